//! GGUF files of llama: the same weights as from the Hugging Face checkpoint that they were made of.

use std::fs;
use std::path::Path;

use candle_wick_convert::{ConvertError, ConvertOptions};
use serde_json::Value;
use wick_format::Dtype;

use crate::gguf_file::{kinds, paired, rows_in_order, GgufFile};
use crate::tiny::{all_tensors, manifest, run, run_default, snapshot, stored, Place, Tiny};

pub(crate) const HEADS: usize = 4;
const KV_HEADS: usize = 2;

const PARTS: [(&str, &str); 9] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

fn gguf_name(name: &str) -> String {
    let (stem, kind) = name.rsplit_once('.').unwrap();
    let stem = match stem {
        "model.embed_tokens" => "token_embd".into(),
        "model.norm" => "output_norm".into(),
        "lm_head" => "output".into(),
        _ => {
            let layer = stem.strip_prefix("model.layers.").unwrap();
            let (layer, part) = layer.split_once('.').unwrap();
            let (_, part) = PARTS.iter().find(|(known, _)| *known == part).unwrap();
            format!("blk.{layer}.{part}")
        }
    };
    format!("{stem}.{kind}")
}

/// The order of the tensor's rows in the file, if it is another one.
fn order_of(name: &str, head_dim: usize) -> Option<Vec<usize>> {
    let heads = match name {
        _ if name.contains("q_proj") => HEADS,
        _ if name.contains("k_proj") => KV_HEADS,
        _ => return None,
    };
    Some(paired(heads, head_dim))
}

/// What llama.cpp's converter makes of `Tiny::llama`.
pub(crate) fn gguf_of(tiny: &Tiny) -> GgufFile {
    let size = |key: &str| tiny.config[key].as_u64().unwrap() as usize;
    let (hidden, ffn) = (size("hidden_size"), size("intermediate_size"));
    let mut file = GgufFile::of("llama");
    file.set("llama.block_count", size("num_hidden_layers"));
    file.set("llama.context_length", 512);
    file.set("llama.embedding_length", hidden);
    file.set("llama.feed_forward_length", ffn);
    file.set("llama.attention.head_count", HEADS);
    file.set("llama.attention.head_count_kv", KV_HEADS);
    file.set("llama.attention.layer_norm_rms_epsilon", 1e-5);
    file.set("llama.rope.dimension_count", hidden / HEADS);
    file.set("llama.rope.freq_base", 100_000.0);
    file.set("tokenizer.ggml.bos_token_id", 1);
    file.set("tokenizer.ggml.eos_token_id", 2);
    for (name, tensor) in &tiny.tensors {
        let tensor = match order_of(name, hidden / HEADS) {
            Some(order) => rows_in_order(tensor, &order),
            None => tensor.clone(),
        };
        file.add(&gguf_name(name), &tensor);
    }
    file
}

/// A source that is a folder with this file.
pub(crate) fn place(file: &GgufFile) -> Place {
    let place = Place::new();
    fs::write(place.source.join("tiny.gguf"), file.bytes()).unwrap();
    place
}

pub(crate) fn config(out: &Path) -> Value {
    serde_json::from_slice(&snapshot(out)["config.json"]).unwrap()
}

pub(crate) fn tiny() -> Tiny {
    Tiny::llama(64, 176, Dtype::F32)
}

#[test]
fn the_same_weights_as_from_hugging_face() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let tiny = Tiny::llama(64, 176, dtype);
        let expected = Place::of(&tiny);
        run_default(&expected.source, &expected.out).unwrap();
        let place = place(&gguf_of(&tiny));
        let report = run_default(&place.source.join("tiny.gguf"), &place.out).unwrap();
        assert_eq!(report.ignored_tensors, Vec::<String>::new());
        assert_eq!(all_tensors(&place.out), all_tensors(&expected.out));
        assert_eq!(
            manifest(&place.out).model_hash,
            manifest(&expected.out).model_hash
        );
        assert_eq!(manifest(&place.out).layers, manifest(&expected.out).layers);
        let sources: Vec<_> = manifest(&place.out)
            .sources
            .into_iter()
            .map(|file| file.name)
            .collect();
        assert_eq!(sources, ["tiny.gguf"]);
    }
}

#[test]
fn blocks_become_what_candle_makes_of_them() {
    for kind in kinds() {
        let mut tiny = Tiny::llama_of(256, 768, 1, Dtype::F32);
        let mut file = gguf_of(&tiny);
        for (name, values) in file.quantise(kind) {
            let (current, (_, shape, _)) = tiny
                .tensors
                .iter()
                .find(|(current, _)| gguf_name(current) == name)
                .unwrap();
            let (current, mut tensor) = (current.clone(), stored(Dtype::F32, shape, &values));
            if let Some(order) = order_of(&current, 64) {
                let back =
                    (0..order.len()).map(|row| order.iter().position(|&n| n == row).unwrap());
                tensor = rows_in_order(&tensor, &back.collect::<Vec<_>>());
            }
            tiny.tensors.insert(current, tensor);
        }
        let expected = Place::of(&tiny);
        let place = place(&file);
        for dtype in [Dtype::F32, Dtype::F16] {
            let options = ConvertOptions {
                dtype: Some(dtype),
                ..Default::default()
            };
            let outs = [&expected, &place].map(|place| place.out.with_extension(dtype.name()));
            run(&expected.source, &outs[0], &options).unwrap();
            run(&place.source, &outs[1], &options).unwrap();
            assert_eq!(all_tensors(&outs[1]), all_tensors(&outs[0]), "{kind:?}");
        }
        let report = run_default(&place.source, &place.out).unwrap();
        assert!(
            report
                .notes
                .iter()
                .any(|note| note.contains("quantised") && note.contains("f16")),
            "{:?}",
            report.notes
        );
        assert_eq!(manifest(&place.out).dtype, Dtype::F16);
        let norm = &all_tensors(&place.out)["model.norm.weight"];
        assert_eq!(
            norm.0,
            safetensors::Dtype::F32,
            "what is not quantised stays as it is"
        );
    }
}

