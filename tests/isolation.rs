//! Promise: what runs in a sandbox sees and reaches nothing of the host, whatever it tries.
use std::path::Path;

use cleanhands_tests::installation::{Installation, Setup};

const POLICY: &str = "[sandbox]\nroot = \"host\"\n";

fn started() -> Installation {
    Installation::start(&Setup::default().policy("dev", POLICY))
}

fn claims(installation: &Installation, script: &str) -> String {
    let (status, out, err) = installation.shell("dev", script);
    assert_eq!(status, Some(0), "{out}\n{err}");
    out
}

#[test]
fn sees_no_file_of_the_host_but_its_programs() {
    let installation = started();

    let out = claims(
        &installation,
        "ls -A / | sort | tr '\\n' ' '; ls -A /root /home 2>&1 | tr '\\n' ' '",
    );

    for forbidden in ["boot", "srv", "var/lib", ".ssh", ".bash"] {
        assert!(!out.contains(forbidden), "{out}");
    }
    let marker = installation.root().join("marker");
    std::fs::write(&marker, "x").unwrap();
    let script = format!("cat {} 2>&1; echo $?", marker.display());
    assert!(claims(&installation, &script).trim_end().ends_with('1'));
}

#[test]
fn has_no_capability_and_can_gain_none() {
    let installation = started();

    let out = claims(&installation, "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status");

    for line in out.lines().filter(|l| l.starts_with("Cap")) {
        assert!(line.ends_with("0000000000000000"), "{out}");
    }
    assert!(out.contains("NoNewPrivs:\t1") && out.contains("Seccomp:\t2"), "{out}");
}

#[test]
fn cannot_make_namespaces_mounts_or_devices() {
    let installation = started();

    let out = installation.intrude("dev", &[], "./intruder privileged");

    let refused = "unshare-user EPERM\nunshare-net EPERM\nunshare-mount EPERM\nmount EPERM\n\
        umount EPERM\nmknod EACCES\nchroot EPERM\nsethostname EPERM\nsetns EPERM\n\
        ptrace-first-process EPERM\nfirst-process EACCES\nloopback-down EPERM\n\
        delete-route EPERM\n";
    assert_eq!(out, refused);
}

#[test]
fn sees_and_reaches_no_process_but_its_own() {
    let installation = started();
    let pid = installation.pid("sandboxd");

    let script = format!(
        "ls -d /proc/[0-9]* | wc -l; kill -0 {pid} 2>/dev/null; echo $?; \
         [ -e /proc/{pid} ] && cat /proc/{pid}/comm; true"
    );
    let out = claims(&installation, &script);

    let count: usize = out.lines().next().unwrap().trim().parse().unwrap();
    assert!(count < 12, "{out}");
    assert!(!out.contains("sandboxd") && !out.contains("cleanhands"), "{out}");
}

#[test]
fn inherits_no_descriptor_but_the_three_standard_ones() {
    let installation = started();

    let out = claims(&installation, "exec ls /proc/self/fd");

    // One more is ls's own handle on the directory.
    let numbers: Vec<&str> = out.split_whitespace().collect();
    assert!(numbers.starts_with(&["0", "1", "2"]) && numbers.len() <= 4, "{out}");
}

#[test]
fn has_no_network_but_loopback_and_no_other_socket_family() {
    let installation = started();

    let odd = ["17,3,0", "40,1,0", "38,5,0", "2,3,1", "2,1,262", "31,3,0"];
    let script = format!(
        "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '; ./intruder socket {} 2,1,6",
        odd.join(" ")
    );
    let out = installation.intrude("dev", &[], &script);

    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((lines.len(), lines[0], lines[7]), (8, "lo", "2,1,6 OPEN"), "{out}");
    for (line, kind) in lines[1..7].iter().zip(odd) {
        assert!(line.starts_with(kind) && !line.contains("OPEN"), "{out}");
    }
}

#[test]
fn writes_only_to_its_workspace_and_its_temporary_folders() {
    let installation = started();

    let script = "for d in / /usr /usr/bin /etc /bin /lib /dev /proc/sys/kernel; do \
        if echo x > $d/cleanhands-probe 2>/dev/null; then echo \"WROTE $d\"; fi; done; \
        echo x > /workspace/a && echo x > /tmp/b && echo fine";
    let out = claims(&installation, script);

    assert_eq!(out.trim(), "fine");
}

