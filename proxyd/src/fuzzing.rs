//! What must hold for any bytes whatever, one function for each parser that meets hostile ones.
//!
//! `tests/fuzz` hands in what a fuzzer makes up, and an ordinary test what was kept of that. Each
//! function panics where its claim fails; no panic of the parsers themselves is expected either.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use policies::path::CanonicalPath;
use policies::{Host, HostPattern, PolicySet, Scheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::Runtime;

use crate::dns::message::{self, Answer, ParseError};
use crate::entry::authority;
use crate::head::{Fields, RequestHead};
use crate::relay::body::{BodyIn, Piece, ReadError};
use crate::relay::h1::body::Reading;
use crate::relay::h1::framing::{self, Framing, Version};
use crate::relay::h1::{client, head, server, wire};
use crate::relay::h2::convert;
use crate::relay::stream::Stream;
use crate::relay::websocket::Guard;
use crate::scrub::{BodyScrubber, reference};
use crate::tls::hello;

/// Messages and pieces of one input; no real one needs more.
const STEPS_MAX: usize = 1000;

/// A peer that says these bytes, in pieces of that size, and takes whatever it is told.
struct Peer {
    says: Bytes,
    piece: usize,
}

impl Peer {
    /// The first byte of an input sets the size of the pieces.
    fn stream(data: &[u8]) -> Stream {
        let (piece, says) = data.split_first().unwrap_or((&0, &[]));
        let piece = usize::from(*piece).max(1);
        Stream::new(Self { says: Bytes::copy_from_slice(says), piece })
    }
}

impl AsyncRead for Peer {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let length = self.piece.min(self.says.len()).min(buffer.remaining());
        let part = self.says.split_to(length);
        buffer.put_slice(&part);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Peer {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    thread_local! {
        static RUNTIME: RefCell<Runtime> = RefCell::new(
            tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .build()
                .expect("a runtime without sockets needs nothing of the system"),
        );
    }
    RUNTIME.with_borrow(|runtime| runtime.block_on(future))
}

/// A client hello is read or refused, and its name is a host or none.
pub fn client_hello(data: &[u8]) {
    let hello = run(hello::read(Peer::stream(data)));
    if let Ok(hello) = hello
        && let Some(name) = &hello.server_name
    {
        assert!(name.is_ascii(), "{name:?}");
        host_is_fixed(name);
    }
}

/// Every request of a connection that is taken is printed so that it reads as the same request.
pub fn request_head(data: &[u8]) {
    run(async {
        let mut connection = server::Connection::new(Peer::stream(data));
        for _ in 0..STEPS_MAX {
            let Ok(incoming) = connection.next().await else { return };
            let raw = &incoming.raw;
            let printed = head::print_request(&raw.method, &raw.target, &raw.headers).freeze();
            let again = head::parse_request(&printed).expect("what was printed can be read");
            assert_eq!((&again.method, &again.target), (&raw.method, &raw.target));
            assert!(again.headers == raw.headers, "{:?}", raw.headers.to_vec());
            if raw.version == Version::Http11 {
                let framing = framing::of_request(Version::Http11, &again.headers);
                assert_eq!(framing.ok(), Some(incoming.framing));
            }
            let (mut body, _) = connection.parts(&incoming);
            if drain(&mut body).await.is_err() {
                return;
            }
        }
    });
}

/// An answer is read as one or refused, to whatever method.
pub fn response_head(data: &[u8]) {
    let (choice, data) = data.split_first().unwrap_or((&0, &[]));
    let method: &[u8] = [&b"GET"[..], b"HEAD", b"POST", b"CONNECT"][usize::from(choice % 4)];
    let upgrade = (choice & 4 != 0).then(|| Bytes::from_static(b"websocket"));
    run(async {
        let mut connection = client::Connection::new(Peer::stream(data));
        let asked = RequestHead {
            method: Bytes::copy_from_slice(method),
            target: Bytes::from_static(b"/"),
            scheme: Scheme::Https,
            authority: "api.test".to_owned(),
            headers: Fields::new(),
        };
        let sent = connection.send(&asked, Framing::None, upgrade.as_ref()).await;
        let Ok((_, mut awaited)) = sent else { return };
        for _ in 0..STEPS_MAX {
            let Ok((head, next)) = awaited.head().await else { return };
            let printed = head::print_response(&head).freeze();
            let (again, _) = head::parse_response(&printed).expect("what was printed can be read");
            assert!(again.status == head.status && again.headers == head.headers);
            match next {
                client::Next::Interim(next) => awaited = next,
                client::Next::Switched(mut body) | client::Next::Body(mut body, _) => {
                    let _ = drain(&mut body).await;
                    return;
                }
            }
        }
    });
}

/// A chunked body gives the same data in whatever pieces it comes, and again when it is chunked
/// anew.
pub fn chunked_body(data: &[u8]) {
    let whole = data.split_first().map_or(&[][..], |(_, rest)| rest);
    let read = |bytes: &[u8], piece: u8| {
        let stream = Peer::stream(&[&[piece], bytes].concat());
        run(async {
            let (mut reader, _writer) = wire::split(stream);
            let mut body = BodyIn::H1(Reading::new(&mut reader, Framing::Chunked));
            drain(&mut body).await
        })
    };
    let once = read(whole, u8::MAX);
    let pieces = read(whole, data.first().copied().unwrap_or(1));
    assert_eq!(once.is_ok(), pieces.is_ok());
    let (Ok((once, trailers)), Ok((pieces, same))) = (once, pieces) else { return };
    assert!(once == pieces && trailers == same);
    let mut anew = BytesMut::new();
    if !once.is_empty() {
        anew.extend_from_slice(format!("{:x}\r\n", once.len()).as_bytes());
        anew.extend_from_slice(&once);
        anew.extend_from_slice(b"\r\n");
    }
    anew.extend_from_slice(b"0\r\n");
    head::print_fields(&mut anew, &trailers.clone().unwrap_or_default());
    let Ok((again, kept)) = read(&anew, u8::MAX) else { panic!("chunked anew it is refused") };
    assert!(again == once && kept.unwrap_or_default() == trailers.unwrap_or_default());
}

async fn drain(body: &mut BodyIn<'_>) -> Result<(Vec<u8>, Option<Fields>), ReadError> {
    let (mut data, mut trailers) = (Vec::new(), None);
    loop {
        match body.next().await? {
            Some(Piece::Data(part)) => data.extend_from_slice(&part),
            Some(Piece::Trailers(fields)) => trailers = Some(fields),
            None => return Ok((data, trailers)),
        }
    }
}

/// Fields that HTTP/2 can carry mean the same in HTTP/1.1: none begins another or ends the head.
/// Lines of the input are method, target, authority, and then `name value` each.
pub fn h2_head(data: &[u8]) {
    let mut lines = data.split(|b| *b == b'\n');
    let mut line = || lines.next().unwrap_or_default();
    let (method, target, named) = (line(), line(), line());
    let mut map = http::HeaderMap::new();
    for line in lines.take(100) {
        let at = line.iter().position(|b| *b == b' ').unwrap_or(line.len());
        let (name, value) = (&line[..at], line.get(at + 1..).unwrap_or_default());
        let name = http::HeaderName::from_bytes(name);
        let value = http::HeaderValue::from_bytes(value);
        if let (Ok(name), Ok(value)) = (name, value) {
            map.append(name, value);
        }
    }
    let uri = http::Uri::builder().scheme("https").authority(named).path_and_query(target).build();
    let (Ok(method), Ok(uri)) = (http::Method::from_bytes(method), uri) else { return };
    let Some(target) = uri.path_and_query() else { return };
    let head = RequestHead {
        method: Bytes::copy_from_slice(method.as_str().as_bytes()),
        target: Bytes::copy_from_slice(target.as_str().as_bytes()),
        scheme: Scheme::Https,
        authority: uri.authority().map_or_else(String::new, ToString::to_string),
        headers: convert::fields(&map),
    };
    let printed = head::print_request(&head.method, &head.target, &head.headers).freeze();
    // What only HTTP/2 can say is refused by the other side's own rules, never read as something
    // else.
    if let Ok(again) = head::parse_request(&printed) {
        assert_eq!((&again.method, &again.target), (&head.method, &head.target));
        let trimmed = |fields: &Fields| -> Vec<(Bytes, Vec<u8>)> {
            fields.iter().map(|(n, v)| (n.clone(), v.trim_ascii().to_vec())).collect()
        };
        assert_eq!(trimmed(&again.headers), trimmed(&head.headers));
    }
    if let Ok(request) = convert::request(&head) {
        assert_eq!(request.method(), method);
        assert!(!request.headers().contains_key("host"));
    }
}

/// Whatever a packet says, the answer is short, is one, and repeats the question and nothing else.
pub fn dns_packet(data: &[u8]) {
    let addresses = ["198.18.0.1", "fd00::1"].map(|text| text.parse().expect("an address"));
    match message::parse(data) {
        Ok(question) => {
            let _ = Host::parse(&question.name);
            let [v4, v6] = addresses.map(Answer::Address);
            for answer in [v4, v6, Answer::NoRecord, Answer::NoName, Answer::Refused] {
                let reply = message::reply(&question, answer);
                check_reply(data, &reply);
                let end = 12 + question.bytes().len();
                assert_eq!(&reply[12..end], &data[12..end]);
            }
        }
        Err(ParseError::Reply(reply)) => check_reply(data, &reply),
        Err(ParseError::Ignore) => {}
    }
    if let Some(reply) = message::too_long(data) {
        check_reply(data, &reply);
    }
}

fn check_reply(packet: &[u8], reply: &[u8]) {
    assert!((12..=512).contains(&reply.len()));
    assert_eq!(reply[..2], packet[..2], "the answer to another question");
    assert_ne!(reply[2] & 0x80, 0, "not an answer");
    assert_eq!(packet[2] & 0x80, 0, "an answer was answered");
    assert!(matches!(message::parse(reply), Err(ParseError::Ignore)));
}

/// A policy file is taken, or refused with reasons.
pub fn policy_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match PolicySet::parse(&[("dev.toml".to_owned(), text.to_owned())]) {
        Ok(set) => assert!(set.environment("dev").is_some()),
        Err(found) => {
            assert!(!found.is_empty());
            assert!(found.iter().all(|diagnostic| !diagnostic.to_string().is_empty()));
        }
    }
}

/// Names, authorities, targets and paths have one canonical form, which stays as it is.
pub fn url(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    host_is_fixed(text);
    if let Some((host, port)) = authority::parse(text) {
        let whole = host.authority(port.unwrap_or(443));
        assert_eq!(authority::parse(&whole), Some((host.clone(), Some(port.unwrap_or(443)))));
        let settled = authority::settle(text, &host, port.unwrap_or(443));
        let settled = settled.expect("it names itself").into_owned();
        assert!(settled.is_ascii());
        let again = authority::settle(&settled, &host, port.unwrap_or(443));
        assert_eq!(again.as_deref(), Some(&settled[..]));
    }
    if let Some(absolute) = authority::absolute(text) {
        assert!(absolute.target.starts_with('/'));
        assert!(!absolute.authority.contains(['/', '?']));
    }
    if let Ok(path) = CanonicalPath::parse(text) {
        for segment in path.segments() {
            assert!(segment != "." && segment != ".." && !segment.contains(['/', '\\', '\0']));
        }
    }
    let _ = HostPattern::parse(text);
}

fn host_is_fixed(text: &str) {
    let Ok(host) = Host::parse(text) else { return };
    let shown = host.to_string();
    assert!(shown.is_ascii() && shown == shown.to_ascii_lowercase(), "{text:?} {shown:?}");
    assert_eq!(Host::parse(&shown).as_ref(), Ok(&host), "{text:?}");
    assert!(HostPattern::parse(&shown).is_ok_and(|pattern| pattern.matches(&host)), "{text:?}");
}

/// What goes up an upgraded connection is judged alike in whatever pieces it comes.
pub fn websocket(data: &[u8]) {
    let (choice, rest) = data.split_first().unwrap_or((&0, &[]));
    let protocol: &[u8] = if choice & 1 == 0 { b"websocket" } else { b"other" };
    let mut whole = Guard::new(protocol);
    let verdict = whole.check(rest);
    let mut piecewise = Guard::new(protocol);
    let size = usize::from(choice >> 1).max(1);
    let verdicts = rest.chunks(size).try_for_each(|piece| piecewise.check(piece));
    assert_eq!(verdict, verdicts);
    if verdict.is_ok() {
        assert_eq!(whole.farewell(), piecewise.farewell());
    }
}

/// What a fuzzed text may hold, in encodings whose letters and digits the fuzzer varies.
const VALUE: &[u8] = b"SECRET-CANARY/7f3a+b=&c";

/// A value is masked where the reference finds it and nowhere else, in whatever pieces the text
/// comes, and alike in WebSocket messages. Bytes 1 to 8 of the input stand for forms of the value.
pub fn scrub(data: &[u8]) {
    let (choice, rest) = data.split_first().unwrap_or((&0, &[]));
    let each = |encode: fn(u8) -> String| VALUE.iter().map(|byte| encode(*byte)).collect();
    let mut text = Vec::new();
    for byte in rest {
        let form: String = match byte {
            1 => each(|byte| char::from(byte).into()),
            2 => each(|byte| format!("%{byte:02x}")),
            3 => each(|byte| format!("\\u{byte:04X}")),
            4 => each(|byte| format!("&#{byte};")),
            5 => each(|byte| format!("={byte:02X}")),
            6 => "SECRET-CANARY".into(),
            7 => "U0VDUKVULUNBTKFSWS83ZJNHK2I9JMM".into(),
            8 => "KNCUGUSFKQWUGQKOIFJFSLZXMYZWCK3CHUTGG".into(),
            _ => {
                text.push(*byte);
                continue;
            }
        };
        text.extend_from_slice(form.as_bytes());
    }
    let size = usize::from(choice >> 1).max(1);
    let cuts: Vec<usize> = (size..text.len()).step_by(size).collect();
    let patterns = reference::patterns(VALUE);
    if choice & 1 == 0 {
        assert_eq!(reference::masked(&patterns, &text, &cuts), reference::hidden(VALUE, &text));
        return;
    }
    let through = |size: usize| {
        let mut scrubber = BodyScrubber::switched(&patterns, b"websocket");
        let mut out = Vec::new();
        for piece in text.chunks(size) {
            // What came before a refusal may come in more than one piece.
            let Ok(parts) = scrubber.push(Bytes::copy_from_slice(piece)) else { return None };
            out.extend(parts.concat());
        }
        scrubber.finish().ok().map(|rest| [out, rest.concat()].concat())
    };
    let whole = through(text.len().max(1));
    assert!(whole.as_ref().is_none_or(|whole| whole.len() == text.len()));
    assert!(whole == through(size), "the pieces matter");
}
