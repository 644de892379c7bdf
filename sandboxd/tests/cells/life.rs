//! How commands and cells begin and end.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sandboxd::cell::CellError;

use super::support::{Place, bash, command, processes, run, start, until, within};

#[tokio::test]
async fn exit_codes_and_signals_are_exact() {
    let place = Place::new();
    let cell = place.cell().await;

    for (script, code, signal) in [
        ("true", Some(0), None),
        ("false", Some(1), None),
        ("exit 7", Some(7), None),
        ("exit 255", Some(255), None),
        ("kill -TERM $$", None, Some(15)),
        ("kill -KILL $$", None, Some(9)),
        ("kill -SEGV $$", None, Some(11)),
    ] {
        let ran = run(&cell, script).await;

        assert_eq!((ran.exit.code, ran.exit.signal), (code, signal), "{script}: {}", ran.output);
    }
}

#[tokio::test]
async fn a_program_that_is_not_there_or_not_executable_is_told_apart() {
    let place = Place::new();
    let cell = place.cell().await;

    let absent = cell.spawn(&command(&["no-such-program"]), &[]).await.unwrap_err();
    let refused = cell.spawn(&command(&["/etc/passwd"]), &[]).await.unwrap_err();
    let no_directory = {
        let mut wrong = bash("true");
        wrong.cwd = "/nowhere".into();
        cell.spawn(&wrong, &[]).await.unwrap_err()
    };

    assert_eq!(absent.not_runnable(), Some(127), "{absent}");
    assert_eq!(refused.not_runnable(), Some(126), "{refused}");
    assert_eq!(no_directory.not_runnable(), None);
    assert!(no_directory.to_string().contains("chdir"), "{no_directory}");
    assert_eq!(run(&cell, "echo alive").await.output, "alive");
}

#[tokio::test]
async fn orphans_that_end_meanwhile_do_not_disturb_exit_codes() {
    let place = Place::new();
    let cell = place.cell().await;
    let noise = bash("for i in $(seq 100); do (true & true & exit 3) & done; wait; exit 9");

    let (noisy, _pipe) = start(&cell, &noise).await;
    for _ in 0..30 {
        let ran = run(&cell, "(sleep 0.01 & exit 5) & exit 7").await;
        assert_eq!((ran.exit.code, ran.exit.signal), (Some(7), None));
    }

    assert_eq!(within(noisy.wait()).await.unwrap().code, Some(9));
}

#[tokio::test]
async fn killing_a_command_reaches_what_made_itself_a_session_of_its_own() {
    let place = Place::new();
    let cell = place.cell().await;
    // Arguments of sleep that nothing else on the host has.
    let script = "./intruder new-session sleep 86391 & \
                  (./intruder new-session bash -c 'sleep 86392 & sleep 86393' &) ; \
                  trap '' TERM; sleep 86394";

    let (running, _pipe) = start(&cell, &bash(script)).await;
    until("all four sleep", || processes("sleep 8639").len() >= 5).await;
    within(running.kill_tree()).await.unwrap();

    assert_eq!(processes("sleep 8639"), [""; 0]);
    assert_eq!(within(running.wait()).await.unwrap().signal, Some(9));
    assert_eq!(run(&cell, "echo alive").await.output, "alive");
}

#[tokio::test]
async fn a_fork_bomb_is_bounded_and_killed() {
    let place = Place::new();
    let cell = place.cell().await;
    let bomb = "b() { b | b & sleep 86401; }; b 2>/dev/null; sleep 86401";

    let (running, pipe) = start(&cell, &bash(bomb)).await;
    drop(pipe);
    until("it grows", || processes("sleep 86401").len() > 20).await;
    within(running.kill_tree()).await.unwrap();

    assert_eq!(processes("sleep 86401"), [""; 0]);
    assert_eq!(run(&cell, "echo alive").await.output, "alive");
}

