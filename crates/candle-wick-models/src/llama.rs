//! Llama (1, 2, 3, ProSparse), Mistral and Qwen2, their FFN on flash: one definition, told apart by their configs.
//!
//! Tensor names and config keys are Hugging Face's (`LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`).
//! Shapes: ids `(1, seq)`, hidden states `(1, seq, hidden_size)`, logits `(1, vocab_size)` for the last position.
//! Activations are f32. Biases are used where the folder has them: the conversion kept those that the config asks
//! for.

use candle::{Module, Result, Tensor};
use candle_nn::RmsNorm;
use candle_wick::{
    Activation, FlashEmbedding, FlashLinear, FlashMlp, FlashVarBuilder, KvCache, ModelNeeds,
    Residuals,
};
use serde::Deserialize;

use crate::family::{CausalLm, ModelConfig};
use crate::interrupt::Interrupt;
use crate::layers::{embedding_and_head, head_name, split_heads, Layer, Layers};
use crate::limits::{check_kv_heads, check_positive, check_rotary_head, check_sizes};
use crate::rope::{Rope, RopeParameters};

/// `model_type`: who the config's defaults and the sliding window come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LlamaKind {
    /// Llama.
    Llama,
    /// ProSparse, a Llama with FATReLU.
    SparseLlama,
    /// Mistral: a sliding window in every layer.
    Mistral,
    /// Qwen2: biases at q, k and v, a sliding window in some layers.
    Qwen2,
}

/// The keys of `config.json` that this definition obeys.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the keys are Hugging Face's, documented there")]
pub struct LlamaConfig {
    pub model_type: LlamaKind,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: Option<usize>,
    pub head_dim: Option<usize>,
    #[serde(default = "silu")]
    pub hidden_act: String,
    pub hidden_act_param: Option<f32>,
    pub max_position_embeddings: Option<usize>,
    #[serde(default = "default_eps")]
    pub rms_norm_eps: f64,
    pub rope_theta: Option<f64>,
    pub rope_scaling: Option<RopeParameters>,
    pub rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    pub tie_word_embeddings: bool,
    #[serde(default = "default_window")]
    pub sliding_window: Option<usize>,
    #[serde(default)]
    pub use_sliding_window: bool,
    #[serde(default = "default_max_window_layers")]
    pub max_window_layers: usize,
    pub layer_types: Option<Vec<LayerType>>,
}

/// An entry of `layer_types`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// A position sees everything before it.
    FullAttention,
    /// A position sees a window.
    SlidingAttention,
}

fn silu() -> String {
    "silu".to_owned()
}

fn default_eps() -> f64 {
    1e-6
}

fn default_window() -> Option<usize> {
    Some(4096)
}

fn default_max_window_layers() -> usize {
    28
}

impl LlamaConfig {
    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(match self.model_type {
            LlamaKind::Llama | LlamaKind::SparseLlama => self.num_attention_heads,
            LlamaKind::Mistral => 8,
            LlamaKind::Qwen2 => 32,
        })
    }

    fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// How many positions a token sees in `layer`, itself among them; `None` when all.
    pub fn sliding_window_of(&self, layer: usize) -> Option<usize> {
        let slides = match &self.layer_types {
            Some(types) => types.get(layer) == Some(&LayerType::SlidingAttention),
            None => self.model_type == LlamaKind::Mistral || layer >= self.max_window_layers,
        };
        self.window().filter(|_| slides)
    }

    /// The window of the layers that have one.
    fn window(&self) -> Option<usize> {
        match self.model_type {
            LlamaKind::Llama | LlamaKind::SparseLlama => None,
            LlamaKind::Qwen2 if !self.use_sliding_window => None,
            LlamaKind::Mistral | LlamaKind::Qwen2 => self.sliding_window,
        }
    }

    fn check_windows(&self) -> std::result::Result<(), String> {
        check_sizes(&[("sliding_window", self.window().unwrap_or(1))])?;
        match self.layer_types.as_ref().map(Vec::len) {
            Some(types) if types != self.num_hidden_layers => Err(format!(
                "layer_types has {types} entries for {} layers",
                self.num_hidden_layers
            )),
            _ => Ok(()),
        }
    }

    fn inv_freq(&self) -> std::result::Result<Vec<f32>, String> {
        let parameters = RopeParameters::of(&self.rope_scaling, &self.rope_parameters);
        let theta = self.rope_theta.unwrap_or(10_000.0);
        parameters.partial_inv_freq(theta, 1.0, self.head_dim())
    }
}

