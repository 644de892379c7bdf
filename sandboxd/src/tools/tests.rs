//! The file tools on a real directory: their texts, their bounds, and links that lead astray.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ipc::sandbox::Content;
use serde_json::{Value, json};

use super::files::{Reply, Request, decode_reply, perform};
use super::{Tool, parse};

struct Tree {
    directory: tempfile::TempDir,
}

impl Tree {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("work")).unwrap();
        std::fs::write(directory.path().join("secret"), "outside").unwrap();
        Self { directory }
    }

    fn work(&self) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join("work")
    }

    fn write(&self, path: &str, bytes: impl AsRef<[u8]>) {
        let path = self.work().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    fn reply(&self, tool: &str, input: &Value) -> Reply {
        let Ok(Tool::File(action)) = parse(tool, input) else { panic!("{tool} {input}") };
        let request = Request { roots: vec![self.work()], search_ms_max: 60_000, action };
        decode_reply(&perform(&request.encode(b""))).unwrap()
    }

    fn run(&self, tool: &str, input: Value) -> (String, bool) {
        let reply = self.reply(tool, &input);
        let [Content::Text { text }] = &reply.content[..] else { panic!("{reply:?}") };
        (text.clone(), reply.is_error)
    }

    fn ok(&self, tool: &str, input: Value) -> String {
        let (text, is_error) = self.run(tool, input);
        assert!(!is_error, "{text}");
        text
    }

    fn fails(&self, tool: &str, input: Value) -> String {
        let (text, is_error) = self.run(tool, input);
        assert!(is_error, "{text}");
        text
    }
}

#[test]
fn writes_reads_and_edits_with_the_documented_texts() {
    let tree = Tree::new();

    let wrote = tree.ok("write", json!({"file_path": "a.txt", "content": "one\n"}));
    let edited = tree
        .ok("edit", json!({"file_path": "a.txt", "old_string": "one", "new_string": "two\nthree"}));
    let read = tree.ok("read", json!({"file_path": "a.txt"}));
    let line = tree.ok("read", json!({"file_path": "a.txt", "view_range": [2, 0]}));

    assert_eq!(wrote, "wrote 4 bytes to a.txt");
    assert_eq!(edited, "edited a.txt (1 replacement(s))");
    assert_eq!(read, "two\nthree\n");
    assert_eq!(line, "three\n");
}

#[test]
fn write_makes_missing_parents_and_absolute_paths_work() {
    let tree = Tree::new();
    let path = tree.work().join("x/y/z.txt");

    tree.ok("write", json!({"file_path": path, "content": "deep"}));
    tree.ok("write", json!({"file_path": "x/../x/y/w.txt", "content": ""}));

    assert_eq!(std::fs::read_to_string(path).unwrap(), "deep");
    assert_eq!(tree.ok("read", json!({"file_path": "x/y/w.txt"})), "(no output)");
}

#[test]
fn no_path_and_no_link_leads_outside() {
    let tree = Tree::new();
    let outside = tree.directory.path().join("secret");
    symlink(&outside, tree.work().join("absolute")).unwrap();
    symlink("../secret", tree.work().join("relative")).unwrap();
    symlink("..", tree.work().join("up")).unwrap();
    symlink("/proc/self/root", tree.work().join("magic")).unwrap();
    symlink("/nonexistent/x", tree.work().join("dangling")).unwrap();
    let magic = format!("magic{}", outside.display());

    for path in ["absolute", "relative", "up/secret", "../secret", "/etc/passwd", &magic] {
        let expected = format!("path '{path}' is outside the session's working directory");
        let read = tree.fails("read", json!({"file_path": path}));
        assert_eq!(read, format!("read: {expected}"));
        let write = tree.fails("write", json!({"file_path": path, "content": "x"}));
        assert_eq!(write, format!("write: {expected}"));
        let input = json!({"file_path": path, "old_string": "outside", "new_string": "x"});
        assert_eq!(tree.fails("edit", input), format!("edit: {expected}"));
        tree.fails("grep", json!({"pattern": "outside", "path": path}));
    }
    tree.fails("write", json!({"file_path": "dangling", "content": "x"}));
    tree.fails("write", json!({"file_path": "up/new", "content": "x"}));
    tree.fails("glob", json!({"pattern": "*", "path": "up"}));
    tree.fails("glob", json!({"pattern": "../*"}));

    assert_eq!(std::fs::read_to_string(outside).unwrap(), "outside");
    assert!(!tree.directory.path().join("new").exists());
}

