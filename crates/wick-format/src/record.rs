//! The neuron record: what one neuron of an FFN needs, side by side.
//!
//! ```text
//! [hidden]dtype | gate row          only in gated FFNs
//! [hidden]dtype | up row
//! [hidden]dtype | down column
//! [..]zeros     | padding to the stride
//! ```
//!
//! The stride is the record rounded up to 4096 bytes when that adds less than 5 % of the record,
//! else rounded up to 512 bytes: both can be read directly, the larger one on every device.

use std::ops::Range;

use crate::{Dtype, FormatError};

/// The smallest unit of direct reads: every stride is a multiple of it.
pub const STRIDE_UNIT_BYTES: usize = 512;

/// Largest `hidden_size` or `intermediate_size` that a manifest may name.
pub const SIZE_MAX: usize = 1 << 24;

/// Where the parts of one record lie, relative to the record's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordLayout {
    /// Elements of each of the rows.
    pub hidden_size: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Whether a gate row comes first.
    pub gated: bool,
    /// Distance between two records.
    pub stride_bytes: usize,
}

impl RecordLayout {
    /// The layout with the stride that the rule gives.
    ///
    /// # Errors
    /// `hidden_size` is zero or larger than [`SIZE_MAX`].
    pub fn new(hidden_size: usize, dtype: Dtype, gated: bool) -> Result<Self, FormatError> {
        if hidden_size == 0 || hidden_size > SIZE_MAX {
            return Err(FormatError::Manifest {
                field: "hidden_size".into(),
                got: hidden_size.to_string(),
                expected: format!("1 to {SIZE_MAX}"),
            });
        }
        let overflow = || FormatError::Overflow {
            name: "record".into(),
        };
        let row_count = if gated { 3 } else { 2 };
        let record_bytes = hidden_size
            .checked_mul(dtype.size_bytes())
            .and_then(|row| row.checked_mul(row_count))
            .ok_or_else(overflow)?;
        let stride_bytes = stride_of(record_bytes).ok_or_else(overflow)?;
        Ok(Self {
            hidden_size,
            dtype,
            gated,
            stride_bytes,
        })
    }

    /// Bytes of one row: `hidden_size` elements.
    pub const fn row_bytes(&self) -> usize {
        self.hidden_size * self.dtype.size_bytes()
    }

    /// Bytes of the record without its padding.
    pub const fn record_bytes(&self) -> usize {
        self.row_bytes() * if self.gated { 3 } else { 2 }
    }

    /// Where the gate row lies, in gated FFNs.
    pub fn gate_range(&self) -> Option<Range<usize>> {
        self.gated.then(|| 0..self.row_bytes())
    }

    /// Where the up row lies.
    pub fn up_range(&self) -> Range<usize> {
        let start = if self.gated { self.row_bytes() } else { 0 };
        start..start + self.row_bytes()
    }

    /// Where the down column lies.
    pub fn down_range(&self) -> Range<usize> {
        let start = self.record_bytes() - self.row_bytes();
        start..self.record_bytes()
    }
}

/// The stride rule: see the module's doc. `None` when it does not fit.
pub(crate) fn stride_of(record_bytes: usize) -> Option<usize> {
    let page = record_bytes.checked_next_multiple_of(4096)?;
    if (page - record_bytes).checked_mul(20)? < record_bytes {
        return Some(page);
    }
    record_bytes.checked_next_multiple_of(STRIDE_UNIT_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stride(hidden_size: usize, dtype: Dtype, gated: bool) -> usize {
        RecordLayout::new(hidden_size, dtype, gated)
            .unwrap()
            .stride_bytes
    }

    #[test]
    fn strides_of_known_models() {
        assert_eq!(stride(4096, Dtype::F16, true), 24576); // llama-2-7b: no padding
        assert_eq!(stride(768, Dtype::F16, false), 3072); // opt-125m: 4096 would waste a third
        assert_eq!(stride(4544, Dtype::Bf16, false), 18432); // falcon-7b: 18176, 1.4 %
        assert_eq!(stride(2560, Dtype::F16, false), 10240); // phi-2: 12288 would waste a fifth
        assert_eq!(stride(64, Dtype::F32, true), 1024);
        assert_eq!(stride(6800, Dtype::F16, true), 40960); // 40800 + 160
    }

    #[test]
    fn parts_are_side_by_side() {
        let gated = RecordLayout::new(64, Dtype::F16, true).unwrap();
        assert_eq!(gated.gate_range(), Some(0..128));
        assert_eq!(gated.up_range(), 128..256);
        assert_eq!(gated.down_range(), 256..384);
        assert_eq!((gated.record_bytes(), gated.stride_bytes), (384, 512));
        let plain = RecordLayout::new(64, Dtype::F32, false).unwrap();
        assert_eq!(plain.gate_range(), None);
        assert_eq!(plain.up_range(), 0..256);
        assert_eq!(plain.down_range(), 256..512);
    }

    #[test]
    fn sizes_are_bounded() {
        assert!(RecordLayout::new(0, Dtype::F32, true).is_err());
        assert!(RecordLayout::new(SIZE_MAX, Dtype::F32, true).is_ok());
        assert!(RecordLayout::new(usize::MAX, Dtype::F32, true).is_err());
    }
}
