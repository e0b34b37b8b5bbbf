//! A matrix as it lies in a file of the folder, read by rows through a ring of buffers.
//!
//! Rows are `row_bytes` long and follow each other; every `block_rows` of them share one crc32c (in files that have
//! checksums), so reads go by whole blocks and each block is checked before anybody sees a row of it. Neuron records are such a
//! matrix too, with one checksum a row.
//!
//! Invariant: what `for_each_rows` hands out is verified; the next two parts are being read meanwhile.
//!
//! Not here: what the rows mean.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use wick_io::{FlashFile, Reader, SlotBuffer, SlotRead, Ticket};

use crate::error::{Error, Result};
use crate::stats::MatrixStats;

/// One part of the ring is in use while the others are read: with one in flight alone the device would run out of
/// requests at each change.
const PARTS: usize = 3;
/// Slots in each part at most. Fewer leave the device idle, and more were no faster (docs/bench/io.md).
const PART_SLOTS_MAX: usize = 8;
/// Slots in each part for matrices that are through before more would help.
const PART_SLOTS_MIN: usize = 3;
/// Bytes of rows that a slot should hold, before room for alignment.
const SLOT_PAYLOAD_BYTES: usize = 256 * 1024;
/// A block of rows that would need more than this in one buffer is refused.
const BLOCK_BYTES_MAX: usize = 4 * 1024 * 1024;
const PAGE_BYTES: usize = 4096;

/// A buffer in parts, through which matrices are read in order.
pub(crate) struct StreamRing {
    buffer: Option<SlotBuffer>,
    slot_bytes: usize,
    part_slots: usize,
    times: MatrixStats,
}

impl StreamRing {
    /// A ring for blocks of at most `block_bytes_max` bytes, of matrices of at most `matrix_bytes_max`.
    pub(crate) fn new(block_bytes_max: usize, matrix_bytes_max: u64) -> Result<Self> {
        let slot_bytes = Self::slot_bytes(block_bytes_max);
        let slots = matrix_bytes_max / (PARTS * SLOT_PAYLOAD_BYTES) as u64;
        let part_slots = slots.clamp(PART_SLOTS_MIN as u64, PART_SLOTS_MAX as u64) as usize;
        let buffer = Some(SlotBuffer::new(PARTS * part_slots, slot_bytes)?);
        Ok(Self {
            buffer,
            slot_bytes,
            part_slots,
            times: MatrixStats::default(),
        })
    }

    fn slot_bytes(block_bytes_max: usize) -> usize {
        // An aligned superset reaches at most one page beyond either end.
        block_bytes_max
            .max(SLOT_PAYLOAD_BYTES)
            .next_multiple_of(PAGE_BYTES)
            + 2 * PAGE_BYTES
    }

    /// What reading through the ring took so far.
    pub(crate) fn times(&self) -> MatrixStats {
        self.times
    }

    /// Bytes that the ring takes.
    pub(crate) fn bytes(&self) -> u64 {
        (PARTS * self.part_slots * self.slot_bytes) as u64
    }
}

/// One matrix in a file.
pub(crate) struct StoredMatrix {
    pub(crate) name: String,
    pub(crate) file: FlashFile,
    pub(crate) offset_bytes: u64,
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
    pub(crate) block_rows: usize,
    /// One a block; `None` where the file has none.
    pub(crate) checksums: Option<Vec<u32>>,
}

/// The blocks that one slot takes at one time.
struct Group {
    rows: Range<usize>,
    /// Where the first row lies in the slot.
    skip_bytes: usize,
    read: SlotRead,
}

impl StoredMatrix {
    /// Refuses a matrix whose blocks are too long to be buffered, or whose checksums are not one a block.
    pub(crate) fn check(self, path: &Path) -> Result<Self> {
        let block_bytes = self.block_bytes();
        let reason = if block_bytes > BLOCK_BYTES_MAX {
            format!(
                "tensor {}: blocks of {block_bytes} bytes, at most {BLOCK_BYTES_MAX}",
                self.name
            )
        } else {
            let blocks = self.rows.div_ceil(self.block_rows);
            match &self.checksums {
                Some(checksums) if checksums.len() != blocks => format!(
                    "tensor {}: {} checksums for {} rows in blocks of {}",
                    self.name,
                    checksums.len(),
                    self.rows,
                    self.block_rows
                ),
                _ => return Ok(self),
            }
        };
        Err(Error::Folder {
            path: path.to_owned(),
            reason,
        })
    }

