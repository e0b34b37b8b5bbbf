//! The FFN of one layer over its columns.
//!
//! A step: choose of the inputs, add their columns of gate and up, activate, choose of the product, add its down
//! columns. Each choice has a cache of its own.
//!
//! Invariant: a step of several tokens gives each the bits that it would have alone; with `dip-ca`, where a token's choice
//! depends on what the one before has read, they go one by one.

use std::sync::{Arc, Mutex};

use wick_format::{ColumnKind, FfnLayer};

use super::mask::{cache_aware, keep_largest};
use super::options::Keep;
use crate::activation::Activation;
use crate::column_cache::{ColumnCache, ColumnCounts};
use crate::error::Result;
use crate::neurons::{optional_values, Rows};
use crate::predictor_kind::PredictorInput;
use crate::rows::add_bias;
use crate::selection::Selection;
use crate::selector_kind::SelectorKind;
use crate::stats::Clock;
use crate::var_builder::{lock, FlashVarBuilder};
use crate::workspace::{sized, Workspace, CHUNK_TOKENS_MAX};

/// Stands for a gamma of 0: what is in memory comes first, and the rest still by size.
const GAMMA_MIN: f32 = 1e-30;

/// One layer.
pub(crate) struct DipLayer {
    /// The layer's place in the manifest.
    pub(crate) index: usize,
    layer: FfnLayer,
    activation: Activation,
    /// Columns of gate and up, or of up alone.
    channels: ColumnCache,
    downs: ColumnCache,
    keep: Keep,
    /// Factor of values whose columns are not in memory; `None` where that does not count.
    gamma: Option<f32>,
    dense_prompt: bool,
    gate_bias: Option<Vec<f32>>,
    up_bias: Option<Vec<f32>>,
    down_bias: Option<Vec<f32>>,
    pub(crate) workspace: Arc<Mutex<Workspace>>,
}

impl DipLayer {
    /// The layer at `vb`, with the slots that its placement gives; the selector is one that goes by columns.
    pub(crate) fn load(
        vb: &FlashVarBuilder,
        index: usize,
        layer: FfnLayer,
        activation: Activation,
    ) -> Result<Self> {
        let (folder, placement) = (vb.folder(), vb.placement());
        let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
        let selector = placement.selector;
        selector.check(folder, activation)?;
        let dip = placement.dip;
        if selector.has_density() {
            dip.check(selector)?;
        }
        let keep = match selector {
            SelectorKind::Dip | SelectorKind::DipCa => {
                dip.keep(1 + usize::from(layer.gate.is_some()), hidden, ffn)
            }
            _ => Keep {
                channels: hidden,
                neurons: ffn,
            },
        };
        let columns = |kind| {
            let slots = placement.column_slots(kind, index);
            ColumnCache::whole(folder, &layer, kind, slots, placement)
        };
        Ok(Self {
            index,
            activation,
            channels: columns(ColumnKind::Channel)?,
            downs: columns(ColumnKind::Down)?,
            keep,
            gamma: (selector == SelectorKind::DipCa).then_some((dip.gamma as f32).max(GAMMA_MIN)),
            dense_prompt: dip.dense_prompt,
            gate_bias: optional_values(folder, &layer.gate_bias, ffn)?,
            up_bias: optional_values(folder, &layer.up_bias, ffn)?,
            down_bias: optional_values(folder, &layer.down_bias, hidden)?,
            workspace: vb.workspace().clone(),
            layer,
        })
    }

    pub(crate) fn hidden_size(&self) -> usize {
        self.layer.hidden_size
    }

    /// `y` of `x`, both `(tokens, hidden_size)`.
    pub(crate) fn forward_rows(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let hidden = self.layer.hidden_size;
        let work = &mut *lock(&self.workspace);
        let keeps_all = self.dense_prompt && work.is_prompt;
        let tokens = match self.gamma {
            Some(_) if !keeps_all => 1,
            _ => CHUNK_TOKENS_MAX,
        };
        let chunks = y.chunks_mut(tokens * hidden);
        for (values, y) in x.chunks(tokens * hidden).zip(chunks) {
            let x = Rows {
                tokens: values.len() / hidden,
                values,
            };
            self.step(x, keeps_all, y, work)?;
        }
        Ok(())
    }

