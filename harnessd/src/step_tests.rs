//! Claims about `next_step`: each a short log and the step that must follow from it.

use ipc::id::CallId;
use serde_json::json;

use super::*;
use crate::log::{
    Agent, Body, CallOutcome, Created, ErrorKind, Event, Failure, RequestEnded, ToolResult,
    ToolUse, event::new_event_id,
};

/// A log under construction; ids are chosen by the test.
#[derive(Default, Clone)]
struct Script(Vec<Event>);

impl Script {
    fn with(mut self, id: &str, body: Body) -> Self {
        let seq = self.0.len() as u64 + 1;
        let time = "2026-01-01T00:00:00.000Z".to_owned();
        self.0.push(Event { seq, id: id.to_owned(), time, body });
        self
    }

    fn and(self, body: Body) -> Self {
        let id = new_event_id();
        self.with(&id, body)
    }

    fn created() -> Self {
        let agent = Agent {
            model: "m".into(),
            system: None,
            tools: Vec::new(),
            mcp: Vec::new(),
            snapshot: serde_json::Value::Null,
        };
        let created = Created {
            owner: "uid:1".into(),
            policy: "dev".into(),
            workspace: None,
            agent,
            budget_cents: None,
        };
        Self::default().and(Body::SessionCreated(created))
    }

    /// A turn whose message `m1` is taken in.
    fn asked() -> Self {
        Self::created()
            .with("m1", message())
            .and(Body::StatusRunning {})
            .and(Body::Processed { events: vec!["m1".into()] })
    }

    /// A turn with one answered request that used these tools.
    fn used(tools: &[(&str, Permission, HandKind)]) -> Self {
        let mut script = Self::asked().with("r1", started());
        for (id, permission, hand) in tools {
            script = script.with(id, Body::ToolUse(tool(id, *permission, *hand)));
        }
        script.and(ended("r1", "tool_use"))
    }

    fn next(&self) -> Step {
        next_step(&State::of(&self.0))
    }
}

fn message() -> Body {
    Body::UserMessage { content: vec![json!({"type": "text", "text": "hi"})] }
}

fn started() -> Body {
    Body::ModelRequestStarted {
        model: "m".into(),
        profile: "whole-log/1".into(),
        from: 0,
        summary: false,
    }
}

fn answer(reason: &str) -> RequestEnded {
    RequestEnded { stop_reason: Some(reason.into()), duration_ms: 1, ..RequestEnded::new("r1") }
}

fn ended(request: &str, reason: &str) -> Body {
    Body::ModelRequestEnded(RequestEnded { request: request.into(), ..answer(reason) })
}

fn failed(retryable: bool, retry_after_ms: Option<u64>) -> Body {
    let message = "overloaded".to_owned();
    let failure = Failure::new(ErrorKind::ModelOverloaded, message, retryable);
    let failure = Failure { retry_after_ms, ..failure };
    Body::ModelRequestEnded(RequestEnded { failure: Some(failure), ..answer("") })
}

fn tool(id: &str, permission: Permission, hand: HandKind) -> ToolUse {
    ToolUse {
        request: "r1".into(),
        call: CallId::parse(&format!("call_{id}")).unwrap(),
        model_id: format!("toolu_{id}"),
        name: "bash".into(),
        input: json!({}),
        hand,
        permission,
        reason: None,
        mcp: None,
    }
}

fn result(id: &str) -> Body {
    Body::ToolResult(ToolResult {
        tool_use: id.into(),
        call: CallId::parse(&format!("call_{id}")).unwrap(),
        content: Vec::new(),
        is_error: false,
        outcome: CallOutcome::Finished,
        receipt: None,
        mcp: false,
    })
}

fn idle(stop_reason: StopReason) -> Body {
    Body::StatusIdle { stop_reason, stop_details: None }
}

fn confirmation(tool_use: &str, allow: bool) -> Body {
    Body::UserToolConfirmation { tool_use: tool_use.into(), allow, deny_message: None }
}

