//! The upstream: small answers, large ones, uploads, event streams.
//!
//! | path | answer |
//! |---|---|
//! | `/down` | 100 MiB |
//! | `/gzip` | 16 MiB of varied text, compressed once with gzip |
//! | `/sse` | [`EVENTS`] events, [`PAUSE`] apart, each with the time at which it was sent |
//! | anything | 200 bytes, after the request's body was read |

use std::io::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::server::TlsStream;

use crate::Failure;

pub const LARGE_BYTES: usize = 100 * 1024 * 1024;
/// What the compressed answer is when it is not.
pub const GZIP_BYTES: usize = 16 * 1024 * 1024;
pub const EVENTS: usize = 6;
const PAUSE: Duration = Duration::from_millis(5);
const SMALL_BYTES: usize = 200;

pub async fn serve(host: &str, ca_out: &str, port_out: &str) -> Result<(), Failure> {
    let acceptor = TlsAcceptor::from(Arc::new(config(host, ca_out)?));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    std::fs::write(port_out, listener.local_addr()?.port().to_string())?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            // A connection that breaks off is the client's affair.
            let _ = connection(acceptor, stream).await;
        });
    }
}

fn config(host: &str, ca_out: &str) -> Result<ServerConfig, Failure> {
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    };
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::default();
    // Not the name that leaves get by default: OpenSSL would take those for self-signed.
    ca.distinguished_name.push(DnType::CommonName, "Bench CA");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    std::fs::write(ca_out, ca.self_signed(&ca_key)?.pem())?;
    let issuer = Issuer::new(ca, ca_key);
    let names = vec![host.to_owned(), format!("*.{host}")];
    let front_key = KeyPair::generate()?;
    let front = CertificateParams::new(names.clone())?.signed_by(&front_key, &issuer)?;
    let beside = |name: &str| std::path::Path::new(ca_out).with_file_name(name);
    std::fs::write(beside("front.pem"), front.pem())?;
    std::fs::write(beside("front.key"), front_key.serialize_pem())?;
    let key = KeyPair::generate()?;
    let leaf = CertificateParams::new(names)?.signed_by(&key, &issuer)?;
    let private = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], private)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

async fn connection(acceptor: TlsAcceptor, stream: TcpStream) -> Result<(), Failure> {
    let stream = acceptor.accept(stream).await?;
    match stream.get_ref().1.alpn_protocol() {
        Some(b"h2") => answer_streams(stream).await,
        _ => answer_all(stream).await,
    }
}

async fn answer_streams(stream: TlsStream<TcpStream>) -> Result<(), Failure> {
    let mut connection = h2::server::handshake(stream).await?;
    let body = Bytes::from(vec![b'x'; SMALL_BYTES]);
    while let Some(accepted) = connection.accept().await {
        let (_, mut respond) = accepted?;
        let answer = http::Response::builder().header("content-length", SMALL_BYTES).body(())?;
        respond.send_response(answer, false)?.send_data(body.clone(), true)?;
    }
    Ok(())
}

async fn answer_all(mut stream: TlsStream<TcpStream>) -> Result<(), Failure> {
    let small = format!("HTTP/1.1 200 OK\r\ncontent-length: {SMALL_BYTES}\r\n\r\n");
    let small = [small.as_bytes(), &[b'x'; SMALL_BYTES]].concat();
    let (mut buffer, mut held) = (vec![0u8; 64 * 1024], Vec::new());
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        held.extend_from_slice(&buffer[..count]);
        while let Some(end) = held.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&held[..end]).to_ascii_lowercase();
            held.drain(..end + 4);
            let length = crate::client::content_length(&head).unwrap_or(0);
            let mut owed = length.saturating_sub(held.len());
            held.drain(..length.min(held.len()));
            while owed > 0 {
                let count = stream.read(&mut buffer).await?;
                if count == 0 {
                    return Ok(());
                }
                held.extend_from_slice(&buffer[owed.min(count)..count]);
                owed = owed.saturating_sub(count);
            }
            match head.split(' ').nth(1) {
                Some("/down") => large(&mut stream).await?,
                Some("/gzip") => compressed(&mut stream).await?,
                Some("/sse") => events(&mut stream).await?,
                _ => stream.write_all(&small).await?,
            }
        }
        stream.flush().await?;
    }
}

async fn large(stream: &mut TlsStream<TcpStream>) -> Result<(), Failure> {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE_BYTES}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    // Text-like bytes, as a search for values meets them.
    let pattern = b"The quick brown fox jumps over 13 lazy dogs; {\"id\": 4711, \"ok\": true}\n";
    let part: Vec<u8> = pattern.iter().copied().cycle().take(64 * 1024).collect();
    for _ in 0..LARGE_BYTES / part.len() {
        stream.write_all(&part).await?;
    }
    Ok(())
}

async fn compressed(stream: &mut TlsStream<TcpStream>) -> Result<(), Failure> {
    static BODY: OnceLock<Vec<u8>> = OnceLock::new();
    let body = BODY.get_or_init(gzip);
    let length = body.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    Ok(stream.write_all(body).await?)
}

/// Records as an API lists them: they compress as such do, by a sixth to a fourth.
fn gzip() -> Vec<u8> {
    let words = ["fox", "dog", "lazy", "quick", "brown", "jumps", "over", "name", "state", "open"];
    let mut random: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut text = Vec::with_capacity(GZIP_BYTES + 128);
    while text.len() < GZIP_BYTES {
        let (number, word) = (next(), |number: u64| words[number as usize % words.len()]);
        let title = format!("{} {} {}", word(number), word(number >> 8), word(number >> 16));
        let id = number >> 32;
        text.extend(format!("{{\"id\": {id}, \"title\": \"{title}\", \"ok\": true}}\n").bytes());
    }
    text.truncate(GZIP_BYTES);
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    let packed = packed.write_all(&text).and_then(|()| packed.finish());
    packed.expect("writing to memory does not fail")
}

async fn events(stream: &mut TlsStream<TcpStream>) -> Result<(), Failure> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                transfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    for number in 0..EVENTS {
        if number > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        let event = format!("data: {:020}\n\n", crate::load::now_ns());
        stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).await?;
        stream.flush().await?;
    }
    stream.write_all(b"0\r\n\r\n").await?;
    Ok(stream.flush().await?)
}
