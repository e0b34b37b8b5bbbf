//! The neuron cache: which slot of DRAM holds which neuron of one layer, and what a token must read.
//!
//! It only keeps the books: `slot_count` slots, `neuron_count` neurons, no bytes. One step (a token, or a
//! chunk of prompt tokens):
//! 1. `plan` takes the step's selected neurons and gives each a slot: hits keep theirs, misses get a free
//!    slot or that of a neuron which the policy gives up (`eviction_order`).
//! 2. The caller walks the passes: reads a pass's misses, computes over its neurons.
//! 3. `commit` makes the misses residents and slides the window; after a failed read `abort` forgets them.
//!
//! A neuron out of use stays until its slot is wanted. With `window_tokens` it is dropped as soon as none of the
//! last `window_tokens` tokens used it, whatever the policy (the paper's windowing, section 3.1).
//!
//! A selection larger than the slots runs in ascending passes: what is resident stays, and the misses
//! stream through a ring of two parts, so that one is read while the other is computed.
//!
//! Invariants:
//! - `slot_of` and `neuron_of` are inverse maps;
//! - no policy gives up a slot of the step at hand;
//! - during a pass and the reads of [`PASSES_IN_FLIGHT`] passes with misses after it, no slot of the pass is
//!   rewritten.
//!
//! Not here: choosing neurons (`selector`), reading them (`wick-io`), multiplying (`wick-kernels`).

use std::ops::Range;

use crate::eviction_order::{CachePolicy, EvictionOrder};

const NONE: u32 = u32::MAX;
/// The slots that a budget leaves each layer at least.
pub const PASS_NEURONS: usize = 256;
/// Parts of the streaming ring: with three smaller ones, two of them in flight, reading everything for each token was
/// slower (docs/bench/decode.md).
const RING_PARTS: usize = 2;
/// How many passes with misses may be read while the one before them is computed.
pub(crate) const PASSES_IN_FLIGHT: usize = RING_PARTS - 1;
/// Neurons in one part of the streaming ring at most.
const RING_PART_NEURONS: usize = 256;

/// The slots and reads of one step, in passes. Its memory is reused from step to step.
#[derive(Debug, Default)]
pub struct StepPlan {
    /// Slot of each selected neuron, in the order of the selection.
    slots: Vec<u32>,
    /// Whether each selected neuron must be read.
    is_miss: Vec<bool>,
    /// Consecutive ranges of the selection.
    passes: Vec<Range<usize>>,
    /// How often the books had been cleared.
    clear_count: u64,
}

impl StepPlan {
    /// The passes, as ascending ranges of positions in the selection; at least one, perhaps empty.
    pub fn passes(&self) -> &[Range<usize>] {
        &self.passes
    }

    /// The slot of the selected neuron at `position`.
    pub fn slot(&self, position: usize) -> usize {
        self.slots[position] as usize
    }

    /// Whether the selected neuron at `position` has to be read.
    pub fn is_miss(&self, position: usize) -> bool {
        self.is_miss[position]
    }

    /// How many selected neurons have to be read.
    pub fn miss_count(&self) -> usize {
        self.is_miss.iter().filter(|miss| **miss).count()
    }
}

/// The books of one layer's slots.
#[derive(Debug)]
pub struct NeuronCache {
    slot_of: Vec<u32>,
    neuron_of: Vec<u32>,
    /// Token count at the slot's last use.
    used_at: Vec<u64>,
    order: EvictionOrder,
    selected_in: Vec<u32>,
    step: u32,
    tokens: u64,
    /// Token count after the last step of several tokens, whose slots do not lie in the order of their use.
    chunk_end: u64,
    window_tokens: Option<usize>,
    clear_count: u64,
    plan: StepPlan,
    /// Slots that misses of one step stream through; only its memory outlives the step.
    ring: Vec<u32>,
}

impl NeuronCache {
    /// Books for `neuron_count` neurons in `slot_count` slots, all free.
    ///
    /// # Panics
    /// With fewer than two slots for a layer of more neurons: streaming needs one to read and one to compute.
    pub fn new(
        neuron_count: usize,
        slot_count: usize,
        policy: CachePolicy,
        window_tokens: Option<usize>,
    ) -> Self {
        assert!(
            slot_count >= neuron_count.min(2),
            "{slot_count} slots for {neuron_count} neurons"
        );
        Self {
            slot_of: vec![NONE; neuron_count],
            neuron_of: vec![NONE; slot_count],
            used_at: vec![0; slot_count],
            order: EvictionOrder::new(policy, neuron_count, slot_count),
            selected_in: vec![0; neuron_count],
            step: 0,
            tokens: 0,
            chunk_end: 0,
            window_tokens,
            clear_count: 0,
            plan: StepPlan::default(),
            ring: Vec::new(),
        }
    }

    /// Whether a neuron can still be resident when the next step comes.
    pub(crate) fn keeps_neurons(&self) -> bool {
        self.window_tokens != Some(0)
    }

