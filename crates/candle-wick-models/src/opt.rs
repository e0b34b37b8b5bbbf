//! OPT, its FFN on flash.
//!
//! All sizes but 350m norm what goes into attention and FFN, and once more at the end. 350m
//! (`do_layer_norm_before` false) norms the sums after them instead, and its embeddings are narrower than its
//! layers (`word_embed_proj_dim`): `project_in` and `project_out` lead from one width to the other.
//!
//! Tensor names and config keys are Hugging Face's (`OPTForCausalLM`). Shapes: ids `(1, seq)`, hidden states
//! `(1, seq, hidden_size)`, logits `(1, vocab_size)` for the last position. Activations are f32.

use candle::{Device, Module, Result, Tensor};
use candle_nn::LayerNorm;
use candle_wick::{
    Activation, FlashEmbedding, FlashLinear, FlashMlp, FlashVarBuilder, KvCache, ModelNeeds,
    Residuals,
};
use serde::Deserialize;

use crate::family::{yes, CausalLm, ModelConfig};
use crate::interrupt::Interrupt;
use crate::layers::{embedding_and_head, head_name, layer_norm, split_heads, Layer, Layers};
use crate::limits::{check_heads, check_sizes};

/// The first two rows of the position table are unused (`OPTLearnedPositionalEmbedding`).
const POSITION_OFFSET: usize = 2;
/// Not in the config: torch's default.
const LAYER_NORM_EPS: f64 = 1e-5;

/// The keys of `config.json` that this definition obeys.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the keys are Hugging Face's, documented there")]
pub struct OptConfig {
    pub hidden_size: usize,
    pub ffn_dim: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub max_position_embeddings: usize,
    #[serde(default = "relu")]
    pub activation_function: String,
    pub hidden_act_param: Option<f32>,
    #[serde(default = "yes")]
    pub do_layer_norm_before: bool,
    pub word_embed_proj_dim: Option<usize>,
    #[serde(default = "yes")]
    pub layer_norm_elementwise_affine: bool,
    #[serde(default, rename = "_remove_final_layer_norm")]
    pub remove_final_layer_norm: bool,
    #[serde(default = "yes")]
    pub tie_word_embeddings: bool,
}

fn relu() -> String {
    "relu".to_owned()
}

impl OptConfig {
    fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Width of the token embedding and of the head.
    fn embedding_width(&self) -> usize {
        self.word_embed_proj_dim.unwrap_or(self.hidden_size)
    }

    fn has_projections(&self) -> bool {
        self.embedding_width() != self.hidden_size
    }

    fn has_final_layer_norm(&self) -> bool {
        self.do_layer_norm_before && !self.remove_final_layer_norm
    }
}

