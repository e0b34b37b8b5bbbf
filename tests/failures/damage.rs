//! Bytes that changed after the conversion: an error with file and offset, never other numbers.

use std::fs;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};

use candle_wick::{IoOptions, SelectorKind};
use candle_wick_models::{load, score, LoadOptions, Result};
use wick_format::{Manifest, TensorExtent, TensorIndex};

use super::{complete_folder, refused, snapshot, text, wick};

const RECORDS: &str = "ffn-00001-of-00001.safetensors";
const RESIDENT: &str = "resident.safetensors";
const PREDICTORS: &str = "predictors.safetensors";
const ROUNDS: u64 = 240;

fn index_of(path: &Path) -> TensorIndex {
    let bytes = fs::read(path).unwrap();
    let len =
        TensorIndex::header_len_bytes(bytes[..8].try_into().unwrap(), bytes.len() as u64).unwrap();
    TensorIndex::parse(&bytes[8..8 + len], bytes.len() as u64).unwrap()
}

/// Flips one bit of `path` and puts it back when dropped.
struct Flip(PathBuf, Vec<u8>);

impl Flip {
    fn new(path: &Path, at: usize, mask: u8) -> Self {
        let good = fs::read(path).unwrap();
        let mut bad = good.clone();
        bad[at] ^= mask;
        fs::write(path, bad).unwrap();
        Self(path.to_owned(), good)
    }
}

impl Drop for Flip {
    fn drop(&mut self) {
        fs::write(&self.0, &self.1).unwrap();
    }
}

#[test]
fn flipped_bytes_are_named_by_file_and_offset() {
    let folder = complete_folder("opt-pre-ln", true);
    let model = text(folder.path());
    let layer = "model.decoder.layers.1";
    let stride = Manifest::parse(&fs::read_to_string(folder.path().join("wick.json")).unwrap())
        .unwrap()
        .layers[1]
        .stride_bytes as u64;
    // The record of neuron 77, and the one block of each of these tensors.
    let places = [
        (RECORDS, format!("{layer}.neurons"), 77 * stride),
        (RESIDENT, format!("{layer}.self_attn.q_proj.weight"), 0),
        (RESIDENT, format!("{layer}.self_attn.q_proj.bias"), 0),
        (RESIDENT, format!("{layer}.fc1.bias"), 0),
        (
            RESIDENT,
            "model.decoder.final_layer_norm.weight".to_owned(),
            0,
        ),
        (PREDICTORS, format!("{layer}.predictor.up.weight"), 0),
        (PREDICTORS, format!("{layer}.predictor.down.weight"), 0),
        (PREDICTORS, format!("{layer}.predictor.up.bias"), 0),
    ];
    for (file, tensor, block) in places {
        let path = folder.path().join(file);
        let offset = index_of(&path).tensors[&tensor].offset_bytes + block;
        let _flip = Flip::new(&path, offset as usize + 11, 0x10);
        let selector = if file == PREDICTORS {
            "lowrank"
        } else {
            "dense"
        };
        let parts = [file, &format!("offset {offset}"), "crc32c"];
        for command in [&["run", model, "-n", "1"][..], &["score", model]] {
            refused(
                &[command, &["--ids", "1,2,3", "--selector", selector]].concat(),
                &parts,
            );
        }
        // Read while the model runs, too.
        for io in ["direct", "buffered"] {
            let words = [
                "run",
                model,
                "--ids",
                "1,2,3",
                "--selector",
                selector,
                "--io",
                io,
                "--memory",
                "60%",
            ];
            let said = wick(&words, b"");
            if io == "buffered" || !said.stderr.contains("direct I/O is required") {
                said.is_refusal(io, &parts);
            }
        }
    }
    wick(&["run", model, "--ids", "1,2,3", "-n", "1"], b"").is_success("all is as it was");
}

#[test]
fn truncated_files() {
    let folder = complete_folder("opt-pre-ln", true);
    let run = [
        "run",
        text(folder.path()),
        "--ids",
        "1,2,3",
        "--selector",
        "lowrank",
    ];
    for (name, bytes) in snapshot(folder.path()) {
        let path = folder.path().join(&name);
        for left in [bytes.len() - 1, bytes.len() / 2, 4, 0] {
            fs::write(&path, &bytes[..left]).unwrap();
            // The last byte of the manifest is a line break.
            if name != "wick.json" || left + 1 < bytes.len() {
                refused(&run, &[&name]);
            }
        }
        fs::remove_file(&path).unwrap();
        match name.as_str() {
            "wick.json" => refused(&run, &["no wick.json"]),
            _ => refused(&run, &[&name]),
        }
        fs::write(&path, &bytes).unwrap();
    }
    wick(&run, b"").is_success("all is as it was");
}

