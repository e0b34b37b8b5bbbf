//! Whose slot is taken next: the order in which a neuron cache gives up its slots.
//!
//! Every slot is in one of some doubly linked lists: the free ones first, then a list for each rank, all of them oldest
//! use first. Taking a slot, moving one and aging never walk a list, so a step costs the same however many slots there
//! are, and nothing is allocated after `new`.
//!
//! `Lru` has one rank. The paper's window, as long as nothing is deleted before its slot is wanted, is the same thing
//! whatever its length: what no token of the window used goes first, oldest use first, and when the window needs more
//! than there is, its oldest go as well. `Lfu` ranks by how many tokens used a neuron of late, resident or not, and
//! within a rank by use: [`HALVING_TOKENS`] tokens after the last time, all numbers are halved, and the order is kept.
//! Without that, what an old text needed would stay for good.
//!
//! Not here: which neuron is in which slot, and dropping neurons before their slots are wanted (`neuron_cache`).

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// Tokens after which use counts for half.
const HALVING_TOKENS: usize = 128;
/// Ranks of `Lfu`: counts end here.
const RANKS: usize = 256;
/// The list of slots without a neuron; those of the ranks follow it.
const FREE: usize = 0;

/// Which neuron leaves when its slot is wanted; never one that the step at hand needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePolicy {
    /// The least recently used one.
    Lru,
    /// The least frequently used one, of those the least recently used one. Older uses count for less: all counts are
    /// halved every 128 tokens.
    #[default]
    Lfu,
}

impl CachePolicy {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Lru, Self::Lfu];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
        }
    }
}

impl fmt::Display for CachePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CachePolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let mut all = Self::ALL.into_iter();
        all.find(|policy| policy.name() == name)
            .ok_or_else(|| Error::UnknownName {
                what: "cache policy",
                name: name.to_owned(),
                known: "lru, lfu",
            })
    }
}

/// All slots of a layer, and what ranks them.
#[derive(Debug)]
pub(crate) struct EvictionOrder {
    slot_count: usize,
    /// Neighbours of each slot, then the two ends of each list.
    before: Vec<u32>,
    after: Vec<u32>,
    /// Uses of each neuron of late; empty under `Lru`.
    counts: Vec<u8>,
    /// Tokens since counts were halved.
    tokens: usize,
    /// The first rank that may have a slot to take in this step.
    first_rank: usize,
}

impl EvictionOrder {
    /// All slots free.
    pub(crate) fn new(policy: CachePolicy, neuron_count: usize, slot_count: usize) -> Self {
        let (ranks, counted) = match policy {
            CachePolicy::Lru => (1, 0),
            CachePolicy::Lfu => (RANKS, neuron_count),
        };
        let nodes = slot_count + 1 + ranks;
        let mut order = Self {
            slot_count,
            before: vec![0; nodes],
            after: vec![0; nodes],
            counts: vec![0; counted],
            tokens: 0,
            first_rank: FREE,
        };
        order.clear();
        order
    }

    /// Bytes that it takes under any policy.
    pub(crate) fn bytes(neuron_count: usize, slot_count: usize) -> usize {
        neuron_count + (slot_count + 1 + RANKS) * 8
    }

    /// Frees all slots, and forgets what was used.
    pub(crate) fn clear(&mut self) {
        for end in self.slot_count..self.after.len() {
            (self.before[end], self.after[end]) = (end as u32, end as u32);
        }
        for slot in 0..self.slot_count as u32 {
            self.link_last(FREE, slot);
        }
        self.counts.fill(0);
        self.tokens = 0;
    }

    /// Before a step's first [`Self::take`].
    pub(crate) fn begin_step(&mut self) {
        self.first_rank = FREE + 1;
    }

    /// The slot to give up next, which moves behind those that stay. In every list the step's own slots come last, so
    /// `is_kept` is asked about the first one only.
    ///
    /// # Panics
    /// All slots are the step's own.
    pub(crate) fn take(&mut self, is_kept: impl Fn(u32) -> bool) -> u32 {
        let slot = self.first(FREE).unwrap_or_else(|| loop {
            match self.first(self.first_rank) {
                Some(slot) if !is_kept(slot) => break slot,
                _ => self.first_rank += 1,
            }
        });
        self.move_last(FREE + 1, slot);
        slot
    }

    /// `slot`, which holds `neuron`, is the last of its rank to be given up.
    pub(crate) fn touch(&mut self, slot: u32, neuron: u32) {
        let rank = self.counts.get(neuron as usize).copied().unwrap_or(0);
        self.move_last(FREE + 1 + usize::from(rank), slot);
    }

