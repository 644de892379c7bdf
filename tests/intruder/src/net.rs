//! Sockets of the usual kinds: clients, small servers, questions about names.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket,
};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use crate::sys;

/// Longest wait for a connection, and for the next bytes of one.
const CONNECT: Duration = Duration::from_secs(30);
const READ: Duration = Duration::from_secs(50);
/// A refusal comes at once; this is for a loaded machine.
const DATAGRAM: Duration = Duration::from_secs(20);

/// Connects to the first address that takes it.
pub fn connect(host: &str, port: u16) -> Result<TcpStream> {
    let mut outcome = Err(Error::other(format!("{host} has no address")));
    for address in (host, port).to_socket_addrs()? {
        outcome = TcpStream::connect_timeout(&address, CONNECT);
        if outcome.is_ok() {
            break;
        }
    }
    let stream = outcome.map_err(|e| Error::new(e.kind(), format!("{host}:{port}: {e}")))?;
    stream.set_read_timeout(Some(READ))?;
    Ok(stream)
}

/// Answers every request on the loopback address.
pub fn serve(port: u16) -> Result<()> {
    for stream in TcpListener::bind((Ipv4Addr::LOCALHOST, port))?.incoming() {
        let mut stream = stream?;
        stream.set_read_timeout(Some(READ))?;
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
            head.push(byte[0]);
        }
        // A client that is gone is not our trouble.
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    }
    Ok(())
}

/// Listens under a name and on a port and never accepts.
pub fn hold(name: &str, port: u16) -> Result<()> {
    let name = name.trim_start_matches('@');
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    let _name = UnixListener::bind_addr(&address)?;
    let _port = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    loop {
        std::thread::park();
    }
}

pub fn loopback(port: u16) -> Result<()> {
    for host in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        let listener = TcpListener::bind((host, port))?;
        let mut client = TcpStream::connect((host, port))?;
        let (mut server, peer) = listener.accept()?;
        server.write_all(b"inside")?;
        drop(server);
        let mut said = String::new();
        client.read_to_string(&mut said)?;
        println!("{said} {}", peer.ip());
    }
    Ok(())
}

pub fn datagram(address: &str) -> Result<()> {
    let address: SocketAddr = address.parse().map_err(Error::other)?;
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(DATAGRAM))?;
    socket.connect(address)?;
    socket.send(b"x")?;
    match socket.recv(&mut [0]) {
        Ok(_) => println!("answered"),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => println!("refused"),
        Err(error) => println!("{error}"),
    }
    Ok(())
}

/// By the C library's two functions, and by questions of our own over UDP and TCP, as programs
/// with a resolver of their own ask.
pub fn resolve(name: &str) -> Result<()> {
    let found = (name, 443).to_socket_addrs()?.find(SocketAddr::is_ipv4);
    println!("{}", found.ok_or_else(|| Error::other("no IPv4 address"))?.ip());
    println!("{}", sys::gethostbyname(name)?);
    let configured = std::fs::read_to_string("/etc/resolv.conf")?;
    let resolver = configured.lines().find_map(|line| line.strip_prefix("nameserver "));
    let resolver = resolver.ok_or_else(|| Error::other("no nameserver in resolv.conf"))?;
    let resolver: SocketAddr = (resolver.parse::<IpAddr>().map_err(Error::other)?, 53).into();

    let question = question(name);
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(DATAGRAM))?;
    socket.send_to(&question, resolver)?;
    let mut answer = vec![0; 1500];
    let length = socket.recv(&mut answer)?;
    println!("{}", last_address(&answer[..length])?);

    let mut stream = TcpStream::connect_timeout(&resolver, CONNECT)?;
    stream.set_read_timeout(Some(READ))?;
    let length = u16::try_from(question.len()).map_err(Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], &question].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer)?;
    println!("{}", last_address(&answer)?);
    Ok(())
}

/// Asks for the IPv4 addresses of a name (RFC 1035 section 4.1).
fn question(name: &str) -> Vec<u8> {
    let mut message = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        message.extend([u8::try_from(label.len()).unwrap_or(u8::MAX)]);
        message.extend(label.as_bytes());
    }
    message.extend([0, 0, 1, 0, 1]);
    message
}

/// The address that ends the answer's first record, which follows the repeated question.
fn last_address(message: &[u8]) -> Result<Ipv4Addr> {
    let asked = message.iter().skip(12).position(|byte| *byte == 0).unwrap_or_default();
    // The end of the name and its type and class, then a record: a name that points back, type,
    // class, time to live, length, address.
    let record = message.get(12 + asked + 5..).unwrap_or_default();
    match record {
        [0xc0, 12, 0, 1, 0, 1, _, _, _, _, 0, 4, a, b, c, d, ..] => {
            Ok(Ipv4Addr::new(*a, *b, *c, *d))
        }
        _ => Err(Error::other(format!("an answer of another shape: {message:?}"))),
    }
}

pub fn unix(paths: &[&str]) -> Result<()> {
    let variables = ["SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS"];
    let named: Vec<String> = variables.iter().filter_map(|n| std::env::var(n).ok()).collect();
    for path in paths.iter().copied().chain(named.iter().map(String::as_str)) {
        for kind in [libc::SOCK_STREAM, libc::SOCK_SEQPACKET, libc::SOCK_DGRAM] {
            if sys::connect_unix(path, kind).is_ok() {
                println!("REACHED {path}");
            }
        }
    }
    println!("done");
    Ok(())
}
