//! One step of an FFN layer: a token, or up to 128 tokens of a prompt, from their inputs to their outputs.
//!
//! `begin` takes the first three of the six steps of `FlashMlp` and leaves reads in flight; `finish` takes the others.
//!
//! Invariants:
//! - A layer has at most one step on its way; its slots are with the step meanwhile.
//! - Reads of at most `PASSES_IN_FLIGHT` passes are on their way while another is computed, in the order of the passes.
//! - A step that is dropped, by an error, a panic or a caller that lost interest, gives the slots back, and what it
//!   meant to read is not resident.
//!
//! Not here: choosing neurons (`selector`), the books of the slots (`neuron_cache`), products (`neurons`).

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use wick_io::Ticket;

use crate::ahead::Ahead;
use crate::error::Result;
use crate::lookahead::Lookahead;
use crate::mlp::Shared;
use crate::neuron_cache::{StepPlan, PASSES_IN_FLIGHT};
use crate::neurons::Rows;
use crate::predictor_kind::PredictorInput;
use crate::selection::Selection;
use crate::stats::Clock;
use crate::workspace::{pass_neurons, sized, Workspace};

/// A step with its neurons chosen and placed, and the misses of its first passes being read.
pub(crate) struct Step {
    shared: Arc<Shared>,
    selection: Selection,
    /// Away while passes run.
    plan: Option<StepPlan>,
    /// The slots, and what is being read into them; gone when the step has ended.
    reads: Option<Ticket>,
    /// The first pass whose misses are not asked for yet.
    next_pass: usize,
    /// Since when reads have been in flight, if there are some.
    in_flight_since: Option<Instant>,
    /// Whether the layer has its slots back.
    has_ended: bool,
    clock: Clock,
}

/// What the tokens of a step bring, `(tokens, hidden)` each.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// The FFN's own input.
    pub(crate) x: Rows<'a>,
    /// What the selector looks at: the same, or what its predictors were made for.
    pub(crate) seen: Rows<'a>,
}

/// A range of a step's selection that is computed at once.
struct Pass<'a> {
    x: Rows<'a>,
    plan: &'a StepPlan,
    range: &'a Range<usize>,
}

/// The neurons of a pass that lay in a slot, or that are read for it.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Hits,
    Misses,
}

impl Step {
    /// Selects, plans, and starts to read what the first passes miss.
    pub(crate) fn begin(
        shared: &Arc<Shared>,
        inputs: Inputs<'_>,
        work: &mut Workspace,
    ) -> Result<Self> {
        let Inputs { x, seen } = inputs;
        if let Some(record) = work.recorder(PredictorInput::FfnInput) {
            record(shared.index, x.values);
        }
        let mut clock = Clock::start();
        let mut selection = work.selections.pop().unwrap_or_default();
        shared
            .selector
            .select(&shared.neurons, seen, &mut work.scores, &mut selection)?;
        if let Some(record) = &mut work.selection_recorder {
            selection.for_each_token(x.tokens, &mut work.positions, |neurons| {
                record(shared.index, neurons);
            });
        }
        clock.select();
        let mut state = shared.state();
        work.settled(shared.index, state.settle(&selection));
        clock.io();
        let slots = state.slots.take().ok_or_else(|| shared.busy())?;
        let plan = state.cache.plan(&selection.neurons, pass_neurons(x.tokens));
        drop(state);
        clock.memory();
        let mut step = Self {
            shared: shared.clone(),
            selection,
            plan: None,
            reads: Some(shared.neurons.submit(slots, &[])),
            next_pass: 0,
            in_flight_since: None,
            has_ended: false,
            clock,
        };
        step.read_on(&plan, step.passes_ahead(), work);
        step.plan = Some(plan);
        step.clock.io();
        Ok(step)
    }

    /// Computes pass by pass, the hits of a pass while its misses are in flight, and writes the sums to `y`.
    pub(crate) fn finish(
        mut self,
        inputs: Inputs<'_>,
        y: &mut [f32],
        work: &mut Workspace,
    ) -> Result<()> {
        let (shared, x) = (self.shared.clone(), inputs.x);
        self.clock.resume();
        work.sums.reset(x.tokens, shared.neurons.layer.hidden_size);
        let plan = self.plan.take().expect("a step ends once");
        if let Err(error) = self.run_passes(inputs, &plan, work) {
            self.plan = Some(plan);
            return Err(error);
        }
        self.count(x.tokens, &plan, work);
        self.commit(plan, x.tokens);
        self.clock.memory();
        work.sums.write_to(y);
        shared.add_down_bias(y);
        self.clock.compute();
        work.stats[shared.index].add_times(&self.clock);
        work.selections.push(std::mem::take(&mut self.selection));
        Ok(())
    }

