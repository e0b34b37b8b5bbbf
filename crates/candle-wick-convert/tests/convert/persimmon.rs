//! Persimmon: names of its first release, defaults, and what does not fit.

use serde_json::{json, Value};
use wick_format::Dtype;

use crate::tiny::{all_tensors, run_default, snapshot, Place, Tiny, VOCAB};

const HIDDEN: usize = 16;
const HEAD_DIM: usize = 4;

/// Two layers, without the keys that have defaults.
fn persimmon() -> Tiny {
    let mut tiny = Tiny::new(json!({
        "model_type": "persimmon", "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
        "hidden_dropout": 0.6,
    }));
    let mut add = |name: &str, shape: &[usize]| {
        tiny.add(&format!("{name}.weight"), Dtype::Bf16, shape);
        tiny.add(&format!("{name}.bias"), Dtype::Bf16, &shape[..1]);
    };
    for n in 0..2 {
        let layer = format!("model.layers.{n}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(&format!("{layer}.{norm}"), &[HIDDEN]);
        }
        for norm in ["q_layernorm", "k_layernorm"] {
            add(&format!("{layer}.self_attn.{norm}"), &[HEAD_DIM]);
        }
        add(
            &format!("{layer}.self_attn.query_key_value"),
            &[3 * HIDDEN, HIDDEN],
        );
        add(&format!("{layer}.self_attn.dense"), &[HIDDEN, HIDDEN]);
        add(&format!("{layer}.mlp.dense_h_to_4h"), &[24, HIDDEN]);
        add(&format!("{layer}.mlp.dense_4h_to_h"), &[HIDDEN, 24]);
    }
    add("model.final_layernorm", &[HIDDEN]);
    tiny.add("model.embed_tokens.weight", Dtype::Bf16, &[VOCAB, HIDDEN]);
    tiny.add("lm_head.weight", Dtype::Bf16, &[VOCAB, HIDDEN]);
    tiny
}

#[test]
fn the_names_of_the_first_release() {
    let (new, mut old) = (Place::of(&persimmon()), persimmon());
    let tensors = std::mem::take(&mut old.tensors).into_iter();
    let first_name = |name: String| {
        name.replace("lm_head", "word_embeddings_for_head")
            .replace(
                "model.embed_tokens",
                "language_model.embedding.word_embeddings",
            )
            .replace("model.layers", "language_model.encoder.layers")
            .replace(
                "model.final_layernorm",
                "language_model.encoder.final_layernorm",
            )
            .replace("self_attn", "self_attention")
    };
    old.tensors = tensors
        .map(|(name, tensor)| (first_name(name), tensor))
        .collect();
    old.add(
        "language_model.encoder.layers.0.self_attention.rotary_emb.inv_freq",
        Dtype::F32,
        &[1],
    );
    let old = Place::of(&old);
    let report = run_default(&old.source, &old.out).unwrap();
    run_default(&new.source, &new.out).unwrap();
    assert_eq!(report.ignored_tensors, Vec::<String>::new());
    assert!(
        report.notes[0].contains("rotary_emb.inv_freq"),
        "{:?}",
        report.notes
    );
    assert!(all_tensors(&old.out) == all_tensors(&new.out));
    let config: Value = serde_json::from_slice(&snapshot(&old.out)["config.json"]).unwrap();
    assert_eq!(config["hidden_act"], "relu2");
}

#[test]
fn what_does_not_fit_is_refused() {
    let name = "model.layers.1.self_attn.query_key_value.weight";
    let mut short = persimmon();
    short.add(name, Dtype::Bf16, &[2 * HIDDEN, HIDDEN]);
    let mut head = persimmon();
    head.add(
        "model.layers.0.self_attn.q_layernorm.bias",
        Dtype::Bf16,
        &[HIDDEN],
    );
    let mut bare = persimmon();
    bare.tensors.retain(|name, _| !name.contains("k_layernorm"));
    let mut odd = persimmon();
    odd.config["partial_rotary_factor"] = json!(0.8);
    let mut heads = persimmon();
    heads.config["num_attention_heads"] = json!(5);
    for (case, tiny, parts) in [
        ("short", short, vec![name, "[32, 16]", "[48, 16]"]),
        ("head", head, vec!["q_layernorm.bias", "[16]", "[4]"]),
        ("bare", bare, vec!["4 of 35 tensors missing", "k_layernorm"]),
        ("odd", odd, vec!["config.json", "turns 3 of a head's 4"]),
        ("heads", heads, vec!["config.json", "a divisor of 16"]),
    ] {
        let text = Place::of(&tiny).refused().to_string();
        for part in parts {
            assert!(text.contains(part), "{case}: `{part}` not in: {text}");
        }
    }
}

#[test]
fn norms_of_queries_and_keys_by_config() {
    let mut tiny = persimmon();
    tiny.config["qk_layernorm"] = json!(false);
    let with = Place::of(&tiny);
    let report = run_default(&with.source, &with.out).unwrap();
    assert_eq!(report.ignored_tensors.len(), 8);
    tiny.tensors
        .retain(|name, _| !name.contains("_layernorm.") || !name.contains("self_attn"));
    let without = Place::of(&tiny);
    run_default(&without.source, &without.out).unwrap();
    assert!(all_tensors(&with.out) == all_tensors(&without.out));
}
