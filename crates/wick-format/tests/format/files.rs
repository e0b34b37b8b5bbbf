//! F1 to F10: the files of tensors.

use serde_json::{json, Value};
use wick_format::{FormatError, StoredDtype, TensorIndex};

/// Header JSON, padded so that the data starts at 4096.
fn padded(json: &str) -> Vec<u8> {
    let mut bytes = json.as_bytes().to_vec();
    bytes.resize(4088, b' ');
    bytes
}

/// Parses a header in front of `data_len` bytes of data.
fn parse(json: &str, data_len: u64) -> Result<TensorIndex, FormatError> {
    TensorIndex::parse(&padded(json), 4096 + data_len)
}

fn tensor(dtype: &str, shape: Value, start: u64, end: u64) -> Value {
    json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] })
}

/// A sound header; the tests break one thing each.
fn sound() -> Value {
    json!({
        "__metadata__": { "a": "b" },
        "m": tensor("F16", json!([8, 4]), 0, 64),
        "m.pad": tensor("U8", json!([4032]), 64, 4096),
        "n": tensor("BF16", json!([2, 2]), 4096, 4104),
        "v": tensor("F32", json!([3]), 4104, 4116),
        "c": tensor("U32", json!([1]), 4116, 4120),
    })
}

fn refused(header: &Value) -> FormatError {
    parse(&header.to_string(), 4120).unwrap_err()
}

#[test]
fn a_sound_header() {
    let index = parse(&sound().to_string(), 4120).unwrap();
    assert_eq!(index.data_start_bytes, 4096);
    assert_eq!(index.metadata["a"], "b");
    let v = index.get("v").unwrap();
    assert_eq!(
        (v.dtype, v.offset_bytes, v.len_bytes),
        (StoredDtype::F32, 8200, 12)
    );
    assert_eq!(v.shape, [3]);
    assert_eq!(parse("{}", 0).unwrap().tensors.len(), 0);
}

#[test]
fn f1_header_length() {
    let len = |n: u64, file| TensorIndex::header_len_bytes(n.to_le_bytes(), file);
    assert_eq!(len(100, 108).unwrap(), 100);
    assert_eq!(len(100_000_000, u64::MAX).unwrap(), 100_000_000);
    for (n, file) in [
        (101, 108),
        (1 << 60, 1 << 61),
        (100_000_001, u64::MAX),
        (u64::MAX, 9),
        (0, 0),
    ] {
        if n == 0 {
            assert_eq!(len(n, file).unwrap(), 0); // refused by F2 then
            continue;
        }
        let error = len(n, file).unwrap_err();
        assert!(matches!(error, FormatError::HeaderLength { .. }));
        assert!(error.to_string().contains(&n.to_string()), "{error}");
    }
}

#[test]
fn f2_first_byte() {
    let text = sound().to_string();
    for header in [
        format!(" {text}"),
        format!("\n{text}"),
        "[]".into(),
        String::new(),
    ] {
        let error = TensorIndex::parse(header.as_bytes(), 9999).unwrap_err();
        assert!(matches!(error, FormatError::HeaderStart), "{error}");
    }
}