#[tokio::test]
async fn what_runs_in_the_background_lives_until_the_command_is_dropped() {
    let place = Place::new();
    let cell = place.cell().await;

    let (running, _pipe) = start(&cell, &bash("sleep 86411 & exit 4")).await;
    assert_eq!(within(running.wait()).await.unwrap().code, Some(4));
    until("it sleeps", || processes("sleep 86411").len() == 1).await;
    drop(running);

    until("it is gone", || processes("sleep 86411").is_empty()).await;
}

#[tokio::test]
async fn a_signal_reaches_the_commands_group() {
    let place = Place::new();
    let cell = place.cell().await;

    let (running, _pipe) = start(&cell, &bash("sleep 86421 | sleep 86421")).await;
    until("both sleep", || processes("sleep 86421").len() >= 2).await;
    running.signal_group(15).await.unwrap();

    assert_eq!(within(running.wait()).await.unwrap().signal, Some(15));
    until("both are gone", || processes("sleep 86421").is_empty()).await;
}

#[tokio::test]
async fn the_end_of_a_cell_is_noticed_and_disturbs_no_other() {
    let place = Place::new();
    let doomed = place.cell().await;
    let other = place.cell_elsewhere().await;
    let (running, _pipe) =
        start(&doomed, &bash("./intruder new-session sleep 86431 & sleep 86431")).await;
    until("both sleep", || processes("sleep 86431").len() >= 2).await;

    doomed.kill();
    within(doomed.ended()).await;

    assert!(matches!(within(running.wait()).await, Err(CellError::Lost)));
    assert_eq!(processes("sleep 86431"), [""; 0]);
    assert!(doomed.spawn(&bash("true"), &[]).await.is_err());
    assert_eq!(run(&other, "echo alive").await.output, "alive");
    assert_eq!(run(&place.cell().await, "echo new").await.output, "new");
}

#[tokio::test]
async fn cells_end_with_their_zygote() {
    let place = Place::new();
    let cell = place.cell().await;
    let (_running, _pipe) =
        start(&cell, &bash("./intruder new-session sleep 86441 & sleep 86441")).await;
    until("both sleep", || processes("sleep 86441").len() >= 2).await;

    let zygote = Pid::from_raw(place.zygote.pid() as i32).unwrap();
    kill_process(zygote, Signal::KILL).unwrap();

    within(cell.ended()).await;
    until("all are gone", || processes("sleep 86441").is_empty()).await;
    let next = place.make(&place.plan()).await;
    assert!(matches!(next, Err(CellError::Zygote)), "{next:?}");
}

#[tokio::test]
async fn dropping_a_cell_ends_it() {
    let place = Place::new();
    let cell = place.cell().await;
    let (_running, _pipe) = start(&cell, &bash("sleep 86451")).await;
    until("it sleeps", || !processes("sleep 86451").is_empty()).await;

    drop(cell);

    until("it is gone", || processes("sleep 86451").is_empty()).await;
}

#[tokio::test]
async fn many_commands_and_cells_at_once() {
    let place = Place::new();
    let cell = place.cell().await;

    let runs = (0..40).map(|n| {
        let cell = &cell;
        async move { run(cell, &format!("exit {n}")).await.exit.code }
    });
    let codes = futures_util::future::join_all(runs).await;
    let plan = place.plan();
    let cells = (0..20).map(|_| place.make(&plan));
    let cells = within(futures_util::future::try_join_all(cells)).await.unwrap();

    assert_eq!(codes, (0..40).map(Some).collect::<Vec<_>>());
    let mut uids: Vec<u32> = cells.iter().map(sandboxd::cell::Cell::uid).collect();
    uids.dedup();
    let own = place.zygote.identities() != sandboxd::zygote::Identities::Own;
    assert_eq!(uids.len(), if own { 20 } else { 1 });
}

