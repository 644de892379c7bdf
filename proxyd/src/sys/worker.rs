//! What confines the vault's workers: the one that talks over the network, the one that runs
//! commands.

use std::io;

use rustix::process::Signal;
use seccompiler::{SeccompAction, SeccompFilter, TargetArch};

/// The calling process ends with the one that started it.
pub fn end_with_parent() -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)
}

/// Signals that tell the one that started this process to end mean nothing here: systemd sends
/// them to every process of a service, a terminal to every process of a group. It ends by the end
/// of its socket.
pub fn leave_ends_to_parent() -> io::Result<()> {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: `SIG_IGN` runs no code of this process, so there is nothing that a signal could
        // interrupt.
        if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// What neither worker has any use for: other processes' memory and descriptors, namespaces and
/// mounts, the kernel's own machinery.
const NEVER: &[i64] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_bpf,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_userfaultfd,
    libc::SYS_perf_event_open,
    libc::SYS_io_uring_setup,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_kexec_load,
];

/// What reaches beyond a process that only opens connections.
const NOT_OUTWARDS: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_kill,
    libc::SYS_tkill,
];

/// It opens connections and does nothing else that reaches beyond it: no program is started, no
/// connection taken, no other process looked into, no namespace entered. What files it may read is
/// Landlock's part.
pub fn only_outwards() -> io::Result<()> {
    refuse(NEVER.iter().chain(NOT_OUTWARDS))
}

/// It starts commands, and they may do what ordinary programs do. They inherit this, and that no
/// program gives them privileges.
pub fn only_commands() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    refuse(NEVER.iter())
}

fn refuse<'a>(calls: impl Iterator<Item = &'a i64>) -> io::Result<()> {
    let arch = if cfg!(target_arch = "x86_64") { TargetArch::x86_64 } else { TargetArch::aarch64 };
    let rules = calls.map(|call| (*call, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch);
    let program: seccompiler::BpfProgram =
        filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_dials_and_starts_nothing_and_takes_no_connection() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();

        // The filter holds for the thread, so the other tests stay free.
        let can = std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            only_outwards().unwrap();
            let own = rustix::process::getpid();
            [
                std::net::TcpStream::connect(address).is_ok(),
                std::net::TcpListener::bind("127.0.0.1:0").is_ok(),
                std::process::Command::new("/bin/true").status().is_ok(),
                rustix::process::test_kill_process(own).is_ok(),
            ]
        });

        assert_eq!(can.join().unwrap(), [true, false, false, false]);
    }
}
