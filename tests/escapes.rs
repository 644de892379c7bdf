//! Promise: no socket, signal, odd system call or other entry to the kernel leads out of a sandbox.
#![allow(clippy::unwrap_used)]

use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use cleanhands_tests::installation::{Installation, Setup};

const POLICY: &str = "[sandbox]\nroot = \"host\"\n";

fn started() -> Installation {
    Installation::start(&Setup::default().policy("dev", POLICY))
}

fn python(installation: &Installation, program: &str) -> String {
    let (status, out, err) =
        installation.shell("dev", &format!("exec python3 - <<'PROGRAM'\n{program}\nPROGRAM"));
    assert_eq!(status, Some(0), "{out}\n{err}");
    out
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
    let program = format!(
        r#"
import glob, os, socket
paths = {paths:?} + ["/run/dbus/system_bus_socket", "/run/systemd/private",
    "/run/systemd/notify", "/run/docker.sock", "/var/run/docker.sock",
    "/run/containerd/containerd.sock", "/tmp/.X11-unix/X0", "/run/user/0/bus",
    "/run/user/1000/bus", "/run/user/1000/gnupg/S.gpg-agent", "/run/user/1000/wayland-0"]
paths += ["/proc/%d/root%s" % (pid, path) for pid in (1, 2, os.getpid()) for path in paths[:1]]
paths += [os.environ[n] for n in ("SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS") if n in os.environ]
for path in paths + ["\0{name}", "\0/tmp/.X11-unix/X0"]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        try: socket.socket(socket.AF_UNIX, kind).connect(path); print("REACHED", repr(path))
        except OSError: pass
# What sockets there are at all: none that this process did not make.
print(len(open("/proc/net/unix").readlines()) - 1, os.listdir("/run"))
"#
    );

    let out = python(&installation, &program);

    assert_eq!(out, "0 []\n");
    assert!(untouched(&by_path) && untouched(&by_name));
}

#[test]
fn no_signal_leaves_the_sandbox_and_a_sibling_is_not_there() {
    let installation = started();
    let daemons: Vec<u32> =
        ["proxyd", "sandboxd", "harnessd"].iter().map(|d| installation.pid(d)).collect();
    let program = format!(
        r#"
import os, signal
own = {{int(p) for p in os.listdir("/proc") if p.isdigit()}}
for pid in {daemons:?} + list(range(-200, 0)) + list(range(1, 3000)):
    if pid in own and pid > 2 or pid == -os.getpgid(0) or pid == -1: continue
    try: os.kill(pid, 0); print("signalled", pid)
    except (PermissionError, ProcessLookupError): pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try: os.kill(-1, signal.SIGTERM)
except OSError: pass
print("done")
"#
    );
    let mut sibling = installation.command(&["exec"]);
    sibling.args(["--environment", "dev", "--", "cat"]);
    sibling.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut sibling = sibling.spawn().unwrap();
    std::io::Write::write_all(sibling.stdin.as_mut().unwrap(), b"before\n").unwrap();
    let mut first = [0; 7];
    std::io::Read::read_exact(sibling.stdout.as_mut().unwrap(), &mut first).unwrap();

    let out = python(&installation, &program);

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
    let program = r#"
import ctypes, errno, multiprocessing, os, platform, socket, subprocess, tempfile, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    return "OPEN" if result >= 0 else errno.errorcode[ctypes.get_errno()]
x86 = platform.machine() == "x86_64"
page = ctypes.addressof(ctypes.create_string_buffer(4096))
print("io_uring_setup", call(425, 8, page))
print("io_uring_enter", call(426, 0, 1, 1, 0, 0))
print("io_uring_register", call(427, 0, 0, 0, 0))
print("clone3", call(435, page, 88))
print("unshare-user", call(272 if x86 else 97, 0x10000000))
print("unshare-net", call(272 if x86 else 97, 0x40000000))
print("clone-user", call(56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0))
print("bpf", call(321 if x86 else 280, 0, page, 8))
print("keyctl", call(250 if x86 else 219, 0, 0, 0))
print("userfaultfd", call(323 if x86 else 282, 0))
print("ptrace-me", call(101 if x86 else 117, 16, 1, 0, 0))
print("no-such-call", call(4000))
# What programs need goes on: threads and processes without clone3, shared memory.
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(multiprocessing.Pool(2).map(abs, [-1, -2]))
print(subprocess.check_output(["echo", "child"]).decode().strip())
queue = multiprocessing.Queue(); queue.put(1); print("queue", queue.get())
shared = tempfile.NamedTemporaryFile(dir="/dev/shm"); shared.write(b"x"); print("shm")
"#;

    let out = python(&installation, program);

    let expected = "io_uring_setup ENOSYS\nio_uring_enter ENOSYS\nio_uring_register ENOSYS\n\
        clone3 ENOSYS\nunshare-user EPERM\nunshare-net EPERM\nclone-user EPERM\nbpf EPERM\n\
        keyctl EPERM\nuserfaultfd EPERM\nptrace-me EPERM\nno-such-call ENOSYS\n\
        thread\n[1, 2]\nchild\nqueue 1\nshm\n";
    assert_eq!(out, expected);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_program_that_enters_the_kernel_as_i386_or_x32_gets_no_socket() {
    let installation = started();
    let source = r#"
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) {
    long got = -1;
    (void)argc;
    puts("enters");
    fflush(stdout);
    if (!strcmp(argv[1], "i386"))  /* socket is 359 there */
        __asm__ volatile("int $0x80" : "=a"(got) : "a"(359L), "b"(2L), "c"(1L), "d"(0L) : "memory");
    if (!strcmp(argv[1], "x32"))
        __asm__ volatile("syscall" : "=a"(got) : "a"(0x40000000L | 41), "D"(2L), "S"(1L), "d"(0L)
                         : "rcx", "r11", "memory");
    if (!strcmp(argv[1], "native"))
        __asm__ volatile("syscall" : "=a"(got) : "a"(41L), "D"(2L), "S"(1L), "d"(0L)
                         : "rcx", "r11", "memory");
    printf("got %ld\n", got);
    return 0;
}
"#;
    let workspace = tempfile::tempdir().unwrap();
    std::fs::write(workspace.path().join("enter.c"), source).unwrap();
    let compiled = std::process::Command::new("cc")
        .args(["-O1", "-o", "enter", "enter.c"])
        .current_dir(workspace.path())
        .status();
    assert!(compiled.unwrap().success(), "cc is needed, as for building this");

    for (entry, code, shown) in [
        ("native", 0, "enters\ngot 3\n"),
        // 128 + SIGSYS: killed at the call.
        ("i386", 128 + 31, "enters\n"),
        // ENOSYS
        ("x32", 0, "enters\ngot -38\n"),
    ] {
        let output = installation
            .command(&["exec"])
            .args(["--environment", "dev", "--workspace"])
            .arg(workspace.path())
            .args(["--", "./enter", entry])
            .output()
            .unwrap();

        let out = String::from_utf8_lossy(&output.stdout);
        assert_eq!((output.status.code(), &*out), (Some(code), shown), "{entry}: {output:?}");
    }
}
