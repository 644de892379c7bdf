//! Half-made sandboxes: used by one session, made again, given back, never stale.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod support;

use ipc::id::SessionId;
use ipc::sandbox::Outcome;
use support::{Daemon, text, wait_until};

/// Waits until as many leases are open as sandboxes live and are ready.
async fn filled(daemon: &Daemon, leases: usize) {
    let proxyd = daemon.proxyd.as_ref().unwrap();
    wait_until("the pool is filled", async || proxyd.leases().len() == leases).await;
}

#[tokio::test]
async fn a_session_gets_a_ready_sandbox_with_its_own_workspace_and_its_lease() {
    let daemon = Daemon::start_with_ready(2).await;
    let proxyd = daemon.proxyd.as_ref().unwrap();
    let [first, second] = [SessionId::random(), SessionId::random()];

    daemon.bash(&first, "echo first > mine").await;
    filled(&daemon, 3).await;
    let receipt = daemon.bash(&second, "ls -A; echo second > mine; cat mine").await;

    assert_eq!((receipt.outcome, text(&receipt)), (Outcome::Finished, "second\n"), "{receipt:?}");
    assert!(receipt.provision_us.is_some());
    assert_eq!(proxyd.sessions(), [first.clone(), second]);
    assert_eq!(text(&daemon.bash(&first, "cat mine").await), "first\n");
}

#[tokio::test]
async fn what_was_one_sessions_is_never_anothers() {
    let daemon = Daemon::start_with_ready(1).await;
    let plant = "touch /tmp/left ~/left /dev/shm/left; (sleep 1000 &) ; hostname";
    let look = "ls -A /tmp ~ /dev/shm | grep left; ps ax | grep -c '[s]leep 1000'";
    daemon.bash(&SessionId::random(), "true").await;
    for used in 0..4 {
        filled(&daemon, 2 + used).await;
        let session = SessionId::random();
        let seen = daemon.bash(&session, look).await;
        daemon.bash(&session, plant).await;
        daemon.delete(&format!("/v1/sessions/{session}")).await.unwrap();

        assert_eq!(text(&seen), "0\n");
    }
}

#[tokio::test]
async fn a_changed_policy_rules_the_next_sandbox_although_others_were_ready() {
    let daemon = Daemon::start_with_ready(2).await;
    daemon.bash(&SessionId::random(), "true").await;
    filled(&daemon, 3).await;

    daemon.policy("dev", "env = { COLOUR = \"green\" }");
    let receipt = daemon.bash(&SessionId::random(), "echo $COLOUR").await;

    assert_eq!(text(&receipt), "green\n");
    let proxyd = daemon.proxyd.as_ref().unwrap();
    wait_until("the stale ones are given back", async || proxyd.closed() == 2).await;
}

#[tokio::test]
async fn ready_sandboxes_are_given_back_when_the_daemon_ends() {
    let mut daemon = Daemon::start_with_ready(3).await;
    daemon.bash(&SessionId::random(), "true").await;
    filled(&daemon, 4).await;

    assert!(daemon.stop().await.success());

    assert_eq!(daemon.proxyd.as_ref().unwrap().closed(), 4);
}

#[tokio::test]
async fn a_ready_sandbox_whose_lease_was_revoked_is_not_used() {
    let daemon = Daemon::start_with_ready(1).await;
    daemon.bash(&SessionId::random(), "true").await;
    filled(&daemon, 2).await;
    let proxyd = daemon.proxyd.as_ref().unwrap();

    proxyd.revoke_all();
    wait_until("the living one ends", async || daemon.sandboxes().await.is_empty()).await;
    let receipt = daemon.bash(&SessionId::random(), "echo alive").await;

    assert_eq!(text(&receipt), "alive\n");
}
