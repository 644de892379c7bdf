//! The vault's worker for the network: carries one question to a server that gives tokens or keeps
//! secrets, brings the answer.
//!
//! A process of its own, started by proxyd with a socket to the vault child as standard input. It
//! sees what it carries (a refresh token, a client's secret, a new token) and nothing else: it has
//! no way to the store, asks the vault nothing, and keeps nothing. It starts no program, takes no
//! connection, and reads only what the way out needs: trust, names, proxyd's own configuration.
//! Questions run beside each other; each reads the configuration again, since there are few. The
//! worker ends with the vault child, which may outlive proxyd ([`super::ending`]).

mod exchange;
mod metadata;

use std::ffi::OsString;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use policies::{Host, Scheme};
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;
use zeroize::Zeroizing;

use super::FETCH_SECONDS;
use super::secret::Secret;
use super::wire::{self, Exchange, Fetch, Fetched, Instance};
use crate::config::{Arguments, Config};
use crate::head::{Fields, RequestHead, ResponseHead};
use crate::relay::body::Piece;
use crate::relay::h1::client::{Connection, Next};
use crate::relay::h1::framing::Framing;
use crate::start;
use crate::sys::{process, worker};
use crate::upstream::outbound::Outbound;

/// What this program is told to be.
pub const ROLE: &str = "vault-fetch";
/// Longest answer of such a server.
const ANSWER_BYTES_MAX: usize = 256 * 1024;

/// Runs the worker. `args` are those after the role: proxyd's own.
pub fn main(args: Vec<OsString>) -> ExitCode {
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            ipc::say::line(format_args!("proxyd vault-fetch: {reason}"));
            ExitCode::FAILURE
        }
    }
}

fn run(args: Vec<OsString>) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    process::hide_memory().map_err(|error| text(&error))?;
    worker::leave_ends_to_parent().map_err(|error| text(&error))?;
    let arguments = Arguments::parse_from_rest(args).map_err(|error| text(&error))?;
    let config = Config::load(&arguments).map_err(|error| text(&error))?;
    let socket = ipc::daemon::inherited_fd(0).map(StdUnixStream::from);
    let socket = socket.map_err(|error| text(&error))?;
    let outbound = Outbound::new(&config.way_out, config.resolver.clone());
    let outbound = outbound.map_err(|error| text(&error))?;
    let read: Vec<PathBuf> = start::readable(&config);
    process::confine_reader(&read).map_err(|error| text(&error))?;
    // It makes sockets of its own of a kind that is not to be had afterwards.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| text(&error))?;
    worker::only_outwards().map_err(|error| text(&error))?;
    let outcome = runtime.block_on(async {
        socket.set_nonblocking(true).map_err(|error| text(&error))?;
        let socket = UnixStream::from_std(socket).map_err(|error| text(&error))?;
        serve(socket, config, outbound).await;
        Ok(())
    });
    runtime.shutdown_timeout(Duration::from_millis(200));
    outcome
}

/// Until the vault has gone.
async fn serve(socket: UnixStream, config: Config, outbound: Outbound) {
    let (mut reading, writing) = socket.into_split();
    let writing = Arc::new(Mutex::new(writing));
    let place = Arc::new(Mutex::new((config, Arc::new(outbound))));
    loop {
        let mut prefix = [0; 4];
        if reading.read_exact(&mut prefix).await.is_err() {
            return;
        }
        let Ok(length) = wire::body_length(prefix) else { return };
        let mut body = Zeroizing::new(vec![0; length]);
        if reading.read_exact(&mut body).await.is_err() {
            return;
        }
        let (writing, place) = (Arc::clone(&writing), Arc::clone(&place));
        tokio::spawn(async move {
            let patience = Duration::from_secs(FETCH_SECONDS);
            let fetching = async {
                let (outbound, plain) = current(&place).await;
                fetch(&outbound, plain.as_deref(), &body).await
            };
            let fetched = match timeout(patience, fetching).await {
                Ok(fetched) => fetched,
                Err(_) => Err(format!("the server gave no answer in {FETCH_SECONDS} s")),
            };
            let (head, parts) = match fetched {
                Ok((status, body)) => (Fetched::Answered { status }, vec![body]),
                Err(reason) => (Fetched::Failed { reason }, Vec::new()),
            };
            let frame = wire::encode(wire::number(&body), &head, &parts);
            // A vault that has gone needs no answer.
            let _ = writing.lock().await.write_all(&frame).await;
        });
    }
}