    /// Bytes that the books of one layer take, under any policy.
    pub fn bookkeeping_bytes(neuron_count: usize, slot_count: usize) -> u64 {
        // slot_of, selected_in, plan slots, is_miss; neuron_of, used_at.
        let books = neuron_count * (4 + 4 + 4 + 1) + slot_count * (4 + 8);
        (books + EvictionOrder::bytes(neuron_count, slot_count)) as u64
    }

    /// How many slots there are.
    pub fn slot_count(&self) -> usize {
        self.neuron_of.len()
    }

    /// How many slots hold a neuron.
    pub fn used_count(&self) -> usize {
        self.neuron_of
            .iter()
            .filter(|neuron| **neuron != NONE)
            .count()
    }

    /// Whether `neuron` is in a slot now.
    pub fn contains(&self, neuron: u32) -> bool {
        self.slot_of[neuron as usize] != NONE
    }

    /// Gives each selected neuron (ascending ids, none twice) a slot, in passes of at most `pass_neurons`.
    pub fn plan(&mut self, selection: &[u32], pass_neurons: usize) -> StepPlan {
        debug_assert!(
            selection.windows(2).all(|pair| pair[0] < pair[1]),
            "ascending ids"
        );
        let mut plan = std::mem::take(&mut self.plan);
        plan.slots.clear();
        plan.is_miss.clear();
        plan.passes.clear();
        plan.clear_count = self.clear_count;
        self.mark_and_touch(selection);
        for &neuron in selection {
            let slot = self.slot_of[neuron as usize];
            plan.slots.push(slot);
            plan.is_miss.push(slot == NONE);
        }
        if selection.len() <= self.slot_count() {
            self.place_all(selection, &mut plan);
            split_by_count(selection.len(), pass_neurons.max(1), &mut plan.passes);
        } else {
            self.place_streaming(selection, pass_neurons.max(1), &mut plan);
        }
        plan
    }

    /// Marks the step's neurons and moves the resident ones to the end of their lists, so that the first of a list is
    /// one that this step does not need, if there is such a one.
    fn mark_and_touch(&mut self, selection: &[u32]) {
        self.step = self.step.wrapping_add(1);
        if self.step == 0 {
            self.selected_in.fill(0);
            self.step = 1;
        }
        self.order.begin_step();
        for &neuron in selection {
            self.selected_in[neuron as usize] = self.step;
            let slot = self.slot_of[neuron as usize];
            if slot != NONE {
                self.order.touch(slot, neuron);
            }
        }
    }

    fn place_all(&mut self, selection: &[u32], plan: &mut StepPlan) {
        for position in 0..selection.len() {
            if plan.is_miss[position] {
                plan.slots[position] = self.take_oldest();
            }
        }
    }

    /// Takes the slot that the policy gives up, for the step at hand.
    fn take_oldest(&mut self) -> u32 {
        let (neuron_of, selected_in, step) = (&self.neuron_of, &self.selected_in, self.step);
        let slot = self.order.take(|slot| match neuron_of[slot as usize] {
            // Taken a moment ago.
            NONE => true,
            neuron => selected_in[neuron as usize] == step,
        });
        let neuron = std::mem::replace(&mut self.neuron_of[slot as usize], NONE);
        if neuron != NONE {
            self.slot_of[neuron as usize] = NONE;
        }
        slot
    }

    fn place_streaming(&mut self, selection: &[u32], pass_neurons: usize, plan: &mut StepPlan) {
        // Long enough to keep the device busy, short enough to leave most slots to residents; and no longer than
        // the selection is too large by, so that one neuron too many does not cost an eighth of the slots.
        let longest = match self.window_tokens {
            // Nobody stays.
            Some(0) => RING_PART_NEURONS,
            _ => (self.slot_count() / 8).clamp(32, RING_PART_NEURONS),
        };
        let overflow = selection.len() - self.slot_count();
        let part_slots = overflow
            .clamp(16, longest)
            .min(self.slot_count() / RING_PARTS);
        let ring_slots = RING_PARTS * part_slots;
        let mut available = self.slot_count() - plan.is_miss.iter().filter(|miss| !**miss).count();
        // Too many hits for a ring: those with the highest ids stream instead.
        for position in (0..selection.len()).rev() {
            if available >= ring_slots {
                break;
            }
            if !plan.is_miss[position] {
                plan.is_miss[position] = true;
                let slot = plan.slots[position];
                self.forget_slot(slot);
                available += 1;
            }
        }
        let permanent = available - ring_slots;
        let mut ring = std::mem::take(&mut self.ring);
        ring.clear();
        ring.extend((0..ring_slots).map(|_| self.take_oldest()));
        // Residents lie between the streamed neurons, a block of them in each pass: the device reads while they are
        // computed, and still reads whole blocks.
        let streaming = plan.miss_count() - permanent;
        let pass_count = streaming.div_ceil(part_slots);
        let quota = |round: usize| permanent.min(permanent * round / pass_count);
        let mut used = [0; RING_PARTS];
        let (mut start, mut streamed, mut part) = (0, 0, 0);
        let (mut placed, mut round) = (0, 1);
        for position in 0..selection.len() {
            let is_miss = plan.is_miss[position];
            let is_full = is_miss && placed >= quota(round) && streamed == part_slots;
            if is_full || position - start == pass_neurons {
                plan.passes.push(start..position);
                // Passes that stream nothing leave the turn to the next, which may be read before they are computed.
                part = (part + usize::from(streamed > 0)) % RING_PARTS;
                round += usize::from(is_full);
                (start, streamed) = (position, 0);
            }
            if is_miss && placed < quota(round) {
                plan.slots[position] = self.take_oldest();
                placed += 1;
            } else if is_miss {
                plan.slots[position] = ring[part * part_slots + streamed];
                streamed += 1;
                used[part] = used[part].max(streamed);
            }
        }
        plan.passes.push(start..selection.len());
        for (part, used) in ring.chunks(part_slots).zip(used) {
            for &slot in &part[used..] {
                self.order.free(slot);
            }
        }
        self.ring = ring;
    }

