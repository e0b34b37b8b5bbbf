//! The column record: what one input of a linear layer is multiplied with, side by side.
//!
//! ```text
//! [rows]dtype   | column n of the first matrix
//! [rows]dtype   | column n of the second, where two matrices have the same input
//! [..]zeros     | padding to the stride
//! ```
//!
//! An FFN has two kinds. A channel's record has its columns of gate and up, since both read the channel or neither does; a
//! neuron's has its column of down. The stride follows the rule of neuron records ([`RecordLayout`](crate::RecordLayout)).

use std::ops::Range;

use crate::record::{stride_of, SIZE_MAX, STRIDE_UNIT_BYTES};
use crate::{Dtype, FormatError};

/// Where the columns lie in one record, relative to the record's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnLayout {
    /// Elements of each column.
    pub rows: usize,
    /// Matrices with a column in the record.
    pub matrix_count: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Distance between two records.
    pub stride_bytes: usize,
}

impl ColumnLayout {
    /// The layout with the stride that the rule gives.
    ///
    /// # Errors
    /// `rows` is zero or larger than [`SIZE_MAX`].
    pub fn new(rows: usize, matrix_count: usize, dtype: Dtype) -> Result<Self, FormatError> {
        if rows == 0 || rows > SIZE_MAX {
            return Err(FormatError::Manifest {
                field: "rows of a column".into(),
                got: rows.to_string(),
                expected: format!("1 to {SIZE_MAX}"),
            });
        }
        let stride_bytes = (rows * dtype.size_bytes())
            .checked_mul(matrix_count)
            .and_then(stride_of)
            .ok_or_else(|| FormatError::Overflow {
                name: "column record".into(),
            })?;
        Ok(Self {
            rows,
            matrix_count,
            dtype,
            stride_bytes,
        })
    }

    /// Bytes of one column.
    pub const fn column_bytes(&self) -> usize {
        self.rows * self.dtype.size_bytes()
    }

    /// Bytes of the record without its padding.
    pub const fn record_bytes(&self) -> usize {
        self.column_bytes() * self.matrix_count
    }

    /// Where the column of matrix `index` lies.
    pub const fn column_range(&self, index: usize) -> Range<usize> {
        let start = index * self.column_bytes();
        start..start + self.column_bytes()
    }

    /// Where all columns lie.
    pub const fn columns_range(&self) -> Range<usize> {
        0..self.record_bytes()
    }

    /// What a stride must be instead, when it is not one that the format allows.
    pub(crate) fn stride_fault(&self) -> Option<String> {
        stride_fault(self.stride_bytes, self.record_bytes())
    }
}

/// What `stride_bytes` must be instead, when it is not a multiple of the unit that holds a record with little padding.
pub(crate) fn stride_fault(stride_bytes: usize, record_bytes: usize) -> Option<String> {
    let strides = record_bytes..record_bytes + 4096;
    let is_good = stride_bytes.is_multiple_of(STRIDE_UNIT_BYTES) && strides.contains(&stride_bytes);
    (!is_good).then(|| {
        format!(
            "a multiple of {STRIDE_UNIT_BYTES} from {} to {}",
            strides.start,
            strides.end - 1
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_follow_the_rule_of_neuron_records() {
        let stride = |rows, matrices| {
            ColumnLayout::new(rows, matrices, Dtype::F16)
                .unwrap()
                .stride_bytes
        };
        assert_eq!(stride(11008, 2), 45056); // llama-2-7b: 44032 + 1024, 2.3 %
        assert_eq!(stride(4096, 1), 8192); // its down columns: no padding
        assert_eq!(stride(1536, 2), 6144); // smollm2-135m: 8192 would waste a quarter
        assert_eq!(stride(576, 1), 1536);
    }

    #[test]
    fn columns_are_side_by_side_and_sizes_bounded() {
        let layout = ColumnLayout::new(100, 2, Dtype::F32).unwrap();
        assert_eq!(layout.column_range(0), 0..400);
        assert_eq!(layout.column_range(1), 400..800);
        assert_eq!(layout.columns_range(), 0..800);
        assert_eq!(layout.stride_bytes, 1024);
        assert!(ColumnLayout::new(0, 1, Dtype::F32).is_err());
        assert!(ColumnLayout::new(SIZE_MAX + 1, 1, Dtype::F32).is_err());
    }
}
