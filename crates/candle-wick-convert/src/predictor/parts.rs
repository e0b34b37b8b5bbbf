//! Which tokens serve which purpose: of each text the last tenth is measured on, the tenth before it sets thresholds and ends
//! learning, the rest is learnt from.
//!
//! So every purpose sees every text, and nothing is judged on tokens that it was made from. Where there are more tokens than
//! wanted, whole blocks are taken, spread evenly over all texts.
//!
//! Not here: the tokens themselves (`observed`).

use std::ops::Range;

/// Tokens of one purpose, as ranges that do not overlap, ascending.
pub(super) type Part = Vec<Range<usize>>;

/// The tokens of each purpose.
#[derive(Debug, PartialEq)]
pub(super) struct Parts {
    pub(super) fit: Part,
    pub(super) tune: Part,
    pub(super) measure: Part,
}

impl Parts {
    /// Of texts that follow each other and have so many tokens each.
    pub(super) fn of(tokens_by_text: &[usize]) -> Self {
        let (mut fit, mut tune, mut measure) = (Part::new(), Part::new(), Part::new());
        let mut start = 0;
        for tokens in tokens_by_text {
            let (held_out, end) = (tokens / 10, start + tokens);
            fit.push(start..end - 2 * held_out);
            tune.push(end - 2 * held_out..end - held_out);
            measure.push(end - held_out..end);
            start = end;
        }
        Self { fit, tune, measure }
    }

    /// How many tokens each purpose has, in the order of the fields.
    pub(super) fn counts(&self) -> [usize; 3] {
        [&self.fit, &self.tune, &self.measure].map(|part| count(part))
    }
}

/// Tokens of a part.
pub(super) fn count(part: &[Range<usize>]) -> usize {
    part.iter().map(Range::len).sum()
}

/// Whole blocks of `ctx` tokens of texts with so many tokens, one after the other: `wanted` of them, spread evenly, or all.
/// Gives where each starts, counted over all texts, and how many tokens of them each text has: a block belongs to the
/// text that it starts in.
pub(super) fn blocks(
    tokens_by_text: &[usize],
    ctx: usize,
    wanted: usize,
) -> (Vec<usize>, Vec<usize>) {
    let blocks = tokens_by_text.iter().sum::<usize>() / ctx;
    let kept = wanted.min(blocks);
    let starts: Vec<usize> = (0..kept).map(|block| block * blocks / kept * ctx).collect();
    let mut end = 0;
    let owned = tokens_by_text.iter().map(|tokens| {
        let range = end..end + tokens;
        end = range.end;
        ctx * starts.iter().filter(|start| range.contains(start)).count()
    });
    let owned = owned.collect();
    (starts, owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_gives_a_share_to_each_purpose() {
        let parts = Parts::of(&[100, 9, 40]);
        assert_eq!(parts.fit, [0..80, 100..109, 109..141]);
        assert_eq!(parts.tune, [80..90, 109..109, 141..145]);
        assert_eq!(parts.measure, [90..100, 109..109, 145..149]);
        assert_eq!(parts.counts(), [121, 14, 14]);
        assert_eq!(Parts::of(&[]).counts(), [0; 3]);
    }

    #[test]
    fn blocks_are_spread_over_all_texts_and_belong_to_where_they_start() {
        // Two texts of 5 and 7 blocks and a half, and one so short that no block starts in it.
        let (starts, owned) = blocks(&[55, 1, 74], 10, 100);
        assert_eq!(starts, (0..13).map(|block| 10 * block).collect::<Vec<_>>());
        assert_eq!(owned, [60, 0, 70]);
        let (starts, owned) = blocks(&[55, 1, 74], 10, 4);
        assert_eq!(starts, [0, 30, 60, 90]);
        assert_eq!(owned, [20, 0, 20]);
        assert_eq!(blocks(&[9], 10, 4), (vec![], vec![0]));
    }
}
