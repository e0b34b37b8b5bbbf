//! The shapes that can be synthesised: one line a model, sizes and config keys as in its Hugging Face config, ranks
//! as in "LLM in a flash" (section 3.1 and appendix).
//!
//! Ranks marked assumed are not in the paper: OPT's for its smaller sizes, and for Phi-2 those of the middle layers,
//! of which the paper says only that they are larger.
//!
//! No config has an `eos_token_id`: random logits would hit it by chance, and a measurement would end early.

use std::fmt;
use std::ops::Range;

use serde_json::{json, Map, Value};

use crate::ConvertError;

/// Key in `config.json` that says whose geometry a folder of random weights has. Loaders pass over it.
pub const SYNTHETIC_KEY: &str = "wick_synthetic";

/// A model's shape.
#[derive(Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Its name.
    pub name: &'static str,
    family: Family,
    /// Layers of the whole model.
    pub layers: usize,
    sizes: Sizes,
    ranks: Ranks,
}

/// Which config keys it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Opt,
    Falcon,
    Llama,
    Persimmon,
    Phi,
}

#[derive(Debug, PartialEq, Eq)]
struct Sizes {
    hidden: usize,
    ffn: usize,
    heads: usize,
    vocab: usize,
    positions: usize,
}

/// Ranks of the predictors.
#[derive(Debug, PartialEq, Eq)]
struct Ranks {
    usual: usize,
    /// Where more is needed.
    raised: usize,
    /// The layers with the rank `raised`.
    raised_layers: Range<usize>,
    assumed: bool,
}

/// hidden, FFN, heads, vocabulary, positions.
const fn sizes(values: [usize; 5]) -> Sizes {
    let [hidden, ffn, heads, vocab, positions] = values;
    Sizes {
        hidden,
        ffn,
        heads,
        vocab,
        positions,
    }
}

/// `usual` everywhere but in `raised_layers`.
const fn ranks(usual: usize, raised: usize, raised_layers: Range<usize>) -> Ranks {
    Ranks {
        usual,
        raised,
        raised_layers,
        assumed: false,
    }
}

const fn assumed(usual: usize, raised: usize, raised_layers: Range<usize>) -> Ranks {
    let mut ranks = ranks(usual, raised, raised_layers);
    ranks.assumed = true;
    ranks
}

const fn geometry(
    name: &'static str,
    family: Family,
    layers: usize,
    sizes: Sizes,
    ranks: Ranks,
) -> Geometry {
    Geometry {
        name,
        family,
        layers,
        sizes,
        ranks,
    }
}

#[rustfmt::skip]
static KNOWN: [Geometry; 7] = {
    use Family::{Falcon, Llama, Opt, Persimmon, Phi};
    [
        geometry("opt-125m", Opt, 12, sizes([768, 3072, 12, 50_272, 2048]), assumed(128, 1024, 8..12)),
        geometry("opt-1.3b", Opt, 24, sizes([2048, 8192, 32, 50_272, 2048]), assumed(128, 1024, 20..24)),
        geometry("opt-6.7b", Opt, 32, sizes([4096, 16_384, 32, 50_272, 2048]), ranks(128, 1024, 28..32)),
        geometry("falcon-7b", Falcon, 32, sizes([4544, 18_176, 71, 65_024, 2048]), ranks(256, 1152, 28..32)),
        geometry("persimmon-8b", Persimmon, 36, sizes([4096, 16_384, 64, 262_144, 16_384]), ranks(256, 1152, 32..36)),
        geometry("llama-2-7b", Llama, 32, sizes([4096, 11_008, 32, 32_000, 4096]), ranks(256, 1024, 14..18)),
        geometry("phi-2", Phi, 32, sizes([2560, 10_240, 32, 51_200, 2048]), assumed(256, 800, 14..18)),
    ]
};

