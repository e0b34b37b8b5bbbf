//! Checksums of plain tensors: one crc32c for each block of rows.
//!
//! `block_rows = max(1, 65536 / row_bytes)`, so that a block is about 64 KiB and a row read on its
//! own costs one block. A 1-D tensor is one row. The checksums of tensor `t` are the tensor
//! `t.crc32c`, U32, one for each block. (Records have one checksum each instead: see
//! [`FfnLayer`](crate::FfnLayer).)

use std::ops::Range;

use crate::{FormatError, StoredDtype};

/// Bytes of rows that share a checksum, about.
const BLOCK_BYTES: usize = 65536;

/// How the rows of one tensor are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumBlocks {
    /// Rows of the tensor: its first dimension, or 1.
    pub rows: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
    /// Rows of a block; the last block may have fewer.
    pub block_rows: usize,
}

impl ChecksumBlocks {
    /// The grouping for a tensor of this shape.
    ///
    /// # Errors
    /// The size of the tensor does not fit.
    pub fn of(shape: &[usize], dtype: StoredDtype) -> Result<Self, FormatError> {
        let (rows, row_shape) = match shape {
            [rows, row_shape @ ..] if !row_shape.is_empty() => (*rows, row_shape),
            flat => (1, flat),
        };
        let row_bytes = row_shape
            .iter()
            .try_fold(dtype.size_bytes(), |bytes, &dim| bytes.checked_mul(dim))
            .filter(|row_bytes| row_bytes.checked_mul(rows).is_some())
            .ok_or_else(|| FormatError::Overflow {
                name: format!("tensor of shape {shape:?}"),
            })?;
        let block_rows = BLOCK_BYTES.checked_div(row_bytes).unwrap_or(1).max(1);
        Ok(Self {
            rows,
            row_bytes,
            block_rows,
        })
    }

    /// Name of the tensor with the checksums.
    pub fn tensor_name(of: &str) -> String {
        format!("{of}.crc32c")
    }

    /// How many checksums there are.
    pub fn block_count(&self) -> usize {
        self.rows.div_ceil(self.block_rows)
    }

    /// The block that holds a row.
    pub fn block_of_row(&self, row: usize) -> usize {
        row / self.block_rows
    }

    /// Bytes of block `block`, relative to the start of the tensor; empty past the end.
    pub fn block_bytes_range(&self, block: usize) -> Range<u64> {
        let at = |block: usize| {
            let row = block.saturating_mul(self.block_rows).min(self.rows);
            row as u64 * self.row_bytes as u64
        };
        at(block)..at(block.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_rows_share_a_block() {
        let blocks = ChecksumBlocks::of(&[320, 64], StoredDtype::F32).unwrap();
        assert_eq!(
            (blocks.rows, blocks.row_bytes, blocks.block_rows),
            (320, 256, 256)
        );
        assert_eq!(blocks.block_count(), 2);
        assert_eq!(blocks.block_bytes_range(0), 0..65536);
        assert_eq!(blocks.block_bytes_range(1), 65536..81920);
        assert_eq!(blocks.block_bytes_range(2), 81920..81920);
        assert_eq!((blocks.block_of_row(255), blocks.block_of_row(256)), (0, 1));
    }

    #[test]
    fn long_rows_stand_alone() {
        let blocks = ChecksumBlocks::of(&[3, 40000], StoredDtype::F16).unwrap();
        assert_eq!((blocks.block_rows, blocks.block_count()), (1, 3));
        assert_eq!(blocks.block_bytes_range(2), 160_000..240_000);
    }

    #[test]
    fn flat_scalar_and_empty_tensors() {
        let flat = ChecksumBlocks::of(&[100_000], StoredDtype::F32).unwrap();
        assert_eq!(
            (flat.rows, flat.row_bytes, flat.block_count()),
            (1, 400_000, 1)
        );
        let scalar = ChecksumBlocks::of(&[], StoredDtype::F16).unwrap();
        assert_eq!(scalar.block_bytes_range(0), 0..2);
        assert_eq!(
            ChecksumBlocks::of(&[0, 8], StoredDtype::F32)
                .unwrap()
                .block_count(),
            0
        );
        assert_eq!(
            ChecksumBlocks::of(&[8, 0], StoredDtype::F32)
                .unwrap()
                .block_count(),
            8
        );
        assert!(ChecksumBlocks::of(&[usize::MAX, 2], StoredDtype::U8).is_err());
    }
}