    fn forget_slot(&mut self, slot: u32) {
        let neuron = std::mem::replace(&mut self.neuron_of[slot as usize], NONE);
        if neuron != NONE {
            self.slot_of[neuron as usize] = NONE;
        }
        self.order.free(slot);
    }

    /// Ends the step after all its reads: the misses are residents now, `tokens` tokens went by, and
    /// `used_by(position)` has bit `t` set when token `t` of them used the neuron at `position`. A plan from before the
    /// last [`clear`](Self::clear) leaves nothing resident.
    pub fn commit(
        &mut self,
        selection: &[u32],
        plan: StepPlan,
        tokens: usize,
        used_by: impl Fn(usize) -> u128,
    ) {
        self.tokens += tokens as u64;
        if tokens > 1 {
            self.chunk_end = self.tokens;
        }
        if plan.clear_count != self.clear_count {
            self.plan = plan;
            return;
        }
        for (position, &neuron) in selection.iter().enumerate() {
            let slot = plan.slots[position];
            if plan.is_miss[position] {
                // In a streaming step a later neuron may have taken the slot over.
                let before = std::mem::replace(&mut self.neuron_of[slot as usize], neuron);
                if before != NONE {
                    self.slot_of[before as usize] = NONE;
                }
                self.slot_of[neuron as usize] = slot;
            }
            let used_by = used_by(position);
            self.used_at[slot as usize] = self.tokens - tokens_since(used_by, tokens);
            self.order.count(slot, neuron, used_by.count_ones());
        }
        self.plan = plan;
        self.slide_window();
        self.order.age(tokens);
    }

    /// Ends the step after a failed read: none of its misses is resident.
    pub fn abort(&mut self, plan: StepPlan) {
        let is_current = plan.clear_count == self.clear_count;
        for position in 0..plan.slots.len() {
            if is_current && plan.is_miss[position] && plan.slots[position] != NONE {
                self.forget_slot(plan.slots[position]);
            }
        }
        // The hits were touched without a use.
        self.chunk_end = self.tokens;
        self.plan = plan;
    }

    /// Drops what no token of the window used. Where slots lie in the order of their steps, the first fresh one ends
    /// the search, unless a step of several tokens in the window mixed the order.
    fn slide_window(&mut self) {
        let Some(window_tokens) = self.window_tokens else {
            return;
        };
        let is_outside = |tokens: u64| tokens >= window_tokens as u64;
        let in_order = self.order.is_by_use() && is_outside(self.tokens - self.chunk_end);
        for rank in self.order.ranks() {
            let mut slot = self.order.first(rank);
            while let Some(current) = slot {
                slot = self.order.next(current);
                if is_outside(self.tokens - self.used_at[current as usize]) {
                    self.forget_slot(current);
                } else if in_order {
                    break;
                }
            }
        }
    }

    /// Forgets every neuron (a new sequence with a cold cache), and those of a step on its way.
    pub fn clear(&mut self) {
        self.clear_count += 1;
        self.slot_of.fill(NONE);
        self.neuron_of.fill(NONE);
        self.order.clear();
    }
}

/// How many tokens ago the last of those of `used_by` was, in a step of `tokens` tokens.
fn tokens_since(used_by: u128, tokens: usize) -> u64 {
    let newest = u128::BITS - used_by.leading_zeros();
    match newest {
        0 => 0,
        newest => tokens as u64 - u64::from(newest),
    }
}

fn split_by_count(len: usize, count: usize, passes: &mut Vec<Range<usize>>) {
    let mut start = 0;
    loop {
        let end = len.min(start + count);
        passes.push(start..end);
        start = end;
        if start == len {
            break;
        }
    }
}

#[cfg(test)]
#[path = "neuron_cache_tests.rs"]
mod tests;
