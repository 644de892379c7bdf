//! From a table of system calls to a BPF program (seccomp(2), "Filters").
//!
//! The program checks the architecture (another kills: the numbers would mean other calls), then
//! finds the call's number by binary search over ranges that share a verdict, then looks at
//! arguments where the verdict hangs on them.

use std::ops::RangeInclusive;

/// One instruction, as the kernel lays it out (`struct sock_filter`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    pub code: u16,
    pub jump_true: u8,
    pub jump_false: u8,
    pub value: u32,
}

// linux/bpf_common.h, linux/seccomp.h
const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_AT_LEAST: u16 = 0x35;
const IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;
const RETURN_KILL_PROCESS: u32 = 0x8000_0000;
const RETURN_ERRNO: u32 = 0x0005_0000;
/// The call waits for whoever holds the filter's listener; fails with ENOSYS where nobody does.
const RETURN_SUPERVISOR: u32 = 0x7fc0_0000;
const RETURN_ALLOW: u32 = 0x7fff_0000;
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCHITECTURE: u32 = 4;
/// Low half of argument 0; the others follow at eight bytes each (little-endian machines).
const OFFSET_ARGUMENTS: u32 = 16;

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Allow,
    Fail(i32),
    /// The guard makes the call in the command's place, or refuses it (`init::gate`).
    Supervise,
}

/// A verdict that may hang on arguments. Arguments are looked at as 32 bits: each one that the
/// table names is an `int` or an `unsigned int` to the kernel, which ignores the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    Give(Verdict),
    /// Is argument `argument`, masked, one of `values`?
    If {
        argument: u8,
        mask: u32,
        values: Vec<u32>,
        then: Box<Node>,
        otherwise: Box<Node>,
    },
    /// Has argument `argument` any bit of `mask`?
    IfAnyBit {
        argument: u8,
        mask: u32,
        then: Box<Node>,
        otherwise: Box<Node>,
    },
}

impl Node {
    /// Whether any arguments lead to the call.
    pub fn may_allow(&self) -> bool {
        match self {
            Self::Give(verdict) => !matches!(verdict, Verdict::Fail(_)),
            Self::If { then, otherwise, .. } | Self::IfAnyBit { then, otherwise, .. } => {
                then.may_allow() || otherwise.may_allow()
            }
        }
    }
}

/// The program for a table of (number, node). Numbers that the table lacks fail with EPERM, those
/// above `number_max` with ENOSYS: to a program, a kernel that is older than they are.
pub fn assemble(architecture: u32, number_max: u32, table: &[(u32, Node)]) -> Vec<Instruction> {
    let ranges = ranges(number_max, table);
    let mut program = vec![
        load(OFFSET_ARCHITECTURE),
        branch(IF_EQUAL, architecture, 1, 0),
        give(RETURN_KILL_PROCESS),
        load(OFFSET_NUMBER),
    ];
    program.extend(search(&ranges));
    program
}

/// The whole space of numbers, each range with one verdict.
fn ranges(number_max: u32, table: &[(u32, Node)]) -> Vec<(RangeInclusive<u32>, Node)> {
    let mut sorted: Vec<_> = table.iter().collect();
    sorted.sort_by_key(|(number, _)| *number);
    let refused = Node::Give(Verdict::Fail(libc::EPERM));
    let mut ranges: Vec<(RangeInclusive<u32>, Node)> = Vec::new();
    let mut push = |range: RangeInclusive<u32>, node: &Node| match ranges.last_mut() {
        Some((last, same)) if same == node => *last = *last.start()..=*range.end(),
        _ => ranges.push((range, node.clone())),
    };
    let mut next = 0;
    for (number, node) in sorted {
        if *number > next {
            push(next..=number - 1, &refused);
        }
        push(*number..=*number, node);
        next = number + 1;
    }
    if next <= number_max {
        push(next..=number_max, &refused);
        next = number_max + 1;
    }
    push(next..=u32::MAX, &Node::Give(Verdict::Fail(libc::ENOSYS)));
    ranges
}

fn search(ranges: &[(RangeInclusive<u32>, Node)]) -> Vec<Instruction> {
    if let [(_, node)] = ranges {
        return leaf(node);
    }
    let (left, right) = ranges.split_at(ranges.len() / 2);
    let below = search(left);
    let first = *right[0].0.start();
    // A conditional jump reaches 255 instructions, a plain one any number.
    let mut program = vec![
        branch(IF_AT_LEAST, first, 0, 1),
        Instruction { code: JUMP, jump_true: 0, jump_false: 0, value: below.len() as u32 },
    ];
    program.extend(below);
    program.extend(search(right));
    program
}

