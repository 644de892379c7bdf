//! Where tests find the programs that they start: built by cargo at that moment, so never stale.
//!
//! The program of this crate, `intruder`, is what tests run inside sandboxes: it sends bytes that
//! no usual client sends and makes system calls that no usual program makes, so that the tests
//! need no interpreter on the host. `main.rs` lists what it can do.
#![allow(clippy::unwrap_used, reason = "a failed set-up must fail loudly")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The program `name` of the workspace's package `package`. `CLEANHANDS_BIN` names a `cleanhands`
/// that the runner has just built, with the others beside it (an ordinary user cannot write to the
/// build folder); else it is built here.
pub fn built(package: &str, name: &str) -> PathBuf {
    if let Some(path) = std::env::var_os("CLEANHANDS_BIN") {
        return Path::new(&path).with_file_name(name);
    }
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().and_then(Path::parent).unwrap().to_owned();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--package", package, "--bin", name])
        .arg("--target-dir")
        .arg(folder.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .unwrap();
    assert!(built.success(), "cannot build {name}");
    folder.join(name)
}

/// The intruder.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| built("intruder", "intruder"))
}

/// Puts the intruder into a workspace, as `./intruder`.
pub fn put_into(workspace: &Path) {
    std::fs::copy(program(), workspace.join("intruder")).unwrap();
}
