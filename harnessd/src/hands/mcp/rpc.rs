//! JSON-RPC 2.0 as MCP uses it, and what an answer of `tools/call` gives the model. Pure.

use serde_json::{Value, json};

use super::super::text_block;

/// The revision that we ask for.
pub const NEWEST: &str = "2025-11-25";
/// The revisions of the transport that we speak.
const KNOWN: [&str; 3] = [NEWEST, "2025-06-18", "2025-03-26"];
/// What a server may have named as content of a call, in characters; more is cut.
pub const RESULT_CHARS_MAX: usize = 100_000;
/// Of an image in base64: what the model's server takes (5 MB each), and of all of a call.
const IMAGE_BYTES_MAX: usize = 5 * 1000 * 1000;
const IMAGES_BYTES_MAX: usize = 2 * IMAGE_BYTES_MAX;
const IMAGES: [&str; 4] = ["image/png", "image/jpeg", "image/gif", "image/webp"];
/// The code of an answer to a request that a client does not serve.
const METHOD_NOT_FOUND: i64 = -32601;

/// One message of a server.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    Result {
        id: u64,
        result: Value,
    },
    /// `id`: none when the server could not read the request's.
    Error {
        id: Option<u64>,
        code: i64,
        message: String,
    },
    /// The server asks us.
    Request {
        id: Value,
        method: String,
    },
    Notification {
        method: String,
    },
}

/// Bytes that are no message.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server sent {0}, which is no JSON-RPC message")]
pub struct Malformed(String);

pub fn request(id: u64, method: &str, params: &Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
}

pub fn notification(method: &str, params: &Value) -> Value {
    json!({ "jsonrpc": "2.0", "method": method, "params": params })
}

/// Our answer to what a server asks: we are alive, and serve nothing else.
pub fn reply(id: &Value, method: &str) -> Value {
    if method == "ping" {
        return json!({ "jsonrpc": "2.0", "id": id, "result": {} });
    }
    let message = format!("this client does not serve {method}");
    let error = json!({ "code": METHOD_NOT_FOUND, "message": message });
    json!({ "jsonrpc": "2.0", "id": id, "error": error })
}

/// Reads one message, or the several of a batch, which the oldest revision has.
pub fn parse(text: &str) -> Result<Vec<Message>, Malformed> {
    let malformed = || Malformed(format!("{:?}", text.chars().take(80).collect::<String>()));
    match serde_json::from_str(text).map_err(|_| malformed())? {
        Value::Array(items) => items.iter().map(|m| message(m).ok_or_else(malformed)).collect(),
        single => Ok(vec![message(&single).ok_or_else(malformed)?]),
    }
}

fn message(value: &Value) -> Option<Message> {
    if value["jsonrpc"] != "2.0" {
        return None;
    }
    if let Some(method) = value["method"].as_str() {
        let method = method.to_owned();
        return Some(match value.get("id") {
            Some(id) => Message::Request { id: id.clone(), method },
            None => Message::Notification { method },
        });
    }
    if let Some(result) = value.get("result") {
        return Some(Message::Result { id: value["id"].as_u64()?, result: result.clone() });
    }
    let error = value.get("error")?.as_object()?;
    let text = error.get("message").and_then(Value::as_str).unwrap_or("no message");
    let message = text.chars().take(1_000).collect();
    let code = error.get("code").and_then(Value::as_i64).unwrap_or(0);
    Some(Message::Error { id: value["id"].as_u64(), code, message })
}

/// The revision that an answer of `initialize` settles on.
pub fn revision(result: &Value) -> Result<&'static str, String> {
    let named = result["protocolVersion"].as_str().unwrap_or("none");
    let known = KNOWN.into_iter().find(|known| *known == named);
    known.ok_or_else(|| {
        let named: String = named.chars().take(40).collect();
        format!("it speaks revision {named:?} of MCP; known are {}", KNOWN.join(", "))
    })
}