fn leaf(node: &Node) -> Vec<Instruction> {
    match node {
        Node::Give(Verdict::Allow) => vec![give(RETURN_ALLOW)],
        Node::Give(Verdict::Supervise) => vec![give(RETURN_SUPERVISOR)],
        Node::Give(Verdict::Fail(errno)) => vec![give(RETURN_ERRNO | errno.cast_unsigned())],
        Node::If { argument, mask, values, then, otherwise } => {
            let (then, otherwise) = (leaf(then), leaf(otherwise));
            let mut program = vec![load(OFFSET_ARGUMENTS + 8 * u32::from(*argument))];
            if *mask != u32::MAX {
                program.push(Instruction { code: AND, jump_true: 0, jump_false: 0, value: *mask });
            }
            for (at, value) in values.iter().enumerate() {
                let left = values.len() - 1 - at;
                program.push(branch(IF_EQUAL, *value, short(left + otherwise.len()), 0));
            }
            program.extend(otherwise);
            program.extend(then);
            program
        }
        Node::IfAnyBit { argument, mask, then, otherwise } => {
            let (then, otherwise) = (leaf(then), leaf(otherwise));
            let mut program = vec![
                load(OFFSET_ARGUMENTS + 8 * u32::from(*argument)),
                branch(IF_ANY_BIT, *mask, short(otherwise.len()), 0),
            ];
            program.extend(otherwise);
            program.extend(then);
            program
        }
    }
}

fn short(distance: usize) -> u8 {
    u8::try_from(distance).expect("the table is fixed and its argument checks are short")
}

fn load(offset: u32) -> Instruction {
    Instruction { code: LOAD, jump_true: 0, jump_false: 0, value: offset }
}

fn branch(code: u16, value: u32, jump_true: u8, jump_false: u8) -> Instruction {
    Instruction { code, jump_true, jump_false, value }
}

fn give(value: u32) -> Instruction {
    Instruction { code: RETURN, jump_true: 0, jump_false: 0, value }
}

#[cfg(test)]
mod tests {
    use super::super::calls;
    use super::*;

