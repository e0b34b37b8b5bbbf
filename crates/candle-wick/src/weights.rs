//! Which weights are in DRAM: streamable matrices as far as they fit, then slots shared out by need.
//!
//! Not here: the rest of the budget (`budget`).

use wick_format::{ColumnKind, FfnLayer};

use crate::budget::ModelNeeds;
use crate::column_cache::COLUMN_SLOTS_MIN;
use crate::folder::FlashFolder;
use crate::neuron_cache::{NeuronCache, PASS_NEURONS};
use crate::predictors::PredictorMetadata;
use crate::selector_kind::SelectorKind;

/// Records that share a cache of slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached {
    /// How many there are.
    pub(crate) count: usize,
    /// What a slot for one takes.
    pub(crate) stride_bytes: usize,
    /// The smallest number of slots to work with: one pass.
    pub(crate) slots_min: usize,
}

impl Cached {
    fn neurons(layer: &FfnLayer) -> Self {
        Self {
            count: layer.intermediate_size,
            stride_bytes: layer.stride_bytes,
            slots_min: layer.intermediate_size.min(PASS_NEURONS),
        }
    }

    fn columns(layer: &FfnLayer, kind: ColumnKind) -> Self {
        let count = layer.column_count(kind);
        let layout = layer.column_layout(kind);
        Self {
            count,
            stride_bytes: layout.map_or(0, |layout| layout.stride_bytes),
            slots_min: count.min(COLUMN_SLOTS_MIN),
        }
    }

    /// What has a cache: the neurons of each layer; or the down columns of each, and then the channels of each.
    pub(crate) fn of(folder: &FlashFolder, selector: SelectorKind) -> Vec<Self> {
        let layers = &folder.manifest().layers;
        if !selector.reads_columns(folder) {
            return layers.iter().map(Self::neurons).collect();
        }
        let kinds = [ColumnKind::Down, ColumnKind::Channel];
        let of_kind = |kind| layers.iter().map(move |layer| Self::columns(layer, kind));
        kinds.into_iter().flat_map(of_kind).collect()
    }

    /// Bytes of `slots` slots.
    pub(crate) fn slot_bytes(&self, slots: usize) -> u64 {
        slots as u64 * self.stride_bytes as u64
    }

    /// Checksums and cache books.
    pub(crate) fn books_bytes(&self) -> u64 {
        NeuronCache::bookkeeping_bytes(self.count, self.count) + 4 * self.count as u64
    }
}

/// Bytes of so many slots of each cache.
pub(crate) fn all_slot_bytes(caches: &[Cached], slots: &[usize]) -> u64 {
    let pairs = caches.iter().zip(slots);
    pairs.map(|(cached, slots)| cached.slot_bytes(*slots)).sum()
}

/// What is in DRAM of the streamable matrices and the slots.
pub(crate) struct Weights {
    pub(crate) resident_bytes: u64,
    pub(crate) streamed: Vec<String>,
    /// Of each cache.
    pub(crate) slots: Vec<usize>,
    pub(crate) slot_bytes: u64,
}

/// Bytes of the smallest number of slots in every cache.
pub(crate) fn slots_floor_bytes(caches: &[Cached]) -> u64 {
    let slots = caches
        .iter()
        .map(|cached| cached.slot_bytes(cached.slots_min));
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

/// Each cache's need for slots, relative to the others': what 5 tokens select, where predictors tell, or else the same share
/// of each.
pub(crate) fn slots_need(
    folder: &FlashFolder,
    selector: SelectorKind,
    caches: &[Cached],
) -> Vec<f64> {
    let layers = &folder.manifest().layers;
    match (selector.form(), folder.predictors()) {
        (Some(_), Ok(Some(PredictorMetadata { union_fraction, .. }))) => layers
            .iter()
            .zip(union_fraction)
            .map(|(layer, union)| {
                layer.intermediate_size as f64 * f64::from(union.clamp(0.001, 1.0))
            })
            .collect(),
        _ => caches.iter().map(|cached| cached.count as f64).collect(),
    }
}

impl Weights {
    pub(crate) fn choose(
        caches: &[Cached],
        matrices: &[(String, u64)],
        budget: u64,
        need: &[f64],
    ) -> Self {
        let slots_floor = slots_floor_bytes(caches);
        let mut resident_bytes: u64 = matrices.iter().map(|(_, bytes)| bytes).sum();
        let mut streamed = Vec::new();
        for (name, bytes) in matrices {
            if resident_bytes + slots_floor <= budget {
                break;
            }
            resident_bytes -= bytes;
            streamed.push(name.clone());
        }
        let slots = share_slots(caches, budget - resident_bytes, need);
        Self {
            resident_bytes,
            streamed,
            slot_bytes: all_slot_bytes(caches, &slots),
            slots,
        }
    }
}

/// Shares `bytes` out: every cache its minimum, then the same multiple of its need as far as it has records.
fn share_slots(caches: &[Cached], bytes: u64, need: &[f64]) -> Vec<usize> {
    let slots_at = |level: f64| -> Vec<usize> {
        let slots = caches.iter().zip(need).map(|(cached, need)| {
            let wanted = (need * level).min(cached.count as f64) as usize;
            wanted.max(cached.slots_min)
        });
        slots.collect()
    };
    let fits = |slots: &[usize]| all_slot_bytes(caches, slots) <= bytes;
    let (mut low, mut high) = (0.0, 1.0);
    while !slots_at(high)
        .iter()
        .zip(caches)
        .all(|(slots, cached)| *slots == cached.count)
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
    for (index, cached) in caches.iter().enumerate() {
        slots[index] += 1;
        if slots[index] > cached.count || !fits(&slots) {
            slots[index] -= 1;
        }
    }
    slots
}
