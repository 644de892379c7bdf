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

pub fn crowd(path: &str, count: usize) -> Result<()> {
    let listener = UnixListener::bind(path)?;
    sys::set_backlog(&listener, 0)?;
    let client = || -> Result<String> {
        let mut said = String::new();
        UnixStream::connect(path)?.read_to_string(&mut said)?;
        Ok(said)
    };
    let answered = std::thread::scope(|scope| -> Result<usize> {
        let clients: Vec<_> = (0..count).map(|_| scope.spawn(client)).collect();
        for _ in 0..count {
            listener.accept()?.0.write_all(b"answer")?;
        }
        let heard = clients.into_iter().map(std::thread::ScopedJoinHandle::join);
        Ok(heard.filter(|said| matches!(said, Ok(Ok(said)) if said == "answer")).count())
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
