//! Memory that is given back is zeroed first, in processes that see secrets.
//!
//! A credential passes through buffers that are not ours (a TLS record before it is encrypted, a
//! request's body as hyper reads it), and nobody else would wipe those. As the allocator of the
//! whole program this sees every one of them. It is off until [`freed_memory`] is called, so the
//! other roles of the same program pay one load for each block they free. malloc(3),
//! explicit_bzero(3).
//!
//! A thread that carries traffic takes and gives some dozens of small blocks for each request. It
//! keeps those it has wiped for its next ones ([`keep_blocks`]), which is cheaper than the system's
//! way there and back.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

static WANTED: AtomicBool = AtomicBool::new(false);

/// From now on this process zeroes what it frees. Call at start, before any secret is seen.
pub fn freed_memory() {
    WANTED.store(true, Ordering::Relaxed);
}

/// Blocks of up to this size may be kept.
const KEPT_BYTES_MAX: usize = 1024;
/// Sizes are rounded up to steps of so many bytes: a kept block serves any size of its step.
const STEP_BYTES: usize = 16;
const STEPS: usize = KEPT_BYTES_MAX / STEP_BYTES;
/// Bytes of one step that a thread keeps: what many requests give back that end at once.
const STEP_KEPT_BYTES_MAX: usize = 32 * 1024;

/// The blocks that one thread keeps, by step: each points to the next.
struct Kept {
    wanted: Cell<bool>,
    first: [Cell<*mut u8>; STEPS],
    bytes: [Cell<usize>; STEPS],
}

thread_local! {
    // Nothing is to be dropped in it, so it can be used by an allocator, and until the thread ends.
    static KEPT: Kept = const {
        Kept {
            wanted: Cell::new(false),
            first: [const { Cell::new(ptr::null_mut()) }; STEPS],
            bytes: [const { Cell::new(0) }; STEPS],
        }
    };
}

/// From now on until the answer is dropped this thread keeps the small blocks that it frees.
pub fn keep_blocks() -> Keeping {
    KEPT.with(|kept| kept.wanted.set(true));
    Keeping(std::marker::PhantomData)
}

/// See [`keep_blocks`]. It stays on its thread.
pub struct Keeping(std::marker::PhantomData<*mut u8>);

impl Drop for Keeping {
    fn drop(&mut self) {
        KEPT.with(|kept| {
            kept.wanted.set(false);
            for step in 0..STEPS {
                while let Some(block) = kept.take(step) {
                    let layout = Layout::from_size_align(size(step), STEP_BYTES);
                    let layout = layout.expect("a small size and a power of two");
                    // SAFETY: a kept block came from the system's allocator, nobody else has it,
                    // and that allocator goes by the block and not by its layout.
                    unsafe { System.dealloc(block, layout) };
                }
            }
        });
    }
}

impl Kept {
    fn take(&self, step: usize) -> Option<*mut u8> {
        let block = self.first[step].get();
        if block.is_null() {
            return None;
        }
        // SAFETY: `give` wrote the pointer there, and the block is nobody else's since.
        self.first[step].set(unsafe { block.cast::<*mut u8>().read() });
        self.bytes[step].set(self.bytes[step].get() - size(step));
        Some(block)
    }

    /// Takes a block over if it is to be kept.
    ///
    /// # Safety
    ///
    /// `block` must have at least the size of its step, and nobody may use it afterwards.
    unsafe fn give(&self, step: usize, block: *mut u8) -> bool {
        let bytes = self.bytes[step].get() + size(step);
        if !self.wanted.get() || bytes > STEP_KEPT_BYTES_MAX {
            return false;
        }
        // SAFETY: every step has room for a pointer, and blocks are aligned to `STEP_BYTES`.
        unsafe { block.cast::<*mut u8>().write(self.first[step].get()) };
        self.first[step].set(block);
        self.bytes[step].set(bytes);
        true
    }
}

/// The step that a block belongs to; none where it is not to be kept.
fn step(layout: Layout) -> Option<usize> {
    let small = layout.size() <= KEPT_BYTES_MAX && layout.align() <= STEP_BYTES;
    // No allocator is asked for nothing.
    small.then(|| (layout.size().max(1) - 1) / STEP_BYTES)
}

