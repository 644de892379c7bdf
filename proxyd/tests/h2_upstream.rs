//! What the relay makes of an upstream's HTTP/2: shared connections, limits, refusals, resets.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::*;
use bytes::Bytes;
use h2::Reason;
use h2::client::SendRequest;
use h2::server::SendResponse;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Barrier;
use tokio_rustls::server::TlsStream;

const H2: &[&[u8]] = &[b"h2"];

type Conn = TlsStream<TcpStream>;
type Asked = http::Request<h2::RecvStream>;

/// An HTTP/2 upstream for `api.test` that allows so many streams, and proxyd before it.
async fn before<F, S>(streams: u32, serve: S) -> (Proxyd, Upstream)
where
    S: Fn(Asked, SendResponse<Bytes>) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let serve = Arc::new(serve);
    let upstream =
        Upstream::tls("api.test", H2, move |stream| serve_h2(stream, streams, Arc::clone(&serve)));
    let upstream = upstream.await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    (proxyd, upstream)
}

async fn serve_h2<F, S>(stream: Conn, streams: u32, serve: Arc<S>)
where
    S: Fn(Asked, SendResponse<Bytes>) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(streams);
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    while let Some(Ok((request, respond))) = connection.accept().await {
        tokio::spawn(serve(request, respond));
    }
}

fn fine() -> http::Response<()> {
    http::Response::new(())
}

fn get(path: &str) -> http::Request<()> {
    http::Request::get(format!("https://api.test{path}")).body(()).unwrap()
}

fn post(path: &str) -> http::request::Builder {
    http::Request::post(format!("https://api.test{path}"))
}

/// Sends requests without bodies at the same time; gives the statuses.
async fn all(sender: &SendRequest<Bytes>, count: usize) -> Vec<u16> {
    let mut running = tokio::task::JoinSet::new();
    for number in 0..count {
        let mut sender = sender.clone();
        running.spawn(async move {
            let (response, _) = sender.send_request(get(&format!("/{number}")), true).unwrap();
            response.await.unwrap().status().as_u16()
        });
    }
    timely(running.join_all()).await
}

