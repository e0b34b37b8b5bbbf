//! Neurons by the size of what a dense part of the layer gives: what dip is measured against.
//!
//! `PruneGate`, `PruneUp` and `PruneGlu` keep the neurons of each token's largest |act(gate)|, |up| or |act(gate) * up|; `Cats` keeps those whose
//! |act(gate)| is above a threshold of the layer (Lee et al., 2024), of which there are as many as wanted on average.
//!
//! Whatever decides is multiplied in whole, so the neurons kept are what is left of the density. The layer is read in whole to
//! know them: these are yardsticks of quality, not of speed.
//!
//! Not here: the sizes' order (`dip`), the streaming of records (`records`).

use std::sync::OnceLock;

use crate::dip::{keep_largest, DipOptions, MaskScratch};
use crate::error::{Error, Result};
use crate::neurons::{LayerNeurons, Rows};
use crate::selection::Selection;
use crate::selector_kind::SelectorKind;
use crate::workspace::{sized, Scores};

/// Who is kept in one layer.
pub(crate) struct Pruning {
    by: By,
    /// Matrices that decide.
    in_whole: u64,
    /// Of the layer's neurons; above 0.
    share: f64,
    /// Of `Cats`: set by the first tokens that the layer sees.
    threshold: Option<OnceLock<f32>>,
}

/// A threshold that every size is above.
const KEEPS_ALL: f32 = -1.0;

/// Whose size counts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Gate,
    Up,
    Glu,
}

impl Pruning {
    /// The pruning `kind` of a layer. Without a gate there is but one: by the size of the activation.
    pub(crate) fn new(kind: SelectorKind, options: DipOptions, is_gated: bool) -> Result<Self> {
        options.check(kind)?;
        let refuse = |reason: String| {
            Err(Error::Selector {
                selector: kind.name(),
                reason,
            })
        };
        let by = match kind {
            SelectorKind::PruneUp => By::Up,
            SelectorKind::PruneGlu => By::Glu,
            _ => By::Gate,
        };
        if !is_gated && by != By::Glu {
            return refuse(
                "the model's FFN has no gate; prune-glu goes by what its activation gives".into(),
            );
        }
        let matrices = 2 + u64::from(is_gated);
        let in_whole = match (is_gated, by) {
            (true, By::Glu) => 2,
            _ => 1,
        };
        let (matrices, dense) = (matrices as f64, in_whole as f64);
        let share = (matrices * options.density - dense) / (matrices - dense);
        if share <= 0.0 {
            return refuse(format!(
                "density is {:?}, and what decides is {:.3} of the FFN already: it must be more",
                options.density,
                dense / matrices
            ));
        }
        let threshold = (kind == SelectorKind::Cats).then(OnceLock::new);
        Ok(Self {
            by,
            in_whole,
            share,
            threshold,
        })
    }

    /// How many of the layer's matrices are multiplied in whole to choose.
    pub(crate) fn matrices_in_whole(&self) -> u64 {
        self.in_whole
    }

    /// Puts the neurons that the tokens of `x` keep into `selection`.
    pub(crate) fn select(
        &self,
        neurons: &LayerNeurons,
        x: Rows<'_>,
        scores: &mut Scores,
        selection: &mut Selection,
    ) -> Result<()> {
        let width = neurons.layer.intermediate_size;
        self.measure(neurons, x, scores)?;
        let sizes = Rows {
            tokens: x.tokens,
            values: &scores.sizes[..x.tokens * width],
        };
        let Some(threshold) = &self.threshold else {
            let count = ((self.share * width as f64) as usize).max(1);
            keep_largest(
                sizes,
                width,
                count,
                |_, size| size,
                &mut scores.mask,
                selection,
            );
            return Ok(());
        };
        let known = threshold.get().copied();
        let first = || {
            let quantile = self.quantile(sizes.values)?;
            Some(*threshold.get_or_init(|| quantile))
        };
        // With nothing to go by yet all stay, and what is wrong stays visible.
        let threshold = known.or_else(first).unwrap_or(KEEPS_ALL);
        selection.clear();
        for neuron in 0..width {
            let of_neuron = sizes.values[neuron..].iter().step_by(width).enumerate();
            // In this order a NaN is above all others, and stays visible.
            let kept = of_neuron.filter(|(_, value)| value.abs().total_cmp(&threshold).is_gt());
            let wanted_by = kept.fold(0, |bits, (token, _)| bits | 1 << token);
            selection.push(neuron as u32, wanted_by);
        }
        Ok(())
    }

    /// Fills `scores.sizes` `(tokens, intermediate_size)` with the values whose sizes count.
    fn measure(&self, neurons: &LayerNeurons, x: Rows<'_>, scores: &mut Scores) -> Result<()> {
        let (width, stride) = (neurons.layer.intermediate_size, neurons.layer.stride_bytes);
        let Scores {
            values: gate,
            up,
            sizes,
            ..
        } = scores;
        let sizes = sized(sizes, x.tokens * width);
        neurons.for_each_range(|range, bytes| {
            let record = |r: usize| &bytes[r * stride..(r + 1) * stride];
            let id = |r: usize| neurons.records.neuron_of(range.start + r) as u32;
            let count = range.len();
            if self.by != By::Up {
                neurons.deciding(count, id, record, x, gate);
                gate[..count * x.tokens]
                    .iter_mut()
                    .for_each(|gate| *gate = neurons.activation.apply(*gate));
            }
            let has_up = self.by == By::Up || (self.by == By::Glu && neurons.layout.gated);
            if has_up {
                neurons.up_factors(count, id, record, x, up);
            }
            for at in 0..count * x.tokens {
                let (r, token) = (at / x.tokens, at % x.tokens);
                sizes[token * width + id(r) as usize] = match (self.by, has_up) {
                    (By::Up, _) => up[at],
                    (By::Glu, true) => gate[at] * up[at],
                    (By::Gate | By::Glu, _) => gate[at],
                };
            }
            Ok(())
        })
    }

    /// What all but the kept share of `values` are at most, by size; of those that are numbers.
    fn quantile(&self, values: &[f32]) -> Option<f32> {
        let numbers = values.iter().filter(|value| !value.is_nan());
        let mut sizes: Vec<f32> = numbers.map(|value| value.abs()).collect();
        if sizes.is_empty() {
            return None;
        }
        let below = ((1.0 - self.share) * sizes.len() as f64) as usize;
        Some(match below.checked_sub(1) {
            None => KEEPS_ALL,
            Some(last) => *sizes.select_nth_unstable_by(last, f32::total_cmp).1,
        })
    }
}

/// Bytes that its scratch grows to for `tokens` tokens: sizes, a copy of them for a threshold, and gate and up of a range.
pub(crate) fn pruning_workspace_bytes(tokens: usize, intermediate_size: usize) -> u64 {
    let mask = MaskScratch::bytes(intermediate_size);
    (4 * 4 * tokens * intermediate_size + mask) as u64
}
