//! Folders with random weights: whose shapes they have, and the history that they replay, made up from how active the
//! neurons of real models are.
//!
//! Not here: the history itself (`candle_wick::ActivityTrace`), what is expected of a real model (`activity`).

use anyhow::{Context, Result};
use candle_wick::{ActivityTrace, FlashFolder, TraceFigures};

/// Of the one history that is made up: whoever replays it sees the same.
const SEED: u64 = 5;

/// What is known of a model's activity, and from where.
pub(crate) struct Activity {
    pub(crate) figures: TraceFigures,
    pub(crate) source: &'static str,
}

/// The paper's figures for OPT-6.7B: 3.3 % truly active for about 10 % selected, the union of five tokens 24 % of the
/// FFN, 2.4 % new for each token. Falcon and Persimmon are close to it.
const OPT: Activity = Activity {
    figures: TraceFigures {
        selected: 0.10,
        window_tokens: 5,
        union: 0.24,
        fresh: 0.024,
    },
    source: "OPT 6.7B in \"LLM in a flash\", section 3.1 and figure 4",
};

/// FATReLU keeps more; the paper's window is two tokens.
const LLAMA: Activity = Activity {
    figures: TraceFigures {
        selected: 0.20,
        window_tokens: 2,
        union: 0.26,
        fresh: 0.05,
    },
    source: "assumed",
};

/// For a Phi-2 with ReLU.
const PHI: Activity = Activity {
    figures: TraceFigures {
        selected: 0.20,
        window_tokens: 4,
        union: 0.38,
        fresh: 0.05,
    },
    source: "assumed",
};

/// The activity to replay for a folder of this `model_type`.
pub(crate) fn activity(model_type: &str) -> &'static Activity {
    match model_type {
        "llama" | "sparsellama" => &LLAMA,
        "phi" => &PHI,
        _ => &OPT,
    }
}

/// Whose geometry the random weights of the folder have.
pub(crate) fn synthetic_name(folder: &FlashFolder) -> Result<Option<String>> {
    let config: serde_json::Value = serde_json::from_str(&folder.config_json()?)
        .context("config.json of a converted folder")?;
    let name = config.get(candle_wick_convert::synthetic::SYNTHETIC_KEY);
    Ok(name.and_then(|name| name.as_str()).map(str::to_owned))
}

/// The history that layers of the folder replay, as many neurons as the widest has: one set of figures for all layers, or one
/// for each.
pub(crate) fn made_up(folder: &FlashFolder, figures: &[TraceFigures]) -> ActivityTrace {
    let layers = folder.manifest().layers.iter();
    let widest = layers.map(|layer| layer.intermediate_size).max();
    ActivityTrace::by_layer(widest.unwrap_or(0), figures, SEED)
}
