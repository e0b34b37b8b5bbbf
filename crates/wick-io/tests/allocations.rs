//! Submits, requests and waits allocate nothing, on any thread and by either engine, once the largest has been.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use wick_io::{DirectIo, Engine, FlashFile, Reader, ReaderOptions, SlotBuffer, SlotRead, Ticket};

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

const BLOCK_BYTES: usize = 4096;
const BLOCKS: usize = 100;
/// Long enough to be split.
const LONG_BYTES: usize = (5 << 20) / 2;
const FILE_BYTES: usize = 4 * LONG_BYTES;
const SUBMITS: usize = 200;

/// Reads of one kind, with their checksums, and the buffer they go to.
struct Kind {
    reads: Vec<SlotRead>,
    buffer: Option<SlotBuffer>,
}

impl Kind {
    /// Reads of `len_bytes`, one every `step_bytes` from `start_bytes` on.
    fn new(
        content: &[u8],
        count: usize,
        len_bytes: usize,
        step_bytes: usize,
        start_bytes: usize,
    ) -> Self {
        let read = |slot| {
            let offset = start_bytes + slot * step_bytes;
            SlotRead {
                slot,
                offset_bytes: offset as u64,
                len_bytes,
                crc32c: Some(crc32c::crc32c(&content[offset..offset + len_bytes])),
            }
        };
        Self {
            reads: (0..count).map(read).collect(),
            buffer: Some(SlotBuffer::new(count, len_bytes).unwrap()),
        }
    }

    fn submit(&mut self, reader: &Reader, file: &FlashFile, count: usize) -> Ticket {
        reader.submit(self.buffer.take().unwrap(), file, &self.reads[..count])
    }

    fn wait(&mut self, ticket: Ticket) {
        let (buffer, outcome) = ticket.wait();
        outcome.unwrap();
        self.buffer = Some(buffer);
    }
}

/// Far apart, neighbours, unaligned; short and long.
fn kinds(content: &[u8]) -> Vec<Kind> {
    vec![
        Kind::new(content, BLOCKS, BLOCK_BYTES, 10 * BLOCK_BYTES, 0),
        Kind::new(content, BLOCKS, BLOCK_BYTES, BLOCK_BYTES, 0),
        Kind::new(content, BLOCKS, BLOCK_BYTES, 10 * BLOCK_BYTES, 8),
        Kind::new(content, 3, LONG_BYTES, LONG_BYTES, 0),
        Kind::new(content, 2, LONG_BYTES, LONG_BYTES, 8),
    ]
}

/// Each kind alone with all, some and none of its reads, and two at once.
fn submit_all(reader: &Reader, file: &FlashFile, kinds: &mut [Kind], turn: usize) -> usize {
    let mut submits = 0;
    for kind in &mut *kinds {
        for count in [kind.reads.len(), turn % kind.reads.len(), 0] {
            let ticket = kind.submit(reader, file, count);
            kind.wait(ticket);
            submits += 1;
        }
    }
    for pair in kinds.chunks_exact_mut(2) {
        let [one, two] = pair else { unreachable!() };
        let first = one.submit(reader, file, one.reads.len());
        let second = two.submit(reader, file, two.reads.len());
        two.wait(second);
        one.wait(first);
        submits += 2;
    }
    submits
}

/// Allocations of many unaligned reads after one: whichever threads get them find their memory there.
fn after_one_unaligned_read(reader: &Reader, file: &FlashFile, kinds: &mut [Kind]) -> usize {
    let mut read = |kind: usize, count| {
        let ticket = kinds[kind].submit(reader, file, count);
        kinds[kind].wait(ticket);
    };
    read(0, BLOCKS);
    read(2, 1);
    let before = COUNT.load(Ordering::Relaxed);
    read(2, BLOCKS);
    COUNT.load(Ordering::Relaxed) - before
}

#[test]
fn nothing_is_allocated_once_everything_has_been_read() {
    let content: Vec<u8> = (0..FILE_BYTES).map(|i| (i / 999) as u8).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blocks");
    std::fs::write(&path, &content).unwrap();
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let mut kinds = kinds(&content);
    for direct in [DirectIo::Preferred, DirectIo::Off] {
        let file = FlashFile::open(&path, direct).unwrap();
        for (engine, coalesce) in [
            (Engine::Pool, true),
            (Engine::Uring, true),
            (Engine::Pool, false),
            (Engine::Uring, false),
        ] {
            let options = ReaderOptions {
                engine,
                depth: 8,
                coalesce,
                ..ReaderOptions::default()
            };
            let reader = Reader::with_options(&options).unwrap();
            let count = after_one_unaligned_read(&reader, &file, &mut kinds);
            assert_eq!(count, 0, "by other threads, {engine}, {}", file.mode());
            for turn in 0..2 {
                submit_all(&reader, &file, &mut kinds, turn);
            }
            let (before, mut submits, mut turn) = (COUNT.load(Ordering::Relaxed), 0, 0);
            while submits < SUBMITS {
                submits += submit_all(&reader, &file, &mut kinds, turn);
                turn += 1;
            }
            let count = COUNT.load(Ordering::Relaxed) - before;
            let mode = file.mode();
            assert_eq!(
                count, 0,
                "by {submits} submits, {engine}, {mode}, shared: {coalesce}"
            );
        }
    }
}