/// The size of a step's blocks.
const fn size(step: usize) -> usize {
    (step + 1) * STEP_BYTES
}

/// What the system is asked for in place of `layout`, so that the block has the size of its step.
fn rounded(layout: Layout) -> Layout {
    let Some(step) = step(layout) else { return layout };
    let layout_whole = Layout::from_size_align(size(step), STEP_BYTES);
    layout_whole.unwrap_or(layout)
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

// SAFETY: every block comes from the system's allocator with the layout it was asked for, rounded
// up, and goes back there, or waits in a list of this thread until one of no larger size is asked
// for; in between nothing is kept. A block that moves is copied before the old one is wiped.
unsafe impl GlobalAlloc for Wiping {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Some(step) = step(layout)
            && let Some(block) = KEPT.with(|kept| kept.take(step))
        {
            return block;
        }
        // SAFETY: the caller's promises about the layout hold for a larger one.
        unsafe { System.alloc(rounded(layout)) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises about the layout hold for a larger one.
        unsafe { System.alloc_zeroed(rounded(layout)) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if WANTED.load(Ordering::Relaxed) {
            // SAFETY: the caller gives the block up; it has the size of its layout.
            unsafe { wipe(block, layout.size()) };
            if let Some(step) = step(layout) {
                // SAFETY: the block is the caller's to give up, and was asked for with the size of
                // its step.
                if KEPT.with(|kept| unsafe { kept.give(step, block) }) {
                    return;
                }
            }
        }
        // SAFETY: the block came from the system's allocator with this layout.
        unsafe { System.dealloc(block, rounded(layout)) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that `size`, rounded up to the alignment, is a legal size.
        let layout_new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !WANTED.load(Ordering::Relaxed) {
            let (old, new) = (rounded(layout), rounded(layout_new));
            // SAFETY: the block was asked for with this layout; the new size is a legal one.
            return unsafe { System.realloc(block, old, new.size()) };
        }
        // The system's own would leave the old block unwiped where it moves it.
        // SAFETY: `size` is not zero by the caller's promise.
        let moved = unsafe { self.alloc(layout_new) };
        if !moved.is_null() {
            // SAFETY: both blocks are as long as the shorter of the two sizes and do not overlap;
            // the old one is given up by the caller when a new one is returned.
            unsafe {
                ptr::copy_nonoverlapping(block, moved, layout.size().min(size));
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

    #[test]
    fn a_kept_block_is_wiped_and_serves_once_until_it_is_free_again() {
        freed_memory();
        let _keeping = keep_blocks();
        let first = Box::new([0xA5u8; 100]);
        let place = ptr::from_ref(&*first).addr();
        drop(first);

        // SAFETY: the layout is not of size zero; the block is freed below with the same one.
        let (layout, again) = unsafe {
            let layout = Layout::new::<[u8; 112]>();
            (layout, std::alloc::alloc(layout))
        };
        // SAFETY: the test's own block of 112 bytes; past the pointer of the list all that the
        // former owner wrote was zeroed, and what lies behind was never written.
        let left = unsafe { std::slice::from_raw_parts(again.add(8), 92) };
        let other = Box::new([1u8; 100]);

        assert_eq!(again.addr(), place, "the block was kept");
        assert!(left.iter().all(|byte| *byte == 0), "the block was wiped");
        assert_ne!(ptr::from_ref(&*other).addr(), place, "nobody else got it");
        // SAFETY: it came from this allocator with this layout.
        unsafe { std::alloc::dealloc(again, layout) };
    }

    #[test]
    fn what_one_thread_frees_for_another_and_what_outlives_the_keeping_is_sound() {
        freed_memory();
        let made: Vec<Vec<u8>> = std::thread::spawn(|| {
            let _keeping = keep_blocks();
            (1..3000).map(|size| vec![7; size]).collect()
        })
        .join()
        .unwrap();
        let keeping = keep_blocks();
        let copies = made.clone();
        drop(made);
        drop(keeping);

        for (size, copy) in (1..3000).zip(copies) {
            assert_eq!(copy, vec![7; size]);
        }
        KEPT.with(|kept| assert!(kept.first.iter().all(|first| first.get().is_null())));
    }
}
