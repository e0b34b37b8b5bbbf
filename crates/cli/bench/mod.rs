//! `wick bench`: how fast the parts are that running a model is made of.
//!
//! Figures are medians with the least and the most. What can take turns does: a machine that others use too disturbs
//! all of it alike. Those are the cells of a row in `io` and the settings of a probe, over [`ROUNDS`](crate::spread::ROUNDS) rounds.
//! Rows of `decode` have a process each and follow each other, with probes between them.

mod access;
mod cgroup;
mod decode;
mod dense;
mod density;
mod density_table;
mod io;
pub(crate) mod plot;
mod prompt;
mod row;
mod simulated;
mod subject;
mod sweep;
mod sweep_figure;
mod sweep_table;
mod table;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand, Debug)]
enum Benchmark {
    /// Measure random reads of a file, by request size and requests in flight
    Io(io::IoArgs),
    /// Measure what a token takes at a budget, and what each part of the method brings
    Decode(decode::DecodeArgs),
    /// Measure what a token takes along budgets, the length of a text, or windows
    Sweep(sweep::SweepArgs),
    /// Measure the time to the first token of prompts, and what they read
    Prompt(prompt::PromptArgs),
    /// Measure what each density of dip, and of its rivals, loses in perplexity and saves in bytes and time
    Density(density::DensityArgs),
    /// Measure the row that stdin describes; the others start this by themselves
    #[command(hide = true)]
    Row,
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    match &args.benchmark {
        Benchmark::Io(args) => io::run(args),
        Benchmark::Decode(args) => decode::run(args),
        Benchmark::Sweep(args) => sweep::run(args),
        Benchmark::Prompt(args) => prompt::run(args),
        Benchmark::Density(args) => density::run(args),
        Benchmark::Row => row::run(),
    }
}
