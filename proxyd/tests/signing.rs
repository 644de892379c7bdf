//! Bodies in which the credential has a part, over real sockets: chunks that are signed again,
//! bodies that are held back to be hashed or to have a placeholder replaced.

use std::sync::{Arc, Mutex};

use crate::support::*;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["aws.test"]
methods = ["GET", "PUT", "POST"]
addresses = ["127.0.0.1/32"]
credential = "aws"

[[egress.allow]]
hosts = ["body.test"]
methods = ["POST"]
addresses = ["127.0.0.1/32"]
credential = "body"

[credentials.aws]
secret = "local:aws"
inject = { aws-sigv4 = { regions = ["eu-central-1"], services = ["s3", "sts"] } }
hosts = ["aws.test"]
env = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]

[credentials.body]
secret = "local:body"
inject = { placeholder = ["body"] }
hosts = ["body.test"]
env = "BODY_TOKEN"
"#;

type Seen = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

struct Scene {
    proxyd: Proxyd,
    lease: Lease,
    seen: Seen,
    _upstreams: Vec<Upstream>,
}

impl Scene {
    async fn start() -> Scene {
        let seen = Seen::default();
        let mut upstreams = Vec::new();
        for name in ["aws.test", "body.test"] {
            let log = Arc::clone(&seen);
            let upstream = Upstream::tls(name, &[b"http/1.1"], move |mut stream| {
                let log = Arc::clone(&log);
                async move {
                    while let Some(request) = request(&mut stream).await {
                        log.lock().unwrap().push(request);
                        let answer = b"HTTP/1.1 200 So\r\nContent-Length: 0\r\n\r\n";
                        if stream.write_all(answer).await.is_err() {
                            return;
                        }
                        let _ = stream.flush().await;
                    }
                }
            });
            upstreams.push(upstream.await);
        }
        let rows = [("aws.test", &upstreams[0]), ("body.test", &upstreams[1])];
        let proxyd = Proxyd::start(POLICY, &rows).await;
        for (name, value) in
            [("aws", "AKIAREAL0000000REAL0:SECRET-CANARY-aws"), ("body", "SECRET-CANARY-body")]
        {
            let value = Bytes::from_static(value.as_bytes());
            let path = format!("/v1/secrets/{name}");
            proxyd.control().call(http::Method::PUT, &path, None, value).await.unwrap();
        }
        let lease = proxyd.lease().await;
        Scene { proxyd, lease, seen, _upstreams: upstreams }
    }

    fn variable(&self, name: &str) -> &str {
        &self.lease.opened.env.iter().find(|(known, _)| known == name).unwrap().1
    }

