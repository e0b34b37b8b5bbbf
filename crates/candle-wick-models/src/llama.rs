//! Llama (1, 2, 3 and relatives with the same tensors), its FFN on flash.
//!
//! Tensor names and config keys are Hugging Face's (`LlamaForCausalLM`). Shapes: ids `(1, seq)`, hidden states
//! `(1, seq, hidden_size)`, logits `(1, vocab_size)` for the last position. Activations are f32.

use candle::{Module, Result, Tensor};
use candle_nn::RmsNorm;
use candle_wick::{
    Activation, FlashEmbedding, FlashLinear, FlashMlp, FlashVarBuilder, KvCache, ModelNeeds,
};
use serde::Deserialize;

use crate::family::{CausalLm, ModelConfig};
use crate::interrupt::Interrupt;
use crate::layers::{embedding_and_head, split_heads};
use crate::limits::{check_positive, check_sizes};
use crate::rope::{Rope, RopeParameters};

/// The keys of `config.json` that this definition obeys.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the keys are Hugging Face's, documented there")]
pub struct LlamaConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: Option<usize>,
    pub head_dim: Option<usize>,
    #[serde(default = "silu")]
    pub hidden_act: String,
    #[serde(default = "default_positions")]
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: Option<f64>,
    pub rope_scaling: Option<RopeParameters>,
    pub rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    pub tie_word_embeddings: bool,
}

fn silu() -> String {
    "silu".to_owned()
}

fn default_positions() -> usize {
    2048
}

impl LlamaConfig {
    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    fn inv_freq(&self) -> std::result::Result<Vec<f32>, String> {
        let parameters = self
            .rope_parameters
            .clone()
            .or(self.rope_scaling.clone())
            .unwrap_or_default();
        let theta = parameters
            .rope_theta
            .or(self.rope_theta)
            .unwrap_or(10_000.0);
        check_positive("rope_theta", theta)?;
        parameters.inv_freq(theta, self.head_dim())
    }
}

impl ModelConfig for LlamaConfig {
    fn validate(&self) -> std::result::Result<(), String> {
        let (heads, kv_heads) = (self.num_attention_heads, self.kv_heads());
        check_sizes(&[
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("head_dim", self.head_dim()),
            ("all heads together", heads.saturating_mul(self.head_dim())),
        ])?;
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "{heads} attention heads cannot share {kv_heads} key heads"
            ));
        }
        if !self.head_dim().is_multiple_of(2) {
            return Err(format!("head_dim {} is odd", self.head_dim()));
        }
        self.inv_freq().map(|_| ())
    }

    fn num_hidden_layers(&self) -> usize {
        self.num_hidden_layers
    }

    fn max_position_embeddings(&self) -> usize {
        self.max_position_embeddings
    }

    fn activation(&self) -> candle_wick::Result<Activation> {
        self.hidden_act.parse()
    }

    fn needs(&self, ctx: usize) -> ModelNeeds {
        let head = if self.tie_word_embeddings {
            "model.embed_tokens.weight"
        } else {
            "lm_head.weight"
        };
        let attention = self.num_attention_heads * self.head_dim();
        let layers = self.num_hidden_layers as u64;
        let rope_bytes = 4 * self.head_dim() as u64;
        ModelNeeds {
            ctx,
            kv_position_bytes: layers * KvCache::position_bytes(self.kv_heads(), self.head_dim())
                + rope_bytes,
            hidden_size: self.hidden_size,
            token_values: 5 * self.hidden_size + 5 * attention,
            vocab_size: self.vocab_size,
            embedding: "model.embed_tokens.weight".to_owned(),
            head: head.to_owned(),
        }
    }

    fn load(
        &self,
        vb: FlashVarBuilder,
        ctx: usize,
        interrupt: Interrupt,
    ) -> Result<Box<dyn CausalLm>> {
        Ok(Box::new(Llama::load(vb, self, ctx, interrupt)?))
    }
}

