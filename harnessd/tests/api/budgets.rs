//! Budgets: set at creation, kept between two requests, raised or removed, never unmeasured.

use serde_json::{Value, json};

use super::daemon::{Daemon, message, of};

/// At this price every token costs half a dollar: any request goes beyond a small budget.
const DEAR: u32 = 500_000;
const INVALID: &str = "invalid_request_error";

fn limit(cents: u64) -> Value {
    let cost = json!({ "amount": cents.to_string(), "currency": "USD" });
    json!({ "type": "limit", "max_list_cost": cost })
}

fn ask() -> Value {
    json!([{ "type": "custom", "name": "ask", "description": "Asks the client.",
        "input_schema": { "type": "object" } }])
}

/// Uses the client's tool, then ends.
fn script() -> Value {
    json!([
        { "text": "One.", "tools": [{ "name": "ask", "input": {} }] },
        { "text": "Two." },
        { "text": "Three." },
    ])
}

/// The body that makes a session like this one.
async fn like(daemon: &Daemon, session: &str) -> Value {
    let made = daemon.get(&format!("/v1/sessions/{session}")).await.ok();
    json!({ "agent": made["agent"]["id"], "environment_id": made["environment_id"] })
}

/// A session with this budget; gives its path.
async fn budgeted(daemon: &Daemon, cents: u64) -> (String, String) {
    let other = daemon.session(ask()).await;
    let mut body = like(daemon, &other).await;
    body["budget"] = limit(cents);
    let made = daemon.post("/v1/sessions", body).await.ok();
    assert_eq!(made["budget"], limit(cents));
    assert_eq!(made["usage"]["list_cost"], json!({ "amount": "0", "currency": "USD" }));
    let id = made["id"].as_str().unwrap().to_owned();
    (format!("/v1/sessions/{id}"), id)
}

fn cents(session: &Value) -> u64 {
    session["usage"]["list_cost"]["amount"].as_str().unwrap().parse().unwrap()
}

/// Lets the session speak once and answers its tool; gives the events up to the next idle.
async fn until_stopped(daemon: &Daemon, id: &str) -> Vec<Value> {
    let mut stream = daemon.stream(id, "").await;
    daemon.send(id, json!([message("go")])).await.ok();
    let events = stream.until("session.status_idle").await;
    let used = of(&events, "agent.custom_tool_use")[0]["id"].clone();
    let stop = &events.last().unwrap()["stop_reason"];
    assert_eq!(stop["type"], "requires_action", "waiting for the client goes first");
    let result = json!({ "type": "user.custom_tool_result", "custom_tool_use_id": used,
        "content": [{ "type": "text", "text": "here" }] });
    daemon.send(id, json!([result])).await.ok();
    stream.until("session.status_idle").await
}

#[tokio::test]
async fn a_spent_budget_stops_the_turn_and_a_greater_one_lets_it_go_on_by_itself() {
    let daemon = Daemon::start_priced(script(), DEAR).await;
    let (path, id) = budgeted(&daemon, 1).await;

    let events = until_stopped(&daemon, &id).await;
    let stopped = daemon.get(&path).await.ok();

    assert_eq!(events.last().unwrap()["stop_reason"], json!({ "type": "budget_reached" }));
    let usage = of(&events, "session.usage")[0];
    assert_eq!(
        (&usage["budget"], &usage["usage"]["list_cost"]),
        (&limit(1), &stopped["usage"]["list_cost"])
    );
    assert_eq!(of(&events, "session.error").len(), 0);
    let spent = cents(&stopped);
    assert!(spent >= 100, "{stopped}");
    assert_eq!((&stopped["status"], &stopped["budget"]), (&json!("idle"), &limit(1)));
    let refused = daemon.send(&id, json!([message("go on")])).await;
    refused.refused(400, INVALID, "its budget is reached");
    daemon.send(&id, json!([{ "type": "user.interrupt" }])).await.ok();
    let low = daemon.post(&path, json!({ "budget": limit(spent) })).await;
    assert_eq!(low.body["error"]["details"]["error_code"], "budget_not_raised");
    low.refused(400, INVALID, &format!("has cost {spent} cents"));

    let mut stream = daemon.stream(&id, "").await;
    let raised = daemon.post(&path, json!({ "budget": limit(spent + 1_000_000) })).await.ok();
    let events = stream.until("session.status_idle").await;

    assert_eq!(raised["budget"], limit(spent + 1_000_000));
    let updated = of(&events, "session.updated")[0];
    assert_eq!(updated["budget"], raised["budget"]);
    assert_eq!((updated.get("title"), updated.get("agent")), (None, None));
    assert_eq!(of(&events, "agent.message")[0]["content"][0]["text"], "Two.");
    assert_eq!(events.last().unwrap()["stop_reason"]["type"], "end_turn");
    assert!(cents(&daemon.get(&path).await.ok()) > spent);
}

