//! The `wick` command: from what was typed to one of the command files to an exit status.
//!
//! Exit status: 0 done (also when the reader of a pipe left), 1 with one line on stderr, 2 for wrong usage,
//! 130 after Ctrl-C. Text and figures that were asked for go to stdout, everything else to stderr.

mod activity;
mod args;
mod bench;
mod columns;
mod compare;
mod convert;
mod demo;
mod dip;
mod disk;
mod doctor;
mod draw;
mod eval;
mod friends;
mod front;
mod inspect;
mod interrupt;
mod lora;
mod machine;
mod output;
mod pass;
mod plan;
mod predict;
mod predictor;
mod predictors;
mod probe;
mod prompt;
mod read_load;
mod reorder;
mod report;
mod run;
mod score;
mod selectors;
mod spread;
mod synth;
mod synthetic;
mod trace;
mod tune;
mod tuned;
mod window;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Run language models that do not fit in memory: feed-forward weights stay on flash.
#[derive(Parser, Debug)]
#[command(name = "wick", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Turn a Hugging Face checkpoint into a folder that `run` reads from flash
    Convert(convert::ConvertArgs),
    /// Merge a LoRA adapter into a checkpoint
    Lora(lora::LoraArgs),
    /// Write on from a prompt, inside a memory budget
    Run(run::RunArgs),
    /// Show what a model would keep in memory, and load nothing
    Plan(plan::PlanArgs),
    /// Find settings that suit this machine and disk, and keep them beside a model
    Tune(tune::TuneArgs),
    /// Look at this machine and a disk, and say what to change
    Doctor(doctor::DoctorArgs),
    /// Show what is in a converted folder
    Inspect(inspect::InspectArgs),
    /// Show how likely a model finds a text
    Score(score::ScoreArgs),
    /// Show what skipping neurons costs in quality: perplexity and accuracy beside those of all neurons
    Eval(eval::EvalArgs),
    /// Show what a model writes with all neurons and with the selected ones, side by side
    Compare(compare::CompareArgs),
    /// Make the predictors that let a model skip neurons
    Predictor(predictor::PredictorArgs),
    /// Record which neurons each token of a text has
    Trace(trace::TraceArgs),
    /// Show what a recorded trace needs: union and new neurons by window, misses by cache policy
    Window(window::WindowArgs),
    /// Write a folder with random weights in a model's shapes, for measuring
    Synth(synth::SynthArgs),
    /// Write a model again, with neurons side by side that a trace reads together
    Reorder(reorder::ReorderArgs),
    /// Show which neurons of a trace fire together, and what storing closest friends together would read
    Friends(friends::FriendsArgs),
    /// Measure this machine's reads, or what a model's tokens take on it
    Bench(bench::BenchArgs),
    /// Write the embedded model into a folder; `run demo` starts this by itself
    #[command(hide = true)]
    PrepareDemo(demo::PrepareDemoArgs),
}

fn main() -> ExitCode {
    // Before anything starts a thread.
    candle_wick::share_one_heap();
    let done = match Cli::parse().command {
        Command::Convert(args) => convert::run(&args),
        Command::Lora(args) => lora::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Predictor(args) => predictor::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Window(args) => window::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Reorder(args) => reorder::run(&args),
        Command::Friends(args) => friends::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::PrepareDemo(args) => demo::prepare(&args),
    };
    match done {
        Ok(status) => status,
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&output::one_line(&error));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        super::Cli::command().debug_assert();
    }
}
