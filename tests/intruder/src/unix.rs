//! Unix sockets by path: the sandbox's own, and those that it should not reach.

use std::io::{Read, Result, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use crate::sys;

pub fn serve(path: &str) -> Result<()> {
    let listener = UnixListener::bind(path)?;
    println!("listening");
    for stream in listener.incoming() {
        let mut stream = stream?;
        let uid = sys::peer_uid(&stream)?;
        // A client that is gone is not our trouble.
        let _ = write!(stream, "uid {uid}");
    }
    Ok(())
}

/// Never accepts; one more connection may wait.
pub fn fill(path: &str) -> Result<()> {
    let listener = UnixListener::bind(path)?;
    sys::set_backlog(&listener, 0)?;
    let _waits = UnixStream::connect(path)?;
    println!("full");
    loop {
        std::thread::park();
    }
}

pub fn ask(paths: &[&str]) -> Result<()> {
    for path in paths {
        let mut said = String::new();
        let asked = UnixStream::connect(path).and_then(|mut to| to.read_to_string(&mut said));
        match asked {
            Ok(_) => println!("{said}"),
            Err(error) => println!("{}", error.kind()),
        }
    }
    Ok(())
}

/// Ends the program, whatever its other threads wait for.
fn give_up(what: &str, error: &std::io::Error) -> ! {
    println!("{what}: {error}");
    std::process::exit(1)
}

pub fn crowd(path: &str, count: usize) -> Result<()> {
    let listener = UnixListener::bind(path)?;
    sys::set_backlog(&listener, 0)?;
    let client = || {
        let mut said = String::new();
        let heard = UnixStream::connect(path).and_then(|mut s| s.read_to_string(&mut said));
        if let Err(error) = heard {
            give_up("a connection failed", &error);
        }
        said == "answer"
    };
    let answered = std::thread::scope(|scope| -> Result<usize> {
        let mut clients = Vec::new();
        for _ in 0..count {
            match std::thread::Builder::new().spawn_scoped(scope, client) {
                Ok(made) => clients.push(made),
                Err(error) => give_up("no thread for a client", &error),
            }
        }
        for _ in 0..count {
            listener.accept()?.0.write_all(b"answer")?;
        }
        Ok(clients.into_iter().filter_map(|client| client.join().ok()).filter(|said| *said).count())
    })?;
    println!("{answered} answered");
    Ok(())
}

pub fn swap(own: &str, other: &str) -> Result<()> {
    let listener = UnixListener::bind(own)?;
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            drop(stream);
        }
    });
    let connected = sys::swap::connect_while_swapping(own, other, 20_000)?;
    println!("{}", if connected > 0 { "connected" } else { "never connected" });
    Ok(())
}
