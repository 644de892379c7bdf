//! Secrets in files: a new value is used without anybody being told, also when a link is moved.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::support::*;
use tokio::io::AsyncWriteExt;

fn policy(path: &Path) -> String {
    format!(
        "[[egress.allow]]\nhosts = [\"api.test\"]\nmethods = [\"GET\"]\n\
         addresses = [\"127.0.0.1/32\"]\ncredential = \"api\"\n\
         [credentials.api]\nsecret = \"file:{}\"\ninject = {{ bearer = true }}\n\
         hosts = [\"api.test\"]\n",
        path.display()
    )
}

async fn ask(lease: &Lease) -> (String, String) {
    let mut stream = lease.h1("api.test").await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;
    (head[9..12].to_owned(), String::from_utf8_lossy(&body).into_owned())
}

/// Where the one secret is kept, and its state.
async fn listed(proxyd: &Proxyd) -> (String, String) {
    let list: serde_json::Value = proxyd.control().get("/v1/secrets").await.unwrap();
    let text = |key: &str| list["secrets"][0][key].as_str().unwrap().to_owned();
    assert!(text("name").starts_with("file:/"), "{list}");
    (text("kept"), text("state"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_that_a_moved_link_brings_is_used_and_its_echo_does_not_come_back() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], move |mut stream| {
        let log = Arc::clone(&log);
        async move {
            while let Some((head, _)) = request(&mut stream).await {
                let shown = field(&head, "authorization").unwrap_or("none").to_owned();
                log.lock().unwrap().push(shown.clone());
                let length = shown.len();
                let answer = format!("HTTP/1.1 200 So\r\nContent-Length: {length}\r\n\r\n{shown}");
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
                let _ = stream.flush().await;
            }
        }
    })
    .await;
    // As an orchestrator mounts secrets: a link to a directory that is replaced as a whole.
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("one", "FILE-CANARY-one\n"), ("two", "FILE-CANARY-two\n")] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
        std::fs::write(dir.path().join(name).join("token"), text).unwrap();
    }
    symlink("one", dir.path().join("..data")).unwrap();
    symlink("..data/token", dir.path().join("token")).unwrap();
    let more = format!("secret-directories = [\"{}\"]\n", dir.path().display());
    let policy = policy(&dir.path().join("token"));
    let proxyd = Proxyd::configured(&policy, &[("api.test", &upstream)], &more).await;
    let lease = proxyd.lease().await;

    assert_eq!(ask(&lease).await, ("200".to_owned(), "Bearer ***************".to_owned()));
    symlink("two", dir.path().join("next")).unwrap();
    std::fs::rename(dir.path().join("next"), dir.path().join("..data")).unwrap();
    until("the new value is used", || async {
        assert_eq!(ask(&lease).await, ("200".to_owned(), "Bearer ***************".to_owned()));
        seen.lock().unwrap().last().unwrap() == "Bearer FILE-CANARY-two"
    })
    .await;

    assert_eq!(seen.lock().unwrap()[0], "Bearer FILE-CANARY-one");
    assert_eq!(listed(&proxyd).await, ("file".to_owned(), "ready".to_owned()));
    assert!(!proxyd.log().contains("CANARY"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_outside_of_the_operators_directories_is_not_read() {
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], echo_h1).await;
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(elsewhere.path().join("token"), "FILE-CANARY-elsewhere").unwrap();
    symlink(elsewhere.path().join("token"), dir.path().join("link")).unwrap();
    let more = format!("secret-directories = [\"{}\"]\n", dir.path().display());
    // By its own name, and by a link that lies where it may be read.
    for path in [elsewhere.path().join("token"), dir.path().join("link")] {
        let proxyd = Proxyd::configured(&policy(&path), &[("api.test", &upstream)], &more).await;
        let lease = proxyd.lease().await;

        let (status, body) = ask(&lease).await;

        assert_eq!(status, "503", "{body}");
        assert!(body.contains("secret_unavailable") && !body.contains("CANARY"), "{body}");
        assert_eq!(listed(&proxyd).await, ("file".to_owned(), "unavailable".to_owned()));
    }
    assert_eq!(upstream.connections(), 0);
}