    fn run_passes(
        &mut self,
        inputs: Inputs<'_>,
        plan: &StepPlan,
        work: &mut Workspace,
    ) -> Result<()> {
        let x = inputs.x;
        let overlap = self.shared.switches.overlap;
        let ahead = self.passes_ahead();
        for (index, range) in plan.passes().iter().enumerate() {
            let pass = Pass { x, plan, range };
            if overlap {
                self.coefficients(&pass, Part::Hits, work);
            }
            if index + 1 == plan.passes().len() {
                self.look_ahead(inputs.seen, work);
            }
            if range.clone().any(|position| plan.is_miss(position)) {
                self.read_on(plan, ahead.max(1), work);
                self.wait()?;
                self.read_on(plan, ahead, work);
            }
            self.clock.io();
            if !overlap {
                self.coefficients(&pass, Part::Hits, work);
            }
            self.coefficients(&pass, Part::Misses, work);
            self.add_down(&pass, work);
        }
        Ok(())
    }

    /// Passes whose misses are in flight while others are computed.
    fn passes_ahead(&self) -> usize {
        match self.shared.switches.overlap {
            true => PASSES_IN_FLIGHT,
            false => 0,
        }
    }

    /// Has the next layer's neurons read behind the last ones of this layer, in decoding. All predictors of a model look
    /// at the same kind of input, so that the next layer's can guess from what this layer's has `seen`.
    fn look_ahead(&mut self, seen: Rows<'_>, work: &mut Workspace) {
        let lookahead = self.shared.switches.lookahead;
        if lookahead == Lookahead::Off {
            return;
        }
        if seen.tokens > 1 {
            work.trials.pause();
            return;
        }
        if self.shared.index == 0 {
            work.trials.begin_token(Instant::now());
        }
        let Some(next) = self.shared.next.get() else {
            return;
        };
        if lookahead == Lookahead::Always || work.trials.is_on() {
            Ahead::begin(next, seen, work);
            self.clock.select();
        }
    }

