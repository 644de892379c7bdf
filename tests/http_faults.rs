//! Promise: HTTP that a sandbox makes up is judged request by request, and what is allowed arrives
//! as it was sent, with its credential, whatever its method and size.
use cleanhands_tests::installation::{Installation, Setup};
use cleanhands_tests::origin::{Origin, ok};

const TOKEN: &str = "SECRET-CANARY-http-91d3c07be5a4";
const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]
credential = "api"
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
"#;

async fn started() -> (Installation, Origin) {
    let hosts = ["api.example", "read.example"];
    let origin = Origin::start(&hosts, |request| match request.method() {
        "HEAD" => b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n".to_vec(),
        _ => ok("", b"ok"),
    })
    .await;
    let mut setup = Setup::default().policy("dev", POLICY);
    for host in hosts {
        setup = origin.behind(host, setup);
    }
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", TOKEN).await;
    (installation, origin)
}

/// Runs a shell script inside; gives its output.
fn shell(installation: &Installation, script: &str) -> String {
    let (status, out, err) = tokio::task::block_in_place(|| installation.shell("dev", script));
    assert_eq!(status, Some(0), "{out}\n{err}");
    out
}

/// Connects to `host` with the name `sni`, sends these bytes in turn, and gives the status of each
/// answer until the end.
fn exchange(host: &str, sni: &str, requests: &[&str]) -> String {
    let sends = requests.iter().map(|bytes| format!("send {host} {}\n", hex::encode(bytes)));
    format!("tls {host} {host} {sni}\n{}statuses {host}\n", sends.collect::<String>())
}

