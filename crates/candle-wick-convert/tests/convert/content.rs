//! What is in the converted files: the source's weights, bit for bit or rounded as asked.

use std::fs;
use std::path::Path;

use candle_wick_convert::{ConvertError, ConvertOptions};
use half::{bf16, f16};
use safetensors::Dtype as FileDtype;
use wick_format::{crc32c, ChecksumBlocks, Dtype, FileHasher, StoredDtype, TensorIndex};

use crate::tiny::{
    all_tensors, fixture, manifest, run, run_default, snapshot, stored, Place, Stored, Tiny,
};

const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// Checks a converted folder against its source, whatever the family; dtypes are the stored ones.
fn check_folder(source: &Path, out: &Path, rename: fn(&str) -> String) {
    let from: std::collections::BTreeMap<String, Stored> = all_tensors(source)
        .into_iter()
        .map(|(name, tensor)| (rename(&name), tensor))
        .collect();
    let to = all_tensors(out);
    let manifest = manifest(out);
    let mut ffn = std::collections::BTreeSet::new();
    for layer in &manifest.layers {
        let layout = layer.record_layout();
        let (dtype, shape, records) = &to[&layer.neurons_tensor()];
        assert_eq!(
            (*dtype, shape),
            (
                FileDtype::U8,
                &vec![layer.intermediate_size, layout.stride_bytes]
            )
        );
        let size = layer.dtype.size_bytes();
        for (n, record) in records.chunks(layout.stride_bytes).enumerate() {
            let row = |name: &str| &from[name].2[n * layout.row_bytes()..][..layout.row_bytes()];
            if let Some(gate) = &layer.gate {
                assert_eq!(&record[layout.gate_range().unwrap()], row(gate));
            }
            assert_eq!(&record[layout.up_range()], row(&layer.up));
            let down: Vec<u8> = from[&layer.down]
                .2
                .chunks(size * layer.intermediate_size)
                .flat_map(|row| row[n * size..][..size].to_vec())
                .collect();
            assert_eq!(
                &record[layout.down_range()],
                down,
                "{} neuron {n}",
                layer.prefix
            );
            assert!(record[layout.record_bytes()..]
                .iter()
                .all(|&byte| byte == 0));
        }
        let checksums: Vec<u8> = records
            .chunks(layout.stride_bytes)
            .flat_map(|record| crc32c(record).to_le_bytes())
            .collect();
        assert_eq!(to[&layer.checksums_tensor()].2, checksums);
        ffn.extend(layer.gate.iter().chain([&layer.up, &layer.down]));
        for bias in [&layer.gate_bias, &layer.up_bias, &layer.down_bias]
            .into_iter()
            .flatten()
        {
            assert!(to.contains_key(bias));
        }
    }
    for (name, tensor) in from.iter().filter(|(name, _)| !ffn.contains(name)) {
        assert_eq!(&to[name], tensor, "{name}");
    }
}

/// Checks that every file is as the format says: alignment, order, checksums of plain tensors, hashes.
fn check_files(out: &Path) {
    let manifest = manifest(out);
    for file in &manifest.files {
        let bytes = fs::read(out.join(&file.name)).unwrap();
        let mut hasher = FileHasher::new();
        hasher.update(&bytes);
        assert_eq!(
            (file.size_bytes, &file.xxh3),
            (bytes.len() as u64, &hasher.hex())
        );
        if !file.name.ends_with(".safetensors") {
            continue;
        }
        let first8 = *bytes.first_chunk::<8>().unwrap();
        let len = TensorIndex::header_len_bytes(first8, file.size_bytes).unwrap();
        let index = TensorIndex::parse(&bytes[8..8 + len], file.size_bytes).unwrap();
        for layer in manifest
            .layers
            .iter()
            .filter(|layer| layer.file == file.name)
        {
            let (records, _) = layer.extents(&index).unwrap();
            assert_eq!(records.offset_bytes % 4096, 0);
        }
        if file.name != "resident.safetensors" {
            continue;
        }
        let is_plain = |name: &str| !name.ends_with(".crc32c") && !name.ends_with(".pad");
        for (name, extent) in index.tensors.iter().filter(|(name, _)| is_plain(name)) {
            let (blocks, at) = index.checksums_of(name).unwrap();
            assert!(at.offset_bytes > extent.offset_bytes);
            for block in 0..blocks.block_count() {
                let range = blocks.block_bytes_range(block);
                let data = &bytes[(extent.offset_bytes + range.start) as usize
                    ..(extent.offset_bytes + range.end) as usize];
                let stored = &bytes[at.offset_bytes as usize + 4 * block..][..4];
                assert_eq!(stored, crc32c(data).to_le_bytes());
            }
        }
    }
}

