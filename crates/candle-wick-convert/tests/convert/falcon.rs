//! Falcon in all its variants, under today's config keys and those of the first uploads.

use candle_wick_convert::ConvertOptions;
use serde_json::{json, Value};
use wick_format::Dtype;

use crate::tiny::{all_tensors, manifest, run, run_default, snapshot, Place, Tiny, VOCAB};

const HIDDEN: usize = 16;
const FFN: usize = 4 * HIDDEN;

/// Two layers of four heads, with the tensors of `changes`' variant: a fused projection of `qkv` rows and these
/// norms.
fn tiny(changes: &Value, qkv: usize, norms: &[&str], bias: bool) -> Tiny {
    let mut config = json!({
        "model_type": "falcon", "hidden_size": HIDDEN, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": VOCAB,
    });
    merge(&mut config, changes);
    let mut tiny = Tiny::new(config);
    let mut add = |name: &str, shape: &[usize]| {
        tiny.add(&format!("transformer.{name}"), Dtype::Bf16, shape);
    };
    add("word_embeddings.weight", &[VOCAB, HIDDEN]);
    add("ln_f.weight", &[HIDDEN]);
    add("ln_f.bias", &[HIDDEN]);
    for n in 0..2 {
        for norm in norms {
            add(&format!("h.{n}.{norm}.weight"), &[HIDDEN]);
            add(&format!("h.{n}.{norm}.bias"), &[HIDDEN]);
        }
        for (name, out_dim, in_dim) in [
            ("self_attention.query_key_value", qkv, HIDDEN),
            ("self_attention.dense", HIDDEN, HIDDEN),
            ("mlp.dense_h_to_4h", FFN, HIDDEN),
            ("mlp.dense_4h_to_h", HIDDEN, FFN),
        ] {
            add(&format!("h.{n}.{name}.weight"), &[out_dim, in_dim]);
            if bias {
                add(&format!("h.{n}.{name}.bias"), &[out_dim]);
            }
        }
    }
    tiny
}

/// Sets the keys of `changes`; null removes one.
fn merge(config: &mut Value, changes: &Value) {
    let config = config.as_object_mut().unwrap();
    for (key, value) in changes.as_object().unwrap() {
        if value.is_null() {
            config.remove(key);
        } else {
            config.insert(key.clone(), value.clone());
        }
    }
}

/// A falcon-7b.
fn multi_query() -> Tiny {
    tiny(&json!({}), 24, &["input_layernorm"], false)
}

fn copied_config(place: &Place) -> Value {
    serde_json::from_slice(&snapshot(&place.out)["config.json"]).unwrap()
}

#[test]
fn every_variant_needs_the_tensors_that_it_has() {
    let one = ["input_layernorm"];
    let sequential = ["input_layernorm", "post_attention_layernorm"];
    let two = ["ln_attn", "ln_mlp"];
    // Rows of the fused projection: heads and twice the key heads, four values each.
    for (changes, qkv, norms) in [
        (json!({}), 24, &one[..]),
        (
            json!({"num_kv_heads": 4, "num_ln_in_parallel_attn": 1}),
            24,
            &one,
        ),
        (json!({"parallel_attn": false}), 24, &sequential),
        (json!({"multi_query": false}), 48, &one),
        (
            json!({"multi_query": false, "parallel_attn": false, "alibi": true}),
            48,
            &sequential,
        ),
        (
            json!({"new_decoder_architecture": true, "num_kv_heads": 2}),
            32,
            &two,
        ),
        (json!({"new_decoder_architecture": true}), 48, &two),
        (
            json!({"new_decoder_architecture": true, "num_kv_heads": 1,
                "num_ln_in_parallel_attn": 1, "parallel_attn": false}),
            24,
            &one,
        ),
    ] {
        for bias in [false, true] {
            let mut tiny = tiny(&changes, qkv, norms, bias);
            tiny.config["bias"] = json!(bias);
            let place = Place::of(&tiny);
            let report = run_default(&place.source, &place.out)
                .unwrap_or_else(|error| panic!("{changes} {bias}: {error}"));
            assert_eq!(report.ignored_tensors, Vec::<String>::new(), "{changes}");
            let layer = &manifest(&place.out).layers[1];
            assert_eq!(layer.prefix, "transformer.h.1.mlp");
            assert_eq!(
                (layer.up_bias.is_some(), layer.down_bias.is_some()),
                (bias, bias)
            );
            let kept = all_tensors(&place.out);
            let fused = "transformer.h.1.self_attention.query_key_value.weight";
            assert_eq!(kept[fused], tiny.tensors[fused], "fused as it was");

            tiny.tensors
                .remove(&format!("transformer.h.1.{}.bias", norms[norms.len() - 1]));
            let error = Place::of(&tiny).refused().to_string();
            assert!(error.contains(norms[norms.len() - 1]), "{changes}: {error}");
        }
    }
}

