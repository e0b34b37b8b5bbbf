//! The queue between those who submit batches, the threads that read them, and those who wait for them.
//!
//! Batches are served first come first served; each thread takes runs from the first batch until none is left. A
//! batch that was waited for becomes spare, and a later submit uses its lists again.
//!
//! Invariants:
//! - A batch is in the queue until all of its runs are claimed; a claimed run is always settled.
//! - A thread holds a batch only while it has runs of it to settle, and lets go of it under the lock when it settles
//!   them: whoever finds a batch finished, under the lock, finds it without other holders than tickets.
//! - A spare batch has one holder, the queue, and holds neither slots nor file.
//! - The queue lives, and the device with it, until the last thread has left `work` and the last ticket is gone.

use crate::batch::Batch;
use crate::device::Device;
use crate::transfer::Transfer;
use crate::IoError;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Most spare batches; so many tickets at once are served without allocating.
pub(crate) const SPARE_MAX: usize = 16;

/// What the threads of a reader share.
pub(crate) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
    pub(crate) device: Device,
}

struct State {
    batches: VecDeque<Arc<Batch>>,
    spare: Vec<Arc<Batch>>,
    idle_count: usize,
    is_stopping: bool,
}

impl State {
    /// A run of the first batch that has one left.
    fn claim(&mut self) -> Option<(Arc<Batch>, usize)> {
        loop {
            let batch = self.batches.front()?;
            if let Some(run) = batch.claim() {
                return Some((Arc::clone(batch), run));
            }
            self.batches.pop_front();
        }
    }

    /// Lets go of batches without a run to claim: they are all in front.
    fn drop_exhausted(&mut self) {
        while self.batches.front().is_some_and(|b| b.is_exhausted()) {
            self.batches.pop_front();
        }
    }
}

impl Queue {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            state: Mutex::new(State {
                batches: VecDeque::with_capacity(SPARE_MAX),
                spare: Vec::with_capacity(SPARE_MAX),
                idle_count: 0,
                is_stopping: false,
            }),
            wake: Condvar::new(),
            device,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A batch without other holders: the spare one with the most room, else a new one.
    pub(crate) fn spare(&self) -> Arc<Batch> {
        let mut state = self.lock();
        let roomiest = (0..state.spare.len()).max_by_key(|&index| state.spare[index].room());
        let spare = roomiest.map(|index| state.spare.swap_remove(index));
        drop(state);
        spare.unwrap_or_default()
    }

    /// Queues a batch and wakes as many threads as it has runs.
    pub(crate) fn push(&self, batch: Arc<Batch>) {
        let run_count = batch.run_count();
        let mut state = self.lock();
        state.batches.push_back(batch);
        let idle_count = state.idle_count;
        drop(state);
        if run_count >= idle_count {
            self.wake.notify_all();
        } else {
            (0..run_count).for_each(|_| self.wake.notify_one());
        }
    }

    /// Blocks until the batch of a ticket is finished.
    pub(crate) fn wait(&self, batch: &Batch) {
        let mut state = self.lock();
        while !batch.is_finished() {
            let waited = batch.finished.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes a batch that was waited for spare; its first error, if any.
    pub(crate) fn recycle(&self, mut batch: Arc<Batch>) -> Result<(), IoError> {
        let outcome = batch.outcome();
        if let Some(free) = Arc::get_mut(&mut batch) {
            free.clear();
            let mut state = self.lock();
            if state.spare.len() < SPARE_MAX {
                state.spare.push(batch);
            }
        }
        outcome
    }

    /// Ends a thread's hold of a batch of which it has read, or given up, `count` runs.
    pub(crate) fn settle(&self, batch: Arc<Batch>, count: usize) {
        let mut state = self.lock();
        state.drop_exhausted();
        if batch.count(count) {
            batch.finished.notify_all();
        }
        // Before the lock, without which nobody sees that the batch is finished.
        drop(batch);
        drop(state);
    }

    /// Lets the threads go once everything submitted is done.
    pub(crate) fn stop(&self) {
        self.lock().is_stopping = true;
        self.wake.notify_all();
    }

    /// The life of a thread of the pool.
    pub(crate) fn work(&self, mut transfer: Transfer) {
        while let Some((batch, first)) = self.claim() {
            let count = batch.work(first, &mut transfer, &self.device);
            self.settle(batch, count);
        }
    }

    /// The next run and its batch, waiting for one; `None` when there is none and the reader is gone.
    pub(crate) fn claim(&self) -> Option<(Arc<Batch>, usize)> {
        let mut state = self.lock();
        loop {
            let claimed = state.claim();
            if claimed.is_some() || state.is_stopping {
                return claimed;
            }
            state.idle_count += 1;
            state = self
                .wake
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.idle_count -= 1;
        }
    }

    /// The next run and its batch, if there is one now.
    #[cfg(target_os = "linux")]
    pub(crate) fn try_claim(&self) -> Option<(Arc<Batch>, usize)> {
        self.lock().claim()
    }
}
