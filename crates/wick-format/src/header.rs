//! The header of any safetensors file: names, dtypes as text, shapes, and extents proved sound.
//!
//! ```text
//! [8]u8   | length N of the header, little-endian
//! [N]u8   | JSON object, starts with `{`, may end in spaces
//! [..]u8  | data: the tensors, side by side
//! ```
//!
//! Used for source checkpoints, which may hold dtypes that we do not read and whose data may be cut
//! short; [`TensorIndex`](crate::TensorIndex) adds the rules for files of our own.
//!
//! Invariants of a parsed header:
//! - no name occurs twice; data extents are contiguous from zero, without hole or overlap;
//! - every extent whose dtype is known has the length that shape and dtype say.
//!
//! Not here: whether the file is as long as the header says (`data_end_bytes`), because only the
//! caller knows what to tell its user then.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use crate::FormatError;

/// Longest header that is read, as in the safetensors crate.
pub const HEADER_LEN_MAX: u64 = 100_000_000;

/// One tensor of a [`RawHeader`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawTensor {
    /// Dtype as written, such as `F16` or `I64`.
    pub dtype: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// First byte, absolute in the file.
    pub offset_bytes: u64,
    /// Length of the data.
    pub len_bytes: u64,
}

/// A parsed header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawHeader {
    /// The tensors by name.
    pub tensors: BTreeMap<String, RawTensor>,
    /// The `__metadata__` entry.
    pub metadata: BTreeMap<String, String>,
    /// Where the data starts: 8 + length of the header.
    pub data_start_bytes: u64,
    /// Where the data ends, which is the size that the file should have.
    pub data_end_bytes: u64,
}

#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// A JSON object in which no key occurs twice.
struct UniqueMap<V>(BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

struct UniqueMapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("duplicate key `{key}`")));
            }
            let value = access.next_value()?;
            map.insert(key, value);
        }
        Ok(UniqueMap(map))
    }
}

/// The whole header object: one metadata entry, the others are tensors.
struct Object {
    metadata: BTreeMap<String, String>,
    entries: BTreeMap<String, Entry>,
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut metadata = None;
        let mut entries = BTreeMap::new();
        while let Some(key) = access.next_key::<String>()? {
            let is_metadata = key == "__metadata__";
            if (is_metadata && metadata.is_some()) || entries.contains_key(&key) {
                return Err(A::Error::custom(format!("duplicate key `{key}`")));
            }
            if is_metadata {
                metadata = Some(access.next_value::<UniqueMap<String>>()?.0);
            } else {
                let entry = access
                    .next_value::<Entry>()
                    .map_err(|error| A::Error::custom(format!("tensor `{key}`: {error}")))?;
                entries.insert(key, entry);
            }
        }
        Ok(Object {
            metadata: metadata.unwrap_or_default(),
            entries,
        })
    }
}

/// Length of the header, from the first eight bytes of a file.
///
/// # Errors
/// The length is larger than [`HEADER_LEN_MAX`] or does not fit the file.
pub fn header_len_bytes(first8: [u8; 8], file_len: u64) -> Result<usize, FormatError> {
    let got = u64::from_le_bytes(first8);
    let limit = file_len.saturating_sub(8).min(HEADER_LEN_MAX);
    match usize::try_from(got) {
        Ok(len) if got <= limit => Ok(len),
        _ => Err(FormatError::HeaderLength {
            got,
            limit,
            file_len_bytes: file_len,
        }),
    }
}

/// `shape` times the size of an element, or the overflow by name.
pub(crate) fn data_len_bytes(
    tensor: &str,
    shape: &[usize],
    element_bytes: usize,
) -> Result<u64, FormatError> {
    shape
        .iter()
        .try_fold(element_bytes as u64, |bytes, &dim| {
            bytes.checked_mul(dim as u64)
        })
        .ok_or_else(|| FormatError::Overflow {
            name: tensor.into(),
        })
}

/// Bytes of an element of the dtypes whose elements are whole bytes, by safetensors name.
fn element_bytes(dtype: &str) -> Option<usize> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => Some(1),
        "I16" | "U16" | "F16" | "BF16" => Some(2),
        "I32" | "U32" | "F32" => Some(4),
        "I64" | "U64" | "F64" | "C64" => Some(8),
        _ => None,
    }
}

impl RawHeader {
    /// Parses the JSON after the length field.
    ///
    /// # Errors
    /// The text is no header, a key occurs twice, or the extents have a hole, an overlap or a
    /// length that contradicts shape and dtype.
    pub fn parse(header_json: &[u8]) -> Result<Self, FormatError> {
        if header_json.first() != Some(&b'{') {
            return Err(FormatError::HeaderStart);
        }
        let object: Object =
            serde_json::from_slice(header_json).map_err(|source| FormatError::Json {
                what: "header",
                source,
            })?;
        let data_start_bytes = 8 + header_json.len() as u64;
        let data_end_bytes = check_extents(&object.entries)?
            .checked_add(data_start_bytes)
            .ok_or_else(|| FormatError::Overflow {
                name: "data".into(),
            })?;
        let tensors = object
            .entries
            .into_iter()
            .map(|(name, entry)| {
                let (start, end) = entry.data_offsets;
                let tensor = RawTensor {
                    dtype: entry.dtype,
                    shape: entry.shape,
                    offset_bytes: data_start_bytes + start, // at most data_end_bytes
                    len_bytes: end - start,                 // check_extents: start <= end
                };
                (name, tensor)
            })
            .collect();
        Ok(Self {
            tensors,
            metadata: object.metadata,
            data_start_bytes,
            data_end_bytes,
        })
    }
}

/// Proves that the extents are contiguous from zero and as long as they should be; returns their
/// end.
fn check_extents(entries: &BTreeMap<String, Entry>) -> Result<u64, FormatError> {
    let mut in_order: Vec<(&String, &Entry)> = entries.iter().collect();
    in_order.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut expected = 0;
    for (name, entry) in in_order {
        let (start, end) = entry.data_offsets;
        if start != expected {
            return Err(FormatError::TensorOffset {
                tensor: name.clone(),
                got: start,
                expected,
            });
        }
        if end < start {
            let tensor = name.clone();
            return Err(FormatError::TensorOffset {
                tensor,
                got: end,
                expected: start,
            });
        }
        if let Some(size) = element_bytes(&entry.dtype) {
            let needed = data_len_bytes(name, &entry.shape, size)?;
            if end - start != needed {
                let (tensor, got) = (name.clone(), end - start);
                return Err(FormatError::TensorLength {
                    tensor,
                    got,
                    expected: needed,
                });
            }
        }
        expected = end;
    }
    Ok(expected)
}
