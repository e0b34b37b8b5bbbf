//! How active a model's neurons are expected to be, and who says so.
//!
//! The file of its predictors knows best: what they selected was measured when they were fitted, by the length of a
//! window of tokens. An `lru` cache of some size holds what the last so many tokens used, which leads to that window and
//! to what a token finds outside of it. `lfu` keeps what no window tells; by how much less it reads is a ratio that was
//! measured on one model's trace, and others may differ. Random weights have the figures of the trace that they replay.

use anyhow::Result;
use candle_wick::{
    BudgetPlan, CachePolicy, FlashFolder, PredictorMetadata, SelectorKind, TraceFigures,
    WindowShares, WINDOW_TOKENS,
};

use crate::synthetic::{activity, synthetic_name};

/// New neurons of a token beside all that it selects, where nobody measured it: the paper's figures for OPT 6.7B.
const FRESH_OF_SELECTED: f64 = 0.24;
/// What `lfu` saves of the misses of `lru`, for each neuron's share that is resident, up to half of them; from there on it
/// stays. A line through the measured ratios of opt-9m with its predictors (docs/bench/window.md).
const LFU_SAVES: f64 = 0.38;

/// What is expected, and the sentence that says where it is from.
pub(crate) struct Expected {
    /// Of all layers together; `None` where all neurons are used, or only running would tell.
    pub(crate) figures: Option<TraceFigures>,
    /// Of each layer with its own slots, where that was measured; empty where not.
    pub(crate) by_layer: Vec<TraceFigures>,
    /// Share of the neurons that a token misses with the planned slots, where that was measured.
    pub(crate) missed: Option<f64>,
    pub(crate) source: String,
}

impl Expected {
    /// Of the model in `folder` with the slots of `plan` under `policy`.
    pub(crate) fn of(folder: &FlashFolder, plan: &BudgetPlan, policy: CachePolicy) -> Result<Self> {
        let nothing = |source: &str| Self {
            figures: None,
            by_layer: Vec::new(),
            missed: None,
            source: source.to_owned(),
        };
        match plan.selector {
            SelectorKind::Dense => return Ok(nothing("all neurons are used")),
            SelectorKind::LowRank | SelectorKind::Gate => {}
            _ => return Ok(nothing("measured on the first layers, on tokens at random")),
        }
        if synthetic_name(folder)?.is_some() {
            let activity = activity(&folder.manifest().model_type);
            return Ok(Self {
                figures: Some(activity.figures),
                by_layer: Vec::new(),
                missed: None,
                source: format!("replayed trace with the figures of {}", activity.source),
            });
        }
        let Some(predictors) = folder.predictors()? else {
            return Ok(nothing("unknown"));
        };
        let mean = |values: &[f32]| f64::from(PredictorMetadata::mean(values)).clamp(0.0, 1.0);
        let selected = mean(&predictors.selected_fraction);
        Ok(match &predictors.windows {
            Some(windows) => {
                // An eager window keeps less than the slots could.
                let is_known = plan.window_tokens.is_none();
                let of_policy = match policy {
                    CachePolicy::Lfu if is_known => ", for lru; what lfu saves is that of another text",
                    _ => "",
                };
                Self {
                    figures: Some(at_residency(windows, selected, slot_share(folder, plan))),
                    by_layer: by_layer(predictors, windows, folder, plan),
                    missed: is_known.then(|| missed(windows, selected, folder, plan, policy)),
                    source: format!("measured when the predictors were made{of_policy}"),
                }
            }
            None => Self {
                figures: Some(TraceFigures {
                    selected,
                    window_tokens: 5,
                    union: mean(&predictors.union_fraction),
                    fresh: FRESH_OF_SELECTED * selected,
                }),
                by_layer: Vec::new(),
                missed: None,
                source: format!(
                    "unknown: fitted before it was measured, {:.0} % of the selected are taken for new, as in OPT 6.7B; \
                     `wick predictor fit` measures it",
                    100.0 * FRESH_OF_SELECTED
                ),
            },
        })
    }
}

/// Slots for each neuron.
fn slot_share(folder: &FlashFolder, plan: &BudgetPlan) -> f64 {
    let layers = folder.manifest().layers.iter();
    let neurons: usize = layers.map(|layer| layer.intermediate_size).sum();
    plan.slots_per_layer.iter().sum::<usize>() as f64 / neurons.max(1) as f64
}

