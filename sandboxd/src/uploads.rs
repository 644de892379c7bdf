//! Files that a session is given to read: shown read-only at `/mnt/session/uploads`.
//!
//! They lie beside the sessions' workspaces, where cells find the way to, in a directory that no
//! sandbox can write, so sandboxd may open what is inside. A file appears whole: it is written
//! under another name first. It comes and goes while a sandbox lives, since the directory is shown.

use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use axum::body::{Body, HttpBody};
use ipc::fault::{Code, Fault};
use ipc::id::SessionId;

use crate::workspace::{Workspace, Workspaces};

/// Begins the names of their directories: no id begins so.
const UPLOADS: &str = ".uploads-";
/// Begins the names of files that are being written.
const PART: &str = ".part-";
/// The documented limit of one file of the API.
const FILE_BYTES_MAX: u64 = 500 * 1000 * 1000;
/// Of a path below the directory: far below the kernel's own limit.
const PATH_BYTES_MAX: usize = 1024;
const PATH_PARTS_MAX: usize = 20;
const NAME_BYTES_MAX: usize = 255;

impl Workspaces {
    /// The directory of what the session was given, made at its first use.
    pub fn uploads(&self, session: &SessionId) -> Result<Workspace, Fault> {
        let made = self.own(&uploads_of(session))?;
        permit(&made.path, 0o755).map_err(|e| cannot("keep", &e))?;
        Ok(made)
    }

    /// Removes what the session was given. Blocking.
    pub fn end_of_uploads(&self, session: &SessionId) -> std::io::Result<()> {
        self.remove(&uploads_of(session))
    }

    /// Stores a file, in place of one that was there.
    pub async fn upload(&self, session: &SessionId, path: &str, body: Body) -> Result<(), Fault> {
        let below = checked(path)?;
        let directory = self.uploads(session)?.path;
        let part = directory.join(format!("{PART}{}", ipc::id::random_text(12)));
        let written = write(&part, body).await;
        let stored = match written {
            Ok(file) => {
                let (part, directory, below) = (part.clone(), directory.clone(), below.clone());
                // To the disk before the session names it.
                let work = move || put_in_place(&file, &part, &directory, &below);
                let placed = tokio::task::spawn_blocking(work).await;
                placed
                    .map_err(|e| cannot("store", &std::io::Error::other(e)))
                    .and_then(|placed| placed.map_err(|e| taken(path, &e)))
            }
            Err(fault) => Err(fault),
        };
        if stored.is_err() {
            // It may not have come to be.
            let _ = std::fs::remove_file(&part);
        }
        stored
    }

    /// Takes a file away; one that is not there is away already.
    pub fn take_away(&self, session: &SessionId, path: &str) -> Result<(), Fault> {
        let below = checked(path)?;
        let directory = self.folder().join(uploads_of(session));
        match std::fs::remove_file(directory.join(&below)) {
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Err(cannot("remove", &e));
            }
            _ => {}
        }
        // A directory that holds nothing any more would stand in the way of a file of its name.
        for parent in below.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
            if std::fs::remove_dir(directory.join(parent)).is_err() {
                break;
            }
        }
        Ok(())
    }
}

fn uploads_of(session: &SessionId) -> String {
    format!("{UPLOADS}{session}")
}

/// Whatever the umask: the cell's user may be another than this daemon's, whose mount is read-only.
fn permit(path: &Path, mode: u32) -> std::io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

/// Makes a written file findable at its place, also after a loss of power. Blocking.
fn put_in_place(
    file: &std::fs::File,
    part: &Path,
    directory: &Path,
    below: &Path,
) -> std::io::Result<()> {
    file.set_permissions(std::fs::Permissions::from_mode(0o444))?;
    file.sync_all()?;
    let mut place = directory.to_owned();
    let mut changed: Vec<PathBuf> = directory.ancestors().take(2).map(Path::to_owned).collect();
    for name in below.parent().into_iter().flat_map(Path::components) {
        place.push(name);
        match std::fs::DirBuilder::new().mode(0o755).create(&place) {
            Ok(()) => permit(&place, 0o755)?,
            Err(e) if e.kind() == ErrorKind::AlreadyExists && place.is_dir() => {}
            Err(e) => return Err(e),
        }
        changed.push(place.clone());
    }
    std::fs::rename(part, directory.join(below))?;
    changed.iter().rev().try_for_each(|path| std::fs::File::open(path)?.sync_all())
}

