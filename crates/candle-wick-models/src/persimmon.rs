//! Persimmon, its FFN on flash: squared ReLU, queries and keys normed by head, half of each head turned by its
//! position, and a vocabulary so large that embedding and head are a quarter of the model.
//!
//! Tensor names and config keys are Hugging Face's (`PersimmonForCausalLM`). Shapes: ids `(1, seq)`, hidden states
//! `(1, seq, hidden_size)`, logits `(1, vocab_size)` for the last position. Activations are f32.

use candle::{Module, Result, Tensor};
use candle_nn::LayerNorm;
use candle_wick::{
    Activation, FlashEmbedding, FlashLinear, FlashMlp, FlashVarBuilder, KvCache, ModelNeeds,
    Residuals,
};
use serde::Deserialize;

use crate::family::{yes, CausalLm, ModelConfig};
use crate::interrupt::Interrupt;
use crate::layers::{embedding_and_head, head_name, layer_norm, split_heads, Layer, Layers};
use crate::limits::{check_heads, check_positive, check_sizes};
use crate::rope::{Rope, RopeParameters};

/// The keys of `config.json` that this definition obeys.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the keys are Hugging Face's, documented there")]
pub struct PersimmonConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    #[serde(default = "relu2")]
    pub hidden_act: String,
    pub hidden_act_param: Option<f32>,
    #[serde(default = "default_positions")]
    pub max_position_embeddings: usize,
    #[serde(default = "default_eps")]
    pub layer_norm_eps: f64,
    #[serde(default = "yes")]
    pub qk_layernorm: bool,
    pub rope_theta: Option<f64>,
    pub partial_rotary_factor: Option<f64>,
    pub rope_scaling: Option<RopeParameters>,
    pub rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    pub tie_word_embeddings: bool,
}

fn relu2() -> String {
    "relu2".to_owned()
}

fn default_positions() -> usize {
    16_384
}

fn default_eps() -> f64 {
    1e-5
}

impl PersimmonConfig {
    fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    fn inv_freq(&self) -> std::result::Result<Vec<f32>, String> {
        let parameters = RopeParameters::of(&self.rope_scaling, &self.rope_parameters);
        let theta = self.rope_theta.unwrap_or(25_000.0);
        parameters.partial_inv_freq(
            theta,
            self.partial_rotary_factor.unwrap_or(0.5),
            self.head_dim(),
        )
    }
}

impl ModelConfig for PersimmonConfig {
    fn validate(&self) -> std::result::Result<(), String> {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        check_sizes(&[
            ("hidden_size", hidden),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_attention_heads", heads),
        ])?;
        check_positive("layer_norm_eps", self.layer_norm_eps)?;
        check_heads(hidden, heads)?;
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
        let layer_bytes = KvCache::position_bytes(self.num_attention_heads, self.head_dim());
        let rope_bytes = self
            .inv_freq()
            .map_or(0, |inv_freq| Rope::position_bytes(&inv_freq));
        ModelNeeds {
            ctx,
            kv_position_bytes: self.num_hidden_layers as u64 * layer_bytes + rope_bytes,
            hidden_size: self.hidden_size,
            // At the end of attention: x, its norm, queries, keys and values together and one by one, queries and
            // keys normed and turned, and the output before and after `dense`.
            token_values: 15 * self.hidden_size,
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
        Ok(Box::new(Persimmon::load(vb, self, ctx, interrupt)?))
    }
}

struct Attention {
    query_key_value: FlashLinear,
    dense: FlashLinear,
    q_layernorm: Option<LayerNorm>,
    k_layernorm: Option<LayerNorm>,
    num_attention_heads: usize,
    head_dim: usize,
    rope: Rope,
    kv_cache: KvCache,
}

impl Attention {
    fn load(vb: FlashVarBuilder, cfg: &PersimmonConfig, rope: &Rope, ctx: usize) -> Result<Self> {
        let (hidden, head_dim) = (cfg.hidden_size, cfg.head_dim());
        let head_norm = |name: &str| {
            let load = || layer_norm(head_dim, cfg.layer_norm_eps, true, vb.pp(name));
            cfg.qk_layernorm.then(load).transpose()
        };
        Ok(Self {
            query_key_value: FlashLinear::load(hidden, 3 * hidden, vb.pp("query_key_value"))?,
            dense: FlashLinear::load(hidden, hidden, vb.pp("dense"))?,
            q_layernorm: head_norm("q_layernorm")?,
            k_layernorm: head_norm("k_layernorm")?,
            num_attention_heads: cfg.num_attention_heads,
            head_dim,
            rope: rope.clone(),
            kv_cache: KvCache::new(cfg.num_attention_heads, head_dim, ctx),
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        // The rows of the fused matrix are each head's q, k and v.
        let fused = split_heads(&self.query_key_value.forward(x)?, self.num_attention_heads)?;
        let part = |index| {
            let part = fused.narrow(3, index * self.head_dim, self.head_dim)?;
            part.contiguous()
        };
        let q = self.q_layernorm.as_ref().forward(&part(0)?)?;
        let k = self.k_layernorm.as_ref().forward(&part(1)?)?;
        let v = part(2)?;
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
    post_attention_layernorm: LayerNorm,
    mlp: FlashMlp,
}

impl DecoderLayer {
    fn load(vb: FlashVarBuilder, cfg: &PersimmonConfig, rope: &Rope, ctx: usize) -> Result<Self> {
        let activation = cfg.activation()?;
        let (hidden, intermediate) = (cfg.hidden_size, cfg.intermediate_size);
        Ok(Self {
            input_layernorm: norm(cfg, vb.pp("input_layernorm"))?,
            self_attn: Attention::load(vb.pp("self_attn"), cfg, rope, ctx)?,
            post_attention_layernorm: norm(cfg, vb.pp("post_attention_layernorm"))?,
            mlp: FlashMlp::load(hidden, intermediate, activation, vb.pp("mlp"))?,
        })
    }
}

impl Layer for DecoderLayer {
    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let normed = self.input_layernorm.forward(x)?;
        let sum = (x + self.self_attn.forward(&normed, position)?)?;
        let normed = self.post_attention_layernorm.forward(&sum)?;
        let residuals = Residuals {
            layer_input: x,
            after_attention: &sum,
        };
        let y = self.mlp.forward_with(&normed, residuals)?;
        sum + y
    }

    fn kv_cache(&mut self) -> &mut KvCache {
        &mut self.self_attn.kv_cache
    }

    fn mlp_after_attention(&self) -> Option<&FlashMlp> {
        Some(&self.mlp)
    }
}

fn norm(cfg: &PersimmonConfig, vb: FlashVarBuilder) -> Result<LayerNorm> {
    layer_norm(cfg.hidden_size, cfg.layer_norm_eps, true, vb)
}

/// A Persimmon for one sequence.
pub struct Persimmon {
    embed_tokens: FlashEmbedding,
    layers: Layers<DecoderLayer>,
    final_layernorm: LayerNorm,
    lm_head: FlashLinear,
}

impl Persimmon {
    /// Loads what the placement of `vb` keeps in DRAM, with room for `ctx` positions.
    pub fn load(
        vb: FlashVarBuilder,
        cfg: &PersimmonConfig,
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

impl CausalLm for Persimmon {
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
