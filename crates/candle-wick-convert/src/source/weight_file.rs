//! A weight file: mapped, its tensors listed. Or what stands for one where tensors are made up.
//!
//! PyTorch and GGUF files are parsed by `wick-checkpoint`, which executes nothing and believes no number that the
//! file's length does not back. candle has readers for both, but they set memory aside by what a header says.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use wick_checkpoint::{read_gguf, read_torch, Metadata};
use wick_io::SourceFile;

use super::tensor::StoredTensor;
use super::{file_name, refuse_lfs_pointer, safetensors};
use crate::ConvertError;

/// What kind of file holds the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Safetensors,
    Torch,
    Gguf,
}

impl Kind {
    /// How the names of such files end.
    pub(super) fn ending(self) -> &'static str {
        match self {
            Self::Safetensors => ".safetensors",
            Self::Torch => ".bin",
            Self::Gguf => ".gguf",
        }
    }
}

/// A weight file.
pub(super) struct WeightFile {
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// `None` where the tensors are made up.
    file: Option<SourceFile>,
}

impl WeightFile {
    /// Maps the file at `path` and lists its tensors; of a GGUF file also its metadata, else none.
    pub(super) fn open(
        path: &Path,
        kind: Kind,
    ) -> Result<(Self, Vec<StoredTensor>, Metadata), ConvertError> {
        refuse_lfs_pointer(path)?;
        let len = fs::metadata(path)
            .map_err(ConvertError::io(path, "read"))?
            .len();
        let file = SourceFile::open(path)?;
        let damaged = ConvertError::weight_file(path);
        let from_reader = |tensors: Vec<wick_checkpoint::StoredTensor>| {
            tensors.into_iter().map(StoredTensor::from_reader).collect()
        };
        let (tensors, metadata) = match kind {
            Kind::Safetensors => (safetensors::read(path, &file, len)?, Metadata::default()),
            Kind::Torch => {
                let tensors = read_torch(file.bytes()).map_err(damaged)?;
                (from_reader(tensors), Metadata::default())
            }
            Kind::Gguf => {
                let gguf = read_gguf(file.bytes()).map_err(damaged)?;
                (from_reader(gguf.tensors), gguf.metadata)
            }
        };
        file.release(0..file.bytes().len());
        let opened = Self {
            name: file_name(path),
            path: path.to_path_buf(),
            file: Some(file),
        };
        Ok((opened, tensors, metadata))
    }

    /// Stands for a file where there is none; messages say `name`.
    pub(super) fn none(name: &str) -> Self {
        Self {
            name: name.to_string(),
            path: PathBuf::from(name),
            file: None,
        }
    }

    /// Whether there is a file.
    pub(super) fn is_file(&self) -> bool {
        self.file.is_some()
    }

    /// Its contents.
    pub(super) fn bytes(&self) -> &[u8] {
        self.file.as_ref().map_or(&[], SourceFile::bytes)
    }

    /// Lets go of the memory behind these bytes.
    pub(super) fn release(&self, range: Range<usize>) {
        if let Some(file) = &self.file {
            file.release(range);
        }
    }
}