fn names(step: Step) -> (&'static str, Vec<String>) {
    let ids = |calls: Vec<PendingCall>| calls.into_iter().map(|c| c.tool_use).collect();
    match step {
        Step::Rest => ("rest", vec![]),
        Step::CloseRequest { request } => ("close", vec![request]),
        Step::Interrupt { calls, .. } => ("interrupt", ids(calls)),
        Step::Begin { events } => ("begin", events),
        Step::Process { events } => ("process", events),
        Step::Refuse { calls } => ("refuse", calls.into_iter().map(|(c, _)| c.tool_use).collect()),
        Step::RunTools { calls } => ("run", ids(calls)),
        Step::RequireAction { tool_uses, .. } => ("ask", tool_uses),
        Step::CallModel { .. } => ("model", vec![]),
        Step::Finish { stop_reason, .. } => match stop_reason {
            StopReason::EndTurn => ("finish", vec![]),
            StopReason::RetriesExhausted => ("exhausted", vec![]),
            StopReason::Refusal => ("refusal", vec![]),
            StopReason::BudgetReached => ("budget", vec![]),
            StopReason::RequiresAction { .. } => ("never", vec![]),
        },
    }
}

use HandKind::{Client, Sandbox};
use Permission::{Allow, Ask, Deny};

type Case = (&'static str, Script, &'static str, &'static [&'static str]);

fn check(cases: Vec<Case>) {
    for (name, script, expected, ids) in cases {
        let ids = ids.iter().map(ToString::to_string).collect();
        assert_eq!(names(script.next()), (expected, ids), "{name}");
    }
}

#[test]
fn each_log_has_its_next_step() {
    let over = |reason| Script::asked().and(ended("r1", reason));
    let two = || Script::used(&[("a", Allow, Sandbox), ("b", Allow, Sandbox)]);
    let mixed = Script::used(&[("a", Ask, Sandbox), ("b", Allow, Sandbox)]);
    let archived = Script::created().with("m1", message()).and(Body::StatusTerminated {});
    let stray = Script::created().with("c", confirmation("x", true));
    check(vec![
        ("an empty log", Script::default(), "rest", &[]),
        ("a new session", Script::created(), "rest", &[]),
        ("a message", Script::created().with("m1", message()), "begin", &["m1"]),
        ("a message taken in", Script::asked(), "model", &[]),
        ("an open request", Script::asked().with("r1", started()), "close", &["r1"]),
        ("an end of turn", over("end_turn"), "finish", &[]),
        ("a refusal", over("refusal"), "refusal", &[]),
        ("a paused turn", over("pause_turn"), "model", &[]),
        ("two uses", two(), "run", &["a", "b"]),
        ("one result of two", two().and(result("b")), "run", &["a"]),
        ("both results", two().and(result("b")).and(result("a")), "model", &[]),
        ("a denied tool", Script::used(&[("a", Deny, Sandbox)]), "refuse", &["a"]),
        ("a client's tool", Script::used(&[("a", Allow, Client)]), "ask", &["a"]),
        ("runnable before asked", mixed, "run", &["b"]),
        ("a queued message waits for results", two().with("m2", message()), "run", &["a", "b"]),
        ("a queued message", over("end_turn").with("m2", message()), "process", &["m2"]),
        (
            "a message in mid-turn joins it",
            two().and(result("a")).and(result("b")).with("m2", message()),
            "process",
            &["m2"],
        ),
        (
            "a message behind a paused answer waits",
            over("pause_turn").with("m2", message()),
            "model",
            &[],
        ),
        ("an interrupt", two().with("i", Body::UserInterrupt {}), "interrupt", &["a", "b"]),
        ("archived", archived, "rest", &[]),
        ("a stray confirmation", stray, "process", &["c"]),
    ]);
}

#[test]
fn a_session_that_waits_for_its_client_has_its_next_step() {
    let asks = || Script::used(&[("a", Ask, Sandbox), ("b", Ask, Sandbox)]);
    let waiting = StopReason::RequiresAction { events: vec!["a".into(), "b".into()] };
    let asked = || asks().and(idle(waiting.clone()));
    let one = || asked().with("c", confirmation("a", true));
    let both = one().with("d", confirmation("b", false));
    let interrupted = asked().with("i", Body::UserInterrupt {});
    check(vec![
        ("asked", asks(), "ask", &["a", "b"]),
        ("asked already", asked(), "rest", &[]),
        ("one of two allowed", one(), "ask", &["b"]),
        ("all decided", both, "begin", &["c", "d"]),
        ("a message", asked().with("m2", message()), "rest", &[]),
        ("an interrupt", interrupted, "interrupt", &["a", "b"]),
    ]);
}

