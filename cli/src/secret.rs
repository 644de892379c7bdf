//! `cleanhands secret`: values go in, names come out.
//!
//! A value is read from standard input, without echo where that is a terminal, sent to proxyd over
//! its socket and wiped here. It is never an argument, a variable, or part of a message.

use std::io::{IsTerminal, Read, Write};
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use bytes::Bytes;
use ipc::fault::Code;
use ipc::http::Client;
use ipc::vault::{SECRET_BYTES_MAX, SECRET_BYTES_MIN, SecretInfo};
use rustix::termios::{LocalModes, OptionalActions, Termios};
use zeroize::Zeroizing;

use crate::api::segment;
use crate::args::{Global, Secret};
use crate::failure::{Failure, INTERRUPTED, USAGE};
use crate::place;
use crate::term;

/// Says how the command is used, and nothing of what was typed: that may be the value. `named`:
/// this subcommand was surely meant.
pub fn misused(error: &clap::Error, named: bool, json: bool) -> ExitCode {
    let usage = error.get(clap::error::ContextKind::Usage).map(ToString::to_string);
    let usage = usage.unwrap_or_else(|| "Usage: cleanhands [OPTIONS] <COMMAND>".to_owned());
    let advice = "a value is never an argument: cleanhands secret set NAME < FILE\n";
    let advice = if named { advice } else { "" };
    let text = "wrong arguments; they are not shown, as one may be a secret";
    let hint = format!("{advice}\n{usage}\n\nFor more information, try '--help'.");
    if json {
        return Failure { code: Code::Invalid, ..Failure::new(text) }
            .with_hint(hint.trim())
            .with_status(USAGE)
            .report(true);
    }
    // Nobody reads standard error: the exit status still tells.
    let _ = writeln!(std::io::stderr(), "error: {text}\n{hint}");
    ExitCode::from(USAGE)
}

pub async fn secret(global: &Global, what: Secret) -> Result<ExitCode, Failure> {
    let proxyd = Client::new(place::layout(global).proxyd());
    match what {
        Secret::Set { name } => set(global, &proxyd, &name).await,
        Secret::List => list(global, &proxyd).await,
        Secret::Rotate { wrapping_key: false } => rotate(global, &proxyd).await,
        Secret::Rotate { wrapping_key: true } => replace_wrapping_key(global, &proxyd).await,
        Secret::Remove { name } => remove(global, &proxyd, &name).await,
    }
}

