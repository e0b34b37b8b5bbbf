//! Tied and own heads, activations, and tensors that the model does not have.

use candle_wick_convert::ConvertOptions;
use serde_json::{json, Value};
use wick_format::Dtype;

use crate::tiny::{all_tensors, manifest, run, run_default, snapshot, Place, Tiny};

const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

fn copied_config(place: &Place) -> Value {
    serde_json::from_slice(&snapshot(&place.out)["config.json"]).unwrap()
}

/// Converts; returns whether the head was kept, the copied `tie_word_embeddings`, and the notes.
fn head_of(tiny: &Tiny) -> (bool, Value, Vec<String>) {
    let place = Place::of(tiny);
    std::fs::write(place.source.join("tokenizer.json"), "{}").unwrap();
    let report = run_default(&place.source, &place.out).unwrap();
    assert_eq!(report.ignored_tensors, Vec::<String>::new());
    let kept = all_tensors(&place.out).contains_key(HEAD);
    let weights: usize = tiny
        .tensors
        .iter()
        .filter(|(name, _)| kept || *name != HEAD)
        .map(|(_, tensor)| tensor.2.len())
        .sum();
    assert_eq!(manifest(&place.out).dense_weight_bytes, weights as u64);
    (
        kept,
        copied_config(&place)["tie_word_embeddings"].clone(),
        report.notes,
    )
}

#[test]
fn every_kind_of_head() {
    let mut tiny = Tiny::llama(8, 4, Dtype::F32);
    let (kept, tied, notes) = head_of(&tiny);
    assert!(kept && tied.is_null() && notes.is_empty());

    tiny.config["tie_word_embeddings"] = json!(true);
    let (kept, tied, notes) = head_of(&tiny);
    assert!(kept && tied == json!(false), "a head that differs is used");
    assert!(notes[0].contains("differs"), "{notes:?}");

    let embedding = tiny.tensors[EMBEDDING].clone();
    tiny.tensors.insert(HEAD.into(), embedding);
    let (kept, tied, notes) = head_of(&tiny);
    assert!(!kept && tied == json!(true));
    assert!(notes[0].contains("stored once"), "{notes:?}");

    tiny.config["tie_word_embeddings"] = json!(false);
    let (kept, tied, notes) = head_of(&tiny);
    assert!(kept && tied == json!(false) && notes.is_empty());

    tiny.tensors.remove(HEAD);
    let (kept, tied, notes) = head_of(&tiny);
    assert!(
        !kept && tied == json!(true),
        "without a head the embedding is the head"
    );
    assert!(notes[0].contains("no lm_head.weight"), "{notes:?}");
}

#[test]
fn the_same_head_in_another_dtype_is_the_same() {
    let mut tiny = Tiny::opt(8, 4, Dtype::F16, "model.");
    let (dtype, shape, bytes) = tiny.tensors["model.decoder.embed_tokens.weight"].clone();
    assert_eq!(dtype, safetensors::Dtype::F16);
    let widened = bytes
        .chunks(2)
        .flat_map(|b| {
            half::f16::from_le_bytes([b[0], b[1]])
                .to_f32()
                .to_le_bytes()
        })
        .collect();
    tiny.tensors
        .insert(HEAD.into(), (safetensors::Dtype::F32, shape, widened));
    let (kept, tied, notes) = head_of(&tiny);
    assert!(
        !kept && tied.is_null() && notes.len() == 1,
        "opt is tied by default: {notes:?}"
    );
}

#[test]
fn numbers_keep_their_spelling_in_a_changed_config() {
    let mut tiny = Tiny::llama(8, 4, Dtype::F32);
    tiny.config["rms_norm_eps"] = json!("here");
    let place = Place::of(&tiny);
    let text = tiny.config.to_string().replace("\"here\"", "1.00E-05");
    std::fs::write(place.source.join("config.json"), text).unwrap();
    let options = ConvertOptions {
        activation: Some("relu".into()),
        ..Default::default()
    };
    let report = run(&place.source, &place.out, &options).unwrap();
    assert!(
        report.notes[0].contains("hidden_act is relu"),
        "{:?}",
        report.notes
    );
    let copied = String::from_utf8(snapshot(&place.out)["config.json"].clone()).unwrap();
    assert!(copied.contains("\"hidden_act\": \"relu\""), "{copied}");
    assert!(copied.contains("1.00E-05"), "{copied}");
}

