//! Roots from OCI image layouts, and layers that setup commands fill: made once, shared, whole or
//! not there.
use std::path::{Path, PathBuf};

use crate::image::{Layer, Packing, layout, system};
use crate::support::{Daemon, text};
use ipc::id::SessionId;
use ipc::sandbox::{Outcome, Receipt};

async fn run(daemon: &Daemon, environment: &str, command: &str) -> Receipt {
    let mut call = daemon.bash_request(&SessionId::random(), command);
    call.environment = environment.into();
    daemon.execute(&call).await.unwrap()
}

/// What is in the folder of templates, whole or half made.
fn templates(daemon: &Daemon) -> Vec<PathBuf> {
    let folder = daemon.layout.state.join("sandboxd/templates");
    let mut all: Vec<_> = std::fs::read_dir(folder).unwrap().flatten().map(|e| e.path()).collect();
    all.sort();
    all
}

/// An environment whose root is a layout of these layers over a system; the layout's directory.
fn imaged(daemon: &Daemon, layers: Vec<(Layer, Packing)>) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().canonicalize().unwrap();
    let mut all = vec![(system(), Packing::Gzip)];
    all.extend(layers);
    layout(&path, all, &["GREETING=from the image", "PATH=/usr/bin:/opt/own/bin", "HOME=/root"]);
    daemon.policy("imaged", &format!("root = \"{}\"", path.display()));
    directory
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_unpacked_once_and_shown_with_its_layers_in_order_and_its_variables() {
    let daemon = Daemon::start().await;
    let mut lower = Layer::default();
    lower.file("usr/share/kept", 0o644, b"lower").file("usr/share/gone", 0o644, b"lower");
    lower.file("usr/share/d/old", 0o644, b"lower").device("usr/share/null");
    let mut upper = Layer::default();
    upper.file("usr/share/.wh.gone", 0o644, b"").file("usr/share/d/.wh..wh..opq", 0o644, b"");
    upper.file("usr/share/d/new", 0o644, b"upper").hard_link("usr/share/hard", "usr/share/d/new");
    upper.file("opt/own/bin/tool", 0o4755, b"#!/bin/bash\necho tool\n");
    let _layout = imaged(&daemon, vec![(lower, Packing::Zstd), (upper, Packing::Plain)]);

    let script = "cd /usr/share; echo \"$(<kept) $(<d/new) $(<hard) $(echo d/*) $GREETING $HOME\"; \
                  [ -e gone ] || [ -e null ] || [ -u /opt/own/bin/tool ] || tool; \
                  echo x > /usr/share/x || echo read-only";
    let first = run(&daemon, "imaged", script).await;
    let before = templates(&daemon);
    let second = run(&daemon, "imaged", script).await;

    let said = text(&first);
    assert_eq!(first.outcome, Outcome::Finished, "{said}");
    assert!(said.contains("lower upper upper d/new from the image /home/agent\ntool\n"), "{said}");
    assert!(said.trim_end().ends_with("read-only"), "{said}");
    assert_eq!(text(&second), said);
    assert_eq!(before.len(), 1, "{before:?}");
    assert_eq!(templates(&daemon), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_with_a_changed_layer_is_refused_and_nothing_of_it_is_kept() {
    let daemon = Daemon::start().await;
    let directory = imaged(&daemon, Vec::new());
    let blob = crate::image::largest_blob(directory.path());
    let mut bytes = std::fs::read(&blob).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&blob, bytes).unwrap();

    let refused = run(&daemon, "imaged", "echo never").await;

    let said = text(&refused);
    assert_eq!(refused.outcome, Outcome::Refused, "{said}");
    assert!(said.contains("layer sha256:") && said.contains("image /"), "{said}");
    crate::support::wait_until("the half made template goes", async || {
        templates(&daemon).is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_whose_names_or_links_climb_is_refused_or_stays_inside() {
    let daemon = Daemon::start().await;
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("f"), "kept").unwrap();
    let mut climbing = Layer::default();
    climbing.file("../../../escaped", 0o644, b"x");
    let _first = imaged(&daemon, vec![(climbing, Packing::Gzip)]);
    let refused = run(&daemon, "imaged", "echo never").await;
    let mut linked = Layer::default();
    linked.link("usr/away", outside.path().to_str().unwrap());
    linked.file("usr/away/f", 0o644, b"planted");
    let _second = imaged(&daemon, vec![(linked, Packing::Gzip)]);
    let inside = run(&daemon, "imaged", "echo inside").await;

    assert!(text(&refused).contains("climbs out"), "{}", text(&refused));
    assert_eq!(refused.outcome, Outcome::Refused);
    // The link leads to nothing in the image, or to a directory of the image's own.
    assert!(matches!(inside.outcome, Outcome::Finished | Outcome::Refused));
    assert_eq!(std::fs::read_to_string(outside.path().join("f")).unwrap(), "kept");
    assert!(!daemon.layout.state.parent().unwrap().join("escaped").exists());
}

const TOOL: &str = "mkdir -p /usr/local/bin /opt/own && \
    printf '#!/bin/sh\\\\necho built\\\\n' > /usr/local/bin/our-tool && \
    chmod 755 /usr/local/bin/our-tool && echo made >> /opt/own/made";

#[tokio::test(flavor = "multi_thread")]
async fn setup_commands_run_once_for_all_who_ask_and_later_sandboxes_share_what_they_made() {
    let daemon = Daemon::start().await;
    daemon.policy("packages", "tool-timeout = \"20s\"");
    daemon.policy("built", &format!("setup = [\"{TOOL}\"]"));

    let script = "our-tool; cat /opt/own/made; ls /usr/bin | wc -l | grep -q ... && echo whole; \
                  touch /usr/local/x /opt/x 2>/dev/null || echo read-only";
    let together = (0..3).map(|_| run(&daemon, "built", script));
    let together = futures_util::future::join_all(together).await;
    let before = templates(&daemon);
    let later = run(&daemon, "built", script).await;

    for receipt in together.iter().chain([&later]) {
        assert_eq!(text(receipt).trim(), "built\nmade\nwhole\nread-only", "{receipt:?}");
    }
    assert_eq!(before.len(), 1, "{before:?}");
    assert_eq!(templates(&daemon), before);
    let upper = before[0].join("upper");
    assert!(upper.join("usr/local/bin/our-tool").exists());
    assert!(!upper.join("usr/share").exists(), "what was not written into is not kept");
    assert!(!Path::new("/usr/local/bin/our-tool").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_goes_over_an_image_as_over_the_host() {
    let daemon = Daemon::start().await;
    daemon.policy("packages", "tool-timeout = \"20s\"");
    let mut own = Layer::default();
    own.file("usr/local/bin/of-image", 0o755, b"#!/bin/bash\necho image\n");
    own.file("opt/theirs/file", 0o644, b"theirs");
    let directory = imaged(&daemon, Vec::new());
    let root = directory.path().canonicalize().unwrap();
    let setup = "echo 'echo layer' > /usr/local/bin/of-layer; echo ours > /opt/ours; \
                 rm /opt/theirs/file; echo new > /opt/theirs/new";
    let table = format!("root = \"{}\"\nsetup = [\"{setup}\"]", root.display());
    // An image without /bin/sh runs no setup command, and says so.
    daemon.policy("without", &table);
    let refused = run(&daemon, "without", "echo never").await;
    let mut shell = Layer::default();
    shell.link("usr/bin/sh", "bash");
    let rm = PathBuf::from("/bin/rm").canonicalize().unwrap();
    shell.file("usr/bin/rm", 0o755, &std::fs::read(rm).unwrap());
    let directory = imaged(&daemon, vec![(own, Packing::Gzip), (shell, Packing::Plain)]);
    let root = directory.path().canonicalize().unwrap();
    daemon.policy("with", &format!("root = \"{}\"\nsetup = [\"{setup}\"]", root.display()));

    let ran = run(
        &daemon,
        "with",
        ". /usr/local/bin/of-layer; /usr/local/bin/of-image; echo $(</opt/ours) /opt/theirs/*",
    )
    .await;

    assert_eq!(refused.outcome, Outcome::Refused);
    assert!(text(&refused).contains("the root has no /bin/sh"), "{}", text(&refused));
    assert_eq!(text(&ran).trim(), "layer\nimage\nours /opt/theirs/new");
}

/// Copies a tree of directories, files and links.
fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let (kind, target) = (entry.file_type().unwrap(), to.join(entry.file_name()));
        if kind.is_dir() {
            std::fs::create_dir(&target).unwrap();
            copy(&entry.path(), &target);
        } else if kind.is_symlink() {
            let text = std::fs::read_link(entry.path()).unwrap();
            std::os::unix::fs::symlink(text, target).unwrap();
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_is_a_root_and_layers_go_over_it_too() {
    let daemon = Daemon::start().await;
    daemon.policy("packages", "tool-timeout = \"20s\"");
    let mut own = Layer::default();
    own.file("opt/theirs/file", 0o644, b"theirs").link("usr/bin/sh", "bash");
    let _layout = imaged(&daemon, vec![(own, Packing::Plain)]);
    assert_eq!(run(&daemon, "imaged", "true").await.outcome, Outcome::Finished);
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    copy(&templates(&daemon)[0].join("root"), &root);
    let line = format!("root = \"{}\"", root.display());
    daemon.policy("tree", &line);
    daemon.policy("over", &format!("{line}\nsetup = [\"echo layer > /opt/ours\"]"));

    let script = "echo $(</opt/theirs/file) /opt/*; [ -e /usr/bin/env ] || echo nothing else";
    let plain = run(&daemon, "tree", script).await;
    let over = run(&daemon, "over", "echo $(</opt/ours) $(</opt/theirs/file)").await;

    assert_eq!(text(&plain), "theirs /opt/theirs\nnothing else\n", "{plain:?}");
    assert_eq!(text(&over), "layer theirs\n", "{over:?}");
    assert!(!root.join("opt/ours").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policys_mounts_lie_below_what_a_layer_covers_and_the_layer_keeps_no_place_of_theirs() {
    let daemon = Daemon::start().await;
    let shown = tempfile::tempdir().unwrap();
    std::fs::write(shown.path().join("f"), "shown ").unwrap();
    let source = shown.path().canonicalize().unwrap();
    let at =
        |target: &str| format!("{{ source = \"{}\", target = \"{target}\" }}", source.display());
    let mounts = format!("mounts = [{}, {}]", at("/opt/deep/data"), at("/opt/other"));
    daemon.policy("packages", &format!("tool-timeout = \"20s\"\n{mounts}"));
    let setup = "cat /opt/deep/data/f > /opt/copied";
    daemon.policy("built", &format!("setup = [\"{setup}\"]\n{mounts}"));

    let script = "cat /opt/copied /opt/deep/data/f /opt/other/f; ls /opt";
    let receipt = run(&daemon, "built", script).await;

    assert_eq!(text(&receipt), "shown shown shown copied\ndeep\nother\n", "{receipt:?}");
    let made = templates(&daemon);
    assert!(made[0].join("upper/opt/copied").exists());
    assert!(!made[0].join("upper/opt/deep").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_setup_says_which_step_and_what_it_printed_last_and_is_tried_again() {
    let daemon = Daemon::start().await;
    daemon.policy("packages", "tool-timeout = \"20s\"");
    daemon.policy("built", "setup = [\"true\", \"echo some; echo reason >&2; exit 7\"]");

    let failed = run(&daemon, "built", "echo never").await;
    daemon.policy("built", "setup = [\"true\"]");
    let mended = run(&daemon, "built", "echo works").await;

    let said = text(&failed);
    assert_eq!(failed.outcome, Outcome::Refused);
    for part in ["setup command 2", "status 7", "some\nreason", "packages.toml"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(text(&mended).trim(), "works");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_policy_that_builds_run_under_there_is_no_sandbox_and_the_reason_is_said() {
    let daemon = Daemon::start().await;

    let refused = run(&daemon, "packed", "echo never").await;

    assert_eq!(refused.outcome, Outcome::Refused);
    let said = text(&refused);
    assert!(said.contains("policy \"packages\"") && said.contains("packages.toml"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_takes_too_long_or_is_killed_leaves_nothing_that_is_used() {
    let mut daemon = Daemon::start().await;
    daemon.policy("packages", "tool-timeout = \"1s\"");
    daemon.policy("built", "setup = [\"echo half > /opt/half; sleep 600\"]");
    let late = run(&daemon, "built", "echo never").await;
    daemon.policy("packages", "tool-timeout = \"10m\"");
    let mut call = daemon.bash_request(&SessionId::random(), "echo never");
    call.environment = "built".into();
    let client = daemon.client();
    let waiting = tokio::spawn(async move { Daemon::execute_with(&client, &call).await });
    let half = |daemon: &Daemon| {
        let made = templates(daemon);
        made.iter().any(|path| path.join("upper/opt/half").exists())
    };
    crate::support::wait_until("the build begins", async || half(&daemon)).await;

    daemon.kill_hard();
    daemon.restart().await;
    let _ = waiting.await;
    crate::support::wait_until("what was half made goes", async || templates(&daemon).is_empty())
        .await;
    daemon.policy("built", "setup = [\"[ ! -e /opt/half ] && echo whole > /opt/whole\"]");
    let after = run(&daemon, "built", "cat /opt/*").await;

    assert!(text(&late).contains("was stopped after 1 s"), "{}", text(&late));
    assert_eq!(text(&after).trim(), "whole");
}
