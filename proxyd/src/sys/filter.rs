//! System call filters of the vault's processes (seccomp(2)): a list for a job, and what becomes of
//! every other call.
//!
//! A filter that is loaded later cannot take back what an earlier one refuses, and of two that
//! refuse the kernel takes the stronger. So those that end the process or give an error of their
//! own come first, each a small one, and the list of what is allowed comes last: it forbids loading
//! another one, too. For the errors of the earlier ones to count, it allows what those refuse.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// What an argument of a call must be, by its number from 0. Those that are named anywhere are an
/// `int` or an `unsigned int` to the kernel, which ignores the upper half, unless it is a pointer.
#[derive(Clone, Copy, Debug)]
pub enum Argument {
    Is(u8, u32),
    IsNot(u8, u32),
    /// Masked by the second it is the third.
    Masked(u8, u32, u32),
    Null(u8),
}

/// A call with arguments that are all as named.
#[derive(Clone, Debug)]
pub struct When {
    pub call: i64,
    pub arguments: Vec<Argument>,
}

pub fn when(call: i64, arguments: impl Into<Vec<Argument>>) -> When {
    When { call, arguments: arguments.into() }
}

/// What one process, and what it starts, may ask of the kernel.
#[derive(Clone, Debug, Default)]
pub struct Job<'a> {
    /// No error of ours or of a library leads here: the process ends at once.
    pub fatal: Vec<&'a [i64]>,
    /// What libraries try and do without: unknown to this kernel (ENOSYS).
    pub unknown: Vec<&'a [i64]>,
    /// EPERM.
    pub refused: Vec<&'a [i64]>,
    /// EPERM with these arguments.
    pub refused_when: Vec<When>,
    pub allowed: Vec<&'a [i64]>,
    /// With these arguments only.
    pub allowed_when: Vec<When>,
    /// The error of every call that is named nowhere.
    pub otherwise: i32,
}

