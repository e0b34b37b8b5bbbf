//! A recorded trace: which neurons of each layer every token of a text had, in a file.
//!
//! A plain safetensors file of U32 vectors, three a layer:
//! ```text
//! layers.{i}.counts   [neurons]     how many tokens have each neuron; its length is the layer's width
//! layers.{i}.offsets  [tokens + 1]  where each token's neurons start in the next vector, and the end
//! layers.{i}.neurons  [entries]     ids, ascending inside a token
//! ```
//! The metadata say which form this is (`wick_trace`), what was recorded, and the hash of the model it is about.
//!
//! Invariants of a layer that was read: every token's ids are ascending and below the layer's width, and add up to the
//! counts. Traces come from strangers: one layer is in memory at a time, and no more of it than the file is long.
//!
//! Not here: recording (`trace_recorder`), and the made-up history that stands in for random weights (`trace`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use wick_format::{u32_values, Manifest, StoredDtype, TensorExtent, TensorIndex, TensorSpec};

use crate::error::{Error, Result};
use crate::folder::open_indexed;

/// Key of the form's version in the metadata.
const VERSION_KEY: &str = "wick_trace";
const VERSION: &str = "1";

/// What was recorded, and of which model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceMetadata {
    /// `model_type` of the model's manifest.
    pub model_type: String,
    /// Its [`Manifest::neurons_hash`]: a trace goes by the neurons' own numbers, whatever order their records have.
    pub model_hash: String,
    /// Who chose the neurons: `oracle` (the truly active ones) or `lowrank`.
    pub selector: String,
    /// Whether a made-up history stood in for what the selector chose, because the weights are random.
    pub is_replayed: bool,
    /// Tokens of one sequence; the model started anew after that many.
    pub sequence_tokens: usize,
}

/// A vector of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Counts,
    Offsets,
    Neurons,
}

impl Part {
    /// In the order of the file.
    pub(crate) const ALL: [Self; 3] = [Self::Counts, Self::Offsets, Self::Neurons];

    fn name(self, layer: usize) -> String {
        let part = match self {
            Self::Counts => "counts",
            Self::Offsets => "offsets",
            Self::Neurons => "neurons",
        };
        format!("layers.{layer}.{part}")
    }

    pub(crate) fn spec(self, layer: usize, len: usize) -> TensorSpec {
        TensorSpec::new(self.name(layer), StoredDtype::U32, &[len])
    }
}

impl TraceMetadata {
    /// As string pairs for a safetensors header.
    pub(crate) fn to_map(&self) -> BTreeMap<String, String> {
        [
            (VERSION_KEY, VERSION.to_owned()),
            ("model_type", self.model_type.clone()),
            ("model_hash", self.model_hash.clone()),
            ("selector", self.selector.clone()),
            ("is_replayed", self.is_replayed.to_string()),
            ("sequence_tokens", self.sequence_tokens.to_string()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
    }

    /// Reads them back; the error is a reason without the file's name.
    fn parse(map: &BTreeMap<String, String>) -> std::result::Result<Self, String> {
        let text = |key: &str| match map.get(key) {
            // It is shown to people, whose terminal would obey it.
            Some(text) if text.chars().any(char::is_control) => {
                Err(format!("metadata \"{key}\" has control characters"))
            }
            Some(text) => Ok(text.clone()),
            None => Err(format!("metadata lacks \"{key}\"")),
        };
        let version =
            text(VERSION_KEY).map_err(|_| "not a recorded trace (`wick trace` makes one)")?;
        if version != VERSION {
            return Err(format!(
                "version {version} of the form, this program reads version {VERSION}"
            ));
        }
        let is_replayed = text("is_replayed")?;
        let sequence_tokens = text("sequence_tokens")?;
        Ok(Self {
            model_type: text("model_type")?,
            model_hash: text("model_hash")?,
            selector: text("selector")?,
            is_replayed: is_replayed.parse().map_err(|_| {
                format!("metadata \"is_replayed\" is \"{is_replayed}\", not true or false")
            })?,
            sequence_tokens: sequence_tokens.parse().map_err(|_| {
                format!("metadata \"sequence_tokens\" is \"{sequence_tokens}\", not a count")
            })?,
        })
    }
}

/// An opened trace; its layers are read one by one.
#[derive(Debug)]
pub struct RecordedTrace {
    path: PathBuf,
    file: File,
    index: TensorIndex,
    metadata: TraceMetadata,
    /// Width of each layer.
    intermediate_sizes: Vec<usize>,
    tokens: usize,
}

/// What one layer's tokens had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTrace {
    counts: Vec<u32>,
    offsets: Vec<u32>,
    neurons: Vec<u32>,
}

impl RecordedTrace {
    /// Opens a trace and checks which vectors it has; their values are checked as they are read.
    ///
    /// # Errors
    /// The file cannot be read, is no trace of this version, or its vectors do not match each other.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let (file, index) = open_indexed(&path)?;
        let reason = |reason| Error::Trace {
            path: path.clone(),
            reason,
        };
        let metadata = TraceMetadata::parse(&index.metadata).map_err(reason)?;
        let (intermediate_sizes, tokens) = shapes(&index).map_err(reason)?;
        Ok(Self {
            path,
            file,
            index,
            metadata,
            intermediate_sizes,
            tokens,
        })
    }

