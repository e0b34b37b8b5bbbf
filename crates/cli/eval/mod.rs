//! `wick eval`: what skipping neurons costs in quality, the dense score beside the sparse one.
//!
//! The same model runs twice, one after the other inside the same budget: with every neuron, then with the selector
//! that was asked for. Both see the same tokens, so differences are paired: their standard error is far smaller than
//! that of the scores. No score depends on the budget.
//!
//! Not here: how texts and choices are scored (`candle_wick_models`).

mod documents;
mod encoder;
mod lines;
mod ppl;
mod results;
mod side;
mod statistics;
mod task;
mod tasks;
mod tasks_report;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Args, Debug)]
pub(crate) struct EvalArgs {
    #[command(subcommand)]
    command: EvalCommand,
}

#[derive(Subcommand, Debug)]
enum EvalCommand {
    /// Perplexity of a text, block by block
    Ppl(ppl::PplArgs),
    /// Accuracy on tasks with choices, and on last words
    Tasks(tasks::TasksArgs),
}

pub(crate) fn run(args: &EvalArgs) -> Result<ExitCode> {
    match &args.command {
        EvalCommand::Ppl(args) => ppl::run(args),
        EvalCommand::Tasks(args) => tasks::run(args),
    }
}
