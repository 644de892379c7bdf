//! Puts the entries of one layer into a directory, over what lower layers have put there.
//!
//! A layer may name any path and hold any link. Names that climb are refused. Every parent is
//! found by the kernel inside the directory (`RESOLVE_IN_ROOT`): a link of the image leads to where
//! it would in the image, and to nothing outside. The last part of a name is never followed.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::tar::{Entry, Kind};

/// Begins the name of what stands for the absence of a file of a lower layer.
const WHITEOUT: &str = ".wh.";
/// Stands for the absence of all that lower layers have in its directory.
const OPAQUE: &str = ".wh..wh..opq";
/// How often a file is opened again when the kernel asks for that: see `init::root`.
const OPEN_TRIES_MAX: u32 = 1000;
/// Nobody reads an image that is deeper, and removing it takes a descriptor for each.
const DEPTH_MAX: usize = 256;
/// Files, directories and links of one image.
const ENTRIES_MAX: u64 = 4_000_000;

/// What was put and what was left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub entries: u64,
    pub bytes: u64,
    /// Devices and pipes.
    pub skipped: u64,
}

/// A directory that layers are put into, the lowest first.
pub struct Place {
    root: OwnedFd,
    /// What the current layer has put: an absence is about lower layers only.
    own: HashSet<PathBuf>,
    /// Modes that would keep us from going on, set in the end: those of the highest layers.
    modes: BTreeMap<PathBuf, u32>,
    bytes_max: u64,
    pub count: Count,
}

