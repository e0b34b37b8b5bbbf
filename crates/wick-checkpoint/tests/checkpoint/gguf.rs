//! GGUF files: good ones, and with one thing broken each.

use wick_checkpoint::{read_gguf, Metadata, MetadataValue};

use crate::support::{assert_sound, gguf_array, gguf_string, Gguf};

fn nothing() -> Metadata {
    Metadata::default()
}

#[test]
fn metadata_of_every_type() {
    let strings = ["<s>", "", "é"].map(gguf_string).concat();
    let nested = [gguf_array(5, 1, &1i32.to_le_bytes()), gguf_array(5, 0, &[])].concat();
    let file = Gguf::new()
        .with("u8", 0, &[200])
        .with("i8", 1, &[0xff])
        .with("u16", 2, &300u16.to_le_bytes())
        .with("i16", 3, &(-300i16).to_le_bytes())
        .with("u32", 4, &70000u32.to_le_bytes())
        .with("i32", 5, &(-70000i32).to_le_bytes())
        .with("f32", 6, &0.5f32.to_le_bytes())
        .with("yes", 7, &[1])
        .with("text", 8, &gguf_string("llama"))
        .with("strings", 9, &gguf_array(8, 3, &strings))
        .with("nested", 9, &gguf_array(9, 2, &nested))
        .with("u64", 10, &u64::MAX.to_le_bytes())
        .with("i64", 11, &i64::MIN.to_le_bytes())
        .with("f64", 12, &1e300f64.to_le_bytes())
        .bytes();
    let metadata = read_gguf(&file).unwrap().metadata;
    assert_eq!(metadata.0.len(), 14);
    for (key, number) in [("u8", 200), ("u16", 300), ("u32", 70000), ("u64", u64::MAX)] {
        assert_eq!(metadata.get::<u64>(key).unwrap(), number);
    }
    for (key, number) in [
        ("i8", -1),
        ("i16", -300),
        ("i32", -70000),
        ("i64", i64::MIN),
    ] {
        assert_eq!(metadata.get::<i64>(key).unwrap(), number);
    }
    assert_eq!(metadata.get::<f64>("f32").unwrap(), 0.5);
    assert_eq!(metadata.get::<f64>("f64").unwrap(), 1e300);
    assert!(metadata.get::<bool>("yes").unwrap());
    assert_eq!(metadata.get::<&str>("text").unwrap(), "llama");
    assert_eq!(
        metadata.get::<Vec<&str>>("strings").unwrap(),
        ["<s>", "", "é"]
    );
    assert_eq!(
        metadata.get::<Vec<Vec<i64>>>("nested").unwrap(),
        [vec![1], vec![]]
    );
}

#[test]
fn getters_say_what_is_there_and_what_is_not() {
    let file = Gguf::new()
        .with("minus", 5, &(-1i32).to_le_bytes())
        .with("text", 8, &gguf_string("x"))
        .with("scores", 9, &gguf_array(6, 2, &[0; 8]))
        .bytes();
    let metadata = read_gguf(&file).unwrap().metadata;
    let says = [
        (
            metadata.get::<u64>("none").unwrap_err(),
            "missing, expected an integer of at least 0",
        ),
        (
            metadata.get::<u64>("minus").unwrap_err(),
            "the integer -1, expected an integer of at",
        ),
        (
            metadata.get::<f64>("text").unwrap_err(),
            "a string, expected a float",
        ),
        (
            metadata.get::<bool>("minus").unwrap_err(),
            "the integer -1, expected true or false",
        ),
        (
            metadata.find::<&str>("minus").unwrap_err(),
            "the integer -1, expected a string",
        ),
        (
            metadata.get::<Vec<&str>>("scores").unwrap_err(),
            "2 values, the first is the float 0, expected an array of the right type",
        ),
    ];
    for (error, says) in says {
        let error = error.to_string();
        assert!(
            error.starts_with("metadata `") && error.contains(says),
            "{error}"
        );
    }
    assert_eq!(metadata.find::<u64>("none").unwrap(), None);
    assert_eq!(metadata.get::<Vec<f64>>("scores").unwrap(), [0.0, 0.0]);
    assert!(nothing().0.is_empty());
}

