//! The way to a model: the lease, the request that proxyd sees, and what comes of its answers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response, StatusCode};
use harnessd::config::{ModelConfig, Provider};
use harnessd::context::Prompt;
use harnessd::log::{ErrorKind, Failure};
use harnessd::model::{Answer, Delta, Egress, Models};
use ipc::fd::ChannelListener;
use ipc::lease::{Holder, LeaseReply, LeaseRequest, Opened};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// A proxyd that opens leases and answers for the model's server.
struct Proxyd {
    seen: Arc<Seen>,
    stop: CancellationToken,
}

/// Status, headers, body.
type Answered = (StatusCode, Vec<(&'static str, &'static str)>, String);
/// Target, headers, body.
type Asked = (String, Vec<(String, String)>, Value);

#[derive(Default)]
struct Seen {
    /// Answers still to be given, the next one last.
    answers: Mutex<Vec<Answered>>,
    requests: Mutex<Vec<Asked>>,
    /// Number of the latest lease; each start counts on from the next hundred.
    leases: Mutex<u32>,
}

impl Proxyd {
    fn start(dir: &Path, seen: Arc<Seen>) -> Self {
        // A new proxyd knows no token of the one before.
        *seen.leases.lock().unwrap() += 100;
        let stop = CancellationToken::new();
        let lease = bind(&dir.join("lease.sock"), ipc::daemon::Kind::SeqPacket);
        let (state, ended) = (Arc::clone(&seen), stop.clone());
        tokio::spawn(async move {
            let listener = ChannelListener::new(lease).unwrap();
            let mut held = Vec::new();
            loop {
                let channel = tokio::select! {
                    channel = listener.accept() => channel.unwrap(),
                    () = ended.cancelled() => return,
                };
                let (request, _) = channel.receive::<LeaseRequest>().await.unwrap();
                let LeaseRequest::Open(open) = request else { panic!("{request:?}") };
                assert_eq!((open.holder, open.environment.as_str()), (Holder::Harness, "harness"));
                let number = {
                    let mut leases = state.leases.lock().unwrap();
                    *leases += 1;
                    *leases
                };
                let opened = LeaseReply::Opened(Opened {
                    lease: open.lease,
                    token: Some(format!("token-{number}")),
                    ca_pem: String::new(),
                    env: Vec::new(),
                    generation: 1,
                });
                channel.send(&opened, &[]).await.unwrap();
                held.push(channel);
            }
        });
        let egress = bind(&dir.join("egress.sock"), ipc::daemon::Kind::Stream);
        let egress = std::os::unix::net::UnixListener::from(egress);
        egress.set_nonblocking(true).unwrap();
        let egress = tokio::net::UnixListener::from_std(egress).unwrap();
        let router = Router::new().fallback(answer).with_state(Arc::clone(&seen));
        let drain = std::time::Duration::ZERO;
        tokio::spawn(ipc::http::serve(egress, router, stop.clone(), drain));
        Self { seen, stop }
    }
}

fn bind(path: &Path, kind: ipc::daemon::Kind) -> std::os::fd::OwnedFd {
    let mut none = ipc::daemon::Inherited::from_environment().unwrap();
    ipc::daemon::listen(&mut none, path, kind).unwrap()
}

async fn answer(State(seen): State<Arc<Seen>>, request: Request<Body>) -> Response<Body> {
    let uri = request.uri().to_string();
    let headers: Vec<(String, String)> = request
        .headers()
        .iter()
        .map(|(n, v)| (n.to_string(), v.to_str().unwrap().to_owned()))
        .collect();
    let token = format!("Bearer token-{}", seen.leases.lock().unwrap());
    if !headers.contains(&("proxy-authorization".into(), token)) {
        return Response::builder().status(407).body(Body::empty()).unwrap();
    }
    let body = axum::body::to_bytes(request.into_body(), usize::MAX).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap();
    seen.requests.lock().unwrap().push((uri, headers, body));
    let (status, headers, text) = seen.answers.lock().unwrap().pop().unwrap();
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(name, value);
    }
    response.body(Body::from(text)).unwrap()
}

