//! Whole turns through the real daemon: what is written, in which order, and what the model gets.

use crate::rig::peers::SECRET;
use crate::rig::{Rig, idle, kinds, say, send, session, session_with, turn, until};
use harnessd::log::{Body, CallOutcome, Event, StopReason};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_with_tools_is_written_in_order_before_anything_acts_on_it() {
    let rig = Rig::new(json!([
        turn("I look.", &["one"]),
        turn("And on.", &["two", "three"]),
        turn("Done.", &[])
    ]));
    let daemon = rig.daemon().await;
    let session = session(&daemon.client).await;

    say(&daemon.client, &session, "go").await;
    let events = idle(&rig.log(), &session, 1).await;

    assert_eq!(
        kinds(&events),
        [
            "session_created",
            "user_message",
            "status_running",
            "processed",
            "model_request_started",
            "agent_message",
            "tool_use",
            "model_request_ended",
            "tool_started",
            "tool_result",
            "model_request_started",
            "agent_message",
            "tool_use",
            "tool_use",
            "model_request_ended",
            "tool_started",
            "tool_started",
            "tool_result",
            "tool_result",
            "model_request_started",
            "agent_message",
            "model_request_ended",
            "usage",
            "status_idle",
        ]
    );
    let runs = rig.sandboxd.runs();
    assert_eq!((runs["one"], runs["two"], runs["three"]), (1, 1, 1));
    let first_token = events.iter().find_map(|e| match &e.body {
        Body::ModelRequestEnded(ended) => ended.first_token_ms,
        _ => None,
    });
    assert!(first_token.is_some());
    let report = rig.log().verify(&session).await.unwrap();
    assert_eq!((report.records, report.problems), (24, vec![]));
    let head = until("the chain's head at proxyd", || async { rig.proxyd.heads().pop() }).await;
    assert_eq!((head.events, head.head), (24, report.head));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_in_a_tools_output_is_masked_before_it_is_stored() {
    let rig = Rig::new(json!([turn("", &["leak"]), turn("Done.", &[])]));
    let daemon = rig.daemon().await;
    let session = session(&daemon.client).await;

    say(&daemon.client, &session, "go").await;
    let events = idle(&rig.log(), &session, 1).await;

    let result = first_result(&events);
    assert_eq!(result.content[0]["text"], format!("token={}.", "*".repeat(SECRET.len())));
    assert_eq!(result.receipt.as_ref().unwrap().masked, 1);
    let state = rig.layout.state.join("harnessd");
    for file in std::fs::read_dir(state).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        let found = bytes.windows(SECRET.len()).any(|w| w == SECRET.as_bytes());
        assert!(!found, "the secret is in the state directory");
    }
    assert!(!rig.log_text().contains(SECRET));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_cannot_be_searched_is_withheld() {
    let rig = Rig::new(json!([turn("", &["leak"]), turn("Done.", &[])]));
    let daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    rig.proxyd.refuse();

    say(&daemon.client, &session, "go").await;
    let events = idle(&rig.log(), &session, 1).await;

    let result = first_result(&events);
    let text = result.content[0]["text"].as_str().unwrap();
    assert!(text.contains("withheld") && !text.contains(SECRET), "{text}");
    assert!(result.is_error);
    assert_eq!(result.outcome, CallOutcome::Finished);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupt_ends_the_call_and_the_turn_and_the_next_message_begins_another() {
    let rig = Rig::new(json!([turn("", &["hold"]), turn("Again.", &[])]));
    let daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    say(&daemon.client, &session, "go").await;
    until("the call to run", || async { rig.sandboxd.runs().get("hold").copied() }).await;

    send(&daemon.client, &session, json!({ "type": "user.interrupt" })).await;
    let events = idle(&rig.log(), &session, 1).await;
    say(&daemon.client, &session, "again").await;
    let after = idle(&rig.log(), &session, 2).await;

    assert_eq!(first_result(&events).outcome, CallOutcome::Cancelled);
    assert!(matches!(
        events.last().unwrap().body,
        Body::StatusIdle { stop_reason: StopReason::EndTurn, .. }
    ));
    assert!(
        kinds(&after).ends_with(
            &[
                "status_running",
                "processed",
                "model_request_started",
                "agent_message",
                "model_request_ended",
                "usage",
                "status_idle",
            ]
            .map(str::to_owned)
        )
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn shell_commands_run_in_the_order_of_the_answer_and_none_begins_after_an_interrupt() {
    let rig = Rig::new(json!([turn("", &["one", "two", "hold", "three"]), turn("Again.", &[])]));
    let daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    say(&daemon.client, &session, "go").await;
    until("the third call to run", || async { rig.sandboxd.runs().get("hold").copied() }).await;

    let asked: Vec<String> =
        rig.sandboxd.asked().iter().map(|c| c.input["command"].to_string()).collect();
    send(&daemon.client, &session, json!({ "type": "user.interrupt" })).await;
    let events = idle(&rig.log(), &session, 1).await;

    assert_eq!(asked, ["\"one\"", "\"two\"", "\"hold\""]);
    assert_eq!(rig.sandboxd.runs().get("three"), None, "a command began after the interrupt");
    let ended = |wanted| {
        let is = |e: &&Event| matches!(&e.body, Body::ToolResult(r) if r.outcome == wanted);
        events.iter().filter(is).count()
    };
    assert_eq!((ended(CallOutcome::Finished), ended(CallOutcome::Cancelled)), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupt_while_the_model_speaks_leaves_no_answer() {
    let slow = json!({ "text": "one two three four", "first_token_ms": 1, "chunk_ms": 30_000 });
    let rig = Rig::new(json!([slow]));
    let daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    say(&daemon.client, &session, "go").await;
    let log = rig.log();
    until("the request to begin", || async {
        let events = log.all(&session).await.unwrap();
        let begun = |e: &Event| matches!(e.body, Body::ModelRequestStarted { .. });
        events.iter().any(begun).then_some(())
    })
    .await;

    send(&daemon.client, &session, json!({ "type": "user.interrupt" })).await;
    let events = idle(&log, &session, 1).await;

    assert_eq!(
        kinds(&events)[4..],
        [
            "model_request_started",
            "user_interrupt",
            "model_request_ended",
            "processed",
            "usage",
            "status_idle",
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_that_the_client_must_allow_runs_after_it_did() {
    let rig = Rig::new(json!([turn("", &["one", "two"]), turn("Done.", &[])]));
    let daemon = rig.daemon().await;
    let ask = json!([{
        "type": "agent_toolset_20260401",
        "default_config": { "permission_policy": { "type": "always_ask" } },
    }]);
    let session = session_with(&daemon.client, ask).await;
    say(&daemon.client, &session, "go").await;
    let events = idle(&rig.log(), &session, 1).await;
    let Body::StatusIdle { stop_reason: StopReason::RequiresAction { events: asked }, .. } =
        &events.last().unwrap().body
    else {
        panic!("{:?}", events.last())
    };
    assert_eq!(rig.sandboxd.runs().len(), 0);

    for (id, result) in [(&asked[0], "allow"), (&asked[1], "deny")] {
        let event =
            json!({ "type": "user.tool_confirmation", "tool_use_id": id, "result": result });
        send(&daemon.client, &session, event).await;
    }
    let events = until("the end of the turn", || async {
        let events = rig.log().all(&session).await.unwrap();
        let end = Body::StatusIdle { stop_reason: StopReason::EndTurn, stop_details: None };
        (events.last().unwrap().body == end).then_some(events)
    })
    .await;

    assert_eq!(rig.sandboxd.runs().into_iter().collect::<Vec<_>>(), [("one".to_owned(), 1)]);
    let outcomes: Vec<_> = events
        .iter()
        .filter_map(|e| match &e.body {
            Body::ToolResult(result) => Some(result.outcome),
            _ => None,
        })
        .collect();
    assert_eq!(outcomes, [CallOutcome::Denied, CallOutcome::Finished]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_session_leaves_a_tombstone_and_no_workspace() {
    let rig = Rig::new(json!([turn("", &["one"]), turn("Done.", &[])]));
    let daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    say(&daemon.client, &session, "go").await;
    let events = idle(&rig.log(), &session, 1).await;

    let path = format!("/v1/sessions/{session}");
    let _: serde_json::Value = daemon.client.delete(&path).await.unwrap();

    let stone = rig.log().tombstone(&session).await.unwrap().unwrap();
    assert_eq!(stone.events, events.len() as u64);
    assert_eq!(stone.deleted_by, ipc::peer::Principal::own().owner());
    assert!(rig.log().all(&session).await.unwrap().is_empty());
    assert_eq!(rig.sandboxd.forgotten(), [session.to_string()]);
}

fn first_result(events: &[Event]) -> harnessd::log::ToolResult {
    let result = events.iter().find_map(|e| match &e.body {
        Body::ToolResult(result) => Some(result.clone()),
        _ => None,
    });
    result.unwrap()
}
