//! The source: its weight files, mapped read-only, and the extents of their tensors.
//!
//! Everything that can be wrong with a download is found here, before anything is written: missing,
//! cut or damaged files, git-lfs pointers, an index that names what is not there. Names are the
//! current ones of the family (see `Family::rename` and `gguf`).
//!
//! A source may also have no files, and make its tensors up ([`SourceFolder::random`]).
//!
//! Not here: whether these are the tensors that the model needs (`check`).

mod elements;
mod random;
mod safetensors;
mod shards;
mod small_file;
mod tensor;
mod weight_file;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use wick_checkpoint::Metadata;
use wick_format::Dtype;

use self::elements::Elements;
use self::tensor::StoredTensor;
use self::weight_file::{Kind, WeightFile};
use crate::family::TensorNeed;
use crate::ConvertError;

pub(crate) use self::random::Random;
pub(crate) use self::shards::Shards;
#[cfg(test)]
pub(crate) use self::small_file::SMALL_FILE_BYTES_MAX;
pub(crate) use self::small_file::{read_small, read_text, refuse_lfs_pointer};
pub(crate) use self::tensor::{RowOrder, SourceTensor};

/// What training frameworks put before the names of a model that they wrap.
const WRAPPERS: [&str; 3] = ["module.", "_forward_module.", "_orig_mod."];

/// The weight files and their tensors.
pub(crate) struct SourceFolder {
    /// The folder, or the GGUF file with the metadata, for messages.
    pub(crate) path: PathBuf,
    shards: Vec<WeightFile>,
    tensors: BTreeMap<String, SourceTensor>,
    /// Of the first GGUF file, else empty.
    pub(crate) metadata: Metadata,
}

impl SourceFolder {
    /// Opens and checks every weight file.
    pub(crate) fn open(found: &Shards, rename: fn(&str) -> String) -> Result<Self, ConvertError> {
        let mut source = Self {
            path: found.described_by(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: Metadata::default(),
        };
        for name in &found.names {
            source.add_shard(name, found, rename)?;
        }
        source.check_index(found, rename)?;
        Ok(source)
    }

    /// A PyTorch file by itself, its tensors under their names in it.
    pub(crate) fn torch_file(path: &Path) -> Result<Self, ConvertError> {
        Self::single(path, Kind::Torch)
    }

    /// A safetensors file by itself, likewise.
    pub(crate) fn safetensors_file(path: &Path) -> Result<Self, ConvertError> {
        Self::single(path, Kind::Safetensors)
    }

    fn single(path: &Path, kind: Kind) -> Result<Self, ConvertError> {
        let (file, tensors, metadata) = WeightFile::open(path, kind)?;
        let named = tensors.into_iter().map(|stored| {
            let name = stored.name.clone();
            (name, SourceTensor::new(stored, 0))
        });
        Ok(Self {
            path: path.to_path_buf(),
            shards: vec![file],
            tensors: named.collect(),
            metadata,
        })
    }

    /// A source without files, whose tensors are made up; messages call it `name`.
    pub(crate) fn random(
        name: &str,
        tensors: impl IntoIterator<Item = (TensorNeed, Random)>,
    ) -> Self {
        let made_up = |(need, random): (TensorNeed, Random)| {
            let elements = Elements::Random(random);
            let stored = StoredTensor::packed(need.name, elements, need.shape, 0..0);
            (stored.name.clone(), SourceTensor::new(stored, 0))
        };
        Self {
            path: PathBuf::from(name),
            shards: vec![WeightFile::none(name)],
            tensors: tensors.into_iter().map(made_up).collect(),
            metadata: Metadata::default(),
        }
    }

    fn add_shard(
        &mut self,
        name: &str,
        found: &Shards,
        rename: fn(&str) -> String,
    ) -> Result<(), ConvertError> {
        let path = found.folder.join(name);
        let (opened, tensors, metadata) = WeightFile::open(&path, found.kind)?;
        let shard = self.shards.len();
        if shard == 0 {
            self.metadata = metadata;
        }
        for stored in tensors {
            let current = current_name(&stored.name, rename);
            let listed = found.weight_map.get(&stored.name);
            if listed.is_some_and(|in_shard| in_shard != name) {
                continue; // the index says that the other copy counts
            }
            let tensor = SourceTensor::new(stored, shard);
            if let Some(other) = self.tensors.insert(current.clone(), tensor) {
                let other = &self
                    .shards
                    .get(other.shard)
                    .map_or(name, |shard| &shard.name);
                let problem = format!("holds tensor `{current}`, and so does {other}");
                return Err(ConvertError::checkpoint(&path, problem));
            }
        }
        self.shards.push(opened);
        Ok(())
    }

    /// Every tensor of the index is in the file that the index names.
    fn check_index(&self, found: &Shards, rename: fn(&str) -> String) -> Result<(), ConvertError> {
        for (name, shard) in &found.weight_map {
            let tensor = self.tensors.get(&current_name(name, rename));
            if tensor.is_none_or(|tensor| self.shards[tensor.shard].name != *shard) {
                let problem = format!("names tensor `{name}` in {shard}, which does not hold it");
                return Err(ConvertError::checkpoint(&found.index_path, problem));
            }
        }
        Ok(())
    }

    /// Paths of the weight files, in the order of their names.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        let files = self.shards.iter().filter(|shard| shard.is_file());
        files.map(|shard| shard.path.as_path())
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
            let mut part = tensor.clone();
            part.shape[0] = *rows;
            part.push_order(*order);
            if let Some(other) = self.tensors.insert(name.clone(), part) {
                let problem = format!("beside a tensor `{}`", other.stored_name);
                return Err(self.wrong(&tensor, problem, "one of the two"));
            }
        }
        self.tensors.remove(whole);
        Ok(())
    }

    /// Takes a tensor out whose content the config has.
    pub(crate) fn forget(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Gives tensor `old`, if it is there, another name and another order of its rows.
    ///
    /// # Errors
    /// There is a tensor of that name.
    pub(crate) fn rename(
        &mut self,
        old: &str,
        name: String,
        order: RowOrder,
    ) -> Result<(), ConvertError> {
        let Some(mut tensor) = self.tensors.remove(old) else {
            return Ok(());
        };
        tensor.push_order(order);
        match self.tensors.get(&name) {
            Some(other) => {
                let problem = format!("beside a tensor `{}`", other.stored_name);
                Err(self.wrong(&tensor, problem, "one of the two"))
            }
            None => {
                self.tensors.insert(name, tensor);
                Ok(())
            }
        }
    }

    /// The dtype that the tensor is written in unless another is wanted, if it is one for weights.
    pub(crate) fn dtype(&self, tensor: &SourceTensor) -> Result<Dtype, ConvertError> {
        match tensor.stored.elements.dtype() {
            Ok(dtype) => Ok(dtype),
            Err(what) => Err(self.wrong(tensor, what, self.expected_elements())),
        }
    }

    fn expected_elements(&self) -> &'static str {
        if self.metadata.0.is_empty() {
            "F32, F16 or BF16"
        } else {
            "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or Q2_K to Q6_K"
        }
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

/// The name without what a training framework put before it, as the family calls it now.
fn current_name(stored: &str, rename: fn(&str) -> String) -> String {
    let mut name = stored;
    while let Some(rest) = WRAPPERS
        .iter()
        .find_map(|wrapper| name.strip_prefix(wrapper))
    {
        name = rest;
    }
    rename(name)
}

/// The last part of a path.
pub(crate) fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