/// The content of a call as the model reads it, and whether the tool says that it failed.
pub fn content(result: &Value) -> (Vec<Value>, bool) {
    let (mut room, mut images) = (RESULT_CHARS_MAX, IMAGES_BYTES_MAX);
    let items = result["content"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut blocks: Vec<Value> =
        items.iter().map(|item| block(item, &mut room, &mut images)).collect();
    if blocks.is_empty() {
        let structured = result.get("structuredContent").map(ToString::to_string);
        let text = structured.unwrap_or_else(|| "(no output)".to_owned());
        blocks.push(text_block(fitting(&text, &mut room)));
    }
    (blocks, result["isError"] == true)
}

fn block(item: &Value, room: &mut usize, images: &mut usize) -> Value {
    let text = |key: &str| item[key].as_str().unwrap_or_default();
    let mime = text("mimeType");
    match text("type") {
        "text" => text_block(fitting(text("text"), room)),
        // One that the model's server refuses would stand in every later request.
        "image" if IMAGES.contains(&mime) && !is_image(text("data"), *images) => {
            text_block("(an image is not shown: no base64, or too large)")
        }
        "image" if IMAGES.contains(&mime) => {
            *images -= text("data").len();
            let source = json!({ "type": "base64", "media_type": mime, "data": text("data") });
            json!({ "type": "image", "source": source })
        }
        "resource" if item["resource"]["text"].is_string() => {
            let inner = item["resource"]["text"].as_str().unwrap_or_default();
            text_block(fitting(inner, room))
        }
        "resource_link" => text_block(fitting(&format!("resource: {}", text("uri")), room)),
        other => {
            let other: String = other.chars().take(40).collect();
            text_block(format!("(content of the kind {other:?} {mime:.80} is not shown)"))
        }
    }
}

fn is_image(data: &str, room: usize) -> bool {
    use base64::Engine;
    let fits = !data.is_empty() && data.len() <= IMAGE_BYTES_MAX.min(room);
    fits && base64::engine::general_purpose::STANDARD.decode(data).is_ok()
}

fn fitting(text: &str, room: &mut usize) -> String {
    let chars = text.chars().count();
    if chars <= *room {
        *room -= chars;
        return text.to_owned();
    }
    let kept: String = text.chars().take(std::mem::take(room)).collect();
    format!("{kept}\n(cut here: a result may have {RESULT_CHARS_MAX} characters)")
}

/// The name under which the model knows a tool; none that stands in `taken`.
pub fn model_name(server: &str, tool: &str, taken: &[String]) -> String {
    const CHARS_MAX: usize = 128;
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let full: String = format!("mcp__{server}__{tool}").chars().map(legal).collect();
    let mut name: String = full.chars().take(CHARS_MAX).collect();
    let mut number = 2;
    while taken.contains(&name) {
        let end = format!("_{number}");
        name = full.chars().take(CHARS_MAX - end.len()).collect::<String>() + &end;
        number += 1;
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_message_is_told_from_the_others() {
        let kinds = parse(
            r#"[{"jsonrpc":"2.0","id":1,"result":{}},
                {"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"bad"}},
                {"jsonrpc":"2.0","id":"a","method":"ping"},
                {"jsonrpc":"2.0","method":"notifications/progress"}]"#,
        )
        .unwrap();

        assert_eq!(kinds[0], Message::Result { id: 1, result: json!({}) });
        assert_eq!(kinds[1], Message::Error { id: None, code: -32700, message: "bad".into() });
        assert_eq!(kinds[2], Message::Request { id: json!("a"), method: "ping".into() });
        assert!(matches!(&kinds[3], Message::Notification { method } if method.ends_with("ress")));
    }

    #[test]
    fn what_is_no_message_is_refused_and_quoted() {
        for text in ["", "<html>", "{}", r#"{"jsonrpc":"2.0","id":1}"#, r#"[{"jsonrpc":"1.0"}]"#] {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().contains("no JSON-RPC message"), "{text}: {error}");
        }
    }

    #[test]
    fn only_revisions_that_we_speak_are_settled_on() {
        assert_eq!(revision(&json!({ "protocolVersion": "2025-03-26" })), Ok("2025-03-26"));
        assert!(
            revision(&json!({ "protocolVersion": "1999-01-01" })).unwrap_err().contains("1999")
        );
        assert!(revision(&json!({})).is_err());
    }

    #[test]
    fn a_result_keeps_what_the_model_can_read_and_is_bounded() {
        let long = "é".repeat(RESULT_CHARS_MAX);
        let (blocks, failed) = content(&json!({ "isError": true, "content": [
            { "type": "text", "text": "ab" },
            { "type": "image", "mimeType": "image/png", "data": "AAAA" },
            { "type": "audio", "mimeType": "audio/wav", "data": "AAAA" },
            { "type": "text", "text": long },
            { "type": "text", "text": "x" },
        ] }));

        assert!(failed);
        assert_eq!(blocks[1]["source"]["media_type"], "image/png");
        assert!(blocks[2]["text"].as_str().unwrap().contains("audio/wav"));
        let cut = blocks[3]["text"].as_str().unwrap();
        assert_eq!(cut.chars().filter(|c| *c == 'é').count(), RESULT_CHARS_MAX - 2);
        assert!(cut.contains("cut here"));
        assert!(blocks[4]["text"].as_str().unwrap().starts_with("\n(cut"));
        assert_eq!(content(&json!({ "structuredContent": { "a": 1 } })).0[0]["text"], "{\"a\":1}");
    }

    #[test]
    fn names_are_legal_and_never_the_same() {
        let first = model_name("my server", "get.it", &[]);
        let second = model_name("my server", "get:it", std::slice::from_ref(&first));
        let long = model_name("s", &"x".repeat(300), &[]);
        let other = model_name("s", &"x".repeat(301), std::slice::from_ref(&long));

        assert_eq!(first, "mcp__my_server__get_it");
        assert_eq!(second, "mcp__my_server__get_it_2");
        assert_eq!((long.len(), other.len()), (128, 128));
        assert_ne!(long, other);
    }
}
