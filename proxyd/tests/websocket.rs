//! WebSocket and other upgraded connections: frames pass as they are, both ends close on their
//! own, placeholders do not go out in them, over HTTP/1.1 and HTTP/2.

use std::sync::{Arc, Mutex};

use crate::support::*;
use bytes::Bytes;
use h2::client::SendRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::server::TlsStream;

const H1: &[&[u8]] = &[b"http/1.1"];
/// The example of RFC 6455: a key and the answer to it.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
/// A frame of an upstream's.
const LAST: &[u8] = b"\x81\x04last";
/// What names no variable has no placeholder that could be anywhere.
const NO_PLACEHOLDER: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
"#;

type Conn = TlsStream<TcpStream>;

async fn before(policy: &str) -> (Proxyd, Upstream) {
    let upstream = Upstream::tls("api.test", H1, serve).await;
    let proxyd = Proxyd::start(policy, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    (proxyd, upstream)
}

/// Switches, then gives every byte back; says in a field which extensions it was offered.
async fn serve(mut stream: Conn) {
    let Some((head, _)) = request(&mut stream).await else { return };
    if head.starts_with("GET /refused ") {
        let answer = "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno";
        stream.write_all(answer.as_bytes()).await.unwrap();
        return;
    }
    let accept = match field(&head, "sec-websocket-key") {
        Some(KEY) => ACCEPT.to_owned(),
        Some(_) if head.starts_with("GET /wrong ") => ACCEPT.to_owned(),
        Some(key) => answer_to(key),
        None => panic!("a handshake without a key: {head}"),
    };
    let offered = field(&head, "sec-websocket-extensions").unwrap_or("none");
    let authorization = field(&head, "authorization").unwrap_or("none");
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: {accept}\r\nX-Offered: {offered}\r\nX-Echo: {authorization}\r\n\r\n"
    );
    stream.write_all(answer.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    let mut buffer = vec![0; 16 * 1024];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) => {
                // The other direction ended; this one has a last word.
                stream.write_all(LAST).await.unwrap();
                stream.shutdown().await.unwrap();
                return;
            }
            Ok(length) => {
                if stream.write_all(&buffer[..length]).await.is_err() {
                    return;
                }
                let _ = stream.flush().await;
            }
            Err(_) => return,
        }
    }
}

fn answer_to(key: &str) -> String {
    use base64::Engine;
    use sha1::Digest;
    let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    base64::engine::general_purpose::STANDARD.encode(sha1::Sha1::digest(text))
}

fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mask = [0x11, 0x82, 0x33, 0xf4];
    let mut out = vec![first, 0x80 | u8::try_from(payload.len()).unwrap()];
    out.extend(mask);
    out.extend(payload.iter().enumerate().map(|(index, byte)| byte ^ mask[index % 4]));
    out
}

fn handshake(path: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: api.test\r\nConnection: keep-alive, Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n\
         Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
    )
}

async fn open(lease: &Lease) -> (Tls, String) {
    let mut stream = lease.h1("api.test").await;
    stream.write_all(handshake("/ws").as_bytes()).await.unwrap();
    let head = timely(head(&mut stream)).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    (stream, head)
}

async fn open_h2(
    sender: &mut SendRequest<Bytes>,
    path: &str,
    protocol: &'static str,
) -> (h2::client::ResponseFuture, h2::SendStream<Bytes>) {
    let mut request = http::Request::builder()
        .method("CONNECT")
        .uri(format!("https://api.test{path}"))
        .header("sec-websocket-version", "13")
        .body(())
        .unwrap();
    request.extensions_mut().insert(h2::ext::Protocol::from_static(protocol));
    sender.send_request(request, false).unwrap()
}

/// What comes until there are so many bytes, or the end.
async fn some(body: &mut h2::RecvStream, length: usize) -> Result<Vec<u8>, h2::Error> {
    let mut all = Vec::new();
    while all.len() < length {
        match timely(body.data()).await {
            Some(data) => all.extend_from_slice(&data?),
            None => break,
        }
    }
    Ok(all)
}

#[tokio::test]
async fn frames_pass_untouched_and_each_direction_ends_on_its_own() {
    let (proxyd, _upstream) = before(POLICY).await;
    let lease = proxyd.lease().await;
    let (mut stream, head) = open(&lease).await;
    let sent = [
        frame(0x01, b"begun "),
        frame(0x89, b"ping"),
        frame(0x00, b""),
        frame(0x80, b"ended"),
        frame(0x88, &[0x03, 0xe8]),
    ]
    .concat();

    stream.write_all(&sent).await.unwrap();
    let mut back = vec![0; sent.len()];
    timely(stream.read_exact(&mut back)).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut rest = Vec::new();
    timely(stream.read_to_end(&mut rest)).await.unwrap();

    assert_eq!(back, sent);
    assert_eq!(rest, LAST);
    assert_eq!(field(&head, "sec-websocket-accept"), Some(ACCEPT));
    assert_eq!(field(&head, "x-echo"), Some(&*format!("Bearer {}", "*".repeat(CANARY.len()))));
}

