//! Orders of a layer's neurons, made from what tokens miss.
//!
//! Without gaps, a token that misses `m` neurons makes `m` requests less one for each pair of neighbours in the file that it
//! misses both of. Over all tokens that is the sum, over neighbours, of how often both are missed together: the best
//! order is the heaviest path through all neurons, by common misses. `chained` and `paired` are two ways towards it.

use std::cmp::Reverse;

use rayon::prelude::*;

use super::together::{Counters, Together};

/// Partners that a neuron may be joined with in one round.
const PARTNERS: usize = 16;

/// An order of all neurons, and how it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrangement {
    /// By the neurons' own numbers.
    Natural,
    /// Those that are missed most first.
    Popularity,
    /// From each neuron on to the one that is most often missed together with it.
    Chained,
    /// The closest neighbours first, wherever they end up.
    Paired,
}

impl Arrangement {
    /// In the order in which they are tried.
    pub const ALL: [Self; 4] = [Self::Natural, Self::Popularity, Self::Chained, Self::Paired];

    /// The order of the neurons of `misses`.
    pub(crate) fn order(self, misses: &Together<'_>) -> Vec<u32> {
        match self {
            Self::Natural => (0..misses.neuron_count() as u32).collect(),
            Self::Popularity => by_popularity(misses),
            Self::Chained => chained(misses),
            Self::Paired => paired(misses),
        }
    }
}

fn by_popularity(misses: &Together<'_>) -> Vec<u32> {
    let mut order: Vec<u32> = (0..misses.neuron_count() as u32).collect();
    order.sort_by_key(|neuron| Reverse(misses.count(*neuron)));
    order
}

fn chained(misses: &Together<'_>) -> Vec<u32> {
    let count = misses.neuron_count();
    let mut counters = Counters::new(count);
    let mut is_placed = vec![false; count];
    let mut order = Vec::with_capacity(count);
    for first in by_popularity(misses) {
        let mut next = Some(first).filter(|first| !is_placed[*first as usize]);
        while let Some(neuron) = next {
            is_placed[neuron as usize] = true;
            order.push(neuron);
            let closest =
                misses.closest(neuron, 1, &mut counters, |other| !is_placed[other as usize]);
            next = closest.first().map(|(other, _)| *other);
        }
    }
    order
}

/// Neurons on their way into one line; at first each is a line of its own.
struct Lines {
    neighbours: Vec<[Option<u32>; 2]>,
    /// Of a neuron at an end of a line, the one at the other end.
    far_end: Vec<u32>,
}

impl Lines {
    fn new(count: usize) -> Self {
        Self {
            neighbours: vec![[None; 2]; count],
            far_end: (0..count as u32).collect(),
        }
    }

    fn is_end(&self, neuron: u32) -> bool {
        self.neighbours[neuron as usize][1].is_none()
    }

    /// Whether `a` and `b`, two neurons, are ends of different lines.
    fn can_join(&self, a: u32, b: u32) -> bool {
        self.is_end(a) && self.is_end(b) && self.far_end[a as usize] != b
    }

    /// Joins two ends of different lines; whether they were that.
    fn join(&mut self, a: u32, b: u32) -> bool {
        if !self.can_join(a, b) {
            return false;
        }
        for (neuron, other) in [(a, b), (b, a)] {
            let [first, second] = &mut self.neighbours[neuron as usize];
            *if first.is_none() { first } else { second } = Some(other);
        }
        let ends = [a, b].map(|neuron| self.far_end[neuron as usize]);
        self.far_end[ends[0] as usize] = ends[1];
        self.far_end[ends[1] as usize] = ends[0];
        true
    }

    /// The line that begins at `end`.
    fn walk(&self, end: u32, order: &mut Vec<u32>) {
        let (mut before, mut current) = (None, Some(end));
        while let Some(neuron) = current {
            order.push(neuron);
            let neighbours = self.neighbours[neuron as usize].iter().flatten();
            let next = neighbours.copied().find(|next| Some(*next) != before);
            (before, current) = (Some(neuron), next);
        }
    }
}

/// Joins the neurons that are missed together most often, then those ends of lines that are, until no ends have a miss
/// in common.
fn paired(misses: &Together<'_>) -> Vec<u32> {
    let count = misses.neuron_count();
    let mut lines = Lines::new(count);
    loop {
        let ends = (0..count as u32).into_par_iter();
        let ends = ends.filter(|neuron| lines.is_end(*neuron));
        let closest = |counters: &mut Counters, neuron: u32| {
            let may_be = |other| lines.can_join(neuron, other);
            let closest = misses.closest(neuron, PARTNERS, counters, may_be);
            let pair = move |(other, count)| (Reverse(count), neuron, other);
            closest.into_iter().map(pair).collect::<Vec<_>>()
        };
        let mut pairs: Vec<_> = ends
            .map_init(|| Counters::new(count), closest)
            .flatten_iter()
            .collect();
        pairs.par_sort_unstable();
        let joins = pairs.iter().filter(|(_, a, b)| lines.join(*a, *b));
        if joins.count() == 0 {
            break;
        }
    }
    let mut order = Vec::with_capacity(count);
    let mut is_walked = vec![false; count];
    for neuron in by_popularity(misses) {
        // A line is walked from the end that is missed more.
        if lines.is_end(neuron) && !is_walked[neuron as usize] {
            let start = order.len();
            lines.walk(neuron, &mut order);
            for walked in &order[start..] {
                is_walked[*walked as usize] = true;
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neurons_missed_together_become_neighbours() {
        // Three teams, scattered over the numbers, and loners.
        let teams: [&[u32]; 3] = [&[1, 5, 9], &[2, 4, 11], &[0, 7, 8]];
        let sets: Vec<&[u32]> = (0..30).map(|token| teams[token % 3]).collect();
        let misses = Together::new(sets, 12);
        for arrangement in [Arrangement::Chained, Arrangement::Paired] {
            let order = arrangement.order(&misses);
            let place = |neuron: &u32| order.iter().position(|other| other == neuron).unwrap();
            for team in teams {
                let places = team.iter().map(place);
                let span = places.clone().max().unwrap() - places.min().unwrap();
                assert_eq!(span, 2, "{arrangement:?} {team:?} in {order:?}");
            }
        }
        let popular = by_popularity(&Together::new(vec![&[3, 4], &[4], &[0]], 5));
        assert_eq!(popular, [4, 0, 3, 1, 2]);
    }

    proptest! {
        #[test]
        fn each_order_has_each_neuron_once(
            sets in prop::collection::vec(prop::collection::btree_set(0u32..40, 0..12), 0..30),
        ) {
            let sets: Vec<Vec<u32>> = sets.into_iter().map(|set| set.into_iter().collect()).collect();
            let misses = Together::new(sets.iter().map(Vec::as_slice).collect(), 40);
            for arrangement in Arrangement::ALL {
                let mut order = arrangement.order(&misses);
                order.sort_unstable();
                prop_assert!(order.into_iter().eq(0..40), "{arrangement:?}");
            }
        }
    }
}
