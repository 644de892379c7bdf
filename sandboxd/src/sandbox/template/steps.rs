//! The commands that fill a layer, in order: apt, pip, npm, cargo, then the policy's own.
//!
//! They run as every command does, under the same confinement; only the directories that layers may
//! add to can be written. What they print is kept as far as a failure needs it.

use std::os::fd::AsFd;
use std::time::Duration;

use ipc::fault::{Code, Fault};
use ipc::id::CallId;
use policies::SandboxTable;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::time::Instant;

use crate::cell::{CellCommand, CellError, ExitOf};
use crate::plan::WORKSPACE;
use crate::pool::{Ready, Shape};
use crate::templates::Building;

/// Of what a step printed, the end is shown of one that failed.
const SHOWN_BYTES_MAX: usize = 8 * 1024;
const SHOWN_LINES_MAX: usize = 30;

/// One command of a build.
#[derive(Debug)]
pub struct Step {
    /// What it does, for people.
    pub what: String,
    argv: Vec<String>,
}

/// The steps of a table.
pub fn of(table: &SandboxTable) -> Vec<Step> {
    let packages = &table.packages;
    let mut steps = Vec::new();
    let mut add = |what: String, argv: &[&str], names: &[String]| {
        let argv = argv.iter().map(|arg| (*arg).to_owned()).chain(names.iter().cloned());
        steps.push(Step { what, argv: argv.collect() });
    };
    if !packages.apt.is_empty() {
        add(named("apt", &packages.apt), &["/bin/sh", "-c", APT, "apt"], &packages.apt);
    }
    if !packages.pip.is_empty() {
        let pip = ["python3", "-m", "pip", "install", "--ignore-installed", "--no-input"];
        add(named("pip", &packages.pip), &[&pip[..], &["--"]].concat(), &packages.pip);
    }
    if !packages.npm.is_empty() {
        let npm = ["npm", "install", "--global", "--prefix", "/usr/local", "--no-fund"];
        let argv = [&npm[..], &["--no-audit", "--loglevel=error", "--"]].concat();
        add(named("npm", &packages.npm), &argv, &packages.npm);
    }
    // One by one, so that a failure is about one.
    for name in &packages.cargo {
        let one = std::slice::from_ref(name);
        add(named("cargo", one), &["cargo", "install", "--root", "/usr/local", "--"], one);
    }
    for (at, command) in table.setup.iter().enumerate() {
        let what = format!("setup command {}: {}", at + 1, first_line(command));
        add(what, &["/bin/sh", "-ec"], std::slice::from_ref(command));
    }
    steps
}

/// Downloads what is asked for and what that needs beyond what the image has, and unpacks it. No
/// script of a package runs: that would take users and privileges that a sandbox has not.
const APT: &str = include_str!("apt.sh");

fn named(tool: &str, packages: &[String]) -> String {
    format!("{tool}: {}", packages.join(" "))
}

fn first_line(command: &str) -> String {
    command.lines().next().unwrap_or("").chars().take(120).collect()
}

/// Runs one step in the build's cell.
pub async fn run(
    ready: &Ready,
    step: &Step,
    shape: &Shape,
    building: &Building,
    call: &CallId,
) -> Result<(), Fault> {
    let begun = Instant::now();
    building.say(format!("{} ...", step.what));
    let timeout = shape.policy.sandbox.tool_timeout;
    let env = variables(&shape.plan.env, &ready.opened.env);
    let (exit, output) = match execute(ready, step, env, timeout).await {
        Ok(ended) => ended,
        Err(error) => return Err(not_run(step, &error)),
    };
    let seconds = begun.elapsed().as_secs_f32();
    let why = match exit {
        Some(ExitOf { code: Some(0), .. }) => {
            building.say(format!("{} done in {seconds:.1} s", step.what));
            return Ok(());
        }
        Some(ExitOf { signal: Some(signal), .. }) => format!("ended by signal {signal}"),
        Some(exit) => format!("ended with status {}", exit.code.unwrap_or(-1)),
        None => format!("was stopped after {} s (tool-timeout)", timeout.as_secs()),
    };
    let mut text = format!("{}: {why}", step.what);
    for line in ready.lease.refusals(call).await {
        text += &format!("\nproxyd refused: {line}");
    }
    text += &format!("\n{}", last_lines(&output));
    building.say(format!("{} {why}", step.what));
    Err(Fault::new(Code::Missing, text.trim_end().to_owned()).with_hint(
        "what builds may reach, and with which variables, is in the policy packages.toml",
    ))
}

fn not_run(step: &Step, error: &CellError) -> Fault {
    let tool = step.argv.first().map_or("", String::as_str);
    match error.not_runnable() {
        Some(127) => Fault::new(Code::Missing, format!("{}: the root has no {tool}", step.what))
            .with_hint("install it on the host, or use a root that has it"),
        _ => Fault::new(Code::Unavailable, format!("{}: {error}", step.what)),
    }
}

