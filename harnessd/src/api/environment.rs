//! What an environment is: a name for a policy file, and a config that may not go beyond it.
//!
//! The operator's file is the ceiling and at the same time what holds: `unrestricted` means all
//! that the file allows. A host or package outside the file is refused with the reason. A config
//! that leaves out what the file allows is refused as well, for nothing would enforce it: who
//! wants less names a narrower file.

use std::collections::BTreeMap;

use ipc::session::METADATA_POLICY;
use policies::{HostPattern, Policy};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{Fields, Patch, text_of};

const NAME_CHARS_MAX: usize = 256;
const DESCRIPTION_CHARS_MAX: usize = 2_048;
const HOSTS_MAX: usize = 1_000;
const HOST_CHARS_MAX: usize = 256;
const PACKAGES_MAX: usize = 1_000;
const PACKAGE_CHARS_MAX: usize = 512;
/// In the order of the wire API.
const PACKAGE_KINDS: [&str; 6] = ["apt", "cargo", "gem", "go", "npm", "pip"];

/// Which hosts an environment asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Networking {
    Unrestricted,
    Limited { allowed_hosts: Vec<String> },
}

/// An environment as the API knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    pub name: String,
    pub description: Option<String>,
    pub networking: Networking,
    /// By package kind; every kind is present.
    pub packages: BTreeMap<String, Vec<String>>,
    pub metadata: BTreeMap<String, String>,
}

impl Environment {
    pub fn create(body: &Value) -> Result<Self, ApiError> {
        let mut fields = Fields::of("", body)?;
        let mut environment = Self {
            name: fields.required_text("name", NAME_CHARS_MAX)?,
            description: fields.text("description", DESCRIPTION_CHARS_MAX)?.value(),
            networking: Networking::Unrestricted,
            packages: PACKAGE_KINDS.iter().map(|kind| ((*kind).to_owned(), Vec::new())).collect(),
            metadata: fields.metadata()?,
        };
        environment.read_config(&mut fields, true)?;
        read_scope(&mut fields)?;
        fields.finish()?;
        Ok(environment)
    }

    pub fn updated(&self, body: &Value) -> Result<Self, ApiError> {
        // In environments an empty value deletes as null does: the documented rule.
        let mut body = body.clone();
        if let Some(metadata) = body.get_mut("metadata").and_then(Value::as_object_mut) {
            for value in metadata.values_mut() {
                if value.as_str() == Some("") {
                    *value = Value::Null;
                }
            }
        }
        let mut fields = Fields::of("", &body)?;
        let name = match fields.text("name", NAME_CHARS_MAX)? {
            Patch::Keep => self.name.clone(),
            Patch::Set(name) if !name.is_empty() => name,
            _ => return Err(ApiError::field("name", "must not be empty")),
        };
        let description = fields.text("description", DESCRIPTION_CHARS_MAX)?;
        let mut environment = Self {
            name,
            description: description.over(self.description.clone()),
            networking: self.networking.clone(),
            packages: self.packages.clone(),
            metadata: fields.metadata_over(&self.metadata)?,
        };
        environment.read_config(&mut fields, false)?;
        read_scope(&mut fields)?;
        fields.finish()?;
        Ok(environment)
    }

    /// The policy file that rules it, without `.toml`.
    pub fn policy<'a>(&'a self, default: &'a str) -> &'a str {
        self.metadata.get(METADATA_POLICY).map_or(default, String::as_str)
    }

    fn read_config(&mut self, fields: &mut Fields<'_>, create: bool) -> Result<(), ApiError> {
        let Some(value) = fields.any("config").filter(|value| !value.is_null()) else {
            return Ok(());
        };
        let mut config = Fields::of("config", value)?;
        let kind = config.any("type").filter(|value| !value.is_null());
        match kind.map(|kind| kind.as_str().unwrap_or_default()) {
            Some("cloud") => {}
            None if !create => {}
            None => return Err(ApiError::field("config.type", "required")),
            Some("self_hosted") if create => {
                return Err(ApiError::unsupported("config.type: self_hosted"));
            }
            Some("self_hosted") => {
                let error = ApiError::field("config.type", "cannot be changed");
                return Err(error.with_code("invalid_config_type_change"));
            }
            Some(_) => return Err(ApiError::field("config.type", "must be cloud")),
        }
        if let Some(value) = config.any("networking").filter(|value| !value.is_null()) {
            self.networking = networking(value)?;
        }
        if let Some(value) = config.any("packages").filter(|value| !value.is_null()) {
            let mut packages = Fields::of("config.packages", value)?;
            if packages.any("type").is_some_and(|kind| kind != "packages") {
                return Err(ApiError::field("config.packages.type", "must be packages"));
            }
            for kind in PACKAGE_KINDS {
                let path = packages.path(kind);
                match packages.array(kind, PACKAGES_MAX)? {
                    Patch::Keep => {}
                    given => {
                        let names = texts(&path, given.value(), PACKAGE_CHARS_MAX)?;
                        self.packages.insert(kind.to_owned(), names);
                    }
                }
            }
            packages.finish()?;
        }
        config.finish()
    }

