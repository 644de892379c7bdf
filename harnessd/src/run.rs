//! Under way.
use std::{ffi::OsString, process::ExitCode};
/// Entry.
pub fn main(_prefix: &[&str], _args: Vec<OsString>) -> ExitCode {
    todo!()
}
