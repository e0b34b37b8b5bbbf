//! Small pieces that several families are made of.

use candle::{Device, Result, Tensor};
use candle_nn::LayerNorm;
use candle_wick::{FlashEmbedding, FlashLinear, FlashVarBuilder};

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
