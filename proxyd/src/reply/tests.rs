//! Which client gets which form, and that each form says the same.
#![allow(clippy::unwrap_used)]

use policies::Scheme;

use super::form::{Coding, Git};
use super::*;
use crate::head::{Fields, RequestHead};

fn refusal() -> Refusal {
    Refusal::denied(403, "host_not_listed", "no rule lists \"evil.example\"\u{e9}").with_hint("50%")
}

fn head(
    method: &'static str,
    target: &'static str,
    fields: &[(&str, &'static str)],
) -> RequestHead {
    let mut headers = Fields::new();
    for (name, value) in fields {
        headers.append(name, Bytes::from_static(value.as_bytes()));
    }
    RequestHead {
        method: Bytes::from_static(method.as_bytes()),
        target: Bytes::from_static(target.as_bytes()),
        scheme: Scheme::Https,
        authority: "a.test".to_owned(),
        headers,
    }
}

#[test]
fn the_form_is_the_clients_own() {
    let git = ("user-agent", "git/2.39.5");
    let kind = |kind| ("content-type", kind);
    let agent = |agent| ("User-Agent", agent);
    let table = [
        (head("GET", "/", &[]), Form::Json),
        (head("GET", "/", &[agent("curl/8.5.0")]), Form::Json),
        (head("POST", "/a", &[kind("application/grpc+proto")]), Form::Grpc),
        (head("POST", "/a", &[kind("application/grpc")]), Form::Grpc),
        (head("POST", "/a", &[kind("application/grpc-web+proto")]), Form::GrpcWeb(Coding::Binary)),
        (head("POST", "/a", &[kind("Application/GRPC-Web-Text")]), Form::GrpcWeb(Coding::Text)),
        (head("POST", "/a", &[("Connect-Protocol-Version", "1")]), Form::Connect),
        (head("GET", "/a/info/refs?service=git-upload-pack", &[git]), Form::Git(Git::FetchRefs)),
        (head("GET", "/a/info/refs?service=git-receive-pack", &[git]), Form::Git(Git::PushRefs)),
        (head("GET", "/a/info/refs", &[git]), Form::Text),
        (head("POST", "/a/git-upload-pack", &[git]), Form::Git(Git::Fetch)),
        (head("POST", "/a/git-receive-pack", &[git]), Form::Git(Git::Push)),
        (head("GET", "/a/HEAD", &[git]), Form::Text),
        (head("GET", "/a/info/refs?service=git-upload-pack", &[]), Form::Json),
        (head("POST", "/a/objects/batch", &[agent("git-lfs/3.4.0")]), Form::Lfs),
        (head("GET", "/left-pad", &[agent("npm/10.8.2 node/v20 linux x64")]), Form::Npm),
        (head("GET", "/left-pad", &[agent("pnpm/9.0.0 npm/? node/v20")]), Form::Npm),
        (head("GET", "/se/rd/serde", &[agent("cargo/1.95.0")]), Form::Registry),
        (head("GET", "/v2/", &[]), Form::Registry),
        (head("GET", "/v2/a/manifests/1", &[agent("docker/27.0 go/1.22")]), Form::Registry),
        (head("GET", "/v2x", &[]), Form::Json),
        (head("GET", "/m/@v/list", &[agent("Go-http-client/1.1")]), Form::Text),
        (head("GET", "/api", &[agent("Go-http-client/1.1")]), Form::Json),
    ];
    for (head, form) in table {
        let target = String::from_utf8_lossy(&head.target).into_owned();
        assert_eq!(Form::of(&head), form, "{target}");
    }
}

#[test]
fn a_denial_says_the_same_in_every_form_and_html_is_none_of_them() {
    let id = RequestId::parse("req_x").unwrap();
    let all = [
        Form::Json,
        Form::Text,
        Form::Grpc,
        Form::GrpcWeb(Coding::Binary),
        Form::GrpcWeb(Coding::Text),
        Form::Connect,
        Form::Git(Git::FetchRefs),
        Form::Git(Git::PushRefs),
        Form::Git(Git::Fetch),
        Form::Git(Git::Push),
        Form::Lfs,
        Form::Npm,
        Form::Registry,
    ];
    for form in all {
        let (head, body) = print(&refusal(), form, &id, "dev");

        let fields = head.headers.iter().map(|(_, value)| String::from_utf8_lossy(value));
        let said = fields.collect::<String>() + &String::from_utf8_lossy(&body);
        for words in ["host_not_listed", "evil.example", "50%", "req_x"] {
            assert!(said.contains(words), "{form:?} does not say {words}: {said}");
        }
        assert!(!said.contains("html"), "{form:?}: {said}");
        let length = head.headers.first("content-length").unwrap();
        assert_eq!(*length, body.len().to_string(), "{form:?}");
        let quiet = matches!(form, Form::Grpc | Form::GrpcWeb(_) | Form::Git(_));
        assert_eq!(head.status, if quiet { 200 } else { 403 }, "{form:?}");
        assert_eq!(head.headers.first("x-cleanhands-denial").unwrap(), "host_not_listed");
        assert_eq!(head.headers.first("x-cleanhands-request").unwrap(), "req_x");
    }
}

#[test]
fn each_form_has_the_shape_that_its_clients_print() {
    let id = RequestId::parse("req_x").unwrap();
    let body = |form| print(&refusal(), form, &id, "dev").1;
    let json = |form| serde_json::from_slice::<serde_json::Value>(&body(form)).unwrap();

    let object = &json(Form::Json)["error"];
    assert_eq!(
        (&object["code"], &object["environment"]),
        (&"host_not_listed".into(), &"dev".into())
    );
    assert!(object["message"].as_str().unwrap().contains("evil.example"));
    assert!(json(Form::Npm)["error"].as_str().unwrap().contains("evil.example"));
    let registry = &json(Form::Registry)["errors"][0];
    assert_eq!(registry["code"], "DENIED");
    assert!(registry["message"].as_str().unwrap().contains("evil.example"));
    assert!(registry["detail"].as_str().unwrap().contains("evil.example"));
    assert_eq!(json(Form::Connect)["code"], "permission_denied");
    assert!(json(Form::Lfs)["message"].as_str().unwrap().contains("evil.example"));
    let refs = String::from_utf8(body(Form::Git(Git::PushRefs)).to_vec()).unwrap();
    assert!(refs.starts_with("001f# service=git-receive-pack\n0000"), "{refs}");
    let error = &refs["001f# service=git-receive-pack\n0000".len()..];
    assert_eq!(usize::from_str_radix(&error[..4], 16).unwrap(), error.len());
    assert!(error[4..].starts_with("ERR cleanhands: denied"), "{error}");
    let push = String::from_utf8(body(Form::Git(Git::Push)).to_vec()).unwrap();
    assert!(push[4..].starts_with("\u{3}cleanhands: ") && push.ends_with("\n0000"), "{push}");
    let head = print(&refusal(), Form::Grpc, &id, "dev").0;
    assert_eq!(head.headers.first("grpc-status").unwrap(), "7");
    let message = head.headers.first("grpc-message").unwrap();
    assert!(message.ends_with(b"50%25%0Acleanhands: request req_x"), "{message:?}");
}

#[test]
fn the_reason_phrase_tells_those_who_print_nothing_else() {
    let id = RequestId::parse("req_x").unwrap();
    let long = Refusal::denied(403, "path_not_listed", "x\r\n\u{0}y".repeat(200));

    let (head, _) = print(&refusal(), Form::Json, &id, "dev");
    let (cut, _) = print(&long, Form::Json, &id, "dev");

    assert_eq!(head.reason, "cleanhands: host_not_listed: no rule lists \"evil.example\"?");
    assert!(cut.reason.len() <= REASON_BYTES_MAX);
    assert!(cut.reason.iter().all(|byte| (b' '..=b'~').contains(byte)), "{:?}", cut.reason);
}
