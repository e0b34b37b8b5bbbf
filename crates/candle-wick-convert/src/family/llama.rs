//! Llama, ProSparse, Mistral and Qwen2: gated FFN, grouped-query attention, the same tensor names. They differ in
//! which projections have a bias, and in what a missing `num_key_value_heads` means.

use super::{parameters, with_prefix, Family, LayerSpec, ModelSpec, TensorNeed, CURRENT};
use crate::config::ModelConfig;
use crate::ConvertError;

pub(super) const FAMILY: Family = Family {
    model_types: &["llama", "sparsellama", "mistral", "qwen2"],
    supported: "llama, sparsellama, mistral, qwen2",
    rename,
    spec,
    ..CURRENT
};

const EMBEDDING: &str = "model.embed_tokens.weight";

/// A model that was saved without its head has names without the prefix.
fn rename(name: &str) -> String {
    with_prefix(name, "model.", &["embed_tokens.", "layers.", "norm."])
}

fn spec(config: &ModelConfig) -> Result<ModelSpec, ConvertError> {
    let hidden = config.size("hidden_size")?;
    let vocab = config.size("vocab_size")?;
    let layer_count = config.layer_count("num_hidden_layers")?;
    let shapes = LayerShapes::of(config, hidden)?;
    let mut resident = vec![TensorNeed::new(EMBEDDING, &[vocab, hidden])];
    let mut layers = Vec::with_capacity(layer_count);
    for n in 0..layer_count {
        let layer = format!("model.layers.{n}");
        shapes.push_resident(&layer, &mut resident);
        let ffn = shapes.ffn(&layer);
        resident.extend(ffn.biases(hidden));
        layers.push(ffn);
    }
    resident.extend(parameters("model.norm", &[hidden], false));
    Ok(ModelSpec {
        hidden_size: hidden,
        layers,
        resident,
        embedding: EMBEDDING.to_string(),
        head: TensorNeed::new("lm_head.weight", &[vocab, hidden]),
        tied: config.flag_or("tie_word_embeddings", false)?,
        computed: &[".rotary_emb.inv_freq"],
    })
}

/// What all layers share.
struct LayerShapes {
    hidden: usize,
    intermediate: usize,
    query: usize,
    key_value: usize,
    bias: Biases,
}

/// What has a bias.
struct Biases {
    qkv: bool,
    output: bool,
    mlp: bool,
}

impl Biases {
    fn of(config: &ModelConfig) -> Result<Self, ConvertError> {
        let (qkv, output, mlp) = match config.text("model_type")? {
            "qwen2" => (true, false, false),
            "mistral" => (false, false, false),
            _ => {
                let attention = config.flag_or("attention_bias", false)?;
                (attention, attention, config.flag_or("mlp_bias", false)?)
            }
        };
        Ok(Self { qkv, output, mlp })
    }
}

/// `num_key_value_heads` where the config does not say.
fn default_kv_heads(config: &ModelConfig, heads: usize) -> Result<usize, ConvertError> {
    Ok(match config.text("model_type")? {
        "mistral" => 8,
        "qwen2" => 32,
        _ => heads,
    })
}

impl LayerShapes {
    fn of(config: &ModelConfig, hidden: usize) -> Result<Self, ConvertError> {
        let heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_or("num_key_value_heads", default_kv_heads(config, heads)?)?;
        let head_dim = if config.has("head_dim") {
            config.size("head_dim")?
        } else {
            hidden / config.divisor("num_attention_heads", hidden)?
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.wrong("num_key_value_heads", format!("a divisor of {heads}")));
        }
        Ok(Self {
            hidden,
            intermediate: config.size("intermediate_size")?,
            query: heads * head_dim, // sizes are below 2^24
            key_value: kv_heads * head_dim,
            bias: Biases::of(config)?,
        })
    }

    fn push_resident(&self, layer: &str, resident: &mut Vec<TensorNeed>) {
        let mut push = |name: &str, shape: &[usize], bias: bool| {
            resident.extend(parameters(&format!("{layer}.{name}"), shape, bias));
        };
        let bias = &self.bias;
        push("input_layernorm", &[self.hidden], false);
        push("self_attn.q_proj", &[self.query, self.hidden], bias.qkv);
        push("self_attn.k_proj", &[self.key_value, self.hidden], bias.qkv);
        push("self_attn.v_proj", &[self.key_value, self.hidden], bias.qkv);
        push("self_attn.o_proj", &[self.hidden, self.query], bias.output);
        push("post_attention_layernorm", &[self.hidden], false);
    }

    fn ffn(&self, layer: &str) -> LayerSpec {
        let prefix = format!("{layer}.mlp");
        let modules = ["up_proj", "down_proj"];
        let plain = LayerSpec::plain(&prefix, modules, self.intermediate, self.bias.mlp);
        LayerSpec {
            gate: Some(format!("{prefix}.gate_proj.weight")),
            gate_bias: self.bias.mlp.then(|| format!("{prefix}.gate_proj.bias")),
            ..plain
        }
    }
}
