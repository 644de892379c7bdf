//! The `tools` array of an agent: read, checked, and written back with every default spelled out.
//!
//! What the wire API has and this version does not offer (web search, the `auto` policy) is refused
//! by name when it is asked for. `web_search` stands in answers as disabled, so that a client that
//! reads, edits and sends back the array meets no surprise.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::mcp;

pub const TOOLSET: &str = "agent_toolset_20260401";
/// The tools of the toolset that sandboxes have.
pub const OFFERED: [&str; 7] = ["bash", "edit", "read", "write", "glob", "grep", "web_fetch"];
/// The tools of the toolset that this version does not have.
const ABSENT: [&str; 1] = ["web_search"];
/// What the web tools alone can be told, and nothing here enforces: the policy file says where an
/// environment's requests may go.
const WEB_KEYS: [&str; 5] =
    ["allowed_domains", "blocked_domains", "url_sources", "user_location", "max_content_tokens"];
/// Most entries of `tools` and most tools in all: the documented limits.
const ENTRIES_MAX: usize = 128;
const NAME_CHARS_MAX: usize = 128;
const DESCRIPTION_CHARS_MAX: usize = 16_384;
const PROPERTY_CHARS_MAX: usize = 64;

/// Whether a call runs at once or waits for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    Allow,
    Ask,
}

impl Permission {
    pub fn wire(self) -> Value {
        match self {
            Self::Allow => json!({ "type": "always_allow" }),
            Self::Ask => json!({ "type": "always_ask" }),
        }
    }
}

/// What applies to one tool of the toolset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    pub enabled: bool,
    pub permission: Permission,
}

/// Reads `tools` and gives the materialised array.
pub fn read(path: &str, items: &[Value]) -> Result<Vec<Value>, ApiError> {
    if items.len() > ENTRIES_MAX {
        return Err(ApiError::field(path, format!("must have at most {ENTRIES_MAX} entries")));
    }
    let mut tools = Vec::with_capacity(items.len());
    let mut names: Vec<String> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        let path = format!("{path}[{at}]");
        let mut fields = Fields::of(&path, item)?;
        let (name, tool) = match fields.kind()? {
            TOOLSET => (TOOLSET.to_owned(), toolset(&path, fields)?),
            "custom" => custom(&path, fields)?,
            mcp::TOOLSET => {
                let (server, tool) = mcp::toolset(&path, fields)?;
                // No other entry's name has a space.
                (format!("{} {server}", mcp::TOOLSET), tool)
            }
            other => {
                let other: String = other.chars().take(64).collect();
                let why = format!(
                    "unknown tool type {other:?}: {TOOLSET}, mcp_toolset and custom \
                     are offered"
                );
                return Err(ApiError::field(&format!("{path}.type"), why));
            }
        };
        if names.contains(&name) {
            return Err(ApiError::field(&path, format!("{name:?} stands in the array twice")));
        }
        names.push(name);
        tools.push(tool);
    }
    Ok(tools)
}

fn toolset(path: &str, mut fields: Fields<'_>) -> Result<Value, ApiError> {
    let mut default = Setting { enabled: true, permission: Permission::Allow };
    if let Some(value) = fields.any("default_config").filter(|value| !value.is_null()) {
        let mut config = Fields::of(&format!("{path}.default_config"), value)?;
        default = setting(&mut config, default)?;
        config.finish()?;
    }
    let mut given: Vec<(&str, Setting)> = Vec::new();
    let configs = fields.array("configs", OFFERED.len() + ABSENT.len())?.value().unwrap_or(&[]);
    for (at, value) in configs.iter().enumerate() {
        let path = format!("{path}.configs[{at}]");
        let mut config = Fields::of(&path, value)?;
        let name = config.required_text("name", NAME_CHARS_MAX)?;
        let known = OFFERED.iter().chain(&ABSENT).find(|known| **known == name);
        let Some(name) = known.copied() else {
            let why = format!("{name:?} is no tool of {TOOLSET}");
            return Err(ApiError::field(&format!("{path}.name"), why));
        };
        if config.text("type", NAME_CHARS_MAX)?.value().is_some_and(|kind| kind != name) {
            return Err(ApiError::field(&format!("{path}.type"), "must equal name"));
        }
        let inherited =
            if ABSENT.contains(&name) { Setting { enabled: false, ..default } } else { default };
        let setting = setting(&mut config, inherited)?;
        if ABSENT.contains(&name) && setting.enabled {
            return Err(ApiError::unsupported(&format!("{path}.name: {name}")));
        }
        if name.starts_with("web_") {
            for key in WEB_KEYS {
                config.unsupported(key)?;
            }
        }
        config.finish()?;
        if given.iter().any(|(other, _)| *other == name) {
            let why = format!("{name:?} stands in the array twice");
            return Err(ApiError::field(&format!("{path}.name"), why));
        }
        given.push((name, setting));
    }
    fields.finish()?;
    Ok(toolset_wire(default, &given))
}

