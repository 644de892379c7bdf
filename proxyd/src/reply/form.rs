//! In which form a client reads best why it was refused.
//!
//! Each form is the one in which clients of that kind expect their own servers' errors, because
//! that is what they print. HTML is none of them. Which one it is hangs on what the request says
//! about its client; a client that says nothing true about itself gets another form of the same
//! words, nothing else.

use bytes::Bytes;
use ipc::id::RequestId;
use serde_json::{Value, json};

use super::Refusal;
use crate::head::{Fields, RequestHead};

/// The forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Json,
    Text,
    Grpc,
    GrpcWeb(Coding),
    /// The Connect protocol over plain HTTP.
    Connect,
    Git(Git),
    /// git's large files.
    Lfs,
    /// npm and its kin print `error` where that is a text.
    Npm,
    /// Container registries (OCI distribution), and cargo's.
    Registry,
}

/// gRPC-Web is binary, or base64 of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    Binary,
    Text,
}

/// What git waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Git {
    /// `GET …/info/refs?service=…`.
    FetchRefs,
    PushRefs,
    /// `POST …/git-upload-pack` and `POST …/git-receive-pack`.
    Fetch,
    Push,
}

/// How user agents of clients with a form of their own begin.
const AGENTS: [(&str, Form); 16] = [
    ("git-lfs/", Form::Lfs),
    ("npm/", Form::Npm),
    ("pnpm/", Form::Npm),
    ("yarn/", Form::Npm),
    ("bun/", Form::Npm),
    ("cargo/", Form::Registry),
    ("docker/", Form::Registry),
    ("containerd/", Form::Registry),
    ("containers/", Form::Registry),
    ("buildkit/", Form::Registry),
    ("buildah/", Form::Registry),
    ("skopeo/", Form::Registry),
    ("oras/", Form::Registry),
    ("helm/", Form::Registry),
    ("go-containerregistry/", Form::Registry),
    ("git/", Form::Text),
];

impl Form {
    /// Chosen by what the request says about its client.
    pub fn of(head: &RequestHead) -> Self {
        let headers = &head.headers;
        let kind = lower(headers, "content-type");
        let of_kind = [
            ("application/grpc-web-text", Self::GrpcWeb(Coding::Text)),
            ("application/grpc-web", Self::GrpcWeb(Coding::Binary)),
            ("application/grpc", Self::Grpc),
        ];
        if let Some((_, form)) = of_kind.iter().find(|(prefix, _)| kind.starts_with(prefix)) {
            return *form;
        }
        if headers.contains("connect-protocol-version") {
            return Self::Connect;
        }
        let agent = lower(headers, "user-agent");
        let of_agent = AGENTS.iter().find(|(prefix, _)| agent.starts_with(prefix));
        match of_agent.map(|(_, form)| *form) {
            Some(Self::Text) => Git::of(head).map_or(Self::Text, Self::Git),
            Some(form) => form,
            None if head.path() == b"/v2" || head.path().starts_with(b"/v2/") => Self::Registry,
            // The go command shows plain text and nothing else.
            None if agent.starts_with("go-http-client/") && is_go_module(head.path()) => Self::Text,
            None => Self::Json,
        }
    }

    /// Status, fields and body.
    pub fn print(
        self,
        refusal: &Refusal,
        request: &RequestId,
        environment: &str,
    ) -> (u16, Fields, Bytes) {
        let mut fields = Fields::new();
        let lines = refusal.lines(request);
        let told = || told(refusal, request, environment);
        let (status, kind, body) = match self {
            Self::Json => {
                (refusal.status, "application/json", with_end(&json!({ "error": told() })))
            }
            Self::Text => (refusal.status, "text/plain; charset=utf-8", lines.into_bytes()),
            Self::Npm => {
                let value = json!({ "error": one_line(&lines), "cleanhands": told() });
                (refusal.status, "application/json", with_end(&value))
            }
            Self::Registry => {
                let line = one_line(&lines);
                let code = called(refusal, "TOOMANYREQUESTS", "DENIED", "UNAVAILABLE");
                // cargo prints `detail`, others print `message`.
                let error = json!({ "code": code, "message": line, "detail": line });
                let value = json!({ "errors": [error], "error": told() });
                (refusal.status, "application/json", with_end(&value))
            }
            Self::Lfs => {
                let value = json!({ "message": one_line(&lines), "request_id": request });
                (refusal.status, "application/vnd.git-lfs+json", with_end(&value))
            }
            Self::Connect => {
                let code =
                    called(refusal, "resource_exhausted", "permission_denied", "unavailable");
                let value = json!({ "code": code, "message": one_line(&lines) });
                (refusal.status, "application/json", with_end(&value))
            }
            Self::Grpc | Self::GrpcWeb(_) => {
                let (status, message) = (grpc_status(refusal), percent_encoded(&lines));
                fields.append("grpc-status", Bytes::from_static(status.as_bytes()));
                fields.append("grpc-message", message.into());
                let kind = match self {
                    Self::GrpcWeb(Coding::Text) => "application/grpc-web-text",
                    Self::GrpcWeb(Coding::Binary) => "application/grpc-web",
                    _ => "application/grpc",
                };
                (200, kind, Vec::new())
            }
            // git reads no further than the status of anything but a 200.
            Self::Git(git) => (200, git.kind(), git.body(&lines)),
        };
        fields.append("content-type", Bytes::from_static(kind.as_bytes()));
        (status, fields, body.into())
    }
}