#[test]
fn tensors_have_the_shapes_of_hugging_face_and_the_lengths_of_their_blocks() {
    let types = [
        ("F32", 0, 256 * 3 * 4),
        ("F16", 1, 256 * 3 * 2),
        ("Q4_0", 2, 8 * 3 * 18),
        ("Q4_1", 3, 8 * 3 * 20),
        ("Q5_0", 6, 8 * 3 * 22),
        ("Q5_1", 7, 8 * 3 * 24),
        ("Q8_0", 8, 8 * 3 * 34),
        ("Q2_K", 10, 3 * 84),
        ("Q3_K", 11, 3 * 110),
        ("Q4_K", 12, 3 * 144),
        ("Q5_K", 13, 3 * 176),
        ("Q6_K", 14, 3 * 210),
        ("IQ4_XS", 23, 3 * 136),
        ("I32", 26, 256 * 3 * 4),
        ("BF16", 30, 256 * 3 * 2),
    ];
    for version in [2, 3] {
        let mut file = Gguf::new();
        file.version = version;
        let mut end = 0u64;
        for (name, number, len) in types {
            file = file.tensor(name, &[256, 3], number, end);
            end += u64::next_multiple_of(len, 32);
        }
        let bytes = file.data(end as usize).bytes();
        let tensors = read_gguf(&bytes).unwrap().tensors;
        assert_sound(&tensors, bytes.len());
        let data_start = tensors[0].offset_bytes;
        assert!(data_start.is_multiple_of(32));
        for (tensor, (name, _, len)) in tensors.iter().zip(types) {
            assert_eq!((&tensor.dtype[..], tensor.len_bytes), (name, len));
            assert_eq!(
                (&tensor.shape[..], &tensor.strides[..]),
                (&[3, 256][..], &[256, 1][..])
            );
            assert!(tensor.is_contiguous());
        }
    }
}

#[test]
fn alignment_moves_the_data() {
    let file = |alignment: u32| {
        let mut bytes = Gguf::new()
            .with("general.alignment", 4, &alignment.to_le_bytes())
            .tensor("w", &[4], 0, 0)
            .bytes();
        bytes.resize(8192, 0);
        bytes
    };
    let offset = |alignment| read_gguf(&file(alignment)).map(|file| file.tensors[0].offset_bytes);
    assert_eq!(offset(4096).unwrap(), 4096);
    assert!(offset(8).unwrap() < 128);
    for bad in [0, 3, 48, 1 << 21] {
        let error = offset(bad).unwrap_err().to_string();
        assert!(
            error.contains(&format!("`general.alignment` is {bad}")),
            "{error}"
        );
    }
}

#[test]
fn other_versions_and_formats_are_named() {
    let versioned = |version: u32| {
        let mut file = Gguf::new();
        file.version = version;
        file.bytes()
    };
    for (file, says) in [
        (
            versioned(1),
            "a GGUF file of version 1; expected version 2 or 3",
        ),
        (versioned(4), "a GGUF file of version 4"),
        (versioned(3u32.swap_bytes()), "a big-endian GGUF file"),
        (b"lmgg".to_vec(), "a GGML file, the format before GGUF"),
        (
            b"tjgg\x03\0\0\0".to_vec(),
            "a GGJT file, a format before GGUF",
        ),
        (b"fmgg".to_vec(), "a GGMF file, a format before GGUF"),
        (b"".to_vec(), "an empty file"),
        (b"GGU".to_vec(), "a file that starts with [47, 47, 55]"),
    ] {
        let error = read_gguf(&file).unwrap_err().to_string();
        assert!(error.contains(says), "{error}\n  should say: {says}");
    }
}

/// A file that ends after the counts.
fn counts(tensors: u64, metadata: u64) -> Vec<u8> {
    let head = [b"GGUF".to_vec(), 3u32.to_le_bytes().to_vec()].concat();
    [&head[..], &tensors.to_le_bytes(), &metadata.to_le_bytes()].concat()
}

#[track_caller]
fn assert_refused(file: &[u8], says: &str) {
    let error = read_gguf(file).unwrap_err().to_string();
    assert!(error.contains(says), "{error}\n  should say: {says}");
}

