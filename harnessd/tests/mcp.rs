//! The hand `mcp` against a small server behind a proxyd that opens leases: the handshake, lists,
//! calls, what breaks and what is told of it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, Request, Response};
use harnessd::hands::{Ended, McpHand, TroubleKind};
use harnessd::log::{Body as Logged, CallOutcome, Event};
use harnessd::model::Egress;
use ipc::fd::ChannelListener;
use ipc::id::SessionId;
use ipc::lease::{Holder, LeaseReply, LeaseRequest, Open, Opened};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::rig::{Rig as Installation, idle, kinds, say, send, until};

const URL: &str = "http://mcp.test/mcp";

/// How the server treats `tools/call`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Manner {
    /// A stream with a ping and progress before the answer.
    Streams,
    /// The first call is told that its session is gone.
    Forgets,
    /// The stream ends early; the rest is had by its event's id.
    Breaks,
    /// The stream ends early, and nothing says where.
    Vanishes,
    /// No answer comes.
    Hangs,
    /// Every request is refused: with this status, and by proxyd if there is a code.
    Refuses(u16, Option<&'static str>),
}

struct Server {
    manner: Manner,
    opened: Mutex<Vec<Open>>,
    asked: Mutex<Vec<(Method, String, axum::http::HeaderMap, Value)>>,
}

impl Server {
    fn methods(&self) -> Vec<String> {
        let asked = self.asked.lock().unwrap();
        let name = |method: &Method, body: &Value| match body["method"].as_str() {
            Some(name) => name.to_owned(),
            None if body["result"].is_object() => "a result".to_owned(),
            None => method.to_string(),
        };
        asked.iter().map(|(method, _, _, body)| name(method, body)).collect()
    }

    fn count(&self, method: &str) -> usize {
        self.methods().iter().filter(|name| *name == method).count()
    }
}