#[test]
fn links_within_the_workspace_work_also_absolute_ones() {
    let tree = Tree::new();
    tree.write("real/a.txt", "hello");
    symlink("real", tree.work().join("relative")).unwrap();
    symlink(tree.work().join("real"), tree.work().join("absolute")).unwrap();

    for way in ["relative", "absolute"] {
        let path = format!("{way}/a.txt");
        assert_eq!(tree.ok("read", json!({"file_path": path})), "hello");
        let new = format!("{way}/sub/{way}.txt");
        tree.ok("write", json!({"file_path": new, "content": "x"}));
        assert!(tree.work().join(format!("real/sub/{way}.txt")).exists());
    }
}

#[test]
fn a_directory_swapped_for_a_link_during_writes_lets_none_escape() {
    let tree = Tree::new();
    let outside = tree.directory.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let work = tree.work();
    std::fs::create_dir(work.join("real")).unwrap();
    symlink(&outside, work.join("link")).unwrap();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flag = std::sync::Arc::clone(&stop);
    let racer = std::thread::spawn(move || {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        let (a, b) = (work.join("real"), work.join("link"));
        while !flag.load(std::sync::atomic::Ordering::Relaxed) {
            renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).unwrap();
        }
    });

    for _ in 0..3_000 {
        tree.run("write", json!({"file_path": "real/file", "content": "x"}));
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    racer.join().unwrap();

    assert_eq!(std::fs::read_dir(outside).unwrap().count(), 0);
}

#[test]
fn what_is_no_regular_file_is_refused_without_waiting() {
    let tree = Tree::new();
    let fifo = tree.work().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();

    assert_eq!(tree.fails("read", json!({"file_path": "fifo"})), "read: fifo: not a regular file");
    tree.fails("write", json!({"file_path": "fifo", "content": "x"}));
    tree.fails("grep", json!({"pattern": "x", "path": "fifo"}));
    assert_eq!(tree.ok("grep", json!({"pattern": "x"})), "no matches");
    assert_eq!(tree.fails("read", json!({"file_path": "."})), "read: .: is a directory");
    let missing = tree.fails("read", json!({"file_path": "nosuch"}));
    assert_eq!(missing, "read: nosuch: no such file or directory");
}

#[test]
fn an_edit_must_be_unambiguous() {
    let tree = Tree::new();
    tree.write("a", "x y x");
    let edit = |old: &str, all: bool| {
        let input = json!({
            "file_path": "a", "old_string": old, "new_string": "z", "replace_all": all
        });
        tree.run("edit", input)
    };

    assert!(edit("q", false).1);
    assert!(edit("", false).1);
    assert!(edit("x", false).0.contains("2 times"));
    assert_eq!(edit("x", true), ("edited a (2 replacement(s))".into(), false));
    assert_eq!(std::fs::read_to_string(tree.work().join("a")).unwrap(), "z y z");
}

#[test]
fn large_and_binary_files_are_told_apart() {
    let tree = Tree::new();
    tree.write("large", "line\n".repeat(100_000));
    tree.write("binary", [0xff, 0xfe, 0x00]);
    tree.write("image", b"\x89PNG\r\n\x1a\nrest");
    tree.write("document", b"%PDF-1.7\n\xff");

    assert!(tree.fails("read", json!({"file_path": "large"})).contains("view_range"));
    let range = json!({"file_path": "large", "view_range": [99_999, 100_000]});
    assert_eq!(tree.ok("read", range), "line\nline\n");
    let beyond = json!({"file_path": "large", "view_range": [100_001, -1]});
    assert!(tree.fails("read", beyond).contains("the file has 100000"));
    tree.fails("read", json!({"file_path": "large", "view_range": [0, 5]}));
    tree.fails("read", json!({"file_path": "large", "view_range": [5, 4]}));
    assert!(tree.fails("read", json!({"file_path": "binary"})).contains("UTF-8"));
    let image = tree.reply("read", &json!({"file_path": "image"}));
    assert!(matches!(&image.content[..], [Content::Image { media_type, .. }]
        if media_type == "image/png"));
    let document = tree.reply("read", &json!({"file_path": "document"}));
    assert!(matches!(&document.content[..], [Content::Document { .. }]));
}