fn same(name: &str) -> String {
    name.to_string()
}

#[test]
fn every_bit_arrives() {
    for dtype in ALL {
        let llama = Place::of(&Tiny::llama(64, 176, dtype));
        run_default(&llama.source, &llama.out).unwrap();
        check_folder(&llama.source, &llama.out, same);
        check_files(&llama.out);
        let opt = Place::of(&Tiny::opt(32, 96, dtype, "model."));
        run_default(&opt.source, &opt.out).unwrap();
        check_folder(&opt.source, &opt.out, same);
        check_files(&opt.out);
    }
}

#[test]
fn sizes_that_fill_no_tile() {
    for (hidden, ffn) in [(8, 1), (264, 3), (520, 777), (8, 600)] {
        let place = Place::of(&Tiny::llama(hidden, ffn, Dtype::Bf16));
        run_default(&place.source, &place.out).unwrap();
        check_folder(&place.source, &place.out, same);
        check_files(&place.out);
    }
}

#[test]
fn layers_larger_than_a_block() {
    // 6000 records of 12 KiB: more than the 64 MiB that are put together at a time.
    let place = Place::of(&Tiny::llama_of(1024, 6000, 1, Dtype::F32));
    run_default(&place.source, &place.out).unwrap();
    check_folder(&place.source, &place.out, same);
    check_files(&place.out);
}

#[test]
fn shards_and_old_names() {
    let place = Place::new();
    Tiny::opt(32, 96, Dtype::F16, "").write_sharded(&place.source, 3);
    run_default(&place.source, &place.out).unwrap();
    check_folder(&place.source, &place.out, |name| format!("model.{name}"));
    let prefixes: Vec<String> = manifest(&place.out)
        .layers
        .into_iter()
        .map(|layer| layer.prefix)
        .collect();
    assert_eq!(
        prefixes,
        ["model.decoder.layers.0", "model.decoder.layers.1"]
    );
    // A complete sequence without its index is good enough.
    fs::remove_file(place.source.join("model.safetensors.index.json")).unwrap();
    let again = place.out.with_extension("again");
    run_default(&place.source, &again).unwrap();
    let hash = |out: &Path| manifest(out).model_hash;
    assert_eq!(hash(&place.out), hash(&again));
}

#[test]
fn shared_fixtures() {
    let names = [
        "llama-2-silu",
        "llama-relu-gqa-f16",
        "llama-3-rope-scaled-tied",
        "opt-pre-ln",
        "phi-2",
        "persimmon",
    ];
    for source in names.into_iter().filter_map(fixture) {
        let place = Place::new();
        let report = run_default(&source, &place.out).unwrap();
        assert_eq!(report.ignored_tensors, Vec::<String>::new());
        assert_eq!(report.notes, Vec::<String>::new());
        check_folder(&source, &place.out, same);
        check_files(&place.out);
        let copied = fs::read(place.out.join("config.json")).unwrap();
        assert_eq!(copied, fs::read(source.join("config.json")).unwrap());
    }
}

