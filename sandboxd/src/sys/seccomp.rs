//! The system call filter of every command.
//!
//! [`calls`] is the table, [`filter`] turns it into the kernel's program, here it is loaded. Made
//! once, in the zygote; cells inherit the bytes.

mod calls;
mod filter;

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

    /// Filters the calling thread and what it starts, for good. Needs no-new-privileges.
    pub fn load(&self, subject: Subject) -> std::io::Result<()> {
        let program = match subject {
            Subject::Command => &self.commands,
            Subject::FileTools => &self.files,
        };
        let program = libc::sock_fprog {
            len: u16::try_from(program.len()).expect("the table is fixed and far shorter"),
            filter: program.as_ptr().cast_mut().cast(),
        };
        // SAFETY: `program` describes a vector of `self`, whose layout is that of sock_filter; the
        // kernel copies it and writes nothing.
        let result = unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
        };
        if result == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Default for Filter {
    fn default() -> Self {
        Self::new()
    }
}
