//! The queue between those who submit batches and the threads that read them.
//!
//! Batches are served first come first served; each thread takes runs from the first batch until none is left.
//!
//! Invariants:
//! - A batch is in the queue until all of its runs are claimed; a claimed run is always finished.
//! - The queue lives, and the device with it, until the last thread has left `work`.

use crate::batch::Batch;
use crate::device::Device;
use crate::transfer::Transfer;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What the threads of a reader share.
pub(crate) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
    pub(crate) device: Device,
}

#[derive(Default)]
struct State {
    batches: VecDeque<Arc<Batch>>,
    idle_count: usize,
    is_stopping: bool,
}

impl State {
    /// The first batch with work.
    fn front(&mut self) -> Option<Arc<Batch>> {
        while self
            .batches
            .front()
            .is_some_and(|batch| batch.is_exhausted())
        {
            self.batches.pop_front();
        }
        self.batches.front().cloned()
    }
}

impl Queue {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            state: Mutex::default(),
            wake: Condvar::new(),
            device,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Lets the threads go once everything submitted is done.
    pub(crate) fn stop(&self) {
        self.lock().is_stopping = true;
        self.wake.notify_all();
    }

    /// The life of a thread of the pool.
    pub(crate) fn work(&self) {
        let mut transfer = Transfer::new();
        while let Some(batch) = self.next_batch() {
            batch.work(&mut transfer, &self.device);
        }
    }

    /// The first batch with work, waiting for one; `None` when there is none and the reader is gone.
    pub(crate) fn next_batch(&self) -> Option<Arc<Batch>> {
        let mut state = self.lock();
        loop {
            let front = state.front();
            if front.is_some() || state.is_stopping {
                return front;
            }
            state.idle_count += 1;
            state = self
                .wake
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.idle_count -= 1;
        }
    }

    /// The first batch with work, if there is one now.
    #[cfg(target_os = "linux")]
    pub(crate) fn try_next_batch(&self) -> Option<Arc<Batch>> {
        self.lock().front()
    }
}
