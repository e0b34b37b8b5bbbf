//! What can go wrong in this crate, and how it turns into a `candle::Error`.

use std::fmt;
use std::path::PathBuf;

use crate::memory::HumanBytes;
use crate::predictor_kind::PredictorInput;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Trouble with a converted folder, a device or a budget; one sentence each, also where it is printed by `main`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A read failed, or its bytes do not match their checksum.
    #[error(transparent)]
    Io(#[from] wick_io::IoError),
    /// A file of the folder does not have the form that docs/FORMAT.md gives it.
    #[error("{}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        source: wick_format::FormatError,
    },
    /// A file of the folder could not be opened.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// The folder is not a finished conversion, or a file of it changed afterwards.
    #[error("{}: {reason}", path.display())]
    Folder {
        /// The folder or file.
        path: PathBuf,
        /// What is missing or differs, with the numbers.
        reason: String,
    },
    /// No such tensor.
    #[error("tensor {name} is not in {}", path.display())]
    MissingTensor {
        /// Its full name.
        name: String,
        /// The converted folder.
        path: PathBuf,
    },
    /// A tensor has another shape than the model's config asks for.
    #[error("tensor {name} has shape {got:?}, the config asks for {expected:?}")]
    Shape {
        /// Its full name.
        name: String,
        /// The shape asked for.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// A name that is none of the known ones.
    #[error("unknown {what} \"{name}\" (known: {known})")]
    UnknownName {
        /// What kind of name.
        what: &'static str,
        /// The name given.
        name: String,
        /// The accepted ones.
        known: &'static str,
    },
    /// An activation with a parameter that the config does not give, or gives wrongly.
    #[error(
        "activation \"{activation}\" needs a finite hidden_act_param of at least 0, the config has {}",
        parameter.map_or("none".to_owned(), |parameter| parameter.to_string())
    )]
    ActivationParameter {
        /// Its name.
        activation: &'static str,
        /// What the config has.
        parameter: Option<f32>,
    },
    /// The budget is below what the model needs at the very least.
    #[error(
        "a budget of {} ({budget_bytes} bytes) is below the floor of {} ({floor_bytes} bytes): {breakdown}; {enough} will do",
        HumanBytes(*budget_bytes), HumanBytes(*floor_bytes)
    )]
    BelowFloor {
        /// The budget given.
        budget_bytes: u64,
        /// The smallest budget that works.
        floor_bytes: u64,
        /// What makes up the floor.
        breakdown: String,
        /// What to ask for instead.
        enough: String,
    },
    /// The machine does not have what a plan by shares comes to.
    #[error(
        "the plan needs {needed_bytes} bytes more, {available_bytes} are free: lower --memory or --ctx"
    )]
    MemoryFull {
        /// What is to be allocated.
        needed_bytes: u64,
        /// What the system has.
        available_bytes: u64,
    },
    /// A selector that this layer, model or folder cannot serve.
    #[error("selector {selector}: {reason}")]
    Selector {
        /// Its name.
        selector: &'static str,
        /// Why not, and what to use instead.
        reason: String,
    },
    /// A layer whose predictors look at the residual stream was run without it.
    #[error(
        "{prefix}: its predictors look at {input}, which this call is not given: use forward_with"
    )]
    PredictorInput {
        /// The layer's place in the checkpoint.
        prefix: String,
        /// What they look at.
        input: PredictorInput,
    },
    /// A recorded trace breaks its form, or is about another model.
    #[error("{}: {reason}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// What is wrong in it, with the tensor and the numbers.
        reason: String,
    },
    /// A layer was asked for another result before it gave the one it had begun.
    #[error("{prefix}: a step of this layer has begun and is not finished; a model serves one sequence at a time")]
    Busy {
        /// The layer's prefix.
        prefix: String,
    },
    /// A stock model that cannot be built or run.
    #[error("stock model: {reason}")]
    Stock {
        /// Why not, and what to do.
        reason: String,
    },
    /// An error of candle's own.
    #[error(transparent)]
    Candle(#[from] candle::Error),
}

impl Error {
    /// A budget in bytes below the floor: with what moves from run to run a little more than the floor will do.
    pub(crate) fn below_floor(budget_bytes: u64, floor_bytes: u64, breakdown: String) -> Self {
        let mib = floor_bytes.saturating_add(3 << 19).div_ceil(1 << 20);
        Self::BelowFloor {
            budget_bytes,
            floor_bytes,
            breakdown,
            enough: format!("with what moves from run to run, {mib} MiB"),
        }
    }

    /// A share of `dense_bytes` of weights below the floor of weights.
    pub(crate) fn below_share(
        percent: f64,
        floor_bytes: u64,
        dense_bytes: u64,
        breakdown: String,
    ) -> Self {
        let dense_bytes = dense_bytes.max(1) as f64;
        Self::BelowFloor {
            budget_bytes: (dense_bytes * percent / 100.0) as u64,
            floor_bytes,
            breakdown,
            enough: match (100.0 * floor_bytes as f64 / dense_bytes).ceil() {
                enough if enough <= 100.0 => format!("{enough}%"),
                _ => "100% or a budget in bytes".to_owned(),
            },
        }
    }
}

/// The sentence: what `main` prints of an error that it returns.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Error> for candle::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle::Error::wrap(other),
        }
    }
}
