//! The house rules that a machine can check, over the tree as it is.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Every file below the given folders that ends in `ending`, with its text.
fn files(folders: &[&str], ending: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = folders.iter().map(|f| root().join(f)).collect();
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap()) {
            let path = entry.path();
            let name = entry.file_name().into_string().unwrap();
            if path.is_dir() && name != "target" {
                open.push(path);
            } else if name.ends_with(ending) {
                let shown = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((shown, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(!found.is_empty(), "no {ending} file below {folders:?}: the check would check nothing");
    found
}

const CRATES: [&str; 7] = ["ipc", "policies", "proxyd", "sandboxd", "harnessd", "cli", "tests"];

fn rust() -> Vec<(String, String)> {
    files(&CRATES, ".rs")
}

fn assert_none(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what}:\n{}", found.join("\n"));
}

/// Lines of code proper: without comments and without what stands below `mod tests`.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    text[..end]
        .lines()
        .enumerate()
        .map(|(n, line)| (n + 1, line))
        .filter(|(_, line)| !line.trim_start().starts_with("//"))
}

#[test]
fn every_file_says_what_it_is_for() {
    let bad: Vec<String> =
        rust().into_iter().filter(|(_, t)| !t.starts_with("//!")).map(|(f, _)| f).collect();

    assert_none("files that do not open with //!", &bad);
}

#[test]
fn no_file_is_longer_than_600_lines_and_no_line_than_100_columns() {
    let mut bad = Vec::new();
    for (file, text) in rust() {
        if text.lines().count() > 600 {
            bad.push(format!("{file}: {} lines", text.lines().count()));
        }
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > 100 {
                bad.push(format!("{file}:{}: over 100 columns", number + 1));
            }
        }
    }

    assert_none("too long", &bad);
}

#[test]
fn unsafe_stands_only_below_sys() {
    let mut bad = Vec::new();
    for (file, text) in rust() {
        if file.contains("/src/sys/") || file == "ipc/src/sys.rs" || file == "tests/tidy.rs" {
            continue;
        }
        for (number, line) in code_lines(&text) {
            let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
            let words = words.filter(|_| !line.contains("reason = \""));
            if words.clone().any(|w| w == "unsafe") || line.contains("allow(unsafe_code") {
                bad.push(format!("{file}:{number}: {}", line.trim()));
            }
        }
    }

    assert_none("unsafe outside sys/", &bad);
}

#[test]
fn daemons_do_not_depend_on_each_other() {
    let mut bad = Vec::new();
    for (krate, may) in [
        ("ipc", &[][..]),
        ("policies", &[]),
        ("proxyd", &["ipc", "policies"]),
        ("sandboxd", &["ipc", "policies"]),
        ("harnessd", &["ipc", "policies"]),
    ] {
        let manifest = std::fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        for other in ["ipc", "policies", "proxyd", "sandboxd", "harnessd", "cli"] {
            if manifest.contains(&format!("\n{other}.workspace")) && !may.contains(&other) {
                bad.push(format!("{krate} depends on {other}"));
            }
        }
    }

    assert_none("dependencies against the direction", &bad);
}

#[test]
fn system_wrappers_and_sqlite_stand_where_the_layout_says() {
    let mut bad = Vec::new();
    for (file, text) in files(&["proxyd/src", "sandboxd/src", "harnessd/src"], ".rs") {
        // A file may import our own module of such a name from its sys/.
        let ours = text.contains("use crate::sys::");
        for (number, line) in code_lines(&text) {
            // The crate itself: not `std::os::unix::`, not a local module of that name.
            let uses = |name: &str| {
                if ours && !line.trim_start().starts_with("use ") {
                    return false;
                }
                line.match_indices(&format!("{name}::")).any(|(at, _)| {
                    let before = line[..at].chars().next_back();
                    !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':')
                        && (line.trim_start().starts_with("use ") || before == Some(' '))
                })
            };
            let place = |ok: &[&str]| ok.iter().any(|part| file.contains(part));
            let wrong =
                (["nix", "landlock", "libc", "caps", "seccompiler"].iter().any(|c| uses(c))
                    && !place(&["/src/sys/"]))
                    || (uses("rusqlite")
                        && !place(&["/log/", "/log.rs", "journal", "audit", "/vault/", "dns"]))
                    || (uses("rcgen") && !place(&["/tls/", "/vault/"]));
            if wrong {
                bad.push(format!("{file}:{number}: {}", line.trim()));
            }
        }
    }

    assert_none("imports in the wrong room", &bad);
}

