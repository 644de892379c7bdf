//! System calls through the entries that other kinds of programs use on x86-64.

#[cfg(target_arch = "x86_64")]
use std::arch::asm;

/// Makes the call and gives what the kernel gave; none where there is no such entry.
#[cfg(target_arch = "x86_64")]
pub fn enter(entry: &str, number: i64, arguments: [i64; 3]) -> Option<i64> {
    /// Set in the number of a call that keeps to 32-bit pointers.
    const X32: i64 = 0x4000_0000;
    let [a, b, c] = arguments;
    let got: i64;
    match entry {
        // SAFETY: callers give calls that take numbers only. The compiler keeps rbx for itself, so
        // the first argument changes places with it and back.
        "i386" => unsafe {
            asm!(
                "xchg {a}, rbx", "int 0x80", "xchg {a}, rbx",
                a = inout(reg) a => _, inlateout("rax") number => got, in("rcx") b, in("rdx") c,
                out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            );
        },
        "native" | "x32" => {
            let number = if entry == "x32" { number | X32 } else { number };
            // SAFETY: callers give calls that take numbers only.
            unsafe {
                asm!(
                    "syscall",
                    inlateout("rax") number => got, in("rdi") a, in("rsi") b, in("rdx") c,
                    out("rcx") _, out("r11") _,
                );
            }
        }
        _ => return None,
    }
    Some(got)
}

#[cfg(not(target_arch = "x86_64"))]
pub fn enter(_: &str, _: i64, _: [i64; 3]) -> Option<i64> {
    None
}
