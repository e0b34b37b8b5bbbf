//! `wick lora`: adapters and the checkpoints that they were trained on.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_wick::HumanBytes;
use candle_wick_convert::{lora, ConvertProgress};
use clap::{Args, Subcommand};

use crate::output;

#[derive(Args, Debug)]
pub(crate) struct LoraArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Merge an adapter into its checkpoint, before that is converted
    Apply(ApplyArgs),
}

#[derive(Args, Debug)]
struct ApplyArgs {
    /// Hugging Face folder: the checkpoint that the adapter was trained on
    model: PathBuf,

    /// Folder with the adapter, as peft saves it: adapter_config.json and adapter_model.safetensors
    adapter: PathBuf,

    /// Folder to write the merged checkpoint to
    out: PathBuf,

    /// Print errors only
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(args: &LoraArgs) -> Result<ExitCode> {
    let Action::Apply(args) = &args.action;
    let bar = output::progress_bar(output::BYTES_BAR, args.quiet);
    let on_progress = |progress: ConvertProgress<'_>| output::show_progress(&bar, progress);
    let report = lora::apply(&args.model, &args.adapter, &args.out, &on_progress)?;
    bar.finish_and_clear();
    if args.quiet {
        return Ok(ExitCode::SUCCESS);
    }
    let out = args.out.display();
    let mut lines = vec![format!(
        "{} of {} tensors merged into {out}, {}",
        report.merged,
        report.tensors,
        HumanBytes(report.weight_bytes)
    )];
    if !report.left_out.is_empty() {
        lines.push(format!(
            "left out, no weights: {}",
            report.left_out.join(", ")
        ));
    }
    lines.push(format!("next: wick convert {out} {out}.wick"));
    output::print(&(lines.join("\n") + "\n"))?;
    Ok(ExitCode::SUCCESS)
}
