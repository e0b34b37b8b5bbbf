//! The reader: threads that fill slots.
//!
//! The pool is a thread for each request in flight, the ring one thread for all of them. They exist from `new`
//! until the last clone of the reader is dropped, which first finishes everything submitted.
//!
//! Cost: for each request that can be in flight at most [`READER_THREAD_BYTES_MAX`]: a stack or a list of
//! pieces, and, once an unaligned read was met, a bounce buffer. Besides, the gap limit's worth of sink, and the
//! lists of as many submits as were on their way at once (16 are kept), some 100 bytes for each read of the largest.
//! With that, submitting, reading and waiting allocate nothing once a submit with no fewer reads, bytes and bytes
//! a slot has been waited for. Exceptions: errors, and tickets that are not waited for, whose lists are lost.
//!
//! Invariants:
//! - A panic while a run is read is an error of that ticket; the thread goes on.

use crate::buffer::SlotBuffer;
use crate::device::{Device, IoCounters};
use crate::file::FlashFile;
use crate::options::{Engine, ReaderOptions};
use crate::plan::{SlotRead, RUN_BYTES_MAX};
use crate::queue::Queue;
use crate::slice;
use crate::ticket::Ticket;
use crate::transfer::{end_of_file, Transfer, PIECES_BYTES};
use crate::IoError;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Most requests in flight of a reader; devices gain nothing from more.
pub const READER_THREADS_MAX: usize = 1024;

/// Most memory that a reader keeps for each request it can have in flight.
pub const READER_THREAD_BYTES_MAX: usize = STACK_BYTES + PIECES_BYTES + RUN_BYTES_MAX;

/// The bounce buffer kept for each request that can be in flight, all of them from the first read on that the device
/// cannot place directly.
pub const READER_BOUNCE_BYTES: usize = RUN_BYTES_MAX;

const STACK_BYTES: usize = 128 << 10;

/// Reading threads; clones share them.
#[derive(Clone)]
pub struct Reader {
    threads: Arc<Threads>,
}

/// The threads' owner: gone with the last reader, and the threads with it.
struct Threads {
    queue: Arc<Queue>,
    handles: Vec<JoinHandle<()>>,
    engine: Engine,
    depth: usize,
    gap_bytes: Option<usize>,
}

impl Reader {
    /// Starts a pool of `threads` threads, 1 to [`READER_THREADS_MAX`]: as many requests can be in flight.
    pub fn new(threads: usize) -> Result<Self, IoError> {
        Self::with_options(&ReaderOptions {
            engine: Engine::Pool,
            depth: threads,
            ..ReaderOptions::default()
        })
    }

    /// Starts the threads that `options` ask for; [`engine`](Self::engine) says what it came to.
    pub fn with_options(options: &ReaderOptions) -> Result<Self, IoError> {
        let depth = options.depth;
        if !(1..=READER_THREADS_MAX).contains(&depth) {
            return Err(IoError::ThreadCount {
                got: depth,
                max: READER_THREADS_MAX,
            });
        }
        let gap_bytes = options.gap_limit_bytes();
        let device = Device::new(depth, gap_bytes, options.slow_disk.clone())?;
        let mut threads = Threads {
            queue: Arc::new(Queue::new(device)),
            handles: Vec::new(),
            engine: Engine::Pool,
            depth,
            gap_bytes,
        };
        if options.engine == Engine::Uring && threads.start_ring()? {
            threads.engine = Engine::Uring;
        } else {
            threads.start_pool()?;
        }
        Ok(Self {
            threads: Arc::new(threads),
        })
    }

    /// Who makes the requests: the pool or the ring.
    pub fn engine(&self) -> Engine {
        self.threads.engine
    }

    /// Most requests in flight.
    pub fn threads(&self) -> usize {
        self.threads.depth
    }

    /// What came from the device so far.
    pub fn counters(&self) -> IoCounters {
        self.threads.queue.device.counters()
    }

    /// Begins to fill slots of `buffer` from `file` and returns at once.
    ///
    /// A read that the file is too short for, or whose end overflows, fails the ticket.
    ///
    /// # Panics
    /// When a read names a slot that does not exist, names a slot twice or is longer than a slot.
    pub fn submit(&self, buffer: SlotBuffer, file: &FlashFile, reads: &[SlotRead]) -> Ticket {
        let mut ticket = Ticket::idle(buffer);
        self.submit_behind(&mut ticket, file, reads);
        ticket
    }

