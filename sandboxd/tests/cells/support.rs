//! A zygote, a workspace, a cell; scripts in it and what they print.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use policies::SandboxTable;
use sandboxd::cell::{Cell, CellCommand, CellError, ExitOf, Running};
use sandboxd::plan::{Mount, PlanFacts, SandboxPlan, plan};
use sandboxd::zygote::{Identities, Zygote};

/// Longest wait for anything: a loaded machine, not a slow program.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Workspaces hold `./intruder`.
pub struct Place {
    pub zygote: Zygote,
    pub workspace: tempfile::TempDir,
    elsewhere: tempfile::TempDir,
}

/// What a script printed, both streams in one, and how it ended.
#[derive(Debug)]
pub struct Ran {
    pub exit: ExitOf,
    pub output: String,
}

impl Place {
    pub fn new() -> Self {
        let program = Path::new(env!("CARGO_BIN_EXE_sandboxd"));
        let identities = Identities::detect(200_000, 1000);
        let zygote = Zygote::start_program(program, &[], identities).unwrap();
        let [workspace, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        intruder::put_into(workspace.path());
        intruder::put_into(elsewhere.path());
        Self { zygote, workspace, elsewhere }
    }

    pub fn plan(&self) -> SandboxPlan {
        self.plan_of(&SandboxTable::default())
    }

    pub fn plan_of(&self, table: &SandboxTable) -> SandboxPlan {
        let facts = PlanFacts { hostname: "box".into(), ports: vec![443] };
        plan(table, &facts).unwrap()
    }

    pub async fn cell(&self) -> Cell {
        self.make(&self.plan()).await.unwrap()
    }

    /// A cell with the workspace, ready to run commands.
    pub async fn make(&self, plan: &SandboxPlan) -> Result<Cell, CellError> {
        self.make_with(plan, &workspace(self.workspace.path())).await
    }

    /// What the daemon does for a session that has no half-made sandbox ready.
    pub async fn make_with(
        &self,
        plan: &SandboxPlan,
        workspace: &Mount,
    ) -> Result<Cell, CellError> {
        let mut cell = self.zygote.begin(plan).await?;
        let entering = self.zygote.enter(&cell, Some(workspace), None).await;
        // What kept a cell from being made is a better reason than that it is gone.
        within(cell.take_egress()).await?;
        within(cell.make_ready()).await?;
        within(entering?.done()).await?;
        Ok(cell)
    }

    /// A cell with another workspace: where owners cannot be mapped, a workspace is one cell's at a
    /// time.
    pub async fn cell_elsewhere(&self) -> Cell {
        self.make_with(&self.plan(), &workspace(self.elsewhere.path())).await.unwrap()
    }
}

/// A directory as the workspace that it is now.
pub fn workspace(directory: &Path) -> Mount {
    let meta = std::fs::metadata(directory).unwrap();
    sandboxd::plan::workspace(directory, (meta.dev(), meta.ino()))
}

/// `bash -c SCRIPT` with the plan's environment.
pub fn bash(script: &str) -> CellCommand {
    command(&["bash", "-c", script])
}

pub fn command(argv: &[&str]) -> CellCommand {
    CellCommand {
        argv: argv.iter().map(|arg| (*arg).to_owned()).collect(),
        env: vec![("PATH".into(), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".into())],
        cwd: "/workspace".into(),
    }
}

/// Starts a script; the pipe ends when its last process does.
pub async fn start(cell: &Cell, command: &CellCommand) -> (Running, OwnedFd) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let fds = [null.as_fd(), write.as_fd(), write.as_fd()];
    let running = cell.spawn(command, &fds).await.unwrap();
    (running, read)
}

pub async fn run(cell: &Cell, script: &str) -> Ran {
    let (running, read) = start(cell, &bash(script)).await;
    let reading = tokio::task::spawn_blocking(move || {
        let mut output = String::new();
        std::fs::File::from(read).read_to_string(&mut output).unwrap();
        output
    });
    let exit = within(running.wait()).await.unwrap();
    Ran { exit, output: within(reading).await.unwrap().trim_end().to_owned() }
}

pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("it took longer than any machine needs")
}

/// Waits until a condition of the host holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "never came true: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A program of the host's and the files that the loader needs to start it.
pub fn program_files(program: &str) -> Vec<String> {
    let mut loader = std::process::Command::new(program);
    // Makes the loader name them instead of starting it, see ld.so(8).
    let named = loader.env("LD_TRACE_LOADED_OBJECTS", "1").output().unwrap();
    let named = String::from_utf8(named.stdout).unwrap();
    let files = named.split_whitespace().filter(|word| word.starts_with('/'));
    files.chain([program]).map(str::to_owned).collect()
}

/// The host's processes whose command line contains `mark`.
pub fn processes(mark: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let path = entry.path().join("cmdline");
        let line = std::fs::read(path).unwrap_or_default();
        if String::from_utf8_lossy(&line).replace('\0', " ").contains(mark) {
            found.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    found
}