struct Rig {
    server: Arc<Server>,
    session: SessionId,
    hand: McpHand,
    _dir: tempfile::TempDir,
    stop: CancellationToken,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// The server, behind what of proxyd it takes to reach it.
fn serve(lease: &Path, egress: &Path, manner: Manner, stop: &CancellationToken) -> Arc<Server> {
    let server = Arc::new(Server { manner, opened: Mutex::default(), asked: Mutex::default() });
    serve_leases(lease, &server);
    let socket = std::os::unix::net::UnixListener::bind(egress).unwrap();
    socket.set_nonblocking(true).unwrap();
    let socket = tokio::net::UnixListener::from_std(socket).unwrap();
    let router = Router::new().fallback(answer).with_state(Arc::clone(&server));
    tokio::spawn(ipc::http::serve(socket, router, stop.clone(), std::time::Duration::ZERO));
    server
}

fn rig(manner: Manner) -> Rig {
    let mode = std::fs::Permissions::from_mode(0o700);
    let dir = tempfile::Builder::new().permissions(mode).tempdir().unwrap();
    let stop = CancellationToken::new();
    let (lease, egress) = (dir.path().join("lease.sock"), dir.path().join("egress.sock"));
    let server = serve(&lease, &egress, manner, &stop);
    let session = SessionId::random();
    let egress = Egress::new(lease, egress, "harness").for_session("dev", "uid:7", &session);
    Rig { server, session, hand: McpHand::new(Arc::new(egress)), _dir: dir, stop }
}

fn serve_leases(path: &Path, server: &Arc<Server>) {
    let mut none = ipc::daemon::Inherited::from_environment().unwrap();
    let socket = ipc::daemon::listen(&mut none, path, ipc::daemon::Kind::SeqPacket).unwrap();
    let (listener, server) = (ChannelListener::new(socket).unwrap(), Arc::clone(server));
    tokio::spawn(async move {
        let mut held = Vec::new();
        loop {
            let channel = listener.accept().await.unwrap();
            let (request, _) = channel.receive::<LeaseRequest>().await.unwrap();
            let LeaseRequest::Open(open) = request else { panic!("{request:?}") };
            let opened = LeaseReply::Opened(Opened {
                lease: open.lease.clone(),
                token: Some("lease-token".to_owned()),
                ca_pem: String::new(),
                env: Vec::new(),
                generation: 1,
            });
            server.opened.lock().unwrap().push(open);
            channel.send(&opened, &[]).await.unwrap();
            held.push(channel);
        }
    });
}

async fn answer(State(server): State<Arc<Server>>, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let calls = server.count("tools/call");
    let target = head.uri.to_string();
    server.asked.lock().unwrap().push((head.method.clone(), target, head.headers, body.clone()));
    if let Manner::Refuses(status, code) = server.manner {
        let mut response = Response::builder().status(status);
        if let Some(code) = code {
            response = response.header("x-cleanhands-denial", code);
        }
        return response.body(Body::from("no")).unwrap();
    }
    let id = &body["id"];
    match body["method"].as_str() {
        Some("initialize") => {
            let result = json!({ "protocolVersion": "2025-06-18", "capabilities": {} });
            let mut response = whole(id, &result);
            response.headers_mut().insert("mcp-session-id", "first".parse().unwrap());
            response
        }
        Some("tools/list") => whole(id, &page(&body["params"]["cursor"])),
        Some("tools/call") => call(server.manner, id, calls),
        None if head.method == Method::GET => stream(&event("2", &done(id_of_call(&server)))),
        _ => Response::builder().status(202).body(Body::empty()).unwrap(),
    }
}

fn page(cursor: &Value) -> Value {
    let tool = |name: &str| json!({ "name": name, "inputSchema": { "type": "object" } });
    match cursor.as_str() {
        None => json!({ "tools": [tool("zeta"), { "name": "no schema" }], "nextCursor": "n" }),
        Some(_) => json!({ "tools": [tool("alpha")] }),
    }
}

fn call(manner: Manner, id: &Value, before: usize) -> Response<Body> {
    let ping = json!({ "jsonrpc": "2.0", "id": "p", "method": "ping" });
    let progress = json!({ "jsonrpc": "2.0", "method": "notifications/progress" });
    let changed = json!({ "jsonrpc": "2.0", "method": "notifications/tools/list_changed" });
    match manner {
        Manner::Forgets if before == 0 => {
            Response::builder().status(404).body(Body::empty()).unwrap()
        }
        Manner::Breaks => stream(&event("1", &progress)),
        Manner::Vanishes => stream(&event("", &progress)),
        Manner::Hangs => {
            let never = futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>();
            streaming(Body::from_stream(never))
        }
        _ => {
            let parts = [ping, progress, changed].map(|part| event("", &part)).concat();
            stream(&(parts + &event("", &done(id.clone()))))
        }
    }
}

fn id_of_call(server: &Server) -> Value {
    let asked = server.asked.lock().unwrap();
    let call = asked.iter().rfind(|(_, _, _, body)| body["method"] == "tools/call");
    call.unwrap().3["id"].clone()
}

fn done(id: Value) -> Value {
    let content = json!([{ "type": "text", "text": "done" }]);
    json!({ "jsonrpc": "2.0", "id": id, "result": { "content": content } })
}

fn whole(id: &Value, result: &Value) -> Response<Body> {
    let body = json!({ "jsonrpc": "2.0", "id": id, "result": result }).to_string();
    let response = Response::builder().header("content-type", "application/json");
    response.body(Body::from(body)).unwrap()
}

fn event(id: &str, data: &Value) -> String {
    let id = if id.is_empty() { String::new() } else { format!("id: {id}\n") };
    format!("{id}data: {data}\n\n")
}

fn stream(text: &str) -> Response<Body> {
    streaming(Body::from(text.to_owned()))
}

fn streaming(body: Body) -> Response<Body> {
    Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
}

async fn call_once(rig: &Rig) -> Ended {
    let (input, never) = (json!({ "a": 1 }), CancellationToken::new());
    rig.hand.execute(URL, "alpha", &input, Some(rig.hand.journal()), never).await
}

#[tokio::test]
async fn tools_are_listed_over_pages_in_one_order_and_called_over_a_stream() {
    let rig = rig(Manner::Streams);

    let tools = rig.hand.tools(URL).await.unwrap();
    let ended = call_once(&rig).await;

    let names: Vec<_> = tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["alpha", "zeta"]);
    assert_eq!((ended.outcome, ended.is_error), (CallOutcome::Finished, false));
    assert_eq!(ended.content[0]["text"], "done");
    assert!(rig.hand.take_changed() && !rig.hand.take_changed());
    let all = ["initialize", "notifications/initialized", "tools/list", "tools/list", "tools/call"];
    assert_eq!(rig.server.methods()[..5], all);
    assert_eq!(rig.server.count("a result"), 1, "the ping was answered");
}

