//! `cleanhands key`: keys of the loopback port, each standing for the user who made it.
//!
//! A key is shown once, on standard output, so that it can be piped to where it belongs; harnessd
//! keeps its hash.

use std::io::IsTerminal;
use std::process::ExitCode;

use ipc::http::Client;

use crate::api::Harness;
use crate::args::{Global, Key};
use crate::failure::Failure;
use crate::place;
use crate::term;

pub async fn key(global: &Global, what: Key) -> Result<ExitCode, Failure> {
    let harness = Harness::new(Client::new(place::layout(global).harnessd()));
    match what {
        Key::Add { name } => {
            let made = harness.add_key(&name).await?;
            if global.json {
                term::json_line(&made)?;
            } else {
                term::line(&made.key)?;
                if std::io::stdout().is_terminal() {
                    term::aside("this is the only time it is shown");
                }
            }
        }
        Key::List => {
            let list = harness.keys().await?;
            if global.json {
                term::json_line(&list)?;
            } else if list.names.is_empty() {
                term::line("no keys; `cleanhands key add NAME` makes one")?;
            } else {
                list.names.iter().try_for_each(|name| term::line(&term::printable(name)))?;
            }
        }
        Key::Remove { name } => {
            harness.remove_key(&name).await?;
            if global.json {
                term::json_line(&serde_json::json!({ "name": name }))?;
            } else {
                term::line(&format!("removed {}", term::printable(&name)))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
