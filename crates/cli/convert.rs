//! `wick convert`: a checkpoint in, a folder out. One that is not here is downloaded first.

use std::panic;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;

use anyhow::{bail, ensure, Result};
use candle_wick::{HumanBytes, Memory};
use candle_wick_convert::hub::{self, DownloadProgress, HubModel};
use candle_wick_convert::{convert, ConvertOptions, ConvertProgress, ConvertReport, Layout};
use candle_wick_models::WickTokenizer;
use clap::{Args, ValueEnum};

use crate::output;

/// Names of ignored tensors shown; checkpoints may have hundreds.
const IGNORED_SHOWN: usize = 8;

#[derive(Args, Debug)]
pub(crate) struct ConvertArgs {
    /// Hugging Face folder (config.json and weights), GGUF file, or ORG/NAME of a model on the hub
    #[arg(value_name = "SRC")]
    source: PathBuf,

    /// Folder to write; one that is unfinished is taken up where it stopped
    out: PathBuf,

    /// Element type of all weights [default: as stored]
    #[arg(long)]
    dtype: Option<DtypeChoice>,

    /// Activation to write into the folder's config, for checkpoints whose own is wrong
    #[arg(long, value_name = "NAME")]
    activation: Option<String>,

    /// Records that an FFN is stored in: neuron (for predictors), channel (for the selectors dip and dip-ca), or both, which
    /// takes twice the room
    #[arg(long, value_name = "NAME", default_value = "neuron")]
    layout: LayoutChoice,

    /// Start another file of FFN records beyond this size [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    file_size: Option<Memory>,

    /// Branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "NAME")]
    revision: Option<String>,

    /// GGUF file of a model on the hub that has several
    #[arg(long, value_name = "NAME")]
    file: Option<String>,

    /// Print errors only
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DtypeChoice {
    F32,
    F16,
    Bf16,
}

/// What is converted into; other orders are made by `wick reorder`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LayoutChoice {
    Neuron,
    Channel,
    Both,
}

impl LayoutChoice {
    pub(crate) fn layout(self) -> Layout {
        match self {
            Self::Neuron => Layout::Neuron,
            Self::Channel => Layout::Channel,
            Self::Both => Layout::Both,
        }
    }
}

impl DtypeChoice {
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl ConvertArgs {
    fn options(&self) -> Result<ConvertOptions> {
        let default = ConvertOptions::default();
        Ok(ConvertOptions {
            dtype: self
                .dtype
                .map(|dtype| dtype.name().try_into())
                .transpose()?,
            activation: self.activation.clone(),
            layout: self.layout.layout(),
            max_file_bytes: match self.file_size {
                None => default.max_file_bytes,
                Some(Memory::Bytes(bytes)) => bytes,
                Some(Memory::Percent(_)) => {
                    bail!("--file-size takes a size such as 512MiB, no share")
                }
            },
        })
    }

    /// What to convert: what lies at the path, or else a model of the hub, downloaded.
    fn model(&self) -> Result<HubModel> {
        let source = self.source.display();
        // A link that leads nowhere is a local path too.
        if self.source.symlink_metadata().is_ok() {
            for (flag, value) in [("revision", &self.revision), ("file", &self.file)] {
                ensure!(
                    value.is_none(),
                    "--{flag} is for models of the hub, and {source} is a local path: leave it out"
                );
            }
            return Ok(HubModel {
                path: self.source.clone(),
                notes: Vec::new(),
            });
        }
        let name = self.source.to_str().filter(|name| hub::is_repo_name(name));
        let Some(name) = name else {
            bail!(
                "{source} does not exist, and is not the name of a model on the Hugging Face hub either: those look \
                 like facebook/opt-125m"
            );
        };
        self.download(name)
    }

    fn download(&self, name: &str) -> Result<HubModel> {
        // A panic there becomes an error: one sentence is enough.
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if thread::current().name() != Some(hub::THREAD_NAME) {
                hook(info);
            }
        }));
        let bar = output::progress_bar(output::BYTES_BAR, self.quiet);
        let on_progress = |progress: DownloadProgress<'_>| {
            if bar.message() != progress.file {
                bar.reset();
                bar.set_length(progress.total_bytes);
                bar.set_position(progress.done_bytes);
                bar.reset_eta(); // what an earlier call brought is no sign of speed
                bar.set_message(progress.file.to_owned());
            }
            bar.set_position(progress.done_bytes);
        };
        let (revision, file) = (self.revision.as_deref(), self.file.as_deref());
        let model = hub::download(name, revision, file, &on_progress);
        bar.finish_and_clear();
        model.map_err(|error| {
            let is_not_found = error.is_not_found();
            let error = anyhow::Error::new(error);
            if is_not_found {
                error.context(format!("there is no local {name}, and on the hub"))
            } else {
                error
            }
        })
    }
}