/// The first field of a name, in lower case.
fn lower(headers: &Fields, name: &str) -> String {
    let value = headers.first(name).map(|value| value.to_ascii_lowercase());
    String::from_utf8_lossy(&value.unwrap_or_default()).into_owned()
}

fn is_go_module(path: &[u8]) -> bool {
    let path = String::from_utf8_lossy(path);
    path.contains("/@v/") || path.ends_with("/@latest")
}

/// Everything about a refusal.
fn told(refusal: &Refusal, request: &RequestId, environment: &str) -> Value {
    json!({
        "code": refusal.code,
        "message": one_line(&refusal.lines(request)),
        "rule": refusal.rule,
        "reason": refusal.reason,
        "hint": refusal.hint,
        "request_id": request,
        "environment": environment,
    })
}

fn with_end(value: &Value) -> Vec<u8> {
    format!("{value}\n").into_bytes()
}

fn one_line(lines: &str) -> String {
    lines.trim_end().replace('\n', "; ")
}

impl Git {
    fn of(head: &RequestHead) -> Option<Self> {
        let (path, query) = (head.path(), head.query().unwrap_or_default());
        let asks =
            |service: &str| query.split(|b| *b == b'&').any(|part| part == service.as_bytes());
        if path.ends_with(b"/info/refs") {
            return match (asks("service=git-upload-pack"), asks("service=git-receive-pack")) {
                (true, false) => Some(Self::FetchRefs),
                (false, true) => Some(Self::PushRefs),
                _ => None,
            };
        }
        match (&head.method[..], path) {
            (b"POST", path) if path.ends_with(b"/git-upload-pack") => Some(Self::Fetch),
            (b"POST", path) if path.ends_with(b"/git-receive-pack") => Some(Self::Push),
            _ => None,
        }
    }

    fn kind(self) -> &'static str {
        match self {
            Self::FetchRefs => "application/x-git-upload-pack-advertisement",
            Self::PushRefs => "application/x-git-receive-pack-advertisement",
            Self::Fetch => "application/x-git-upload-pack-result",
            Self::Push => "application/x-git-receive-pack-result",
        }
    }

    /// git's own error line (gitprotocol-pack(5), "ERR"). What answers a push is in a side band
    /// (gitprotocol-capabilities(5)), whose third channel is for fatal errors.
    fn body(self, lines: &str) -> Vec<u8> {
        let lines = lines.trim_end();
        match self {
            Self::FetchRefs | Self::PushRefs => {
                let service = match self {
                    Self::FetchRefs => "# service=git-upload-pack\n",
                    _ => "# service=git-receive-pack\n",
                };
                [packet(service), "0000".to_owned(), packet(&format!("ERR {lines}"))]
                    .concat()
                    .into_bytes()
            }
            Self::Fetch => packet(&format!("ERR {lines}")).into_bytes(),
            Self::Push => (packet(&format!("\x03{lines}\n")) + "0000").into_bytes(),
        }
    }
}

/// One line of git's protocol: its length in four hex digits, which are part of it.
fn packet(text: &str) -> String {
    /// git's own limit, less what stands around the text.
    const TEXT_BYTES_MAX: usize = 65_000;
    let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|at| text.is_char_boundary(*at));
    let text = &text[..end.unwrap_or(0)];
    format!("{:04x}{text}", text.len() + 4)
}

/// What a protocol calls a budget that is used up, another denial, and a failure.
fn called(
    refusal: &Refusal,
    exhausted: &'static str,
    denied: &'static str,
    failed: &'static str,
) -> &'static str {
    match (refusal.denied, refusal.status) {
        (true, 429) => exhausted,
        (true, _) => denied,
        (false, _) => failed,
    }
}

/// RESOURCE_EXHAUSTED, PERMISSION_DENIED, UNAVAILABLE.
fn grpc_status(refusal: &Refusal) -> &'static str {
    called(refusal, "8", "7", "14")
}

/// As the gRPC protocol over HTTP/2 writes `grpc-message`.
fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.trim_end().bytes() {
        if (b' '..=b'~').contains(&byte) && byte != b'%' {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
