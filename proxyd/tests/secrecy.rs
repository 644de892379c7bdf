//! Where a value may be while proxyd works, and where it may never come back: every form in which
//! an upstream can return it, memory after the last exchange, files, and the vault's death.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::*;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ipc::vault::Health;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const H1: &[&[u8]] = &[b"http/1.1"];
const GET: &[u8] = b"GET /echo HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n";

/// An upstream that gives this answer to every request, in pieces of `size` bytes.
async fn answering(head: &str, body: Vec<u8>, size: usize) -> Upstream {
    let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{head}\r\n");
    let answer = [head.into_bytes(), body].concat();
    Upstream::tls("api.test", H1, move |mut stream| {
        let answer = answer.clone();
        async move {
            crate::support::head(&mut stream).await;
            for piece in answer.chunks(size) {
                if stream.write_all(piece).await.is_err() || stream.flush().await.is_err() {
                    return;
                }
            }
            let _ = stream.shutdown().await;
        }
    })
    .await
}

async fn ask(upstream: &Upstream) -> (Proxyd, String) {
    let proxyd = Proxyd::start(POLICY, &[("api.test", upstream)]).await;
    proxyd.put_secret("api").await;
    let answer = talk(&mut proxyd.lease().await.h1("api.test").await, GET).await;
    (proxyd, answer)
}

/// The forms of the value that the answers below hold, by name.
fn forms() -> Vec<(&'static str, String)> {
    let hex = |upper: bool| -> String {
        let digits = |byte: u8| if upper { format!("{byte:02X}") } else { format!("{byte:02x}") };
        CANARY.bytes().map(digits).collect()
    };
    vec![
        ("raw", CANARY.to_owned()),
        ("header", format!("Bearer {CANARY}")),
        ("base64", STANDARD.encode(CANARY)),
        ("base64 after one byte", STANDARD.encode(format!("a{CANARY}z"))),
        ("base64 after two bytes", STANDARD.encode(format!("ab{CANARY}"))),
        ("base64url", URL_SAFE_NO_PAD.encode(format!("Bearer {CANARY}"))),
        ("hex", hex(false)),
        ("HEX", hex(true)),
        ("percent", CANARY.bytes().map(|byte| format!("%{byte:02X}")).collect()),
        ("JSON", serde_json::to_string(CANARY).unwrap()),
        ("JSON by number", CANARY.bytes().map(|byte| format!("\\u{byte:04x}")).collect()),
        ("HTML by number", CANARY.bytes().map(|byte| format!("&#{byte};")).collect()),
        ("percent twice", CANARY.bytes().map(|byte| format!("%25{byte:02x}")).collect()),
        ("small letters", CANARY.to_lowercase()),
        ("capital letters", CANARY.to_uppercase()),
        ("base64 in capitals", STANDARD.encode(CANARY).to_uppercase()),
        ("base32", base32(&format!("Bearer {CANARY}"), b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")),
        ("base32hex", base32(CANARY, b"0123456789ABCDEFGHIJKLMNOPQRSTUV").to_lowercase()),
        ("quoted-printable", CANARY.bytes().map(|byte| format!("={byte:02X}")).collect()),
        ("HTML in JSON", CANARY.bytes().map(|byte| format!("\\u0026#x{byte:x};")).collect()),
        ("octal", CANARY.bytes().map(|byte| format!("\\{byte:03o}")).collect()),
        ("mixed", mixed()),
    ]
}

/// Each character in another way.
fn mixed() -> String {
    let each = |(at, byte)| match at % 5 {
        0 => char::from(byte).to_string(),
        1 => format!("%{byte:02x}"),
        2 => format!("&#{byte};"),
        3 => format!("\\u{byte:04x}"),
        _ => format!("&amp;#x{byte:X};"),
    };
    CANARY.bytes().enumerate().map(each).collect()
}

/// RFC 4648, section 6, with padding.
fn base32(text: &str, alphabet: &[u8; 32]) -> String {
    let mut bits: String = text.bytes().map(|byte| format!("{byte:08b}")).collect();
    bits.extend(std::iter::repeat_n('0', (5 - bits.len() % 5) % 5));
    let digit = |at| alphabet[usize::from_str_radix(&bits[at..at + 5], 2).unwrap()];
    let mut out: String = (0..bits.len()).step_by(5).map(|at| char::from(digit(at))).collect();
    out.extend(std::iter::repeat_n('=', (8 - out.len() % 8) % 8));
    out
}

/// A chunked body with its trailers, in one piece.
fn without_chunks(mut rest: &str) -> String {
    let mut joined = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return joined + after;
        }
        joined += &after[..size];
        rest = &after[size + 2..];
    }
    panic!("the body breaks off: {joined}");
}

