//! A feed-forward layer whose neurons stay on flash: only what the tokens need is read and multiplied.
//!
//! `y = down · (act(gate x) * up x)` or `down · act(up x)`, with biases where the model has them. One `step`
//! takes a token, or up to 128 tokens of a prompt, through
//! 1. `selector.select`: which neurons are needed;
//! 2. `cache.plan`: which of them are missing, and where they go, in passes;
//! 3. `submit`: the misses of a pass are read into their slots;
//! 4. `coefficients`: gate, up and activation of the hits meanwhile, then of the misses;
//! 5. `add_down`: one down product over the pass, added to the sums of the passes before;
//! 6. `cache.commit`: the misses are residents, the window slides.
//!
//! The result depends on the selection alone: each output element is one ascending sum over the selected
//! neurons, whatever the slots, the threads, the engine and the number of tokens in the step.
//!
//! Not here: choosing neurons (`selector`), the books of the slots (`neuron_cache`), reading (`wick-io`).

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use candle::{Module, Tensor};
use wick_io::{SlotBuffer, Ticket};

use crate::activation::Activation;
use crate::error::{Error, Result};
use crate::neuron_cache::{NeuronCache, StepPlan};
use crate::neurons::{LayerNeurons, Rows};
use crate::rows::map_rows;
use crate::selector::{Selection, Selector};
use crate::var_builder::{lock, FlashVarBuilder};
use crate::workspace::{pass_neurons, sized, Workspace, CHUNK_TOKENS_MAX};

/// The FFN of one layer: `x (.., hidden_size) -> (.., hidden_size)`.
///
/// Layers of one `FlashVarBuilder` take turns behind a lock, and compute on the rayon pool meanwhile: call `forward`
/// from a plain thread, not from inside a rayon task, which could be made to wait for itself.
#[derive(Clone)]
pub struct FlashMlp {
    shared: Arc<Shared>,
}

struct Shared {
    /// The layer's place in the manifest.
    index: usize,
    slot_count: usize,
    neurons: LayerNeurons,
    selector: Selector,
    workspace: Arc<Mutex<Workspace>>,
    state: Mutex<State>,
}

struct State {
    cache: NeuronCache,
    /// Away only while a step's reads are in flight.
    slots: Option<SlotBuffer>,
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

impl FlashMlp {
    /// The FFN whose records lie at `vb`, for instance `model.layers.0.mlp`; its slots are allocated here.
    pub fn load(
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
        vb: FlashVarBuilder,
    ) -> Result<Self> {
        let (index, layer) = vb.ffn_layer()?;
        let (expected, got) = (
            [intermediate_size, hidden_size],
            [layer.intermediate_size, layer.hidden_size],
        );
        if expected != got {
            let (expected, got) = (expected.to_vec(), got.to_vec());
            return Err(Error::Shape {
                name: layer.neurons_tensor(),
                expected,
                got,
            });
        }
        let placement = vb.placement();
        let slots = placement.slots_per_layer[index];
        let slot_count = slots.max(2).min(intermediate_size);
        let slots = SlotBuffer::new(slot_count, layer.stride_bytes)?;
        let cache = NeuronCache::new(intermediate_size, slot_count, placement.window_tokens);
        let neurons = LayerNeurons::load(vb.folder(), layer, activation)?;
        Ok(Self {
            shared: Arc::new(Shared {
                index,
                slot_count,
                selector: Selector::load(&vb, index, &neurons)?,
                neurons,
                workspace: vb.workspace().clone(),
                state: Mutex::new(State {
                    cache,
                    slots: Some(slots),
                }),
            }),
        })
    }

