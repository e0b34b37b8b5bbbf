//! The neuron cache: which slot of DRAM holds which neuron of one layer, and what a token must read.
//!
//! It only keeps the books: `slot_count` slots, `neuron_count` neurons, no bytes. One step (a token, or a
//! chunk of prompt tokens):
//! 1. `plan` takes the step's selected neurons and gives each a slot: hits keep theirs, misses get a free
//!    slot or that of the neuron whose last use is the longest ago.
//! 2. The caller walks the passes: reads a pass's misses, computes over its neurons.
//! 3. `commit` makes the misses residents and slides the window; after a failed read `abort` forgets them.
//!
//! A neuron out of use stays until its slot is wanted, oldest use first. With `window_tokens` it is dropped
//! as soon as none of the last `window_tokens` tokens used it (the paper's windowing, section 3.1).
//!
//! A selection larger than the slots runs in ascending passes: what is resident stays, and the misses
//! stream through a ring of three parts, so that two are read while the third is computed: with one in flight the
//! device would run out of requests at each change.
//!
//! Invariants:
//! - `slot_of` and `neuron_of` are inverse maps;
//! - the recency list holds every slot once, free slots first;
//! - during a pass and the reads of [`StepPlan::passes_in_flight`] passes with misses after it, no slot of the pass is
//!   rewritten.
//!
//! Not here: choosing neurons (`selector`), reading them (`wick-io`), multiplying (`wick-kernels`).

use std::ops::Range;

const NONE: u32 = u32::MAX;
/// The slots that a budget leaves each layer at least.
pub const PASS_NEURONS: usize = 256;
/// Parts of the streaming ring, where there are slots for so many.
const RING_PARTS: usize = 3;
/// Neurons in one part of the streaming ring at most.
const RING_PART_NEURONS: usize = 170;

/// The slots and reads of one step, in passes. Its memory is reused from step to step.
#[derive(Debug, Default)]
pub struct StepPlan {
    /// Slot of each selected neuron, in the order of the selection.
    slots: Vec<u32>,
    /// Whether each selected neuron must be read.
    is_miss: Vec<bool>,
    /// Consecutive ranges of the selection.
    passes: Vec<Range<usize>>,
    /// Parts of the ring that passes stream through by turns.
    ring_parts: usize,
}

impl StepPlan {
    /// How many passes with misses may be read while the one before them is computed.
    pub fn passes_in_flight(&self) -> usize {
        self.ring_parts - 1
    }

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
    recency: RecencyList,
    selected_in: Vec<u32>,
    step: u32,
    tokens: u64,
    /// Token count after the last step of several tokens, whose slots do not lie in the order of their use.
    chunk_end: u64,
    window_tokens: Option<usize>,
    plan: StepPlan,
    /// Slots that misses of one step stream through; only its memory outlives the step.
    ring: Vec<u32>,
}

impl NeuronCache {
    /// Books for `neuron_count` neurons in `slot_count` slots, all free.
    ///
    /// # Panics
    /// With fewer than two slots for a layer of more neurons: streaming needs one to read and one to compute.
    pub fn new(neuron_count: usize, slot_count: usize, window_tokens: Option<usize>) -> Self {
        assert!(
            slot_count >= neuron_count.min(2),
            "{slot_count} slots for {neuron_count} neurons"
        );
        Self {
            slot_of: vec![NONE; neuron_count],
            neuron_of: vec![NONE; slot_count],
            used_at: vec![0; slot_count],
            recency: RecencyList::new(slot_count),
            selected_in: vec![0; neuron_count],
            step: 0,
            tokens: 0,
            chunk_end: 0,
            window_tokens,
            plan: StepPlan::default(),
            ring: Vec::new(),
        }
    }

