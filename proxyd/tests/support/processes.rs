//! Processes of a proxyd, as the kernel shows them.

/// A file about a process; none where there is no such process.
pub fn proc(pid: u32, file: &str) -> Option<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/{file}")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Those that a process has started.
pub fn children(parent: u32) -> Vec<u32> {
    let of_parent = |pid: &u32| {
        let line = format!("PPid:\t{parent}");
        proc(*pid, "status").is_some_and(|status| status.lines().any(|found| found == line))
    };
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(of_parent).collect()
}
