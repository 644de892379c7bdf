//! A load generator and the upstream it is pointed at: HTTPS, HTTP/1.1, small keep-alive requests.
//!
//! `loadgen serve HOST CA_OUT PORT_OUT` serves 200-byte answers with a certificate for HOST.
//! `loadgen load HOST ADDRESS CA CONNECTIONS SECONDS` keeps that many connections busy, one request
//! at a time each, and prints one JSON line: requests, requests per second, p50 and p99 in
//! microseconds. ADDRESS is `name:port`; the name is resolved as any client would.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Requests before the clock starts: connections, leaf certificates and caches are warm by then.
const WARM_UP: Duration = Duration::from_millis(500);

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve", host, ca_out, port_out] => serve(host, ca_out, port_out).await,
        ["load", host, address, ca, connections, seconds] => {
            let seconds = Duration::from_secs(seconds.parse()?);
            load(host, address, ca, connections.parse()?, seconds).await
        }
        _ => Err("usage: loadgen serve HOST CA_OUT PORT_OUT | load HOST ADDRESS CA CONNECTIONS SECONDS".into()),
    }
}

async fn serve(host: &str, ca_out: &str, port_out: &str) -> Result<(), Failure> {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    std::fs::write(ca_out, ca.self_signed(&ca_key)?.pem())?;
    let key = KeyPair::generate()?;
    let leaf = CertificateParams::new(vec![host.to_owned()])?
        .signed_by(&key, &Issuer::new(ca, ca_key))?;
    let private = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], private)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    std::fs::write(port_out, listener.local_addr()?.port().to_string())?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            // A connection that breaks off is the client's affair.
            let _ = answer_all(acceptor, stream).await;
        });
    }
}

async fn answer_all(acceptor: TlsAcceptor, stream: TcpStream) -> Result<(), Failure> {
    let mut stream = acceptor.accept(stream).await?;
    let body = "x".repeat(200);
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let (mut buffer, mut held) = (vec![0u8; 16 * 1024], Vec::new());
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        held.extend_from_slice(&buffer[..count]);
        while let Some(end) = held.windows(4).position(|w| w == b"\r\n\r\n") {
            held.drain(..end + 4);
            stream.write_all(answer.as_bytes()).await?;
        }
        stream.flush().await?;
    }
}

async fn load(host: &str, address: &str, ca: &str, connections: usize, time: Duration) -> Result<(), Failure> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca)? {
        roots.add(certificate?).ok();
    }
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let begin = Instant::now() + WARM_UP;
    let end = begin + time;
    let mut tasks = Vec::new();
    for _ in 0..connections {
        let (connector, host, address) = (connector.clone(), host.to_owned(), address.to_owned());
        tasks.push(tokio::spawn(async move { client(connector, host, address, begin, end).await }));
    }
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await??);
    }
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let rate = times.len() as f64 / time.as_secs_f64();
    println!("{{\"requests\":{},\"rps\":{rate:.0},\"p50_us\":{},\"p99_us\":{}}}", times.len(), at(0.5), at(0.99));
    Ok(())
}

async fn client(
    connector: TlsConnector, host: String, address: String, begin: Instant, end: Instant,
) -> Result<Vec<u64>, Failure> {
    let stream = TcpStream::connect(&address).await?;
    stream.set_nodelay(true)?;
    let mut stream = connector.connect(ServerName::try_from(host.clone())?, stream).await?;
    let request = format!("GET /x HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n\r\n");
    let (mut times, mut buffer) = (Vec::new(), vec![0u8; 16 * 1024]);
    loop {
        let start = Instant::now();
        if start >= end {
            return Ok(times);
        }
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        read_answer(&mut stream, &mut buffer).await?;
        if start >= begin {
            times.push(u64::try_from(start.elapsed().as_micros())?);
        }
    }
}

/// Reads one answer with a content length; anything but 200 is an error.
async fn read_answer<S: tokio::io::AsyncRead + Unpin>(stream: &mut S, buffer: &mut [u8]) -> Result<(), Failure> {
    let mut held = 0;
    loop {
        let count = stream.read(&mut buffer[held..]).await?;
        if count == 0 {
            return Err("the connection ended within an answer".into());
        }
        held += count;
        let Some(head) = buffer[..held].windows(4).position(|w| w == b"\r\n\r\n") else { continue };
        let text = std::str::from_utf8(&buffer[..head])?.to_ascii_lowercase();
        if !text.starts_with("http/1.1 200") {
            return Err(format!("answered: {}", String::from_utf8_lossy(&buffer[..held])).into());
        }
        let length: usize = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length:"))
            .ok_or("no content-length")?
            .trim()
            .parse()?;
        if held >= head + 4 + length {
            return Ok(());
        }
    }
}
