//! Reading ahead: the neurons that the next layer will probably want, guessed from the input of this one's selector.
//!
//! In a model whose FFN comes after attention, a layer's neurons are known late, and the device would have nothing to
//! do during attention. The residual stream changes little from layer to layer, so the next layer's own selector,
//! given this layer's input, names most of them early. What it names is read into slots as usual and is resident when
//! the layer's true selection arrives; what it missed is read then. So a guess changes times and never results.
//!
//! Invariants:
//! - A guess has the slots of its layer until it is settled, which a step does first.
//! - One that fails to read is forgotten: the step that needs the neuron reads it again, and names the error.
//!
//! Not here: whether guessing pays (`lookahead`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use wick_io::Ticket;

use crate::mlp::{Shared, State};
use crate::neuron_cache::StepPlan;
use crate::neurons::Rows;
use crate::selection::Selection;
use crate::workspace::{pass_neurons, Workspace};

/// A layer's guessed neurons, those that were missing on their way into slots.
pub(crate) struct Ahead {
    selection: Selection,
    plan: StepPlan,
    reads: Ticket,
    submitted: Instant,
}

/// What a settled guess was worth.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    /// Its memory, to be used again.
    pub(crate) selection: Option<Selection>,
    /// From handing its reads out until they were waited for.
    pub(crate) in_flight: Duration,
    /// Neurons read for the guess.
    pub(crate) read_count: u64,
    /// Of them, those that the step then wanted.
    pub(crate) used_count: u64,
}

impl Ahead {
    /// Guesses from `x`, what the selector of the layer before looked at for one token, and starts to read; leaves it be where the layer is
    /// busy, has everything, keeps nothing from one step to the next, or cannot hold what was guessed.
    pub(crate) fn begin(shared: &Arc<Shared>, x: Rows<'_>, work: &mut Workspace) {
        let has_all = shared.slot_count == shared.neurons.layer.intermediate_size;
        if has_all || !shared.state().cache.keeps_neurons() {
            return;
        }
        let mut selection = work.selections.pop().unwrap_or_default();
        let guessed = shared.selector.guess(x, &mut work.scores, &mut selection);
        let mut state = shared.state();
        let slots = match (guessed, state.slots.take()) {
            (true, Some(slots)) if selection.neurons.len() <= shared.slot_count => slots,
            (_, slots) => {
                state.slots = slots;
                work.selections.push(selection);
                return;
            }
        };
        let plan = state.cache.plan(&selection.neurons, pass_neurons(x.tokens));
        work.reads.clear();
        for (position, neuron) in selection.neurons.iter().enumerate() {
            if plan.is_miss(position) {
                let reads = &mut work.reads;
                shared
                    .neurons
                    .push_reads(*neuron, plan.slot(position), reads);
            }
        }
        state.ahead = Some(Self {
            reads: shared.neurons.submit(slots, &work.reads),
            selection,
            plan,
            submitted: Instant::now(),
        });
    }
}

impl State {
    /// Waits for what was read ahead; its neurons are residents then. `wanted` is what the step selected.
    pub(crate) fn settle(&mut self, wanted: &Selection) -> Settled {
        let Some(Ahead {
            selection,
            plan,
            reads,
            submitted,
        }) = self.ahead.take()
        else {
            return Settled::default();
        };
        let (slots, result) = reads.wait();
        self.slots = Some(slots);
        let mut settled = Settled {
            in_flight: submitted.elapsed(),
            ..Settled::default()
        };
        if result.is_ok() {
            let misses = (0..selection.neurons.len()).filter(|position| plan.is_miss(*position));
            for neuron in misses.map(|position| selection.neurons[position]) {
                settled.read_count += 1;
                let is_wanted = wanted.neurons.binary_search(&neuron).is_ok();
                settled.used_count += u64::from(is_wanted);
            }
            self.cache.commit(&selection.neurons, plan, 0, |_| 0);
        } else {
            self.cache.abort(plan);
        }
        settled.selection = Some(selection);
        settled
    }
}
