//! What a client signs in a TLS handshake, told from everything else that could be asked for.
//!
//! In TLS 1.3 that is 64 spaces, a text that names the client, and a hash (RFC 8446, section
//! 4.4.3): nothing else begins so, and who is spoken to is hidden in the hash. In TLS 1.2 it is the
//! handshake itself (RFC 5246, section 7.4.8). Many servers that ask for certificates speak nothing
//! newer, and there is more in it to check: that it goes to the host of the question, shows this
//! certificate, and has exactly the messages of a handshake up to here.

use policies::Host;
use rustls::SignatureScheme;
use rustls_pki_types::CertificateDer;

const SPACES: usize = 64;
const CLIENT: &[u8] = b"TLS 1.3, client CertificateVerify\0";
/// Of SHA-256 and SHA-384, which are all that TLS 1.3 hashes with.
const HASH_BYTES: [usize; 2] = [32, 48];

/// Types of handshake messages (RFC 5246, section 7.4).
const CLIENT_HELLO: u8 = 1;
const SERVER_HELLO: u8 = 2;
const CERTIFICATE: u8 = 11;
const SERVER_KEY_EXCHANGE: u8 = 12;
const CERTIFICATE_REQUEST: u8 = 13;
const SERVER_HELLO_DONE: u8 = 14;
const CLIENT_KEY_EXCHANGE: u8 = 16;
/// RFC 6066, section 8: between the server's certificate and its key exchange, if at all.
const CERTIFICATE_STATUS: u8 = 22;
/// Without forward secrecy there is no [`SERVER_KEY_EXCHANGE`]: rustls speaks no such suite.
const MESSAGES: [u8; 8] = [
    CLIENT_HELLO,
    SERVER_HELLO,
    CERTIFICATE,
    SERVER_KEY_EXCHANGE,
    CERTIFICATE_REQUEST,
    SERVER_HELLO_DONE,
    CERTIFICATE,
    CLIENT_KEY_EXCHANGE,
];
const TLS_1_2: &[u8] = &[3, 3];
const SERVER_NAME: [u8; 2] = [0, 0];
const HOST_NAME: u8 = 0;

/// Refuses what no client signs in a handshake with that host, in which it shows `chain`.
pub(super) fn check(
    message: &[u8],
    scheme: SignatureScheme,
    host: &Host,
    chain: &[CertificateDer<'_>],
) -> Result<(), &'static str> {
    if message.starts_with(&[b' '; SPACES]) {
        let hash = message[SPACES..].strip_prefix(CLIENT).ok_or("it is not a client's")?;
        if !HASH_BYTES.contains(&hash.len()) {
            return Err("there is no such hash");
        }
        // RFC 8446, section 4.2.3.
        let old = [
            SignatureScheme::RSA_PKCS1_SHA256,
            SignatureScheme::RSA_PKCS1_SHA384,
            SignatureScheme::RSA_PKCS1_SHA512,
        ];
        return match old.contains(&scheme) {
            true => Err("TLS 1.3 has no such scheme"),
            false => Ok(()),
        };
    }
    let messages = messages(message).ok_or("it is no handshake")?;
    let types = messages.iter().map(|(kind, _)| *kind);
    let status = messages.get(3).is_some_and(|(kind, _)| *kind == CERTIFICATE_STATUS);
    let without_status = types.enumerate().filter(|(at, _)| !(status && *at == 3));
    if !without_status.map(|(_, kind)| kind).eq(MESSAGES) {
        return Err("it has not the messages of a handshake");
    }
    let (_, hello) = messages[0];
    let named = server_name(hello).ok_or("its first message is no hello of TLS 1.2")?;
    if named != host.name().map(str::as_bytes) {
        return Err("it is with another host");
    }
    match messages[messages.len() - 2].1 == shown(chain) {
        true => Ok(()),
        false => Err("it shows another certificate"),
    }
}

/// The messages of a handshake; none if it does not end with one.
fn messages(mut rest: &[u8]) -> Option<Vec<(u8, &[u8])>> {
    let mut messages = Vec::new();
    // One more than there can be says enough.
    while !rest.is_empty() && messages.len() <= MESSAGES.len() + 1 {
        let kind = take(&mut rest, 1)?[0];
        let length = number(take(&mut rest, 3)?);
        messages.push((kind, take(&mut rest, length)?));
    }
    rest.is_empty().then_some(messages)
}

/// The server's name in a hello of TLS 1.2 (RFC 6066, section 3), if it has one; none at all for
/// what is no such hello.
fn server_name(mut hello: &[u8]) -> Option<Option<&[u8]>> {
    let hello = &mut hello;
    if take(hello, 2)? != TLS_1_2 {
        return None;
    }
    take(hello, 32)?;
    for length_bytes in [1, 2, 1] {
        // Session, cipher suites, compression.
        vector(hello, length_bytes)?;
    }
    let mut extensions = vector(hello, 2)?;
    let mut found = None;
    while !extensions.is_empty() {
        let kind = take(&mut extensions, 2)?;
        let mut body = vector(&mut extensions, 2)?;
        if kind == SERVER_NAME {
            let mut list = vector(&mut body, 2)?;
            let is_name = take(&mut list, 1)? == [HOST_NAME];
            let name = vector(&mut list, 2)?;
            if !is_name || !list.is_empty() || !body.is_empty() || found.replace(name).is_some() {
                return None;
            }
        }
    }
    hello.is_empty().then_some(found)
}

/// The body of the message that shows a chain (RFC 5246, section 7.4.6).
fn shown(chain: &[CertificateDer<'_>]) -> Vec<u8> {
    let length = |bytes: usize| (bytes as u32).to_be_bytes()[1..].to_vec();
    let list: Vec<u8> = chain
        .iter()
        .flat_map(|certificate| [length(certificate.len()), certificate.to_vec()].concat())
        .collect();
    [length(list.len()), list].concat()
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(count)?;
    *rest = after;
    Some(taken)
}

/// Bytes with their number in front.
fn vector<'a>(rest: &mut &'a [u8], length_bytes: usize) -> Option<&'a [u8]> {
    let length = number(take(rest, length_bytes)?);
    take(rest, length)
}

/// Of at most three bytes.
fn number(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

#[cfg(test)]
mod tests;
