//! Where sockets, state, configuration and policies live.
//!
//! Two fixed sets of places: the system's, under systemd, and one of the calling user's. Each
//! daemon takes `--runtime-dir`, `--state-dir`, `--policies-dir` to say otherwise.

use std::path::{Path, PathBuf};

/// The directories of one installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Holds the sockets; private to those who may talk to the daemons.
    pub runtime: PathBuf,
    /// Holds one directory for each daemon: `proxyd`, `sandboxd`, `harnessd`.
    pub state: PathBuf,
    /// Holds `NAME.toml` for each environment, and `groups.toml`.
    pub policies: PathBuf,
    /// Holds `proxyd.toml`, `sandboxd.toml`, `harnessd.toml`, all optional.
    pub config: PathBuf,
}

/// A directory that the daemons cannot tell each other of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot use {}: its name is not UTF-8; rename it, or name another directory",
    path.display()
)]
pub struct NotUtf8 {
    pub path: PathBuf,
}

impl Layout {
    /// The places of the system services.
    pub fn system() -> Self {
        Self {
            runtime: "/run/cleanhands".into(),
            state: "/var/lib/cleanhands".into(),
            policies: "/etc/cleanhands/policies".into(),
            config: "/etc/cleanhands".into(),
        }
    }

    /// The places of one user, from the values of `XDG_RUNTIME_DIR`, `XDG_STATE_HOME`,
    /// `XDG_CONFIG_HOME` and `HOME` (XDG base directory specification). Without a runtime
    /// directory a private one below the state directory serves.
    pub fn user(variable: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let absolute = |name: &str| variable(name).filter(|p| p.is_absolute());
        let home = absolute("HOME").unwrap_or_else(|| "/".into());
        let state = absolute("XDG_STATE_HOME")
            .unwrap_or_else(|| home.join(".local/state"))
            .join("cleanhands");
        let config =
            absolute("XDG_CONFIG_HOME").unwrap_or_else(|| home.join(".config")).join("cleanhands");
        let runtime = match absolute("XDG_RUNTIME_DIR") {
            Some(dir) => dir.join("cleanhands"),
            None => state.join("run"),
        };
        Self { runtime, state, policies: "policies".into(), config }
    }

    /// Everything below one directory: for the demo and for tests.
    pub fn below(root: &Path) -> Self {
        Self {
            runtime: root.join("run"),
            state: root.join("state"),
            policies: root.join("policies"),
            config: root.join("config"),
        }
    }

    /// Whether every path can be told to others: messages, logs and variables are UTF-8.
    pub fn check(&self) -> Result<(), NotUtf8> {
        let all = [&self.runtime, &self.state, &self.policies, &self.config];
        match all.into_iter().find(|path| path.to_str().is_none()) {
            None => Ok(()),
            Some(path) => Err(NotUtf8 { path: path.clone() }),
        }
    }

    pub fn proxyd(&self) -> PathBuf {
        self.runtime.join("proxyd.sock")
    }

    pub fn proxyd_lease(&self) -> PathBuf {
        self.runtime.join("proxyd-lease.sock")
    }

    pub fn proxyd_egress(&self) -> PathBuf {
        self.runtime.join("proxyd-egress.sock")
    }

    pub fn sandboxd(&self) -> PathBuf {
        self.runtime.join("sandboxd.sock")
    }

    pub fn sandboxd_exec(&self) -> PathBuf {
        self.runtime.join("sandboxd-exec.sock")
    }

    pub fn harnessd(&self) -> PathBuf {
        self.runtime.join("harnessd.sock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_without_a_runtime_directory_gets_one_below_the_state() {
        let layout = Layout::user(|name| (name == "HOME").then(|| "/home/ada".into()));

        assert_eq!(layout.runtime, Path::new("/home/ada/.local/state/cleanhands/run"));
        assert_eq!(layout.config, Path::new("/home/ada/.config/cleanhands"));
    }

    #[test]
    fn a_directory_whose_name_is_not_utf8_is_refused_and_shown() {
        use std::os::unix::ffi::OsStringExt;
        let named = |bytes: &[u8]| PathBuf::from(std::ffi::OsString::from_vec(bytes.to_vec()));
        let layout = |policies| Layout { policies, ..Layout::system() };

        let refused = layout(named(b"/srv/caf\xe9")).check().unwrap_err();

        assert!(refused.to_string().contains("/srv/caf\u{fffd}"), "{refused}");
        assert_eq!(layout(named("/srv/caf\u{e9}".as_bytes())).check(), Ok(()));
    }

    #[test]
    fn relative_xdg_values_are_ignored() {
        let layout = Layout::user(|name| match name {
            "HOME" => Some("/home/ada".into()),
            _ => Some("relative".into()),
        });

        assert_eq!(layout.state, Path::new("/home/ada/.local/state/cleanhands"));
    }
}