    /// What was recorded, and of which model.
    pub fn metadata(&self) -> &TraceMetadata {
        &self.metadata
    }

    /// How many neurons each layer has; one entry a layer.
    pub fn intermediate_sizes(&self) -> &[usize] {
        &self.intermediate_sizes
    }

    /// How many tokens were recorded, the same for each layer.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Refuses a trace of another model than that of `manifest`.
    pub fn check_model(&self, manifest: &Manifest) -> Result<()> {
        let widths = manifest.layers.iter().map(|layer| layer.intermediate_size);
        let (made_for, here) = (&self.metadata.model_hash, manifest.neurons_hash());
        if made_for != here {
            return Err(self.error(format!(
                "recorded of model {made_for}, this one is {here}: record it again"
            )));
        }
        if !widths.eq(self.intermediate_sizes.iter().copied()) {
            let (got, expected) = (self.intermediate_sizes.len(), manifest.layers.len());
            let widths = manifest.layers.iter().map(|layer| layer.intermediate_size);
            let both = self.intermediate_sizes.iter().copied().zip(widths);
            let differ = both
                .enumerate()
                .find(|(_, (got, expected))| got != expected);
            return Err(self.error(match differ {
                Some((layer, (got, expected))) => {
                    format!("layer {layer} has {got} neurons, the model's {expected}")
                }
                None => format!("{got} layers, the model has {expected}"),
            }));
        }
        Ok(())
    }

    /// Reads what the tokens had in layer `index`.
    ///
    /// # Errors
    /// The file cannot be read, or the layer breaks one of the invariants above.
    ///
    /// # Panics
    /// There is no such layer.
    pub fn layer(&self, index: usize) -> Result<LayerTrace> {
        let layer = LayerTrace {
            counts: self.values(&Part::Counts.name(index))?,
            offsets: self.values(&Part::Offsets.name(index))?,
            neurons: self.values(&Part::Neurons.name(index))?,
        };
        match layer.check() {
            Ok(()) => Ok(layer),
            Err((part, reason)) => {
                Err(self.error(format!("tensor `{}`: {reason}", part.name(index))))
            }
        }
    }

    fn values(&self, name: &str) -> Result<Vec<u32>> {
        let extent = &self.index.tensors[name];
        let opened = |source| Error::Open {
            path: self.path.clone(),
            source,
        };
        // The index has compared the length with the file's; a file with holes may be longer than memory.
        let len = extent.len_bytes as usize;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(2 * len).map_err(|_| {
            self.error(format!(
                "tensor `{name}`: no memory for its {len} bytes twice"
            ))
        })?;
        bytes.resize(len, 0);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(extent.offset_bytes))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(opened)?;
        Ok(u32_values(&bytes))
    }

    fn error(&self, reason: String) -> Error {
        Error::Trace {
            path: self.path.clone(),
            reason,
        }
    }
}

