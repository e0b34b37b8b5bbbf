//! ALiBi: a penalty on attention scores that grows with distance instead of position embeddings.
//!
//! Head `h` adds `slope(h) * position` to the score of the key at `position`; softmax does not see what all
//! keys have in common, so only distances count. Slopes and products are rounded to bf16, as the models that
//! use it were trained (`build_alibi_tensor` of `FalconForCausalLM`).

use half::bf16;

/// The slopes of a layer's query heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Alibi {
    slopes: Vec<bf16>,
}

impl Alibi {
    /// Slopes for `heads` query heads: a geometric sequence over the largest power of two in `heads`, then
    /// every other term of the sequence for twice as many.
    pub fn new(heads: usize) -> Self {
        let sequence = |count: usize| {
            let base = 2f64.powf(-8.0 / count as f64) as f32;
            (1..=count).map(move |power| bf16::from_f32(base.powi(power as i32)))
        };
        let first = heads.checked_ilog2().map_or(0, |log| 1 << log);
        let rest = sequence(2 * first).step_by(2).take(heads - first);
        Self {
            slopes: sequence(first).chain(rest).collect(),
        }
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        self.slopes.len()
    }

    /// What head `head` adds to the score of the key at `position`, before scores are scaled.
    pub fn bias(&self, head: usize, position: usize) -> f32 {
        (self.slopes[head] * bf16::from_f32(position as f32)).to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_paper() {
        let slopes = |heads| -> Vec<f32> {
            let alibi = Alibi::new(heads);
            (0..alibi.heads()).map(|head| alibi.bias(head, 1)).collect()
        };
        assert_eq!(slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
        assert_eq!(slopes(1), [1.0 / 256.0]);
        // Six heads: those of four, then the first and third of eight.
        assert_eq!(slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
        assert!(slopes(0).is_empty());
    }

    #[test]
    fn products_are_rounded_to_bf16() {
        // 257 needs nine bits, bf16 has eight.
        assert_eq!(Alibi::new(1).bias(0, 257), 1.0);
        assert_eq!(Alibi::new(1).bias(0, 258), 258.0 / 256.0);
    }
}
