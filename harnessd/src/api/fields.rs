//! Reads JSON objects field by field, so that every error names its field and none is ignored.
//!
//! A [`Fields`] is asked for each key it may have; `finish` refuses what nobody asked for. Absent,
//! null and given are three different things in this API, hence [`Patch`].

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::error::ApiError;

/// Most pairs of a metadata map, and the lengths of keys and values in characters: the documented
/// limits of the wire API.
const METADATA_PAIRS_MAX: usize = 16;
const METADATA_KEY_CHARS_MAX: usize = 64;
const METADATA_VALUE_CHARS_MAX: usize = 512;

/// What an update does to one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Patch<T> {
    /// Absent: stays as it is.
    Keep,
    /// Null: back to nothing, or to the default.
    Clear,
    Set(T),
}

impl<T> Patch<T> {
    /// The value of a field at creation, where absent and null mean the same.
    pub fn value(self) -> Option<T> {
        match self {
            Self::Set(value) => Some(value),
            Self::Keep | Self::Clear => None,
        }
    }

    /// The value after the update.
    pub fn over(self, old: Option<T>) -> Option<T> {
        match self {
            Self::Keep => old,
            Self::Clear => None,
            Self::Set(value) => Some(value),
        }
    }
}

/// One JSON object of a request, and its place in the body.
#[derive(Debug)]
pub struct Fields<'a> {
    path: String,
    map: &'a Map<String, Value>,
    asked: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// `path` is empty for the body itself.
    pub fn of(path: &str, value: &'a Value) -> Result<Self, ApiError> {
        let shown = if path.is_empty() { "request body" } else { path };
        let map =
            value.as_object().ok_or_else(|| ApiError::field(shown, "must be a JSON object"))?;
        Ok(Self { path: path.to_owned(), map, asked: Vec::new() })
    }

    /// The full path of one of this object's keys.
    pub fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The raw value of a key.
    pub fn any(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.push(key);
        self.map.get(key)
    }

    pub fn required(&mut self, key: &'static str) -> Result<&'a Value, ApiError> {
        match self.any(key) {
            Some(value) if !value.is_null() => Ok(value),
            _ => Err(ApiError::field(&self.path(key), "required")),
        }
    }

    /// A string of at most `chars_max` characters.
    pub fn text(&mut self, key: &'static str, chars_max: usize) -> Result<Patch<String>, ApiError> {
        match self.any(key) {
            None => Ok(Patch::Keep),
            Some(Value::Null) => Ok(Patch::Clear),
            Some(value) => text_of(&self.path(key), value, 0, chars_max).map(Patch::Set),
        }
    }

    /// A string that must be there, of 1 to `chars_max` characters.
    pub fn required_text(
        &mut self,
        key: &'static str,
        chars_max: usize,
    ) -> Result<String, ApiError> {
        let value = self.required(key)?;
        text_of(&self.path(key), value, 1, chars_max)
    }

    /// The `type` of a union member.
    pub fn kind(&mut self) -> Result<&'a str, ApiError> {
        let path = self.path("type");
        self.required("type")?.as_str().ok_or_else(|| ApiError::field(&path, "must be a string"))
    }

    pub fn flag(&mut self, key: &'static str) -> Result<Option<bool>, ApiError> {
        match self.any(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(ApiError::field(&self.path(key), "must be true or false")),
        }
    }

    /// A whole number from 1.
    pub fn version(&mut self, key: &'static str) -> Result<Option<u64>, ApiError> {
        match self.any(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) if (1..=u64::from(u32::MAX)).contains(&number) => Ok(Some(number)),
                _ => Err(ApiError::field(&self.path(key), "must be a whole number from 1")),
            },
        }
    }

    pub fn array(
        &mut self,
        key: &'static str,
        len_max: usize,
    ) -> Result<Patch<&'a [Value]>, ApiError> {
        match self.any(key) {
            None => Ok(Patch::Keep),
            Some(Value::Null) => Ok(Patch::Clear),
            Some(Value::Array(items)) if items.len() <= len_max => Ok(Patch::Set(items)),
            Some(Value::Array(_)) => {
                let why = format!("must have at most {len_max} entries");
                Err(ApiError::field(&self.path(key), why))
            }
            Some(_) => Err(ApiError::field(&self.path(key), "must be an array")),
        }
    }

    /// A map of strings as given at creation.
    pub fn metadata(&mut self) -> Result<BTreeMap<String, String>, ApiError> {
        let path = self.path("metadata");
        let mut metadata = BTreeMap::new();
        let Some(value) = self.any("metadata").filter(|value| !value.is_null()) else {
            return Ok(metadata);
        };
        let map = value.as_object().ok_or_else(|| ApiError::field(&path, "must be an object"))?;
        for (key, value) in map {
            let value = value.as_str().ok_or_else(|| {
                ApiError::field(&format!("{path}.{key}"), "must be a string")
                    .with_code("invalid_metadata")
            })?;
            metadata.insert(key.clone(), value.to_owned());
        }
        check_metadata(&path, &metadata)?;
        Ok(metadata)
    }

    /// `old` after a patch: strings set, nulls delete.
    pub fn metadata_over(
        &mut self,
        old: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, ApiError> {
        let path = self.path("metadata");
        let mut metadata = old.clone();
        let Some(value) = self.any("metadata").filter(|value| !value.is_null()) else {
            return Ok(metadata);
        };
        let map = value.as_object().ok_or_else(|| ApiError::field(&path, "must be an object"))?;
        for (key, value) in map {
            match value {
                Value::Null => {
                    metadata.remove(key);
                }
                Value::String(value) => {
                    metadata.insert(key.clone(), value.clone());
                }
                _ => {
                    let path = format!("{path}.{key}");
                    return Err(ApiError::field(&path, "must be a string or null")
                        .with_code("invalid_metadata"));
                }
            }
        }
        check_metadata(&path, &metadata)?;
        Ok(metadata)
    }

    /// Refuses a field that asks for what this version does not do. Null, `[]` and `{}` ask for
    /// nothing and pass.
    pub fn unsupported(&mut self, key: &'static str) -> Result<(), ApiError> {
        match self.any(key) {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Array(items)) if items.is_empty() => Ok(()),
            Some(Value::Object(map)) if map.is_empty() => Ok(()),
            Some(_) => Err(ApiError::unsupported(&self.path(key))),
        }
    }

    /// Refuses keys that nobody asked for.
    pub fn finish(self) -> Result<(), ApiError> {
        for key in self.map.keys() {
            if !self.asked.contains(&key.as_str()) {
                let shown: String = key.chars().take(64).collect();
                return Err(ApiError::field(&self.path(&shown), "unknown field"));
            }
        }
        Ok(())
    }
}

