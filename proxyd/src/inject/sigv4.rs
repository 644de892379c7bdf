//! AWS Signature Version 4: what the sandbox signed with placeholders is signed again.
//!
//! The client's signature says region and service, which the policy's lists bound. It is taken out
//! and a new one made over what goes on, by proxyd's own clock, with a key that the vault derived
//! for this day, region and service. It covers the host, the content type and every `x-amz-` field:
//! nothing that any hop changes.
//!
//! | `x-amz-content-sha256` | the body |
//! |---|---|
//! | a hash, `UNSIGNED-PAYLOAD`, `STREAMING-UNSIGNED-PAYLOAD-TRAILER` | passes through |
//! | `STREAMING-AWS4-HMAC-SHA256-PAYLOAD`, `…-TRAILER` | each chunk is signed again (`chunks`) |
//! | absent | held back and hashed, up to a bound |
//! | anything else | refused |
//!
//! A presigned address is signed again when its key is the placeholder; it lasts as long as the
//! client said, and no longer.

use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::chunks::Signer;
use super::placeholder::percent_encode;
use super::stray::percent_decoded;
use crate::head::RequestHead;
use crate::vault::Secret;

pub(super) const ALGORITHM: &str = "AWS4-HMAC-SHA256";
const CONTENT: &str = "x-amz-content-sha256";
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";
const CHUNKED: &str = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD";
const CHUNKED_TRAILER: &str = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER";
/// How far ahead of ours a client's clock may be.
const AHEAD_SECONDS: i64 = 15 * 60;
/// The parameters of a presigned address, folded to lower case.
const PARAMETERS: [&str; 7] = [
    "x-amz-algorithm",
    "x-amz-credential",
    "x-amz-date",
    "x-amz-expires",
    "x-amz-signedheaders",
    "x-amz-signature",
    "x-amz-security-token",
];

/// What a request says about its own signature.
pub(super) struct Asked {
    pub key_id: String,
    pub region: String,
    pub service: String,
    /// For a presigned address: how long it still lasts, in seconds.
    presigned: Option<i64>,
}

/// Why a request cannot be signed again.
pub(super) type Reason = &'static str;

/// The signature that the request carries; none when it carries none at all.
pub(super) fn read(head: &RequestHead, now: jiff::Timestamp) -> Result<Option<Asked>, Reason> {
    let signed: Vec<&Bytes> = head.headers.all("authorization").collect();
    let presigned = parameter(head, "x-amz-signature").is_some()
        || parameter(head, "x-amz-credential").is_some();
    match (&signed[..], presigned) {
        ([], false) => Ok(None),
        ([], true) => presigned_address(head, now).map(Some),
        ([value], false) => header(value).map(Some),
        _ => Err("it is signed more than once"),
    }
}

fn header(value: &[u8]) -> Result<Asked, Reason> {
    let value = std::str::from_utf8(value).map_err(|_| "its signature is not readable")?;
    let rest = value.strip_prefix(ALGORITHM).filter(|rest| rest.starts_with(' '));
    let rest = rest.ok_or("its signature is not of version 4 with HMAC")?;
    let scope = rest
        .split(',')
        .find_map(|part| part.trim().strip_prefix("Credential="))
        .ok_or("its signature names no scope")?;
    scoped(scope, None)
}

fn presigned_address(head: &RequestHead, now: jiff::Timestamp) -> Result<Asked, Reason> {
    let text = |name: &str| {
        parameter(head, name).map(|value| String::from_utf8_lossy(&value).into_owned())
    };
    if text("x-amz-algorithm").as_deref() != Some(ALGORITHM) {
        return Err("its signature is not of version 4 with HMAC");
    }
    let scope = text("x-amz-credential").ok_or("its signature names no scope")?;
    let date = text("x-amz-date").and_then(|date| parse_date(&date));
    let life = text("x-amz-expires").and_then(|life| life.parse::<i64>().ok());
    let (Some(date), Some(life)) = (date, life.filter(|life| (1..=604_800).contains(life))) else {
        return Err("it does not say how long it lasts");
    };
    let age = now.as_second() - date.as_second();
    if age < -AHEAD_SECONDS {
        return Err("it is signed for a time to come");
    }
    let left = life - age.max(0);
    if left <= 0 {
        return Err("it has expired");
    }
    scoped(&scope, Some(left))
}

