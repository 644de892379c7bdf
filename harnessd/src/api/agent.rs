//! What an agent is: read from a request, kept as a document, written to an answer.
//!
//! The document has the shape of the wire API's object without the parts that the store adds (id,
//! version, times). It is materialised when it is made, so that a later default changes no agent.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Fields, Patch, text_of};
use super::{mcp, tools};

const NAME_CHARS_MAX: usize = 256;
const MODEL_CHARS_MAX: usize = 256;
const DESCRIPTION_CHARS_MAX: usize = 2_048;
const SYSTEM_CHARS_MAX: usize = 100_000;
/// More entries than `tools` may have are refused with their own message.
const ARRAY_LEN_MAX: usize = 1_000;
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];
/// What an agent that names no effort gets.
const EFFORT_DEFAULT: &str = "high";

/// The model of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    pub id: String,
    pub effort: String,
}

/// One version of an agent.
#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    pub name: String,
    pub description: Option<String>,
    pub system: Option<String>,
    pub model: Model,
    /// Materialised, as [`tools::read`] gives them.
    pub tools: Vec<Value>,
    /// As [`mcp::servers`] gives them.
    pub mcp_servers: Vec<Value>,
    pub metadata: BTreeMap<String, String>,
}

impl Agent {
    /// Reads the body of a creation.
    pub fn create(body: &Value) -> Result<Self, ApiError> {
        let mut fields = Fields::of("", body)?;
        let agent = Self {
            name: fields.required_text("name", NAME_CHARS_MAX)?,
            model: {
                let value = fields.required("model")?;
                model("model", value, None)?
            },
            description: fields.text("description", DESCRIPTION_CHARS_MAX)?.value(),
            system: fields.text("system", SYSTEM_CHARS_MAX)?.value(),
            tools: match fields.array("tools", ARRAY_LEN_MAX)?.value() {
                Some(items) => tools::read("tools", items)?,
                None => Vec::new(),
            },
            mcp_servers: patched_servers(&mut fields, "mcp_servers", &[])?,
            metadata: fields.metadata()?,
        };
        mcp::check(&agent.mcp_servers, &agent.tools)?;
        refuse_unsupported(&mut fields)?;
        fields.finish()?;
        Ok(agent)
    }

    /// Reads the body of an update; gives the new version's content and the version it expects.
    pub fn updated(&self, body: &Value) -> Result<(Self, Option<u64>), ApiError> {
        let mut fields = Fields::of("", body)?;
        let expected = fields.version("version")?;
        let name = match fields.text("name", NAME_CHARS_MAX)? {
            Patch::Keep => self.name.clone(),
            Patch::Clear => return Err(ApiError::field("name", "cannot be cleared")),
            Patch::Set(name) if name.is_empty() => {
                return Err(ApiError::field("name", "must not be empty"));
            }
            Patch::Set(name) => name,
        };
        let model = match fields.any("model") {
            None => self.model.clone(),
            Some(Value::Null) => return Err(ApiError::field("model", "cannot be cleared")),
            Some(value) => model("model", value, Some(&self.model))?,
        };
        let description = fields.text("description", DESCRIPTION_CHARS_MAX)?;
        let system = fields.text("system", SYSTEM_CHARS_MAX)?;
        let filled = |text: &String| !text.is_empty();
        let agent = Self {
            name,
            model,
            description: description.over(self.description.clone()).filter(filled),
            system: system.over(self.system.clone()).filter(filled),
            tools: patched_tools(&mut fields, "tools", &self.tools)?,
            mcp_servers: patched_servers(&mut fields, "mcp_servers", &self.mcp_servers)?,
            metadata: fields.metadata_over(&self.metadata)?,
        };
        mcp::check(&agent.mcp_servers, &agent.tools)?;
        refuse_unsupported(&mut fields)?;
        fields.finish()?;
        Ok((agent, expected))
    }

