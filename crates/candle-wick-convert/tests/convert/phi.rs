//! Phi under its older names and keys: the same folder comes out, whatever the upload looks like.

use serde_json::{json, Value};
use wick_format::Dtype;

use crate::tiny::{all_tensors, manifest, run_default, snapshot, Place, Stored, Tiny, VOCAB};

const HIDDEN: usize = 16;
const HEADS: usize = 4;
const HEAD_DIM: usize = 4;
const LAYERS: usize = 2;

/// Two layers with today's names and keys, half of each head rotary, an FFN four times as wide.
fn current(kv_heads: usize) -> Tiny {
    let mut tiny = Tiny::new(json!({
        "model_type": "phi", "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": kv_heads,
        "vocab_size": VOCAB, "hidden_act": "gelu_new", "layer_norm_eps": 1e-05,
        "max_position_embeddings": 32, "partial_rotary_factor": 0.5,
    }));
    let kv = kv_heads * HEAD_DIM;
    tiny.add("model.embed_tokens.weight", Dtype::F16, &[VOCAB, HIDDEN]);
    let mut add = |name: &str, shape: &[usize]| {
        tiny.add(&format!("{name}.weight"), Dtype::F16, shape);
        tiny.add(&format!("{name}.bias"), Dtype::F16, &shape[..1]);
    };
    for n in 0..LAYERS {
        let layer = format!("model.layers.{n}");
        add(&format!("{layer}.input_layernorm"), &[HIDDEN]);
        for (name, rows) in [
            ("q_proj", HIDDEN),
            ("k_proj", kv),
            ("v_proj", kv),
            ("dense", HIDDEN),
        ] {
            add(&format!("{layer}.self_attn.{name}"), &[rows, HIDDEN]);
        }
        add(&format!("{layer}.mlp.fc1"), &[4 * HIDDEN, HIDDEN]);
        add(&format!("{layer}.mlp.fc2"), &[HIDDEN, 4 * HIDDEN]);
    }
    add("model.final_layernorm", &[HIDDEN]);
    add("lm_head", &[VOCAB, HIDDEN]);
    tiny
}

/// Puts q, k and v of every layer into one tensor: one after the other, or by heads.
fn fuse(tiny: &mut Tiny, name: &str, by_heads: bool) {
    for n in 0..LAYERS {
        for kind in ["weight", "bias"] {
            let attention = format!("model.layers.{n}.self_attn");
            let parts = ["q", "k", "v"].map(|part| {
                let part = format!("{attention}.{part}_proj.{kind}");
                tiny.tensors.remove(&part).unwrap()
            });
            let rows: usize = parts.iter().map(|(_, shape, _)| shape[0]).sum();
            let (dtype, mut shape, _) = parts[0].clone();
            let head_bytes = parts[0].2.len() / shape[0] * HEAD_DIM;
            shape[0] = rows;
            let bytes = if by_heads {
                let head = |h: usize| {
                    parts
                        .iter()
                        .map(move |part| &part.2[h * head_bytes..][..head_bytes])
                };
                (0..HEADS).flat_map(head).flatten().copied().collect()
            } else {
                parts.iter().flat_map(|part| part.2.clone()).collect()
            };
            let fused: Stored = (dtype, shape, bytes);
            tiny.tensors
                .insert(format!("{attention}.{name}.{kind}"), fused);
        }
    }
}

fn rename(tiny: &mut Tiny, name_of: impl Fn(&str) -> String) {
    let tensors = std::mem::take(&mut tiny.tensors).into_iter();
    tiny.tensors = tensors
        .map(|(name, tensor)| (name_of(&name), tensor))
        .collect();
}