fn scoped(scope: &str, presigned: Option<i64>) -> Result<Asked, Reason> {
    let parts: Vec<&str> = scope.split('/').collect();
    let [key_id, _date, region, service, "aws4_request"] = parts[..] else {
        return Err("the scope of its signature is not KEY/DATE/REGION/SERVICE/aws4_request");
    };
    let [key_id, region, service] = [key_id, region, service].map(str::to_owned);
    Ok(Asked { key_id, region, service, presigned })
}

/// `20261129T185000Z`.
fn parse_date(text: &str) -> Option<jiff::Timestamp> {
    let time = jiff::civil::DateTime::strptime("%Y%m%dT%H%M%SZ", text).ok()?;
    time.to_zoned(jiff::tz::TimeZone::UTC).ok().map(|zoned| zoned.timestamp())
}

/// A parameter of the query, decoded, in whatever case: one in a spelling of its own must not pass
/// for none.
fn parameter(head: &RequestHead, folded: &str) -> Option<Vec<u8>> {
    pairs(head.query()?)
        .find(|(name, _)| percent_decoded(name).eq_ignore_ascii_case(folded.as_bytes()))
        .map(|(_, value)| percent_decoded(value).into_owned())
}

fn pairs(query: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    query.split(|byte| *byte == b'&').filter(|piece| !piece.is_empty()).map(|piece| {
        match piece.iter().position(|byte| *byte == b'=') {
            Some(at) => (&piece[..at], &piece[at + 1..]),
            None => (piece, &b""[..]),
        }
    })
}

/// How the body goes on.
pub(super) enum Content {
    AsItIs,
    /// It has to be hashed: the whole of it is needed.
    Held,
    Chunked,
}

pub(super) fn content(head: &RequestHead, asked: &Asked) -> Result<Content, Reason> {
    if asked.presigned.is_some() {
        return Ok(Content::AsItIs);
    }
    let mut values = head.headers.all(CONTENT);
    let value = values.next();
    if values.next().is_some() {
        return Err("it says twice what its body is");
    }
    let hash = |v: &[u8]| v.len() == 64 && v.iter().all(u8::is_ascii_hexdigit);
    match value.map(|value| &value[..]) {
        None => Ok(Content::Held),
        Some(value) if hash(value) => Ok(Content::AsItIs),
        Some(b"UNSIGNED-PAYLOAD" | b"STREAMING-UNSIGNED-PAYLOAD-TRAILER") => Ok(Content::AsItIs),
        Some(value) if value == CHUNKED.as_bytes() || value == CHUNKED_TRAILER.as_bytes() => {
            Ok(Content::Chunked)
        }
        Some(_) => Err("its body is signed in a way that cannot be signed again"),
    }
}

/// What the vault gave for one request.
pub(crate) struct Key<'a> {
    pub signing: &'a [u8],
    pub id: &'a [u8],
    pub session: &'a [u8],
}

