//! Files: uploaded, listed, given to sessions, taken away.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::routing::{delete, put};
use axum::{Json, Router};
use bytes::Bytes;
use ipc::fault::{Code, Fault};
use ipc::sandbox::Upload;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::daemon::Daemon;

const INVALID: &str = "invalid_request_error";

/// What sandboxd was given, by session and path, and the sessions it was told to forget.
#[derive(Clone, Default)]
struct Given {
    files: Arc<Mutex<BTreeMap<String, Bytes>>>,
    forgotten: Arc<Mutex<Vec<String>>>,
}

impl Given {
    fn at(&self, session: &str, path: &str) -> Option<Bytes> {
        self.files.lock().unwrap().get(&format!("{session} {path}")).cloned()
    }
}

/// The part of sandboxd that takes files.
async fn sandboxd(daemon: &Daemon) -> (Given, CancellationToken) {
    async fn upload(
        State(given): State<Given>,
        Path(session): Path<String>,
        Query(upload): Query<Upload>,
        body: Bytes,
    ) -> Result<Json<Value>, Fault> {
        if upload.path.ends_with("refused") {
            return Err(Fault::new(Code::Unavailable, "no room").with_hint("make some"));
        }
        assert_eq!(upload.owner, ipc::peer::Principal::own().owner());
        given.files.lock().unwrap().insert(format!("{session} {}", upload.path), body);
        Ok(Json(json!({})))
    }
    async fn take_away(
        State(given): State<Given>,
        Path(session): Path<String>,
        Query(upload): Query<Upload>,
    ) -> Json<Value> {
        given.files.lock().unwrap().remove(&format!("{session} {}", upload.path));
        Json(json!({}))
    }
    async fn forget(State(given): State<Given>, Path(session): Path<String>) -> Json<Value> {
        given.forgotten.lock().unwrap().push(session);
        Json(json!({}))
    }
    let given = Given::default();
    let router = Router::new()
        .route("/v1/sessions/{session}/uploads", put(upload).delete(take_away))
        .route("/v1/sessions/{session}", delete(forget))
        .layer(DefaultBodyLimit::disable())
        .with_state(given.clone());
    let listener = tokio::net::UnixListener::bind(daemon.path("run/sandboxd.sock")).unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(ipc::http::serve(listener, router, stop.clone(), Duration::ZERO));
    (given, stop)
}

fn parts_stored(daemon: &Daemon) -> u64 {
    let path = daemon.path("state/harnessd/sessions.db");
    let raw = rusqlite::Connection::open(path).unwrap();
    raw.query_row("SELECT count(*) FROM file_parts", [], |row| row.get(0)).unwrap()
}

/// What a session is created with, without its files.
async fn base(daemon: &Daemon) -> Value {
    let environment = daemon.post("/v1/environments", json!({ "name": "e" })).await.ok();
    let agent = daemon.post("/v1/agents", json!({ "name": "a", "model": "m" })).await.ok();
    json!({ "agent": agent["id"], "environment_id": environment["id"] })
}

#[tokio::test]
async fn a_file_is_uploaded_listed_read_about_and_deleted() {
    let daemon = Daemon::start(json!([])).await;
    let parts: [(&str, Option<&str>, &[u8]); 2] =
        [("expires_in_seconds", None, b"3600"), ("file", Some("b.csv"), b"x")];

    let first = daemon.upload("a.txt", b"hello").await.ok();
    let second = daemon.form(&parts, "--cut--\r\n").await.ok();
    let list = daemon.get("/v1/files?limit=1").await.ok();
    let next = list["next_page"].as_str().unwrap();
    let rest = daemon.get(&format!("/v1/files?limit=1&page={next}")).await.ok();
    let path = format!("/v1/files/{}", first["id"].as_str().unwrap());
    let named = format!("/v1/files?ids[]={}&ids[]=file_none", first["id"].as_str().unwrap());

    assert_eq!((&first["filename"], &first["size_bytes"]), (&json!("a.txt"), &json!(5)));
    assert_eq!((&first["type"], &first["mime_type"]), (&json!("file"), &json!("text/plain")));
    assert_eq!((&first["downloadable"], &first["scope"]), (&json!(false), &Value::Null));
    assert_eq!(first["expires_at"], Value::Null);
    assert!(second["expires_at"].as_str() > second["created_at"].as_str(), "{second}");
    assert_eq!((&list["data"], &rest["data"]), (&json!([second]), &json!([first])));
    assert_eq!(daemon.get(&path).await.ok(), first);
    assert_eq!(daemon.get(&named).await.ok()["data"], json!([first]));
    let content = daemon.get(&format!("{path}/content")).await;
    content.refused(400, INVALID, "not downloadable");
    let deleted = daemon.call("DELETE", &path, None).await.ok();
    assert_eq!(deleted["type"], "file_deleted");
    daemon.get(&path).await.refused(404, "not_found_error", "file");
    assert_eq!(parts_stored(&daemon), 1);
}