#[tokio::test]
async fn every_request_goes_through_the_lease_of_its_session_and_carries_no_token_of_ours() {
    let rig = rig(Manner::Streams);

    rig.hand.tools(URL).await.unwrap();

    let opened = rig.server.opened.lock().unwrap();
    let open = &opened[0];
    assert_eq!((opened.len(), open.holder, open.environment.as_str()), (1, Holder::Harness, "dev"));
    assert_eq!((open.owner.as_str(), &open.session), ("uid:7", &Some(rig.session.clone())));
    for (number, (_, target, headers, _)) in rig.server.asked.lock().unwrap().iter().enumerate() {
        assert_eq!(target, URL);
        assert_eq!(headers["proxy-authorization"], "Bearer lease-token");
        assert!(!headers.contains_key("authorization"));
        let settled = number > 0;
        let revision = if settled { "2025-06-18" } else { "2025-11-25" };
        assert_eq!(headers["mcp-protocol-version"], revision);
        assert_eq!(headers.get("mcp-session-id").is_some(), settled);
    }
}

#[tokio::test]
async fn a_session_that_the_server_forgot_is_begun_again() {
    let rig = rig(Manner::Forgets);

    let ended = call_once(&rig).await;

    assert_eq!(ended.outcome, CallOutcome::Finished, "{ended:?}");
    assert_eq!((rig.server.count("initialize"), rig.server.count("tools/call")), (2, 2));
}

#[tokio::test]
async fn a_stream_that_broke_is_taken_up_where_it_was_and_the_call_not_sent_again() {
    let rig = rig(Manner::Breaks);

    let ended = call_once(&rig).await;

    assert_eq!(ended.content[0]["text"], "done", "{ended:?}");
    assert_eq!(rig.server.count("tools/call"), 1);
    let asked = rig.server.asked.lock().unwrap();
    let again = asked.iter().find(|(method, ..)| method == Method::GET).unwrap();
    assert_eq!(again.2["last-event-id"], "1");
}

#[tokio::test]
async fn a_call_whose_answer_is_lost_is_unknown_and_not_sent_again() {
    let rig = rig(Manner::Vanishes);

    let ended = call_once(&rig).await;

    assert_eq!((ended.outcome, ended.is_error), (CallOutcome::OutcomeUnknown, true));
    assert_eq!(rig.server.count("tools/call"), 1);
}

#[tokio::test]
async fn a_call_that_another_run_has_sent_is_unknown_and_not_sent_again() {
    let rig = rig(Manner::Streams);

    let never = CancellationToken::new();
    let ended = rig.hand.execute(URL, "alpha", &json!({}), Some("mcp-run-other"), never).await;

    assert_eq!(ended.outcome, CallOutcome::OutcomeUnknown);
    assert!(rig.server.methods().is_empty());
}

