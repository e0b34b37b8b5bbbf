//! A safetensors file of the source: its tensors, proven to be as long as its header says.

use std::path::Path;

use wick_format::{header_len_bytes, RawHeader};
use wick_io::SourceFile;

use super::elements::Elements;
use super::tensor::StoredTensor;
use crate::ConvertError;

/// Names and places of the tensors of `file`, `len` bytes on the disk.
pub(super) fn read(
    path: &Path,
    file: &SourceFile,
    len: u64,
) -> Result<Vec<StoredTensor>, ConvertError> {
    if len < 8 {
        let problem = format!("has {len} bytes, too few for weights: download it again");
        return Err(ConvertError::checkpoint(path, problem));
    }
    let bytes = file.bytes();
    let too_short = || ConvertError::FileLength {
        path: path.to_path_buf(),
        got: bytes.len() as u64,
        expected: len,
    };
    let (first8, rest) = bytes.split_first_chunk::<8>().ok_or_else(too_short)?;
    let header_len = header_len_bytes(*first8, len).map_err(ConvertError::format(path))?;
    let json = rest.get(..header_len).ok_or_else(too_short)?;
    let header = RawHeader::parse(json).map_err(ConvertError::format(path))?;
    if header.data_end_bytes != bytes.len() as u64 {
        return Err(ConvertError::FileLength {
            path: path.to_path_buf(),
            got: bytes.len() as u64,
            expected: header.data_end_bytes,
        });
    }
    let tensors = header.tensors.into_iter().map(|(name, raw)| {
        // The file is mapped and as long as its header says, so offsets fit usize.
        let range = raw.offset_bytes as usize..(raw.offset_bytes + raw.len_bytes) as usize;
        let elements = Elements::of(&raw.dtype, range.start);
        StoredTensor::packed(name, elements, raw.shape, range)
    });
    Ok(tensors.collect())
}