pub fn setting(fields: &mut Fields<'_>, inherited: Setting) -> Result<Setting, ApiError> {
    let enabled = fields.flag("enabled")?.unwrap_or(inherited.enabled);
    let path = fields.path("permission_policy");
    let permission = match fields.any("permission_policy") {
        None | Some(Value::Null) => inherited.permission,
        Some(value) => {
            let mut policy = Fields::of(&path, value)?;
            let permission = match policy.kind()? {
                "always_allow" => Permission::Allow,
                "always_ask" => Permission::Ask,
                "auto" => return Err(ApiError::unsupported(&format!("{path}.type: auto"))),
                _ => {
                    let why = "must be always_allow or always_ask";
                    return Err(ApiError::field(&format!("{path}.type"), why));
                }
            };
            policy.finish()?;
            permission
        }
    };
    Ok(Setting { enabled, permission })
}

fn toolset_wire(default: Setting, given: &[(&str, Setting)]) -> Value {
    let config = |name: &str, setting: Setting| {
        json!({
            "name": name,
            "type": name,
            "enabled": setting.enabled,
            "permission_policy": setting.permission.wire(),
        })
    };
    let of = |name: &str| given.iter().find(|(other, _)| *other == name).map(|(_, s)| *s);
    let offered = OFFERED.iter().map(|name| config(name, of(name).unwrap_or(default)));
    let off = Setting { enabled: false, ..default };
    let absent = ABSENT.iter().map(|name| config(name, of(name).unwrap_or(off)));
    json!({
        "type": TOOLSET,
        "default_config": {
            "enabled": default.enabled,
            "permission_policy": default.permission.wire(),
        },
        "configs": offered.chain(absent).collect::<Vec<_>>(),
    })
}

fn custom(path: &str, mut fields: Fields<'_>) -> Result<(String, Value), ApiError> {
    let name = fields.required_text("name", NAME_CHARS_MAX)?;
    let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if !name.bytes().all(legal) {
        let why = "may hold A-Z a-z 0-9 _ - only";
        return Err(ApiError::field(&format!("{path}.name"), why));
    }
    let taken = OFFERED.iter().chain(&ABSENT).any(|known| *known == name);
    if taken || name.starts_with("mcp__") {
        let why = format!("{name:?} is the name of a built-in tool, or has the prefix mcp__");
        return Err(ApiError::field(&format!("{path}.name"), why));
    }
    let description = fields.required_text("description", DESCRIPTION_CHARS_MAX)?;
    let schema = fields.required("input_schema")?;
    check_schema(&format!("{path}.input_schema"), schema)?;
    fields.finish()?;
    let tool = json!({
        "type": "custom",
        "name": name,
        "description": description,
        "input_schema": schema,
    });
    Ok((name, tool))
}

/// The rules of the wire API for a custom tool's schema.
fn check_schema(path: &str, schema: &Value) -> Result<(), ApiError> {
    let map = schema.as_object().ok_or_else(|| ApiError::field(path, "must be a JSON object"))?;
    if map.get("type").and_then(Value::as_str) != Some("object") {
        return Err(ApiError::field(&format!("{path}.type"), "must be \"object\""));
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        if map.contains_key(key) {
            return Err(ApiError::field(&format!("{path}.{key}"), "not allowed at the top level"));
        }
    }
    if let Some(properties) = map.get("properties") {
        let properties = properties
            .as_object()
            .ok_or_else(|| ApiError::field(&format!("{path}.properties"), "must be an object"))?;
        check_property_names(&format!("{path}.properties"), properties)?;
    }
    if names_a_reference(schema) {
        return Err(ApiError::field(path, "must not use $ref"));
    }
    Ok(())
}

