//! The threads of a stock model, for one product or forward at a time.
//!
//! A thread that waits in a pool picks up other tasks of it; none of them may want a lock that it holds. So these weights have a
//! pool of their own with one piece of work in it at a time, and who waits for a turn waits outside of any pool.

use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};

use crate::error::Result;
use crate::pool::{with_awake_threads, ComputePool};

pub(super) struct Turns {
    pool: ComputePool,
    turn: Mutex<()>,
}

impl Turns {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            pool: ComputePool::new()?,
            turn: Mutex::new(()),
        })
    }

    /// Whether the current thread has the turn already.
    #[cfg(feature = "wick-gemm")]
    pub(super) fn are_current(&self) -> bool {
        self.pool.is_current()
    }

    /// Runs `work` when it is its turn, on the pool's threads.
    pub(super) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        outside_of_pools(|| {
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            self.pool.run(|| with_awake_threads(work))
        })
    }
}

/// Runs `work` on a thread that picks up no task of any pool while it waits.
pub(super) fn outside_of_pools<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    match rayon::current_thread_index() {
        None => work(),
        Some(_) => std::thread::scope(|scope| scope.spawn(work).join())
            .unwrap_or_else(|panic| resume_unwind(panic)),
    }
}
