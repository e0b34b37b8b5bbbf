//! The predictor of one layer: a score for each neuron from one vector a token; those that reach the threshold are
//! selected.
//!
//! `score_i = (matrices . x)_i + bias_i`, where the matrices are a low-rank pair or a quantised copy of the one that
//! decides which neurons are active. All of it is in DRAM.
//!
//! A score depends on its own token alone, in the same bits, however many tokens are scored together and on how many
//! threads. What a comparison with the threshold says of a NaN is "not selected".
//!
//! Not here: the matrices (`low_rank`, `quantised_gate`), who is selected in the end (`selector`).

use wick_format::{FfnLayer, PredictorPart, StoredDtype, TensorExtent};

use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::low_rank::{rank, LowRank};
use crate::matrix::Matrix;
use crate::neurons::Rows;
use crate::predictor_kind::{PredictorForm, PredictorInput};
use crate::quantised_gate::{packed_bits, QuantisedGate};
use crate::workspace::{score_neurons, sized, Scores, CHUNK_TOKENS_MAX};

/// A layer's predictor, loaded.
pub struct Predictor {
    matrices: Matrices,
    /// One a neuron.
    bias: Vec<f32>,
    threshold: f32,
    input: PredictorInput,
    hidden_size: usize,
}

enum Matrices {
    LowRank(Box<LowRank>),
    Gate(QuantisedGate),
}

impl Predictor {
    /// The predictor of layer `index` in `folder`, whichever form the file has.
    ///
    /// # Errors
    /// The folder has no predictors or unusable ones, a tensor is missing, damaged, of another shape or dtype than the
    /// layer asks for, or has scales or biases that are not finite.
    pub fn load(folder: &FlashFolder, index: usize) -> Result<Self> {
        let form = folder
            .predictors()?
            .map_or_else(Default::default, |found| found.form);
        let metadata = folder.needed_predictors(form)?;
        let layers = &folder.manifest().layers;
        let layer = layers.get(index).ok_or_else(|| Error::Folder {
            path: folder.path().to_owned(),
            reason: format!("has {} layers, none of index {index}", layers.len()),
        })?;
        let (matrices, bias) = match form {
            PredictorForm::LowRank => {
                let pair = LowRank::load(folder, layer, metadata.between)?;
                (Matrices::LowRank(Box::new(pair)), PredictorPart::UpBias)
            }
            PredictorForm::Gate => {
                let gate = QuantisedGate::load(folder, layer)?;
                (Matrices::Gate(gate), PredictorPart::GateBias)
            }
        };
        Ok(Self {
            matrices,
            bias: finite_values(
                folder,
                &layer.predictor_tensor(bias),
                layer.intermediate_size,
            )?,
            threshold: metadata.thresholds[index],
            input: metadata.input,
            hidden_size: layer.hidden_size,
        })
    }

    /// What the scores are computed from.
    pub fn input(&self) -> PredictorInput {
        self.input
    }

    /// Neurons are selected whose score reaches it.
    pub fn threshold(&self) -> f32 {
        self.threshold
    }

    /// The scores `(tokens, intermediate)` of `x` `(tokens, hidden)`.
    ///
    /// # Errors
    /// `x` is not whole rows.
    pub fn scores(&self, x: &[f32]) -> Result<Vec<f32>> {
        let (hidden, ffn) = (self.hidden_size, self.bias.len());
        if !x.len().is_multiple_of(hidden) {
            let (expected, got) = (vec![hidden], vec![x.len()]);
            let name = "inputs of a predictor".to_owned();
            return Err(Error::Shape {
                name,
                expected,
                got,
            });
        }
        let mut all = vec![0.0; x.len() / hidden * ffn];
        let mut scratch = Scores::default();
        let chunks = x.chunks(CHUNK_TOKENS_MAX * hidden);
        for (values, all) in chunks.zip(all.chunks_mut(CHUNK_TOKENS_MAX * ffn)) {
            let tokens = values.len() / hidden;
            self.for_each_block(Rows { tokens, values }, &mut scratch, |first, scores| {
                for (r, scores) in scores.chunks(tokens).enumerate() {
                    for (token, score) in scores.iter().enumerate() {
                        all[token * ffn + first + r] = *score;
                    }
                }
            })?;
        }
        Ok(all)
    }

    /// Calls `wanted(neuron, tokens)` for each neuron, ascending, with bit `t` set where token `t` selects it.
    pub(crate) fn select(
        &self,
        x: Rows<'_>,
        scratch: &mut Scores,
        mut wanted: impl FnMut(u32, u128),
    ) -> Result<()> {
        self.for_each_block(x, scratch, |first, scores| {
            for (r, scores) in scores.chunks(x.tokens).enumerate() {
                let tokens = tokens_where(scores, |score| score >= self.threshold);
                wanted((first + r) as u32, tokens);
            }
        })
    }

