//! Phi 1, 1.5 and 2: one norm before attention and FFN, biases everywhere, the head's included.
//!
//! Three older kinds of upload get the current names and keys:
//! - `phi-msft`: keys such as `n_embd`, names such as `transformer.h.N.mixer.Wqkv`, whose rows are all of q, then
//!   all of k, then all of v;
//! - `mixformer-sequential`: the same as parts of one sequence, `layers.0` the embedding and the last one the head;
//! - the release between: current keys and names, but `query_key_value`, whose rows are each head's q, k and v.

use super::{parameters, Family, LayerSpec, ModelSpec, TensorNeed, CURRENT};
use crate::config::ModelConfig;
use crate::source::{RowOrder, SourceFolder};
use crate::ConvertError;

pub(super) const FAMILY: Family = Family {
    model_types: &["phi", "phi-msft", "mixformer-sequential"],
    supported: "phi",
    modernise,
    rename,
    split,
    spec,
    ..CURRENT
};

const EMBEDDING: &str = "model.embed_tokens.weight";

/// Keys of the oldest uploads whose values are sizes.
const OLD_SIZES: [(&str, &str); 6] = [
    ("n_embd", "hidden_size"),
    ("n_inner", "intermediate_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_head_kv", "num_key_value_heads"),
    ("n_positions", "max_position_embeddings"),
];

/// Rotary dimensions where `rotary_dim` is left out.
const ROTARY_DIM: usize = 32;

/// Beginnings of names that are the same in every layer.
const OLD_NAMES: [(&str, &str); 4] = [
    ("transformer.embd.wte.", "model.embed_tokens."),
    ("layers.0.wte.", "model.embed_tokens."),
    ("lm_head.ln.", "model.final_layernorm."),
    ("lm_head.linear.", "lm_head."),
];

fn modernise(config: &mut ModelConfig) -> Result<(), ConvertError> {
    if config.text("model_type")? != "phi" {
        for (old, key) in OLD_SIZES {
            if config.has(old) {
                config.size(old)?; // what is wrong with it is said of the key in the file
            }
            config.rename(old, key);
        }
        config.rename("activation_function", "hidden_act");
        config.rename("layer_norm_epsilon", "layer_norm_eps");
        let (hidden, head_dim) = (config.size("hidden_size")?, head_dim(config)?);
        config.set_default("intermediate_size", 4 * hidden);
        if !config.has("partial_rotary_factor") {
            let rotary_dim = config.size_or("rotary_dim", ROTARY_DIM)?.min(head_dim);
            let factor = rotary_factor(rotary_dim, head_dim)
                .ok_or_else(|| config.wrong("rotary_dim", format!("a part of {head_dim}")))?;
            config.set("partial_rotary_factor", factor);
        }
        config.set("model_type", "phi");
    }
    config.set_default("hidden_act", "gelu_new");
    Ok(())
}

fn head_dim(config: &ModelConfig) -> Result<usize, ConvertError> {
    let hidden = config.size("hidden_size")?;
    Ok(hidden / config.divisor("num_attention_heads", hidden)?)
}

/// A share of `head_dim` with few decimals, whose product rounded down is `rotary_dim` again.
fn rotary_factor(rotary_dim: usize, head_dim: usize) -> Option<f64> {
    let millionths = (rotary_dim * 1_000_000).div_ceil(head_dim); // sizes are below 2^24
    [millionths, millionths + 1]
        .map(|millionths| millionths as f64 / 1e6)
        .into_iter()
        .find(|factor| (factor * head_dim as f64) as usize == rotary_dim)
}

