//! The messages of sandboxd's two sockets: run a tool, ask after a call, run a command.
//!
//! | call on `sandboxd.sock` | body → answer |
//! |---|---|
//! | `GET /v1/health` | → [`Health`]: the layers of this host, the journal's identity |
//! | `POST /v1/execute` | [`Execute`] → [`Receipt`], when the call has ended |
//! | `GET /v1/calls/CALL` | → [`CallReport`] at once |
//! | `POST /v1/calls/CALL/cancel` | → `{}`; the call ends with outcome `cancelled` |
//! | `GET /v1/sandboxes` | → `{"sandboxes":[SandboxInfo…]}` |
//! | `DELETE /v1/sandboxes/ID` | → `{}`: ends every process at once; the workspace stays |
//! | `PUT /v1/sessions/SESSION/uploads?`[`Upload`] | a file's bytes → `{}`: its sandboxes show it |
//! | `DELETE /v1/sessions/SESSION/uploads?`[`Upload`] | → `{}`: they show it no more |
//! | `DELETE /v1/sessions/SESSION` | → `{}`: ends its sandboxes; all that was its own goes |
//!
//! A deleted session takes no call any more, and the ids of its calls stay known, so that none of
//! them is ever run again: both are a conflict.
//!
//! On `sandboxd-exec.sock` (SEQPACKET) a client sends one [`ExecRequest`] and reads [`ExecReply`]
//! messages; what each request attaches stands at its variant.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::fault::Fault;
use crate::id::{CallId, SandboxId, SessionId, WorkspaceId};

/// One tool call. The same `call` again joins the running call or returns its receipt; it never
/// runs twice.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Execute {
    pub call: CallId,
    pub session: SessionId,
    /// The owner of the session. Believed only from harnessd's uid; else it must be the peer.
    pub owner: String,
    /// The fencing number of the session's holder: a lower one than seen before is a conflict.
    pub fence: u64,
    /// The journal this call was first sent to. If sandboxd's identity is another and it does not
    /// know the call, the answer is `outcome_unknown`, never an execution.
    pub journal: Option<String>,
    /// The policy file, without `.toml`.
    pub environment: String,
    /// A directory from [`ExecRequest::Workspace`]; none: the session's own workspace.
    pub workspace: Option<WorkspaceId>,
    /// `bash`, `read`, `write`, `edit`, `glob`, `grep`, `web_fetch`.
    pub tool: String,
    pub input: Value,
}

/// A file that a session is given to read.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upload {
    /// As [`Execute::owner`].
    pub owner: String,
    /// Below [`UPLOADS`].
    pub path: String,
}

/// Where what a session was given lies in its sandboxes, read-only.
pub const UPLOADS: &str = "/mnt/session/uploads";

/// What became of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    pub call: CallId,
    pub session: SessionId,
    pub sandbox: Option<SandboxId>,
    pub tool: String,
    pub outcome: Outcome,
    /// What the model reads. Never empty: `(no output)` stands for nothing.
    pub content: Vec<Content>,
    pub is_error: bool,
    pub exit_code: Option<i32>,
    /// Number of the signal that ended the command.
    pub signal: Option<i32>,
    /// Bytes the command wrote, before any cut.
    pub output_bytes: u64,
    /// What the call used, where it ran.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// Why it failed, where it was a limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits_reached: Vec<Limit>,
    /// Where the whole output lies, as the sandbox sees it, when `content` holds a part only.
    pub spill: Option<String>,
    /// RFC 3339, milliseconds.
    pub started_at: String,
    pub duration_ms: u64,
    /// Microseconds spent making the sandbox, when this call was its first.
    pub provision_us: Option<u64>,
    /// The layers that confined it.
    pub layers: Vec<Layer>,
    /// Identity of the journal that holds this receipt.
    pub journal: String,
}

