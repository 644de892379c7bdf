//! Promise: no socket, signal, odd system call or other entry to the kernel leads out of a sandbox.
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use cleanhands_tests::installation::{Installation, Setup, intruders_workspace};

const POLICY: &str = "[sandbox]\nroot = \"host\"\n";
/// Where hosts have sockets that would lead out.
const KNOWN_SOCKETS: [&str; 12] = [
    "/run/dbus/system_bus_socket",
    "/run/systemd/private",
    "/run/systemd/notify",
    "/run/docker.sock",
    "/var/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/tmp/.X11-unix/X0",
    "@/tmp/.X11-unix/X0",
    "/run/user/0/bus",
    "/run/user/1000/bus",
    "/run/user/1000/gnupg/S.gpg-agent",
    "/run/user/1000/wayland-0",
];

fn started() -> Installation {
    Installation::start(&Setup::default().policy("dev", POLICY))
}

/// Whether nobody ever connected.
fn untouched(listener: &UnixListener) -> bool {
    listener.set_nonblocking(true).unwrap();
    listener.accept().is_err()
}

#[test]
fn no_unix_socket_of_the_host_can_be_reached_by_path_or_by_abstract_name() {
    let installation = started();
    // Open to everybody, so that only the sandbox keeps its processes out.
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let path = folder.path().join("agent.sock");
    let by_path = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let name = format!("cleanhands-test-{}", ipc::id::random_text(16));
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let by_name = UnixListener::bind_addr(&address).unwrap();
    let mut paths = vec![path.display().to_string()];
    for entry in std::fs::read_dir(&installation.layout.runtime).unwrap() {
        paths.push(entry.unwrap().path().display().to_string());
    }
    paths.push(format!("/proc/self/root{}", paths[0]));
    paths.push(format!("/proc/1/root{}", paths[0]));
    paths.push(format!("@{name}"));
    // What sockets have a name at all: none. Pairs of the cell's own processes have none, and
    // nobody can connect to them.
    let script = format!(
        "./intruder unix {} {}; tail -n +2 /proc/net/unix | \
         while read -r _ _ _ _ _ _ _ name; do [ -z \"$name\" ] || echo \"$name\"; done; ls -A /run",
        paths.join(" "),
        KNOWN_SOCKETS.join(" ")
    );

    let out = installation.intrude("dev", &[], &script);

    assert_eq!(out, "done\n");
    assert!(untouched(&by_path) && untouched(&by_name));
}

#[test]
fn no_signal_leaves_the_sandbox_and_a_sibling_is_not_there() {
    let installation = started();
    let daemons = ["proxyd", "sandboxd", "harnessd"].map(|d| installation.pid(d).to_string());
    let mut sibling = installation.command(&["exec"]);
    sibling.args(["--environment", "dev", "--", "cat"]);
    sibling.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut sibling = sibling.spawn().unwrap();
    std::io::Write::write_all(sibling.stdin.as_mut().unwrap(), b"before\n").unwrap();
    let mut first = [0; 7];
    std::io::Read::read_exact(sibling.stdout.as_mut().unwrap(), &mut first).unwrap();

    let script = format!("exec ./intruder signal {} -200..-1 1..2999", daemons.join(" "));
    let out = installation.intrude("dev", &[], &script);

    let (signalled, done): (Vec<&str>, Vec<&str>) =
        out.lines().partition(|line| line.starts_with("signalled"));
    // Landlock keeps signals from the sandbox's own first processes from ABI 6 on; elsewhere these
    // are the only ones that can be named, and they ignore what they do not expect.
    assert!(signalled.iter().all(|s| ["signalled 1", "signalled 2"].contains(s)), "{out}");
    assert_eq!(done, ["done"]);
    // Everybody else lives and works.
    drop(sibling.stdin.take());
    assert!(sibling.wait().unwrap().success());
    assert_eq!(installation.shell("dev", "echo alive").1, "alive\n");
}

#[test]
fn calls_that_go_around_the_filter_are_closed_and_runtimes_fall_back() {
    let installation = started();

    let out = installation.intrude("dev", &[], "./intruder calls; ./intruder works");

    let expected = "io_uring_setup ENOSYS\nio_uring_enter ENOSYS\nio_uring_register ENOSYS\n\
        clone3 ENOSYS\nunshare-user EPERM\nunshare-net EPERM\nclone-user EPERM\nbpf EPERM\n\
        keyctl EPERM\nuserfaultfd EPERM\nno-such-call ENOSYS\n\
        thread\nchild\nshared 3\nterminal true\n";
    assert_eq!(out, expected);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_program_that_enters_the_kernel_as_i386_or_x32_gets_no_socket() {
    let installation = started();
    let workspace = intruders_workspace();

    for (entry, code, shown) in [
        // socket(AF_INET, SOCK_STREAM, 0), which has another number for i386.
        ("native 41", 0, "enters\ngot 3\n"),
        // 128 + SIGSYS: killed at the call.
        ("i386 359", 128 + 31, "enters\n"),
        // ENOSYS
        ("x32 41", 0, "enters\ngot -38\n"),
    ] {
        let script = format!("./intruder enter {entry} 2 1 0");
        let output = installation
            .intruder("dev", workspace.path())
            .args(["bash", "-c", &script])
            .output()
            .unwrap();

        let out = String::from_utf8_lossy(&output.stdout);
        assert_eq!((output.status.code(), &*out), (Some(code), shown), "{entry}: {output:?}");
    }
}