impl Job<'_> {
    /// From now on the calling thread, and what it starts, does nothing else.
    pub fn load(&self) -> io::Result<()> {
        let error = |number: i32| SeccompAction::Errno(number.unsigned_abs());
        let first = [
            (rules(&self.fatal, &[])?, SeccompAction::KillProcess),
            (rules(&self.unknown, &[])?, error(libc::ENOSYS)),
            (rules(&self.refused, &self.refused_when)?, error(libc::EPERM)),
        ];
        let named: Vec<&[i64]> = [&self.fatal, &self.unknown, &self.refused, &self.allowed]
            .into_iter()
            .flatten()
            .copied()
            .collect();
        let last = rules(&named, &self.allowed_when)?;
        // All are made before one is loaded: an error leaves none in force by itself.
        let mut programs = Vec::new();
        for (rules, action) in first {
            if !rules.is_empty() {
                programs.push(program(rules, SeccompAction::Allow, action)?);
            }
        }
        programs.push(program(last, error(self.otherwise), SeccompAction::Allow)?);
        for program in programs {
            seccompiler::apply_filter(&program).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn program(rules: Rules, other: SeccompAction, named: SeccompAction) -> io::Result<BpfProgram> {
    let arch = if cfg!(target_arch = "x86_64") { TargetArch::x86_64 } else { TargetArch::aarch64 };
    let filter = SeccompFilter::new(rules, other, named, arch);
    filter.and_then(TryInto::try_into).map_err(io::Error::other)
}

/// A call without rules is meant with any arguments.
fn rules(always: &[&[i64]], conditions: &[When]) -> io::Result<Rules> {
    let mut rules = Rules::new();
    for condition in conditions {
        let arguments = condition.arguments.iter().map(|argument| judged(*argument));
        let arguments = arguments.collect::<Result<_, _>>().map_err(io::Error::other)?;
        let rule = SeccompRule::new(arguments).map_err(io::Error::other)?;
        rules.entry(condition.call).or_default().push(rule);
    }
    rules.extend(always.iter().copied().flatten().map(|call| (*call, Vec::new())));
    Ok(rules)
}

fn judged(argument: Argument) -> Result<SeccompCondition, seccompiler::BackendError> {
    use SeccompCmpArgLen::{Dword, Qword};
    let (number, length, how, value) = match argument {
        Argument::Is(number, value) => (number, Dword, SeccompCmpOp::Eq, value),
        Argument::IsNot(number, value) => (number, Dword, SeccompCmpOp::Ne, value),
        Argument::Masked(number, mask, value) => {
            (number, Dword, SeccompCmpOp::MaskedEq(mask.into()), value)
        }
        Argument::Null(number) => (number, Qword, SeccompCmpOp::Eq, 0),
    };
    SeccompCondition::new(number, length, how, value.into())
}

/// For tests of what a filter does to the process that loads it.
#[cfg(test)]
pub mod trial {
    /// How a process ended.
    #[derive(Debug, PartialEq, Eq)]
    pub enum End {
        Code(i32),
        Signal(i32),
    }

    /// Runs `act` in a process of its own and tells how it ended; its code is what `act` gives. One
    /// that is stuck ends by an alarm.
    pub fn apart(act: impl FnOnce() -> i32) -> End {
        // SAFETY: the child runs `act`, which waits for no other thread of this process (the
        // allocator is made to be used after a fork), and leaves without running what the parent
        // has yet to run.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "{}", std::io::Error::last_os_error());
        if child == 0 {
            // SAFETY: neither call touches memory; the second does not return.
            unsafe {
                libc::alarm(60);
                libc::_exit(act());
            }
        }
        let mut status = 0;
        // SAFETY: the child is ours and nobody else waits for it; `status` is a place for an int.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(waited, child, "{}", std::io::Error::last_os_error());
        match libc::WIFSIGNALED(status) {
            true => End::Signal(libc::WTERMSIG(status)),
            false => End::Code(libc::WEXITSTATUS(status)),
        }
    }

    /// The error of a call; 0 when there is none.
    pub fn call(number: i64, arguments: [u64; 6]) -> i32 {
        let [a, b, c, d, e, f] = arguments;
        // SAFETY: the tests name calls that a filter stops before the kernel looks at what the
        // arguments point to, or pass none that points anywhere but to memory of theirs.
        let outcome = unsafe { libc::syscall(number, a, b, c, d, e, f) };
        match outcome {
            -1 => std::io::Error::last_os_error().raw_os_error().unwrap_or(-1),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::trial::{End, apart, call};
    use super::*;

    /// What becomes of each of the calls under a filter that has one of each kind.
    fn under_all_kinds(number: i64, arguments: [u64; 6]) -> End {
        apart(|| {
            let job = Job {
                fatal: vec![&[libc::SYS_ptrace]],
                unknown: vec![&[libc::SYS_clone3]],
                refused: vec![&[libc::SYS_getppid]],
                refused_when: vec![when(libc::SYS_umask, [Argument::Is(0, 7)])],
                allowed: vec![&[libc::SYS_exit_group, libc::SYS_umask, libc::SYS_getpid]],
                allowed_when: vec![
                    when(libc::SYS_getpriority, [Argument::Is(0, 0), Argument::Null(1)]),
                    when(libc::SYS_getpriority, [Argument::Masked(0, 0xff, 2)]),
                ],
                otherwise: libc::EACCES,
            };
            match job.load() {
                Ok(()) => call(number, arguments),
                Err(_) => 255,
            }
        })
    }

    #[test]
    fn each_call_has_the_fate_that_its_list_says() {
        let none = [0; 6];
        for (number, arguments, end) in [
            (libc::SYS_getpid, none, End::Code(0)),
            (libc::SYS_umask, none, End::Code(0)),
            (libc::SYS_umask, [7, 0, 0, 0, 0, 0], End::Code(libc::EPERM)),
            // The upper half of an int is not the kernel's to see.
            (libc::SYS_umask, [7 | 1 << 40, 0, 0, 0, 0, 0], End::Code(libc::EPERM)),
            (libc::SYS_getppid, none, End::Code(libc::EPERM)),
            (libc::SYS_clone3, none, End::Code(libc::ENOSYS)),
            (libc::SYS_ptrace, none, End::Signal(libc::SIGSYS)),
            (libc::SYS_getpriority, none, End::Code(0)),
            (libc::SYS_getpriority, [0, 1 << 40, 0, 0, 0, 0], End::Code(libc::EACCES)),
            (libc::SYS_getpriority, [0x102, 0, 0, 0, 0, 0], End::Code(libc::EINVAL)),
            (libc::SYS_getpriority, [1, 0, 0, 0, 0, 0], End::Code(libc::EACCES)),
            (libc::SYS_getuid, none, End::Code(libc::EACCES)),
            // Nobody loads another filter.
            (libc::SYS_seccomp, none, End::Code(libc::EACCES)),
        ] {
            assert_eq!(under_all_kinds(number, arguments), end, "{number} {arguments:?}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_same_calls_through_the_entry_of_x32_are_none_of_the_list() {
        const X32: i64 = 0x4000_0000;
        let none = [0; 6];

        // A kernel without that entry says so by itself.
        for number in [libc::SYS_getpid, libc::SYS_ptrace, libc::SYS_umask] {
            let end = under_all_kinds(X32 | number, none);
            assert!([End::Code(libc::EACCES), End::Code(libc::ENOSYS)].contains(&end), "{end:?}");
        }
    }
}
