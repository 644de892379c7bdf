//! Promise: what a rule asks an operator about waits for the word that he types. What was asked,
//! who answered and what came of it stand in the audit under the call that it was about.

use std::process::{Child, Output, Stdio};

use cleanhands_tests::installation::Installation;
use cleanhands_tests::origin::Origin;
use cleanhands_tests::wait;
use ipc::peer::Principal;
use ipc::question::Question;
use ipc::vault::{AuditKind, AuditRecord};

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["POST"]
paths = ["/orders/*"]
addresses = ["127.0.0.1/32"]
ask = true
"#;
const CURL: &str = "curl -sS -w '\\n%{http_code}\\n' -d x https://api.example/orders/1?of=2";

async fn started() -> (Installation, Origin) {
    Installation::before(&["api.example"], POLICY).await
}

/// A command in a fresh sandbox, with a workspace of its own.
fn begun(installation: &Installation, workspace: &std::path::Path, script: &str) -> Child {
    let mut command = installation.intruder("dev", workspace);
    command.args(["bash", "-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

fn ended(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{out}{err}")
}

fn question(installation: &Installation, verbs: &[&str]) -> Output {
    installation.command(&[&["question"], verbs].concat()).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

/// What is listed, for programs.
fn listed(installation: &Installation) -> Vec<Question> {
    let lines = said(&question(installation, &["list", "--json"]));
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn held(installation: &Installation) -> Question {
    wait::until("a question", || listed(installation).pop())
}

/// Everything about a question's request, once it has come to its end in so many records.
async fn records(installation: &Installation, asked: &Question, count: usize) -> Vec<AuditRecord> {
    let found = wait::until_async("the records of a request", || async {
        let mut records = installation.audit().await;
        records.retain(|record| record.request.as_ref() == Some(&asked.request));
        (records.len() >= count).then_some(records)
    })
    .await;
    assert_eq!(asked.calls.len(), 1, "{asked:?}");
    assert!(found.iter().all(|record| record.calls == asked.calls), "{found:?}");
    found
}

fn begins(record: &AuditRecord, text: &str) -> bool {
    record.reason.as_ref().is_some_and(|reason| reason.starts_with(text))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_held_listed_and_goes_on_when_an_operator_allows_it() {
    let (installation, origin) = started().await;
    let workspace = tempfile::tempdir().unwrap();
    assert_eq!(said(&question(&installation, &["list"])), "no questions");
    let running = begun(&installation, workspace.path(), CURL);

    let asked = held(&installation);
    let id = asked.question.as_str();
    let shown = said(&question(&installation, &["list"]));
    assert!(shown.contains(&format!("{id}  POST api.example:443/orders/1?of=2\n")), "{shown}");
    assert!(origin.seen().is_empty(), "it went on before anybody said yes");
    assert_eq!(said(&question(&installation, &["allow", id])), format!("allowed {id}"));

    let out = ended(running);
    assert_eq!(out, "ok\n200\n");
    assert_eq!(origin.seen().len(), 1);
    assert!(listed(&installation).is_empty());
    let records = records(&installation, &asked, 4).await;
    let kinds: Vec<_> = records.iter().map(|record| record.kind).collect();
    use AuditKind::{Allowed, Note, Outcome};
    assert_eq!(kinds, [Note, Note, Allowed, Outcome], "{records:?}");
    let by = Principal::own();
    assert!(begins(&records[0], &format!("question {id}: held for ")), "{records:?}");
    assert!(begins(&records[1], &format!("question {id}: allowed once by {by}")), "{records:?}");
    assert_eq!(records[3].status, Some(200), "{records:?}");

    let again = question(&installation, &["allow", id]);
    let errors = String::from_utf8_lossy(&again.stderr);
    assert_eq!(again.status.code(), Some(1), "{errors}");
    assert!(errors.contains(&format!("no question {id} is open")), "{errors}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_an_operator_denies_is_a_403_that_says_so() {
    let (installation, origin) = started().await;
    let workspace = tempfile::tempdir().unwrap();
    let running = begun(&installation, workspace.path(), CURL);

    let asked = held(&installation);
    let id = asked.question.as_str();
    assert_eq!(said(&question(&installation, &["deny", id])), format!("denied {id}"));

    let out = ended(running);
    assert!(out.contains("\n403\n") && out.contains("question_denied"), "{out}");
    assert!(out.contains(&format!("asks an operator, who said no ({id})")), "{out}");
    assert!(origin.seen().is_empty());
    let records = records(&installation, &asked, 3).await;
    let kinds: Vec<_> = records.iter().map(|record| record.kind).collect();
    use AuditKind::{Denied, Note};
    assert_eq!(kinds, [Note, Note, Denied], "{records:?}");
    let by = Principal::own();
    assert!(begins(&records[1], &format!("question {id}: denied once by {by}")), "{records:?}");
    assert!(begins(&records[2], "question_denied: "), "{records:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_its_client_gave_up_leaves_the_list() {
    let (installation, origin) = started().await;
    let workspace = tempfile::tempdir().unwrap();
    // The substitution in the loop has a process of its own, which `$!` would name.
    let script = format!(
        "{CURL} & curl=$!; until [ -e leave ]; do read -rt 0.05 <> <(:); done; kill $curl; wait"
    );
    let running = begun(&installation, workspace.path(), &script);

    let asked = held(&installation);
    std::fs::write(workspace.path().join("leave"), "").unwrap();
    wait::until("the question to go", || listed(&installation).is_empty().then_some(()));
    let late = question(&installation, &["allow", asked.question.as_str()]);

    ended(running);
    assert_eq!(late.status.code(), Some(1), "{late:?}");
    assert!(origin.seen().is_empty());
    let records = records(&installation, &asked, 2).await;
    assert_eq!(records[1].kind, AuditKind::Denied, "{records:?}");
    assert!(begins(&records[1], "client_gone: "), "{records:?}");
}
