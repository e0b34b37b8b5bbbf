//! Small pieces that several families are made of.

use candle::{Device, Result, Tensor};
use candle_nn::LayerNorm;
use candle_wick::{
    release_free_heap, with_awake_threads, FlashEmbedding, FlashLinear, FlashMlp, FlashVarBuilder,
    KvCache,
};

use crate::interrupt::Interrupt;

/// One layer of a family: attention over its own KV cache, and an FFN.
pub(crate) trait Layer {
    /// Hidden states `(1, seq, hidden_size)`, whose first is at `position`, from those of the layer before.
    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor>;

    /// The keys and values that it has seen.
    fn kv_cache(&mut self) -> &mut KvCache;

    /// The FFN, where its input is known only after attention: then the layer before may read ahead for it.
    fn mlp_after_attention(&self) -> Option<&FlashMlp>;
}

/// The layers of a model, which have all seen the same positions.
pub(crate) struct Layers<L> {
    layers: Vec<L>,
    interrupt: Interrupt,
}

impl<L: Layer> Layers<L> {
    /// `count` layers, each by its index from 0; `interrupt` stops a forward pass between two of them.
    pub(crate) fn load(
        count: usize,
        interrupt: Interrupt,
        mut layer: impl FnMut(usize) -> Result<L>,
    ) -> Result<Self> {
        let mut layers: Vec<L> = Vec::with_capacity(count);
        for index in 0..count {
            layers.push(layer(index)?);
            // What one layer's loading left free would add up under the peak.
            release_free_heap();
        }
        for pair in layers.windows(2) {
            let [before, after] = [0, 1].map(|index: usize| pair[index].mlp_after_attention());
            if let (Some(before), Some(after)) = (before, after) {
                before.look_ahead_to(after);
            }
        }
        Ok(Self { layers, interrupt })
    }

    /// Refuses `input_ids` `(1, seq)` from `position` on that do not follow those seen.
    pub(crate) fn check_next(&mut self, input_ids: &Tensor, position: usize) -> Result<()> {
        match self.layers.first_mut() {
            Some(layer) => layer.kv_cache().check_next(position, input_ids.dim(1)?),
            None => Ok(()),
        }
    }

    /// Hidden states `(1, seq, hidden_size)`, whose first is at `position`, through all layers.
    pub(crate) fn forward(&mut self, mut x: Tensor, position: usize) -> Result<Tensor> {
        for layer in &mut self.layers {
            self.interrupt.check()?;
            x = with_awake_threads(|| layer.forward(&x, position))?;
        }
        Ok(x)
    }

    /// Forgets all but the first `positions` of the sequence; 0 starts a new one.
    pub(crate) fn truncate_kv_cache(&mut self, positions: usize) {
        for layer in &mut self.layers {
            layer.kv_cache().truncate(positions);
        }
    }
}

/// `LayerNorm` over the last `size` values; one without weights (not `affine`) only normalises.
pub(crate) fn layer_norm(
    size: usize,
    eps: f64,
    affine: bool,
    vb: FlashVarBuilder,
) -> Result<LayerNorm> {
    let (weight, bias) = if affine {
        (vb.get(size, "weight")?, vb.get(size, "bias")?)
    } else {
        let constant = |value: f32| Tensor::full(value, size, &Device::Cpu);
        (constant(1.0)?, constant(0.0)?)
    };
    Ok(LayerNorm::new(weight, bias, eps))
}

/// Name of the head's matrix: that of the `embedding` when they are `tied`.
pub(crate) fn head_name(embedding: &str, tied: bool) -> String {
    if tied { embedding } else { "lm_head.weight" }.to_owned()
}

/// `(1, seq, heads * dim)` as `(1, heads, seq, dim)`.
pub(crate) fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (_, seq, width) = x.dims3()?;
    x.reshape((1, seq, heads, width / heads))?.transpose(1, 2)
}

/// The token embedding `(vocab_size, width)` at `embed`, and the output head: the same matrix when they are
/// `tied`, else that at `head`, in both cases with the bias at `head` where there is one. An embedding that is not
/// also the head is read row by row.
pub(crate) fn embedding_and_head(
    vocab_size: usize,
    width: usize,
    tied: bool,
    embed: FlashVarBuilder,
    head: FlashVarBuilder,
) -> Result<(FlashEmbedding, FlashLinear)> {
    let embedding = FlashEmbedding::load(vocab_size, width, !tied, embed)?;
    let head = if tied {
        embedding.tied_head(&head)?
    } else {
        FlashLinear::load(width, vocab_size, head)?
    };
    Ok((embedding, head))
}
