//! Who is needed: the neurons that each token of a step uses.
//!
//! `Dense` takes all, `Oracle` the truly active ones (it reads the whole layer to know them: tests and upper
//! bounds), `Pruning` the largest (measurements), `Predicted` those whose predicted score reaches the layer's threshold ("LLM in a flash", 3.1).
//!
//! A trace may take the place of what predictors choose: weights that are random have no activity worth measuring.
//!
//! Not here: scores (`predictor`), whether a selected neuron must be read (`neuron_cache`).

use std::sync::{Mutex, PoisonError};

use crate::error::Result;
use crate::neurons::{LayerNeurons, Rows};
use crate::predictor::{tokens_where, Predictor};
use crate::predictor_kind::PredictorInput;
use crate::pruning::Pruning;
use crate::selection::{all_of, Selection};
use crate::selector_kind::SelectorKind;
use crate::trace::Replay;
use crate::var_builder::FlashVarBuilder;
use crate::workspace::{Scores, CHUNK_TOKENS_MAX};

/// The selector of one layer.
pub(crate) enum Selector {
    Dense,
    Oracle,
    Pruning(Pruning),
    Predicted(Box<Predictor>),
    /// Runs the predictor, for the time it takes, and goes by the trace.
    Replay(Box<Predictor>, Mutex<Replay>),
}

impl Selector {
    /// The placement's selector for the layer `vb` is at; refused where it cannot be exact or is not there.
    pub(crate) fn load(vb: &FlashVarBuilder, index: usize, neurons: &LayerNeurons) -> Result<Self> {
        let kind = vb.placement().selector;
        kind.check(vb.folder(), neurons.activation)?;
        let predictor = match kind {
            SelectorKind::Dense => return Ok(Self::Dense),
            SelectorKind::Oracle => return Ok(Self::Oracle),
            SelectorKind::PruneGate
            | SelectorKind::PruneUp
            | SelectorKind::PruneGlu
            | SelectorKind::Cats => {
                let is_gated = neurons.layout.gated;
                let pruning = Pruning::new(kind, vb.placement().dip, is_gated)?;
                return Ok(Self::Pruning(pruning));
            }
            SelectorKind::LowRank | SelectorKind::Gate => Predictor::load(vb.folder(), index)?,
            SelectorKind::Dip | SelectorKind::DipCa => {
                unreachable!("layers that go by columns have no neurons to select")
            }
        };
        let predictor = Box::new(predictor);
        Ok(match &vb.placement().trace {
            None => Self::Predicted(predictor),
            Some(trace) => {
                let replay = trace.replay(index, neurons.layer.intermediate_size)?;
                Self::Replay(predictor, Mutex::new(replay))
            }
        })
    }

    /// What it looks at.
    pub(crate) fn input(&self) -> PredictorInput {
        match self {
            Self::Dense | Self::Oracle | Self::Pruning(_) => PredictorInput::FfnInput,
            Self::Predicted(predictor) | Self::Replay(predictor, _) => predictor.input(),
        }
    }

    /// How many of the layer's matrices are multiplied in whole to choose.
    pub(crate) fn matrices_in_whole(&self) -> u64 {
        match self {
            Self::Oracle => 1,
            Self::Pruning(pruning) => pruning.matrices_in_whole(),
            Self::Dense | Self::Predicted(_) | Self::Replay(..) => 0,
        }
    }

    /// Puts the neurons that the tokens of `x` need into `selection`; `x` is what [`Self::input`] says.
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
                for neuron in 0..neurons.layer.intermediate_size as u32 {
                    selection.push(neuron, all_of(x.tokens));
                }
                Ok(())
            }
            Self::Oracle => truly_active(neurons, x, scores, selection),
            Self::Pruning(pruning) => pruning.select(neurons, x, scores, selection),
            Self::Predicted(predictor) => predictor.select(x, scores, |neuron, wanted_by| {
                selection.push(neuron, wanted_by);
            }),
            Self::Replay(predictor, replay) => {
                predictor.select(x, scores, |_, _| {})?;
                let mut replay = replay.lock().unwrap_or_else(PoisonError::into_inner);
                replay.advance(x.tokens, |neuron, wanted_by| {
                    selection.push(neuron, wanted_by);
                });
                Ok(())
            }
        }
    }

    /// Puts the neurons that the layer will probably want into `selection`, from what the selector of the layer before
    /// looked at for one token, which is of the same kind; `false` where there is no telling.
    pub(crate) fn guess(
        &self,
        x: Rows<'_>,
        scores: &mut Scores,
        selection: &mut Selection,
    ) -> bool {
        selection.clear();
        match self {
            Self::Dense | Self::Oracle | Self::Pruning(_) => false,
            Self::Predicted(predictor) => {
                let selected = predictor.select(x, scores, |neuron, wanted_by| {
                    selection.push(neuron, wanted_by);
                });
                selected.is_ok()
            }
            Self::Replay(predictor, replay) => {
                let selected = predictor.select(x, scores, |_, _| {});
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
    let all = 0..neurons.layer.intermediate_size;
    let records = &neurons.records;
    scores.wanted_by.clear();
    scores.wanted_by.resize(all.len(), 0);
    neurons.for_each_range(|range, bytes| {
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
