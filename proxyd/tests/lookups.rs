//! A sandbox's lookups as its resolver makes them, on port 53, over UDP and TCP, sound and odd: in
//! a network of the test's own, where that port is to be had.

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

#[path = "support/network.rs"]
mod network;
mod support;

use std::net::{Ipv6Addr, SocketAddr};
use std::process::ExitCode;

use ipc::lease::{Descriptor, Holder};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::Ipv6RecvPacketInfo;
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

const A: u16 = 1;
const AAAA: u16 = 28;
const NO_NAME: u8 = 3;
const SERVER: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::LOCALHOST), 53);

fn main() -> ExitCode {
    network::main(&[
        (
            "lookups_over_udp_and_tcp_get_the_same_answers_at_once",
            lookups_over_udp_and_tcp_get_the_same_answers_at_once,
        ),
        (
            "odd_questions_get_an_answer_or_none_and_stop_nothing",
            odd_questions_get_an_answer_or_none_and_stop_nothing,
        ),
    ])
}

/// A lease whose sandbox's sockets are those of port 53 here.
async fn sandbox(proxyd: &Proxyd) -> Lease {
    let tcp = std::net::TcpListener::bind(SERVER).unwrap();
    let udp = std::net::UdpSocket::bind(SERVER).unwrap();
    setsockopt(&udp, Ipv6RecvPacketInfo, &true).unwrap();
    let open = wanted(Holder::Sandbox, vec![Descriptor::Tcp, Descriptor::DnsUdp]);
    proxyd.opened(open, &[tcp.into(), udp.into()]).await.unwrap()
}

fn run(test: impl AsyncFnOnce(Proxyd)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let proxyd = Proxyd::start(POLICY, &[]).await;
        test(proxyd).await;
    });
}

fn question(name: &str, kind: u16) -> Vec<u8> {
    let mut packet = vec![7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        packet.push(u8::try_from(label.len()).unwrap());
        packet.extend_from_slice(label.as_bytes());
    }
    packet.push(0);
    packet.extend_from_slice(&kind.to_be_bytes());
    packet.extend_from_slice(&[0, 1]);
    packet
}

async fn over_udp(packet: &[u8]) -> Vec<u8> {
    let socket = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).await.unwrap();
    socket.send_to(packet, SERVER).await.unwrap();
    let mut answer = vec![0u8; 2000];
    let (length, from) = timely(socket.recv_from(&mut answer)).await.unwrap();
    assert_eq!(from, SERVER);
    answer.truncate(length);
    answer
}

/// All questions in one write, as resolvers may (RFC 7766 section 6.2.1.1), and their answers.
async fn over_tcp(packets: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut stream = TcpStream::connect(SERVER).await.unwrap();
    let mut bytes = Vec::new();
    for packet in packets {
        bytes.extend_from_slice(&u16::try_from(packet.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(packet);
    }
    stream.write_all(&bytes).await.unwrap();
    let mut answers = Vec::new();
    for _ in packets {
        let length = timely(stream.read_u16()).await.unwrap();
        let mut answer = vec![0u8; usize::from(length)];
        timely(stream.read_exact(&mut answer)).await.unwrap();
        answers.push(answer);
    }
    answers
}

fn code(answer: &[u8]) -> u8 {
    answer[3] & 15
}

fn lookups_over_udp_and_tcp_get_the_same_answers_at_once() {
    run(async |proxyd| {
        let _lease = sandbox(&proxyd).await;
        let mut extended = question("api.test", A);
        extended[11] = 1;
        extended.extend_from_slice(&[0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let longest = [&"a".repeat(63)[..], &"b".repeat(63), &"c".repeat(63), &"d".repeat(61)];
        // The question, the code of its answer, and how many records that has.
        let table = [
            (question("api.test", A), 0, 1),
            (question("API.TEST", AAAA), 0, 1),
            (extended, 0, 1),
            (question(&longest.join("."), A), 0, 1),
            (question("unlisted.example", A), 0, 1),
            (question("localhost", A), 0, 1),
            // Service bindings would lead clients past the addresses that stand for the name.
            (question("api.test", 65), 0, 0),
            (question("api.test", 64), 0, 0),
            (question("api.test", 16), 0, 0),
            (question("api.test", 255), 0, 0),
            (question("1.0.18.198.in-addr.arpa", 12), 0, 0),
            (question("nodots", A), NO_NAME, 0),
            (question("", A), NO_NAME, 0),
            (question("169.254.169.254", A), NO_NAME, 0),
            (question("sp ace.test", A), NO_NAME, 0),
        ];
        let packets: Vec<Vec<u8>> = table.iter().map(|(packet, ..)| packet.clone()).collect();

        let by_tcp = over_tcp(&packets).await;

        for ((packet, expected, records), by_tcp) in table.iter().zip(&by_tcp) {
            let shown = String::from_utf8_lossy(packet).into_owned();
            let by_udp = over_udp(packet).await;
            assert_eq!(&by_udp, by_tcp, "{shown}");
            assert_eq!((code(&by_udp), by_udp[7]), (*expected, *records), "{shown}");
            assert!(by_udp[2] & 0x82 == 0x80, "{shown}: cut off or no answer");
        }
    });
}

fn odd_questions_get_an_answer_or_none_and_stop_nothing() {
    run(async |proxyd| {
        let _lease = sandbox(&proxyd).await;
        let whole = question("api.test", A);
        let socket = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).await.unwrap();
        let mut answer_to_nothing = whole.clone();
        answer_to_nothing[2] |= 0x80;
        // What is too short to be answered, or an answer itself, gets none; more than a datagram
        // of ours may hold is a format error.
        for packet in [&whole[..5], &[], &answer_to_nothing] {
            socket.send_to(packet, SERVER).await.unwrap();
        }
        let mut long = whole.clone();
        long.resize(5000, 0);
        for (packet, expected) in [
            (long, 1),
            (whole[..14].to_vec(), 1),
            ([&whole[..5], &[2], &whole[6..]].concat(), 1),
            ([&whole[..2], &[0x29], &whole[3..]].concat(), 4),
            ([&whole[..12], &[0xc0, 12, 0, 1, 0, 1]].concat(), 1),
            ([&whole[..whole.len() - 1], &[3]].concat(), 5),
        ] {
            let answer = over_udp(&packet).await;
            assert_eq!(code(&answer), expected, "{packet:?}");
            assert_eq!(answer[..2], [7, 7]);
        }

        // A connection that says what no question is ends; the next one is served.
        for bytes in [&[0xff, 0xff, 1][..], &[0, 0], &[0, 4, 1, 2, 3, 4]] {
            let mut stream = TcpStream::connect(SERVER).await.unwrap();
            stream.write_all(bytes).await.unwrap();
            let mut rest = Vec::new();
            let _ = timely(stream.read_to_end(&mut rest)).await;
            assert_eq!(rest, b"", "{bytes:?}");
        }
        assert_eq!(over_tcp(&[whole]).await.len(), 1);
    });
}