#[test]
fn counts_and_metadata_that_cannot_be_true_are_refused() {
    let value = |number, bytes: &[u8]| Gguf::new().with("k", number, bytes).bytes();
    let twice = Gguf::new().with("k", 7, &[1]).with("k", 7, &[1]).bytes();
    let deep = (0..5).fold(gguf_array(0, 1, &[1]), |inner, _| gguf_array(9, 1, &inner));
    let max = u64::MAX;
    for (file, says) in [
        (
            counts(max, 0),
            "tensor count at byte 8: a count of 18446744073709551615, at most",
        ),
        (
            counts(1, 0),
            "tensor count at byte 8: a count of 1, at most 0",
        ),
        (
            counts(0, 1),
            "metadata count at byte 16: a count of 1, at most 0 are possible",
        ),
        (
            value(8, &max.to_le_bytes()),
            "cut short: a metadata value at byte",
        ),
        (
            value(9, &gguf_array(8, max, &[])),
            "an array's length at byte 41: a count of",
        ),
        (
            value(9, &gguf_array(9, 1 << 40, &[0; 64])),
            "a count of 1099511627776, at most",
        ),
        (
            value(9, &deep),
            "metadata `k` is arrays in arrays, expected at most 4 deep",
        ),
        (
            value(13, &[0; 8]),
            "metadata `k` is of type 13, expected a type up to 12",
        ),
        (
            value(9, &gguf_array(77, 1, &[0; 8])),
            "metadata `k` is of type 77",
        ),
        (
            value(7, &[2]),
            "metadata `k` is the bool 2, expected 0 or 1",
        ),
        (
            value(8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]),
            "a metadata value at byte 45 is not UTF-8",
        ),
        (twice, "metadata `k` is there twice, expected there once"),
    ] {
        assert_refused(&file, says);
    }
}

#[test]
fn tensors_that_cannot_be_there_are_refused() {
    let tensor = |dims: &[u64], number, offset| {
        Gguf::new()
            .tensor("w", dims, number, offset)
            .data(1024)
            .bytes()
    };
    let same_name = Gguf::new()
        .tensor("w", &[1], 0, 0)
        .tensor("w", &[1], 0, 0)
        .data(64)
        .bytes();
    let max = u64::MAX;
    for (file, says) in [
        (same_name, "tensor `w`: occurs twice"),
        (
            tensor(&[1; 5], 0, 0),
            "tensor `w`: 5 dimensions, expected at most 4",
        ),
        (tensor(&[257], 0, 0), "cut short: 1028 bytes at"),
        (
            tensor(&[1], 0, 1024),
            "cut short: 4 bytes at 64 + 1024, but the file has 1088",
        ),
        (
            tensor(&[1], 0, max - 31),
            "cut short: 4 bytes at 64 + 18446744073709551584",
        ),
        (
            tensor(&[1], 0, 4),
            "tensor `w`: offset 4, not a multiple of 32",
        ),
        (tensor(&[max, max], 0, 0), "does not fit 64 bits"),
        (tensor(&[1 << 62, 2], 0, 0), "does not fit 64 bits"),
        (
            tensor(&[48], 2, 0),
            "tensor `w`: rows of 48, but Q4_0 has blocks of 32",
        ),
        (
            tensor(&[32], 12, 0),
            "tensor `w`: rows of 32, but Q4_K has blocks of 256",
        ),
        (tensor(&[32], 4, 0), "tensor `w`: unknown ggml type 4"),
        (tensor(&[32], 4711, 0), "tensor `w`: unknown ggml type 4711"),
    ] {
        assert_refused(&file, says);
    }
}

#[test]
fn arrays_have_a_limit_in_all() {
    // One byte of the file would be 32 of memory.
    let bytes = vec![1; (1 << 24) + 1];
    let file = Gguf::new()
        .with("k", 9, &gguf_array(0, bytes.len() as u64, &bytes))
        .bytes();
    assert_refused(&file, "a count of 16777217, at most 16777216 are possible");
}

#[test]
fn a_large_vocabulary_reads() {
    let count = 300_000;
    let tokens: Vec<u8> = (0..count)
        .flat_map(|n| gguf_string(&format!("token {n}")))
        .collect();
    let file = Gguf::new()
        .with("tokens", 9, &gguf_array(8, count, &tokens))
        .bytes();
    let metadata = read_gguf(&file).unwrap().metadata;
    let tokens = metadata.get::<Vec<&str>>("tokens").unwrap();
    assert_eq!((tokens.len(), tokens[299_999]), (300_000, "token 299999"));
    assert!(matches!(metadata.0["tokens"], MetadataValue::Array(_)));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let file = Gguf::new()
        .with(
            "strings",
            9,
            &gguf_array(8, 2, &["a", "b"].map(gguf_string).concat()),
        )
        .with("number", 4, &[1, 0, 0, 0])
        .tensor("w", &[8, 2], 1, 0)
        .data(32)
        .bytes();
    assert!(read_gguf(&file).is_ok());
    for len in 0..file.len() {
        assert!(read_gguf(&file[..len]).is_err(), "{len}");
    }
}