#[test]
fn pure_modules_do_no_input_or_output() {
    let mut bad = Vec::new();
    let pure = |f: &str| {
        (f.starts_with("policies/src/") && !f.ends_with("/load.rs"))
            || f == "sandboxd/src/plan.rs"
            || f == "harnessd/src/step.rs"
            || f.starts_with("harnessd/src/context")
    };
    let banned =
        ["tokio::", "std::fs", "std::net::Tcp", "std::net::Udp", "std::process", "SystemTime::now"];
    for (file, text) in rust().into_iter().filter(|(f, _)| pure(f)) {
        for (number, line) in code_lines(&text) {
            if banned.iter().any(|b| line.contains(b)) {
                bad.push(format!("{file}:{number}: {}", line.trim()));
            }
        }
    }

    assert_none("input or output in a pure module", &bad);
}

#[test]
fn no_type_has_an_empty_name_and_nothing_is_left_to_do() {
    let mut bad = Vec::new();
    for (file, text) in rust().into_iter().filter(|(f, _)| f != "tests/tidy.rs") {
        for (number, line) in code_lines(&text) {
            let declared = ["struct ", "enum ", "trait ", "mod "]
                .iter()
                .find_map(|kind| line.trim_start().trim_start_matches("pub ").strip_prefix(kind));
            let name = declared.and_then(|d| d.split(|c: char| !c.is_alphanumeric()).next());
            let empty = ["Manager", "Handler", "Helper", "Utils", "common", "utils", "misc"];
            if name.is_some_and(|n| empty.iter().any(|e| n.contains(e))) {
                bad.push(format!("{file}:{number}: {}", line.trim()));
            }
            if ["todo!(", "unimplemented!(", "dbg!("].iter().any(|m| line.contains(m)) {
                bad.push(format!("{file}:{number}: {}", line.trim()));
            }
        }
        if ["TODO", "FIXME", "XXX"].iter().any(|mark| text.contains(mark)) {
            bad.push(format!("{file}: a mark of something left to do"));
        }
        if text.contains("#[ignore") {
            bad.push(format!("{file}: an ignored test"));
        }
    }

    assert_none("names and marks", &bad);
}

#[test]
fn rows_of_the_table_of_attacks_have_ids_of_their_own_and_name_tests_that_exist() {
    let table = std::fs::read_to_string(root().join("tests/attacks.md")).unwrap();
    let sources = rust();
    let mut rows = 0;
    let mut ids = BTreeSet::new();
    let mut bad = Vec::new();
    for line in table.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| id")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let test = cells.get(3).copied().unwrap_or_default();
        rows += 1;
        if !ids.insert(cells[1]) {
            bad.push(format!("a second {}: {line}", cells[1]));
        }
        if test.starts_with("n/a: ") || test.starts_with("open: ") {
            continue;
        }
        let Some((file, name)) = test.trim_matches('`').split_once("::") else {
            bad.push(line.to_owned());
            continue;
        };
        let there = if file.ends_with(".py") {
            std::fs::read_to_string(root().join(file)).is_ok_and(|t| t.contains(name))
        } else {
            sources.iter().any(|(f, t)| f == file && t.contains(&format!("fn {name}(")))
        };
        if !there {
            bad.push(line.to_owned());
        }
    }

    assert!(rows > 20, "the table of attacks has only {rows} rows");
    assert_none("rows whose test does not exist, or whose id is another's too", &bad);
}

/// What stands between the quotes after `key` in a line of a manifest.
fn quoted<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"')
}

#[test]
fn every_file_of_tests_is_part_of_a_program() {
    let mut bad = Vec::new();
    let mut programs = 0;
    for krate in CRATES {
        let manifest = std::fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        if !manifest.contains("\nautotests = false\n") && krate != "tests" {
            continue;
        }
        let folder =
            if krate == "tests" { root().join(krate) } else { root().join(krate).join("tests") };
        let (_, tests) = manifest.split_once("[[test]]").unwrap();
        let named: BTreeSet<String> =
            tests.lines().filter_map(|line| quoted(line, "name")).map(str::to_owned).collect();
        let text =
            |name: &String| std::fs::read_to_string(folder.join(format!("{name}.rs"))).unwrap();
        let roots: Vec<String> = named.iter().map(text).collect();
        programs += roots.len();
        for entry in std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap()) {
            let name = entry.file_name().into_string().unwrap();
            let Some(name) = name.strip_suffix(".rs") else { continue };
            let module = format!("\nmod {name};\n");
            if !named.contains(name) && !roots.iter().any(|root| root.contains(&module)) {
                bad.push(format!("{krate}: {name}.rs"));
            }
        }
    }

    assert!(programs > 1, "only {programs} programs of tests were looked at");
    assert_none("files of tests that no program has, so that they never run", &bad);
}