#[tokio::test]
async fn no_form_of_the_value_comes_back_in_any_part_of_an_answer() {
    let fields: String = forms()
        .iter()
        .enumerate()
        .map(|(i, (_, form))| format!("X-Form-{i}: {form}\r\n"))
        .collect();
    let body: String = forms().iter().map(|(name, form)| format!("{name} {form}\n")).collect();
    let chunked: String = body
        .as_bytes()
        .chunks(7)
        .map(|piece| format!("{:x}\r\n{}\r\n", piece.len(), String::from_utf8_lossy(piece)))
        .collect();
    let head = format!("{fields}Transfer-Encoding: chunked\r\n");
    let upstream = answering(&head, format!("{chunked}0\r\n{fields}\r\n").into(), 50).await;

    let (proxyd, answer) = ask(&upstream).await;

    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(answer.contains("X-Form-9") && answer.ends_with("\r\n\r\n"), "{answer}");
    let (head, rest) = answer.split_once("\r\n\r\n").unwrap();
    let joined = without_chunks(rest);
    assert!(joined.contains("base64url ") && joined.contains("X-Form-9: "), "{joined}");
    for (name, form) in forms() {
        // The characters at both ends of base64 are not the value's alone; nor is what pads it, or
        // stands before it in a field.
        let core = &form.trim_end_matches('=')[if name == "base32" { 14 } else { 4 }..];
        let core = &core[..core.len() - 4];
        assert!(!head.contains(core) && !joined.contains(core), "{name} came back: {answer}");
    }
    let record = proxyd.record(|record| record.scrubbed.is_some()).await;
    assert_eq!(record.scrubbed, Some(3 * forms().len() as u64));
}

