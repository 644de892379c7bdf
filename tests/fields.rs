//! Promise: no field of a request to the API names a file, a variable or an option of a daemon.
//!
//! Every field that the API's description knows is set, in every object of every body, to texts
//! that a shell, a loader, a parser of options or a path would take for more than a text.
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;

use cleanhands_tests::api::{Api, tool_results};
use cleanhands_tests::installation::{DAEMONS, Installation, Setup};
use rustix::fs::inotify;
use serde_json::{Value, json};

const DESCRIPTION: &str = include_str!("../harnessd/openapi.json");
/// In no text but ours.
const MARK: &str = "FIELD-CANARY";
/// Names that no body has, and that some program takes for its own.
const NAMES: &[&str] = &["LD_PRELOAD", "PATH", "BASH_ENV", "argv", "cwd", "env", "--config"];

/// A directory that nobody has a reason to look into, and what watches it.
struct Outside {
    directory: tempfile::TempDir,
    watch: rustix::fd::OwnedFd,
}

impl Outside {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix(MARK).tempdir().unwrap();
        for name in ["evil.so", "evil.toml", "evil.sh"] {
            std::fs::write(directory.path().join(name), "").unwrap();
        }
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        let flags = inotify::WatchFlags::OPEN | inotify::WatchFlags::CREATE;
        inotify::add_watch(&watch, directory.path(), flags).unwrap();
        Self { directory, watch }
    }

    fn tricks(&self) -> Vec<String> {
        let path = self.directory.path().display();
        vec![
            format!("{path}/evil.toml"),
            format!("../../../../../../../../../..{path}/evil.toml"),
            format!("file://{path}/evil.toml"),
            format!("LD_PRELOAD={path}/evil.so"),
            format!("x\nLD_PRELOAD={path}/evil.so\nBASH_ENV={path}/evil.sh"),
            format!("--config={path}/evil.toml"),
            format!("x\0{path}/evil.so"),
            format!("$(touch {path}/made)`touch {path}/made`;touch {path}/made"),
            format!("\"]\nroot = \"{path}\"\n[x.\""),
        ]
    }

    /// Who made or opened something in it since the last time.
    fn touched(&self) -> Vec<String> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.watch, &mut buffer);
        let mut names = Vec::new();
        while let Ok(event) = reader.next() {
            names.push(format!("{:?} {:?}", event.file_name(), event.events()));
        }
        names
    }
}

/// One request; gives the status and the answer.
fn post(socket: &Path, path: &str, body: &Value) -> (u16, Value) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let (_, content) = answer.split_once("\r\n\r\n").unwrap_or_default();
    (status, serde_json::from_str(content).unwrap_or_default())
}

/// The name of every field that the description knows.
fn fields(value: &Value, found: &mut BTreeSet<String>) {
    if let Some(properties) = value.get("properties").and_then(Value::as_object) {
        found.extend(properties.keys().cloned());
    }
    match value {
        Value::Object(map) => map.values().for_each(|value| fields(value, found)),
        Value::Array(list) => list.iter().for_each(|value| fields(value, found)),
        _ => {}
    }
}

/// Pointers to all that is in a body, and the objects among them.
fn places(value: &Value, at: &str, all: &mut Vec<String>, objects: &mut Vec<String>) {
    all.push(at.to_owned());
    match value {
        Value::Object(map) => {
            objects.push(at.to_owned());
            for (name, value) in map {
                places(value, &format!("{at}/{name}"), all, objects);
            }
        }
        Value::Array(list) => {
            for (number, value) in list.iter().enumerate() {
                places(value, &format!("{at}/{number}"), all, objects);
            }
        }
        _ => {}
    }
}

/// The body with each place set to each trick, and with each name in each object.
fn variants(body: &Value, names: &BTreeSet<String>, tricks: &[String]) -> Vec<Value> {
    let (mut all, mut objects) = (Vec::new(), Vec::new());
    places(body, "", &mut all, &mut objects);
    let mut variants = Vec::new();
    for place in &all {
        for trick in tricks {
            let mut variant = body.clone();
            *variant.pointer_mut(place).unwrap() = json!(trick);
            variants.push(variant);
        }
    }
    let mut next = tricks.iter().cycle();
    for place in &objects {
        let own = tricks.iter().map(String::as_str);
        for name in names.iter().map(String::as_str).chain(own) {
            let mut variant = body.clone();
            let object = variant.pointer_mut(place).unwrap().as_object_mut().unwrap();
            let trick = next.next().unwrap();
            // As a text, and as what holds texts.
            match variants.len() % 3 {
                0 => object.insert(name.to_owned(), json!(trick)),
                1 => object.insert(name.to_owned(), json!([trick])),
                _ => object.insert(name.to_owned(), json!({ "LD_PRELOAD": trick })),
            };
            variants.push(variant);
        }
    }
    variants
}

/// Environment and arguments of a process and of all that descend from it.
fn exposed(pid: u32) -> Vec<String> {
    let mut found = Vec::new();
    let mut pids = vec![pid];
    while let Some(pid) = pids.pop() {
        for name in ["environ", "cmdline"] {
            let text = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            found.push(String::from_utf8_lossy(&text).into_owned());
        }
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        pids.extend(children.split_whitespace().map(|pid| pid.parse::<u32>().unwrap()));
    }
    found
}