    /// Runs a program as the kernel does.
    fn run(program: &[Instruction], architecture: u32, number: u32, arguments: [u32; 6]) -> u32 {
        let (mut at, mut a) = (0, 0u32);
        loop {
            let i = program[at];
            at += 1;
            let jump = |yes: bool| usize::from(if yes { i.jump_true } else { i.jump_false });
            match i.code {
                LOAD if i.value == OFFSET_NUMBER => a = number,
                LOAD if i.value == OFFSET_ARCHITECTURE => a = architecture,
                LOAD => a = arguments[((i.value - OFFSET_ARGUMENTS) / 8) as usize],
                AND => a &= i.value,
                JUMP => at += i.value as usize,
                IF_EQUAL => at += jump(a == i.value),
                IF_AT_LEAST => at += jump(a >= i.value),
                IF_ANY_BIT => at += jump(a & i.value != 0),
                RETURN => return i.value,
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    fn verdict(number: i64, arguments: [u32; 6]) -> u32 {
        let program = assemble(calls::ARCHITECTURE, calls::NUMBER_MAX, &calls::commands());
        run(&program, calls::ARCHITECTURE, number as u32, arguments)
    }

    fn fails(errno: i32) -> u32 {
        RETURN_ERRNO | errno as u32
    }

    #[test]
    fn every_call_of_the_table_gets_the_tables_verdict() {
        let table = calls::commands();
        let program = assemble(calls::ARCHITECTURE, calls::NUMBER_MAX, &table);

        for (number, node) in &table {
            let expected = leaf(node);
            if let Node::Give(_) = node {
                let got = run(&program, calls::ARCHITECTURE, *number, [0; 6]);
                assert_eq!(got, expected[0].value, "call {number}");
            }
        }
        assert!(program.len() < 1000, "{} instructions", program.len());
    }

    #[test]
    fn another_architecture_is_killed() {
        const I386: u32 = 0x4000_0003;
        let program = assemble(calls::ARCHITECTURE, calls::NUMBER_MAX, &calls::commands());

        assert_eq!(run(&program, I386, 1, [0; 6]), RETURN_KILL_PROCESS);
    }

    #[test]
    fn dangerous_calls_are_refused_and_new_ones_unknown() {
        for call in [
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_keyctl,
            libc::SYS_userfaultfd,
            libc::SYS_perf_event_open,
            libc::SYS_open_by_handle_at,
            libc::SYS_kexec_load,
            libc::SYS_init_module,
            libc::SYS_fsopen,
            libc::SYS_move_mount,
        ] {
            assert_eq!(verdict(call, [0x1000_0000; 6]), fails(libc::EPERM), "call {call}");
        }
        for call in [libc::SYS_clone3, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, 9999] {
            assert_eq!(verdict(call, [0; 6]), fails(libc::ENOSYS), "call {call}");
        }
    }

    #[test]
    fn sockets_are_judged_by_family_type_and_protocol() {
        let socket = |domain: i32, kind: i32, protocol: i32| {
            let arguments = [domain as u32, kind as u32, protocol as u32, 0, 0, 0];
            verdict(libc::SYS_socket, arguments)
        };
        const CLOEXEC: i32 = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;

        assert_eq!(socket(libc::AF_UNIX, libc::SOCK_STREAM | CLOEXEC, 0), RETURN_ALLOW);
        assert_eq!(socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | CLOEXEC, 0), RETURN_ALLOW);
        assert_eq!(socket(libc::AF_INET, libc::SOCK_STREAM | CLOEXEC, 6), RETURN_ALLOW);
        assert_eq!(socket(libc::AF_INET6, libc::SOCK_DGRAM, 0), RETURN_ALLOW);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, 0), RETURN_ALLOW);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, 12), fails(libc::EPROTONOSUPPORT));
        assert_eq!(socket(libc::AF_INET, libc::SOCK_RAW | CLOEXEC, 1), fails(libc::EPERM));
        // The old way to a packet socket.
        assert_eq!(socket(libc::AF_INET, 10 | CLOEXEC, 0), fails(libc::EPERM));
        assert_eq!(socket(libc::AF_INET, libc::SOCK_STREAM, 262), fails(libc::EPROTONOSUPPORT));
        for family in [libc::AF_PACKET, libc::AF_VSOCK, libc::AF_ALG, libc::AF_BLUETOOTH] {
            assert_eq!(socket(family, libc::SOCK_RAW, 0), fails(libc::EAFNOSUPPORT), "{family}");
        }
    }

    #[test]
    fn unix_sockets_that_send_to_an_address_cannot_be_made_and_connections_are_supervised() {
        let made =
            |call: i64, kind: i32| verdict(call, [libc::AF_UNIX as u32, kind as u32, 0, 0, 0, 0]);
        let files = assemble(calls::ARCHITECTURE, calls::NUMBER_MAX, &calls::files());
        let of_files = |call: i64, domain: i32| {
            let arguments = [domain as u32, libc::SOCK_STREAM as u32, 0, 0, 0, 0];
            run(&files, calls::ARCHITECTURE, call as u32, arguments)
        };

        for call in [libc::SYS_socket, libc::SYS_socketpair] {
            // The kernel makes a datagram socket of a raw one.
            for kind in [libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, libc::SOCK_RAW] {
                assert_eq!(made(call, kind), fails(libc::ESOCKTNOSUPPORT), "{call} {kind}");
            }
            assert_eq!(made(call, libc::SOCK_STREAM | libc::SOCK_NONBLOCK), RETURN_ALLOW);
        }
        assert_eq!(verdict(libc::SYS_connect, [0; 6]), RETURN_SUPERVISOR);
        assert_eq!(of_files(libc::SYS_socket, libc::AF_UNIX), fails(libc::EAFNOSUPPORT));
        assert_eq!(of_files(libc::SYS_socket, libc::AF_INET6), RETURN_ALLOW);
        assert_eq!(of_files(libc::SYS_connect, 0), RETURN_ALLOW);
    }

    #[test]
    fn new_namespaces_by_clone_and_terminal_injection_are_refused() {
        let clone = |flags: i32| verdict(libc::SYS_clone, [flags as u32, 0, 0, 0, 0, 0]);
        let ioctl = |request: u64| verdict(libc::SYS_ioctl, [0, request as u32, 0, 0, 0, 0]);

        assert_eq!(clone(libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD), RETURN_ALLOW);
        assert_eq!(clone(libc::CLONE_NEWUSER | libc::SIGCHLD), fails(libc::EPERM));
        assert_eq!(clone(libc::CLONE_NEWNET), fails(libc::EPERM));
        assert_eq!(ioctl(libc::TCGETS), RETURN_ALLOW);
        assert_eq!(ioctl(libc::TIOCSTI), fails(libc::EPERM));
    }

    #[test]
    fn no_command_makes_a_set_id_file_and_only_the_file_tools_have_openat2() {
        const CREATE: u32 = (libc::O_CREAT | libc::O_WRONLY) as u32;
        let openat = |flags: u32, mode: u32| verdict(libc::SYS_openat, [0, 0, flags, mode, 0, 0]);
        let chmod = |mode: u32| verdict(libc::SYS_fchmodat, [0, 0, mode, 0, 0, 0]);

        assert_eq!(chmod(0o1777), RETURN_ALLOW);
        assert_eq!(chmod(0o4755), fails(libc::EPERM));
        assert_eq!(chmod(0o2755), fails(libc::EPERM));
        assert_eq!(openat(CREATE, 0o755), RETURN_ALLOW);
        assert_eq!(openat(CREATE, 0o4755), fails(libc::EPERM));
        assert_eq!(openat(libc::O_TMPFILE as u32, 0o4755), fails(libc::EPERM));
        // Without creation the mode is whatever happens to be in the register.
        assert_eq!(openat(libc::O_RDONLY as u32, 0o4755), RETURN_ALLOW);
        assert_eq!(verdict(libc::SYS_openat2, [0; 6]), fails(libc::ENOSYS));
        let files = assemble(calls::ARCHITECTURE, calls::NUMBER_MAX, &calls::files());
        let got = run(&files, calls::ARCHITECTURE, libc::SYS_openat2 as u32, [0; 6]);
        assert_eq!(got, RETURN_ALLOW);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_x32_entry_is_unknown() {
        const X32_BIT: i64 = 0x4000_0000;

        for call in [libc::SYS_read, libc::SYS_socket, libc::SYS_execve, 520] {
            assert_eq!(verdict(X32_BIT | call, [0; 6]), fails(libc::ENOSYS), "call {call}");
        }
    }
}