    fn step(
        &self,
        x: Rows<'_>,
        keeps_all: bool,
        y: &mut [f32],
        work: &mut Workspace,
    ) -> Result<()> {
        if let Some(record) = work.recorder(PredictorInput::FfnInput) {
            record(self.index, x.values);
        }
        let keep = match keeps_all {
            true => Keep {
                channels: self.layer.hidden_size,
                neurons: self.layer.intermediate_size,
            },
            false => self.keep,
        };
        if self.gamma.is_some() {
            self.channels.begin_sequence(work.sequence);
            self.downs.begin_sequence(work.sequence);
        }
        let mut clock = Clock::start();
        let mut selection = work.selections.pop().unwrap_or_default();
        self.choose(&self.channels, x, keep.channels, work, &mut selection);
        clock.select();
        let counts = self.channels.multiply(&selection, x, work, &mut clock)?;
        self.count(ColumnKind::Channel, x.tokens, &selection, counts, work);
        // Taken out: the second product looks at them, and works in the rest.
        let mut products = std::mem::take(&mut work.up);
        self.activate(x.tokens, work, &mut products);
        let glu = Rows {
            tokens: x.tokens,
            values: &products[..x.tokens * self.layer.intermediate_size],
        };
        clock.compute();
        self.choose(&self.downs, glu, keep.neurons, work, &mut selection);
        if let Some(record) = &mut work.selection_recorder {
            selection.for_each_token(x.tokens, &mut work.positions, |neurons| {
                record(self.index, neurons);
            });
        }
        clock.select();
        let counts = self.downs.multiply(&selection, glu, work, &mut clock)?;
        self.count(ColumnKind::Down, x.tokens, &selection, counts, work);
        work.up = products;
        work.sums.write_to(y);
        add_bias(y, self.down_bias.as_deref());
        clock.compute();
        let stats = &mut work.stats[self.index];
        stats.tokens += x.tokens as u64;
        stats.add_times(&clock);
        work.selections.push(selection);
        Ok(())
    }

    /// Puts the `count` inputs of `columns` that each token of `x` keeps into `selection`.
    fn choose(
        &self,
        columns: &ColumnCache,
        x: Rows<'_>,
        count: usize,
        work: &mut Workspace,
        selection: &mut Selection,
    ) {
        let (width, scratch) = (columns.count(), &mut work.scores.mask);
        match self.gamma {
            None => keep_largest(x, width, count, |_, size| size, scratch, selection),
            Some(gamma) => {
                let state = columns.state();
                let weigh = |number: usize, magnitude: f32| {
                    cache_aware(magnitude, state.cache.contains(number as u32), gamma)
                };
                keep_largest(x, width, count, weigh, scratch, selection);
            }
        }
    }

    /// `act(gate) * up`, or `act(up)`, of the sums: `(tokens, intermediate_size)`.
    fn activate(&self, tokens: usize, work: &mut Workspace, products: &mut Vec<f32>) {
        let ffn = self.layer.intermediate_size;
        let width = self.channels.width();
        let sums = sized(&mut work.gate, tokens * width);
        work.sums.write_to(sums);
        let products = sized(products, tokens * ffn);
        for (sums, products) in sums.chunks_mut(width).zip(products.chunks_mut(ffn)) {
            if self.layer.gate.is_none() {
                add_bias(sums, self.up_bias.as_deref());
                for (product, up) in products.iter_mut().zip(&*sums) {
                    *product = self.activation.apply(*up);
                }
                continue;
            }
            let (gate, up) = sums.split_at_mut(ffn);
            add_bias(gate, self.gate_bias.as_deref());
            add_bias(up, self.up_bias.as_deref());
            for ((product, gate), up) in products.iter_mut().zip(&*gate).zip(&*up) {
                *product = self.activation.apply(*gate) * up;
            }
        }
    }

    /// Books what a product took, in weights: columns of the two kinds are of different lengths.
    fn count(
        &self,
        kind: ColumnKind,
        tokens: usize,
        selection: &Selection,
        counts: ColumnCounts,
        work: &mut Workspace,
    ) {
        let columns = match kind {
            ColumnKind::Channel => &self.channels,
            ColumnKind::Down => &self.downs,
        };
        let weights = columns.width() as u64;
        let stats = &mut work.stats[self.index];
        stats.neurons += (tokens * columns.count()) as u64 * weights;
        stats.multiply_adds += selection.selected_count() * weights;
        stats.selected += selection.selected_count() * weights;
        stats.active += (counts.hits + counts.misses) * weights;
        stats.hits += counts.hits * weights;
        stats.misses += counts.misses * weights;
        stats.bytes_read += counts.misses * columns.stride_bytes() as u64;
    }

    /// Forgets which columns are in DRAM.
    pub(crate) fn clear_cache(&self) {
        self.channels.state().clear();
        self.downs.state().clear();
    }
}
