//! The reader: a pool of threads that fill slots.
//!
//! Batches wait in a queue, first come first served; each thread takes runs from the first batch until none is
//! left. The threads exist from `new` until the last clone of the reader is dropped, which first finishes
//! everything submitted.
//!
//! Cost: a thread is a small stack and, once it has met an unaligned read, a bounce buffer: at most
//! [`READER_THREAD_BYTES_MAX`]. A submit allocates the batch and its two lists; a request allocates nothing.
//!
//! Invariants:
//! - A batch is in the queue until all of its runs are claimed; a claimed run is always finished.
//! - A panic of a thread is an error of that ticket; the thread goes on.

use crate::batch::Batch;
use crate::buffer::SlotBuffer;
use crate::file::FlashFile;
use crate::plan::{Plan, SlotRead, RUN_BYTES_MAX};
use crate::ticket::Ticket;
use crate::transfer::{end_of_file, Bounce, Counters};
use crate::IoError;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Most threads of a reader; devices gain nothing from more.
pub const READER_THREADS_MAX: usize = 1024;

/// Most memory that one thread of a reader keeps: its stack and its bounce buffer.
pub const READER_THREAD_BYTES_MAX: usize = STACK_BYTES + RUN_BYTES_MAX;

/// The bounce buffer that a thread keeps once it has met a read that the device cannot place directly.
pub const READER_BOUNCE_BYTES: usize = RUN_BYTES_MAX;

const STACK_BYTES: usize = 128 << 10;

/// What a reader got from the device since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounters {
    /// Bytes, with what was read only for alignment or to bridge a gap.
    pub bytes: u64,
    /// Read calls.
    pub requests: u64,
}

/// A pool of reading threads; clones share it.
#[derive(Clone)]
pub struct Reader {
    pool: Arc<Pool>,
}

/// The threads' owner: gone with the last reader, and the threads with it.
struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    counters: Counters,
}

#[derive(Default)]
struct Queue {
    batches: VecDeque<Arc<Batch>>,
    idle_count: usize,
    is_stopping: bool,
}

impl Reader {
    /// Starts `threads` threads, 1 to [`READER_THREADS_MAX`]: as many requests can be in flight.
    pub fn new(threads: usize) -> Result<Self, IoError> {
        if !(1..=READER_THREADS_MAX).contains(&threads) {
            return Err(IoError::ThreadCount {
                got: threads,
                max: READER_THREADS_MAX,
            });
        }
        let mut pool = Pool {
            shared: Arc::default(),
            threads: Vec::with_capacity(threads),
        };
        for index in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("wick-io-{index}"))
                .stack_size(STACK_BYTES)
                .spawn(move || shared.work())
                .map_err(|source| IoError::Thread { index, source })?;
            pool.threads.push(thread);
        }
        Ok(Self {
            pool: Arc::new(pool),
        })
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.pool.threads.len()
    }

    /// What came from the device so far.
    pub fn counters(&self) -> IoCounters {
        let Counters { bytes, requests } = &self.pool.shared.counters;
        IoCounters {
            bytes: bytes.load(Ordering::Relaxed),
            requests: requests.load(Ordering::Relaxed),
        }
    }

    /// Begins to fill slots of `buffer` from `file` and returns at once.
    ///
    /// A read that the file is too short for, or whose end overflows, fails the ticket.
    ///
    /// # Panics
    /// When a read names a slot that does not exist, names a slot twice or is longer than a slot.
    pub fn submit(&self, mut buffer: SlotBuffer, file: &FlashFile, reads: &[SlotRead]) -> Ticket {
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
            return Ticket::new(buffer, None);
        }
        let outside = reads
            .iter()
            .find(|read| !file.holds(read.offset_bytes, read.len_bytes));
        let reads = if outside.is_some() { &[] } else { reads };
        let plan = Plan::new(reads, buffer.slot_bytes(), file.alignment_bytes());
        // SAFETY: the parts lie in the slots marked busy above, which `SlotBuffer` shows to nobody until
        // `Ticket::wait` unmarks them; a slot is named once, so parts of two reads never overlap.
        let batch = Arc::new(unsafe { Batch::new(Arc::clone(buffer.pages()), file.clone(), plan) });
        match outside {
            Some(read) => batch.fail(end_of_file(file, read.offset_bytes, read.len_bytes)),
            None => self.pool.shared.push(Arc::clone(&batch)),
        }
        Ticket::new(buffer, Some(batch))
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("threads", &self.threads())
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked outside of a run has nothing left to tell.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a batch and wakes as many threads as it has runs.
    fn push(&self, batch: Arc<Batch>) {
        let run_count = batch.run_count();
        let mut queue = self.lock();
        queue.batches.push_back(batch);
        let idle_count = queue.idle_count;
        drop(queue);
        if run_count >= idle_count {
            self.wake.notify_all();
        } else {
            (0..run_count).for_each(|_| self.wake.notify_one());
        }
    }

    /// The life of a thread.
    fn work(&self) {
        let mut bounce = Bounce::default();
        while let Some(batch) = self.next_batch() {
            batch.work(&mut bounce, &self.counters);
        }
    }

    /// The first batch with work, waiting for one; `None` when there is none and the reader is gone.
    fn next_batch(&self) -> Option<Arc<Batch>> {
        let mut queue = self.lock();
        loop {
            while queue
                .batches
                .front()
                .is_some_and(|batch| batch.is_exhausted())
            {
                queue.batches.pop_front();
            }
            if let Some(batch) = queue.batches.front() {
                return Some(Arc::clone(batch));
            }
            if queue.is_stopping {
                return None;
            }
            queue.idle_count += 1;
            queue = self
                .wake
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
            queue.idle_count -= 1;
        }
    }
}
