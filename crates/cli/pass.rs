//! One forward pass, measured: a decoded token, or a prompt.
//!
//! Times of a token: I/O is waiting for reads, those of streamed matrices included, memory is keeping the cache's books,
//! compute is everything else. Times are milliseconds.
//!
//! Not here: which tokens, and what becomes of the figures (`bench::row`, `front`).

use std::time::Duration;

use anyhow::Result;
use candle_wick::{FfnStats, FlashFolder, MatrixStats};
use candle_wick_models::{ForwardTimes, LoadedModel};
use serde::{Deserialize, Serialize};

/// What a pass took, in whole and in parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    pub(crate) figures: TokenFigures,
    /// Layers and head apart.
    pub(crate) times: ForwardTimes,
    /// All layers' FFNs together.
    pub(crate) ffn: FfnStats,
    /// Waiting for streamed matrices of layers.
    pub(crate) layer_matrix_io: Duration,
}

/// What one token took, or a prompt.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TokenFigures {
    pub(crate) total_ms: f64,
    /// Waiting for reads.
    pub(crate) io_ms: f64,
    /// From handing reads out until they were waited for.
    pub(crate) in_flight_ms: f64,
    pub(crate) memory_ms: f64,
    /// Choosing neurons: part of compute.
    pub(crate) select_ms: f64,
    /// Products of the FFNs: part of compute.
    pub(crate) ffn_ms: f64,
    /// From the device, with what was read beyond what was needed.
    pub(crate) bytes_read: f64,
    /// Matrices that are not resident.
    pub(crate) streamed_bytes: f64,
    /// Records that were missing.
    pub(crate) record_bytes: f64,
    /// Of weights that were missing, without padding and what was read beside them, and of streamed matrices.
    pub(crate) missed_bytes: f64,
    /// Weights, keys and values that products went through.
    pub(crate) touched_bytes: f64,
    /// Share of the FFN's neurons selected, by a token.
    pub(crate) selected: f64,
    /// Neurons that any token of a step selected, as a share of the FFN's; of several steps added up.
    pub(crate) needed: f64,
    /// Neurons read ahead, and those of them that were then selected.
    pub(crate) ahead_read: f64,
    pub(crate) ahead_used: f64,
    /// Share of the FFN's neurons that had to be read.
    pub(crate) missed: f64,
}

impl TokenFigures {
    pub(crate) fn compute_ms(&self) -> f64 {
        self.total_ms - self.io_ms - self.memory_ms
    }
}

/// Decodes a token, or reads a prompt: what it took, and the logits after it.
pub(crate) fn pass(model: &mut LoadedModel, ids: &[u32]) -> Result<(Pass, Vec<f32>)> {
    model.reset_stats();
    let counters = model.folder().io_counters();
    let before = model.folder().matrix_stats();
    let (logits, times) = model.forward_timed(ids)?;
    let folder = model.folder();
    let bytes_read = folder.io_counters().bytes - counters.bytes;
    let (ffn, matrices) = (model.stats(), folder.matrix_stats());
    let streamed = |of: fn(&MatrixStats) -> Duration| of(&matrices) - of(&before);
    let matrix_io = streamed(|stats| stats.io);
    // Read at the right moment or ahead of it: both had to be.
    let missed = ffn.misses + ffn.ahead_used;
    let matrix_bytes = matrices.bytes_multiplied - before.bytes_multiplied;
    let streamed_bytes = (matrices.bytes_streamed - before.bytes_streamed) as f64;
    let figures = TokenFigures {
        total_ms: ms(times.layers + times.head),
        io_ms: ms(ffn.io + matrix_io),
        in_flight_ms: ms(ffn.in_flight + streamed(|stats| stats.in_flight)),
        memory_ms: ms(ffn.memory),
        select_ms: ms(ffn.select),
        ffn_ms: ms(ffn.compute),
        bytes_read: bytes_read as f64,
        streamed_bytes,
        missed_bytes: missed_bytes(model, missed) + streamed_bytes,
        record_bytes: (ffn.bytes_read + ffn.ahead_used * stride_bytes(folder)) as f64,
        touched_bytes: matrix_bytes as f64 + ffn_bytes(model, &ffn) + kv_bytes(model),
        ahead_read: ffn.ahead_read as f64,
        ahead_used: ffn.ahead_used as f64,
        selected: ffn.selected_fraction(),
        needed: (ffn.hits + ffn.misses) as f64 * ids.len() as f64 / ffn.neurons.max(1) as f64,
        missed: missed as f64 / ffn.neurons.max(1) as f64,
    };
    let pass = Pass {
        figures,
        times,
        ffn,
        layer_matrix_io: matrix_io.saturating_sub(times.head_io),
    };
    Ok((pass, logits))
}

fn stride_bytes(folder: &FlashFolder) -> u64 {
    let layer = folder.manifest().layers.first();
    layer.map_or(0, |layer| layer.stride_bytes as u64)
}

/// Weights of records that were missing: neurons, or weights where they are counted in those.
fn missed_bytes(model: &LoadedModel, missed: u64) -> f64 {
    let Some(layer) = model.folder().manifest().layers.first() else {
        return 0.0;
    };
    let of_one = match model.plan().goes_by_columns() {
        true => 1,
        false => layer.multiply_adds() / layer.intermediate_size.max(1) as u64,
    };
    (missed * of_one) as f64 * layer.dtype.size_bytes() as f64
}

/// Rows of the selected neurons, and down columns of the active ones; or the weights of the selected columns.
fn ffn_bytes(model: &LoadedModel, ffn: &FfnStats) -> f64 {
    let Some(layer) = model.folder().manifest().layers.first() else {
        return 0.0;
    };
    if model.plan().goes_by_columns() {
        return ffn.active as f64 * layer.dtype.size_bytes() as f64;
    }
    let layout = layer.record_layout();
    let rows = layout.down_range().start as f64;
    (ffn.hits + ffn.misses) as f64 * rows + ffn.active as f64 * layout.row_bytes() as f64
}

/// Keys and values of all positions so far.
fn kv_bytes(model: &LoadedModel) -> f64 {
    model.position() as f64 * model.kv_position_bytes() as f64
}

pub(crate) fn ms(time: Duration) -> f64 {
    1000.0 * time.as_secs_f64()
}
