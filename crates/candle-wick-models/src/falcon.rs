//! Falcon (7B, 40B, 180B, 11B and the RW models), its FFN on flash.
//!
//! Tensor names and config keys are Hugging Face's (`FalconForCausalLM`). Shapes: ids `(1, seq)`, hidden states
//! `(1, seq, hidden_size)`, logits `(1, vocab_size)` for the last position. Activations are f32.
//!
//! One fused projection gives queries, keys and values: for each key head the query heads that share it, then
//! itself, then its value head. Multi-query models have one such group, the RW models one for each head.

use candle::{Module, Result, Tensor};
use candle_nn::LayerNorm;
use candle_wick::{
    Activation, Alibi, FlashEmbedding, FlashLinear, FlashMlp, FlashVarBuilder, KvCache, ModelNeeds,
    Residuals,
};
use serde::Deserialize;

use crate::family::{yes, CausalLm, ModelConfig};
use crate::interrupt::Interrupt;
use crate::layers::{embedding_and_head, head_name, layer_norm, Layer, Layers};
use crate::limits::{check_heads, check_kv_heads, check_positive, check_rotary_head, check_sizes};
use crate::rope::{Rope, RopeParameters};

/// The keys of `config.json` that this definition obeys.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the keys are Hugging Face's, documented there")]
pub struct FalconConfig {
    pub hidden_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_kv_heads: Option<usize>,
    pub ffn_hidden_size: Option<usize>,
    #[serde(default = "gelu")]
    pub activation: String,
    pub hidden_act_param: Option<f32>,
    #[serde(default = "default_eps")]
    pub layer_norm_epsilon: f64,
    #[serde(default = "default_positions")]
    pub max_position_embeddings: usize,
    #[serde(default)]
    pub alibi: bool,
    #[serde(default)]
    pub new_decoder_architecture: bool,
    #[serde(default = "yes")]
    pub multi_query: bool,
    #[serde(default = "yes")]
    pub parallel_attn: bool,
    pub num_ln_in_parallel_attn: Option<usize>,
    pub rope_theta: Option<f64>,
    pub rope_scaling: Option<RopeParameters>,
    pub rope_parameters: Option<RopeParameters>,
    #[serde(default = "yes")]
    pub tie_word_embeddings: bool,
}

fn gelu() -> String {
    "gelu".to_owned()
}

fn default_eps() -> f64 {
    1e-5
}

fn default_positions() -> usize {
    2048
}

impl FalconConfig {
    fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// `num_kv_heads` counts in the new decoder architecture alone.
    fn kv_heads(&self) -> usize {
        match (self.new_decoder_architecture, self.multi_query) {
            (true, _) => self.num_kv_heads.unwrap_or(self.num_attention_heads),
            (false, true) => 1,
            (false, false) => self.num_attention_heads,
        }
    }

    /// Rows of the fused projection.
    fn qkv_dim(&self) -> usize {
        (self.num_attention_heads + 2 * self.kv_heads()) * self.head_dim()
    }

    fn ffn_dim(&self) -> usize {
        self.ffn_hidden_size
            .unwrap_or(self.hidden_size.saturating_mul(4))
    }

    /// Whether attention and FFN see the same hidden states; in the new decoder architecture they always do.
    fn is_parallel(&self) -> bool {
        self.new_decoder_architecture || self.parallel_attn
    }

    /// Layer norms of a parallel block.
    fn parallel_norms(&self) -> usize {
        let default = if self.new_decoder_architecture { 2 } else { 1 };
        self.num_ln_in_parallel_attn.unwrap_or(default)
    }

    fn inv_freq(&self) -> std::result::Result<Vec<f32>, String> {
        let parameters = RopeParameters::of(&self.rope_scaling, &self.rope_parameters);
        let theta = self.rope_theta.unwrap_or(10_000.0);
        parameters.partial_inv_freq(theta, 1.0, self.head_dim())
    }

    fn check_positions(&self) -> std::result::Result<(), String> {
        if !self.alibi {
            check_rotary_head(self.head_dim())?;
            return self.inv_freq().map(|_| ());
        }
        if self.rope_scaling.is_some() {
            let reason = "rope_scaling in a model with alibi, which has no rotary embeddings";
            return Err(reason.to_owned());
        }
        Ok(())
    }
}

impl ModelConfig for FalconConfig {
    fn validate(&self) -> std::result::Result<(), String> {
        let (hidden, heads, kv_heads) =
            (self.hidden_size, self.num_attention_heads, self.kv_heads());
        check_sizes(&[
            ("hidden_size", hidden),
            ("ffn_hidden_size", self.ffn_dim()),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_attention_heads", heads),
            ("num_kv_heads", kv_heads),
        ])?;
        check_positive("layer_norm_epsilon", self.layer_norm_epsilon)?;
        check_heads(hidden, heads)?;
        check_kv_heads(heads, kv_heads)?;
        let most = if self.new_decoder_architecture { 2 } else { 1 };
        if self.is_parallel() && !(1..=most).contains(&self.parallel_norms()) {
            return Err(format!(
                "num_ln_in_parallel_attn is {}, expected 1, or 2 in the new decoder architecture",
                self.parallel_norms()
            ));
        }
        self.activation().map_err(|error| error.to_string())?;
        self.check_positions()
    }

