//! After the largest `reset`, the kernels allocate nothing.
//!
//! One test only: the counter counts every thread of the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use wick_kernels::{dot_rows, Accumulator, WeightDtype};

/// The system's allocator, counting calls that hand out memory.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn kernels_allocate_nothing() {
    const ROWS: usize = 300;
    const WIDTH: usize = 1000;
    const TOKENS: usize = 20;
    let bytes = vec![0u8; ROWS * WIDTH * 2];
    let row = |r: usize| &bytes[2 * r * WIDTH..2 * (r + 1) * WIDTH];
    let x = vec![1f32; TOKENS * WIDTH];
    let mut out = vec![0f32; ROWS * TOKENS];
    let mut result = vec![0f32; TOKENS * WIDTH];
    let mut sums = Accumulator::new();
    sums.reset(TOKENS, WIDTH);
    let mut pass = || {
        for tokens in [1, 3, TOKENS] {
            let (x, out) = (&x[..tokens * WIDTH], &mut out[..ROWS * tokens]);
            dot_rows(WeightDtype::F16, ROWS, row, x, tokens, out);
            sums.reset(tokens, WIDTH);
            sums.add_rows(WeightDtype::F16, ROWS, row, out);
            sums.write_to(&mut result[..tokens * WIDTH]);
        }
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
    // Threads that start, and the test harness, may allocate meanwhile: one clean pass is proof.
    let fewest = pool.unwrap().install(|| {
        let passes = (0..20).map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            pass();
            ALLOCATIONS.load(Ordering::Relaxed) - before
        });
        passes.min()
    });
    assert_eq!(fewest, Some(0));
}
