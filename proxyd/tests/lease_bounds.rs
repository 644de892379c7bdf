//! What one lease may use up, and what it cannot hide by asking often.

use std::net::{Ipv6Addr, SocketAddr};

use crate::support::*;
use bytes::Bytes;
use ipc::lease::{Descriptor, Holder};
use ipc::vault::AuditPage;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::Ipv6RecvPacketInfo;
use tokio::io::AsyncWriteExt;
use tokio::net::UdpSocket;

const MIB: usize = 1 << 20;
const SIGNING: &str = r#"
[[egress.allow]]
hosts = ["aws.test"]
methods = ["PUT", "POST"]
addresses = ["127.0.0.1/32"]
credential = "aws"

[credentials.aws]
secret = "local:aws"
inject = { aws-sigv4 = { regions = ["eu-central-1"], services = ["s3", "sts"] } }
hosts = ["aws.test"]
env = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
"#;

/// Fields that ask to be signed again.
fn signed(lease: &Lease, service: &str) -> String {
    let id = lease.opened.env.iter().find(|(name, _)| name == "AWS_ACCESS_KEY_ID");
    format!(
        "Host: aws.test\r\nAuthorization: AWS4-HMAC-SHA256 \
         Credential={}/20200101/eu-central-1/{service}/aws4_request, SignedHeaders=host, \
         Signature={}\r\n",
        id.unwrap().1,
        "0".repeat(64)
    )
}

/// Uploads one signed chunk of 3 MiB; gives the head of the answer.
async fn upload(lease: &Lease) -> String {
    let line = |size: usize| format!("{size:x};chunk-signature={}\r\n", "0".repeat(64));
    let (first, last) = (line(3 * MIB), format!("\r\n{}\r\n", line(0)));
    let head = format!(
        "PUT /box/key HTTP/1.1\r\nContent-Length: {}\r\nX-Amz-Content-Sha256: \
         STREAMING-AWS4-HMAC-SHA256-PAYLOAD\r\n{}\r\n",
        first.len() + 3 * MIB + last.len(),
        signed(lease, "s3")
    );
    let body = [head.as_bytes(), first.as_bytes(), &vec![b'a'; 3 * MIB], last.as_bytes()].concat();
    let (mut reader, mut writer) = tokio::io::split(lease.h1("aws.test").await);
    // Whoever refuses reads no further.
    let sending = async {
        if writer.write_all(&body).await.is_ok() {
            let _ = writer.flush().await;
        }
    };
    let (answer, ()) = timely(async { tokio::join!(response(&mut reader), sending) }).await;
    answer.0
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_that_are_held_back_to_be_signed_are_of_the_leases_share_of_memory() {
    let upstream = Upstream::tls("aws.test", &[b"http/1.1"], echo_h1).await;
    let proxyd = Proxyd::start(SIGNING, &[("aws.test", &upstream)]).await;
    let value = Bytes::from_static(b"AKIAREAL0000000REAL0:SECRET-CANARY-aws");
    let control = proxyd.control();
    control.call(http::Method::PUT, "/v1/secrets/aws", None, value).await.unwrap();
    let lease = proxyd.lease().await;
    assert!(upload(&lease).await.starts_with("HTTP/1.1 200 "));

    // Three bodies leave 2 MiB of 32.
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut stream = lease.h1("aws.test").await;
        let length = 10 * MIB;
        let fields = format!("Content-Length: {length}\r\nExpect: 100-continue\r\n");
        let asked = format!("POST / HTTP/1.1\r\n{fields}{}\r\n", signed(&lease, "sts"));
        stream.write_all(asked.as_bytes()).await.unwrap();
        let leave = timely(head(&mut stream)).await;
        assert!(leave.starts_with("HTTP/1.1 100 "), "{leave}");
        held.push(stream);
    }
    let refused = upload(&lease).await;

    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    assert_eq!(field(&refused, "retry-after"), Some("1"));
    assert_eq!(field(&refused, "x-cleanhands-failure"), Some("bodies_busy"));
    proxyd
        .record(|r| r.reason.as_deref().is_some_and(|reason| reason.starts_with("bodies_busy: ")))
        .await;
    assert!(upload(&proxyd.lease().await).await.starts_with("HTTP/1.1 200 "));
    drop(held);
    until("there is room again", || async { upload(&lease).await.starts_with("HTTP/1.1 200 ") })
        .await;
}

/// A question for the IPv4 address of a name of one label.
fn question(name: &str) -> Vec<u8> {
    let length = u8::try_from(name.len()).unwrap();
    let head = [7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, length];
    [&head[..], name.as_bytes(), &[0, 0, 1, 0, 1]].concat()
}

async fn sandbox(proxyd: &Proxyd) -> (Lease, SocketAddr) {
    let tcp = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    let dns = std::net::UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    setsockopt(&dns, Ipv6RecvPacketInfo, &true).unwrap();
    let address = dns.local_addr().unwrap();
    let open = wanted(Holder::Sandbox, vec![Descriptor::Tcp, Descriptor::DnsUdp]);
    (proxyd.opened(open, &[tcp.into(), dns.into()]).await.unwrap(), address)
}

#[tokio::test]
async fn a_lease_that_asks_for_many_refused_names_has_every_one_recorded() {
    let proxyd = Proxyd::start(POLICY, &[]).await;
    let (_lease, server) = sandbox(&proxyd).await;
    let socket = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).await.unwrap();

    // As many names, as often each, as are told apart and written singly.
    for name in 0..32 {
        for _ in 0..20 {
            socket.send_to(&question(&format!("odd{name}")), server).await.unwrap();
            let mut answer = [0u8; 512];
            timely(socket.recv_from(&mut answer)).await.unwrap();
            assert_eq!(answer[3] & 15, 3);
        }
    }

    until("all are recorded", || async {
        let page = proxyd.control().get::<AuditPage>("/v1/audit?limit=1000").await.unwrap();
        let lookups = page.records.iter().filter(|record| record.entry.as_deref() == Some("dns"));
        lookups.map(|record| 1 + record.repeated.unwrap_or(0)).sum::<u64>() >= 32 * 20
    })
    .await;
}