#[tokio::test]
async fn a_cancelled_call_is_told_to_the_server_and_is_unknown() {
    let rig = rig(Manner::Hangs);
    let cancel = CancellationToken::new();

    let input = json!({});
    let call = rig.hand.execute(URL, "alpha", &input, Some(rig.hand.journal()), cancel.clone());
    let stop = async {
        until("the call to arrive", || async {
            (rig.server.count("tools/call") == 1).then_some(())
        })
        .await;
        cancel.cancel();
    };
    let (ended, ()) = tokio::join!(call, stop);

    assert_eq!(ended.outcome, CallOutcome::OutcomeUnknown);
    let asked = rig.server.asked.lock().unwrap();
    let last = &asked.last().unwrap().3;
    assert_eq!(last["method"], "notifications/cancelled");
    let call = asked.iter().find(|(_, _, _, body)| body["method"] == "tools/call").unwrap();
    assert_eq!(last["params"]["requestId"], call.3["id"]);
}

#[tokio::test]
async fn refusals_say_who_refused_and_that_nothing_was_begun() {
    for (status, code, kind, said) in [
        (401, None, TroubleKind::Authentication, "401"),
        (403, None, TroubleKind::Authentication, "403"),
        (403, Some("host_not_listed"), TroubleKind::Connection, "proxyd denied"),
        (500, None, TroubleKind::Connection, "500"),
    ] {
        let rig = rig(Manner::Refuses(status, code));

        let trouble = rig.hand.tools(URL).await.unwrap_err();
        let ended = call_once(&rig).await;

        assert_eq!((trouble.kind, trouble.begun), (kind, false), "{trouble}");
        assert!(trouble.text.contains(said), "{trouble}");
        assert_eq!((ended.outcome, ended.is_error), (CallOutcome::Refused, true));
        assert_eq!(rig.server.count("tools/call"), 0);
    }
}

#[tokio::test]
async fn the_end_of_a_run_ends_the_session_at_the_server() {
    let rig = rig(Manner::Streams);
    rig.hand.tools(URL).await.unwrap();

    rig.hand.close();

    until("the session's end", || async {
        let asked = rig.server.asked.lock().unwrap();
        let end = asked.iter().find(|(method, ..)| method == Method::DELETE)?;
        assert_eq!(end.2["mcp-session-id"], "first");
        Some(())
    })
    .await;
}

/// A whole harnessd whose model calls the server's `alpha` once.
fn installation(manner: Manner) -> (Installation, Arc<Server>, CancellationToken) {
    let call = json!({ "name": "mcp__s__alpha", "input": { "a": 1 } });
    let first = json!({ "text": "", "tools": [call], "chunk_ms": 0, "first_token_ms": 1 });
    let rig = Installation::new(json!([first, super::rig::turn("end", &[])]));
    let (layout, stop) = (&rig.layout, CancellationToken::new());
    let server = serve(&layout.proxyd_lease(), &layout.proxyd_egress(), manner, &stop);
    (rig, server, stop)
}

async fn session(client: &ipc::http::Client, policy: Option<&str>) -> SessionId {
    let post = async |path: &str, body: Value| -> Value { client.post(path, &body).await.unwrap() };
    let mut toolset = json!({ "type": "mcp_toolset", "mcp_server_name": "s" });
    if let Some(policy) = policy {
        toolset["default_config"] = json!({ "permission_policy": { "type": policy } });
    }
    let environment = post("/v1/environments", json!({ "name": "for-mcp" })).await;
    let servers = json!([{ "type": "url", "name": "s", "url": URL }]);
    let agent = json!({ "name": "t", "model": "m", "tools": [toolset], "mcp_servers": servers });
    let agent = post("/v1/agents", agent).await;
    assert_eq!(agent["mcp_servers"], servers);
    let session = json!({ "agent": agent["id"], "environment_id": environment["id"] });
    let session = post("/v1/sessions", session).await;
    SessionId::parse(session["id"].as_str().unwrap()).unwrap()
}