#[tokio::test]
async fn an_upload_that_is_not_as_documented_is_refused_and_leaves_nothing() {
    let daemon = Daemon::start(json!([])).await;
    let end = "--cut--\r\n";
    let long = "x".repeat(256);

    for (parts, end, words) in [
        (vec![], end, "file: required"),
        (vec![("file", Some("a/b"), "x")], end, "file: must have a filename"),
        (vec![("file", Some(long.as_str()), "x")], end, "file: must have a filename"),
        (vec![("file", None, "x")], end, "file: must have a filename"),
        (vec![("file", Some("a"), "x"), ("colour", None, "red")], end, "colour"),
        (vec![("file", Some("a"), "x"), ("file", Some("b"), "y")], end, "more than once"),
        (vec![("file", Some("a"), "x"), ("expires_in_seconds", None, "60")], end, "from 3600"),
        (vec![("file", Some("a"), "x")], "", "not whole"),
    ] {
        let parts: Vec<_> = parts.into_iter().map(|(n, f, b)| (n, f, b.as_bytes())).collect();
        let refused = daemon.form(&parts, end).await;

        refused.refused(400, INVALID, words);
    }
    daemon.raw("POST", "/v1/files", "{}".into()).await.refused(400, INVALID, "multipart");
    assert_eq!(parts_stored(&daemon), 0);
    assert_eq!(daemon.get("/v1/files").await.ok()["data"], json!([]));
}

#[tokio::test]
async fn a_session_is_given_a_copy_of_its_own_that_outlives_the_file() {
    let daemon = Daemon::start(json!([])).await;
    let (given, _stop) = sandboxd(&daemon).await;
    let bytes: Vec<u8> = (0..2_500_000u32).map(|at| at.to_le_bytes()[at as usize % 3]).collect();
    let file = daemon.upload("big.bin", &bytes).await.ok();
    let mut body = base(&daemon).await;
    body["resources"] = json!([
        { "type": "file", "file_id": file["id"] },
        { "type": "file", "file_id": file["id"], "mount_path": "/in/a b&c.bin" },
    ]);

    let session = daemon.post("/v1/sessions", body).await.ok();
    let id = session["id"].as_str().unwrap();
    let path = format!("/v1/files/{}", file["id"].as_str().unwrap());
    daemon.call("DELETE", &path, None).await.ok();
    let copies = daemon.get(&format!("/v1/files?scope_id={id}")).await.ok();

    assert_eq!(given.at(id, file["id"].as_str().unwrap()).as_deref(), Some(&bytes[..]));
    assert_eq!(given.at(id, "in/a b&c.bin").as_deref(), Some(&bytes[..]));
    let resources = session["resources"].as_array().unwrap();
    assert_eq!(resources[1]["mount_path"], "/mnt/session/uploads/in/a b&c.bin");
    assert!(resources.iter().all(|one| one["file_id"] != file["id"]), "{session}");
    assert_eq!(
        daemon.get(&format!("/v1/sessions/{id}")).await.ok()["resources"],
        session["resources"]
    );
    let copies = copies["data"].as_array().unwrap();
    assert_eq!(copies.len(), 2);
    assert_eq!(copies[0]["scope"], json!({ "type": "session", "id": id }));
    let copy = format!("/v1/files/{}", copies[0]["id"].as_str().unwrap());
    daemon.call("DELETE", &copy, None).await.refused(409, "conflict_error", id);
    daemon.call("DELETE", &format!("/v1/sessions/{id}"), None).await.ok();
    assert_eq!(*given.forgotten.lock().unwrap(), [id]);
    daemon.get(&copy).await.refused(404, "not_found_error", "file");
    assert_eq!(parts_stored(&daemon), 0);
}

