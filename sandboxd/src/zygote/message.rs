//! What sandboxd, the zygote, a cell's first process and its guards say to each other.
//!
//! Every message is one JSON object on a SEQPACKET socket (`ipc::fd`). A cell has one socket for
//! its life; each command has one of its own, so nothing need be told apart by number.

use serde::{Deserialize, Serialize};

use crate::plan::{Limits, SandboxPlan};

/// From sandboxd to the zygote. Attached: the cell's end of its socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Make {
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
    /// The zygote: the first process exists. Attached: its pidfd, and `memory.events` of its
    /// control group if it has one.
    Cloned { pid: u32, uid: u32 },
    /// The first process: everything is in place. Attached: the egress sockets, TCP ones first.
    Ready { tcp_sockets: usize, layers: Vec<ipc::sandbox::Layer> },
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
    /// Attached: the command's socket, a memory file with a [`Program`], then its descriptors
    /// 0, 1, 2, and so on.
    Run,
    /// Attached: the call's socket, a memory file with the request, an empty one for the answer.
    Call,
    /// Attached: a socket for the answer, a memory file with an [`Installation`].
    Install,
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
    pub limits: Option<Limits>,
}

/// Files to be put into a living cell. In the memory file: the length of the head (four bytes,
/// little endian), the head, then the contents one after the other, because a bundle of
/// certificates is too much to be written as JSON while a call waits for its sandbox.
pub struct Installation<'a> {
    pub files: Vec<(String, &'a [u8])>,
}

impl<'a> Installation<'a> {
    pub fn encode(&self) -> std::io::Result<Vec<u8>> {
        let head: Vec<(&str, usize)> =
            self.files.iter().map(|(path, bytes)| (path.as_str(), bytes.len())).collect();
        let head = serde_json::to_vec(&head)?;
        let length = u32::try_from(head.len()).map_err(|_| malformed())?.to_le_bytes();
        let contents = self.files.iter().map(|(_, bytes)| *bytes);
        let parts = [&length[..], &head].into_iter().chain(contents);
        Ok(parts.collect::<Vec<_>>().concat())
    }

    pub fn decode(bytes: &'a [u8]) -> std::io::Result<Self> {
        let (length, rest) = bytes.split_first_chunk().ok_or_else(malformed)?;
        let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| malformed())?;
        let (head, mut rest) = rest.split_at_checked(length).ok_or_else(malformed)?;
        let head: Vec<(String, usize)> = serde_json::from_slice(head)?;
        let mut files = Vec::with_capacity(head.len());
        for (path, length) in head {
            let (content, after) = rest.split_at_checked(length).ok_or_else(malformed)?;
            files.push((path, content));
            rest = after;
        }
        Ok(Self { files })
    }
}

fn malformed() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, "an installation is not as documented")
}

/// From sandboxd to a command's guard.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Control {
    /// To the command's process group.
    Signal { signal: i32 },
    /// To everything that descends from it. Answered with [`Report::Swept`].
    Kill,
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
    /// Nothing that descends from the command is left.
    Swept,
    /// An installation is in place.
    Installed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installation_comes_back_as_it_was_and_a_cut_one_is_refused() {
        let files = vec![("/etc/a".to_owned(), &b"one"[..]), ("/etc/b".to_owned(), &b"\0\xff"[..])];

        let bytes = Installation { files: files.clone() }.encode().unwrap();

        assert_eq!(Installation::decode(&bytes).unwrap().files, files);
        for length in 0..bytes.len() {
            assert!(Installation::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
    }
}
