//! The packaged daemon: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    harnessd::main(&[], std::env::args_os().skip(1).collect())
}
