//! A command that was started, as sandboxd holds it.
//!
//! One task reads what the command's guard reports; everybody else watches what it has learned.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ipc::fd::Channel;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::CellError;
use crate::zygote::message::{Control, Report, Sample};

/// A guard gives up after five seconds; one that says nothing was stopped or killed.
const SWEPT_TIMEOUT: Duration = Duration::from_secs(10);

/// A command that was started.
#[derive(Debug)]
pub struct Running {
    channel: Arc<Channel>,
    known: watch::Receiver<Known>,
    learn: Arc<watch::Sender<Known>>,
    reader: JoinHandle<()>,
}

/// How a command ended: exactly one of code and signal is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitOf {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    /// Of the command itself and those below it that it waited for.
    pub maxrss_bytes: u64,
    pub cpu_us: u64,
}

/// The most that was seen since [`Running::begin`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    pub resident_bytes: u64,
    pub tasks: u64,
    pub full: BTreeSet<String>,
}

/// What the guard has said so far.
#[derive(Clone, Debug, Default)]
struct Known {
    exit: Option<ExitOf>,
    sweeps: u64,
    sample: Sample,
    peak: Peak,
    /// How often a sample was asked for, and said.
    asked: u64,
    told: u64,
    /// The guard is gone: nothing more will be known.
    lost: bool,
}

impl Running {
    /// Waits for the program to run, or for the reason why not.
    pub(super) async fn started(channel: Channel) -> Result<Self, CellError> {
        match channel.receive().await.map_err(CellError::of_cell)?.0 {
            Report::Started => {}
            Report::Failed(failure) => return Err(CellError::Start(failure)),
            _ => return Err(CellError::Lost),
        }
        let channel = Arc::new(channel);
        let (learn, known) = watch::channel(Known::default());
        let learn = Arc::new(learn);
        let reader = tokio::spawn(read(channel.clone(), learn.clone()));
        Ok(Self { channel, known, learn, reader })
    }

    /// Waits for the command itself; what it left in the background lives on until
    /// [`Running::kill_tree`] or the drop. May be called again.
    pub async fn wait(&self) -> Result<ExitOf, CellError> {
        let mut known = self.known.clone();
        let known = known.wait_for(|known| known.exit.is_some() || known.lost).await;
        known.ok().and_then(|known| known.exit).ok_or(CellError::Lost)
    }

    /// How it ended, if it has.
    pub fn exited(&self) -> Option<ExitOf> {
        self.known.borrow().exit
    }

    /// Signals the command's process group.
    pub async fn signal_group(&self, signal: i32) -> Result<(), CellError> {
        self.say(Control::Signal { signal }).await
    }

    /// Kills the command and all that descends from it, also what made itself a session of its
    /// own. When it returns `Ok`, none of them is left; when it does not, only the end of the
    /// cell is sure to end them.
    pub async fn kill_tree(&self) -> Result<(), CellError> {
        let before = self.known.borrow().sweeps;
        self.say(Control::Kill).await?;
        let mut known = self.known.clone();
        let swept = known.wait_for(|known| known.sweeps > before || known.lost);
        let known = tokio::time::timeout(SWEPT_TIMEOUT, swept).await;
        match known.is_ok_and(|known| known.is_ok_and(|known| known.sweeps > before)) {
            true => Ok(()),
            false => Err(CellError::Lost),
        }
    }

    /// Forgets what was seen so far.
    pub fn begin(&self) {
        self.learn.send_modify(|known| known.peak = Peak::default());
    }

    pub fn peak(&self) -> Peak {
        self.known.borrow().peak.clone()
    }

    /// Has the guard look what is used, unless it has yet to answer. `since`: see [`Sample`].
    pub async fn look(&self, since: u64) -> Result<(), CellError> {
        if self.known.borrow().asked > self.known.borrow().told {
            return Ok(());
        }
        self.learn.send_modify(|known| known.asked += 1);
        self.say(Control::Usage { since }).await
    }

    /// What is used now, at the latest look that was asked for before or by this.
    pub async fn sample(&self, since: u64) -> Result<Sample, CellError> {
        let asked = {
            self.learn.send_modify(|known| known.asked += 1);
            self.known.borrow().asked
        };
        self.say(Control::Usage { since }).await?;
        let mut known = self.known.clone();
        let told = known.wait_for(|known| known.told >= asked || known.lost);
        match tokio::time::timeout(SWEPT_TIMEOUT, told).await {
            Ok(Ok(known)) if known.told >= asked => Ok(known.sample.clone()),
            _ => Err(CellError::Lost),
        }
    }

    async fn say(&self, control: Control) -> Result<(), CellError> {
        self.channel.send(&control, &[]).await.map_err(CellError::of_cell)
    }
}

impl Known {
    fn saw(&mut self, sample: Sample) {
        self.peak.resident_bytes = self.peak.resident_bytes.max(sample.resident_bytes);
        self.peak.tasks = self.peak.tasks.max(sample.tasks);
        self.peak.full.extend(sample.full.iter().cloned());
        self.sample = sample;
        self.told += 1;
    }
}

async fn read(channel: Arc<Channel>, learn: Arc<watch::Sender<Known>>) {
    loop {
        match channel.receive().await {
            Ok((Report::Exited { code, signal, maxrss_bytes, cpu_us }, _)) => {
                let exit = ExitOf { code, signal, maxrss_bytes, cpu_us };
                learn.send_modify(|known| known.exit = Some(exit));
            }
            Ok((Report::Used(sample), _)) => learn.send_modify(|known| known.saw(sample)),
            Ok((Report::Swept, _)) => learn.send_modify(|known| known.sweeps += 1),
            Ok(_) => {}
            Err(_) => {
                learn.send_modify(|known| known.lost = true);
                return;
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The guard sweeps when both holders of the socket are gone.
        self.reader.abort();
    }
}
