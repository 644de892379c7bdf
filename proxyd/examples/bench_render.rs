//! Measures what it takes to have a credential rendered by the vault's process: `bench_render
//! DIRECTORY`.
//!
//! One line of JSON: a rendering and, as its measure, a round trip of as many bytes over a socket
//! of the same kind to another process, in turn; and the CPU time of a rendering in both processes.
//! Called by `bench/egress.py`. Each rendering is for another host, since what was rendered for one
//! serves its requests for some seconds.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on should say so")]

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const ROUNDS: usize = 20;
const EACH: usize = 1000;
/// About what a question of the vault's and its answer are long.
const TRIP_BYTES: usize = 256;
const POLICY: &str = r#"
[[egress.allow]]
hosts = ["*.bench.example"]
methods = ["GET"]
credential = "bench"
[credentials.bench]
secret = "local:bench"
inject = { bearer = true }
hosts = ["*.bench.example"]
"#;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match args[0].to_str() {
        Some("echo") => echo(),
        Some(role) if role.starts_with("vault") => return proxyd::main(&[], args),
        _ => measure(Path::new(&args[0])),
    }
    ExitCode::SUCCESS
}

/// The other end of a round trip.
fn echo() {
    let mut socket = UnixStream::from(ipc::daemon::inherited_fd(0).unwrap());
    let mut bytes = [0; TRIP_BYTES];
    while socket.read_exact(&mut bytes).is_ok() && socket.write_all(&bytes).is_ok() {}
}

fn measure(dir: &Path) {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir.join("policies")).unwrap();
    for (name, text) in [("policies/bench.toml", POLICY), ("proxyd.toml", "")] {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create(true).mode(0o600).open(dir.join(name)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }
    let place = |flag: &str, name: &str| [flag.into(), dir.join(name).into_os_string()];
    let arguments = [
        place("--config", "proxyd.toml"),
        place("--runtime-dir", "run"),
        place("--state-dir", "state"),
        place("--policies-dir", "policies"),
    ];
    let rendering = proxyd::measuring::Rendering::start(arguments.concat()).unwrap();
    let (mut near, far) = UnixStream::pair().unwrap();
    let mut other = Command::new("/proc/self/exe");
    let mut other = other.arg("echo").stdin(Stdio::from(OwnedFd::from(far))).spawn().unwrap();

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (mut renders, mut trips, mut cpu) = (Vec::new(), Vec::new(), 0.0);
    runtime.block_on(async {
        rendering.fill("SECRET-CANARY-bench-0123456789").await.unwrap();
        for round in 0..ROUNDS {
            let name = |number: usize| format!("h{}.bench.example", round * EACH + number);
            let hosts: Vec<String> = (0..EACH).map(name).collect();
            let both = || cpu_us("self") + cpu_us(&rendering.pid.to_string());
            let before = both();
            renders.push(rendering.render(&hosts).await.unwrap());
            cpu += both() - before;
            trips.push(round_trips(&mut near));
        }
    });
    drop(near);
    other.wait().unwrap();
    println!(
        "{{\"render_us\":{:.2},\"trip_us\":{:.2},\"cpu_us\":{:.2}}}",
        median_us(renders),
        median_us(trips),
        cpu / (ROUNDS * EACH) as f64
    );
}

fn round_trips(socket: &mut UnixStream) -> Duration {
    let mut bytes = [0; TRIP_BYTES];
    let begun = Instant::now();
    for _ in 0..EACH {
        socket.write_all(&bytes).unwrap();
        socket.read_exact(&mut bytes).unwrap();
    }
    begun.elapsed()
}

/// Of one of them.
fn median_us(mut rounds: Vec<Duration>) -> f64 {
    rounds.sort();
    rounds[rounds.len() / 2].as_secs_f64() * 1e6 / EACH as f64
}

/// User and system time of a process, of all its threads (proc_pid_stat(5), fields 14 and 15).
fn cpu_us(process: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let rest = stat.rsplit_once(") ").unwrap().1;
    let ticks = rest.split(' ').skip(11).take(2).map(|field| field.parse::<f64>().unwrap());
    ticks.sum::<f64>() * 10_000.0
}
