//! A weight file: mapped, its tensors listed.
//!
//! PyTorch and GGUF files are parsed by `wick-checkpoint`, which executes nothing and believes no number that the
//! file's length does not back. candle has readers for both, but they set memory aside by what a header says.

use std::fs;
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
    pub(super) file: SourceFile,
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
            file,
        };
        Ok((opened, tensors, metadata))
    }
}
