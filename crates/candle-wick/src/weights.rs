//! Which weights are in DRAM: streamable matrices as far as they fit, then slots shared out by need.
//!
//! Not here: the rest of the budget (`budget`).

use wick_format::FfnLayer;

use crate::budget::ModelNeeds;
use crate::folder::FlashFolder;
use crate::neuron_cache::PASS_NEURONS;
use crate::predictors::PredictorMetadata;
use crate::selector_kind::SelectorKind;

/// What is in DRAM of the streamable matrices and the slots.
pub(crate) struct Weights {
    pub(crate) resident_bytes: u64,
    pub(crate) streamed: Vec<String>,
    pub(crate) slots_per_layer: Vec<usize>,
    pub(crate) slot_bytes: u64,
}

/// The smallest number of slots a layer works with: one pass.
fn slots_min(layer: &FfnLayer) -> usize {
    layer.intermediate_size.min(PASS_NEURONS)
}

/// Bytes of the smallest number of slots in every layer.
pub(crate) fn slots_floor_bytes(layers: &[FfnLayer]) -> u64 {
    let slots = layers
        .iter()
        .map(|layer| (slots_min(layer) * layer.stride_bytes) as u64);
    slots.sum()
}

/// The matrices that may stay on flash, those to be given up first in front.
pub(crate) fn streamable(folder: &FlashFolder, needs: &ModelNeeds) -> Vec<(String, u64)> {
    let mut matrices: Vec<(String, u64)> = folder
        .resident_tensors()
        // An untied embedding is always read by rows.
        .filter(|(name, _)| **name != needs.embedding || needs.embedding == needs.head)
        .filter(|(_, extent)| extent.shape.len() >= 2)
        .map(|(name, extent)| (name.clone(), extent.len_bytes))
        .collect();
    matrices.sort_by_key(|(name, bytes)| (*name != needs.head, std::cmp::Reverse(*bytes)));
    matrices
}

/// Each layer's need for slots, relative to the others': what 5 tokens select, where predictors tell.
pub(crate) fn slots_need(folder: &FlashFolder, selector: SelectorKind) -> Vec<f64> {
    let layers = &folder.manifest().layers;
    match (selector.form(), folder.predictors()) {
        (Some(_), Ok(Some(PredictorMetadata { union_fraction, .. }))) => layers
            .iter()
            .zip(union_fraction)
            .map(|(layer, union)| {
                layer.intermediate_size as f64 * f64::from(union.clamp(0.001, 1.0))
            })
            .collect(),
        _ => layers
            .iter()
            .map(|layer| layer.intermediate_size as f64)
            .collect(),
    }
}

impl Weights {
    pub(crate) fn choose(
        layers: &[FfnLayer],
        matrices: &[(String, u64)],
        budget: u64,
        need: &[f64],
    ) -> Self {
        let slots_floor = slots_floor_bytes(layers);
        let mut resident_bytes: u64 = matrices.iter().map(|(_, bytes)| bytes).sum();
        let mut streamed = Vec::new();
        for (name, bytes) in matrices {
            if resident_bytes + slots_floor <= budget {
                break;
            }
            resident_bytes -= bytes;
            streamed.push(name.clone());
        }
        let slots_per_layer = share_slots(layers, budget - resident_bytes, need);
        let slots = layers.iter().zip(&slots_per_layer);
        let slot_bytes = slots
            .map(|(layer, slots)| (slots * layer.stride_bytes) as u64)
            .sum();
        Self {
            resident_bytes,
            streamed,
            slots_per_layer,
            slot_bytes,
        }
    }
}

/// Shares `bytes` out: every layer its minimum, then the same multiple of its need as far as it has neurons.
fn share_slots(layers: &[FfnLayer], bytes: u64, need: &[f64]) -> Vec<usize> {
    let slots_at = |level: f64| -> Vec<usize> {
        let slots = layers.iter().zip(need).map(|(layer, need)| {
            let wanted = (need * level).min(layer.intermediate_size as f64) as usize;
            wanted.max(slots_min(layer))
        });
        slots.collect()
    };
    let fits = |slots: &[usize]| {
        let taken = layers
            .iter()
            .zip(slots)
            .map(|(layer, slots)| (slots * layer.stride_bytes) as u64);
        taken.sum::<u64>() <= bytes
    };
    let (mut low, mut high) = (0.0, 1.0);
    while !slots_at(high)
        .iter()
        .zip(layers)
        .all(|(s, l)| *s == l.intermediate_size)
    {
        high *= 2.0;
    }
    if fits(&slots_at(high)) {
        return slots_at(high);
    }
    for _ in 0..64 {
        let middle = (low + high) / 2.0;
        if fits(&slots_at(middle)) {
            low = middle;
        } else {
            high = middle;
        }
    }
    let mut slots = slots_at(low);
    // What rounding left over, a slot at a time.
    for (index, layer) in layers.iter().enumerate() {
        slots[index] += 1;
        if slots[index] > layer.intermediate_size || !fits(&slots) {
            slots[index] -= 1;
        }
    }
    slots
}