    /// Starts to read the misses of the next passes that have some, until those of `passes` are in flight.
    fn read_on(&mut self, plan: &StepPlan, passes: usize, work: &mut Workspace) {
        let reads = self.reads.as_mut().expect("the slots are with the step");
        while reads.in_flight() < passes {
            let Some(range) = plan.passes().get(self.next_pass) else {
                return;
            };
            self.next_pass += 1;
            work.reads.clear();
            for position in range.clone().filter(|position| plan.is_miss(*position)) {
                let (neuron, slot) = (self.selection.neurons[position], plan.slot(position));
                let neurons = &self.shared.neurons;
                neurons.push_reads(neuron, slot, &mut work.reads);
            }
            if !work.reads.is_empty() {
                self.shared.neurons.submit_behind(reads, &work.reads);
                self.in_flight_since.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Waits for the oldest reads in flight.
    fn wait(&mut self) -> Result<()> {
        let reads = self.reads.as_mut().expect("the slots are with the step");
        let result = reads.wait_first();
        if let Some(since) = self.in_flight_since.take() {
            self.clock.in_flight += since.elapsed();
        }
        if reads.in_flight() > 0 {
            self.in_flight_since = Some(Instant::now());
        }
        self.clock.io();
        Ok(result?)
    }

    /// Those slots that nobody reads into can be looked at.
    fn slots(&self) -> &Ticket {
        self.reads.as_ref().expect("the slots are with the step")
    }

    /// Computes `act(gate) * up` (or `act(up)`) of the pass's misses, or of its hits, into `coefficients`
    /// `(neurons of the pass, tokens)`; zero where a token did not select the neuron.
    fn coefficients(&mut self, pass: &Pass<'_>, part: Part, work: &mut Workspace) {
        let Pass { x, plan, range } = pass;
        let (neurons, selection) = (&self.shared.neurons, &self.selection);
        let Workspace {
            positions,
            gate,
            up,
            coefficients,
            ..
        } = work;
        let is_in_part = |p: &usize| plan.is_miss(*p) == (part == Part::Misses);
        positions.clear();
        positions.extend((*range).clone().filter(is_in_part).map(|p| p as u32));
        let count = positions.len();
        if count == 0 {
            return;
        }
        let slots = self.slots();
        let record = |r: usize| neurons.rows(slots, plan.slot(positions[r] as usize));
        let neuron = |r: usize| selection.neurons[positions[r] as usize];
        neurons.deciding(count, neuron, record, *x, gate);
        let gated = neurons.layout.gated;
        if gated {
            neurons.up_factors(count, neuron, record, *x, up);
        }
        let coefficients = sized(coefficients, range.len() * x.tokens);
        for (r, &position) in positions.iter().enumerate() {
            let wanted_by = selection.wanted_by[position as usize];
            let first = (position as usize - range.start) * x.tokens;
            for token in 0..x.tokens {
                let at = r * x.tokens + token;
                let value = match wanted_by >> token & 1 {
                    0 => 0.0,
                    _ if gated => neurons.activation.apply(gate[at]) * up[at],
                    _ => neurons.activation.apply(gate[at]),
                };
                coefficients[first + token] = value;
            }
        }
        self.clock.compute();
    }

    /// Adds coefficient times down column of the pass, in ascending order of neurons. Those that are zero for every
    /// token would add exact zeros: their columns are not even touched.
    fn add_down(&mut self, pass: &Pass<'_>, work: &mut Workspace) {
        let Pass { x, plan, range } = pass;
        let tokens = x.tokens;
        let Workspace {
            positions,
            coefficients,
            sums,
            ..
        } = work;
        positions.clear();
        for position in (*range).clone() {
            let first = (position - range.start) * tokens;
            let of_neuron = first..first + tokens;
            if coefficients[of_neuron.clone()]
                .iter()
                .any(|value| *value != 0.0)
            {
                coefficients.copy_within(of_neuron, positions.len() * tokens);
                positions.push(position as u32);
            }
        }
        let (neurons, slots) = (&self.shared.neurons, self.slots());
        let column = |r: usize| neurons.down_column(slots, plan.slot(positions[r] as usize));
        let count = positions.len();
        sums.add_rows(
            neurons.dtype,
            count,
            column,
            &coefficients[..count * tokens],
        );
        work.stats[self.shared.index].active += count as u64;
        self.clock.compute();
    }

    /// The misses are residents now, and the layer has its slots back.
    fn commit(&mut self, plan: StepPlan, tokens: usize) {
        let reads = self.reads.take().expect("the slots are with the step");
        // Every pass has waited for its own.
        let (slots, _nothing_in_flight) = reads.wait();
        let selection = &self.selection;
        let used_by = |position: usize| selection.wanted_by[position];
        let mut state = self.shared.state();
        state
            .cache
            .commit(&selection.neurons, plan, tokens, used_by);
        state.slots = Some(slots);
        drop(state);
        self.has_ended = true;
    }

    fn count(&self, tokens: usize, plan: &StepPlan, work: &mut Workspace) {
        let layer = &self.shared.neurons.layer;
        let misses = plan.miss_count() as u64;
        let stats = &mut work.stats[self.shared.index];
        stats.tokens += tokens as u64;
        stats.neurons += (tokens * layer.intermediate_size) as u64;
        stats.selected += self.selection.selected_count();
        stats.misses += misses;
        stats.hits += self.selection.neurons.len() as u64 - misses;
        stats.bytes_read += misses * layer.stride_bytes as u64;
        let in_whole = self.shared.selector.matrices_in_whole();
        let of_all = layer.multiply_adds() / layer.matrices() * in_whole;
        let of_one = layer.hidden_size as u64 * (layer.matrices() - in_whole);
        stats.multiply_adds += tokens as u64 * of_all + self.selection.selected_count() * of_one;
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let slots = match self.reads.take() {
            Some(reads) => Some(reads.wait().0),
            // Lost on their way from one read to the next.
            None => self.shared.neurons.new_slots(self.shared.slot_count).ok(),
        };
        let mut state = self.shared.state();
        state.slots = slots;
        match self.plan.take() {
            Some(plan) => state.cache.abort(plan),
            None => state.cache.clear(),
        }
    }
}
