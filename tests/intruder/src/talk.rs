//! A conversation, step by step, as a file says it; every connection has a name.
//!
//! ```text
//! tcp NAME HOST PORT       connects
//! tls NAME HOST [SNI]      connects to port 443 and verifies the certificate for SNI
//! tls-unverified NAME HOST takes any certificate
//! send NAME HEX            sends; a peer that is gone is no failure
//! say NAME HEX             sends, reads one answer, prints NAME and its first line
//! statuses NAME            reads to the end, prints the status of each answer of HTTP
//! end NAME                 waits, prints NAME and: closed, reset, more (bytes), or silent
//! touch FILE               makes a file, which tells a waiting test how far this has come
//! ```

use std::collections::HashMap;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::sync::Arc;

use crate::net::connect;
use crate::{number, tls};

enum Connection {
    Plain(TcpStream),
    Tls(Box<tls::Stream>),
}

impl Connection {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Plain(stream) => stream.write_all(bytes),
            Self::Tls(stream) => stream.write_all(bytes).and_then(|()| stream.flush()),
        }
    }

    /// The next bytes; none at the end, however TLS was closed.
    fn next(&mut self) -> Result<Vec<u8>> {
        let mut piece = vec![0; 65536];
        let read = match self {
            Self::Plain(stream) => stream.read(&mut piece),
            Self::Tls(stream) => stream.read(&mut piece),
        };
        match read {
            Ok(length) => piece.truncate(length),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => piece.clear(),
            Err(error) => return Err(error),
        }
        Ok(piece)
    }

    /// All that comes until the end, or until it is enough.
    fn read_until(&mut self, enough: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        let mut got = Vec::new();
        while !enough(&got) {
            // A reset ends it like a proper end; what came before it counts.
            match self.next() {
                Ok(piece) if !piece.is_empty() => got.extend(piece),
                _ => break,
            }
        }
        got
    }
}

pub fn talk(steps: &str) -> Result<()> {
    let mut open: HashMap<&str, Connection> = HashMap::new();
    let mut trusting: Option<Arc<rustls::ClientConfig>> = None;
    for line in steps.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match *words.as_slice() {
            ["tcp", name, host, port] => {
                let stream = connect(host, number(port)?)?;
                open.insert(name, Connection::Plain(stream));
            }
            ["tls", name, host, ref sni @ ..] => {
                let sni = sni.first().unwrap_or(&host);
                let config = match &trusting {
                    Some(config) => Arc::clone(config),
                    None => tls::config(tls::Trust::Roots)?,
                };
                trusting = Some(Arc::clone(&config));
                let stream = tls::over(connect(host, 443)?, sni, config)?;
                open.insert(name, Connection::Tls(Box::new(stream)));
            }
            ["tls-unverified", name, host] => {
                let config = tls::config(tls::Trust::Anything)?;
                let stream = tls::over(connect(host, 443)?, host, config)?;
                open.insert(name, Connection::Tls(Box::new(stream)));
            }
            ["send", name, bytes] => {
                let _ = named(&mut open, name)?.send(&hex(bytes)?);
            }
            ["say", name, bytes] => {
                let connection = named(&mut open, name)?;
                let _ = connection.send(&hex(bytes)?);
                println!("{name}: {}", first_line(&connection.read_until(is_whole)));
            }
            ["statuses", name] => {
                println!("{}", statuses(&named(&mut open, name)?.read_until(|_| false)));
            }
            ["end", name] => println!("{name}: {}", ending(named(&mut open, name)?.next())),
            ["touch", file] => drop(std::fs::File::create(file)?),
            _ => return Err(Error::other(format!("no such step: {line}"))),
        }
    }
    Ok(())
}

fn named<'a>(open: &'a mut HashMap<&str, Connection>, name: &str) -> Result<&'a mut Connection> {
    open.get_mut(name).ok_or_else(|| Error::other(format!("{name} is not connected")))
}

/// The byte that is echoed, or an answer of HTTP that ends with its body, as our origins give them
/// and as denials are written.
fn is_whole(got: &[u8]) -> bool {
    let got = got.trim_ascii_end();
    got.ends_with(b"x") || got.ends_with(b"ok") || got.ends_with(b"}")
}

fn first_line(got: &[u8]) -> String {
    String::from_utf8_lossy(got).split("\r\n").next().unwrap_or_default().to_owned()
}

fn statuses(got: &[u8]) -> String {
    let text = String::from_utf8_lossy(got);
    let after = text.split("HTTP/1.1 ").skip(1);
    let words = after.filter_map(|rest| rest.split(' ').next());
    words.filter(|w| w.bytes().all(|b| b.is_ascii_digit())).collect::<Vec<_>>().join(" ")
}

fn ending(next: Result<Vec<u8>>) -> &'static str {
    match next {
        Ok(piece) if piece.is_empty() => "closed",
        Ok(_) => "more",
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            "silent"
        }
        Err(_) => "reset",
    }
}

fn hex(text: &str) -> Result<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits
        .map(|pair| {
            let pair = std::str::from_utf8(pair).map_err(Error::other)?;
            u8::from_str_radix(pair, 16).map_err(Error::other)
        })
        .collect()
}
