//! Agents, environments, sessions as objects; errors; pages.

use bytes::Bytes;
use serde_json::{Value, json};

use super::daemon::Daemon;

fn ids(page: &Value) -> Vec<String> {
    let data = page["data"].as_array().unwrap().iter();
    data.map(|object| object["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn every_error_has_envelope_type_and_request_id() {
    let daemon = Daemon::start(json!([])).await;
    let invalid = "invalid_request_error";

    daemon.get("/v1/agents/agent_none").await.refused(404, "not_found_error", "agent_none");
    daemon.get("/v1/nothing").await.refused(404, "not_found_error", "no such endpoint");
    daemon.call("DELETE", "/v1/agents", None).await.refused(405, invalid, "DELETE");
    daemon.post("/v1/agents", json!({})).await.refused(400, invalid, "name: required");
    daemon.raw("POST", "/v1/agents", "{".into()).await.refused(400, invalid, "not JSON");
    daemon.get("/v1/agents?colour=red").await.refused(400, invalid, "colour");
    daemon.get("/v1/agents?page=page_x").await.refused(400, invalid, "page");
    let fault = daemon.get("/cleanhands/v1/sessions/sesn_none/log").await;
    assert_eq!((fault.status, &fault.body["code"]), (404, &json!("not_found")));
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_as_too_large() {
    let daemon = Daemon::start(json!([])).await;
    let body = Bytes::from(vec![b' '; 32 * 1024 * 1024 + 1]);

    let answer = daemon.raw("POST", "/v1/agents", body).await;

    answer.refused(413, "request_too_large", "33554432");
}

#[tokio::test]
async fn an_empty_post_and_the_beta_parameter_are_tolerated() {
    let daemon = Daemon::start(json!([])).await;
    let agent = daemon.post("/v1/agents?beta=true", json!({ "name": "a", "model": "m" })).await;
    let agent = agent.ok();
    let path = format!("/v1/agents/{}/archive?beta=true", agent["id"].as_str().unwrap());

    let first = daemon.raw("POST", &path, Bytes::new()).await.ok();
    let second = daemon.raw("POST", &path, Bytes::new()).await.ok();

    assert!(first["archived_at"].is_string());
    assert_eq!(first, second);
}

#[tokio::test]
async fn agents_have_versions_and_a_lock() {
    let daemon = Daemon::start(json!([])).await;
    let agent = daemon.post("/v1/agents", json!({ "name": "a", "model": "m" })).await.ok();
    let path = format!("/v1/agents/{}", agent["id"].as_str().unwrap());

    let second = daemon.post(&path, json!({ "version": 1, "system": "s" })).await.ok();
    let same = daemon.post(&path, json!({ "system": "s" })).await.ok();
    let stale = daemon.post(&path, json!({ "version": 1, "system": "s" })).await;
    let first = daemon.get(&format!("{path}?version=1")).await.ok();
    let page = daemon.get(&format!("{path}/versions?limit=1")).await.ok();
    let cursor = page["next_page"].as_str().unwrap();
    let rest = daemon.get(&format!("{path}/versions?limit=1&page={cursor}")).await.ok();

    assert_eq!((&second["version"], &same["version"]), (&json!(2), &json!(2)));
    assert_eq!(stale.header("x-should-retry"), Some("false"));
    stale.refused(409, "conflict_error", "version");
    assert_eq!((&first["system"], &first["version"]), (&Value::Null, &json!(1)));
    assert_eq!(page["data"][0]["version"], 2);
    assert_eq!((&rest["data"][0]["version"], &rest["next_page"]), (&json!(1), &Value::Null));
    daemon.get(&format!("{path}?version=9")).await.refused(404, "not_found_error", "agent");
}

#[tokio::test]
async fn environments_are_bound_to_policy_files() {
    let daemon = Daemon::start(json!([])).await;
    let invalid = "invalid_request_error";
    let with = |name: &str, policy: &str, networking: Value| {
        json!({
            "name": name,
            "metadata": { "policy": policy },
            "config": { "type": "cloud", "networking": networking },
        })
    };
    let limited = |hosts: Value| json!({ "type": "limited", "allowed_hosts": hosts });
    let post = async |body: Value| daemon.post("/v1/environments", body).await;

    let made = post(json!({ "name": "default" })).await.ok();
    let nothing = post(with("nothing", "locked", limited(json!([])))).await.ok();

    assert_eq!(made["config"]["networking"]["type"], "unrestricted");
    assert_eq!(nothing["config"]["networking"]["allow_mcp_servers"], false);
    post(json!({ "name": "default" })).await.refused(409, "conflict_error", "default");
    post(with("a", "nope", limited(json!([])))).await.refused(400, invalid, "nope.toml");
    post(with("a", "nope", limited(json!([])))).await.refused(400, invalid, "there are: dev");
    post(with("a", "harness", limited(json!([])))).await.refused(400, invalid, "model calls");
    let evil = with("b", "dev", limited(json!(["evil.example"])));
    post(evil).await.refused(400, invalid, "evil.example");
    let narrow = with("c", "dev", limited(json!(["api.corp.example"])));
    post(narrow).await.refused(400, invalid, "db.corp.example");
    let whole = with("c", "dev", limited(json!(["*.corp.example"])));
    post(whole).await.refused(400, invalid, "outside dev.toml");
    let all = with("c", "dev", limited(json!(["db.corp.example", "api.corp.example"])));
    post(all).await.ok();
    let packages = json!({ "name": "d", "config": { "type": "cloud",
        "packages": { "pip": ["requests"] } } });
    post(packages).await.refused(400, invalid, "sandbox.packages.pip");
}

#[tokio::test]
async fn an_environment_goes_only_when_no_session_names_it() {
    let daemon = Daemon::start(json!([])).await;
    let session = daemon.session(json!([])).await;
    let session = daemon.get(&format!("/v1/sessions/{session}")).await.ok();
    let path = format!("/v1/environments/{}", session["environment_id"].as_str().unwrap());

    daemon.call("DELETE", &path, None).await.refused(409, "conflict_error", "uses it");
    let session = format!("/v1/sessions/{}", session["id"].as_str().unwrap());
    let deleted = daemon.call("DELETE", &session, None).await.ok();
    let gone = daemon.call("DELETE", &path, None).await.ok();

    assert_eq!(deleted["type"], "session_deleted");
    assert_eq!(gone["type"], "environment_deleted");
    daemon.get(&path).await.refused(404, "not_found_error", "environment");
}

#[tokio::test]
async fn sessions_page_both_ways_and_cursors_keep_to_their_list() {
    let daemon = Daemon::start(json!([])).await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.insert(0, daemon.session(json!([])).await);
    }

    let first = daemon.get("/v1/sessions?limit=2").await.ok();
    let next = first["next_page"].as_str().unwrap().to_owned();
    let second = daemon.get(&format!("/v1/sessions?limit=2&page={next}")).await.ok();
    let prev = second["prev_page"].as_str().unwrap();
    let back = daemon.get(&format!("/v1/sessions?limit=2&page={prev}")).await.ok();
    let last = second["next_page"].as_str().unwrap();
    let third = daemon.get(&format!("/v1/sessions?limit=2&page={last}")).await.ok();
    let oldest = daemon.get("/v1/sessions?limit=5&order=asc").await.ok();
    let filtered = daemon.get("/v1/sessions?statuses%5B%5D=running").await.ok();

    assert_eq!(ids(&first), made[0..2]);
    assert_eq!(first["prev_page"], Value::Null);
    assert_eq!(ids(&second), made[2..4]);
    assert_eq!(ids(&back), made[0..2]);
    assert_eq!((ids(&third), &third["next_page"]), (made[4..].to_vec(), &Value::Null));
    made.reverse();
    assert_eq!(ids(&oldest), made);
    assert_eq!(ids(&filtered), Vec::<String>::new());
    let other = daemon.get(&format!("/v1/sessions?order=asc&page={next}")).await;
    other.refused(400, "invalid_request_error", "page");
}

#[tokio::test]
async fn what_sessions_cannot_do_yet_is_refused_by_name() {
    let daemon = Daemon::start(json!([])).await;
    let session = daemon.session(json!([])).await;
    let session = daemon.get(&format!("/v1/sessions/{session}")).await.ok();
    let base = json!({ "agent": session["agent"]["id"],
        "environment_id": session["environment_id"] });
    for (field, value) in [
        ("resources", json!([{ "type": "github_repository", "url": "https://x.example/a/b" }])),
        ("vault_ids", json!(["vlt_1"])),
        ("budget", json!({ "type": "limit" })),
        ("initial_events", json!([{ "type": "user.define_outcome" }])),
        ("metadata.cleanhands.workspace", json!(null)),
        ("agent", json!({ "type": "agent", "id": "agent_none" })),
        ("surprise", json!(1)),
    ] {
        let mut body = base.clone();
        match field {
            "metadata.cleanhands.workspace" => {
                body["metadata"] = json!({ "cleanhands.workspace": "../../etc" });
            }
            _ => body[field] = value,
        }

        let answer = daemon.post("/v1/sessions", body).await;

        let status = if field == "agent" { 404 } else { 400 };
        assert_eq!(answer.status, status, "{field}: {}", answer.body);
        assert!(answer.message().starts_with(field), "{field}: {}", answer.message());
    }
}
