//! A client that talks, interrupts, decides and answers, through whichever process lives.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use harnessd::log::objects::NewObject;
use harnessd::log::{
    Agent, Body, Created, Guard, HandKind, Log, LogError, NewEvent, Permission, Status, StopReason,
    Tool,
};
use harnessd::state::State;
use ipc::id::SessionId;
use serde_json::{Value, json};

use super::Process;
use super::world::World;

/// How long the client waits for an answer before it asks somebody else.
const PATIENCE: Duration = Duration::from_secs(5);

type Processes = Arc<Mutex<Vec<Process>>>;

fn created() -> Body {
    let sandbox = |name: &str, permission| Tool::Sandbox { name: name.to_owned(), permission };
    let agent = Agent {
        model: "m".into(),
        system: None,
        tools: vec![
            sandbox("bash", Permission::Allow),
            sandbox("read", Permission::Allow),
            sandbox("write", Permission::Ask),
            Tool::Custom {
                name: "yours".into(),
                description: String::new(),
                input_schema: json!({ "type": "object" }),
            },
        ],
        mcp: Vec::new(),
        snapshot: Value::Null,
    };
    Body::SessionCreated(Created {
        owner: "uid:1".into(),
        policy: "dev".into(),
        workspace: None,
        agent,
        budget_cents: None,
    })
}

/// Makes the session and says this and that; gives the ids of what was acknowledged.
pub async fn talk(
    world: &World,
    log: &Log,
    session: &SessionId,
    processes: &Processes,
) -> Vec<String> {
    let object = NewObject {
        kind: "session",
        id: session.as_str().to_owned(),
        owner: "uid:1".into(),
        unique_name: None,
        body: json!({}),
    };
    log.create_session(session, object, vec![created().into()]).await.unwrap();
    let mut acknowledged = Vec::new();
    for number in 0..2 + world.chance.below(6) {
        let body = match world.chance.below(5) {
            0 => Body::UserInterrupt {},
            _ => Body::UserMessage {
                content: vec![json!({ "type": "text", "text": format!("word {number}") })],
            },
        };
        if world.chance.now_and_then(15) {
            let profile =
                world.chance.one_of(&["whole-log", "last-n:2", "summary:800:2", "reset:800"]);
            let change = Body::ProfileChanged { profile: profile.to_owned() };
            let _ = send(processes, session, change.into()).await;
        }
        let event = NewEvent::from(body);
        let id = event.id.clone();
        if send(processes, session, event).await {
            acknowledged.push(id);
        }
        for _ in 0..world.chance.below(4) {
            tokio::time::sleep(world.chance.millis(900)).await;
            answer(world, log, session).await;
        }
    }
    acknowledged
}

/// Whether it was acknowledged. A process that dies meanwhile leaves it open.
async fn send(processes: &Processes, session: &SessionId, event: NewEvent) -> bool {
    let engine = {
        let processes = processes.lock().unwrap();
        let alive = processes.iter().find(|process| !process.life.dead.is_cancelled());
        alive.map(|process| process.engine.clone())
    };
    let Some(engine) = engine else {
        // All are dead. Time is virtual here: it passes once nobody has anything left to do, so
        // this lets the world start another.
        tokio::time::sleep(Duration::from_millis(50)).await;
        return false;
    };
    let sent = tokio::time::timeout(PATIENCE, engine.send(session, vec![event])).await;
    matches!(sent, Ok(Ok(_)))
}

/// Answers what the session waits for, or some of it. The answer must still be wanted when it is
/// stored, as the API sees to.
async fn answer(world: &World, log: &Log, session: &SessionId) {
    let events = log.all(session).await.unwrap();
    let Some(Body::StatusIdle {
        stop_reason: StopReason::RequiresAction { events: asked }, ..
    }) = events.iter().rev().map(|e| &e.body).find(|b| b.status().is_some())
    else {
        return;
    };
    let state = State::of(&events);
    // The next one is answered on another look.
    if let Some(id) = asked.iter().find(|id| state.awaits(id)) {
        let used = events.iter().find_map(|event| match &event.body {
            Body::ToolUse(used) if event.id == *id => Some(used),
            _ => None,
        });
        let tool_use = id.clone();
        let body = match used.unwrap().hand {
            HandKind::Client => {
                Body::UserCustomToolResult { tool_use, content: Vec::new(), is_error: false }
            }
            HandKind::Sandbox | HandKind::Mcp => {
                let allow = world.chance.now_and_then(70);
                Body::UserToolConfirmation { tool_use, allow, deny_message: None }
            }
        };
        let guard = Guard { last: Some(events.last().unwrap().seq), ..Guard::default() };
        match log.append(session, guard, vec![body.into()]).await {
            Ok(_) | Err(LogError::Moved(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Whether the session has nothing left to do and asks for nothing; answers what it asks for.
pub async fn rests(log: &Log, session: &SessionId, processes: &Processes) -> bool {
    let chain = log.chain(session).await.unwrap();
    if chain.unsettled || chain.status != Status::Idle {
        return false;
    }
    let state = State::of(&log.all(session).await.unwrap());
    if !state.has_open_calls() {
        return true;
    }
    let world = processes.lock().unwrap().first().map(|process| Arc::clone(&process.life.world));
    if let Some(world) = world {
        answer(&world, log, session).await;
    }
    false
}
