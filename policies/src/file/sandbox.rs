//! Reads `[sandbox]`: limits, packages, mounts, variables.

use core::time::Duration;
use std::collections::BTreeMap;

use super::reader::{Reader, Section};
use super::{units, variables};
use crate::sandbox::{Mount, Packages, Root, SandboxTable};

pub(crate) const SANDBOX: &[&str] = &[
    "root",
    "memory",
    "processes",
    "disk",
    "tool-timeout",
    "idle-timeout",
    "packages",
    "setup",
    "mounts",
    "limits",
    "landlock-floor",
    "env",
];
pub(crate) const PACKAGES: &[&str] = &["apt", "pip", "npm", "cargo"];
pub(crate) const MOUNT: &[&str] = &["source", "target", "read-only"];

/// Below this not even a shell starts reliably.
const BYTES_MIN: u64 = 16 << 20;
/// Above this a figure is a slip of the unit.
const BYTES_MAX: u64 = 1 << 50;
const TOOL_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
const IDLE_TIMEOUT_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// The kernel takes no longer argument.
const SETUP_BYTES_MAX: usize = 100_000;

/// What a sandbox makes itself; a mount over it would undo that.
const TARGETS_RESERVED: &[&str] = &["/proc", "/dev", "/sys", "/etc", "/usr", "/workspace", "/run"];

/// Kernel interfaces and the daemons' own places: secrets, sockets, policies.
const SOURCES_RESERVED: &[&str] =
    &["/proc", "/sys", "/dev", "/run", "/var/run", "/var/lib/cleanhands", "/etc/cleanhands"];

pub(crate) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> SandboxTable {
    section.check_keys(reader, SANDBOX);
    let default = SandboxTable::default();
    SandboxTable {
        root: root(reader, section),
        memory_bytes: bytes(reader, section, "memory").unwrap_or(default.memory_bytes),
        processes: section.integer(reader, "processes", 4..=65_536).unwrap_or(default.processes),
        disk_bytes: bytes(reader, section, "disk").unwrap_or(default.disk_bytes),
        disk_named: section.has("disk"),
        tool_timeout: time(reader, section, "tool-timeout", TOOL_TIMEOUT_MAX)
            .unwrap_or(default.tool_timeout),
        idle_timeout: time(reader, section, "idle-timeout", IDLE_TIMEOUT_MAX)
            .unwrap_or(default.idle_timeout),
        packages: packages(reader, section),
        setup: setup(reader, section),
        mounts: mounts(reader, section),
        limits_required: limits_required(reader, section),
        // ABI 1 lacks what keeps files from being moved between directories with other rules.
        landlock_floor: section
            .integer(reader, "landlock-floor", 2..=16)
            .unwrap_or(default.landlock_floor),
        env: env(reader, section),
    }
}

fn root(reader: &mut Reader<'_>, section: &Section<'_>) -> Root {
    match section.string(reader, "root") {
        None => Root::Host,
        Some(text) if text.value == "host" => Root::Host,
        Some(text) => {
            if !is_plain_absolute(&text.value) || text.value == "/" {
                let hint = "\"host\", or the absolute path of a directory or an OCI layout";
                reader.error_hint(&text.span, "not a root for sandboxes", hint);
            }
            Root::Path(text.value)
        }
    }
}

fn bytes(reader: &mut Reader<'_>, section: &Section<'_>, key: &str) -> Option<u64> {
    let text = section.string(reader, key)?;
    match units::bytes(&text.value) {
        Err(why) => reader.error(&text.span, why),
        Ok(bytes) if !(BYTES_MIN..=BYTES_MAX).contains(&bytes) => {
            reader.error(&text.span, format!("\"{key}\" is 16MiB to 1024TiB"));
        }
        Ok(bytes) => return Some(bytes),
    }
    None
}

fn time(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    key: &str,
    max: Duration,
) -> Option<Duration> {
    let text = section.string(reader, key)?;
    match units::time(&text.value) {
        Err(why) => reader.error(&text.span, why),
        Ok(time) if time.is_zero() || time > max => {
            let hours = max.as_secs() / 3600;
            reader.error(&text.span, format!("\"{key}\" is 1s to {hours}h"));
        }
        Ok(time) => return Some(time),
    }
    None
}

