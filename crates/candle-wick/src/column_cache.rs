//! The columns of one weight matrix, on flash and in a cache of slots: `y = sum over the selected inputs of x_i * column_i`.
//!
//! A step takes a token, or up to 128 tokens of a prompt. Passes of selected columns are computed in ascending order,
//! the misses of one being read while the one before is computed.
//!
//! Invariants:
//! - Each output is one ascending sum over what its token selected: it depends neither on what was in a slot, nor on passes,
//!   threads or the other tokens of the step.
//! - After an error nothing that was to be read counts as resident.
//!
//! Not here: choosing columns (`dip`), whose slot is taken (`neuron_cache`), the sums themselves (`wick-kernels`).

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use wick_format::{ColumnKind, FfnLayer};
use wick_io::{SlotBuffer, SlotRead, Ticket};
use wick_kernels::WeightDtype;

use crate::error::Result;
use crate::folder::FlashFolder;
use crate::neuron_cache::{NeuronCache, StepPlan, PASSES_IN_FLIGHT};
use crate::neurons::{kernel_dtype, Rows};
use crate::selection::Selection;
use crate::stats::Clock;
use crate::stored::StoredMatrix;
use crate::var_builder::Placement;
use crate::workspace::{sized, Workspace};

/// Slots that a cache of columns has at least.
pub(crate) const COLUMN_SLOTS_MIN: usize = 64;
/// Bytes of the records of one pass: enough to keep the device busy, few enough that computing begins soon.
const PASS_BYTES: usize = 1 << 20;
/// Columns of one pass at least, and at most: shorter passes would cost more in handing them out than they hide.
const PASS_COLUMNS: [usize; 2] = [32, 1024];
/// Coefficients (columns times tokens) of one pass at most.
pub(crate) const PASS_COEFFICIENTS: usize = 1 << 17;
/// Records of one read when all slots are filled.
const FILL_COLUMNS: usize = 256;

/// Column records of one kind of a layer.
pub(crate) struct ColumnCache {
    folder: FlashFolder,
    stored: StoredMatrix,
    dtype: WeightDtype,
    /// What of a record is multiplied, in bytes.
    place: Range<usize>,
    overlap: bool,
    slot_count: usize,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) cache: NeuronCache,
    /// The sequence that the residents are from.
    sequence: u64,
    /// Whether all columns were read at once, and are there for every sequence.
    stays: bool,
    /// Away while a step computes; gone after a panic.
    slots: Option<SlotBuffer>,
}

impl State {
    /// Forgets which columns are in memory: they come back one by one.
    pub(crate) fn clear(&mut self) {
        self.cache.clear();
        self.stays = false;
    }
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ColumnCounts {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

/// A step on its way.
struct Step<'a> {
    selection: &'a Selection,
    x: Rows<'a>,
    plan: &'a StepPlan,
    /// The first pass whose misses are not asked for yet.
    next_pass: usize,
    in_flight_since: Option<Instant>,
}

impl ColumnCache {
    /// The records of `kind` of `layer`, of which the bytes `place` are multiplied. There are `slots` slots, two at least;
    /// they are filled here when there is one for each record and no window drops any.
    pub(crate) fn load(
        folder: &FlashFolder,
        layer: &FfnLayer,
        kind: ColumnKind,
        place: Range<usize>,
        slots: usize,
        placement: &Placement,
    ) -> Result<Self> {
        let stored = folder.columns(layer, kind)?;
        let slot_count = slots.max(2).min(stored.rows);
        let (policy, window_tokens) = (placement.cache_policy, placement.window_tokens);
        let cache = NeuronCache::new(stored.rows, slot_count, policy, window_tokens);
        let columns = Self {
            folder: folder.clone(),
            dtype: kernel_dtype(layer.dtype),
            place,
            overlap: placement.switches.overlap,
            slot_count,
            state: Mutex::new(State {
                cache,
                sequence: 0,
                stays: false,
                slots: None,
            }),
            stored,
        };
        let mut state = columns.state();
        state.slots = Some(columns.new_slots()?);
        if slot_count == columns.stored.rows && window_tokens.is_none() {
            columns.fill(&mut state)?;
            state.stays = true;
        }
        drop(state);
        Ok(columns)
    }