fn models(dir: &Path) -> Models {
    let endpoint = "https://model.example/v1/messages".parse().unwrap();
    let provider = Provider::Messages { endpoint, temperature: None };
    let model = Some("real-name".into());
    let config = ModelConfig { model, max_tokens: 99, ..ModelConfig::new(provider) };
    let table = BTreeMap::from([("*".to_owned(), config)]);
    let egress = Egress::new(dir.join("lease.sock"), dir.join("egress.sock"), "harness");
    Models::new(table, BTreeMap::new(), egress)
}

async fn ask(models: &Models) -> Result<(Answer, String), Failure> {
    ask_for(models, "agents-name").await
}

async fn ask_for(models: &Models, name: &str) -> Result<(Answer, String), Failure> {
    let heard = Mutex::new(String::new());
    let sink = |delta: Delta| {
        if let Delta::Text { text, .. } = delta {
            heard.lock().unwrap().push_str(&text);
        }
    };
    let prompt = Prompt {
        system: Some("Be brief.".into()),
        tools: vec![json!({ "name": "bash", "input_schema": { "type": "object" } })],
        messages: vec![json!({ "role": "user", "content": [{ "type": "text", "text": "hi" }] })],
    };
    let answer = models.find(name).unwrap().ask(prompt, &sink).await?;
    Ok((answer, heard.into_inner().unwrap()))
}

fn private_dir() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::Permissions::from_mode(0o700);
    tempfile::Builder::new().permissions(mode).tempdir().unwrap()
}

const WHOLE: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\
    \"msg_1\",\"model\":\"real-name\",\"usage\":{\"input_tokens\":5}}}\n\n\
    event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\
    \"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n\
    event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\
    \"delta\":{\"type\":\"text_delta\",\"text\":\"Hello\"}}\n\n\
    event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n\
    event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\
    \"end_turn\"},\"usage\":{\"output_tokens\":2}}\n\n\
    event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";

#[tokio::test]
async fn a_request_goes_through_the_lease_and_carries_no_key() {
    let dir = private_dir();
    let proxyd = Proxyd::start(dir.path(), Arc::default());
    proxyd.seen.answers.lock().unwrap().push((StatusCode::OK, vec![], WHOLE.into()));

    let (answer, heard) = ask(&models(dir.path())).await.unwrap();

    assert_eq!(answer.blocks, [json!({ "type": "text", "text": "Hello" })]);
    assert_eq!((heard.as_str(), answer.usage.input_tokens), ("Hello", 5));
    let (uri, headers, body) = proxyd.seen.requests.lock().unwrap().remove(0);
    assert_eq!(uri, "https://model.example/v1/messages", "not in absolute form");
    let names: Vec<&str> = headers.iter().map(|(n, _)| n.as_str()).collect();
    assert!(!names.contains(&"x-api-key") && !names.contains(&"authorization"), "{names:?}");
    assert!(headers.contains(&("anthropic-version".into(), "2023-06-01".into())));
    assert!(headers.contains(&("host".into(), "model.example".into())));
    assert_eq!(body["model"], "real-name");
    assert_eq!(body["stream"], true);
    assert_eq!(body["system"][0]["cache_control"]["type"], "ephemeral");
}

#[tokio::test]
async fn one_lease_serves_many_requests_and_a_restarted_proxyd_gives_a_new_one() {
    let dir = private_dir();
    let seen = Arc::<Seen>::default();
    let whole = || (StatusCode::OK, vec![], WHOLE.to_owned());
    *seen.answers.lock().unwrap() = vec![whole(), whole(), whole()];
    let first = Proxyd::start(dir.path(), Arc::clone(&seen));
    let models = models(dir.path());

    ask(&models).await.unwrap();
    ask(&models).await.unwrap();
    let before = *seen.leases.lock().unwrap();
    first.stop.cancel();
    // The old listeners go once their tasks have seen the stop.
    let second = loop {
        tokio::task::yield_now().await;
        let free = |name: &str| {
            std::os::unix::net::UnixStream::connect(dir.path().join(name)).is_err()
                && ipc::fd::connect(&dir.path().join(name)).is_err()
        };
        if free("lease.sock") && free("egress.sock") {
            break Proxyd::start(dir.path(), Arc::clone(&seen));
        }
    };
    ask(&models).await.unwrap();

    assert_eq!((before, *seen.leases.lock().unwrap()), (101, 202));
    drop(second);
}