#[tokio::test]
async fn a_burst_to_a_new_host_opens_one_connection() {
    let (proxyd, upstream) = before(200, |_, mut respond| async move {
        respond.send_response(fine(), true).unwrap();
    })
    .await;
    let lease = proxyd.lease().await;
    let sender = lease.h2("api.test").await;

    let statuses = all(&sender, 40).await;

    assert_eq!(statuses, [200; 40]);
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn a_burst_to_a_host_that_does_not_answer_fails_once_for_all() {
    let upstream = Upstream::tcp(|stream| async move { drop(stream) }).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let sender = lease.h2("api.test").await;

    let statuses = all(&sender, 40).await;

    assert_eq!(statuses, [502; 40]);
    // Requests that came after one attempt had failed make another.
    assert!(upstream.connections() < 40, "{} attempts", upstream.connections());
}

#[tokio::test]
async fn streams_beyond_what_an_upstream_allows_go_over_another_connection() {
    let together = Arc::new(Barrier::new(6));
    let (proxyd, upstream) = before(2, move |_, mut respond| {
        let together = Arc::clone(&together);
        async move {
            // Nobody is answered before six are there, and a connection takes two.
            together.wait().await;
            respond.send_response(fine(), true).unwrap();
        }
    })
    .await;
    let lease = proxyd.lease().await;
    let sender = lease.h2("api.test").await;

    let statuses = all(&sender, 6).await;

    assert_eq!(statuses, [200; 6]);
    assert!(upstream.connections() >= 3);
}

#[tokio::test]
async fn requests_queue_where_an_upstream_allows_few_streams_on_few_connections() {
    let (proxyd, upstream) = before(1, |_, mut respond| async move {
        respond.send_response(fine(), true).unwrap();
    })
    .await;
    let lease = proxyd.lease().await;
    let sender = lease.h2("api.test").await;

    let statuses = all(&sender, 60).await;

    assert_eq!(statuses, [200; 60]);
    assert!(upstream.connections() <= 8, "{} connections", upstream.connections());
}

/// Refuses the first stream that comes, answers all others.
async fn refusing(seen: Arc<AtomicUsize>) -> (Proxyd, Upstream) {
    before(100, move |_, mut respond| {
        let first = seen.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            if first {
                respond.send_reset(Reason::REFUSED_STREAM);
            } else {
                respond.send_response(fine(), true).unwrap();
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_refused_stream_is_sent_again_whatever_its_method() {
    let seen = Arc::new(AtomicUsize::new(0));
    let (proxyd, upstream) = refusing(Arc::clone(&seen)).await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let (response, _) = sender.send_request(post("/").body(()).unwrap(), true).unwrap();
    let response = timely(response).await.unwrap();

    assert_eq!(response.status(), 200);
    assert_eq!(seen.load(Ordering::SeqCst), 2);
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn a_refused_stream_whose_body_is_on_its_way_is_refused_in_turn_for_the_client_to_repeat() {
    let seen = Arc::new(AtomicUsize::new(0));
    let (proxyd, _upstream) = refusing(Arc::clone(&seen)).await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let (response, mut body) = sender.send_request(post("/").body(()).unwrap(), false).unwrap();
    body.send_data(Bytes::from_static(b"first part"), false).unwrap();
    let error = timely(response).await.unwrap_err();

    assert_eq!(error.reason(), Some(Reason::REFUSED_STREAM));
    assert!(error.is_remote());
    assert_eq!(seen.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_upstream_that_always_refuses_is_not_asked_for_ever() {
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    let (proxyd, _upstream) = before(100, move |_, mut respond| {
        counter.fetch_add(1, Ordering::SeqCst);
        async move { respond.send_reset(Reason::REFUSED_STREAM) }
    })
    .await;
    let lease = proxyd.lease().await;

    let mut h1 = lease.h1("api.test").await;
    let answer =
        talk(&mut h1, b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n").await;
    let asked = seen.load(Ordering::SeqCst);

    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    assert!((2..=4).contains(&asked), "asked {asked} times");
}

/// Speaks HTTP/2 by hand: takes one request, says that it went away before it, ends.
async fn go_away_before_the_request(mut stream: Conn) {
    let mut preface = [0u8; 24];
    if stream.read_exact(&mut preface).await.is_err() {
        return;
    }
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
    stream.flush().await.unwrap();
    loop {
        let mut head = [0u8; 9];
        stream.read_exact(&mut head).await.unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        if head[3] == 1 {
            break;
        }
    }
    // GOAWAY: last stream 0, no error.
    stream.write_all(&[0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).await.unwrap();
    stream.flush().await.unwrap();
    let _ = stream.read_to_end(&mut Vec::new()).await;
}

#[tokio::test]
async fn a_request_that_an_upstream_went_away_before_is_sent_on_another_connection() {
    let connections = Arc::new(AtomicUsize::new(0));
    let upstream = Upstream::tls("api.test", H2, move |stream| {
        let first = connections.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            if first {
                go_away_before_the_request(stream).await;
            } else {
                echo_h2(stream).await;
            }
        }
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let (response, _) = sender.send_request(post("/").body(()).unwrap(), true).unwrap();

    assert_eq!(timely(response).await.unwrap().status(), 200);
    assert_eq!(upstream.connections(), 2);
}

#[tokio::test]
async fn a_request_that_an_upstream_wants_over_http_1_1_is_sent_so() {
    let upstream = Upstream::tls("api.test", &[b"h2", b"http/1.1"], |stream| async move {
        if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
            let refuse = |_, mut respond: SendResponse<Bytes>| async move {
                respond.send_reset(Reason::HTTP_1_1_REQUIRED);
            };
            serve_h2(stream, 100, Arc::new(refuse)).await;
        } else {
            echo_h1(stream).await;
        }
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let (response, _) = sender.send_request(post("/x").body(()).unwrap(), true).unwrap();
    let (body, _) = timely(async { h2_body(response.await.unwrap().into_body()).await }).await;

    assert!(body.starts_with(b"POST /x HTTP/1.1\r\n"));
}

#[tokio::test]
async fn the_code_of_a_reset_reaches_a_grpc_client_and_words_reach_others() {
    let (proxyd, _upstream) = before(100, |_, mut respond| async move {
        respond.send_reset(Reason::ENHANCE_YOUR_CALM);
    })
    .await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let grpc = post("/svc/Method").header("content-type", "application/grpc").body(()).unwrap();
    let (response, _) = sender.send_request(grpc, true).unwrap();
    let error = timely(response).await.unwrap_err();
    let (response, _) = sender.send_request(get("/"), true).unwrap();
    let other = timely(response).await.unwrap();

    assert_eq!(error.reason(), Some(Reason::ENHANCE_YOUR_CALM));
    assert_eq!(other.status(), 502);
}

#[tokio::test]
async fn a_stream_that_its_client_gives_up_ends_at_the_upstream_and_no_other_does() {
    let (given_up, mut gone) = tokio::sync::mpsc::unbounded_channel();
    let (proxyd, upstream) = before(100, move |request, mut respond| {
        let given_up = given_up.clone();
        async move {
            let path = request.uri().path().to_owned();
            if path == "/kept" {
                respond.send_response(fine(), true).unwrap();
                return;
            }
            let mut stream = respond.send_response(fine(), false).unwrap();
            stream.send_data(Bytes::from_static(b"begun."), false).unwrap();
            let reason = poll_fn(|context| stream.poll_reset(context)).await.unwrap();
            given_up.send((path, reason)).unwrap();
        }
    })
    .await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let (response, _) = sender.send_request(get("/left"), true).unwrap();
    let mut body = timely(response).await.unwrap().into_body();
    assert_eq!(timely(body.data()).await.unwrap().unwrap(), "begun.");
    drop(body);
    let gone = timely(gone.recv()).await.unwrap();
    let after = all(&sender, 1).await;

    assert_eq!(gone, ("/left".to_owned(), Reason::CANCEL));
    assert_eq!(after.len(), 1);
    assert_eq!(upstream.connections(), 1);
    let record = proxyd.record(|r| r.reason.as_deref().is_some_and(|x| x.contains("client_gone")));
    assert_eq!(record.await.path.as_deref(), Some("/left"));
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_the_upstream_from_sending() {
    const WHOLE: usize = 256 << 20;
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    let (proxyd, _upstream) = before(100, move |request, mut respond| {
        let sent = Arc::clone(&counter);
        async move {
            let large = request.uri().path() == "/large";
            let mut stream = respond.send_response(fine(), !large).unwrap();
            while large && sent.load(Ordering::SeqCst) < WHOLE {
                h2_send(&mut stream, Bytes::from(vec![b'x'; 64 * 1024])).await;
                sent.fetch_add(64 * 1024, Ordering::SeqCst);
            }
        }
    })
    .await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;
    let (response, _) = sender.send_request(get("/large"), true).unwrap();
    let body = timely(response).await.unwrap().into_body();

    // Other streams go on meanwhile, for long enough to fill any buffer without a bound.
    for _ in 0..40 {
        assert_eq!(all(&sender, 4).await, [200; 4]);
    }

    let held = sent.load(Ordering::SeqCst);
    assert!(held < 32 << 20, "{held} bytes were taken from the upstream for nobody");
    drop(body);
}
