//! What a lease's holder is told: where the proxy is, whom to trust, which variables say so.

use std::collections::BTreeMap;

use sandboxd::trust;
use serde_json::json;

use super::Entry;
use super::files::{BUNDLE, CA, ENVIRONMENT, Files, KEY_STORE};
use super::hold::Held;
use crate::args::{Global, OpenLease};
use crate::failure::Failure;
use crate::term;

/// The user's part of a proxy's URL; only the password counts.
const USER: &str = "lease";

/// Everything about one open lease.
pub struct Shown {
    lease: String,
    environment: String,
    token: String,
    seconds_left: Option<u64>,
    /// None on a Unix socket.
    url: Option<String>,
    address: String,
    loopback: bool,
    paths: BTreeMap<&'static str, String>,
    placeholders: Vec<(String, String)>,
    java: Vec<String>,
}

impl Shown {
    pub fn new(held: &Held, entry: &Entry, files: &Files) -> Self {
        let (url, address, loopback, java) = match entry {
            Entry::Tcp(address) => (
                Some(format!("http://{USER}:{}@{address}", held.token)),
                address.to_string(),
                address.ip().is_loopback(),
                java(&address.ip().to_string(), address.port(), &files.path(KEY_STORE)),
            ),
            Entry::Unix(path) => (None, path.display().to_string(), false, Vec::new()),
        };
        Self {
            lease: held.lease().to_owned(),
            environment: held.environment().to_owned(),
            token: held.token.clone(),
            seconds_left: held.seconds_left(),
            url,
            address,
            loopback,
            paths: [CA, BUNDLE, KEY_STORE, ENVIRONMENT].map(|n| (n, files.path(n))).into(),
            placeholders: held.env.clone(),
            java,
        }
    }

    /// The variables for a program on this host.
    pub fn variables(&self) -> Vec<(String, String)> {
        self.pointing_to(&self.paths[BUNDLE], &self.paths[CA])
    }

    /// The same for a container, where the files lie as they do in a sandbox.
    pub fn in_container(&self) -> Vec<(String, String)> {
        self.pointing_to(trust::BUNDLE, trust::OURS)
    }

    fn pointing_to(&self, bundle: &str, ours: &str) -> Vec<(String, String)> {
        let own = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let mut variables = Vec::new();
        if let Some(url) = &self.url {
            // Programs differ in which case they read; some, like curl, read http_proxy only so.
            for name in ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"] {
                variables.push(own(name, url));
                variables.push(own(&name.to_lowercase(), url));
            }
            // What is on the client's own host is not proxyd's to reach.
            for name in ["NO_PROXY", "no_proxy"] {
                variables.push(own(name, "localhost,127.0.0.1,::1"));
            }
            // Node reads the variables above only when told to.
            variables.push(own("NODE_USE_ENV_PROXY", "1"));
        }
        for (name, value) in trust::variables() {
            match value.as_str() {
                trust::BUNDLE => variables.push((name, bundle.to_owned())),
                trust::OURS => variables.push((name, ours.to_owned())),
                _ => {}
            }
        }
        // A file that somebody set for these would be asked instead; in a sandbox every such file
        // is ours, here it is not.
        for name in ["npm_config_cafile", "YARN_HTTPS_CA_FILE_PATH"] {
            variables.push(own(name, bundle));
        }
        variables.extend(self.placeholders.iter().cloned());
        variables
    }

    pub fn print(&self, global: &Global, options: &OpenLease) -> Result<(), Failure> {
        let text = match (global.json, options.shell, options.docker) {
            (true, _, _) => return term::json_line(&self.json()),
            (_, true, _) => self.shell(),
            (_, _, true) => self.docker() + "\n",
            _ => self.text(),
        };
        term::write_out(text.as_bytes())
    }

    fn json(&self) -> serde_json::Value {
        let variables = self.variables();
        let variables: serde_json::Map<_, _> =
            variables.into_iter().map(|(n, v)| (n, v.into())).collect();
        json!({
            "lease": self.lease,
            "environment": self.environment,
            "address": self.address,
            "proxy": self.url,
            "token": self.token,
            "seconds_left": self.seconds_left,
            "ca": self.paths[CA],
            "bundle": self.paths[BUNDLE],
            "java_trust_store": self.paths[KEY_STORE],
            "variables": variables,
            "java": self.java,
            "docker": self.docker(),
        })
    }

    /// Lines that a shell reads with `.`.
    fn shell(&self) -> String {
        let export =
            |(name, value): &(String, String)| format!("export {name}={}\n", quoted(value));
        self.variables().iter().map(export).collect()
    }

    /// Arguments of `docker run` and `podman run`.
    fn docker(&self) -> String {
        let mount = |name: &str, target: &str| {
            format!("--volume {}", quoted(&format!("{}:{target}:ro", self.paths[name])))
        };
        let mut words = vec![
            format!("--env-file {}", quoted(&self.paths[ENVIRONMENT])),
            mount(BUNDLE, trust::BUNDLE),
            mount(CA, trust::OURS),
            mount(KEY_STORE, trust::KEY_STORE),
        ];
        if self.loopback {
            words.push("--network host".to_owned());
        }
        if self.url.is_none() {
            words.push(format!("--volume {}", quoted(&format!("{0}:{0}", self.address))));
        }
        words.join(" ")
    }

    fn text(&self) -> String {
        let left = self.seconds_left.map_or_else(String::new, |left| format!(" for {left} s"));
        let mut text = format!(
            "lease {} in {} is open{left}; Ctrl-C ends it\n\nproxy  {}\nCA     {}\nboth   {}\n",
            self.lease, self.environment, self.address, self.paths[CA], self.paths[BUNDLE]
        );
        if self.url.is_none() {
            text +=
                "\nProcesses of this user need no token on that socket. The token for others:\n";
            text += &format!("  {}\n", self.token);
        }
        text += match self.url {
            Some(_) => "\nVariables (--shell prints them for a shell, --docker for containers):\n",
            None => "\nVariables:\n",
        };
        for (name, value) in self.variables() {
            text += &format!("  {name}={value}\n");
        }
        if !self.java.is_empty() {
            text += "\nJava, whose programs ask their own java.net.Authenticator for the token:\n";
            text += &format!("  {}\n", self.java.join(" "));
        }
        text
    }
}

/// Options for a Java program: it reads no variables, and no PEM.
fn java(host: &str, port: u16, store: &str) -> Vec<String> {
    let mut options = Vec::new();
    for scheme in ["http", "https"] {
        options.push(format!("-D{scheme}.proxyHost={host}"));
        options.push(format!("-D{scheme}.proxyPort={port}"));
    }
    // By default it gives no password to a proxy that it asks for a tunnel.
    options.push("-Djdk.http.auth.tunneling.disabledSchemes=".to_owned());
    options.push(format!("-Djavax.net.ssl.trustStore={store}"));
    options.push("-Djavax.net.ssl.trustStorePassword=changeit".to_owned());
    options
}

/// One word of a shell.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/:._-=,@+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_a_shell_is_one_word_whatever_stands_in_it() {
        assert_eq!(quoted("/tmp/a.pem"), "/tmp/a.pem");
        assert_eq!(quoted("it's $HOME"), "'it'\\''s $HOME'");
        assert_eq!(quoted(""), "''");
    }
}
