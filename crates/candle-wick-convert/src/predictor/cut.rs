//! The threshold that finds a wanted share of the active neurons, exactly, without keeping their scores.
//!
//! A text has millions of scores. They are gone through twice: the first time the upper halves of their bits are counted, which
//! says in which of 65,536 ranges the threshold lies, the second time the lower halves of those in that range. Memory is
//! 1 MiB, however long the text is.
//!
//! A score that is no number counts as the least of all: it is missed by every threshold but the one that all reach.

/// Ranges of the upper or the lower half of a score's bits.
const RANGES: usize = 1 << 16;

/// A threshold, and what it selects of the neurons that it was found on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cut {
    /// The largest that the wanted share of the active neurons' scores reach; where nobody is active, one that nobody
    /// reaches.
    pub(super) threshold: f32,
    /// The share of all neurons that reach it.
    pub(super) selected_fraction: f64,
}

/// Counts of one pass.
pub(super) struct Pass {
    /// The range that the lower halves are counted of; `None` while upper halves are.
    within: Option<usize>,
    all: Vec<u64>,
    active: Vec<u64>,
}

impl Cut {
    /// Finds it; `show` is called twice and pushes every neuron of every token, the same both times.
    ///
    /// # Errors
    /// Those of `show`.
    pub(super) fn find<E>(
        recall: f64,
        mut show: impl FnMut(&mut Pass) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut upper = Pass::new(None);
        show(&mut upper)?;
        let active: u64 = upper.active.iter().sum();
        if active == 0 {
            return Ok(Self {
                threshold: f32::MAX,
                selected_fraction: 0.0,
            });
        }
        let missed = (((1.0 - recall) * active as f64) as u64).min(active - 1);
        let (range, before) = place(&upper.active, missed);
        let mut lower = Pass::new(Some(range));
        show(&mut lower)?;
        let (last, _) = place(&lower.active, missed - before);
        let above = upper.all[range + 1..].iter().sum::<u64>();
        let selected = above + lower.all[last..].iter().sum::<u64>();
        Ok(Self {
            threshold: score(((range << 16) | last) as u32),
            selected_fraction: selected as f64 / upper.all.iter().sum::<u64>() as f64,
        })
    }
}

impl Pass {
    fn new(within: Option<usize>) -> Self {
        Self {
            within,
            all: vec![0; RANGES],
            active: vec![0; RANGES],
        }
    }

    /// Counts one neuron of one token.
    pub(super) fn push(&mut self, score: f32, is_active: bool) {
        let key = key(score) as usize;
        let (upper, lower) = (key >> 16, key & (RANGES - 1));
        let at = match self.within {
            None => upper,
            Some(range) if range == upper => lower,
            Some(_) => return,
        };
        self.all[at] += 1;
        self.active[at] += u64::from(is_active);
    }
}

/// In which range the value lies that `rank` others are below, and how many are in the ranges before.
fn place(counts: &[u64], rank: u64) -> (usize, u64) {
    let mut before = 0;
    for (range, count) in counts.iter().enumerate() {
        if rank < before + count {
            return (range, before);
        }
        before += count;
    }
    // Not reached: there are more values than `rank`.
    (counts.len() - 1, before)
}

/// A number that is larger for a larger score.
fn key(score: f32) -> u32 {
    let score = if score.is_nan() {
        f32::NEG_INFINITY
    } else {
        score + 0.0 // both zeros are one
    };
    let bits = score.to_bits();
    match bits >> 31 {
        0 => bits | (1 << 31),
        _ => !bits,
    }
}

/// The score that a key is of.
fn score(key: u32) -> f32 {
    f32::from_bits(match key >> 31 {
        0 => !key,
        _ => key & !(1 << 31),
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::super::random::Random;
    use super::*;

    fn cut(scores: &[(f32, bool)], recall: f64) -> Cut {
        let show = |pass: &mut Pass| {
            scores
                .iter()
                .for_each(|(score, active)| pass.push(*score, *active));
            Ok::<(), Infallible>(())
        };
        Cut::find(recall, show).unwrap()
    }

    /// By sorting them all.
    #[test]
    fn the_threshold_is_the_one_that_sorting_finds() {
        let mut random = Random(4);
        for (count, radius) in [(1, 1.0), (7, 1e-3), (500, 1.0), (3000, 1e20)] {
            let mut scores: Vec<(f32, bool)> = (0..count)
                .map(|_| (random.uniform(radius), random.uniform(1.0) > 0.4))
                .collect();
            // Many that are equal, and both zeros.
            for at in (0..count).step_by(3) {
                scores[at].0 = [0.0, -0.0, 0.25 * radius][at / 3 % 3];
            }
            scores[0].1 = true;
            let mut of_active: Vec<f32> = scores
                .iter()
                .filter(|(_, active)| *active)
                .map(|(score, _)| *score)
                .collect();
            of_active.sort_unstable_by(f32::total_cmp);
            for recall in [1.0, 0.97, 0.5, 0.01] {
                let missed = ((1.0 - recall) * of_active.len() as f64) as usize;
                let expected = of_active[missed.min(of_active.len() - 1)];
                let cut = cut(&scores, recall);
                assert_eq!(cut.threshold, expected, "{count} {recall}");
                let selected = scores.iter().filter(|(score, _)| *score >= expected);
                let selected = selected.count() as f64 / f64::from(count as u32);
                assert_eq!(cut.selected_fraction, selected, "{count} {recall}");
            }
        }
    }

    #[test]
    fn scores_that_are_no_numbers_are_missed_and_nobody_active_needs_nobody() {
        let odd = [(f32::NAN, true), (1.0, true), (f32::INFINITY, false)];
        assert_eq!(cut(&odd, 0.5).threshold, 1.0);
        // A pair that gives no numbers needs everyone, and is not the best of all.
        let none = cut(&[(f32::NAN, true), (f32::NAN, false)], 0.9);
        assert_eq!(none.threshold, f32::NEG_INFINITY);
        assert_eq!(none.selected_fraction, 1.0);
        for scores in [&[][..], &[(3.0, false)]] {
            let cut = cut(scores, 0.9);
            assert_eq!((cut.threshold, cut.selected_fraction), (f32::MAX, 0.0));
        }
    }
}
