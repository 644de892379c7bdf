//! What every daemon does around its work: listeners, readiness, starting itself again.
//!
//! A listening socket comes from systemd (sd_listen_fds(3), matched by name) or is bound here in a
//! directory that only this user can enter, so there is no moment at which it is open to others.

mod hold;

use std::ffi::OsString;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

pub use hold::{Held, HoldError, Holder, hold};

/// How to execute this program again in another role: `cleanhands` links all daemons and needs
/// the daemon's name first, the packaged daemons need nothing.
#[derive(Clone, Debug)]
pub struct SelfExec {
    /// Arguments before the role: `["proxyd"]` under `cleanhands`, empty in a packaged daemon.
    pub prefix: Vec<OsString>,
}

impl SelfExec {
    /// A command that runs this same executable in `role`. It names `/proc/self/exe`, so a binary
    /// replaced on disk is never mixed with the running one.
    pub fn command(&self, role: &str) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.args(&self.prefix).arg(role);
        command
    }
}

/// The sockets that systemd passed to this process: Unix sockets by the file name they are bound
/// at, others by their `FileDescriptorName=`.
pub struct Inherited(Vec<(String, OwnedFd)>);

impl Inherited {
    /// Reads `LISTEN_PID`, `LISTEN_FDS`, `LISTEN_FDNAMES`. Call once, at start.
    pub fn from_environment() -> std::io::Result<Self> {
        let mut fds = Vec::new();
        if std::env::var_os("LISTEN_FDS").is_some() {
            for (raw, name) in sd_notify::listen_fds_with_names()? {
                let fd = crate::sys::adopt(raw)?;
                fds.push((bound_name(&fd).unwrap_or(name), fd));
            }
        }
        Ok(Self(fds))
    }

    /// Takes the socket of that name, if it was passed.
    pub fn take(&mut self, name: &str) -> Option<OwnedFd> {
        let at = self.0.iter().position(|(n, _)| n == name)?;
        Some(self.0.swap_remove(at).1)
    }
}

/// Takes over a descriptor whose number our own starter gave as an argument.
pub fn inherited_fd(raw: RawFd) -> std::io::Result<OwnedFd> {
    crate::sys::adopt(raw)
}

/// Why a socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot create directory {path}: {source}")]
    Directory { path: PathBuf, source: std::io::Error },
    #[error("directory {path} can be entered by others (mode {mode:03o}): it must be 0700")]
    Open { path: PathBuf, mode: u32 },
    #[error("directory {path} belongs to uid {uid}, not to this user")]
    Foreign { path: PathBuf, uid: u32 },
    #[error(
        "{} is served by {holder}\nend that first, or give this one a --runtime-dir of its own",
        path.display()
    )]
    InUse { path: PathBuf, holder: Holder },
    #[error("cannot listen on {path}: {source}")]
    Bind { path: PathBuf, source: std::io::Error },
}

/// Makes `path` a directory that only this user can enter, or says why it is not one.
pub fn private_directory(path: &Path) -> Result<(), ListenError> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};

    let fail = |source| ListenError::Directory { path: path.to_owned(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(fail)?;
    let meta = std::fs::metadata(path).map_err(fail)?;
    if meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(ListenError::Foreign { path: path.to_owned(), uid: meta.uid() });
    }
    if meta.mode() & 0o077 != 0 {
        return Err(ListenError::Open { path: path.to_owned(), mode: meta.mode() & 0o777 });
    }
    Ok(())
}

/// The kinds of Unix socket that daemons listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Stream,
    SeqPacket,
}

/// The socket named `path`'s file name from systemd, else one bound at `path` in a private
/// directory. A stale socket file is removed only after nobody answered on it.
pub fn listen(inherited: &mut Inherited, path: &Path, kind: Kind) -> Result<OwnedFd, ListenError> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    if let Some(fd) = inherited.take(name) {
        return Ok(fd);
    }
    if let Some(parent) = path.parent() {
        private_directory(parent)?;
    }
    let bind = |source: rustix::io::Errno| ListenError::Bind {
        path: path.to_owned(),
        source: source.into(),
    };
    let address = SocketAddrUnix::new(path).map_err(bind)?;
    if let Some(holder) = answers(&address, kind) {
        return Err(ListenError::InUse { path: path.to_owned(), holder });
    }
    match rustix::fs::unlink(path) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(bind(error)),
    }
    let socket = new_socket(kind).map_err(bind)?;
    rustix::net::bind(&socket, &address).map_err(bind)?;
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(bind)?;
    rustix::net::listen(&socket, 1024).map_err(bind)?;
    Ok(socket)
}

/// The file name of a Unix socket's own address.
fn bound_name(socket: &OwnedFd) -> Option<String> {
    let address = rustix::net::getsockname(socket).ok()?;
    let address = SocketAddrUnix::try_from(address).ok()?;
    let path = Path::new(std::str::from_utf8(address.path_bytes()?).ok()?);
    Some(path.file_name()?.to_str()?.to_owned())
}

fn new_socket(kind: Kind) -> rustix::io::Result<OwnedFd> {
    let kind = match kind {
        Kind::Stream => SocketType::STREAM,
        Kind::SeqPacket => SocketType::SEQPACKET,
    };
    rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

/// Who listens there, if anybody does.
fn answers(address: &SocketAddrUnix, kind: Kind) -> Option<Holder> {
    let socket = new_socket(kind).ok()?;
    rustix::net::connect(&socket, address).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&socket).ok();
    Some(Holder::of(peer.map(|peer| peer.pid.as_raw_nonzero().get())))
}

/// Tells systemd that the daemon serves (sd_notify(3)); does nothing elsewhere.
pub fn ready(status: &str) {
    let states = [sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status(status)];
    // Nobody to tell is no failure of ours; systemd itself ends a unit that never says ready.
    let _ = sd_notify::notify(&states);
}

/// Tells systemd that the daemon drains.
pub fn stopping() {
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
}

/// How often to tell the watchdog, when systemd asked for it: half its period.
pub fn watchdog_period() -> Option<std::time::Duration> {
    sd_notify::watchdog_enabled().map(|period| period / 2)
}

/// Tells the watchdog that the daemon lives.
pub fn alive() {
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing() -> Inherited {
        Inherited(Vec::new())
    }

    #[test]
    fn a_second_daemon_does_not_take_a_served_socket_and_a_stale_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let path = run.join("x.sock");

        let first = listen(&mut nothing(), &path, Kind::Stream).unwrap();
        let second = listen(&mut nothing(), &path, Kind::Stream);
        drop(first);
        let third = listen(&mut nothing(), &path, Kind::Stream);

        let refused = second.unwrap_err().to_string();
        let expected = format!("{} is served by process {} (", path.display(), std::process::id());
        assert!(refused.starts_with(&expected), "{refused}");
        assert!(refused.ends_with("--runtime-dir of its own"), "{refused}");
        assert!(third.is_ok(), "{third:?}");
    }

    #[test]
    fn a_passed_unix_socket_is_known_by_the_file_it_is_bound_at() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/y.sock");

        let socket = listen(&mut nothing(), &path, Kind::SeqPacket).unwrap();

        assert_eq!(bound_name(&socket).as_deref(), Some("y.sock"));
    }

    #[test]
    fn refuses_a_directory_that_others_can_enter() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();

        let outcome = listen(&mut nothing(), &dir.path().join("x.sock"), Kind::Stream);

        assert!(matches!(outcome, Err(ListenError::Open { .. })), "{outcome:?}");
    }
}