/// As the first uploads of Phi 1.5 and 2, before transformers had the model.
fn msft(kv_heads: usize) -> Tiny {
    let mut tiny = current(kv_heads);
    tiny.config = json!({
        "model_type": "phi-msft", "n_embd": HIDDEN, "n_inner": null, "n_layer": LAYERS,
        "n_head": HEADS, "n_head_kv": if kv_heads == HEADS { Value::Null } else { json!(kv_heads) },
        "n_positions": 32, "rotary_dim": 2, "vocab_size": VOCAB,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05,
        "tie_word_embeddings": false,
    });
    fuse(&mut tiny, "Wqkv", false);
    rename(&mut tiny, |name| {
        name.replace("model.embed_tokens", "transformer.embd.wte")
            .replace("lm_head", "lm_head.linear")
            .replace("model.final_layernorm", "lm_head.ln")
            .replace("model.layers", "transformer.h")
            .replace("input_layernorm", "ln")
            .replace("self_attn.dense", "mixer.out_proj")
            .replace("self_attn", "mixer")
    });
    tiny
}

/// As the very first: parts of one sequence.
fn sequential() -> Tiny {
    let mut tiny = msft(HEADS);
    tiny.config["model_type"] = json!("mixformer-sequential");
    let head = format!("layers.{}.", LAYERS + 1);
    rename(&mut tiny, |name| {
        name.replace("transformer.embd.", "layers.0.")
            .replace("transformer.h.1.", "layers.2.")
            .replace("transformer.h.0.", "layers.1.")
            .replace("lm_head.", &head)
    });
    tiny
}

fn between() -> Tiny {
    let mut tiny = current(HEADS);
    fuse(&mut tiny, "query_key_value", true);
    tiny
}

fn copied_config(place: &Place) -> Value {
    serde_json::from_slice(&snapshot(&place.out)["config.json"]).unwrap()
}

#[test]
fn every_kind_of_upload_becomes_the_same_folder() {
    for (case, old, kv_heads) in [
        ("phi-msft", msft(HEADS), HEADS),
        ("phi-msft with shared keys", msft(2), 2),
        ("mixformer-sequential", sequential(), HEADS),
        ("fused by heads", between(), HEADS),
    ] {
        let (old, new) = (Place::of(&old), Place::of(&current(kv_heads)));
        let report = run_default(&old.source, &old.out).unwrap();
        run_default(&new.source, &new.out).unwrap();
        assert_eq!(report.ignored_tensors, Vec::<String>::new(), "{case}");
        assert!(all_tensors(&old.out) == all_tensors(&new.out), "{case}");
        assert_eq!(manifest(&old.out).model_type, "phi");
        let (old, new) = (copied_config(&old), copied_config(&new));
        for (key, value) in new.as_object().unwrap() {
            let same = old[key] == *value || (key == "num_key_value_heads" && kv_heads == HEADS);
            assert!(same, "{case}: {key} is {}, {value}", old[key]);
        }
    }
}

#[test]
fn tensors_that_the_config_gives_are_left_out() {
    let mut tiny = sequential();
    tiny.add("layers.1.mixer.rotary_emb.inv_freq", Dtype::F32, &[1]);
    tiny.add("layers.1.mixer.extra", Dtype::F32, &[1]);
    let place = Place::of(&tiny);
    let report = run_default(&place.source, &place.out).unwrap();
    assert_eq!(report.ignored_tensors, ["model.layers.0.self_attn.extra"]);
    assert!(
        report.notes[0].contains("rotary_emb.inv_freq"),
        "{:?}",
        report.notes
    );
}

#[test]
fn old_keys_have_the_defaults_of_their_time() {
    for (key, value, expected) in [
        (
            "rotary_dim",
            json!(32),
            ("partial_rotary_factor", json!(1.0)),
        ),
        (
            "rotary_dim",
            json!(null),
            ("partial_rotary_factor", json!(1.0)),
        ),
        (
            "n_inner",
            json!(4 * HIDDEN),
            ("intermediate_size", json!(4 * HIDDEN)),
        ),
        (
            "activation_function",
            json!(null),
            ("hidden_act", json!("gelu_new")),
        ),
        (
            "activation_function",
            json!("relu"),
            ("hidden_act", json!("relu")),
        ),
    ] {
        let mut tiny = msft(HEADS);
        tiny.config[key] = value;
        let place = Place::of(&tiny);
        run_default(&place.source, &place.out).unwrap();
        assert_eq!(copied_config(&place)[expected.0], expected.1, "{key}");
    }
}

