//! Protocols in which the server speaks first: what policy allows waits for nobody's word, and what
//! it does not allow ends without one.

use std::io::ErrorKind;
use std::net::Ipv4Addr;

use crate::support::*;
use ipc::lease::{Descriptor, Holder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const MAIL: &str = r#"
[[egress.allow]]
hosts = ["mail.test"]
ports = [2525, 40000]
addresses = ["127.0.0.1/32"]
"#;

/// A server of which nobody hears who speaks before it does.
async fn greet(mut stream: TcpStream) {
    let mut early = [0];
    if stream.try_read(&mut early).is_ok() {
        return;
    }
    stream.write_all(b"220 mail.test ready\r\n").await.unwrap();
    let _ = stream.read_u8().await;
}

#[tokio::test]
async fn a_server_that_speaks_first_is_heard_at_any_port_that_a_rule_lists() {
    let upstream = Upstream::tcp(greet).await;
    let proxyd = Proxyd::start(MAIL, &[("mail.test", &upstream)]).await;
    let lease = proxyd.lease().await;

    for port in [2525, 40000] {
        let mut stream = lease.connect(&format!("mail.test:{port}")).await;
        let mut greeting = [0; 21];
        timely(stream.read_exact(&mut greeting)).await.unwrap();
        assert_eq!(&greeting, b"220 mail.test ready\r\n");
    }
}

#[tokio::test]
async fn a_client_that_waits_for_the_servers_word_is_cut_off_where_no_rule_lists_it() {
    let proxyd = Proxyd::start(MAIL, &[]).await;
    let lease = proxyd.lease().await;

    for (authority, reason) in [
        ("mail.test:25", "port_not_listed"),
        ("mail.test:2222", "port_not_listed"),
        ("other.test:2525", "host_not_listed"),
        ("other.test:40000", "host_not_listed"),
    ] {
        let mut stream = lease.connect(authority).await;
        let mut said = Vec::new();
        // A Unix socket has no reset to show; whatever it is, nothing was said.
        let _ = timely(stream.read_to_end(&mut said)).await;
        assert!(said.is_empty());
        proxyd
            .record(|record| {
                record.reason.as_deref().is_some_and(|said| said.starts_with(reason))
                    && format!("{}:{}", record.host.as_deref().unwrap(), record.port.unwrap())
                        == authority
            })
            .await;
    }

    // The same from a sandbox, which sees a reset.
    let tcp = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = tcp.local_addr().unwrap();
    let open = wanted(Holder::Sandbox, vec![Descriptor::Tcp]);
    let _sandbox = proxyd.opened(open, &[tcp.into()]).await.unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let ended = timely(stream.read_u8()).await.unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::ConnectionReset);
}
