//! Unix sockets by path: those of the sandbox work wherever they lie, those of the host do not.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixListener};

use policies::SandboxTable;
use sandboxd::cell::{Cell, Running};

use super::support::{Place, bash, run, start, until, within};

/// Whether nobody has connected to a listener of the host.
fn untouched(listener: &UnixListener) -> bool {
    listener.set_nonblocking(true).unwrap();
    listener.accept().is_err()
}

/// Runs a script that says a line when it is ready, and goes on.
async fn background(cell: &Cell, script: &str) -> Running {
    let (running, read) = start(cell, &bash(script)).await;
    let said = tokio::task::spawn_blocking(move || {
        use std::io::BufRead;
        let mut line = String::new();
        std::io::BufReader::new(std::fs::File::from(read)).read_line(&mut line).unwrap();
        line
    });
    let said = within(said).await.unwrap();
    assert!(said == "listening\n" || said == "full\n", "{said}");
    running
}

#[tokio::test]
async fn a_socket_of_the_host_in_a_directory_that_is_shown_cannot_be_connected_to() {
    let place = Place::new();
    let shown = tempfile::tempdir().unwrap();
    let [in_workspace, in_mount] = [place.workspace.path(), shown.path()]
        .map(|directory| UnixListener::bind(directory.join("host.sock")).unwrap());
    let datagrams = UnixDatagram::bind(place.workspace.path().join("datagrams")).unwrap();
    datagrams.set_nonblocking(true).unwrap();
    let mount = policies::Mount {
        source: shown.path().to_str().unwrap().into(),
        target: "/shown".into(),
        read_only: true,
    };
    let table = SandboxTable { mounts: vec![mount], ..SandboxTable::default() };
    let cell = place.make(&place.plan_of(&table)).await.unwrap();

    let asked = run(
        &cell,
        "ln -s /workspace/host.sock /tmp/link; ln host.sock hard; mkdir d; exec 9<.; \
         ./intruder unix-ask host.sock ./d/../host.sock /workspace/host.sock /tmp/link hard \
         /proc/self/cwd/host.sock /proc/self/fd/9/host.sock /dev/fd/9/host.sock \
         /shown/host.sock; mv host.sock moved; ./intruder unix-ask moved",
    )
    .await;
    let kinds = run(&cell, "./intruder unix moved datagrams /shown/host.sock").await;

    let refused = vec!["permission denied"; 10];
    assert_eq!(asked.output.lines().collect::<Vec<_>>(), refused, "{}", asked.output);
    assert_eq!(kinds.output, "done");
    assert!(untouched(&in_workspace) && untouched(&in_mount));
    assert!(datagrams.recv(&mut [0; 16]).is_err());
    // What nobody listens on is as it is everywhere: programs remove it and begin anew.
    drop(in_workspace);
    assert_eq!(run(&cell, "./intruder unix-ask moved").await.output, "connection refused");
}

#[tokio::test]
async fn sockets_of_the_sandbox_work_wherever_they_lie_and_for_its_other_commands() {
    let place = Place::new();
    let cell = place.cell().await;
    let mut servers = Vec::new();
    for path in ["/workspace/s", "/tmp/s", "/home/agent/s", "/dev/shm/s"] {
        servers.push(background(&cell, &format!("exec ./intruder unix-serve {path}")).await);
    }

    let asked = run(
        &cell,
        "exec 9</tmp; ./intruder unix-ask s /tmp/s /home/agent/s /dev/shm/s /proc/self/fd/9/s \
         /dev/fd/9/s ../tmp/s; cd /tmp; ln -s s link; /workspace/intruder unix-ask s link",
    )
    .await;
    let none = run(&cell, "./intruder unix-ask /tmp/none /tmp ''").await;

    let answers = vec!["uid 1000"; 9];
    assert_eq!(asked.output.lines().collect::<Vec<_>>(), answers, "{}", asked.output);
    assert!(none.output.starts_with("entity not found\nconnection refused\n"), "{none:?}");
    drop(servers);
    // Until the last of the servers has ended, theirs are sockets without a process.
    let gone = within(run(
        &cell,
        "refused=$'connection refused\\nconnection refused'; \
         until [ \"$(./intruder unix-ask s /tmp/s)\" = \"$refused\" ]; do :; done; echo refused",
    ));
    assert_eq!(gone.await.output, "refused");
}

#[tokio::test]
async fn a_socket_in_the_place_of_the_sandboxes_own_is_not_taken_for_it() {
    let place = Place::new();
    let cell = place.cell().await;
    let server = background(&cell, "exec ./intruder unix-serve own").await;

    // One command for both questions: what it was told of the first file counts for that alone.
    let (asking, read) = start(
        &cell,
        &bash(
            "./intruder unix-ask own; touch asked; until [ -e exchanged ]; do read -t .02 <> <(:); \
             done; ./intruder unix-ask own",
        ),
    )
    .await;
    let path = place.workspace.path();
    until("the first answer", || path.join("asked").exists()).await;
    std::fs::remove_file(path.join("own")).unwrap();
    let listener = UnixListener::bind(path.join("own")).unwrap();
    std::fs::write(path.join("exchanged"), "").unwrap();
    within(asking.wait()).await.unwrap();

    let mut said = String::new();
    std::io::Read::read_to_string(&mut std::fs::File::from(read), &mut said).unwrap();
    assert_eq!(said, "uid 1000\npermission denied\n");
    assert!(untouched(&listener));
    drop(server);
}

#[tokio::test]
async fn a_command_is_given_no_datagram_socket_of_the_host() {
    let place = Place::new();
    let cell = place.cell().await;
    let (datagrams, _peer) = UnixDatagram::pair().unwrap();

    // The first command of a cell is another process's than the later ones.
    for _ in 0..2 {
        let outcome = cell.spawn(&bash("true"), &[datagrams.as_fd()]).await;

        let said = outcome.err().unwrap().to_string();
        assert!(said.contains("descriptor 0 is a Unix datagram socket"), "{said}");
    }
    assert_eq!(run(&cell, "echo works").await.output, "works");
}

#[tokio::test]
async fn connections_that_wait_hold_up_nobody_and_end_with_their_program() {
    let place = Place::new();
    let cell = place.cell().await;
    let full = background(&cell, "exec ./intruder unix-full /tmp/full").await;
    let server = background(&cell, "exec ./intruder unix-serve /tmp/s").await;

    let waited = run(
        &cell,
        "for i in 1 2 3; do timeout 30 ./intruder unix-ask /tmp/full & waits=\"$waits $!\"; done; \
         ./intruder unix-ask /tmp/s; kill $waits; wait $waits; echo $?; ./intruder unix-ask /tmp/s",
    )
    .await;

    assert_eq!(waited.output, "uid 1000\n143\nuid 1000");
    drop((full, server));
    // Each that waits takes two of the 256 processes: its own thread and one of its guard's.
    assert_eq!(run(&cell, "./intruder unix-crowd c 100").await.output, "100 answered");
}

#[tokio::test]
async fn what_changes_while_it_is_judged_is_not_what_is_connected() {
    let place = Place::new();
    let listener = UnixListener::bind(place.workspace.path().join("host.sock")).unwrap();
    let cell = place.cell().await;

    let swapped = run(&cell, "./intruder unix-swap /tmp/own /workspace/host.sock").await;

    assert_eq!(swapped.output, "connected");
    assert!(untouched(&listener));
}
