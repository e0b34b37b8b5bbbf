//! The residual stream around a layer's attention, before any norm: what some predictors look at in the place of the
//! FFN's own input.

use candle::Tensor;

/// The residual stream of a decoder layer at two places, `(.., hidden_size)` each, of the tokens of the FFN's input.
#[derive(Clone, Copy, Debug)]
pub struct Residuals<'a> {
    /// As it comes into the layer.
    pub layer_input: &'a Tensor,
    /// With what attention gave added to it.
    pub after_attention: &'a Tensor,
}
