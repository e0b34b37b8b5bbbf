//! The file of predictors that belongs to an opened folder: its own, or one from elsewhere in its place.
//!
//! The folder's own only matters when somebody wants to use it: everything else works without, and new predictors can
//! be made. One that was asked for by name has to be usable.
//!
//! Not here: what the metadata says (`predictors`), the tensors (`predictor`).

use std::path::{Path, PathBuf};

use wick_format::Manifest;
use wick_io::DirectIo;

use crate::error::{Error, Result};
use crate::folder::{is_auxiliary, TensorFile, PREDICTORS_FILE};
use crate::predictors::PredictorMetadata;

/// What was found.
pub(crate) enum PredictorFile {
    Usable(Box<(TensorFile, PredictorMetadata)>),
    Unusable { path: PathBuf, reason: String },
}

impl PredictorFile {
    /// The predictors in the folder of `manifest`, if it has some.
    pub(crate) fn own(folder: &Path, direct: DirectIo, manifest: &Manifest) -> Option<Self> {
        let path = folder.join(PREDICTORS_FILE);
        path.exists().then(|| Self::open(path, direct, manifest))
    }

    /// The predictors in a file that was asked for.
    pub(crate) fn given(path: &Path, direct: DirectIo, manifest: &Manifest) -> Result<Self> {
        if let Err(source) = std::fs::metadata(path) {
            let path = path.to_owned();
            return Err(Error::Open { path, source });
        }
        let file = Self::open(path.to_owned(), direct, manifest);
        file.usable()?;
        Ok(file)
    }

    fn open(path: PathBuf, direct: DirectIo, manifest: &Manifest) -> Self {
        let opened = match TensorFile::open(path.clone(), direct) {
            Ok(file) => PredictorMetadata::parse(&file.index.metadata, manifest)
                .map(|metadata| Self::Usable(Box::new((file, metadata)))),
            Err(Error::Format { source, .. }) => Err(source.to_string()),
            Err(error) => Err(error.to_string()),
        };
        opened.unwrap_or_else(|reason| Self::Unusable { path, reason })
    }

    /// The file and its metadata, or why not.
    pub(crate) fn usable(&self) -> Result<(&TensorFile, &PredictorMetadata)> {
        match self {
            Self::Usable(usable) => Ok((&usable.0, &usable.1)),
            Self::Unusable { path, reason } => {
                let (path, reason) = (path.clone(), reason.clone());
                Err(Error::Folder { path, reason })
            }
        }
    }

    /// Bytes of the tensors in DRAM: vectors are kept as f32.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let Ok((file, _)) = self.usable() else {
            return 0;
        };
        let tensors = file.index.tensors.iter();
        let bytes = tensors
            .filter(|(name, _)| !is_auxiliary(name))
            .map(|(_, extent)| match extent.shape.len() {
                0 | 1 => 4 * extent.shape.iter().product::<usize>() as u64,
                _ => extent.len_bytes,
            });
        bytes.sum()
    }
}
