//! How long records are kept: whole segments go, the oldest first, where the operator says so.
//!
//! A record in the chain says first up to where it is removed, with the hash there, and is on disk
//! before any file goes. So what is left can be verified from its beginning on, and a file that
//! somebody else removed is a gap as ever. A removal that was broken off leaves segments that the
//! next one takes; nothing else removes any.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ipc::vault::{AuditKind, AuditRecord};

use super::chain::Check;
use super::read::{self, Reader};
use super::record::Hash;
use super::{Audit, AuditError, Line, journal};
use crate::Daemon;

/// What the note of a removal has in `entry`; nobody but this daemon's own code writes that.
const ENTRY: &str = "retention";
/// Segments removed in one go: all of them are read before.
const AT_ONCE: usize = 16;
/// A segment takes no more records when its first is older than this part of the time to keep.
const PART: u32 = 10;
/// How often it is looked whether a segment was filled, and how often at the times.
const LOOK: Duration = Duration::from_secs(1);
const LOOKS_MAX: u64 = 60;

/// What the operator wants kept; all of it where he says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Records that are younger stay.
    pub keep: Option<Duration>,
    /// Segments beyond that many bytes go, however young.
    pub bytes: Option<u64>,
}

/// Removes what is to go, as long as proxyd runs.
pub async fn keep(daemon: Arc<Daemon>) {
    let (mut segment, mut looks) = (None, 0);
    let mut look = tokio::time::interval(LOOK);
    loop {
        look.tick().await;
        let limits = daemon.configured.retention();
        let pause = limits.keep.map_or(LOOKS_MAX, |keep| keep.as_secs() / 10).clamp(1, LOOKS_MAX);
        let current = daemon.audit.segment();
        looks += 1;
        if segment == Some(current) && looks < pause {
            continue;
        }
        (segment, looks) = (Some(current), 0);
        let generation = daemon.policies.current().number;
        match daemon.audit.prune(limits, generation, SystemTime::now()).await {
            Ok(0) => {}
            Ok(segments) => {
                tracing::info!(segments, "old audit records removed");
                segment = None;
            }
            Err(error) => tracing::error!(%error, "cannot remove old audit records"),
        }
    }
}

impl Audit {
    /// The first record of the segment that is written to.
    fn segment(&self) -> u64 {
        self.0.state().journal.first()
    }

    /// Removes the segments that are to go at `now`, a few at most; gives how many went.
    pub async fn prune(
        &self,
        limits: Retention,
        generation: u64,
        now: SystemTime,
    ) -> Result<usize, AuditError> {
        if limits == Retention::default() {
            return Ok(0);
        }
        if let Some(keep) = limits.keep {
            self.0.state().journal.end_segment_since(now, keep / PART)?;
        }
        let plan = self.read(move |reader, _| reader.due(limits, now)).await?;
        let Some((removal, segments)) = plan else { return Ok(0) };
        let (entry, reason) = (Some(ENTRY.to_owned()), Some(removal.to_string()));
        // Resolves when the disk has it.
        self.note(&Line { entry, reason, generation, ..Line::default() }).await?;
        self.read(move |reader, _| reader.remove(&segments)).await
    }
}

/// What the record of a removal says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Removal {
    pub first: u64,
    pub last: u64,
    /// Of the last one.
    pub hash: Hash,
    /// What was wrong with them.
    pub broken: Option<String>,
}

/// The words of that, around two numbers, a hash and what was wrong.
const WORDS: [&str; 4] = ["records ", " to ", " removed by retention, the last with hash ", "; "];

impl std::fmt::Display for Removal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [records, to, with, but] = WORDS;
        let (first, last, hash) = (self.first, self.last, hex::encode(self.hash));
        write!(f, "{records}{first}{to}{last}{with}{hash}")?;
        self.broken.iter().try_for_each(|broken| write!(f, "{but}{broken}"))
    }
}