    /// As [`Self::load`], with all columns of each record.
    pub(crate) fn whole(
        folder: &FlashFolder,
        layer: &FfnLayer,
        kind: ColumnKind,
        slots: usize,
        placement: &Placement,
    ) -> Result<Self> {
        let layout = layer.column_layout(kind);
        // Where there is none, loading says so.
        let place = layout.map_or(0..0, |layout| layout.columns_range());
        Self::load(folder, layer, kind, place, slots, placement)
    }

    /// Inputs: one record each.
    pub(crate) fn count(&self) -> usize {
        self.stored.rows
    }

    /// Outputs.
    pub(crate) fn width(&self) -> usize {
        self.place.len() / self.dtype.size_bytes()
    }

    /// Bytes of one record, as it is read.
    pub(crate) fn stride_bytes(&self) -> usize {
        self.stored.row_bytes
    }

    /// Whether every record has a slot.
    pub(crate) fn is_resident(&self) -> bool {
        self.slot_count == self.count()
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // A panic in the books leaves them half-written.
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            state.clear();
            self.state.clear_poison();
            state
        })
    }

    /// Forgets what another sequence left in memory, unless all columns are there to stay.
    pub(crate) fn begin_sequence(&self, sequence: u64) {
        let mut state = self.state();
        if state.sequence != sequence && !state.stays {
            state.clear();
        }
        state.sequence = sequence;
    }

    fn new_slots(&self) -> Result<SlotBuffer> {
        Ok(SlotBuffer::new(self.slot_count, self.stored.row_bytes)?)
    }

    fn read_of(&self, column: u32, slot: usize) -> SlotRead {
        let column = column as usize;
        SlotRead {
            slot,
            offset_bytes: self.stored.offset_bytes + (column * self.stored.row_bytes) as u64,
            len_bytes: self.stored.row_bytes,
            crc32c: self.stored.checksum(column),
        }
    }

    /// Reads every record.
    fn fill(&self, state: &mut State) -> Result<()> {
        let all: Vec<u32> = (0..self.count() as u32).collect();
        let plan = state.cache.plan(&all, FILL_COLUMNS);
        for range in plan.passes() {
            let reads = range.clone().map(|position| {
                let column = all[position];
                self.read_of(column, plan.slot(position))
            });
            let reads: Vec<SlotRead> = reads.collect();
            let slots = state.slots.take().expect("nobody else has a new layer");
            let reader = self.folder.reader();
            let (slots, result) = reader.submit(slots, &self.stored.file, &reads).wait();
            state.slots = Some(slots);
            result?;
        }
        state.cache.commit(&all, plan, 0, |_| 0);
        Ok(())
    }

    /// `work.sums[t] = sum of x[t][i] * column i` over the columns `i` that token `t` selected; `x` is `(tokens, count)`.
    pub(crate) fn multiply(
        &self,
        selection: &Selection,
        x: Rows<'_>,
        work: &mut Workspace,
        clock: &mut Clock,
    ) -> Result<ColumnCounts> {
        work.sums.reset(x.tokens, self.width());
        let mut state = self.state();
        let slots = match state.slots.take() {
            Some(slots) => slots,
            None => {
                state.clear();
                self.new_slots()?
            }
        };
        let plan = state
            .cache
            .plan(&selection.neurons, self.pass_columns(x.tokens));
        clock.memory();
        let reader = self.folder.reader();
        let mut reads = reader.submit(slots, &self.stored.file, &[]);
        let step = Step {
            selection,
            x,
            plan: &plan,
            next_pass: 0,
            in_flight_since: None,
        };
        let result = self.run_passes(step, &mut reads, work, clock);
        let (slots, last) = reads.wait();
        state.slots = Some(slots);
        if let Err(error) = result.and(last.map_err(Into::into)) {
            state.cache.abort(plan);
            return Err(error);
        }
        let misses = plan.miss_count() as u64;
        let used_by = |position: usize| selection.wanted_by[position];
        state
            .cache
            .commit(&selection.neurons, plan, x.tokens, used_by);
        clock.memory();
        Ok(ColumnCounts {
            hits: selection.neurons.len() as u64 - misses,
            misses,
        })
    }

    /// Columns of one pass when `tokens` tokens are computed together.
    fn pass_columns(&self, tokens: usize) -> usize {
        let [fewest, most] = PASS_COLUMNS;
        (PASS_BYTES / self.stored.row_bytes)
            .clamp(fewest, most)
            .min(PASS_COEFFICIENTS / tokens.max(1))
    }

    fn run_passes(
        &self,
        mut step: Step<'_>,
        reads: &mut Ticket,
        work: &mut Workspace,
        clock: &mut Clock,
    ) -> Result<()> {
        let ahead = if self.overlap { PASSES_IN_FLIGHT } else { 0 };
        let plan = step.plan;
        self.read_on(&mut step, reads, ahead, work);
        for range in plan.passes() {
            if range.clone().any(|position| plan.is_miss(position)) {
                self.read_on(&mut step, reads, ahead.max(1), work);
                step.wait(reads, clock)?;
                self.read_on(&mut step, reads, ahead, work);
            }
            clock.io();
            self.add(&step, range, reads, work);
            clock.compute();
        }
        Ok(())
    }

    /// Starts to read the misses of the next passes that have some, until those of `passes` are in flight.
    fn read_on(
        &self,
        step: &mut Step<'_>,
        reads: &mut Ticket,
        passes: usize,
        work: &mut Workspace,
    ) {
        let plan = step.plan;
        while reads.in_flight() < passes {
            let Some(range) = plan.passes().get(step.next_pass) else {
                return;
            };
            step.next_pass += 1;
            let misses = range.clone().filter(|position| plan.is_miss(*position));
            let read = |position: usize| {
                let column = step.selection.neurons[position];
                self.read_of(column, plan.slot(position))
            };
            work.reads.clear();
            work.reads.extend(misses.map(read));
            if !work.reads.is_empty() {
                let reader = self.folder.reader();
                reader.submit_behind(reads, &self.stored.file, &work.reads);
                step.in_flight_since.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Adds the columns of a pass to the sums.
    fn add(&self, step: &Step<'_>, range: &Range<usize>, reads: &Ticket, work: &mut Workspace) {
        let (tokens, count) = (step.x.tokens, self.count());
        let coefficients = sized(&mut work.coefficients, range.len() * tokens);
        for (position, row) in range.clone().zip(coefficients.chunks_mut(tokens)) {
            let column = step.selection.neurons[position] as usize;
            let wanted_by = step.selection.wanted_by[position];
            for (token, value) in row.iter_mut().enumerate() {
                *value = match wanted_by >> token & 1 {
                    0 => 0.0,
                    _ => step.x.values[token * count + column],
                };
            }
        }
        let place = &self.place;
        let column = |r: usize| &reads.slot(step.plan.slot(range.start + r))[place.clone()];
        work.sums
            .add_rows(self.dtype, range.len(), column, coefficients);
    }
}

impl Step<'_> {
    /// Waits for the oldest reads in flight.
    fn wait(&mut self, reads: &mut Ticket, clock: &mut Clock) -> Result<()> {
        let result = reads.wait_first();
        if let Some(since) = self.in_flight_since.take() {
            clock.in_flight += since.elapsed();
        }
        if reads.in_flight() > 0 {
            self.in_flight_since = Some(Instant::now());
        }
        Ok(result?)
    }
}
