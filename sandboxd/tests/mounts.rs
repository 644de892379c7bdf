//! What a policy may show of the host: no directory of the daemons', and none that a command chose.
use std::path::{Path, PathBuf};

use crate::support::{Daemon, text};
use ipc::id::SessionId;
use ipc::sandbox::Outcome;

/// What a call says in a sandbox whose policy is this table.
async fn told(daemon: &Daemon, sandbox: &str, command: &str) -> (Outcome, String) {
    daemon.policy("shows", sandbox);
    let mut call = daemon.bash_request(&SessionId::random(), command);
    call.environment = "shows".into();
    let receipt = daemon.execute(&call).await.unwrap();
    (receipt.outcome, text(&receipt).to_owned())
}

fn mount(source: &Path, read_only: bool) -> String {
    let source = source.display();
    format!("mounts = [{{ source = \"{source}\", target = \"/m\", read-only = {read_only} }}]")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_or_root_that_is_holds_or_lies_in_a_directory_of_the_daemons_is_refused() {
    let daemon = Daemon::start().await;
    let layout = &daemon.layout;
    let top = layout.policies.parent().unwrap().canonicalize().unwrap();
    let own = [&layout.state, &layout.policies, &layout.runtime];
    let mut refused: Vec<PathBuf> = own.map(|path| path.canonicalize().unwrap()).into();
    refused.push(layout.state.canonicalize().unwrap().join("sandboxd"));
    refused.push(top.parent().unwrap().to_owned());
    refused.push(top.clone());
    // As a root it would be a root.
    std::fs::create_dir_all(layout.state.join("usr")).unwrap();

    for path in refused {
        for read_only in [true, false] {
            let (outcome, said) = told(&daemon, &mount(&path, read_only), "ls /m").await;

            assert_eq!(outcome, Outcome::Refused, "{}: {said}", path.display());
            assert!(said.contains("belongs to the daemons"), "{}: {said}", path.display());
        }
    }
    let root = format!("root = \"{}\"", layout.state.canonicalize().unwrap().display());
    let (outcome, said) = told(&daemon, &root, "true").await;
    assert_eq!(outcome, Outcome::Refused, "{said}");
    assert!(said.contains("belongs to the daemons"), "{said}");
    assert!(daemon.sandboxes().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lies_beside_the_daemons_directories_is_shown() {
    let daemon = Daemon::start().await;
    let shown = tempfile::tempdir().unwrap();
    std::fs::write(shown.path().join("f"), "shown").unwrap();
    let source = shown.path().canonicalize().unwrap();

    let (outcome, said) = told(&daemon, &mount(&source, false), "cat /m/f").await;

    assert_eq!((outcome, said.trim()), (Outcome::Finished, "shown"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_a_command_planted_is_not_what_the_next_sandbox_mounts() {
    let daemon = Daemon::start().await;
    let project = tempfile::tempdir().unwrap();
    let project = project.path().canonicalize().unwrap();
    let data = project.join("data");
    std::fs::create_dir(&data).unwrap();
    let policy = mount(&data, false);
    let policy_of_project = mount(&project, false).replace("/m\"", "/project\"");

    // The command of the first sandbox chooses, here once the state and once the host's processes.
    for chosen in [daemon.layout.state.to_str().unwrap(), "/proc", "/"] {
        let script = format!("cd /project && rm -rf data && ln -s {chosen} data && echo planted");
        let planted = told(&daemon, &policy_of_project, &script).await;
        let (outcome, said) = told(&daemon, &policy, "ls /m").await;

        assert_eq!(planted.1.trim(), "planted");
        assert_eq!(outcome, Outcome::Refused, "{said}");
        let named = format!("{} is a symbolic link", data.display());
        assert!(said.contains(&named), "{said}");
    }
}
