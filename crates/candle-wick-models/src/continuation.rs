//! How likely a model finds continuations of a context: what tasks with choices are scored by.
//!
//! The protocol is that of lm-eval: context and continuation are tokenised together, and the continuation's tokens
//! are those beyond the context's own count; spaces at the end of the context belong to the continuation, where
//! most vocabularies have them. What is longer than the model's context loses its beginning.
//!
//! Continuations scored together share their longest common beginning: it goes through the model once. Results are
//! the same bits as one by one, since they depend neither on how many tokens come at once nor on what is cached; with selectors
//! for which that is not so (`dip-ca`), each goes through the model from its start.
//!
//! Not here: tasks and what their scores add up to.

use crate::error::{Error, Result};
use crate::load::LoadedModel;
use crate::score::{likeliest, logprob};
use crate::tokenizer::WickTokenizer;

/// A context and what follows it.
///
/// Invariant: `1 <= start < ids.len()`, so every target has something that predicts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    ids: Vec<u32>,
    /// The first target.
    start: usize,
}

/// How likely a continuation is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContinuationScore {
    /// `ln p(continuation | context)`, natural logarithm, added up over its tokens.
    pub logprob: f64,
    /// Whether each of its tokens is the likeliest one: greedy decoding would write it.
    pub is_greedy: bool,
}

impl Continuation {
    /// Tokenises `context` and `continuation` together, behind the ids `before`: none, or what
    /// [`WickTokenizer::special_prefix`] says.
    ///
    /// # Errors
    /// Nothing precedes the continuation, or it adds no token to its context.
    pub fn encode(
        tokenizer: &WickTokenizer,
        before: &[u32],
        context: &str,
        continuation: &str,
    ) -> Result<Self> {
        let joint = format!("{context}{continuation}");
        let context = tokenizer.encode_bare(context.trim_end())?;
        let mut ids = before.to_vec();
        ids.extend(tokenizer.encode_bare(&joint)?);
        Self::new(ids, before.len() + context.len())
    }

    /// The continuation `ids[start..]` of `ids[..start]`.
    ///
    /// # Errors
    /// One of the two is empty.
    pub fn new(ids: Vec<u32>, start: usize) -> Result<Self> {
        match start {
            0 => Err(Error::NoContext),
            start if start >= ids.len() => Err(Error::NoContinuation),
            start => Ok(Self { ids, start }),
        }
    }

    /// Cuts the beginning of the context until the model has to see `ctx` tokens at most: all but the last. Gives how
    /// many tokens that took.
    ///
    /// # Errors
    /// The continuation alone is too long.
    pub fn cut_to(&mut self, ctx: usize) -> Result<usize> {
        let surplus = self.ids.len().saturating_sub(ctx.saturating_add(1));
        if surplus >= self.start {
            let tokens = self.target_count();
            return Err(Error::ContinuationLength { tokens, ctx });
        }
        self.ids.drain(..surplus);
        self.start -= surplus;
        Ok(surplus)
    }

    /// All tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Where the continuation starts among them.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Tokens of the continuation.
    pub fn target_count(&self) -> usize {
        self.ids.len() - self.start
    }
}

/// Scores continuations, each as if it were alone, in the order given.
///
/// # Errors
/// One is longer than the model's context, has an unknown id, or the model fails.
pub fn score_continuations(
    model: &mut LoadedModel,
    continuations: &[Continuation],
) -> Result<Vec<ContinuationScore>> {
    let shared = match model.depends_on_history() {
        true => 0,
        false => shared_tokens(continuations),
    };
    model.reset();
    let after_shared = match continuations.first() {
        Some(first) if shared > 0 => model.forward(&first.ids[..shared])?,
        _ => Vec::new(),
    };
    let score = |continuation: &Continuation| {
        model.rewind(shared);
        score_from(model, continuation, shared, &after_shared)
    };
    continuations.iter().map(score).collect()
}