impl ModelConfig for LlamaConfig {
    fn validate(&self) -> std::result::Result<(), String> {
        let (heads, kv_heads) = (self.num_attention_heads, self.kv_heads());
        check_sizes(&[
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings()),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("head_dim", self.head_dim()),
            ("all heads together", heads.saturating_mul(self.head_dim())),
        ])?;
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        check_kv_heads(heads, kv_heads)?;
        check_rotary_head(self.head_dim())?;
        self.check_windows()?;
        self.activation().map_err(|error| error.to_string())?;
        self.inv_freq().map(|_| ())
    }

    fn num_hidden_layers(&self) -> usize {
        self.num_hidden_layers
    }

    fn is_gated(&self) -> bool {
        true
    }

    fn max_position_embeddings(&self) -> usize {
        self.max_position_embeddings
            .unwrap_or(match self.model_type {
                LlamaKind::Llama | LlamaKind::SparseLlama => 2048,
                LlamaKind::Mistral => 131_072,
                LlamaKind::Qwen2 => 32_768,
            })
    }

    fn activation(&self) -> candle_wick::Result<Activation> {
        Activation::from_config(&self.hidden_act, self.hidden_act_param)
    }

    fn needs(&self, ctx: usize) -> ModelNeeds {
        let embedding = "model.embed_tokens.weight";
        let attention = self.num_attention_heads * self.head_dim();
        let layer_bytes = KvCache::position_bytes(self.kv_heads(), self.head_dim());
        let rope_bytes = self
            .inv_freq()
            .map_or(0, |inv_freq| Rope::position_bytes(&inv_freq));
        ModelNeeds {
            ctx,
            kv_position_bytes: self.num_hidden_layers as u64 * layer_bytes + rope_bytes,
            hidden_size: self.hidden_size,
            token_values: 5 * self.hidden_size + 5 * attention,
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
    fn load(
        vb: FlashVarBuilder,
        cfg: &LlamaConfig,
        rope: &Rope,
        kv_cache: KvCache,
    ) -> Result<Self> {
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
            kv_cache,
        })
    }

    fn forward(&mut self, x: &Tensor, position: usize) -> Result<Tensor> {
        let q = split_heads(&self.q_proj.forward(x)?, self.num_attention_heads)?;
        let k = split_heads(&self.k_proj.forward(x)?, self.num_key_value_heads)?;
        let v = split_heads(&self.v_proj.forward(x)?, self.num_key_value_heads)?;
        let q = self.rope.apply(&q, position)?;
        let k = self.rope.apply(&k, position)?;
        self.kv_cache.append(&k, &v)?;
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        self.o_proj
            .forward(&self.kv_cache.causal_attention(&q, scale)?)
    }
}

struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: FlashMlp,
}

impl DecoderLayer {
    fn load(
        vb: FlashVarBuilder,
        cfg: &LlamaConfig,
        rope: &Rope,
        kv_cache: KvCache,
    ) -> Result<Self> {
        let activation = cfg.activation()?;
        let (hidden, intermediate) = (cfg.hidden_size, cfg.intermediate_size);
        Ok(Self {
            input_layernorm: rms_norm(cfg, vb.pp("input_layernorm"))?,
            self_attn: Attention::load(vb.pp("self_attn"), cfg, rope, kv_cache)?,
            post_attention_layernorm: rms_norm(cfg, vb.pp("post_attention_layernorm"))?,
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

fn rms_norm(cfg: &LlamaConfig, vb: FlashVarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm::new(
        vb.get(cfg.hidden_size, "weight")?,
        cfg.rms_norm_eps,
    ))
}

/// A Llama, Mistral or Qwen2 for one sequence.
pub struct Llama {
    embed_tokens: FlashEmbedding,
    layers: Layers<DecoderLayer>,
    norm: RmsNorm,
    lm_head: FlashLinear,
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
        let layer = |index| {
            let kv_cache = KvCache::new(cfg.kv_heads(), cfg.head_dim(), ctx)
                .with_sliding_window(cfg.sliding_window_of(index));
            DecoderLayer::load(model.pp("layers").pp(index), cfg, &rope, kv_cache)
        };
        Ok(Self {
            embed_tokens,
            layers: Layers::load(cfg.num_hidden_layers, interrupt, layer)?,
            norm: rms_norm(cfg, model.pp("norm"))?,
            lm_head,
        })
    }
}

impl CausalLm for Llama {
    fn hidden_states(&mut self, input_ids: &Tensor, position: usize) -> Result<Tensor> {
        self.layers.check_next(input_ids, position)?;
        let x = self.embed_tokens.forward(input_ids)?;
        let x = self.layers.forward(x, position)?;
        self.norm.forward(&x)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(hidden)
    }

    fn truncate_kv_cache(&mut self, positions: usize) {
        self.layers.truncate_kv_cache(positions);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{json, Value};

    use super::*;

    /// The windows of three layers.
    fn windows(model_type: &str, keys: Value) -> [Option<usize>; 3] {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        });
        for (key, value) in keys.as_object().unwrap() {
            config[key] = value.clone();
        }
        let config: LlamaConfig = serde_json::from_value(config).unwrap();
        config.validate().unwrap();
        [0, 1, 2].map(|layer| config.sliding_window_of(layer))
    }

    #[test]
    fn windows_follow_the_model_type() {
        let window = json!({"sliding_window": 7});
        assert_eq!(windows("llama", window.clone()), [None; 3]);
        assert_eq!(windows("mistral", window.clone()), [Some(7); 3]);
        assert_eq!(windows("mistral", json!({})), [Some(4096); 3]);
        assert_eq!(
            windows("mistral", json!({"sliding_window": null})),
            [None; 3]
        );
        assert_eq!(windows("qwen2", window), [None; 3]);
        let mut some =
            json!({"use_sliding_window": true, "sliding_window": 7, "max_window_layers": 2});
        assert_eq!(windows("qwen2", some.clone()), [None, None, Some(7)]);
        some["layer_types"] = json!(["sliding_attention", "full_attention", "sliding_attention"]);
        assert_eq!(windows("qwen2", some.clone()), [Some(7), None, Some(7)]);
        assert_eq!(windows("mistral", some.clone()), [Some(7), None, Some(7)]);
        some["use_sliding_window"] = json!(false);
        assert_eq!(windows("qwen2", some), [None; 3]);
    }
}
