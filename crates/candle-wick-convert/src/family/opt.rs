//! OPT, norms before attention and FFN or after them, embeddings as wide as the layers or not.
//!
//! Uploads from before 2022-07 call the tensors `decoder.`; they get their current names, `model.decoder.`.

use super::{parameters, Family, LayerSpec, ModelSpec, TensorNeed, CURRENT};
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

const EMBEDDING: &str = "model.decoder.embed_tokens.weight";

fn rename(name: &str) -> String {
    match name.strip_prefix("decoder.") {
        Some(rest) => format!("model.decoder.{rest}"),
        None => name.to_string(),
    }
}

fn spec(config: &ModelConfig) -> Result<ModelSpec, ConvertError> {
    let hidden = config.size("hidden_size")?;
    config.divisor("num_attention_heads", hidden)?;
    let vocab = config.size("vocab_size")?;
    let width = config.size_or("word_embed_proj_dim", hidden)?;
    let layer_count = config.layer_count("num_hidden_layers")?;
    let shapes = LayerShapes::of(config, hidden)?;
    let positions = config.size("max_position_embeddings")? + POSITION_OFFSET;
    let mut resident = vec![
        TensorNeed::new(EMBEDDING, &[vocab, width]),
        TensorNeed::new("model.decoder.embed_positions.weight", &[positions, hidden]),
    ];
    if width != hidden {
        for (name, shape) in [("in", [hidden, width]), ("out", [width, hidden])] {
            let name = format!("model.decoder.project_{name}");
            resident.extend(parameters(&name, &shape, false));
        }
    }
    let mut layers = Vec::with_capacity(layer_count);
    for n in 0..layer_count {
        let layer = format!("model.decoder.layers.{n}");
        shapes.push_resident(&layer, &mut resident);
        let ffn = shapes.ffn(&layer);
        resident.extend(ffn.biases(hidden));
        layers.push(ffn);
    }
    let removed = config.flag_or("_remove_final_layer_norm", false)?;
    if config.flag_or("do_layer_norm_before", true)? && !removed {
        resident.extend(shapes.norm("model.decoder.final_layer_norm"));
    }
    Ok(ModelSpec {
        hidden_size: hidden,
        layers,
        resident,
        embedding: EMBEDDING.to_string(),
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
    fn of(config: &ModelConfig, hidden: usize) -> Result<Self, ConvertError> {
        Ok(Self {
            hidden,
            intermediate: config.size("ffn_dim")?,
            bias: config.flag_or("enable_bias", true)?,
            affine: config.flag_or("layer_norm_elementwise_affine", true)?,
        })
    }

    fn push_resident(&self, layer: &str, resident: &mut Vec<TensorNeed>) {
        for name in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            let name = format!("{layer}.self_attn.{name}");
            resident.extend(parameters(&name, &[self.hidden, self.hidden], self.bias));
        }
        resident.extend(self.norm(&format!("{layer}.self_attn_layer_norm")));
        resident.extend(self.norm(&format!("{layer}.final_layer_norm")));
    }

    /// Parameters of a norm, which may have none.
    fn norm(&self, name: &str) -> impl Iterator<Item = TensorNeed> {
        let parameters = || parameters(name, &[self.hidden], true);
        self.affine.then(parameters).into_iter().flatten()
    }

    fn ffn(&self, layer: &str) -> LayerSpec {
        LayerSpec::plain(layer, ["fc1", "fc2"], self.intermediate, self.bias)
    }
}

#[cfg(test)]
mod tests {
    use super::rename;

    #[test]
    fn old_names_become_current_ones() {
        for (old, current) in [
            (
                "decoder.layers.0.fc1.weight",
                "model.decoder.layers.0.fc1.weight",
            ),
            ("lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(rename(old), current);
            assert_eq!(rename(current), current);
        }
    }
}
