//! Sessions as files: fetched, brought in, and made anew under hashes that fit.

use axum::http::Method;
use harnessd::log::chain;
use http_body_util::BodyExt;
use ipc::fault::Fault;
use ipc::http::Client;
use ipc::id::SessionId;
use ipc::session::LogEvent;
use serde_json::{Value, json};

pub async fn bytes(client: &Client, path: &str) -> Vec<u8> {
    let response = client.send(Method::GET, path, None, Default::default()).await.unwrap();
    assert_eq!(response.status(), 200);
    response.into_body().collect().await.unwrap().to_bytes().to_vec()
}

/// The lines of a session's file: the first, its events, the last.
pub async fn exported(client: &Client, session: &SessionId) -> (Value, Vec<Value>, Value) {
    let file = bytes(client, &format!("/cleanhands/v1/sessions/{session}/export")).await;
    let text = String::from_utf8(file).unwrap();
    let mut lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let end = lines.pop().unwrap();
    (lines.remove(0), lines, end)
}

pub async fn import(
    client: &Client,
    header: &Value,
    events: &[Value],
    last: bool,
) -> Result<Value, Fault> {
    let path = format!("/cleanhands/v1/sessions/{}/import", header["session"].as_str().unwrap());
    client.post(&path, &json!({ "header": header, "events": events, "last": last })).await
}

/// The lines as one whole chain, in the order in which they are.
pub fn chained(session: &SessionId, mut lines: Vec<Value>) -> Vec<Value> {
    let mut previous = chain::GENESIS.to_owned();
    for (seq, line) in (1..).zip(&mut lines) {
        let text = |key: &str| line[key].as_str().unwrap().to_owned();
        let (id, time, kind, body) = (text("id"), text("time"), text("kind"), text("body"));
        let hash = String::new();
        let event = LogEvent { seq, id, time, kind, body: Value::Null, previous, hash };
        let hash = chain::hash(session.as_str(), &event, &body);
        line["seq"] = json!(seq);
        line["previous"] = json!(event.previous);
        line["hash"] = json!(hash);
        previous = hash;
    }
    lines
}