/// Names whose meaning depends on the number of layers are left to [`split`].
fn rename(name: &str) -> String {
    for (old, current) in OLD_NAMES {
        if let Some(rest) = name.strip_prefix(old) {
            return format!("{current}{rest}");
        }
    }
    let numbered = |rest: &str| {
        let (number, part) = rest.split_once('.')?;
        Some((number.parse::<usize>().ok()?, part.to_string()))
    };
    if let Some((n, part)) = name.strip_prefix("transformer.h.").and_then(numbered) {
        return format!("model.layers.{n}.{}", current_part(&part));
    }
    match name.strip_prefix("layers.").and_then(numbered) {
        Some((n @ 1.., part)) if part.starts_with("mixer.") || part.starts_with("mlp.") => {
            format!("model.layers.{}.{}", n - 1, current_part(&part))
        }
        _ => name.to_string(),
    }
}

/// Current name of a tensor within its layer.
fn current_part(part: &str) -> String {
    let names = [
        ("ln.", "input_layernorm."),
        ("mixer.out_proj.", "self_attn.dense."),
        ("mixer.", "self_attn."),
    ];
    let renamed = names.iter().find_map(|(old, current)| {
        let rest = part.strip_prefix(old)?;
        Some(format!("{current}{rest}"))
    });
    renamed.unwrap_or_else(|| part.to_string())
}

fn split(config: &ModelConfig, source: &mut SourceFolder) -> Result<(), ConvertError> {
    let sizes = Sizes::of(config)?;
    for kind in ["weight", "bias"] {
        for n in 0..sizes.layers {
            let attention = format!("model.layers.{n}.self_attn");
            for (fused, parts) in [
                ("Wqkv", sizes.one_after_the_other()),
                ("query_key_value", sizes.by_heads()),
            ] {
                let parts = parts.map(|(name, rows, order)| {
                    (format!("{attention}.{name}_proj.{kind}"), rows, order)
                });
                source.split(&format!("{attention}.{fused}.{kind}"), &parts)?;
            }
            let norm = format!("model.layers.{n}.input_layernorm.{kind}");
            let sequential = format!("layers.{}.ln.{kind}", n + 1);
            source.split(&sequential, &[(norm, sizes.hidden, RowOrder::Same)])?;
        }
        let last = format!("layers.{}", sizes.layers + 1);
        for (old, current, rows) in [
            ("ln", "model.final_layernorm", sizes.hidden),
            ("linear", "lm_head", sizes.vocab),
        ] {
            let part = (format!("{current}.{kind}"), rows, RowOrder::Same);
            source.split(&format!("{last}.{old}.{kind}"), &[part])?;
        }
    }
    Ok(())
}

fn spec(config: &ModelConfig) -> Result<ModelSpec, ConvertError> {
    let sizes = Sizes::of(config)?;
    let mut resident = vec![TensorNeed::new(EMBEDDING, &[sizes.vocab, sizes.hidden])];
    let mut layers = Vec::with_capacity(sizes.layers);
    for n in 0..sizes.layers {
        let layer = format!("model.layers.{n}");
        sizes.push_resident(&layer, &mut resident);
        let ffn = sizes.ffn(&layer);
        resident.extend(ffn.biases(sizes.hidden));
        layers.push(ffn);
    }
    resident.extend(parameters("model.final_layernorm", &[sizes.hidden], true));
    // Also where the head's weight is the embedding.
    resident.push(TensorNeed::new("lm_head.bias", &[sizes.vocab]));
    Ok(ModelSpec {
        hidden_size: sizes.hidden,
        layers,
        resident,
        embedding: EMBEDDING.to_string(),
        head: TensorNeed::new("lm_head.weight", &[sizes.vocab, sizes.hidden]),
        tied: config.flag_or("tie_word_embeddings", false)?,
        computed: &[".rotary_emb.inv_freq"],
    })
}

/// What [`split`] and the layers need to know.
struct Sizes {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    vocab: usize,
    head_dim: usize,
    key_value: usize,
    qk_layernorm: bool,
}

