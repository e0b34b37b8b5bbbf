//! Keys and values of one attention layer, and causal attention over them.
//!
//! `(kv_heads, ctx, head_dim)` f32 each, allocated once for the whole context. Scores are f32: f16 overflows
//! there for some models. Every sum goes over positions in ascending order by one thread, so results depend
//! neither on threads nor on how many tokens come at once.

use std::ops::Range;

use candle::{Device, Result, Tensor};
use rayon::prelude::*;
use wick_io::advise_huge_pages;
use wick_kernels::{axpy, dot};

use crate::alibi::Alibi;
use crate::rows::with_f32;

/// The keys and values that one layer has seen.
#[derive(Clone)]
pub struct KvCache {
    kv_heads: usize,
    head_dim: usize,
    ctx: usize,
    len: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
    sliding_window: Option<usize>,
    alibi: Option<Alibi>,
}

impl KvCache {
    /// Room for `ctx` positions; its pages are touched now, so that memory is taken at load or not at all.
    pub fn new(kv_heads: usize, head_dim: usize, ctx: usize) -> Self {
        let touched = || {
            let mut values = Vec::with_capacity(kv_heads * ctx * head_dim);
            advise_huge_pages(values.spare_capacity_mut());
            // Any value but zero: zeroed memory would come from the system untouched.
            values.resize(kv_heads * ctx * head_dim, 1.0);
            values
        };
        Self {
            kv_heads,
            head_dim,
            ctx,
            len: 0,
            keys: touched(),
            values: touched(),
            sliding_window: None,
            alibi: None,
        }
    }

    /// Lets each position see itself and those before it, `positions` in all (Mistral's `sliding_window`);
    /// `None` lets it see everything before it.
    pub fn with_sliding_window(self, positions: Option<usize>) -> Self {
        Self {
            sliding_window: positions,
            ..self
        }
    }

    /// Adds these biases to the scores, before they are scaled (`FalconAttention`).
    pub fn with_alibi(self, alibi: Option<Alibi>) -> Self {
        Self { alibi, ..self }
    }

    /// Bytes of one position in one layer.
    pub fn position_bytes(kv_heads: usize, head_dim: usize) -> u64 {
        (2 * 4 * kv_heads * head_dim) as u64
    }

    /// Positions seen so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position was seen yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Refuses `seq` new positions from `position` on that do not follow those seen.
    pub fn check_next(&self, position: usize, seq: usize) -> Result<()> {
        if position != self.len || seq == 0 {
            candle::bail!(
                "{seq} ids at position {position}, after {}: ids go on where the last ended",
                self.len
            );
        }
        Ok(())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Forgets what came after the first `len` positions; a longer `len` than was seen changes nothing.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Adds `seq` positions: `keys` and `values` are `(1, kv_heads, seq, head_dim)`.
    pub fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let (batch, kv_heads, seq, head_dim) = keys.dims4()?;
        if batch != 1 || seq == 0 {
            candle::bail!(
                "{batch} sequences of {seq} positions, a cache takes one of at least one"
            );
        }
        if keys.dims() != values.dims() || (kv_heads, head_dim) != (self.kv_heads, self.head_dim) {
            candle::bail!(
                "keys {:?}, values {:?} in a cache of other heads",
                keys.dims(),
                values.dims()
            );
        }
        if self.len + seq > self.ctx {
            candle::bail!(
                "{} positions and {seq} more exceed the context of {}",
                self.len,
                self.ctx
            );
        }
        for (new, kept) in [(keys, &mut self.keys), (values, &mut self.values)] {
            with_f32(new, |new| {
                for (head, rows) in new.chunks(seq * head_dim).enumerate() {
                    let start = (head * self.ctx + self.len) * head_dim;
                    kept[start..start + rows.len()].copy_from_slice(rows);
                }
                Ok(())
            })?;
        }
        self.len += seq;
        Ok(())
    }

    /// `softmax(scale · q kᵀ) v` for the newest `seq` positions: `q` `(1, heads, seq, head_dim)`, already
    /// appended keys and values; query head `h` uses key head `h / (heads / kv_heads)`. Gives
    /// `(1, seq, heads * head_dim)`. A sliding window and ALiBi apply as set.
    pub fn causal_attention(&self, q: &Tensor, scale: f32) -> Result<Tensor> {
        let (batch, heads, seq, head_dim) = q.dims4()?;
        if batch != 1 || head_dim != self.head_dim || heads % self.kv_heads != 0 || seq > self.len {
            candle::bail!(
                "queries {:?} for {} key heads of {}",
                q.dims(),
                self.kv_heads,
                self.head_dim
            );
        }
        if let Some(alibi) = self.alibi.as_ref().filter(|alibi| alibi.heads() != heads) {
            candle::bail!("ALiBi for {} heads, queries of {heads}", alibi.heads());
        }
        let mut out = vec![0.0; seq * heads * head_dim];
        with_f32(q, |q| {
            let attend = |scores: &mut Vec<f32>, (index, out): (usize, &mut [f32])| {
                let (token, head) = (index / heads, index % heads);
                let q = &q[(head * seq + token) * head_dim..][..head_dim];
                let end = self.len - seq + token + 1;
                let start = self
                    .sliding_window
                    .map_or(0, |width| end.saturating_sub(width));
                scores.resize(end - start, 0.0);
                self.attend((head, heads), start..end, q, scale, scores, out);
            };
            let capacity = || Vec::with_capacity(self.len);
            out.par_chunks_mut(head_dim)
                .enumerate()
                .for_each_init(capacity, attend);
            Ok(())
        })?;
        Tensor::from_vec(out, (1, seq, heads * head_dim), &Device::Cpu)
    }