/// How it ended, if in time, and the end of what it printed.
async fn execute(
    ready: &Ready,
    step: &Step,
    env: Vec<(String, String)>,
    timeout: Duration,
) -> Result<(Option<ExitOf>, Vec<u8>), CellError> {
    let (read, write) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(std::io::Error::from)?;
    let command = CellCommand { argv: step.argv.clone(), env, cwd: WORKSPACE.to_owned() };
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    let null = rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty())
        .map_err(std::io::Error::from)?;
    let fds = [null.as_fd(), write.as_fd(), write.as_fd()];
    let running = ready.cell.spawn(&command, &fds).await?;
    drop(write);
    let mut output = pipe::Receiver::from_owned_fd(read)?;
    let mut kept = Vec::new();
    let mut buffer = vec![0u8; 64 * 1024];
    let ended = async {
        let mut open = true;
        loop {
            tokio::select! {
                read = output.read(&mut buffer), if open => match read {
                    Ok(0) | Err(_) => open = false,
                    Ok(read) => keep(&mut kept, &buffer[..read]),
                },
                exit = running.wait(), if !open => return exit,
                exit = running.wait() => {
                    // What it printed last may still be in the pipe. The runtime may not have heard
                    // of it, and would say that there is nothing.
                    while let Ok(read) = rustix::io::read(&output, &mut buffer[..])
                        && read > 0
                    {
                        keep(&mut kept, &buffer[..read]);
                    }
                    return exit;
                }
            }
        }
    };
    let ended = tokio::time::timeout(timeout, ended).await;
    // What it left in the background is no part of the next step.
    running.kill_tree().await?;
    Ok((ended.ok().transpose()?, kept))
}

fn keep(kept: &mut Vec<u8>, bytes: &[u8]) {
    kept.extend_from_slice(bytes);
    if kept.len() > 4 * SHOWN_BYTES_MAX {
        kept.drain(..kept.len() - SHOWN_BYTES_MAX);
    }
}

/// The end of an output as text for people: no control characters, no more than a screen.
fn last_lines(output: &[u8]) -> String {
    let end = &output[output.len().saturating_sub(SHOWN_BYTES_MAX)..];
    let text = String::from_utf8_lossy(end);
    let plain = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c };
    let lines: Vec<String> =
        text.trim_end().lines().map(|line| line.chars().map(plain).collect()).collect();
    lines[lines.len().saturating_sub(SHOWN_LINES_MAX)..].join("\n")
}

/// What the tools are told beside their own variables: caches on the disk, questions never.
fn variables(plan: &[(String, String)], lease: &[(String, String)]) -> Vec<(String, String)> {
    let ours = [
        ("TMPDIR", WORKSPACE),
        ("XDG_CACHE_HOME", "/workspace/cache"),
        ("CARGO_HOME", "/workspace/cargo"),
        ("CARGO_TARGET_DIR", "/workspace/target"),
        ("npm_config_cache", "/workspace/npm"),
        ("npm_config_update_notifier", "false"),
        ("PIP_NO_CACHE_DIR", "1"),
        ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
        // The root's own packages are its distribution's; these go beside them.
        ("PIP_BREAK_SYSTEM_PACKAGES", "1"),
        ("PIP_USER", "0"),
        ("DEBIAN_FRONTEND", "noninteractive"),
    ];
    // TMPDIR is ours in every plan.
    let given = plan.iter().filter(|(name, _)| name != "TMPDIR");
    let ours = ours.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let mut merged: Vec<(String, String)> = Vec::new();
    let all = ours.chain(crate::trust::variables()).chain(given.cloned());
    for (name, value) in all.chain(lease.iter().cloned()) {
        merged.retain(|(known, _)| *known != name);
        merged.push((name, value));
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_output_is_shown_without_control_characters() {
        let long: String = (0..100).map(|n| format!("line {n}\n")).collect();

        let shown = last_lines(format!("{long}\x1b[31mred\r\n\n").as_bytes());

        assert!(shown.starts_with("line 71\n"), "{shown}");
        assert!(shown.ends_with("\u{fffd}[31mred"), "{shown:?}");
    }

    #[test]
    fn variables_of_the_policy_stand_over_ours_and_the_leases_over_both() {
        let of = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
        let plan = [of("CARGO_HOME", "/mirror"), of("TMPDIR", "/tmp"), of("X", "1")].concat();

        let merged = variables(&plan, &of("X", "2"));

        let value = |name: &str| {
            let found: Vec<_> = merged.iter().filter(|(known, _)| known == name).collect();
            assert_eq!(found.len(), 1, "{name}");
            found[0].1.as_str()
        };
        assert_eq!((value("CARGO_HOME"), value("TMPDIR"), value("X")), ("/mirror", WORKSPACE, "2"));
    }
}
