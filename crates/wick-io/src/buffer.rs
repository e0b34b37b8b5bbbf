//! The slot buffer: `slot_count` slots of `slot_bytes` bytes, one after the other.
//!
//! Slot `i` is the bytes `[i * slot_bytes, (i + 1) * slot_bytes)` of memory aligned to 4096, so a slot is as
//! aligned as `slot_bytes` is. The memory is resident from `new` on, so a budget that holds then holds later.
//!
//! Invariants:
//! - While a [`Ticket`](crate::Ticket) owns the buffer, pool threads write only slots marked in `busy`.
//! - A buffer in the hands of a caller has no slot marked busy and no writer.

use crate::pages::Pages;
use crate::IoError;
use std::fmt;
use std::sync::Arc;

/// Memory for records, filled by a [`Reader`](crate::Reader).
pub struct SlotBuffer {
    pages: Arc<Pages>,
    slot_count: usize,
    slot_bytes: usize,
    /// One bit a slot: the slot belongs to the pool threads.
    busy: Vec<u64>,
}

impl SlotBuffer {
    /// Allocates and touches `slot_count * slot_bytes` bytes of zeros, rounded up to whole pages.
    pub fn new(slot_count: usize, slot_bytes: usize) -> Result<Self, IoError> {
        let bytes = slot_count
            .checked_mul(slot_bytes)
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or(IoError::BufferTooLarge {
                slot_count,
                slot_bytes,
            })?;
        // The larger one first: what cannot be had must fail before anything is touched.
        let pages = Arc::new(Pages::new(bytes)?);
        let words = slot_count.div_ceil(64);
        let mut busy = Vec::new();
        busy.try_reserve_exact(words)
            .map_err(|_| IoError::OutOfMemory {
                bytes: words.saturating_mul(size_of::<u64>()),
            })?;
        busy.resize(words, 0);
        Ok(Self {
            pages,
            slot_count,
            slot_bytes,
            busy,
        })
    }

    /// Number of slots.
    pub fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes of memory the buffer keeps resident.
    pub fn memory_bytes(&self) -> usize {
        self.pages.len_bytes() + self.busy.len() * size_of::<u64>()
    }

    /// The bytes of slot `index`.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn slot(&self, index: usize) -> &[u8] {
        assert!(
            index < self.slot_count,
            "slot {index} of {}",
            self.slot_count
        );
        assert!(!self.is_busy(index), "slot {index} is being filled");
        let start = index * self.slot_bytes;
        // SAFETY: pool threads write only busy slots, and this one is not.
        unsafe { self.pages.bytes(start..start + self.slot_bytes) }
    }

    pub(crate) fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }

    pub(crate) fn is_busy(&self, index: usize) -> bool {
        (self.busy[index / 64] >> (index % 64)) & 1 == 1
    }

    /// Gives the slot to the pool threads.
    pub(crate) fn mark_busy(&mut self, index: usize) {
        self.busy[index / 64] |= 1 << (index % 64);
    }

    /// Takes the slot back; no pool thread writes to it any more.
    pub(crate) fn clear_busy_slot(&mut self, index: usize) {
        self.busy[index / 64] &= !(1 << (index % 64));
    }

    /// Takes all slots back; no pool thread writes to the buffer any more.
    pub(crate) fn clear_busy(&mut self) {
        self.busy.fill(0);
    }
}

impl fmt::Debug for SlotBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotBuffer")
            .field("slot_count", &self.slot_count)
            .field("slot_bytes", &self.slot_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_zeroed_and_of_one_size() {
        let buffer = SlotBuffer::new(130, 100).unwrap();
        assert_eq!((buffer.slot_count(), buffer.slot_bytes()), (130, 100));
        assert!((0..130).all(|i| buffer.slot(i) == [0u8; 100]));
        assert!(buffer.memory_bytes() >= 13_000);
    }

    #[test]
    fn empty_buffers_exist() {
        assert_eq!(SlotBuffer::new(0, 4096).unwrap().slot_count(), 0);
        assert!(SlotBuffer::new(3, 0).unwrap().slot(2).is_empty());
    }

    #[test]
    fn sizes_beyond_the_address_space_are_errors() {
        assert!(matches!(
            SlotBuffer::new(usize::MAX, 2),
            Err(IoError::BufferTooLarge { .. })
        ));
        assert!(matches!(
            SlotBuffer::new(1, usize::MAX),
            Err(IoError::BufferTooLarge { .. })
        ));
        assert!(matches!(
            SlotBuffer::new(1 << 40, 1 << 20),
            Err(IoError::OutOfMemory { .. })
        ));
        assert!(matches!(
            SlotBuffer::new(usize::MAX, 0),
            Err(IoError::OutOfMemory { .. })
        ));
    }

    #[test]
    #[should_panic(expected = "slot 2 of 2")]
    fn a_slot_that_does_not_exist_panics() {
        let _ = SlotBuffer::new(2, 8).unwrap().slot(2);
    }
}
