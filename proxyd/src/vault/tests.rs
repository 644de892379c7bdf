//! The traffic process's side against the child's own code, in one process.

use std::os::unix::net::UnixStream;

use policies::{Policy, PolicySet};

use super::*;

pub(crate) const CANARY: &str = "SECRET-CANARY-7f3a9b2c";

/// A vault served by a thread, attached to the calling runtime.
pub(crate) fn in_process(directory: &Path) -> Vault {
    in_process_by(directory, child::now_unsigned)
}

/// The same, with a clock of the test's own for what it issues.
pub(crate) fn in_process_by(directory: &Path, clock: impl Fn() -> u64 + Send + 'static) -> Vault {
    let (ours, theirs) = UnixStream::pair().unwrap();
    child::serve_in_test(theirs, directory, clock);
    let (connection, first) = Connection::served(ours);
    let (vault, _) = Vault::opened(connection, first).unwrap();
    vault.attach().unwrap();
    vault
}

/// The environment `dev` of this text.
pub(crate) fn policy(text: &str) -> Arc<Policy> {
    let set = PolicySet::parse(&[("dev.toml".into(), text.into())]).unwrap();
    let policy = set.environment("dev").unwrap().clone();
    lock(&REGISTERED).push(policy.clone());
    policy
}

/// Policies that tests made, which a vault's own files would hold.
static REGISTERED: Mutex<Vec<Arc<Policy>>> = Mutex::new(Vec::new());

pub(super) fn registered(_: &str, name: &str, print: &str) -> Option<Arc<Credential>> {
    let policies = lock(&REGISTERED);
    let mut found = policies.iter().filter_map(|policy| policy.credentials.get(name));
    found.find(|credential| known::print(credential) == print).cloned()
}

fn github() -> Arc<Credential> {
    let policy = policy(
        r#"
        description = "test"
        [[egress.allow]]
        hosts = ["api.example", "other.example"]
        methods = ["GET"]
        credential = "github"
        [credentials.github]
        secret = "local:github"
        inject = { bearer = true }
        hosts = ["api.example", "other.example"]
        env = "GITHUB_TOKEN"
        "#,
    );
    policy.credentials["github"].clone()
}

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

fn host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

#[tokio::test]
async fn a_new_value_is_used_at_once_and_the_old_one_is_still_searched_for() {
    let dir = tempfile::tempdir().unwrap();
    let vault = in_process(dir.path());
    let credential = github();
    vault.put("github", secret("SECRET-CANARY-old")).await.unwrap();
    let old = vault.render(&credential, &host("api.example")).await.unwrap();
    let kept = vault.render(&credential, &host("api.example")).await.unwrap();

    vault.put("github", secret("SECRET-CANARY-new")).await.unwrap();
    let new = vault.render(&credential, &host("api.example")).await.unwrap();

    assert!(Arc::ptr_eq(&old, &kept), "asked twice for one value");
    assert_eq!(old.value.expose_secret(), b"Bearer SECRET-CANARY-old");
    assert_eq!(new.value.expose_secret(), b"Bearer SECRET-CANARY-new");
    let (clean, found) =
        crate::scrub::scrub_text(&new.patterns, "SECRET-CANARY-old SECRET-CANARY-new");
    assert_eq!((clean.as_str(), found), ("***************** *****************", 2));
}

#[tokio::test]
async fn a_removed_value_is_missing_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let vault = in_process(dir.path());
    let credential = github();
    vault.put("github", secret(CANARY)).await.unwrap();
    vault.render(&credential, &host("api.example")).await.unwrap();
    let masked = || vault.mask("dev", vec![CANARY.to_owned(), "else".to_owned()]);
    assert_eq!(masked().await.unwrap(), (vec!["*".repeat(CANARY.len()), "else".to_owned()], 1));

    vault.remove("github").await.unwrap();
    let rendered = vault.render(&credential, &host("api.example")).await;

    assert_eq!(rendered.err(), Some(VaultError::Missing("github".into())));
    assert_eq!(masked().await.unwrap().1, 0);
    assert!(vault.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn what_is_rendered_for_one_host_is_not_kept_for_another() {
    let dir = tempfile::tempdir().unwrap();
    let vault = in_process(dir.path());
    vault.put("github", secret(CANARY)).await.unwrap();
    vault.render(&github(), &host("api.example")).await.unwrap();

    let refused = vault.render(&github(), &host("evil.example")).await;

    assert!(matches!(refused.err(), Some(VaultError::Refused(_))));
}

#[tokio::test]
async fn placeholders_stay_the_same_and_differ_by_lease() {
    let dir = tempfile::tempdir().unwrap();
    let vault = in_process(dir.path());
    let (one, two) = (LeaseId::random(), LeaseId::random());

    let first = vault.placeholder(&one, &github(), Some("GITHUB_TOKEN")).await.unwrap();

    assert!(first.starts_with("ghp_") && first.len() == 40, "{first}");
    assert_eq!(vault.placeholder(&one, &github(), Some("GITHUB_TOKEN")).await.unwrap(), first);
    assert_ne!(vault.placeholder(&two, &github(), Some("GITHUB_TOKEN")).await.unwrap(), first);
}

#[tokio::test]
async fn every_question_fails_once_the_child_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let end = theirs.try_clone().unwrap();
    child::serve_in_test(theirs, dir.path(), child::now_unsigned);
    let (connection, first) = Connection::served(ours);
    let (vault, _) = Vault::opened(connection, first).unwrap();
    vault.attach().unwrap();
    vault.put("github", secret(CANARY)).await.unwrap();

    end.shutdown(std::net::Shutdown::Both).unwrap();
    tokio::time::timeout(Duration::from_secs(10), vault.gone()).await.unwrap();

    assert_eq!(vault.list().await.err(), Some(VaultError::Gone));
    assert_eq!(vault.render(&github(), &host("api.example")).await.err(), Some(VaultError::Gone));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_reach_those_who_asked_even_when_others_stop_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let vault = in_process(dir.path());
    let leases: Vec<_> = (0..200).map(|_| LeaseId::random()).collect();
    let expected: Vec<_> = {
        let credential = github();
        let mut expected = Vec::new();
        for lease in &leases {
            expected.push(vault.placeholder(lease, &credential, None).await.unwrap());
        }
        expected
    };
    lock(&vault.placeholders).clear();

    let tasks: Vec<_> = leases
        .into_iter()
        .map(|lease| {
            let vault = vault.clone();
            tokio::spawn(async move { vault.placeholder(&lease, &github(), None).await.unwrap() })
        })
        .collect();
    for (index, (task, expected)) in tasks.into_iter().zip(expected).enumerate() {
        if index % 3 == 0 {
            task.abort();
        } else {
            assert_eq!(task.await.unwrap(), expected);
        }
    }
}
