//! PyTorch checkpoints: the same weights as from safetensors, however they were saved.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::Dtype as FileDtype;
use serde_json::json;
use wick_format::Dtype;

use crate::tiny::{
    all_tensors, manifest, notes_on_weights, run_default, snapshot, Place, Stored, Tiny,
};
use crate::torch_file::TorchFile;

const SINGLE: &str = "pytorch_model.bin";

/// A source with the config of `tiny` and these weight files.
fn place(tiny: &Tiny, files: &[(&str, Vec<u8>)]) -> Place {
    let place = Place::new();
    tiny.write_config(&place.source);
    for (name, bytes) in files {
        fs::write(place.source.join(name), bytes).unwrap();
    }
    place
}

/// What the converted folder holds, but for its own name for the job.
fn check_same(out: &Path, expected: &Path) {
    assert_eq!(all_tensors(out), all_tensors(expected));
    assert_eq!(manifest(out).model_hash, manifest(expected).model_hash);
    assert_eq!(manifest(out).layers, manifest(expected).layers);
    let (out, expected) = (snapshot(out), snapshot(expected));
    for (name, bytes) in expected.iter().filter(|(name, _)| name.starts_with("ffn-")) {
        assert_eq!(&out[name], bytes, "{name}");
    }
    assert_eq!(out["config.json"], expected["config.json"]);
}

/// Converts the files, which must give what the same tensors in a safetensors file do.
fn check(tiny: &Tiny, files: &[(&str, Vec<u8>)]) -> Vec<String> {
    let expected = Place::of(tiny);
    run_default(&expected.source, &expected.out).unwrap();
    let place = place(tiny, files);
    let report = run_default(&place.source, &place.out).unwrap();
    check_same(&place.out, &expected.out);
    let weights = |name: &&String| name.ends_with(".bin");
    let sources = manifest(&place.out)
        .sources
        .into_iter()
        .map(|file| file.name);
    let sources: Vec<String> = sources.collect();
    assert!(sources.iter().any(|name| weights(&name)), "{sources:?}");
    notes_on_weights(&report)
}

#[test]
fn both_formats_and_all_dtypes() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let tiny = Tiny::llama(64, 176, dtype);
        let file = TorchFile::of(&tiny.tensors);
        for bytes in [file.zip(), file.legacy()] {
            let notes = check(&tiny, &[(SINGLE, bytes)]);
            assert_eq!(notes, Vec::<String>::new());
        }
    }
}

#[test]
fn tensors_with_steps() {
    for (dtype, hidden, ffn) in [(Dtype::F32, 32, 96), (Dtype::F16, 264, 300)] {
        let tiny = Tiny::opt(hidden, ffn, dtype, "model.");
        let file = TorchFile::turned(&tiny.tensors);
        check(&tiny, &[(SINGLE, file.zip())]);
        check(&tiny, &[(SINGLE, file.legacy())]);
    }
}

#[test]
fn a_tied_head_is_stored_once() {
    let mut tiny = Tiny::opt(32, 96, Dtype::F16, "model.");
    let embedding = "model.decoder.embed_tokens.weight";
    let mut file = TorchFile::of(&tiny.tensors);
    file.tie("lm_head.weight", embedding);
    let storages = file.storages.len();
    assert_eq!(storages, tiny.tensors.len());
    let head = tiny.tensors[embedding].clone();
    tiny.tensors.insert("lm_head.weight".into(), head);
    let notes = check(&tiny, &[(SINGLE, file.zip())]);
    assert!(notes[0].contains("lm_head.weight repeats"), "{notes:?}");
}

#[test]
fn names_with_the_prefix_of_a_framework() {
    let tiny = Tiny::llama(16, 24, Dtype::F32);
    for prefix in [
        "module.",
        "_forward_module.",
        "_orig_mod.",
        "module._orig_mod.",
    ] {
        let file = TorchFile::of(&tiny.tensors).wrapped(prefix);
        check(&tiny, &[(SINGLE, file.zip())]);
    }
}