#[test]
fn configs_of_the_first_uploads_become_current_ones() {
    let first = |kind: &str, changes: Value| {
        let mut config = json!({
            "model_type": kind, "num_hidden_layers": null, "num_attention_heads": null, "n_layer": 2,
            "n_head": 4, "alibi": false, "bias": false, "apply_residual_connection_post_layernorm": false,
        });
        merge(&mut config, &changes);
        config
    };
    let (rw, web) = ("RefinedWebModel", "RefinedWeb");
    let (one, two) = (["input_layernorm"], ["ln_attn", "ln_mlp"]);
    let sequential = ["input_layernorm", "post_attention_layernorm"];
    let parallel = json!({"multi_query": true, "parallel_attn": true});
    for (changes, qkv, norms, new) in [
        (first(rw, parallel.clone()), 24, &one[..], false),
        (
            first(rw, json!({"multi_query": true, "n_head_kv": 1})),
            24,
            &one,
            false,
        ),
        (
            first(
                rw,
                json!({"alibi": true, "multi_query": false, "parallel_attn": false}),
            ),
            48,
            &sequential,
            false,
        ),
        (
            first(rw, json!({"multi_query": false, "n_head_kv": 4})),
            48,
            &one,
            false,
        ),
        (
            first(rw, json!({"n_head_kv": 2, "parallel_attn": true})),
            32,
            &two,
            true,
        ),
        (
            first(web, json!({"n_head_kv": 2, "parallel_attn": true})),
            32,
            &two,
            true,
        ),
        (first(web, json!({"parallel_attn": true})), 48, &two, true),
        (
            first(web, json!({"multi_query": false, "parallel_attn": false})),
            48,
            &sequential,
            false,
        ),
    ] {
        let place = Place::of(&tiny(&changes, qkv, norms, false));
        run_default(&place.source, &place.out).unwrap_or_else(|error| panic!("{changes}: {error}"));
        let config = copied_config(&place);
        assert_eq!(manifest(&place.out).model_type, "falcon");
        assert_eq!(config["model_type"], "falcon");
        assert_eq!(config["num_hidden_layers"], 2);
        assert_eq!(config["num_attention_heads"], 4);
        assert_eq!(config["num_kv_heads"], changes["n_head_kv"], "{changes}");
        assert_eq!(config["new_decoder_architecture"], new, "{changes}");
        assert_eq!(config["activation"], "gelu");
        assert_eq!(config["alibi"], changes["alibi"]);
    }
}

#[test]
fn an_activation_that_the_config_does_not_mention_can_be_asked_for() {
    let place = Place::of(&multi_query());
    let options = ConvertOptions {
        activation: Some("relu".into()),
        ..Default::default()
    };
    let report = run(&place.source, &place.out, &options).unwrap();
    assert_eq!(copied_config(&place)["activation"], "relu");
    let asked = "activation is relu in the copied config.json, as asked for";
    assert_eq!(report.notes, [asked]);
}

