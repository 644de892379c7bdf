//! One client connection: reached directly or through a CONNECT, TLS, one request at a time.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::Failure;

pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

pub type Connection = TlsStream<Socket>;

/// Whom requests are for and how to get there.
#[derive(Clone)]
pub struct Target {
    pub host: String,
    via: String,
    token: String,
    connector: TlsConnector,
    connector_h2: TlsConnector,
}

impl Target {
    pub fn new(host: &str, via: &str, ca: &str) -> Result<Self, Failure> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(ca)? {
            roots.add(certificate?).ok();
        }
        Self::trusting(host, via, roots)
    }

    /// For what needs no TLS.
    pub fn plain(host: &str, via: &str) -> Result<Self, Failure> {
        Self::trusting(host, via, RootCertStore::empty())
    }

    fn trusting(host: &str, via: &str, roots: RootCertStore) -> Result<Self, Failure> {
        let roots = Arc::new(roots);
        let connector = |alpn: &[u8]| {
            let mut config =
                ClientConfig::builder().with_root_certificates(roots.clone()).with_no_client_auth();
            config.alpn_protocols = vec![alpn.to_vec()];
            // A sandbox's commands are short processes, which have no session to resume.
            config.resumption = Resumption::disabled();
            TlsConnector::from(Arc::new(config))
        };
        Ok(Self {
            host: host.to_owned(),
            via: looked_up(via)?,
            token: std::env::var("LEASE_TOKEN").unwrap_or_default(),
            connector: connector(b"http/1.1"),
            connector_h2: connector(b"h2"),
        })
    }

    pub async fn open(&self, host: &str, h2: bool) -> Result<Connection, Failure> {
        let socket = self.reach(host, 443).await?;
        let connector = if h2 { &self.connector_h2 } else { &self.connector };
        Ok(connector.connect(ServerName::try_from(host.to_owned())?, socket).await?)
    }

    /// A connection to a host before TLS.
    pub async fn reach(&self, host: &str, port: u16) -> Result<Socket, Failure> {
        match self.via.strip_prefix("unix:") {
            Some(path) => Ok(Socket::Unix(self.tunnel(path, host, port).await?)),
            None => {
                let stream = match self.via.strip_prefix("names:") {
                    // Looked up as part of what is measured.
                    Some(port) => TcpStream::connect((host, port.parse()?)).await?,
                    None => TcpStream::connect(&self.via).await?,
                };
                stream.set_nodelay(true)?;
                Ok(Socket::Tcp(stream))
            }
        }
    }

    async fn tunnel(&self, path: &str, host: &str, port: u16) -> Result<UnixStream, Failure> {
        let mut stream = UnixStream::connect(path).await?;
        let ask = format!(
            "CONNECT {host}:{port} HTTP/1.1\r\nhost: {host}:{port}\r\n\
             proxy-authorization: Bearer {}\r\n\r\n",
            self.token
        );
        stream.write_all(ask.as_bytes()).await?;
        let (mut answer, mut held) = ([0u8; 1024], 0);
        while !answer[..held].ends_with(b"\r\n\r\n") {
            let count = stream.read(&mut answer[held..]).await?;
            if count == 0 {
                return Err("the proxy closed the connection".into());
            }
            held += count;
        }
        match answer.starts_with(b"HTTP/1.1 200") {
            true => Ok(stream),
            false => Err(String::from_utf8_lossy(&answer[..held]).into_owned().into()),
        }
    }
}

/// A name is looked up once, so that this is no part of any measurement.
fn looked_up(via: &str) -> Result<String, Failure> {
    use std::net::ToSocketAddrs;
    if via.starts_with("unix:") || via.starts_with("names:") {
        return Ok(via.to_owned());
    }
    let address = via.to_socket_addrs()?.next().ok_or("it has no address")?;
    Ok(address.to_string())
}

pub fn content_length(head: &str) -> Option<usize> {
    head.lines().find_map(|line| line.strip_prefix("content-length:"))?.trim().parse().ok()
}

/// The bytes of a head, and those of the body that came with it; anything but 200 is an error.
pub async fn read_head<S: AsyncRead + Unpin>(
    stream: &mut S,
    buffer: &mut [u8],
) -> Result<(String, usize, usize), Failure> {
    let mut held = 0;
    loop {
        let count = stream.read(&mut buffer[held..]).await?;
        if count == 0 {
            return Err("the connection ended within an answer".into());
        }
        held += count;
        let Some(end) = buffer[..held].windows(4).position(|w| w == b"\r\n\r\n") else { continue };
        let head = std::str::from_utf8(&buffer[..end])?.to_ascii_lowercase();
        if !head.starts_with("http/1.1 200") {
            return Err(format!("answered: {}", String::from_utf8_lossy(&buffer[..held])).into());
        }
        return Ok((head, end + 4, held));
    }
}

/// Reads one answer with a content length.
pub async fn read_answer<S: AsyncRead + Unpin>(
    stream: &mut S,
    buffer: &mut [u8],
) -> Result<usize, Failure> {
    let (head, start, held) = read_head(stream, buffer).await?;
    let length = content_length(&head).ok_or("no content-length")?;
    let mut owed = length.saturating_sub(held - start);
    while owed > 0 {
        let count = stream.read(buffer).await?;
        if count == 0 {
            return Err("the connection ended within a body".into());
        }
        owed = owed.saturating_sub(count);
    }
    Ok(length)
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