/// Signs. `body` is there where [`content`] asked for it; what comes out signs the chunks of a
/// body that has them.
pub(super) fn sign(
    head: &mut RequestHead,
    asked: &Asked,
    key: &Key<'_>,
    body: Option<&[u8]>,
    now: jiff::Timestamp,
) -> Option<Signer> {
    let stamp = stamp(now);
    let scope = format!("{}/{}/{}/aws4_request", &stamp[..8], asked.region, asked.service);
    for name in ["authorization", "x-amz-date", "x-amz-security-token", "date"] {
        head.headers.remove_all(name);
    }
    let payload = match (asked.presigned, head.headers.first(CONTENT), body) {
        (Some(_), ..) if asked.service == "s3" => UNSIGNED.to_owned(),
        (Some(_), ..) => sha256(b""),
        (None, Some(value), _) => String::from_utf8_lossy(value).into_owned(),
        (None, None, body) => {
            let hash = sha256(body.unwrap_or_default());
            if asked.service == "s3" {
                head.headers.append("X-Amz-Content-Sha256", hash.clone().into());
            }
            hash
        }
    };
    match asked.presigned {
        Some(left) => {
            in_query(head, asked, key, &stamp, &scope, &payload, left);
            None
        }
        None => {
            let last = in_header(head, asked, key, &stamp, &scope, &payload);
            let trailer = payload == CHUNKED_TRAILER;
            if !trailer && payload != CHUNKED {
                return None;
            }
            let key = Secret::concat(&[key.signing]);
            Some(Signer { key, stamp, scope, last, trailer })
        }
    }
}

/// Signs a request of proxyd's own, whose body is whole.
pub(crate) fn sign_own(
    head: &mut RequestHead,
    (region, service): (&str, &str),
    key: &Key<'_>,
    body: &[u8],
    now: jiff::Timestamp,
) {
    let [region, service] = [region, service].map(str::to_owned);
    let asked = Asked { key_id: String::new(), region, service, presigned: None };
    sign(head, &asked, key, Some(body), now);
}

fn in_header(
    head: &mut RequestHead,
    asked: &Asked,
    key: &Key<'_>,
    stamp: &str,
    scope: &str,
    payload: &str,
) -> String {
    head.headers.append("X-Amz-Date", Bytes::copy_from_slice(stamp.as_bytes()));
    if !key.session.is_empty() {
        head.headers.append("X-Amz-Security-Token", Secret::concat(&[key.session]).into_bytes());
    }
    let (names, canonical) = canonical(head, asked, payload);
    let signature = signature(key.signing, stamp, scope, canonical.expose_secret());
    let value = [
        ALGORITHM.as_bytes(),
        b" Credential=",
        key.id,
        format!("/{scope}, SignedHeaders={names}, Signature={signature}").as_bytes(),
    ]
    .concat();
    head.headers.append("Authorization", Secret::new(value).into_bytes());
    signature
}

fn in_query(
    head: &mut RequestHead,
    asked: &Asked,
    key: &Key<'_>,
    stamp: &str,
    scope: &str,
    payload: &str,
    left: i64,
) {
    let mut query = Vec::new();
    for piece in head.query().unwrap_or_default().split(|byte| *byte == b'&') {
        let name = piece.split(|byte| *byte == b'=').next().unwrap_or_default();
        let name = percent_decoded(name).to_ascii_lowercase();
        if !piece.is_empty() && !PARAMETERS.iter().any(|known| known.as_bytes() == name) {
            query.extend_from_slice(piece);
            query.push(b'&');
        }
    }
    let (names, _) = fields(head);
    let credential = [key.id, b"/", scope.as_bytes()].concat();
    let seconds = left.to_string();
    for (name, value) in [
        ("X-Amz-Algorithm", ALGORITHM.as_bytes()),
        ("X-Amz-Credential", &credential),
        ("X-Amz-Date", stamp.as_bytes()),
        ("X-Amz-Expires", seconds.as_bytes()),
        ("X-Amz-Security-Token", key.session),
        ("X-Amz-SignedHeaders", names.as_bytes()),
    ] {
        if !value.is_empty() {
            query.extend_from_slice(name.as_bytes());
            query.push(b'=');
            percent_encode(&mut query, value, b"");
            query.push(b'&');
        }
    }
    query.pop();
    head.target = Secret::concat(&[head.path(), b"?", &query]).into_bytes();
    let (_, canonical) = canonical(head, asked, payload);
    let signature = signature(key.signing, stamp, scope, canonical.expose_secret());
    head.target =
        Secret::concat(&[&head.target, b"&X-Amz-Signature=", signature.as_bytes()]).into_bytes();
}

