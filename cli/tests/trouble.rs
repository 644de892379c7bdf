//! What an operator sees when `up` cannot start, or when nobody reads what it says.

use std::io::{BufRead, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Far above what any of these takes.
const DEADLINE: Duration = Duration::from_secs(30);

fn up(place: &Path, arguments: &[&str]) -> Command {
    let policies = place.join("policies");
    std::fs::create_dir_all(&policies).expect("the test's own files and processes work");
    std::fs::write(policies.join("dev.toml"), "").expect("the test's own files and processes work");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleanhands"));
    command.arg("up").arg("--policies").arg(policies);
    command.arg("--runtime-dir").arg(place.join("run"));
    command.arg("--state-dir").arg(place.join("state"));
    command.args(arguments).env_clear().env("HOME", place).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A configuration with a mistake that proxyd, which is waited for first, refuses.
fn mistaken(place: &Path) -> String {
    let config = place.join("config");
    std::fs::create_dir(&config).expect("the test's own files and processes work");
    std::fs::write(config.join("proxyd.toml"), "upstraems = 1\n")
        .expect("the test's own files and processes work");
    config.to_str().expect("the test's own files and processes work").to_owned()
}

fn ended(mut child: Child) -> Option<i32> {
    let deadline = Instant::now() + DEADLINE;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("the test's own files and processes work") {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().expect("the test's own files and processes work");
    panic!("it does not end");
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_words_of_the_daemon_that_failed_come_last() {
    let place = tempfile::tempdir().unwrap();
    let config = mistaken(place.path());

    let output = up(place.path(), &["--config-dir", &config]).output().unwrap();

    let errors = text(&output);
    assert_eq!(output.status.code(), Some(78), "{errors}");
    let (_, last) = errors.split_once("cleanhands: proxyd ended").expect(&errors);
    assert!(last.contains("upstraems") && last.contains("proxyd.toml"), "{errors}");
}

#[test]
fn a_standard_error_that_nobody_reads_changes_nothing() {
    let place = tempfile::tempdir().unwrap();
    let config = mistaken(place.path());

    let mut child = up(place.path(), &["--config-dir", &config]).spawn().unwrap();
    drop(child.stderr.take());

    assert_eq!(ended(child), Some(78));
}

/// Leaves no room for a byte in a pipe.
fn fill(write: &std::os::fd::OwnedFd) {
    let flags = rustix::fs::fcntl_getfl(write).expect("the test's own files and processes work");
    rustix::fs::fcntl_setfl(write, flags | rustix::fs::OFlags::NONBLOCK)
        .expect("the test's own files and processes work");
    for size in [4096, 1] {
        while rustix::io::write(write, &vec![b'x'; size]).is_ok() {}
    }
    rustix::fs::fcntl_setfl(write, flags).expect("the test's own files and processes work");
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The process that serves a socket.
fn served_by(socket: &Path) -> Option<rustix::process::Pid> {
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    Some(rustix::net::sockopt::socket_peercred(&stream).ok()?.pid)
}

#[test]
fn a_log_that_nobody_reads_keeps_nothing_from_being_started_again_or_from_ending() {
    let place = tempfile::tempdir().unwrap();
    let (read, write) = rustix::pipe::pipe().unwrap();
    let mut command = up(place.path(), &[]);
    let child = command.stderr(write.try_clone().unwrap()).spawn().unwrap();
    let socket = place.path().join("run/harnessd.sock");
    let mut said = std::io::BufReader::new(std::fs::File::from(read));
    let mut line = String::new();
    while !line.contains("Ctrl-C drains") {
        line.clear();
        assert_ne!(said.read_line(&mut line).unwrap(), 0, "it ended");
    }
    fill(&write);

    let first = until("harnessd", || served_by(&socket));
    rustix::process::kill_process(first, rustix::process::Signal::KILL).unwrap();
    let again = until("another harnessd", || served_by(&socket).filter(|pid| *pid != first));
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::TERM,
    )
    .unwrap();

    assert_eq!(ended(child), Some(0));
    assert!(rustix::process::test_kill_process(again).is_err(), "harnessd is left");
}

#[test]
fn a_failure_that_nobody_reads_ends_it_all_the_same() {
    let place = tempfile::tempdir().unwrap();
    let config = mistaken(place.path());
    let (_read, write) = rustix::pipe::pipe().unwrap();
    fill(&write);

    let child = up(place.path(), &["--config-dir", &config]).stderr(write).spawn().unwrap();

    assert_eq!(ended(child), Some(78));
}

#[test]
fn a_named_directory_that_is_not_there_is_an_error() {
    let place = tempfile::tempdir().unwrap();
    for flag in ["--config-dir", "--policies"] {
        let nowhere = place.path().join("nowhere");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleanhands"));
        let policies = place.path().to_str().unwrap();
        let others: &[&str] = if flag == "--policies" { &[] } else { &["--policies", policies] };
        command.args(["up", flag]).arg(&nowhere).args(others).env("HOME", place.path());

        let output = command.output().unwrap();

        assert_eq!(output.status.code(), Some(78), "{flag}: {}", text(&output));
        assert!(text(&output).contains("nowhere"), "{flag}: {}", text(&output));
    }
}

#[test]
fn a_directory_whose_name_is_not_utf8_is_refused_at_the_start_by_whoever_is_given_it() {
    use std::os::unix::ffi::OsStrExt;
    let place = tempfile::tempdir().unwrap();
    let odd = place.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
    std::fs::create_dir(&odd).unwrap();
    let shown = format!("{}: its name is not UTF-8", odd.display());
    let refused = |arguments: &[&str], flag: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_cleanhands"))
            .args(arguments)
            .arg(flag)
            .arg(&odd)
            .env("HOME", place.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(78), "{arguments:?} {flag}: {}", text(&output));
        assert!(text(&output).contains(&shown), "{arguments:?} {flag}: {}", text(&output));
    };

    for flag in ["--policies", "--config-dir", "--state-dir", "--runtime-dir"] {
        refused(&["up"], flag);
    }
    for daemon in ["proxyd", "sandboxd", "harnessd"] {
        for flag in ["--policies-dir", "--state-dir", "--runtime-dir"] {
            refused(&[daemon, "--check"], flag);
        }
    }
}

#[test]
fn a_terminal_that_goes_ends_it_as_ctrl_c_does() {
    let place = tempfile::tempdir().unwrap();
    let mut child = up(place.path(), &[]).spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let mut said = Vec::new();
    // Something was said: the daemons are being started, and the signals are watched.
    let mut piece = [0; 256];
    let length = stderr.read(&mut piece).unwrap();
    said.extend_from_slice(&piece[..length]);

    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    std::thread::spawn(move || stderr.read_to_end(&mut said));

    // 77: a host without user namespaces said so first.
    assert!(matches!(ended(child), Some(0 | 77)));
}

#[test]
fn a_second_one_in_the_same_place_says_who_is_there_and_leaves_it_alone() {
    let place = tempfile::tempdir().unwrap();
    let run = place.path().join("run");
    std::fs::DirBuilder::new().mode(0o700).create(&run).unwrap();
    let socket = UnixListener::bind(run.join("proxyd.sock")).unwrap();
    let first = std::thread::spawn(move || {
        let (mut stream, _) = socket.accept().unwrap();
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).unwrap() > 0);
        let body = r#"{"daemon":"proxyd","version":"0","pid":4711}"#;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
        write!(stream, "{head}: {}\r\n\r\n{body}", body.len()).unwrap();
    });

    let output = up(place.path(), &[]).output().unwrap();

    first.join().unwrap();
    let errors = text(&output);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("4711") && errors.contains("--runtime-dir"), "{errors}");
    assert!(run.join("proxyd.sock").exists());
}

