//! The progress meter: counts bytes and tells the caller.

use std::cell::Cell;

use crate::ConvertProgress;

/// Bytes done of bytes to do.
pub(crate) struct Meter<'a> {
    progress: &'a dyn Fn(ConvertProgress<'_>),
    done_bytes: Cell<u64>,
    total_bytes: u64,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(progress: &'a dyn Fn(ConvertProgress<'_>), total_bytes: u64) -> Self {
        Self {
            progress,
            done_bytes: Cell::new(0),
            total_bytes,
        }
    }

    /// Counts `bytes` of `step`.
    pub(crate) fn add(&self, bytes: u64, step: &str) {
        let done_bytes = self.done_bytes.get() + bytes;
        self.done_bytes.set(done_bytes);
        let total_bytes = self.total_bytes.max(done_bytes);
        (self.progress)(ConvertProgress {
            done_bytes,
            total_bytes,
            step,
        });
    }
}