struct Attention {
    q_proj: FlashLinear,
    k_proj: FlashLinear,
    v_proj: FlashLinear,
    o_proj: FlashLinear,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    rope: Rope,
    kv_cache: KvCache,
}

impl Attention {
    fn load(vb: FlashVarBuilder, cfg: &LlamaConfig, rope: &Rope, ctx: usize) -> Result<Self> {
        let (hidden, head_dim) = (cfg.hidden_size, cfg.head_dim());
        let (q_dim, kv_dim) = (
            cfg.num_attention_heads * head_dim,
            cfg.kv_heads() * head_dim,
        );
        Ok(Self {
            q_proj: FlashLinear::load(hidden, q_dim, vb.pp("q_proj"))?,
            k_proj: FlashLinear::load(hidden, kv_dim, vb.pp("k_proj"))?,
            v_proj: FlashLinear::load(hidden, kv_dim, vb.pp("v_proj"))?,
            o_proj: FlashLinear::load(q_dim, hidden, vb.pp("o_proj"))?,
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
        let (q, k) = (
            self.rope.apply(&q, position)?,
            self.rope.apply(&k, position)?,
        );
        self.kv_cache.append(&k, &v)?;
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        self.o_proj
            .forward(&self.kv_cache.causal_attention(&q, scale)?)
    }
}

struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: FlashMlp,
}

impl Block {
    fn load(vb: FlashVarBuilder, cfg: &LlamaConfig, rope: &Rope, ctx: usize) -> Result<Self> {
        let activation = cfg.activation()?;
        let (hidden, intermediate) = (cfg.hidden_size, cfg.intermediate_size);
        Ok(Self {
            input_layernorm: rms_norm(cfg, vb.pp("input_layernorm"))?,
            self_attn: Attention::load(vb.pp("self_attn"), cfg, rope, ctx)?,
            post_attention_layernorm: rms_norm(cfg, vb.pp("post_attention_layernorm"))?,
            mlp: FlashMlp::load(hidden, intermediate, activation, vb.pp("mlp"))?,
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let x = (x + self
            .self_attn
            .forward(&self.input_layernorm.forward(x)?, position)?)?;
        let y = self
            .mlp
            .forward(&self.post_attention_layernorm.forward(&x)?)?;
        x + y
    }
}

fn rms_norm(cfg: &LlamaConfig, vb: FlashVarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm::new(
        vb.get(cfg.hidden_size, "weight")?,
        cfg.rms_norm_eps,
    ))
}

/// A Llama for one sequence.
pub struct Llama {
    embed_tokens: FlashEmbedding,
    layers: Vec<Block>,
    norm: RmsNorm,
    lm_head: FlashLinear,
    interrupt: Interrupt,
}

impl Llama {
    /// Loads what the placement of `vb` keeps in DRAM, with room for `ctx` positions.
    pub fn load(
        vb: FlashVarBuilder,
        cfg: &LlamaConfig,
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
        let layers = (0..cfg.num_hidden_layers)
            .map(|index| Block::load(model.pp("layers").pp(index), cfg, &rope, ctx));
        Ok(Self {
            embed_tokens,
            layers: layers.collect::<Result<_>>()?,
            norm: rms_norm(cfg, model.pp("norm"))?,
            lm_head,
            interrupt,
        })
    }
}

impl CausalLm for Llama {
    fn hidden_states(&mut self, input_ids: &Tensor, position: usize) -> Result<Tensor> {
        if let Some(layer) = self.layers.first() {
            let kv_cache = &layer.self_attn.kv_cache;
            kv_cache.check_next(position, input_ids.dim(1)?)?;
        }
        let mut x = self.embed_tokens.forward(input_ids)?;
        for layer in &mut self.layers {
            self.interrupt.check()?;
            x = layer.forward(&x, position)?;
        }
        self.norm.forward(&x)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(hidden)
    }

    fn clear_kv_cache(&mut self) {
        self.layers
            .iter_mut()
            .for_each(|layer| layer.self_attn.kv_cache.clear());
    }
}