#[tokio::test]
async fn compression_is_offered_only_where_nothing_is_searched() {
    let (searched, _one) = before(POLICY).await;
    let (unsearched, _two) = before(NO_PLACEHOLDER).await;
    let searched = open(&searched.lease().await).await.1;
    let unsearched = open(&unsearched.lease().await).await.1;

    assert_eq!(field(&searched, "x-offered"), Some("none"));
    assert_eq!(field(&unsearched, "x-offered"), Some("permessage-deflate"));
}

#[tokio::test]
async fn a_message_with_a_placeholder_is_refused_by_a_close_code_and_recorded() {
    let (proxyd, _upstream) = before(POLICY).await;
    let lease = proxyd.lease().await;
    let text = format!("{{\"token\":\"{}\"}}", lease.placeholder());
    let (start, end) = text.as_bytes().split_at(text.find("mark").unwrap());
    let whole = frame(0x81, text.as_bytes());
    let fragments = [frame(0x01, start), frame(0x89, b"still here"), frame(0x80, end)].concat();
    // Six bytes of head, then the text.
    let two_writes = whole.split_at(6 + start.len());
    let first = fragments.len() - frame(0x80, end).len();
    let cases: [(&[u8], &[u8], &[u8]); 3] = [
        (&whole, b"", b""),
        // What went on before the placeholder was whole comes back first.
        (&fragments[..first], &fragments[first..], &fragments[..first]),
        (two_writes.0, two_writes.1, two_writes.0),
    ];
    for (one, two, echoed) in cases {
        let (mut stream, _) = open(&lease).await;
        stream.write_all(one).await.unwrap();
        let mut back = vec![0; echoed.len()];
        timely(stream.read_exact(&mut back)).await.unwrap();
        assert_eq!(back, echoed);
        stream.write_all(two).await.unwrap();
        let mut rest = Vec::new();
        // It may end with a reset; what was said before it counts.
        let _ = timely(stream.read_to_end(&mut rest)).await;

        // In the middle of an echoed frame there is no place for a close of ours.
        if one.ends_with(two_writes.0) && !two.is_empty() && echoed == two_writes.0 {
            assert_eq!(rest, b"");
            continue;
        }
        assert_eq!(rest[0], 0x88, "{rest:?}");
        assert_eq!(rest[2..4], 1008u16.to_be_bytes());
        assert!(String::from_utf8_lossy(&rest).contains("placeholder"), "{rest:?}");
    }
    proxyd
        .record(|r| r.reason.as_deref().is_some_and(|text| text.starts_with("message_refused")))
        .await;
}

#[tokio::test]
async fn a_value_that_comes_back_over_fragments_or_messages_is_masked() {
    let (proxyd, _upstream) = before(POLICY).await;
    let lease = proxyd.lease().await;
    let (mut stream, _) = open(&lease).await;
    let (begins, ends) = CANARY.split_at(CANARY.len() / 2);
    let stars = |text: &str| "*".repeat(text.len());
    let frames = |begins: &str, ends: &str| -> Vec<u8> {
        [
            frame(0x01, format!("fragments: {begins}").as_bytes()),
            frame(0x89, b"ping"),
            frame(0x80, format!("{ends}.").as_bytes()),
            frame(0x81, format!("messages: {begins}").as_bytes()),
            frame(0x82, format!("{ends}.").as_bytes()),
        ]
        .concat()
    };

    let sent = frames(begins, ends);
    stream.write_all(&sent).await.unwrap();
    let mut back = vec![0; sent.len()];
    timely(stream.read_exact(&mut back)).await.unwrap();

    assert_eq!(back, frames(&stars(begins), &stars(ends)));
}

