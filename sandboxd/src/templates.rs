//! What sandboxes share and what takes long to make: unpacked images, and layers of packages.
//!
//! A template has a key that says all that went into it, and a directory of its own that is made
//! under another name and renamed when it is whole and on the disk: what a crash left half made has
//! a name that nobody looks for, and goes at the next start. Two who need the same wait for one
//! making. What no sandbox uses goes after a while, or earlier when all together are too large.
//!
//! sandboxd looks into none of them: [`oci`], [`place`] and [`seal`] run inside cells. Who makes
//! them is `crate::sandbox`.

pub mod key;
pub mod oci;
pub mod place;
pub mod seal;
pub mod tar;

use std::collections::HashMap;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use ipc::fault::{Code, Fault};
use serde::{Deserialize, Serialize};
use tokio::sync::{broadcast, watch};

/// Begins the names of templates that are being made, and removed: no key begins so.
const BUILDING: &str = ".building-";
const REMOVED: &str = ".removed-";
/// Says, in a template's directory, what it is; its time is when it was last used.
const ABOUT: &str = "template.json";
/// A template that nobody used for so long goes.
const UNUSED_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// Lines about builds that a slow reader may miss.
const LINES_MAX: usize = 256;

/// What a template is, as it is written beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    pub bytes: u64,
    /// The variables that an image sets.
    #[serde(default)]
    pub env: Vec<(String, String)>,
}

/// A template in use. It is kept for as long as this is held.
#[derive(Debug)]
pub struct Held {
    pub path: PathBuf,
    pub about: About,
}

/// A template that is being made. What is left of it when this is dropped goes.
#[derive(Debug)]
pub struct Building {
    pub path: PathBuf,
    environment: String,
    lines: broadcast::Sender<(String, String)>,
}

type Told = watch::Receiver<Option<Result<(), Fault>>>;

/// All templates of this daemon.
#[derive(Debug)]
pub struct Templates {
    folder: PathBuf,
    bytes_max: u64,
    held: Mutex<HashMap<String, Weak<Held>>>,
    /// What is being made now.
    flights: Mutex<HashMap<String, Told>>,
    /// Layouts whose index was read, as it was, and the digest of the image in it.
    resolved: Mutex<HashMap<PathBuf, (key::Stamp, String)>>,
    lines: broadcast::Sender<(String, String)>,
}

/// What is done inside a cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Inside {
    /// Answered with a digest.
    Resolve,
    /// Answered with [`oci::Unpacked`].
    Unpack { digest: String },
    /// Answered with [`seal::Sealed`].
    Seal,
}

/// Begins what is asked of a cell about templates. What is asked of the file tools begins with a
/// length, which as a length this would be beyond every limit.
const ASKED: &[u8] = b"template";

impl Inside {
    pub fn encode(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("a digest is text");
        [ASKED, &json].concat()
    }
}

/// Reads what [`perform`] answered; the error is what went wrong inside.
pub fn decode<T: serde::de::DeserializeOwned>(answer: &[u8]) -> Result<T, String> {
    let answer: Result<serde_json::Value, String> =
        serde_json::from_slice(answer).map_err(|error| error.to_string())?;
    serde_json::from_value(answer?).map_err(|error| error.to_string())
}

/// Does what is asked about a template, if that is asked; runs inside a cell, confined as the file
/// tools are.
pub fn perform(request: &[u8]) -> Option<Vec<u8>> {
    let inside = serde_json::from_slice(request.strip_prefix(ASKED)?);
    let outcome = inside.map_err(|error| error.to_string()).and_then(|inside| run(&inside));
    Some(serde_json::to_vec(&outcome).expect("an outcome has string keys only"))
}

fn run(inside: &Inside) -> Result<serde_json::Value, String> {
    let (layout, workspace) = (Path::new(oci::LAYOUT), Path::new(crate::plan::WORKSPACE));
    let answer = match inside {
        Inside::Resolve => oci::resolve(layout).map(serde_json::Value::from),
        Inside::Unpack { digest } => oci::unpack(layout, digest, workspace).and_then(json),
        Inside::Seal => seal::seal(workspace, Path::new("/")).and_then(json),
    };
    answer.map_err(|error| error.to_string())
}