async fn write(part: &Path, mut body: Body) -> Result<std::fs::File, Fault> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o444);
    let mut file = options.open(part).map_err(|e| cannot("store", &e))?;
    let mut bytes = 0;
    while let Some(frame) =
        std::future::poll_fn(|cx| std::pin::Pin::new(&mut body).poll_frame(cx)).await
    {
        let broken = |_| Fault::new(Code::Invalid, "the file broke off before its end");
        let Ok(piece) = frame.map_err(broken)?.into_data() else { continue };
        bytes += piece.len() as u64;
        if bytes > FILE_BYTES_MAX {
            let text = format!("a file of more than {FILE_BYTES_MAX} bytes");
            return Err(Fault::new(Code::TooLarge, text));
        }
        // A few hundred KiB at most: no longer than a turn of the runtime.
        file.write_all(&piece).map_err(|e| cannot("store", &e))?;
    }
    Ok(file)
}

/// A relative path whose parts are plain names, the last of which is none of ours.
fn checked(path: &str) -> Result<PathBuf, Fault> {
    let parts = Path::new(path).components();
    let plain = parts.clone().all(|part| matches!(part, Component::Normal(_)));
    let canonical: PathBuf = parts.clone().collect();
    let long = path.split('/').any(|name| name.len() > NAME_BYTES_MAX);
    let ours = path.split('/').any(|name| name.starts_with(PART));
    let many = parts.count() > PATH_PARTS_MAX || path.len() > PATH_BYTES_MAX;
    let bad = path.is_empty() || canonical.as_os_str() != path || !plain || long || ours || many;
    if bad || path.chars().any(char::is_control) {
        let shown: String = path.escape_debug().take(128).collect();
        let text = format!("{shown:?} is no path of a file that a session can be given");
        return Err(Fault::new(Code::Invalid, text)
            .with_hint("name it relative to /mnt/session/uploads, without `.` and `..`"));
    }
    Ok(canonical)
}

fn cannot(what: &str, error: &std::io::Error) -> Fault {
    Fault::new(Code::Unavailable, format!("cannot {what} a session's file: {error}"))
        .with_hint("is the disk of sandboxd's state directory full?")
}

/// What stands where a file or one of its directories is to be.
fn taken(path: &str, error: &std::io::Error) -> Fault {
    let there = [ErrorKind::AlreadyExists, ErrorKind::NotADirectory, ErrorKind::IsADirectory];
    if there.contains(&error.kind()) {
        let text = format!("{path:?}: another file stands in its way: {error}");
        return Fault::new(Code::Conflict, text);
    }
    cannot("store", error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apart::Apart;

    fn workspaces() -> (tempfile::TempDir, Workspaces) {
        let dir = tempfile::tempdir().unwrap();
        let workspaces = Workspaces::open(dir.path().join("workspaces"), Apart::default()).unwrap();
        (dir, workspaces)
    }

    #[tokio::test]
    async fn a_file_lies_where_its_path_says_and_goes_with_its_session() {
        let (_dir, workspaces) = workspaces();
        let session = SessionId::random();

        workspaces.upload(&session, "a/b.txt", Body::from("one")).await.unwrap();
        workspaces.upload(&session, "a/b.txt", Body::from("two")).await.unwrap();

        let folder = workspaces.uploads(&session).unwrap().path;
        assert_eq!(std::fs::read_to_string(folder.join("a/b.txt")).unwrap(), "two");
        let in_the_way = workspaces.upload(&session, "a", Body::from("x")).await.unwrap_err();
        assert_eq!(in_the_way.code, Code::Conflict);
        workspaces.take_away(&session, "a/b.txt").unwrap();
        workspaces.take_away(&session, "a/b.txt").unwrap();
        assert!(!folder.join("a/b.txt").exists());
        workspaces.end_of_uploads(&session).unwrap();
        assert!(!folder.exists());
    }

    #[tokio::test]
    async fn a_path_that_leads_elsewhere_is_refused_and_makes_nothing() {
        let (dir, workspaces) = workspaces();
        let session = SessionId::random();
        let deep = ["d"; 21].join("/");
        for bad in
            ["", ".", "..", "../x", "a/../x", "/etc/x", "a//b", "a/", "./a", "a\nb", "a\0b", &deep]
        {
            let fault = workspaces.upload(&session, bad, Body::from("x")).await.unwrap_err();

            assert_eq!(fault.code, Code::Invalid, "{bad:?}");
        }
        assert_eq!(std::fs::read_dir(dir.path().join("workspaces")).unwrap().count(), 0);
    }
}