#[test]
fn old_values_that_cannot_be_are_named_by_their_old_keys() {
    for (key, value, part) in [
        ("n_embd", json!(0), "`n_embd` is 0"),
        ("n_embd", json!("16"), "`n_embd` is \"16\""),
        ("n_embd", json!(null), "`hidden_size` is missing"),
        ("n_layer", json!(1u64 << 40), "1099511627776"),
        ("n_layer", json!(-2), "`n_layer` is -2"),
        ("n_head", json!(3), "a divisor of 16"),
        ("n_head_kv", json!(3), "a divisor of 4"),
        ("n_inner", json!(u64::MAX), "`n_inner`"),
        ("n_positions", json!(1.5), "`n_positions` is 1.5"),
        ("rotary_dim", json!(3), "turns 3 of a head's 4"),
        ("rotary_dim", json!(0), "`rotary_dim` is 0"),
        ("layer_norm_epsilon", json!(0), "layer_norm_eps is 0"),
        ("activation_function", json!("swosh"), "swosh"),
    ] {
        let mut tiny = msft(HEADS);
        tiny.config[key] = value;
        let text = Place::of(&tiny).refused().to_string();
        assert!(
            text.contains("config.json") && text.contains(part),
            "{key}: {text}"
        );
    }
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let name = "transformer.h.1.mixer.Wqkv.weight";
    let mut longer = msft(HEADS);
    longer.add(name, Dtype::F16, &[3 * HIDDEN + 1, HIDDEN]);
    let mut keys = msft(HEADS);
    keys.config["n_head_kv"] = json!(2);
    let mut narrow = msft(HEADS);
    narrow.add(name, Dtype::F16, &[3 * HIDDEN, HIDDEN - 1]);
    let mut both = msft(HEADS);
    both.add(
        "model.layers.1.self_attn.k_proj.weight",
        Dtype::F16,
        &[HIDDEN, HIDDEN],
    );
    let mut twice = msft(HEADS);
    twice.add(
        "model.layers.1.mlp.fc1.weight",
        Dtype::F16,
        &[4 * HIDDEN, HIDDEN],
    );
    let mut by_heads = between();
    by_heads.config["num_key_value_heads"] = json!(2);
    // Too few layers: what would be the head is not, and the other way round.
    let (mut fewer, mut more) = (sequential(), sequential());
    fewer.config["n_layer"] = json!(LAYERS - 1);
    more.config["n_layer"] = json!(LAYERS + 1);
    for (case, tiny, parts) in [
        (
            "longer",
            longer,
            vec![name, "[49, 16]", "48 rows by config.json"],
        ),
        (
            "keys",
            keys,
            vec!["Wqkv", "[48, 16]", "32 rows by config.json"],
        ),
        ("narrow", narrow, vec![name, "[16, 15]", "[16, 16]"]),
        ("both", both, vec![name, "k_proj.weight", "one of the two"]),
        ("twice", twice, vec!["model.layers.1.mlp.fc1.weight"]),
        ("by heads", by_heads, vec!["query_key_value", "[16", "[8"]),
        ("fewer", fewer, vec!["missing", "lm_head.bias"]),
        (
            "more",
            more,
            vec!["15 of 46 tensors missing", "layers.2.self_attn.q_proj"],
        ),
    ] {
        let text = Place::of(&tiny).refused().to_string();
        for part in parts {
            assert!(text.contains(part), "{case}: `{part}` not in: {text}");
        }
    }
}

#[test]
fn norms_of_queries_and_keys_by_config() {
    let mut tiny = current(HEADS);
    tiny.config["qk_layernorm"] = json!(true);
    let text = Place::of(&tiny).refused().to_string();
    assert!(
        text.contains("8 of ") && text.contains("q_layernorm"),
        "{text}"
    );
    for n in 0..LAYERS {
        for name in [
            "q_layernorm.weight",
            "q_layernorm.bias",
            "k_layernorm.weight",
            "k_layernorm.bias",
        ] {
            tiny.add(
                &format!("model.layers.{n}.self_attn.{name}"),
                Dtype::F16,
                &[HEAD_DIM],
            );
        }
    }
    let place = Place::of(&tiny);
    run_default(&place.source, &place.out).unwrap();
    assert!(all_tensors(&place.out).contains_key("model.layers.1.self_attn.k_layernorm.bias"));
}
