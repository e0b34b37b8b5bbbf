//! What can go wrong in a conversion: one sentence each, with the file or the tensor and the
//! numbers.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;
use wick_checkpoint::CheckpointError;
use wick_format::FormatError;

/// Names in one sentence.
const NAMES_SHOWN: usize = 8;

/// A conversion that did not happen, or stopped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The system refused something.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// A source file could not be opened for reading.
    #[error(transparent)]
    Source(#[from] wick_io::IoError),
    /// The model could not be loaded or run.
    #[error(transparent)]
    Model(#[from] candle_wick_models::Error),
    /// The disk has no room, now or for what is still to be written.
    #[error("no room on the disk for {}: {needed_bytes} bytes needed{}", path.display(), free(.free_bytes))]
    DiskFull {
        /// The file or folder that does not fit.
        path: PathBuf,
        /// Size of what was to be written.
        needed_bytes: u64,
        /// What the file system has free, when it says so.
        free_bytes: Option<u64>,
    },
    /// A header, a manifest or a layout that breaks the format.
    #[error("{}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// A weight file that is shorter or longer than its header says.
    #[error(
        "{} has {got} bytes, but its header says {expected}: the file is {}",
        path.display(),
        if got < expected { "cut short, download it again" } else { "damaged" }
    )]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Its size.
        got: u64,
        /// Its size by the header.
        expected: u64,
    },
    /// A PyTorch or GGUF file that is damaged or must not be read.
    #[error("{}: {source}", path.display())]
    WeightFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<CheckpointError>,
    },
    /// Weight files that the checkpoint names but does not have.
    #[error(
        "{}: {present} of {total} weight files present, missing: {} (an unfinished download?)",
        folder.display(),
        listed(missing)
    )]
    MissingShards {
        /// The source folder.
        folder: PathBuf,
        /// How many are there.
        present: usize,
        /// How many there should be.
        total: usize,
        /// The names of the others.
        missing: Vec<String>,
    },
    /// A file or folder that is no checkpoint that can be read.
    #[error("{} {problem}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// The rest of the sentence.
        problem: String,
    },
    /// A value in `config.json` that is missing or cannot be.
    #[error("{}: `{key}` is {got}, expected {expected}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value, or `missing`.
        got: String,
        /// What would be accepted.
        expected: String,
    },
    /// A model that this version cannot convert.
    #[error("{got} is not supported; supported: {supported}")]
    Unsupported {
        /// What the checkpoint asks for.
        got: String,
        /// What there is instead.
        supported: String,
    },
    /// Tensors that the model needs and the checkpoint lacks.
    #[error(
        "{}: {} of {total} tensors missing: {} (an unfinished download, or another kind of model?)",
        folder.display(),
        names.len(),
        listed(names)
    )]
    MissingTensors {
        /// The source folder.
        folder: PathBuf,
        /// How many tensors the model has.
        total: usize,
        /// The missing ones.
        names: Vec<String>,
    },
    /// A tensor of the wrong dtype or shape, or with a value that does not fit.
    #[error("{}: tensor `{tensor}` is {got}, expected {expected}", path.display())]
    Tensor {
        /// The file with the tensor.
        path: PathBuf,
        /// Its name in that file.
        tensor: String,
        /// What it is.
        got: String,
        /// What it should be.
        expected: String,
    },
    /// An output folder that must not be written to.
    #[error("{} {problem}", path.display())]
    Output {
        /// The folder.
        path: PathBuf,
        /// The rest of the sentence.
        problem: String,
    },
}

/// The first names of a list that may be long.
pub(crate) fn listed(names: &[String]) -> String {
    let shown = names.len().min(NAMES_SHOWN);
    let more = match names.len() - shown {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    names[..shown].join(", ") + &more
}

fn free(free_bytes: &Option<u64>) -> String {
    free_bytes.map_or_else(String::new, |bytes| format!(", {bytes} free"))
}

impl ConvertError {
    /// For `map_err`: the system's refusal with path and action.
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io {
            path,
            action,
            source,
        }
    }

    /// For `map_err`: a format error with its path.
    pub(crate) fn format(path: &Path) -> impl FnOnce(FormatError) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Format { path, source }
    }

    /// For `map_err`: what is wrong with a PyTorch or GGUF file.
    pub(crate) fn weight_file(path: &Path) -> impl FnOnce(CheckpointError) -> Self {
        let path = path.to_path_buf();
        move |source| Self::WeightFile {
            path,
            source: source.into(),
        }
    }

    pub(crate) fn checkpoint(path: &Path, problem: impl Into<String>) -> Self {
        Self::Checkpoint {
            path: path.to_path_buf(),
            problem: problem.into(),
        }
    }

    pub(crate) fn output(path: &Path, problem: impl Into<String>) -> Self {
        Self::Output {
            path: path.to_path_buf(),
            problem: problem.into(),
        }
    }
}