/// Names of the signed fields, and the canonical request.
fn canonical(head: &RequestHead, asked: &Asked, payload: &str) -> (String, Secret) {
    let (names, fields) = fields(head);
    let mut out = Vec::with_capacity(1024);
    out.extend_from_slice(&head.method);
    out.push(b'\n');
    path(&mut out, head.path(), asked.service == "s3");
    out.push(b'\n');
    query(&mut out, head.query().unwrap_or_default());
    out.push(b'\n');
    out.extend_from_slice(&fields);
    out.push(b'\n');
    out.extend_from_slice(names.as_bytes());
    out.push(b'\n');
    out.extend_from_slice(payload.as_bytes());
    (names, Secret::new(out))
}

/// The fields that are signed: their names with semicolons, and their lines.
fn fields(head: &RequestHead) -> (String, Vec<u8>) {
    let mut signed: Vec<(String, Vec<u8>)> = Vec::new();
    if !head.headers.contains("host") {
        signed.push(("host".into(), head.authority.clone().into_bytes()));
    }
    for (name, value) in head.headers.iter() {
        let name = String::from_utf8_lossy(name).to_ascii_lowercase();
        let counts = matches!(name.as_str(), "host" | "content-type" | "content-md5");
        if !counts && !name.starts_with("x-amz-") || name == "x-amzn-trace-id" {
            continue;
        }
        let words: Vec<&[u8]> =
            value.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).collect();
        let value = words.join(&b' ');
        match signed.iter_mut().find(|(known, _)| *known == name) {
            Some((_, values)) => {
                values.push(b',');
                values.extend_from_slice(&value);
            }
            None => signed.push((name, value)),
        }
    }
    signed.sort();
    let names: Vec<&str> = signed.iter().map(|(name, _)| name.as_str()).collect();
    let names = names.join(";");
    let lines =
        signed.iter().flat_map(|(name, value)| [name.as_bytes(), b":", value, b"\n"].concat());
    (names, lines.collect())
}

/// S3 signs the path as the object's name is encoded, once; all others the path as it is sent,
/// encoded once more, without dot segments and empty ones.
fn path(out: &mut Vec<u8>, raw: &[u8], s3: bool) {
    if s3 {
        return percent_encode(out, &percent_decoded(raw), b"/");
    }
    let mut segments: Vec<&[u8]> = Vec::new();
    for segment in raw.split(|byte| *byte == b'/') {
        match segment {
            b"" | b"." => {}
            b".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    for segment in &segments {
        out.push(b'/');
        percent_encode(out, segment, b"");
    }
    if segments.is_empty() || raw.ends_with(b"/") {
        out.push(b'/');
    }
}

fn query(out: &mut Vec<u8>, raw: &[u8]) {
    let encoded = |text: &[u8]| {
        let mut out = Vec::with_capacity(text.len());
        percent_encode(&mut out, &percent_decoded(text), b"");
        out
    };
    let mut all: Vec<_> = pairs(raw).map(|(name, value)| (encoded(name), encoded(value))).collect();
    all.sort();
    for (at, (name, value)) in all.iter().enumerate() {
        if at > 0 {
            out.push(b'&');
        }
        out.extend_from_slice(name);
        out.push(b'=');
        out.extend_from_slice(value);
    }
}

fn signature(key: &[u8], stamp: &str, scope: &str, canonical: &[u8]) -> String {
    let text = format!("{ALGORITHM}\n{stamp}\n{scope}\n{}", sha256(canonical));
    hex_mac(key, text.as_bytes())
}

pub(super) fn hex_mac(key: &[u8], text: &[u8]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(text);
    hex::encode(mac.finalize().into_bytes())
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

pub(crate) fn stamp(now: jiff::Timestamp) -> String {
    now.to_zoned(jiff::tz::TimeZone::UTC).strftime("%Y%m%dT%H%M%SZ").to_string()
}

#[cfg(test)]
#[path = "sigv4_tests.rs"]
mod tests;