impl Place {
    /// Everything below `directory`, at most `bytes_max` in all files together.
    pub fn open(directory: &Path, bytes_max: u64) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, directory, flags, Mode::empty())?;
        let (own, modes, count) = (HashSet::new(), BTreeMap::new(), Count::default());
        Ok(Self { root, own, modes, bytes_max, count })
    }

    /// The entries from here on are those of the next layer.
    pub fn next_layer(&mut self) {
        self.own.clear();
    }

    /// Puts one entry, whose content is `content`.
    pub fn put(&mut self, entry: &Entry, content: &mut impl Read) -> io::Result<()> {
        let path = inside(&entry.path)?;
        let Some(name) = path.file_name().map(OsStr::to_owned) else { return Ok(()) };
        self.count.entries += 1;
        if self.count.entries > ENTRIES_MAX {
            return Err(refused(format!("it has more than {ENTRIES_MAX} entries")));
        }
        let above = path.parent().unwrap_or(Path::new("")).to_owned();
        if name == OPAQUE {
            return self.clear(&above);
        }
        if let Some(gone) = name.as_bytes().strip_prefix(WHITEOUT.as_bytes()) {
            return self.remove(&above.join(single(gone)?));
        }
        if entry.kind == Kind::Special {
            self.count.skipped += 1;
            return Ok(());
        }
        let parent = self.parent(&above)?;
        self.make_room(&parent, &path, &name, entry.kind)?;
        match entry.kind {
            Kind::Directory => match rustix::fs::mkdirat(&parent, &name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {
                    self.modes.insert(path.clone(), entry.mode);
                }
                Err(error) => return Err(error.into()),
            },
            Kind::File => self.file(&parent, &name, entry, content)?,
            Kind::Symlink => rustix::fs::symlinkat(&entry.link, &parent, &name)?,
            Kind::HardLink => self.hard_link(&parent, &name, &entry.link)?,
            Kind::Special => {}
        }
        self.own.insert(path);
        Ok(())
    }

    /// Sets what was left until the end. Call it once, after the last layer.
    pub fn finish(mut self) -> io::Result<Count> {
        for (path, mode) in std::mem::take(&mut self.modes) {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            match self.open_in(&path, flags) {
                // Its owner may always read, search and remove.
                Ok(found) => rustix::fs::fchmod(&found, Mode::from_raw_mode(mode & 0o777 | 0o700))?,
                // A higher layer has put something else there.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.count)
    }

    fn file(
        &mut self,
        parent: &OwnedFd,
        name: &OsStr,
        entry: &Entry,
        content: &mut impl Read,
    ) -> io::Result<()> {
        self.count.bytes = self.count.bytes.saturating_add(entry.bytes);
        if self.count.bytes > self.bytes_max {
            return Err(refused(format!("its files have more than {} bytes", self.bytes_max)));
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(parent, name, flags, Mode::RUSR | Mode::WUSR)?;
        let mut file = File::from(file);
        io::copy(content, &mut file)?;
        // No set-id bit counts on these mounts; none is kept either.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(entry.mode & 0o777 | 0o400))?;
        let time = Timespec { tv_sec: entry.modified, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        Ok(rustix::fs::futimens(&file, &times)?)
    }

    fn hard_link(&mut self, parent: &OwnedFd, name: &OsStr, to: &Path) -> io::Result<()> {
        let to = inside(to)?;
        let (Some(target), Some(above)) = (to.file_name(), to.parent()) else {
            return Err(refused("a hard link to the root".to_owned()));
        };
        let above = self.open_in(above, OFlags::PATH | OFlags::DIRECTORY)?;
        Ok(rustix::fs::linkat(&above, target, parent, name, AtFlags::empty())?)
    }

    /// Removes what stands where an entry goes, unless both are directories.
    fn make_room(
        &mut self,
        parent: &OwnedFd,
        path: &Path,
        name: &OsStr,
        kind: Kind,
    ) -> io::Result<()> {
        match kind_of(parent, name) {
            Err(Errno::NOENT) => Ok(()),
            Ok(FileType::Directory) if kind == Kind::Directory => Ok(()),
            Ok(FileType::Directory) => {
                self.own.retain(|own| !own.starts_with(path));
                remove_tree(parent, name, 0)
            }
            Ok(_) => Ok(rustix::fs::unlinkat(parent, name, AtFlags::empty())?),
            Err(error) => Err(error.into()),
        }
    }

    /// What lower layers have put at `path` is not there any more.
    fn remove(&mut self, path: &Path) -> io::Result<()> {
        let (Some(name), Some(above)) = (path.file_name(), path.parent()) else { return Ok(()) };
        let parent = match self.open_in(above, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(parent) => parent,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let kind = match kind_of(&parent, name) {
            Ok(kind) => kind,
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let has_own = self.own.contains(path) || self.own.iter().any(|own| own.starts_with(path));
        match (kind, has_own) {
            (FileType::Directory, true) => self.clear(path),
            (FileType::Directory, false) => remove_tree(&parent, name, 0),
            (_, true) => Ok(()),
            (_, false) => Ok(rustix::fs::unlinkat(&parent, name, AtFlags::empty())?),
        }
    }

    /// What lower layers have put into the directory `path` is not there any more.
    fn clear(&mut self, path: &Path) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = match self.open_in(path, flags) {
            Ok(directory) => directory,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for name in names_in(&directory)? {
            self.remove(&path.join(name))?;
        }
        Ok(())
    }

    /// A directory that entries go into; what is missing of it is made.
    fn parent(&mut self, path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        match self.open_in(path, flags) {
            Err(Errno::NOENT) => {}
            other => return other.map_err(|e| named(path, e.into())),
        }
        let above = self.parent(path.parent().unwrap_or(Path::new("")))?;
        let name = path.file_name().unwrap_or(OsStr::new("."));
        let _ = match rustix::fs::mkdirat(&above, name, Mode::RWXU) {
            Ok(()) => self.modes.insert(path.to_owned(), 0o755),
            // A link that leads to nothing inside the image.
            Err(error) => return Err(named(path, error.into())),
        };
        self.open_in(path, flags).map_err(|e| named(path, e.into()))
    }

    fn open_in(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        let flags = flags | OFlags::CLOEXEC;
        let mut tries = 0;
        loop {
            match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN) if tries < OPEN_TRIES_MAX => tries += 1,
                other => return other,
            }
        }
    }
}

/// A name of an archive as a path below the root.
fn inside(path: &Path) -> io::Result<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => plain.push(name),
            Component::ParentDir | Component::Prefix(_) => {
                return Err(refused(format!("{} climbs out of its directory", path.display())));
            }
        }
    }
    let bytes = plain.as_os_str().as_bytes();
    if bytes.contains(&0) || plain.components().count() > DEPTH_MAX {
        return Err(refused("a name in it is no path".to_owned()));
    }
    Ok(plain)
}

/// The one name that a whiteout is about.
fn single(name: &[u8]) -> io::Result<OsString> {
    match name {
        b"" | b"." | b".." => Err(refused("a whiteout in it names no file".to_owned())),
        name => Ok(OsStr::from_bytes(name).to_owned()),
    }
}