#[test]
fn a_wanted_dtype_is_rounded_to_nearest_even() {
    let tiny = Tiny::llama(16, 24, Dtype::F32);
    for dtype in [Dtype::F16, Dtype::Bf16] {
        // What is expected: the same checkpoint, rounded before it is converted.
        let mut rounded = Tiny::llama(16, 24, Dtype::F32);
        for (file_dtype, _, bytes) in rounded.tensors.values_mut() {
            let values = bytes
                .chunks(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            (*file_dtype, *bytes) = match dtype {
                Dtype::F16 => {
                    let bits = values.flat_map(|v| f16::from_f32(v).to_le_bytes());
                    (FileDtype::F16, bits.collect())
                }
                _ => {
                    let bits = values.flat_map(|v| bf16::from_f32(v).to_le_bytes());
                    (FileDtype::BF16, bits.collect())
                }
            };
        }
        let (place, expected) = (Place::of(&tiny), Place::of(&rounded));
        let options = ConvertOptions {
            dtype: Some(dtype),
            ..Default::default()
        };
        run(&place.source, &place.out, &options).unwrap();
        run_default(&expected.source, &expected.out).unwrap();
        assert_eq!(all_tensors(&place.out), all_tensors(&expected.out));
        let (manifest, expected) = (manifest(&place.out), manifest(&expected.out));
        assert_eq!(manifest.dtype, dtype);
        assert_eq!(manifest.model_hash, expected.model_hash);
        assert_eq!(manifest.dense_weight_bytes, expected.dense_weight_bytes);
    }
}

#[test]
fn mixed_dtypes_settle_on_the_most_common() {
    let mut tiny = Tiny::llama(16, 24, Dtype::F16);
    tiny.add("model.layers.1.mlp.up_proj.weight", Dtype::F32, &[24, 16]);
    tiny.add("model.norm.weight", Dtype::F32, &[16]);
    let place = Place::of(&tiny);
    let report = run_default(&place.source, &place.out).unwrap();
    assert!(
        report.notes[0].contains("f32 and f16"),
        "{:?}",
        report.notes
    );
    assert_eq!(manifest(&place.out).dtype, Dtype::F16);
    let to = all_tensors(&place.out);
    assert_eq!(
        to["model.norm.weight"].0,
        FileDtype::F32,
        "resident tensors keep their dtype"
    );
    assert_eq!(
        to["model.layers.0.input_layernorm.weight"].0,
        FileDtype::F16
    );
}

#[test]
fn values_that_do_not_fit_are_named() {
    let mut tiny = Tiny::llama(8, 4, Dtype::F32);
    let mut values = [0.5; 32];
    values[9] = -70000.0;
    for name in [
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
    ] {
        let count = tiny.tensors[name].1.iter().product();
        let shape = tiny.tensors[name].1.clone();
        let before = tiny.tensors.insert(
            name.into(),
            stored(
                Dtype::F32,
                &shape,
                &values
                    .iter()
                    .copied()
                    .cycle()
                    .take(count)
                    .collect::<Vec<_>>(),
            ),
        );
        let place = Place::of(&tiny);
        let options = ConvertOptions {
            dtype: Some(Dtype::F16),
            ..Default::default()
        };
        let error = place.refused_with(&options);
        assert!(matches!(error, ConvertError::Tensor { .. }));
        let text = error.to_string();
        assert!(text.contains(name) && text.contains("-70000"), "{text}");
        tiny.tensors.insert(name.into(), before.unwrap());
    }
}

#[test]
fn the_report_adds_up() {
    let place = Place::of(&Tiny::llama(64, 176, Dtype::F16));
    let options = ConvertOptions {
        max_file_bytes: 1,
        ..Default::default()
    };
    let report = run(&place.source, &place.out, &options).unwrap();
    let manifest = manifest(&place.out);
    let names: Vec<&str> = manifest
        .files
        .iter()
        .map(|file| file.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "config.json",
            "resident.safetensors",
            "ffn-00001-of-00002.safetensors",
            "ffn-00002-of-00002.safetensors"
        ]
    );
    assert_eq!(report.layers, 2);
    assert_eq!(report.files, manifest.files);
    assert_eq!(report.resident_bytes, manifest.files[1].size_bytes);
    assert_eq!(
        report.ffn_bytes,
        manifest.files[2].size_bytes + manifest.files[3].size_bytes
    );
    let source: usize = all_tensors(&place.source)
        .values()
        .map(|tensor| tensor.2.len())
        .sum();
    assert_eq!(manifest.dense_weight_bytes, source as u64);
    let listed: Vec<&str> = manifest
        .sources
        .iter()
        .map(|file| file.name.as_str())
        .collect();
    assert_eq!(listed, ["config.json", "model.safetensors"]);
    let on_disk: Vec<String> = snapshot(&place.out).into_keys().collect();
    assert_eq!(
        on_disk.len(),
        names.len() + 1,
        "nothing but the manifest besides: {on_disk:?}"
    );
}

#[test]
fn checksum_blocks_of_long_rows() {
    // 40 rows of 4 KiB: three blocks of 16 rows.
    let blocks = ChecksumBlocks::of(&[40, 1024], StoredDtype::F32).unwrap();
    assert_eq!(blocks.block_count(), 3);
    let place = Place::of(&Tiny::llama_of(1024, 8, 1, Dtype::F32));
    run_default(&place.source, &place.out).unwrap();
    check_files(&place.out);
}

#[test]
fn other_files_come_along() {
    let place = Place::of(&Tiny::llama(8, 4, Dtype::F32));
    for name in [
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "README.md",
    ] {
        fs::write(place.source.join(name), format!("text of {name}")).unwrap();
    }
    run_default(&place.source, &place.out).unwrap();
    let out = snapshot(&place.out);
    assert_eq!(out["tokenizer.json"], b"text of tokenizer.json");
    assert_eq!(out["tokenizer.model"], b"text of tokenizer.model");
    assert!(out.contains_key("vocab.json") && out.contains_key("merges.txt"));
    assert!(!out.contains_key("README.md"));
}
