//! Perplexity over a text longer than the context, as GPTQ and QuaRot measure it.
//!
//! The text is tokenised once, special tokens at its start and nowhere else, and cut into blocks of as many tokens
//! that do not overlap; what is left at the end is dropped. Each block is a text of its own: its first token is
//! given, the others are targets. All blocks have as many targets, so the mean over targets is the mean of the
//! blocks' means. lm-eval's `wikitext` rolls over documents and counts words: its numbers are others.
//!
//! Not here: tokenising, adding blocks up.

use crate::error::{Error, Result};
use crate::load::LoadedModel;
use crate::score::score_each;

/// The blocks of a text: `block_tokens` ids each, at least one block.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    ids: &'a [u32],
    block_tokens: usize,
    count: usize,
}

impl<'a> Blocks<'a> {
    /// Cuts `ids` into blocks, the first `count_max` of them.
    ///
    /// # Errors
    /// A block of one token has no target, or the text is shorter than one block.
    pub fn cut(ids: &'a [u32], block_tokens: usize, count_max: usize) -> Result<Self> {
        let tokens = ids.len();
        if block_tokens < 2 {
            return Err(Error::BlockTokens { block_tokens });
        }
        let count = (tokens / block_tokens).min(count_max);
        if count == 0 {
            return Err(Error::NoBlock {
                tokens,
                block_tokens,
            });
        }
        Ok(Self {
            ids,
            block_tokens,
            count,
        })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Tokens of a block that are predicted: all but the first.
    pub fn targets_per_block(&self) -> usize {
        self.block_tokens - 1
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Tokens of the text that are in no block.
    pub fn dropped_tokens(&self) -> usize {
        self.ids.len() - self.count * self.block_tokens
    }

    /// The blocks in order.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u32]> {
        self.ids.chunks_exact(self.block_tokens).take(self.count)
    }
}

/// `-ln p`, natural logarithm, of all but the first token of `block`, added up.
///
/// # Errors
/// The model fails, or a probability is no number.
pub fn block_nll(model: &mut LoadedModel, block: &[u32]) -> Result<f64> {
    let mut sum = 0.0;
    score_each(model, block, &mut |_, logprob| sum -= logprob)?;
    match sum.is_finite() {
        true => Ok(sum),
        false => Err(Error::NotFinite),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_overlap_and_the_tail_is_dropped() {
        let ids: Vec<u32> = (0..11).collect();
        let blocks = Blocks::cut(&ids, 3, usize::MAX).unwrap();
        let cut: Vec<&[u32]> = blocks.iter().collect();
        assert_eq!(cut, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]);
        assert_eq!((blocks.count(), blocks.dropped_tokens()), (3, 2));
        assert_eq!(blocks.targets_per_block(), 2);
        let first = Blocks::cut(&ids, 3, 1).unwrap();
        assert_eq!((first.iter().count(), first.dropped_tokens()), (1, 8));
    }

    #[test]
    fn a_text_without_a_block_and_a_block_without_a_target_are_refused() {
        let error = Blocks::cut(&[1, 2], 3, 9).unwrap_err().to_string();
        assert!(error.contains("2 tokens") && error.contains("block of 3"));
        for block_tokens in [0, 1] {
            let error = Blocks::cut(&[1, 2], block_tokens, 9).unwrap_err();
            assert!(error.to_string().contains("at least 2"), "{error}");
        }
    }
}