#[test]
fn header_lengths_out_of_bounds() {
    let folder = complete_folder("opt-pre-ln", true);
    let run = [
        "run",
        text(folder.path()),
        "--ids",
        "1,2,3",
        "--selector",
        "lowrank",
    ];
    for name in [RECORDS, RESIDENT, PREDICTORS] {
        for length in [1u64 << 60, u64::MAX] {
            let path = folder.path().join(name);
            let good = fs::read(&path).unwrap();
            let mut bad = good.clone();
            bad[..8].copy_from_slice(&length.to_le_bytes());
            fs::write(&path, bad).unwrap();
            refused(&run, &[name, &length.to_string()]);
            fs::write(&path, good).unwrap();
        }
    }
}

fn logits(folder: &Path, selector: SelectorKind, slots: Option<usize>) -> Result<Vec<u32>> {
    let options = LoadOptions {
        selector: Some(selector),
        slots_per_layer: slots,
        io: IoOptions {
            threads: 2,
            ..IoOptions::default()
        },
        ..LoadOptions::default()
    };
    let score = score(&mut load(folder, &options)?, &[1, 87, 3, 200, 5])?;
    Ok(score
        .last_logits
        .iter()
        .map(|logit| logit.to_bits())
        .collect())
}

/// Whether a byte is data of a tensor, and not header, padding or a checksum.
fn is_data(index: Option<&TensorIndex>, at: u64) -> bool {
    let holds = |extent: &TensorExtent| {
        (extent.offset_bytes..extent.offset_bytes + extent.len_bytes).contains(&at)
    };
    let tensor = index.and_then(|index| index.tensors.iter().find(|(_, extent)| holds(extent)));
    tensor.is_some_and(|(name, _)| !name.ends_with(".pad") && !name.ends_with(".crc32c"))
}

/// Any byte of any file, with any other value, or any length: an answer or an error, no panic; and where bytes are
/// under a checksum, no other answer.
#[test]
fn random_damage_never_panics_and_never_changes_numbers() {
    let mut state = 2024u64;
    let mut random = move |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % below.max(1) as u64) as usize
    };
    let (mut refusals, mut same, mut other) = (0, 0, 0);
    for name in ["opt-pre-ln", "llama-relu-gqa-f16"] {
        let folder = complete_folder(name, true);
        let files: Vec<(String, Vec<u8>)> = snapshot(folder.path()).into_iter().collect();
        let kinds = [
            SelectorKind::Dense,
            SelectorKind::Oracle,
            SelectorKind::LowRank,
        ];
        let good = kinds.map(|kind| logits(folder.path(), kind, None).unwrap());
        for round in 0..ROUNDS / 2 {
            let (file, bytes) = &files[random(files.len())];
            let path = folder.path().join(file);
            let index = file.ends_with(".safetensors").then(|| index_of(&path));
            // The header is a small part of a file, and the part with the most to go wrong.
            let part = if random(3) == 0 {
                bytes.len().min(4096)
            } else {
                bytes.len()
            };
            let (at, is_cut) = (random(part), random(6) == 0);
            let mut bad = bytes.clone();
            if is_cut {
                bad.truncate(at);
            } else {
                bad[at] ^= 1 + random(255) as u8;
            }
            fs::write(&path, bad).unwrap();
            let kind = random(3);
            let slots = (random(2) == 0).then_some(8);
            let case = format!(
                "{name} round {round}: {file} at {at}, cut {is_cut}, {}",
                kinds[kind]
            );
            let got = catch_unwind(AssertUnwindSafe(|| {
                logits(folder.path(), kinds[kind], slots)
            }));
            match got.unwrap_or_else(|_| panic!("panicked, {case}")) {
                Err(error) => {
                    assert!(!error.to_string().is_empty(), "{case}");
                    refusals += 1;
                }
                Ok(got) if got == good[kind] => same += 1,
                Ok(_) => {
                    assert!(
                        is_cut || !is_data(index.as_ref(), at as u64),
                        "other numbers, {case}"
                    );
                    assert!(
                        !is_cut || !file.ends_with(".safetensors"),
                        "a cut was not seen, {case}"
                    );
                    other += 1;
                    println!("other numbers by what has no checksum: {case}");
                }
            }
            fs::write(&path, bytes).unwrap();
        }
    }
    println!("{refusals} refused, {same} the same numbers, {other} other numbers");
    assert!(refusals > ROUNDS / 4, "hardly anything was damaged");
}
