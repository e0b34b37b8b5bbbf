//! Which forwards a thread is in the middle of.
//!
//! A forward inside of another one of the same weights would wait for itself, unless it is the innermost: then it is part of that.

use std::cell::RefCell;

use crate::sparse::ffn::forget_begun;

thread_local! {
    /// The numbers of their stores, outermost first.
    static RUNNING: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The forwards that this thread is in the middle of.
pub(super) fn outer() -> Vec<u64> {
    RUNNING.with_borrow(Vec::clone)
}

/// Whether the innermost forward of this thread is one of this store.
pub(super) fn is_running(store: u64) -> bool {
    RUNNING.with_borrow(|running| running.last() == Some(&store))
}

/// Marks a forward, also when it ends by a panic; no FFN that was begun before counts in it, nor later.
pub(super) struct Running {
    before: Vec<u64>,
}

impl Running {
    /// A forward of `store` inside of `outer`, which may be those of another thread that waits.
    pub(super) fn begin(mut outer: Vec<u64>, store: u64) -> Self {
        forget_begun();
        outer.push(store);
        Self {
            before: RUNNING.replace(outer),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        forget_begun();
        RUNNING.set(std::mem::take(&mut self.before));
    }
}
