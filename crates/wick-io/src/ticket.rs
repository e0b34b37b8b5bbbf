//! The ticket: a slot buffer on loan to the pool threads.
//!
//! Invariants:
//! - The ticket owns the buffer's handle, the batch its own share of the memory: dropping or forgetting the
//!   ticket leaves the memory alive for as long as a pool thread may write to it.
//! - A slot named in the submit is busy, thus unreadable, until `wait`.
//! - Only a batch that was waited for is used again; nobody else can tell that it has no other holders.

use crate::batch::Batch;
use crate::buffer::SlotBuffer;
use crate::queue::Queue;
use crate::IoError;
use std::fmt;
use std::sync::Arc;

/// The right to get a buffer back once its slots are filled.
///
/// Dropping the ticket gives the buffer up and cancels the reads that have not begun.
#[must_use = "a dropped ticket gives its buffer up"]
pub struct Ticket {
    buffer: SlotBuffer,
    reads: Reads,
}

/// The batch behind a ticket and who knows when it is finished; `None` when nothing had to be read.
struct Reads(Option<(Arc<Batch>, Arc<Queue>)>);

impl Drop for Reads {
    fn drop(&mut self) {
        if let Some((batch, _)) = &self.0 {
            batch.cancel();
        }
    }
}

impl Ticket {
    pub(crate) fn new(buffer: SlotBuffer, reads: Option<(Arc<Batch>, Arc<Queue>)>) -> Self {
        Self {
            buffer,
            reads: Reads(reads),
        }
    }

    /// The bytes of a slot that this ticket does not fill.
    ///
    /// # Panics
    /// When there is no such slot, or the ticket fills it, even if it has already been read.
    pub fn slot(&self, index: usize) -> &[u8] {
        self.buffer.slot(index)
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_finished(&self) -> bool {
        self.reads
            .0
            .as_ref()
            .is_none_or(|(batch, _)| batch.is_finished())
    }

    /// Blocks until all slots are filled or one read has failed, and returns the buffer either way.
    ///
    /// After an error the bytes of every slot named in the submit are unspecified; the other slots are as they
    /// were.
    pub fn wait(self) -> (SlotBuffer, Result<(), IoError>) {
        let Self {
            mut buffer,
            mut reads,
        } = self;
        let outcome = match reads.0.take() {
            Some((batch, queue)) => queue.wait(batch),
            None => Ok(()),
        };
        buffer.clear_busy();
        (buffer, outcome)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("buffer", &self.buffer)
            .field("is_finished", &self.is_finished())
            .finish()
    }
}
