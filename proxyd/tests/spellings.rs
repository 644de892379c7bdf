//! One host in every spelling and by every way in gets one decision, and the upstream reads the
//! name that was judged; another host behind it gets none.

use crate::support::*;
use tokio::io::AsyncWriteExt;

const H1: &[&[u8]] = &[b"http/1.1"];
const POLICY: &str = r#"
[[egress.allow]]
hosts = ["bücher.test", "10.9.8.7", "2001:db8::7"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "api"

[[egress.allow]]
hosts = ["other.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]

[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["bücher.test", "10.9.8.7", "2001:db8::7"]
"#;
const NAME: &str = "xn--bcher-kva.test";
/// Each of these is that name.
const NAMES: &[&str] = &[
    "xn--bcher-kva.test",
    "XN--BCHER-KVA.TEST",
    "xn--bcher-kva.test.",
    "bücher.test",
    "BÜCHER.Test.",
    "bu\u{308}cher.test",
    "ｂücher。ｔｅｓｔ",
    "bü\u{ad}cher.test",
];
/// And these are that address.
const ADDRESSES: &[&str] =
    &["10.9.8.7", "10.9.2055", "0x0a.9.8.7", "0xa090807", "168364039", "012.011.010.07"];
const ADDRESSES_V6: &[&str] = &["[2001:db8::7]", "[2001:DB8:0:0::7]", "[2001:db8::0.0.0.7]"];
/// None of these is, and no neighbour of theirs either.
const OTHERS: &[&str] = &[
    "bucher.test",
    "bücher.test.evil.test",
    "evil.bücher.test",
    "bücher.tesť",
    "xn--bcher-kva-.test",
    "bücher.test..",
    "10.9.8.8",
    "[2001:db8::7%25eth0]",
    "x@bücher.test",
];

struct Rig {
    proxyd: Proxyd,
    lease: Lease,
    upstreams: Vec<Upstream>,
}

impl Rig {
    async fn start() -> Self {
        let mut upstreams = Vec::new();
        for host in [NAME, "10.9.8.7", "2001:db8::7"] {
            upstreams.push(Upstream::tls(host, H1, echo_h1).await);
        }
        let rows =
            [(NAME, &upstreams[0]), ("10.9.8.7", &upstreams[1]), ("2001:db8::7", &upstreams[2])];
        let proxyd = Proxyd::start(POLICY, &rows).await;
        proxyd.put_secret("api").await;
        let lease = proxyd.lease().await;
        Self { proxyd, lease, upstreams }
    }

    fn connections(&self) -> usize {
        self.upstreams.iter().map(Upstream::connections).sum()
    }

    /// A request in absolute form; the status and the Host that the upstream read.
    async fn absolute(&self, authority: &str, host: &str) -> (String, Option<String>) {
        let mut stream = self.lease.plain().await;
        let request = format!(
            "GET https://{authority}/ HTTP/1.1\r\nHost: {host}\r\n\
             Proxy-Authorization: Bearer {}\r\nConnection: close\r\n\r\n",
            self.lease.token()
        );
        answer(&talk(&mut stream, request.as_bytes()).await)
    }

    /// The same inside a CONNECT, with TLS by the canonical name.
    async fn connect(&self, authority: &str, name: &str, host: &str) -> (String, Option<String>) {
        let mut stream = self.lease.tls(authority, name, b"http/1.1").await;
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        answer(&talk(&mut stream, request.as_bytes()).await)
    }
}

fn answer(text: &str) -> (String, Option<String>) {
    let status = text.get(9..12).unwrap_or_default().to_owned();
    let (_, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
    let host = body.lines().find_map(|line| line.strip_prefix("Host: "));
    (status, host.map(str::to_owned))
}

/// The name as it stands on the wire, but for the case of letters.
fn canonical(host: Option<&str>, name: &str) -> bool {
    let bare = host.map(|host| host.strip_suffix(":443").unwrap_or(host));
    bare.is_some_and(|host| host.eq_ignore_ascii_case(name))
}

#[tokio::test]
async fn every_spelling_of_a_host_gets_its_decision_by_every_way_in() {
    let rig = Rig::start().await;
    for (spellings, name) in
        [(NAMES, NAME), (ADDRESSES, "10.9.8.7"), (ADDRESSES_V6, "[2001:db8::7]")]
    {
        let tls_name = name.trim_matches(['[', ']']);
        for spelled in spellings {
            let whole = format!("{spelled}:443");
            let host = rig.connect(&format!("{name}:443"), tls_name, spelled).await;
            let mut ways = vec![(host, "Host"), (rig.absolute(name, &whole).await, "Host")];
            // A URI is ASCII; in any other it is none, whatever it might mean.
            if spelled.is_ascii() {
                ways.push((rig.absolute(spelled, name).await, "the URI"));
                ways.push((rig.absolute(&whole, spelled).await, "URI and Host"));
                ways.push((rig.connect(&whole, tls_name, name).await, "CONNECT"));
            } else {
                assert_eq!(rig.absolute(spelled, name).await.0, "400", "{spelled}");
            }
            for (shown, given) in ways {
                let (status, host) = shown;
                assert_eq!(status, "200", "{spelled} as {given}");
                assert!(canonical(host.as_deref(), name), "{spelled} as {given}: {host:?}");
            }
        }
    }
    assert!(!rig.proxyd.log().contains(CANARY));
}

#[tokio::test]
async fn a_target_in_absolute_form_inside_a_connection_may_spell_its_host_as_it_likes() {
    let rig = Rig::start().await;
    for (authority, host, expected) in [
        (format!("{NAME}:443"), NAME, "200"),
        (format!("{NAME}."), NAME, "200"),
        (NAME.to_ascii_uppercase(), "bücher.test:443", "200"),
        ("other.test".to_owned(), NAME, "421"),
        (NAME.to_owned(), "other.test", "421"),
        (format!("{NAME}:444"), NAME, "421"),
    ] {
        let mut stream = rig.lease.h1(NAME).await;
        let request = format!(
            "GET https://{authority}/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        );
        let (status, _) = answer(&talk(&mut stream, request.as_bytes()).await);
        assert_eq!(status, expected, "{authority} {host}");
    }
}

#[tokio::test]
async fn a_neighbour_of_a_host_gets_none_of_its_decisions() {
    let rig = Rig::start().await;
    for other in OTHERS {
        let refused = |status: &str| matches!(status, "400" | "403" | "421");
        let (status, _) = rig.absolute(other, other).await;
        assert!(refused(&status), "{other} in the URI: {status}");
        let (status, _) = rig.absolute(NAME, other).await;
        assert!(refused(&status), "{other} as Host of a request for {NAME}: {status}");
        let (status, _) = rig.connect(&format!("{NAME}:443"), NAME, other).await;
        assert!(refused(&status), "{other} as Host inside {NAME}: {status}");
    }
    assert_eq!(rig.connections(), 0);
}

#[tokio::test]
async fn every_stream_of_a_connection_is_for_the_host_of_the_connection() {
    let rig = Rig::start().await;
    let mut sender = rig.lease.h2(NAME).await;
    // The name in two spellings; a host that policy lists too; one that shares a certificate
    // with nobody; a request that says two names.
    for (uri, host, expected) in [
        (format!("https://{NAME}/"), None, Ok(200)),
        (format!("https://{}:443/", NAME.to_ascii_uppercase()), None, Ok(200)),
        (format!("https://{NAME}./"), None, Ok(200)),
        (format!("https://{NAME}/"), Some(format!("{NAME}:443")), Ok(200)),
        ("https://other.test/".to_owned(), None, Ok(421)),
        (format!("https://{NAME}:8443/"), None, Ok(421)),
        ("https://10.9.8.7/".to_owned(), None, Ok(421)),
        (format!("https://{NAME}/"), Some("other.test".to_owned()), Err(())),
    ] {
        let mut request = http::Request::get(&uri);
        if let Some(host) = &host {
            request = request.header("host", host);
        }
        let (response, _) = sender.send_request(request.body(()).unwrap(), true).unwrap();
        let status = timely(response).await.map(|response| response.status().as_u16());
        assert_eq!(status.map_err(drop), expected, "{uri} {host:?}");
    }
}

#[tokio::test]
async fn a_hello_may_spell_its_name_in_any_case_and_no_other_name() {
    let rig = Rig::start().await;
    let ask = async |name: &str| rig.connect(&format!("{NAME}:443"), name, NAME).await.0;

    assert_eq!(ask(&NAME.to_ascii_uppercase()).await, "200");
    assert_eq!(ask("other.test").await, "421");
    assert_eq!(rig.connections(), 1);
}

#[tokio::test]
async fn the_ports_of_an_authority_are_one_number_in_any_spelling() {
    let upstream = Upstream::tcp(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    })
    .await;
    let rule = "[[egress.allow]]\nhosts = [\"raw.test\"]\nports = [9000]\n\
                addresses = [\"127.0.0.1/32\"]\n";
    let proxyd = Proxyd::start(rule, &[("raw.test", &upstream)]).await;
    let lease = proxyd.lease().await;

    for (authority, expected) in [
        ("raw.test:9000", "200"),
        ("RAW.TEST.:09000", "200"),
        ("raw.test:9001", "403"),
        ("raw.test:443", "403"),
    ] {
        let mut stream = lease.connect(authority).await;
        let answer =
            talk(&mut stream, b"GET / HTTP/1.1\r\nHost: raw.test\r\nConnection: close\r\n\r\n")
                .await;
        assert_eq!(answer.get(9..12), Some(expected), "{authority}");
    }
}
