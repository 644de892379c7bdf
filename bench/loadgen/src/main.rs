//! A load generator and the upstream it is pointed at.
//!
//! `loadgen serve HOST CA_OUT PORT_OUT` serves HTTPS with a certificate for HOST and every name
//! below it, HTTP/1.1 and HTTP/2 (see `serve`). Beside CA_OUT it leaves `front.pem` and
//! `front.key`, a certificate for a reverse proxy that stands before it.
//!
//! `loadgen load KIND HOST VIA CA CONNECTIONS SECONDS [PID…]` puts it under load and prints one
//! JSON line. KIND is one of `keep`, `h2`, `new`, `cold:FIRST`, `down`, `gzip`, `up`, `sse`, `idle`
//! (see `load`). VIA is `HOST:PORT`, or `names:PORT` where each host's own address is dialled, or
//! `unix:PATH` for a proxy that takes CONNECT there with the token in the variable LEASE_TOKEN. CPU
//! time and memory are those of the PIDs.
//!
//! `loadgen raw-serve PORT_OUT` and `loadgen touch|pull HOST PORT VIA SECONDS` and
//! `loadgen paced HOST VIA CA SECONDS` are for what a sandbox does itself (see `egress`).
//!
//! All have one thread.

mod client;
mod egress;
mod load;
mod serve;

use std::time::Duration;

pub type Failure = Box<dyn std::error::Error + Send + Sync>;

const USAGE: &str = "usage: loadgen serve HOST CA_OUT PORT_OUT | \
                     load KIND HOST VIA CA CONNECTIONS SECONDS [PID…] | raw-serve PORT_OUT | \
                     touch HOST PORT VIA SECONDS | pull HOST PORT VIA SECONDS | \
                     paced HOST VIA CA SECONDS";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve", host, ca_out, port_out] => serve::serve(host, ca_out, port_out).await,
        ["load", kind, host, via, ca, connections, seconds, pids @ ..] => {
            let target = client::Target::new(host, via, ca)?;
            let plan = load::Plan {
                kind: kind.parse()?,
                connections: connections.parse()?,
                time: Duration::from_secs_f64(seconds.parse()?),
                pids: pids.iter().map(|pid| pid.parse()).collect::<Result<_, _>>()?,
            };
            load::run(target, plan).await
        }
        ["raw-serve", port_out] => egress::serve(port_out).await,
        ["touch", host, port, via, seconds] => {
            egress::touch(client::Target::plain(host, via)?, port.parse()?, seconds.parse()?).await
        }
        ["pull", host, port, via, seconds] => {
            egress::pull(client::Target::plain(host, via)?, port.parse()?, seconds.parse()?).await
        }
        ["paced", host, via, ca, seconds] => {
            egress::paced(client::Target::new(host, via, ca)?, seconds.parse()?).await
        }
        _ => Err(USAGE.into()),
    }
}