    /// This agent with a session's overrides. `fields` is the `agent` object of the request.
    pub fn overridden(&self, fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        let path = fields.path("model");
        let model = match fields.any("model") {
            None => self.model.clone(),
            Some(Value::Null) => {
                let error = ApiError::field(&path, "cannot be cleared");
                return Err(error.with_code("agent_model_required"));
            }
            // An effort inside an override is not applied: the documented rule.
            Some(value) => {
                Model { effort: self.model.effort.clone(), ..model(&path, value, None)? }
            }
        };
        let system = fields.text("system", SYSTEM_CHARS_MAX)?.over(self.system.clone());
        let tools_path = fields.path("tools");
        let servers_path = fields.path("mcp_servers");
        let agent = Self {
            model,
            system: system.filter(|text| !text.is_empty()),
            tools: patched_tools(fields, &tools_path, &self.tools)?,
            mcp_servers: patched_servers(fields, &servers_path, &self.mcp_servers)?,
            ..self.clone()
        };
        mcp::check(&agent.mcp_servers, &agent.tools)?;
        fields.unsupported("skills")?;
        Ok(agent)
    }

    /// The stored form, which also is what the answers are made of.
    pub fn document(&self) -> Value {
        json!({
            "name": self.name,
            "description": self.description,
            "model": { "id": self.model.id, "effort": { "type": self.model.effort } },
            "system": self.system,
            "tools": self.tools,
            "mcp_servers": self.mcp_servers,
            "skills": [],
            "multiagent": null,
            "execution_identity": { "type": "service_account" },
            "metadata": self.metadata,
        })
    }

    /// Reads the stored form back. `None`: it is not one, which is a failure of ours.
    pub fn of_document(document: &Value) -> Option<Self> {
        let text = |key: &str| document[key].as_str().map(str::to_owned);
        let mut metadata = BTreeMap::new();
        if let Some(map) = document["metadata"].as_object() {
            for (key, value) in map {
                metadata.insert(key.clone(), value.as_str()?.to_owned());
            }
        }
        Some(Self {
            name: text("name")?,
            description: text("description"),
            system: text("system"),
            model: Model {
                id: document["model"]["id"].as_str()?.to_owned(),
                effort: document["model"]["effort"]["type"].as_str()?.to_owned(),
            },
            tools: document["tools"].as_array()?.clone(),
            mcp_servers: document["mcp_servers"].as_array().cloned().unwrap_or_default(),
            metadata,
        })
    }
}

/// The tools after an update: absent keeps, null and `[]` clear, an array replaces.
pub fn patched_tools(
    fields: &mut Fields<'_>,
    path: &str,
    old: &[Value],
) -> Result<Vec<Value>, ApiError> {
    match fields.array("tools", ARRAY_LEN_MAX)? {
        Patch::Keep => Ok(old.to_vec()),
        Patch::Clear => Ok(Vec::new()),
        Patch::Set(items) => tools::read(path, items),
    }
}

/// The MCP servers after an update, by the same rule.
pub fn patched_servers(
    fields: &mut Fields<'_>,
    path: &str,
    old: &[Value],
) -> Result<Vec<Value>, ApiError> {
    match fields.array("mcp_servers", ARRAY_LEN_MAX)? {
        Patch::Keep => Ok(old.to_vec()),
        Patch::Clear => Ok(Vec::new()),
        Patch::Set(items) => mcp::servers(path, items),
    }
}

/// `old` is the model before an update: its effort stays when the id does.
fn model(path: &str, value: &Value, old: Option<&Model>) -> Result<Model, ApiError> {
    let kept = |id: &str| match old {
        Some(old) if old.id == id => old.effort.clone(),
        _ => EFFORT_DEFAULT.to_owned(),
    };
    if value.is_string() {
        let id = text_of(path, value, 1, MODEL_CHARS_MAX)?;
        return Ok(Model { effort: kept(&id), id });
    }
    let mut fields = Fields::of(path, value)
        .map_err(|_| ApiError::field(path, "must be a model name or an object with an id"))?;
    let id = fields.required_text("id", MODEL_CHARS_MAX)?;
    let effort = match fields.any("effort") {
        None | Some(Value::Null) => kept(&id),
        Some(value) => {
            let name = value.as_str().or_else(|| value["type"].as_str()).unwrap_or_default();
            if !EFFORTS.contains(&name) {
                let why = format!("must be one of {}", EFFORTS.join(", "));
                return Err(ApiError::field(&format!("{path}.effort"), why));
            }
            // The models are asked without one, so another than theirs would be ignored.
            if name != EFFORT_DEFAULT {
                return Err(ApiError::unsupported(&format!("{path}.effort: {name}")));
            }
            name.to_owned()
        }
    };
    match fields.text("speed", MODEL_CHARS_MAX)?.value().as_deref() {
        None | Some("standard") => {}
        Some(_) => return Err(ApiError::unsupported(&format!("{path}.speed"))),
    }
    fields.unsupported("inference_geo")?;
    fields.finish()?;
    Ok(Model { id, effort })
}

