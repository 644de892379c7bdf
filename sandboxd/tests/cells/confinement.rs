//! What a command cannot see and cannot do.

use policies::SandboxTable;
use sandboxd::probe;
use sandboxd::zygote::Identities;

use super::support::{Place, command, program_files, run, start, within, workspace};

#[tokio::test]
async fn the_file_tree_is_the_sandboxes_own() {
    let place = Place::new();
    let cell = place.cell().await;

    let root = run(&cell, "ls -A /").await.output;
    let names: Vec<&str> = root.lines().collect();
    for name in &names {
        let known = [
            "bin",
            "dev",
            "etc",
            "home",
            "lib",
            "lib32",
            "lib64",
            "libx32",
            "mnt",
            "proc",
            "run",
            "sbin",
            "tmp",
            "usr",
            "var",
            "workspace",
        ];
        assert!(known.contains(name), "/{name} is not ours: {root}");
    }
    for absent in ["/root", "/sys", "/etc/shadow", "/etc/ssh", "/etc/ssl/private", "/boot", "/srv"]
    {
        let ran = run(&cell, &format!("test -e {absent}")).await;
        assert_eq!(ran.exit.code, Some(1), "{absent} exists");
    }
    let given = run(&cell, "find /mnt").await.output;
    assert_eq!(given, "/mnt\n/mnt/session\n/mnt/session/uploads");
    let who =
        run(&cell, "id -un; cat /proc/sys/kernel/hostname; ls -A ~; ls -A /run /var/tmp").await;
    assert_eq!(who.output, "agent\nbox\n/run:\n\n/var/tmp:");
}

#[tokio::test]
async fn only_the_workspace_and_scratch_space_can_be_written() {
    let place = Place::new();
    let cell = place.cell().await;

    for dir in ["/workspace", "/tmp", "/dev/shm", "/home/agent", "/var/tmp"] {
        let ran = run(&cell, &format!("echo text >{dir}/f && cat {dir}/f")).await;
        assert_eq!(ran.output, "text", "{dir}");
    }
    for path in ["/f", "/etc/f", "/usr/f", "/home/f", "/run/f", "/dev/f", "/bin/f"] {
        let ran = run(&cell, &format!("echo x >{path}")).await;
        assert_eq!(ran.exit.code, Some(1), "{path}: {}", ran.output);
    }
    for attempt in [
        "echo x >>/etc/passwd",
        "chmod 666 /etc/passwd",
        "mv /etc/passwd /etc/p",
        "rm /etc/hosts",
        "chmod 777 /usr/bin",
        "touch /usr/bin/ls",
        "echo 1 >/proc/sys/kernel/panic",
        "echo 9 >/proc/sys/user/max_user_namespaces",
        "mknod /workspace/n c 1 5",
    ] {
        assert_ne!(run(&cell, attempt).await.exit.code, Some(0), "{attempt}");
    }
}

#[tokio::test]
async fn files_in_the_workspace_belong_to_the_directorys_owner_on_the_host() {
    use std::os::unix::fs::MetadataExt;
    let place = Place::new();
    std::fs::write(place.workspace.path().join("given"), "from the host").unwrap();
    let cell = place.cell().await;

    let ran = run(&cell, "cat given; echo from the sandbox >made; stat -c %U given made").await;

    assert_eq!(ran.output, "from the hostagent\nagent");
    let made = place.workspace.path().join("made");
    let owner = std::fs::metadata(place.workspace.path()).unwrap().uid();
    assert_eq!(std::fs::metadata(&made).unwrap().uid(), owner);
    assert_eq!(std::fs::read_to_string(made).unwrap(), "from the sandbox\n");
}

#[tokio::test]
async fn a_workspace_that_was_exchanged_is_not_mounted() {
    let place = Place::new();
    let mut exchanged = workspace(place.workspace.path());
    exchanged.identity = Some((1, 1));

    let outcome = place.make_with(&place.plan(), &exchanged).await;

    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("another directory"), "{error}");
}