fn json(value: impl Serialize) -> std::io::Result<serde_json::Value> {
    Ok(serde_json::to_value(value)?)
}

impl Templates {
    /// Opens the folder; what an earlier process was making or removing goes.
    pub fn open(folder: PathBuf, bytes_max: u64) -> std::io::Result<Arc<Self>> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        // As for workspaces: see there.
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o711))?;
        for entry in std::fs::read_dir(&folder)? {
            let name = entry?.file_name();
            let half = |name: &str| name.starts_with(BUILDING) || name.starts_with(REMOVED);
            if name.to_str().is_some_and(half) {
                remove_later(folder.join(name));
            }
        }
        let (lines, _) = broadcast::channel(LINES_MAX);
        let (held, flights, resolved) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Arc::new(Self { folder, bytes_max, held, flights, resolved, lines }))
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What is said about builds from now on: the environment, and a line.
    pub fn lines(&self) -> broadcast::Receiver<(String, String)> {
        self.lines.subscribe()
    }

    /// The template of this key; made by `make` if there is none. Whoever asks meanwhile waits for
    /// the same making, and whoever leaves does not end it.
    pub async fn obtain<F>(
        self: &Arc<Self>,
        key: &str,
        environment: &str,
        make: impl FnOnce(Arc<Building>) -> F,
    ) -> Result<Arc<Held>, Fault>
    where
        F: Future<Output = Result<About, Fault>> + Send + 'static,
    {
        if let Some(held) = self.hold(key) {
            return Ok(held);
        }
        let mut told = self.join_or_begin(key, environment, make)?;
        let outcome = told.wait_for(Option::is_some).await.map(|outcome| outcome.clone());
        outcome.ok().flatten().unwrap_or_else(|| Err(broke_off()))?;
        self.hold(key).ok_or_else(broke_off)
    }

    fn join_or_begin<F>(
        self: &Arc<Self>,
        key: &str,
        environment: &str,
        make: impl FnOnce(Arc<Building>) -> F,
    ) -> Result<Told, Fault>
    where
        F: Future<Output = Result<About, Fault>> + Send + 'static,
    {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = flights.get(key) {
            let line = "waiting for what another sandbox is having made".to_owned();
            let _ = self.lines.send((environment.to_owned(), line));
            return Ok(told.clone());
        }
        let (tell, told) = watch::channel(None);
        if self.hold(key).is_some() {
            tell.send_replace(Some(Ok(())));
            return Ok(told);
        }
        let building = Arc::new(self.begin(environment).map_err(|e| {
            let text = format!("cannot make a template in {}: {e}", self.folder.display());
            Fault::new(Code::Unavailable, text)
        })?);
        flights.insert(key.to_owned(), told.clone());
        let making = make(Arc::clone(&building));
        let (all, key) = (Arc::clone(self), key.to_owned());
        tokio::spawn(async move {
            // A panic of ours must not leave others waiting.
            let made = tokio::spawn(making).await.unwrap_or_else(|_| Err(broke_off()));
            let outcome = match made {
                Ok(about) => all.publish(&key, &building, about).await,
                Err(fault) => Err(fault),
            };
            all.flights.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
            tell.send_replace(Some(outcome));
        });
        Ok(told)
    }

    fn begin(&self, environment: &str) -> std::io::Result<Building> {
        let path = self.folder.join(format!("{BUILDING}{}", ipc::id::random_text(12)));
        std::fs::DirBuilder::new().mode(0o711).create(&path)?;
        let environment = environment.to_owned();
        Ok(Building { path, environment, lines: self.lines.clone() })
    }

    /// Gives a template its name, when all of it is on the disk.
    async fn publish(&self, key: &str, building: &Building, about: About) -> Result<(), Fault> {
        let (from, to) = (building.path.clone(), self.folder.join(key));
        let published = tokio::task::spawn_blocking(move || {
            std::fs::write(from.join(ABOUT), serde_json::to_vec(&about)?)?;
            let directory = std::fs::File::open(&from)?;
            rustix::fs::syncfs(&directory)?;
            std::fs::rename(&from, &to)
        });
        let outcome = published.await.map_err(std::io::Error::from).and_then(|outcome| outcome);
        outcome.map_err(|e| {
            Fault::new(Code::Unavailable, format!("cannot keep a template: {e}"))
                .with_hint("make room on the file system of sandboxd's state directory")
        })
    }

    /// Takes a template, if it is there.
    fn hold(&self, key: &str) -> Option<Arc<Held>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = held.get(key).and_then(Weak::upgrade) {
            return Some(known);
        }
        let path = self.folder.join(key);
        let about = std::fs::read(path.join(ABOUT)).ok()?;
        let about = serde_json::from_slice(&about).ok()?;
        // When it was last used; kept about, it is only removed later than it might be.
        let _ = std::fs::File::options()
            .append(true)
            .open(path.join(ABOUT))
            .and_then(|file| file.set_modified(SystemTime::now()));
        let taken = Arc::new(Held { path, about });
        held.insert(key.to_owned(), Arc::downgrade(&taken));
        Some(taken)
    }

    /// The digest that a layout with this stamp was found to have.
    pub fn resolved(&self, layout: &Path, stamp: &key::Stamp) -> Option<String> {
        let resolved = self.resolved.lock().unwrap_or_else(PoisonError::into_inner);
        resolved.get(layout).filter(|(known, _)| known == stamp).map(|(_, digest)| digest.clone())
    }

    pub fn remember(&self, layout: &Path, stamp: key::Stamp, digest: String) {
        let mut resolved = self.resolved.lock().unwrap_or_else(PoisonError::into_inner);
        resolved.insert(layout.to_owned(), (stamp, digest));
    }

    /// Removes what nobody used for long, and the longest unused while all are too large. Blocking.
    pub fn tidy(&self) {
        self.tidy_at(SystemTime::now());
    }

    fn tidy_at(&self, now: SystemTime) {
        let mut all = self.all();
        all.sort_by_key(|(_, used, _)| *used);
        let mut bytes: u64 = all.iter().map(|(_, _, bytes)| bytes).sum();
        for (key, used, size) in all {
            let old = now.duration_since(used).is_ok_and(|unused| unused > UNUSED_MAX);
            if (old || bytes > self.bytes_max) && self.remove(&key) {
                tracing::info!(template = key, bytes = size, old, "template removed");
                bytes = bytes.saturating_sub(size);
            }
        }
    }

    /// Key, last use and size of each.
    fn all(&self) -> Vec<(String, SystemTime, u64)> {
        let Ok(listing) = std::fs::read_dir(&self.folder) else { return Vec::new() };
        let one = |entry: std::fs::DirEntry| {
            let key = entry.file_name().to_str().filter(|name| !name.starts_with('.'))?.to_owned();
            let path = entry.path().join(ABOUT);
            let used = path.metadata().and_then(|meta| meta.modified()).ok()?;
            let about: About = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
            Some((key, used, about.bytes))
        };
        listing.flatten().filter_map(one).collect()
    }

    /// Removes one, unless it is in use.
    fn remove(&self, key: &str) -> bool {
        let removed = self.folder.join(format!("{REMOVED}{}", ipc::id::random_text(12)));
        {
            let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            if held.get(key).is_some_and(|held| held.strong_count() > 0) {
                return false;
            }
            held.remove(key);
            if std::fs::rename(self.folder.join(key), &removed).is_err() {
                return false;
            }
        }
        remove_later(removed);
        true
    }
}

