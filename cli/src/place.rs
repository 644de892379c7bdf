//! Which installation this command talks to: the caller's own, or the system's.
//!
//! `--runtime-dir` decides; without it the caller's own daemons are chosen when one of them answers
//! on its socket, else the system services where those are installed.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use ipc::fault::{Code, Fault};
use ipc::fd::Channel;
use ipc::layout::Layout;

use crate::args::Global;
use crate::failure::Failure;

/// The directories of the installation to talk to.
pub fn layout(global: &Global) -> Layout {
    let user = user();
    if let Some(runtime) = &global.runtime_dir {
        return Layout { runtime: runtime.clone(), ..user };
    }
    choose(user, Layout::system())
}

/// The directories of the calling user.
pub fn user() -> Layout {
    Layout::user(|name| std::env::var_os(name).map(PathBuf::from))
}

fn choose(user: Layout, system: Layout) -> Layout {
    // A socket's file outlives its daemon: only an answer counts.
    let served = [user.proxyd(), user.sandboxd(), user.harnessd()]
        .iter()
        .any(|path| UnixStream::connect(path).is_ok());
    if !served && system.runtime.is_dir() { system } else { user }
}

/// Connects to a socket of `daemon`.
pub fn connect(socket: &Path, daemon: &str) -> Result<Channel, Failure> {
    Channel::connect(socket).map_err(|error| {
        let fault = Fault::new(Code::Unavailable, format!("{}: {error}", socket.display()));
        fault.with_hint(ipc::reach::hint(socket, error.kind(), daemon)).into()
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_users_own_daemons_come_before_the_systems() {
        let dir = tempfile::tempdir().unwrap();
        let user = Layout::below(&dir.path().join("user"));
        let system = Layout::below(&dir.path().join("system"));
        std::fs::create_dir_all(&user.runtime).unwrap();
        std::fs::create_dir_all(&system.runtime).unwrap();

        assert_eq!(choose(user.clone(), system.clone()), system);
        let socket = UnixListener::bind(user.proxyd()).unwrap();
        assert_eq!(choose(user.clone(), system.clone()), user);
        drop(socket);
        assert_eq!(choose(user, system.clone()), system, "a socket that nobody serves counts");
    }

    #[test]
    fn without_any_daemon_the_users_places_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let user = Layout::below(&dir.path().join("user"));

        assert_eq!(choose(user.clone(), Layout::below(&dir.path().join("none"))), user);
    }
}