#[tokio::test]
async fn no_form_of_a_basic_header_comes_back() {
    let header = format!("Basic {}", STANDARD.encode(format!("bot:{CANARY}")));
    let forms = [
        ("raw", header.clone()),
        ("hex", header.bytes().map(|byte| format!("{byte:02x}")).collect()),
        ("percent", header.bytes().map(|byte| format!("%{byte:02X}")).collect()),
        ("base64", STANDARD.encode(&header)),
        ("base64 of a field", STANDARD.encode(format!("authorization: {header}\r\n"))),
        ("base64url without padding", URL_SAFE_NO_PAD.encode(header.trim_end_matches('='))),
        ("base32", base32(&header, b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")),
    ];
    let body: String = forms.iter().map(|(name, form)| format!("{name} {form}\n")).collect();
    let upstream = answering(&format!("Content-Length: {}\r\n", body.len()), body.into(), 50).await;
    let policy = POLICY.replace("bearer = true", "basic = \"bot\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;

    let answer = talk(&mut proxyd.lease().await.h1("api.test").await, GET).await;

    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with('\n'), "{answer}");
    for (name, form) in forms {
        // What is not masked are the ends, which others have a part in.
        let (before, after) = if name == "base64 of a field" { (30, 8) } else { (14, 8) };
        let core = &form[before..form.len() - after];
        assert!(!answer.contains(core), "{name} came back: {answer}");
    }
}

#[tokio::test]
async fn a_compressed_answer_with_the_value_breaks_off_before_it() {
    let text = format!("{}{CANARY} and more", "filler ".repeat(300));
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(text.as_bytes()).unwrap();
    let mut br = Vec::new();
    brotli::CompressorWriter::new(&mut br, 4096, 5, 20).write_all(text.as_bytes()).unwrap();
    let zstd = zstd::encode_all(text.as_bytes(), 3).unwrap();
    for (coding, body) in [("gzip", gzip.finish().unwrap()), ("br", br), ("zstd", zstd)] {
        let head = format!("Content-Encoding: {coding}\r\nContent-Length: {}\r\n", body.len());
        let length = body.len();
        let upstream = answering(&head, body, 40).await;

        let (proxyd, answer) = ask(&upstream).await;

        assert!(!answer.contains(CANARY), "{coding}");
        let got = answer.split_once("\r\n\r\n").map_or(0, |(_, body)| body.len());
        // Lossy text is never shorter than what it stands for.
        assert!(
            got < length || !answer.starts_with("HTTP/1.1 200 "),
            "{coding}: {got} of {length}"
        );
        proxyd.record(|record| record.reason.as_deref().is_some_and(|r| r.contains(coding))).await;
    }
}

#[tokio::test]
async fn an_answer_cannot_hide_that_its_body_is_compressed() {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(format!("the value is {CANARY}, so {CANARY}").as_bytes()).unwrap();
    let body = gzip.finish().unwrap();
    let head = format!(
        "Content-Encoding: gzip\r\nConnection: content-encoding\r\nContent-Length: {}\r\n",
        body.len()
    );
    let length = body.len();
    let upstream = answering(&head, body, 4096).await;

    let (proxyd, answer) = ask(&upstream).await;

    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    assert!(head.is_empty() || head.starts_with("HTTP/1.1 200 "), "{answer}");
    // Lossy text is never shorter than what it stands for.
    assert!(body.len() < length, "{} of {length}", body.len());
    proxyd.record(|record| record.reason.as_deref().is_some_and(|r| r.contains("gzip"))).await;
}

#[tokio::test]
async fn base64_in_lines_does_not_come_back() {
    let long = STANDARD.encode(format!("{}{CANARY} and more", "x".repeat(50)));
    let (line, rest) = long.split_at(76);
    let body = format!("{line}\r\n{rest}\r\n");
    let head = format!("Content-Length: {}\r\n", body.len());
    let upstream = answering(&head, body.into(), 30).await;

    let (proxyd, answer) = ask(&upstream).await;

    assert!(answer.contains("********"), "{answer}");
    assert!(!answer.contains(&line[70..]) && !answer.contains(&rest[..8]), "{answer}");
    let record = proxyd.record(|record| record.scrubbed.is_some()).await;
    assert_eq!(record.scrubbed, Some(1));
}

/// The refusal's body and everything in the audit, which say why without saying the value.
async fn refused_without_the_value(upstream: &Upstream) -> String {
    let (proxyd, answer) = ask(upstream).await;
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    proxyd.record(|record| record.bytes_down.is_some() && record.reason.is_some()).await;
    let audit = serde_json::to_string(&proxyd.audit().await).unwrap();
    for (place, text) in [("answer", &answer), ("audit", &audit), ("log", &proxyd.log())] {
        assert!(!text.contains(&CANARY[..CANARY.len() / 2]), "the {place} holds it: {text}");
    }
    answer
}

#[tokio::test]
async fn a_refusal_does_not_quote_the_value_that_an_upstream_names_as_the_encoding() {
    for before in [0, 12, 30] {
        let named = format!("{}{CANARY}", "x".repeat(before));
        let head = format!("Content-Encoding: {named}\r\nContent-Length: 2\r\n");

        let answer = refused_without_the_value(&answering(&head, b"ok".into(), 99).await).await;

        assert!(answer.contains("answer_unsearchable"), "{answer}");
    }
}

#[tokio::test]
async fn a_refusal_does_not_quote_the_debug_data_with_which_an_upstream_ends_http2() {
    let upstream = Upstream::tls("api.test", &[b"h2"], |mut stream| async move {
        // RFC 9113: an empty SETTINGS frame; then, once the request is here, a GOAWAY.
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        let mut got = Vec::new();
        while !got.windows(4).any(|frame| frame == [1, 5, 0, 0]) {
            let mut some = [0; 4096];
            let length = stream.read(&mut some).await.unwrap();
            assert!(length > 0, "no request came");
            got.extend_from_slice(&some[..length]);
        }
        let length = u8::try_from(8 + CANARY.len()).unwrap();
        let mut goaway = vec![0, 0, length, 7, 0, 0, 0, 0, 0];
        goaway.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 11]);
        goaway.extend_from_slice(CANARY.as_bytes());
        stream.write_all(&goaway).await.unwrap();
        stream.flush().await.unwrap();
        let _ = stream.read(&mut [0; 64]).await;
    })
    .await;

    let answer = refused_without_the_value(&upstream).await;

    assert!(answer.contains("connection ended"), "{answer}");
}

