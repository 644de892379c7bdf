//! The exec socket: a command on the client's own descriptors, and directories shown as workspaces.
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::support::{Daemon, text, wait_until};
use ipc::fault::Code;
use ipc::fd::Channel;
use ipc::id::SessionId;
use ipc::sandbox::{ExecReply, ExecRequest, Outcome};
use serde_json::json;

struct Client {
    channel: Channel,
    stdin: Option<std::io::PipeWriter>,
    stdout: std::io::PipeReader,
}

/// Asks for a command with pipes as its descriptors, and `directory` as its workspace.
async fn exec(daemon: &Daemon, argv: &[&str], directory: Option<&std::path::Path>) -> Client {
    exec_in("dev", daemon, argv, directory).await
}

async fn exec_in(
    environment: &str,
    daemon: &Daemon,
    argv: &[&str],
    directory: Option<&std::path::Path>,
) -> Client {
    let channel = Channel::connect(&daemon.layout.sandboxd_exec()).unwrap();
    let (stdin_in, stdin) = std::io::pipe().unwrap();
    let (stdout, stdout_in) = std::io::pipe().unwrap();
    let request = ExecRequest::Exec {
        environment: environment.into(),
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        env: vec![("EXTRA".into(), "extra".into())],
        path: directory.map(|path| path.to_str().unwrap().to_owned()),
    };
    let opened: Option<OwnedFd> = directory.map(|path| std::fs::File::open(path).unwrap().into());
    let mut fds = vec![stdin_in.as_fd(), stdout_in.as_fd(), stdout_in.as_fd()];
    fds.extend(opened.iter().map(AsFd::as_fd));
    channel.send(&request, &fds).await.unwrap();
    Client { channel, stdin: Some(stdin), stdout }
}

impl Client {
    async fn reply(&self) -> ExecReply {
        let received = tokio::time::timeout(Duration::from_secs(30), self.channel.receive());
        received.await.unwrap().unwrap().0
    }

    async fn started(&self) {
        let reply = self.reply().await;
        assert!(
            matches!(&reply, ExecReply::Started { layers, .. } if !layers.is_empty()),
            "{reply:?}"
        );
    }

    async fn exited(&self) -> (Option<i32>, Option<i32>) {
        match self.reply().await {
            ExecReply::Exited { exit_code, signal } => (exit_code, signal),
            other => panic!("{other:?}"),
        }
    }

