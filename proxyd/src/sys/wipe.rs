//! Memory that is given back is zeroed first, in processes that see secrets.
//!
//! A credential passes through buffers that are not ours (a TLS record before it is encrypted, a
//! request's body as hyper reads it), and nobody else would wipe those. As the allocator of the
//! whole program this sees every one of them. It is off until [`freed_memory`] is called, so the
//! other roles of the same program pay one load for each block they free. malloc(3),
//! explicit_bzero(3).

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

static WANTED: AtomicBool = AtomicBool::new(false);

/// From now on this process zeroes what it frees. Call at start, before any secret is seen.
pub fn freed_memory() {
    WANTED.store(true, Ordering::Relaxed);
}

struct Wiping;

#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

/// Zeroes a block in a way that the compiler does not drop as useless.
///
/// # Safety
///
/// `block` must be valid for writes of `size` bytes, and nobody may read them afterwards.
unsafe fn wipe(block: *mut u8, size: usize) {
    // SAFETY: the caller's promise is what explicit_bzero asks for.
    unsafe { libc::explicit_bzero(block.cast(), size) };
}

// SAFETY: every block comes from and goes back to the system's allocator with the layout it was
// asked for; in between nothing is kept. A block that moves is copied before the old one is wiped.
unsafe impl GlobalAlloc for Wiping {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises about the layout are passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if WANTED.load(Ordering::Relaxed) {
            // SAFETY: the caller gives the block up; it has the size of its layout.
            unsafe { wipe(block, layout.size()) };
        }
        // SAFETY: the block came from the system's allocator with this layout.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !WANTED.load(Ordering::Relaxed) {
            // SAFETY: the caller's promises are passed on unchanged.
            return unsafe { System.realloc(block, layout, size) };
        }
        // The system's own would leave the old block unwiped where it moves it.
        // SAFETY: the caller promises that `size`, rounded up to the alignment, is a legal size.
        let layout_new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: `size` is not zero by the caller's promise.
        let moved = unsafe { System.alloc(layout_new) };
        if !moved.is_null() {
            // SAFETY: both blocks are as long as the shorter of the two sizes and do not overlap;
            // the old one is given up by the caller when a new one is returned.
            unsafe {
                std::ptr::copy_nonoverlapping(block, moved, layout.size().min(size));
                self.dealloc(block, layout);
            }
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_grows_or_shrinks_keeps_its_content() {
        freed_memory();
        let mut bytes: Vec<u8> = Vec::new();

        for round in 0..10_000u32 {
            bytes.push(round.to_le_bytes()[0]);
        }
        bytes.truncate(300);
        bytes.shrink_to_fit();

        let expected: Vec<u8> = (0..300u32).map(|round| round.to_le_bytes()[0]).collect();
        assert_eq!(bytes, expected);
    }
}
