//! What the FFNs of a model saw on a text: what predictors are made from.
//!
//! The model runs over the text once and is gone before the first layer is looked at: from then on memory holds what one layer
//! takes. Whether that fits, and whether the disk has room for the inputs of all layers, is asked before the run.
//!
//! Not here: the files of inputs (`capture`), which token serves which purpose (`parts`).

use std::path::{Path, PathBuf};

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_wick::{
    available_memory_bytes, current_rss_bytes, release_free_heap, Activation, FlashFolder,
    FlashVarBuilder, IoOptions, Placement, PredictorInput, SelectorKind,
};
use candle_wick_models::{LoadOptions, LoadedModel, WickTokenizer};
use wick_format::{FfnLayer, Manifest};

use super::capture::Capture;
use super::parts::{blocks, Part, Parts};
use super::{problem_with, FitOptions, FitProgress};
use crate::ConvertError;

/// Blocks of the context that a text must have.
const BLOCKS_MIN: usize = 10;
/// Tokens whose scores are computed together, anywhere in this folder, at most.
const ROWS_MAX: u64 = 256;
/// Tokens whose inputs are copied together, at most.
const COPIED_MAX: u64 = 4096;

/// A run of a model over a text that is over.
pub(super) struct Observed {
    /// The model's folder.
    pub(super) folder: FlashFolder,
    pub(super) activation: Activation,
    /// The text.
    pub(super) ids: Vec<u32>,
    /// Which of its tokens serve what.
    pub(super) parts: Parts,
    ffn: Capture,
    /// What predictors look at, where it is something else.
    seen: Option<Capture>,
}

/// What is wanted of a run.
pub(super) struct Wanted<'a> {
    /// What the predictors look at.
    pub(super) input: PredictorInput,
    /// Bytes that the work on a layer takes for so many tokens, beside its inputs, its deciding matrix and its scores.
    pub(super) layer_bytes: &'a dyn Fn(&FfnLayer, u64) -> u64,
}

/// A layer's inputs on the tokens of some purpose, `(tokens, hidden)` each.
pub(super) struct LayerInputs {
    /// What the FFN multiplies, which says who is active.
    pub(super) ffn: Tensor,
    /// What the predictor looks at.
    pub(super) seen: Tensor,
}

impl Observed {
    /// Runs the model in `folder` over `texts`.
    ///
    /// # Errors
    /// Its neurons are never exactly zero, it has no tokenizer, the texts are too short, disk or memory have no room, the run
    /// is interrupted, or a disk refuses.
    pub(super) fn on(
        folder: FlashFolder,
        texts: &[PathBuf],
        options: &FitOptions,
        wanted: &Wanted<'_>,
        progress: &dyn Fn(FitProgress),
    ) -> Result<Self, ConvertError> {
        let load = LoadOptions {
            selector: Some(SelectorKind::Dense),
            memory: options.memory,
            interrupt: options.interrupt.clone(),
            ..LoadOptions::default()
        };
        let mut model = LoadedModel::load(folder.clone(), &load)?;
        let (path, activation) = (folder.path(), model.activation());
        if !activation.is_relu_like() {
            let name = activation.name();
            let problem = "whose neurons are never exactly zero: nothing to predict";
            return Err(problem_with(
                path,
                format!("has activation {name}, {problem}"),
            ));
        }
        let (ids, parts) = tokens_of(path, texts, model.ctx(), options.tokens)?;
        let layers = &folder.manifest().layers;
        check_memory(path, layers, ids.len(), wanted, room_without_model())?;
        let kinds = match wanted.input {
            PredictorInput::FfnInput => vec![PredictorInput::FfnInput],
            other => vec![PredictorInput::FfnInput, other],
        };
        let over = |model: &mut LoadedModel| run(model, &ids, progress);
        let mut captures = Capture::record(&mut model, path, ids.len(), &kinds, over)?;
        drop(model);
        release_free_heap();
        Ok(Self {
            ffn: captures.swap_remove(0),
            seen: captures.pop(),
            folder,
            activation,
            ids,
            parts,
        })
    }

    pub(super) fn manifest(&self) -> &Manifest {
        self.folder.manifest()
    }

