//! The `mcp_servers` of an agent and the `mcp_toolset` entries of its tools: read, checked against
//! each other, and given to the loop.

use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::tools::{Permission, Setting, setting};
use crate::log::{self, McpServer, McpSetting};

pub const TOOLSET: &str = "mcp_toolset";
const SERVERS_MAX: usize = 20;
const CONFIGS_MAX: usize = 256;
const NAME_CHARS_MAX: usize = 255;
const URL_CHARS_MAX: usize = 2_048;

/// Reads `mcp_servers`.
pub fn servers(path: &str, items: &[Value]) -> Result<Vec<Value>, ApiError> {
    if items.len() > SERVERS_MAX {
        return Err(ApiError::field(path, format!("must have at most {SERVERS_MAX} entries")));
    }
    let mut servers: Vec<Value> = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        let path = format!("{path}[{at}]");
        let mut fields = Fields::of(&path, item)?;
        if fields.kind()? != "url" {
            return Err(ApiError::field(&format!("{path}.type"), "must be \"url\""));
        }
        let name = fields.required_text("name", NAME_CHARS_MAX)?;
        let url = fields.required_text("url", URL_CHARS_MAX)?;
        fields.finish()?;
        let parsed: Option<http::Uri> = url.parse().ok();
        let parsed = parsed.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
        // What would be a credential belongs into a vault, never into an agent.
        if parsed.is_none_or(|uri| uri.authority().is_none_or(|a| a.as_str().contains('@'))) {
            let why = "must be an http or https URL without a user name";
            return Err(ApiError::field(&format!("{path}.url"), why));
        }
        if servers.iter().any(|other| other["name"] == name.as_str()) {
            let why = format!("{name:?} stands in the array twice");
            return Err(ApiError::field(&format!("{path}.name"), why));
        }
        servers.push(json!({ "type": "url", "name": name, "url": url }));
    }
    Ok(servers)
}

/// Reads one `mcp_toolset`; gives the name of its server as well.
pub fn toolset(path: &str, mut fields: Fields<'_>) -> Result<(String, Value), ApiError> {
    let server = fields.required_text("mcp_server_name", NAME_CHARS_MAX)?;
    // What a server of somebody else's does is not known here: a person is asked.
    let mut default = Setting { enabled: true, permission: Permission::Ask };
    if let Some(value) = fields.any("default_config").filter(|value| !value.is_null()) {
        let mut config = Fields::of(&format!("{path}.default_config"), value)?;
        default = setting(&mut config, default)?;
        config.finish()?;
    }
    let mut configs: Vec<Value> = Vec::new();
    let given = fields.array("configs", CONFIGS_MAX)?.value().unwrap_or(&[]);
    for (at, value) in given.iter().enumerate() {
        let path = format!("{path}.configs[{at}]");
        let mut config = Fields::of(&path, value)?;
        let name = config.required_text("name", NAME_CHARS_MAX)?;
        let setting = setting(&mut config, default)?;
        config.finish()?;
        if configs.iter().any(|other| other["name"] == name.as_str()) {
            let why = format!("{name:?} stands in the array twice");
            return Err(ApiError::field(&format!("{path}.name"), why));
        }
        let mut entry = wire(setting);
        entry["name"] = json!(name);
        configs.push(entry);
    }
    fields.finish()?;
    let tool = json!({
        "type": TOOLSET,
        "mcp_server_name": server,
        "default_config": wire(default),
        "configs": configs,
    });
    Ok((server, tool))
}

fn wire(setting: Setting) -> Value {
    json!({ "enabled": setting.enabled, "permission_policy": setting.permission.wire() })
}

/// Each server has one toolset, and each toolset its server.
pub fn check(servers: &[Value], tools: &[Value]) -> Result<(), ApiError> {
    let of = |tool: &&Value| tool["type"] == TOOLSET;
    for tool in tools.iter().filter(of) {
        let name = &tool["mcp_server_name"];
        if !servers.iter().any(|server| server["name"] == *name) {
            let why = format!("a mcp_toolset names the server {name}, which mcp_servers lacks");
            return Err(ApiError::field("tools", why));
        }
    }
    for server in servers {
        let name = &server["name"];
        if !tools.iter().filter(of).any(|tool| tool["mcp_server_name"] == *name) {
            let why = format!("no mcp_toolset of tools names the server {name}");
            return Err(ApiError::field("mcp_servers", why));
        }
    }
    Ok(())
}

/// The servers as the loop knows them.
pub fn effective(servers: &[Value], tools: &[Value]) -> Vec<McpServer> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let setting = |config: &Value| McpSetting {
        enabled: config["enabled"] == true,
        permission: match config["permission_policy"]["type"].as_str() {
            Some("always_allow") => log::Permission::Allow,
            // Anything else waits for a person: what cannot be read grants nothing.
            _ => log::Permission::Ask,
        },
    };
    let toolsets = tools.iter().filter(|tool| tool["type"] == TOOLSET);
    let server = |tool: &Value| {
        let server = servers.iter().find(|server| server["name"] == tool["mcp_server_name"])?;
        let configs = tool["configs"].as_array().map(Vec::as_slice).unwrap_or_default();
        Some(McpServer {
            name: text(&server["name"]),
            url: text(&server["url"]),
            default: setting(&tool["default_config"]),
            configs: configs.iter().map(|c| (text(&c["name"]), setting(c))).collect(),
        })
    };
    toolsets.filter_map(server).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(name: &str, url: &str) -> Value {
        json!({ "type": "url", "name": name, "url": url })
    }

    #[test]
    fn a_bare_toolset_asks_before_every_call() {
        let given = json!({ "type": TOOLSET, "mcp_server_name": "s",
            "configs": [{ "name": "read", "permission_policy": { "type": "always_allow" } }] });
        let mut fields = Fields::of("tools[0]", &given).unwrap();
        fields.kind().unwrap();
        let (_, tool) = toolset("tools[0]", fields).unwrap();

        let servers = effective(&[server("s", "https://s.test/mcp")], &[tool]);

        let ask = McpSetting { enabled: true, permission: log::Permission::Ask };
        assert_eq!(servers[0].default, ask);
        let allow = McpSetting { permission: log::Permission::Allow, ..ask };
        assert_eq!(servers[0].configs, [("read".to_owned(), allow)]);
    }

    #[test]
    fn servers_and_toolsets_name_each_other() {
        let servers = [server("s", "https://s.test/mcp")];
        let tool = |name: &str| json!({ "type": TOOLSET, "mcp_server_name": name });

        assert!(check(&servers, &[tool("s")]).is_ok());
        assert!(check(&servers, &[]).unwrap_err().message.starts_with("mcp_servers: no"));
        assert!(check(&[], &[tool("s")]).unwrap_err().message.starts_with("tools: a mcp_toolset"));
    }

    #[test]
    fn an_address_is_one_of_http_and_holds_no_credential() {
        for url in ["", "ftp://x/", "https://user:pw@x/", "/mcp", "nonsense"] {
            assert!(super::servers("mcp_servers", &[server("s", url)]).is_err(), "{url}");
        }
        let twice = [server("s", "http://x/"), server("s", "http://y/")];
        assert!(super::servers("mcp_servers", &twice).is_err());
    }
}