    fn output(mut self) -> String {
        let mut output = String::new();
        self.stdout.read_to_string(&mut output).unwrap();
        output
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_has_the_clients_descriptors_and_its_status_comes_back() {
    let daemon = Daemon::start().await;
    let script = "cat; echo $EXTRA $BILLING_TOKEN; pwd; exit 3";
    let mut client = exec(&daemon, &["/bin/sh", "-c", script], None).await;

    client.started().await;
    let mut stdin = client.stdin.take().unwrap();
    stdin.write_all(b"from the client\n").unwrap();
    drop(stdin);
    let exit = client.exited().await;

    assert_eq!(exit, (Some(3), None));
    assert_eq!(client.output(), "from the client\nextra placeholder-billing\n/workspace\n");
    wait_until("its sandbox is gone", || async { daemon.sandboxes().await.is_empty() }).await;
    let workspaces = std::fs::read_dir(daemon.layout.state.join("sandboxd/workspaces"));
    let workspaces = workspaces.unwrap().count();
    assert_eq!(workspaces, 0, "a workspace of its own ends with the command");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_is_delivered_and_a_client_that_leaves_ends_the_command() {
    let daemon = Daemon::start().await;

    let client = exec(&daemon, &["/bin/sh", "-c", "echo up; exec sleep 300"], None).await;
    client.started().await;
    let mut byte = [0u8; 3];
    (&client.stdout).read_exact(&mut byte).unwrap();
    client.channel.send(&ExecRequest::Signal { signal: 15 }, &[]).await.unwrap();
    let exit = client.exited().await;
    let place = tempfile::tempdir().unwrap();
    intruder::put_into(place.path());
    let sleepers = "sleep 300 & ./intruder new-session sleep 300 & wait";
    let leaver = exec(&daemon, &["/bin/sh", "-c", sleepers], Some(place.path())).await;
    leaver.started().await;
    let Client { channel, stdin, stdout } = leaver;
    drop((channel, stdin));
    let begun = Instant::now();
    // Ends only when the last process that holds the pipe has ended.
    let rest = std::io::read_to_string(stdout).unwrap();

    assert_eq!(exit, (None, Some(15)));
    assert_eq!(rest, "");
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_runs_is_not_idle() {
    let daemon = Daemon::start().await;

    let client = exec_in("brief", &daemon, &["/bin/sleep", "2"], None).await;
    client.started().await;

    assert_eq!(client.exited().await, (Some(0), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_run_is_told_apart() {
    let daemon = Daemon::start().await;

    let missing = exec(&daemon, &["no-such-program"], None).await.reply().await;
    let not_executable = exec(&daemon, &["/etc/passwd"], None).await.reply().await;
    let nothing = exec(&daemon, &[], None).await.reply().await;

    for (reply, expected) in
        [(missing, Code::NotFound), (not_executable, Code::Denied), (nothing, Code::Invalid)]
    {
        assert!(
            matches!(&reply, ExecReply::Refused { fault } if fault.code == expected),
            "{reply:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_cannot_be_a_standard_descriptor() {
    let daemon = Daemon::start().await;
    let channel = Channel::connect(&daemon.layout.sandboxd_exec()).unwrap();
    let root = std::fs::File::open("/").unwrap();
    let request = ExecRequest::Exec {
        environment: "dev".into(),
        argv: vec!["/bin/true".into()],
        env: Vec::new(),
        path: None,
    };

    channel.send(&request, &[root.as_fd(), root.as_fd(), root.as_fd()]).await.unwrap();
    let reply = channel.receive::<ExecReply>().await.unwrap().0;

    assert!(matches!(&reply, ExecReply::Refused { fault } if fault.text.contains("directory")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_users_directory_is_the_workspace_and_its_files_stay_the_users() {
    use std::os::unix::fs::MetadataExt;
    let daemon = Daemon::start().await;
    let project = tempfile::tempdir().unwrap();
    std::fs::write(project.path().join("in"), "from outside\n").unwrap();

    let client =
        exec(&daemon, &["/bin/sh", "-c", "cat in; id -un; echo x > out"], Some(project.path()))
            .await;
    client.started().await;
    let exit = client.exited().await;
    let output = client.output();
    let channel = Channel::connect(&daemon.layout.sandboxd_exec()).unwrap();
    let path = project.path().to_str().unwrap().to_owned();
    let directory = std::fs::File::open(project.path()).unwrap();
    channel.send(&ExecRequest::Workspace { path }, &[directory.as_fd()]).await.unwrap();
    let ExecReply::Workspace { workspace } = channel.receive().await.unwrap().0 else { panic!() };
    let mut call = daemon.bash_request(&SessionId::random(), "cat in out; rm out; echo y > new");
    call.workspace = Some(workspace);
    let receipt = daemon.execute(&call).await.unwrap();

    assert_eq!((exit, output.as_str()), ((Some(0), None), "from outside\nagent\n"));
    assert_eq!(text(&receipt), "from outside\nx\n");
    let new = std::fs::metadata(project.path().join("new")).unwrap();
    assert_eq!(new.uid(), rustix::process::geteuid().as_raw());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_was_replaced_is_not_used() {
    let daemon = Daemon::start().await;
    let parent = tempfile::tempdir().unwrap();
    let project = parent.path().join("project");
    std::fs::create_dir(&project).unwrap();
    let channel = Channel::connect(&daemon.layout.sandboxd_exec()).unwrap();
    let path = project.to_str().unwrap().to_owned();
    let directory = std::fs::File::open(&project).unwrap();
    channel.send(&ExecRequest::Workspace { path }, &[directory.as_fd()]).await.unwrap();
    let ExecReply::Workspace { workspace } = channel.receive().await.unwrap().0 else { panic!() };
    std::fs::rename(&project, parent.path().join("old")).unwrap();
    std::os::unix::fs::symlink("/etc", &project).unwrap();
    let session = SessionId::random();

    let mut call = daemon.request(&session, "write", json!({"file_path": "x", "content": "x"}));
    call.workspace = Some(workspace);
    let receipt = daemon.execute(&call).await.unwrap();

    assert_eq!(receipt.outcome, Outcome::Refused);
    assert!(text(&receipt).contains("another directory"), "{}", text(&receipt));
}
