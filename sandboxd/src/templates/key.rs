//! The keys of templates: a digest of all that goes into one.
//!
//! sandboxd may not read what a root holds, but it may ask what the kernel says of its files; a
//! program that was replaced has another inode or another time.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use policies::SandboxTable;
use sha2::{Digest, Sha256};

/// Changes whenever a template would be made otherwise of the same things.
const VERSION: &str = "1";

/// Files that are others after a system's upgrade: what packages were made with and link against.
const TELLING: &[&str] = &[
    "usr/lib/os-release",
    "usr/bin/python3",
    "usr/local/bin/python3",
    "usr/bin/node",
    "usr/local/bin/node",
    "usr/bin/npm",
    "usr/local/bin/npm",
    "usr/bin/cargo",
    "usr/local/bin/cargo",
    "usr/bin/gcc",
    "usr/lib/x86_64-linux-gnu/libc.so.6",
    "usr/lib/aarch64-linux-gnu/libc.so.6",
    "usr/lib64/libc.so.6",
    "lib/ld-musl-x86_64.so.1",
    "lib/ld-musl-aarch64.so.1",
];

/// What the kernel says of some files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp(Vec<Option<[i128; 4]>>);

/// What a layer is made of.
#[derive(Clone, Copy, Debug)]
pub struct Recipe<'a> {
    /// Which root it is made over, exactly.
    pub root: &'a str,
    /// Where the root is looked for: paths in a layer may name it.
    pub table: &'a SandboxTable,
    /// The variables and limits that the tools run with.
    pub tools: &'a SandboxTable,
}

/// Whether a root is an image layout, and not a tree.
pub fn is_layout(root: &Path) -> bool {
    root != Path::new("/") && root.join("oci-layout").is_file()
}

/// What says that a layout's index is the same.
pub fn stamp_of_layout(layout: &Path) -> Stamp {
    stamp(&[layout.join("index.json"), layout.join("oci-layout")])
}

/// Which system lies in a directory, as far as metadata tell.
pub fn identity(root: &Path) -> String {
    let mut files: Vec<PathBuf> = TELLING.iter().map(|name| root.join(name)).collect();
    files.push(root.join("usr"));
    let mut stamp = stamp(&files);
    if let Some(Some(directory)) = stamp.0.last_mut() {
        // Of the directory itself only which one it is.
        directory[2..].fill(0);
    }
    format!("{}:{stamp:?}", root.display())
}

fn stamp(files: &[PathBuf]) -> Stamp {
    let one = |path: &PathBuf| {
        let meta = path.metadata().ok()?;
        let modified = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        Some([meta.dev().into(), meta.ino().into(), meta.size().into(), modified])
    };
    Stamp(files.iter().map(one).collect())
}

/// The key of an image's unpacked tree.
pub fn of_image(digest: &str) -> String {
    hashed("image", &[digest, std::env::consts::ARCH])
}

impl Recipe<'_> {
    /// The key of the layer. The order of packages does not count, that of commands does.
    pub fn key(&self) -> String {
        let packages = &self.table.packages;
        let lists = [&packages.apt, &packages.pip, &packages.npm, &packages.cargo];
        let sorted = lists.map(|list| {
            let mut list = list.clone();
            list.sort();
            list
        });
        let made_of = format!(
            "{:?} {sorted:?} {:?} {:?} {:?}",
            self.root, self.table.setup, self.tools.env, self.tools.mounts
        );
        hashed("layer", &[&made_of])
    }
}

fn hashed(kind: &str, parts: &[&str]) -> String {
    let mut sum = Sha256::new();
    for part in [&[VERSION, kind], parts].concat() {
        sum.update((part.len() as u64).to_le_bytes());
        sum.update(part.as_bytes());
    }
    format!("{kind}-{}", hex::encode(&sum.finalize()[..20]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(change: impl Fn(&mut SandboxTable)) -> String {
        let mut table = SandboxTable::default();
        table.packages.pip = vec!["a==1".into(), "b==2".into()];
        table.setup = vec!["one".into(), "two".into()];
        change(&mut table);
        Recipe { root: "r", table: &table, tools: &SandboxTable::default() }.key()
    }

    #[test]
    fn a_key_changes_with_all_that_goes_into_a_layer_and_with_nothing_else() {
        let same = key(|_| {});

        assert_eq!(same, key(|table| table.packages.pip.reverse()));
        assert_eq!(same, key(|table| table.memory_bytes += 1));
        assert_ne!(same, key(|table| table.packages.pip[0] = "a==2".into()));
        assert_ne!(same, key(|table| table.packages.npm = table.packages.pip.clone()));
        assert_ne!(same, key(|table| table.setup.reverse()));
        let table = SandboxTable::default();
        let mut tools = SandboxTable::default();
        let of = |root: &str, tools: &SandboxTable| Recipe { root, table: &table, tools }.key();
        assert_ne!(of("r", &tools), of("s", &tools));
        let before = of("r", &tools);
        tools.env.insert("INDEX".into(), "x".into());
        assert_ne!(before, of("r", &tools));
    }

    #[test]
    fn a_root_is_another_when_its_programs_were_replaced() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        let before = identity(dir.path());
        std::fs::write(dir.path().join("usr/bin/node"), "1").unwrap();
        let with = identity(dir.path());
        std::fs::write(dir.path().join("usr/bin/another"), "1").unwrap();
        let beside = identity(dir.path());
        std::fs::write(dir.path().join("usr/bin/node"), "two").unwrap();

        assert_ne!(before, with);
        assert_eq!(with, beside);
        assert_ne!(with, identity(dir.path()));
    }
}
