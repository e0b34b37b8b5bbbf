//! How likely a model finds a text: the log-probability of each token after those before it.
//!
//! `logprobs[i - 1] = ln p(ids[i] | ids[..i])`, natural logarithm; log-softmax in f64 over f32 logits. Logits of
//! a few positions are held at a time.
//!
//! Not here: blocks of a long text (`blocks`), choices of a task (`continuation`).

use serde::Serialize;

use crate::error::Result;
use crate::load::LoadedModel;

/// The score of one text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// `ln p(ids[i] | ids[..i])` for `i` from 1.
    pub logprobs: Vec<f64>,
    /// The logits after the last token.
    pub last_logits: Vec<f32>,
}

impl Score {
    /// Mean negative log-probability of a token; `None` for a text of one token, which predicts nothing.
    pub fn mean_nll(&self) -> Option<f64> {
        let count = self.logprobs.len();
        (count > 0).then(|| -self.logprobs.iter().sum::<f64>() / count as f64)
    }

    /// e to the mean negative log-probability.
    pub fn perplexity(&self) -> Option<f64> {
        self.mean_nll().map(f64::exp)
    }
}

/// Scores `ids` as a text of its own.
pub fn score(model: &mut LoadedModel, ids: &[u32]) -> Result<Score> {
    let mut logprobs = Vec::with_capacity(ids.len().saturating_sub(1));
    let last_logits = score_each(model, ids, &mut |_, logprob| logprobs.push(logprob))?;
    Ok(Score {
        ids: ids.to_vec(),
        logprobs,
        last_logits,
    })
}

/// Calls `each(i, ln p(ids[i] | ids[..i]))` for `i` from 1, and gives the logits after the last token.
pub fn score_each(
    model: &mut LoadedModel,
    ids: &[u32],
    each: &mut dyn FnMut(usize, f64),
) -> Result<Vec<f32>> {
    model.reset();
    let mut last_logits = Vec::new();
    model.forward_each(ids, &mut |index, logits| {
        match ids.get(index + 1) {
            Some(&next) => each(index + 1, logprob(logits, next)),
            None => last_logits = logits.to_vec(),
        }
        Ok(())
    })?;
    Ok(last_logits)
}

/// `ln softmax(logits)[id]`, natural logarithm.
///
/// # Panics
/// There is no such logit.
pub fn logprob(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = |logit: f32| f64::from(logit) - f64::from(max);
    let sum: f64 = logits.iter().map(|logit| shifted(*logit).exp()).sum();
    shifted(logits[id as usize]) - sum.ln()
}

/// The id of the first of the largest logits, as torch's `argmax` has it; `None` without logits.
pub fn likeliest(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (id, &logit) in logits.iter().enumerate() {
        if best.is_none_or(|(_, largest)| logit > largest) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin() * 20.0).collect();
        let sum: f64 = (0..100).map(|id| logprob(&logits, id).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12, "{sum}");
    }

    #[test]
    fn large_and_small_logits_do_not_overflow() {
        assert_eq!(logprob(&[7.0; 4], 2), -(4f64.ln()));
        let far = [1e30f32, 0.0, -1e30];
        assert_eq!(logprob(&far, 0), 0.0);
        assert_eq!(logprob(&far, 2), -2.0 * f64::from(1e30f32));
        // Beyond f32's precision next to 1, not beyond f64's.
        assert!((logprob(&[20.0, 0.0], 0) + (-20f64).exp()).abs() < 1e-15);
    }

    #[test]
    fn perplexity_of_a_uniform_guess_is_the_number_of_choices() {
        let uniform = Score {
            ids: vec![0, 1, 2],
            logprobs: vec![-(8f64.ln()); 2],
            last_logits: Vec::new(),
        };
        assert!((uniform.perplexity().unwrap() - 8.0).abs() < 1e-12);
        let one = Score {
            ids: vec![0],
            logprobs: Vec::new(),
            last_logits: vec![1.0],
        };
        assert_eq!(one.perplexity(), None);
        let json = serde_json::to_string(&one).unwrap();
        assert_eq!(json, r#"{"ids":[0],"logprobs":[],"last_logits":[1.0]}"#);
    }

    #[test]
    fn the_first_of_the_largest_logits_is_the_likeliest() {
        assert_eq!(likeliest(&[1.0, 3.0, 3.0, 2.0]), Some(1));
        assert_eq!(likeliest(&[f32::NEG_INFINITY; 2]), Some(0));
        assert_eq!(likeliest(&[]), None);
    }
}
