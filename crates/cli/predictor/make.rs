//! What the commands that make predictors from one text share: flags, and how they show what was made.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_wick::{HumanBytes, Memory};
use candle_wick_convert::predictor::{FitOptions, FitProgress};
use candle_wick_models::Interrupt;
use clap::Args;
use serde::Serialize;

use super::{refuse_demo, with_progress};
use crate::args::{positive, share};
use crate::output;

#[derive(Args, Debug)]
pub(super) struct MakeArgs {
    /// Converted folder
    pub(super) model: PathBuf,

    /// File with text like that which the model will see
    #[arg(long, alias = "text", value_name = "FILE")]
    pub(super) text_file: PathBuf,

    /// Share of the active neurons to be found
    #[arg(long, value_name = "SHARE", default_value_t = FitOptions::default().recall, value_parser = share)]
    recall: f64,

    /// Tokens of the text to use at most
    #[arg(long, value_name = "COUNT", default_value_t = FitOptions::default().tokens, value_parser = positive)]
    tokens: usize,

    /// Budget of the model while it runs [default: what is free]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,

    /// Write the predictors into FILE [default: into the model's folder, in the place of those that it has]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl MakeArgs {
    /// All but a rank, which only some have.
    pub(super) fn options(&self, interrupt: Interrupt) -> FitOptions {
        FitOptions {
            recall: self.recall,
            tokens: self.tokens,
            memory: self.memory,
            out: self.out.clone(),
            interrupt,
            ..FitOptions::default()
        }
    }

    /// Makes predictors under a bar, and shows the report or its summary.
    pub(super) fn make<T: Serialize, E: std::error::Error + Send + Sync + 'static>(
        &self,
        make: impl FnOnce(&dyn Fn(FitProgress)) -> Result<T, E>,
        summary: impl FnOnce(&T) -> String,
    ) -> Result<ExitCode> {
        refuse_demo(&self.model)?;
        let report = with_progress(make)?;
        match self.json {
            true => output::print_json(&report)?,
            false => output::print(&summary(&report))?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The last line of a summary: where the predictors are.
pub(super) fn file_line(path: &Path, bytes: u64) -> String {
    format!("{} ({})", path.display(), HumanBytes(bytes))
}
