//! Connections with random bytes to random places, the same ones at each run.

use std::io::{Result, Write};
use std::net::UdpSocket;

use crate::net::connect;
use crate::{sys, tls};

const HOSTS: [&str; 4] = ["api.example", "evil.example", "10.1.2.3", "2001:db8::5"];
const PORTS: [u16; 5] = [80, 443, 443, 22, 53];
/// What a sandbox's resolver has for an address.
const RESOLVER: &str = "192.0.2.53:53";
/// Beginnings and pieces of what the ports speak.
const WORDS: [&[u8]; 12] = [
    b"GET / HTTP/1.1\r\nHost: ",
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n",
    &[0; 64],
    &[0xff; 64],
    b"Transfer-Encoding: chunked\r\n",
    b"api.example",
    b"0\r\n",
    b":",
    b"\x05\x01\x00",
];

/// A small generator (xorshift); the same numbers at each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or_default() % limit
    }

    fn bytes(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        for _ in 0..4 {
            match self.below(WORDS.len() + 1) {
                at if at < WORDS.len() => all.extend(WORDS[at]),
                _ => all.extend((0..40).map(|_| self.below(256) as u8)),
            }
        }
        all
    }
}

/// Half of the connections end with a reset, a few speak inside of TLS. Prints how many there were.
pub fn flood(count: usize) -> Result<()> {
    let mut numbers = Numbers(0x0123_4567_89ab_cdef);
    let trusting = tls::config(tls::Trust::Roots)?;
    let resolver = UdpSocket::bind("0.0.0.0:0")?;
    resolver.connect(RESOLVER)?;
    for turn in 0..count {
        let bytes = numbers.bytes();
        if turn % 10 == 0 {
            let _ = resolver.send(&bytes[..bytes.len().min(500)]);
        }
        let (host, port) = (HOSTS[numbers.below(4)], PORTS[numbers.below(5)]);
        // Whatever the peer does with it is well: the test asks the daemons afterwards.
        let _ = one(host, port, &bytes, turn, &trusting);
    }
    println!("{count}");
    Ok(())
}

fn one(
    host: &str,
    port: u16,
    bytes: &[u8],
    turn: usize,
    trusting: &std::sync::Arc<rustls::ClientConfig>,
) -> Result<()> {
    let mut stream = connect(host, port)?;
    if turn % 2 == 1 {
        sys::reset_on_close(&stream)?;
    }
    if turn.is_multiple_of(20) {
        let mut stream = tls::over(stream, "api.example", std::sync::Arc::clone(trusting))?;
        stream.write_all(bytes)?;
        return stream.flush();
    }
    stream.write_all(bytes)
}
