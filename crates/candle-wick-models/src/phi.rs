//! Phi (1, 1.5, 2), its FFN on flash: attention and FFN side by side behind one norm, biases everywhere, and only
//! the first part of each head turned by its position.
//!
//! Tensor names and config keys are Hugging Face's (`PhiForCausalLM`); the conversion brings older uploads to them.
//! Shapes: ids `(1, seq)`, hidden states `(1, seq, hidden_size)`, logits `(1, vocab_size)` for the last position.
//! Activations are f32, attention scores above all: those of Phi 2 are more than f16 holds.

use candle::{Module, Result, Tensor};
use candle_nn::LayerNorm;
use candle_wick::{
    Activation, FlashEmbedding, FlashLinear, FlashMlp, FlashVarBuilder, KvCache, ModelNeeds,
};
use serde::Deserialize;

use crate::family::{CausalLm, ModelConfig};
use crate::interrupt::Interrupt;
use crate::layers::{embedding_and_head, head_name, layer_norm, split_heads, Layer, Layers};
use crate::limits::{check_heads, check_kv_heads, check_positive, check_sizes};
use crate::rope::{Rope, RopeParameters};

/// The keys of `config.json` that this definition obeys.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the keys are Hugging Face's, documented there")]
pub struct PhiConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: Option<usize>,
    #[serde(default = "gelu_new")]
    pub hidden_act: String,
    pub hidden_act_param: Option<f32>,
    #[serde(default = "default_positions")]
    pub max_position_embeddings: usize,
    #[serde(default = "default_eps")]
    pub layer_norm_eps: f64,
    #[serde(default)]
    pub qk_layernorm: bool,
    pub rope_theta: Option<f64>,
    pub partial_rotary_factor: Option<f64>,
    pub rope_scaling: Option<RopeParameters>,
    pub rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    pub tie_word_embeddings: bool,
}

fn gelu_new() -> String {
    "gelu_new".to_owned()
}

fn default_positions() -> usize {
    2048
}

fn default_eps() -> f64 {
    1e-5
}

impl PhiConfig {
    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    fn inv_freq(&self) -> std::result::Result<Vec<f32>, String> {
        let parameters = RopeParameters::of(&self.rope_scaling, &self.rope_parameters);
        let theta = self.rope_theta.unwrap_or(10_000.0);
        parameters.partial_inv_freq(
            theta,
            self.partial_rotary_factor.unwrap_or(0.5),
            self.head_dim(),
        )
    }
}

impl ModelConfig for PhiConfig {
    fn validate(&self) -> std::result::Result<(), String> {
        let (hidden, heads, kv_heads) =
            (self.hidden_size, self.num_attention_heads, self.kv_heads());
        check_sizes(&[
            ("hidden_size", hidden),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
        ])?;
        check_positive("layer_norm_eps", self.layer_norm_eps)?;
        check_heads(hidden, heads)?;
        check_kv_heads(heads, kv_heads)?;
        self.activation().map_err(|error| error.to_string())?;
        self.inv_freq().map(|_| ())
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
        Activation::from_config(&self.hidden_act, self.hidden_act_param)
    }