/// The figures of each layer over the window that its own slots hold.
fn by_layer(
    predictors: &PredictorMetadata,
    windows: &[WindowShares],
    folder: &FlashFolder,
    plan: &BudgetPlan,
) -> Vec<TraceFigures> {
    let layers = folder.manifest().layers.iter();
    let residency = layers
        .zip(&plan.slots_per_layer)
        .map(|(layer, slots)| *slots as f64 / layer.intermediate_size.max(1) as f64);
    let of_layer = windows
        .iter()
        .zip(&predictors.selected_fraction)
        .zip(residency);
    of_layer
        .map(|((window, selected), residency)| {
            let selected = f64::from(*selected).clamp(0.0, 1.0);
            at_residency(std::slice::from_ref(window), selected, residency)
        })
        .collect()
}

/// What is outside of the window that each layer's own slots hold, less what `policy` saves of it, as a share of all
/// neurons.
fn missed(
    layers: &[WindowShares],
    selected: f64,
    folder: &FlashFolder,
    plan: &BudgetPlan,
    policy: CachePolicy,
) -> f64 {
    let widths = folder
        .manifest()
        .layers
        .iter()
        .map(|layer| layer.intermediate_size);
    let (mut missed, mut neurons) = (0.0, 0.0);
    for ((layer, slots), width) in layers.iter().zip(&plan.slots_per_layer).zip(widths) {
        neurons += width as f64;
        // A slot for each neuron, and nothing is read.
        if *slots < width {
            let residency = *slots as f64 / width as f64;
            let fresh = at_residency(std::slice::from_ref(layer), selected, residency).fresh;
            missed += width as f64 * fresh * of_lru(policy, residency);
        }
    }
    missed / f64::max(neurons, 1.0)
}

/// Misses of `policy` for each of `lru`, where a share of `residency` of the neurons has a slot.
fn of_lru(policy: CachePolicy, residency: f64) -> f64 {
    match policy {
        CachePolicy::Lru => 1.0,
        CachePolicy::Lfu => 1.0 - LFU_SAVES * residency.clamp(0.0, 0.5),
    }
}

/// The figures over the window whose neurons take up a share of `residency`: the mean over all layers, which share
/// slots out so that their windows are about alike.
fn at_residency(layers: &[WindowShares], selected: f64, residency: f64) -> TraceFigures {
    let mean = |of: &dyn Fn(&WindowShares) -> f32| -> f64 {
        layers.iter().map(|layer| f64::from(of(layer))).sum::<f64>() / layers.len().max(1) as f64
    };
    let at = |window: usize| {
        let union = mean(&|layer| layer.union[window]);
        (union, mean(&|layer| layer.fresh[window]))
    };
    let last = WINDOW_TOKENS.len() - 1;
    let after = (0..=last).find(|&window| at(window).0 > residency);
    let (window, union, fresh) = match after {
        None => (WINDOW_TOKENS[last] as f64, at(last).0, at(last).1),
        Some(0) => (1.0, at(0).0, at(0).1),
        Some(after) => {
            let ((less, more), before) = ((at(after - 1), at(after)), after - 1);
            let part = (residency - less.0) / (more.0 - less.0).max(1e-9);
            // Windows double from one to the next, and what is outside of them falls by a like factor each time.
            let fresh = less.1.max(1e-9).powf(1.0 - part) * more.1.max(1e-9).powf(part);
            (WINDOW_TOKENS[before] as f64 * part.exp2(), residency, fresh)
        }
    };
    TraceFigures {
        selected,
        window_tokens: (window.round() as usize).max(1),
        union,
        fresh,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_holds_the_window_that_fits_into_it() {
        let union = [0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8];
        let fresh = [0.05, 0.04, 0.032, 0.02, 0.01, 0.008, 0.004, 0.002, 0.001];
        let layers = [WindowShares { union, fresh }; 2];
        let at = |residency| at_residency(&layers, 0.1, residency);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert_eq!((at(0.05).window_tokens, at(0.301).window_tokens), (1, 8));
        let between = at(0.45);
        assert_eq!(between.window_tokens, 23);
        assert!(near(between.union, 0.45) && between.fresh < 0.01 && between.fresh > 0.008);
        let beyond = at(0.95);
        assert_eq!(beyond.window_tokens, 256);
        assert!(near(beyond.fresh, f64::from(0.001f32)));
    }

    #[test]
    fn lfu_reads_as_much_less_as_was_measured() {
        // Resident, and read for a token with lru and lfu (docs/bench/window.md, lowrank), in percent.
        for (resident, lru, lfu) in [
            (15.0, 8.09, 7.73),
            (25.0, 5.98, 5.47),
            (40.0, 3.76, 3.16),
            (50.0, 2.59, 2.10),
            (75.0, 0.64, 0.53),
        ] {
            let ratio = of_lru(CachePolicy::Lfu, resident / 100.0);
            assert!((ratio - lfu / lru).abs() < 0.02, "{resident}: {ratio}");
            assert_eq!(of_lru(CachePolicy::Lru, resident / 100.0), 1.0);
        }
    }
}
