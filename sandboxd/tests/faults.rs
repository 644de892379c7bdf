//! What is broken, full or not to be had: told with its reason, and nothing that was said is lost.
use crate::support::{Daemon, text, wait_until};
use ipc::fault::Code;
use ipc::id::SessionId;
use ipc::sandbox::{CallReport, Health, Outcome};

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_zygote_ends_the_daemon_and_the_next_one_knows_what_ran() {
    let mut daemon = Daemon::start().await;
    let session = SessionId::random();
    let call = daemon.bash_request(&session, "touch begun; sleep 300");
    let client = daemon.client();

    let (running, status) = tokio::join!(Daemon::execute_with(&client, &call), async {
        daemon.sandbox_with("begun").await;
        crate::support::kill(zygote_of(daemon.pid().await));
        daemon.ended().await
    });
    daemon.restart().await;
    let receipt = daemon.execute(&call).await.unwrap();
    let after = daemon.bash(&session, "ls").await;

    assert_eq!(status.code(), Some(1));
    assert_eq!(receipt.outcome, Outcome::OutcomeUnknown);
    assert!(running.is_err() || running.is_ok_and(|running| running == receipt));
    assert_eq!(text(&after), "begun\n");
}

/// The child that sandboxd has.
fn zygote_of(daemon: u32) -> u32 {
    let children = format!("/proc/{daemon}/task/{daemon}/children");
    let children = std::fs::read_to_string(children).unwrap();
    children.split_ascii_whitespace().next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_calls_and_loses_nothing_that_was_acknowledged() {
    let daemon = Daemon::start_on_small_disk(16).await;
    let (session, hog) = (SessionId::random(), SessionId::random());
    let append = "echo x >> counter; wc -l < counter";
    let first = daemon.bash_request(&session, append);
    let filling = daemon.bash_request(&hog, "cat /dev/zero > fill");
    let late = daemon.bash_request(&session, append);

    // The command that fills the disk is told so, and its receipt is kept nevertheless.
    let first_receipt = daemon.execute(&first).await.unwrap();
    let full = daemon.execute(&filling).await.unwrap();
    assert_eq!((full.outcome, full.is_error), (Outcome::Finished, true));
    assert!(text(&full).contains("No space left on device"), "{}", text(&full));

    // Nothing begins any more, and what has ended is known.
    for _ in 0..3 {
        let refused = daemon.execute(&late).await.unwrap();
        assert_eq!(refused.outcome, Outcome::Refused);
        assert!(text(&refused).contains("nothing was run: journal"), "{}", text(&refused));
        assert!(text(&refused).contains("make room"), "{}", text(&refused));
    }
    assert_eq!(daemon.execute(&first).await.unwrap(), first_receipt);
    assert_eq!(daemon.execute(&filling).await.unwrap(), full);

    // With room again the refused call runs, once.
    daemon.delete(&format!("/v1/sessions/{hog}")).await.unwrap();
    let late_receipt = daemon.execute(&late).await.unwrap();
    assert_eq!((text(&late_receipt), late_receipt.exit_code), ("2\n", Some(0)));

    let before = daemon.pid().await;
    crate::support::kill(before);
    wait_until("the next daemon serves", || async {
        daemon.client().get::<Health>("/v1/health").await.is_ok_and(|next| next.pid != before)
    })
    .await;
    assert_eq!(daemon.execute(&first).await.unwrap(), first_receipt);
    assert_eq!(daemon.execute(&late).await.unwrap(), late_receipt);
    assert_eq!(daemon.execute(&filling).await.unwrap_err().code, Code::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_this_version_cannot_do_is_refused_with_the_reason() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();

    for (environment, reason) in [
        ("strict", "limits are required, and disk can be limited for each file only"),
        ("packed", "packages and setup commands run under the policy \"packages\""),
        ("rootless", "/nonexistent"),
    ] {
        let mut call = daemon.bash_request(&session, "true");
        call.environment = environment.into();

        let refused = daemon.execute(&call).await.unwrap();

        assert_eq!(refused.outcome, Outcome::Refused, "{environment}");
        assert!(text(&refused).contains(reason), "{environment}: {}", text(&refused));
    }
    assert!(daemon.sandboxes().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn want_of_memory_is_an_outcome_or_the_receipt_says_that_it_cannot_be_told() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let mut hog = daemon.bash_request(&session, "head -c 300M /dev/zero | tail -c 200M >/dev/null");
    hog.environment = "lean".into();

    let receipt = daemon.execute(&hog).await.unwrap();

    let limits = receipt.layers.iter().find(|layer| layer.name == "limits").unwrap();
    if limits.detail.starts_with("cgroup") {
        assert_eq!(receipt.outcome, Outcome::OutOfMemory, "{receipt:?}");
        assert!(text(&receipt).contains("limit 96 MiB"), "{}", text(&receipt));
    } else {
        assert_eq!((receipt.outcome, receipt.is_error), (Outcome::Finished, true));
        assert!(limits.detail.contains("cannot be told"), "{}", limits.detail);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_session_leaves_nothing_behind() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let call = daemon.bash_request(&session, "mkdir -p a/b; echo x > a/b/c; chmod 0 a/b");
    daemon.execute(&call).await.unwrap();
    let workspace = daemon.sandboxes().await[0].workspace.clone();
    let unknown = daemon.delete(&format!("/v1/sessions/{}", SessionId::random())).await;

    daemon.delete(&format!("/v1/sessions/{session}")).await.unwrap();
    let again = daemon.execute(&call).await.unwrap_err();
    let report = daemon.report(&call.call).await;
    let new = daemon.execute(&daemon.bash_request(&session, "true")).await.unwrap_err();
    let twice = daemon.delete(&format!("/v1/sessions/{session}")).await;

    assert_eq!(unknown.unwrap_err().code, Code::NotFound);
    assert!(!std::path::Path::new(&workspace).exists());
    assert!(daemon.sandboxes().await.is_empty());
    assert_eq!((again.code, new.code), (Code::Conflict, Code::Conflict), "{again} {new}");
    assert!(matches!(report, CallReport::Unknown { .. }), "{report:?}");
    assert!(twice.is_ok());
}
