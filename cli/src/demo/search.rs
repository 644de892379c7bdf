//! Looks for the token wherever this user can look: files, environments, command lines, memory.
//!
//! Blocking; it names each place where something was found and counts what it could not open.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::demo::fingerprint::Fingerprints;

/// Bytes read at once.
const CHUNK: usize = 1024 * 1024;

/// Where to look.
#[derive(Clone, Debug)]
pub struct Ground {
    pub dir: PathBuf,
    /// First processes of living sandboxes.
    pub sandboxes: Vec<u32>,
    /// Processes that must never have the token.
    pub without: Vec<(u32, &'static str)>,
    /// proxyd's processes, which may have it while a request is under way.
    pub with: Vec<(u32, &'static str)>,
    /// The other company's server, which is not ours to search.
    pub except: Option<u32>,
}

impl Ground {
    /// Looks everywhere. Gives what was found where nothing may be, and what was found in the
    /// memory of the processes that may have it.
    pub fn search(&self, prints: &Fingerprints) -> (Searched, Searched) {
        let mut searched = Searched::default();
        searched.files_below(prints, &self.dir);
        for pid in tree(std::process::id()) {
            if Some(pid) != self.except {
                searched.environment(prints, pid, self.name(pid));
            }
        }
        for pid in self.sandboxes.iter().flat_map(|init| tree(*init)) {
            searched.memory(prints, pid, "the sandbox");
        }
        let mut daemons = Searched::default();
        for (pid, name) in &self.without {
            daemons.memory(prints, *pid, name);
        }
        searched.found.append(&mut daemons.found);
        let mut allowed = Searched::default();
        for (pid, name) in &self.with {
            allowed.memory(prints, *pid, name);
        }
        (searched, allowed)
    }

    fn name(&self, pid: u32) -> &'static str {
        let known = self.without.iter().chain(&self.with).find(|(known, _)| *known == pid);
        known.map_or("a process", |(_, name)| name)
    }
}

/// What was looked at, and where the token was.
#[derive(Clone, Debug, Default)]
pub struct Searched {
    pub files: usize,
    pub databases: usize,
    pub logs: usize,
    pub environments: usize,
    /// Processes whose memory was read, and how much of it.
    pub memories: usize,
    pub memory_bytes: u64,
    /// Environments and memories that the kernel keeps from this user.
    pub closed: usize,
    pub found: Vec<String>,
}

impl Searched {
    /// Every regular file below a directory, whatever its name.
    pub fn files_below(&mut self, prints: &Fingerprints, dir: &Path) {
        let Ok(entries) = std::fs::read_dir(dir) else {
            self.closed += 1;
            return;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => self.files_below(prints, &path),
                Ok(kind) if kind.is_file() => self.file(prints, &path),
                _ => {}
            }
        }
    }

    fn file(&mut self, prints: &Fingerprints, path: &Path) {
        // The workspace is the sandbox's: what looked like a file may be a link or a pipe by now.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let flags = flags.bits().cast_signed();
        let opened = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
        let Ok(mut file) = opened else {
            // Gone meanwhile is fine; kept from us is not.
            self.closed += usize::from(path.exists());
            return;
        };
        self.files += 1;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        self.databases += usize::from(name.contains(".db"));
        self.logs += usize::from(name.ends_with(".log"));
        if reads_token(prints, &mut file) {
            self.found.push(path.display().to_string());
        }
    }

    /// Environment and command line of a process.
    pub fn environment(&mut self, prints: &Fingerprints, pid: u32, name: &str) {
        for part in ["environ", "cmdline"] {
            match std::fs::read(format!("/proc/{pid}/{part}")) {
                Ok(bytes) => {
                    if prints.search().push(&bytes) {
                        self.found.push(format!("{part} of {name} (process {pid})"));
                    }
                    self.environments += usize::from(part == "environ");
                }
                Err(_) => self.closed += usize::from(part == "environ"),
            }
        }
    }

    /// All memory of a process that is not a plain copy of a file on disk. Gives whether it could
    /// be read.
    pub fn memory(&mut self, prints: &Fingerprints, pid: u32, name: &str) -> bool {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let memory = File::open(format!("/proc/{pid}/mem"));
        let (Ok(memory), false) = (memory, maps.is_empty()) else {
            self.closed += 1;
            return false;
        };
        let mut search = Memory { memory, buffer: vec![0; CHUNK], bytes: 0 };
        let found = maps
            .lines()
            .filter_map(region)
            .fold(false, |found, (from, to)| search.region(prints, from, to) | found);
        self.memories += 1;
        self.memory_bytes += search.bytes;
        if found {
            self.found.push(format!("memory of {name} (process {pid})"));
        }
        true
    }
}