#[test]
fn every_key_of_a_policy_file_is_in_its_man_page() {
    let page = std::fs::read_to_string(root().join("policies/policy.5.md")).unwrap();
    let mut bad = Vec::new();
    let mut keys = 0;
    for (file, text) in files(&["policies"], ".toml") {
        if file.ends_with("Cargo.toml") {
            continue;
        }
        for line in text.lines().filter(|l| !l.trim_start().starts_with('#')) {
            if let Some((key, _)) = line.split_once('=') {
                let key = key.trim().trim_matches('"');
                keys += 1;
                let name = |c: char| c.is_ascii_lowercase() || c == '-';
                if !key.is_empty() && key.chars().all(name) && !page.contains(key) {
                    bad.push(format!("{file}: {key}"));
                }
            }
        }
    }

    assert!(keys > 10);
    assert_none("keys that policy.5.md does not name", &bad);
}

/// The part of a file that is compiled for tests only.
fn test_code<'a>(file: &str, text: &'a str) -> &'a str {
    let whole =
        file.starts_with("tests/") || file.contains("/tests/") || file.ends_with("tests.rs");
    let start = if whole { Some(0) } else { text.find("#[cfg(test)]\nmod tests") };
    start.map_or("", |start| &text[start..])
}

#[test]
fn rust_tests_start_no_program_that_only_some_hosts_have() {
    // Written in pieces, so that this file does not find itself. What they did is the intruder's
    // work (tests/intruder), or that of a suite in tests/peers.
    let absent = [
        ["pyth", "on3"].concat(),
        ["open", "ssl"].concat(),
        ["set", "priv"].concat(),
        ["set", "sid "].concat(),
        ["un", "share -"].concat(),
        ["ns", "enter"].concat(),
        ["ip li", "nk "].concat(),
    ];
    // Beside cargo, the compiler and the programs under test; the shell is what a sandbox needs.
    let started = ["cc", "curl", "echo", "git", "sh", "sleep", "/bin/bash", "/bin/true"];
    let mut bad = Vec::new();
    let mut tests = 0;
    for (file, text) in rust() {
        let code = test_code(&file, &text);
        tests += code.matches("#[test]").count() + code.matches("#[tokio::test").count();
        for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
            let named =
                line.split_once("Command::new(\"").and_then(|(_, rest)| rest.split_once('"'));
            let other =
                named.is_some_and(|(n, _)| !started.contains(&n) && !n.starts_with("/proc/"));
            if other || absent.iter().any(|word| line.contains(word.as_str())) {
                bad.push(format!("{file}: {}", line.trim()));
            }
        }
    }

    assert!(tests > 100, "only {tests} tests were looked at");
    assert_none("programs that a host may lack", &bad);
}

#[test]
fn nothing_names_a_public_registry_or_a_private_machine() {
    // Written in pieces, so that this file does not find itself.
    let words = [
        ["py", "pi.", "org"].concat(),
        ["python", "hosted."].concat(),
        ["npm", "js."].concat(),
        ["index.", "crates"].concat(),
        ["static.", "crates"].concat(),
        ["packa", "gist.", "org"].concat(),
        ["ruby", "gems.", "org"].concat(),
        ["maven.", "org"].concat(),
        ["proxy.", "golang"].concat(),
        ["deb.", "debian"].concat(),
        ["/wo", "rk/main"].concat(),
        ["/wo", "rk/shared"].concat(),
    ];
    let mut bad = Vec::new();
    let all = everything();
    for name in ["README.md", "bench/run", ".ci/run", "tests/peers/clients.py", "systemd/package"] {
        assert!(all.iter().any(|(file, _)| file == name), "{name} was not looked at");
    }
    for (file, text) in all {
        for word in words.iter().filter(|w| text.contains(w.as_str())) {
            bad.push(format!("{file}: {word}"));
        }
    }

    assert_none("names that do not belong here", &bad);
}

/// Every file of ours, whatever its name and whatever is in it; not what is built, nor cargo's own
/// list of where crates come from.
fn everything() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = CRATES.iter().map(|name| root().join(name)).collect();
    open.extend(["bench", "systemd", ".ci"].map(|name| root().join(name)));
    open.push(root());
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap()) {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            // A file of git's own, where the checkout is one of several work trees.
            let passed = ["Cargo.lock", ".git"].iter().any(|name| entry.file_name() == *name);
            if kind.is_dir() && folder != root() && entry.file_name() != "target" {
                open.push(path);
            } else if kind.is_file() && !passed {
                let shown = path.strip_prefix(root()).unwrap().display().to_string();
                let bytes = std::fs::read(&path).unwrap();
                found.push((shown, String::from_utf8_lossy(&bytes).into_owned()));
            }
        }
    }
    found
}
