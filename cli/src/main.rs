//! `cleanhands`, the operator's command: it starts the three daemons and talks to their sockets.
//!
//! The daemons are linked in: `cleanhands proxyd …` *is* proxyd, chosen here before any argument
//! is parsed and any thread exists. Everything else is a subcommand in a file of its own; read
//! `args` for the list, `demo` for the whole story in one place. This program holds no secret: a
//! value passes through `secret set` and the demo's sealing process, both of which end with it.
#![deny(unsafe_code)]

mod api;
mod args;
mod audit;
mod ca;
mod chain;
mod completions;
mod daemons;
mod demo;
mod doctor;
mod exec;
mod failure;
mod key;
mod lease;
mod man;
mod place;
mod policy;
mod question;
mod run;
mod secret;
mod session;
mod show;
mod sse;
mod stop;
mod term;
mod up;
mod wire;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command, Hidden};
use crate::failure::Failure;

fn main() -> ExitCode {
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if words.first().is_some_and(|word| word == daemons::ATTACHED)
        && let Err(failure) = daemons::attach(&mut words)
    {
        return failure.report(false);
    }
    let program = words.first().and_then(|word| word.to_str()).unwrap_or_default().to_owned();
    match program.as_str() {
        "proxyd" => return proxyd::main(&["proxyd"], words.split_off(1)),
        "sandboxd" => return sandboxd::main(&["sandboxd"], words.split_off(1)),
        "harnessd" => return harnessd::main(&["harnessd"], words.split_off(1)),
        _ => {}
    }
    let line = std::iter::once("cleanhands".into()).chain(words.iter().cloned());
    let args = match Args::try_parse_from(line) {
        Ok(args) => args,
        Err(error) if error.use_stderr() => return misused(&error, &words),
        Err(error) => error.exit(),
    };
    let json = args.global.json;
    // One thread: what this program starts dies with the thread that started it (PR_SET_PDEATHSIG).
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::new(format!("cannot start: {error}")).report(json),
    };
    let outcome = runtime.block_on(perform(args));
    // A read of the terminal that nobody waits for any more must not keep the program here.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(failure) => failure.report(json),
    }
}

/// What stands beside the word `secret` may be one, and is not repeated.
fn misused(error: &clap::Error, words: &[OsString]) -> ExitCode {
    let json = args::wants_json(words);
    match args::subcommand(words).as_deref() {
        Some("secret") => secret::misused(error, true, json),
        None if words.iter().any(|word| word == "secret") => secret::misused(error, false, json),
        _ if json => Failure::usage(error).report(true),
        _ => error.exit(),
    }
}

async fn perform(args: Args) -> Result<ExitCode, Failure> {
    let global = args.global;
    match args.command {
        Command::Demo(options) => demo::demo(&global, options).await,
        Command::Up(options) => up::up(&global, options).await,
        Command::Run(options) => run::run(&global, options).await,
        Command::Exec(options) => exec::exec(&global, options).await,
        Command::Secret(what) => secret::secret(&global, what).await,
        Command::Key(what) => key::key(&global, what).await,
        Command::Lease(what) => lease::lease(&global, what).await,
        Command::Session(what) => session::session(&global, what).await,
        Command::Audit(options) => audit::audit(&global, options).await,
        Command::Ca(what) => ca::ca(&global, what).await,
        Command::Question(what) => question::question(&global, what).await,
        Command::Policy(what) => policy::policy(&global, what).await,
        Command::Doctor => doctor::doctor(&global).await,
        Command::Completions { shell } => completions::print(shell),
        Command::Hidden(Hidden::DemoSeal) => demo::seal::main(&global).await,
        Command::Hidden(Hidden::DemoBilling { ca }) => demo::billing::main(&ca).await,
        Command::Hidden(Hidden::Man { directory }) => man::write(&directory),
    }
}
