//! The packaged daemon: hands its arguments to the library and exits with what that says.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandboxd::main(&[], std::env::args_os().skip(1).collect())
}
