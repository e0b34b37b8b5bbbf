//! GGUF files, versions 2 and 3, little-endian.
//!
//! ```text
//! "GGUF" u32 u64 u64          | magic, version, tensor count, metadata count
//! [..](string, u32, value)    | metadata: key, type, value; strings are u64 length and bytes
//! [..](string, u32, [..]u64, u32, u64)
//!                             | tensors: name, rank, dims innermost first, type, offset in the data
//! [..]zeros                   | up to a multiple of `general.alignment`, 32 if absent
//! [..]u8                      | data
//! ```
//!
//! Counts are compared with the bytes that follow before anything is set aside for them.
//!
//! Not here: files of several parts (`split.count`), what the keys mean, and the blocks of
//! quantised types.

mod metadata;
mod types;

use std::collections::{BTreeMap, BTreeSet};

pub use metadata::{FromMetadata, Metadata, MetadataValue};
use types::GgmlType;

use crate::bytes::Bytes;
use crate::error::describe_start;
use crate::tensor::row_major;
use crate::{CheckpointError, StoredTensor};

/// Bytes that values and names take at least: length of a string, or an empty value's type.
const STRING_BYTES_MIN: u64 = 8;
const METADATA_BYTES_MIN: u64 = STRING_BYTES_MIN + 4 + 1;
const TENSOR_BYTES_MIN: u64 = STRING_BYTES_MIN + 4 + 4 + 8;

/// The most values in all arrays together, each of which takes some 32 bytes of memory. The
/// largest vocabularies have half a million texts, and as many merges, scores and types.
const VALUES_MAX: u64 = 1 << 24;

/// Arrays in arrays.
const DEPTH_MAX: usize = 4;

/// As in ggml.
const RANK_MAX: u32 = 4;

/// A sanity limit; files have 32 or a page.
const ALIGNMENT_MAX: u64 = 1 << 20;

/// A parsed GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufFile {
    /// The metadata.
    pub metadata: Metadata,
    /// The tensors in the file's order. Shapes are outermost first, as in Hugging Face
    /// checkpoints, and dtypes are ggml's names.
    pub tensors: Vec<StoredTensor>,
}

/// Parses the head of a GGUF file; `file` is all of it.
///
/// # Errors
/// The file is none, is of another version or byte order, was cut short, or contradicts itself.
pub fn read_gguf(file: &[u8]) -> Result<GgufFile, CheckpointError> {
    if !file.starts_with(b"GGUF") {
        return Err(CheckpointError::Kind {
            found: describe_start(file),
            expected: "a GGUF file",
        });
    }
    let mut reader = Reader {
        bytes: Bytes::starting_at(file, 4),
        values_left: VALUES_MAX,
    };
    reader.version()?;
    let tensor_count = reader.bytes.count("tensor count", TENSOR_BYTES_MIN)?;
    let metadata_count = reader.bytes.count("metadata count", METADATA_BYTES_MIN)?;
    let metadata = reader.metadata(metadata_count)?;
    let alignment = alignment(&metadata)?;
    let mut infos = Vec::with_capacity(tensor_count);
    let mut names = BTreeSet::new();
    for _ in 0..tensor_count {
        let info = reader.tensor_info()?;
        if !names.insert(info.name) {
            return Err(StoredTensor::error(info.name, "occurs twice"));
        }
        infos.push(info);
    }
    // The head ends in the file, so that this is far from 64 bits.
    let data_start = reader.bytes.position().next_multiple_of(alignment);
    let data = DataPart {
        start: data_start,
        file_len: file.len() as u64,
        alignment,
    };
    let tensors = infos.into_iter().map(|info| data.place(info));
    Ok(GgufFile {
        tensors: tensors.collect::<Result<_, _>>()?,
        metadata,
    })
}

fn alignment(metadata: &Metadata) -> Result<u64, CheckpointError> {
    let key = "general.alignment";
    let alignment = metadata.find::<u64>(key)?.unwrap_or(32);
    if alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX {
        return Ok(alignment);
    }
    Err(CheckpointError::Metadata {
        key: key.into(),
        got: alignment.to_string(),
        expected: format!("a power of two up to {ALIGNMENT_MAX}"),
    })
}

struct Reader<'a> {
    bytes: Bytes<'a>,
    /// Values that arrays may still hold.
    values_left: u64,
}

/// A tensor as the file describes it, not yet proved.
struct TensorInfo<'a> {
    name: &'a str,
    /// Outermost first.
    shape: Vec<usize>,
    type_number: u32,
    /// Relative to the data.
    offset: u64,
}

impl<'a> Reader<'a> {
    fn version(&mut self) -> Result<(), CheckpointError> {
        let version = self.bytes.u32("the version")?;
        let found = match version {
            2 | 3 => return Ok(()),
            _ if (1..=0xffff).contains(&version.swap_bytes()) => "a big-endian GGUF file".into(),
            _ => format!("a GGUF file of version {version}"),
        };
        Err(CheckpointError::Kind {
            found,
            expected: "version 2 or 3, little-endian",
        })
    }

