//! The ticket: a slot buffer on loan to the pool threads.
//!
//! One submit fills slots, and a second may follow behind it, so that the device has work while the first one's last
//! requests are on their way.
//!
//! Invariants:
//! - The ticket owns the buffer's handle, the batch its own share of the memory: dropping or forgetting the
//!   ticket leaves the memory alive for as long as a pool thread may write to it.
//! - A slot named in a submit is busy, thus unreadable, until that submit was waited for.
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
    pub(crate) buffer: SlotBuffer,
    reads: Reads,
}

/// A batch and who knows when it is finished.
type Submitted = (Arc<Batch>, Arc<Queue>);

/// The batches behind a ticket, the older one first.
#[derive(Default)]
struct Reads {
    first: Option<Submitted>,
    second: Option<Submitted>,
}

impl Drop for Reads {
    fn drop(&mut self) {
        for (batch, _) in self.first.iter().chain(&self.second) {
            batch.cancel();
        }
    }
}

impl Ticket {
    /// A buffer of which nothing is being filled.
    pub(crate) fn idle(buffer: SlotBuffer) -> Self {
        Self {
            buffer,
            reads: Reads::default(),
        }
    }

    /// Adds a batch whose slots are marked busy.
    pub(crate) fn push(&mut self, submitted: Submitted) {
        let Reads { first, second } = &mut self.reads;
        match (&first, &second) {
            (None, _) => *first = Some(submitted),
            (_, None) => *second = Some(submitted),
            _ => panic!("two submits of this ticket are in flight already"),
        }
    }

    /// The bytes of a slot that nothing is in flight for.
    ///
    /// # Panics
    /// When there is no such slot, or a submit that was not waited for fills it, even if it has already been read.
    pub fn slot(&self, index: usize) -> &[u8] {
        self.buffer.slot(index)
    }

    /// How many submits were not waited for: at most two, and 0 when there was nothing to read.
    pub fn in_flight(&self) -> usize {
        self.reads.first.iter().chain(&self.reads.second).count()
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_finished(&self) -> bool {
        let mut reads = self.reads.first.iter().chain(&self.reads.second);
        reads.all(|(batch, _)| batch.is_finished())
    }

    /// Blocks until the oldest submit is through: its slots can be looked at then, those of the one behind it not yet.
    /// Returns at once when nothing is in flight.
    ///
    /// After an error the bytes of every slot named in that submit are unspecified.
    pub fn wait_first(&mut self) -> Result<(), IoError> {
        let Some((batch, queue)) = self.reads.first.take() else {
            return Ok(());
        };
        self.reads.first = self.reads.second.take();
        queue.wait(&batch);
        match self.reads.first {
            None => self.buffer.clear_busy(),
            Some(_) => batch
                .slots()
                .for_each(|slot| self.buffer.clear_busy_slot(slot)),
        }
        queue.recycle(batch)
    }

    /// Blocks until all slots are filled or one read has failed, and returns the buffer either way, with the first
    /// error.
    ///
    /// After an error the bytes of every slot named in the submit are unspecified; the other slots are as they
    /// were.
    pub fn wait(mut self) -> (SlotBuffer, Result<(), IoError>) {
        let first = self.wait_first();
        if first.is_err() {
            if let Some((batch, _)) = &self.reads.first {
                batch.cancel();
            }
        }
        let outcome = first.and(self.wait_first());
        (self.buffer, outcome)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("buffer", &self.buffer)
            .field("in_flight", &self.in_flight())
            .finish()
    }
}
