//! Whoever goes away: a client that closes ends its request, one that only stops talking gets its
//! answer, and what was cut does not end as if it were whole.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use crate::support::*;
use ipc::lease::{Descriptor, Holder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};

const H1: &[&[u8]] = &[b"http/1.1"];
const PLAIN: &str = r#"
[[egress.allow]]
hosts = ["plain.test"]
plaintext = true
methods = ["GET"]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["raw.test"]
ports = [9000]
addresses = ["127.0.0.1/32"]
"#;

/// A lease's own proxy on TCP.
struct Proxy {
    address: SocketAddr,
    lease: Lease,
}

impl Proxy {
    async fn open(proxyd: &Proxyd) -> Self {
        let tcp = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = tcp.local_addr().unwrap();
        let open = wanted(Holder::Explicit, vec![Descriptor::Proxy]);
        Self { address, lease: proxyd.opened(open, &[tcp.into()]).await.unwrap() }
    }

    /// A head that ends with the token.
    fn head(&self, request: &str) -> String {
        format!("{request}\r\nProxy-Authorization: Bearer {}\r\n\r\n", self.lease.token())
    }

    async fn ask(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(self.head(request).as_bytes()).await.unwrap();
        stream
    }

    /// A tunnel of which the first five bytes have come.
    async fn tunnel(&self) -> TcpStream {
        let mut stream = self.ask("CONNECT raw.test:9000 HTTP/1.1\r\nHost: raw.test:9000").await;
        let head = timely(head(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let mut begun = [0; 5];
        timely(stream.read_exact(&mut begun)).await.unwrap();
        stream
    }
}

async fn end(stream: &mut TcpStream) -> Result<usize, ErrorKind> {
    timely(stream.read_to_end(&mut Vec::new())).await.map_err(|error| error.kind())
}

/// Ends a connection in a reset.
fn cut(stream: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&stream, Some(std::time::Duration::ZERO)).unwrap();
}

#[tokio::test]
async fn a_client_that_closes_ends_its_request_to_an_upstream_that_is_silent() {
    let (asked, mut asks) = mpsc::unbounded_channel();
    let (ended, mut ends) = mpsc::unbounded_channel();
    let upstream = Upstream::tls("api.test", H1, move |mut stream| {
        let (asked, ended) = (asked.clone(), ended.clone());
        async move {
            let Some((head, _)) = request(&mut stream).await else { return };
            if head.contains("/begun") {
                let begun = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n";
                stream.write_all(begun.as_bytes()).await.unwrap();
            }
            asked.send(()).unwrap();
            let _ = stream.read_to_end(&mut Vec::new()).await;
            ended.send(()).unwrap();
        }
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;

    for request in [
        "GET /silent HTTP/1.1\r\nHost: api.test\r\n\r\n",
        "GET /begun HTTP/1.1\r\nHost: api.test\r\n\r\n",
        "POST /silent HTTP/1.1\r\nHost: api.test\r\nContent-Length: 3\r\n\r\nabc",
        "GET /silent HTTP/1.1\r\nHost: api.test\r\n\r\nGET /next HTTP/1.1\r\n",
    ] {
        for says_goodbye in [true, false] {
            let mut stream = lease.h1("api.test").await;
            stream.write_all(request.as_bytes()).await.unwrap();
            timely(asks.recv()).await.unwrap();
            if says_goodbye {
                stream.shutdown().await.unwrap();
            }
            drop(stream);

            timely(ends.recv()).await.unwrap();
        }
    }
    let gone = |reason: &str| reason.starts_with("client_gone");
    until("all are recorded", || async {
        let records = proxyd.audit().await;
        records.iter().filter(|r| r.reason.as_deref().is_some_and(gone)).count() == 8
    })
    .await;
}

#[tokio::test]
async fn a_client_without_tls_that_only_stops_talking_gets_its_answers() {
    let shut = Arc::new(Notify::new());
    let waits = Arc::clone(&shut);
    let upstream = Upstream::tcp(move |mut stream| {
        let waits = Arc::clone(&waits);
        async move {
            while let Some((head, _)) = request(&mut stream).await {
                if head.starts_with("GET /first ") {
                    waits.notified().await;
                }
                let path = head.split(' ').nth(1).unwrap();
                let length = path.len();
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{path}");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        }
    })
    .await;
    let proxyd = Proxyd::start(PLAIN, &[("plain.test", &upstream)]).await;
    let proxy = Proxy::open(&proxyd).await;
    let get = |path: &str| format!("GET http://plain.test{path} HTTP/1.1\r\nHost: plain.test");

    let mut stream = proxy.ask(&get("/first")).await;
    until("the request is under way", || async { upstream.connections() == 1 }).await;
    stream.write_all(proxy.head(&get("/second")).as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    shut.notify_one();
    let (_, first) = timely(response(&mut stream)).await;
    let (_, second) = timely(response(&mut stream)).await;

    assert_eq!((&first[..], &second[..]), (&b"/first"[..], &b"/second"[..]));
    assert_eq!(end(&mut stream).await, Ok(0));
}

#[tokio::test]
async fn a_tunnel_that_is_cut_is_reset_at_the_client_of_a_leases_proxy() {
    let cutting = Arc::new(Notify::new());
    let wait = Arc::clone(&cutting);
    let upstream = Upstream::tcp(move |mut stream| {
        let wait = Arc::clone(&wait);
        async move {
            stream.write_all(b"begun").await.unwrap();
            tokio::select! {
                () = wait.notified() => cut(stream),
                _ = stream.read_u8() => {}
            }
        }
    })
    .await;
    let proxyd = Proxyd::start(PLAIN, &[("raw.test", &upstream)]).await;
    let proxy = Proxy::open(&proxyd).await;

    let mut by_upstream = proxy.tunnel().await;
    cutting.notify_one();
    assert_eq!(end(&mut by_upstream).await, Err(ErrorKind::ConnectionReset));

    let mut by_lease = proxy.tunnel().await;
    drop(proxy);
    assert_eq!(end(&mut by_lease).await, Err(ErrorKind::ConnectionReset), "the lease has ended");

    let proxy = Proxy::open(&proxyd).await;
    let mut by_policy = proxy.tunnel().await;
    proxyd.write_policy(&PLAIN.replace("raw.test", "other.test"));
    assert_eq!(end(&mut by_policy).await, Err(ErrorKind::ConnectionReset), "the policy changed");
}

#[tokio::test]
async fn a_tunnel_that_ended_in_order_is_not_reset() {
    let upstream = Upstream::tcp(|mut stream| async move {
        stream.write_all(b"begun").await.unwrap();
        stream.write_all(&vec![7; 1 << 20]).await.unwrap();
    })
    .await;
    let proxyd = Proxyd::start(PLAIN, &[("raw.test", &upstream)]).await;
    let proxy = Proxy::open(&proxyd).await;

    let mut stream = proxy.tunnel().await;
    stream.shutdown().await.unwrap();

    assert_eq!(end(&mut stream).await, Ok(1 << 20));
}

#[tokio::test]
async fn an_answer_that_is_cut_is_reset_where_only_the_end_of_the_connection_would_end_it() {
    let cutting = Arc::new(Notify::new());
    let wait = Arc::clone(&cutting);
    let upstream = Upstream::tcp(move |mut stream| {
        let wait = Arc::clone(&wait);
        async move {
            let Some((head, _)) = request(&mut stream).await else { return };
            let begun = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n";
            stream.write_all(begun.as_bytes()).await.unwrap();
            if head.starts_with("GET /whole ") {
                stream.write_all(b"0\r\n\r\n").await.unwrap();
            } else {
                wait.notified().await;
                cut(stream);
            }
        }
    })
    .await;
    let proxyd = Proxyd::start(PLAIN, &[("plain.test", &upstream)]).await;
    let proxy = Proxy::open(&proxyd).await;

    for (path, outcome) in [("/cut", Err(ErrorKind::ConnectionReset)), ("/whole", Ok(0))] {
        let get = format!("GET http://plain.test{path} HTTP/1.0\r\nHost: plain.test");
        let mut stream = proxy.ask(&get).await;
        let head = timely(head(&mut stream)).await;
        let mut begun = [0; 5];
        timely(stream.read_exact(&mut begun)).await.unwrap();
        cutting.notify_one();

        assert!(!head.to_ascii_lowercase().contains("transfer-encoding"), "{head}");
        assert_eq!(&begun, b"begun");
        assert_eq!(end(&mut stream).await, outcome, "{path}");
    }
}