    /// Bytes that the books of one layer take.
    pub fn bookkeeping_bytes(neuron_count: usize, slot_count: usize) -> u64 {
        // slot_of, selected_in, plan slots, is_miss; neuron_of, used_at, two links of the list.
        (neuron_count * (4 + 4 + 4 + 1) + slot_count * (4 + 8 + 8)) as u64
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
        plan.ring_parts = RING_PARTS.min(self.slot_count().max(2));
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

    /// Marks the step's neurons and moves the resident ones to the recent end, so that the other end holds
    /// only slots that this step does not need.
    fn mark_and_touch(&mut self, selection: &[u32]) {
        self.step = self.step.wrapping_add(1);
        if self.step == 0 {
            self.selected_in.fill(0);
            self.step = 1;
        }
        for &neuron in selection {
            self.selected_in[neuron as usize] = self.step;
            let slot = self.slot_of[neuron as usize];
            if slot != NONE {
                self.recency.move_to_back(slot);
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

    /// Frees the least recently used slot and moves it to the recent end.
    fn take_oldest(&mut self) -> u32 {
        let slot = self.recency.front();
        let neuron = std::mem::replace(&mut self.neuron_of[slot as usize], NONE);
        if neuron != NONE {
            debug_assert_ne!(
                self.selected_in[neuron as usize], self.step,
                "evicted a needed neuron"
            );
            self.slot_of[neuron as usize] = NONE;
        }
        self.recency.move_to_back(slot);
        slot
    }

    fn place_streaming(&mut self, selection: &[u32], pass_neurons: usize, plan: &mut StepPlan) {
        // Long enough to keep the device busy, short enough to leave most slots to residents; and no longer than
        // the selection is too large by, so that one neuron too many does not cost an eighth of the slots.
        let longest = match self.window_tokens {
            // Nobody stays.
            Some(0) => RING_PART_NEURONS,
            _ => (self.slot_count() / 12).clamp(42, RING_PART_NEURONS),
        };
        let parts = plan.ring_parts;
        let overflow = selection.len() - self.slot_count();
        let part_slots = overflow.clamp(16, longest).min(self.slot_count() / parts);
        let ring_slots = parts * part_slots;
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
                part = (part + usize::from(streamed > 0)) % parts;
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
                self.recency.move_to_front(slot);
            }
        }
        self.ring = ring;
    }

    fn forget_slot(&mut self, slot: u32) {
        let neuron = std::mem::replace(&mut self.neuron_of[slot as usize], NONE);
        if neuron != NONE {
            self.slot_of[neuron as usize] = NONE;
        }
        self.recency.move_to_front(slot);
    }

    /// Ends the step after all its reads: the misses are residents now, `tokens` tokens went by, and
    /// `last_use(position)` says how many of those tokens ago the neuron at `position` was used last.
    pub fn commit(
        &mut self,
        selection: &[u32],
        plan: StepPlan,
        tokens: usize,
        last_use: impl Fn(usize) -> usize,
    ) {
        self.tokens += tokens as u64;
        if tokens > 1 {
            self.chunk_end = self.tokens;
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
            self.used_at[slot as usize] = self.tokens - last_use(position) as u64;
        }
        self.plan = plan;
        self.slide_window();
    }

    /// Ends the step after a failed read: none of its misses is resident.
    pub fn abort(&mut self, plan: StepPlan) {
        for position in 0..plan.slots.len() {
            if plan.is_miss[position] && plan.slots[position] != NONE {
                self.forget_slot(plan.slots[position]);
            }
        }
        // The hits were touched without a use.
        self.chunk_end = self.tokens;
        self.plan = plan;
    }

    /// Drops what no token of the window used. Slots lie in the order of their steps, so the first fresh one
    /// ends the search, unless a step of several tokens in the window mixed the order.
    fn slide_window(&mut self) {
        let Some(window_tokens) = self.window_tokens else {
            return;
        };
        let in_order = self.chunk_end + window_tokens as u64 <= self.tokens;
        let mut slot = self.recency.first();
        while let Some(current) = slot {
            slot = self.recency.after(current);
            if self.neuron_of[current as usize] == NONE {
                continue;
            }
            if self.used_at[current as usize] + window_tokens as u64 <= self.tokens {
                self.forget_slot(current);
            } else if in_order {
                break;
            }
        }
    }

    /// Forgets every neuron (a new sequence with a cold cache).
    pub fn clear(&mut self) {
        self.slot_of.fill(NONE);
        self.neuron_of.fill(NONE);
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

/// All slots in one doubly linked list, least recently used first; every operation O(1).
#[derive(Debug)]
struct RecencyList {
    /// Neighbours of each slot; the last entry is the list's two ends.
    before: Vec<u32>,
    after: Vec<u32>,
}

impl RecencyList {
    fn new(slot_count: usize) -> Self {
        let ends = slot_count as u32;
        let ring = slot_count + 1;
        let before = (0..ring).map(|i| ((i + ring - 1) % ring) as u32).collect();
        let after = (0..ring).map(|i| ((i + 1) % ring) as u32).collect();
        debug_assert!(ends < NONE);
        Self { before, after }
    }

    fn ends(&self) -> u32 {
        (self.after.len() - 1) as u32
    }

    fn first(&self) -> Option<u32> {
        self.after(self.ends())
    }

    fn after(&self, slot: u32) -> Option<u32> {
        let next = self.after[slot as usize];
        (next != self.ends()).then_some(next)
    }

    fn front(&self) -> u32 {
        self.first()
            .expect("a step never asks for more slots than there are")
    }

    fn unlink(&mut self, slot: u32) {
        let (before, after) = (self.before[slot as usize], self.after[slot as usize]);
        self.after[before as usize] = after;
        self.before[after as usize] = before;
    }

    fn link_between(&mut self, before: u32, slot: u32, after: u32) {
        self.after[before as usize] = slot;
        self.before[slot as usize] = before;
        self.after[slot as usize] = after;
        self.before[after as usize] = slot;
    }

    fn move_to_back(&mut self, slot: u32) {
        self.unlink(slot);
        let ends = self.ends();
        self.link_between(self.before[ends as usize], slot, ends);
    }

    fn move_to_front(&mut self, slot: u32) {
        self.unlink(slot);
        let ends = self.ends();
        self.link_between(ends, slot, self.after[ends as usize]);
    }
}

#[cfg(test)]
#[path = "neuron_cache_tests.rs"]
mod tests;