#[tokio::test]
async fn a_request_made_while_proxyd_restarts_waits_for_it() {
    let dir = private_dir();
    let models = models(dir.path());
    let seen = Arc::<Seen>::default();
    seen.answers.lock().unwrap().push((StatusCode::OK, vec![], WHOLE.into()));

    let late = async {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        Proxyd::start(dir.path(), Arc::clone(&seen))
    };
    let (answer, _proxyd) = tokio::join!(ask(&models), late);

    assert_eq!(answer.unwrap().1, "Hello");
}

#[tokio::test]
async fn each_kind_of_refusal_is_a_failure_that_says_what_to_do_about_it() {
    let denial = json!({ "error": {
        "code": "host_not_allowed", "reason": "no rule lists model.example", "hint": "add one",
    }});
    let overloaded = json!({ "type": "error", "error": {
        "type": "overloaded_error", "message": "Overloaded" }});
    let cut = WHOLE.split("event: message_delta").next().unwrap();
    let cases = [
        (
            429,
            vec![("retry-after", "2")],
            "{}".into(),
            ErrorKind::ModelRateLimited,
            true,
            Some(2000),
            "429",
        ),
        (429, vec![], "{}".into(), ErrorKind::ModelRateLimited, false, None, "429"),
        (529, vec![], overloaded.to_string(), ErrorKind::ModelOverloaded, true, None, "Overloaded"),
        (
            500,
            vec![("x-should-retry", "false")],
            "<html>".into(),
            ErrorKind::ModelRequestFailed,
            false,
            None,
            "500",
        ),
        (
            403,
            vec![("x-cleanhands-denial", "host_not_allowed")],
            denial.to_string(),
            ErrorKind::ModelRequestFailed,
            false,
            None,
            "no rule lists model.example; add one",
        ),
        (200, vec![], cut.into(), ErrorKind::ModelRequestFailed, true, None, "ended before"),
        (
            200,
            vec![],
            "data: {\"type\":\n\n".into(),
            ErrorKind::ModelRequestFailed,
            true,
            None,
            "not JSON",
        ),
    ];
    let dir = private_dir();
    let proxyd = Proxyd::start(dir.path(), Arc::default());
    let models = models(dir.path());
    for (status, headers, body, error, retryable, retry_after_ms, text) in cases {
        let status = StatusCode::from_u16(status).unwrap();
        proxyd.seen.answers.lock().unwrap().push((status, headers, body));

        let failure = ask(&models).await.unwrap_err();

        let found = (failure.error, failure.retryable, failure.retry_after_ms);
        assert_eq!(found, (error, retryable, retry_after_ms), "{failure:?}");
        assert!(failure.message.contains(text), "{failure:?}");
    }
}

#[tokio::test]
async fn an_answer_that_is_no_stream_is_understood_or_said_to_be_none_at_once() {
    let message = json!({
        "type": "message", "id": "msg_2", "model": "m", "stop_reason": "end_turn",
        "content": [{ "type": "text", "text": "Hello" }], "usage": { "output_tokens": 3 },
    });
    let dir = private_dir();
    let proxyd = Proxyd::start(dir.path(), Arc::default());
    let models = models(dir.path());
    let answered = |kind, body: String| {
        let answer = (StatusCode::OK, vec![("content-type", kind)], body);
        proxyd.seen.answers.lock().unwrap().push(answer);
    };

    answered("application/json", message.to_string());
    let (answer, heard) = ask(&models).await.unwrap();
    assert_eq!((heard.as_str(), answer.usage.output_tokens), ("Hello", 3));
    assert_eq!(answer.stop_reason.as_deref(), Some("end_turn"));
    for (kind, body) in [
        ("text/html; charset=utf-8", "<html>welcome</html>"),
        ("application/json", "{\"status\":\"ok\"}"),
        ("application/json", "{\"status\":"),
        ("text/plain", "ok"),
    ] {
        answered(kind, body.to_owned());
        let failure = ask(&models).await.unwrap_err();
        assert!(!failure.retryable, "{kind} {body} is asked for again");
        assert!(failure.message.contains("model.example"), "{failure:?}");
        assert!(failure.message.contains("is the url of this model"), "{failure:?}");
    }
}

