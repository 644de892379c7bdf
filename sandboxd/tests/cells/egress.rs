//! The only way out: what arrives on the sockets that a cell hands over.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use ipc::lease::Descriptor;
use sandboxd::cell::Cell;

use super::support::{DEADLINE, Place, bash, run, start, within};

fn socket(cell: &Cell, kind: Descriptor) -> OwnedFd {
    let found = cell.egress().iter().find(|(descriptor, _)| *descriptor == kind);
    found.unwrap().1.try_clone().unwrap()
}

/// The address a connection of `script`'s was meant for, as the listener outside sees it.
async fn asked_for(cell: &Cell, script: &str) -> SocketAddr {
    let listener = TcpListener::from(socket(cell, Descriptor::Tcp));
    let (running, pipe) = start(cell, &bash(script)).await;
    let accepting = tokio::task::spawn_blocking(move || {
        let (mut connection, _) = listener.accept().unwrap();
        connection.set_read_timeout(Some(DEADLINE)).unwrap();
        connection.write_all(b"hello from outside\n").unwrap();
        connection.local_addr().unwrap()
    });
    let address = within(accepting).await.unwrap();
    let mut said = String::new();
    std::fs::File::from(pipe).read_to_string(&mut said).unwrap();
    assert_eq!(said, "hello from outside\n");
    assert_eq!(within(running.wait()).await.unwrap().code, Some(0));
    match address {
        SocketAddr::V6(v6) => SocketAddr::new(v6.ip().to_canonical(), v6.port()),
        v4 => v4,
    }
}

#[tokio::test]
async fn every_tcp_connection_arrives_with_the_address_it_asked_for() {
    let place = Place::new();
    let cell = place.cell().await;

    for address in [
        "1.2.3.4:443",
        "10.0.0.1:5432",
        "169.254.169.254:80",
        "198.18.0.7:22",
        "[2001:db8::1]:8080",
    ] {
        let (host, port) = address.rsplit_once(':').unwrap();
        let host = host.trim_matches(['[', ']']);
        let script = format!("exec 5<>/dev/tcp/{host}/{port}; read -r line <&5; echo $line");

        let seen = asked_for(&cell, &script).await;

        assert_eq!(seen, address.parse().unwrap());
    }
}

#[tokio::test]
async fn localhost_stays_inside() {
    let place = Place::new();
    let cell = place.cell().await;

    let ran = run(&cell, "./intruder loopback 8000").await;

    assert_eq!(ran.output, "inside 127.0.0.1\ninside ::1");
    let listener = TcpListener::from(socket(&cell, Descriptor::Tcp));
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[tokio::test]
async fn a_local_port_without_a_server_is_refused_at_once() {
    let place = Place::new();
    let cell = place.cell().await;

    let ran = run(&cell, "echo x >/dev/tcp/127.0.0.1/9").await;

    assert!(ran.output.contains("Connection refused"), "{}", ran.output);
}

#[tokio::test]
async fn a_dns_question_to_any_resolver_reaches_the_dns_socket_and_is_answered_from_there() {
    let place = Place::new();
    let cell = place.cell().await;
    let dns = UdpSocket::from(socket(&cell, Descriptor::DnsUdp));
    dns.set_read_timeout(Some(DEADLINE)).unwrap();

    for resolver in ["192.0.2.53", "8.8.8.8", "127.0.0.1"] {
        let script = format!("printf question >/dev/udp/{resolver}/53");
        assert_eq!(run(&cell, &script).await.exit.code, Some(0));

        let mut question = [0u8; 64];
        let (length, _) = dns.recv_from(&mut question).unwrap();
        assert_eq!(&question[..length], b"question", "{resolver}");
    }
    assert_eq!(
        run(&cell, "grep ^nameserver /etc/resolv.conf").await.output,
        "nameserver 192.0.2.53"
    );
}

#[tokio::test]
async fn other_datagrams_are_refused() {
    let place = Place::new();
    let cell = place.cell().await;

    for address in ["1.2.3.4:443", "[2001:db8::1]:123"] {
        let script = format!("./intruder datagram {address}");
        assert_eq!(run(&cell, &script).await.output, "refused", "{address}");
    }
}

#[tokio::test]
async fn connections_wait_while_nobody_accepts() {
    let place = Place::new();
    let cell = place.cell().await;
    let script = "exec 5<>/dev/tcp/1.2.3.4/443; echo asked >&5; read -r line <&5; echo $line";

    let (running, pipe) = start(&cell, &bash(script)).await;
    let listener = TcpListener::from(socket(&cell, Descriptor::Tcp));
    let accepting = tokio::task::spawn_blocking(move || {
        let (mut connection, _) = listener.accept().unwrap();
        connection.write_all(b"late\n").unwrap();
    });
    within(accepting).await.unwrap();

    assert_eq!(within(running.wait()).await.unwrap().code, Some(0));
    let mut said = String::new();
    std::fs::File::from(pipe).read_to_string(&mut said).unwrap();
    assert_eq!(said, "late\n");
}
