//! The layout of a safetensors file of our own, planned before anything is written.
//!
//! Tensors lie in the order asked for. A tensor of two or more dimensions starts at a multiple of
//! [`ALIGNMENT_BYTES`], and so does whatever follows it: the gap is filled by a U8 tensor
//! `<name>.pad`, named after the tensor before it, because the format allows no holes. The header
//! is padded with spaces so that the data starts at such a multiple too.

use std::collections::BTreeMap;

use crate::header::{data_len_bytes, HEADER_LEN_MAX};
use crate::index::ALIGNMENT_BYTES;
use crate::{FormatError, StoredDtype, TensorExtent};

/// A tensor that a file shall hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name, unique in the file.
    pub name: String,
    /// Element type.
    pub dtype: StoredDtype,
    /// Dimensions.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor to be laid out.
    pub fn new(name: impl Into<String>, dtype: StoredDtype, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        }
    }
}

/// Header bytes and extents of a file to be written.
#[derive(Clone, Debug)]
pub struct FileLayout {
    header: Vec<u8>,
    entries: Vec<(String, TensorExtent)>,
    index_of: BTreeMap<String, usize>,
    total_bytes: u64,
}

impl FileLayout {
    /// Lays the tensors out in this order.
    ///
    /// # Errors
    /// A name occurs twice (or collides with padding or `__metadata__`), or a size overflows.
    pub fn new(
        tensors: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, FormatError> {
        Self::of(place(tensors, true)?, metadata)
    }

    /// As [`Self::new`], without padding between tensors, for files that others read.
    ///
    /// # Errors
    /// As of [`Self::new`].
    pub fn packed(
        tensors: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, FormatError> {
        Self::of(place(tensors, false)?, metadata)
    }

    fn of(
        mut entries: Vec<(String, TensorExtent)>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, FormatError> {
        let header = header_bytes(&entries, metadata)?;
        let data_start = header.len() as u64;
        let mut total_bytes = data_start;
        for (name, extent) in &mut entries {
            extent.offset_bytes += data_start;
            total_bytes = extent
                .offset_bytes
                .checked_add(extent.len_bytes)
                .ok_or_else(|| FormatError::Overflow { name: name.clone() })?;
        }
        let mut index_of = BTreeMap::new();
        for (index, (name, _)) in entries.iter().enumerate() {
            if name == "__metadata__" || index_of.insert(name.clone(), index).is_some() {
                return Err(FormatError::Tensor {
                    tensor: name.clone(),
                    got: "a name that is taken".into(),
                    expected: "a name of its own".into(),
                });
            }
        }
        Ok(Self {
            header,
            entries,
            index_of,
            total_bytes,
        })
    }

    /// The bytes before the data: length field, JSON, spaces.
    pub fn header_bytes(&self) -> &[u8] {
        &self.header
    }

    /// Where a tensor goes.
    pub fn extent(&self, name: &str) -> Option<&TensorExtent> {
        self.index_of.get(name).map(|&index| &self.entries[index].1)
    }

    /// All tensors in file order, `.pad` tensors (to be written as zeros) included.
    pub fn entries(&self) -> &[(String, TensorExtent)] {
        &self.entries
    }

    /// Size of the file.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }
}

/// Extents relative to the data's start, with padding inserted where they are to be aligned.
fn place(
    tensors: &[TensorSpec],
    is_aligned: bool,
) -> Result<Vec<(String, TensorExtent)>, FormatError> {
    let mut entries: Vec<(String, TensorExtent)> = Vec::with_capacity(tensors.len());
    let mut end: u64 = 0;
    let mut previous: Option<&TensorSpec> = None;
    for spec in tensors {
        if let Some(before) =
            previous.filter(|p| is_aligned && (p.shape.len() >= 2 || spec.shape.len() >= 2))
        {
            end = pad(&mut entries, &before.name, end)?;
        }
        let len_bytes = data_len_bytes(&spec.name, &spec.shape, spec.dtype.size_bytes())?;
        let (dtype, shape) = (spec.dtype, spec.shape.clone());
        entries.push((
            spec.name.clone(),
            TensorExtent {
                dtype,
                shape,
                offset_bytes: end,
                len_bytes,
            },
        ));
        end = checked_end(&spec.name, end, len_bytes)?;
        previous = Some(spec);
    }
    if let Some(last) = previous.filter(|last| is_aligned && last.shape.len() >= 2) {
        pad(&mut entries, &last.name, end)?;
    }
    Ok(entries)
}

/// Fills up to the next multiple of the alignment; returns the new end.
fn pad(
    entries: &mut Vec<(String, TensorExtent)>,
    after: &str,
    end: u64,
) -> Result<u64, FormatError> {
    let name = format!("{after}.pad");
    let aligned = end
        .checked_next_multiple_of(ALIGNMENT_BYTES)
        .ok_or_else(|| FormatError::Overflow { name: name.clone() })?;
    let len_bytes = aligned - end;
    if len_bytes > 0 {
        let (dtype, shape) = (StoredDtype::U8, vec![len_bytes as usize]); // below 4096
        entries.push((
            name,
            TensorExtent {
                dtype,
                shape,
                offset_bytes: end,
                len_bytes,
            },
        ));
    }
    Ok(aligned)
}

fn checked_end(name: &str, offset: u64, len: u64) -> Result<u64, FormatError> {
    // Files are addressed by signed offsets; this also leaves room for the header.
    offset
        .checked_add(len)
        .filter(|&end| end <= i64::MAX as u64 - HEADER_LEN_MAX - ALIGNMENT_BYTES)
        .ok_or_else(|| FormatError::Overflow { name: name.into() })
}

/// Length field, JSON in file order, and spaces up to the alignment.
fn header_bytes(
    entries: &[(String, TensorExtent)],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, FormatError> {
    let mut parts = Vec::with_capacity(entries.len() + 1);
    if !metadata.is_empty() {
        parts.push(format!("\"__metadata__\":{}", serde_json::json!(metadata)));
    }
    for (name, extent) in entries {
        let end = extent.offset_bytes + extent.len_bytes; // checked_end
        parts.push(format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
            serde_json::json!(name),
            extent.dtype,
            serde_json::json!(extent.shape),
            extent.offset_bytes,
            end,
        ));
    }
    let mut json = format!("{{{}}}", parts.join(","));
    let total = (8 + json.len()).next_multiple_of(ALIGNMENT_BYTES as usize);
    json.push_str(&" ".repeat(total - 8 - json.len()));
    let len = json.len() as u64;
    if len > HEADER_LEN_MAX {
        return Err(FormatError::HeaderLength {
            got: len,
            limit: HEADER_LEN_MAX,
            file_len_bytes: total as u64,
        });
    }
    Ok([&len.to_le_bytes(), json.as_bytes()].concat())
}
