//! What those who wait get when the secret changes under a flight; the worker is the test.

use std::os::unix::net::UnixStream;

use super::*;
use crate::vault::child::open_in_test;
use crate::vault::tests::policy;
use crate::vault::wire::{Fetched, Request};

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
credential = "api"
[credentials.api]
secret = "local:app"
hosts = ["api.example"]
[credentials.api.inject.oauth2]
grant = "client-credentials"
token-url = "https://login.example/token"
client-id = "c"
"#;

/// A vault with a secret, its end of the worker's socket, and what is asked for.
fn scene(dir: &std::path::Path) -> (Child, UnixStream, Key) {
    let (worker, ours) = UnixStream::pair().unwrap();
    let mut child = open_in_test(dir, worker);
    put(&mut child, "SECRET-CANARY-0");
    let policy = policy(POLICY);
    let api = &policy.credentials["api"];
    (child, ours, Key::Token(api.secret.clone(), api.grant.clone().unwrap()))
}

fn put(child: &mut Child, value: &str) {
    let value = Secret::new(value.as_bytes().to_vec());
    let answer = child.answer(0, Request::Put { name: "app".to_owned() }, &[value]);
    assert!(matches!(answer, Some(Ok(_))));
}

fn wait(child: &mut Child, key: &Key, number: u32) {
    let waiter = Waiter::new(number, Form::Bare);
    assert!(child.render_minted(key.clone(), waiter, None).is_none(), "it was answered at once");
}

/// The one flight under way.
fn flight(child: &Child) -> u32 {
    let numbers: Vec<u32> = child.mints.flights.keys().copied().collect();
    assert_eq!(numbers.len(), 1, "flights under way");
    numbers[0]
}

fn silent() -> Fetched {
    Fetched::Failed { reason: "the token server gave no answer".to_owned() }
}

fn answered(child: &mut Child, number: u32) -> Vec<(u32, Answer)> {
    let body = br#"{"access_token":"ACCESS-CANARY","token_type":"Bearer","expires_in":3600}"#;
    child.landed(number, Fetched::Answered { status: 200 }, Some(&Secret::new(body.to_vec())))
}

fn is_unavailable(answer: &Answer) -> bool {
    matches!(answer, Err(VaultError::Unavailable(_)))
}

#[test]
fn nobody_waits_for_a_second_flight_to_a_server_that_was_silent_in_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let (mut child, _worker, key) = scene(dir.path());
    wait(&mut child, &key, 1);
    wait(&mut child, &key, 2);
    let first = flight(&child);
    put(&mut child, "SECRET-CANARY-1");

    let answers = child.landed(first, silent(), None);

    assert_eq!(answers.len(), 2);
    assert!(answers.iter().all(|(_, answer)| is_unavailable(answer)));
    assert!(child.mints.flights.is_empty());
    // It was not about the new value: the next who asks is not told to come later.
    wait(&mut child, &key, 3);
}

#[test]
fn an_answer_about_a_former_value_is_asked_for_again_once_for_whoever_waits() {
    let dir = tempfile::tempdir().unwrap();
    let (mut child, _worker, key) = scene(dir.path());
    wait(&mut child, &key, 1);
    let first = flight(&child);
    put(&mut child, "SECRET-CANARY-1");
    assert!(answered(&mut child, first).is_empty(), "the token of a former value was given out");
    let second = flight(&child);
    assert_ne!(second, first);
    wait(&mut child, &key, 2);
    put(&mut child, "SECRET-CANARY-2");

    let answers = answered(&mut child, second);

    assert!(matches!(&answers[..], [(1, answer)] if is_unavailable(answer)), "{}", answers.len());
    let third = flight(&child);
    let answers = answered(&mut child, third);
    assert!(matches!(&answers[..], [(2, Ok(_))]));
}

#[test]
fn once_proxyd_has_gone_nothing_is_asked_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let (mut child, ours, key) = scene(dir.path());
    child.workers.end();

    let answer = child.render_minted(key, Waiter::new(1, Form::Bare), None);

    assert!(matches!(answer, Some(Err(VaultError::Gone))));
    assert!(child.mints.flights.is_empty());
    ours.set_nonblocking(true).unwrap();
    let read = std::io::Read::read(&mut &ours, &mut [0]);
    assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}
