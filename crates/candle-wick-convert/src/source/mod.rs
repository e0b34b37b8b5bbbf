//! The source folder: its weight files, mapped read-only, and the extents of their tensors.
//!
//! Everything that can be wrong with a download is found here, before anything is written: missing,
//! cut or damaged files, git-lfs pointers, an index that names what is not there. Names are the
//! current ones of the family (see `Family::rename`).
//!
//! Not here: whether these are the tensors that the model needs (`check`).

mod safetensors;
mod shards;
mod tensor;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use wick_format::Dtype;
use wick_io::SourceFile;

use self::shards::{find_shards, Shards};
use self::tensor::StoredTensor;
use crate::ConvertError;

pub(crate) use self::tensor::{RowOrder, SourceTensor};

/// A weight file.
struct Shard {
    name: String,
    path: PathBuf,
    file: SourceFile,
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
        let (file, tensors) = open_shard(&path)?;
        let shard = self.shards.len();
        for tensor in tensors {
            let StoredTensor {
                name: stored_name,
                stored,
                shape,
            } = tensor;
            let current = rename(&stored_name);
            let listed = found.weight_map.get(&stored_name);
            if listed.is_some_and(|in_shard| in_shard != name) {
                continue; // the index says that the other copy counts
            }
            let tensor = SourceTensor {
                shard,
                stored_name,
                stored,
                shape,
                order: RowOrder::Same,
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

    /// Gives parts of tensor `whole` names of their own, if it is there: a name, the rows' number, their order.
    ///
    /// # Errors
    /// It has not as many rows as the parts together.
    pub(crate) fn split(
        &mut self,
        whole: &str,
        parts: &[(String, usize, RowOrder)],
    ) -> Result<(), ConvertError> {
        let Some(tensor) = self.tensors.get(whole).cloned() else {
            return Ok(());
        };
        let rows: usize = parts.iter().map(|(_, rows, _)| rows).sum();
        if tensor.shape.first() != Some(&rows) {
            let got = format!("of shape {:?}", tensor.shape);
            return Err(self.wrong(&tensor, got, format!("{rows} rows by config.json")));
        }
        for (name, rows, order) in parts {
            let mut part = SourceTensor {
                order: *order,
                ..tensor.clone()
            };
            part.shape[0] = *rows;
            if let Some(other) = self.tensors.insert(name.clone(), part) {
                let problem = format!("beside a tensor `{}`", other.stored_name);
                return Err(self.wrong(&tensor, problem, "one of the two"));
            }
        }
        self.tensors.remove(whole);
        Ok(())
    }

    /// The tensor's dtype, if it is one for weights.
    pub(crate) fn dtype(&self, tensor: &SourceTensor) -> Result<Dtype, ConvertError> {
        let stored = tensor.stored.dtype.as_str();
        Dtype::try_from(stored).map_err(|_| self.wrong(tensor, stored, "F32, F16 or BF16"))
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

/// Maps a weight file and lists its tensors.
fn open_shard(path: &Path) -> Result<(SourceFile, Vec<StoredTensor>), ConvertError> {
    refuse_lfs_pointer(path)?;
    let len = fs::metadata(path)
        .map_err(ConvertError::io(path, "read"))?
        .len();
    let file = SourceFile::open(path)?;
    let tensors = safetensors::read(path, &file, len)?;
    Ok((file, tensors))
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
