//! Who is needed: the neurons that each token of a step uses.
//!
//! `Dense` takes all, `Oracle` the truly active ones (it reads the whole layer to know them: tests and upper
//! bounds), `LowRank` those whose predicted score reaches the layer's threshold ("LLM in a flash", 3.1).
//!
//! A trace may take the place of what predictors choose: weights that are random have no activity worth measuring.
//!
//! Not here: whether a selected neuron must be read (`neuron_cache`).

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use wick_kernels::dot_rows;

use crate::activation::Activation;
use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::matrix::Matrix;
use crate::neurons::{LayerNeurons, Rows};
use crate::trace::Replay;
use crate::var_builder::FlashVarBuilder;
use crate::workspace::{score_neurons, sized, Scores, CHUNK_TOKENS_MAX};

/// The name of a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectorKind {
    /// Every neuron.
    Dense,
    /// The truly active neurons of a ReLU-family layer, found by reading all of it.
    Oracle,
    /// The neurons that a low-rank predictor expects to be active.
    LowRank,
}

impl SelectorKind {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Oracle => "oracle",
            Self::LowRank => "lowrank",
        }
    }

    /// Refuses a selector that cannot be exact for `activation`, or lacks what it needs in `folder`.
    pub fn check(self, folder: &FlashFolder, activation: Activation) -> Result<()> {
        if self != Self::Dense && !activation.is_relu_like() {
            return Err(Error::Selector {
                selector: self.name(),
                reason: format!(
                    "activation {} is never exactly zero, so no neuron can be skipped; use dense \
                     (dip, for such models, is not there yet)",
                    activation.name()
                ),
            });
        }
        if self == Self::LowRank {
            folder.needed_predictors()?;
        }
        Ok(())
    }
}

impl fmt::Display for SelectorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SelectorKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "dense" => Ok(Self::Dense),
            "oracle" => Ok(Self::Oracle),
            "lowrank" => Ok(Self::LowRank),
            _ => Err(Error::UnknownName {
                what: "selector",
                name: name.to_owned(),
                known: "dense, oracle, lowrank",
            }),
        }
    }
}

/// The neurons of a step: the union over its tokens, and which token wants which.
#[derive(Debug, Default)]
pub(crate) struct Selection {
    /// Ascending ids.
    pub(crate) neurons: Vec<u32>,
    /// For each of them, bit `t` when token `t` selected it.
    pub(crate) wanted_by: Vec<u128>,
}

impl Selection {
    fn clear(&mut self) {
        self.neurons.clear();
        self.wanted_by.clear();
    }

    fn push(&mut self, neuron: u32, wanted_by: u128) {
        if wanted_by != 0 {
            self.neurons.push(neuron);
            self.wanted_by.push(wanted_by);
        }
    }

    /// Hands out each token's own neurons, ascending, in a step of `tokens` tokens; they are put together in `list`.
    pub(crate) fn for_each_token(
        &self,
        tokens: usize,
        list: &mut Vec<u32>,
        mut hand_out: impl FnMut(&[u32]),
    ) {
        for token in 0..tokens {
            let all = self.neurons.iter().zip(&self.wanted_by);
            let wanted = all.filter(|(_, wanted_by)| *wanted_by >> token & 1 == 1);
            list.clear();
            list.extend(wanted.map(|(neuron, _)| *neuron));
            hand_out(list);
        }
    }

    /// Neurons selected, summed over tokens.
    pub(crate) fn selected_count(&self) -> u64 {
        self.wanted_by
            .iter()
            .map(|tokens| u64::from(tokens.count_ones()))
            .sum()
    }
}

/// The selector of one layer.
pub(crate) enum Selector {
    Dense,
    Oracle,
    LowRank(Box<LowRank>),
    /// Runs the predictor, for the time it takes, and goes by the trace.
    Replay(Box<LowRank>, Mutex<Replay>),
}

/// `up (down x) + bias >= threshold`, matrices in DRAM in their stored dtype.
pub(crate) struct LowRank {
    down: Matrix,
    up: Matrix,
    bias: Vec<f32>,
    threshold: f32,
}

impl Selector {
    /// The placement's selector for the layer `vb` is at; refused where it cannot be exact or is not there.
    pub(crate) fn load(vb: &FlashVarBuilder, index: usize, neurons: &LayerNeurons) -> Result<Self> {
        let kind = vb.placement().selector;
        kind.check(vb.folder(), neurons.activation)?;
        let metadata = match kind {
            SelectorKind::Dense => return Ok(Self::Dense),
            SelectorKind::Oracle => return Ok(Self::Oracle),
            SelectorKind::LowRank => vb.folder().needed_predictors()?,
        };
        let (form, input, between) = (metadata.form, metadata.input, metadata.between);
        if (form, input, between) != Default::default() {
            return Err(Error::Selector {
                selector: kind.name(),
                reason: format!(
                    "predictors of form {form}, input {input} and {between} between are not run here yet"
                ),
            });
        }
        let layer = &neurons.layer;
        let name = layer.predictor_tensor("down.weight");
        let extent = vb
            .folder()
            .extent(&name)
            .ok_or_else(|| vb.folder().missing(&name))?;
        let rank = extent.shape.first().copied().unwrap_or(0);
        // Never streamed, whatever the placement says of other matrices.
        let resident = |part: &str, shape: [usize; 2]| {
            Matrix::load(vb.folder(), &layer.predictor_tensor(part), &shape, true)
        };
        let predictor = Box::new(LowRank {
            down: resident("down.weight", [rank, layer.hidden_size])?,
            up: resident("up.weight", [layer.intermediate_size, rank])?,
            bias: vb
                .pp("predictor")
                .pp("up")
                .values(layer.intermediate_size, "bias")?,
            threshold: metadata.thresholds[index],
        });
        Ok(match &vb.placement().trace {
            None => Self::LowRank(predictor),
            Some(trace) => {
                let replay = trace.replay(index, layer.intermediate_size)?;
                Self::Replay(predictor, Mutex::new(replay))
            }
        })
    }