#[tokio::test]
async fn mounts_of_the_policy_are_shown_as_it_says() {
    let place = Place::new();
    let shown = tempfile::tempdir().unwrap();
    std::fs::write(shown.path().join("f"), "shown").unwrap();
    let mount = |target: &str, read_only| policies::Mount {
        source: shown.path().display().to_string(),
        target: target.into(),
        read_only,
    };
    let mounts = vec![mount("/data", true), mount("/workspace/inner", false)];
    let plan = place.plan_of(&SandboxTable { mounts, ..SandboxTable::default() });
    let cell = place.make(&plan).await.unwrap();

    assert_eq!(run(&cell, "cat /data/f /workspace/inner/f").await.output, "shownshown");
    assert_eq!(run(&cell, "echo x >/data/g").await.exit.code, Some(1));
    assert_eq!(run(&cell, "echo x >/workspace/inner/g").await.exit.code, Some(0));
    assert!(shown.path().join("g").exists());
}

#[tokio::test]
async fn the_source_of_a_mount_is_judged_as_it_is_when_it_is_mounted() {
    let place = Place::new();
    let top = tempfile::tempdir().unwrap();
    let top = top.path().canonicalize().unwrap();
    let [data, state] = ["data", "state"].map(|name| top.join(name));
    std::fs::create_dir_all(state.join("usr")).unwrap();
    let refusal = async |source: &std::path::Path| {
        let mounts = vec![policies::Mount {
            source: source.display().to_string(),
            target: "/m".into(),
            read_only: false,
        }];
        let mut plan = place.plan_of(&SandboxTable { mounts, ..SandboxTable::default() });
        plan.apart = sandboxd::apart::Apart::new(vec![state.clone()]);
        place.make(&plan).await.err().map(|error| error.to_string())
    };
    std::os::unix::fs::symlink(&state, &data).unwrap();

    let linked = refusal(&data).await.unwrap();
    for kept in [&state, &state.join("usr"), &top] {
        let refused = refusal(kept).await.unwrap();
        assert!(refused.contains("belongs to the daemons"), "{refused}");
    }
    let proc = refusal("/proc/sys".as_ref()).await.unwrap();
    std::fs::remove_file(&data).unwrap();
    std::fs::create_dir(&data).unwrap();
    let plain = refusal(&data).await;

    assert!(linked.contains("is a symbolic link"), "{linked}");
    assert!(linked.contains(&format!("if {} is what is meant", state.display())), "{linked}");
    assert!(proc.contains("a file system of the kernel's"), "{proc}");
    assert_eq!(plain, None);
}

#[tokio::test]
async fn a_link_planted_in_the_workspace_does_not_move_a_mount() {
    let place = Place::new();
    let victim = tempfile::tempdir().unwrap();
    let shown = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(victim.path(), place.workspace.path().join("inner")).unwrap();
    let mounts = vec![policies::Mount {
        source: shown.path().display().to_string(),
        target: "/workspace/inner/deep".into(),
        read_only: true,
    }];
    let plan = place.plan_of(&SandboxTable { mounts, ..SandboxTable::default() });

    let outcome = place.make(&plan).await;

    assert!(outcome.is_err());
    assert!(!victim.path().join("deep").exists());
}

#[tokio::test]
async fn nothing_is_inherited_but_what_was_given() {
    let place = Place::new();
    let cell = place.cell().await;

    let env = run(&cell, "env -u _ -u SHLVL -u PWD -u OLDPWD env").await;
    let fds = run(&cell, "ls /proc/self/fd").await;

    assert_eq!(env.output, "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
    // 0, 1, 2, and the directory being listed.
    assert_eq!(fds.output, "0\n1\n2\n3");
}

#[tokio::test]
async fn no_capability_no_new_privileges_filtered() {
    let place = Place::new();
    let cell = place.cell().await;

    let status = run(&cell, "grep -E '^(Cap|NoNewPrivs|Seccomp:|Groups)' /proc/self/status").await;

    for line in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(status.output.contains(&format!("{line}:\t0000000000000000")), "{}", status.output);
    }
    assert!(status.output.contains("NoNewPrivs:\t1"), "{}", status.output);
    assert!(status.output.contains("Seccomp:\t2"), "{}", status.output);
    if place.zygote.identities() != Identities::Own {
        assert!(status.output.contains("Groups:\t \n"), "{}", status.output);
    }
}