pub(crate) fn run(args: &ConvertArgs) -> Result<ExitCode> {
    let options = args.options()?;
    let HubModel { path, notes } = args.model()?;
    let bar = output::progress_bar(output::BYTES_BAR, args.quiet);
    let on_progress = |progress: ConvertProgress<'_>| output::show_progress(&bar, progress);
    let report = convert(&path, &args.out, &options, &on_progress);
    bar.finish_and_clear();
    let mut report = report?;
    report.notes.splice(0..0, notes);
    report.notes.extend(tokenizer_note(&args.out));
    if !args.quiet {
        output::print(&summary(args, &report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A tokenizer.json is copied as it is: whether it can be read is told now, not at the first prompt.
fn tokenizer_note(folder: &Path) -> Option<String> {
    let error = WickTokenizer::load(folder).err()?;
    Some(format!(
        "{error} (until the file is repaired, the model takes no text, and token ids (--ids) once it is removed)"
    ))
}

fn summary(args: &ConvertArgs, report: &ConvertReport) -> String {
    let mut lines = vec![format!(
        "{}: {} layers, {} of FFN records, {} resident, {} files",
        args.out.display(),
        report.layers,
        HumanBytes(report.ffn_bytes),
        HumanBytes(report.resident_bytes),
        report.files.len() + 1
    )];
    lines.extend(report.notes.iter().map(|note| format!("note: {note}")));
    let ignored = &report.ignored_tensors;
    if !ignored.is_empty() {
        let shown = ignored[..ignored.len().min(IGNORED_SHOWN)].join(", ");
        let more = ignored.len().saturating_sub(IGNORED_SHOWN);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        lines.push(format!("ignored {} tensors: {shown}{more}", ignored.len()));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        convert: ConvertArgs,
    }

    fn options(flags: &[&str]) -> Result<ConvertOptions> {
        let words = ["wick", "src", "out"].iter().chain(flags);
        Command::try_parse_from(words)?.convert.options()
    }

    #[test]
    fn flags_become_options() {
        assert_eq!(options(&[]).unwrap(), ConvertOptions::default());
        let all = options(&[
            "--dtype",
            "bf16",
            "--activation",
            "relu",
            "--file-size",
            "2MiB",
            "--layout",
            "both",
        ])
        .unwrap();
        assert_eq!(all.layout, Layout::Both);
        assert_eq!(all.dtype.map(|dtype| dtype.name()), Some("bf16"));
        assert_eq!(
            (all.activation.as_deref(), all.max_file_bytes),
            (Some("relu"), 2 << 20)
        );
        assert!(options(&["--dtype", "int3"]).is_err());
        assert!(options(&["--layout", "permuted"]).is_err());
        assert!(options(&["--file-size", "50%"]).is_err());
    }

    #[test]
    fn the_summary_shows_some_of_many_ignored_tensors() {
        let Command { convert } = Command::parse_from(["wick", "src", "out"]);
        let report = ConvertReport {
            files: Vec::new(),
            layers: 2,
            resident_bytes: 1024,
            ffn_bytes: 2048,
            ignored_tensors: (0..10).map(|index| format!("t{index}")).collect(),
            notes: vec!["written before".to_owned()],
        };
        let summary = summary(&convert, &report);
        assert!(summary.contains("ignored 10 tensors: t0, t1,") && summary.contains("and 2 more"));
        assert!(summary.contains("\nnote: written before\n"));
    }
}
