//! Calls that a sandbox should refuse, each made once, with arguments for which the kernel would
//! do something.

use std::os::fd::AsRawFd;

use crate::calls::Made;

type Number = libc::c_long;

/// A system call by its number; none when it succeeded.
///
/// # Safety
/// The call must be sound with these arguments whether it is carried out or not.
unsafe fn call(number: Number, arguments: [usize; 6]) -> Option<i32> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: said by the caller.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    // A call that makes a process came through twice; the second is not to go on with this.
    let makes_process = [libc::SYS_clone, libc::SYS_clone3].contains(&number);
    if makes_process && result == 0 {
        // SAFETY: ends this process at once, and nothing of the first one's is touched.
        unsafe { libc::_exit(0) };
    }
    (result < 0).then(|| std::io::Error::last_os_error().raw_os_error().unwrap_or_default())
}

fn six<const N: usize>(given: [usize; N]) -> [usize; 6] {
    let mut all = [0; 6];
    all[..N].copy_from_slice(&given);
    all
}

/// Ways around a filter of system calls, and calls with a history of holes.
pub fn filtered() -> Vec<Made> {
    let page = [0u8; 4096];
    let page = page.as_ptr().expose_provenance();
    let new_user = libc::CLONE_NEWUSER as usize;
    let calls = [
        ("io_uring_setup", libc::SYS_io_uring_setup, six([8, page])),
        ("io_uring_enter", libc::SYS_io_uring_enter, six([0, 1, 1])),
        ("io_uring_register", libc::SYS_io_uring_register, six([])),
        ("clone3", libc::SYS_clone3, six([page, 88])),
        ("unshare-user", libc::SYS_unshare, six([new_user])),
        ("unshare-net", libc::SYS_unshare, six([libc::CLONE_NEWNET as usize])),
        ("clone-user", libc::SYS_clone, six([new_user | libc::SIGCHLD as usize])),
        ("bpf", libc::SYS_bpf, six([0, page, 8])),
        ("keyctl", libc::SYS_keyctl, six([])),
        ("userfaultfd", libc::SYS_userfaultfd, six([])),
        ("no-such-call", 4000, six([])),
    ];
    calls
        .into_iter()
        // SAFETY: the kernel reads the page, which lives, and writes at most a ring's description
        // (120 bytes) into it, which nobody reads; the others touch no memory of this process.
        .map(|(name, number, arguments)| (name, unsafe { call(number, arguments) }))
        .collect()
}

/// What needs a capability over the host's or the sandbox's own namespaces.
pub fn privileged() -> Vec<Made> {
    let texts = [c"tmpfs", c"/tmp", c"/tmp/null", c"/", c"box"].map(|t| t.as_ptr().addr());
    let [tmpfs, tmp, null, root, name] = texts;
    let here = libc::AT_FDCWD as usize;
    let device = (libc::S_IFCHR | 0o666) as usize;
    let made = libc::makedev(1, 3) as usize;
    let own = std::fs::File::open("/proc/self/ns/net");
    let own = own.map(|file| (file.as_raw_fd() as usize, file));
    let (descriptor, _kept) = own.map_or((usize::MAX, None), |(fd, file)| (fd, Some(file)));
    let calls = [
        ("unshare-user", libc::SYS_unshare, six([libc::CLONE_NEWUSER as usize])),
        ("unshare-net", libc::SYS_unshare, six([libc::CLONE_NEWNET as usize])),
        ("unshare-mount", libc::SYS_unshare, six([libc::CLONE_NEWNS as usize])),
        ("mount", libc::SYS_mount, six([tmpfs, tmp, tmpfs, 0, 0])),
        ("umount", libc::SYS_umount2, six([tmp, 0])),
        ("mknod", libc::SYS_mknodat, six([here, null, device, made])),
        ("chroot", libc::SYS_chroot, six([root])),
        ("sethostname", libc::SYS_sethostname, six([name, 3])),
        ("setns", libc::SYS_setns, six([descriptor, 0])),
        ("ptrace-first-process", libc::SYS_ptrace, six([libc::PTRACE_ATTACH as usize, 1])),
    ];
    let mut outcomes: Vec<Made> = calls
        .into_iter()
        // SAFETY: every pointer is to a constant C string; the calls write no memory of ours.
        .map(|(name, number, arguments)| (name, unsafe { call(number, arguments) }))
        .collect();
    let first = std::fs::File::open("/proc/1/ns/mnt");
    outcomes.push(("first-process", first.err().and_then(|error| error.raw_os_error())));
    outcomes.push(("loopback-down", loopback_down()));
    outcomes.push(("delete-route", delete_route()));
    outcomes
}

/// Takes the loopback interface down, as `ip link set lo down` does.
fn loopback_down() -> Option<i32> {
    let socket = match super::socket(libc::AF_INET, libc::SOCK_DGRAM, 0) {
        Ok(socket) => socket,
        Err(error) => return Some(error),
    };
    // SAFETY: an ifreq is numbers only, for which zero is a value; no flags means down.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    // SAFETY: the request is live and of the kind that this ioctl takes.
    let done =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    (done < 0).then(|| std::io::Error::last_os_error().raw_os_error().unwrap_or_default())
}

/// Deletes the route for everything from the local table, over netlink (rtnetlink(7)); the route
/// is what brings a sandbox's connections to its way out.
fn delete_route() -> Option<i32> {
    let socket = match super::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE) {
        Ok(socket) => socket,
        Err(error) => return Some(error),
    };
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    let mut message = Vec::from(28u32.to_ne_bytes());
    message.extend(libc::RTM_DELROUTE.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    // Family, lengths of addresses, type of service, table, protocol, scope, kind, flags.
    message.extend([libc::AF_INET as u8, 0, 0, 0, libc::RT_TABLE_LOCAL, 0, 0, libc::RTN_LOCAL]);
    message.extend([0; 4]);
    // SAFETY: the message is live and of that length; without an address it goes to the kernel.
    let sent = unsafe { libc::send(socket.as_raw_fd(), message.as_ptr().cast(), 28, 0) };
    let mut answer = [0u8; 512];
    // SAFETY: the buffer is live and of that length.
    let got = unsafe { libc::recv(socket.as_raw_fd(), answer.as_mut_ptr().cast(), 512, 0) };
    if sent < 0 || got < 20 {
        return Some(std::io::Error::last_os_error().raw_os_error().unwrap_or_default());
    }
    // After the header of the answer: an error number, negative, or zero.
    let number = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
    (number != 0).then_some(-number)
}