    /// Calls `each(first neuron, scores)` with blocks of scores `(neurons, tokens)` of `x`, in order.
    fn for_each_block(
        &self,
        x: Rows<'_>,
        scratch: &mut Scores,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let Rows { tokens, values } = x;
        let Scores {
            query,
            query_by_token,
            values: scores,
            ..
        } = scratch;
        let query = match &self.matrices {
            Matrices::LowRank(pair) => pair.query(x, query, query_by_token)?,
            Matrices::Gate(gate) => {
                gate.count_multiplied();
                values
            }
        };
        let block = score_neurons(tokens);
        for (index, biases) in self.bias.chunks(block).enumerate() {
            let neurons = index * block..index * block + biases.len();
            let first = neurons.start;
            let scores = sized(scores, biases.len() * tokens);
            match &self.matrices {
                Matrices::LowRank(pair) => pair.scores(neurons, query, tokens, scores),
                Matrices::Gate(gate) => gate.scores(neurons, query, tokens, scores),
            }
            for (scores, bias) in scores.chunks_mut(tokens).zip(biases) {
                scores.iter_mut().for_each(|score| *score += bias);
            }
            each(first, scores);
        }
        Ok(())
    }
}

impl FlashFolder {
    /// Bits that a weight of layer `index`'s predictor is stored in; `None` where there are no predictors or no such
    /// layer.
    ///
    /// # Errors
    /// The predictors are unusable, or their tensor is missing or of another shape than the layer asks for.
    pub fn predictor_bits(&self, index: usize) -> Result<Option<usize>> {
        let (Some(found), Some(layer)) = (self.predictors()?, self.manifest().layers.get(index))
        else {
            return Ok(None);
        };
        let bits = match found.form {
            PredictorForm::LowRank => {
                let extent = tensor_extent(self, &layer.predictor_tensor(PredictorPart::Up))?;
                8 * extent.dtype.size_bytes()
            }
            PredictorForm::Gate => packed_bits(self, layer)?.count(),
        };
        Ok(Some(bits))
    }

    /// The highest rank of the predictors' low-rank pairs; 0 where there is none. What says that it is one and has not a
    /// pair's shape is refused when it is loaded.
    pub(crate) fn predictor_rank_max(&self) -> usize {
        let rank = |layer: &FfnLayer| {
            let extent = self.extent(&layer.predictor_tensor(PredictorPart::Down))?;
            match extent.shape[..] {
                [rank, hidden] if hidden == layer.hidden_size => Some(rank),
                _ => None,
            }
        };
        self.manifest()
            .layers
            .iter()
            .filter_map(rank)
            .max()
            .unwrap_or(0)
    }

    /// Rank of layer `index`'s low-rank predictor, by the header of its file; `None` where there is no such predictor or no
    /// such layer.
    ///
    /// # Errors
    /// The predictors are unusable, or their tensor is missing.
    pub fn predictor_rank(&self, index: usize) -> Result<Option<usize>> {
        match (self.predictors()?, self.manifest().layers.get(index)) {
            (Some(found), Some(layer)) if found.form == PredictorForm::LowRank => {
                rank(self, layer).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// The tokens of whose values `wanted` holds, a bit each.
pub(crate) fn tokens_where(values: &[f32], wanted: impl Fn(f32) -> bool) -> u128 {
    let tokens = values
        .iter()
        .enumerate()
        .filter(|(_, value)| wanted(**value));
    tokens.fold(0, |bits, (token, _)| bits | 1 << token)
}

/// A vector of `len` f32 values, each of them finite: one that is not would leave its neuron out, or in, silently.
pub(crate) fn finite_values(folder: &FlashFolder, name: &str, len: usize) -> Result<Vec<f32>> {
    expect_tensor(folder, name, &[StoredDtype::F32], &[len])?;
    let values = Matrix::load(folder, name, &[len], false)?.to_f32()?;
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(predictor_error(
            folder,
            format!("tensor {name}: value {at} is {}", values[at]),
        )),
    }
}

/// Refuses a tensor that has none of `dtypes`, or another shape; gives its dtype.
pub(crate) fn expect_tensor(
    folder: &FlashFolder,
    name: &str,
    dtypes: &[StoredDtype],
    shape: &[usize],
) -> Result<StoredDtype> {
    let got = tensor_extent(folder, name)?;
    if dtypes.contains(&got.dtype) && got.shape == shape {
        return Ok(got.dtype);
    }
    let dtypes: Vec<String> = dtypes.iter().map(StoredDtype::to_string).collect();
    let (dtype, got, dtypes) = (got.dtype, &got.shape, dtypes.join(", "));
    let reason = format!("tensor {name} is {dtype} {got:?}, expected {dtypes} {shape:?}");
    Err(predictor_error(folder, reason))
}

/// Where a tensor of a predictor lies, and what it says it is.
pub(crate) fn tensor_extent<'a>(folder: &'a FlashFolder, name: &str) -> Result<&'a TensorExtent> {
    let missing = || predictor_error(folder, format!("tensor {name} is missing"));
    folder.extent(name).ok_or_else(missing)
}

/// What is wrong with the file of predictors.
pub(crate) fn predictor_error(folder: &FlashFolder, reason: String) -> Error {
    let path = folder.predictors_path().unwrap_or(folder.path()).to_owned();
    Error::Folder { path, reason }
}
