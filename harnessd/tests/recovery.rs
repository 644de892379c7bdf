//! Death and return: kill -9 anywhere, go on elsewhere; same history, nothing run twice.

use std::collections::HashMap;

use crate::rig::{Rig, idle, kinds, say, session, turn, until};
use harnessd::log::{Body, CallOutcome, Event};
use http_body_util::BodyExt;
use serde_json::json;

fn results(events: &[Event]) -> Vec<(String, CallOutcome)> {
    events
        .iter()
        .filter_map(|e| match &e.body {
            Body::ToolResult(result) => Some((result.tool_use.clone(), result.outcome)),
            _ => None,
        })
        .collect()
}

/// The history without what a recovery may add: notes, and a request given up and made again.
fn essence(events: &[Event]) -> Vec<String> {
    let mut kept = Vec::new();
    for (event, kind) in events.iter().zip(kinds(events)) {
        match &event.body {
            Body::Note(_) => {}
            Body::ModelRequestEnded(ended) if ended.failure.is_some() => {
                let open = kept.iter().rposition(|k| k == "model_request_started");
                kept.truncate(open.unwrap_or(kept.len()));
            }
            _ => kept.push(kind),
        }
    }
    kept
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_any_event_a_new_process_ends_the_turn_and_runs_no_tool_twice() {
    let script =
        json!([turn("One.", &["one"]), turn("Two.", &["two", "three"]), turn("Done.", &[])]);
    let rig = Rig::new(script);
    let log = {
        // Only to have the database there before the first look at it.
        let _daemon = rig.daemon().await;
        rig.log()
    };
    let mut whole = None;
    for stop_at in 3..25 {
        let before = rig.sandboxd.runs();
        let mut daemon = rig.daemon().await;
        let session = session(&daemon.client).await;
        say(&daemon.client, &session, "go").await;
        until("the event to die after", || async {
            (log.chain(&session).await.unwrap().events >= stop_at).then_some(())
        })
        .await;
        daemon.kill();

        let _daemon = rig.daemon().await;
        let events = idle(&log, &session, 1).await;

        let essence = essence(&events);
        assert_eq!(whole.get_or_insert_with(|| essence.clone()), &essence, "killed at {stop_at}");
        assert_eq!(results(&events).len(), 3, "killed at {stop_at}");
        let ran: HashMap<_, _> = rig
            .sandboxd
            .runs()
            .into_iter()
            .map(|(command, count)| (command.clone(), count - before.get(&command).unwrap_or(&0)))
            .collect();
        assert!(ran.values().all(|count| *count == 1), "killed at {stop_at}: {ran:?}");
        assert_eq!(log.verify(&session).await.unwrap().problems, Vec::<String>::new());
    }
    assert_eq!(whole.unwrap().len(), 24);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_process_joins_the_call_that_the_killed_one_had_sent() {
    let rig = Rig::new(json!([turn("", &["hold"]), turn("Done.", &[])]));
    let mut daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    say(&daemon.client, &session, "go").await;
    until("the call to run", || async { rig.sandboxd.runs().get("hold").copied() }).await;
    daemon.kill();

    let _second = rig.daemon().await;
    until("the call to be joined", || async { (rig.sandboxd.asked().len() >= 2).then_some(()) })
        .await;
    rig.sandboxd.release();
    let events = idle(&rig.log(), &session, 1).await;

    assert_eq!(rig.sandboxd.runs()["hold"], 1);
    assert_eq!(results(&events)[0].1, CallOutcome::Finished);
    assert!(kinds(&events).contains(&"note".to_owned()), "the recovery is not in the history");
    let asked = rig.sandboxd.asked();
    assert_eq!(asked[0].call, asked[1].call);
    assert!(asked[0].fence < asked[1].fence);
    assert_eq!(asked[1].journal.as_deref(), Some("journal-1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_a_lost_journal_held_is_told_as_unknown_and_not_run_again() {
    let rig = Rig::new(json!([turn("", &["hold"]), turn("I look.", &[])]));
    let mut daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    say(&daemon.client, &session, "go").await;
    until("the call to run", || async { rig.sandboxd.runs().get("hold").copied() }).await;
    daemon.kill();
    rig.sandboxd.forget_all();

    let _second = rig.daemon().await;
    let events = idle(&rig.log(), &session, 1).await;

    assert_eq!(rig.sandboxd.runs()["hold"], 1);
    assert_eq!(results(&events)[0].1, CallOutcome::OutcomeUnknown);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandboxd_that_restarts_in_mid_call_is_asked_again_under_the_same_id() {
    let rig = Rig::new(json!([turn("", &["hold"]), turn("Done.", &[])]));
    let daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    say(&daemon.client, &session, "go").await;
    until("the call to run", || async { rig.sandboxd.runs().get("hold").copied() }).await;

    rig.sandboxd.restart();
    until("the call to be asked again", || async {
        (rig.sandboxd.asked().len() >= 2).then_some(())
    })
    .await;
    rig.sandboxd.release();
    let events = idle(&rig.log(), &session, 1).await;

    assert_eq!(rig.sandboxd.runs()["hold"], 1);
    assert_eq!(results(&events)[0].1, CallOutcome::Finished);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_processes_one_runs_the_session_and_the_other_takes_over_when_it_dies() {
    let rig = Rig::new(json!([turn("", &["hold"]), turn("Done.", &[]), turn("More.", &[])]));
    let mut first = rig.daemon().await;
    let session = session(&first.client).await;
    say(&first.client, &session, "go").await;
    until("the call to run", || async { rig.sandboxd.runs().get("hold").copied() }).await;
    let second = rig.second_daemon().await;

    say(&second.client, &session, "and then").await;
    let log = rig.log();
    let while_owned = log.chain(&session).await.unwrap();
    first.kill();
    until("the other to take over", || async { (rig.sandboxd.asked().len() >= 2).then_some(()) })
        .await;
    rig.sandboxd.release();
    let events = idle(&log, &session, 1).await;

    assert_eq!(while_owned.fence, 1, "two processes owned the session at once");
    assert_eq!(rig.sandboxd.runs()["hold"], 1);
    assert_eq!(results(&events).len(), 1);
    let processed = kinds(&events).iter().filter(|k| *k == "processed").count();
    assert_eq!(processed, 2, "the second message was not taken in");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_in_mid_call_exits_cleanly_and_leaves_the_session_to_the_next() {
    let rig = Rig::new(json!([turn("", &["hold"]), turn("Done.", &[])]));
    let mut daemon = rig.daemon().await;
    let session = session(&daemon.client).await;
    say(&daemon.client, &session, "go").await;
    until("the call to run", || async { rig.sandboxd.runs().get("hold").copied() }).await;

    let status = daemon.stop().await;
    let _second = rig.daemon().await;
    rig.sandboxd.release();
    let events = idle(&rig.log(), &session, 1).await;

    assert_eq!(status.code(), Some(0), "{}", rig.log_text());
    assert_eq!(rig.sandboxd.runs()["hold"], 1);
    assert_eq!(results(&events)[0].1, CallOutcome::Finished);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_said_and_loses_nothing_that_was_acknowledged() {
    let rig = Rig::new(json!([turn("Hello.", &[])]));
    let mut daemon = rig.daemon_on_a_full_disk(800).await;
    let session = session(&daemon.client).await;
    let path = format!("/v1/sessions/{session}/events");
    let text = "x".repeat(20_000);
    let content = json!([{ "type": "text", "text": text }]);
    let body = json!({ "events": [{ "type": "user.message", "content": content }] }).to_string();

    let mut accepted = 0;
    let refused = loop {
        let (method, kind) = (axum::http::Method::POST, Some("application/json"));
        let response = daemon.client.send(method, &path, kind, body.clone().into()).await.unwrap();
        if !response.status().is_success() {
            let status = response.status();
            let said = response.into_body().collect().await.unwrap().to_bytes();
            break (status, String::from_utf8_lossy(&said).into_owned());
        }
        accepted += 1;
        assert!(accepted < 1000, "the disk never filled");
    };
    daemon.kill();
    let _second = rig.daemon().await;
    let log = rig.log();
    let events = until("the session to go on", || async {
        let unsettled = log.chain(&session).await.unwrap().unsettled;
        let events = log.all(&session).await.unwrap();
        (!unsettled).then_some(events)
    })
    .await;

    assert_eq!(refused.0, 503);
    assert!(refused.1.contains("is it full, a quota used up"), "{}", refused.1);
    let stored = kinds(&events).iter().filter(|k| *k == "user_message").count();
    assert!(accepted > 0 && stored >= accepted, "{accepted} were acknowledged, {stored} are there");
    assert_eq!(log.verify(&session).await.unwrap().problems, Vec::<String>::new());
}