    fn num_hidden_layers(&self) -> usize {
        self.num_hidden_layers
    }

    fn is_gated(&self) -> bool {
        false
    }

    fn max_position_embeddings(&self) -> usize {
        self.max_position_embeddings
    }

    fn activation(&self) -> candle_wick::Result<Activation> {
        Activation::from_config(&self.activation, self.hidden_act_param)
    }

    fn needs(&self, ctx: usize) -> ModelNeeds {
        let embedding = "transformer.word_embeddings.weight";
        let layer_bytes = KvCache::position_bytes(self.kv_heads(), self.head_dim());
        let rope_bytes = match self.alibi {
            true => 0,
            false => self
                .inv_freq()
                .map_or(0, |inv_freq| Rope::position_bytes(&inv_freq)),
        };
        ModelNeeds {
            ctx,
            kv_position_bytes: self.num_hidden_layers as u64 * layer_bytes + rope_bytes,
            hidden_size: self.hidden_size,
            // The most is in flight either when the fused product is turned around or when attention has both
            // it and the turned queries; hidden states, their norm and what attention gave are there as well.
            token_values: 5 * self.hidden_size + 2 * self.qkv_dim(),
            vocab_size: self.vocab_size,
            embedding: embedding.to_owned(),
            head: head_name(embedding, self.tie_word_embeddings),
        }
    }

    fn load(
        &self,
        vb: FlashVarBuilder,
        ctx: usize,
        interrupt: Interrupt,
    ) -> Result<Box<dyn CausalLm>> {
        Ok(Box::new(Falcon::load(vb, self, ctx, interrupt)?))
    }
}

/// How attention knows where tokens are.
#[derive(Clone)]
enum Positions {
    Rotary(Rope),
    Alibi(Alibi),
}

impl Positions {
    fn new(cfg: &FalconConfig, ctx: usize) -> Result<Self> {
        if cfg.alibi {
            return Ok(Self::Alibi(Alibi::new(cfg.num_attention_heads)));
        }
        let inv_freq = cfg.inv_freq().map_err(candle::Error::msg)?;
        Ok(Self::Rotary(Rope::new(&inv_freq, ctx)?))
    }

    fn alibi(&self) -> Option<Alibi> {
        match self {
            Self::Rotary(_) => None,
            Self::Alibi(alibi) => Some(alibi.clone()),
        }
    }

    /// Turns queries or keys `(1, heads, seq, head_dim)`, whose first row is at `position`.
    fn turn(&self, x: Tensor, position: usize) -> Result<Tensor> {
        match self {
            Self::Rotary(rope) => rope.apply(&x, position),
            Self::Alibi(_) => Ok(x),
        }
    }
}

/// Queries `(1, kv_heads * share, seq, head_dim)`, keys and values `(1, kv_heads, seq, head_dim)` from
/// `fused` `(1, seq, kv_heads * (share + 2) * head_dim)`, where `share` query heads use a key head.
fn split_qkv(fused: &Tensor, kv_heads: usize, share: usize) -> Result<(Tensor, Tensor, Tensor)> {
    let (_, seq, width) = fused.dims3()?;
    let head_dim = width / (kv_heads * (share + 2));
    let groups = fused.reshape((seq, kv_heads, share + 2, head_dim))?;
    let groups = groups.permute((2, 1, 0, 3))?;
    let queries = groups.narrow(0, 0, share)?.transpose(0, 1)?;
    Ok((
        queries.reshape((1, kv_heads * share, seq, head_dim))?,
        groups.narrow(0, share, 1)?,
        groups.narrow(0, share + 1, 1)?,
    ))
}

struct Attention {
    query_key_value: FlashLinear,
    dense: FlashLinear,
    num_kv_heads: usize,
    /// Query heads that use one key head.
    share: usize,
    head_dim: usize,
    positions: Positions,
    kv_cache: KvCache,
}

