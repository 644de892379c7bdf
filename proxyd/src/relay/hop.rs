//! Fields that belong to one connection and must not cross to the next (RFC 9110 section 7.6.1).

use bytes::Bytes;

use crate::head::Fields;

/// Always of one connection, named in `Connection` or not.
const HOP_BY_HOP: [&str; 6] =
    ["connection", "keep-alive", "proxy-connection", "proxy-authorization", "te", "upgrade"];

/// What a request may not declare hop-by-hop: removing these would change whom the request is
/// for, where it ends, or what was judged.
const NEVER_HOP_BY_HOP: [&str; 8] = [
    "authorization",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    "transfer-encoding",
    "trailer",
];

/// What an answer may not declare hop-by-hop besides: its body is searched and read by it.
const NEVER_HOP_BY_HOP_IN_ANSWERS: [&str; 2] = ["content-encoding", "content-range"];

/// A request asked to strip a field that must stay.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("connection names a field that must not be removed")]
pub struct Indispensable;

/// What a request said about its own connection.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Connection {
    pub close: bool,
    /// The protocol to switch to, if an upgrade is asked for.
    pub upgrade: Option<Bytes>,
}

/// Removes what belongs to the sandbox's connection. `te: trailers` stays, in its plain form: it
/// is end to end for gRPC.
pub fn strip_request(headers: &mut Fields) -> Result<Connection, Indispensable> {
    let mut connection = said(headers);
    // Upgrades to HTTP itself are never passed on: requests would follow that nobody judges.
    if headers.members("upgrade").any(carries_requests) {
        connection.upgrade = None;
    }
    let trailers = headers.lists("te", "trailers");
    for name in named(headers) {
        if NEVER_HOP_BY_HOP.contains(&name.as_str()) {
            return Err(Indispensable);
        }
        headers.remove_all(&name);
    }
    remove(headers);
    if trailers {
        headers.append("te", Bytes::from_static(b"trailers"));
    }
    Ok(connection)
}

/// Whether more requests could come in a protocol of that name, and what is no plain name at all.
fn carries_requests(protocol: &[u8]) -> bool {
    let name = protocol.split(|byte| *byte == b'/').next().unwrap_or_default();
    let plain = name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._+".contains(byte));
    let known = [&b"h2"[..], b"h2c", b"h3", b"http", b"https", b"shttp", b"tls"];
    name.is_empty() || !plain || known.iter().any(|k| name.eq_ignore_ascii_case(k))
}

/// Removes what belongs to the upstream's connection; says whether it stays open.
pub fn strip_response(headers: &mut Fields) -> Connection {
    let connection = said(headers);
    for name in named(headers) {
        let kept = NEVER_HOP_BY_HOP.iter().chain(&NEVER_HOP_BY_HOP_IN_ANSWERS);
        if !kept.into_iter().any(|field| *field == name) {
            headers.remove_all(&name);
        }
    }
    remove(headers);
    connection
}

fn said(headers: &Fields) -> Connection {
    let upgrade = headers.lists("connection", "upgrade");
    Connection {
        close: headers.lists("connection", "close"),
        upgrade: headers.first("upgrade").filter(|_| upgrade).cloned(),
    }
}

fn named(headers: &Fields) -> Vec<String> {
    headers
        .members("connection")
        .map(|name| String::from_utf8_lossy(name).to_ascii_lowercase())
        .filter(|name| !HOP_BY_HOP.contains(&name.as_str()) && name != "close")
        .collect()
}

fn remove(headers: &mut Fields) {
    for name in HOP_BY_HOP {
        headers.remove_all(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(list: &[(&'static str, &'static str)]) -> Fields {
        list.iter()
            .map(|(n, v)| (Bytes::from_static(n.as_bytes()), Bytes::from_static(v.as_bytes())))
            .collect()
    }

    #[test]
    fn fields_named_in_connection_do_not_cross() {
        let mut headers = fields(&[
            ("Connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("Keep-Alive", "5"),
            ("X-End", "2"),
            ("TE", "trailers, deflate"),
        ]);

        let connection = strip_request(&mut headers).unwrap();

        assert!(connection.close);
        assert!(headers == fields(&[("X-End", "2"), ("te", "trailers")]));
    }

    #[test]
    fn an_answer_cannot_have_what_its_body_is_read_by_stripped() {
        for name in ["Content-Encoding", "content-type", "content-length"] {
            let mut headers = fields(&[("Connection", "x-hop, "), ("Connection", name)]);
            headers.append(name, Bytes::from_static(b"gzip"));
            headers.append("x-hop", Bytes::from_static(b"1"));

            strip_response(&mut headers);

            assert!(headers == fields(&[(name, "gzip")]), "{name}");
        }
    }

    #[test]
    fn a_request_cannot_have_its_host_or_length_stripped() {
        for name in NEVER_HOP_BY_HOP {
            let mut headers = fields(&[("Connection", name)]);

            assert_eq!(strip_request(&mut headers), Err(Indispensable), "{name}");
        }
    }

    #[test]
    fn an_upgrade_to_http_is_dropped_however_it_is_listed() {
        for protocol in [
            "h2c",
            "H2C",
            "h2c, websocket",
            "websocket, h2c",
            "websocket,,h2c ,",
            "h2c/1.0",
            "HTTP/2.0",
            "TLS/1.0",
            "\"h2c\"",
            "/1",
        ] {
            let mut headers = fields(&[("Connection", "Upgrade"), ("Upgrade", protocol)]);
            assert_eq!(strip_request(&mut headers).unwrap().upgrade, None, "{protocol}");
        }
        let mut twice =
            fields(&[("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Upgrade", "h2c")]);
        assert_eq!(strip_request(&mut twice).unwrap().upgrade, None);
        let mut web = fields(&[("Connection", "keep-alive, Upgrade"), ("Upgrade", "websocket")]);

        assert_eq!(strip_request(&mut web).unwrap().upgrade.as_deref(), Some(&b"websocket"[..]));
    }
}
