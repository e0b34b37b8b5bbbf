//! The predictors of an opened folder in one line: for `plan` and `inspect`.

use std::fmt;

use anyhow::Result;
use candle_wick::{Between, FlashFolder};
use serde::Serialize;

/// What the file of predictors says of itself, and where it is.
#[derive(Serialize)]
pub(crate) struct Predictors {
    form: &'static str,
    /// Of a weight of the first layer's.
    bits: usize,
    input: &'static str,
    between: &'static str,
    made_by: Option<String>,
    file: String,
    /// In DRAM, when a model uses them.
    bytes: u64,
}

impl Predictors {
    /// Those of `folder`; `None` where it has none.
    pub(crate) fn of(folder: &FlashFolder) -> Result<Option<Self>> {
        let (Some(found), Some(path)) = (folder.predictors()?, folder.predictors_path()) else {
            return Ok(None);
        };
        Ok(Some(Self {
            form: found.form.name(),
            bits: folder.predictor_bits(0)?.unwrap_or(0),
            input: found.input.name(),
            between: found.between.name(),
            made_by: found.made_by.clone(),
            file: path.display().to_string(),
            bytes: folder.predictor_bytes(),
        }))
    }
}

impl fmt::Display for Predictors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bits, of {}", self.form, self.bits, self.input)?;
        if self.between != Between::None.name() {
            write!(f, ", {} between", self.between)?;
        }
        match &self.made_by {
            Some(by) => write!(f, ", made by: {by}"),
            None => Ok(()),
        }
    }
}
