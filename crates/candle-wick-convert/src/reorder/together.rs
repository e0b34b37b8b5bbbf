//! How often neurons are in one set: counted for one neuron at a time, over the sets that it is in.
//!
//! A table of all pairs would take `neurons^2` counters, a gigabyte for a layer of 16,384. The sets and the list of each
//! neuron's sets take 4 bytes an entry, and the counters of one neuron are used again for the next.

/// Sets of neurons, and each neuron's sets.
pub(crate) struct Together<'a> {
    sets: Vec<&'a [u32]>,
    /// Where each neuron's list begins in `sets_of`, and the end.
    starts: Vec<usize>,
    sets_of: Vec<u32>,
}

/// Counters for one neuron at a time.
pub(crate) struct Counters {
    counts: Vec<u32>,
    touched: Vec<u32>,
}

impl Counters {
    pub(crate) fn new(neuron_count: usize) -> Self {
        Self {
            counts: vec![0; neuron_count],
            touched: Vec::new(),
        }
    }
}

impl<'a> Together<'a> {
    /// The sets, of neurons below `neuron_count`.
    pub(crate) fn new(sets: Vec<&'a [u32]>, neuron_count: usize) -> Self {
        let mut starts = vec![0; neuron_count + 1];
        for neuron in sets.iter().copied().flatten() {
            starts[*neuron as usize + 1] += 1;
        }
        for neuron in 0..neuron_count {
            starts[neuron + 1] += starts[neuron];
        }
        let mut next = starts.clone();
        let mut sets_of = vec![0; starts[neuron_count]];
        for (set, neurons) in sets.iter().enumerate() {
            for neuron in *neurons {
                let place = &mut next[*neuron as usize];
                sets_of[*place] = set as u32;
                *place += 1;
            }
        }
        Self {
            sets,
            starts,
            sets_of,
        }
    }

    /// How many neurons there are.
    pub(crate) fn neuron_count(&self) -> usize {
        self.starts.len() - 1
    }

    /// How many sets `neuron` is in.
    pub(crate) fn count(&self, neuron: u32) -> usize {
        self.starts[neuron as usize + 1] - self.starts[neuron as usize]
    }

    /// The (at most) `most` neurons that are in the most sets together with `neuron`, of those that `may_be` names, with the
    /// number of these sets: most first, of equals the lower id.
    pub(crate) fn closest(
        &self,
        neuron: u32,
        most: usize,
        counters: &mut Counters,
        may_be: impl Fn(u32) -> bool,
    ) -> Vec<(u32, u32)> {
        let Counters { counts, touched } = counters;
        let lists = self.starts[neuron as usize]..self.starts[neuron as usize + 1];
        for set in &self.sets_of[lists] {
            for &other in self.sets[*set as usize] {
                let count = &mut counts[other as usize];
                if *count == 0 {
                    touched.push(other);
                }
                *count += 1;
            }
        }
        let others = touched
            .iter()
            .filter(|other| **other != neuron && may_be(**other));
        let mut closest: Vec<(u32, u32)> = others
            .map(|other| (*other, counts[*other as usize]))
            .collect();
        let by_count = |(id, count): &(u32, u32)| (std::cmp::Reverse(*count), *id);
        if closest.len() > most && most > 0 {
            closest.select_nth_unstable_by_key(most - 1, by_count);
        }
        closest.truncate(most);
        closest.sort_unstable_by_key(by_count);
        for other in touched.drain(..) {
            counts[other as usize] = 0;
        }
        closest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_are_those_in_most_common_sets() {
        let sets: [&[u32]; 4] = [&[0, 1, 3], &[0, 3], &[1, 2], &[0, 2, 3]];
        let together = Together::new(sets.to_vec(), 5);
        assert_eq!([0, 1, 4].map(|neuron| together.count(neuron)), [3, 2, 0]);
        let mut counters = Counters::new(5);
        let mut closest = |neuron, most| together.closest(neuron, most, &mut counters, |_| true);
        assert_eq!(closest(0, 9), [(3, 3), (1, 1), (2, 1)]);
        assert_eq!(closest(0, 2), [(3, 3), (1, 1)]);
        assert_eq!(
            closest(1, 9),
            [(0, 1), (2, 1), (3, 1)],
            "counters are clean"
        );
        assert_eq!(closest(4, 9), []);
        let open = |other| other != 3;
        assert_eq!(together.closest(0, 1, &mut counters, open), [(1, 1)]);
    }
}
