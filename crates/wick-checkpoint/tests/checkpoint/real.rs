//! Files that PyTorch wrote (`scripts/torch_files.py`), against what PyTorch reads in them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use half::{bf16, f16};
use serde_json::Value;
use wick_checkpoint::{read_torch, CheckpointError, StoredTensor};

use crate::support::{assert_sound, size_bytes};

pub(crate) fn file(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/files");
    std::fs::read(folder.join(name)).unwrap()
}

/// The good files by name, and their tensors.
pub(crate) fn expected() -> BTreeMap<String, BTreeMap<String, Value>> {
    serde_json::from_slice(&file("expected.json")).unwrap()
}

fn number(dtype: &str, bytes: &[u8]) -> f64 {
    let two = || bytes.try_into().unwrap();
    let four = || bytes.try_into().unwrap();
    let eight = || bytes.try_into().unwrap();
    match dtype {
        "F64" => f64::from_le_bytes(eight()),
        "F32" => f32::from_le_bytes(four()).into(),
        "F16" => f16::from_le_bytes(two()).into(),
        "BF16" => bf16::from_le_bytes(two()).into(),
        "I64" => i64::from_le_bytes(eight()) as f64,
        "I32" => i32::from_le_bytes(four()).into(),
        "I16" => i16::from_le_bytes(two()).into(),
        "I8" => (bytes[0] as i8).into(),
        "U8" | "BOOL" => bytes[0].into(),
        other => panic!("dtype {other}"),
    }
}

/// The elements in row-major order.
fn values(tensor: &StoredTensor, file: &[u8]) -> Vec<f64> {
    let size = size_bytes(&tensor.dtype).unwrap() as usize;
    let start = tensor.offset_bytes as usize;
    let extent = &file[start..start + tensor.len_bytes as usize];
    let count = tensor.shape.iter().product();
    let element = |mut index: usize| {
        let mut position = 0;
        for (&dim, &stride) in tensor.shape.iter().zip(&tensor.strides).rev() {
            position += index % dim * stride;
            index /= dim;
        }
        number(&tensor.dtype, &extent[position * size..][..size])
    };
    (0..count).map(element).collect()
}

#[test]
fn every_file_reads_as_in_pytorch() {
    let files = expected();
    assert_eq!(files.len(), 13);
    for (name, tensors) in files {
        let file = file(&name);
        let read = read_torch(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_sound(&read, file.len());
        assert!(!tensors.is_empty());
        let names: Vec<&String> = read.iter().map(|tensor| &tensor.name).collect();
        assert_eq!(names, tensors.keys().collect::<Vec<_>>(), "{name}");
        for tensor in &read {
            let expected = &tensors[&tensor.name];
            let got = serde_json::json!({
                "dtype": tensor.dtype, "shape": tensor.shape, "strides": tensor.strides,
                "values": values(tensor, &file),
            });
            assert_eq!(got, *expected, "{name}: {}", tensor.name);
        }
    }
}

#[test]
fn views_keep_their_strides_and_tied_tensors_their_bytes() {
    for name in ["zip-views-protocol-2.pt", "legacy-views-protocol-4.pt"] {
        let tensors = read_torch(&file(name)).unwrap();
        let get = |name: &str| tensors.iter().find(|tensor| tensor.name == name).unwrap();
        let (whole, tied, rows) = (get("whole"), get("tied"), get("rows"));
        assert_eq!(whole.offset_bytes, tied.offset_bytes);
        assert_eq!(rows.offset_bytes, whole.offset_bytes + 12);
        assert_eq!((rows.len_bytes, whole.len_bytes), (24, 48));
        assert_eq!(get("transposed").strides, [1, 6]);
        assert_eq!(get("expanded").len_bytes, 12);
        for (name, contiguous) in [
            ("whole", true),
            ("rows", true),
            ("parameter", true),
            ("transposed", false),
            ("columns", false),
            ("step", false),
            ("expanded", false),
        ] {
            assert_eq!(get(name).is_contiguous(), contiguous, "{name}");
        }
    }
}

/// What an error must say, and what stands for no error.
const READS: &str = "reads";

#[test]
fn what_a_pickle_would_run_is_named_and_never_run() {
    let system = "is made by `posix.system`, which is not known here and is never run";
    for (name, says) in [
        ("runs.pt", format!("the entry `weight` {system}")),
        ("runs-nested.pt", format!("the entry `model` {system}")),
        ("runs-beside.pt", READS.into()),
    ] {
        for kind in ["zip", "legacy"] {
            let name = format!("{kind}-{name}");
            let file = file(&name);
            let got = match read_torch(&file) {
                Ok(tensors) => {
                    assert_eq!(tensors.len(), 1, "{name}");
                    READS.into()
                }
                Err(error) => error.to_string(),
            };
            assert_eq!(got, says, "{name}");
        }
    }
    let error = read_torch(&file("zip-runs-whole.pt"))
        .unwrap_err()
        .to_string();
    assert_eq!(error, format!("the whole file {system}"));
    assert!(!PathBuf::from("the-pickle-was-executed").exists());
}

#[test]
fn tensors_of_other_kinds_are_refused() {
    let error = read_torch(&file("zip-quantized.pt")).unwrap_err();
    assert!(matches!(
        error,
        CheckpointError::UnknownGlobal { what, global }
            if what == "the entry `weight`" && global == "torch._utils._rebuild_qtensor"
    ));
    let error = read_torch(&file("zip-single.pt")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no tensors: the file holds a single tensor, expected a dictionary of tensors"
    );
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    for (name, _) in expected() {
        let file = file(&name);
        for len in 0..file.len() {
            let error = read_torch(&file[..len]).unwrap_err().to_string();
            assert!(
                len < 4 || error.contains("cut short"),
                "{name} to {len}: {error}"
            );
        }
    }
}