fn check_property_names(path: &str, properties: &Map<String, Value>) -> Result<(), ApiError> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    for name in properties.keys() {
        if name.is_empty() || name.len() > PROPERTY_CHARS_MAX || !name.bytes().all(legal) {
            let shown: String = name.chars().take(PROPERTY_CHARS_MAX).collect();
            let why = format!(
                "{shown:?} is no property name: 1 to {PROPERTY_CHARS_MAX} of A-Z a-z 0-9 _ . -"
            );
            return Err(ApiError::field(path, why));
        }
    }
    Ok(())
}

/// The depth of the recursion is that of the body, which the JSON parser bounds.
fn names_a_reference(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.contains_key("$ref") || map.values().any(names_a_reference),
        Value::Array(items) => items.iter().any(names_a_reference),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config<'a>(tools: &'a [Value], name: &str) -> &'a Value {
        let configs = tools[0]["configs"].as_array().unwrap();
        configs.iter().find(|config| config["name"] == name).unwrap()
    }

    #[test]
    fn a_bare_toolset_is_spelled_out() {
        let tools = read("tools", &[json!({ "type": TOOLSET })]).unwrap();

        assert_eq!(tools[0]["default_config"]["enabled"], true);
        assert_eq!(tools[0]["default_config"]["permission_policy"]["type"], "always_allow");
        assert_eq!(config(&tools, "bash")["enabled"], true);
        assert_eq!(config(&tools, "web_fetch")["enabled"], true);
        assert_eq!(config(&tools, "web_search")["enabled"], false);
        assert_eq!(tools[0]["configs"].as_array().unwrap().len(), 8);
    }

    #[test]
    fn what_was_answered_can_be_sent_back_unchanged() {
        let given = json!({
            "type": TOOLSET,
            "default_config": { "enabled": false, "permission_policy": { "type": "always_ask" } },
            "configs": [{ "name": "bash", "enabled": true }],
        });
        let once = read("tools", &[given]).unwrap();

        let twice = read("tools", &once).unwrap();

        assert_eq!(once, twice);
        assert_eq!(config(&once, "bash")["permission_policy"]["type"], "always_ask");
        assert_eq!(config(&once, "grep")["enabled"], false);
    }

    #[test]
    fn every_refusal_names_the_field() {
        let custom = |name: &str, schema: Value| {
            let mut tool = json!({ "type": "custom", "name": name, "description": "d" });
            tool["input_schema"] = schema;
            tool
        };
        let object = || json!({ "type": "object" });
        for (tool, expected) in [
            (json!({ "type": "mcp_toolset" }), "tools[0].mcp_server_name: required"),
            (json!({ "type": "later_2030" }), "tools[0].type: unknown tool type"),
            (json!({ "name": "x" }), "tools[0].type: required"),
            (
                json!({ "type": TOOLSET,
                    "configs": [{ "name": "web_search", "enabled": true }] }),
                "tools[0].configs[0].name: web_search: not supported",
            ),
            (
                json!({ "type": TOOLSET, "configs": [{ "name": "bush" }] }),
                "tools[0].configs[0].name: \"bush\" is no tool",
            ),
            (
                json!({ "type": TOOLSET, "default_config": {
                    "permission_policy": { "type": "auto" } } }),
                "tools[0].default_config.permission_policy.type: auto: not supported",
            ),
            (custom("bash", object()), "tools[0].name: \"bash\" is the name of a built-in"),
            (custom("mcp__x", object()), "tools[0].name"),
            (custom("a b", object()), "tools[0].name: may hold"),
            (custom("x", json!({ "type": "string" })), "tools[0].input_schema.type"),
            (custom("x", json!({ "type": "object", "anyOf": [] })), "tools[0].input_schema.anyOf"),
            (
                custom("x", json!({ "type": "object", "properties": { "a": { "$ref": "#" } } })),
                "tools[0].input_schema: must not use $ref",
            ),
            (
                custom("x", json!({ "type": "object", "properties": { "a b": {} } })),
                "tools[0].input_schema.properties: \"a b\"",
            ),
        ] {
            let error = read("tools", std::slice::from_ref(&tool)).unwrap_err();
            assert!(error.message.starts_with(expected), "{tool}: {}", error.message);
        }
    }

    #[test]
    fn one_name_stands_for_one_tool() {
        let tool = json!({
            "type": "custom", "name": "x", "description": "d", "input_schema": { "type": "object" }
        });

        assert!(read("tools", &[tool.clone(), tool]).is_err());
        assert!(read("tools", &[json!({ "type": TOOLSET }), json!({ "type": TOOLSET })]).is_err());
    }
}
