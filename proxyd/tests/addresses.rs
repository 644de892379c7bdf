//! Addresses of the host itself, in a network of the test's own where they can come and go.

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

#[path = "support/nameserver.rs"]
mod nameserver;
#[path = "support/network.rs"]
mod network;
mod support;

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nameserver::NameServer;
use network::Change;
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PORT: u16 = 7443;
/// Public addresses: they need no entry in a rule unless they are this host's own.
const V4: &str = "93.184.216.34";
const V6: &str = "2606:4700::1111";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn policy(addresses: &str) -> String {
    format!(
        "[[egress.allow]]\nhosts = [\"four.test\", \"six.test\", \"{V4}\"]\nports = [{PORT}]\n\
         {addresses}\n"
    )
}

/// What comes out of a tunnel to a host: the upstream's word, or the code of a refusal.
async fn said(lease: &Lease, host: &str) -> String {
    let mut stream = lease.connect(&format!("{host}:{PORT}")).await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = Vec::new();
    let _ = timely(stream.read_to_end(&mut text)).await;
    let text = String::from_utf8_lossy(&text).into_owned();
    let code = field(&text, "x-cleanhands-denial").or(field(&text, "x-cleanhands-failure"));
    code.map_or(text.clone(), str::to_owned)
}

fn main() -> ExitCode {
    network::main(&[
        (
            "an_address_that_comes_up_later_is_the_hosts_own_from_then_on",
            an_address_that_comes_up_later_is_the_hosts_own_from_then_on,
        ),
        (
            "a_whole_range_that_a_route_makes_local_is_the_hosts_own",
            a_whole_range_that_a_route_makes_local_is_the_hosts_own,
        ),
    ])
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(test);
}

fn an_address_that_comes_up_later_is_the_hosts_own_from_then_on() {
    run(async {
        let heard = Arc::new(AtomicBool::new(false));
        let own = Arc::clone(&heard);
        let service = Upstream::tcp_at(SocketAddr::new(ip("::"), PORT), move |mut stream| {
            let heard = Arc::clone(&own);
            async move {
                if stream.read_u8().await.is_ok() {
                    heard.store(true, Ordering::SeqCst);
                    let _ = stream.write_all(b"the host's own service").await;
                }
            }
        });
        let _service = service.await.unwrap();
        let names = NameServer::start(|name, kind, _| match (name, kind) {
            ("four.test", 1) => Some(vec![ip(V4)]),
            ("six.test", 28) => Some(vec![ip(V6)]),
            _ => Some(vec![]),
        })
        .await;
        let proxyd = Proxyd::configured(&policy(""), &[], &names.config()).await;
        let lease = proxyd.lease().await;

        for _ in 0..3 {
            // Not here and nowhere else: there is no way out of this network.
            for host in ["four.test", "six.test"] {
                assert_eq!(said(&lease, host).await, "upstream_connect", "{host}");
            }

            network::address(Change::Add, ip(V4), 32);
            network::address(Change::Add, ip(V6), 128);
            assert_eq!(said(&lease, "four.test").await, "address_private");
            // The kernel brings up addresses of this family in its own time.
            until("the other one is up", || async {
                let code = said(&lease, "six.test").await;
                assert!(matches!(&code[..], "upstream_connect" | "address_private"), "{code}");
                code == "address_private"
            })
            .await;

            network::address(Change::Remove, ip(V4), 32);
            network::address(Change::Remove, ip(V6), 128);
        }
        assert!(!heard.load(Ordering::SeqCst), "something reached the host's own service");

        // A rule that names them, in a list or as its host, means it.
        network::address(Change::Add, ip(V4), 32);
        network::address(Change::Add, ip(V6), 128);
        assert_eq!(said(&lease, V4).await, "the host's own service");
        proxyd.write_policy(&policy(&format!("addresses = [\"{V4}\", \"{V6}\"]")));
        for host in ["four.test", "six.test"] {
            let counts = || async { said(&lease, host).await == "the host's own service" };
            until("the rule counts", counts).await;
        }
    });
}

fn a_whole_range_that_a_route_makes_local_is_the_hosts_own() {
    run(async {
        let names = NameServer::start(|_, kind, _| {
            Some(if kind == 1 { vec![ip("93.184.216.99")] } else { vec![] })
        })
        .await;
        let service = Upstream::tcp_at(SocketAddr::new(ip("0.0.0.0"), PORT), |_| async {});
        let service = service.await.unwrap();
        let proxyd = Proxyd::configured(&policy(""), &[], &names.config()).await;
        let lease = proxyd.lease().await;

        network::local_route(ip("93.184.216.0"), 24);

        assert_eq!(said(&lease, "four.test").await, "address_private");
        assert_eq!(service.connections(), 0);
    });
}
