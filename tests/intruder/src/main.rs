//! What a hostile or merely odd program in a sandbox would do, as one program that says on plain
//! lines what happened. It judges nothing: the tests do.
//!
//! ```text
//! talk FILE               connections and bytes as the file says, see talk.rs
//! certificate HOST [SNI]  the certificate that HOST:443 shows, in hex
//! flood COUNT             connections with random bytes, see flood.rs
//! serve PORT              HTTP on the loopback address, until it is ended
//! hold NAME PORT          listens on @NAME and on the loopback address, until it is ended
//! loopback PORT           connects to itself over both loopback addresses
//! datagram ADDRESS        one datagram and what becomes of it
//! resolve NAME            its IPv4 address, asked for in every way that there is
//! unix PATH...            connects to each as stream, packets and datagrams; @NAME is abstract
//! unix-serve PATH         tells who connects its uid, until it is ended
//! unix-full PATH          listens, has one connection wait and never accepts
//! unix-ask PATH...        connects to each and says what it is told
//! unix-crowd PATH COUNT   connects so often at once to a listener of its own with no room
//! unix-swap OWN OTHER     changes address and socket while connecting
//! signal FROM..TO...      signals each process and group
//! socket F,K,P...         makes a socket of each family, kind and protocol
//! calls                   entries to the kernel that a filter should close
//! privileged              what needs a capability or makes a namespace
//! works                   what programs of every kind need
//! enter ENTRY CALL ARG... a system call through another entry: native, i386, x32
//! create FILE MODE        makes a file with that mode
//! new-session PROGRAM...  runs it as the leader of a session of its own
//! without-namespaces PROGRAM...          (outside) where no user namespace can be made
//! small-disk MEGABYTES PATH PROGRAM...   (outside) with so much space there; run twice
//! die-with-parent PROGRAM...             (outside)
//! ```

mod calls;
mod flood;
mod net;
mod sys;
mod talk;
mod tls;
mod unix;

use std::io::Result;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<()> {
    match *words {
        ["talk", file] => talk::talk(&std::fs::read_to_string(file)?),
        ["certificate", host] => tls::certificate(host, host),
        ["certificate", host, sni] => tls::certificate(host, sni),
        ["flood", count] => flood::flood(number(count)?),
        ["serve", port] => net::serve(number(port)?),
        ["hold", name, port] => net::hold(name, number(port)?),
        ["loopback", port] => net::loopback(number(port)?),
        ["datagram", address] => net::datagram(address),
        ["resolve", name] => net::resolve(name),
        ["unix", ref paths @ ..] => net::unix(paths),
        ["unix-serve", path] => unix::serve(path),
        ["unix-full", path] => unix::fill(path),
        ["unix-ask", ref paths @ ..] => unix::ask(paths),
        ["unix-crowd", path, count] => unix::crowd(path, number(count)?),
        ["unix-swap", own, other] => unix::swap(own, other),
        ["signal", ref ranges @ ..] => calls::signal(ranges),
        ["socket", ref triples @ ..] => calls::sockets(triples),
        ["calls"] => calls::show(&sys::attempts::filtered()),
        ["privileged"] => calls::show(&sys::attempts::privileged()),
        ["works"] => calls::works(),
        ["enter", entry, ref numbers @ ..] => calls::enter(entry, numbers),
        ["create", file, mode] => {
            let mode = u32::from_str_radix(mode, 8).map_err(std::io::Error::other)?;
            std::fs::File::options().write(true).create_new(true).mode(mode).open(file).map(drop)
        }
        ["new-session", ref program @ ..] => {
            sys::new_session()?;
            become_program(program)
        }
        ["without-namespaces", ref program @ ..] => {
            sys::apart::become_root_of_own_namespace(0)?;
            std::fs::write("/proc/sys/user/max_user_namespaces", "0")?;
            become_program(program)
        }
        ["small-disk", megabytes, path, ref program @ ..] => {
            sys::apart::become_root_of_own_namespace(libc::CLONE_NEWNS)?;
            sys::apart::mount_small_disk(path, number(megabytes)?)?;
            for _ in 0..2 {
                let own = std::env::current_exe()?;
                Command::new(own).arg("die-with-parent").args(program).status()?;
            }
            Ok(())
        }
        ["die-with-parent", ref program @ ..] => {
            sys::apart::die_with_parent()?;
            become_program(program)
        }
        _ => Err(std::io::Error::other(format!("no such thing to do: {words:?}"))),
    }
}

/// Gives way to another program; comes back only when that fails.
fn become_program(program: &[&str]) -> Result<()> {
    let [name, arguments @ ..] = program else {
        return Err(std::io::Error::other("no program is named"));
    };
    Err(Command::new(name).args(arguments).exec())
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| std::io::Error::other(format!("{text:?} is not a number")))
}
