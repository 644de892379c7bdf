//! Descriptors of a process about to become somebody else's program.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::fcntl_dupfd_cloexec;

/// Numbers from here on are out of the way of those being placed.
const ASIDE: RawFd = 16;

/// Puts `wanted` at 0, 1, 2, and so on, open across exec, and `report` behind them, closed by
/// exec; closes every other descriptor of the process. Whatever owned one of those, `report`
/// included, must never be dropped: the caller ends in exec or `_exit`. When it fails for want of
/// numbers, `report` is still what it was.
pub fn place(wanted: Vec<OwnedFd>, report: &OwnedFd) -> std::io::Result<ManuallyDrop<OwnedFd>> {
    let mut aside = Vec::new();
    for fd in wanted.iter().chain([report]) {
        aside.push(ManuallyDrop::new(fcntl_dupfd_cloexec(fd, ASIDE)?));
    }
    std::mem::forget(wanted);
    let last = aside.len() - 1;
    for (number, fd) in aside.iter().enumerate() {
        let flags = if number == last { libc::O_CLOEXEC } else { 0 };
        // SAFETY: both are plain numbers. What was open at `number` is closed without its owner's
        // knowledge, which is why owners must not be dropped; see above.
        if unsafe { libc::dup3(fd.as_raw_fd(), number as RawFd, flags) } == -1 {
            return Err(std::io::Error::last_os_error());
        }
    }
    close_from(last as u32 + 1)?;
    // SAFETY: dup3 opened this number just now and nobody else owns it.
    Ok(ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(last as RawFd) }))
}

/// Closes every descriptor but 0, 1, 2 and `keep`. Whatever owned another must never be dropped:
/// for a new process that never returns to the frames of its parent.
pub fn close_all_but(keep: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let mut numbers: Vec<u32> = keep.iter().map(|fd| fd.as_raw_fd().cast_unsigned()).collect();
    numbers.sort_unstable();
    let mut next = 3;
    for number in numbers {
        if number > next {
            close_range(next, number - 1)?;
        }
        next = next.max(number + 1);
    }
    close_from(next)
}

/// Closes every descriptor from `first` on. For the start of a program and the end of a child's
/// set-up, when nothing owns them.
pub fn close_from(first: u32) -> std::io::Result<()> {
    close_range(first, u32::MAX)
}

fn close_range(first: u32, last: u32) -> std::io::Result<()> {
    // SAFETY: the numbers are closed without their owners' knowledge; the callers above say why
    // those owners never use them again.
    if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == -1 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// A descriptor that [`place`] put at `number`, for a process that does not execute a program.
pub fn placed(number: RawFd) -> ManuallyDrop<OwnedFd> {
    // SAFETY: `place` put an open descriptor there and its owner gave it up; ManuallyDrop keeps
    // this one from closing it, so it may be asked for again.
    ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) })
}