#[tokio::test]
async fn other_protocols_than_websocket_are_searched_too() {
    let (arrived, mut arrivals) = mpsc::unbounded_channel();
    let upstream = Upstream::tls("api.test", H1, move |mut stream| {
        let arrived = arrived.clone();
        async move {
            let _ = request(&mut stream).await;
            let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                          Upgrade: echo\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
            let mut all = Vec::new();
            let _ = stream.read_to_end(&mut all).await;
            arrived.send(String::from_utf8_lossy(&all).into_owned()).unwrap();
        }
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    let request =
        "GET / HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n";
    let text = [request, "here: ", lease.placeholder(), "\n"].concat();
    let answer = talk(&mut stream, text.as_bytes()).await;
    let arrived = timely(arrivals.recv()).await.unwrap();

    assert!(answer.starts_with("HTTP/1.1 101 ") && answer.ends_with("\r\n\r\n"), "{answer}");
    assert!("here: ".starts_with(&arrived), "more than what stands before it: {arrived:?}");
    proxyd
        .record(|r| r.reason.as_deref().is_some_and(|text| text.starts_with("message_refused")))
        .await;
}

#[tokio::test]
async fn websocket_over_http2_reaches_an_upstream_over_http_1_1() {
    let (proxyd, _upstream) = before(POLICY).await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;
    until("the server offers it", || async { sender.is_extended_connect_protocol_enabled() }).await;
    let sent = [frame(0x01, b"begun "), frame(0x80, b"ended")].concat();

    let (response, mut up) = open_h2(&mut sender, "/ws", "websocket").await;
    up.send_data(sent.clone().into(), false).unwrap();
    let response = timely(response).await.unwrap();
    let (parts, mut down) = response.into_parts();
    let back = some(&mut down, sent.len()).await.unwrap();
    up.send_data(Bytes::new(), true).unwrap();
    let rest = some(&mut down, usize::MAX).await.unwrap();

    assert_eq!(parts.status, 200);
    assert_eq!(parts.headers["x-echo"], format!("Bearer {}", "*".repeat(CANARY.len())));
    assert!(!parts.headers.contains_key("sec-websocket-accept"));
    assert!(!parts.headers.contains_key("upgrade"));
    assert_eq!(back, sent);
    assert_eq!(rest, LAST);
    let record = proxyd.record(|r| r.path.as_deref() == Some("/ws") && r.status.is_some()).await;
    assert_eq!((record.method.as_deref(), record.status), (Some("GET"), Some(101)));
}

#[tokio::test]
async fn websocket_over_http2_is_guarded_and_refused_like_any_other() {
    let (proxyd, _upstream) = before(POLICY).await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let (response, mut up) = open_h2(&mut sender, "/ws", "websocket").await;
    let mut down = timely(response).await.unwrap().into_body();
    up.send_data(frame(0x81, lease.placeholder().as_bytes()).into(), false).unwrap();
    let close = some(&mut down, usize::MAX).await.unwrap();
    let (refused, _up) = open_h2(&mut sender, "/refused", "websocket").await;
    let refused = timely(refused).await.unwrap();
    let (wrong, _up) = open_h2(&mut sender, "/wrong", "websocket").await;
    let wrong = timely(wrong).await.unwrap();
    let (other, _up) = open_h2(&mut sender, "/ws", "connect-udp").await;
    let other = timely(other).await.unwrap();

    assert_eq!((close[0], &close[2..4]), (0x88, &1008u16.to_be_bytes()[..]));
    assert_eq!(refused.status(), 401);
    assert_eq!(wrong.status(), 502);
    assert_eq!(other.status(), 501);
    assert_eq!(other.headers()["x-cleanhands-denial"], "protocol_unsupported");
}

#[tokio::test]
async fn a_length_announced_for_an_upgrade_does_not_swallow_the_next_request() {
    let heads = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&heads);
    let upstream = Upstream::tls("api.test", H1, move |mut stream| {
        let heads = Arc::clone(&kept);
        async move {
            while let Some((head, _)) = request(&mut stream).await {
                heads.lock().unwrap().push(head);
                let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                stream.write_all(answer).await.unwrap();
                stream.flush().await.unwrap();
            }
        }
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;
    until("the server offers it", || async { sender.is_extended_connect_protocol_enabled() }).await;
    let mut declined = http::Request::builder()
        .method("CONNECT")
        .uri("https://api.test/ws")
        .header("sec-websocket-version", "13")
        .header("content-length", "39")
        .body(())
        .unwrap();
    declined.extensions_mut().insert(h2::ext::Protocol::from_static("websocket"));

    let (answer, mut up) = sender.send_request(declined, false).unwrap();
    let declined = timely(answer).await.unwrap();
    let _ = up.send_data(Bytes::new(), true);
    let next = http::Request::builder()
        .uri("https://api.test/next")
        .header("x", "DELETE /secret HTTP/1.0")
        .body(())
        .unwrap();
    let next = timely(sender.send_request(next, true).unwrap().0).await.unwrap();

    assert_eq!((declined.status(), next.status()), (http::StatusCode::OK, http::StatusCode::OK));
    let heads = heads.lock().unwrap();
    assert_eq!(heads.len(), 2);
    assert!(heads[0].starts_with("GET /ws ") && heads[1].starts_with("GET /next "), "{heads:?}");
    assert_eq!(field(&heads[0], "content-length"), None);
    // Who declined to switch may have begun to read for the other protocol.
    assert_eq!(upstream.connections(), 2);
}

#[tokio::test]
async fn a_plain_connect_inside_a_connection_is_denied_in_words() {
    let (proxyd, upstream) = before(POLICY).await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let request = http::Request::builder().method("CONNECT").uri("api.test:443").body(()).unwrap();
    let (response, _up) = sender.send_request(request, false).unwrap();
    let response = timely(response).await.unwrap();

    assert_eq!(response.status(), 405);
    assert_eq!(upstream.connections(), 0);
}
