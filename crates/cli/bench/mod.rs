//! `wick bench`: how fast the parts are that running a model is made of.
//!
//! Figures are medians with the least and the most. What can take turns does: a machine that others use too disturbs
//! all of it alike. Those are the cells of a row in `io` and the settings of a probe, over [`spread::ROUNDS`] rounds.
//! Rows of `decode` have a process each and follow each other, with probes between them.

mod access;
mod cgroup;
mod decode;
mod dense;
mod figures;
mod io;
mod load;
mod machine;
mod probe;
mod row;
mod spread;
mod table;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

pub(crate) use decode::synthetic_name;
pub(crate) use figures::activity;

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
    /// Measure one row of `decode`; it starts this by itself
    #[command(hide = true)]
    Row(row::RowArgs),
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    match &args.benchmark {
        Benchmark::Io(args) => io::run(args),
        Benchmark::Decode(args) => decode::run(args),
        Benchmark::Row(args) => row::run(args),
    }
}
