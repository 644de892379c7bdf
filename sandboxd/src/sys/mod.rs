//! The only place of sandboxd for unsafe code and for the crates that wrap the kernel: one file
//! for each facility.

#![allow(unsafe_code)]

use std::path::Path;

/// Confines this process for the rest of its life: no core dump, no ptrace by its own user, no file
/// but those below `read` and `write`. Call it after the zygote was started and before the runtime:
/// Landlock holds for the calling thread and those it starts. Paths that do not exist are passed
/// over. Returns what to tell the operator.
pub fn confine_self(read: &[&Path], write: &[&Path]) -> std::io::Result<String> {
    let _ = (read, write);
    todo!()
}