fn reads_token(prints: &Fingerprints, file: &mut File) -> bool {
    let mut search = prints.search();
    let mut buffer = vec![0; CHUNK];
    let mut found = false;
    while let Ok(n @ 1..) = file.read(&mut buffer) {
        found |= search.push(&buffer[..n]);
    }
    found
}

struct Memory {
    memory: File,
    buffer: Vec<u8>,
    bytes: u64,
}

impl Memory {
    fn region(&mut self, prints: &Fingerprints, from: u64, to: u64) -> bool {
        let mut search = prints.search();
        let mut found = false;
        let mut at = from;
        while at < to {
            let length = usize::try_from(to - at).unwrap_or(CHUNK).min(CHUNK);
            // A page that was never touched or is gone ends the region.
            let Ok(n @ 1..) = self.memory.read_at(&mut self.buffer[..length], at) else { break };
            found |= search.push(&self.buffer[..n]);
            at += n as u64;
            self.bytes += n as u64;
        }
        found
    }
}

/// One line of proc_pid_maps(5): the range, if it is readable and not a file's own pages.
fn region(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let rights = fields.next()?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or_default();
    let plain_file = inode != "0" && !rights.contains('w');
    if !rights.starts_with('r') || plain_file || name.starts_with("[v") {
        return None;
    }
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
}

/// A process and all that it started, as far as /proc shows them.
pub fn tree(root: u32) -> Vec<u32> {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        parents.extend(parent(&stat).map(|parent| (pid, parent)));
    }
    let mut found = vec![root];
    let mut at = 0;
    while at < found.len() {
        let children = parents.iter().filter(|(_, parent)| *parent == found[at]);
        let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
        found.extend(children.into_iter().filter(|pid| *pid != root));
        at += 1;
    }
    found
}

/// Field 4 of proc_pid_stat(5), behind a name that may hold anything.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &[u8] = b"nb5yq3xk4tzs6rjw3hdb5ncyl7gfp2aeiou5x3zq6vm4tk2z";

    #[test]
    fn finds_the_token_in_any_file_and_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("x.db-wal"), [&[0; 99], TOKEN].concat()).unwrap();
        std::fs::write(dir.path().join("clean.log"), "nothing").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        let mut searched = Searched::default();

        searched.files_below(&Fingerprints::of(TOKEN), dir.path());

        assert_eq!(searched.found, [deep.join("x.db-wal").display().to_string()]);
        assert_eq!((searched.files, searched.databases, searched.logs), (2, 1, 1));
    }

    #[test]
    fn finds_the_token_in_the_memory_of_a_process() {
        // This process itself: the token is a constant here, so it is put on the heap too.
        let kept = TOKEN.to_vec();
        let mut searched = Searched::default();

        let read = searched.memory(&Fingerprints::of(TOKEN), std::process::id(), "this test");

        assert!(read && searched.found.len() == 1, "{searched:?}");
        assert_eq!(kept, TOKEN);
    }

    #[test]
    fn only_memory_that_may_differ_from_a_file_is_read() {
        let cases = [
            ("7f00-7f10 rw-p 00000000 00:00 0 [heap]", true),
            ("7f00-7f10 r--p 00000000 00:00 0", true),
            ("7f00-7f10 r-xp 00000000 08:01 42 /usr/bin/bash", false),
            ("7f00-7f10 rw-p 00000000 08:01 42 /usr/bin/bash", true),
            ("7f00-7f10 ---p 00000000 00:00 0", false),
            ("7f00-7f10 r--p 00000000 00:00 0 [vvar]", false),
            ("nonsense", false),
        ];

        for (line, read) in cases {
            assert_eq!(region(line).is_some(), read, "{line}");
        }
    }

    #[test]
    fn a_process_name_cannot_forge_its_parent() {
        assert_eq!(parent("7 (a) S 1 (b) S 42 7 7"), Some(42));
        assert_eq!(parent(""), None);
    }

    #[test]
    fn the_tree_of_this_process_has_its_children() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();

        let found = tree(std::process::id());

        assert!(found.contains(&child.id()), "{found:?}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