/// What is said to whoever comes to a place that a process has already.
fn refused(mut command: Command, process: rustix::process::Pid, place: &Path) -> String {
    let begun = Instant::now();
    let output = command.output().unwrap();
    let errors = text(&output);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    // A vault that was waited for takes longer than this.
    assert!(begun.elapsed() < DEADLINE / 2, "{:?}: {errors}", begun.elapsed());
    let pid = process.as_raw_nonzero();
    assert!(errors.contains(&format!("process {pid} (")), "{pid} is not named: {errors}");
    assert!(errors.contains(place.to_str().unwrap()), "{place:?} is not named: {errors}");
    errors
}

#[test]
fn whoever_comes_to_a_state_or_a_socket_in_use_is_told_at_once_whose_it_is() {
    let place = tempfile::tempdir().unwrap();
    let (run, state) = (place.path().join("run"), place.path().join("state"));
    let mut first = up(place.path(), &[]).spawn().unwrap();
    let mut said = std::io::BufReader::new(first.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("Ctrl-C drains") {
        line.clear();
        assert_ne!(said.read_line(&mut line).unwrap(), 0, "it ended");
    }
    // Nobody may be held up because this test does not read on.
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    let serves = |daemon: &str| served_by(&run.join(format!("{daemon}.sock"))).unwrap();
    let elsewhere = place.path().join("elsewhere");
    let by_hand = |daemon: &str, runtime: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleanhands"));
        command.args([daemon, "--runtime-dir"]).arg(runtime).arg("--state-dir").arg(&state);
        command.arg("--policies-dir").arg(place.path().join("policies"));
        command.env_clear().env("HOME", place.path()).stdin(Stdio::null());
        command
    };

    let mut again = Command::new(env!("CARGO_BIN_EXE_cleanhands"));
    again.args(["up", "--runtime-dir"]).arg(&elsewhere).arg("--state-dir").arg(&state);
    again.arg("--policies").arg(place.path().join("policies"));
    again.env_clear().env("HOME", place.path()).stdin(Stdio::null());
    let errors = refused(again, serves("proxyd"), &state.join("proxyd"));
    assert!(errors.contains("--state-dir of its own"), "{errors}");
    for daemon in ["proxyd", "sandboxd"] {
        let command = by_hand(daemon, &elsewhere);
        let errors = refused(command, serves(daemon), &state.join(daemon));
        assert!(errors.contains("--state-dir of its own"), "{errors}");
    }
    // Any number of harnessd may go by one log, each on a socket of its own.
    let errors = refused(by_hand("harnessd", &run), serves("harnessd"), &run);
    assert!(errors.contains("--runtime-dir of its own"), "{errors}");

    let pid = rustix::process::Pid::from_child(&first);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(ended(first), Some(0));
}
