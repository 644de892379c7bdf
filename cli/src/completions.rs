//! Prints a completion script made from the command line's own definition.

use std::process::ExitCode;

use clap::CommandFactory;

use crate::args::Args;
use crate::failure::Failure;

pub fn print(shell: clap_complete::Shell) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "cleanhands", &mut script);
    crate::term::write_out(&script)?;
    Ok(ExitCode::SUCCESS)
}