#[test]
fn files_in_parts_and_folders() {
    let tiny = tiny();
    let whole = place(&gguf_of(&tiny));
    run_default(&whole.source, &whole.out).unwrap();

    let place = Place::new();
    let mut first = gguf_of(&tiny);
    let mut second = GgufFile::of("llama");
    second.tensors = first.tensors.split_off(7);
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    for (name, file) in names.iter().zip([&first, &second]) {
        fs::write(place.source.join(name), file.bytes()).unwrap();
    }
    for (n, source) in [
        place.source.clone(),
        place.source.join(names[0]),
        place.source.join(names[1]),
    ]
    .iter()
    .enumerate()
    {
        let out = place.out.with_extension(n.to_string());
        run_default(source, &out).unwrap();
        assert_eq!(all_tensors(&out), all_tensors(&whole.out));
        assert_eq!(manifest(&out).sources.len(), 2);
    }
    fs::copy(
        whole.source.join("tiny.gguf"),
        place.source.join("tiny.gguf"),
    )
    .unwrap();
    let text = place.refused().to_string();
    assert!(
        text.contains("several GGUF files")
            && text.contains(&names.join(", "))
            && text.contains("tiny.gguf"),
        "{text}"
    );
    fs::remove_file(place.source.join("tiny.gguf")).unwrap();
    fs::remove_file(place.source.join(names[0])).unwrap();
    let text = place.refused().to_string();
    assert!(
        text.contains("1 of 2 weight files") && text.contains(names[0]),
        "{text}"
    );
}

#[test]
fn beside_a_hugging_face_checkpoint() {
    let tiny = tiny();
    let place = Place::of(&tiny);
    fs::write(place.source.join("tiny.gguf"), gguf_of(&tiny).bytes()).unwrap();
    let report = run_default(&place.source, &place.out).unwrap();
    assert_eq!(report.notes[0], "left out: tiny.gguf");
    // Without its weights the folder is one of a GGUF file, whose metadata counts.
    fs::remove_file(place.source.join("model.safetensors")).unwrap();
    fs::write(place.source.join("config.json"), "{}").unwrap();
    fs::write(place.source.join("tokenizer.json"), "{\"its\": \"own\"}").unwrap();
    let out = place.out.with_extension("gguf");
    let report = run_default(&place.source, &out).unwrap();
    assert!(
        report.notes.iter().any(|note| note.contains("config.json")),
        "{:?}",
        report.notes
    );
    assert_eq!(config(&out)["hidden_size"], 64);
    assert_eq!(snapshot(&out)["tokenizer.json"], b"{\"its\": \"own\"}");
    assert_eq!(all_tensors(&out), all_tensors(&place.out));
}

#[test]
fn a_second_run_and_the_file_itself() {
    let place = place(&gguf_of(&tiny()));
    let file = place.source.join("tiny.gguf");
    // Beside the file is fine, in its place is not.
    let out = place.source.join("out");
    run_default(&file, &out).unwrap();
    let before = snapshot(&out);
    let report = run_default(&file, &out).unwrap();
    assert!(report.notes[0].contains("nothing was written"));
    assert_eq!(snapshot(&out), before);
    for out in [&file, &file.join("out")] {
        let error = run_default(&file, out).unwrap_err();
        assert!(matches!(error, ConvertError::Output { .. }), "{error}");
        assert!(error.to_string().contains("source file"), "{error}");
    }
    let mut other = gguf_of(&tiny());
    other.set("llama.context_length", 1024);
    fs::write(&file, other.bytes()).unwrap();
    let text = run_default(&file, &out).unwrap_err().to_string();
    assert!(text.contains("another checkpoint"), "{text}");
}

#[test]
fn tensors_that_are_damaged_or_of_another_type() {
    let bytes = gguf_of(&tiny()).bytes();
    for keep in [0, 3, 4, 100, bytes.len() / 2, bytes.len() - 1] {
        let place = Place::new();
        fs::write(place.source.join("tiny.gguf"), &bytes[..keep]).unwrap();
        let text = place.refused().to_string();
        assert!(text.contains("tiny.gguf"), "{keep}: {text}");
    }
    let mut file = gguf_of(&tiny());
    for (name, _, number, data) in &mut file.tensors {
        if name == "blk.1.ffn_up.weight" {
            (*number, *data) = (20, vec![0; 176 * 64 / 32 * 18]); // IQ4_NL
        }
    }
    let text = place(&file).refused().to_string();
    for part in ["blk.1.ffn_up.weight", "IQ4_NL", "Q4_0"] {
        assert!(text.contains(part), "{text}");
    }
    let mut file = gguf_of(&tiny());
    file.tensors
        .retain(|(name, ..)| name != "blk.1.attn_norm.weight");
    let text = place(&file).refused().to_string();
    assert!(
        text.contains("model.layers.1.input_layernorm.weight"),
        "{text}"
    );

    let place = place(&gguf_of(&tiny()));
    let weights = place.source.join("model.safetensors");
    fs::write(&weights, "not GGUF").unwrap();
    let text = run_default(&weights, &place.out).unwrap_err().to_string();
    assert!(
        text.contains("not a folder") && text.contains("give the folder"),
        "{text}"
    );
}