    /// `slot` holds `neuron` from now on, which `uses` tokens of the step used.
    pub(crate) fn count(&mut self, slot: u32, neuron: u32, uses: u32) {
        if let Some(count) = self.counts.get_mut(neuron as usize) {
            *count = count.saturating_add(u8::try_from(uses).unwrap_or(u8::MAX));
            self.touch(slot, neuron);
        }
    }

    /// `slot` is free, and the next one to take.
    pub(crate) fn free(&mut self, slot: u32) {
        self.unlink(slot);
        let end = self.end(FREE);
        self.link(end, slot, self.after[end as usize]);
    }

    /// `tokens` tokens went by.
    pub(crate) fn age(&mut self, tokens: usize) {
        self.tokens += tokens;
        if self.tokens < HALVING_TOKENS || self.counts.is_empty() {
            return;
        }
        self.tokens = 0;
        self.counts.iter_mut().for_each(|count| *count /= 2);
        for rank in 0..RANKS {
            self.append(FREE + 1 + rank / 2, FREE + 1 + rank);
        }
    }

    /// Whether the lists are in the order of use alone.
    pub(crate) fn is_by_use(&self) -> bool {
        self.counts.is_empty()
    }

    /// The lists of slots with neurons.
    pub(crate) fn ranks(&self) -> std::ops::Range<usize> {
        FREE + 1..self.after.len() - self.slot_count
    }

    /// The first slot of a list.
    pub(crate) fn first(&self, list: usize) -> Option<u32> {
        self.next(self.end(list))
    }

    /// The slot after `slot` in its list.
    pub(crate) fn next(&self, slot: u32) -> Option<u32> {
        let next = self.after[slot as usize];
        ((next as usize) < self.slot_count).then_some(next)
    }

    fn end(&self, list: usize) -> u32 {
        (self.slot_count + list) as u32
    }

    fn unlink(&mut self, slot: u32) {
        let (before, after) = (self.before[slot as usize], self.after[slot as usize]);
        self.after[before as usize] = after;
        self.before[after as usize] = before;
    }

    fn link(&mut self, before: u32, slot: u32, after: u32) {
        self.after[before as usize] = slot;
        self.before[slot as usize] = before;
        self.after[slot as usize] = after;
        self.before[after as usize] = slot;
    }

    fn link_last(&mut self, list: usize, slot: u32) {
        let end = self.end(list);
        self.link(self.before[end as usize], slot, end);
    }

    fn move_last(&mut self, list: usize, slot: u32) {
        self.unlink(slot);
        self.link_last(list, slot);
    }

    /// Puts the slots of list `from` behind those of list `to`.
    fn append(&mut self, to: usize, from: usize) {
        let (to, from) = (self.end(to), self.end(from));
        let (first, last) = (self.after[from as usize], self.before[from as usize]);
        if to == from || first == from {
            return;
        }
        let before = self.before[to as usize];
        self.after[before as usize] = first;
        self.before[first as usize] = before;
        self.after[last as usize] = to;
        self.before[to as usize] = last;
        (self.before[from as usize], self.after[from as usize]) = (from, from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(order: &EvictionOrder, list: usize) -> Vec<u32> {
        std::iter::successors(order.first(list), |slot| order.next(*slot)).collect()
    }

    #[test]
    fn names_go_there_and_back() {
        for policy in CachePolicy::ALL {
            assert_eq!(policy.to_string().parse::<CachePolicy>().unwrap(), policy);
        }
        let error = "best".parse::<CachePolicy>().unwrap_err().to_string();
        assert!(
            error.contains("best") && error.contains("lru, lfu"),
            "{error}"
        );
    }

    #[test]
    fn aging_halves_counts_and_keeps_the_order() {
        let mut order = EvictionOrder::new(CachePolicy::Lfu, 8, 6);
        for (slot, uses) in [(0, 4), (1, 1), (2, 5), (3, 0), (4, 200), (5, 4)] {
            order.count(slot, slot + 1, uses);
        }
        let all = |order: &EvictionOrder| -> Vec<u32> {
            order.ranks().flat_map(|rank| slots(order, rank)).collect()
        };
        assert_eq!(all(&order), [3, 1, 0, 5, 2, 4]);
        order.age(HALVING_TOKENS - 1);
        assert_eq!(slots(&order, FREE + 1 + 4), [0, 5]);
        order.age(1);
        assert_eq!(all(&order), [3, 1, 0, 5, 2, 4]);
        assert_eq!(slots(&order, FREE + 1), [3, 1]);
        assert_eq!(slots(&order, FREE + 1 + 2), [0, 5, 2]);
        assert_eq!(slots(&order, FREE + 1 + 100), [4]);
        order.count(4, 5, 300);
        assert_eq!(slots(&order, FREE + RANKS), [4]);
        order.clear();
        assert_eq!(slots(&order, FREE), [0, 1, 2, 3, 4, 5]);
        assert!(all(&order).is_empty());
    }
}