#[tokio::test]
async fn namespaces_mounts_and_odd_sockets_are_refused() {
    let place = Place::new();
    let cell = place.cell().await;

    let attempts = run(&cell, "./intruder privileged").await.output;
    let odd = ["17,3,0", "38,5,0", "40,1,0", "2,3,1", "2,1,262", "16,3,12"];
    let usual = ["16,3,0", "2,1,6", "10,2,0"];
    let command = format!("./intruder socket {} {}", odd.join(" "), usual.join(" "));
    let sockets = run(&cell, &command).await.output;

    assert_eq!(attempts.lines().count(), 13, "{attempts}");
    for attempt in attempts.lines() {
        // Not ENOSYS: the sandbox refuses, with or without a kernel that knows the call.
        assert!(attempt.ends_with(" EPERM") || attempt.ends_with(" EACCES"), "{attempts}");
    }
    let sockets: Vec<&str> = sockets.lines().collect();
    assert_eq!(sockets.len(), odd.len() + usual.len(), "{sockets:?}");
    let (refused, open) = sockets.split_at(odd.len());
    assert!(refused.iter().all(|line| !line.contains("OPEN")), "{sockets:?}");
    assert!(open.iter().all(|line| line.ends_with(" OPEN")), "{sockets:?}");
}

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn the_i386_and_x32_entries_are_closed() {
    let place = Place::new();
    let cell = place.cell().await;
    // getpid, by its three numbers.
    let native = run(&cell, "./intruder enter native 39").await;
    let i386 = run(&cell, "./intruder enter i386 20").await;
    let x32 = run(&cell, "./intruder enter x32 39").await;

    let pid = native.output.strip_prefix("enters\ngot ").unwrap();
    assert!(pid.parse::<u32>().is_ok_and(|pid| pid > 2), "{native:?}");
    // bash reports the death of the program: 128 + SIGSYS; or dies itself when it executed it.
    let killed = i386.exit.signal == Some(31) || i386.exit.code == Some(159);
    assert!(killed && !i386.output.contains("got"), "{i386:?}");
    assert_eq!(x32.output, "enters\ngot -38", "{x32:?}");
}

#[tokio::test]
async fn only_the_sandboxes_processes_are_visible_and_its_first_is_out_of_reach() {
    let place = Place::new();
    let cell = place.cell().await;

    let listed = run(&cell, "ls /proc | grep -c '^[0-9]'").await.output;
    let reach =
        run(&cell, "kill -9 1; cat /proc/1/environ /proc/1/maps; ls /proc/1/fd /proc/1/root").await;

    assert!(listed.parse::<u32>().unwrap() < 8, "{listed}");
    assert!(reach.output.contains("Permission denied"), "{}", reach.output);
    assert_ne!(reach.exit.code, Some(0));
    assert_eq!(run(&cell, "echo alive").await.output, "alive");
}