    /// What the FFN of layer `index` saw of the tokens of `part`, `(tokens, hidden)`.
    pub(super) fn inputs(&self, index: usize, part: &Part) -> Result<Tensor, ConvertError> {
        self.ffn.inputs(index, part)
    }

    /// The same, with what its predictor looks at.
    pub(super) fn all_inputs(
        &self,
        index: usize,
        part: &Part,
    ) -> Result<LayerInputs, ConvertError> {
        let ffn = self.inputs(index, part)?;
        let seen = match &self.seen {
            None => ffn.clone(),
            Some(seen) => seen.inputs(index, part)?,
        };
        Ok(LayerInputs { ffn, seen })
    }

    /// Calls `each(index, layer)` for one layer after the other.
    pub(super) fn for_each_layer<T>(
        &self,
        options: &FitOptions,
        progress: &dyn Fn(FitProgress),
        mut each: impl FnMut(usize, &FfnLayer) -> Result<T, ConvertError>,
    ) -> Result<Vec<T>, ConvertError> {
        let layers = &self.manifest().layers;
        let mut results = Vec::with_capacity(layers.len());
        for (index, layer) in layers.iter().enumerate() {
            if options.interrupt.is_triggered() {
                return Err(candle_wick_models::Error::Interrupted.into());
            }
            results.push(each(index, layer)?);
            progress(FitProgress {
                step: "layers",
                done: index + 1,
                total: layers.len(),
            });
        }
        Ok(results)
    }
}

/// The converted folder at `path`, with its own predictors or those in a file.
pub(super) fn open(path: &Path, predictors: Option<&Path>) -> Result<FlashFolder, ConvertError> {
    let opened = FlashFolder::open_with(path, IoOptions::default(), predictors);
    Ok(opened.map_err(candle_wick_models::Error::from)?)
}

/// All tensors of a folder, each read when it is asked for.
pub(super) fn tensors(folder: &FlashFolder) -> VarBuilder<'static> {
    let placement = Placement::resident(folder, SelectorKind::Dense);
    FlashVarBuilder::new(folder, placement).dense()
}

/// Weight and bias of the matrix that decides which neurons are active.
pub(super) fn deciding(folder: &FlashFolder, layer: &FfnLayer) -> candle::Result<(Tensor, Tensor)> {
    let dense = tensors(folder);
    let (name, bias) = match &layer.gate {
        Some(gate) => (gate, &layer.gate_bias),
        None => (&layer.up, &layer.up_bias),
    };
    let weight = dense.get((layer.intermediate_size, layer.hidden_size), name)?;
    let bias = match bias {
        Some(name) => dense.get(layer.intermediate_size, name)?,
        None => Tensor::zeros(layer.intermediate_size, DType::F32, &Device::Cpu)?,
    };
    Ok((weight, bias))
}

fn run(
    model: &mut LoadedModel,
    ids: &[u32],
    progress: &dyn Fn(FitProgress),
) -> Result<(), ConvertError> {
    let mut done = 0;
    for block in ids.chunks(model.ctx()) {
        model.reset();
        model.forward(block)?;
        done += block.len();
        progress(FitProgress {
            step: "tokens",
            done,
            total: ids.len(),
        });
    }
    Ok(())
}

/// The tokens to run over, and what they are for.
fn tokens_of(
    model: &Path,
    texts: &[PathBuf],
    ctx: usize,
    wanted: usize,
) -> Result<(Vec<u32>, Parts), ConvertError> {
    let tokenizer = WickTokenizer::load(model)?.ok_or_else(|| {
        let problem = "has no tokenizer.json, which a text needs";
        problem_with(model, problem.to_owned())
    })?;
    let (mut ids, mut by_text) = (Vec::new(), Vec::with_capacity(texts.len()));
    for text in texts {
        let content = std::fs::read_to_string(text).map_err(ConvertError::io(text, "read"))?;
        let more = tokenizer.encode(&content)?;
        by_text.push(more.len());
        ids.extend(more);
    }
    let wanted = wanted.div_ceil(ctx).max(BLOCKS_MIN);
    let (starts, owned) = blocks(&by_text, ctx, wanted);
    let parts = Parts::of(&owned);
    // Texts so short that a tenth of each is no token come to nothing as well.
    if starts.len() < BLOCKS_MIN || parts.counts().contains(&0) {
        let first = texts.first().map_or(model, PathBuf::as_path);
        let more = if texts.len() > 1 {
            "and the other texts have"
        } else {
            "has"
        };
        let needed = BLOCKS_MIN * ctx;
        let problem = format!("{more} {} tokens, {needed} are needed", ids.len());
        return Err(problem_with(first, problem));
    }
    let blocks = starts.into_iter().map(|start| &ids[start..start + ctx]);
    Ok((blocks.flatten().copied().collect(), parts))
}