/// Whether a process's writable memory holds the text; none when it may not be read.
fn memory_holds(pid: u32, wanted: &[u8]) -> Option<bool> {
    let process = Path::new("/proc").join(pid.to_string());
    let memory = std::fs::File::open(process.join("mem")).ok()?;
    let maps = std::fs::read_to_string(process.join("maps")).ok()?;
    let mut found = false;
    for line in maps.lines().filter(|line| line.split(' ').nth(1) == Some("rw-p")) {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let from = u64::from_str_radix(from, 16).unwrap();
        let to = u64::from_str_radix(to, 16).unwrap();
        let mut bytes = vec![0; usize::try_from(to - from).unwrap()];
        if memory.read_exact_at(&mut bytes, from).is_ok() {
            let mut rest = &bytes[..];
            while let Some(at) = rest.iter().position(|byte| *byte == wanted[0]) {
                rest = &rest[at..];
                found |= rest.starts_with(wanted);
                rest = &rest[1..];
            }
        }
    }
    Some(found)
}

async fn health(proxyd: &Proxyd) -> Health {
    proxyd.control().get("/v1/health").await.unwrap()
}

#[tokio::test]
async fn once_exchanges_are_over_no_process_holds_the_value() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    for _ in 0..20 {
        let answer = talk(&mut lease.h1("api.test").await, GET).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && !answer.contains(CANARY), "{answer}");
    }
    lease.close().await;
    let health = health(&proxyd).await;

    if !rustix::process::geteuid().is_root() {
        for pid in [health.pid, health.vault_pid] {
            assert_eq!(memory_holds(pid, CANARY.as_bytes()), None, "memory can be read");
        }
        return;
    }
    // The search itself works: a name is found.
    assert_eq!(memory_holds(health.pid, b"api.test"), Some(true));
    assert_eq!(memory_holds(health.vault_pid, CANARY.as_bytes()), Some(false));
    let end = Instant::now() + Duration::from_secs(30);
    while memory_holds(health.pid, CANARY.as_bytes()) != Some(false) {
        assert!(Instant::now() < end, "the traffic process still holds the value");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn no_file_that_proxyd_writes_holds_the_value() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let (proxyd, answer) = ask(&upstream).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    proxyd.record(|record| record.status == Some(200)).await;

    let mut directories = vec![proxyd.dir.path().to_owned()];
    let mut files = 0;
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let (path, kind) = entry.map(|e| (e.path(), e.file_type().unwrap())).unwrap();
            if kind.is_dir() {
                directories.push(path);
            } else if kind.is_file() {
                files += 1;
                let bytes = std::fs::read(&path).unwrap();
                let holds = bytes.windows(CANARY.len()).any(|w| w == CANARY.as_bytes());
                assert!(!holds, "{} holds the value", path.display());
            }
        }
    }
    assert!(files > 5, "only {files} files were searched");
}

#[tokio::test]
async fn proxyd_ends_when_its_vault_dies_and_nothing_leaves_meanwhile() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    let health = health(&proxyd).await;

    let vault = rustix::process::Pid::from_raw(health.vault_pid.cast_signed()).unwrap();
    rustix::process::kill_process(vault, rustix::process::Signal::KILL).unwrap();
    let answer = talk(&mut stream, GET).await;

    assert!(!answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(upstream.connections(), 0);
    until("proxyd has ended", || async {
        // Not waited for yet, it stays as a zombie.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", health.pid));
        stat.map_or(true, |stat| stat.rsplit_once(") ").is_some_and(|(_, s)| s.starts_with('Z')))
    })
    .await;
    assert!(proxyd.log().contains("vault"), "{}", proxyd.log());
}