    /// One query of head `head` of `heads` over some positions.
    fn attend(
        &self,
        (head, heads): (usize, usize),
        positions: Range<usize>,
        q: &[f32],
        scale: f32,
        scores: &mut [f32],
        out: &mut [f32],
    ) {
        let kv_head = head / (heads / self.kv_heads);
        let row = |position: usize| (kv_head * self.ctx + position) * self.head_dim;
        let range = row(positions.start)..row(positions.end);
        let mut largest = f32::NEG_INFINITY;
        let keys = self.keys[range.clone()].chunks(self.head_dim);
        for ((score, key), position) in scores.iter_mut().zip(keys).zip(positions) {
            let bias = self.alibi.as_ref().map(|alibi| alibi.bias(head, position));
            *score = (dot(q, key) + bias.unwrap_or(0.0)) * scale;
            largest = largest.max(*score);
        }
        let mut sum = 0.0;
        for score in scores.iter_mut() {
            *score = (*score - largest).exp();
            sum += *score;
        }
        for (score, value) in scores.iter().zip(self.values[range].chunks(self.head_dim)) {
            axpy(score / sum, value, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use candle::{DType, D};

    use super::*;

    fn random(shape: (usize, usize, usize, usize)) -> Tensor {
        Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap()
    }

    /// The same with candle's own operations.
    fn naive(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, window: usize, alibi: bool) -> Tensor {
        let (_, heads, seq, head_dim) = q.dims4().unwrap();
        let (_, kv_heads, len, _) = k.dims4().unwrap();
        let repeat = |x: &Tensor| {
            let x = x.unsqueeze(2).unwrap();
            let x = x
                .broadcast_as((1, kv_heads, heads / kv_heads, len, head_dim))
                .unwrap();
            x.reshape((1, heads, len, head_dim))
                .unwrap()
                .contiguous()
                .unwrap()
        };
        let (k, v) = (repeat(k), repeat(v));
        let scores = q.matmul(&k.t().unwrap().contiguous().unwrap()).unwrap();
        let biases = Alibi::new(heads);
        let mut mask = Vec::new();
        for (head, t) in (0..heads).flat_map(|head| (0..seq).map(move |t| (head, t))) {
            let last = len - seq + t;
            mask.extend((0..len).map(|p| match p {
                p if p > last || p + window <= last => f32::NEG_INFINITY,
                p if alibi => biases.bias(head, p) * scale as f32,
                _ => 0.0,
            }));
        }
        let mask = Tensor::from_vec(mask, (1, heads, seq, len), &Device::Cpu).unwrap();
        let scores = (scores * scale).unwrap();
        let weights =
            candle_nn::ops::softmax(&scores.broadcast_add(&mask).unwrap(), D::Minus1).unwrap();
        let out = weights.matmul(&v).unwrap().transpose(1, 2).unwrap();
        out.reshape((1, seq, heads * head_dim)).unwrap()
    }

    fn bits(x: &Tensor) -> Vec<u32> {
        let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        let values = x.to_vec1::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn equals_masked_softmax_and_its_own_steps() {
        let (heads, kv_heads, len, head_dim) = (6, 2, 11, 10);
        let (q, k, v) = (
            random((1, heads, len, head_dim)),
            random((1, kv_heads, len, head_dim)),
            random((1, kv_heads, len, head_dim)),
        );
        for (window, alibi) in [
            (None, false),
            (None, true),
            (Some(4), false),
            (Some(1), true),
        ] {
            let cache = |ctx| {
                KvCache::new(kv_heads, head_dim, ctx)
                    .with_sliding_window(window)
                    .with_alibi(alibi.then(|| Alibi::new(heads)))
            };
            let mut whole = cache(16);
            whole.append(&k, &v).unwrap();
            let all = whole.causal_attention(&q, 0.3).unwrap();
            let expected = naive(&q, &k, &v, 0.3, window.unwrap_or(len), alibi);
            let difference = (&all - expected).unwrap().abs().unwrap();
            let worst = difference.flatten_all().unwrap().max(0).unwrap();
            let worst = worst.to_scalar::<f32>().unwrap();
            assert!(worst < 1e-5, "{window:?} {alibi}: {worst}");

            let mut stepped = cache(len);
            for t in 0..len {
                let at = |x: &Tensor| x.narrow(2, t, 1).unwrap();
                stepped.append(&at(&k), &at(&v)).unwrap();
                let one = stepped.causal_attention(&at(&q), 0.3).unwrap();
                let same = all.narrow(1, t, 1).unwrap();
                assert_eq!(bits(&one), bits(&same), "position {t}");
            }
        }
    }

    #[test]
    fn refuses_more_positions_than_the_context() {
        let mut cache = KvCache::new(2, 4, 3);
        let k = random((1, 2, 2, 4));
        cache.append(&k, &k).unwrap();
        let message = cache.append(&k, &k).unwrap_err().to_string();
        assert!(message.contains("context of 3"), "{message}");
        assert_eq!(cache.len(), 2);
    }
}
