//! What confines the vault's workers: the one that talks over the network, the one that runs
//! commands.

use std::io;

use rustix::process::Signal;

use super::{calls, programs};

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

/// It opens connections over IP and does nothing else that reaches beyond it: no program is
/// started, no connection taken, no other process looked into, no namespace entered. What files it
/// may read is Landlock's part.
pub fn only_outwards() -> io::Result<()> {
    calls::network().load()
}

/// It starts commands, and they may do what ordinary programs do. They inherit this, and that no
/// program gives them privileges.
pub fn only_commands() -> io::Result<()> {
    programs::commands().load()
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
