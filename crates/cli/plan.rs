//! `wick plan`: what a model would keep in memory.

use std::process::ExitCode;

use anyhow::Result;
use candle_wick_models::Interrupt;
use clap::Args;

use crate::args::ModelArgs;
use crate::output;

#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    let model = args.model.open(Interrupt::new())?;
    let plan = candle_wick_models::plan(&model.folder, &model.options)?;
    if args.json {
        output::print_json(&plan)?;
    } else {
        output::print(&format!("{plan}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
