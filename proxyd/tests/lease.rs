//! A sandbox's lease: sockets handed over, names answered, connections judged by where they went.
//! The sockets live on loopback here; whole sandboxes are tested elsewhere.

use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use crate::support::*;
use ipc::id::{CallId, SessionId};
use ipc::lease::{Descriptor, Holder, LeaseRequest, Open};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::Ipv6RecvPacketInfo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

struct Sandbox {
    lease: Lease,
    tcp: SocketAddr,
    dns: SocketAddr,
}

async fn sandbox(proxyd: &Proxyd) -> Sandbox {
    let tcp = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    let dns = std::net::UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    setsockopt(&dns, Ipv6RecvPacketInfo, &true).unwrap();
    let addresses = (tcp.local_addr().unwrap(), dns.local_addr().unwrap());
    let open = wanted(Holder::Sandbox, vec![Descriptor::Tcp, Descriptor::DnsUdp]);
    let lease = proxyd.opened(open, &[tcp.into(), dns.into()]).await.unwrap();
    assert!(lease.opened.token.is_none() && lease.opened.ca_pem.contains("BEGIN CERTIFICATE"));
    Sandbox { lease, tcp: addresses.0, dns: addresses.1 }
}

/// A question for `name`, and the answer's code and last bytes.
async fn lookup(sandbox: &Sandbox, name: &str, kind: u8) -> (u8, Vec<u8>) {
    let mut packet = vec![7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        packet.push(u8::try_from(label.len()).unwrap());
        packet.extend_from_slice(label.as_bytes());
    }
    packet.extend_from_slice(&[0, 0, kind, 0, 1]);
    let socket = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).await.unwrap();
    socket.send_to(&packet, sandbox.dns).await.unwrap();
    let mut answer = [0u8; 600];
    let (length, from) = timely(socket.recv_from(&mut answer)).await.unwrap();
    assert_eq!(from, sandbox.dns);
    assert_eq!(answer[..2], [7, 7]);
    (answer[3] & 15, answer[packet.len()..length].to_vec())
}

#[tokio::test]
async fn names_get_stable_addresses_and_single_labels_are_refused() {
    let proxyd = Proxyd::start(POLICY, &[]).await;
    let sandbox = sandbox(&proxyd).await;

    let first = lookup(&sandbox, "api.test", 1).await;
    let again = lookup(&sandbox, "API.test", 1).await;
    let other = lookup(&sandbox, "open.test", 1).await;
    let https = lookup(&sandbox, "api.test", 65).await;
    let single = lookup(&sandbox, "host", 1).await;

    assert!(first.1.ends_with(&[198, 18, 0, 1]), "{first:?}");
    assert_eq!(first, again);
    assert!(other.1.ends_with(&[198, 18, 0, 2]), "{other:?}");
    assert_eq!(https, (0, Vec::new()));
    // "There is no such name": a resolver passes that on at once.
    assert_eq!(single, (3, Vec::new()));
}

#[tokio::test]
async fn a_connection_to_an_address_that_stands_for_nothing_allowed_is_denied_in_words() {
    let proxyd = Proxyd::start(POLICY, &[]).await;
    let sandbox = sandbox(&proxyd).await;
    let call = CallId::random();
    let started = LeaseRequest::CallStarted { call: call.clone() };
    sandbox.lease.channel.send(&started, &[]).await.unwrap();
    until("the call is known", || async {
        lookup(&sandbox, "odd", 1).await;
        proxyd.audit().await.iter().any(|record| record.calls.contains(&call))
    })
    .await;

    let mut stream = TcpStream::connect(sandbox.tcp).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n";
    let answer = talk(&mut stream, request).await;

    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    assert!(answer.contains("host_not_listed"), "{answer}");
    let record = proxyd.record(|record| record.host.as_deref() == Some("::1")).await;
    assert_eq!(record.calls, [call]);
    assert!(record.sandbox.is_some() && record.session.is_some());
}

#[tokio::test]
async fn when_the_holder_goes_the_listeners_and_connections_go() {
    let proxyd = Proxyd::start(POLICY, &[]).await;
    let sandbox = sandbox(&proxyd).await;
    let mut open = TcpStream::connect(sandbox.tcp).await.unwrap();
    open.write_all(b"G").await.unwrap();

    drop(sandbox.lease);
    let ended = timely(open.read_u8()).await;
    until("nobody listens", || async { TcpStream::connect(sandbox.tcp).await.is_err() }).await;

    assert!(ended.is_err());
}

#[tokio::test]
async fn leases_that_are_not_as_documented_are_refused_with_a_reason() {
    let proxyd = Proxyd::start(POLICY, &[]).await;
    let table = [
        (wanted(Holder::Sandbox, vec![]), "needs a listening socket"),
        (wanted(Holder::Sandbox, vec![Descriptor::Tcp]), "carries 0"),
        (Open { version: 9, ..wanted(Holder::Sandbox, vec![]) }, "version 9"),
        (Open { environment: "none".into(), ..wanted(Holder::Explicit, vec![]) }, "none.toml"),
        (
            Open { environment: "harness".into(), ..wanted(Holder::Explicit, vec![]) },
            "harnessd's own",
        ),
    ];
    for (open, word) in table {
        let fault = proxyd.opened(open, &[]).await.err().unwrap();

        assert!(fault.text.contains(word), "{fault}");
    }
}

#[tokio::test]
async fn no_sandbox_has_the_environment_of_harnessd_and_none_a_listener_that_is_none() {
    let proxyd = Proxyd::start(POLICY, &[]).await;
    let listening = || std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    let udp = || std::net::UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    let table: [(&str, OwnedFd, &str); 5] = [
        ("harness", listening().into(), "harnessd's own"),
        ("dev", udp().into(), "no listening TCP socket"),
        ("dev", std::io::pipe().unwrap().0.into(), "cannot use the Tcp socket"),
        ("dev", std::fs::File::open("/dev/null").unwrap().into(), "cannot use the Tcp socket"),
        (
            "dev",
            std::os::unix::net::UnixStream::pair().unwrap().0.into(),
            "no listening TCP socket",
        ),
    ];
    for (environment, socket, word) in table {
        let open = wanted(Holder::Sandbox, vec![Descriptor::Tcp]);
        let open = Open { environment: environment.into(), ..open };
        let fault = proxyd.opened(open, &[socket]).await.err().unwrap();

        assert!(fault.text.contains(word), "{fault}");
    }
}

#[tokio::test]
async fn harnessd_on_behalf_of_a_session_reaches_mcp_servers_and_nothing_else() {
    let policy = format!("{POLICY}\n[mcp.t]\nurl = \"https://mcp.test/mcp\"\n");
    let proxyd = Proxyd::start(&policy, &[]).await;
    let session = Some(SessionId::random());
    let open = Open { session, ..wanted(Holder::Harness, vec![]) };
    let lease = proxyd.opened(open, &[]).await.unwrap();
    let token = lease.token();

    let mut codes = Vec::new();
    for url in ["https://api.test/", "https://mcp.test/other", "https://mcp.test/mcp"] {
        let host = url.split('/').nth(2).unwrap();
        let mut stream = lease.plain().await;
        let request = format!(
            "GET {url} HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: Bearer {token}\r\n\
             Connection: close\r\n\r\n"
        );
        codes.push(talk(&mut stream, request.as_bytes()).await[9..12].to_owned());
    }

    // The last is allowed and fails at resolving a name that exists nowhere.
    assert_eq!(codes, ["403", "403", "502"]);
}