    /// Puts the neurons that the tokens of `x` need into `selection`.
    pub(crate) fn select(
        &self,
        neurons: &LayerNeurons,
        x: Rows<'_>,
        scores: &mut Scores,
        selection: &mut Selection,
    ) -> Result<()> {
        assert!(x.tokens <= CHUNK_TOKENS_MAX, "a step has one bit a token");
        selection.clear();
        match self {
            Self::Dense => {
                let everyone = u128::MAX >> (CHUNK_TOKENS_MAX - x.tokens);
                for neuron in 0..neurons.layer.intermediate_size as u32 {
                    selection.push(neuron, everyone);
                }
                Ok(())
            }
            Self::Oracle => truly_active(neurons, x, scores, selection),
            Self::LowRank(predictor) => predictor.select(x, scores, selection),
            Self::Replay(predictor, replay) => {
                predictor.select(x, scores, selection)?;
                selection.clear();
                let mut replay = replay.lock().unwrap_or_else(PoisonError::into_inner);
                replay.advance(x.tokens, |neuron, wanted_by| {
                    selection.push(neuron, wanted_by);
                });
                Ok(())
            }
        }
    }

    /// Puts the neurons that the layer will probably want into `selection`, from one token's input of the layer before;
    /// `false` where there is no telling.
    pub(crate) fn guess(
        &self,
        x: Rows<'_>,
        scores: &mut Scores,
        selection: &mut Selection,
    ) -> bool {
        selection.clear();
        match self {
            Self::Dense | Self::Oracle => false,
            Self::LowRank(predictor) => predictor.select(x, scores, selection).is_ok(),
            Self::Replay(predictor, replay) => {
                let selected = predictor.select(x, scores, selection);
                selection.clear();
                let replay = replay.lock().unwrap_or_else(PoisonError::into_inner);
                let guessed = replay.guess(|neuron| selection.push(neuron, 1));
                selected.is_ok() && guessed
            }
        }
    }
}

/// Reads the whole layer, in the order of the file, and selects what is active: the same dot products as the layer itself
/// computes.
fn truly_active(
    neurons: &LayerNeurons,
    x: Rows<'_>,
    scores: &mut Scores,
    selection: &mut Selection,
) -> Result<()> {
    let stride = neurons.layer.stride_bytes;
    let folder = &neurons.folder;
    let all = 0..neurons.layer.intermediate_size;
    let records = &neurons.records;
    scores.wanted_by.clear();
    scores.wanted_by.resize(all.len(), 0);
    let mut ring = folder.ring();
    records.for_each(folder.reader(), &mut ring, |range, bytes| {
        let record = |r: usize| &bytes[r * stride..(r + 1) * stride];
        let id = |r: usize| records.neuron_of(range.start + r);
        neurons.deciding(range.len(), |r| id(r) as u32, record, x, &mut scores.values);
        let values = scores.values.chunks(x.tokens).take(range.len());
        for (r, values) in values.enumerate() {
            let wanted_by = tokens_where(values, |value| neurons.activation.is_active(value));
            scores.wanted_by[id(r)] = wanted_by;
        }
        Ok(())
    })?;
    for (neuron, wanted_by) in all.zip(&scores.wanted_by) {
        selection.push(neuron as u32, *wanted_by);
    }
    Ok(())
}

impl LowRank {
    fn select(&self, x: Rows<'_>, scores: &mut Scores, selection: &mut Selection) -> Result<()> {
        let (tokens, rank) = (x.tokens, self.down.rows());
        let query = sized(&mut scores.query, rank * tokens);
        self.down.product(x.values, tokens, query)?;
        let by_token = sized(&mut scores.query_by_token, rank * tokens);
        for (r, values) in query.chunks(tokens).enumerate() {
            for (token, value) in values.iter().enumerate() {
                by_token[token * rank + r] = *value;
            }
        }
        self.up.count_multiplied();
        let (dtype, row_bytes, rows) = self.up.resident_rows().expect("loaded as resident above");
        let block = score_neurons(tokens);
        for (index, biases) in self.bias.chunks(block).enumerate() {
            let first = index * block;
            let row = |r: usize| &rows[(first + r) * row_bytes..(first + r + 1) * row_bytes];
            let values = sized(&mut scores.values, biases.len() * tokens);
            dot_rows(dtype, biases.len(), row, by_token, tokens, values);
            for (r, (values, bias)) in values.chunks(tokens).zip(biases).enumerate() {
                let wanted_by = tokens_where(values, |score| score + bias >= self.threshold);
                selection.push((first + r) as u32, wanted_by);
            }
        }
        Ok(())
    }
}

fn tokens_where(values: &[f32], wanted: impl Fn(f32) -> bool) -> u128 {
    let tokens = values
        .iter()
        .enumerate()
        .filter(|(_, value)| wanted(**value));
    tokens.fold(0, |bits, (token, _)| bits | 1 << token)
}
