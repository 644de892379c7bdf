//! The loopback port: nobody without a key, nobody from a foreign page, nobody else's objects.

use std::net::{SocketAddr, TcpListener};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};

use super::daemon::Daemon;

struct Port {
    address: SocketAddr,
}

impl Port {
    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> (u16, Value) {
        let stream = tokio::net::TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut request = http::Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::new())).unwrap();
        let response = sender.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }
}

async fn start() -> (Daemon, Port) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let daemon = Daemon::start_with(json!([]), Some(&listener)).await;
    (daemon, Port { address })
}

/// What the daemon would store for a key of another user.
fn key_of_another() -> (&'static str, String) {
    use sha2::Digest;
    let key = "chk_of_another_user";
    let hash = hex::encode(sha2::Sha256::digest(key));
    let lines = format!("[[key]]\nname = \"x\"\nsha256 = \"{hash}\"\nowner = \"uid:4242\"\n");
    (key, lines)
}

#[tokio::test]
async fn the_port_wants_a_key_and_refuses_foreign_hosts_and_pages_even_with_one() {
    let (daemon, port) = start().await;
    let host = ("host", "localhost");
    let early = port.get("/v1/agents", &[host, ("x-api-key", "chk_guess")]).await;
    let key = daemon.key("laptop").await;
    let bearer = format!("Bearer {key}");
    let bearer = ("authorization", bearer.as_str());
    let page = ("origin", "https://evil.example");

    assert_eq!(early.0, 401, "{}", early.1);
    for (headers, status) in [
        (vec![host, bearer], 200),
        (vec![host, ("x-api-key", &key)], 200),
        (vec![host], 401),
        (vec![host, ("authorization", "Bearer chk_guess")], 401),
        (vec![host, bearer, page], 403),
        (vec![("host", "evil.example"), bearer], 403),
    ] {
        let (answered, body) = port.get("/v1/agents", &headers).await;
        assert_eq!(answered, status, "{body}");
    }
    let path = "/cleanhands/v1/keys";
    assert_eq!(port.get(path, &[host, bearer]).await.0, 403, "a key made keys");
    let broken = daemon.post(path, json!({ "name": "a\nb" })).await;
    assert_eq!(broken.status, 400, "{}", broken.body);
    assert_eq!(daemon.get(path).await.ok()["names"], json!(["laptop"]));
    daemon.call("DELETE", &format!("{path}/laptop"), None).await.ok();
    assert_eq!(port.get("/v1/agents", &[host, bearer]).await.0, 401);
}

#[tokio::test]
async fn both_ways_in_show_a_user_the_same_objects() {
    let (daemon, port) = start().await;
    let key = daemon.key("laptop").await;
    let session = daemon.session(json!([])).await;
    let headers = [("host", "127.0.0.1"), ("x-api-key", key.as_str())];

    let (_, list) = port.get("/v1/sessions", &headers).await;

    assert_eq!(list["data"][0]["id"], json!(session));
}

#[tokio::test]
async fn a_keys_owner_sees_nothing_of_others() {
    let (daemon, port) = start().await;
    let (key, lines) = key_of_another();
    std::fs::write(daemon.path("state/harnessd/keys.toml"), lines).unwrap();
    daemon.private("state/harnessd/keys.toml");
    let session = daemon.session(json!([])).await;
    let file = daemon.upload("mine.txt", b"mine").await.ok()["id"].as_str().unwrap().to_owned();
    let headers = [("host", "127.0.0.1"), ("x-api-key", key)];

    assert_eq!(port.get("/v1/files", &headers).await.1["data"], json!([]));
    let named = port.get(&format!("/v1/files?ids[]={file}"), &headers).await.1;
    assert_eq!(named["data"], json!([]));
    let (listed, list) = port.get("/v1/sessions", &headers).await;
    assert_eq!((listed, &list["data"]), (200, &json!([])));
    for path in [
        format!("/v1/sessions/{session}"),
        format!("/v1/files/{file}"),
        format!("/v1/files/{file}/content"),
        format!("/v1/sessions/{session}/resources"),
        format!("/v1/sessions/{session}/events"),
        format!("/v1/sessions/{session}/events/stream"),
        format!("/cleanhands/v1/sessions/{session}/log"),
        format!("/cleanhands/v1/sessions/{session}/verify"),
    ] {
        assert_eq!(port.get(&path, &headers).await.0, 404, "{path}");
    }
}