#[tokio::test]
async fn usual_programs_work() {
    let place = Place::new();
    let cell = place.cell().await;

    for (script, expected) in [
        ("./intruder works", "thread\nchild\nshared 3\nterminal true"),
        ("yes | head -2", "y\ny"),
        ("echo $((1+1)) | tee /dev/stderr 2>/dev/null", "2"),
        ("echo x >/dev/null; head -c2 /dev/zero | wc -c; test -c /dev/urandom && echo ok", "2\nok"),
        ("cat <(echo substituted)", "substituted"),
        ("getent passwd agent | cut -d: -f6", "/home/agent"),
        ("getent hosts localhost | head -c3", "::1"),
        ("test -r /etc/ssl/certs/ca-certificates.crt || test -d /etc/pki; echo $?", "0"),
        ("umask", "0022"),
        ("ulimit -c; ulimit -u", "0\n256"),
    ] {
        assert_eq!(run(&cell, script).await.output, expected, "{script}");
    }
}

#[tokio::test]
async fn proxyds_certificates_follow_the_roots_and_cannot_be_changed() {
    let place = Place::new();
    let cell = place.cell().await;
    let system = "/etc/ssl/certs/ca-certificates.crt";
    let root = std::fs::read_to_string(system).unwrap_or_default();
    let mut paths = vec!["/etc/ssl/cleanhands-bundle.pem"];
    if !root.is_empty() {
        paths.push(system);
    }

    for ca in ["first\n", "second, longer\n", "third\n"] {
        cell.trust(ca, "own\n").await.unwrap();

        for path in &paths {
            let bundle = run(&cell, &format!("cat {path}")).await.output;
            assert_eq!(bundle.trim(), format!("{root}\n{ca}").trim(), "{path}");
            let write = run(&cell, &format!("chmod 777 {path}; echo x >{path}")).await;
            assert_ne!(write.exit.code, Some(0), "{path}");
        }
        let added = run(&cell, "cat /etc/ssl/cleanhands-ca.pem").await.output;
        assert_eq!(added, format!("{ca}own"));
    }
}