    /// Compares with the policy file: nothing outside it, and nothing less than it.
    pub fn check(&self, policy: &Policy) -> Result<(), ApiError> {
        let none = Vec::new();
        for (kind, names) in &self.packages {
            let offered = match kind.as_str() {
                "apt" => &policy.sandbox.packages.apt,
                "cargo" => &policy.sandbox.packages.cargo,
                "npm" => &policy.sandbox.packages.npm,
                "pip" => &policy.sandbox.packages.pip,
                _ => &none,
            };
            if let Some(name) = names.iter().find(|name| !offered.contains(name)) {
                let why = format!(
                    "{name:?} is not in sandbox.packages.{kind} of {}.toml, which is the ceiling",
                    policy.name
                );
                return Err(ApiError::field(&format!("config.packages.{kind}"), why));
            }
        }
        let Networking::Limited { allowed_hosts } = &self.networking else { return Ok(()) };
        let mut patterns = Vec::with_capacity(allowed_hosts.len());
        for (at, host) in allowed_hosts.iter().enumerate() {
            let path = format!("config.networking.allowed_hosts[{at}]");
            let pattern = HostPattern::parse(host).map_err(|why| ApiError::field(&path, why))?;
            if policy.covering_rule(&pattern).is_none() {
                let why = format!(
                    "{host:?} is outside {}.toml: no egress.allow rule covers it",
                    policy.name
                );
                return Err(ApiError::field(&path, why));
            }
            patterns.push(pattern);
        }
        let kept = |host: &HostPattern| patterns.iter().any(|pattern| pattern.covers(host));
        if let Some(host) = policy.hosts().find(|host| !kept(host)) {
            let why = format!(
                "leaves out \"{host}\", which {}.toml allows, and this version enforces the file \
                 alone: use unrestricted, which means all that the file allows, or name a \
                 narrower file in metadata.policy",
                policy.name
            );
            return Err(ApiError::field("config.networking", why));
        }
        Ok(())
    }

    /// The stored form, which also is what the answers are made of.
    pub fn document(&self) -> Value {
        let networking = match &self.networking {
            Networking::Unrestricted => json!({ "type": "unrestricted" }),
            Networking::Limited { allowed_hosts } => json!({
                "type": "limited",
                "allowed_hosts": allowed_hosts,
                "allow_mcp_servers": false,
                "allow_package_managers": false,
            }),
        };
        let mut packages = Map::new();
        packages.insert("type".to_owned(), json!("packages"));
        for kind in PACKAGE_KINDS {
            packages.insert(kind.to_owned(), json!(self.packages.get(kind)));
        }
        json!({
            "name": self.name,
            "description": self.description,
            "config": { "type": "cloud", "networking": networking, "packages": packages },
            "metadata": self.metadata,
            "scope": "organization",
        })
    }

    /// Reads the stored form back. `None`: it is not one, which is a failure of ours.
    pub fn of_document(document: &Value) -> Option<Self> {
        let given = json!({
            "name": document["name"],
            "description": document["description"],
            "config": document["config"],
            "metadata": document["metadata"],
        });
        Self::create(&given).ok()
    }
}

fn networking(value: &Value) -> Result<Networking, ApiError> {
    let mut fields = Fields::of("config.networking", value)?;
    let networking = match fields.kind()? {
        "unrestricted" => Networking::Unrestricted,
        "limited" => {
            let hosts = fields.array("allowed_hosts", HOSTS_MAX)?.value();
            for key in ["allow_mcp_servers", "allow_package_managers"] {
                if fields.flag(key)? == Some(true) {
                    return Err(ApiError::unsupported(&fields.path(key)));
                }
            }
            let path = "config.networking.allowed_hosts";
            Networking::Limited { allowed_hosts: texts(path, hosts, HOST_CHARS_MAX)? }
        }
        _ => {
            let why = "must be unrestricted or limited";
            return Err(ApiError::field("config.networking.type", why));
        }
    };
    fields.finish()?;
    Ok(networking)
}

