//! Measures how many records of the audit are on disk a second: `bench_audit DIRECTORY`.
//!
//! One line of JSON, with the CPU time of a record. Called by `bench/egress.py`. One thread, as a
//! shard has; the audit's own thread comes beside it.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on should say so")]

use std::path::Path;

const TASKS: usize = 64;
const PAIRS: usize = 256 * 1024;

fn main() {
    let dir = std::env::args().nth(1).expect("bench_audit DIRECTORY");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let before = cpu_us();
    let spent = runtime.block_on(proxyd::measuring::audit(Path::new(&dir), TASKS, PAIRS)).unwrap();
    let records = (2 * PAIRS) as f64;
    let cpu = (cpu_us() - before) / records;
    println!("{{\"rate\":{:.0},\"cpu_us\":{cpu:.3}}}", records / spent.as_secs_f64());
}

/// User and system time of this process, of all its threads (proc_pid_stat(5), fields 14 and 15).
fn cpu_us() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let rest = stat.rsplit_once(") ").unwrap().1;
    let ticks = rest.split(' ').skip(11).take(2).map(|field| field.parse::<f64>().unwrap());
    ticks.sum::<f64>() * 10_000.0
}
