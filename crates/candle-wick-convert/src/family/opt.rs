//! OPT, norms before attention and FFN or after them, embeddings as wide as the layers or not.
//!
//! Uploads from before 2022-07 call the tensors `decoder.`; they get their present names,
//! `model.decoder.`.

use super::{Family, LayerSpec, ModelSpec, TensorNeed, CURRENT};
use crate::config::ModelConfig;
use crate::ConvertError;

/// The position table has this many rows before position 0.
const POSITION_OFFSET: usize = 2;

pub(super) const FAMILY: Family = Family {
    model_types: &["opt"],
    supported: "opt",
    activation_key: "activation_function",
    rename,
    spec,
    ..CURRENT
};

fn rename(name: &str) -> String {
    match name.strip_prefix("decoder.") {
        Some(rest) => format!("model.decoder.{rest}"),
        None => name.to_string(),
    }
}

fn spec(config: &ModelConfig) -> Result<ModelSpec, ConvertError> {
    let hidden = config.size("hidden_size")?;
    let heads = config.size("num_attention_heads")?;
    if !hidden.is_multiple_of(heads) {
        return Err(config.wrong("num_attention_heads", format!("a divisor of {hidden}")));
    }
    let vocab = config.size("vocab_size")?;
    let width = config.size_or("word_embed_proj_dim", hidden)?;
    let layer_count = config.layer_count("num_hidden_layers")?;
    let layer = LayerShapes {
        hidden,
        intermediate: config.size("ffn_dim")?,
        bias: config.flag_or("enable_bias", true)?,
        affine: config.flag_or("layer_norm_elementwise_affine", true)?,
    };
    let embedding = "model.decoder.embed_tokens.weight".to_string();
    let positions = config.size("max_position_embeddings")? + POSITION_OFFSET;
    let mut resident = vec![
        TensorNeed::new(&embedding, &[vocab, width]),
        TensorNeed::new("model.decoder.embed_positions.weight", &[positions, hidden]),
    ];
    if width != hidden {
        for (name, shape) in [("in", [hidden, width]), ("out", [width, hidden])] {
            let name = format!("model.decoder.project_{name}.weight");
            resident.push(TensorNeed::new(name, &shape));
        }
    }
    let mut layers = Vec::with_capacity(layer_count);
    for n in 0..layer_count {
        let prefix = format!("model.decoder.layers.{n}");
        layer.push_resident(&prefix, &mut resident);
        layers.push(ffn(prefix, layer.intermediate, layer.bias));
    }
    let removed = config.flag_or("_remove_final_layer_norm", false)?;
    if config.flag_or("do_layer_norm_before", true)? && !removed {
        layer.push_norm("model.decoder.final_layer_norm", &mut resident);
    }
    Ok(ModelSpec {
        hidden_size: hidden,
        layers,
        resident,
        embedding,
        head: TensorNeed::new("lm_head.weight", &[vocab, width]),
        tied: config.flag_or("tie_word_embeddings", true)?,
        computed: &[],
    })
}

/// What all layers share.
struct LayerShapes {
    hidden: usize,
    intermediate: usize,
    bias: bool,
    affine: bool,
}

impl LayerShapes {
    fn push_resident(&self, prefix: &str, resident: &mut Vec<TensorNeed>) {
        for name in ["q", "k", "v", "out"] {
            let name = format!("{prefix}.self_attn.{name}_proj");
            let shape = [self.hidden, self.hidden];
            resident.push(TensorNeed::new(format!("{name}.weight"), &shape));
            self.push_bias(&name, self.hidden, resident);
        }
        self.push_norm(&format!("{prefix}.self_attn_layer_norm"), resident);
        self.push_norm(&format!("{prefix}.final_layer_norm"), resident);
        self.push_bias(&format!("{prefix}.fc1"), self.intermediate, resident);
        self.push_bias(&format!("{prefix}.fc2"), self.hidden, resident);
    }

    fn push_bias(&self, name: &str, size: usize, resident: &mut Vec<TensorNeed>) {
        if self.bias {
            resident.push(TensorNeed::new(format!("{name}.bias"), &[size]));
        }
    }

    fn push_norm(&self, name: &str, resident: &mut Vec<TensorNeed>) {
        if self.affine {
            for part in ["weight", "bias"] {
                resident.push(TensorNeed::new(format!("{name}.{part}"), &[self.hidden]));
            }
        }
    }
}

fn ffn(prefix: String, intermediate_size: usize, bias: bool) -> LayerSpec {
    LayerSpec {
        intermediate_size,
        gate: None,
        up: format!("{prefix}.fc1.weight"),
        down: format!("{prefix}.fc2.weight"),
        gate_bias: None,
        up_bias: bias.then(|| format!("{prefix}.fc1.bias")),
        down_bias: bias.then(|| format!("{prefix}.fc2.bias")),
        prefix,
    }
}