fn texts(path: &str, items: Option<&[Value]>, chars_max: usize) -> Result<Vec<String>, ApiError> {
    let items = items.unwrap_or(&[]).iter().enumerate();
    items.map(|(at, item)| text_of(&format!("{path}[{at}]"), item, 1, chars_max)).collect()
}

/// Objects belong to their owner alone, which is what an organization is here.
fn read_scope(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    match fields.text("scope", NAME_CHARS_MAX)?.value().as_deref() {
        None | Some("organization") => Ok(()),
        Some(_) => Err(ApiError::field("scope", "must be organization")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use policies::PolicySet;

    fn policy(text: &str) -> std::sync::Arc<Policy> {
        let files = [("dev.toml".to_owned(), text.to_owned())];
        let set = PolicySet::parse(&files).unwrap();
        std::sync::Arc::clone(set.environment("dev").unwrap())
    }

    fn with(config: Value) -> Environment {
        Environment::create(&json!({ "name": "e", "config": config })).unwrap()
    }

    #[test]
    fn defaults_are_spelled_out_and_read_back() {
        let environment = with(json!({ "type": "cloud" }));
        let document = environment.document();

        assert_eq!(document["config"]["networking"]["type"], "unrestricted");
        assert_eq!(document["config"]["packages"]["gem"], json!([]));
        assert_eq!(Environment::of_document(&document), Some(environment));
    }

    #[test]
    fn nothing_goes_beyond_the_file_and_nothing_stays_silently_below_it() {
        let rules = "[sandbox]\npackages = { pip = [\"requests==2.32.5\"] }\n\
                     [[egress.allow]]\nhosts = [\"*.corp.example\"]\n";
        let policy = policy(rules);
        let limited = |hosts: &[&str]| {
            with(json!({ "type": "cloud", "networking": {
                "type": "limited", "allowed_hosts": hosts } }))
        };
        let packaged = |pip: &str| with(json!({ "type": "cloud", "packages": { "pip": [pip] } }));

        assert_eq!(with(json!({ "type": "cloud" })).check(&policy), Ok(()));
        assert_eq!(packaged("requests==2.32.5").check(&policy), Ok(()));
        let outside = limited(&["db.corp.example", "evil.example"]).check(&policy).unwrap_err();
        assert!(outside.message.contains("allowed_hosts[1]"), "{outside}");
        assert!(outside.message.contains("outside dev.toml"), "{outside}");
        let narrower = limited(&["db.corp.example"]).check(&policy).unwrap_err();
        assert!(narrower.message.contains("leaves out \"*.corp.example\""), "{narrower}");
        assert_eq!(limited(&["*.corp.example"]).check(&policy), Ok(()));
        let package = packaged("evil").check(&policy).unwrap_err();
        assert!(package.message.contains("sandbox.packages.pip of dev.toml"), "{package}");
    }

    #[test]
    fn limited_to_nothing_fits_a_file_that_allows_nothing() {
        let policy = policy("[sandbox]\n");
        let nothing = json!({ "type": "cloud", "networking": { "type": "limited" } });

        assert_eq!(with(nothing).check(&policy), Ok(()));
    }

    #[test]
    fn an_update_keeps_what_it_does_not_name_and_never_the_type() {
        let old = Environment::create(&json!({
            "name": "e", "metadata": { "policy": "dev", "x": "1" },
            "config": { "type": "cloud", "packages": { "pip": ["a"], "npm": ["b"] } },
        }))
        .unwrap();

        let body = json!({ "config": { "packages": { "npm": [] } }, "metadata": { "x": "" } });
        let new = old.updated(&body).unwrap();
        let changed = old.updated(&json!({ "config": { "type": "self_hosted" } })).unwrap_err();

        assert_eq!(new.packages["pip"], ["a"]);
        assert!(new.packages["npm"].is_empty());
        assert_eq!((new.policy("default"), new.metadata.len()), ("dev", 1));
        assert_eq!(changed.error_code, Some("invalid_config_type_change"));
    }
}