#[tokio::test]
async fn every_layer_stands_in_the_receipt_and_the_probe_agrees() {
    let place = Place::new();
    let facts = probe::with(&place.zygote).unwrap();
    let cell = place.cell().await;

    let names: Vec<&str> = cell.layers().iter().map(|layer| layer.name.as_str()).collect();
    for name in
        ["user-namespace", "network-namespace", "landlock", "seccomp", "capabilities", "limits"]
    {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(facts.every_port, "{facts:?}");
    let own = place.zygote.identities() == Identities::Own;
    assert_eq!(facts.mode, if own { "user" } else { "system" });
    assert_eq!(facts.layers.len(), cell.layers().len());
}

#[tokio::test]
async fn a_kernel_below_the_policys_floor_is_a_refusal() {
    let place = Place::new();
    let plan = place.plan_of(&SandboxTable { landlock_floor: 99, ..SandboxTable::default() });

    let error = place.make(&plan).await.unwrap_err().to_string();

    assert!(error.contains("ABI") && error.contains("99 is required"), "{error}");
}

#[tokio::test]
async fn sandboxes_cannot_reach_each_other() {
    let place = Place::new();
    let (one, other) = (place.cell().await, place.cell_elsewhere().await);
    let hold = command(&["./intruder", "hold", "@probe", "8123"]);
    let (_running, _pipe) = start(&one, &hold).await;
    run(&one, "until echo >/dev/tcp/127.0.0.1/8123; do sleep 0.02; done 2>/dev/null").await;
    run(&one, "echo mine >/tmp/f; echo mine >/dev/shm/f").await;

    let reach = "./intruder unix @probe; \
                 (echo >/dev/tcp/127.0.0.1/8123 && echo reached) 2>/dev/null";
    let near = "./intruder hold @near 8124 & \
                until (echo >/dev/tcp/127.0.0.1/8124) 2>/dev/null; do sleep 0.02; done; \
                ./intruder unix @near; kill $!";
    let own = within(run(&one, near)).await.output;
    let others = within(run(&other, &format!("{reach}; ls /tmp /dev/shm"))).await.output;

    assert_eq!(own, "REACHED @near\ndone");
    assert_eq!(others, "done\n/dev/shm:\n\n/tmp:");
}

#[tokio::test]
async fn the_root_can_be_a_directory_instead_of_the_hosts() {
    let place = Place::new();
    let image = tempfile::tempdir().unwrap();
    // bash and what it needs, at the places where the loader looks for them.
    for path in program_files("/bin/bash") {
        let copy = image.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
        std::fs::copy(path, copy).unwrap();
    }
    let certificates = image.path().join("etc/ssl/certs");
    std::fs::create_dir_all(&certificates).unwrap();
    std::fs::write(image.path().join("etc/real.pem"), "REAL").unwrap();
    // Leads to a file of the image, not of the host.
    let link = certificates.join("ca-certificates.crt");
    std::os::unix::fs::symlink("/etc/real.pem", link).unwrap();
    let outside = tempfile::tempdir().unwrap();
    std::fs::create_dir(outside.path().join("certs")).unwrap();
    open_to_all(outside.path());
    std::fs::create_dir(image.path().join("etc/pki")).unwrap();
    std::os::unix::fs::symlink(outside.path(), image.path().join("etc/pki/tls")).unwrap();
    std::fs::write(image.path().join("etc/os-release"), "NAME=image").unwrap();
    open_to_all(image.path());
    let root = policies::Root::Path(image.path().display().to_string());
    let plan = place.plan_of(&SandboxTable { root, ..SandboxTable::default() });

    let cell = place.make(&plan).await.unwrap();
    cell.trust("OURS", "").await.unwrap();
    let ran = run(&cell, "echo $(</etc/os-release); echo /bin/*; [ -e /usr/bin/env ]").await;
    let bundle = run(&cell, "echo \"$(</etc/ssl/cleanhands-bundle.pem)\"").await;

    assert_eq!(ran.output, "NAME=image\n/bin/bash");
    assert_eq!(ran.exit.code, Some(1));
    let led_out = run(&cell, "[ -e /etc/pki/tls/certs ]").await;
    assert_eq!(bundle.output, "REAL\nOURS");
    assert_eq!(led_out.exit.code, Some(1));
}

#[tokio::test]
async fn what_is_no_root_is_refused_with_its_reason() {
    let place = Place::new();
    let image = tempfile::tempdir().unwrap();
    open_to_all(image.path());
    let root = policies::Root::Path(image.path().display().to_string());
    let plan = place.plan_of(&SandboxTable { root, ..SandboxTable::default() });

    let empty = place.make(&plan).await.unwrap_err();

    assert!(empty.to_string().contains("none of the directories"), "{empty}");
}

/// What a sandbox shows read-only must be readable for its own uid.
fn open_to_all(path: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    if path.is_symlink() {
        return;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    if path.is_dir() {
        std::fs::read_dir(path).unwrap().for_each(|entry| open_to_all(&entry.unwrap().path()));
    }
}

#[tokio::test]
async fn a_command_cannot_signal_or_trace_its_guard() {
    let place = Place::new();
    let cell = place.cell().await;

    let reach = run(&cell, "kill -STOP $PPID; cat /proc/$PPID/maps; ls /proc/$PPID/fd").await;

    assert!(reach.output.contains("Permission denied"), "{}", reach.output);
    // Before Landlock's signal scope a guard can be signalled; then its command counts as lost.
    if probe::with(&Place::new().zygote).unwrap().landlock_abi >= 6 {
        assert!(reach.output.contains("Operation not permitted"), "{}", reach.output);
        assert_eq!(run(&cell, "echo alive").await.output, "alive");
    }
}

#[tokio::test]
async fn nothing_in_proc_says_how_the_sandbox_was_started() {
    let place = Place::new();
    let cell = place.cell().await;

    let lines = run(&cell, "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'; cat /proc/1/comm").await;

    assert_eq!(lines.exit.code, Some(0));
    assert!(!lines.output.contains("sandboxd") && !lines.output.contains("zygote"), "{lines:?}");
    assert!(lines.output.contains("init"), "{lines:?}");
}