#[tokio::test]
async fn a_budget_is_removed_for_good_and_the_turn_goes_on_without() {
    let daemon = Daemon::start_priced(script(), DEAR).await;
    let (path, id) = budgeted(&daemon, 1).await;
    until_stopped(&daemon, &id).await;

    let mut stream = daemon.stream(&id, "").await;
    let removed = daemon.post(&path, json!({ "budget": null })).await.ok();
    let events = stream.until("session.status_idle").await;
    let again = daemon.post(&path, json!({ "budget": limit(9_999_999) })).await;

    assert_eq!(removed["budget"], Value::Null);
    assert_eq!(of(&events, "session.updated")[0].get("budget"), Some(&Value::Null));
    assert_eq!(events.last().unwrap()["stop_reason"]["type"], "end_turn");
    assert_eq!(again.body["error"]["details"]["error_code"], "budget_create_only");
    again.refused(400, INVALID, "budget: can only be set when the session is created");
    daemon.send(&id, json!([message("more")])).await.ok();
}

#[tokio::test]
async fn a_budget_that_is_far_away_changes_nothing_and_a_change_of_it_wakes_nobody() {
    let daemon = Daemon::start_priced(json!([{ "text": "One." }]), 1).await;
    let (path, id) = budgeted(&daemon, 500).await;
    let mut stream = daemon.stream(&id, "").await;
    daemon.send(&id, json!([message("go")])).await.ok();
    let events = stream.until("session.status_idle").await;
    assert_eq!(events.last().unwrap()["stop_reason"]["type"], "end_turn");

    let same = daemon.post(&path, json!({ "budget": limit(500) })).await.ok();
    let lower = daemon.post(&path, json!({ "budget": limit(3), "title": "T" })).await.ok();
    let history = daemon.events(&id).await;

    assert_eq!((&same["budget"], &same["status"]), (&limit(500), &json!("idle")));
    assert_eq!((&lower["budget"], &lower["status"]), (&limit(3), &json!("idle")));
    let updated = of(&history, "session.updated");
    assert_eq!(updated.len(), 1, "the same budget again is no change");
    assert_eq!((&updated[0]["budget"], &updated[0]["title"]), (&limit(3), &json!("T")));
    assert_eq!(history.last().unwrap()["type"], "session.updated");
}

#[tokio::test]
async fn a_model_without_a_price_takes_no_budget() {
    let daemon = Daemon::start(script()).await;
    let session = daemon.session(ask()).await;
    let mut body = like(&daemon, &session).await;
    body["budget"] = limit(100);

    let refused = daemon.post("/v1/sessions", body).await;

    assert_eq!(refused.body["error"]["details"]["error_code"], "model_not_budgetable");
    refused.refused(400, INVALID, "budget: the model \"m\" has no price here");
    daemon.send(&session, json!([message("go")])).await.ok();
    let path = format!("/v1/sessions/{session}");
    daemon.stream(&session, "").await.until("session.status_idle").await;
    let shown = daemon.get(&path).await.ok();
    assert_eq!((&shown["usage"]["list_cost"], &shown["budget"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn a_price_that_went_away_stops_the_session_unmeasured_until_it_is_back() {
    let mut daemon = Daemon::start_priced(script(), 1).await;
    let (path, id) = budgeted(&daemon, 500).await;
    daemon.restart(|text| text.replace("price-", "#price-")).await;

    let mut stream = daemon.stream(&id, "").await;
    daemon.send(&id, json!([message("go")])).await.ok();
    let events = stream.until("session.status_idle").await;

    assert_eq!(events.last().unwrap()["stop_reason"]["type"], "budget_reached");
    assert_eq!(of(&events, "span.model_request_start").len(), 0, "it was asked unmeasured");
    let error = &of(&events, "session.error")[0]["error"];
    assert!(error["message"].as_str().unwrap().contains("no price any more"), "{error}");
    let refused = daemon.post(&path, json!({ "budget": limit(600) })).await;
    refused.refused(400, INVALID, "has no price here");
    daemon.send(&id, json!([message("go on")])).await.refused(400, INVALID, "budget is reached");

    daemon.restart(|text| text.replace("#price-", "price-")).await;
    let mut stream = daemon.stream(&id, "").await;
    daemon.post(&path, json!({ "budget": limit(500) })).await.ok();
    let events = stream.until("session.status_idle").await;
    assert_eq!(of(&events, "agent.message").len(), 1);
}