impl ModelConfig for OptConfig {
    fn validate(&self) -> std::result::Result<(), String> {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        check_sizes(&[
            ("hidden_size", hidden),
            ("ffn_dim", self.ffn_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_attention_heads", heads),
            ("word_embed_proj_dim", self.embedding_width()),
        ])?;
        check_heads(hidden, heads)?;
        self.activation().map_err(|error| error.to_string())?;
        Ok(())
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
        Activation::from_config(&self.activation_function, self.hidden_act_param)
    }

    fn needs(&self, ctx: usize) -> ModelNeeds {
        let embedding = "model.decoder.embed_tokens.weight";
        let projected = if self.has_projections() {
            2 * self.embedding_width()
        } else {
            0
        };
        let layer_bytes = KvCache::position_bytes(self.num_attention_heads, self.head_dim());
        ModelNeeds {
            ctx,
            kv_position_bytes: self.num_hidden_layers as u64 * layer_bytes,
            hidden_size: self.hidden_size,
            token_values: 10 * self.hidden_size + projected,
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
        Ok(Box::new(Opt::load(vb, self, ctx, interrupt)?))
    }
}

struct Attention {
    q_proj: FlashLinear,
    k_proj: FlashLinear,
    v_proj: FlashLinear,
    out_proj: FlashLinear,
    num_attention_heads: usize,
    head_dim: usize,
    kv_cache: KvCache,
}

impl Attention {
    fn load(vb: FlashVarBuilder, cfg: &OptConfig, ctx: usize) -> Result<Self> {
        let linear = |name: &str| FlashLinear::load(cfg.hidden_size, cfg.hidden_size, vb.pp(name));
        Ok(Self {
            q_proj: linear("q_proj")?,
            k_proj: linear("k_proj")?,
            v_proj: linear("v_proj")?,
            out_proj: linear("out_proj")?,
            num_attention_heads: cfg.num_attention_heads,
            head_dim: cfg.head_dim(),
            kv_cache: KvCache::new(cfg.num_attention_heads, cfg.head_dim(), ctx),
        })
    }

    fn forward(&mut self, x: &Tensor) -> Result<Tensor> {
        let heads = |x: &Tensor| split_heads(x, self.num_attention_heads);
        let q = heads(&self.q_proj.forward(x)?)?;
        let k = heads(&self.k_proj.forward(x)?)?;
        let v = heads(&self.v_proj.forward(x)?)?;
        self.kv_cache.append(&k, &v)?;
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        self.out_proj
            .forward(&self.kv_cache.causal_attention(&q, scale)?)
    }
}

struct DecoderLayer {
    self_attn_layer_norm: LayerNorm,
    self_attn: Attention,
    final_layer_norm: LayerNorm,
    mlp: FlashMlp,
    do_layer_norm_before: bool,
}

impl DecoderLayer {
    fn load(vb: FlashVarBuilder, cfg: &OptConfig, ctx: usize) -> Result<Self> {
        let activation = cfg.activation()?;
        Ok(Self {
            self_attn_layer_norm: norm(cfg, vb.pp("self_attn_layer_norm"))?,
            self_attn: Attention::load(vb.pp("self_attn"), cfg, ctx)?,
            final_layer_norm: norm(cfg, vb.pp("final_layer_norm"))?,
            mlp: FlashMlp::load(cfg.hidden_size, cfg.ffn_dim, activation, vb)?,
            do_layer_norm_before: cfg.do_layer_norm_before,
        })
    }
}

impl Layer for DecoderLayer {
    fn forward(&mut self, x: &Tensor, _position: usize) -> Result<Tensor> {
        let (attn_norm, ffn_norm) = (&self.self_attn_layer_norm, &self.final_layer_norm);
        let normed = match self.do_layer_norm_before {
            true => attn_norm.forward(x)?,
            false => x.clone(),
        };
        let sum = (x + self.self_attn.forward(&normed)?)?;
        let residuals = Residuals {
            layer_input: x,
            after_attention: &sum,
        };
        if self.do_layer_norm_before {
            let y = self.mlp.forward_with(&ffn_norm.forward(&sum)?, residuals)?;
            sum + y
        } else {
            let x = attn_norm.forward(&sum)?;
            let y = self.mlp.forward_with(&x, residuals)?;
            ffn_norm.forward(&(x + y)?)
        }
    }

    fn kv_cache(&mut self) -> &mut KvCache {
        &mut self.self_attn.kv_cache
    }

    fn mlp_after_attention(&self) -> Option<&FlashMlp> {
        Some(&self.mlp)
    }
}

fn norm(cfg: &OptConfig, vb: FlashVarBuilder) -> Result<LayerNorm> {
    let affine = cfg.layer_norm_elementwise_affine;
    layer_norm(cfg.hidden_size, LAYER_NORM_EPS, affine, vb)
}

/// An OPT for one sequence.
pub struct Opt {
    embed_tokens: FlashEmbedding,
    project_in: Option<FlashLinear>,
    embed_positions: FlashEmbedding,
    layers: Layers<DecoderLayer>,
    final_layer_norm: Option<LayerNorm>,
    project_out: Option<FlashLinear>,
    lm_head: FlashLinear,
}

impl Opt {
    /// Loads what the placement of `vb` keeps in DRAM, with room for `ctx` positions.
    pub fn load(
        vb: FlashVarBuilder,
        cfg: &OptConfig,
        ctx: usize,
        interrupt: Interrupt,
    ) -> Result<Self> {
        cfg.validate().map_err(candle::Error::msg)?;
        let decoder = vb.pp("model").pp("decoder");
        let (hidden, width) = (cfg.hidden_size, cfg.embedding_width());
        let positions = cfg.max_position_embeddings + POSITION_OFFSET;
        let (embed_tokens, lm_head) = embedding_and_head(
            cfg.vocab_size,
            width,
            cfg.tie_word_embeddings,
            decoder.pp("embed_tokens"),
            vb.pp("lm_head"),
        )?;
        let projection = |from, to, name: &str| {
            let load = || FlashLinear::load(from, to, decoder.pp(name));
            cfg.has_projections().then(load).transpose()
        };
        let final_layer_norm = || norm(cfg, decoder.pp("final_layer_norm"));
        let layer = |index| DecoderLayer::load(decoder.pp("layers").pp(index), cfg, ctx);
        Ok(Self {
            embed_tokens,
            project_in: projection(width, hidden, "project_in")?,
            embed_positions: FlashEmbedding::load(
                positions,
                hidden,
                false,
                decoder.pp("embed_positions"),
            )?,
            layers: Layers::load(cfg.num_hidden_layers, interrupt, layer)?,
            final_layer_norm: cfg
                .has_final_layer_norm()
                .then(final_layer_norm)
                .transpose()?,
            project_out: projection(hidden, width, "project_out")?,
            lm_head,
        })
    }
}

impl CausalLm for Opt {
    fn hidden_states(&mut self, input_ids: &Tensor, position: usize) -> Result<Tensor> {
        self.layers.check_next(input_ids, position)?;
        let first = (position + POSITION_OFFSET) as u32;
        let end = first + input_ids.dim(1)? as u32;
        let positions = Tensor::arange(first, end, &Device::Cpu)?.unsqueeze(0)?;
        let mut x = self.embed_tokens.forward(input_ids)?;
        if let Some(project_in) = &self.project_in {
            x = project_in.forward(&x)?;
        }
        x = (x + self.embed_positions.forward(&positions)?)?;
        x = self.layers.forward(x, position)?;
        match &self.final_layer_norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        match &self.project_out {
            Some(project_out) => self.lm_head.forward(&project_out.forward(hidden)?),
            None => self.lm_head.forward(hidden),
        }
    }

    fn truncate_kv_cache(&mut self, positions: usize) {
        self.layers.truncate_kv_cache(positions);
    }
}