#[test]
fn an_interrupt_goes_before_the_message_that_came_with_it() {
    let script = Script::asked().with("i", Body::UserInterrupt {}).with("m2", message());
    let interrupted = script
        .clone()
        .and(Body::Processed { events: vec!["i".into()] })
        .and(idle(StopReason::EndTurn));

    assert_eq!(names(script.next()).0, "interrupt");
    assert_eq!(names(interrupted.next()), ("begin", vec!["m2".to_owned()]));
}

#[test]
fn confirmations_lead_to_a_run_and_a_refusal() {
    let script = Script::used(&[("a", Ask, Sandbox), ("b", Ask, Sandbox)])
        .and(idle(StopReason::RequiresAction { events: vec!["a".into(), "b".into()] }))
        .with("c", confirmation("a", true))
        .with("d", confirmation("b", false))
        .and(Body::StatusRunning {})
        .and(Body::Processed { events: vec!["c".into(), "d".into()] });

    assert_eq!(names(script.next()), ("refuse", vec!["b".to_owned()]));
    let script = script.and(result("b"));
    assert_eq!(names(script.next()), ("run", vec!["a".to_owned()]));
}

#[test]
fn a_started_call_is_asked_for_again_at_the_journal_it_was_sent_to() {
    let script = Script::used(&[("a", Allow, Sandbox)]).and(Body::ToolStarted {
        call: CallId::parse("call_a").unwrap(),
        journal: "j1".into(),
        fence: 4,
    });

    let Step::RunTools { calls } = script.next() else { panic!("{:?}", script.next()) };
    assert_eq!(calls[0].journal.as_deref(), Some("j1"));
}

#[test]
fn failures_are_tried_again_with_growing_waits_until_the_budget_is_spent() {
    let mut script = Script::asked();
    let mut waits = Vec::new();
    for _ in 0..FAILURES_MAX - 1 {
        script = script.and(failed(true, None));
        let Step::CallModel { wait_ms } = script.next() else { panic!("{:?}", script.next()) };
        waits.push(wait_ms);
    }
    script = script.and(failed(true, None));

    assert_eq!(waits, [500, 1000, 2000, 4000, 8000]);
    assert_eq!(names(script.next()).0, "exhausted");
    let afterwards = script.and(idle(StopReason::RetriesExhausted)).with("m2", message());
    assert_eq!(names(afterwards.next()), ("begin", vec!["m2".to_owned()]));
}

#[test]
fn an_answer_that_was_cut_off_is_asked_for_again_a_few_times() {
    let cut = || {
        let cut = RequestEnded { cut: true, ..answer("max_tokens") };
        Body::ModelRequestEnded(cut)
    };
    let mut script = Script::asked();
    for _ in 0..CUTS_MAX {
        script = script.and(cut());
        assert_eq!(names(script.next()).0, "model");
    }
    script = script.and(cut());

    assert_eq!(names(script.next()).0, "exhausted");
    let why = State::of(&script.0).reason_given_up();
    assert!(why.is_some_and(|why| why.contains("output limit")), "{why:?}");
}

#[test]
fn a_turn_that_a_provider_pauses_again_and_again_is_given_up() {
    let mut script = Script::asked();
    for _ in 0..PAUSES_MAX {
        script = script.and(ended("r1", "pause_turn"));
        assert_eq!(names(script.next()).0, "model");
    }
    script = script.and(ended("r1", "pause_turn"));

    assert_eq!(names(script.next()).0, "exhausted");
}

#[test]
fn a_context_that_is_too_long_is_halved_until_nothing_is_left_to_leave_out() {
    let request = |from| Body::ModelRequestStarted {
        model: "m".into(),
        profile: "whole-log/1".into(),
        from,
        summary: false,
    };
    let overflow = || {
        let failure = Failure::new(ErrorKind::ModelRequestFailed, "prompt is too long", false);
        let failure = Some(Failure { overflow: true, ..failure });
        Body::ModelRequestEnded(RequestEnded { failure, ..answer("") })
    };
    let mut script = Script::asked();
    for number in 0..8 {
        let id = format!("t{number}");
        script = script.and(request(0)).with(&id, Body::ToolUse(tool(&id, Allow, Sandbox)));
        script = script.and(ended("r1", "tool_use")).and(result(&id));
    }

    let mut floors = vec![0];
    loop {
        script = script.and(request(*floors.last().unwrap())).and(overflow());
        match script.next() {
            Step::CallModel { wait_ms: 0 } => floors.push(State::of(&script.0).floor),
            step => break assert_eq!(names(step).0, "exhausted"),
        }
    }

    assert!(floors.is_sorted_by(|a, b| a < b), "{floors:?}");
    assert!((3..6).contains(&floors.len()), "{floors:?}");
    let again = script.and(idle(StopReason::RetriesExhausted)).with("m2", message());
    assert_eq!(names(again.next()).0, "begin");
}

