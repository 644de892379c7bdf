//! What sandboxd, the zygote, a cell's first process and its guards say to each other.
//!
//! Every message is one JSON object on a SEQPACKET socket (`ipc::fd`). A cell has one socket for
//! its life; each command has one of its own, so nothing need be told apart by number.

use serde::{Deserialize, Serialize};

use crate::plan::{Mount, SandboxPlan};

/// From sandboxd to the zygote.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// Attached: the cell's end of its socket.
    Make(Box<Make>),
    /// Make a workspace a cell's, before that enters it. Attached: a socket for the answer, which
    /// is [`Progress::Taken`].
    Take { mount: Mount, uid: u32, range: (u32, u32) },
}

/// A cell to be made: all of it but the workspace.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Make {
    /// Without the workspace's mount.
    pub plan: SandboxPlan,
    /// The uid and gid, on the host, of everything in the cell; none: this process's own.
    pub uid: Option<u32>,
    /// First and count of the uids that cells are given.
    pub range: Option<(u32, u32)>,
}

/// From the zygote, then from the cell's first process, over the cell's socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Progress {
    /// The zygote: the first process exists. Attached: its pidfd, and `memory.events` and
    /// `pids.events` of its control group if it has one.
    Cloned { pid: u32, uid: u32 },
    /// The zygote: a workspace is the cell's. Attached, where owners are mapped: its mount; else
    /// the cell finds it by its path.
    Taken,
    /// The first process: the way out is there. Attached: the egress sockets, TCP ones first.
    Egress { tcp_sockets: usize },
    /// The first process: everything but the workspace is in place. Attached, if `bundle`: the
    /// root's own bundle of certificates.
    Ready { bundle: bool, layers: Vec<ipc::sandbox::Layer> },
    /// Either: it was not to be.
    Failed(Failure),
}

/// A step that failed, as its maker names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub step: String,
    /// What the kernel said, when it said something.
    pub errno: Option<i32>,
    /// The sentence for people: which thing, and why.
    pub text: String,
}

/// From sandboxd to a cell's first process, over the cell's socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Order {
    /// Once, before anything runs: show the workspace and what the session was given, and let go of
    /// the host. Attached: a socket for the answer, and the workspace's mount where the zygote took
    /// it.
    Enter { workspace: Option<Mount>, uploads: Option<Mount> },
    /// Attached: the command's socket, a memory file with a [`Program`], then its descriptors
    /// 0, 1, 2, and so on.
    Run,
    /// Attached: the call's socket, a memory file with the request, an empty one for the answer.
    Call,
    /// Attached: a socket for the answer, a memory file with proxyd's certificates (PEM), and one
    /// with those of the root's bundle that only this host has.
    Trust,
    /// Attached: a socket. Confines a process as a command is, and ends it: the proof that every
    /// layer can be had.
    Rehearse,
}

/// What a command is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Program {
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    pub cwd: String,
}

/// From sandboxd to a command's guard.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Control {
    /// To the command's process group.
    Signal { signal: i32 },
    /// Answered with [`Report::Used`]. `since`: the call's begin, in the unit of
    /// `init::sample::now`.
    Usage { since: u64 },
    /// To everything that descends from it. Answered with [`Report::Swept`].
    Kill,
}

/// What a command's guard sees of all that descends from it, or did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// So far.
    pub cpu_us: u64,
    /// Bytes read from disks and written to them so far, where the kernel counts them.
    pub disk: Option<(u64, u64)>,
    /// In memory now, by processes that began since the call did.
    pub resident_bytes: u64,
    /// Processes and threads of the whole cell now.
    pub tasks: u64,
    /// The places that can be written where there is no room now.
    pub full: Vec<String>,
}

/// From a command's guard, or from the first process, to sandboxd.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Report {
    /// The program runs: `execve` was called and did not fail.
    Started,
    /// It never ran.
    Failed(Failure),
    Exited {
        code: Option<i32>,
        signal: Option<i32>,
        maxrss_bytes: u64,
        cpu_us: u64,
    },
    Used(Sample),
    /// Nothing that descends from the command is left.
    Swept,
    /// The certificates are in the bundle.
    Trusted,
    /// The workspace is there: commands can run.
    Entered,
}
