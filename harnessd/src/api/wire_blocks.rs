//! Content blocks on the wire: read from a client's event, written to a client.
//!
//! The log keeps blocks as the Messages API knows them, which for text, images and documents is
//! what the wire API says too. Each is copied field by field, so that nothing else slips through.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{Fields, text_of};

/// Most blocks of one event. The wire API states no number; a turn needs a handful.
const BLOCKS_MAX: usize = 1_000;
/// Longest text of one block, in characters: the request body's limit bounds it anyway.
const TEXT_CHARS_MAX: usize = 32 * 1024 * 1024;
const NAME_CHARS_MAX: usize = 4_096;
const IMAGE_TYPES: [&str; 4] = ["image/jpeg", "image/png", "image/gif", "image/webp"];

/// Blocks of the log as a client sees them.
pub fn all(blocks: &[Value]) -> Vec<Value> {
    blocks.iter().filter_map(one).collect()
}

fn one(block: &Value) -> Option<Value> {
    let kept: &[&str] = match block["type"].as_str()? {
        "text" => &["type", "text"],
        "image" => &["type", "source"],
        "document" => &["type", "source", "title", "context"],
        _ => return None,
    };
    let mut out = Map::new();
    for key in kept {
        if let Some(value) = block.get(*key) {
            out.insert((*key).to_owned(), value.clone());
        }
    }
    Some(Value::Object(out))
}

/// Reads the blocks of a message that a client sends.
pub fn read(path: &str, value: &Value) -> Result<Vec<Value>, ApiError> {
    let items = value.as_array().ok_or_else(|| ApiError::field(path, "must be an array"))?;
    if items.len() > BLOCKS_MAX {
        return Err(ApiError::field(path, format!("must have at most {BLOCKS_MAX} blocks")));
    }
    let mut blocks = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        blocks.push(read_one(&format!("{path}[{at}]"), item)?);
    }
    Ok(blocks)
}

/// Reads the blocks of a tool's result, where an empty text means that there was no output: the
/// Messages API would refuse it, and a session must not be stuck for it.
pub fn read_result(path: &str, value: &Value) -> Result<Vec<Value>, ApiError> {
    let Some(items) = value.as_array() else { return read(path, value) };
    let empty = |item: &&Value| item["type"] == "text" && item["text"] == "";
    let kept: Vec<Value> = items.iter().filter(|item| !empty(item)).cloned().collect();
    read(path, &Value::Array(kept))
}

fn read_one(path: &str, item: &Value) -> Result<Value, ApiError> {
    let mut fields = Fields::of(path, item)?;
    let block = match fields.kind()? {
        "text" => {
            let text = fields.required("text")?;
            let text = text_of(&fields.path("text"), text, 1, TEXT_CHARS_MAX)?;
            json!({ "type": "text", "text": text })
        }
        "image" => json!({ "type": "image", "source": source(&mut fields, false)? }),
        "document" => {
            let mut block = json!({ "type": "document", "source": source(&mut fields, true)? });
            for key in ["title", "context"] {
                if let Some(text) = fields.text(key, NAME_CHARS_MAX)?.value() {
                    block[key] = json!(text);
                }
            }
            block
        }
        "search_result" => {
            return Err(ApiError::unsupported(&format!("{path}.type: search_result")));
        }
        "redacted" => {
            return Err(ApiError::field(
                &format!("{path}.type"),
                "redacted comes from servers only",
            ));
        }
        _ => {
            let why = "must be text, image or document";
            return Err(ApiError::field(&format!("{path}.type"), why));
        }
    };
    fields.finish()?;
    Ok(block)
}

/// An inline source. Files and URLs would be read by somebody who has a network: not offered.
fn source(fields: &mut Fields<'_>, document: bool) -> Result<Value, ApiError> {
    let path = fields.path("source");
    let mut source = Fields::of(&path, fields.required("source")?)?;
    let kind = source.kind()?;
    let read = match kind {
        "base64" => {
            let media_type = source.required_text("media_type", NAME_CHARS_MAX)?;
            let known = if document {
                media_type == "application/pdf"
            } else {
                IMAGE_TYPES.contains(&media_type.as_str())
            };
            if !known {
                let why = if document { "must be application/pdf" } else { "is no image type" };
                return Err(ApiError::field(&source.path("media_type"), why));
            }
            let data = source.required_text("data", TEXT_CHARS_MAX)?;
            json!({ "type": "base64", "media_type": media_type, "data": data })
        }
        "text" if document => {
            let media_type = source.required_text("media_type", NAME_CHARS_MAX)?;
            if media_type != "text/plain" {
                return Err(ApiError::field(&source.path("media_type"), "must be text/plain"));
            }
            let data = source.required_text("data", TEXT_CHARS_MAX)?;
            json!({ "type": "text", "media_type": media_type, "data": data })
        }
        "url" | "file" => return Err(ApiError::unsupported(&format!("{path}.type: {kind}"))),
        _ => return Err(ApiError::field(&format!("{path}.type"), "must be base64")),
    };
    source.finish()?;
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_blocks_pass_and_every_refusal_names_the_field() {
        let text = json!([{ "type": "text", "text": "hi" }]);
        assert_eq!(read("content", &text).unwrap(), *text.as_array().unwrap());
        for (block, expected) in [
            (json!("hi"), "content[0]: must be a JSON object"),
            (json!({ "type": "text", "text": "" }), "content[0].text: must not be empty"),
            (json!({ "type": "text" }), "content[0].text: required"),
            (json!({ "type": "redacted" }), "content[0].type: redacted"),
            (json!({ "type": "audio" }), "content[0].type: must be"),
            (
                json!({ "type": "image", "source": { "type": "url", "url": "https://x.example" } }),
                "content[0].source.type: url: not supported",
            ),
            (
                json!({ "type": "image", "source": {
                    "type": "base64", "media_type": "image/tiff", "data": "AA==" } }),
                "content[0].source.media_type: is no image type",
            ),
            (
                json!({ "type": "text", "text": "x", "cache_control": { "type": "ephemeral" } }),
                "content[0].cache_control: unknown field",
            ),
        ] {
            let error = read("content", &json!([block])).unwrap_err();
            assert!(error.message.starts_with(expected), "{}", error.message);
        }
    }

    #[test]
    fn what_only_the_model_reads_is_not_shown() {
        let blocks = [
            json!({ "type": "text", "text": "a", "citations": [1] }),
            json!({ "type": "thinking", "thinking": "hidden", "signature": "s" }),
        ];

        assert_eq!(all(&blocks), [json!({ "type": "text", "text": "a" })]);
    }
}