#[test]
fn the_file_descriptor_of_the_workspace_leads_nowhere_else() {
    let installation = started();

    let script = "cd /workspace && cat ../../../../../../etc/shadow 2>&1; \
        ls /proc/1/root/ 2>&1 | head -3; \
        ls /proc/self/root/root 2>&1; true";
    let out = claims(&installation, script);

    assert!(!out.contains("root:"), "{out}");
}

#[test]
fn a_directory_that_holds_or_lies_in_the_daemons_own_is_no_workspace() {
    let installation = started();

    for workspace in [
        installation.root(),
        &installation.layout.policies,
        &installation.layout.state.join("proxyd"),
    ] {
        assert_no_workspace(&installation, workspace, "belongs to the daemons");
    }
}

/// A sandbox with this as its workspace is refused, for that reason, and its command never runs.
fn assert_no_workspace(installation: &Installation, workspace: &Path, reason: &str) {
    let output = installation
        .command(&["exec"])
        .args(["--environment", "dev", "--workspace"])
        .arg(workspace)
        .args(["--", "ls", "/workspace"])
        .output()
        .unwrap();

    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{}", workspace.display());
    assert!(said.contains(reason), "{said}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_directory_of_the_kernels_or_of_the_hosts_services_is_no_workspace() {
    let installation = started();
    let shared = tempfile::tempdir_in("/dev/shm").unwrap();
    let own = Path::new("/proc").join(std::process::id().to_string());

    for (workspace, part) in [
        (shared.path(), "it is or lies in /dev, the host's devices"),
        (own.as_path(), "it lies in a file system of the kernel's, proc"),
    ] {
        assert_no_workspace(&installation, workspace, part);
    }
}

#[test]
fn no_set_id_file_is_left_in_a_directory_of_the_host() {
    let installation = started();

    let script = "cp /bin/ls x; chmod 4755 x; echo $?; chmod 2755 x; echo $?; \
        chmod 1755 x; echo $?; \
        ./intruder create y 4755; echo $?; ./intruder create z 1755; echo $?; \
        stat -c %a x; test -e y; echo $?";
    let out = installation.intrude("dev", &[], &format!("{{ {script}; }} 2>/dev/null"));

    let expected = "1\n1\n0\nfailed: Operation not permitted (os error 1)\n1\n0\n1755\n1\n";
    assert_eq!(out, expected);
}

#[test]
fn exit_status_and_signals_come_through_exactly() {
    let installation = started();

    assert_eq!(installation.shell("dev", "exit 37").0, Some(37));
    assert_eq!(installation.shell("dev", "kill -TERM $$").0, Some(128 + 15));
    assert_eq!(installation.shell("dev", "kill -KILL $$").0, Some(128 + 9));
}

#[test]
fn a_command_that_leaves_daemons_behind_ends_and_leaves_nothing_alive() {
    let installation = started();
    let script = "./intruder new-session sleep 300 >/dev/null 2>&1 & (sleep 300 &) ; echo done";
    let out = installation.intrude("dev", &[], script);

    assert_eq!(out.trim(), "done");
    // Half-made sandboxes that wait for a session are sandboxd's own business.
    cleanhands_tests::wait::until("the command's processes to be gone", || {
        let left = descendants(installation.pid("sandboxd"));
        left.iter().all(|name| name != "sleep" && name != "intruder").then_some(())
    });
}

/// What the processes that descend from `pid` are called.
fn descendants(pid: u32) -> Vec<String> {
    let parents: Vec<(u32, u32)> = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| {
            let number: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
            let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
            Some((number, parent))
        })
        .collect();
    let mut found = vec![pid];
    let mut at = 0;
    while at < found.len() {
        let parent = found[at];
        found.extend(parents.iter().filter(|(_, p)| *p == parent).map(|(n, _)| *n));
        at += 1;
    }
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    found[1..].iter().filter_map(name).map(|name| name.trim_end().to_owned()).collect()
}
