//! A converted folder again, with its neurons in an order in which those that are read together lie together.
//!
//! 1. Of each layer, `misses` says what the tokens of a trace have to read; `arrange` makes orders from the first four
//!    fifths of them, `cost` prices them on the last fifth, and the cheapest is taken.
//! 2. `write` writes the folder: each record once, nothing else changed.
//!
//! Invariants:
//! - a layer is never put into an order that cost more than its neurons' own on tokens that it was not made from;
//! - the order of a reordered folder can be made anew from it: everything goes by the neurons' own numbers.
//!
//! Not here: reading such a folder (`candle-wick`), recording traces.

mod arrange;
mod cost;
mod friends;
mod misses;
mod together;
mod write;

use std::path::Path;

use candle_wick::{FlashFolder, LayerTrace, RecordedTrace, MANIFEST_FILE};
use wick_format::{FfnLayer, FileHasher, NeuronOrder, OrderOrigin};

use self::cost::ReadCost;
use self::misses::TokenSets;
use self::together::Together;
use self::write::Writer;
use crate::meter::Meter;
use crate::output::{hash_file, refuse_inside};
use crate::{ConvertError, ConvertProgress};

pub use self::arrange::Arrangement;
pub use self::friends::{friends, Friends, LayerFriends};

/// Counts up when the same folder and trace begin to give another order.
const REORDER_VERSION: u32 = 2;
/// Pairs of neurons in the sets that an order is made from, at most: what bounds the time for a layer.
const PAIRS_MAX: u64 = 1 << 30;
/// A trace of fewer tokens says nothing.
const TOKENS_MIN: usize = 10;

/// How to reorder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReorderOptions {
    /// Share of each layer's neurons that is in memory while the order is used: only the others are read.
    pub resident: f64,
}

impl Default for ReorderOptions {
    fn default() -> Self {
        // What the paper keeps of OPT 6.7B.
        Self { resident: 0.25 }
    }
}

/// What an order costs, a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct OrderCost {
    /// Requests.
    pub requests: f64,
    /// Bytes read, with those of gaps.
    pub bytes: f64,
}

/// What was found for one layer.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct LayerOrder {
    /// The order taken.
    pub arrangement: Arrangement,
    /// Neurons that a token misses.
    pub misses: f64,
    /// What each arrangement costs on the tokens that it was not made from.
    pub costs: Vec<(Arrangement, OrderCost)>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ReorderReport {
    /// Tokens of the trace.
    pub tokens: usize,
    /// A layer each.
    pub layers: Vec<LayerOrder>,
    /// Bytes written.
    pub bytes: u64,
}

