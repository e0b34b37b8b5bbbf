//! Reading ahead: the neurons that the next layer will probably want, guessed from the input of this one's selector.
//!
//! In a model whose FFN comes after attention, a layer's neurons are known late, and the device would have nothing to
//! do during attention. The residual stream changes little from layer to layer, so the next layer's own selector,
//! given this layer's input, names most of them early. What it names is read into slots as usual and is resident when
//! the layer's true selection arrives; what it missed is read then. So a guess changes times and never results.
//!
//! Invariants:
//! - A guess has the slots of its layer until it is settled, which a step does first.
//! - A layer whose guesses are mostly read in vain is left alone for a while: where the residual stream still changes a lot (the
//!   second layer of opt-9m), they say nothing.
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

/// What the last guesses for a layer were worth: neurons read ahead, and those of them that were then wanted.
#[derive(Debug, Default)]
pub(crate) struct Worth {
    read_count: u64,
    used_count: u64,
    /// Tokens without a guess that are left.
    rest_tokens: u32,
}

/// Neurons to judge by; older ones count less and less.
const JUDGED_NEURONS: u64 = 1024;
/// Of `USED_PER` neurons read ahead at least one has to be used.
const USED_PER: u64 = 3;
/// Tokens that a layer is left alone.
const REST_TOKENS: u32 = 512;

impl Worth {
    /// Whether to guess for the token at hand.
    fn is_tried(&mut self) -> bool {
        let is_resting = self.rest_tokens > 0;
        self.rest_tokens = self.rest_tokens.saturating_sub(1);
        !is_resting
    }

    fn add(&mut self, read_count: u64, used_count: u64) {
        self.read_count += read_count;
        self.used_count += used_count;
        if self.read_count < JUDGED_NEURONS {
            return;
        }
        if self.used_count * USED_PER < self.read_count {
            *self = Self {
                rest_tokens: REST_TOKENS,
                ..Self::default()
            };
        } else {
            self.read_count /= 2;
            self.used_count /= 2;
        }
    }
}

impl Ahead {
    /// Guesses from `x`, what the selector of the layer before looked at for one token, and starts to read; leaves it be where the
    /// layer is busy, has everything, keeps nothing from one step to the next, cannot hold what was guessed, or was guessed in
    /// vain.
    pub(crate) fn begin(shared: &Arc<Shared>, x: Rows<'_>, work: &mut Workspace) {
        let has_all = shared.slot_count == shared.neurons.layer.intermediate_size;
        let is_tried = |state: &mut State| state.cache.keeps_neurons() && state.worth.is_tried();
        if has_all || !is_tried(&mut shared.state()) {
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
            self.worth.add(settled.read_count, settled.used_count);
            self.cache.commit(&selection.neurons, plan, 0, |_| 0);
        } else {
            self.cache.abort(plan);
        }
        settled.selection = Some(selection);
        settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_is_guessed_in_vain_is_left_alone_for_a_while() {
        let tokens = |used_count: u64| {
            let mut worth = Worth::default();
            let token = |_| {
                let is_tried = worth.is_tried();
                if is_tried {
                    worth.add(100, used_count);
                }
                usize::from(is_tried)
            };
            (0..2000).map(token).sum::<usize>()
        };
        assert_eq!(tokens(80), 2000);
        assert_eq!(tokens(34), 2000);
        // Eleven tokens show it, each time.
        assert!((20..60).contains(&tokens(3)), "{}", tokens(3));
        assert_eq!(tokens(3), tokens(0));
    }

    #[test]
    fn a_bad_time_is_forgotten_and_a_rest_ends() {
        let mut worth = Worth::default();
        (0..11).for_each(|_| worth.add(100, 5));
        assert!(!worth.is_tried());
        let rested = (0..REST_TOKENS).filter(|_| !worth.is_tried()).count();
        assert_eq!(rested as u32, REST_TOKENS - 1);
        (0..100).for_each(|_| worth.add(100, 90));
        assert!(worth.is_tried());
    }
}