    fn needs(&self, ctx: usize) -> ModelNeeds {
        let embedding = "model.embed_tokens.weight";
        let (kv_heads, head_dim) = (self.kv_heads(), self.head_dim());
        let layer_bytes = KvCache::position_bytes(kv_heads, head_dim);
        let rope_bytes = self
            .inv_freq()
            .map_or(0, |inv_freq| Rope::position_bytes(&inv_freq));
        ModelNeeds {
            ctx,
            kv_position_bytes: self.num_hidden_layers as u64 * layer_bytes + rope_bytes,
            hidden_size: self.hidden_size,
            // At the end of attention: x, its norm, queries and keys as projected, normed and turned, values, and the
            // output before and after `dense`.
            token_values: 8 * self.hidden_size + 4 * kv_heads * head_dim,
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
        Ok(Box::new(Phi::load(vb, self, ctx, interrupt)?))
    }
}

struct Attention {
    q_proj: FlashLinear,
    k_proj: FlashLinear,
    v_proj: FlashLinear,
    dense: FlashLinear,
    q_layernorm: Option<LayerNorm>,
    k_layernorm: Option<LayerNorm>,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    rope: Rope,
    kv_cache: KvCache,
}

impl Attention {
    fn load(vb: FlashVarBuilder, cfg: &PhiConfig, rope: &Rope, ctx: usize) -> Result<Self> {
        let (hidden, head_dim) = (cfg.hidden_size, cfg.head_dim());
        let kv_dim = cfg.kv_heads() * head_dim;
        let head_norm = |name: &str| {
            let load = || layer_norm(head_dim, cfg.layer_norm_eps, true, vb.pp(name));
            cfg.qk_layernorm.then(load).transpose()
        };
        Ok(Self {
            q_proj: FlashLinear::load(hidden, hidden, vb.pp("q_proj"))?,
            k_proj: FlashLinear::load(hidden, kv_dim, vb.pp("k_proj"))?,
            v_proj: FlashLinear::load(hidden, kv_dim, vb.pp("v_proj"))?,
            dense: FlashLinear::load(hidden, hidden, vb.pp("dense"))?,
            q_layernorm: head_norm("q_layernorm")?,
            k_layernorm: head_norm("k_layernorm")?,
            num_attention_heads: cfg.num_attention_heads,
            num_key_value_heads: cfg.kv_heads(),
            head_dim,
            rope: rope.clone(),
            kv_cache: KvCache::new(cfg.kv_heads(), head_dim, ctx),
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let q = split_heads(&self.q_proj.forward(x)?, self.num_attention_heads)?;
        let k = split_heads(&self.k_proj.forward(x)?, self.num_key_value_heads)?;
        let v = split_heads(&self.v_proj.forward(x)?, self.num_key_value_heads)?;
        let q = self.q_layernorm.as_ref().forward(&q.contiguous()?)?;
        let k = self.k_layernorm.as_ref().forward(&k.contiguous()?)?;
        let q = self.rope.apply(&q, position)?;
        let k = self.rope.apply(&k, position)?;
        self.kv_cache.append(&k, &v)?;
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        self.dense
            .forward(&self.kv_cache.causal_attention(&q, scale)?)
    }
}

struct DecoderLayer {
    input_layernorm: LayerNorm,
    self_attn: Attention,
    mlp: FlashMlp,
}

impl DecoderLayer {
    fn load(vb: FlashVarBuilder, cfg: &PhiConfig, rope: &Rope, ctx: usize) -> Result<Self> {
        let activation = cfg.activation()?;
        let (hidden, intermediate) = (cfg.hidden_size, cfg.intermediate_size);
        Ok(Self {
            input_layernorm: norm(cfg, vb.pp("input_layernorm"))?,
            self_attn: Attention::load(vb.pp("self_attn"), cfg, rope, ctx)?,
            mlp: FlashMlp::load(hidden, intermediate, activation, vb.pp("mlp"))?,
        })
    }
}

impl Layer for DecoderLayer {
    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let normed = self.input_layernorm.forward(x)?;
        // Neurons are read during attention, which sees the same.
        let begun = self.mlp.begin_with(&normed, x)?;
        let attention = self.self_attn.forward(&normed, position)?;
        let y = begun.finish_with(&(x + &attention)?)?;
        (attention + y)? + x
    }

    fn kv_cache(&mut self) -> &mut KvCache {
        &mut self.self_attn.kv_cache
    }

    fn mlp_after_attention(&self) -> Option<&FlashMlp> {
        None
    }
}

fn norm(cfg: &PhiConfig, vb: FlashVarBuilder) -> Result<LayerNorm> {
    layer_norm(cfg.hidden_size, cfg.layer_norm_eps, true, vb)
}

/// A Phi for one sequence.
pub struct Phi {
    embed_tokens: FlashEmbedding,
    layers: Layers<DecoderLayer>,
    final_layernorm: LayerNorm,
    lm_head: FlashLinear,
}

impl Phi {
    /// Loads what the placement of `vb` keeps in DRAM, with room for `ctx` positions.
    pub fn load(
        vb: FlashVarBuilder,
        cfg: &PhiConfig,
        ctx: usize,
        interrupt: Interrupt,
    ) -> Result<Self> {
        cfg.validate().map_err(candle::Error::msg)?;
        let rope = Rope::new(&cfg.inv_freq().map_err(candle::Error::msg)?, ctx)?;
        let model = vb.pp("model");
        let (embed_tokens, lm_head) = embedding_and_head(
            cfg.vocab_size,
            cfg.hidden_size,
            cfg.tie_word_embeddings,
            model.pp("embed_tokens"),
            vb.pp("lm_head"),
        )?;
        let layer = |index| DecoderLayer::load(model.pp("layers").pp(index), cfg, &rope, ctx);
        Ok(Self {
            embed_tokens,
            layers: Layers::load(cfg.num_hidden_layers, interrupt, layer)?,
            final_layernorm: norm(cfg, model.pp("final_layernorm"))?,
            lm_head,
        })
    }
}

impl CausalLm for Phi {
    fn hidden_states(&mut self, input_ids: &Tensor, position: usize) -> Result<Tensor> {
        self.layers.check_next(input_ids, position)?;
        let x = self.embed_tokens.forward(input_ids)?;
        let x = self.layers.forward(x, position)?;
        self.final_layernorm.forward(&x)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(hidden)
    }

    fn truncate_kv_cache(&mut self, positions: usize) {
        self.layers.truncate_kv_cache(positions);
    }
}