/// Writes `model` into the folder `out`, its neurons in an order made from the trace `trace`.
///
/// `out` must not exist, or be empty, or hold what an earlier run with the same folder, trace and options has left, which
/// is taken up then.
///
/// # Errors
/// The trace is of another model or too short, the folder has records of columns or is damaged, `out` holds something else or cannot be written.
/// `model` is never changed, and `out` has no manifest then.
pub fn reorder(
    model: &FlashFolder,
    trace: &Path,
    out: &Path,
    options: &ReorderOptions,
    progress: &dyn Fn(ConvertProgress<'_>),
) -> Result<ReorderReport, ConvertError> {
    check_resident(trace, options.resident)?;
    let mut layers = model.manifest().layers.iter();
    if let Some(layer) = layers.find(|layer| layer.layout.has_columns()) {
        return Err(ConvertError::Unsupported {
            got: format!("layout {} to be reordered", layer.layout.name()),
            supported: "neuron, as `wick convert` writes it by default".into(),
        });
    }
    let recorded = RecordedTrace::open(trace).map_err(of_model)?;
    recorded.check_model(model.manifest()).map_err(of_model)?;
    if recorded.tokens() < TOKENS_MIN {
        let tokens = recorded.tokens();
        let problem = format!("has {tokens} tokens, an order needs {TOKENS_MIN} at least");
        return Err(ConvertError::checkpoint(trace, problem));
    }
    refuse_inside(model.path(), out)?;
    let trace_xxh3 = hash_file(trace, "trace", |_| {})?.xxh3;
    let origin = OrderOrigin {
        model_hash: model.manifest().neurons_hash().to_owned(),
        trace_xxh3,
    };
    let job = job_of(model, &origin, options)?;
    let writer = Writer::new(model, out, job)?;
    let meter = Meter::new(progress, writer.total_bytes());
    let mut layers = Vec::new();
    let mut orders = Vec::new();
    for (index, layer) in model.manifest().layers.iter().enumerate() {
        meter.add(0, &format!("order of layer {index}"));
        let trace = recorded.layer(index).map_err(of_model)?;
        let (found, order) = order_of(&trace, layer, options)?;
        layers.push(found);
        orders.push(order);
    }
    let bytes = writer.write(&orders, origin, &meter)?;
    Ok(ReorderReport {
        tokens: recorded.tokens(),
        layers,
        bytes,
    })
}

/// Refuses shares with which everything of a trace is read, or nothing.
fn check_resident(trace: &Path, resident: f64) -> Result<(), ConvertError> {
    if resident > 0.0 && resident < 1.0 {
        return Ok(());
    }
    let problem =
        format!("says what to read with a resident share above 0 and below 1, not {resident}");
    Err(ConvertError::checkpoint(trace, problem))
}

fn of_model(error: candle_wick::Error) -> ConvertError {
    candle_wick_models::Error::from(error).into()
}

/// What the same folder, trace and options have in common, and no others.
fn job_of(
    folder: &FlashFolder,
    origin: &OrderOrigin,
    options: &ReorderOptions,
) -> Result<String, ConvertError> {
    let manifest = hash_file(&folder.path().join(MANIFEST_FILE), MANIFEST_FILE, |_| {})?;
    let mut hasher = FileHasher::new();
    for line in [
        format!("reorder {REORDER_VERSION}\n"),
        format!("manifest {}\n", manifest.xxh3),
        format!("trace {}\n", origin.trace_xxh3),
        format!("resident {}\n", options.resident),
    ] {
        hasher.update(line.as_bytes());
    }
    Ok(hasher.hex())
}

/// Slots that `resident` of a layer's neurons take.
fn slots_of(neuron_count: usize, resident: f64) -> usize {
    (neuron_count as f64 * resident).round() as usize
}

/// The order that costs least, and what the others cost.
fn order_of(
    trace: &LayerTrace,
    layer: &FfnLayer,
    options: &ReorderOptions,
) -> Result<(LayerOrder, NeuronOrder), ConvertError> {
    let width = trace.intermediate_size();
    let sets = TokenSets::misses(trace, slots_of(width, options.resident));
    let tokens = sets.tokens();
    let learnt = tokens / 5 * 4;
    let misses = Together::new(thinned(sets.of_tokens(0..learnt)), width);
    let mut best: Option<(u64, Arrangement, NeuronOrder)> = None;
    let mut costs = Vec::new();
    for arrangement in Arrangement::ALL {
        let order = NeuronOrder::new(&layer.order_tensor(), arrangement.order(&misses))
            .map_err(ConvertError::format(Path::new(&layer.file)))?;
        let record_of = |neuron: u32| order.record_of(neuron as usize);
        let tested = sets.of_tokens(learnt..tokens);
        let cost = ReadCost::of(tested, record_of, layer.stride_bytes);
        costs.push((arrangement, cost.a_token(tokens - learnt)));
        if best.as_ref().is_none_or(|best| cost.weight() < best.0) {
            best = Some((cost.weight(), arrangement, order));
        }
    }
    let (_, arrangement, order) = best.expect("there are arrangements");
    let found = LayerOrder {
        arrangement,
        misses: sets.entries() as f64 / tokens.max(1) as f64,
        costs,
    };
    Ok((found, order))
}

/// Every so manieth set, so that they have at most [`PAIRS_MAX`] pairs.
fn thinned<'a>(sets: impl Iterator<Item = &'a [u32]>) -> Vec<&'a [u32]> {
    let sets: Vec<&[u32]> = sets.collect();
    let pairs: u64 = sets.iter().map(|set| (set.len() as u64).pow(2)).sum();
    let step = pairs.div_ceil(PAIRS_MAX).max(1) as usize;
    sets.into_iter().step_by(step).collect()
}
