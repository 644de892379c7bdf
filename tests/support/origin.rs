//! An HTTPS origin that keeps every request as it came, byte for byte, and answers with bytes that
//! the test made: for claims about what arrives and about answers that no good server gives.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::installation::Setup;

/// A running origin; its tasks end with the test's runtime.
pub struct Origin {
    pub port: u16,
    pub ca_pem: String,
    seen: Arc<Mutex<Vec<Request>>>,
}

/// One request as it came.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Request line and fields, with the empty line.
    pub head: String,
    /// The body without its framing.
    pub body: Vec<u8>,
}

impl Request {
    pub fn method(&self) -> &str {
        self.head.split(' ').next().unwrap_or_default()
    }

    pub fn target(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or_default()
    }

    /// Every value of a field, in order.
    pub fn values(&self, name: &str) -> Vec<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(':'))
            .filter(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
            .collect()
    }
}

impl Origin {
    /// Serves `hosts` over HTTP/1.1; an answer that says `Connection: close` ends its connection.
    pub async fn start<F>(hosts: &[&str], answer: F) -> Self
    where
        F: Fn(&Request) -> Vec<u8> + Send + Sync + 'static,
    {
        let crate::upstream::Tls { mut config, ca_pem, .. } = crate::upstream::tls(hosts);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let (answer, log) = (Arc::new(answer), Arc::clone(&seen));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, answer, log) =
                    (acceptor.clone(), Arc::clone(&answer), Arc::clone(&log));
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    // A peer that goes away ends the connection and nothing else.
                    let _ = serve(stream, answer.as_ref(), &log).await;
                });
            }
        });
        Self { port, ca_pem, seen }
    }

    /// What has arrived so far.
    pub fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }

    /// The set-up with this origin behind `host`.
    #[must_use]
    pub fn behind(&self, host: &str, mut setup: Setup) -> Setup {
        setup.upstreams.insert(host.to_owned(), self.port);
        if !setup.upstream_ca.contains(&self.ca_pem) {
            setup.upstream_ca += &self.ca_pem;
        }
        setup
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: &(dyn Fn(&Request) -> Vec<u8> + Send + Sync),
    log: &Mutex<Vec<Request>>,
) -> std::io::Result<()> {
    loop {
        let mut request = Request { head: head(&mut stream).await?, body: Vec::new() };
        if !request.values("expect").is_empty() {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
            stream.flush().await?;
        }
        request.body = body(&mut stream, &request).await?;
        let bytes = answer(&request);
        log.lock().unwrap().push(request);
        let closes = bytes.windows(17).any(|w| w.eq_ignore_ascii_case(b"connection: close"));
        stream.write_all(&bytes).await?;
        stream.flush().await?;
        if closes {
            return stream.shutdown().await;
        }
    }
}

async fn head(stream: &mut (impl AsyncRead + Unpin)) -> std::io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

async fn body(
    stream: &mut (impl AsyncRead + Unpin),
    request: &Request,
) -> std::io::Result<Vec<u8>> {
    if let Some(length) = request.values("content-length").first() {
        let mut body = vec![0; length.parse().map_err(std::io::Error::other)?];
        stream.read_exact(&mut body).await?;
        return Ok(body);
    }
    let mut body = Vec::new();
    if request.values("transfer-encoding").is_empty() {
        return Ok(body);
    }
    loop {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(stream.read_u8().await?);
        }
        let digits = String::from_utf8_lossy(&line);
        let size = usize::from_str_radix(digits.trim(), 16).map_err(std::io::Error::other)?;
        let start = body.len();
        body.resize(start + size, 0);
        stream.read_exact(&mut body[start..]).await?;
        stream.read_u16().await?;
        if size == 0 {
            return Ok(body);
        }
    }
}

/// A whole answer of status 200 with these fields (each line ended) and this body.
pub fn ok(fields: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

/// A TCP server that gives each byte back.
pub async fn echoing() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                while let Ok(byte) = stream.read_u8().await {
                    let _ = stream.write_u8(byte).await;
                }
            });
        }
    });
    port
}
