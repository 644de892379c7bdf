//! What the relay does to HTTP: nothing but what it must, in any combination of protocols.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::server::TlsStream;

const H1: &[&[u8]] = &[b"http/1.1"];

type Conn = TlsStream<TcpStream>;

/// proxyd in front of an HTTP/1.1 upstream for `api.test` (injected and scrubbed).
async fn before<F, S>(serve: S) -> (Proxyd, Upstream)
where
    S: Fn(Conn) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let upstream = Upstream::tls("api.test", H1, serve).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    (proxyd, upstream)
}

async fn say(stream: &mut Conn, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
}

#[tokio::test]
async fn requests_that_two_parsers_could_read_in_two_ways_are_refused_and_the_connection_closed() {
    let (proxyd, upstream) = before(echo_h1).await;
    let lease = proxyd.lease().await;
    let post = |fields: &str, body: &str| {
        format!("POST / HTTP/1.1\r\nHost: api.test\r\n{fields}\r\n{body}")
    };
    let smuggled = "0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: api.test\r\n\r\n";
    let table = [
        post("Content-Length: 5\r\nContent-Length: 6\r\n", "hello!"),
        post("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", smuggled),
        post("Transfer-Encoding: chunked,\r\n", smuggled),
        post("Transfer-Encoding:\tchunked\r\n", smuggled),
        post("Transfer-Encoding: chunked, gzip\r\n", smuggled),
        post("Transfer-Encoding: xchunked\r\n", smuggled),
        post("Transfer-Encoding : chunked\r\n", smuggled),
        post("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", smuggled),
        post("Content-Length: +5\r\n", "hello"),
        post("Content-Length: 5, 5\r\n", "hello"),
        post("X: y\r\n z\r\n", ""),
        post("X: y\n", ""),
        post("X: \0\r\n", ""),
        post("Host: api.test\r\n", ""),
        post("Connection: Host\r\n", ""),
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        "GET  / HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: api.test\r\nX: \r\r\n\r\n".to_owned(),
    ];
    for request in table {
        let mut stream = lease.h1("api.test").await;
        let answer = talk(&mut stream, request.as_bytes()).await;

        assert!(answer.starts_with("HTTP/1.1 400 "), "{request:?} got {answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{request:?} got {answer}");
    }
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn broken_chunks_end_the_request_and_do_not_become_the_next() {
    let (arrived, mut arrivals) = mpsc::unbounded_channel();
    let (proxyd, _upstream) = before(move |mut stream| {
        let arrived = arrived.clone();
        async move {
            let mut all = Vec::new();
            let _ = stream.read_to_end(&mut all).await;
            arrived.send(String::from_utf8_lossy(&all).into_owned()).unwrap();
        }
    })
    .await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    let request = "POST / HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n\
                   3\r\nabcGET /smuggled HTTP/1.1\r\nHost: api.test\r\n\r\n";
    let answer = talk(&mut stream, request.as_bytes()).await;
    let arrived = timely(arrivals.recv()).await.unwrap();

    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
    assert!(arrived.starts_with("POST / HTTP/1.1\r\n"), "{arrived}");
    assert!(!arrived.contains("smuggled"), "{arrived}");
}

#[tokio::test]
async fn target_order_and_spelling_arrive_as_sent() {
    let (proxyd, _upstream) = before(echo_h1).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    let targets = ["/a%2fb?x=%20+;&&k=", "/?", "/a;b=c?d", "//double", "/%7e?%7E", "/?a=b?c=d"];

    for target in targets {
        let request = format!(
            "GET {target} HTTP/1.1\r\nhOST: api.test\r\nX-B: 1\r\nx-a: 2\r\nX-B:  3  \r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let (head, body) = timely(response(&mut stream)).await;
        let body = String::from_utf8(body).unwrap();

        let expected =
            format!("GET {target} HTTP/1.1\r\nhOST: api.test\r\nX-B: 1\r\nx-a: 2\r\nX-B: 3\r\n");
        assert!(body.starts_with(&expected), "{head}{body}");
        assert!(head.starts_with("HTTP/1.1 200 Fine\r\n") || head.starts_with("HTTP/1.1 200 OK"));
    }
}

#[tokio::test]
async fn interim_answers_pass_and_are_not_taken_for_the_answer() {
    let (proxyd, _upstream) = before(|mut stream| async move {
        while request(&mut stream).await.is_some() {
            say(&mut stream, "HTTP/1.1 103 Early Hints\r\nLink: </s>\r\n\r\n").await;
            say(&mut stream, "HTTP/1.1 100 Continue\r\n\r\n").await;
            say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
        }
    })
    .await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    for _ in 0..2 {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
        let hints = timely(head(&mut stream)).await;
        let go_on = timely(head(&mut stream)).await;
        let (last, body) = timely(response(&mut stream)).await;

        assert!(hints.starts_with("HTTP/1.1 103 Early Hints\r\nLink: </s>"), "{hints}");
        assert!(go_on.starts_with("HTTP/1.1 100 "), "{go_on}");
        assert!(last.starts_with("HTTP/1.1 200 "), "{last}");
        assert_eq!(body, b"ok");
    }
}

#[tokio::test]
async fn interim_answers_without_end_do_not_pile_up_for_a_client_over_http2() {
    const SENT: usize = 500;
    let (proxyd, _upstream) = before(|mut stream| async move {
        let _ = request(&mut stream).await;
        let hints = format!("HTTP/1.1 103 Early Hints\r\nLink: </{}>\r\n\r\n", "s".repeat(1000));
        for _ in 0..SENT {
            say(&mut stream, &hints).await;
        }
        say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    })
    .await;
    let lease = proxyd.lease().await;
    let mut h2 = lease.h2("api.test").await;
    let get = http::Request::get("https://api.test/").body(()).unwrap();

    let (mut response, _) = h2.send_request(get, true).unwrap();
    let mut interim = 0;
    while let Some(hints) =
        timely(std::future::poll_fn(|context| response.poll_informational(context))).await
    {
        assert_eq!(hints.unwrap().status(), 103);
        interim += 1;
    }
    let last = timely(response).await.unwrap();

    assert_eq!(last.status(), 200);
    assert!((1..20).contains(&interim), "{interim} of {SENT}");
}

#[tokio::test]
async fn an_expectation_is_passed_on_and_an_early_answer_comes_through() {
    let (proxyd, _upstream) = before(|mut stream| async move {
        let head = head(&mut stream).await;
        assert_eq!(field(&head, "expect"), Some("100-continue"));
        if head.starts_with("PUT /no ") {
            say(&mut stream, "HTTP/1.1 401 No\r\nContent-Length: 2\r\n\r\nno").await;
            return;
        }
        say(&mut stream, "HTTP/1.1 100 Continue\r\n\r\n").await;
        let mut body = [0u8; 5];
        stream.read_exact(&mut body).await.unwrap();
        say(&mut stream, "HTTP/1.1 201 Made\r\nContent-Length: 0\r\n\r\n").await;
    })
    .await;
    let lease = proxyd.lease().await;
    let put = |path: &str| {
        format!(
            "PUT {path} HTTP/1.1\r\nHost: api.test\r\nContent-Length: 5\r\n\
             Expect: 100-continue\r\n\r\n"
        )
    };

    let mut yes = lease.h1("api.test").await;
    yes.write_all(put("/yes").as_bytes()).await.unwrap();
    let go_on = timely(head(&mut yes)).await;
    yes.write_all(b"hello").await.unwrap();
    let (made, _) = timely(response(&mut yes)).await;
    let mut no = lease.h1("api.test").await;
    let refused = talk(&mut no, put("/no").as_bytes()).await;

    assert!(go_on.starts_with("HTTP/1.1 100 "), "{go_on}");
    assert!(made.starts_with("HTTP/1.1 201 "), "{made}");
    assert!(refused.starts_with("HTTP/1.1 401 ") && refused.ends_with("no"), "{refused}");
}

#[tokio::test]
async fn chunks_go_on_as_they_come_with_their_trailers_both_ways() {
    let (proxyd, _upstream) = before(|mut stream| async move {
        let head = head(&mut stream).await;
        assert_eq!(field(&head, "transfer-encoding"), Some("chunked"));
        // Answers the first chunk before the second is sent: nobody may hold it back.
        let mut first = [0u8; 8];
        stream.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"3\r\nabc\r\n");
        say(&mut stream, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nxy\r\n").await;
        let mut rest = [0u8; 25];
        stream.read_exact(&mut rest).await.unwrap();
        assert_eq!(&rest[..], b"2\r\nde\r\n0\r\nX-Sum: five\r\n\r\n".as_slice());
        say(&mut stream, "0\r\nX-End: yes\r\n\r\n").await;
    })
    .await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    let request = "POST / HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\
                   Trailer: X-Sum\r\n\r\n3\r\nabc\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let answered = timely(head(&mut stream)).await;
    let mut first = [0u8; 7];
    timely(stream.read_exact(&mut first)).await.unwrap();
    stream.write_all(b"2\r\nde\r\n0\r\nX-Sum: five\r\n\r\n").await.unwrap();
    let mut rest = [0u8; 17];
    timely(stream.read_exact(&mut rest)).await.unwrap();

    assert!(answered.starts_with("HTTP/1.1 200 "), "{answered}");
    assert_eq!(&first, b"2\r\nxy\r\n");
    assert_eq!(&rest, b"0\r\nX-End: yes\r\n\r\n".as_slice());
}

#[tokio::test]
async fn an_upgraded_connection_carries_bytes_both_ways_and_is_searched() {
    let (proxyd, _upstream) = before(|mut stream| async move {
        let head = head(&mut stream).await;
        assert_eq!(field(&head, "upgrade"), Some("websocket"));
        assert_eq!(field(&head, "sec-websocket-extensions"), None);
        let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                      Upgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n";
        let early = [switch.as_bytes(), b"\x81\x06early:"].concat();
        stream.write_all(&early).await.unwrap();
        stream.flush().await.unwrap();
        let mut frame = [0u8; 11];
        stream.read_exact(&mut frame).await.unwrap();
        stream.write_all(&frame).await.unwrap();
        let length = u8::try_from(CANARY.len()).unwrap();
        let value = [&[0x81, length], CANARY.as_bytes()].concat();
        stream.write_all(&value).await.unwrap();
        stream.shutdown().await.unwrap();
    })
    .await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    let request = "GET /ws HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade\r\n\
                   Upgrade: websocket\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n";
    // One text frame under a mask of zeros, in the same write as the head.
    let request = [request.as_bytes(), b"\x81\x85\0\0\0\0frame"].concat();
    let answer = talk(&mut stream, &request).await;

    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    assert!(answer.contains("early:") && answer.contains("frame"), "{answer}");
    assert!(answer.ends_with(&"*".repeat(CANARY.len())), "{answer}");
}

#[tokio::test]
async fn an_ambiguous_or_broken_answer_is_the_upstreams_failure() {
    let (proxyd, _upstream) = before(|mut stream| async move {
        let Some((head, _)) = request(&mut stream).await else { return };
        let path = head.split(' ').nth(1).unwrap();
        let answer = match path {
            "/both" => "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            "/two" => "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
            "/lf" => "HTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
            "/switch" => "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
            _ => "",
        };
        say(&mut stream, answer).await;
        let _ = stream.shutdown().await;
    })
    .await;
    let lease = proxyd.lease().await;

    for path in ["/both", "/two", "/lf", "/switch", "/nothing"] {
        let mut stream = lease.h1("api.test").await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: api.test\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let (head, _) = timely(response(&mut stream)).await;

        assert!(head.starts_with("HTTP/1.1 502 "), "{path}: {head}");
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_does_not_look_whole() {
    let (proxyd, _upstream) = before(|mut stream| async move {
        let _ = request(&mut stream).await;
        say(&mut stream, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n").await;
    })
    .await;
    let lease = proxyd.lease().await;
    let mut h1 = lease.h1("api.test").await;
    let mut h2 = lease.h2("api.test").await;

    let request = b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n";
    let over_h1 = talk(&mut h1, request).await;
    let get = http::Request::get("https://api.test/").body(()).unwrap();
    let (response, _) = h2.send_request(get, true).unwrap();
    let mut body = timely(response).await.unwrap().into_body();
    let end = loop {
        match timely(body.data()).await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break Err(error),
            None => break Ok(()),
        }
    };

    assert!(over_h1.contains("abc") && !over_h1.ends_with("0\r\n\r\n"), "{over_h1}");
    assert!(end.as_ref().is_err_and(h2::Error::is_reset), "{end:?}");
}

#[tokio::test]
async fn a_kept_connection_that_closed_costs_no_get_and_repeats_no_post() {
    let posts = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&posts);
    let (proxyd, upstream) = before(move |mut stream| {
        let posts = Arc::clone(&counter);
        async move {
            // Takes two requests; answers the first, hangs up on the second.
            let count = |asked: &Option<(String, Vec<u8>)>| {
                if asked.as_ref().is_some_and(|(head, _)| head.starts_with("POST")) {
                    posts.fetch_add(1, Ordering::SeqCst);
                }
            };
            count(&request(&mut stream).await);
            say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
            count(&request(&mut stream).await);
        }
    })
    .await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    let deadline = Instant::now() + Duration::from_secs(60);

    // A connection that was kept for more than a second is not used for a request that must not
    // be repeated: on a slow machine the POST may go on a new one, which answers it.
    for round in 1.. {
        let mut statuses = Vec::new();
        for request in ["GET /1", "GET /2", "POST /3"] {
            let length = if request.starts_with("POST") { "Content-Length: 1\r\n" } else { "" };
            let body = if request.starts_with("POST") { "x" } else { "" };
            let text = format!("{request} HTTP/1.1\r\nHost: api.test\r\n{length}\r\n{body}");
            stream.write_all(text.as_bytes()).await.unwrap();
            statuses.push(timely(response(&mut stream)).await.0[9..12].to_owned());
        }

        assert_eq!(statuses[..2], ["200", "200"]);
        assert_eq!(posts.load(Ordering::SeqCst), round, "each POST is seen once");
        if statuses[2] == "502" {
            break;
        }
        assert_eq!(statuses[2], "200");
        assert!(Instant::now() < deadline, "no POST met a connection that closes");
    }
    assert!(upstream.connections() >= 2);
}

#[tokio::test]
async fn http_1_0_and_head_get_what_they_can_read() {
    let (proxyd, _upstream) = before(|mut stream| async move {
        while let Some((head, _)) = request(&mut stream).await {
            let answer = if head.starts_with("HEAD") {
                "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
            } else {
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nok.\r\n0\r\n\r\n"
            };
            say(&mut stream, answer).await;
        }
    })
    .await;
    let lease = proxyd.lease().await;

    let mut old = lease.h1("api.test").await;
    let old = talk(&mut old, b"GET / HTTP/1.0\r\nHost: api.test\r\n\r\n").await;
    let mut stream = lease.h1("api.test").await;
    stream.write_all(b"HEAD / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let bodiless = timely(head(&mut stream)).await;
    let next = b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n";
    let next = talk(&mut stream, next).await;

    assert!(old.ends_with("\r\n\r\nok.") && !old.to_lowercase().contains("chunked"), "{old}");
    assert_eq!(field(&bodiless, "content-length"), Some("1000"));
    assert!(next.contains("3\r\nok.\r\n0\r\n\r\n"), "{next}");
}
