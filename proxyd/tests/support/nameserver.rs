//! A name server on loopback that answers as a test says and counts what it is asked.

#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::net::UdpSocket;

/// A running name server; its task ends with the test's runtime.
pub struct NameServer {
    address: SocketAddr,
    questions: Arc<Mutex<Vec<(String, u16)>>>,
}

impl NameServer {
    /// `answer` gets the name in lower case, the type, and how often this was asked before; it
    /// gives addresses, of which those of the type are sent, or says that there is no such name.
    pub async fn start<F>(answer: F) -> Self
    where
        F: Fn(&str, u16, usize) -> Option<Vec<IpAddr>> + Send + 'static,
    {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let questions = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&questions);
        tokio::spawn(async move {
            let mut packet = [0u8; 1500];
            while let Ok((length, peer)) = socket.recv_from(&mut packet).await {
                let (name, kind, end) = question(&packet[..length]);
                let before = {
                    let mut log = log.lock().unwrap();
                    let same = |(n, k): &&(String, u16)| *n == name && *k == kind;
                    let before = log.iter().filter(same).count();
                    log.push((name.clone(), kind));
                    before
                };
                let reply = reply(&packet[..end], kind, answer(&name, kind, before));
                let _ = socket.send_to(&reply, peer).await;
            }
        });
        Self { address, questions }
    }

    /// The part of `proxyd.toml` that names this server.
    pub fn config(&self) -> String {
        format!("[resolver]\nservers = [\"{}\"]\n", self.address)
    }

    pub fn questions(&self) -> Vec<(String, u16)> {
        self.questions.lock().unwrap().clone()
    }

    pub fn asked(&self, name: &str, kind: u16) -> usize {
        self.questions().iter().filter(|(n, k)| n == name && *k == kind).count()
    }
}

/// The name, its type, and where the question ends.
fn question(packet: &[u8]) -> (String, u16, usize) {
    let (mut name, mut at) = (String::new(), 12);
    while packet[at] != 0 {
        let length = usize::from(packet[at]);
        if !name.is_empty() {
            name.push('.');
        }
        name += &String::from_utf8_lossy(&packet[at + 1..at + 1 + length]).to_ascii_lowercase();
        at += 1 + length;
    }
    (name, u16::from_be_bytes([packet[at + 1], packet[at + 2]]), at + 5)
}

/// Header and question again, then one record an address, none of which lasts.
fn reply(asked: &[u8], kind: u16, addresses: Option<Vec<IpAddr>>) -> Vec<u8> {
    let mut bytes = asked.to_vec();
    bytes[2] = 0x81;
    bytes[3] = if addresses.is_some() { 0x80 } else { 0x83 };
    bytes[4..12].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
    for address in addresses.unwrap_or_default() {
        let data = match address {
            IpAddr::V4(v4) if kind == 1 => v4.octets().to_vec(),
            IpAddr::V6(v6) if kind == 28 => v6.octets().to_vec(),
            _ => continue,
        };
        bytes[7] += 1;
        bytes.extend_from_slice(&[0xc0, 12]);
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0]);
        bytes.push(u8::try_from(data.len()).unwrap());
        bytes.extend_from_slice(&data);
    }
    bytes
}
