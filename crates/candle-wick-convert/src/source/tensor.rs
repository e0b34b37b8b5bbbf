//! A tensor of the model, as it lies in the source: where its bytes are, and in which order its rows.
//!
//! Old uploads put several matrices into one tensor, or order its rows otherwise. A [`RowOrder`] says which
//! stored row a row of the model's tensor is, so nothing is moved before it is written. A vector has one
//! element a row.

use std::ops::Range;

use wick_format::Dtype;

use super::SourceFolder;
use crate::transcode::Cast;
use crate::ConvertError;

/// Bytes of a tensor in a weight file.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    /// As the file names it; checked when the tensor is needed.
    pub(super) dtype: String,
    pub(super) range: Range<usize>,
}

/// A tensor as a weight file lists it.
pub(super) struct StoredTensor {
    pub(super) name: String,
    pub(super) stored: Stored,
    pub(super) shape: Vec<usize>,
}

/// Which stored row is row `r`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The same.
    Same,
    /// `first + r / rows * step + r % rows`: groups of `rows` rows that begin every `step` rows, from `first` on.
    Groups {
        first: usize,
        rows: usize,
        step: usize,
    },
}

impl RowOrder {
    fn stored_row(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::Groups { first, rows, step } => first + row / rows * step + row % rows,
        }
    }
}

/// One tensor of the source, under its current name.
#[derive(Clone, Debug)]
pub(crate) struct SourceTensor {
    pub(super) shard: usize,
    /// Its name in the file.
    pub(super) stored_name: String,
    pub(super) stored: Stored,
    pub(crate) shape: Vec<usize>,
    pub(super) order: RowOrder,
}

impl SourceTensor {
    /// Elements of a row; a vector has one element a row.
    pub(crate) fn width(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Rows, as [`Self::width`] counts them.
    pub(crate) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }
}

impl SourceFolder {
    /// Elements `columns` of the rows `rows` as `to` into `target`, one row after the other.
    ///
    /// # Errors
    /// Its dtype is none for weights, or a value does not fit into `to`.
    pub(crate) fn read(
        &self,
        tensor: &SourceTensor,
        rows: Range<usize>,
        columns: Range<usize>,
        to: Dtype,
        target: &mut [u8],
    ) -> Result<(), ConvertError> {
        let cast = Cast {
            from: self.dtype(tensor)?,
            to,
        };
        let width = tensor.width();
        let size = cast.from.size_bytes();
        let bytes = &self.shards[tensor.shard].file.bytes()[tensor.stored.range.clone()];
        let copy = |start: usize, count: usize, target: &mut [u8]| {
            cast.apply(&bytes[start * size..(start + count) * size], target)
                .map_err(|value| self.out_of_range(tensor, cast, value))
        };
        if tensor.order == RowOrder::Same && columns.len() == width {
            return copy(rows.start * width, rows.len() * width, target);
        }
        let row_bytes = (columns.len() * to.size_bytes()).max(1);
        for (row, target) in rows.zip(target.chunks_mut(row_bytes)) {
            let start = tensor.order.stored_row(row) * width + columns.start;
            copy(start, columns.len(), target)?;
        }
        Ok(())
    }

    /// Lets go of the memory behind some rows; they can be read again.
    pub(crate) fn release(&self, tensor: &SourceTensor, rows: Range<usize>) {
        let Ok(dtype) = self.dtype(tensor) else {
            return;
        };
        let row_bytes = tensor.width() * dtype.size_bytes();
        let file = &self.shards[tensor.shard].file;
        let start = tensor.stored.range.start;
        if tensor.order == RowOrder::Same {
            file.release(start + rows.start * row_bytes..start + rows.end * row_bytes);
            return;
        }
        for row in rows {
            let start = start + tensor.order.stored_row(row) * row_bytes;
            file.release(start..start + row_bytes);
        }
    }

    /// The error for a value that the wanted dtype cannot hold.
    fn out_of_range(&self, tensor: &SourceTensor, cast: Cast, value: f32) -> ConvertError {
        let got = format!("too large for {} with a value of {value}", cast.to);
        let limit = cast.limit();
        let expected = format!("at most {limit} in magnitude (f32 or bf16 would hold it)");
        self.wrong(tensor, got, expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_pick_their_rows() {
        // Three heads of [q, k, v] with two rows each: the keys.
        let keys = RowOrder::Groups {
            first: 2,
            rows: 2,
            step: 6,
        };
        let picked: Vec<usize> = (0..6).map(|row| keys.stored_row(row)).collect();
        assert_eq!(picked, [2, 3, 8, 9, 14, 15]);
    }
}