impl Attention {
    fn load(
        vb: FlashVarBuilder,
        cfg: &FalconConfig,
        positions: &Positions,
        ctx: usize,
    ) -> Result<Self> {
        let (hidden, kv_heads, head_dim) = (cfg.hidden_size, cfg.kv_heads(), cfg.head_dim());
        let fused = vb.pp("query_key_value");
        Ok(Self {
            query_key_value: FlashLinear::load(hidden, cfg.qkv_dim(), fused)?,
            dense: FlashLinear::load(hidden, hidden, vb.pp("dense"))?,
            num_kv_heads: kv_heads,
            share: cfg.num_attention_heads / kv_heads,
            head_dim,
            positions: positions.clone(),
            kv_cache: KvCache::new(kv_heads, head_dim, ctx).with_alibi(positions.alibi()),
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let attended = self.attend(x, position)?;
        self.dense.forward(&attended)
    }

    /// Everything before the output projection; queries, keys and values are let go on return.
    fn attend(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let fused = self.query_key_value.forward(x)?;
        let (q, k, v) = split_qkv(&fused, self.num_kv_heads, self.share)?;
        self.kv_cache
            .append(&self.positions.turn(k, position)?, &v)?;
        let q = self.positions.turn(q, position)?;
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        self.kv_cache.causal_attention(&q, scale)
    }
}

/// What the FFN of a block sees.
enum MlpInput {
    /// What attention saw.
    Shared,
    /// The block's hidden states under a norm of its own.
    Normed(LayerNorm),
    /// The sum of hidden states and attention, normed.
    AfterAttention(LayerNorm),
}

struct DecoderLayer {
    attention_norm: LayerNorm,
    self_attention: Attention,
    mlp_input: MlpInput,
    mlp: FlashMlp,
}

impl DecoderLayer {
    fn load(
        vb: FlashVarBuilder,
        cfg: &FalconConfig,
        positions: &Positions,
        ctx: usize,
    ) -> Result<Self> {
        let norm = |name: &str| norm(cfg, vb.pp(name));
        let (attention_norm, mlp_input) = if !cfg.is_parallel() {
            let mlp_norm = norm("post_attention_layernorm")?;
            (norm("input_layernorm")?, MlpInput::AfterAttention(mlp_norm))
        } else if cfg.parallel_norms() == 2 {
            (norm("ln_attn")?, MlpInput::Normed(norm("ln_mlp")?))
        } else {
            (norm("input_layernorm")?, MlpInput::Shared)
        };
        let activation = cfg.activation()?;
        Ok(Self {
            attention_norm,
            self_attention: Attention::load(vb.pp("self_attention"), cfg, positions, ctx)?,
            mlp_input,
            mlp: FlashMlp::load(cfg.hidden_size, cfg.ffn_dim(), activation, vb.pp("mlp"))?,
        })
    }
}

impl Layer for DecoderLayer {
    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let normed = self.attention_norm.forward(x)?;
        // Where the FFN's input is known, its neurons are read during attention.
        let begun = match &self.mlp_input {
            MlpInput::Shared => self.mlp.begin_with(&normed, x)?,
            MlpInput::Normed(norm) => self.mlp.begin_with(&norm.forward(x)?, x)?,
            MlpInput::AfterAttention(norm) => {
                let sum = (x + self.self_attention.forward(&normed, position)?)?;
                let residuals = Residuals {
                    layer_input: x,
                    after_attention: &sum,
                };
                let y = self.mlp.forward_with(&norm.forward(&sum)?, residuals)?;
                return sum + y;
            }
        };
        let sum = (x + self.self_attention.forward(&normed, position)?)?;
        let y = begun.finish_with(&sum)?;
        sum + y
    }

    fn kv_cache(&mut self) -> &mut KvCache {
        &mut self.self_attention.kv_cache
    }

    fn mlp_after_attention(&self) -> Option<&FlashMlp> {
        match self.mlp_input {
            MlpInput::AfterAttention(_) => Some(&self.mlp),
            MlpInput::Shared | MlpInput::Normed(_) => None,
        }
    }
}

/// Layer norms have biases even where the linear layers have none.
fn norm(cfg: &FalconConfig, vb: FlashVarBuilder) -> Result<LayerNorm> {
    layer_norm(cfg.hidden_size, cfg.layer_norm_epsilon, true, vb)
}

/// A Falcon for one sequence.
pub struct Falcon {
    word_embeddings: FlashEmbedding,
    layers: Layers<DecoderLayer>,
    ln_f: LayerNorm,
    lm_head: FlashLinear,
}

impl Falcon {
    /// Loads what the placement of `vb` keeps in DRAM, with room for `ctx` positions.
    pub fn load(
        vb: FlashVarBuilder,
        cfg: &FalconConfig,
        ctx: usize,
        interrupt: Interrupt,
    ) -> Result<Self> {
        cfg.validate().map_err(candle::Error::msg)?;
        let positions = Positions::new(cfg, ctx)?;
        let transformer = vb.pp("transformer");
        let (word_embeddings, lm_head) = embedding_and_head(
            cfg.vocab_size,
            cfg.hidden_size,
            cfg.tie_word_embeddings,
            transformer.pp("word_embeddings"),
            vb.pp("lm_head"),
        )?;
        let layer = |index| DecoderLayer::load(transformer.pp("h").pp(index), cfg, &positions, ctx);
        Ok(Self {
            word_embeddings,
            layers: Layers::load(cfg.num_hidden_layers, interrupt, layer)?,
            ln_f: norm(cfg, transformer.pp("ln_f"))?,
            lm_head,
        })
    }
}

impl CausalLm for Falcon {
    fn hidden_states(&mut self, input_ids: &Tensor, position: usize) -> Result<Tensor> {
        self.layers.check_next(input_ids, position)?;
        let x = self.word_embeddings.forward(input_ids)?;
        let x = self.layers.forward(x, position)?;
        self.ln_f.forward(&x)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(hidden)
    }

    fn truncate_kv_cache(&mut self, positions: usize) {
        self.layers.truncate_kv_cache(positions);
    }
}

#[cfg(test)]
#[path = "falcon_tests.rs"]
mod tests;
