//! What requests carry: much of it at once does not fill the memory, nor stop others.

use std::io::Write;
use std::os::unix::net::UnixStream;

use bytes::Bytes;
use futures_util::future::join_all;
use serde_json::json;

use super::daemon::Daemon;

const MIB: usize = 1024 * 1024;

/// A list of as many values as go into 31 MiB.
fn crowded() -> Bytes {
    let mut body = br#"{"name":"x","model":"s","tools":[[]"#.to_vec();
    while body.len() < 31 * MIB {
        body.extend_from_slice(b",[]");
    }
    body.extend_from_slice(b"]}");
    body.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_very_many_values_are_refused_and_take_little_memory() {
    let daemon = Daemon::start(json!([])).await;
    let body = crowded();

    let sent = (0..6).map(|_| daemon.raw("POST", "/v1/agents", body.clone()));
    let answers = join_all(sent).await;

    for answer in answers {
        answer.refused(413, "request_too_large", "values");
    }
    let peak = daemon.memory_peak();
    assert!(peak < 200 * MIB, "harnessd took {} MiB", peak / MIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn long_bodies_at_the_same_moment_are_all_read() {
    let daemon = Daemon::start(json!([])).await;
    let session = daemon.session(json!([])).await;
    let path = format!("/v1/sessions/{session}/events");
    let text = "x".repeat(MIB);
    let event = json!({ "type": "user.message", "content": [{ "type": "text", "text": text }] });
    let body = Bytes::from(json!({ "events": [event] }).to_string());

    let answers = join_all((0..8).map(|_| daemon.raw("POST", &path, body.clone()))).await;

    for answer in answers {
        answer.ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_never_end_their_long_bodies_do_not_keep_others_from_short_ones() {
    let daemon = Daemon::start(json!([])).await;
    let head = format!(
        "POST /v1/agents HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{{\"name\":\"{}",
        31 * MIB,
        "x".repeat(200_000)
    );
    let stuck = || {
        let mut stream = UnixStream::connect(daemon.path("run/harnessd.sock")).unwrap();
        // What is not read beyond this needs no place: the daemon has the beginning by then.
        stream.set_nonblocking(true).unwrap();
        let _ = stream.write(head.as_bytes());
        stream
    };
    let stuck: Vec<UnixStream> = (0..8).map(|_| stuck()).collect();

    let made = daemon.post("/v1/agents", json!({ "name": "a", "model": "m" })).await.ok();

    assert_eq!(made["name"], "a");
    drop(stuck);
}