fn refuse_unsupported(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    for key in ["skills", "multiagent"] {
        fields.unsupported(key)?;
    }
    match fields.any("execution_identity") {
        None | Some(Value::Null) => Ok(()),
        Some(value) if value["type"] == "service_account" => Ok(()),
        Some(_) => Err(ApiError::unsupported(&fields.path("execution_identity"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> Agent {
        Agent::create(&json!({
            "name": "n", "model": { "id": "m", "effort": "high" }, "system": "s",
            "tools": [{ "type": "agent_toolset_20260401" }], "metadata": { "a": "1" },
        }))
        .unwrap()
    }

    #[test]
    fn a_document_reads_back_as_the_agent() {
        let agent = agent();

        assert_eq!(Agent::of_document(&agent.document()), Some(agent));
    }

    #[test]
    fn an_update_keeps_what_it_does_not_name() {
        let old = agent();
        let (same, _) = old.updated(&json!({})).unwrap();
        let (new, expected) = old
            .updated(&json!({ "version": 3, "system": null, "tools": [], "model": { "id": "m" } }))
            .unwrap();
        let (other, _) = old.updated(&json!({ "model": "m2" })).unwrap();

        assert_eq!(same, old);
        assert_eq!(expected, Some(3));
        assert_eq!((new.system, new.tools.len(), new.model.effort.as_str()), (None, 0, "high"));
        assert_eq!(other.model.effort, "high");
    }

    #[test]
    fn every_refusal_names_the_field() {
        for (body, expected) in [
            (json!([]), "request body: must be a JSON object"),
            (json!({ "model": "m" }), "name: required"),
            (json!({ "name": "", "model": "m" }), "name: must not be empty"),
            (json!({ "name": "n" }), "model: required"),
            (json!({ "name": "n", "model": 3 }), "model: must be a model name"),
            (
                json!({ "name": "n", "model": { "id": "m", "effort": "huge" } }),
                "model.effort: must",
            ),
            (json!({ "name": "n", "model": { "id": "m", "effort": "low" } }), "model.effort: low"),
            (json!({ "name": "n", "model": { "id": "m", "speed": "fast" } }), "model.speed"),
            (json!({ "name": "n", "model": "m", "skills": [{}] }), "skills: not supported"),
            (
                json!({ "name": "n", "model": "m", "mcp_servers": [{}] }),
                "mcp_servers[0].type: required",
            ),
            (json!({ "name": "n", "model": "m", "multiagent": { "type": "x" } }), "multiagent"),
            (
                json!({ "name": "n", "model": "m", "execution_identity": { "type": "aws_role" } }),
                "execution_identity",
            ),
            (json!({ "name": "n", "model": "m", "temperature": 1 }), "temperature: unknown field"),
        ] {
            let error = Agent::create(&body).unwrap_err();
            assert!(error.message.starts_with(expected), "{body}: {}", error.message);
        }
    }

    #[test]
    fn an_override_cannot_take_the_model_away() {
        let body = json!({ "model": null });
        let mut fields = Fields::of("agent", &body).unwrap();

        let error = agent().overridden(&mut fields).unwrap_err();

        assert_eq!(error.error_code, Some("agent_model_required"));
        assert_eq!(error.message, "agent.model: cannot be cleared");
    }
}