impl Removal {
    pub(super) fn of(record: &AuditRecord) -> Option<Self> {
        if record.kind != AuditKind::Note || record.entry.as_deref() != Some(ENTRY) {
            return None;
        }
        let [records, to, with, but] = WORDS;
        let (first, rest) = record.reason.as_deref()?.strip_prefix(records)?.split_once(to)?;
        let (last, rest) = rest.split_once(with)?;
        let (hash, broken) = match rest.split_once(but) {
            None => (rest, None),
            Some((hash, broken)) => (hash, Some(broken.to_owned())),
        };
        let mut bytes = Hash::default();
        hex::decode_to_slice(hash, &mut bytes).ok()?;
        let removal =
            Self { first: first.parse().ok()?, last: last.parse().ok()?, hash: bytes, broken };
        // It speaks of what came before itself.
        (removal.last < record.seq).then_some(removal)
    }
}

type Segments = Vec<(u64, PathBuf)>;

impl Reader {
    /// The segments that are to go: from the oldest on, never the one that is written to.
    fn due(
        &mut self,
        limits: Retention,
        now: SystemTime,
    ) -> Result<Option<(Removal, Segments)>, AuditError> {
        let mut segments = read::segments(self.dir())?;
        let metas: Vec<_> = (segments.iter())
            .map(|(_, path)| std::fs::metadata(path).map_err(read::cannot_read))
            .collect::<Result<_, _>>()?;
        let mut bytes: u64 = metas.iter().map(std::fs::Metadata::len).sum();
        let old = limits.keep.and_then(|keep| now.checked_sub(keep));
        let mut count = 0;
        while count + 1 < segments.len() && count < AT_ONCE {
            let (first, path) = &segments[count];
            let outgrown = limits.bytes.is_some_and(|most| bytes > most);
            // The file's time too: a record may be hidden behind one that is not readable.
            let outlived = old.is_some_and(|old| metas[count].modified().is_ok_and(|at| at < old))
                && match self.index(*first, path)?.span() {
                    Some((_, to)) => old.is_some_and(|old| to < milliseconds(old)),
                    None => false,
                };
            if !outgrown && !outlived {
                break;
            }
            bytes -= metas[count].len();
            count += 1;
        }
        if count == 0 {
            return Ok(None);
        }
        let (next, next_path) = segments[count].clone();
        segments.truncate(count);
        let header = read::header_of(&next_path)?;
        let Some((_, hash)) = header.filter(|(named, _)| *named == next) else {
            let place = next_path.display();
            return Err(AuditError::Read(format!("{place} has no sound beginning")));
        };
        let broken = check(&segments, next, hash)?.into_iter().next();
        let removal = Removal { first: segments[0].0, last: next - 1, hash, broken };
        Ok(Some((removal, segments)))
    }

    /// Removes segments with what lies beside them, each on disk before the next.
    fn remove(&mut self, segments: &Segments) -> Result<usize, AuditError> {
        let dir = self.dir().to_owned();
        let opened = std::fs::File::open(&dir).map_err(journal::cannot_write)?;
        for (first, path) in segments {
            self.forget(*first);
            for beside in beside(&dir, path)? {
                remove_file(&beside)?;
            }
            remove_file(path)?;
            opened.sync_all().map_err(journal::cannot_write)?;
        }
        Ok(segments.len())
    }
}

/// The index of a segment, and what a power cut left of a half record.
fn beside(dir: &Path, segment: &Path) -> Result<Vec<PathBuf>, AuditError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read::cannot_read)? {
        let path = entry.map_err(read::cannot_read)?.path();
        if path.file_stem() == segment.file_stem() && path != segment {
            found.push(path);
        }
    }
    Ok(found)
}

fn remove_file(path: &Path) -> Result<(), AuditError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(journal::cannot_write(format!("{}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}

/// What is wrong with segments, the next of which begins like this.
fn check(segments: &Segments, next: u64, before: Hash) -> Result<Vec<String>, AuditError> {
    let mut check = Check::default();
    for (first, path) in segments {
        read::walk(&mut check, *first, path, false)?;
    }
    Ok(check.finish_before(next, before))
}

pub(super) fn milliseconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
    i64::try_from(since).unwrap_or(i64::MAX)
}
