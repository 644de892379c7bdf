//! `cleanhands doctor`: what this host offers, what runs, what is missing, and what to do.
//!
//! It only looks. Exit status 1 when something is bad; a warning is not.

mod in_force;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use ipc::http::Client;
use ipc::layout::Layout;
use serde::Serialize;

use crate::api::Harness;
use crate::args::Global;
use crate::daemons::{self, ALL, Alive, Daemon};
use crate::failure::Failure;
use crate::place;
use crate::policy;
use crate::secret;
use crate::term::{self, Style, printable};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Grade {
    Good,
    Warning,
    Bad,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    what: String,
    grade: Grade,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

impl Finding {
    fn new(what: &str, grade: Grade, text: impl Into<String>) -> Self {
        Self { what: what.into(), grade, text: text.into(), hint: None }
    }

    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Looks at everything and reports it.
pub async fn doctor(global: &Global) -> Result<ExitCode, Failure> {
    let layout = place::layout(global);
    let mut findings = host(Path::new("/proc"));
    findings.push(runtime_directory(&layout));
    findings.extend(state_directory(&layout));
    // One that does not answer is not asked again.
    let (mut serving, mut files) = (Vec::new(), Vec::new());
    for daemon in ALL {
        let alive = daemons::health(daemon, &layout).await;
        if let Ok(alive) = &alive {
            serving.push(daemon);
            files.push((daemon, alive.in_force.clone()));
        }
        findings.push(running(daemon, alive));
    }
    findings.extend(in_force::compare(&files));
    if serving.contains(&Daemon::Sandboxd) {
        findings.extend(sandbox_layers(&layout).await);
    }
    findings.extend(policies_and_secrets(&layout, &serving).await);
    print(global, &findings)?;
    let bad = findings.iter().any(|finding| finding.grade == Grade::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(global: &Global, findings: &[Finding]) -> Result<(), Failure> {
    if global.json {
        return findings.iter().try_for_each(term::json_line);
    }
    let style = Style::of_stdout();
    let width = findings.iter().map(|f| f.what.chars().count()).max().unwrap_or(0);
    for finding in findings {
        let mark = match finding.grade {
            Grade::Good => style.good("good"),
            Grade::Warning => style.warn("look"),
            Grade::Bad => style.bad("bad "),
        };
        let below = format!("\n      {:width$}  ", "");
        let text = printable(&finding.text).replace('\n', &below);
        term::line(&format!("{mark}  {:width$}  {text}", finding.what))?;
        for line in finding.hint.iter().flat_map(|hint| hint.lines()) {
            term::line(&format!("      {:width$}  {}", "", style.dim(&printable(line))))?;
        }
    }
    Ok(())
}

/// What the kernel says, without trying anything: sandboxd tries, when it starts.
fn host(proc: &Path) -> Vec<Finding> {
    let read = |name: &str| std::fs::read_to_string(proc.join(name)).unwrap_or_default();
    let kernel = read("sys/kernel/osrelease");
    let mut findings = vec![Finding::new("kernel", Grade::Good, kernel.trim())];
    findings.push(user_namespaces(&read));
    let status = read("self/status");
    findings.push(if status.lines().any(|line| line.starts_with("Seccomp_filters:")) {
        Finding::new("seccomp", Grade::Good, "filters available")
    } else {
        Finding::new("seccomp", Grade::Bad, "the kernel has no seccomp filters")
            .hint("a kernel with CONFIG_SECCOMP_FILTER is needed")
    });
    findings
}

fn user_namespaces(read: &impl Fn(&str) -> String) -> Finding {
    let number = |name: &str| read(name).trim().parse::<u64>().ok();
    let what = "user namespaces";
    if number("sys/user/max_user_namespaces") == Some(0) {
        return Finding::new(what, Grade::Bad, "switched off: user.max_user_namespaces is 0")
            .hint("sudo sysctl -w user.max_user_namespaces=15000");
    }
    if number("sys/kernel/unprivileged_userns_clone") == Some(0) {
        let text = "for root alone: kernel.unprivileged_userns_clone is 0";
        return Finding::new(what, Grade::Bad, text)
            .hint("sudo sysctl -w kernel.unprivileged_userns_clone=1");
    }
    if number("sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
        let text = "restricted: kernel.apparmor_restrict_unprivileged_userns is 1";
        return Finding::new(what, Grade::Warning, text)
            .hint("sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0");
    }
    Finding::new(what, Grade::Good, "allowed")
}

fn runtime_directory(layout: &Layout) -> Finding {
    use std::os::unix::fs::MetadataExt;
    let what = "sockets";
    let path = layout.runtime.display();
    match std::fs::metadata(&layout.runtime) {
        Err(error) => Finding::new(what, Grade::Bad, format!("{path}: {error}"))
            .hint("`cleanhands up` makes it; --runtime-dir names another"),
        Ok(meta) => {
            let text = format!("{path}, mode {:03o}, owner {}", meta.mode() & 0o777, meta.uid());
            Finding::new(what, Grade::Good, text)
        }
    }
}

/// Room below which a daemon may soon be unable to write its log.
const FREE_BYTES_MIN: u64 = 256 * 1024 * 1024;

/// Whether the daemons can go on writing. None where their state is not the caller's to see.
fn state_directory(layout: &Layout) -> Option<Finding> {
    let what = "state";
    let place = layout.state.display();
    let stat = rustix::fs::statvfs(&layout.state).ok()?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
        let finding =
            Finding::new(what, Grade::Bad, format!("{place}: the file system is read-only"));
        return Some(finding.hint("mount it read-write, or name another with --state-dir"));
    }
    let text = format!("{place}, {} MiB free", free / (1024 * 1024));
    if free < FREE_BYTES_MIN {
        let hint = "free some space: a daemon that cannot write its log lets nothing happen";
        return Some(Finding::new(what, Grade::Bad, text).hint(hint));
    }
    Some(Finding::new(what, Grade::Good, text))
}

fn running(daemon: Daemon, alive: Result<Alive, Failure>) -> Finding {
    match alive {
        Ok(alive) if alive.version == env!("CARGO_PKG_VERSION") => Finding::new(
            daemon.name(),
            Grade::Good,
            format!("serves, version {}, process {}", alive.version, alive.pid),
        ),
        Ok(alive) => {
            let own = env!("CARGO_PKG_VERSION");
            let text = format!("serves, version {}; this command is {own}", alive.version);
            Finding::new(daemon.name(), Grade::Warning, text).hint("restart the daemons")
        }
        Err(failure) => {
            let start = "`cleanhands up` starts it; under systemd: systemctl status cleanhands-*";
            // Who may not connect is told of that, and not how to start what runs.
            let hint = failure.hint.filter(|hint| !hint.contains("running?"));
            let hint = hint.unwrap_or_else(|| start.to_owned());
            Finding::new(daemon.name(), Grade::Bad, failure.text).hint(hint)
        }
    }
}

async fn sandbox_layers(layout: &Layout) -> Vec<Finding> {
    let sandboxd = Client::new(layout.sandboxd());
    let Ok(health) = sandboxd.get::<ipc::sandbox::Health>("/v1/health").await else {
        return Vec::new();
    };
    let layers = health.layers.iter();
    let mut findings: Vec<Finding> =
        layers.map(|l| Finding::new(&l.name, Grade::Good, l.detail.as_str())).collect();
    let notes = health.notes.into_iter();
    findings.extend(notes.map(|note| Finding::new("weaker here", Grade::Warning, note)));
    findings
}

async fn policies_and_secrets(layout: &Layout, serving: &[Daemon]) -> Vec<Finding> {
    let proxyd = Client::new(layout.proxyd());
    let vault = match serving.contains(&Daemon::Proxyd) {
        true => proxyd.get::<ipc::vault::Health>("/v1/health").await.ok(),
        false => None,
    };
    // Where the daemons read them, if that is said; else where they would.
    let said = vault.as_ref().and_then(|vault| vault.policies.clone());
    let directory = said.unwrap_or_else(|| layout.policies.clone());
    let former = vault.as_ref().and_then(not_in_force);
    let set = match policy::load(&directory) {
        Ok(set) => set,
        Err(failure) => {
            // The daemons may have been started elsewhere, with policies that are not ours to see.
            let grade = if directory.is_dir() { Grade::Bad } else { Grade::Warning };
            let finding = Finding::new("policies", grade, failure.text);
            let finding = match failure.hint {
                Some(hint) => finding.hint(hint),
                None => finding,
            };
            return [finding].into_iter().chain(former).collect();
        }
    };
    let names: Vec<&str> = set.names().collect();
    let place = directory.display();
    let mut findings =
        vec![Finding::new("policies", Grade::Good, format!("{place}: {}", names.join(", ")))];
    findings.extend(former);
    if serving.contains(&Daemon::Harnessd) {
        findings.extend(default_environment(layout, &names).await);
    }
    let Some(vault) = vault else { return findings };
    let Ok(stored) = secret::names(&proxyd).await else {
        return findings;
    };
    let own = stored.iter().filter(|secret| secret.version > 0).count();
    let text = format!("{own} secrets, key from {}", vault.key_source);
    findings.push(Finding::new("vault", Grade::Good, text));
    for policy in names.iter().filter_map(|name| set.environment(name)) {
        // What lies elsewhere is not the vault's to know.
        let local = policy.credentials.values().map(|credential| &credential.secret);
        let local = local.filter(|secret| secret.backend == policies::Backend::Local);
        for path in local.map(|secret| &secret.path).collect::<BTreeSet<_>>() {
            if stored.iter().any(|secret| secret.name == *path) {
                continue;
            }
            let text = format!("{} names {path}, which is not in the vault", policy.name);
            findings.push(
                Finding::new("secret", Grade::Warning, text)
                    .hint(format!("cleanhands secret set {path}")),
            );
        }
    }
    findings
}

/// Files that proxyd read again and could not put in force: a former state of them rules.
fn not_in_force(proxyd: &ipc::vault::Health) -> Option<Finding> {
    let problem = proxyd.problem.as_ref()?;
    let text = format!("proxyd goes by generation {}, since\n{problem}", proxyd.generation);
    let hint = "mend the file; policies are read again by themselves, proxyd.toml on SIGHUP";
    Some(Finding::new("in force", Grade::Bad, text).hint(hint))
}

/// API environments that name no policy are ruled by this one.
async fn default_environment(layout: &Layout, names: &[&str]) -> Option<Finding> {
    let harness = Harness::new(Client::new(layout.harnessd()));
    let name = harness.health().await.ok()?.default_environment;
    if names.contains(&name.as_str()) {
        return None;
    }
    let text = format!("harnessd's default is {name}, which has no policy file");
    let hint = "set default-environment in harnessd.toml to one that is there";
    Some(Finding::new("environment", Grade::Warning, text).hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_command_that_enables_user_namespaces_is_named() {
        let cases = [
            ("sys/user/max_user_namespaces", "0\n", "user.max_user_namespaces=15000"),
            ("sys/kernel/unprivileged_userns_clone", "0\n", "unprivileged_userns_clone=1"),
            ("sys/kernel/apparmor_restrict_unprivileged_userns", "1\n", "_userns=0"),
        ];

        for (file, content, command) in cases {
            let finding = user_namespaces(&|name| {
                if name == file { content.to_owned() } else { String::new() }
            });
            assert_ne!(finding.grade, Grade::Good, "{file}");
            assert!(finding.hint.unwrap().ends_with(command), "{file}");
        }
        assert_eq!(user_namespaces(&|_| "15000".into()).grade, Grade::Good);
    }
}
