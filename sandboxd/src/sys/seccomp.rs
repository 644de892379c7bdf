//! The system call filter of every command.
//!
//! [`calls`] is the table, [`filter`] turns it into the kernel's program, here it is loaded. Made
//! once, in the zygote; cells inherit the bytes.

mod calls;
mod filter;

use std::os::fd::{FromRawFd, OwnedFd};

pub use filter::Instruction;

/// What the filter is, for receipts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub architecture: &'static str,
    pub calls_allowed: usize,
    pub instructions: usize,
}

/// Whom a filter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// Programs.
    Command,
    /// Our own code of the file tools, inside a cell.
    FileTools,
}

/// A listener, and calls that no signal but a deadly one ends once they were heard: restarted, a
/// call that was made in its caller's place would be made twice (Linux 5.19).
const SUPERVISED: libc::c_ulong =
    libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;

/// The filters, ready to be loaded.
#[derive(Clone, Debug)]
pub struct Filter {
    commands: Vec<Instruction>,
    files: Vec<Instruction>,
    extent: Extent,
}

impl Filter {
    /// The filters of this architecture.
    pub fn new() -> Self {
        let table = calls::commands();
        let assemble = |table| filter::assemble(calls::ARCHITECTURE, calls::NUMBER_MAX, table);
        let commands = assemble(&table);
        let extent = Extent {
            architecture: std::env::consts::ARCH,
            calls_allowed: table.iter().filter(|(_, node)| node.may_allow()).count(),
            instructions: commands.len(),
        };
        Self { commands, files: assemble(&calls::files()), extent }
    }

    /// Of the filter of commands.
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Filters the calling thread and what it starts, for good. Needs no-new-privileges. Gives the
    /// listener of supervised calls where there are any (`super::supervision`): it must leave the
    /// process before what is filtered runs, or that would answer itself.
    pub fn load(&self, subject: Subject) -> std::io::Result<Option<OwnedFd>> {
        let (program, flags) = match subject {
            Subject::Command => (&self.commands, SUPERVISED),
            Subject::FileTools => (&self.files, 0),
        };
        let program = libc::sock_fprog {
            len: u16::try_from(program.len()).expect("the table is fixed and far shorter"),
            filter: program.as_ptr().cast_mut().cast(),
        };
        // SAFETY: `program` describes a vector of `self`, whose layout is that of sock_filter; the
        // kernel copies it and writes nothing.
        let result = unsafe {
            let operation = libc::SECCOMP_SET_MODE_FILTER;
            libc::syscall(libc::SYS_seccomp, operation, flags, &raw const program)
        };
        if result == -1 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: with these flags the kernel gave a new descriptor that nobody else knows.
        let listener = |fd| unsafe { OwnedFd::from_raw_fd(fd as i32) };
        Ok((flags != 0).then(|| listener(result)))
    }
}

impl Default for Filter {
    fn default() -> Self {
        Self::new()
    }
}