    fn string(&mut self, what: &'static str) -> Result<&'a str, CheckpointError> {
        let len = self.bytes.u64(what)?;
        let offset_bytes = self.bytes.position();
        let text = self.bytes.take(what, len)?;
        std::str::from_utf8(text).map_err(|_| CheckpointError::Text { what, offset_bytes })
    }

    fn metadata(&mut self, count: usize) -> Result<Metadata, CheckpointError> {
        let mut values = BTreeMap::new();
        for _ in 0..count {
            let key = self.string("a metadata key")?;
            let number = self.bytes.u32("a metadata type")?;
            let value = self.value(key, number, 0)?;
            if values.insert(key.to_string(), value).is_some() {
                return Err(metadata_error(key, "there twice", "there once"));
            }
        }
        Ok(Metadata(values))
    }

    fn value(
        &mut self,
        key: &str,
        number: u32,
        depth: usize,
    ) -> Result<MetadataValue, CheckpointError> {
        let what = "a metadata value";
        let bytes = &mut self.bytes;
        Ok(match number {
            0 => MetadataValue::U8(bytes.u8(what)?),
            1 => MetadataValue::I8(i8::from_le_bytes(bytes.array(what)?)),
            2 => MetadataValue::U16(bytes.u16(what)?),
            3 => MetadataValue::I16(i16::from_le_bytes(bytes.array(what)?)),
            4 => MetadataValue::U32(bytes.u32(what)?),
            5 => MetadataValue::I32(i32::from_le_bytes(bytes.array(what)?)),
            6 => MetadataValue::F32(f32::from_le_bytes(bytes.array(what)?)),
            7 => match bytes.u8(what)? {
                0 => MetadataValue::Bool(false),
                1 => MetadataValue::Bool(true),
                other => return Err(metadata_error(key, &format!("the bool {other}"), "0 or 1")),
            },
            8 => MetadataValue::String(self.string(what)?.into()),
            9 => MetadataValue::Array(self.values(key, depth + 1)?),
            10 => MetadataValue::U64(bytes.u64(what)?),
            11 => MetadataValue::I64(i64::from_le_bytes(bytes.array(what)?)),
            12 => MetadataValue::F64(f64::from_le_bytes(bytes.array(what)?)),
            other => {
                let got = format!("of type {other}");
                return Err(metadata_error(key, &got, "a type up to 12"));
            }
        })
    }

    /// The values of an array.
    fn values(&mut self, key: &str, depth: usize) -> Result<Vec<MetadataValue>, CheckpointError> {
        if depth > DEPTH_MAX {
            let expected = format!("at most {DEPTH_MAX} deep");
            return Err(metadata_error(key, "arrays in arrays", &expected));
        }
        let number = self.bytes.u32("an array's type")?;
        let each_bytes = match number {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            9 => 4 + 8,
            _ => 8,
        };
        let offset_bytes = self.bytes.position();
        let count = self.bytes.count("an array's length", each_bytes)?;
        let got = count as u64;
        self.values_left = self.values_left.checked_sub(got).ok_or({
            CheckpointError::Count {
                what: "an array's length",
                offset_bytes,
                got,
                limit: self.values_left,
            }
        })?;
        (0..count).map(|_| self.value(key, number, depth)).collect()
    }

    fn tensor_info(&mut self) -> Result<TensorInfo<'a>, CheckpointError> {
        let name = self.string("a tensor's name")?;
        let rank = self.bytes.u32("a tensor's rank")?;
        if rank > RANK_MAX {
            let problem = format!("{rank} dimensions, expected at most {RANK_MAX}");
            return Err(StoredTensor::error(name, problem));
        }
        let mut shape = Vec::new();
        for _ in 0..rank {
            let dim = self.bytes.u64("a tensor's dimensions")?;
            let dim = usize::try_from(dim);
            shape.push(dim.map_err(|_| StoredTensor::error(name, "a dimension beyond memory"))?);
        }
        shape.reverse();
        Ok(TensorInfo {
            name,
            shape,
            type_number: self.bytes.u32("a tensor's type")?,
            offset: self.bytes.u64("a tensor's offset")?,
        })
    }
}

fn metadata_error(key: &str, got: &str, expected: &str) -> CheckpointError {
    CheckpointError::Metadata {
        key: key.into(),
        got: got.into(),
        expected: expected.into(),
    }
}

/// The part of the file behind the head.
struct DataPart {
    start: u64,
    file_len: u64,
    alignment: u64,
}

impl DataPart {
    fn place(&self, info: TensorInfo<'_>) -> Result<StoredTensor, CheckpointError> {
        let fail = |problem: String| StoredTensor::error(info.name, problem);
        let shape = &info.shape;
        let Some(ggml_type) = GgmlType::from_number(info.type_number) else {
            return Err(fail(format!("unknown ggml type {}", info.type_number)));
        };
        let row = shape.last().copied().unwrap_or(1);
        let (name, block) = (ggml_type.name, ggml_type.block_elements);
        if !row.is_multiple_of(block) {
            return Err(fail(format!(
                "rows of {row}, but {name} has blocks of {block}"
            )));
        }
        if !info.offset.is_multiple_of(self.alignment) {
            let (offset, alignment) = (info.offset, self.alignment);
            return Err(fail(format!(
                "offset {offset}, not a multiple of {alignment}"
            )));
        }
        let len_bytes = crate::tensor::element_count(shape)
            .and_then(|count| ggml_type.len_bytes(count))
            .ok_or_else(|| fail(format!("the size of {name} {shape:?} does not fit 64 bits")))?;
        let end = self.start.checked_add(info.offset);
        let end = end.and_then(|start| start.checked_add(len_bytes));
        if end.is_none_or(|end| end > self.file_len) {
            return Err(fail(format!(
                "cut short: {len_bytes} bytes at {} + {}, but the file has {}",
                self.start, info.offset, self.file_len
            )));
        }
        Ok(StoredTensor {
            name: info.name.into(),
            dtype: name.into(),
            strides: row_major(shape),
            offset_bytes: self.start + info.offset, // in the file
            len_bytes,
            shape: info.shape,
        })
    }
}
