//! Promise: what an upstream gives back, and whatever a sandbox reads of itself and of the daemons,
//! never holds a credential; a placeholder gives way to the value or goes nowhere.
use std::io::Write;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use cleanhands_tests::installation::{DAEMONS, Installation, Setup};
use cleanhands_tests::origin::{Origin, Request, ok};

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
credential = "api"
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["git.example"]
methods = ["GET"]
credential = "git"
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["read.example"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example"]
env = "API_TOKEN"
[credentials.git]
secret = "local:git"
inject = { basic = { user = "x-access-token" } }
hosts = ["git.example"]
env = "GIT_TOKEN"
"#;
fn canary() -> String {
    // A quote, a backslash and a slash, so that JSON and URLs must write it in another way.
    format!("SECRET\"CANARY\\{}/+", ipc::id::random_text(20))
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// The forms in which an origin can give a value back, by the path that asks for each.
fn forms(value: &str) -> Vec<(&'static str, String)> {
    let percent = |upper: bool| -> String {
        let digits = |b: u8| if upper { format!("%{b:02X}") } else { format!("%{b:02x}") };
        value.bytes().map(digits).collect()
    };
    vec![
        ("raw", value.to_owned()),
        ("base64", STANDARD.encode(value)),
        ("base64-1", STANDARD.encode(format!("x{value}"))),
        ("base64-2", STANDARD.encode(format!("xy{value}"))),
        ("base64-bearer", STANDARD.encode(format!("Bearer {value}"))),
        ("base64url", URL_SAFE_NO_PAD.encode(value)),
        ("hex", hex::encode(value)),
        ("hex-upper", hex::encode_upper(value)),
        ("percent", percent(false)),
        ("percent-upper", percent(true)),
        ("json", serde_json::to_string(value).unwrap()),
        ("capitals", value.to_ascii_uppercase()),
        ("base64-capitals", STANDARD.encode(value).to_ascii_uppercase()),
        ("base32", base32(value)),
        ("mixed", mixed(value)),
        ("quoted-printable", value.bytes().map(|byte| format!("={byte:02X}")).collect()),
    ]
}

/// RFC 4648, section 6, without padding.
fn base32(value: &str) -> String {
    let mut bits: String = value.bytes().map(|byte| format!("{byte:08b}")).collect();
    bits.extend(std::iter::repeat_n('0', (5 - bits.len() % 5) % 5));
    let digit = |at| usize::from_str_radix(&bits[at..at + 5], 2).unwrap();
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    (0..bits.len()).step_by(5).map(|at| char::from(alphabet[digit(at)])).collect()
}

/// Each character escaped in another way.
fn mixed(value: &str) -> String {
    let each = |(at, byte)| match at % 3 {
        0 => format!("%{byte:02x}"),
        1 => format!("&#{byte};"),
        _ => format!("\\u{byte:04x}"),
    };
    value.bytes().enumerate().map(each).collect()
}

/// What gives a value away: each form without the ends that its neighbours share.
fn needles(value: &str) -> Vec<Vec<u8>> {
    forms(value).into_iter().map(|(_, f)| f.as_bytes()[4..f.len() - 4].to_vec()).collect()
}

fn holds(text: &[u8], needles: &[Vec<u8>]) -> bool {
    needles.iter().any(|needle| text.windows(needle.len()).any(|w| w == needle.as_slice()))
}

/// Answers `/PLACE/FORM` with the value that came in, in that form and in that place.
fn echo(request: &Request) -> Vec<u8> {
    let authorization = request.values("authorization").join(",");
    let value = authorization.strip_prefix("Bearer ").unwrap_or_default();
    let mut parts = request.target().split('/').skip(1);
    let (place, form) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let forms = forms(value);
    let Some((_, shown)) = forms.iter().find(|(name, _)| *name == form) else {
        return ok("", b"no such form");
    };
    let text = format!("before {shown} after");
    let chunked = "Transfer-Encoding: chunked\r\nConnection: close\r\n";
    match place {
        "body" => ok("", text.as_bytes()),
        "field" => ok(&format!("X-Shown: {text}\r\n"), b"before after"),
        "gzip" => ok("Content-Encoding: gzip\r\nConnection: close\r\n", &gzip(&text)),
        "chunks" | "events" => {
            let sse = place == "events";
            let text = if sse { format!("data: {text}\n\n") } else { text };
            let kind = if sse { "Content-Type: text/event-stream\r\n" } else { "" };
            let mut answer = format!("HTTP/1.1 200 OK\r\n{kind}{chunked}\r\n");
            for piece in text.as_bytes().chunks(3) {
                answer += &format!("{:x}\r\n", piece.len());
                answer += std::str::from_utf8(piece).unwrap();
                answer += "\r\n";
            }
            (answer + "0\r\n\r\n").into_bytes()
        }
        "trailer" => format!(
            "HTTP/1.1 200 OK\r\n{chunked}Trailer: X-Shown\r\n\r\nc\r\nbefore after\r\n0\r\n\
             X-Shown: {text}\r\n\r\n"
        )
        .into_bytes(),
        _ => ok("", b"no such place"),
    }
}

async fn started(value: &str) -> (Installation, Origin) {
    let origin = Origin::start(&["api.example"], echo).await;
    let setup = origin.behind("api.example", Setup::default().policy("dev", POLICY));
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", value).await;
    (installation, origin)
}

fn shell(installation: &Installation, script: &str) -> String {
    let (status, out, err) = tokio::task::block_in_place(|| installation.shell("dev", script));
    assert_eq!(status, Some(0), "{out}\n{err}");
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echo_in_any_form_and_place_reaches_the_sandbox_masked_or_not_at_all() {
    let value = canary();
    let (installation, origin) = started(&value).await;
    let names: Vec<&str> = forms("x").into_iter().map(|(name, _)| name).collect();
    let places = ["body", "field", "chunks", "events", "trailer", "gzip"];
    let script = format!(
        "for v in 1.1 2; do for p in {}; do \
         [ $p = gzip ] && how=--compressed || how=-i; \
         curl -s $how --http$v -w '##' $(printf \"https://api.example/$p/%s \" {}); done; done",
        places.join(" "),
        names.join(" ")
    );

    let (_, out, _) = tokio::task::block_in_place(|| installation.shell("dev", &script));

    let parts: Vec<&str> = out.strip_suffix("##").unwrap().split("##").collect();
    let asked =
        || [0, 1].into_iter().flat_map(|_| places).flat_map(|p| names.iter().map(move |f| (p, f)));
    assert_eq!(parts.len(), asked().count(), "{out}");
    let needles = needles(&value);
    for (part, (place, form)) in parts.iter().zip(asked()) {
        assert!(!holds(part.as_bytes(), &needles), "{place} {form}: {part}");
        // A compressed answer cannot be masked: it breaks off. All others come, with a mask.
        let came = part.contains("before") && part.contains("after") && part.contains("****");
        assert_eq!(came, place != "gzip", "{place} {form}: {part}");
    }
    assert_eq!(origin.seen().len(), asked().count());
    let bearer = format!("Bearer {value}");
    assert!(origin.seen().iter().all(|r| r.values("authorization") == [bearer.as_str()]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encoding_that_cannot_be_searched_does_not_come_through() {
    let value = canary();
    let origin = Origin::start(&["api.example"], |request| {
        let shown = request.values("authorization").join(",");
        let coding = request.target().trim_start_matches('/').replace('_', ", ");
        ok(&format!("Content-Encoding: {coding}\r\n"), shown.as_bytes())
    })
    .await;
    let setup = origin.behind("api.example", Setup::default().policy("dev", POLICY));
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", &value).await;
    let codings = ["compress", "x-unknown", "gzip_gzip", "identity_rot13", "br_x"];
    let script = format!(
        "for c in {}; do curl -s -o /tmp/got -w '%{{http_code}}\\n' https://api.example/$c; \
         cat /tmp/got; echo; done",
        codings.join(" ")
    );

    let out = shell(&installation, &script);

    assert!(!holds(out.as_bytes(), &needles(&value)), "{out}");
    assert!(!out.contains("200\n"), "{out}");
    assert_eq!(origin.seen().len(), codings.len(), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_can_read_nothing_of_the_daemons_and_no_value_of_itself() {
    let value = canary();
    let (installation, _origin) = started(&value).await;
    let pids: Vec<String> = DAEMONS.iter().map(|d| installation.pid(d).to_string()).collect();
    // Uses the credential, then reads whatever a process can read, also of itself and of a
    // process that it makes dump its core.
    let script = format!(
        "curl -s https://api.example/body/raw; echo; echo \"$API_TOKEN\"; env; set; \
         cat /proc/self/environ; cd /proc; for p in [0-9]*; do \
         for f in comm environ cmdline maps stack syscall; do \
         cat $p/$f 2>/dev/null; done; ls -l $p/fd $p/task $p/map_files $p/cwd $p/root $p/exe \
         2>/dev/null; done; \
         for p in 1 2 {}; do ( : < $p/mem ) 2>/dev/null && echo \"MEMORY-$((40+2)) $p\"; done; \
         cd /workspace; ulimit -c unlimited 2>/dev/null; ulimit -c; \
         sh -c 'kill -ABRT $$'; ls -A /workspace /tmp; \
         grep -rls CANARY / --exclude-dir=proc --exclude-dir=usr; true",
        pids.join(" ")
    );

    let out = shell(&installation, &script);

    assert!(out.starts_with("before ") && out.contains("****"), "the credential was not used");
    let leaked: Vec<&str> =
        out.lines().filter(|line| holds(line.as_bytes(), &needles(&value))).collect();
    assert!(leaked.is_empty(), "{leaked:#?}");
    for absent in ["proxyd", "harnessd", "MEMORY-42", "core."] {
        let found: Vec<&str> = out.lines().filter(|line| line.contains(absent)).collect();
        assert!(found.is_empty(), "{absent}: {found:#?}");
    }
    assert!(out.contains("API_TOKEN="), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_inside_basic_gives_way_to_the_value_and_leaks_to_no_other_host() {
    let value = canary();
    let hosts = ["git.example", "read.example"];
    let origin = Origin::start(&hosts, |request| {
        ok("", format!("before {} after", request.values("authorization").join(",")).as_bytes())
    })
    .await;
    let mut setup = Setup::default().policy("dev", POLICY);
    for host in hosts {
        setup = origin.behind(host, setup);
    }
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("git", &value).await;
    let script = "ask() { curl -s -w ' %{http_code}\\n' \"$@\"; }; \
        ask -u \"x:$GIT_TOKEN\" https://git.example/; \
        ask -u \"$GIT_TOKEN:x\" https://git.example/; \
        ask \"https://x:$GIT_TOKEN@git.example/\"; \
        ask https://git.example/; \
        ask -o /dev/null -u \"x:$GIT_TOKEN\" https://read.example/; \
        ask -o /dev/null -u \"$GIT_TOKEN:x\" https://read.example/; \
        ask -o /dev/null -u \"xy:$GIT_TOKEN\" https://read.example/; \
        ask -o /dev/null -H \"Authorization: Bearer $GIT_TOKEN\" https://read.example/; \
        ask -o /dev/null \"https://read.example/?k=$GIT_TOKEN\"";

    let out = shell(&installation, script);

    let rendered = STANDARD.encode(format!("x-access-token:{value}"));
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 9, "{out}");
    for line in &lines[..4] {
        assert!(line.starts_with("before Basic") && line.ends_with("after 200"), "{line}");
    }
    assert!(lines[4..].iter().all(|line| line.ends_with("403")), "{out}");
    assert!(!out.contains(&rendered[20..]) && !holds(out.as_bytes(), &needles(&value)), "{out}");
    let seen = origin.seen();
    assert_eq!(seen.len(), 4, "{seen:#?}");
    for request in seen {
        assert_eq!(request.values("authorization"), [format!("Basic {rendered}")]);
    }
}
