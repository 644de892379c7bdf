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

/// A filter, ready to be loaded.
#[derive(Clone, Debug)]
pub struct Filter {
    program: Vec<Instruction>,
    extent: Extent,
}

impl Filter {
    /// The filter of this architecture.
    pub fn new() -> Self {
        let table = calls::table();
        let calls_allowed = table.iter().filter(|(_, node)| node.may_allow()).count();
        let program = filter::assemble(calls::ARCHITECTURE, calls::NUMBER_MAX, &table);
        let extent = Extent {
            architecture: std::env::consts::ARCH,
            calls_allowed,
            instructions: program.len(),
        };
        Self { program, extent }
    }

    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Filters the calling thread and what it starts, for good. Needs no-new-privileges.
    pub fn load(&self) -> std::io::Result<()> {
        let program = libc::sock_fprog {
            len: u16::try_from(self.program.len()).expect("the table is fixed and far shorter"),
            filter: self.program.as_ptr().cast_mut().cast(),
        };
        // SAFETY: `program` describes `self.program`, whose layout is that of sock_filter; the
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
