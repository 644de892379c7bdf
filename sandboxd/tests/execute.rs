//! The daemon itself, its sockets and real sandboxes, with a stand-in for proxyd's lease socket.

use std::path::Path;
use std::time::Duration;

use crate::support::{Daemon, FakeProxyd, text, wait_until};
use ipc::fault::Code;
use ipc::id::{CallId, SessionId};
use ipc::sandbox::{CallReport, Outcome};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn the_tools_of_a_session_share_one_sandbox_made_by_the_first() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();

    let wrote = daemon.file(&session, "write", json!({"file_path": "a.txt", "content": "x\n"}));
    let wrote = wrote.await;
    let ran = daemon.bash(&session, "cat a.txt; echo y >> a.txt; cd /tmp; v=5; echo err >&2").await;
    let state = daemon.bash(&session, "pwd; echo $v; cat | wc -c").await;
    let read = daemon.file(&session, "read", json!({"file_path": "/workspace/a.txt"})).await;
    let found = daemon.file(&session, "grep", json!({"pattern": "y"})).await;
    let listed = daemon.file(&session, "glob", json!({"pattern": "*"})).await;
    let edit = json!({"file_path": "a.txt", "old_string": "y", "new_string": "z"});
    let edited = daemon.file(&session, "edit", edit).await;
    let outside = daemon.file(&session, "read", json!({"file_path": "/etc/passwd"})).await;

    assert_eq!((text(&wrote), wrote.is_error), ("wrote 2 bytes to a.txt", false));
    assert_eq!((text(&ran), ran.exit_code), ("x\nerr\n", Some(0)));
    assert_eq!(text(&state), "/tmp\n5\n0\n");
    assert_eq!(text(&read), "x\ny\n");
    assert_eq!(text(&found), "/workspace/a.txt:2:y");
    assert_eq!(text(&listed), "/workspace/a.txt");
    assert_eq!(text(&edited), "edited a.txt (1 replacement(s))");
    let refusal = "read: path '/etc/passwd' is outside the session's working directory";
    assert_eq!((text(&outside), outside.is_error), (refusal, true));
    assert!(wrote.provision_us.is_some() && ran.provision_us.is_none());
    assert_eq!(wrote.sandbox, ran.sandbox);
    for layer in ["user-namespace", "network-namespace", "landlock", "seccomp"] {
        assert!(ran.layers.iter().any(|l| l.name == layer), "{layer}: {:?}", ran.layers);
    }
    assert_eq!(daemon.sandboxes().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_session_is_given_can_be_read_and_not_written_and_comes_and_goes() {
    let daemon = Daemon::start().await;
    let client = daemon.client();
    let (session, owner) = (SessionId::random(), ipc::peer::Principal::own().owner());
    let at = |path: &str| format!("/v1/sessions/{session}/uploads?owner={owner}&path={path}");
    let put = async |path: &str, body: &'static [u8]| {
        let kind = Some("application/octet-stream");
        client.call(http::Method::PUT, &at(path), kind, body.into()).await
    };

    put("early.txt", b"EARLY").await.unwrap();
    let shown = daemon.bash(&session, "cat /mnt/session/uploads/early.txt").await;
    put("dir/late.txt", b"LATE\n").await.unwrap();
    let given = json!({"file_path": "/mnt/session/uploads/dir/late.txt"});
    let late = daemon.file(&session, "read", given.clone()).await;
    let write = "echo x > /mnt/session/uploads/new || echo x >> /mnt/session/uploads/early.txt \
                 || rm -f /mnt/session/uploads/early.txt || chmod 777 /mnt/session/uploads";
    let written = daemon.bash(&session, write).await;
    client.delete::<serde_json::Value>(&at("dir/late.txt")).await.unwrap();
    let gone = daemon.file(&session, "read", given).await;
    let outside = put("../x", b"x").await.unwrap_err();
    let strange = format!("/v1/sessions/{session}/uploads?owner=uid:1&path=x");
    let strange = client.call(http::Method::PUT, &strange, None, "x".into()).await.unwrap_err();
    client.delete::<serde_json::Value>(&format!("/v1/sessions/{session}")).await.unwrap();
    let after = put("x", b"x").await.unwrap_err();

    assert_eq!(text(&shown), "EARLY");
    assert_eq!(text(&late), "LATE\n");
    assert!(written.is_error && text(&written).contains("Read-only"), "{}", text(&written));
    assert!(gone.is_error, "{}", text(&gone));
    assert_eq!(outside.code, Code::Invalid);
    // The tests' user may speak for others, so that a session has another owner is what is left.
    assert_eq!(strange.code, Code::NotFound);
    assert_eq!(after.code, Code::Conflict);
    let left = std::fs::read_dir(daemon.layout.state.join("sandboxd/workspaces")).unwrap();
    assert_eq!(left.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_has_the_placeholders_and_trusts_the_ca() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();

    let env = daemon.bash(&session, "echo $BILLING_TOKEN $GIT_TERMINAL_PROMPT").await;
    // The second also holds what this host's bundle has beyond Mozilla's list.
    let bundles = "tail -n 2 \"$SSL_CERT_FILE\"; grep -c RkFLRQ== $NODE_EXTRA_CA_CERTS";
    let bundle = daemon.bash(&session, bundles).await;
    let change = daemon.bash(&session, "echo x >> \"$SSL_CERT_FILE\"").await;

    assert_eq!(text(&env), "placeholder-billing 0\n");
    assert_eq!(text(&bundle), "RkFLRQ==\n-----END CERTIFICATE-----\n1\n");
    assert!(change.is_error, "{}", text(&change));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_id_runs_once_however_often_it_is_asked_for() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let call = daemon.bash_request(&session, "echo x >> counter; sleep 0.5; wc -l < counter");

    let (a, b, running) = tokio::join!(daemon.execute(&call), daemon.execute(&call), async {
        wait_until("the call runs", || async {
            matches!(daemon.report(&call.call).await, CallReport::Running { .. })
        })
        .await;
    });
    let (a, b) = (a.unwrap(), b.unwrap());
    let again = daemon.execute(&call).await.unwrap();
    let mut other = call.clone();
    other.input = json!({"command": "true"});
    let conflict = daemon.execute(&other).await.unwrap_err();

    let () = running;
    assert_eq!((&a, text(&a)), (&b, "1\n"));
    assert_eq!(again, a);
    assert_eq!(conflict.code, Code::Conflict);
    assert!(
        matches!(daemon.report(&call.call).await, CallReport::Ended { receipt } if *receipt == a)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_killed_under_a_call_is_outcome_unknown_and_the_workspace_survives() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let call = daemon.bash_request(&session, "echo begun > begun; sleep 300; echo late > late");

    let (receipt, ()) = tokio::join!(daemon.execute(&call), async {
        let sandbox = daemon.sandbox_with("begun").await;
        crate::support::kill(sandbox.pid);
    });
    let receipt = receipt.unwrap();
    let after = daemon.bash(&session, "cat begun; ls").await;
    let again = daemon.execute(&call).await.unwrap();

    assert_eq!(receipt.outcome, Outcome::OutcomeUnknown);
    let expected =
        "outcome unknown: the sandbox ended before the command finished; the workspace is kept";
    assert_eq!((text(&receipt), receipt.is_error), (expected, true));
    assert_eq!(text(&after), "begun\nbegun\n");
    assert_ne!(after.sandbox, receipt.sandbox);
    assert_eq!(again, receipt);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_killed_under_a_call_knows_it_did_not_finish() {
    let mut daemon = Daemon::start().await;
    let session = SessionId::random();
    let before = daemon.bash(&session, "true").await;
    let call = daemon.bash_request(&session, "echo x >> counter; sleep 300");

    let (lost, ()) = tokio::join!(daemon.execute(&call), async {
        daemon.sandbox_with("counter").await;
        daemon.kill_hard();
    });
    daemon.restart().await;
    let receipt = daemon.execute(&call).await.unwrap();
    let after = daemon.bash(&session, "wc -l < counter").await;

    assert!(lost.is_err());
    assert_eq!(receipt.outcome, Outcome::OutcomeUnknown);
    assert_eq!(receipt.journal, before.journal);
    assert_eq!(text(&after), "1\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_sent_to_a_lost_journal_is_never_run() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let mut call = daemon.bash_request(&session, "echo x >> counter");
    call.journal = Some("journal_of_another_time".into());

    let receipt = daemon.execute(&call).await.unwrap();
    let after = daemon.bash(&session, "ls").await;

    assert_eq!(receipt.outcome, Outcome::OutcomeUnknown);
    assert_eq!(text(&after), "(no output)");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_kills_what_the_command_started_and_the_shell_must_be_restarted() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let sleepers = "grep -l '^sleep$' /proc/[0-9]*/comm 2>/dev/null | wc -l";
    let mut call = daemon.bash_request(
        &session,
        "echo a; sleep 300 & ./intruder new-session sleep 300 & \
         (./intruder new-session sleep 300 &); sleep 300",
    );
    call.input["timeout_ms"] = json!(500);
    assert_eq!(text(&daemon.bash(&session, "touch here").await), "(no output)");
    intruder::put_into(Path::new(&daemon.sandbox_with("here").await.workspace));

    let timed_out = daemon.execute(&call).await.unwrap();
    let refused = daemon.bash(&session, "true").await;
    let mut restart = daemon.bash_request(&session, "");
    restart.input = json!({"restart": true});
    let restarted = daemon.execute(&restart).await.unwrap();
    let left = daemon.bash(&session, sleepers).await;

    assert_eq!(timed_out.outcome, Outcome::TimedOut);
    assert_eq!(text(&timed_out), "bash: bash command timed out after 0.5s\na\n");
    assert!(timed_out.duration_ms < 5_000, "{}", timed_out.duration_ms);
    let required = "bash: bash session terminated; restart required";
    assert_eq!((text(&refused), refused.is_error), (required, true));
    assert_eq!((text(&restarted), restarted.is_error), ("bash session restarted", false));
    assert_eq!(text(&left), "0\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exit_ends_the_shell_with_that_status() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();

    let left = daemon.bash(&session, "echo bye; exit 3").await;
    let refused = daemon.bash(&session, "true").await;
    let killed = daemon.bash(&SessionId::random(), "kill -9 $$").await;

    assert_eq!((text(&left), left.exit_code, left.is_error), ("bye\n", Some(3), true));
    assert!(text(&refused).ends_with("restart required"));
    assert_eq!((killed.exit_code, killed.signal), (None, Some(9)));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_exits_of_seven_are_all_sevens_beside_orphans() {
    let daemon = Daemon::start().await;
    let sessions: Vec<SessionId> = (0..8).map(|_| SessionId::random()).collect();
    let calls: Vec<_> = (0..200)
        .map(|n| daemon.bash_request(&sessions[n % 8], "(sleep 0.01 &) ; (exit 7)"))
        .collect();

    let receipts =
        futures_util::future::join_all(calls.iter().map(|call| daemon.execute(call))).await;

    let codes: Vec<_> = receipts.into_iter().map(|receipt| receipt.unwrap().exit_code).collect();
    assert_eq!(codes, vec![Some(7); 200]);
}

#[tokio::test(flavor = "multi_thread")]
async fn long_output_is_bounded_counted_and_spilled() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();

    let long = daemon.bash(&session, "yes | head -c 80000000; echo; echo the end").await;
    let spill = long.spill.clone().unwrap();
    let size =
        daemon.bash(&session, &format!("wc -c < {spill}; git init -q . && git status -s")).await;
    let held_open = daemon.bash(&session, "sleep 300 & echo done").await;

    assert_eq!(long.output_bytes, 80_000_000 + 9);
    assert!(
        text(&long).starts_with("[output truncated] (80000009 bytes"),
        "{}",
        &text(&long)[..99]
    );
    assert!(text(&long).ends_with("y\n\nthe end\n") && text(&long).len() < 103 * 1024);
    assert_eq!(text(&size), format!("{}\n", 64 * 1024 * 1024));
    assert_eq!(text(&held_open), "done\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_that_upset_a_shell_end_with_their_own_status() {
    let daemon = Daemon::start().await;
    let table: [(&str, &str, Option<i32>); 9] = [
        ("nosuchcommand 2>/dev/null", "(no output)", Some(127)),
        ("printf 'a\\xff\\0b'", "a\u{fffd}\u{fffd}b", Some(0)),
        ("for i in 1 2; do echo $i; echo e$i >&2; done", "1\ne1\n2\ne2\n", Some(0)),
        ("exec 3>&- 0<&- 9>&-; { echo x >&3; } 2>/dev/null", "(no output)", Some(1)),
        ("yes > /dev/full & wait $!", "yes: standard output: No space left on device\n", Some(1)),
        ("trap 'echo trapped' EXIT; f() { return 4; }; f", "(no output)", Some(4)),
        ("echo \"it's\" 'a \"quote\"' `echo b` \\\\", "it's a \"quote\" b \\\n", Some(0)),
        ("exec > /dev/null 2>&1; echo lost", "(no output)", Some(0)),
        ("set -e; false; true", "(no output)", Some(1)),
    ];
    let session = SessionId::random();

    for (command, output, code) in table {
        let receipt = daemon.bash(&session, command).await;

        assert_eq!((text(&receipt), receipt.exit_code), (output, code), "{command}");
    }
    assert!(text(&daemon.bash(&session, "true").await).ends_with("restart required"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_command_and_a_noisy_background_process_hold_nothing_up() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let long = "x".repeat(300_000);

    let counted = daemon.bash(&session, &format!("wc -c <<'END'\n{long}\nEND")).await;
    let noisy = daemon.bash(&session, "yes noise & echo started").await;
    let quiet = daemon.bash(&session, "kill $!; wait; echo quiet").await;
    let last = daemon.bash(&session, "echo last").await;

    assert_eq!(text(&counted), "300001\n");
    assert!(noisy.output_bytes > 0 && noisy.exit_code == Some(0));
    assert!(text(&quiet).ends_with("quiet\n"), "{}", &text(&quiet)[..200]);
    assert_eq!(text(&last), "last\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_ends_with_its_call() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let mut bomb = daemon.bash_request(&session, "trap '' TERM; b() { b | b & }; b; sleep 300");
    bomb.environment = "small".into();
    bomb.input["timeout_ms"] = json!(500);
    let mut after = daemon.bash_request(&session, "echo alive");
    after.environment = "small".into();
    let mut restart = daemon.request(&session, "bash", json!({"restart": true}));
    restart.environment = "small".into();

    let ended = daemon.execute(&bomb).await.unwrap();
    daemon.execute(&restart).await.unwrap();
    let after = daemon.execute(&after).await.unwrap();

    assert!(matches!(ended.outcome, Outcome::TimedOut | Outcome::OutcomeUnknown), "{ended:?}");
    assert_eq!(text(&after), "alive\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_wait_for_a_proxyd_that_stays_away_are_refused_together() {
    let mut daemon = Daemon::start().await;
    daemon.proxyd.take().unwrap().stop().await;
    let session = SessionId::random();
    let calls: Vec<_> = (0..3).map(|_| daemon.bash_request(&session, "true")).collect();
    let begun = std::time::Instant::now();

    let receipts =
        futures_util::future::join_all(calls.iter().map(|call| daemon.execute(call))).await;

    for receipt in receipts {
        let receipt = receipt.unwrap();
        assert_eq!(receipt.outcome, Outcome::Refused);
        assert!(text(&receipt).contains("proxyd does not answer"), "{}", text(&receipt));
    }
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert!(daemon.sandboxes().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_call_ends_at_once() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let call = daemon.bash_request(&session, "echo begun > begun; sleep 300");

    let (receipt, ()) = tokio::join!(daemon.execute(&call), async {
        daemon.sandbox_with("begun").await;
        daemon.cancel(&call.call).await.unwrap();
    });
    let unknown = daemon.cancel(&CallId::random()).await.unwrap_err();

    assert_eq!(receipt.unwrap().outcome, Outcome::Cancelled);
    assert_eq!(unknown.code, Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_holder_of_a_session_is_refused() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let with_fence = |fence| {
        let mut call = daemon.bash_request(&session, "true");
        call.fence = fence;
        call
    };

    daemon.execute(&with_fence(2)).await.unwrap();
    let stale = daemon.execute(&with_fence(1)).await.unwrap_err();
    let current = daemon.execute(&with_fence(2)).await;

    assert_eq!(stale.code, Code::Conflict);
    assert!(current.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_begin_is_refused_with_its_reason() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let mut unknown = daemon.bash_request(&session, "true");
    unknown.environment = "nosuch".into();
    let mut refused = daemon.bash_request(&session, "true");
    refused.environment = "refused".into();
    let mut bad = daemon.bash_request(&session, "true");
    bad.input = json!({"comand": "true"});
    let mut tool = daemon.bash_request(&session, "true");
    tool.tool = "format-disk".into();

    for (call, expected) in [
        (unknown, "nosuch.toml"),
        (refused, "proxyd says no"),
        (bad, "unknown field `comand`"),
        (tool, "no such tool"),
    ] {
        let receipt = daemon.execute(&call).await.unwrap();

        assert_eq!((receipt.outcome, receipt.is_error), (Outcome::Refused, true));
        assert!(text(&receipt).contains(expected), "{}", text(&receipt));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_opened_again_when_proxyd_returns_and_says_what_runs() {
    let mut daemon = Daemon::start().await;
    let session = SessionId::random();
    let call = daemon
        .bash_request(&session, "touch begun; until [ -e go ]; do sleep 0.05; done; echo went");

    let first = daemon.proxyd.as_ref().unwrap().leases();
    assert!(first.is_empty());
    let running = {
        let (client, call) = (daemon.client(), call.clone());
        tokio::spawn(async move { Daemon::execute_with(&client, &call).await })
    };
    daemon.sandbox_with("begun").await;
    let before = daemon.proxyd.as_ref().unwrap().leases();
    daemon.proxyd.take().unwrap().stop().await;
    let again = FakeProxyd::start(&daemon.layout);
    wait_until("the lease is open again", || async { again.running().contains(&call.call) }).await;
    let after = again.leases();
    daemon.file(&session, "write", json!({"file_path": "go", "content": ""})).await;
    let receipt = running.await.unwrap().unwrap();

    assert_eq!((before.len(), &before), (1, &after));
    assert_eq!(text(&receipt), "went\n");
    wait_until("proxyd knows that it ended", || async { again.running().is_empty() }).await;
    daemon.proxyd = Some(again);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_sandbox_ends_and_the_next_call_finds_its_files() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let mut first = daemon.bash_request(&session, "echo kept > file");
    first.environment = "brief".into();
    let mut second = daemon.bash_request(&session, "cat file");
    second.environment = "brief".into();

    let first = daemon.execute(&first).await.unwrap();
    wait_until("it is ended", || async { daemon.sandboxes().await.is_empty() }).await;
    let second = daemon.execute(&second).await.unwrap();

    let notice = "(a new shell: the sandbox had ended while idle, \
        and with it the directory, the variables and all processes; files are kept)\nkept\n";
    assert_eq!(text(&second), notice);
    assert_ne!(first.sandbox, second.sandbox);
    let closed = || async { daemon.proxyd.as_ref().unwrap().closed() >= 1 };
    wait_until("its lease is given back", closed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_lease_and_a_deleted_sandbox_end_what_runs() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let revoked = daemon.bash_request(&session, "touch one; sleep 300");
    let deleted = daemon.bash_request(&session, "touch two; sleep 300");

    let (revoked, ()) = tokio::join!(daemon.execute(&revoked), async {
        daemon.sandbox_with("one").await;
        daemon.proxyd.as_ref().unwrap().revoke_all();
    });
    let (deleted, gone) = tokio::join!(daemon.execute(&deleted), async {
        let sandbox = daemon.sandbox_with("two").await.sandbox;
        let path = format!("/v1/sandboxes/{sandbox}");
        daemon.delete(&path).await.unwrap();
        (daemon.sandboxes().await, daemon.delete(&path).await.unwrap_err().code)
    });

    assert_eq!(revoked.unwrap().outcome, Outcome::OutcomeUnknown);
    assert_eq!(deleted.unwrap().outcome, Outcome::OutcomeUnknown);
    assert!(gone.0.is_empty());
    assert_eq!(gone.1, Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_drains_when_told_to_stop() {
    let mut daemon = Daemon::start().await;
    let session = SessionId::random();
    let call = daemon.bash_request(&session, "touch begun; sleep 300");
    let client = daemon.client();

    let (receipt, status) = tokio::join!(Daemon::execute_with(&client, &call), async {
        daemon.sandbox_with("begun").await;
        daemon.stop().await
    });

    assert_eq!(receipt.unwrap().outcome, Outcome::OutcomeUnknown);
    assert_eq!(status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn git_commits_in_worktrees_submodules_and_split_repositories() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let script = r"
        set -e
        export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
        git init -q main && cd main && echo 1 > f && git add f && git commit -q -m one
        git worktree add -q ../tree -b side
        (cd ../tree && echo 2 > g && git add g && git commit -q -m two && git status --short)
        git clone -q --bare . ../bare.git
        git -c protocol.file.allow=always submodule --quiet add ../bare.git sub
        git commit -q -m sub
        cd .. && git init -q --separate-git-dir gitdir split && cd split
        echo 3 > h && git add h && git commit -q -m three
        git -C ../main log --oneline --all | wc -l; git log --oneline | wc -l
    ";

    let receipt = daemon.bash(&session, script).await;

    assert_eq!(text(&receipt), "3\n1\n");
    assert!(!receipt.is_error, "{receipt:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receipt_says_what_its_call_used_and_not_what_others_did() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let busy = "for i in $(seq 300000); do :; done";

    let first = daemon.bash(&session, busy).await;
    let second = daemon.bash(&session, "true").await;
    let large = "b".repeat(1 << 20);
    let file = daemon.file(&session, "write", json!({"file_path": "a", "content": large})).await;

    let (first, second) = (first.usage.unwrap(), second.usage.unwrap());
    assert!(first.cpu_us >= 50_000, "{first:?}");
    assert!(second.cpu_us < first.cpu_us, "{second:?}");
    assert_eq!(second.memory_peak_bytes, None, "it began no process");
    let peak = file.usage.unwrap().memory_peak_bytes.unwrap();
    assert!(peak > 1 << 20, "it held the text: {peak}");
}
