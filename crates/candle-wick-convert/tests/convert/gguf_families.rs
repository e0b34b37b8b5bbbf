//! GGUF files of the other families, made of their fixtures as llama.cpp's converter makes them: the same tensors as
//! from Hugging Face, and a config that says the same.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{json, Value};

use crate::gguf_file::{rows_in_order, separated, GgufFile};
use crate::tiny::{all_tensors, fixture, manifest, run_default, snapshot, Place, Stored};

type Tensors = BTreeMap<String, Stored>;

/// A family's keys and names in llama.cpp's words.
struct Family {
    architecture: &'static str,
    /// Keys of the metadata and of `config.json`.
    keys: &'static [(&'static str, &'static str)],
    /// Parts of names: in Hugging Face's, in llama.cpp's.
    names: &'static [(&'static str, &'static str)],
}

const FALCON: Family = Family {
    architecture: "falcon",
    keys: &[
        ("block_count", "num_hidden_layers"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "ffn_hidden_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
    ],
    names: &[
        ("transformer.word_embeddings", "token_embd"),
        ("transformer.ln_f", "output_norm"),
        ("lm_head", "output"),
        ("transformer.h", "blk"),
        ("input_layernorm", "attn_norm"),
        ("ln_mlp", "attn_norm"),
        ("ln_attn", "attn_norm_2"),
        ("self_attention.query_key_value", "attn_qkv"),
        ("self_attention.dense", "attn_output"),
        ("mlp.dense_h_to_4h", "ffn_up"),
        ("mlp.dense_4h_to_h", "ffn_down"),
    ],
};

const PHI2: Family = Family {
    architecture: "phi2",
    keys: &[
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ],
    names: &[
        ("model.embed_tokens", "token_embd"),
        ("model.final_layernorm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.dense", "attn_output"),
        ("mlp.fc1", "ffn_up"),
        ("mlp.fc2", "ffn_down"),
    ],
};

const PERSIMMON: Family = Family {
    architecture: "persimmon",
    keys: &[
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.layer_norm_epsilon", "layer_norm_eps"),
        ("rope.freq_base", "rope_theta"),
    ],
    names: &[
        ("model.embed_tokens", "token_embd"),
        ("model.final_layernorm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.query_key_value", "attn_qkv"),
        ("self_attn.q_layernorm", "attn_q_norm"),
        ("self_attn.k_layernorm", "attn_k_norm"),
        ("self_attn.dense", "attn_output"),
        ("mlp.dense_h_to_4h", "ffn_up"),
        ("mlp.dense_4h_to_h", "ffn_down"),
    ],
};

const QWEN2: Family = Family {
    architecture: "qwen2",
    keys: &[
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("rope.freq_base", "rope_theta"),
    ],
    names: &[
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ],
};

impl Family {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn name(&self, current: &str) -> String {
        let mut name = format!(".{current}");
        for (part, ours) in self.names {
            name = name.replacen(&format!(".{part}."), &format!(".{ours}."), 1);
        }
        name.split_off(1)
    }

    /// Gives the keys that the config leaves out the values that transformers does.
    fn fill_in(&self, config: &mut Value) {
        let is = |architecture| self.architecture == architecture;
        for (key, default) in [
            ("activation", json!("gelu")),
            ("ffn_hidden_size", json!(4 * size(config, "hidden_size"))),
            ("qk_layernorm", json!(is("persimmon"))),
            ("rope_theta", json!(10000.0)),
            ("tie_word_embeddings", json!(is("falcon"))),
        ] {
            if config[key].is_null() {
                config[key] = default;
            }
        }
    }

    /// The checkpoint as a GGUF file, its tensors changed on the way; and its config.
    fn file(&self, name: &str, change: impl Fn(&Value, &mut Tensors)) -> (GgufFile, Value) {
        let folder = fixture(name);
        let mut config = serde_json::from_slice(&snapshot(&folder)["config.json"]).unwrap();
        self.fill_in(&mut config);
        let mut file = GgufFile::of(self.architecture);
        file.set(&self.key("context_length"), 2048);
        for (key, current) in self.keys {
            let value = &config[current];
            match value.as_u64() {
                Some(size) => file.set(&self.key(key), size as usize),
                None => file.set(&self.key(key), value.as_f64().unwrap() as f32),
            }
        }
        let mut tensors = all_tensors(&folder);
        change(&config, &mut tensors);
        for (name, tensor) in &tensors {
            file.add(&self.name(name), tensor);
        }
        (file, config)
    }
}

/// Converts file and fixture, and checks that both have the same tensors and the same values of these keys.
fn check(name: &str, file: &GgufFile, config: &Value, keys: &[&str]) -> Value {
    let expected = Place::new();
    run_default(&fixture(name), &expected.out).unwrap();
    let place = Place::new();
    fs::write(place.source.join("a.gguf"), file.bytes()).unwrap();
    let report = run_default(&place.source, &place.out).unwrap();
    assert_eq!(report.ignored_tensors, Vec::<String>::new(), "{name}");
    assert_eq!(
        all_tensors(&place.out),
        all_tensors(&expected.out),
        "{name}"
    );
    assert_eq!(manifest(&place.out).layers, manifest(&expected.out).layers);
    assert_eq!(
        manifest(&place.out).model_hash,
        manifest(&expected.out).model_hash
    );
    let made: Value = serde_json::from_slice(&snapshot(&place.out)["config.json"]).unwrap();
    for key in keys {
        assert_eq!(made[key], config[key], "{name}: {key}");
    }
    made
}

fn size(config: &Value, key: &str) -> usize {
    config[key].as_u64().unwrap() as usize
}

#[test]
fn falcon() {
    let keys = [
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "activation",
        "alibi",
        "bias",
        "parallel_attn",
        "new_decoder_architecture",
        "layer_norm_epsilon",
        "ffn_hidden_size",
        "rope_theta",
        "tie_word_embeddings",
    ];
    for (name, has_groups, more_keys) in [
        ("falcon-7b-multi-query", false, &["multi_query"][..]),
        (
            "falcon-40b-new-architecture",
            true,
            &["num_kv_heads", "num_ln_in_parallel_attn"],
        ),
        (
            "falcon-new-architecture-one-norm",
            true,
            &["num_kv_heads", "num_ln_in_parallel_attn"],
        ),
    ] {
        let groups = |config: &Value| {
            if has_groups {
                size(config, "num_kv_heads")
            } else {
                1
            }
        };
        let (mut file, config) = FALCON.file(name, |config, tensors| {
            let (heads, groups) = (size(config, "num_attention_heads"), groups(config));
            let order = separated(groups, heads / groups, size(config, "hidden_size") / heads);
            for (name, tensor) in tensors.iter_mut() {
                if name.contains("query_key_value") {
                    *tensor = rows_in_order(tensor, &order);
                }
            }
        });
        file.set("falcon.attention.head_count_kv", groups(&config));
        file.set("falcon.tensor_data_layout", "jploski");
        check(name, &file, &config, &[&keys, more_keys].concat());
    }
    for name in ["falcon-rw-alibi", "falcon-multi-query-sequential"] {
        let (mut file, _) = FALCON.file(name, |_, _| {});
        file.set("falcon.attention.head_count_kv", 1);
        for (name, ..) in &mut file.tensors {
            *name = name.replace("post_attention_layernorm", "ffn_norm");
        }
        let place = Place::new();
        fs::write(place.source.join("a.gguf"), file.bytes()).unwrap();
        let text = place.refused().to_string();
        assert!(
            text.contains("falcon-rw") && text.contains("blk.0."),
            "{name}: {text}"
        );
    }
}

#[test]
fn phi2() {
    let keys = [
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "hidden_act",
        "layer_norm_eps",
        "intermediate_size",
        "rope_theta",
        "partial_rotary_factor",
        "qk_layernorm",
        "max_position_embeddings",
        "tie_word_embeddings",
    ];
    let rotary = |config: &Value| {
        let head_dim = size(config, "hidden_size") / size(config, "num_attention_heads");
        (config["partial_rotary_factor"].as_f64().unwrap() * head_dim as f64) as usize
    };
    for name in ["phi-2", "phi-grouped-query"] {
        let (mut file, config) = PHI2.file(name, |_, _| {});
        file.set("phi2.rope.dimension_count", rotary(&config));
        check(name, &file, &config, &keys);
    }
    // Files of early 2024, from names with one matrix for all three.
    let (mut file, config) = PHI2.file("phi-2", |config, tensors| {
        for n in 0..size(config, "num_hidden_layers") {
            for kind in ["weight", "bias"] {
                let mut part = |part| {
                    tensors
                        .remove(&format!("model.layers.{n}.self_attn.{part}_proj.{kind}"))
                        .unwrap()
                };
                let (mut fused, others) = (part("q"), [part("k"), part("v")]);
                for (_, shape, bytes) in others {
                    fused.1[0] += shape[0];
                    fused.2.extend(bytes);
                }
                tensors.insert(format!("model.layers.{n}.attn_qkv.{kind}"), fused);
            }
        }
    });
    file.set("phi2.rope.dimension_count", rotary(&config));
    check("phi-2", &file, &config, &keys);

    for (count, part) in [(0, "1 to"), (1000, "at most the head's")] {
        file.set("phi2.rope.dimension_count", count);
        let place = Place::new();
        fs::write(place.source.join("a.gguf"), file.bytes()).unwrap();
        let text = place.refused().to_string();
        assert!(
            text.contains("phi2.rope.dimension_count") && text.contains(part),
            "{text}"
        );
    }
}

#[test]
fn persimmon() {
    let keys = [
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "hidden_act",
        "layer_norm_eps",
        "intermediate_size",
        "rope_theta",
        "qk_layernorm",
        "max_position_embeddings",
        "tie_word_embeddings",
    ];
    for name in ["persimmon", "persimmon-no-qk-layernorm"] {
        let (mut file, config) = PERSIMMON.file(name, |_, _| {});
        let head_dim = size(&config, "hidden_size") / size(&config, "num_attention_heads");
        let factor = config["partial_rotary_factor"].as_f64().unwrap_or(0.5);
        file.set(
            "persimmon.rope.dimension_count",
            (factor * head_dim as f64) as usize,
        );
        let made = check(name, &file, &config, &keys);
        assert_eq!(made["partial_rotary_factor"], json!(factor));
    }
    // Files of 2023 have the length of a head, of which llama.cpp turned half.
    let (mut file, config) = PERSIMMON.file("persimmon", |_, _| {});
    let head_dim = size(&config, "hidden_size") / size(&config, "num_attention_heads");
    file.set("persimmon.rope.dimension_count", head_dim);
    let made = check("persimmon", &file, &config, &keys);
    assert_eq!(made["partial_rotary_factor"], json!(0.5));
}

#[test]
fn qwen2() {
    let (file, config) = QWEN2.file("qwen2", |_, _| {});
    let keys = [
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "hidden_act",
        "rms_norm_eps",
        "intermediate_size",
        "rope_theta",
        "max_position_embeddings",
        "tie_word_embeddings",
    ];
    check("qwen2", &file, &config, &keys);
}
