//! `cleanhands policy explain`: what would become of one request, and why, rule by rule.

use std::process::ExitCode;

use policies::{
    ConnectDecision, Decision, EgressRequest, Host, Policy, Scheme, explain, split_url,
};
use serde_json::{Value, json};

use super::{environment, load};
use crate::args::{Explain, Global};
use crate::failure::{Failure, OTHERWISE, USAGE};
use crate::term;

/// Where a request goes, as it was written.
struct Asked {
    scheme: Scheme,
    host: Host,
    port: u16,
    /// None where only the connection was asked about.
    path: Option<String>,
    query: Option<String>,
}

pub fn run(global: &Global, options: &Explain) -> Result<ExitCode, Failure> {
    let asked = Asked::parse(&options.url)?;
    let set = load(&options.policies)?;
    let policy = environment(&set, &options.environment)?;
    let told = told(policy, &asked, &options.method);
    if global.json {
        term::json_line(&told.json)?;
    } else {
        term::line(&term::printable(&told.text))?;
    }
    Ok(if told.allowed { ExitCode::SUCCESS } else { ExitCode::from(OTHERWISE) })
}

impl Asked {
    fn parse(url: &str) -> Result<Self, Failure> {
        let wrong = |why: String| {
            Failure::new(format!("{url:?} is no address of a request: {why}"))
                .with_hint("write https://host/path?query, http://…, or host:port for a connection")
                .with_status(USAGE)
        };
        let Some((scheme, rest)) = url.split_once("://") else {
            let (scheme, host, port, _) = split_url(&format!("https://{url}")).map_err(wrong)?;
            return Ok(Self { scheme, host, port, path: None, query: None });
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, target) = rest.find(['/', '?']).map_or((rest, ""), |at| rest.split_at(at));
        let (scheme, host, port, _) =
            split_url(&format!("{scheme}://{authority}")).map_err(wrong)?;
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path, Some(query.to_owned())),
            None => (target, None),
        };
        // The path stays as it is: whether it can be read in two ways is for the policy to say.
        let path = Some(if path.is_empty() { "/".to_owned() } else { path.to_owned() });
        Ok(Self { scheme, host, port, path, query })
    }
}

struct Told {
    allowed: bool,
    text: String,
    json: Value,
}

fn told(policy: &Policy, asked: &Asked, method: &str) -> Told {
    let (connection, allowed) = match policy.at_connect(&asked.host, asked.port) {
        ConnectDecision::Deny(denial) => (format!("denied: {denial}"), false),
        ConnectDecision::Tunnel(permit) => {
            let asks = permit.asks().map_or("", |_| ", once an operator has said yes");
            let rule = permit.rule();
            (format!("passed on unread by {rule}{asks}: no request is looked at"), true)
        }
        ConnectDecision::Inspect => {
            ("requests are read, each is judged by itself".to_owned(), true)
        }
    };
    let connection = format!("connection to {}: {connection}", place_of(asked));
    let Some(path) = &asked.path else {
        let json = json!({ "allowed": allowed, "connection": connection });
        return Told { allowed, text: connection, json };
    };
    let (scheme, host, port) = (asked.scheme, &asked.host, asked.port);
    let request = EgressRequest { scheme, host, port, method, path, query: asked.query.as_deref() };
    let explained = explain(policy, &request);
    let mut text = format!("{connection}\n{explained}");
    let mut carried = Vec::new();
    if let Decision::Allowed(permit) = policy.decide(&request) {
        let credentials = [permit.credential(), permit.certificate()];
        for credential in credentials.into_iter().flatten() {
            let (name, secret) = (&credential.name, credential.secret.to_string());
            text += &format!("\ncredential \"{name}\": its secret is {secret}");
            if !credential.env.is_empty() {
                text += &format!("; a placeholder of it is in {}", credential.env.join(", "));
            }
            carried.push(json!({ "name": name, "secret": secret, "env": credential.env }));
        }
        let addresses: Vec<String> = permit.addresses().iter().map(ToString::to_string).collect();
        if !addresses.is_empty() {
            text += &format!("\nthe name may lead to {} too", addresses.join(", "));
        }
    }
    let steps: Vec<Value> = explained
        .steps
        .iter()
        .map(|s| json!({ "rule": s.rule, "allows": s.summary, "verdict": s.verdict }))
        .collect();
    let json = json!({
        "allowed": explained.allowed, "connection": connection, "rules": steps,
        "outcome": explained.outcome, "hint": explained.hint, "credentials": carried,
        "asks_within_seconds": explained.asks,
    });
    Told { allowed: explained.allowed, text, json }
}

/// Host and port.
fn place_of(asked: &Asked) -> String {
    match &asked.host {
        Host::Ip(std::net::IpAddr::V6(ip)) => format!("[{ip}]:{}", asked.port),
        host => format!("{host}:{}", asked.port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_is_sent() {
        for (url, port, path, query) in [
            ("https://a.example", 443, Some("/"), None),
            ("http://a.example/x/../y", 80, Some("/x/../y"), None),
            ("https://a.example:8443/x?y=1#z", 8443, Some("/x"), Some("y=1")),
            ("https://a.example?y", 443, Some("/"), Some("y")),
            ("a.example:5432", 5432, None, None),
            ("[::1]:22", 22, None, None),
        ] {
            let asked = Asked::parse(url).unwrap();
            let found = (asked.port, asked.path.as_deref(), asked.query.as_deref());
            assert_eq!(found, (port, path, query), "{url}");
        }
        for wrong in ["ftp://a.example/", "https://", "https://u@a.example/", "a b", "a.example:0"]
        {
            assert!(Asked::parse(wrong).is_err(), "{wrong}");
        }
    }
}
