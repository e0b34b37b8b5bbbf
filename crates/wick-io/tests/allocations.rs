//! A submit allocates its batch and its lists; a request allocates nothing, by either engine.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use wick_io::{DirectIo, Engine, FlashFile, Reader, ReaderOptions, SlotBuffer, SlotRead};

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all work is the system allocator's; growth counts too, because it goes through `alloc` by default.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller; `alloc` took it from the system allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BYTES: usize = 4096;
const COUNT_MAX: usize = 600;

/// Every third block, so that no two share a request, aligned or not.
fn reads(count: usize, is_odd: bool) -> Vec<SlotRead> {
    let read = |slot| SlotRead {
        slot,
        offset_bytes: (3 * slot * BYTES) as u64 + if is_odd { 8 } else { 0 },
        len_bytes: BYTES,
        crc32c: None,
    };
    (0..count).map(read).collect()
}

#[test]
fn a_request_allocates_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blocks");
    std::fs::write(&path, vec![1u8; 3 * COUNT_MAX * BYTES + 8]).unwrap();
    for direct in [DirectIo::Preferred, DirectIo::Off] {
        let file = FlashFile::open(&path, direct).unwrap();
        for engine in [Engine::Pool, Engine::Uring] {
            let options = ReaderOptions {
                engine,
                depth: 8,
                gap_bytes: 0,
                ..ReaderOptions::default()
            };
            let reader = Reader::with_options(&options).unwrap();
            let mut buffer = Some(SlotBuffer::new(COUNT_MAX, BYTES).unwrap());
            let mut allocations = |count: usize, is_odd: bool| {
                let reads = reads(count, is_odd);
                let before = COUNT.load(Ordering::Relaxed);
                let ticket = reader.submit(buffer.take().unwrap(), &file, &reads);
                let (back, outcome) = ticket.wait();
                outcome.unwrap();
                buffer = Some(back);
                COUNT.load(Ordering::Relaxed) - before
            };
            // The first requests of a thread may bring it a bounce buffer.
            for _ in 0..5 {
                allocations(COUNT_MAX, true);
            }
            for is_odd in [false, true] {
                let (few, many) = (allocations(50, is_odd), allocations(COUNT_MAX, is_odd));
                // The list of runs doubles a few times.
                assert!(many <= few + 8, "{few} and {many} by {engine}");
            }
        }
    }
}