#[test]
fn a_model_saved_without_its_head_has_names_without_prefix() {
    let mut tiny = multi_query();
    let expected = tiny.tensors.clone();
    tiny.tensors = expected
        .iter()
        .map(|(name, tensor)| (name.replace("transformer.", ""), tensor.clone()))
        .collect();
    tiny.add("h.1.self_attention.rotary_emb.inv_freq", Dtype::F32, &[2]);
    let place = Place::of(&tiny);
    let report = run_default(&place.source, &place.out).unwrap();
    assert_eq!(report.ignored_tensors, Vec::<String>::new());
    assert_eq!(report.notes.len(), 1, "{:?}", report.notes);
    let kept = all_tensors(&place.out);
    let resident = |name: &&String| !name.contains("mlp.dense");
    for name in expected.keys().filter(resident) {
        assert_eq!(kept[name], expected[name], "{name}");
    }
    let layer = &manifest(&place.out).layers[0];
    assert!(expected.contains_key(&layer.up) && expected.contains_key(&layer.down));
}

/// Changes to the config of a 7B, and what the refusal says.
fn impossible_configs() -> Vec<(Value, [&'static str; 2])> {
    let new = |key: &str, value: Value| json!({"new_decoder_architecture": true, key: value});
    vec![
        (
            json!({"num_attention_heads": 5}),
            ["num_attention_heads", "divisor of 16"],
        ),
        (
            json!({"num_attention_heads": 0}),
            ["num_attention_heads", "whole number"],
        ),
        (json!({"num_attention_heads": 16}), ["head_dim 1", "odd"]),
        (
            json!({"hidden_size": 1u64 << 60}),
            ["hidden_size", "1152921504606846976"],
        ),
        (json!({"ffn_hidden_size": -4}), ["ffn_hidden_size", "-4"]),
        (json!({"multi_query": 1}), ["multi_query", "true or false"]),
        (
            json!({"num_ln_in_parallel_attn": 2}),
            ["num_ln_in_parallel_attn", "expected 1"],
        ),
        (
            json!({"layer_norm_epsilon": -1.0}),
            ["layer_norm_epsilon", "-1"],
        ),
        (json!({"activation": "geglu"}), ["activation", "geglu"]),
        (
            json!({"alibi": true, "rope_scaling": {"type": "linear", "factor": 2.0}}),
            ["rope_scaling", "alibi"],
        ),
        (
            new("num_kv_heads", json!(0)),
            ["num_kv_heads", "whole number"],
        ),
        (
            new("num_kv_heads", json!(3)),
            ["num_kv_heads", "divisor of 4"],
        ),
        (
            new("num_kv_heads", json!(8)),
            ["num_kv_heads", "divisor of 4"],
        ),
        (
            new("num_ln_in_parallel_attn", json!(3)),
            ["num_ln_in_parallel_attn", "3"],
        ),
        (
            json!({"model_type": "RefinedWebModel", "n_head_kv": 3}),
            ["num_kv_heads", "3"],
        ),
        (
            json!({"model_type": "RefinedWebModel", "parallel_attn": "no"}),
            ["parallel_attn", "no"],
        ),
        // What the 7B's projection would be in another variant.
        (
            json!({"multi_query": false}),
            ["query_key_value", "[48, 16]"],
        ),
    ]
}

#[test]
fn impossible_configs_are_refused_by_key() {
    for (changes, parts) in impossible_configs() {
        // Sixteen heads would be one value wide: that is refused although the tensors fit.
        let qkv = if changes["num_attention_heads"] == 16 {
            18
        } else {
            24
        };
        let place = Place::of(&tiny(&changes, qkv, &["input_layernorm"], false));
        let error = place.refused().to_string();
        for part in parts {
            assert!(error.contains(part), "{changes}: {error}");
        }
        assert!(!place.out.exists(), "{changes}");
    }
}