    /// Forgets which neurons are in DRAM, as at the start.
    pub fn clear_neuron_cache(&self) {
        self.shared.state().cache.clear();
    }
}

impl Module for FlashMlp {
    fn forward(&self, x: &Tensor) -> candle::Result<Tensor> {
        let hidden = self.shared.neurons.layer.hidden_size;
        map_rows(x, hidden, hidden, |tokens, x| {
            let mut y = vec![0.0; tokens * hidden];
            let chunk = CHUNK_TOKENS_MAX * hidden;
            for (x, y) in x.chunks(chunk).zip(y.chunks_mut(chunk)) {
                let rows = Rows {
                    tokens: x.len() / hidden,
                    values: x,
                };
                self.shared.step(rows, y)?;
            }
            Ok(y)
        })
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic in a step may have left slots behind that hold other neurons than the books say.
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            state.cache.clear();
            self.state.clear_poison();
            state
        })
    }

    /// One token, or the tokens of one chunk of a prompt.
    fn step(&self, x: Rows<'_>, y: &mut [f32]) -> Result<()> {
        let mut workspace = lock(&self.workspace);
        let work = &mut *workspace;
        let mut state = self.state();
        if let Some(record) = &mut work.recorder {
            record(self.index, x.values);
        }
        let mut clock = Clock::start();

        self.selector
            .select(&self.neurons, x, &mut work.scores, &mut work.selection)?;
        clock.compute();
        let plan = state
            .cache
            .plan(&work.selection.neurons, pass_neurons(x.tokens));
        clock.memory();
        let summed = self.run_passes(x, &plan, &mut state.slots, work, &mut clock);
        let misses = plan.miss_count() as u64;
        if let Err(error) = summed {
            state.cache.abort(plan);
            return Err(error);
        }
        let Selection { neurons, .. } = &work.selection;
        let last_use = |position| work.selection.last_use(position, x.tokens);
        state.cache.commit(neurons, plan, x.tokens, last_use);
        clock.memory();
        work.sums.write_to(y);
        self.add_down_bias(y);
        clock.compute();
        self.count(x.tokens, misses, &clock, work);
        Ok(())
    }

    /// Reads the misses pass by pass and adds up every selected neuron. Hits are computed while the pass's
    /// misses are in flight; the next pass's reads start before this pass's misses are computed.
    fn run_passes(
        &self,
        x: Rows<'_>,
        plan: &StepPlan,
        slots: &mut Option<SlotBuffer>,
        work: &mut Workspace,
        clock: &mut Clock,
    ) -> Result<()> {
        work.sums.reset(x.tokens, self.neurons.layer.hidden_size);
        let buffer = match slots.take() {
            Some(buffer) => buffer,
            // A panic while they were away lost them; the books were cleared then.
            None => SlotBuffer::new(self.slot_count, self.neurons.layer.stride_bytes)?,
        };
        let mut ticket = self.submit(buffer, plan, plan.passes().first(), work);
        for (index, range) in plan.passes().iter().enumerate() {
            let pass = Pass { x, plan, range };
            clock.io();
            self.coefficients(&pass, Part::Hits, &ticket, work);
            clock.compute();
            let (buffer, result) = ticket.wait();
            if let Err(error) = result {
                *slots = Some(buffer);
                return Err(error.into());
            }
            ticket = self.submit(buffer, plan, plan.passes().get(index + 1), work);
            clock.io();
            self.coefficients(&pass, Part::Misses, &ticket, work);
            self.add_down(&pass, &ticket, work);
            clock.compute();
        }
        *slots = Some(ticket.wait().0);
        Ok(())
    }

    /// Starts reading the misses of a pass; no pass, no reads.
    fn submit(
        &self,
        buffer: SlotBuffer,
        plan: &StepPlan,
        range: Option<&Range<usize>>,
        work: &mut Workspace,
    ) -> Ticket {
        work.reads.clear();
        for position in range.cloned().unwrap_or(0..0) {
            if plan.is_miss(position) {
                let neuron = work.selection.neurons[position];
                work.reads
                    .push(self.neurons.read_into(neuron, plan.slot(position)));
            }
        }
        self.neurons.submit(buffer, &work.reads)
    }

    /// Computes `act(gate) * up` (or `act(up)`) of the pass's misses, or of its hits, into `coefficients`
    /// `(neurons of the pass, tokens)`; zero where a token did not select the neuron.
    fn coefficients(&self, pass: &Pass<'_>, part: Part, ticket: &Ticket, work: &mut Workspace) {
        let Pass { x, plan, range } = pass;
        let Workspace {
            positions,
            selection,
            gate,
            up,
            coefficients,
            ..
        } = work;
        positions.clear();
        positions.extend(
            (*range)
                .clone()
                .filter(|p| plan.is_miss(*p) == (part == Part::Misses))
                .map(|p| p as u32),
        );
        let count = positions.len();
        if count == 0 {
            return;
        }
        let record = |r: usize| ticket.slot(plan.slot(positions[r] as usize));
        let neuron = |r: usize| selection.neurons[positions[r] as usize];
        self.neurons.deciding(count, neuron, record, *x, gate);
        let gated = self.neurons.layout.gated;
        if gated {
            self.neurons.up_factors(count, neuron, record, *x, up);
        }
        let coefficients = sized(coefficients, range.len() * x.tokens);
        for (r, &position) in positions.iter().enumerate() {
            let wanted_by = selection.wanted_by[position as usize];
            let first = (position as usize - range.start) * x.tokens;
            for token in 0..x.tokens {
                let at = r * x.tokens + token;
                let value = match wanted_by >> token & 1 {
                    0 => 0.0,
                    _ if gated => self.neurons.activation.apply(gate[at]) * up[at],
                    _ => self.neurons.activation.apply(gate[at]),
                };
                coefficients[first + token] = value;
            }
        }
    }

    /// Adds coefficient times down column of the whole pass, in ascending order of neurons.
    fn add_down(&self, pass: &Pass<'_>, ticket: &Ticket, work: &mut Workspace) {
        let Pass { x, plan, range } = pass;
        let down = self.neurons.layout.down_range();
        let record = |r: usize| &ticket.slot(plan.slot(range.start + r))[down.clone()];
        let coefficients = &work.coefficients[..range.len() * x.tokens];
        work.sums
            .add_rows(self.neurons.dtype, range.len(), record, coefficients);
    }

    fn add_down_bias(&self, y: &mut [f32]) {
        let Some(bias) = &self.neurons.down_bias else {
            return;
        };
        for row in y.chunks_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }

    fn count(&self, tokens: usize, misses: u64, clock: &Clock, work: &mut Workspace) {
        let layer = &self.neurons.layer;
        let stats = &mut work.stats[self.index];
        stats.tokens += tokens as u64;
        stats.neurons += (tokens * layer.intermediate_size) as u64;
        stats.selected += work.selection.selected_count();
        stats.misses += misses;
        stats.hits += work.selection.neurons.len() as u64 - misses;
        stats.bytes_read += misses * layer.stride_bytes as u64;
        stats.io += clock.io;
        stats.memory += clock.memory;
        stats.compute += clock.compute;
    }
}

/// Books the time since the last call under one of three heads.
struct Clock {
    last: Instant,
    io: Duration,
    memory: Duration,
    compute: Duration,
}

impl Clock {
    fn start() -> Self {
        let zero = Duration::ZERO;
        Self {
            last: Instant::now(),
            io: zero,
            memory: zero,
            compute: zero,
        }
    }

    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let lap = now - self.last;
        self.last = now;
        lap
    }

    fn io(&mut self) {
        let lap = self.lap();
        self.io += lap;
    }

    fn memory(&mut self) {
        let lap = self.lap();
        self.memory += lap;
    }

    fn compute(&mut self) {
        let lap = self.lap();
        self.compute += lap;
    }
}
