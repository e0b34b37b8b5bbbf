//! What a predictor costs: the bytes of records that a token reads when predictor and slots share one memory.
//!
//! A predictor that knows more selects less, and takes more memory, which its layer's slots then lack. So ranks are compared at
//! one memory: the largest predictor of all and the slots for what it selects for five tokens, the paper's window. A
//! smaller predictor gives its bytes to slots. Multiplying, which a larger predictor also takes more of, is not counted.

use candle_wick::WINDOW_TOKENS;
use wick_format::FfnLayer;

use super::threshold::LayerQuality;

/// Bytes of a predictor of rank `rank`: two matrices of 16-bit numbers, a bias of 32-bit ones.
pub(super) fn predictor_bytes(layer: &FfnLayer, rank: usize) -> f64 {
    let (hidden, neurons) = (layer.hidden_size as f64, layer.intermediate_size as f64);
    2.0 * rank as f64 * (hidden + neurons) + 4.0 * neurons
}

/// A rank beyond which the pair is larger than the matrix it stands for.
pub(super) fn rank_max(layer: &FfnLayer) -> usize {
    let (hidden, neurons) = (layer.hidden_size as u64, layer.intermediate_size as u64);
    let rank = hidden.saturating_mul(neurons) / hidden.saturating_add(neurons).max(1);
    (rank as usize).max(1)
}

/// The memory of the comparison: the predictor of rank `rank`, and slots for its window.
pub(super) fn memory_bytes(layer: &FfnLayer, rank: usize, quality: &LayerQuality) -> f64 {
    predictor_bytes(layer, rank) + f64::from(quality.union_fraction) * layer.records_bytes() as f64
}

/// Bytes of records that a token reads with the predictor of rank `rank` and slots in the rest of `memory_bytes`.
pub(super) fn token_bytes(
    layer: &FfnLayer,
    rank: usize,
    quality: &LayerQuality,
    memory_bytes: f64,
) -> f64 {
    let records = layer.records_bytes() as f64;
    let slots = (memory_bytes - predictor_bytes(layer, rank)).max(0.0) / records.max(1.0);
    missed(quality, slots) * records
}

/// The share of the neurons that a token misses, where a share of `residency` has slots and they hold what was used last: on
/// straight lines between the windows that were measured.
fn missed(quality: &LayerQuality, residency: f64) -> f64 {
    if residency >= 1.0 {
        return 0.0;
    }
    let windows = (0..WINDOW_TOKENS.len()).map(|window| {
        let shares = &quality.windows;
        (
            f64::from(shares.union[window]),
            f64::from(shares.fresh[window]),
        )
    });
    let mut before = (0.0, f64::from(quality.selected_fraction));
    for (union, fresh) in windows {
        if union > residency {
            let part = (residency - before.0) / (union - before.0).max(f64::MIN_POSITIVE);
            return before.1 + part * (fresh - before.1);
        }
        before = (union, fresh);
    }
    before.1
}

#[cfg(test)]
mod tests {
    use super::super::example_layer::example_layer;
    use super::*;
    use candle_wick::WindowShares;

    fn quality(selected: f32) -> LayerQuality {
        let share = |window: usize| selected * (1.0 + window as f32 / 2.0);
        LayerQuality {
            selected_fraction: selected,
            union_fraction: share(2),
            windows: WindowShares {
                union: std::array::from_fn(share),
                fresh: std::array::from_fn(|window| selected / (2.0 + window as f32)),
            },
            ..LayerQuality::default()
        }
    }

    #[test]
    fn slots_hold_windows_and_what_is_outside_is_read() {
        let quality = quality(0.1);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(near(missed(&quality, 0.0), 0.1) && near(missed(&quality, 0.05), 0.075));
        assert!(near(missed(&quality, 0.1), 0.05));
        assert!(near(missed(&quality, 0.125), (0.05 + 0.1 / 3.0) / 2.0));
        assert!(near(missed(&quality, 0.9), 0.01) && missed(&quality, 1.0) == 0.0);
    }

    #[test]
    fn memory_given_to_a_predictor_is_taken_from_slots() {
        let layer = example_layer(30, 90);
        assert_eq!(rank_max(&layer), 30 * 90 / 120);
        let quality = quality(0.1);
        let memory = memory_bytes(&layer, 4, &quality);
        let costs = [1, 2, 4].map(|rank| token_bytes(&layer, rank, &quality, memory));
        assert!(costs[0] < costs[1] && costs[1] < costs[2], "{costs:?}");
    }
}
