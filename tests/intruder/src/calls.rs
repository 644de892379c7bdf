//! System calls: what became of each, by the name of its error.

use std::collections::BTreeSet;
use std::io::{Error, Result};

use crate::sys;

/// A call that was made: its name, and the error number it ended with, or none.
pub type Made = (&'static str, Option<i32>);

pub fn show(made: &[Made]) -> Result<()> {
    for (name, error) in made {
        println!("{name} {}", error.map_or("OPEN".to_owned(), error_name));
    }
    Ok(())
}

fn error_name(number: i32) -> String {
    match number {
        libc::EPERM => "EPERM".to_owned(),
        libc::EACCES => "EACCES".to_owned(),
        libc::ENOSYS => "ENOSYS".to_owned(),
        libc::ESRCH => "ESRCH".to_owned(),
        libc::EAFNOSUPPORT => "EAFNOSUPPORT".to_owned(),
        libc::EPROTONOSUPPORT => "EPROTONOSUPPORT".to_owned(),
        other => format!("error {other}"),
    }
}

/// Signals whatever has a number of the ranges; its own processes and everybody come last.
pub fn signal(ranges: &[&str]) -> Result<()> {
    let own: BTreeSet<i32> = std::fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    let own_group = -sys::process_group();
    for range in ranges {
        let (from, to) = range.split_once("..").unwrap_or((range, range));
        for pid in crate::number::<i32>(from)?..=crate::number::<i32>(to)? {
            let skipped = own.contains(&pid) && pid > 2 || pid == own_group;
            if !skipped && ![0, -1].contains(&pid) && sys::signal(pid, 0).is_ok() {
                println!("signalled {pid}");
            }
        }
    }
    sys::ignore_termination();
    // Everybody that there is; nobody outside may notice.
    let _ = sys::signal(-1, libc::SIGTERM);
    println!("done");
    Ok(())
}

pub fn sockets(triples: &[&str]) -> Result<()> {
    for triple in triples {
        let numbers = triple.split(',').map(crate::number).collect::<Result<Vec<i32>>>()?;
        let [family, kind, protocol] = numbers[..] else {
            return Err(Error::other(format!("{triple} is not three numbers")));
        };
        let outcome = sys::socket(family, kind, protocol);
        let shown = outcome.map_or_else(error_name, |_| "OPEN".to_owned());
        println!("{triple} {shown}");
    }
    Ok(())
}

pub fn enter(entry: &str, numbers: &[&str]) -> Result<()> {
    let numbers = numbers.iter().map(|n| crate::number(n)).collect::<Result<Vec<i64>>>()?;
    let at = |place: usize| numbers.get(place).copied().unwrap_or_default();
    println!("enters");
    let got = sys::enter::enter(entry, at(0), [at(1), at(2), at(3)]);
    println!("got {}", got.ok_or_else(|| Error::other(format!("no entry {entry}")))?);
    Ok(())
}

/// Threads, children by either way, memory and a semaphore that two processes share, a terminal.
pub fn works() -> Result<()> {
    let thread = std::thread::spawn(|| "thread").join();
    println!("{}", thread.map_err(|_| Error::other("the thread panicked"))?);
    let child = std::process::Command::new("echo").arg("child").output()?;
    print!("{}", String::from_utf8_lossy(&child.stdout));
    println!("shared {}", sys::works::add_in_child(&[1, 2])?);
    println!("terminal {}", sys::works::terminal()?);
    Ok(())
}