#[tokio::test]
async fn a_request_that_was_too_long_is_known_by_every_servers_words() {
    let dir = private_dir();
    let proxyd = Proxyd::start(dir.path(), Arc::default());
    let models = models(dir.path());
    let said = |message: &str, kind: &str| {
        json!({ "error": { "message": message, "type": kind } }).to_string()
    };
    for (status, body, overflow) in [
        (400, said("prompt is too long: 210000 tokens > 200000 maximum", "invalid"), true),
        (400, said("This model's maximum context length is 8192 tokens", "invalid"), true),
        (400, said("the request exceeds the available size", "exceed_context_size_error"), true),
        (413, "{}".to_owned(), true),
        (400, said("max_tokens: must be at least 1", "invalid"), false),
        (500, said("context window of the log", "api_error"), false),
    ] {
        let status = StatusCode::from_u16(status).unwrap();
        proxyd.seen.answers.lock().unwrap().push((status, vec![], body.clone()));

        let failure = ask(&models).await.unwrap_err();

        assert_eq!(failure.overflow, overflow, "{body}");
    }
}

#[tokio::test]
async fn several_models_answer_each_to_its_name_and_in_its_own_form() {
    let dir = private_dir();
    let proxyd = Proxyd::start(dir.path(), Arc::default());
    let config = |provider, model: &str| ModelConfig {
        model: Some(model.to_owned()),
        ..ModelConfig::new(provider)
    };
    let messages = Provider::Messages {
        endpoint: "https://one.example/v1/messages".parse().unwrap(),
        temperature: None,
    };
    let chat = Provider::Chat {
        endpoint: "https://two.example/v1/chat/completions".parse().unwrap(),
        temperature: Some(0.5),
    };
    let table = BTreeMap::from([
        ("big".to_owned(), config(messages, "one-big")),
        ("small".to_owned(), config(chat, "two-small")),
    ]);
    let lease = dir.path().join("lease.sock");
    let egress = Egress::new(lease, dir.path().join("egress.sock"), "harness");
    let models = Models::new(table, BTreeMap::new(), egress);
    let chunks = "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let answers = [chunks.to_owned(), WHOLE.to_owned()];
    *proxyd.seen.answers.lock().unwrap() =
        answers.map(|body| (StatusCode::OK, vec![], body)).to_vec();

    let first = ask_for(&models, "big").await.unwrap();
    let second = ask_for(&models, "small").await.unwrap();
    let asked = std::mem::take(&mut *proxyd.seen.requests.lock().unwrap());

    assert_eq!((first.1.as_str(), second.1.as_str()), ("Hello", "Hi"));
    let seen: Vec<(&str, &Value)> =
        asked.iter().map(|(uri, _, body)| (uri.as_str(), &body["model"])).collect();
    assert_eq!(
        seen,
        [
            ("https://one.example/v1/messages", &json!("one-big")),
            ("https://two.example/v1/chat/completions", &json!("two-small")),
        ]
    );
    assert!(models.find("other").is_none(), "a model that nobody configured");
    assert_eq!(asked[1].2["temperature"], 0.5);
}

#[tokio::test]
async fn a_request_that_proxyd_could_not_send_is_its_failure_and_not_the_models() {
    let reason = json!({ "error": { "reason": "no value", "hint": "store one" }}).to_string();
    let dir = private_dir();
    let proxyd = Proxyd::start(dir.path(), Arc::default());
    let models = models(dir.path());
    for (code, again) in [("credential_missing", false), ("upstream_connect", true)] {
        let headers = vec![("x-cleanhands-failure", code)];
        let answer = (StatusCode::BAD_GATEWAY, headers, reason.clone());
        proxyd.seen.answers.lock().unwrap().push(answer);

        let failure = ask(&models).await.unwrap_err();

        let expected =
            format!("proxyd could not send the model request ({code}): no value; store one");
        assert_eq!((failure.message, failure.retryable), (expected, again));
    }
}

#[tokio::test]
async fn without_proxyd_the_failure_names_its_socket_and_may_be_tried_again() {
    let dir = private_dir();

    let failure = ask(&models(dir.path())).await.unwrap_err();

    assert!(failure.retryable);
    assert!(failure.message.contains("lease.sock"), "{failure:?}");
}
