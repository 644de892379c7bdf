//! Which installation this command talks to: the caller's own, or the system's.
//!
//! `--runtime-dir` decides; without it the caller's own daemons are chosen when a socket of theirs
//! is there, else the system services where those are installed.

use std::path::PathBuf;

use ipc::layout::Layout;

use crate::args::Global;

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
    let served = |l: &Layout| [l.proxyd(), l.sandboxd(), l.harnessd()].iter().any(|p| p.exists());
    if !served(&user) && (served(&system) || system.runtime.is_dir()) {
        return system;
    }
    user
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_daemons_come_before_the_systems() {
        let dir = tempfile::tempdir().unwrap();
        let user = Layout::below(&dir.path().join("user"));
        let system = Layout::below(&dir.path().join("system"));
        std::fs::create_dir_all(&user.runtime).unwrap();
        std::fs::create_dir_all(&system.runtime).unwrap();

        assert_eq!(choose(user.clone(), system.clone()), system);
        std::fs::write(user.proxyd(), "").unwrap();
        assert_eq!(choose(user.clone(), system), user);
    }

    #[test]
    fn without_any_daemon_the_users_places_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let user = Layout::below(&dir.path().join("user"));

        assert_eq!(choose(user.clone(), Layout::below(&dir.path().join("none"))), user);
    }
}
