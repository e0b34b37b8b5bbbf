//! Sources that are damaged, incomplete or of another kind: one sentence each, nothing written.

use std::fs;

use candle_wick_convert::{ConvertError, ConvertOptions};
use serde_json::{json, Value};
use wick_format::Dtype;

use crate::tiny::{fixture, run_default, Place, Tiny};

fn tiny() -> Tiny {
    Tiny::llama(16, 24, Dtype::F16)
}

/// The sentence for a refused checkpoint; the output folder was not even made.
fn refusal(place: &Place) -> String {
    let text = place.refused().to_string();
    assert!(!place.out.exists(), "written to although: {text}");
    text
}

fn sharded() -> Place {
    let place = Place::new();
    tiny().write_sharded(&place.source, 3);
    place
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` not in: {text}");
    }
}

#[test]
fn truncated_shards() {
    let name = "model-00002-of-00003.safetensors";
    for cut in [
        "one byte",
        "a half",
        "the data",
        "header",
        "all but 5 bytes",
        "all",
    ] {
        let place = sharded();
        let path = place.source.join(name);
        let bytes = fs::read(&path).unwrap();
        let header_len = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let keep = match cut {
            "one byte" => bytes.len() - 1,
            "a half" => bytes.len() / 2,
            "the data" => 8 + header_len,
            "header" => header_len,
            "all but 5 bytes" => 5,
            _ => 0,
        };
        fs::write(&path, &bytes[..keep]).unwrap();
        let text = refusal(&place);
        contains(&text, &[name, &keep.to_string()]);
        if keep >= 8 + header_len {
            contains(&text, &[&bytes.len().to_string(), "cut short"]);
        }
    }
}

#[test]
fn bytes_after_the_data() {
    let place = sharded();
    let path = place.source.join("model-00001-of-00003.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    bytes.push(0);
    fs::write(&path, &bytes).unwrap();
    contains(
        &refusal(&place),
        &["model-00001", &bytes.len().to_string(), "damaged"],
    );
}

#[test]
fn header_lengths_out_of_bounds() {
    for len in [1u64 << 60, u64::MAX, 100_000_001, 0] {
        let place = Place::of(&tiny());
        let path = place.source.join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        contains(&refusal(&place), &["model.safetensors", "header"]);
    }
}

#[test]
fn git_lfs_pointers() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 13\n";
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let place = Place::of(&tiny());
        fs::write(place.source.join(name), pointer).unwrap();
        contains(&refusal(&place), &[name, "git-lfs pointer", "git lfs pull"]);
    }
    let place = sharded();
    fs::write(place.source.join("model.safetensors.index.json"), pointer).unwrap();
    contains(&refusal(&place), &["index.json", "git-lfs"]);
}

#[test]
fn missing_shards() {
    let place = sharded();
    fs::remove_file(place.source.join("model-00002-of-00003.safetensors")).unwrap();
    let expected = [
        "2 of 3 weight files",
        "model-00002-of-00003.safetensors",
        "unfinished download",
    ];
    contains(&refusal(&place), &expected);
    fs::remove_file(place.source.join("model.safetensors.index.json")).unwrap();
    contains(&refusal(&place), &expected);
}

#[test]
fn a_hole_in_the_sequence_that_the_index_does_not_know() {
    let place = sharded();
    let lost = "model-00002-of-00003.safetensors";
    edit_index(&place, |map| map.retain(|_, file| file != lost));
    fs::remove_file(place.source.join(lost)).unwrap();
    contains(&refusal(&place), &["2 of 3 weight files", lost]);
}

fn edit_index(place: &Place, edit: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let path = place.source.join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(index["weight_map"].as_object_mut().unwrap());
    fs::write(path, index.to_string()).unwrap();
}

#[test]
fn an_index_that_lies() {
    let place = sharded();
    edit_index(&place, |map| {
        map.insert(
            "model.extra".into(),
            json!("model-00001-of-00003.safetensors"),
        );
    });
    contains(
        &refusal(&place),
        &["index.json", "model.extra", "does not hold"],
    );
    for file in [
        "../model.safetensors",
        "/etc/x.safetensors",
        "a\\b.safetensors",
        "..",
        "x.bin",
    ] {
        let place = sharded();
        edit_index(&place, |map| {
            map.insert("model.norm.weight".into(), json!(file));
        });
        contains(&refusal(&place), &["index.json", "model.norm.weight", file]);
    }
    let place = sharded();
    fs::write(
        place.source.join("model.safetensors.index.json"),
        "{\"weight_map\": 3}",
    )
    .unwrap();
    contains(&refusal(&place), &["index.json"]);
}

#[test]
fn the_same_tensor_twice() {
    let place = sharded();
    let first = place.source.join("model-00001-of-00003.safetensors");
    fs::copy(
        &first,
        place.source.join("model-00002-of-00003.safetensors"),
    )
    .unwrap();
    fs::remove_file(place.source.join("model.safetensors.index.json")).unwrap();
    contains(
        &refusal(&place),
        &["lm_head.weight", "model-00001", "model-00002"],
    );
    let mut both = Tiny::opt(8, 4, Dtype::F32, "model.");
    both.add("decoder.final_layer_norm.bias", Dtype::F32, &[8]);
    contains(
        &refusal(&Place::of(&both)),
        &["model.decoder.final_layer_norm.bias"],
    );
}

#[test]
fn missing_tensors_are_all_named() {
    let mut tiny = tiny();
    tiny.tensors.remove("model.norm.weight");
    tiny.tensors.remove("model.layers.1.mlp.up_proj.weight");
    let text = refusal(&Place::of(&tiny));
    contains(
        &text,
        &[
            "2 of 20 tensors",
            "model.norm.weight",
            "model.layers.1.mlp.up_proj.weight",
        ],
    );
    let mut narrow = Tiny::opt(8, 4, Dtype::F32, "model.");
    narrow.config["word_embed_proj_dim"] = json!(4);
    let parts = [
        "2 of",
        "decoder.project_in.weight",
        "decoder.project_out.weight",
    ];
    contains(&refusal(&Place::of(&narrow)), &parts);
}

#[test]
fn wrong_shapes_and_dtypes() {
    let mut wrong = tiny();
    wrong.add("model.layers.0.mlp.down_proj.weight", Dtype::F16, &[24, 16]);
    let parts = ["model.safetensors", "down_proj", "[24, 16]", "[16, 24]"];
    contains(&refusal(&Place::of(&wrong)), &parts);

    let mut wrong = tiny();
    wrong.config["vocab_size"] = json!(41);
    contains(
        &refusal(&Place::of(&wrong)),
        &["embed_tokens", "[40, 16]", "[41, 16]"],
    );

    for (dtype, name, size) in [
        (safetensors::Dtype::I64, "I64", 8),
        (safetensors::Dtype::F8_E4M3, "F8_E4M3", 1),
    ] {
        for tensor in ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"] {
            let mut wrong = tiny();
            let shape = wrong.tensors[tensor].1.clone();
            let len = shape.iter().product::<usize>() * size;
            wrong
                .tensors
                .insert(tensor.into(), (dtype, shape, vec![0; len]));
            contains(
                &refusal(&Place::of(&wrong)),
                &[tensor, name, "F32, F16 or BF16"],
            );
        }
    }
}

#[test]
fn unknown_architectures() {
    let mut other = tiny();
    other.config["model_type"] = json!("mamba");
    contains(
        &refusal(&Place::of(&other)),
        &["`mamba`", "not supported", "llama", "opt"],
    );
    other.config.as_object_mut().unwrap().remove("model_type");
    contains(
        &refusal(&Place::of(&other)),
        &["config.json", "`model_type` is missing"],
    );

    let mut quantised = tiny();
    quantised.config["quantization_config"] = json!({ "bits": 4 });
    contains(&refusal(&Place::of(&quantised)), &["quantised"]);

    for name in ["falcon-7b-multi-query"] {
        if let Some(source) = fixture(name) {
            let place = Place::new();
            let error = run_default(&source, &place.out).unwrap_err();
            assert!(
                matches!(error, ConvertError::Unsupported { .. }),
                "{name}: {error}"
            );
            assert!(!place.out.exists());
        }
    }
}

#[test]
fn config_values_that_cannot_be() {
    for (key, value, expected) in [
        ("hidden_size", json!(null), "1 to"),
        ("hidden_size", json!(0), "1 to"),
        ("intermediate_size", json!("24"), "1 to"),
        ("num_hidden_layers", json!(1u64 << 40), "1 to 4096"),
        ("num_attention_heads", json!(-4), "1 to"),
        ("num_attention_heads", json!(5), "a divisor of 16"),
        ("num_key_value_heads", json!(3), "a divisor of 4"),
        ("vocab_size", json!(1.5), "1 to"),
        ("tie_word_embeddings", json!("yes"), "true or false"),
        ("hidden_act", json!(7), "a text"),
    ] {
        let mut wrong = tiny();
        wrong.config[key] = value.clone();
        let text = refusal(&Place::of(&wrong));
        contains(
            &text,
            &["config.json", &format!("`{key}` is {value}"), expected],
        );
    }
    let mut act = tiny();
    act.config["hidden_act"] = json!("geglu");
    let parts = ["`hidden_act` is \"geglu\", expected one of", "relu", "silu"];
    contains(&refusal(&Place::of(&act)), &parts);
    act.config["hidden_act"] = json!("fatrelu");
    let parts = ["config.json", "fatrelu", "hidden_act_param"];
    contains(&refusal(&Place::of(&act)), &parts);
    for (name, parts) in [
        ("swosh", &["\"swosh\"", "gelu_new"][..]),
        ("fatrelu", &parts),
    ] {
        let options = ConvertOptions {
            activation: Some(name.into()),
            ..Default::default()
        };
        let text = Place::of(&tiny()).refused_with(&options).to_string();
        contains(&text, parts);
    }
}

#[test]
fn no_checkpoint_at_all() {
    let place = Place::new();
    contains(&refusal(&place), &["config.json", "cannot read"]);
    tiny().write_config(&place.source);
    contains(&refusal(&place), &["no weights", "model.safetensors"]);
    fs::write(place.source.join("pytorch_model.bin"), "x").unwrap();
    contains(&refusal(&place), &["PyTorch", "safetensors"]);
    fs::write(place.source.join("config.json"), "{\"model_type\":").unwrap();
    contains(&refusal(&place), &["config.json", "EOF"]);
    fs::write(place.source.join("config.json"), [0xff, 0xfe]).unwrap();
    contains(&refusal(&place), &["config.json", "UTF-8"]);

    let missing = run_default(&place.source.join("nowhere"), &place.out).unwrap_err();
    contains(&missing.to_string(), &["nowhere", "does not exist"]);
    let file = run_default(&place.source.join("config.json"), &place.out).unwrap_err();
    contains(&file.to_string(), &["config.json", "not a folder"]);
    assert!(!place.out.exists());
}

#[test]
fn flipped_header_bytes_never_panic() {
    let place = Place::of(&Tiny::llama_of(4, 2, 1, Dtype::F16));
    let path = place.source.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    for position in 0..8 + header_len {
        let mut flipped = bytes.clone();
        flipped[position] ^= 1 << (position % 8);
        fs::write(&path, &flipped).unwrap();
        // Some flips still are a checkpoint (another name for a tensor that is left out).
        if run_default(&place.source, &place.out).is_ok() {
            fs::remove_dir_all(&place.out).unwrap();
        }
    }
}
