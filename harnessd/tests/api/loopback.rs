//! The loopback port: nobody without a key, nobody from a foreign page, nobody else's objects.

use std::net::{SocketAddr, TcpListener};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};

use crate::daemon::Daemon;

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

#[tokio::test]
async fn the_port_wants_a_key_and_refuses_foreign_hosts_and_pages_even_with_one() {
    let (daemon, port) = start().await;
    let (key, lines) = harnessd::api::keys::generate("test", "uid:4242");
    let bearer = format!("Bearer {key}");
    let host = ("host", "localhost");
    let ask = |headers: Vec<(&'static str, String)>| {
        let port = &port;
        async move {
            let headers: Vec<(&str, &str)> =
                headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            port.get("/v1/agents", &headers).await.0
        }
    };
    let with = |extra: &[(&'static str, &str)]| {
        let all = std::iter::once(&host).chain(extra);
        all.map(|(name, value)| (*name, (*value).to_owned())).collect::<Vec<_>>()
    };

    assert_eq!(ask(with(&[("authorization", &bearer)])).await, 401);
    daemon.write_keys(&lines);

    assert_eq!(ask(with(&[("authorization", &bearer)])).await, 200);
    assert_eq!(ask(with(&[("x-api-key", &key)])).await, 200);
    assert_eq!(ask(with(&[])).await, 401);
    assert_eq!(ask(with(&[("authorization", "Bearer chk_guess")])).await, 401);
    let page = [("authorization", bearer.as_str()), ("origin", "https://evil.example")];
    assert_eq!(ask(with(&page)).await, 403);
    let rebound = [("host", "evil.example"), ("authorization", &bearer)];
    assert_eq!(port.get("/v1/agents", &rebound).await.0, 403);
    daemon.write_keys("");
    assert_eq!(ask(with(&[("x-api-key", &key)])).await, 401);
}

#[tokio::test]
async fn a_keys_owner_sees_nothing_of_others() {
    let (daemon, port) = start().await;
    let (key, lines) = harnessd::api::keys::generate("test", "uid:4242");
    daemon.write_keys(&lines);
    let session = daemon.session(json!([])).await;
    let headers = [("host", "127.0.0.1"), ("x-api-key", key.as_str())];

    let (listed, list) = port.get("/v1/sessions", &headers).await;
    assert_eq!((listed, &list["data"]), (200, &json!([])));
    for path in [
        format!("/v1/sessions/{session}"),
        format!("/v1/sessions/{session}/events"),
        format!("/v1/sessions/{session}/events/stream"),
        format!("/cleanhands/v1/sessions/{session}/log"),
        format!("/cleanhands/v1/sessions/{session}/verify"),
    ] {
        assert_eq!(port.get(&path, &headers).await.0, 404, "{path}");
    }
}
