//! The tensor index: which extent of one of our safetensors files holds which tensor.
//!
//! Offsets are absolute in the file, so that a reader needs nothing else.
//!
//! Invariants of a parsed index, besides those of [`RawHeader`]:
//! - every dtype is a [`StoredDtype`];
//! - the data and every tensor of two or more dimensions start at a multiple of
//!   [`ALIGNMENT_BYTES`];
//! - the last tensor ends where the file ends.
//!
//! Not here: which tensors a model needs (see [`FfnLayer`](crate::FfnLayer) for the records).

use std::collections::BTreeMap;

use crate::header::{header_len_bytes, RawHeader, RawTensor};
use crate::{ChecksumBlocks, FormatError, StoredDtype};

/// The data and every matrix in our files start at a multiple of this.
pub const ALIGNMENT_BYTES: u64 = 4096;

/// One tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorExtent {
    /// Element type.
    pub dtype: StoredDtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// First byte, absolute in the file.
    pub offset_bytes: u64,
    /// Length: the product of the shape times the element's size.
    pub len_bytes: u64,
}

/// The parsed header of one of our files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorIndex {
    /// The tensors by name.
    pub tensors: BTreeMap<String, TensorExtent>,
    /// The `__metadata__` entry.
    pub metadata: BTreeMap<String, String>,
    /// Where the data starts: 8 + length of the header.
    pub data_start_bytes: u64,
}

impl TensorIndex {
    /// Length of the header, from the first eight bytes of a file.
    ///
    /// # Errors
    /// The length is larger than 100 MB or does not fit the file.
    pub fn header_len_bytes(first8: [u8; 8], file_len: u64) -> Result<usize, FormatError> {
        header_len_bytes(first8, file_len)
    }

    /// Parses the JSON after the length field of a file of `file_len` bytes.
    ///
    /// # Errors
    /// The header breaks one of the invariants above.
    pub fn parse(header_json: &[u8], file_len: u64) -> Result<Self, FormatError> {
        let raw = RawHeader::parse(header_json)?;
        let data_start_bytes = raw.data_start_bytes;
        check_aligned("data", data_start_bytes)?;
        let tensors = raw
            .tensors
            .into_iter()
            .map(|(name, tensor)| TensorExtent::of(&name, tensor).map(|extent| (name, extent)))
            .collect::<Result<_, _>>()?;
        if raw.data_end_bytes != file_len {
            return Err(FormatError::FileLength {
                got: file_len,
                expected: raw.data_end_bytes,
            });
        }
        Ok(Self {
            tensors,
            metadata: raw.metadata,
            data_start_bytes,
        })
    }

    /// The extent of a tensor that must be there.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn get(&self, name: &str) -> Result<&TensorExtent, FormatError> {
        self.tensors
            .get(name)
            .ok_or_else(|| missing(name, "a tensor of this name"))
    }

    /// The extent of a tensor that must be there with this dtype and shape.
    ///
    /// # Errors
    /// There is no such tensor, or it has another dtype or shape.
    pub fn expect(
        &self,
        name: &str,
        dtype: StoredDtype,
        shape: &[usize],
    ) -> Result<&TensorExtent, FormatError> {
        let expected = format!("{dtype} {shape:?}");
        let extent = self
            .tensors
            .get(name)
            .ok_or_else(|| missing(name, &expected))?;
        if extent.dtype != dtype || extent.shape != shape {
            let got = format!("{} {:?}", extent.dtype, extent.shape);
            return Err(FormatError::Tensor {
                tensor: name.into(),
                got,
                expected,
            });
        }
        Ok(extent)
    }

    /// The checksums of a plain tensor: how its rows are grouped, and where the checksums are.
    ///
    /// # Errors
    /// The tensor or its checksum tensor is missing, or the latter has another dtype or shape.
    pub fn checksums_of(&self, name: &str) -> Result<(ChecksumBlocks, &TensorExtent), FormatError> {
        let extent = self.get(name)?;
        let blocks = ChecksumBlocks::of(&extent.shape, extent.dtype)?;
        let checksums = ChecksumBlocks::tensor_name(name);
        Ok((
            blocks,
            self.expect(&checksums, StoredDtype::U32, &[blocks.block_count()])?,
        ))
    }
}

fn missing(name: &str, expected: &str) -> FormatError {
    FormatError::Tensor {
        tensor: name.into(),
        got: "missing".into(),
        expected: expected.into(),
    }
}

fn check_aligned(name: &str, offset_bytes: u64) -> Result<(), FormatError> {
    if offset_bytes.is_multiple_of(ALIGNMENT_BYTES) {
        return Ok(());
    }
    Err(FormatError::Alignment {
        name: name.into(),
        got: offset_bytes,
        expected: ALIGNMENT_BYTES,
    })
}

impl TensorExtent {
    fn of(name: &str, raw: RawTensor) -> Result<Self, FormatError> {
        let Some(dtype) = StoredDtype::from_safetensors_name(&raw.dtype) else {
            return Err(FormatError::UnknownDtype {
                tensor: name.into(),
                got: raw.dtype,
                expected: StoredDtype::NAMES,
            });
        };
        if raw.shape.len() >= 2 {
            check_aligned(name, raw.offset_bytes)?;
        }
        let RawTensor {
            shape,
            offset_bytes,
            len_bytes,
            ..
        } = raw;
        Ok(Self {
            dtype,
            shape,
            offset_bytes,
            len_bytes,
        })
    }
}