    fn signed(&self, service: &str) -> String {
        format!(
            "AWS4-HMAC-SHA256 Credential={}/20200101/eu-central-1/{service}/aws4_request, \
             SignedHeaders=host, Signature={}",
            self.variable("AWS_ACCESS_KEY_ID"),
            "0".repeat(64)
        )
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_in_signed_chunks_arrives_signed_again_with_its_length_and_its_bytes() {
    let scene = Scene::start().await;
    let zeros = "0".repeat(64);
    let chunk = |data: &[u8]| {
        let head = format!("{:x};chunk-signature={zeros}\r\n", data.len());
        [head.as_bytes(), data, b"\r\n"].concat()
    };
    let data: Vec<u8> = (0..200_000u32).map(|number| (number % 251) as u8).collect();
    let body = [chunk(&data[..131_072]), chunk(&data[131_072..]), chunk(b"")].concat();
    let head = format!(
        "PUT /box/key HTTP/1.1\r\nHost: aws.test\r\nContent-Length: {}\r\nContent-Encoding: \
         aws-chunked\r\nX-Amz-Content-Sha256: STREAMING-AWS4-HMAC-SHA256-PAYLOAD\r\n\
         X-Amz-Decoded-Content-Length: {}\r\nAuthorization: {}\r\n\r\n",
        body.len(),
        data.len(),
        scene.signed("s3")
    );
    let mut stream = scene.lease.h1("aws.test").await;
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&body).await.unwrap();
    stream.flush().await.unwrap();
    let (answer, _) = timely(response(&mut stream)).await;

    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let (head, arrived) = scene.seen.lock().unwrap().pop().unwrap();
    assert!(field(&head, "authorization").unwrap().contains("=AKIAREAL0000000REAL0/"), "{head}");
    assert_eq!(field(&head, "content-length"), Some(&body.len().to_string()[..]));
    assert_eq!(arrived.len(), body.len());
    // Every byte but the signatures is the one that was sent, and no signature is.
    let marks = |body: &[u8]| -> Vec<usize> {
        let mark = b"chunk-signature=";
        let found = body.windows(mark.len()).enumerate().filter(|(_, window)| *window == mark);
        found.map(|(at, _)| at + mark.len()).collect()
    };
    assert_eq!(marks(&arrived), marks(&body));
    let mut plain = arrived.clone();
    for at in marks(&body) {
        assert_ne!(&arrived[at..at + 64], zeros.as_bytes());
        plain[at..at + 64].copy_from_slice(zeros.as_bytes());
    }
    assert!(plain == body);
    assert!(!scene.proxyd.log().contains("CANARY"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_an_object_can_be_asked_for_since_a_signature_is_no_key() {
    let scene = Scene::start().await;
    let mut stream = scene.lease.h1("aws.test").await;
    let head = format!(
        "GET /box/key HTTP/1.1\r\nHost: aws.test\r\nRange: bytes=8388608-16777215\r\n\
         Authorization: {}\r\n\r\n",
        scene.signed("s3")
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let (answer, _) = timely(response(&mut stream)).await;

    // Clients that fetch in parts write a whole answer in the place of each.
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let (head, _) = scene.seen.lock().unwrap().pop().unwrap();
    assert_eq!(field(&head, "range"), Some("bytes=8388608-16777215"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signature_names_what_arrives_and_nothing_that_proxies_change() {
    let scene = Scene::start().await;
    let mut stream = scene.lease.h1("aws.test").await;
    let head = format!(
        "GET /box/key HTTP/1.1\r\nHost: aws.test\r\nConnection: x-amz-meta-hop\r\n\
         X-Amz-Meta-Hop: 1\r\nX-Amz-Meta-Kept: 1\r\nUser-Agent: agent\r\n\
         X-Amzn-Trace-Id: Root=1\r\nAccept-Encoding: zstd, x-odd\r\n\
         Authorization: {}\r\n\r\n",
        scene.signed("s3")
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let (answer, _) = timely(response(&mut stream)).await;

    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let (head, _) = scene.seen.lock().unwrap().pop().unwrap();
    let (_, rest) = field(&head, "authorization").unwrap().split_once("SignedHeaders=").unwrap();
    let names: Vec<&str> = rest.split(',').next().unwrap().split(';').collect();
    assert_eq!(names, ["host", "x-amz-content-sha256", "x-amz-date", "x-amz-meta-kept"], "{head}");
    assert!(names.iter().all(|name| field(&head, name).is_some()), "{head}");
    assert_eq!(field(&head, "x-amz-meta-hop"), None, "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_held_back_is_asked_for_and_one_that_is_too_long_goes_nowhere() {
    let scene = Scene::start().await;
    let mut stream = scene.lease.h1("aws.test").await;
    let head = |length: usize| {
        format!(
            "POST / HTTP/1.1\r\nHost: aws.test\r\nContent-Length: {length}\r\nExpect: 100-continue\
             \r\nAuthorization: {}\r\n\r\n",
            scene.signed("sts")
        )
    };
    stream.write_all(head(27).as_bytes()).await.unwrap();
    let leave = timely(crate::support::head(&mut stream)).await;
    assert!(leave.starts_with("HTTP/1.1 100 "), "{leave}");
    stream.write_all(b"Action=GetCallerIdentity&V=").await.unwrap();
    let (answer, _) = timely(response(&mut stream)).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let (head_seen, body) = scene.seen.lock().unwrap().pop().unwrap();
    assert_eq!(body, b"Action=GetCallerIdentity&V=");
    assert_eq!(field(&head_seen, "expect"), None);

    let mut stream = scene.lease.h1("aws.test").await;
    stream.write_all(head(11 << 20).as_bytes()).await.unwrap();
    let (answer, _) = timely(response(&mut stream)).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(scene.seen.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_in_a_body_in_chunks_gives_way_to_the_value_and_its_length_is_right() {
    let scene = Scene::start().await;
    let own = scene.variable("BODY_TOKEN");
    let json = format!("{{\"token\":\"{own}\"}}");
    let (one, two) = json.split_at(20);
    let chunked = format!(
        "POST / HTTP/1.1\r\nHost: body.test\r\nContent-Type: application/json\r\n\
         Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{one}\r\n{:x}\r\n{two}\r\n0\r\n\r\n",
        one.len(),
        two.len()
    );
    let mut stream = scene.lease.h1("body.test").await;
    stream.write_all(chunked.as_bytes()).await.unwrap();
    let (answer, _) = timely(response(&mut stream)).await;

    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let (head, body) = scene.seen.lock().unwrap().pop().unwrap();
    assert_eq!(String::from_utf8(body).unwrap(), "{\"token\":\"SECRET-CANARY-body\"}");
    assert_eq!(field(&head, "transfer-encoding"), None);

    // Without a placeholder a body arrives as it was sent, with the length that it had.
    let plain = "POST / HTTP/1.1\r\nHost: body.test\r\nContent-Length: 3\r\n\r\nabc";
    stream.write_all(plain.as_bytes()).await.unwrap();
    let (answer, _) = timely(response(&mut stream)).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let (head, body) = scene.seen.lock().unwrap().pop().unwrap();
    assert_eq!((&body[..], field(&head, "content-length")), (&b"abc"[..], Some("3")));

    // Cut short on the way, nothing arrives.
    let mut stream = scene.lease.h1("body.test").await;
    stream
        .write_all(b"POST / HTTP/1.1\r\nHost: body.test\r\nContent-Length: 9\r\n\r\nabc")
        .await
        .unwrap();
    stream.shutdown().await.unwrap();
    let mut rest = Vec::new();
    let _ = timely(stream.read_to_end(&mut rest)).await;
    assert!(scene.seen.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_held_back_at_once_have_a_bound_and_what_ends_makes_room_for_others() {
    const MIB: usize = 1 << 20;
    let scene = Scene::start().await;
    let to = |host: &str, field: &str| {
        let kind = "Content-Type: text/plain\r\nExpect: 100-continue";
        let signed = match host {
            "aws.test" => format!("\r\nAuthorization: {}", scene.signed("sts")),
            _ => String::new(),
        };
        format!("POST / HTTP/1.1\r\nHost: {host}\r\n{kind}\r\n{field}{signed}\r\n\r\n")
    };
    let announced = format!("Content-Length: {}", 10 * MIB);
    let in_chunks = "Transfer-Encoding: chunked".to_owned();
    let mut held = Vec::new();
    for host in ["body.test", "aws.test", "body.test"] {
        let mut stream = scene.lease.h1(host).await;
        stream.write_all(to(host, &announced).as_bytes()).await.unwrap();
        let leave = timely(crate::support::head(&mut stream)).await;
        assert!(leave.starts_with("HTTP/1.1 100 "), "{leave}");
        held.push(stream);
    }

    // 2 MiB are left: no body may be held back that is longer, whether it says so or not.
    for host in ["body.test", "aws.test"] {
        let mut stream = scene.lease.h1(host).await;
        stream.write_all(to(host, &announced).as_bytes()).await.unwrap();
        let (answer, _) = timely(response(&mut stream)).await;
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert_eq!(field(&answer, "retry-after"), Some("1"));
        assert_eq!(field(&answer, "x-cleanhands-failure"), Some("bodies_busy"));
    }
    let chunk = [b"300000\r\n".to_vec(), vec![b'a'; 3 * MIB], b"\r\n0\r\n\r\n".to_vec()].concat();
    let answer = in_pieces(&scene.lease, &to("body.test", &in_chunks), &chunk).await;
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    let busy = |record: &ipc::vault::AuditRecord| {
        record.reason.as_deref().is_some_and(|reason| reason.starts_with("bodies_busy: "))
    };
    for host in ["body.test", "aws.test"] {
        scene.proxyd.record(|record| busy(record) && record.host.as_deref() == Some(host)).await;
    }
    assert!(scene.seen.lock().unwrap().is_empty());

    // Another lease has its own share; and what broke off is given back.
    let other = scene.proxyd.lease().await;
    let answer = in_pieces(&other, &to("body.test", &in_chunks), &chunk).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    drop(held);
    until("there is room again", || async {
        let answer = in_pieces(&scene.lease, &to("body.test", &in_chunks), &chunk).await;
        answer.starts_with("HTTP/1.1 200 ")
    })
    .await;
    let (_, body) = scene.seen.lock().unwrap().pop().unwrap();
    assert_eq!(body.len(), 3 * MIB);
}

/// Sends a body after leave was given, as far as it is taken; gives the head of the answer.
async fn in_pieces(lease: &Lease, head: &str, body: &[u8]) -> String {
    let mut stream = lease.h1("body.test").await;
    stream.write_all(head.as_bytes()).await.unwrap();
    let leave = timely(crate::support::head(&mut stream)).await;
    assert!(leave.starts_with("HTTP/1.1 100 "), "{leave}");
    let (mut reader, mut writer) = tokio::io::split(stream);
    // Whoever refuses reads no further. TLS may keep the last bytes until it is told to flush.
    let sending = async {
        if writer.write_all(body).await.is_ok() {
            drop(writer.flush().await);
        }
    };
    let (answer, ()) = timely(async { tokio::join!(response(&mut reader), sending) }).await;
    answer.0
}