#[test]
fn a_budget_ends_the_turn_before_the_next_request_and_a_greater_one_lets_it_go_on() {
    let costs = |nano| RequestEnded { cost_nano_usd: Some(nano), ..answer("tool_use") };
    let budget = |budget_cents| Body::SessionUpdated {
        agent: None,
        title: None,
        metadata: None,
        budget_cents: Some(Some(budget_cents)),
    };
    let used = Body::ToolUse(tool("a", Allow, Sandbox));
    let script = Script::asked().and(budget(5)).and(started()).with("a", used);
    let spending = script.and(Body::ModelRequestEnded(costs(50_000_000)));
    let script = spending.clone().and(result("a"));
    let spent = script.clone().and(idle(StopReason::BudgetReached));

    assert_eq!(names(script.next()).0, "budget");
    assert_eq!(names(spent.next()).0, "rest");
    assert_eq!(names(spent.clone().and(budget(6)).next()).0, "begin");
    // Whoever waited for the client meanwhile says so as soon as the wait is over.
    let waited = idle(StopReason::RequiresAction { events: vec!["a".into()] });
    let waited = spending.clone().and(waited).and(result("a"));
    assert_eq!(names(waited.next()).0, "begin");
    assert_eq!(names(waited.and(Body::StatusRunning {}).next()).0, "budget");
    // A turn that stopped for want of a price rests too, until its budget changes.
    let stopped = Script::asked().and(budget(5)).and(idle(StopReason::BudgetReached));
    assert_eq!(names(stopped.next()).0, "rest");
    assert_eq!(names(stopped.and(budget(5)).next()).0, "begin");
    let below = Script::asked().and(budget(5)).and(Body::ModelRequestEnded(costs(49_999_999)));
    assert_eq!(names(below.next()).0, "finish");
}

#[test]
fn a_request_that_a_dead_process_left_is_made_again_at_once_the_first_time() {
    let wait = |script: &Script| match script.next() {
        Step::CallModel { wait_ms } => wait_ms,
        step => panic!("{step:?}"),
    };
    let once = Script::asked().and(failed(true, Some(0)));
    let twice = once.clone().and(failed(true, Some(0)));

    assert_eq!(wait(&once), 0);
    assert!(wait(&twice) > 0, "a request that kills its process is made without a pause");
}

#[test]
fn what_a_provider_asks_for_is_honoured_within_reason() {
    let wait = |body| match Script::asked().and(body).next() {
        Step::CallModel { wait_ms } => Some(wait_ms),
        _ => None,
    };

    assert_eq!(wait(failed(true, Some(2000))), Some(2000));
    assert_eq!(wait(failed(true, Some(RETRY_AFTER_MS_MAX + 1))), None);
    assert_eq!(wait(failed(false, None)), None);
}

#[test]
fn no_prefix_of_a_log_asks_the_model_while_a_call_has_no_result() {
    let script = Script::used(&[("a", Allow, Sandbox), ("b", Ask, Sandbox), ("c", Deny, Sandbox)])
        .and(result("c"))
        .and(Body::ToolStarted {
            call: CallId::parse("call_a").unwrap(),
            journal: "j".into(),
            fence: 1,
        })
        .and(result("a"))
        .and(idle(StopReason::RequiresAction { events: vec!["b".into()] }))
        .with("d", confirmation("b", true))
        .and(Body::StatusRunning {})
        .and(Body::Processed { events: vec!["d".into()] })
        .and(result("b"))
        .with("r2", started())
        .and(ended("r2", "end_turn"));

    for end in 0..=script.0.len() {
        let prefix = &script.0[..end];
        let open = prefix.iter().filter(|e| matches!(e.body, Body::ToolUse(_))).count();
        let done = prefix.iter().filter(|e| matches!(e.body, Body::ToolResult(_))).count();
        if open > done {
            let step = next_step(&State::of(prefix));
            assert!(
                !matches!(step, Step::CallModel { .. } | Step::Finish { .. }),
                "{end}: {step:?}"
            );
        }
    }
}
