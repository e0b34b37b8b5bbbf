//! Where a pair starts to learn: at the closed form, made into logits, or at random numbers.
//!
//! A closed-form score misses the pre-activation by an error of about the same size for all tokens, `d`. If that is
//! normal, a neuron with score `s` is active with the probability `Phi(s / d)`, which is nearly the logistic function of
//! `1.702 s / d`; the weights of the loss add the same number to all logits. So learning starts where each neuron's
//! threshold already takes account of how well the pair knows that neuron.

use candle::{DType, Device, Result, Tensor};

use super::factor::Factors;
use super::random::Random;
use super::threshold::{activation_threshold, Truth};

/// Makes the logistic function of a multiple differ from the normal distribution by less than 0.01 everywhere.
const LOGISTIC_OF_NORMAL: f64 = 1.702;
/// Tokens that the errors are measured on.
const TOKENS: usize = 4096;
/// Tokens whose scores are computed together.
const ROWS: usize = 256;
/// The least error, as a share of the pre-activations' own size.
const ERROR_MIN: f64 = 0.01;

/// The pair whose scores are logits of what `closed` predicts, for the inputs `x` `(tokens, hidden)`; `negative_weight` is
/// how much an inactive neuron counts in the loss.
pub(super) fn calibrated(
    closed: &Factors,
    truth: &Truth<'_>,
    x: &Tensor,
    negative_weight: f64,
) -> Result<Factors> {
    let (errors, size) = mean_squares(closed, truth, x)?;
    let least = (size * ERROR_MIN * ERROR_MIN).max(f64::from(f32::MIN_POSITIVE));
    let scale = (errors.maximum(least)?.sqrt()?.recip()? * LOGISTIC_OF_NORMAL)?;
    let threshold = f64::from(activation_threshold(truth.activation));
    let bias = closed.bias.affine(1.0, -threshold)?;
    Ok(Factors {
        down: closed.down.clone(),
        up: closed.up.broadcast_mul(&scale.unsqueeze(1)?)?,
        bias: (bias * scale)?.affine(1.0, -negative_weight.ln())?,
    })
}

/// The means of the squares, over the first tokens of `x`: of each neuron's error, `(intermediate)`, and of all
/// pre-activations.
fn mean_squares(closed: &Factors, truth: &Truth<'_>, x: &Tensor) -> Result<(Tensor, f64)> {
    let tokens = TOKENS.min(x.dim(0)?);
    let mut errors = truth.bias.zeros_like()?;
    let mut size = 0.0;
    for start in (0..tokens).step_by(ROWS) {
        let rows = x.narrow(0, start, ROWS.min(tokens - start))?;
        let exact = truth.pre_activations(&rows)?;
        let squares = (closed.scores(&rows)? - &exact)?.sqr()?;
        errors = (errors + squares.sum(0)?)?;
        size += f64::from(exact.sqr()?.sum_all()?.to_scalar::<f32>()?);
    }
    let of_tokens = 1.0 / tokens.max(1) as f64;
    let neurons = errors.elem_count().max(1) as f64;
    Ok(((errors * of_tokens)?, size * of_tokens / neurons))
}

/// Random matrices as linear layers have them in PyTorch, no bias.
pub(super) fn random(hidden: usize, neurons: usize, rank: usize, seed: u64) -> Result<Factors> {
    let mut random = Random(seed);
    let mut matrix = |rows: usize, columns: usize| {
        let radius = 1.0 / (columns.max(1) as f32).sqrt();
        let values: Vec<f32> = (0..rows * columns)
            .map(|_| random.uniform(radius))
            .collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu)
    };
    Ok(Factors {
        down: matrix(rank, hidden)?,
        up: matrix(neurons, rank)?,
        bias: Tensor::zeros(neurons, DType::F32, &Device::Cpu)?,
    })
}

#[cfg(test)]
mod tests {
    use candle_wick::Activation;

    use super::*;

    /// The shares of active neurons are those that the logits promise, for neurons known well and badly.
    #[test]
    fn logits_of_the_closed_form_are_probabilities() -> Result<()> {
        let (tokens, hidden, neurons) = (4000, 16, 30);
        let mut random = Random(1);
        let (x, weight) = (
            random.normal(tokens, hidden)?,
            random.normal(neurons, hidden)?,
        );
        let bias = Tensor::full(-3f32, neurons, &Device::Cpu)?;
        let truth = Truth {
            weight: &weight,
            bias: &bias,
            activation: Activation::FatRelu(0.5),
        };
        let closed = Factors::fit(&weight, &bias, &x, 8)?;
        // A weight of 1 adds nothing.
        let logits = calibrated(&closed, &truth, &x, 1.0)?
            .scores(&x)?
            .flatten_all()?;
        let exact = truth.pre_activations(&x)?.flatten_all()?.to_vec1::<f32>()?;
        let (mut promised, mut active, mut count) = ([0.0; 4], [0.0; 4], [0.0; 4]);
        for (logit, exact) in logits.to_vec1::<f32>()?.iter().zip(exact) {
            let p = 1.0 / (1.0 + f64::from(-logit).exp());
            let quarter = ((4.0 * p) as usize).min(3);
            promised[quarter] += p;
            active[quarter] += f64::from(u8::from(exact > 0.5));
            count[quarter] += 1.0;
        }
        for quarter in 0..4 {
            let difference = (promised[quarter] - active[quarter]) / count[quarter];
            assert!(
                count[quarter] > 500.0 && difference.abs() < 0.04,
                "{difference}"
            );
        }
        Ok(())
    }

    #[test]
    fn random_starts_go_by_the_seed_and_are_small() -> Result<()> {
        let values = |seed| random(16, 30, 4, seed)?.up.flatten_all()?.to_vec1::<f32>();
        assert_eq!(values(1)?, values(1)?);
        assert_ne!(values(1)?, values(2)?);
        assert!(values(3)?.iter().all(|value| value.abs() <= 0.5));
        Ok(())
    }
}
