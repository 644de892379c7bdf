//! sandboxd's hold on its zygote: starts it, asks it for cells.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ipc::daemon::SelfExec;
use ipc::fd::Channel;
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::{CapabilitySet, capabilities};

use super::message::{Make, Progress, Request};
use crate::cell::{Cell, CellError, Entering, FirstProcess};
use crate::plan::{Mount, SandboxPlan};

/// A cell is there in milliseconds; on a host that is out of breath in seconds. Later is never.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// The running zygote. Dropping it ends the zygote and every cell.
#[derive(Debug)]
pub struct Zygote {
    /// Taken only by drop.
    socket: Option<OwnedFd>,
    channel: OnceLock<Channel>,
    child: Child,
    pidfd: OwnedFd,
    ids: Ids,
}

/// Which ids of the host the cells run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identities {
    /// All as this process's own user: what an unprivileged user can do.
    Own,
    /// Each as one of its own, uid and gid alike, from this range.
    Range { first: u32, count: u32 },
}

/// Why there is no zygote.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    #[error("cannot start the zygote: {0}")]
    Start(std::io::Error),
}

/// The ids in use.
#[derive(Clone, Debug)]
struct Ids {
    identities: Identities,
    used: Arc<Mutex<Used>>,
}

#[derive(Debug, Default)]
struct Used {
    taken: BTreeSet<u32>,
    /// Where the search begins, so that an id rests as long as possible before it is used again.
    next: u32,
}

/// A cell's host uid, its own until this is dropped; none: the daemon's.
#[derive(Debug)]
pub struct OwnId {
    uid: Option<u32>,
    used: Arc<Mutex<Used>>,
}

impl Identities {
    /// A range where this process may map one and make files a cell's, else its own user.
    pub fn detect(first: u32, count: u32) -> Self {
        let held = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        let map = CapabilitySet::SETUID | CapabilitySet::SETGID;
        let own = CapabilitySet::CHOWN | CapabilitySet::DAC_OVERRIDE;
        let able =
            held.contains(map) && (held.contains(CapabilitySet::SYS_ADMIN) || held.contains(own));
        let mapped = std::fs::read_to_string("/proc/self/uid_map")
            .is_ok_and(|map| covers(&map, first, count));
        if able && mapped { Self::Range { first, count } } else { Self::Own }
    }
}

/// Whether ids `first..first + count` exist in a user namespace with this uid_map.
fn covers(map: &str, first: u32, count: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_ascii_whitespace().map(|n| n.parse::<u64>().ok());
        let (Some(Some(from)), Some(Some(length))) = (numbers.next(), numbers.nth(1)) else {
            return false;
        };
        let (first, end) = (u64::from(first), u64::from(first) + u64::from(count));
        from <= first && end <= from + length
    })
}

impl Ids {
    fn take(&self) -> Option<OwnId> {
        let used = self.used.clone();
        let Identities::Range { first, count } = self.identities else {
            return Some(OwnId { uid: None, used });
        };
        let uid = {
            let mut used = used.lock().expect("no code panics with this lock held");
            let begin = used.next;
            let mut all = (0..count).map(|step| first + (begin + step) % count.max(1));
            let uid = all.find(|uid| !used.taken.contains(uid))?;
            used.taken.insert(uid);
            used.next = (uid - first + 1) % count.max(1);
            uid
        };
        Some(OwnId { uid: Some(uid), used })
    }
}

impl Drop for OwnId {
    fn drop(&mut self) {
        if let (Some(uid), Ok(mut used)) = (self.uid, self.used.lock()) {
            used.taken.remove(&uid);
        }
    }
}

impl Zygote {
    /// Starts this same executable in the role `zygote`. Blocking; call it before any thread or
    /// runtime exists, on the thread that lives as long as the process.
    pub fn start(exec: &SelfExec, identities: Identities) -> Result<Self, ZygoteError> {
        Self::start_command(exec.command("zygote"), identities)
    }

    /// Starts `program` with the arguments `prefix` and `zygote`: for tests, whose own executable
    /// is no sandboxd.
    pub fn start_program(
        program: &Path,
        prefix: &[&str],
        identities: Identities,
    ) -> Result<Self, ZygoteError> {
        let mut command = Command::new(program);
        command.args(prefix).arg("zygote");
        Self::start_command(command, identities)
    }

