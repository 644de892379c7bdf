//! The vault child: the only process that holds keys and values.

use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the child. `args` are those after the role name.
pub fn main(args: Vec<OsString>) -> ExitCode {
    let _ = args;
    todo!()
}
