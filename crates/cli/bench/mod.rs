//! `wick bench`: how fast the parts are that running a model is made of.
//!
//! Figures are medians of at least [`spread::ROUNDS`] rounds with the least and the most, and what competes takes
//! turns within a run: a machine that others use too disturbs all of it alike.

mod access;
#[cfg_attr(not(test), expect(dead_code, reason = "what `bench decode` runs in"))]
mod cgroup;
mod io;
mod load;
mod machine;
#[cfg_attr(not(test), expect(dead_code, reason = "the floors of `bench decode`"))]
mod probe;
mod spread;

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
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    match &args.benchmark {
        Benchmark::Io(args) => io::run(args),
    }
}