impl Geometry {
    /// All of them.
    pub fn all() -> &'static [Self] {
        &KNOWN
    }

    /// The one of this name.
    ///
    /// # Errors
    /// There is none; the known ones are named.
    pub fn find(name: &str) -> Result<&'static Self, ConvertError> {
        let names = || KNOWN.iter().map(|known| known.name).collect::<Vec<_>>();
        let found = KNOWN.iter().find(|known| known.name == name);
        found.ok_or_else(|| ConvertError::Unsupported {
            got: format!("geometry `{name}`"),
            supported: names().join(", "),
        })
    }

    /// Rank of the predictor of layer `layer`; never above the hidden size.
    pub fn rank(&self, layer: usize) -> usize {
        let rank = if self.ranks.raised_layers.contains(&layer) {
            self.ranks.raised
        } else {
            self.ranks.usual
        };
        rank.min(self.sizes.hidden)
    }

    /// Whether the paper does not give these ranks.
    pub fn has_assumed_ranks(&self) -> bool {
        self.ranks.assumed
    }

    /// The `config.json` of its first `layers` layers.
    pub(super) fn config(&self, layers: usize) -> Map<String, Value> {
        let Sizes {
            hidden,
            ffn,
            heads,
            vocab,
            positions,
        } = self.sizes;
        let of_family = match self.family {
            Family::Opt => json!({
                "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
                "ffn_dim": ffn, "word_embed_proj_dim": hidden, "do_layer_norm_before": true,
                "_remove_final_layer_norm": false, "enable_bias": true,
                "layer_norm_elementwise_affine": true, "tie_word_embeddings": true,
            }),
            Family::Falcon => json!({
                "architectures": ["FalconForCausalLM"], "model_type": "falcon", "activation": "relu",
                "ffn_hidden_size": ffn, "multi_query": true, "parallel_attn": true,
                "new_decoder_architecture": false, "alibi": false, "bias": false,
                "layer_norm_epsilon": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": true,
            }),
            Family::Llama => json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "fatrelu",
                "hidden_act_param": 0.01, "intermediate_size": ffn, "num_key_value_heads": heads,
                "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": false,
            }),
            Family::Persimmon => json!({
                "architectures": ["PersimmonForCausalLM"], "model_type": "persimmon", "hidden_act": "relu2",
                "intermediate_size": ffn, "qk_layernorm": true, "layer_norm_eps": 1e-5,
                "rope_theta": 25_000.0, "partial_rotary_factor": 0.5, "tie_word_embeddings": false,
            }),
            Family::Phi => json!({
                "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "relu",
                "intermediate_size": ffn, "num_key_value_heads": heads, "qk_layernorm": false,
                "layer_norm_eps": 1e-5, "rope_theta": 10_000.0, "partial_rotary_factor": 0.4,
                "tie_word_embeddings": false,
            }),
        };
        let of_all = json!({
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "vocab_size": vocab, "max_position_embeddings": positions, SYNTHETIC_KEY: self.name,
        });
        let keys = [of_family, of_all]
            .into_iter()
            .filter_map(|part| match part {
                Value::Object(keys) => Some(keys),
                _ => None,
            });
        keys.flatten().collect()
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_the_papers() {
        let of = |name: &str| -> Vec<usize> {
            let geometry = Geometry::find(name).unwrap();
            (0..geometry.layers).map(|n| geometry.rank(n)).collect()
        };
        assert_eq!(of("opt-6.7b").iter().sum::<usize>(), 32 * 240);
        let falcon = of("falcon-7b");
        assert_eq!(
            (falcon[0], falcon[27], falcon[28], falcon[31]),
            (256, 256, 1152, 1152)
        );
        assert_eq!(
            of("persimmon-8b")
                .iter()
                .filter(|rank| **rank == 1152)
                .count(),
            4
        );
        let llama = of("llama-2-7b");
        assert_eq!(
            (llama[13], llama[14], llama[17], llama[18]),
            (256, 1024, 1024, 256)
        );
        assert_eq!(of("opt-125m")[11], 768); // not more than the hidden size
        assert!(Geometry::find("phi-2").unwrap().has_assumed_ranks());
        assert!(!Geometry::find("opt-6.7b").unwrap().has_assumed_ranks());
    }
}