/// Carries out steps of the intruder's inside; gives what it printed.
fn talk(installation: &Installation, steps: &str) -> String {
    installation.intrude("dev", &[("steps", steps)], "./intruder talk steps")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_two_parsers_could_cut_differently_is_refused_and_reaches_nobody() {
    let (installation, origin) = started().await;
    let hidden = "0\r\n\r\nGET /hidden HTTP/1.1\r\nHost: api.example\r\n\r\n";
    let shapes = [
        ("Content-Length: 5\r\nContent-Length: 6\r\n", hidden),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", hidden),
        ("Transfer-Encoding: chunked,\r\n", hidden),
        ("Transfer-Encoding:\tchunked\r\n", hidden),
        ("Transfer-Encoding: chunked, gzip\r\n", hidden),
        ("Transfer-Encoding: gzip, chunked\r\n", hidden),
        ("Transfer-Encoding : chunked\r\n", hidden),
        ("Transfer-Encoding: \"chunked\"\r\n", hidden),
        ("Content-Length: +5\r\n", hidden),
        ("Content-Length: 5, 5\r\n", hidden),
        ("Content-Length: 0x5\r\n", hidden),
        ("Content-Length: 18446744073709551621\r\n", hidden),
        ("X: y\r\n Content-Length: 5\r\n", hidden),
        ("X: y\nContent-Length: 5\n", hidden),
        ("X: a\0b\r\n", ""),
        ("Host: read.example\r\n", ""),
    ];
    let steps: String = shapes
        .iter()
        .map(|(fields, body)| {
            let head = format!("POST /first HTTP/1.1\r\nHost: api.example\r\n{fields}\r\n");
            exchange("api.example", "api.example", &[&(head + body)])
        })
        .collect();

    let out = talk(&installation, &steps);

    let statuses: Vec<&str> = out.lines().collect();
    assert_eq!(statuses.len(), shapes.len(), "{out}");
    for (shape, status) in shapes.iter().zip(statuses) {
        // One answer, and the connection is closed: what came behind was not read as a request.
        assert_eq!(status, "400", "{shape:?}");
    }
    assert!(origin.seen().is_empty(), "{:?}", origin.seen());
    let audit = installation.audit().await;
    assert!(audit.iter().all(|r| r.kind != ipc::vault::AuditKind::Allowed), "{audit:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_request_of_a_connection_is_judged_like_the_first() {
    let (installation, origin) = started().await;
    let get = "GET /1 HTTP/1.1\r\nHost: read.example\r\n\r\n";
    let post = "POST /2 HTTP/1.1\r\nHost: read.example\r\nContent-Length: 0\r\n\
                Connection: close\r\n\r\n";
    let other = "GET https://api.example/3 HTTP/1.1\r\nHost: read.example\r\n\
                 Connection: close\r\n\r\n";
    let steps =
        [post, other].map(|second| exchange("read.example", "read.example", &[get, second]));

    let out = talk(&installation, &steps.concat());

    assert_eq!(out, "200 403\n200 421\n");
    assert!(origin.seen().iter().all(|r| r.target() == "/1"), "{:?}", origin.seen());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_allowed_name_is_a_front_for_another() {
    let (installation, origin) = started().await;
    let request =
        |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let (api, read) = (request("api.example"), request("read.example"));
    let steps = [
        exchange("read.example", "read.example", &[&api]),
        exchange("read.example", "api.example", &[&api]),
        exchange("read.example", "api.example", &[&read]),
    ];

    let over_h1 = talk(&installation, &steps.concat());
    let over_h2 = shell(
        &installation,
        "curl -sS -o /dev/null -w '%{http_code} %{http_version}' --http2 \
         -H 'Host: api.example' https://read.example/",
    );

    assert_eq!(over_h1, "421\n421\n421\n");
    assert_eq!(over_h2, "421 2");
    assert!(origin.seen().is_empty(), "{:?}", origin.seen());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_credential_and_the_length_arrive_whatever_the_size_of_the_body() {
    let (installation, origin) = started().await;
    let mib = 1 << 20;
    let sizes = [3, mib - 1, mib + 1, 32 * mib];
    for size in sizes {
        let script = format!(
            "head -c {size} /dev/zero | tr '\\0' x | curl -sS -o /dev/null -w '%{{http_code}}' \
             --data-binary @- https://api.example/upload"
        );

        assert_eq!(shell(&installation, &script), "200", "{size}");
    }

    let seen = origin.seen();
    assert_eq!(seen.iter().map(|r| r.body.len()).collect::<Vec<_>>(), sizes);
    for request in seen {
        assert_eq!(request.values("authorization"), [format!("Bearer {TOKEN}")]);
        assert_eq!(request.values("content-length"), [request.body.len().to_string()]);
        assert!(request.values("transfer-encoding").is_empty());
        assert!(request.body.iter().all(|byte| *byte == b'x'));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_credential_arrives_whatever_the_method_and_the_placeholder_never_does() {
    let (installation, origin) = started().await;
    let methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"];
    let script = format!(
        "echo \"$API_TOKEN\"; for m in {}; do for v in 1.1 2; do \
         [ $m = HEAD ] && set -- -I || set -- -X $m -d body; \
         curl -sS -o /dev/null -w '%{{http_code}}\\n' --http$v \
         -H \"Authorization: Bearer $API_TOKEN\" \"$@\" https://api.example/; done; done",
        methods.join(" ")
    );

    let out = shell(&installation, &script);

    let (placeholder, statuses) = out.split_once('\n').unwrap();
    assert!(placeholder.len() > 8, "{out}");
    assert!(statuses.lines().all(|status| status == "200"), "{out}");
    let seen = origin.seen();
    assert_eq!(seen.len(), 2 * methods.len());
    for (request, method) in seen.iter().zip(methods.iter().flat_map(|m| [m, m])) {
        assert_eq!(request.method(), *method);
        assert_eq!(request.values("authorization"), [format!("Bearer {TOKEN}")]);
        assert!(!request.head.contains(placeholder), "{}", request.head);
    }
}

/// Fifty targets that a careful proxy might be tempted to tidy up.
fn odd_targets() -> Vec<String> {
    let mut targets: Vec<String> = [
        "/",
        "/?",
        "/??",
        "/?=",
        "/?&",
        "/?a",
        "/?a=",
        "/?=b",
        "/?a=b=c",
        "/?a&b",
        "/?a&&b",
        "/;",
        "/;a=b",
        "/a;b/c",
        "/a:b",
        "/a@b",
        "/a,b",
        "/a+b",
        "/a%20b",
        "/a%2Fb",
        "/a%2fb",
        "/%41",
        "/%7e",
        "/%7E",
        "/~",
        "/a!b$c'(d)*e",
        "/a/?b/c",
        "/a/",
        "/a//b",
        "//a",
        "/a/b/",
        "/A/b",
        "/a%c3%bc",
        "/a%C3%BC",
        "/?q=%C3%BC",
        "/?q=a+b%20c",
        "/?q=%2B",
        "/?a;b",
        "/?a[]=1&a[]=2",
        "/?a%5B%5D=1",
        "/?x='y'",
        "/?http://b.example/",
        "/?a=%00",
        "/a.b",
        "/a..b",
        "/...",
        "/-._~",
        "/?-._~:/@!$&'()*+,;=",
    ]
    .map(str::to_owned)
    .to_vec();
    targets.push(format!("/{}", "a".repeat(4000)));
    targets.push(format!("/?{}", "k=v&".repeat(1000)));
    targets
}

#[tokio::test(flavor = "multi_thread")]
async fn target_order_and_spelling_arrive_as_they_were_sent() {
    let (installation, origin) = started().await;
    let targets = odd_targets();
    assert_eq!(targets.len(), 50);
    let fields = "hOST: read.example\r\nX-b: 1\r\nx-A: 2\r\nX-b: 3\r\nAccept: */*\r\n";
    let says = targets.iter().map(|target| {
        format!("say all {}\n", hex::encode(format!("GET {target} HTTP/1.1\r\n{fields}\r\n")))
    });
    let steps = format!("tls all read.example\n{}", says.collect::<String>());

    let out = talk(&installation, &steps);

    assert_eq!(out, "all: HTTP/1.1 200 OK\n".repeat(targets.len()));
    let seen = origin.seen();
    assert_eq!(seen.len(), targets.len());
    for (request, target) in seen.iter().zip(targets) {
        assert_eq!(request.head, format!("GET {target} HTTP/1.1\r\n{fields}\r\n"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_heads_pass_up_to_the_limit_and_are_refused_in_words_beyond() {
    let (installation, origin) = started().await;
    // curl itself sends no field of 64 KiB over HTTP/2.
    let script = "field() { printf 'X-Large: %*s' $1 '' | tr ' ' x | sed 's/:x/: /'; }; \
        ask() { curl -s -o /tmp/got -w '%{http_code}\\n' \"$@\" https://read.example/; }; \
        for v in 1.1 2; do \
        for k in 8 16 $([ $v = 2 ] && echo 60 || echo 64); do \
        field $((k * 1024)) > /tmp/h; ask --http$v -H @/tmp/h; done; \
        for i in $(seq 300); do echo \"X-$i: y\"; done > /tmp/h; ask --http$v -H @/tmp/h; done; \
        for i in $(seq 600); do echo \"X-$i: y\"; done > /tmp/h; ask --http1.1 -H @/tmp/h; \
        cat /tmp/got";
    let long =
        format!("GET / HTTP/1.1\r\nHost: read.example\r\nX: {}\r\n\r\n", "x".repeat(200_000));

    let out = shell(&installation, script);
    let beyond = talk(&installation, &exchange("read.example", "read.example", &[&long]));

    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[..8], ["200"; 8], "{out}");
    assert_eq!((lines[8], beyond.as_str()), ("431", "431\n"), "{out}");
    assert!(out.contains("more than 512 fields"), "{out}");
    assert_eq!(origin.seen().len(), 8);
}
