//! The scratch that all FFN layers of a model share, one step at a time; reused, so steps do not allocate.

use wick_io::SlotRead;
use wick_kernels::Accumulator;

use crate::ahead::Settled;
use crate::column_cache::PASS_COEFFICIENTS;
use crate::dip::MaskScratch;
use crate::lookahead::Trials;
use crate::predictor_kind::PredictorInput;
use crate::selection::Selection;
use crate::stats::FfnStats;

/// Tokens of one step at most: one bit each in [`Selection`].
pub(crate) const CHUNK_TOKENS_MAX: usize = 128;
/// Activations (neurons times tokens) of one pass at most.
const PASS_ACTIVATIONS: usize = 1 << 18;
/// Neurons of one pass at most, so that reads of the next pass overlap the sums of this one.
pub const PASS_NEURONS_MAX: usize = 2048;

/// Called with a layer's place in the manifest and inputs of one kind, `(tokens, hidden)`, before each step, under the
/// lock of the scratch: it must not ask the `FlashVarBuilder` for statistics, nor run a layer.
pub type FfnRecorder = Box<dyn FnMut(usize, &[f32]) + Send>;

/// Called with a layer's place in the manifest and the neurons of one token, ascending, for each token of a step in
/// turn; under the same lock.
pub type SelectionRecorder = Box<dyn FnMut(usize, &[u32]) + Send>;

/// Buffers of a step, and every layer's counters.
#[derive(Default)]
pub(crate) struct Workspace {
    /// Selections that no step holds at the moment.
    pub(crate) selections: Vec<Selection>,
    pub(crate) scores: Scores,
    pub(crate) positions: Vec<u32>,
    pub(crate) reads: Vec<SlotRead>,
    pub(crate) gate: Vec<f32>,
    pub(crate) up: Vec<f32>,
    pub(crate) coefficients: Vec<f32>,
    pub(crate) sums: Accumulator,
    pub(crate) stats: Vec<FfnStats>,
    /// One a kind of input, in the order of [`PredictorInput`].
    recorders: [Option<FfnRecorder>; 3],
    pub(crate) trials: Trials,
    pub(crate) selection_recorder: Option<SelectionRecorder>,
    /// Whether the tokens at hand are those of a prompt.
    pub(crate) is_prompt: bool,
    /// Counts the sequences begun.
    pub(crate) sequence: u64,
}

/// What selectors compute with.
#[derive(Default)]
pub(crate) struct Scores {
    pub(crate) query: Vec<f32>,
    pub(crate) query_by_token: Vec<f32>,
    pub(crate) values: Vec<f32>,
    /// One a neuron, as in [`Selection`], where records do not come in the order of the neurons.
    pub(crate) wanted_by: Vec<u128>,
    /// Up factors where the whole layer is read to choose of it, and the values whose sizes are compared.
    pub(crate) up: Vec<f32>,
    pub(crate) sizes: Vec<f32>,
    pub(crate) mask: MaskScratch,
}

impl Workspace {
    pub(crate) fn new(layer_count: usize) -> Self {
        Self {
            stats: vec![FfnStats::default(); layer_count],
            ..Self::default()
        }
    }

    /// Who is shown inputs of `kind`.
    pub(crate) fn recorder(&mut self, kind: PredictorInput) -> &mut Option<FfnRecorder> {
        &mut self.recorders[kind as usize]
    }

    /// Books what a guess for layer `index` was worth.
    pub(crate) fn settled(&mut self, index: usize, settled: Settled) {
        let Settled {
            selection,
            in_flight,
            read_count,
            used_count,
        } = settled;
        self.selections.extend(selection);
        self.stats[index].in_flight += in_flight;
        self.stats[index].ahead_read += read_count;
        self.stats[index].ahead_used += used_count;
    }
}

/// Neurons of one pass when `tokens` tokens are computed together.
pub(crate) fn pass_neurons(tokens: usize) -> usize {
    (PASS_ACTIVATIONS / tokens.max(1)).min(PASS_NEURONS_MAX)
}

/// Neurons scored at once when `tokens` tokens are computed together.
pub(crate) fn score_neurons(tokens: usize) -> usize {
    PASS_ACTIVATIONS / tokens.max(1)
}

/// Bytes that the scratch grows to for steps of `tokens` tokens in layers of at most these sizes, whose predictors are
/// low-rank pairs of at most `rank`.
pub(crate) fn workspace_bytes(
    tokens: usize,
    hidden_size: usize,
    intermediate_size: usize,
    rank: usize,
) -> u64 {
    let pass = pass_neurons(tokens).min(intermediate_size);
    let scores = score_neurons(tokens).min(intermediate_size);
    // Gate, up and coefficients of a pass; scores.
    let activations = 4 * tokens * (3 * pass + scores);
    // One in use, one of a guess; what the oracle collects.
    let selections = 2 * intermediate_size * (4 + 16) + intermediate_size * 16;
    // A guess reads what it misses at once.
    let lists = intermediate_size * (4 + size_of::<SlotRead>());
    // What lies between the two matrices of a pair, by row and by token.
    let queries = 2 * 4 * tokens * rank;
    (activations + selections + lists + queries + 4 * tokens * hidden_size) as u64
}

/// Bytes that it grows to beyond that where layers go by columns.
pub(crate) fn column_workspace_bytes(
    tokens: usize,
    hidden_size: usize,
    intermediate_size: usize,
) -> u64 {
    // Sums of gate and up, the same by token, and their products.
    let activations = 4 * (5 * tokens * intermediate_size + PASS_COEFFICIENTS);
    (activations + MaskScratch::bytes(hidden_size.max(intermediate_size))) as u64
}

/// Makes `buffer` hold `len` values without growing it beyond that.
pub(crate) fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.reserve_exact(len - buffer.len());
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}