#[test]
fn tensors_of_other_models_are_listed() {
    let mut tiny = Tiny::llama(8, 4, Dtype::F32);
    tiny.add(
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        Dtype::F32,
        &[2],
    );
    tiny.add("model.layers.0.self_attn.q_proj.bias", Dtype::F32, &[8]);
    tiny.tensors.insert(
        "position_ids".into(),
        (safetensors::Dtype::I64, vec![2], vec![0; 16]),
    );
    let place = Place::of(&tiny);
    let report = run_default(&place.source, &place.out).unwrap();
    assert_eq!(
        report.ignored_tensors,
        ["model.layers.0.self_attn.q_proj.bias", "position_ids"]
    );
    assert!(
        report.notes[0].contains("rotary_emb.inv_freq"),
        "{:?}",
        report.notes
    );
}

#[test]
fn biases_by_config() {
    let mut tiny = Tiny::llama(8, 4, Dtype::F32);
    tiny.config["mlp_bias"] = json!(true);
    tiny.config["attention_bias"] = json!(true);
    let error = Place::of(&tiny).refused().to_string();
    assert!(error.contains("14 of 34 tensors missing"), "{error}");
    for n in 0..2 {
        for (name, dim) in [("q", 8), ("k", 4), ("v", 4), ("o", 8)] {
            tiny.add(
                &format!("model.layers.{n}.self_attn.{name}_proj.bias"),
                Dtype::F32,
                &[dim],
            );
        }
        for (name, dim) in [("gate", 4), ("up", 4), ("down", 8)] {
            tiny.add(
                &format!("model.layers.{n}.mlp.{name}_proj.bias"),
                Dtype::F32,
                &[dim],
            );
        }
    }
    let place = Place::of(&tiny);
    run_default(&place.source, &place.out).unwrap();
    let layer = &manifest(&place.out).layers[1];
    assert_eq!(
        layer.gate_bias.as_deref(),
        Some("model.layers.1.mlp.gate_proj.bias")
    );
    assert_eq!(
        layer.up_bias.as_deref(),
        Some("model.layers.1.mlp.up_proj.bias")
    );
    assert_eq!(
        layer.down_bias.as_deref(),
        Some("model.layers.1.mlp.down_proj.bias")
    );

    let mut opt = Tiny::opt(8, 4, Dtype::F32, "model.");
    opt.config["enable_bias"] = json!(false);
    opt.tensors
        .retain(|name, _| !name.ends_with("proj.bias") && !name.contains("fc1.bias"));
    opt.tensors.retain(|name, _| !name.contains("fc2.bias"));
    let place = Place::of(&opt);
    run_default(&place.source, &place.out).unwrap();
    assert_eq!(manifest(&place.out).layers[0].up_bias, None);
}

#[test]
fn biases_by_model_type() {
    let mut tiny = Tiny::llama(8, 4, Dtype::F32);
    tiny.config["attention_bias"] = json!(true);
    tiny.config["mlp_bias"] = json!(true);
    tiny.config["model_type"] = json!("mistral");
    let place = Place::of(&tiny);
    run_default(&place.source, &place.out).unwrap();
    tiny.config["model_type"] = json!("qwen2");
    let error = Place::of(&tiny).refused().to_string();
    assert!(error.contains("6 of 26 tensors missing"), "{error}");
    assert!(error.contains("layers.1.self_attn.v_proj.bias"), "{error}");
}

#[test]
fn the_activation_of_the_family_where_the_config_has_none() {
    let mut tiny = Tiny::llama(8, 4, Dtype::F32);
    tiny.config.as_object_mut().unwrap().remove("hidden_act");
    let place = Place::of(&tiny);
    run_default(&place.source, &place.out).unwrap();
    assert!(copied_config(&place)["hidden_act"].is_null());
}
