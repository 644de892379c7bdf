//! Keys from beside this host: an instance's metadata service, or an agent of its containers.
//!
//! These speak plain HTTP at addresses that lead nowhere else, so nobody but the operator's own
//! configuration can have them asked, and no proxy is between. The metadata service is asked by
//! sessions only (IMDSv2): what anybody could fetch by a single GET is not taken for an answer.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use policies::{Host, Scheme};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Instance, Secret, talk};
use crate::config::is_instance_role;
use crate::head::{Fields, RequestHead};
use crate::relay::h1::client::Connection;
use crate::relay::stream::Stream;
use crate::vault::wire::Fetch;

/// They are a hop away at most.
const CONNECT: Duration = Duration::from_secs(3);
/// How long a session lasts; it serves three requests.
const SESSION_SECONDS: &[u8] = b"60";
const TOKEN: &str = "/latest/api/token";
const ROLES: &str = "/latest/meta-data/iam/security-credentials/";

/// The keys that a container's agent gives, by the address that is the operator's. No reason quotes
/// what came.
pub(super) async fn agent(asked: &Fetch, parts: Vec<Secret>) -> Result<(u16, Secret), String> {
    let plain = asked
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), Bytes::copy_from_slice(value.as_bytes())));
    let secret = asked.secret_headers.iter().map(String::as_str);
    let secret = secret.zip(parts.into_iter().map(Secret::into_bytes));
    let headers: Vec<(&str, Bytes)> = plain.chain(secret).collect();
    let (_, _, _, path) = policies::split_url(&asked.url)?;
    ask(&asked.url, &asked.method, &path, &headers).await
}

/// The keys of the instance's role.
pub(super) async fn instance(
    asked: &Instance,
    known: Option<&str>,
) -> Result<(u16, Secret), String> {
    if known != Some(&asked.url) {
        return Err("proxyd.toml names no such metadata service".to_owned());
    }
    let life = [("X-aws-ec2-metadata-token-ttl-seconds", Bytes::from_static(SESSION_SECONDS))];
    let (status, token) = ask(&asked.url, "PUT", TOKEN, &life).await?;
    let visible = token.expose_secret().iter().all(u8::is_ascii_graphic);
    if status != 200 || token.expose_secret().is_empty() || !visible {
        return Err(format!("the metadata service gives no session: it answers {status}"));
    }
    let session = [("X-aws-ec2-metadata-token", token.into_bytes())];
    let role = match &asked.role {
        Some(role) => role.clone(),
        None => {
            let (status, list) = ask(&asked.url, "GET", ROLES, &session).await?;
            let first = list.expose_secret().split(|b| *b == b'\n').next().unwrap_or_default();
            let name = std::str::from_utf8(first.trim_ascii()).unwrap_or_default();
            if status != 200 || !is_instance_role(name) {
                return Err(format!("the instance has no role: it answers {status}"));
            }
            name.to_owned()
        }
    };
    ask(&asked.url, "GET", &format!("{ROLES}{role}"), &session).await
}

async fn ask(
    url: &str,
    method: &str,
    path: &str,
    headers: &[(&str, Bytes)],
) -> Result<(u16, Secret), String> {
    let (_, host, port, _) = policies::split_url(url)?;
    let stream = dial(&host, port).await?;
    let authority = host.authority(port);
    let authority = authority.strip_suffix(":80").unwrap_or(&authority).to_owned();
    let mut fields = Fields::new();
    fields.append("Host", authority.clone().into());
    fields.append("Connection", Bytes::from_static(b"close"));
    let body = (method != "GET").then(Bytes::new);
    if body.is_some() {
        fields.append("Content-Length", Bytes::from_static(b"0"));
    }
    for (name, value) in headers {
        fields.append(name, value.clone());
    }
    let head = RequestHead {
        method: Bytes::copy_from_slice(method.as_bytes()),
        target: Bytes::copy_from_slice(path.as_bytes()),
        scheme: Scheme::Http,
        authority,
        headers: fields,
    };
    let answered = talk(Connection::new(stream), &head, body).await;
    let (head, body) = answered
        .map_err(|reason| format!("whoever gives this host keys gave no sound answer: {reason}"))?;
    Ok((head.status, body))
}

async fn dial(host: &Host, port: u16) -> Result<Stream, String> {
    let Host::Ip(ip) = host else {
        return Err("whoever gives this host keys is asked by an address only".to_owned());
    };
    match timeout(CONNECT, TcpStream::connect(SocketAddr::new(*ip, port))).await {
        Ok(Ok(stream)) => Ok(Stream::new(stream)),
        Ok(Err(error)) => Err(format!("cannot connect to {host}: {error}")),
        Err(_) => Err(format!("cannot connect to {host} within {} s", CONNECT.as_secs())),
    }
}