#[test]
fn f3_duplicate_keys() {
    let entry = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    for (header, key) in [
        (format!(r#"{{"t":{entry},"t":{entry}}}"#), "t"),
        (format!(r#"{{"t":{entry},"\u0074":{entry}}}"#), "t"),
        (
            r#"{"__metadata__":{},"__metadata__":{}}"#.into(),
            "__metadata__",
        ),
        (r#"{"__metadata__":{"k":"1","k":"2"}}"#.into(), "k"),
    ] {
        let error = parse(&header, 1).unwrap_err().to_string();
        assert!(error.contains(&format!("duplicate key `{key}`")), "{error}");
    }
    let twice = r#"{"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let error = parse(twice, 1).unwrap_err().to_string();
    assert!(
        error.contains("`t`") && error.contains("duplicate field `dtype`"),
        "{error}"
    );
}

#[test]
fn f4_entries() {
    for entry in [
        json!({ "shape": [1], "data_offsets": [0, 1] }),
        json!({ "dtype": "U8", "data_offsets": [0, 1] }),
        json!({ "dtype": "U8", "shape": [1] }),
        json!({ "dtype": "U8", "shape": [1], "data_offsets": [0] }),
        json!({ "dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2] }),
        json!({ "dtype": "U8", "shape": [-1], "data_offsets": [0, 1] }),
        json!({ "dtype": "U8", "shape": [1.0], "data_offsets": [0, 1] }),
        json!({ "dtype": "U8", "shape": 1, "data_offsets": [0, 1] }),
        json!({ "dtype": 8, "shape": [1], "data_offsets": [0, 1] }),
        json!(3),
    ] {
        let error = parse(&json!({ "odd": entry }).to_string(), 1).unwrap_err();
        assert!(matches!(error, FormatError::Json { .. }), "{error}");
        assert!(error.to_string().contains("tensor `odd`"), "{error}");
    }
    let error = parse(&json!({ "__metadata__": { "k": 1 } }).to_string(), 0).unwrap_err();
    assert!(matches!(error, FormatError::Json { .. }), "{error}");
}

#[test]
fn f5_unknown_dtypes() {
    for dtype in ["F64", "I64", "f32", "F8_E4M3", ""] {
        let mut header = sound();
        header["v"] = tensor(
            dtype,
            json!([3]),
            4104,
            4104 + if dtype == "F64" { 24 } else { 12 },
        );
        header["c"]["data_offsets"] = json!([4104 + 12, 4120]);
        let error = match dtype {
            // Known to other tools, so the length is checked before the dtype.
            "F64" | "I64" | "F8_E4M3" => {
                let size = if dtype == "F8_E4M3" { 3 } else { 24 };
                let alone = json!({ "v": tensor(dtype, json!([3]), 0, size) });
                parse(&alone.to_string(), size).unwrap_err()
            }
            _ => refused(&header),
        };
        assert!(matches!(error, FormatError::UnknownDtype { .. }), "{error}");
        assert!(error.to_string().contains("`v`"), "{error}");
    }
}

#[test]
fn f6_holes_and_overlaps() {
    for (start, end) in [(4100, 4112), (4108, 4120), (0, 12), (4104, 4103)] {
        let mut header = sound();
        header["v"]["data_offsets"] = json!([start, end]);
        let error = refused(&header);
        assert!(
            matches!(
                error,
                FormatError::TensorOffset { .. } | FormatError::TensorLength { .. }
            ),
            "{error}"
        );
    }
    let late = json!({ "v": tensor("U8", json!([1]), 1, 2) });
    let error = parse(&late.to_string(), 2).unwrap_err();
    assert!(
        matches!(
            error,
            FormatError::TensorOffset {
                got: 1,
                expected: 0,
                ..
            }
        ),
        "{error}"
    );
    let backwards =
        json!({ "v": tensor("odd", json!([1]), 0, 5), "w": tensor("odd", json!([1]), 5, 3) });
    let error = parse(&backwards.to_string(), 5).unwrap_err();
    assert!(
        matches!(
            error,
            FormatError::TensorOffset {
                got: 3,
                expected: 5,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn f7_lengths() {
    let mut header = sound();
    header["v"]["shape"] = json!([4]);
    let error = refused(&header);
    assert!(
        matches!(
            error,
            FormatError::TensorLength {
                got: 12,
                expected: 16,
                ..
            }
        ),
        "{error}"
    );
    let max = usize::MAX;
    for shape in [
        json!([max, max]),
        json!([max]),
        json!([1u64 << 32, 1u64 << 32, 0, 4]),
    ] {
        let header = json!({ "big": tensor("F32", shape, 0, 0) });
        let error = parse(&header.to_string(), 0).unwrap_err();
        assert!(
            matches!(&error, FormatError::Overflow { name } if name == "big"),
            "{error}"
        );
    }
    let empty =
        json!({ "none": tensor("F32", json!([0, 8]), 0, 0), "one": tensor("U8", json!([]), 0, 1) });
    assert_eq!(parse(&empty.to_string(), 1).unwrap().tensors.len(), 2);
    let far = json!({ "far": tensor("odd", json!([1]), 0, u64::MAX) });
    assert!(matches!(
        parse(&far.to_string(), 1),
        Err(FormatError::Overflow { .. })
    ));
}

#[test]
fn f8_end_of_file() {
    let text = sound().to_string();
    for data_len in [4119, 4121, 0, 1 << 40] {
        let error = parse(&text, data_len).unwrap_err();
        assert!(
            matches!(error, FormatError::FileLength { got, expected: 8216 } if got == 4096 + data_len),
            "{error}"
        );
    }
}

#[test]
fn f9_start_of_the_data() {
    for len in [2, 100, 4087, 4089, 4096] {
        let mut header = b"{}".to_vec();
        header.resize(len, b' ');
        let error = TensorIndex::parse(&header, 8 + len as u64).unwrap_err();
        assert!(matches!(error, FormatError::Alignment { .. }), "{error}");
    }
}

#[test]
fn f10_start_of_matrices() {
    let header = json!({
        "a": tensor("U8", json!([8]), 0, 8),
        "m": tensor("U8", json!([2, 4]), 8, 16),
    });
    let error = parse(&header.to_string(), 16).unwrap_err();
    assert!(
        matches!(&error, FormatError::Alignment { name, got: 4104, .. } if name == "m"),
        "{error}"
    );
}