#[tokio::test]
async fn files_are_added_to_a_session_and_taken_away() {
    let daemon = Daemon::start(json!([])).await;
    let (given, _stop) = sandboxd(&daemon).await;
    let file = daemon.upload("a.txt", b"hello").await.ok();
    let id = daemon.post("/v1/sessions", base(&daemon).await).await.ok();
    let id = id["id"].as_str().unwrap();
    let path = format!("/v1/sessions/{id}/resources");
    let with = |place: &str| json!({ "type": "file", "file_id": file["id"], "mount_path": place });

    let one = daemon.post(&path, with("one.txt")).await.ok();
    let two = daemon.post(&path, with("d/two.txt")).await.ok();
    let list = daemon.get(&format!("{path}?limit=1")).await.ok();
    let next = list["next_page"].as_str().unwrap();
    let rest = daemon.get(&format!("{path}?limit=1&page={next}")).await.ok();
    let first = format!("{path}/{}", one["id"].as_str().unwrap());

    assert_eq!((&list["data"], &rest["data"]), (&json!([one]), &json!([two])));
    assert_eq!(rest["next_page"], Value::Null);
    assert_eq!(daemon.get(&first).await.ok(), one);
    assert_eq!(given.at(id, "one.txt").as_deref(), Some(&b"hello"[..]));
    daemon.post(&path, with("d")).await.refused(400, INVALID, "mount_path: ");
    daemon.post(&path, with("../x")).await.refused(400, INVALID, "mount_path: ");
    daemon.post(&path, with("refused")).await.refused(503, "overloaded_error", "no room");
    let copy = json!({ "type": "file", "file_id": one["file_id"] });
    daemon.post(&path, copy).await.refused(400, INVALID, "file_id: ");
    let other = json!({ "type": "file", "file_id": "file_none" });
    daemon.post(&path, other).await.refused(404, "not_found_error", "file_none");
    let token = json!({ "authorization_token": "x" });
    daemon.post(&first, token).await.refused(400, INVALID, "github_repository");
    let removed = daemon.call("DELETE", &first, None).await.ok();
    assert_eq!(removed["type"], "session_resource_deleted");
    assert_eq!(given.at(id, "one.txt"), None);
    daemon.get(&first).await.refused(404, "not_found_error", "resource");
    assert_eq!(daemon.get(&path).await.ok()["data"], json!([two]));
    daemon.call("POST", &format!("/v1/sessions/{id}/archive"), None).await.ok();
    daemon.post(&path, with("late")).await.refused(400, INVALID, "archived");
}

#[tokio::test]
async fn a_session_whose_files_cannot_be_given_does_not_come_to_be() {
    let daemon = Daemon::start(json!([])).await;
    let file = daemon.upload("a.txt", b"hello").await.ok();
    let mut body = base(&daemon).await;
    body["resources"] = json!([
        { "type": "file", "file_id": file["id"], "mount_path": "good" },
        { "type": "file", "file_id": file["id"], "mount_path": "refused" },
    ]);

    daemon.post("/v1/sessions", body.clone()).await.refused(503, "overloaded_error", "sandboxd");
    let (given, _stop) = sandboxd(&daemon).await;
    daemon.post("/v1/sessions", body.clone()).await.refused(503, "overloaded_error", "no room");
    body["resources"][1]["mount_path"] = json!("good/inside");
    let crowded = daemon.post("/v1/sessions", body).await;

    crowded.refused(400, INVALID, "resources[1].mount_path: ");
    assert_eq!(daemon.get("/v1/sessions").await.ok()["data"], json!([]));
    assert_eq!(given.forgotten.lock().unwrap().len(), 1);
    // Copies of a session that is none are gone; the file is there still.
    assert_eq!(daemon.get("/v1/files").await.ok()["data"], json!([file]));
}