/// A string within its limits, counted in characters as the wire API does.
pub fn text_of(
    path: &str,
    value: &Value,
    chars_min: usize,
    chars_max: usize,
) -> Result<String, ApiError> {
    let text = value.as_str().ok_or_else(|| ApiError::field(path, "must be a string"))?;
    let chars = text.chars().count();
    if chars < chars_min {
        return Err(ApiError::field(path, "must not be empty"));
    }
    if chars > chars_max {
        return Err(ApiError::field(path, format!("must have at most {chars_max} characters")));
    }
    Ok(text.to_owned())
}

fn check_metadata(path: &str, metadata: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let bad = |why: String| Err(ApiError::field(path, why).with_code("invalid_metadata"));
    if metadata.len() > METADATA_PAIRS_MAX {
        return bad(format!("must have at most {METADATA_PAIRS_MAX} pairs"));
    }
    for (key, value) in metadata {
        if key.is_empty() || key.chars().count() > METADATA_KEY_CHARS_MAX {
            return bad(format!("a key must have 1 to {METADATA_KEY_CHARS_MAX} characters"));
        }
        if value.chars().count() > METADATA_VALUE_CHARS_MAX {
            return bad(format!(
                "the value of {key:?} must have at most {METADATA_VALUE_CHARS_MAX} characters"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_error_names_its_field() {
        let body = json!({ "name": 7, "inner": { "deep": true, "extra": 1 } });
        let mut fields = Fields::of("", &body).unwrap();
        let name = fields.required_text("name", 10).unwrap_err();
        let mut inner = Fields::of("inner", fields.any("inner").unwrap()).unwrap();
        let missing = inner.required_text("title", 10).unwrap_err();
        inner.flag("deep").unwrap();
        let extra = inner.finish().unwrap_err();

        assert_eq!(name.message, "name: must be a string");
        assert_eq!(missing.message, "inner.title: required");
        assert_eq!(extra.message, "inner.extra: unknown field");
    }

    #[test]
    fn absent_null_and_given_differ() {
        let body = json!({ "b": null, "c": "x" });
        let mut fields = Fields::of("", &body).unwrap();

        assert_eq!(fields.text("a", 9).unwrap().over(Some("old".into())), Some("old".into()));
        assert_eq!(fields.text("b", 9).unwrap().over(Some("old".into())), None);
        assert_eq!(fields.text("c", 9).unwrap().over(Some("old".into())), Some("x".into()));
    }

    #[test]
    fn metadata_is_patched_and_bounded() {
        let old = BTreeMap::from([("keep".to_owned(), "1".to_owned()), ("go".into(), "2".into())]);
        let body = json!({ "metadata": { "go": null, "new": "3" } });
        let new = Fields::of("", &body).unwrap().metadata_over(&old).unwrap();
        let many: Map<String, Value> = (0..17).map(|n| (n.to_string(), json!("v"))).collect();
        let too_many = json!({ "metadata": many });
        let long = json!({ "metadata": { "k": "x".repeat(513) } });

        assert_eq!(new.keys().collect::<Vec<_>>(), ["keep", "new"]);
        for bad in [too_many, long, json!({ "metadata": { "k": 1 } }), json!({ "metadata": [] })] {
            assert!(Fields::of("", &bad).unwrap().metadata().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_unsupported_field_passes_only_when_it_asks_for_nothing() {
        for (value, passes) in
            [(json!([]), true), (json!(null), true), (json!({}), true), (json!(["x"]), false)]
        {
            let body = json!({ "skills": value });
            assert_eq!(Fields::of("", &body).unwrap().unsupported("skills").is_ok(), passes);
        }
    }
}
