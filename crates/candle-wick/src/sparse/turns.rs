//! The threads of a stock model, which its products have to themselves one after the other.
//!
//! A thread that waits in a pool picks up other tasks of it; none of them may want a lock that it holds. So there is a pool for
//! these weights alone, one piece of work in it at a time, and whoever waits for its turn does so outside of any pool.

use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};

use crate::error::Result;
use crate::pool::ComputePool;

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
        let run = || {
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            self.pool.run(work)
        };
        match rayon::current_thread_index() {
            None => run(),
            Some(_) => std::thread::scope(|scope| scope.spawn(run).join())
                .unwrap_or_else(|panic| resume_unwind(panic)),
        }
    }
}
