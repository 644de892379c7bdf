//! Events as they stand in the log, there and back.

use super::*;
use serde_json::json;

fn updated(budget_cents: Option<Option<u64>>) -> Body {
    Body::SessionUpdated { agent: None, title: None, metadata: None, budget_cents }
}

#[test]
fn bodies_survive_their_columns() {
    let bodies = [
        Body::UserInterrupt {},
        Body::UserMessage { content: vec![json!({"type": "text", "text": "hi"})] },
        Body::Note(Note::Recovered { fence: 3, pid: 9 }),
        Body::Note(Note::Imported { events: 3, head: "00".into() }),
        Body::ProfileChanged { profile: "last-n/1:20".into() },
        updated(None),
        updated(Some(None)),
        updated(Some(Some(500))),
        Body::StatusIdle { stop_reason: StopReason::EndTurn, stop_details: None },
        Body::ToolUse(ToolUse {
            request: "sevt_a".into(),
            call: CallId::random(),
            model_id: "toolu_1".into(),
            name: "bash".into(),
            input: json!({"kind": "nested keys are nobody's business"}),
            hand: HandKind::Sandbox,
            permission: Permission::Allow,
            reason: None,
            mcp: None,
        }),
    ];

    for body in bodies {
        let (kind, text) = body.to_columns().unwrap();
        assert_eq!(Body::from_columns(&kind, &text).unwrap(), body, "{kind}: {text}");
    }
}

#[test]
fn ids_differ_and_those_of_later_moments_come_later() {
    let first = new_event_id();
    let ids: std::collections::HashSet<String> = (0..1000).map(|_| new_event_id()).collect();
    let moment = first[..14].to_owned();
    let later = loop {
        let id = new_event_id();
        if id[..14] != moment {
            break id;
        }
    };

    assert_eq!((ids.len(), first.len()), (1000, 29));
    assert!(later > first);
}

#[test]
fn an_unknown_kind_is_an_error_that_names_it() {
    let error = Body::from_columns("tool_cal", "{}").unwrap_err();

    assert!(error.to_string().contains("tool_cal"), "{error}");
}