/// What a call used, with all that descends from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time of processors, user's and system's. To about ten milliseconds for what still runs or
    /// was waited for by the shell.
    pub cpu_us: u64,
    /// Of a file call, its largest process. Of a command, the most that the processes begun in the
    /// call had in memory together when they were looked at, four times a second; none, where the
    /// command was over before the first look.
    pub memory_peak_bytes: Option<u64>,
    /// Read from disks, and written to them: what the kernel counts for each process, so not what
    /// a cache or a file system in memory answered. What a process wrote that its parent left
    /// behind counts while it lives. None where the shell is gone, or the kernel does not count.
    #[serde(default)]
    pub disk_read_bytes: Option<u64>,
    #[serde(default)]
    pub disk_written_bytes: Option<u64>,
}

/// A limit of the sandbox that a call which failed had reached, as far as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The kernel ended a process for want of memory: only where a control group limits it.
    Memory,
    /// As many processes and threads as there may be.
    Processes,
    /// A file system that commands write was full, or the workspace at its limit.
    Disk,
    /// A file would have been longer than one may be.
    FileSize,
    /// The call's time was over.
    Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It ran to its end, whatever its exit status.
    Finished,
    TimedOut,
    OutOfMemory,
    Cancelled,
    /// It began, and nobody can say whether it did its work: the sandbox or the daemon ended first.
    OutcomeUnknown,
    /// It never began: a bad input, no sandbox to be had. Safe to try again.
    Refused,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Content {
    Text {
        text: String,
    },
    /// Base64 of an image or a document the tool read.
    Image {
        media_type: String,
        data: String,
    },
    Document {
        media_type: String,
        data: String,
    },
}

/// One layer of confinement, as applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// `user-namespace`, `mount-namespace`, `network-namespace`, `landlock`, `seccomp`, …
    pub name: String,
    /// Its version or extent: `abi 7, fully enforced`, `x86_64 only, 94 rules`.
    pub detail: String,
}

/// Answer of `GET /v1/calls/CALL`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum CallReport {
    /// Not in this journal.
    Unknown {
        journal: String,
    },
    Running {
        sandbox: Option<SandboxId>,
        started_at: String,
    },
    Ended {
        receipt: Box<Receipt>,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Health {
    pub daemon: String,
    pub version: String,
    pub pid: u32,
    /// Stands for this journal; a new one begins when the journal is lost.
    pub journal: String,
    /// `user` or `system`.
    pub mode: String,
    pub layers: Vec<Layer>,
    /// What is weaker here than in the best case, in words.
    pub notes: Vec<String>,
    /// Its files.
    #[serde(default)]
    pub in_force: crate::in_force::InForce,
    /// Half-made sandboxes that wait for a session.
    #[serde(default)]
    pub ready: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SandboxInfo {
    pub sandbox: SandboxId,
    pub session: Option<SessionId>,
    pub environment: String,
    pub owner: String,
    /// Process id, on the host, of the sandbox's first process.
    pub pid: u32,
    /// Host uid that the sandbox's processes run as.
    pub uid: u32,
    pub created_at: String,
    pub provision_us: u64,
    /// Where the workspace lies on the host.
    pub workspace: String,
    pub running: Vec<CallId>,
}

/// From a client to `sandboxd-exec.sock`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ExecRequest {
    /// Attached: one `O_PATH` or readable descriptor of a directory. Who can open it may use it.
    /// `path` is how the caller named it, absolute. Answer: [`ExecReply::Workspace`]. The
    /// workspace is the peer's: only its sessions may use it.
    Workspace { path: String },
    /// Attached: stdin, stdout, stderr, and the workspace directory when `path` is set.
    /// Answers: `Started`, `Noted` perhaps, then `Exited`; the connection's end kills the command.
    Exec {
        environment: String,
        argv: Vec<String>,
        env: Vec<(String, String)>,
        path: Option<String>,
    },
    /// After `Started`: deliver this signal number to the command's process group.
    Signal { signal: i32 },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ExecReply {
    Workspace {
        workspace: WorkspaceId,
    },
    Started {
        sandbox: SandboxId,
        provision_us: u64,
        layers: Vec<Layer>,
    },
    /// Before `Exited`, for a command that failed: one line each on what its way out refused.
    Noted {
        lines: Vec<String>,
    },
    /// Exactly one of the two is set.
    Exited {
        exit_code: Option<i32>,
        signal: Option<i32>,
    },
    Refused {
        fault: Fault,
    },
}