fn kind_of(parent: &OwnedFd, name: &OsStr) -> rustix::io::Result<FileType> {
    let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

/// Removes a directory and all below it; no link is followed.
pub fn remove_tree(parent: &OwnedFd, name: &OsStr, depth: usize) -> io::Result<()> {
    if depth > DEPTH_MAX {
        return Err(refused("its directories are too deep".to_owned()));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    for below in names_in(&directory)? {
        match kind_of(&directory, &below)? {
            FileType::Directory => remove_tree(&directory, &below, depth + 1)?,
            _ => rustix::fs::unlinkat(&directory, &below, AtFlags::empty())?,
        }
    }
    Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}

/// What is in a directory.
pub fn names_in(directory: &OwnedFd) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    Ok(names)
}

fn refused(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn named(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, kind: Kind) -> Entry {
        let link = PathBuf::new();
        Entry { path: path.into(), kind, mode: 0o644, bytes: 0, modified: 1, link }
    }

    fn link(path: &str, kind: Kind, to: &str) -> Entry {
        Entry { link: to.into(), ..entry(path, kind) }
    }

    fn file(path: &str, text: &str) -> (Entry, String) {
        (Entry { bytes: text.len() as u64, ..entry(path, Kind::File) }, text.to_owned())
    }

    fn put(place: &mut Place, layer: &[(Entry, String)]) -> io::Result<()> {
        place.next_layer();
        layer.iter().try_for_each(|(entry, text)| place.put(entry, &mut text.as_bytes()))
    }

    fn empty(entry: Entry) -> (Entry, String) {
        (entry, String::new())
    }

    #[test]
    fn absences_are_about_lower_layers_and_never_about_the_own() {
        let dir = tempfile::tempdir().unwrap();
        let mut place = Place::open(dir.path(), 1 << 20).unwrap();
        let lower = [file("a/old", "1"), file("a/b/old", "2"), file("gone/x", "3"), file("f", "4")];
        let upper = [
            file("a/new", "5"),
            empty(entry("a/.wh..wh..opq", Kind::File)),
            empty(entry(".wh.gone", Kind::File)),
            empty(entry(".wh.f", Kind::File)),
            file("f", "6"),
            empty(entry(".wh.f", Kind::File)),
            empty(entry(".wh.never", Kind::File)),
        ];

        put(&mut place, &lower).unwrap();
        put(&mut place, &upper).unwrap();
        place.finish().unwrap();

        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).ok();
        assert_eq!(read("a/new").as_deref(), Some("5"));
        assert_eq!((read("a/old"), read("a/b/old"), read("gone/x")), (None, None, None));
        assert_eq!(read("f").as_deref(), Some("6"));
    }

    #[test]
    fn no_name_and_no_link_of_a_layer_leads_out_of_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir_all(&outside).unwrap();
        std::fs::write(outside.join("secret"), "kept").unwrap();
        let target = dir.path().join("root");
        std::fs::create_dir(&target).unwrap();
        let mut place = Place::open(&target, 1 << 20).unwrap();

        for climbing in ["../outside/x", "a/../../outside/x", "/../outside/x"] {
            assert!(put(&mut place, &[file(climbing, "x")]).is_err(), "{climbing}");
        }
        let up = link("up", Kind::Symlink, "../outside");
        let away = link("away", Kind::Symlink, outside.to_str().unwrap());
        put(&mut place, &[empty(up), empty(away)]).unwrap();
        for through in ["up/x", "away/x", "up/.wh.secret", "away/.wh..wh..opq"] {
            let _ = put(&mut place, &[file(through, "x")]);
        }
        let hard = link("hard", Kind::HardLink, "away/secret");
        assert!(put(&mut place, &[empty(hard)]).is_err());
        let climbing = link("hard", Kind::HardLink, "../outside/secret");
        assert!(put(&mut place, &[empty(climbing)]).is_err());
        // A file in the place of a link replaces the link and does not follow it.
        put(&mut place, &[file("away", "own")]).unwrap();

        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
        assert_eq!(std::fs::read_to_string(outside.join("secret")).unwrap(), "kept");
        assert_eq!(std::fs::read_to_string(target.join("away")).unwrap(), "own");
    }

    #[test]
    fn links_of_lower_layers_lead_where_they_would_in_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let mut place = Place::open(dir.path(), 1 << 20).unwrap();
        let merged = link("lib", Kind::Symlink, "/usr/lib");

        put(&mut place, &[file("usr/lib/a", "1"), empty(merged)]).unwrap();
        put(&mut place, &[file("lib/b", "2"), empty(link("c", Kind::HardLink, "lib/a"))]).unwrap();
        place.finish().unwrap();

        assert_eq!(std::fs::read_to_string(dir.path().join("usr/lib/b")).unwrap(), "2");
        assert_eq!(std::fs::read_to_string(dir.path().join("c")).unwrap(), "1");
    }

    #[test]
    fn devices_are_left_out_set_id_bits_too_and_sizes_are_bounded() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let mut place = Place::open(dir.path(), 10).unwrap();
        let set_id = Entry { mode: 0o4755, ..file("su", "x").0 };
        let closed = Entry { mode: 0o000, ..entry("d", Kind::Directory) };

        put(&mut place, &[empty(entry("null", Kind::Special)), (set_id, "x".into())]).unwrap();
        put(&mut place, &[empty(closed), file("d/f", "y")]).unwrap();
        let large = put(&mut place, &[file("large", "more than ten bytes")]);
        let count = place.finish().unwrap();

        assert!(large.unwrap_err().to_string().contains("more than 10 bytes"));
        assert_eq!(count.skipped, 1);
        assert!(!dir.path().join("null").exists());
        let mode = |name: &str| dir.path().join(name).metadata().unwrap().permissions().mode();
        assert_eq!((mode("su") & 0o7777, mode("d") & 0o7777), (0o755, 0o700));
    }
}