#[tokio::test]
async fn a_shell_that_reads_commands_from_a_pipe_keeps_its_state() {
    use std::io::{BufRead, BufReader, Write};
    use std::os::fd::AsFd;
    let place = Place::new();
    let cell = place.cell().await;
    let (stdin, mut to_shell) = std::io::pipe().unwrap();
    let (from_shell, stdout) = std::io::pipe().unwrap();
    let shell = command(&["bash", "--noprofile", "--norc"]);
    let fds = [stdin.as_fd(), stdout.as_fd(), stdout.as_fd(), stdout.as_fd()];
    let running = cell.spawn(&shell, &fds).await.unwrap();

    to_shell.write_all(b"cd /tmp; x=5\necho $PWD $x >&3\nexit 6\n").unwrap();
    let mut line = String::new();
    let reading = tokio::task::spawn_blocking(move || {
        BufReader::new(from_shell).read_line(&mut line).unwrap();
        line
    });

    assert_eq!(within(reading).await.unwrap(), "/tmp 5\n");
    assert_eq!(within(running.wait()).await.unwrap().code, Some(6));
}

#[tokio::test]
async fn the_cpu_limit_of_one_command_holds() {
    let place = Place::new();
    let mut plan = place.plan();
    plan.limits.cpu_seconds = Some(1);
    let cell = place.make(&plan).await.unwrap();
    let busy = bash("while :; do :; done");

    let running = cell.spawn(&busy, &[]).await.unwrap();
    let exit = within(running.wait()).await.unwrap();

    assert!(exit.signal == Some(9) || exit.signal == Some(24), "{exit:?}");
    // The kernel checks this limit by ticks, which on a busy machine run ahead of the true time.
    assert!(exit.cpu_us >= Duration::from_millis(500).as_micros() as u64, "{exit:?}");
}

#[tokio::test]
async fn a_file_call_is_answered_from_inside_and_dies_with_its_cell() {
    let place = Place::new();
    let cell = place.cell().await;

    let answer = within(cell.file_call(b"not a request")).await.unwrap();
    cell.kill();
    within(cell.ended()).await;
    let late = within(cell.file_call(b"not a request")).await;

    assert!(!answer.is_empty());
    assert!(late.is_err());
}

#[tokio::test]
async fn the_end_of_the_zygote_is_noticed() {
    let place = Place::new();

    let zygote = Pid::from_raw(place.zygote.pid() as i32).unwrap();
    kill_process(zygote, Signal::KILL).unwrap();

    within(place.zygote.ended()).await;
}

#[tokio::test]
async fn the_memory_limit_ends_the_hog_and_not_the_sandbox() {
    let place = Place::new();
    let table = policies::SandboxTable { memory_bytes: 64 << 20, ..Default::default() };
    let cell = place.make(&place.plan_of(&table)).await.unwrap();

    let hog =
        run(&cell, "head -c 300M /dev/zero | tail -c 200M >/dev/null; echo ${PIPESTATUS[1]}").await;

    let limits = cell.layers().iter().find(|layer| layer.name == "limits").unwrap();
    if limits.detail.starts_with("cgroup") {
        assert!(hog.output.contains("137"), "{hog:?}");
        assert!(cell.oom_kills() > 0);
    } else {
        assert!(hog.output.ends_with('1'), "{hog:?}");
        assert_eq!(cell.oom_kills(), 0);
    }
    assert_eq!(run(&cell, "echo alive").await.output, "alive");
}

#[tokio::test]
async fn the_process_limit_holds_for_the_sandbox_as_a_whole() {
    let place = Place::new();
    let table = policies::SandboxTable { processes: 24, ..Default::default() };
    let cell = place.make(&place.plan_of(&table)).await.unwrap();

    let many = "for i in $(seq 60); do sleep 86461 & done 2>/dev/null; wait -n; true";
    let (_running, pipe) = start(&cell, &bash(many)).await;
    drop(pipe);
    until("they sleep", || processes("sleep 86461").len() > 10).await;

    assert!(processes("sleep 86461").len() < 24 + 16);
    let next = cell.spawn(&bash("sleep 0.1; true"), &[]).await;
    assert!(next.is_ok() || next.is_err_and(|error| error.to_string().contains("fork")));
}