/// Each layer's width, and the number of tokens, by the shapes of the vectors; else what is wrong.
fn shapes(index: &TensorIndex) -> std::result::Result<(Vec<usize>, usize), String> {
    let vector_len = |part: Part, layer: usize| {
        let name = part.name(layer);
        let extent = index.get(&name).map_err(|error| error.to_string())?;
        let TensorExtent { dtype, shape, .. } = extent;
        match (dtype, &shape[..]) {
            (StoredDtype::U32, [len]) => Ok(*len),
            _ => Err(format!(
                "tensor `{name}`: {dtype} {shape:?}, expected a vector of U32"
            )),
        }
    };
    let layer_count = index.tensors.len() / Part::ALL.len();
    let mut intermediate_sizes = Vec::with_capacity(layer_count);
    let mut tokens = None;
    for layer in 0..layer_count {
        let offsets = vector_len(Part::Offsets, layer)?;
        let expected = *tokens.get_or_insert(offsets);
        if offsets == 0 || offsets != expected {
            return Err(format!(
                "tensor `{}`: {offsets} values, expected {} as in the first layer, at least 1",
                Part::Offsets.name(layer),
                expected
            ));
        }
        vector_len(Part::Neurons, layer)?;
        intermediate_sizes.push(vector_len(Part::Counts, layer)?);
    }
    match (tokens, index.tensors.len() % Part::ALL.len()) {
        (Some(offsets), 0) => Ok((intermediate_sizes, offsets - 1)),
        _ => Err(format!(
            "{} tensors, expected three for each of at least one layer",
            index.tensors.len()
        )),
    }
}

impl LayerTrace {
    /// How many neurons the layer has.
    pub fn intermediate_size(&self) -> usize {
        self.counts.len()
    }

    /// How many tokens have each neuron.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// How many tokens there are.
    pub fn tokens(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Neurons of all tokens, added up.
    pub fn entries(&self) -> usize {
        self.neurons.len()
    }

    /// The neurons of token `token`, ascending.
    ///
    /// # Panics
    /// There is no such token.
    pub fn neurons(&self, token: usize) -> &[u32] {
        &self.neurons[self.offsets[token] as usize..self.offsets[token + 1] as usize]
    }

    /// The neurons of one token after the other.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> + DoubleEndedIterator {
        self.offsets
            .windows(2)
            .map(|ends| &self.neurons[ends[0] as usize..ends[1] as usize])
    }

    /// Refuses what is no trace; the error is a vector and what is wrong with it.
    fn check(&self) -> std::result::Result<(), (Part, String)> {
        let offsets = &self.offsets;
        if offsets[0] != 0 {
            return Err((Part::Offsets, format!("starts at {}, not 0", offsets[0])));
        }
        if let Some(token) = offsets.windows(2).position(|ends| ends[0] > ends[1]) {
            let (start, end) = (offsets[token], offsets[token + 1]);
            let reason = format!("token {token} ends at {end}, before its start at {start}");
            return Err((Part::Offsets, reason));
        }
        let (end, len) = (offsets[offsets.len() - 1] as usize, self.neurons.len());
        if end != len {
            let reason = format!("ends at {end}, there are {len} neurons");
            return Err((Part::Offsets, reason));
        }
        let mut counts = vec![0; self.counts.len()];
        for (token, neurons) in self.iter().enumerate() {
            if let Some(pair) = neurons.windows(2).find(|pair| pair[0] >= pair[1]) {
                let (before, after) = (pair[0], pair[1]);
                let reason = format!("token {token} has {after} after {before}: not ascending");
                return Err((Part::Neurons, reason));
            }
            for &neuron in neurons {
                match counts.get_mut(neuron as usize) {
                    Some(count) => *count += 1,
                    None => {
                        let width = self.counts.len();
                        let reason =
                            format!("token {token} has neuron {neuron}, the layer has {width}");
                        return Err((Part::Neurons, reason));
                    }
                }
            }
        }
        let differs = |(got, expected): &(&u32, &u32)| got != expected;
        match self.counts.iter().zip(&counts).position(|p| differs(&p)) {
            Some(neuron) => {
                let (got, expected) = (self.counts[neuron], counts[neuron]);
                let reason = format!("neuron {neuron} is said to be in {got} tokens, not in the {expected} that have it");
                Err((Part::Counts, reason))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "recorded_trace_tests.rs"]
mod tests;