    /// Begins to fill more slots of a ticket's buffer, behind what is in flight for it; otherwise as
    /// [`submit`](Self::submit).
    ///
    /// # Panics
    /// As `submit`, and when two submits are in flight for the ticket, or a slot that one of them fills is named.
    pub fn submit_behind(&self, ticket: &mut Ticket, file: &FlashFile, reads: &[SlotRead]) {
        let buffer = &mut ticket.buffer;
        for read in reads {
            let SlotRead {
                slot, len_bytes, ..
            } = *read;
            assert!(
                slot < buffer.slot_count(),
                "slot {slot} of {}",
                buffer.slot_count()
            );
            assert!(
                len_bytes <= buffer.slot_bytes(),
                "{len_bytes} bytes into slots of {}",
                buffer.slot_bytes()
            );
            assert!(!buffer.is_busy(slot), "slot {slot} is named twice");
            buffer.mark_busy(slot);
        }
        if reads.is_empty() {
            return;
        }
        let outside = reads
            .iter()
            .find(|read| !file.holds(read.offset_bytes, read.len_bytes));
        let reads = if outside.is_some() { &[] } else { reads };
        let Threads {
            queue, gap_bytes, ..
        } = &*self.threads;
        let mut batch = queue.spare();
        let free = Arc::get_mut(&mut batch).expect("nobody else holds a spare batch");
        let memory = (buffer.pages(), buffer.slot_bytes());
        // SAFETY: the slots are marked busy above, and `SlotBuffer` shows them to nobody until `Ticket` has waited
        // for the batch and unmarks them; that they exist, are large enough and are named once was asserted.
        unsafe { free.assign(memory, file, reads, *gap_bytes) };
        ticket.push((Arc::clone(&batch), Arc::clone(queue)));
        match outside {
            Some(read) => batch.note(Err(end_of_file(file, read.offset_bytes, read.len_bytes))),
            None => queue.push(batch),
        }
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("engine", &self.engine())
            .field("threads", &self.threads())
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl Threads {
    fn start_pool(&mut self) -> Result<(), IoError> {
        let (begun, all_begun) = std::sync::mpsc::channel::<()>();
        for _ in 0..self.depth {
            let begun = begun.clone();
            self.spawn(move |queue| {
                let transfer = Transfer::new();
                drop(begun);
                queue.work(transfer);
            })?;
        }
        drop(begun);
        // A thread that begins later would allocate while others read. Nothing is sent: the channel closes.
        let _ = all_begun.recv();
        Ok(())
    }

    /// Whether the kernel lets a thread have a ring.
    #[cfg(target_os = "linux")]
    fn start_ring(&mut self) -> Result<bool, IoError> {
        use crate::ring::Ring;
        let depth = self.depth;
        let (report, reported) = std::sync::mpsc::sync_channel(1);
        self.spawn(move |queue| {
            let made = Ring::new(depth);
            // The receiver waits for this.
            let _ = report.send(made.is_ok());
            let Ok(mut ring) = made else { return };
            let work = std::panic::AssertUnwindSafe(|| ring.work(queue));
            if std::panic::catch_unwind(work).is_err() {
                // The kernel may still write to memory that unwinding would free.
                std::process::abort();
            }
            drop(ring);
            // Nothing is left to do, unless the kernel has begun to refuse the ring.
            queue.work(Transfer::new());
        })?;
        Ok(reported.recv().unwrap_or(false))
    }

    #[cfg(not(target_os = "linux"))]
    fn start_ring(&mut self) -> Result<bool, IoError> {
        Ok(false)
    }

    fn spawn(&mut self, work: impl FnOnce(&Queue) + Send + 'static) -> Result<(), IoError> {
        let (index, queue) = (self.handles.len(), Arc::clone(&self.queue));
        let handle = std::thread::Builder::new()
            .name(format!("wick-io-{index}"))
            .stack_size(STACK_BYTES)
            .spawn(move || {
                slice::take_short_turns();
                work(&queue);
            })
            .map_err(|source| IoError::Thread { index, source })?;
        self.handles.push(handle);
        Ok(())
    }
}

/// Makes a ring of `depth` requests and drops it again.
///
/// # Errors
/// Why the kernel refuses one; a reader that asks for io_uring takes the pool then.
#[cfg(target_os = "linux")]
pub fn try_uring(depth: usize) -> std::io::Result<()> {
    crate::ring::Ring::new(depth).map(drop)
}

/// As on Linux; elsewhere there is none.
#[cfg(not(target_os = "linux"))]
pub fn try_uring(_depth: usize) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue.stop();
        for handle in self.handles.drain(..) {
            // A thread that panicked outside of a run has nothing left to tell.
            let _ = handle.join();
        }
    }
}