/// A good body of each kind.
fn bodies() -> [Value; 3] {
    let tool = json!({
        "type": "custom", "name": "look", "description": "looks",
        "input_schema": { "type": "object", "properties": {} },
    });
    let toolset = json!({ "type": "agent_toolset_20260401",
        "configs": [{ "name": "bash", "enabled": true }] });
    let environment = json!({
        "name": "e", "description": "d", "metadata": { "policy": "dev", "a": "b" },
        "config": { "type": "cloud", "networking": { "type": "unrestricted" }, "packages": {} },
    });
    let agent = json!({ "name": "a", "model": { "id": "m" }, "system": "s", "description": "d",
        "metadata": { "a": "b" }, "tools": [toolset, tool] });
    let message = json!({ "events": [
        { "type": "user.message", "content": [{ "type": "text", "text": "go" }] }] });
    [environment, agent, message]
}

/// Makes what has to be well; gives its id.
fn made(socket: &Path, path: &str, body: &Value) -> String {
    let (status, answer) = post(socket, path, body);
    assert!((200..300).contains(&status), "{path}: {status} {answer}");
    answer["id"].as_str().unwrap_or_default().to_owned()
}

/// Sends every variant of every body; gives what was accepted, by path, and how many were not.
fn attempt(
    socket: &Path,
    names: &BTreeSet<String>,
    tricks: &[String],
) -> (Vec<(String, Value)>, usize) {
    let [environment, agent, message] = bodies();
    let own_environment = made(socket, "/v1/environments", &environment);
    let own_agent = made(socket, "/v1/agents", &agent);
    let session = json!({ "agent": { "type": "agent", "id": own_agent },
        "environment_id": own_environment, "title": "t", "metadata": { "a": "b" } });
    let own_session = made(socket, "/v1/sessions", &session);
    let (mut accepted, mut refused) = (Vec::new(), 0);
    for (path, body) in [
        ("/v1/environments".to_owned(), environment),
        ("/v1/agents".to_owned(), agent),
        ("/v1/sessions".to_owned(), session),
        (format!("/v1/environments/{own_environment}"), json!({ "description": "d" })),
        (format!("/v1/agents/{own_agent}"), json!({ "version": 1, "description": "d" })),
        (format!("/v1/sessions/{own_session}"), json!({ "title": "t", "metadata": {} })),
        (format!("/cleanhands/v1/sessions/{own_session}/profile"), json!({ "profile": "p" })),
        ("/cleanhands/v1/keys".to_owned(), json!({ "name": "n" })),
        (format!("/v1/sessions/{own_session}/events"), message),
    ] {
        for (number, mut body) in variants(&body, names, tricks).into_iter().enumerate() {
            // Names are unique among environments.
            if body["name"] == "e" {
                body["name"] = json!(format!("e{number}"));
            }
            let (status, answer) = post(socket, &path, &body);
            assert!((200..500).contains(&status), "{path} {body}: {status} {answer}");
            match status < 300 {
                true => accepted.push((path.clone(), answer)),
                false => refused += 1,
            }
        }
    }
    for trick in tricks {
        let segment: String = trick.bytes().map(|byte| format!("%{byte:02x}")).collect();
        for kind in ["agents", "sessions", "environments"] {
            let (status, answer) = post(socket, &format!("/v1/{kind}/{segment}"), &json!({}));
            assert!((400..500).contains(&status), "{kind} {trick}: {status} {answer}");
        }
    }
    (accepted, refused)
}

const SHOW: &str =
    "env; tr '\\0' '\\n' </proc/self/environ; tr '\\0' ' ' </proc/1/cmdline; ls -a ~";

#[tokio::test(flavor = "multi_thread")]
async fn no_field_of_a_request_names_a_file_a_variable_or_an_option() {
    let show = json!([{ "name": "bash", "input": { "command": SHOW } }]);
    let script = json!([{ "text": "Look.", "tools": show }, { "text": "Done." }]);
    let setup = Setup::default().policy("dev", "[sandbox]\nroot = \"host\"\n").script(script);
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    let socket = installation.layout.harnessd();
    let outside = Outside::new();
    let tricks = outside.tricks();
    let mut names: BTreeSet<String> = NAMES.iter().map(|name| (*name).to_owned()).collect();
    fields(&serde_json::from_str(DESCRIPTION).unwrap(), &mut names);
    assert!(names.len() > 60, "{names:?}");

    let (accepted, refused) = attempt(&socket, &names, &tricks);

    // What was taken as a text is one: agents and environments of such names work as any other.
    assert!(accepted.len() > 50 && refused > 500, "{} and {refused}", accepted.len());
    let last = |path: &str| {
        let holds =
            |answer: &&(String, Value)| answer.0 == path && answer.1.to_string().contains(MARK);
        accepted.iter().rev().find(holds).unwrap().1["id"].clone()
    };
    let session = json!({ "agent": last("/v1/agents"), "environment_id": last("/v1/environments"),
        "title": tricks[4], "metadata": { "LD_PRELOAD": tricks[3] } });
    let session = made(&socket, "/v1/sessions", &session);
    let api = Api::new(&socket);
    api.say(&session, &tricks[7]).await;
    let results = tool_results(&api.until_idle(&session).await);
    assert!(results.len() == 1 && results[0].contains("HOME=/home/agent"), "{results:?}");
    assert!(!results[0].contains(MARK), "{results:?}");
    for daemon in DAEMONS {
        let exposed = exposed(installation.pid(daemon));
        let found: Vec<_> = exposed.iter().filter(|text| text.contains(MARK)).collect();
        assert!(found.is_empty() && exposed.iter().any(|text| text.contains(daemon)), "{found:?}");
    }
    assert_eq!(outside.touched(), Vec::<String>::new());
    // And it would have been seen.
    std::fs::read(outside.directory.path().join("evil.so")).unwrap();
    assert_eq!(outside.touched().len(), 1);
}
