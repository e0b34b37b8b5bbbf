//! The source folder: its weight files, mapped read-only, and the extents of their tensors.
//!
//! Everything that can be wrong with a download is found here, before anything is written: missing,
//! cut or damaged files, git-lfs pointers, an index that names what is not there. Names are the
//! current ones of the family (see `Family::rename`).
//!
//! Not here: whether these are the tensors that the model needs (`check`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use wick_format::{header_len_bytes, Dtype, RawHeader, RawTensor};
use wick_io::SourceFile;

use crate::shards::{find_shards, Shards};
use crate::ConvertError;

/// A weight file.
struct Shard {
    name: String,
    path: PathBuf,
    file: SourceFile,
}

/// One tensor of the source.
pub(crate) struct SourceTensor {
    shard: usize,
    /// Its name in the file.
    stored_name: String,
    dtype: String,
    pub(crate) shape: Vec<usize>,
    range: Range<usize>,
}

/// The weight files and their tensors.
pub(crate) struct SourceFolder {
    pub(crate) folder: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, SourceTensor>,
}

impl SourceFolder {
    /// Opens and checks every weight file.
    pub(crate) fn open(folder: &Path, rename: fn(&str) -> String) -> Result<Self, ConvertError> {
        let found = find_shards(folder)?;
        let mut source = Self {
            folder: folder.to_path_buf(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
        };
        for name in &found.names {
            source.add_shard(name, &found, rename)?;
        }
        source.check_index(&found, rename)?;
        Ok(source)
    }

    fn add_shard(
        &mut self,
        name: &str,
        found: &Shards,
        rename: fn(&str) -> String,
    ) -> Result<(), ConvertError> {
        let path = self.folder.join(name);
        let (file, header) = open_shard(&path)?;
        let shard = self.shards.len();
        for (
            stored_name,
            RawTensor {
                dtype,
                shape,
                offset_bytes,
                len_bytes,
            },
        ) in header.tensors
        {
            // The file is mapped and as long as its header says, so offsets fit usize.
            let range = offset_bytes as usize..(offset_bytes + len_bytes) as usize;
            let current = rename(&stored_name);
            let listed = found.weight_map.get(&stored_name);
            if listed.is_some_and(|in_shard| in_shard != name) {
                continue; // the index says that the other copy counts
            }
            let tensor = SourceTensor {
                shard,
                stored_name,
                dtype,
                shape,
                range,
            };
            if let Some(other) = self.tensors.insert(current.clone(), tensor) {
                let other = &self
                    .shards
                    .get(other.shard)
                    .map_or(name, |shard| &shard.name);
                let problem = format!("holds tensor `{current}`, and so does {other}");
                return Err(ConvertError::checkpoint(&path, problem));
            }
        }
        self.shards.push(Shard {
            name: name.to_string(),
            path,
            file,
        });
        Ok(())
    }

    /// Every tensor of the index is in the file that the index names.
    fn check_index(&self, found: &Shards, rename: fn(&str) -> String) -> Result<(), ConvertError> {
        for (name, shard) in &found.weight_map {
            let tensor = self.tensors.get(&rename(name));
            if tensor.is_none_or(|tensor| self.shards[tensor.shard].name != *shard) {
                let problem = format!("names tensor `{name}` in {shard}, which does not hold it");
                return Err(ConvertError::checkpoint(&found.index_path, problem));
            }
        }
        Ok(())
    }

    /// Paths of the weight files, in the order of their names.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&SourceTensor> {
        self.tensors.get(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(crate) fn bytes(&self, tensor: &SourceTensor) -> &[u8] {
        &self.shards[tensor.shard].file.bytes()[tensor.range.clone()]
    }

    /// Lets go of the memory behind part of a tensor (relative to its start); it can be read again.
    pub(crate) fn release(&self, tensor: &SourceTensor, part: Range<usize>) {
        let start = tensor.range.start;
        self.shards[tensor.shard]
            .file
            .release(start + part.start..start + part.end);
    }

    /// The tensor's dtype, if it is one for weights.
    pub(crate) fn dtype(&self, tensor: &SourceTensor) -> Result<Dtype, ConvertError> {
        Dtype::try_from(tensor.dtype.as_str())
            .map_err(|_| self.wrong(tensor, &tensor.dtype, "F32, F16 or BF16"))
    }

    /// The error for a tensor that cannot be.
    pub(crate) fn wrong(
        &self,
        tensor: &SourceTensor,
        got: impl Into<String>,
        expected: impl Into<String>,
    ) -> ConvertError {
        ConvertError::Tensor {
            path: self.shards[tensor.shard].path.clone(),
            tensor: tensor.stored_name.clone(),
            got: got.into(),
            expected: expected.into(),
        }
    }
}

/// Maps a weight file and proves that it is as long as its header says.
fn open_shard(path: &Path) -> Result<(SourceFile, RawHeader), ConvertError> {
    refuse_lfs_pointer(path)?;
    let len = fs::metadata(path)
        .map_err(ConvertError::io(path, "read"))?
        .len();
    if len < 8 {
        let problem = format!("has {len} bytes, too few for weights: download it again");
        return Err(ConvertError::checkpoint(path, problem));
    }
    let file = SourceFile::open(path)?;
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
    file.release(0..8 + header_len);
    Ok((file, header))
}

/// Refuses the text that git leaves where a large file was not fetched.
pub(crate) fn refuse_lfs_pointer(path: &Path) -> Result<(), ConvertError> {
    let mut start = Vec::new();
    File::open(path)
        .and_then(|file| file.take(64).read_to_end(&mut start))
        .map_err(ConvertError::io(path, "read"))?;
    if start.starts_with(b"version https://git-lfs") {
        let problem =
            "is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder, \
                       or download the file";
        return Err(ConvertError::checkpoint(path, problem));
    }
    Ok(())
}

/// A text file of the source.
pub(crate) fn read_text(path: &Path) -> Result<String, ConvertError> {
    refuse_lfs_pointer(path)?;
    fs::read_to_string(path).map_err(ConvertError::io(path, "read"))
}