impl Building {
    /// Tells whoever waits, and the log.
    pub fn say(&self, line: String) {
        tracing::info!(environment = self.environment, "{line}");
        let _ = self.lines.send((self.environment.clone(), line));
    }

    /// A directory in it for a cell to fill.
    pub fn directory(&self, name: &str) -> Result<PathBuf, Fault> {
        let path = self.path.join(name);
        match std::fs::DirBuilder::new().mode(0o755).create(&path) {
            Ok(()) => Ok(path),
            Err(error) => {
                let text = format!("cannot make {}: {error}", path.display());
                Err(Fault::new(Code::Unavailable, text))
            }
        }
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        if self.path.exists() {
            remove_later(std::mem::take(&mut self.path));
        }
    }
}

fn remove_later(path: PathBuf) {
    std::thread::spawn(move || crate::workspace::empty_and_remove(&path));
}

fn broke_off() -> Fault {
    Fault::new(Code::Internal, "the making of a template broke off: see sandboxd's log")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn about(bytes: u64) -> About {
        About { bytes, env: Vec::new() }
    }

    async fn made(templates: &Arc<Templates>, key: &str, bytes: u64) -> Arc<Held> {
        let make = |_| async move { Ok(about(bytes)) };
        templates.obtain(key, "dev", make).await.unwrap()
    }

    #[tokio::test]
    async fn who_asks_at_the_same_time_waits_for_one_making() {
        let dir = tempfile::tempdir().unwrap();
        let templates = Templates::open(dir.path().join("t"), 1 << 30).unwrap();
        let made = Arc::new(AtomicUsize::new(0));
        let (go, gone) = watch::channel(false);
        let ask = || {
            let (templates, made, mut gone) =
                (Arc::clone(&templates), Arc::clone(&made), gone.clone());
            tokio::spawn(async move {
                let make = |building: Arc<Building>| async move {
                    made.fetch_add(1, Ordering::SeqCst);
                    gone.wait_for(|go| *go).await.unwrap();
                    std::fs::write(building.path.join("file"), "whole").unwrap();
                    Ok(about(5))
                };
                templates.obtain("k", "dev", make).await
            })
        };

        let asked: Vec<_> = (0..8).map(|_| ask()).collect();
        while made.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        go.send_replace(true);
        for one in asked {
            let held = one.await.unwrap().unwrap();
            assert_eq!(std::fs::read_to_string(held.path.join("file")).unwrap(), "whole");
        }

        assert_eq!(made.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn what_failed_or_was_left_half_made_is_never_used() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("t");
        std::fs::create_dir_all(folder.join(".building-left")).unwrap();
        let templates = Templates::open(folder.clone(), 1 << 30).unwrap();

        let fail = |building: Arc<Building>| async move {
            std::fs::write(building.path.join("file"), "half").unwrap();
            Err(Fault::new(Code::Unavailable, "no"))
        };
        let failed = templates.obtain("k", "dev", fail).await;
        let held = made(&templates, "k", 1).await;

        assert_eq!(failed.unwrap_err().text, "no");
        assert!(!held.path.join("file").exists());
        let half = || {
            let names = std::fs::read_dir(&folder).unwrap().flatten();
            names.filter(|e| e.file_name().to_string_lossy().starts_with('.')).count()
        };
        while half() > 0 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn the_longest_unused_go_when_all_are_too_large_and_what_is_used_stays() {
        let dir = tempfile::tempdir().unwrap();
        let templates = Templates::open(dir.path().join("t"), 10).unwrap();
        let used = made(&templates, "used", 8).await;
        drop(made(&templates, "first", 8).await);
        drop(made(&templates, "second", 2).await);
        let now = SystemTime::now();
        for (key, age) in [("used", 300), ("first", 200), ("second", 100)] {
            let file = std::fs::File::options()
                .append(true)
                .open(dir.path().join("t").join(key).join(ABOUT));
            file.unwrap().set_modified(now - Duration::from_secs(age)).unwrap();
        }

        templates.tidy_at(now);

        let there = |key: &str| dir.path().join("t").join(key).exists();
        assert!(there("used") && !there("first") && there("second"));
        templates.tidy_at(now + 2 * UNUSED_MAX);
        assert!(there("used") && !there("second"));
        drop(used);
        templates.tidy_at(now + 2 * UNUSED_MAX);
        assert!(!there("used"));
    }
}