async fn set(global: &Global, proxyd: &Client, name: &str) -> Result<ExitCode, Failure> {
    check_name(name)?;
    let stored = store(proxyd, name, asked_for(name).await?).await?;
    if global.json {
        term::json_line(&stored)?;
    } else {
        term::line(&format!("stored {} (version {})", term::printable(name), stored.version))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses a name that no policy could use, before a value is asked for. It is not repeated: it may
/// be the value.
fn check_name(name: &str) -> Result<(), Failure> {
    if policies::is_secret_name(name) {
        return Ok(());
    }
    let text = "no policy could name such a secret; nothing was stored";
    Err(Failure { code: Code::Invalid, ..Failure::new(text) }
        .with_hint(
            "a name has 1 to 128 characters of A-Z a-z 0-9 . _ - and begins with a letter or \
             digit; it is not shown here, as it may be a value",
        )
        .with_status(USAGE))
}

/// Hands a value to the vault and wipes it here.
pub async fn store(
    proxyd: &Client,
    name: &str,
    value: Zeroizing<Vec<u8>>,
) -> Result<SecretInfo, Failure> {
    let path = format!("/v1/secrets/{}", segment(name));
    let kind = Some("application/octet-stream");
    let answer = proxyd.call(http::Method::PUT, &path, kind, Bytes::from_owner(value)).await?;
    serde_json::from_slice(&answer)
        .map_err(|error| Failure::new(format!("proxyd: answer is not as documented: {error}")))
}

async fn list(global: &Global, proxyd: &Client) -> Result<ExitCode, Failure> {
    let secrets = names(proxyd).await?;
    if global.json {
        for secret in &secrets {
            term::json_line(secret)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if secrets.is_empty() {
        term::line("no secrets; `cleanhands secret set NAME` stores one")?;
        return Ok(ExitCode::SUCCESS);
    }
    let heads = ["NAME", "KEPT", "VERSION", "STORED", "LAST USED", "EXPIRES", "STATE"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(secrets.into_iter().map(|s| {
        let none = || "-".to_owned();
        let used = s.last_used_at.unwrap_or_else(|| "never".into());
        let expires = s.expires_at.unwrap_or_else(none);
        let (version, stored, used) = match s.version {
            // Somebody else keeps it.
            0 => (none(), none(), none()),
            version => (version.to_string(), s.created_at, used),
        };
        vec![s.name, s.kept, version, stored, used, expires, s.state]
    }));
    term::write_out(term::columns(&rows).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// What the vault holds, by name.
pub async fn names(proxyd: &Client) -> Result<Vec<SecretInfo>, Failure> {
    #[derive(serde::Deserialize)]
    struct List {
        secrets: Vec<SecretInfo>,
    }
    let list: List = proxyd.get("/v1/secrets").await?;
    Ok(list.secrets)
}

async fn remove(global: &Global, proxyd: &Client, name: &str) -> Result<ExitCode, Failure> {
    let answer: serde_json::Value =
        proxyd.delete(&format!("/v1/secrets/{}", segment(name))).await?;
    if global.json {
        term::json_line(&answer)?;
    } else {
        term::line(&format!("removed {}", term::printable(name)))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn rotate(global: &Global, proxyd: &Client) -> Result<ExitCode, Failure> {
    let answer = proxyd.call(http::Method::POST, "/v1/vault/rotate", None, Bytes::new()).await?;
    let answer: serde_json::Value = serde_json::from_slice(&answer)
        .map_err(|error| Failure::new(format!("proxyd: answer is not as documented: {error}")))?;
    if global.json {
        term::json_line(&answer)?;
    } else {
        term::line(&format!("a new data key; {} rows sealed anew", answer["rows"]))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn replace_wrapping_key(global: &Global, proxyd: &Client) -> Result<ExitCode, Failure> {
    let path = "/v1/vault/wrapping-key";
    proxyd.call(http::Method::POST, path, None, Bytes::new()).await?;
    if global.json {
        term::json_line(&serde_json::json!({ "wrapping_key": "replaced" }))?;
    } else {
        term::line("a new key file; copies of the former one open former backups only")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the value from standard input. One newline at its end is the terminal's, not the value's.
async fn asked_for(name: &str) -> Result<Zeroizing<Vec<u8>>, Failure> {
    let quiet = std::io::stdin().is_terminal().then(|| Quiet::new(name)).transpose()?;
    let reading = tokio::task::spawn_blocking(read_value);
    let value = tokio::select! {
        value = reading => value,
        _ = tokio::signal::ctrl_c() => {
            drop(quiet);
            return Err(Failure::new("interrupted; nothing was stored").with_status(INTERRUPTED));
        }
    };
    drop(quiet);
    let read = value.map_err(|error| Failure::new(format!("cannot read: {error}")))?;
    let value = read.map_err(|e| Failure::new(format!("cannot read standard input: {e}")))?;
    checked(trimmed(value))
}

fn read_value() -> std::io::Result<Zeroizing<Vec<u8>>> {
    // Reserved at once: a buffer that grows would leave copies behind.
    let mut value = Zeroizing::new(Vec::with_capacity(SECRET_BYTES_MAX + 2));
    let terminal = std::io::stdin().is_terminal();
    let mut byte = Zeroizing::new([0u8; 1]);
    let mut input = std::fs::File::from(own_stdin()?);
    while value.len() < SECRET_BYTES_MAX + 2 && input.read(&mut byte[..])? == 1 {
        value.push(byte[0]);
        if terminal && byte[0] == b'\n' {
            break;
        }
    }
    Ok(value)
}

/// Standard input without the standard library's buffer, which would keep a copy.
fn own_stdin() -> std::io::Result<OwnedFd> {
    Ok(rustix::io::dup(rustix::stdio::stdin())?)
}

fn trimmed(mut value: Zeroizing<Vec<u8>>) -> Zeroizing<Vec<u8>> {
    if value.last() == Some(&b'\n') {
        value.pop();
        if value.last() == Some(&b'\r') {
            value.pop();
        }
    }
    value
}

fn checked(value: Zeroizing<Vec<u8>>) -> Result<Zeroizing<Vec<u8>>, Failure> {
    let hint = "cleanhands secret set NAME < FILE";
    match value.len() {
        0 => Err(Failure::new("the value is empty; nothing was stored").with_hint(hint)),
        n if n < SECRET_BYTES_MIN => Err(Failure::new(format!(
            "the value has {n} bytes; a secret has at least {SECRET_BYTES_MIN}"
        ))
        .with_hint("shorter ones could not be told from ordinary text when answers are scrubbed")),
        n if n > SECRET_BYTES_MAX => Err(Failure::new(format!(
            "the value has more than {SECRET_BYTES_MAX} bytes; nothing was stored"
        ))),
        _ => Ok(value),
    }
}

/// A terminal that does not show what is typed, until dropped.
struct Quiet {
    before: Termios,
}

impl Quiet {
    fn new(name: &str) -> Result<Self, Failure> {
        let fail = |e| Failure::new(format!("cannot switch off the terminal's echo: {e}"));
        let before = rustix::termios::tcgetattr(rustix::stdio::stdin()).map_err(fail)?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        rustix::termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &quiet)
            .map_err(fail)?;
        let mut err = std::io::stderr().lock();
        // Without a prompt the reading still works.
        let _ = write!(err, "value of {} (not shown): ", term::printable(name));
        let _ = err.flush();
        Ok(Self { before })
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // Nothing more can be done for a terminal that is gone.
        let stdin = rustix::stdio::stdin();
        let _ = rustix::termios::tcsetattr(stdin, OptionalActions::Now, &self.before);
        term::aside("");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_not_part_of_a_value() {
        let cases: [(&[u8], &[u8]); 5] = [
            (b"abcdefgh\n", b"abcdefgh"),
            (b"abcdefgh\r\n", b"abcdefgh"),
            (b"abcdefgh\n\n", b"abcdefgh\n"),
            (b"abcdefgh", b"abcdefgh"),
            (b"\n", b""),
        ];

        for (typed, value) in cases {
            assert_eq!(trimmed(Zeroizing::new(typed.to_vec())).as_slice(), value);
        }
    }

    #[test]
    fn empty_short_and_endless_values_are_refused_without_being_shown() {
        for bad in [Vec::new(), b"s3cret".to_vec(), vec![b'q'; SECRET_BYTES_MAX + 1]] {
            let failure = checked(Zeroizing::new(bad.clone())).unwrap_err();

            let text = format!("{} {:?}", failure.text, failure.hint);
            assert!(bad.is_empty() || !text.contains(std::str::from_utf8(&bad).unwrap()));
        }
        assert!(checked(Zeroizing::new(vec![b'q'; SECRET_BYTES_MAX])).is_ok());
    }
}