/// The tensors in two files, neighbours by name apart.
fn halves(tiny: &Tiny) -> [(&'static str, BTreeMap<String, Stored>); 2] {
    [0, 1].map(|part| {
        let tensors = tiny.tensors.iter().skip(part).step_by(2);
        let name = [
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
        ][part];
        (
            name,
            tensors
                .map(|(name, tensor)| (name.clone(), tensor.clone()))
                .collect(),
        )
    })
}

fn shards(tiny: &Tiny) -> Vec<(&'static str, Vec<u8>)> {
    let [first, second] = halves(tiny);
    // One of each format, as after a repair.
    vec![
        (first.0, TorchFile::of(&first.1).zip()),
        (second.0, TorchFile::of(&second.1).legacy()),
    ]
}

fn index(tiny: &Tiny) -> Vec<u8> {
    let files = halves(tiny);
    let entries = files
        .iter()
        .flat_map(|(file, tensors)| tensors.keys().map(move |name| (name, file)));
    let map: BTreeMap<_, _> = entries.collect();
    json!({ "metadata": {}, "weight_map": map })
        .to_string()
        .into()
}

const INDEX: &str = "pytorch_model.bin.index.json";

#[test]
fn shards_with_and_without_an_index() {
    let tiny = Tiny::opt(32, 96, Dtype::Bf16, "model.");
    let mut files = shards(&tiny);
    check(&tiny, &files);
    files.push((INDEX, index(&tiny)));
    check(&tiny, &files);

    files.remove(0);
    let with_index = place(&tiny, &files).refused().to_string();
    let without = place(&tiny, &shards(&tiny)[1..]).refused().to_string();
    for text in [with_index, without] {
        assert!(text.contains("1 of 2 weight files"), "{text}");
        assert!(text.contains("pytorch_model-00001-of-00002.bin"), "{text}");
    }
}

#[test]
fn an_index_of_other_files() {
    let tiny = Tiny::opt(32, 96, Dtype::Bf16, "model.");
    for file in ["model-00001-of-00002.safetensors", "../x.bin"] {
        let mut files = shards(&tiny);
        let map = json!({ "weight_map": { "model.decoder.final_layer_norm.bias": file } });
        files.push((INDEX, map.to_string().into()));
        let text = place(&tiny, &files).refused().to_string();
        assert!(
            text.contains(INDEX) && text.contains(file) && text.contains(".bin file"),
            "{text}"
        );
    }
}

#[test]
fn mixed_dtypes_and_doubles() {
    let mut tiny = Tiny::llama(16, 24, Dtype::F16);
    tiny.add("model.norm.weight", Dtype::F32, &[16]);
    tiny.add("model.layers.0.mlp.up_proj.weight", Dtype::Bf16, &[24, 16]);
    let mut stored = tiny.tensors.clone();
    for name in [
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.down_proj.weight",
    ] {
        let shape = tiny.tensors[name].1.clone();
        tiny.add(name, Dtype::F32, &shape);
        let (_, _, bytes) = &tiny.tensors[name];
        let doubles = bytes
            .chunks(4)
            .flat_map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())).to_le_bytes());
        stored.insert(name.into(), (FileDtype::F64, shape, doubles.collect()));
    }
    check(&tiny, &[(SINGLE, TorchFile::of(&stored).zip())]);
    check(&tiny, &[(SINGLE, TorchFile::turned(&stored).legacy())]);

    let name = "model.norm.weight";
    stored.insert(
        name.into(),
        (
            FileDtype::F64,
            vec![16],
            [1e300f64.to_le_bytes(); 16].concat(),
        ),
    );
    let text = place(&tiny, &[(SINGLE, TorchFile::of(&stored).zip())])
        .refused()
        .to_string();
    assert!(
        text.contains(name) && text.contains("too large for f32"),
        "{text}"
    );
    stored.insert(name.into(), (FileDtype::I64, vec![16], vec![0; 128]));
    let text = place(&tiny, &[(SINGLE, TorchFile::of(&stored).zip())])
        .refused()
        .to_string();
    assert!(
        text.contains(name) && text.contains("I64, expected F32, F16 or BF16"),
        "{text}"
    );
}

