//! `wick inspect`: what is in a converted folder.

use std::fmt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_wick::{
    ColumnKind, FlashFolder, HumanBytes, IoMode, PredictorMetadata, PREDICTORS_FILE, RESIDENT_FILE,
};
use clap::Args;
use serde::Serialize;

use crate::args::FolderArgs;
use crate::output;
use crate::predictors::Predictors;

#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    folder: FolderArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A converted folder in figures.
#[derive(Serialize)]
struct Inspection {
    path: String,
    model_type: String,
    /// Of the FFN records.
    dtype: &'static str,
    model_hash: String,
    /// Hash of the trace that the order of the records was made from, where they are not in the model's own.
    order_trace: Option<String>,
    has_tokenizer: bool,
    io_mode: &'static str,
    io_alignment_bytes: usize,
    dense_weight_bytes: u64,
    /// Records with their padding.
    ffn_bytes: u64,
    /// Padding alone.
    ffn_padding_bytes: u64,
    resident_bytes: u64,
    predictor_bytes: u64,
    predictors: Option<Predictors>,
    /// Why the predictors there are cannot be used.
    predictors_error: Option<String>,
    layers: Vec<Layer>,
    files: Vec<File>,
}

/// The FFN of one layer.
#[derive(Serialize)]
struct Layer {
    prefix: String,
    file: String,
    /// How its records are arranged.
    layout: &'static str,
    /// Matrices with a row in each neuron record, in their order there; none where there are no such records.
    record: Vec<&'static str>,
    hidden_size: usize,
    intermediate_size: usize,
    record_bytes: usize,
    stride_bytes: usize,
    /// Records of columns, where there are some.
    columns: Vec<Columns>,
    predictor: Option<Predictor>,
}

/// Records of columns of one kind.
#[derive(Serialize)]
struct Columns {
    /// Matrices with a column in each record, in their order there.
    record: Vec<&'static str>,
    count: usize,
    /// Values of each column.
    rows: usize,
    record_bytes: usize,
    stride_bytes: usize,
}

/// What the predictor of a layer did on text that it was not fitted on.
#[derive(Serialize)]
struct Predictor {
    threshold: f32,
    recall: f32,
    selected_fraction: f32,
    union_fraction: f32,
}

#[derive(Serialize)]
struct File {
    name: String,
    bytes: u64,
}

pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode> {
    let inspection = Inspection::of(&args.folder.open()?)?;
    if args.json {
        output::print_json(&inspection)?;
    } else {
        output::print(&format!("{inspection}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Inspection {
    fn of(folder: &FlashFolder) -> Result<Self> {
        let manifest = folder.manifest();
        let mut files: Vec<File> = manifest
            .files
            .iter()
            .map(|file| File {
                name: file.name.clone(),
                bytes: file.size_bytes,
            })
            .collect();
        let predictors = folder.predictors().ok().flatten();
        // The rest of the folder is as good as without them.
        let (in_short, predictors_error) = match Predictors::of(folder) {
            Ok(in_short) => (in_short, None),
            Err(error) => (None, Some(output::one_line(&error))),
        };
        let mut predictor_bytes = 0;
        let unusable = folder.path().join(PREDICTORS_FILE);
        let unusable = unusable.is_file().then_some(unusable);
        if let Some(path) = folder.predictors_path().or(unusable.as_deref()) {
            let found = std::fs::metadata(path).with_context(|| path.display().to_string())?;
            predictor_bytes = found.len();
            files.push(File {
                name: match path.strip_prefix(folder.path()) {
                    Ok(own) => own.display().to_string(),
                    Err(_) => path.display().to_string(),
                },
                bytes: predictor_bytes,
            });
        }
        let layers = layers(folder, predictors);
        let (ffn_bytes, ffn_padding_bytes) = record_bytes(&layers);
        let (io_mode, io_alignment_bytes) = match folder.io_mode() {
            IoMode::Direct { alignment_bytes } => ("direct", alignment_bytes),
            IoMode::Buffered => ("buffered", 1),
        };
        Ok(Self {
            path: folder.path().display().to_string(),
            model_type: manifest.model_type.clone(),
            dtype: manifest.dtype.name(),
            model_hash: manifest.model_hash.clone(),
            order_trace: manifest
                .order
                .as_ref()
                .map(|order| order.trace_xxh3.clone()),
            has_tokenizer: folder.path().join("tokenizer.json").exists(),
            io_mode,
            io_alignment_bytes,
            dense_weight_bytes: manifest.dense_weight_bytes,
            ffn_bytes,
            ffn_padding_bytes,
            resident_bytes: files
                .iter()
                .find(|file| file.name == RESIDENT_FILE)
                .map_or(0, |file| file.bytes),
            predictor_bytes,
            predictors: in_short,
            predictors_error,
            layers,
            files,
        })
    }
}

/// Bytes of all records, and what of them is padding.
fn record_bytes(layers: &[Layer]) -> (u64, u64) {
    // How many, how long and how far apart.
    let records = layers.iter().flat_map(|layer| {
        let columns = layer.columns.iter();
        let columns = columns.map(|kind| (kind.count, kind.record_bytes, kind.stride_bytes));
        let count = layer.intermediate_size;
        columns.chain([(count, layer.record_bytes, layer.stride_bytes)])
    });
    records.fold((0, 0), |(bytes, padding), (count, record, stride)| {
        let more = (count * (stride - record)) as u64;
        (bytes + (count * stride) as u64, padding + more)
    })
}

fn layers(folder: &FlashFolder, predictors: Option<&PredictorMetadata>) -> Vec<Layer> {
    let layers = folder.manifest().layers.iter().enumerate();
    let layers = layers.map(|(index, layer)| {
        let layout = layer.record_layout();
        let predictor = |found: &PredictorMetadata| Predictor {
            threshold: found.thresholds[index],
            recall: found.recall[index],
            selected_fraction: found.selected_fraction[index],
            union_fraction: found.union_fraction[index],
        };
        let has_neurons = layer.layout.has_neurons();
        let inputs = if layout.gated {
            vec!["gate", "up"]
        } else {
            vec!["up"]
        };
        let columns = ColumnKind::ALL.into_iter().filter_map(|kind| {
            let layout = layer.column_layout(kind)?;
            Some(Columns {
                record: match kind {
                    ColumnKind::Channel => inputs.clone(),
                    ColumnKind::Down => vec!["down"],
                },
                count: layer.column_count(kind),
                rows: layout.rows,
                record_bytes: layout.record_bytes(),
                stride_bytes: layout.stride_bytes,
            })
        });
        Layer {
            prefix: layer.prefix.clone(),
            file: layer.file.clone(),
            layout: layer.layout.name(),
            columns: columns.collect(),
            record: match has_neurons {
                true => [inputs, vec!["down"]].concat(),
                false => Vec::new(),
            },
            hidden_size: layer.hidden_size,
            intermediate_size: layer.intermediate_size,
            record_bytes: if has_neurons {
                layout.record_bytes()
            } else {
                0
            },
            stride_bytes: layer.stride_bytes,
            predictor: predictors.map(predictor),
        }
    });
    layers.collect()
}

impl Inspection {
    /// A line for each kind of records of a layer.
    fn write_records(&self, f: &mut fmt::Formatter<'_>, layer: &Layer) -> fmt::Result {
        let neurons = Columns {
            record: layer.record.clone(),
            count: layer.intermediate_size,
            rows: layer.hidden_size,
            record_bytes: layer.record_bytes,
            stride_bytes: layer.stride_bytes,
        };
        let neurons = Some(("record", &neurons)).filter(|(_, kind)| !kind.record.is_empty());
        let columns = layer.columns.iter().map(|kind| ("columns", kind));
        for (label, kind) in neurons.into_iter().chain(columns) {
            writeln!(
                f,
                "{label:<12}{} of {} values, {} + {} B padding",
                kind.record.join(" + "),
                kind.rows,
                HumanBytes(kind.record_bytes as u64),
                kind.stride_bytes - kind.record_bytes
            )?;
        }
        Ok(())
    }

    /// How the records are read, and whether they lie in an order of their own.
    fn reads(&self) -> String {
        let alignment = match self.io_mode {
            "direct" => format!(", {} B aligned", self.io_alignment_bytes),
            _ => String::new(),
        };
        let order = match &self.order_trace {
            Some(trace) => format!(", in an order by trace {trace}"),
            None => String::new(),
        };
        format!("{}{alignment}{order}", self.io_mode)
    }

    /// The predictors in a line, or why they are of no use; `None` where there are none.
    fn selection(&self) -> Option<String> {
        let unusable = self.predictors_error.as_ref();
        let unusable = unusable.map(|error| format!("unusable: {error}"));
        unusable.or_else(|| self.predictors.as_ref().map(Predictors::to_string))
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokenizer = if self.has_tokenizer {
            "with tokenizer"
        } else {
            "no tokenizer: use --ids"
        };
        writeln!(f, "{:<12}{}", "folder", self.path)?;
        writeln!(
            f,
            "{:<12}{}, {} layers, {}, {tokenizer}",
            "model",
            self.model_type,
            self.layers.len(),
            self.dtype
        )?;
        if let Some(layer) = self.layers.first() {
            self.write_records(f, layer)?;
        }
        writeln!(f, "{:<12}{}", "reads", self.reads())?;
        let parts = [
            ("all weights", self.dense_weight_bytes),
            ("FFN records", self.ffn_bytes),
            ("  padding", self.ffn_padding_bytes),
            ("resident", self.resident_bytes),
            ("predictors", self.predictor_bytes),
        ];
        if let Some(selection) = self.selection() {
            writeln!(f, "{:<12}{selection}", "selection")?;
        }
        for (label, bytes) in parts {
            writeln!(f, "{label:<12}{:>10}", HumanBytes(bytes).to_string())?;
        }
        writeln!(f, "files")?;
        for file in &self.files {
            writeln!(
                f,
                "  {:>10}  {}",
                HumanBytes(file.bytes).to_string(),
                file.name
            )?;
        }
        write!(
            f,
            "layer  neurons  predictor: recall  selected  by any of 5 tokens"
        )?;
        for (index, layer) in self.layers.iter().enumerate() {
            write!(f, "\n{index:>5}  {:>7}", layer.intermediate_size)?;
            match &layer.predictor {
                Some(predictor) => write!(
                    f,
                    "{:>19.3}  {:>6.1} %  {:>16.1} %",
                    predictor.recall,
                    100.0 * predictor.selected_fraction,
                    100.0 * predictor.union_fraction
                )?,
                None => write!(f, "{:>19}", "-")?,
            }
        }
        Ok(())
    }
}