    fn start_command(mut command: Command, identities: Identities) -> Result<Self, ZygoteError> {
        super::cgroup::settle();
        let (ours, theirs) = ipc::fd::pair().map_err(ZygoteError::Start)?;
        let child = command
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .map_err(ZygoteError::Start)?;
        // Its number is its own until `drop` waits for it.
        let pid = Pid::from_raw(child.id().cast_signed()).expect("a child has a process id");
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|error| ZygoteError::Start(error.into()))?;
        let ids = Ids { identities, used: Arc::default() };
        Ok(Self { socket: Some(ours), channel: OnceLock::new(), child, pidfd, ids })
    }

    pub fn identities(&self) -> Identities {
        self.ids.identities
    }

    /// Process id of the zygote.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns when the zygote has ended, which nothing but a failure makes it do. There can be no
    /// new one in a process with threads: the daemon must end and be started again.
    pub async fn ended(&self) {
        if let Ok(pidfd) = self.pidfd.try_clone().and_then(crate::cell::watched) {
            // An error means that the runtime is going down.
            let _ = pidfd.readable().await;
        }
    }

    /// Makes a cell as far as its first process; the rest it does by itself. Needs a tokio
    /// runtime.
    pub async fn begin(&self, shape: &SandboxPlan) -> Result<Cell, CellError> {
        in_time(async {
            let (make, id, ours, theirs) = self.request(shape)?;
            let zygote = self.channel()?;
            zygote.send(&make, &[theirs.as_fd()]).await.map_err(CellError::of_zygote)?;
            drop(theirs);
            let channel = Channel::new(ours)?;
            let (cloned, fds) = channel.receive().await.map_err(CellError::of_zygote)?;
            let first = first_process(cloned, fds)?;
            // From here on the cell exists: if this future is dropped or fails, it is killed.
            Ok(Cell::new(channel, first, id)?)
        })
        .await
    }

    /// Has a cell enter its workspace, as soon as all else of it is made. Once in its life.
    pub async fn enter(
        &self,
        cell: &Cell,
        workspace: Option<&Mount>,
        uploads: Option<&Mount>,
    ) -> Result<Entering, CellError> {
        let tree = match (self.ids.identities, workspace) {
            (Identities::Range { first, count }, Some(mount)) => {
                let uid = cell.uid();
                let request = Request::Take { mount: mount.clone(), uid, range: (first, count) };
                self.take(&request).await?
            }
            _ => None,
        };
        cell.enter(workspace, uploads, tree).await
    }

    async fn take(&self, request: &Request) -> Result<Option<OwnedFd>, CellError> {
        let (ours, theirs) = ipc::fd::pair()?;
        let zygote = self.channel()?;
        zygote.send(request, &[theirs.as_fd()]).await.map_err(CellError::of_zygote)?;
        drop(theirs);
        let answer = Channel::new(ours)?.receive().await.map_err(CellError::of_zygote)?;
        match answer {
            (Progress::Taken, mut trees) => Ok(trees.pop()),
            (Progress::Failed(failure), _) => Err(CellError::Setup(failure)),
            _ => Err(CellError::Lost),
        }
    }

    /// As [`Zygote::begin`], with a blocking socket: for the probe.
    pub(crate) fn make_blocking(&self, plan: &SandboxPlan) -> Result<OwnedFd, CellError> {
        let (make, _id, ours, theirs) = self.request(plan)?;
        let timeout = Some(READY_TIMEOUT);
        rustix::net::sockopt::set_socket_timeout(
            &ours,
            rustix::net::sockopt::Timeout::Recv,
            timeout,
        )
        .map_err(std::io::Error::from)?;
        ipc::fd::send(self.socket(), &make, &[theirs.as_fd()]).map_err(CellError::of_zygote)?;
        drop(theirs);
        let (cloned, fds) = ipc::fd::receive(&ours).map_err(CellError::of_zygote)?;
        first_process(cloned, fds)?;
        Ok(ours)
    }

    fn request(&self, plan: &SandboxPlan) -> Result<(Request, OwnId, OwnedFd, OwnedFd), CellError> {
        let id = self.ids.take().ok_or(CellError::NoIds)?;
        let (ours, theirs) = ipc::fd::pair()?;
        let range = match self.ids.identities {
            Identities::Range { first, count } => Some((first, count)),
            Identities::Own => None,
        };
        let make = Make { plan: plan.clone(), uid: id.uid, range };
        Ok((Request::Make(Box::new(make)), id, ours, theirs))
    }

    fn socket(&self) -> &OwnedFd {
        self.socket.as_ref().expect("taken only by drop")
    }

    /// The same socket under the runtime, from the first use on.
    fn channel(&self) -> Result<&Channel, CellError> {
        if let Some(channel) = self.channel.get() {
            return Ok(channel);
        }
        let made = Channel::new(self.socket().try_clone()?)?;
        Ok(self.channel.get_or_init(|| made))
    }
}

/// What a cell does takes milliseconds; what takes longer than any machine needs has failed.
pub(crate) async fn in_time<T>(
    step: impl Future<Output = Result<T, CellError>>,
) -> Result<T, CellError> {
    let seconds = READY_TIMEOUT.as_secs();
    tokio::time::timeout(READY_TIMEOUT, step).await.unwrap_or(Err(CellError::Late { seconds }))
}

fn first_process(progress: Progress, fds: Vec<OwnedFd>) -> Result<FirstProcess, CellError> {
    let mut fds = fds.into_iter();
    match (progress, fds.next()) {
        (Progress::Cloned { pid, uid }, Some(pidfd)) => {
            Ok(FirstProcess { pid, uid, pidfd, memory: fds.next(), processes: fds.next() })
        }
        (Progress::Failed(failure), _) => Err(CellError::Setup(failure)),
        _ => Err(CellError::Lost),
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        self.channel.take();
        self.socket.take();
        // It ends because its socket did, and holds nothing that could delay it.
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_covered_by_one_line_of_the_map_or_not_at_all() {
        assert!(covers("         0          0 4294967295\n", 200_000, 65_536));
        assert!(!covers("0 1000 1\n", 200_000, 65_536));
        assert!(!covers("0 0 200000\n200000 200000 10\n", 199_999, 2));
        assert!(!covers("", 200_000, 1));
    }

    #[test]
    fn ids_are_used_one_after_another_and_given_back() {
        let identities = Identities::Range { first: 500, count: 3 };
        let ids = Ids { identities, used: Arc::default() };

        let first = ids.take().unwrap();
        let second = ids.take().unwrap();
        assert_eq!((first.uid, second.uid), (Some(500), Some(501)));
        drop(first);
        let third = ids.take().unwrap();
        let fourth = ids.take().unwrap();

        assert_eq!((third.uid, fourth.uid), (Some(502), Some(500)));
        assert!(ids.take().is_none());
    }
}
