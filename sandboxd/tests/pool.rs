//! Half-made sandboxes: used by one session, made again, given back, never stale.
use crate::support::{Daemon, text, wait_until};
use ipc::id::SessionId;
use ipc::sandbox::{Outcome, Receipt};

/// Waits until so many sandboxes are ready, and as many leases are open as that and those that
/// live.
async fn filled(daemon: &Daemon, ready: usize) {
    let proxyd = daemon.proxyd.as_ref().unwrap();
    wait_until("the pool is filled", async || {
        let leases = daemon.sandboxes().await.len() + ready;
        daemon.health().await.ready == ready && proxyd.open_leases().len() == leases
    })
    .await;
}

/// The first call of a new session in an environment.
async fn begin(daemon: &Daemon, environment: &str) -> (SessionId, Receipt) {
    let session = SessionId::random();
    let mut request = daemon.bash_request(&session, "echo begun");
    request.environment = environment.into();
    (session, daemon.execute(&request).await.unwrap())
}

async fn end(daemon: &Daemon, session: &SessionId) {
    daemon.delete(&format!("/v1/sessions/{session}")).await.unwrap();
}

#[tokio::test]
async fn a_session_gets_a_ready_sandbox_with_its_own_workspace_and_its_lease() {
    let daemon = Daemon::start_with_ready(2).await;
    let proxyd = daemon.proxyd.as_ref().unwrap();
    let [first, second] = [SessionId::random(), SessionId::random()];

    daemon.bash(&first, "echo first > mine").await;
    filled(&daemon, 2).await;
    let before = proxyd.open_leases();
    let receipt = daemon.bash(&second, "ls -A; echo second > mine; cat mine").await;

    assert_eq!((receipt.outcome, text(&receipt)), (Outcome::Finished, "second\n"), "{receipt:?}");
    assert!(receipt.provision_us.is_some());
    let assigned = proxyd.assigned();
    let [(one, _), (other, lease)] = &assigned[..] else { panic!("{assigned:?}") };
    assert_eq!([one, other], [&first, &second]);
    assert!(before.contains(lease), "the second session's was not ready");
    assert_eq!(text(&daemon.bash(&first, "cat mine").await), "first\n");
}

#[tokio::test]
async fn what_was_one_sessions_is_never_anothers() {
    let daemon = Daemon::start_with_ready(1).await;
    let plant = "touch /tmp/left ~/left /dev/shm/left; (sleep 1000 &) ; hostname";
    let look = "ls -A /tmp ~ /dev/shm | grep left; grep -lx sleep /proc/[0-9]*/comm | wc -l";
    daemon.bash(&SessionId::random(), "true").await;
    for _ in 0..4 {
        filled(&daemon, 1).await;
        let session = SessionId::random();
        let seen = daemon.bash(&session, look).await;
        daemon.bash(&session, plant).await;
        let planted = daemon.bash(&session, look).await;
        end(&daemon, &session).await;

        assert_eq!(text(&seen), "0\n");
        assert_eq!(text(&planted), "left\nleft\nleft\n1\n");
    }
}

#[tokio::test]
async fn a_changed_policy_rules_the_next_sandbox_although_others_were_ready() {
    let daemon = Daemon::start_with_ready(2).await;
    daemon.bash(&SessionId::random(), "true").await;
    filled(&daemon, 2).await;

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
    filled(&daemon, 3).await;

    assert!(daemon.stop().await.success());

    assert_eq!(daemon.proxyd.as_ref().unwrap().closed(), 4);
}

#[tokio::test]
async fn a_ready_sandbox_whose_lease_was_revoked_is_not_used() {
    let daemon = Daemon::start_with_ready(1).await;
    daemon.bash(&SessionId::random(), "true").await;
    filled(&daemon, 1).await;
    let proxyd = daemon.proxyd.as_ref().unwrap();

    proxyd.revoke_all();
    wait_until("the living one ends", async || daemon.sandboxes().await.is_empty()).await;
    let receipt = daemon.bash(&SessionId::random(), "echo alive").await;

    assert_eq!(text(&receipt), "alive\n");
}

/// Where room is for three: as many as may live, or as many as there are ids.
const ROOM_FOR_THREE: [&str; 2] =
    ["sandboxes-max = 3\n", "uid-range = { first = 1879048192, count = 3 }\n"];

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_refused_a_sandbox_for_what_others_have_ready() {
    for room in ROOM_FOR_THREE {
        let daemon = Daemon::start_with_settings(&format!("{room}cells-ready = 2\n")).await;
        // Each round leaves others' ready ones where the next needs their places and their ids.
        for environments in [["dev", "small", "lean"], ["small", "lean", "dev"]].repeat(3) {
            let mut sessions = Vec::new();
            for environment in environments {
                let (session, receipt) = begin(&daemon, environment).await;
                assert_eq!(text(&receipt), "begun\n", "{room}{environment}: {receipt:?}");
                sessions.push(session);
            }
            let (_, fourth) = begin(&daemon, "brief").await;
            let living = daemon.sandboxes().await;
            for session in &sessions {
                end(&daemon, session).await;
            }

            // Without a right to give out ids there is no range of them.
            let own = rustix::process::geteuid().as_raw();
            if room == ROOM_FOR_THREE[0] || living[0].uid != own {
                assert_eq!(fourth.outcome, Outcome::Refused, "{room}{fourth:?}");
                assert!(text(&fourth).contains("as many sandboxes live as may"), "{fourth:?}");
                assert_eq!(living.len(), 3);
                let uids: std::collections::BTreeSet<u32> = living.iter().map(|s| s.uid).collect();
                assert!(uids.len() == 3 || living[0].uid == own, "{living:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_came_too_late_to_be_kept_ready_gives_its_place_back() {
    for room in ROOM_FOR_THREE {
        let daemon = Daemon::start_with_settings(&format!("{room}cells-ready = 1\n")).await;
        let proxyd = daemon.proxyd.as_ref().unwrap();
        proxyd.answer_only(1);
        daemon.bash(&SessionId::random(), "true").await;
        wait_until("one is being made ready", async || proxyd.asked() == 2).await;

        daemon.policy("dev", "env = { COLOUR = \"green\" }");
        let second = SessionId::random();
        let request = daemon.bash_request(&second, "echo $COLOUR");
        let (receipt, ()) = tokio::join!(daemon.execute(&request), async {
            // By then it is made for a policy that is no more.
            wait_until("the second session's is being made", async || proxyd.asked() >= 3).await;
            proxyd.answer_all();
        });

        assert_eq!(text(&receipt.unwrap()), "green\n");
        wait_until("the late one's lease is given back", async || proxyd.closed() == 1).await;
        filled(&daemon, 1).await;
        let (_, third) = begin(&daemon, "small").await;
        assert_eq!(text(&third), "begun\n", "{room}{third:?}");
    }
}