#[test]
fn glob_lists_newest_first_with_absolute_paths() {
    let tree = Tree::new();
    for (name, age) in [("src/old.rs", 30), ("src/new.rs", 10), ("src/deep/mid.rs", 20)] {
        tree.write(name, "");
        let file = std::fs::File::options().append(true).open(tree.work().join(name)).unwrap();
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(age);
        file.set_modified(then).unwrap();
    }
    tree.write("notes.txt", "");
    let lines = |names: &[&str]| {
        let absolute = |name: &&str| tree.work().join(name).to_str().unwrap().to_owned();
        names.iter().map(absolute).collect::<Vec<_>>().join("\n")
    };

    let all = tree.ok("glob", json!({"pattern": "**/*.rs"}));
    let flat = tree.ok("glob", json!({"pattern": "*.rs", "path": "src"}));
    let none = tree.ok("glob", json!({"pattern": "*.go"}));

    assert_eq!(all, lines(&["src/new.rs", "src/deep/mid.rs", "src/old.rs"]));
    assert_eq!(flat, lines(&["src/new.rs", "src/old.rs"]));
    assert_eq!(none, "no matches");
    tree.fails("glob", json!({"pattern": "/etc/*"}));
    tree.fails("glob", json!({"pattern": "[z-a]"}));
}

#[test]
fn grep_shows_path_line_and_text_and_is_bounded() {
    let tree = Tree::new();
    tree.write("a.txt", "one\r\ntwo\n");
    tree.write("b/c.txt", "x\nanother one\n");
    tree.write("binary", b"one\0one");
    tree.write("wide.txt", format!("match {}\n", "y".repeat(10_000)));
    let at = |name: &str| tree.work().join(name).to_str().unwrap().to_owned();

    let found = tree.ok("grep", json!({"pattern": "\\bone$"}));
    let wide = tree.ok("grep", json!({"pattern": "match", "path": "wide.txt"}));
    let none = tree.ok("grep", json!({"pattern": "three"}));
    tree.write("many.txt", "a line that is found\n".repeat(20_000));
    let many = tree.ok("grep", json!({"pattern": "found"}));

    assert_eq!(found, format!("{}:1:one\n{}:2:another one", at("a.txt"), at("b/c.txt")));
    assert_eq!(wide.len(), at("wide.txt").len() + 3 + 2_000);
    assert_eq!(none, "no matches");
    assert!(many.ends_with("[output truncated]") && many.len() < 101 * 1024, "{}", many.len());
    assert!(tree.fails("grep", json!({"pattern": "("})).starts_with("grep: pattern '('"));
}

#[test]
fn a_spill_follows_no_planted_link() {
    use super::files::Action;
    use super::spill::Piece;

    let tree = Tree::new();
    let spill = |name: &str, continues: bool| {
        let action = Action::Spill(Piece { name: name.into(), continues });
        let request = Request { roots: vec![tree.work()], search_ms_max: 0, action };
        decode_reply(&perform(&request.encode(b"bytes"))).unwrap().is_error
    };

    assert!(!spill("a.txt", false) && !spill("a.txt", true));
    let kept = std::fs::read_to_string(tree.work().join(".cleanhands/a.txt")).unwrap();
    assert_eq!(kept, "bytesbytes");
    assert!(spill("a.txt", false), "an existing file is not overwritten");
    symlink("../../secret", tree.work().join(".cleanhands/b.txt")).unwrap();
    assert!(spill("b.txt", false) && spill("b.txt", true));
    std::fs::remove_dir_all(tree.work().join(".cleanhands")).unwrap();
    symlink("..", tree.work().join(".cleanhands")).unwrap();
    assert!(spill("c.txt", false));
    let outside = std::fs::read_to_string(Path::new(tree.directory.path()).join("secret"));
    assert_eq!(outside.unwrap(), "outside");
}

#[test]
fn garbage_is_an_error_and_no_panic() {
    for bytes in [&b""[..], b"\xff\xff\xff\xff{}", b"\x02\0\0\0{}", b"\x00\0\0\0"] {
        assert!(decode_reply(&perform(bytes)).unwrap().is_error);
    }
}
