//! What a tool has put out is masked of all that the vault knows before it is kept, also of what
//! never leaves the vault; and whoever asks for that learns nothing by guessing.

use crate::support::*;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use ipc::vault::{ScrubReply, ScrubRequest};
use tokio::io::AsyncWriteExt;

const REFRESH: &str = "REFRESH-CANARY-41f0c2";
const CLIENT: &str = "CLIENT-CANARY-9d77ab";
const KEY_ID: &str = "AKIAEXAMPLE000000000";
const AWS: &str = "AWS-CANARY/0123456789+abcdefghijklmnopqr";
const FILE: &str = "FILE-CANARY-aa12bb34";
const COMMAND: &str = "COMMAND-CANARY-c0ffee";
const INPUT: &str = "INPUT-CANARY-f00d1234";
const ELSEWHERE: &str = "ELSEWHERE-CANARY-1234567890";

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "run"
[credentials.run]
secret = "exec:op"
inject = { bearer = true }
hosts = ["api.test"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.test"]
[credentials.file]
secret = "file:SECRETS/token"
inject = { bearer = true }
hosts = ["api.test"]
[credentials.person]
secret = "local:refresh"
hosts = ["api.test"]
[credentials.person.inject.oauth2]
grant = "refresh-token"
token-url = "https://login.test/token"
client-id = "person"
client-secret = "local:client"
[credentials.robot]
secret = "local:signer"
hosts = ["api.test"]
[credentials.robot.inject.oauth2]
grant = "jwt-bearer"
token-url = "https://login.test/token"
issuer = "robot"
audience = "login"
[credentials.objects]
secret = "local:aws"
inject = { aws-sigv4 = { regions = ["eu-central-1"], services = ["s3"] } }
hosts = ["api.test"]
env = "AWS_ACCESS_KEY_ID"
"#;

async fn put(proxyd: &Proxyd, name: &str, value: &str) {
    let (path, value) = (format!("/v1/secrets/{name}"), Bytes::copy_from_slice(value.as_bytes()));
    proxyd.control().call(http::Method::PUT, &path, None, value).await.unwrap();
}

async fn scrub(proxyd: &Proxyd, texts: Vec<String>) -> ScrubReply {
    let asked = ScrubRequest { environment: "dev".to_owned(), texts };
    timely(proxyd.control().post("/v1/scrub", &asked)).await.unwrap()
}

/// One text alone, masked.
async fn masked(proxyd: &Proxyd, text: &str) -> String {
    scrub(proxyd, vec![text.to_owned()]).await.texts.remove(0)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The texts that a tool could show a value in, by name; and what of each belongs to the value.
fn shown(value: &str) -> Vec<(&'static str, String)> {
    vec![
        ("plain", value.to_owned()),
        ("base64", STANDARD.encode(value)),
        ("base64 after one byte", STANDARD.encode(format!("a{value}"))),
        ("base64 after two bytes", STANDARD.encode(format!("ab{value}"))),
        ("base64url", URL_SAFE_NO_PAD.encode(value)),
        ("hex", hex(value.as_bytes())),
        ("percent", value.bytes().map(|byte| format!("%{byte:02X}")).collect()),
        ("JSON by number", value.bytes().map(|byte| format!("\\u{byte:04x}")).collect()),
    ]
}

struct Scene {
    proxyd: Proxyd,
    secrets: tempfile::TempDir,
    signer: String,
    api: Upstream,
}

async fn scene() -> Scene {
    let api = Upstream::tls("api.test", &[b"http/1.1"], |mut stream| async move {
        while request(&mut stream).await.is_some() {
            if stream.write_all(b"HTTP/1.1 204 So\r\n\r\n").await.is_err() {
                return;
            }
            let _ = stream.flush().await;
        }
    })
    .await;
    let secrets = tempfile::tempdir().unwrap();
    std::fs::write(secrets.path().join("token"), FILE).unwrap();
    std::fs::write(secrets.path().join("input"), INPUT).unwrap();
    let place = secrets.path().display().to_string();
    let policy = POLICY.replace("SECRETS", &place);
    let more = format!(
        "secret-directories = [\"{place}\"]\n[commands.op]\n\
         command = [\"/bin/sh\", \"DIR/op.sh\"]\n\
         input = \"file:{place}/input\"\nread = [\"DIR\"]\n"
    );
    let files = [("op.sh", &format!("echo {COMMAND}")[..])];
    let proxyd = Proxyd::with(&policy, &[("api.test", &api)], &more, &files, &[]).await;
    let signer = rcgen::KeyPair::generate().unwrap().serialize_pem().replace("\r\n", "\n");
    for (name, value) in [
        ("api", CANARY),
        ("refresh", REFRESH),
        ("client", CLIENT),
        ("signer", &signer),
        ("aws", &format!("{KEY_ID}:{AWS}")),
        ("elsewhere", ELSEWHERE),
    ] {
        put(&proxyd, name, value).await;
    }
    Scene { proxyd, secrets, signer, api }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tools_output_is_masked_of_what_never_leaves_the_vault_in_every_form() {
    let scene = scene().await;
    // A command's value is known from the first use on.
    let lease = scene.proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    let answer =
        talk(&mut stream, b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n");
    assert!(answer.await.starts_with("HTTP/1.1 204 "), "{}", scene.proxyd.log());
    let body: String = scene.signer.lines().filter(|line| !line.starts_with('-')).collect();
    let der = STANDARD.decode(&body).unwrap();

    let mut texts = vec![("key, unwrapped", body.clone()), ("key, DER in hex", hex(&der))];
    texts.push(("key, as it is", scene.signer.clone()));
    texts.push(("key, in JSON", serde_json::to_string(&scene.signer).unwrap()));
    texts.push(("key, base64 of its file", STANDARD.encode(&scene.signer)));
    for value in [CANARY, REFRESH, CLIENT, AWS, FILE, COMMAND, INPUT, ELSEWHERE] {
        texts.extend(shown(value));
    }
    let asked = texts.iter().map(|(_, text)| format!("before {text} after")).collect();
    let reply = scrub(&scene.proxyd, asked).await;

    for ((name, text), clean) in texts.iter().zip(&reply.texts) {
        assert_eq!(clean.len(), text.len() + 13, "{name}");
        // The characters at both ends of base64 are not the value's alone, nor are a key's labels.
        let (from, to) = if name.starts_with("key") { (60, 60) } else { (4, 4) };
        let core = &text[from..text.len() - to];
        for piece in core.as_bytes().windows(8) {
            let piece = std::str::from_utf8(piece).unwrap();
            assert!(!clean.contains(piece), "{name}: {text}: {clean}");
        }
        assert!(clean.starts_with("before ") && clean.ends_with(" after"), "{name}: {clean}");
    }
    assert_eq!(reply.found, texts.len() as u64);
    // What is no secret stays: the key's id, names, a certificate's label.
    let plain = format!("{KEY_ID} person login -----BEGIN CERTIFICATE----- op refresh elsewhere");
    assert_eq!(masked(&scene.proxyd, &plain).await, plain);
    assert!(!scene.proxyd.log().contains("CANARY"), "{}", scene.proxyd.log());
    drop((scene.secrets, scene.api));
}

#[tokio::test(flavor = "multi_thread")]
async fn guesses_tell_nothing_of_a_value_that_no_request_of_the_environment_has() {
    let scene = scene().await;
    put(&scene.proxyd, "client", "fifteen-bytes-1").await;
    for value in [REFRESH, AWS, ELSEWHERE, INPUT, FILE] {
        let cut = &value[..value.len() - 1];
        let expected = match value {
            // That one is for requests of this environment, as is the one in the vault.
            FILE => "*".repeat(cut.len()),
            _ => cut.to_owned(),
        };
        assert_eq!(masked(&scene.proxyd, cut).await, expected, "{value} cut short");
        assert_eq!(masked(&scene.proxyd, value).await, "*".repeat(value.len()), "{value}");
    }
    let cut = &CANARY[..CANARY.len() - 1];
    assert_eq!(masked(&scene.proxyd, cut).await, "*".repeat(cut.len()));

    // What a person chose could be tried; so a short one is not looked for.
    assert_eq!(masked(&scene.proxyd, "fifteen-bytes-1").await, "fifteen-bytes-1");
    // Of a long one half is as good as random.
    let half = &scene.signer[..scene.signer.len() - 40];
    assert!(masked(&scene.proxyd, half).await.contains("********"));
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_of_any_size_come_back_whole_and_too_much_at_once_is_refused() {
    let scene = scene().await;
    let noise = "A line as a tool writes it, of sixty-four characters and no more\n";
    let long = format!("{}{REFRESH}\n{}", noise.repeat(20_000), noise.repeat(200));
    let mut texts = vec![String::new(); 5000];
    texts.push(long.clone());
    texts.push(REFRESH.to_owned());

    let reply = scrub(&scene.proxyd, texts).await;

    assert_eq!((reply.texts.len(), reply.found), (5002, 2));
    assert!(reply.texts[..5000].iter().all(String::is_empty));
    assert_eq!(reply.texts[5000], long.replace(REFRESH, &"*".repeat(REFRESH.len())));
    assert_eq!(reply.texts[5001], "*".repeat(REFRESH.len()));

    let asked = ScrubRequest { environment: "dev".to_owned(), texts: vec!["x".repeat(32 << 20)] };
    let refused = scene.proxyd.control().post::<_, ScrubReply>("/v1/scrub", &asked).await;
    assert_eq!(refused.unwrap_err().code, ipc::fault::Code::TooLarge);
    let nowhere = ScrubRequest { environment: "none".to_owned(), texts: vec![REFRESH.to_owned()] };
    let refused = scene.proxyd.control().post::<_, ScrubReply>("/v1/scrub", &nowhere).await;
    assert_eq!(refused.unwrap_err().code, ipc::fault::Code::Missing);
}
