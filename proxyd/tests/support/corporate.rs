//! A proxy between proxyd and its upstreams, as companies have them, in every mood.

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]
#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Upstream, field, request};

/// How the proxy answers.
#[derive(Clone)]
pub enum Manner {
    /// Forwards to the address that stands for an authority.
    Forwards(HashMap<String, SocketAddr>),
    /// Demands this value of `Proxy-Authorization`, then forwards.
    Demands(String, HashMap<String, SocketAddr>),
    /// Says this to everything.
    Says(&'static str),
    /// Says nothing and holds the connection.
    Silent,
}

/// A proxy as companies have them.
pub struct Corporate {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Corporate {
    pub async fn start(manner: Manner) -> (Self, Upstream) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let upstream =
            Upstream::tcp(move |stream| corporate(stream, manner.clone(), Arc::clone(&log))).await;
        (Self { address: upstream.address, seen }, upstream)
    }

    /// The lines of `proxyd.toml` that name it.
    pub fn table(&self, more: &str) -> String {
        let address = self.address;
        format!("[upstream-proxy]\nurl = \"http://{address}\"\nresolve = \"proxy\"\n{more}\n")
    }

    pub fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

pub async fn corporate(
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    manner: Manner,
    log: Arc<Mutex<Vec<String>>>,
) {
    let Some((head, _)) = request(&mut client).await else { return };
    log.lock().unwrap().push(head.clone());
    let table = match manner {
        Manner::Forwards(table) => table,
        Manner::Demands(value, table) => {
            if field(&head, "proxy-authorization") != Some(&value) {
                let no = "HTTP/1.1 407 No\r\nProxy-Authenticate: Basic realm=\"x\"\r\n\
                          Content-Length: 0\r\n\r\n";
                return client.write_all(no.as_bytes()).await.unwrap_or_default();
            }
            table
        }
        Manner::Says(text) => {
            client.write_all(text.as_bytes()).await.unwrap_or_default();
            return;
        }
        Manner::Silent => {
            let _ = client.read_u8().await;
            return;
        }
    };
    let target = head.split(' ').nth(1).unwrap();
    if head.starts_with("CONNECT ") {
        let Some(address) = table.get(target) else {
            let no = "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n";
            return client.write_all(no.as_bytes()).await.unwrap_or_default();
        };
        let mut upstream = TcpStream::connect(address).await.unwrap();
        // What a server says first may come in the same piece as the proxy's own answer.
        let mut first = vec![0; 64];
        let early = match target {
            "raw.test:9000" => upstream.read(&mut first).await.unwrap(),
            _ => 0,
        };
        let answer = [&b"HTTP/1.1 200 OK\r\n\r\n"[..], &first[..early]].concat();
        client.write_all(&answer).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut client, &mut upstream).await;
        return;
    }
    // Absolute form: this proxy answers with what it got.
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{head}", head.len());
    client.write_all(answer.as_bytes()).await.unwrap_or_default();
}

pub fn forwards(list: &[(&str, &Upstream)]) -> Manner {
    Manner::Forwards(table(list))
}

pub fn table(list: &[(&str, &Upstream)]) -> HashMap<String, SocketAddr> {
    list.iter().map(|(name, upstream)| ((*name).to_owned(), upstream.address)).collect()
}