/// The events that the API lists, of these kinds.
async fn listed(client: &ipc::http::Client, session: &SessionId, begins: &str) -> Vec<Value> {
    let path = format!("/v1/sessions/{session}/events?limit=100");
    let page: Value = client.get(&path).await.unwrap();
    let all = page["data"].as_array().unwrap().clone();
    all.into_iter().filter(|e| e["type"].as_str().unwrap().starts_with(begins)).collect()
}

fn outcome(events: &[Event]) -> CallOutcome {
    let of = |event: &Event| match &event.body {
        Logged::ToolResult(result) => Some(result.outcome),
        _ => None,
    };
    let found: Vec<_> = events.iter().filter_map(of).collect();
    assert_eq!(found.len(), 1, "{:?}", kinds(events));
    found[0]
}

#[tokio::test]
async fn a_call_of_an_mcp_tool_waits_for_its_client_and_shows_as_the_wire_api_has_it() {
    let (rig, server, stop) = installation(Manner::Streams);
    let daemon = rig.daemon().await;
    let session = session(&daemon.client, None).await;

    say(&daemon.client, &session, "go").await;
    let log = rig.log();
    idle(&log, &session, 1).await;
    assert_eq!(server.count("tools/call"), 0, "it asks first");
    let uses = listed(&daemon.client, &session, "agent.mcp_tool_use").await;
    let id = uses[0]["id"].clone();
    let allow = json!({ "type": "user.tool_confirmation", "tool_use_id": id, "result": "allow" });
    send(&daemon.client, &session, allow).await;
    let events = idle(&log, &session, 2).await;

    assert_eq!(outcome(&events), CallOutcome::Finished);
    let target = (&uses[0]["mcp_server_name"], &uses[0]["name"]);
    assert_eq!(target, (&json!("s"), &json!("alpha")));
    assert_eq!(uses[0]["evaluated_permission"], "ask");
    let results = listed(&daemon.client, &session, "agent.mcp_tool_result").await;
    assert_eq!(results[0]["mcp_tool_use_id"], id);
    assert_eq!(results[0]["content"][0]["text"], "done");
    assert_eq!(server.count("tools/call"), 1);
    stop.cancel();
}

#[tokio::test]
async fn a_server_that_fails_is_an_error_event_and_the_turn_goes_on() {
    for (refusal, kind) in [
        (Manner::Refuses(401, None), "mcp_authentication_failed_error"),
        (Manner::Refuses(403, Some("host_not_listed")), "mcp_connection_failed_error"),
    ] {
        let (rig, _server, stop) = installation(refusal);
        let daemon = rig.daemon().await;
        let session = session(&daemon.client, Some("always_allow")).await;

        say(&daemon.client, &session, "go").await;
        let events = idle(&rig.log(), &session, 1).await;

        let errors = listed(&daemon.client, &session, "session.error").await;
        assert_eq!((errors.len(), &errors[0]["error"]["type"]), (1, &json!(kind)));
        assert_eq!(errors[0]["error"]["mcp_server_name"], "s");
        // The model asked for a tool that is not there, was told so, and came to its end.
        assert_eq!(outcome(&events), CallOutcome::Denied);
        let last = listed(&daemon.client, &session, "session.status_idle").await;
        assert_eq!(last[0]["stop_reason"]["type"], "end_turn");
        stop.cancel();
    }
}

#[tokio::test]
async fn a_call_under_way_when_harnessd_is_killed_is_unknown_and_not_sent_again() {
    let (rig, server, stop) = installation(Manner::Hangs);
    let mut daemon = rig.daemon().await;
    let session = session(&daemon.client, Some("always_allow")).await;
    say(&daemon.client, &session, "go").await;
    until("the call to arrive", || async { (server.count("tools/call") == 1).then_some(()) }).await;

    daemon.kill();
    let _daemon = rig.daemon().await;
    let events = idle(&rig.log(), &session, 1).await;

    assert_eq!(outcome(&events), CallOutcome::OutcomeUnknown);
    assert_eq!(server.count("tools/call"), 1);
    stop.cancel();
}