/// The way out as the files say it now, and what is asked without TLS; the former ones where they
/// are wrong.
async fn current(place: &Mutex<(Config, Arc<Outbound>)>) -> (Arc<Outbound>, Option<String>) {
    let mut place = place.lock().await;
    let again = place.0.again().ok().and_then(|config| {
        let next = Outbound::again(&place.1, &config.way_out).ok()?;
        Some((config, Arc::new(next)))
    });
    if let Some(again) = again {
        *place = again;
    }
    let aws = place.0.backends.aws.as_ref();
    let plain = aws.and_then(|aws| aws.plain_url()).map(str::to_owned);
    (Arc::clone(&place.1), plain)
}

/// What the vault asks.
#[derive(Deserialize)]
#[serde(untagged)]
enum Question {
    Fetch(Fetch),
    Exchange(Exchange),
    Instance(Instance),
}

async fn fetch(
    outbound: &Outbound,
    plain: Option<&str>,
    question: &[u8],
) -> Result<(u16, Secret), String> {
    let (asked, mut parts) = wire::decode(question).map_err(|error| error.to_string())?;
    match asked {
        Question::Instance(asked) => metadata::instance(&asked, plain).await,
        Question::Fetch(asked) if Some(&asked.url[..]) == plain => {
            metadata::agent(&asked, parts).await
        }
        Question::Fetch(asked) => {
            let (head, body) = ask(outbound, &asked, parts).await?;
            Ok((head.status, body))
        }
        Question::Exchange(asked) => {
            let password = parts.pop().ok_or("the vault showed no password")?;
            exchange::run(outbound, &asked, password).await
        }
    }
}

/// One request and its whole answer. No reason quotes what was sent or came.
async fn ask(
    outbound: &Outbound,
    asked: &Fetch,
    mut parts: Vec<Secret>,
) -> Result<(ResponseHead, Secret), String> {
    if parts.len() != asked.secret_headers.len() + 1 {
        return Err("the vault asked in another way than agreed".to_owned());
    }
    let body = parts.pop().map_or_else(Bytes::new, Secret::into_bytes);
    let (address, query) = asked.url.split_once('?').unwrap_or((&asked.url, ""));
    let (scheme, host, port, mut path) = policies::split_url(address)?;
    if !query.is_empty() {
        path = format!("{path}?{query}");
    }
    if scheme != Scheme::Https {
        return Err("secrets are shown over https only".to_owned());
    }
    let stream = outbound.connect(&host, port).await.map_err(|error| error.to_string())?;
    let mut headers = Fields::new();
    let field = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    let named = host_field(&host, port);
    headers.append("Host", field(&named));
    headers.append("User-Agent", field(concat!("cleanhands/", env!("CARGO_PKG_VERSION"))));
    for (name, value) in &asked.headers {
        headers.append(name, field(value));
    }
    let with_body = asked.method != "GET";
    if with_body {
        headers.append("Content-Length", field(&body.len().to_string()));
    }
    headers.append("Connection", field("close"));
    for (name, value) in asked.secret_headers.iter().zip(parts) {
        headers.append(name, value.into_bytes());
    }
    let head = RequestHead {
        method: field(&asked.method),
        target: field(&path),
        scheme,
        authority: named,
        headers,
    };
    let body = with_body.then_some(body);
    talk(Connection::new(stream), &head, body)
        .await
        .map_err(|reason| format!("the server {host} gave no sound answer: {reason}"))
}

/// How a server is named in a request to it.
pub fn host_field(host: &Host, port: u16) -> String {
    let named = host.authority(port);
    named.strip_suffix(":443").map(str::to_owned).unwrap_or(named)
}

async fn talk(
    mut connection: Connection,
    head: &RequestHead,
    body: Option<Bytes>,
) -> Result<(ResponseHead, Secret), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let framing = body.as_ref().map_or(Framing::None, |body| Framing::Length(body.len() as u64));
    let sent = connection.send(head, framing, None).await;
    let (mut out, mut awaited) = sent.map_err(|error| text(&error))?;
    if let Some(body) = body {
        out.data(body).await.map_err(|error| text(&error))?;
    }
    out.finish(None).await.map_err(|error| text(&error))?;
    let (head, mut body) = loop {
        let (head, next) = awaited.head().await.map_err(|error| text(&error))?;
        match next {
            Next::Interim(rest) => awaited = rest,
            Next::Switched(_) => return Err("it speaks another protocol".to_owned()),
            Next::Body(body, _) => break (head, body),
        }
    };
    let mut answer = BytesMut::with_capacity(8 * 1024);
    while let Some(piece) = body.next().await.map_err(|error| text(&error))? {
        if let Piece::Data(data) = piece {
            if answer.len() + data.len() > ANSWER_BYTES_MAX {
                return Err("it is too long".to_owned());
            }
            answer.extend_from_slice(&data);
        }
    }
    Ok((head, Secret::new(answer.to_vec())))
}
