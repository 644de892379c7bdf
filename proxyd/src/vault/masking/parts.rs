//! What of a kept value is secret by itself: what is searched for where nobody knows which part of
//! it a command has printed.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use memchr::memmem;
use zeroize::Zeroizing;

use crate::vault::secret::Secret;
use crate::vault::sigv4;

/// The value, and what it is made of. Of a text of PEM alone only the private keys: what stands
/// beside them is public, as certificates are.
pub(in crate::vault) fn parts(value: &Secret) -> Vec<Secret> {
    let Pem { mut keys, alone } = private_keys(value.expose_secret());
    if !keys.is_empty() && alone {
        return keys;
    }
    let mut parts = vec![Secret::concat(&[value.expose_secret()])];
    parts.append(&mut keys);
    if let Ok(key) = sigv4::parse(value)
        && is_key_id(key.id)
    {
        parts.extend([key.secret, key.session].map(|part| Secret::concat(&[part])));
    }
    parts
}

/// As AWS forms them: `AKIA…`, `ASIA…`.
fn is_key_id(id: &[u8]) -> bool {
    id.first() == Some(&b'A')
        && id.iter().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit())
}

struct Pem {
    /// Each private key as it is written, with the ends of lines that it stands for, and in DER.
    keys: Vec<Secret>,
    /// Nothing stands outside the blocks.
    alone: bool,
}

/// The private keys in a text of PEM, or in JSON that quotes it.
fn private_keys(text: &[u8]) -> Pem {
    let (mut keys, mut alone) = (Vec::new(), true);
    let mut rest = text;
    while let Some(at) = memmem::find(rest, b"-----BEGIN ") {
        alone &= rest[..at].trim_ascii().is_empty();
        rest = &rest[at + 11..];
        let block = memmem::find(rest, b"-----").and_then(|label| {
            let end = label + 5 + memmem::find(&rest[label + 5..], b"-----END ")?;
            let after = end + 9 + memmem::find(&rest[end + 9..], b"-----")? + 5;
            Some((label, end, after))
        });
        let Some((label, end, after)) = block else {
            return Pem { keys, alone: false };
        };
        if rest[..label].ends_with(b"PRIVATE KEY") {
            add_key(&rest[label + 5..end], &mut keys);
        }
        rest = &rest[after..];
    }
    Pem { keys, alone: alone && rest.trim_ascii().is_empty() }
}

fn add_key(written: &[u8], keys: &mut Vec<Secret>) {
    let lines = lines(written);
    keys.push(Secret::concat(&[lines.trim_ascii()]));
    if lines.len() != written.len() {
        keys.push(Secret::concat(&[written]));
    }
    let mut plain = Zeroizing::new(Vec::with_capacity(lines.len()));
    plain.extend(lines.iter().filter(|byte| !byte.is_ascii_whitespace()));
    let mut der = Zeroizing::new(vec![0; plain.len()]);
    if let Ok(length) = STANDARD.decode_slice(&plain[..], &mut der) {
        keys.push(Secret::concat(&[&der[..length]]));
    }
}

/// With ends of lines where they were escaped for JSON.
fn lines(written: &[u8]) -> Zeroizing<Vec<u8>> {
    let mut lines = Zeroizing::new(Vec::with_capacity(written.len()));
    let mut rest = written;
    while let Some((first, after)) = rest.split_first() {
        let (byte, after) = match after.split_first() {
            Some((b'n', after)) if *first == b'\\' => (b'\n', after),
            Some((b'r', after)) if *first == b'\\' => (b'\r', after),
            _ => (*first, after),
        };
        lines.push(byte);
        rest = after;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text.as_bytes().to_vec())
    }

    fn shown(values: &[Secret]) -> Vec<String> {
        let text = |value: &Secret| String::from_utf8_lossy(value.expose_secret()).into_owned();
        values.iter().map(text).collect()
    }

    #[test]
    fn what_is_public_beside_a_key_is_no_part_of_what_is_searched_for() {
        let body = STANDARD.encode("KEY-CANARY-0123456789abcdef-0123456789abcdef");
        let (one, two) = body.split_at(32);
        let pem = format!(
            "-----BEGIN CERTIFICATE-----\nTUlJQ\n-----END CERTIFICATE-----\n\
             -----BEGIN EC PRIVATE KEY-----\n{one}\n{two}\n-----END EC PRIVATE KEY-----\n"
        );
        let json = format!("{{\"private_key\":\"{}\"}}", pem.replace('\n', "\\n"));
        let der = "KEY-CANARY-0123456789abcdef-0123456789abcdef".to_owned();
        let lines = format!("{one}\n{two}");

        assert_eq!(shown(&parts(&secret(&pem))), [lines.clone(), der.clone()]);
        let written = format!("\\n{one}\\n{two}\\n");
        assert_eq!(shown(&parts(&secret(&json))), [json.clone(), lines, written, der]);
    }

    #[test]
    fn a_key_within_another_text_leaves_the_whole_text_to_be_searched_for() {
        let body = STANDARD.encode("KEY-CANARY-0123456789abcdef-0123456789abcdef");
        let pem = format!("-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n");
        for text in [
            format!("password: PASSWORD-CANARY\n{pem}"),
            format!("{pem}PASSWORD-CANARY"),
            format!("{pem}-----BEGIN PRIVATE KEY-----\nPASSWORD-CANARY"),
            format!("{pem}\n-----BEGIN PASSWORD-CANARY"),
        ] {
            let found = shown(&parts(&secret(&text)));
            assert!(found.contains(&text) && found.contains(&body), "{text}");
        }
        for alone in [pem.clone(), format!("\n{pem}\n{pem}\n")] {
            assert!(!shown(&parts(&secret(&alone))).contains(&alone), "{alone}");
        }
    }

    #[test]
    fn of_an_access_key_the_secret_and_the_session_are_searched_for_by_themselves() {
        let whole = "ASIAEXAMPLE0:SECRET-CANARY-1:SESSION-CANARY";
        let expected = [whole, "SECRET-CANARY-1", "SESSION-CANARY"];
        assert_eq!(shown(&parts(&secret(whole))), expected);
        for value in ["some-user:SECRET-CANARY-1", "plain", "-----BEGIN PRIVATE KEY-----", ""] {
            assert_eq!(shown(&parts(&secret(value))), [value]);
        }
    }
}
