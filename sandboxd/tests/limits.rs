//! What a call that reached a limit is told, and what each call used.
use crate::support::{Daemon, text};
use ipc::id::SessionId;
use ipc::sandbox::{Limit, Outcome, Receipt};
use serde_json::json;

/// Runs a command in an environment whose sandbox is this.
async fn run_in(daemon: &Daemon, sandbox: &str, command: &str, timeout_ms: u64) -> Receipt {
    daemon.policy("limited", sandbox);
    let mut request = daemon.bash_request(&SessionId::random(), command);
    request.environment = "limited".into();
    request.input["timeout_ms"] = json!(timeout_ms);
    daemon.execute(&request).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_had_every_process_it_may_is_told_so() {
    let daemon = Daemon::start().await;
    let many = "for i in $(seq 200); do sleep 300 & done; wait";

    let many = run_in(&daemon, "processes = 32", many, 5_000).await;
    let few = run_in(&daemon, "processes = 32", "sleep 300 & sleep 300 & exit 3", 5_000).await;

    assert_eq!(many.limits_reached, [Limit::Processes, Limit::Time], "{many:?}");
    let expected = "bash: the sandbox had as many processes and threads as it may, 32: no other \
                    began\nbash: bash command timed out after 5s";
    assert!(text(&many).starts_with(expected), "{}", text(&many));
    assert_eq!((few.limits_reached, few.exit_code), (vec![], Some(3)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_found_no_room_is_told_where() {
    let daemon = Daemon::start().await;
    let lean = "memory = \"96MiB\"";

    let bytes = run_in(&daemon, lean, "head -c 200M /dev/zero > /tmp/big", 30_000).await;
    let fit = run_in(&daemon, lean, "head -c 1M /dev/zero > /tmp/small; exit 4", 30_000).await;
    let coped = "head -c 200M /dev/zero > /tmp/big || rm /tmp/big";
    let coped = run_in(&daemon, lean, coped, 30_000).await;

    assert_eq!(bytes.limits_reached, [Limit::Disk], "{bytes:?}");
    assert!(text(&bytes).starts_with("bash: there was no room left in /tmp\n"), "{bytes:?}");
    assert_eq!((fit.limits_reached, fit.exit_code), (vec![], Some(4)));
    assert_eq!((coped.limits_reached, coped.is_error), (vec![], false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_wrote_too_long_a_file_is_told_how_long_one_may_be() {
    let daemon = Daemon::start().await;
    let command = "head -c 20M /dev/zero > big";

    let receipt = run_in(&daemon, "disk = \"16MiB\"", command, 30_000).await;

    assert_eq!(receipt.limits_reached, [Limit::FileSize], "{receipt:?}");
    let expected = "bash: a file would have been longer than one may be: 16 MiB\n";
    assert!(text(&receipt).starts_with(expected), "{}", text(&receipt));
    assert_eq!((receipt.exit_code, receipt.outcome), (Some(153), Outcome::Finished));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_of_a_call_is_that_of_the_processes_that_it_began() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();
    let hold = "bash -c 'x=$(head -c 40M /dev/zero | tr \"\\0\" x); echo held > held; sleep";

    let own = daemon.bash(&session, &format!("{hold} 1'; rm held")).await;
    let background = format!("{hold} 300' & while [ ! -e held ]; do sleep 0.1; done");
    daemon.bash(&session, &background).await;
    let others = daemon.bash(&session, "sleep 0.5").await;

    let peak = |receipt: &Receipt| receipt.usage.unwrap().memory_peak_bytes.unwrap();
    assert!(peak(&own) > 40 << 20, "{own:?}");
    assert!(peak(&others) < 40 << 20, "{others:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_call_writes_to_a_disk_is_counted_with_it() {
    let daemon = Daemon::start().await;
    let session = SessionId::random();

    let wrote = daemon.bash(&session, "head -c 8M /dev/zero > big; sync big").await;
    let after = daemon.bash(&session, "true").await;

    let written = |receipt: &Receipt| receipt.usage.unwrap().disk_written_bytes.unwrap();
    // The kernel counts what will go to a disk, which memory is not.
    let place = rustix::fs::statfs(&daemon.layout.state).unwrap();
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    let expected = if place.f_type == TMPFS_MAGIC { 0 } else { 8 << 20 };
    assert!((expected..expected + (1 << 20)).contains(&written(&wrote)), "{wrote:?}");
    assert!(written(&after) < 1 << 20, "{after:?}");
}

/// What the receipt of an ordinary call names decides which of the two must be seen.
#[tokio::test(flavor = "multi_thread")]
async fn required_limits_hold_for_the_whole_sandbox_or_there_is_none() {
    let daemon = Daemon::start().await;
    let ordinary = run_in(&daemon, "limits = \"available\"", "true", 30_000).await;
    let held = ordinary.layers.iter().find(|layer| layer.name == "limits").unwrap();

    let required = run_in(&daemon, "limits = \"required\"", "echo ran", 30_000).await;
    let disk = "limits = \"required\"\ndisk = \"1GiB\"";
    let disk = run_in(&daemon, disk, "echo ran", 30_000).await;

    if held.detail.starts_with("cgroup v2") {
        assert_eq!(text(&required).trim(), "ran");
    } else {
        assert_eq!(required.outcome, Outcome::Refused, "{required:?}");
        let said = text(&required);
        assert!(said.contains("each process only") && said.contains("Delegate=yes"), "{said}");
    }
    assert_eq!(disk.outcome, Outcome::Refused, "{disk:?}");
    assert!(text(&disk).contains("leave out `disk`"), "{disk:?}");
}
