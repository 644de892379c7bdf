//! Says who is at the other end of a Unix socket.
//!
//! The kernel answers (`SO_PEERCRED`, unix(7)): the ids are those of the moment of `connect`. A
//! principal's textual form, `uid:1000`, is what owners are stored as.

use std::fmt;
use std::os::fd::AsFd;

/// A process on this host, as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Principal {
    pub uid: u32,
    pub gid: u32,
    /// Of the process that connected; it may be gone or its number reused. For logs only.
    pub pid: i32,
}

impl Principal {
    /// Asks the kernel for the peer of a connected Unix socket.
    pub fn of(socket: impl AsFd) -> std::io::Result<Self> {
        let cred = rustix::net::sockopt::socket_peercred(socket)?;
        Ok(Self {
            uid: cred.uid.as_raw(),
            gid: cred.gid.as_raw(),
            pid: cred.pid.as_raw_nonzero().get(),
        })
    }

    /// This process itself.
    pub fn own() -> Self {
        Self {
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            pid: rustix::process::getpid().as_raw_nonzero().get(),
        }
    }

    /// The form in which an owner is stored.
    pub fn owner(&self) -> String {
        format!("uid:{}", self.uid)
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid:{}", self.uid)
    }
}
