//! Writes manual pages made from the command line's own definition: one for the command and one
//! for each subcommand, named as man(1) finds them (`cleanhands-secret-set.1`).

use std::path::Path;
use std::process::ExitCode;

use clap::{Command, CommandFactory};

use crate::args::Args;
use crate::failure::Failure;

/// Writes every page into `directory`, which exists.
pub fn write(directory: &Path) -> Result<ExitCode, Failure> {
    let mut command = Args::command();
    // Global flags and inherited settings are on the subcommands' pages too.
    command.build();
    page(&command, "cleanhands", directory)?;
    Ok(ExitCode::SUCCESS)
}

fn page(command: &Command, name: &str, directory: &Path) -> Result<(), Failure> {
    let path = directory.join(format!("{name}.1"));
    let failed = |error: std::io::Error| {
        Failure::new(format!("cannot write a manual page: {}: {error}", path.display()))
    };
    // The page's name is the command's with hyphens; its text keeps what is typed.
    let own = command.clone().display_name(name.to_owned());
    let mut text = Vec::new();
    let source = concat!("Cleanhands ", env!("CARGO_PKG_VERSION"));
    let man = clap_mangen::Man::new(own).manual("Cleanhands").source(source);
    man.render(&mut text).map_err(failed)?;
    std::fs::write(&path, text).map_err(failed)?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        if sub.get_name() != "help" {
            page(sub, &format!("{name}-{}", sub.get_name()), directory)?;
        }
    }
    Ok(())
}