/// Tokens at the start of all contexts that are the same.
fn shared_tokens(continuations: &[Continuation]) -> usize {
    let Some((first, others)) = continuations.split_first() else {
        return 0;
    };
    let same = |other: &Continuation| {
        let context = other.ids[..other.start].iter();
        let pairs = context.zip(&first.ids[..first.start]);
        pairs.take_while(|(a, b)| a == b).count()
    };
    others.iter().map(same).min().unwrap_or(first.start)
}

/// Scores a continuation whose first `seen` tokens the model has seen, with `logits` after them.
fn score_from(
    model: &mut LoadedModel,
    continuation: &Continuation,
    seen: usize,
    logits: &[f32],
) -> Result<ContinuationScore> {
    let Continuation { ids, start } = continuation;
    let mut score = ContinuationScore {
        logprob: 0.0,
        is_greedy: true,
    };
    let mut add = |logits: &[f32], target: u32| {
        if target as usize >= logits.len() {
            let vocab_size = logits.len();
            return Err(Error::UnknownId {
                id: target,
                vocab_size,
            });
        }
        score.logprob += logprob(logits, target);
        score.is_greedy &= likeliest(logits) == Some(target);
        Ok(())
    };
    if *start > seen {
        let logits = model.forward(&ids[seen..*start])?;
        add(&logits, ids[*start])?;
    } else {
        add(logits, ids[*start])?;
    }
    let inputs = &ids[*start..ids.len() - 1];
    if !inputs.is_empty() {
        model.forward_each(inputs, &mut |index, logits| {
            add(logits, ids[start + index + 1])
        })?;
    }
    match score.logprob.is_finite() {
        true => Ok(score),
        false => Err(Error::NotFinite),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn continuation(ids: &[u32], start: usize) -> Continuation {
        Continuation::new(ids.to_vec(), start).unwrap()
    }

    #[test]
    fn contexts_share_what_they_begin_with_and_no_more() {
        let shared = |list: &[(&[u32], usize)]| {
            let list: Vec<Continuation> = list
                .iter()
                .map(|(ids, start)| continuation(ids, *start))
                .collect();
            shared_tokens(&list)
        };
        assert_eq!(shared(&[(&[1, 2, 3, 4], 2), (&[1, 2, 3, 5], 2)]), 2);
        assert_eq!(shared(&[(&[1, 2, 3, 4], 3), (&[1, 2, 3, 5], 2)]), 2);
        assert_eq!(shared(&[(&[1, 2, 3, 4], 3), (&[1, 9, 3, 5], 3)]), 1);
        assert_eq!(shared(&[(&[1, 2, 3], 2), (&[4, 2, 3], 2)]), 0);
        assert_eq!(shared(&[(&[1, 2, 3], 2)]), 2);
        assert_eq!(shared(&[]), 0);
    }

    #[test]
    fn the_beginning_is_cut_and_the_last_token_needs_no_place() {
        let mut exact = continuation(&[1, 2, 3, 4, 5], 3);
        assert_eq!(exact.cut_to(4).unwrap(), 0);
        assert_eq!(exact.cut_to(3).unwrap(), 1);
        assert_eq!(exact, continuation(&[2, 3, 4, 5], 2));
        assert_eq!(exact.cut_to(2).unwrap(), 1);
        let error = exact.cut_to(1).unwrap_err().to_string();
        assert!(
            error.contains("2 tokens") && error.contains("context of 1"),
            "{error}"
        );
        assert_eq!(exact.cut_to(usize::MAX).unwrap(), 0);
    }

    #[test]
    fn a_continuation_of_nothing_and_one_that_is_nothing_are_refused() {
        assert!(matches!(
            Continuation::new(vec![1, 2], 0),
            Err(Error::NoContext)
        ));
        for start in [2, 3] {
            let error = Continuation::new(vec![1, 2], start);
            assert!(matches!(error, Err(Error::NoContinuation)));
        }
    }
}