impl Sizes {
    fn of(config: &ModelConfig) -> Result<Self, ConvertError> {
        let head_dim = head_dim(config)?;
        let heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_or("num_key_value_heads", heads)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.wrong("num_key_value_heads", format!("a divisor of {heads}")));
        }
        Ok(Self {
            layers: config.layer_count("num_hidden_layers")?,
            hidden: config.size("hidden_size")?,
            intermediate: config.size("intermediate_size")?,
            vocab: config.size("vocab_size")?,
            head_dim,
            key_value: kv_heads * head_dim, // at most hidden_size
            qk_layernorm: config.flag_or("qk_layernorm", false)?,
        })
    }

    /// All rows of q, then all of k, then all of v.
    fn one_after_the_other(&self) -> [(&'static str, usize, RowOrder); 3] {
        let part = |name, first, rows| {
            let step = rows;
            (name, rows, RowOrder::Groups { first, rows, step })
        };
        [
            part("q", 0, self.hidden),
            part("k", self.hidden, self.key_value),
            part("v", self.hidden + self.key_value, self.key_value),
        ]
    }

    /// Each head's rows of q, k and v together; there are as many key heads as heads.
    fn by_heads(&self) -> [(&'static str, usize, RowOrder); 3] {
        let part = |name, index| {
            let order = RowOrder::Groups {
                first: index * self.head_dim,
                rows: self.head_dim,
                step: 3 * self.head_dim,
            };
            (name, self.hidden, order)
        };
        [part("q", 0), part("k", 1), part("v", 2)]
    }

    fn push_resident(&self, layer: &str, resident: &mut Vec<TensorNeed>) {
        let mut push = |name: &str, shape: &[usize]| {
            resident.extend(parameters(&format!("{layer}.{name}"), shape, true));
        };
        push("input_layernorm", &[self.hidden]);
        push("self_attn.q_proj", &[self.hidden, self.hidden]);
        push("self_attn.k_proj", &[self.key_value, self.hidden]);
        push("self_attn.v_proj", &[self.key_value, self.hidden]);
        push("self_attn.dense", &[self.hidden, self.hidden]);
        if self.qk_layernorm {
            push("self_attn.q_layernorm", &[self.head_dim]);
            push("self_attn.k_layernorm", &[self.head_dim]);
        }
    }

    fn ffn(&self, layer: &str) -> LayerSpec {
        let prefix = format!("{layer}.mlp");
        LayerSpec::plain(&prefix, ["fc1", "fc2"], self.intermediate, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_names_become_current_ones() {
        for (old, current) in [
            ("transformer.embd.wte.weight", EMBEDDING),
            (
                "transformer.h.3.ln.bias",
                "model.layers.3.input_layernorm.bias",
            ),
            (
                "transformer.h.0.mixer.Wqkv.weight",
                "model.layers.0.self_attn.Wqkv.weight",
            ),
            ("layers.0.wte.weight", EMBEDDING),
            (
                "layers.12.mixer.out_proj.bias",
                "model.layers.11.self_attn.dense.bias",
            ),
            ("layers.1.mlp.fc2.weight", "model.layers.0.mlp.fc2.weight"),
            ("lm_head.ln.weight", "model.final_layernorm.weight"),
            ("lm_head.linear.bias", "lm_head.bias"),
        ] {
            assert_eq!(rename(old), current);
            assert_eq!(rename(current), current);
        }
        for unclear in [
            "layers.3.ln.weight",
            "layers.0.mlp.fc1.weight",
            "layers.x.mlp.y",
        ] {
            assert_eq!(rename(unclear), unclear);
        }
    }

    #[test]
    fn a_rotary_factor_gives_its_dimensions_again() {
        assert_eq!(rotary_factor(32, 80), Some(0.4));
        assert_eq!(rotary_factor(32, 64), Some(0.5));
        for head_dim in 1..=320 {
            for rotary_dim in 1..=head_dim {
                let factor = rotary_factor(rotary_dim, head_dim).unwrap();
                assert!(factor <= 1.0, "{rotary_dim} of {head_dim}: {factor}");
            }
        }
    }
}