#[test]
fn safetensors_go_before_pickles() {
    let tiny = Tiny::llama(16, 24, Dtype::F16);
    let other = TorchFile::of(&Tiny::llama(16, 24, Dtype::F32).tensors).zip();
    let expected = Place::of(&tiny);
    run_default(&expected.source, &expected.out).unwrap();
    // It is not even opened.
    for bytes in [other, b"cos\nsystem\n(S'true'\ntR.".to_vec()] {
        let both = Place::of(&tiny);
        fs::write(both.source.join(SINGLE), bytes).unwrap();
        let report = run_default(&both.source, &both.out).unwrap();
        check_same(&both.out, &expected.out);
        assert_eq!(notes_on_weights(&report), ["left out: pytorch_model.bin"]);
    }
    // A download that stopped says so, although the other files are complete.
    let partial = Place::new();
    tiny.write_sharded(&partial.source, 3);
    fs::write(
        partial.source.join(SINGLE),
        TorchFile::of(&tiny.tensors).zip(),
    )
    .unwrap();
    let lost = "model-00002-of-00003.safetensors";
    fs::remove_file(partial.source.join(lost)).unwrap();
    let text = partial.refused().to_string();
    assert!(text.contains("2 of 3") && text.contains(lost), "{text}");
    // Their index alone says nothing of the kind.
    for number in [1, 3] {
        let name = format!("model-0000{number}-of-00003.safetensors");
        fs::remove_file(partial.source.join(name)).unwrap();
    }
    run_default(&partial.source, &partial.out).unwrap();
    check_same(&partial.out, &expected.out);
    fs::remove_file(partial.source.join(SINGLE)).unwrap();
    fs::remove_dir_all(&partial.out).unwrap();
    let text = partial.refused().to_string();
    assert!(text.contains("0 of 3") && text.contains(lost), "{text}");
}

#[test]
fn what_is_not_read_becomes_one_note() {
    let tiny = Tiny::llama(16, 24, Dtype::F16);
    let names = [
        "adapter_model.safetensors",
        "flax_model.msgpack",
        "optimizer.pt",
        "rust_model.ot",
        "scheduler.pt",
        "tf_model.h5",
        "training_args.bin",
    ];
    let mut files: Vec<_> = names.iter().map(|&name| (name, b"x".to_vec())).collect();
    files.push((SINGLE, TorchFile::of(&tiny.tensors).zip()));
    files.push(("README.md", b"x".to_vec()));
    let notes = check(&tiny, &files);
    assert_eq!(notes, [format!("left out: {}", names.join(", "))]);

    for name in [
        "consolidated.00.pth",
        "adapter_model-00001-of-00001.safetensors",
        "optimizer-00001-of-00001.bin",
    ] {
        let text = place(&tiny, &[(name, b"x".to_vec())]).refused().to_string();
        assert!(text.contains("no weights") && text.contains(name), "{text}");
        assert!(text.contains("pytorch_model.bin"), "{text}");
    }
}

#[test]
fn damaged_files_are_sentences() {
    let tiny = Tiny::llama(16, 24, Dtype::F16);
    let file = TorchFile::of(&tiny.tensors);
    let (zip, legacy) = (file.zip(), file.legacy());
    let system = b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.";
    let cases: [(&str, Vec<u8>, &str); 9] = [
        ("empty", Vec::new(), ""),
        ("half a zip", zip[..zip.len() / 2].to_vec(), "cut short"),
        (
            "a zip without its last byte",
            zip[..zip.len() - 1].to_vec(),
            "",
        ),
        (
            "half a legacy file",
            legacy[..legacy.len() / 2].to_vec(),
            "",
        ),
        (
            "a legacy file without its last byte",
            legacy[..legacy.len() - 1].to_vec(),
            "",
        ),
        (
            "a missing storage",
            file.zip_with(&file.pickle(false), &[3]),
            "3",
        ),
        ("a call", file.zip_with(system, &[]), "os.system"),
        ("a web page", b"<html>".to_vec(), ""),
        (
            "git lfs",
            b"version https://git-lfs.github.com/spec/v1\n".to_vec(),
            "git lfs pull",
        ),
    ];
    for (what, bytes, part) in cases {
        let text = place(&tiny, &[(SINGLE, bytes)]).refused().to_string();
        assert!(
            text.contains(SINGLE) && text.contains(part),
            "{what}: {text}"
        );
    }
}