/// Memory that work could take once the model is gone, which takes nearly all of what the process has now.
fn room_without_model() -> Option<u64> {
    let available = available_memory_bytes()?;
    Some(available.saturating_add(current_rss_bytes().unwrap_or(0)))
}

/// Refuses more tokens than there is memory for in some layer.
fn check_memory(
    folder: &Path,
    layers: &[FfnLayer],
    tokens: usize,
    wanted: &Wanted<'_>,
    room_bytes: Option<u64>,
) -> Result<(), ConvertError> {
    let needs = layers.iter().enumerate();
    let needs = needs.map(|(index, layer)| (needed_bytes(layer, tokens as u64, wanted), index));
    match (needs.max(), room_bytes) {
        (Some((needed_bytes, index)), Some(room_bytes)) if room_bytes < needed_bytes => {
            let problem = format!(
                "needs {needed_bytes} bytes of memory for layer {index} on {tokens} tokens, there are {room_bytes}: use fewer \
                 tokens"
            );
            Err(problem_with(folder, problem))
        }
        _ => Ok(()),
    }
}

/// Bytes that the work on `layer` takes: inputs, a piece of them in some copies, the deciding matrix, covariances and the like
/// in f64, scores of some tokens as they are computed and as they are counted, and what else is wanted.
fn needed_bytes(layer: &FfnLayer, tokens: u64, wanted: &Wanted<'_>) -> u64 {
    let (hidden, ffn) = (layer.hidden_size as u64, layer.intermediate_size as u64);
    let kinds = match wanted.input {
        PredictorInput::FfnInput => 1,
        _ => 2,
    };
    let inputs = tokens.saturating_mul(4 * kinds * hidden);
    let copies = 3 * 4 * hidden * tokens.min(COPIED_MAX);
    let matrices = 4 * ffn * hidden + 3 * 8 * hidden * hidden;
    let scores = 4 * 4 * ROWS_MAX * ffn;
    let others = [
        copies,
        matrices,
        scores,
        (wanted.layer_bytes)(layer, tokens),
    ];
    let sum = |sum: u64, bytes: &u64| sum.saturating_add(*bytes);
    others.iter().fold(inputs, sum)
}

#[cfg(test)]
mod tests {
    use super::super::example_layer::example_layer;
    use super::*;

    #[test]
    fn more_tokens_than_memory_are_refused_with_the_layer_and_both_numbers() {
        let layer = |hidden_size| example_layer(hidden_size, 100);
        let layers = [layer(10), layer(20), layer(10)];
        let wanted = |input| Wanted {
            input,
            layer_bytes: &|layer, tokens| tokens + layer.hidden_size as u64,
        };
        let check = |tokens, input, room| {
            let folder = Path::new("a/model");
            check_memory(folder, &layers, tokens, &wanted(input), room)
        };
        let (own, other) = (PredictorInput::FfnInput, PredictorInput::LayerInput);
        let (inputs, copies) = (4 * 1000 * 20, 12 * 1000 * 20);
        let (matrices, scores) = (4 * 100 * 20 + 24 * 400, 16 * 256 * 100);
        let needed = inputs + copies + matrices + scores + 1000 + 20;
        check(1000, own, Some(needed)).unwrap();
        check(1000, own, None).unwrap();
        assert!(check(1000, other, Some(needed)).is_err());
        assert!(check(usize::MAX, own, Some(u64::MAX - 1)).is_err());
        let error = check(1000, own, Some(needed - 1)).unwrap_err().to_string();
        let [needed, room] = [needed, needed - 1].map(|bytes| bytes.to_string());
        for part in ["a/model", "layer 1", "1000 tokens", &needed, &room] {
            assert!(error.contains(part), "{error}");
        }
    }
}