fn packages(reader: &mut Reader<'_>, section: &Section<'_>) -> Packages {
    let Some(section) = section.section(reader, "packages") else { return Packages::default() };
    section.check_keys(reader, PACKAGES);
    let mut list = |key: &str| {
        let mut names = Vec::new();
        for name in section.strings(reader, key).unwrap_or_default() {
            // A leading dash would be an option of the package tool, not a package.
            let plain = name.value.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '@')
                && name.value.bytes().all(|b| b.is_ascii_graphic());
            if plain {
                names.push(name.value);
            } else {
                reader.error(&name.span, "not the name of a package");
            }
        }
        names
    };
    Packages { apt: list("apt"), pip: list("pip"), npm: list("npm"), cargo: list("cargo") }
}

fn setup(reader: &mut Reader<'_>, section: &Section<'_>) -> Vec<String> {
    let mut commands = Vec::new();
    for command in section.strings(reader, "setup").unwrap_or_default() {
        if command.value.contains('\0') || command.value.trim().is_empty() {
            reader.error(&command.span, "not a command");
        } else if command.value.len() > SETUP_BYTES_MAX {
            let message = format!("a command has at most {SETUP_BYTES_MAX} bytes");
            reader.error_hint(&command.span, &message, "mount a script, and name it");
        } else {
            commands.push(command.value);
        }
    }
    commands
}

fn mounts(reader: &mut Reader<'_>, section: &Section<'_>) -> Vec<Mount> {
    let mut mounts: Vec<Mount> = Vec::new();
    for entry in section.sections(reader, "mounts") {
        entry.check_keys(reader, MOUNT);
        let source = place(reader, &entry, "source", SOURCES_RESERVED);
        let target = place(reader, &entry, "target", TARGETS_RESERVED);
        let read_only = entry.boolean(reader, "read-only").unwrap_or(true);
        let (Some(source), Some(target)) = (source, target) else { continue };
        if mounts.iter().any(|mount| mount.target == target) {
            reader.error(&entry.span_of("target"), "two mounts have this target");
        }
        mounts.push(Mount { source, target, read_only });
    }
    mounts
}

fn place(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    key: &str,
    reserved: &[&str],
) -> Option<String> {
    if !section.has(key) {
        section.lacks(reader, key, "{ source = \"/srv/models\", target = \"/models\" }");
    }
    let text = section.string(reader, key)?;
    let path = text.value.trim_end_matches('/');
    let within = |top: &&&str| path == **top || path.starts_with(&format!("{top}/"));
    if !is_plain_absolute(&text.value) {
        let message = format!("\"{key}\" is an absolute path without \"..\"");
        reader.error(&text.span, message);
        None
    } else if path.is_empty() {
        reader.error(&text.span, format!("\"{key}\" cannot be the whole root"));
        None
    } else if let Some(top) = reserved.iter().find(within) {
        reader.error(&text.span, format!("\"{key}\" cannot lie in {top}"));
        None
    } else {
        Some(path.to_owned())
    }
}

fn is_plain_absolute(path: &str) -> bool {
    path.starts_with('/')
        && !path.chars().any(char::is_control)
        && path.split('/').all(|part| part != "." && part != "..")
        && !path.contains("//")
}

fn limits_required(reader: &mut Reader<'_>, section: &Section<'_>) -> bool {
    match section.string(reader, "limits") {
        None => false,
        Some(text) if text.value == "required" => true,
        Some(text) if text.value == "available" => false,
        Some(text) => {
            let hint = "\"required\": refuse to start where a limit would be weaker than named; \
                        \"available\": start, and say so in every receipt";
            reader.error_hint(&text.span, "not a way to hold limits", hint);
            false
        }
    }
}

fn env(reader: &mut Reader<'_>, section: &Section<'_>) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    let Some(section) = section.section(reader, "env") else { return env };
    for (name, _, span) in section.entries() {
        variables::check(reader, name, &span);
        if let Some(text) = section.string(reader, name) {
            if text.value.contains('\0') {
                reader.error(&text.span, "a variable cannot hold NUL");
            }
            env.insert(name.to_owned(), text.value);
        }
    }
    env
}