    /// Bytes of one full block of rows.
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_rows
            .min(self.rows)
            .saturating_mul(self.row_bytes)
    }

    /// The checksum of a block of rows, when the file has one.
    pub(crate) fn checksum(&self, block: usize) -> Option<u32> {
        self.checksums.as_ref().map(|checksums| checksums[block])
    }

    /// Bytes of the matrix.
    pub(crate) fn len_bytes(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// Reads `rows` in order and calls `consume(rows, bytes)` with verified groups of whole rows.
    pub(crate) fn for_each_rows(
        &self,
        reader: &Reader,
        ring: &mut StreamRing,
        rows: Range<usize>,
        mut consume: impl FnMut(Range<usize>, &[u8]) -> Result<()>,
    ) -> Result<()> {
        debug_assert!(rows.end <= self.rows);
        let mut next = rows.start / self.block_rows * self.block_rows;
        let mut part = 0;
        let buffer = match ring.buffer.take() {
            Some(buffer) => buffer,
            // A block that failed its check took the buffer with it.
            None => SlotBuffer::new(PARTS * ring.part_slots, ring.slot_bytes)?,
        };
        let started = Instant::now();
        let mut ticket = reader.submit(buffer, &self.file, &[]);
        let mut submitted = VecDeque::with_capacity(PARTS);
        let mut read_on = |ticket: &mut Ticket, submitted: &mut VecDeque<_>, ring: &StreamRing| {
            while ticket.in_flight() < PARTS - 1 {
                let groups = self.groups(&mut next, rows.end, part, ring);
                if groups.is_empty() {
                    break;
                }
                let reads: Vec<SlotRead> = groups.iter().map(|group| group.read).collect();
                reader.submit_behind(ticket, &self.file, &reads);
                submitted.push_back(groups);
                part = (part + 1) % PARTS;
            }
        };
        read_on(&mut ticket, &mut submitted, ring);
        while let Some(groups) = submitted.pop_front() {
            let waiting = Instant::now();
            let result = ticket.wait_first();
            ring.times.io += waiting.elapsed();
            if let Err(error) = result {
                ring.buffer = Some(ticket.wait().0);
                return Err(error.into());
            }
            read_on(&mut ticket, &mut submitted, ring);
            for group in &groups {
                ring.times.bytes_streamed += (group.rows.len() * self.row_bytes) as u64;
                let bytes = &ticket.slot(group.read.slot)[group.skip_bytes..];
                let bytes = &bytes[..group.rows.len() * self.row_bytes];
                self.verify(group, bytes)?;
                let wanted = group.rows.start.max(rows.start)..group.rows.end.min(rows.end);
                let first = (wanted.start - group.rows.start) * self.row_bytes;
                let wanted_bytes = wanted.len() * self.row_bytes;
                consume(wanted, &bytes[first..first + wanted_bytes])?;
            }
        }
        ring.times.in_flight += started.elapsed();
        ring.buffer = Some(ticket.wait().0);
        Ok(())
    }

    /// The next groups, one a slot of `part`, from block start `next` up to the block that holds `end`.
    fn groups(&self, next: &mut usize, end: usize, part: usize, ring: &StreamRing) -> Vec<Group> {
        let StreamRing {
            part_slots,
            slot_bytes,
            ..
        } = *ring;
        // Of devices with larger blocks the reader makes aligned reads itself.
        let alignment = self.file.alignment_bytes().min(PAGE_BYTES) as u64;
        let block_bytes = (self.block_rows * self.row_bytes).max(1);
        let blocks = ((slot_bytes - 2 * PAGE_BYTES) / block_bytes).max(1);
        let mut groups = Vec::with_capacity(part_slots);
        while *next < end && groups.len() < part_slots {
            // Up to the end of the last block wanted, which may be shorter at the end of the matrix.
            let last = end.next_multiple_of(self.block_rows).min(self.rows);
            let rows = *next..last.min(*next + blocks * self.block_rows);
            let start_bytes = self.offset_bytes + (rows.start * self.row_bytes) as u64;
            let aligned_bytes = start_bytes / alignment * alignment;
            let skip_bytes = (start_bytes - aligned_bytes) as usize;
            let read = SlotRead {
                slot: part * part_slots + groups.len(),
                offset_bytes: aligned_bytes,
                len_bytes: skip_bytes + rows.len() * self.row_bytes,
                crc32c: None,
            };
            *next = rows.end;
            groups.push(Group {
                rows,
                skip_bytes,
                read,
            });
        }
        groups
    }

    fn verify(&self, group: &Group, bytes: &[u8]) -> Result<()> {
        let Some(checksums) = &self.checksums else {
            return Ok(());
        };
        let block_bytes = (self.block_rows * self.row_bytes).max(1);
        let first_block = group.rows.start / self.block_rows;
        for (index, block) in bytes.chunks(block_bytes).enumerate() {
            let expected = checksums[first_block + index];
            let got = crc32c::crc32c(block);
            if got != expected {
                let row = group.rows.start + index * self.block_rows;
                let offset_bytes = self.offset_bytes + (row * self.row_bytes) as u64;
                return Err(Error::Folder {
                    path: self.file.path().to_owned(),
                    reason: format!(
                        "tensor {}: checksum mismatch at offset {offset_bytes}: \
                         crc32c {got:08x}, expected {expected:08x}",
                        self.name
                    ),
                });
            }
        }
        Ok(())
    }
}
