//! R1 to R6, C1 and C2, P1 and P2: records and plain tensors in the index; and files of our own against the
//! safetensors crate.

use std::collections::BTreeMap;

use safetensors::SafeTensors;
use wick_format::{
    crc32c, ColumnKind, ColumnStrides, Dtype, FfnLayer, FileLayout, FormatError, Layout,
    NeuronOrder, StoredDtype, TensorIndex, TensorSpec,
};

fn layer() -> FfnLayer {
    FfnLayer {
        prefix: "mlp".into(),
        file: "f".into(),
        layout: Layout::Neuron,
        hidden_size: 64,
        intermediate_size: 9,
        stride_bytes: 512,
        column_strides: None,
        dtype: Dtype::F16,
        gate: Some("g".into()),
        up: "u".into(),
        down: "d".into(),
        gate_bias: None,
        up_bias: None,
        down_bias: None,
    }
}

/// The bytes of a file with these tensors, filled with a pattern.
fn file(specs: &[TensorSpec]) -> Vec<u8> {
    let metadata = BTreeMap::from([("k\"1".to_string(), "v\n2".to_string())]);
    let layout = FileLayout::new(specs, &metadata).unwrap();
    let mut bytes = layout.header_bytes().to_vec();
    bytes.extend((bytes.len() as u64..layout.total_bytes()).map(|i| (i % 251) as u8));
    bytes
}

fn index(bytes: &[u8]) -> Result<TensorIndex, FormatError> {
    let len = TensorIndex::header_len_bytes(*bytes.first_chunk().unwrap(), bytes.len() as u64)?;
    TensorIndex::parse(&bytes[8..8 + len], bytes.len() as u64)
}

fn spec(name: &str, dtype: StoredDtype, shape: &[usize]) -> TensorSpec {
    TensorSpec::new(name, dtype, shape)
}

#[test]
fn r1_records() {
    let checksums = spec("mlp.neurons.crc32c", StoredDtype::U32, &[9]);
    let sound = [
        spec("mlp.neurons", StoredDtype::U8, &[9, 512]),
        checksums.clone(),
    ];
    let parsed = index(&file(&sound)).unwrap();
    let (records, stored) = layer().extents(&parsed).unwrap();
    assert_eq!(
        (records.offset_bytes, records.len_bytes, stored.len_bytes),
        (4096, 4608, 36)
    );
    for wrong in [
        spec("mlp.neurons", StoredDtype::U8, &[8, 512]),
        spec("mlp.neurons", StoredDtype::U8, &[9, 1024]),
        spec("mlp.neurons", StoredDtype::F16, &[9, 512]),
        spec("other.neurons", StoredDtype::U8, &[9, 512]),
    ] {
        let parsed = index(&file(&[wrong, checksums.clone()])).unwrap();
        let error = layer().extents(&parsed).unwrap_err().to_string();
        assert!(
            error.contains("`mlp.neurons`") && error.contains("U8 [9, 512]"),
            "{error}"
        );
    }
}

#[test]
fn r2_checksums_of_records() {
    let records = spec("mlp.neurons", StoredDtype::U8, &[9, 512]);
    for wrong in [
        spec("mlp.neurons.crc32c", StoredDtype::U32, &[8]),
        spec("mlp.neurons.crc32c", StoredDtype::F32, &[9]),
        spec("mlp.crc32c", StoredDtype::U32, &[9]),
    ] {
        let parsed = index(&file(&[records.clone(), wrong])).unwrap();
        let error = layer().extents(&parsed).unwrap_err().to_string();
        assert!(
            error.contains("`mlp.neurons.crc32c`") && error.contains("U32 [9]"),
            "{error}"
        );
    }
}

#[test]
fn r3_every_flipped_bit_is_seen() {
    let mut record: Vec<u8> = (0..512)
        .map(|i| if i < 384 { i as u8 } else { 0 })
        .collect();
    let sound = crc32c(&record);
    for bit in 0..512 * 8 {
        record[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(crc32c(&record), sound, "bit {bit}, padding included");
        record[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn c1_c2_column_records_and_their_checksums() {
    let by_channel = FfnLayer {
        layout: Layout::Channel,
        stride_bytes: 0,
        column_strides: Some(ColumnStrides {
            channel_bytes: 512,
            down_bytes: 1024,
        }),
        ..layer()
    };
    let sound = [
        spec("mlp.channels", StoredDtype::U8, &[64, 512]),
        spec("mlp.downs", StoredDtype::U8, &[9, 1024]),
        spec("mlp.channels.crc32c", StoredDtype::U32, &[64]),
        spec("mlp.downs.crc32c", StoredDtype::U32, &[9]),
    ];
    let parsed = index(&file(&sound)).unwrap();
    let lengths = ColumnKind::ALL.map(|kind| {
        let (records, checksums) = by_channel.column_extents(kind, &parsed).unwrap().unwrap();
        (records.len_bytes, checksums.len_bytes)
    });
    assert_eq!(lengths, [(64 * 512, 256), (9 * 1024, 36)]);
    let without = layer().column_extents(ColumnKind::Down, &parsed).unwrap();
    assert_eq!(without, None);
    for (at, wrong) in [
        (0, spec("mlp.channels", StoredDtype::U8, &[9, 512])),
        (0, spec("mlp.channels", StoredDtype::F16, &[64, 512])),
        (1, spec("mlp.downs", StoredDtype::U8, &[9, 512])),
        (2, spec("mlp.channels.crc32c", StoredDtype::U32, &[63])),
        (3, spec("mlp.crc32c", StoredDtype::U32, &[9])),
    ] {
        let expected = sound[at].clone();
        let mut specs = sound.clone();
        specs[at] = wrong;
        let parsed = index(&file(&specs)).unwrap();
        let kind = ColumnKind::ALL[at % 2];
        let error = by_channel.column_extents(kind, &parsed).unwrap_err();
        let error = error.to_string();
        let shape = format!("{:?}", expected.shape);
        assert!(
            error.contains(&format!("`{}`", expected.name)) && error.contains(&shape),
            "{error}"
        );
    }
}

#[test]
fn r5_an_order_where_a_layer_is_permuted_and_only_there() {
    let order = spec("mlp.neurons.order", StoredDtype::U32, &[9]);
    let checksum = spec("mlp.neurons.order.crc32c", StoredDtype::U32, &[1]);
    let permuted = FfnLayer {
        layout: Layout::Permuted,
        ..layer()
    };
    let sound = index(&file(&[order.clone(), checksum.clone()])).unwrap();
    let (found, of_it) = permuted.order_extents(&sound).unwrap().unwrap();
    assert_eq!((found.len_bytes, of_it.len_bytes), (36, 4));
    let refused = layer().order_extents(&sound).unwrap_err().to_string();
    assert!(refused.contains("`mlp.neurons.order`"), "{refused}");
    let records = spec("mlp.neurons", StoredDtype::U8, &[9, 512]);
    let without = index(&file(&[records])).unwrap();
    assert_eq!(layer().order_extents(&without).unwrap(), None);
    let refused = permuted.order_extents(&without).unwrap_err().to_string();
    assert!(refused.contains("U32 [9]"), "{refused}");
    for wrong in [
        [spec("mlp.neurons.order", StoredDtype::U32, &[8]), checksum],
        [
            order,
            spec("mlp.neurons.order.crc32c", StoredDtype::U32, &[9]),
        ],
    ] {
        let parsed = index(&file(&wrong)).unwrap();
        let refused = permuted.order_extents(&parsed).unwrap_err().to_string();
        assert!(refused.contains("`mlp.neurons.order"), "{refused}");
    }
}

#[test]
fn r6_an_order_holds_each_neuron_once() {
    let parse = |words: &[u32], flip: u32| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        NeuronOrder::parse("mlp.neurons.order", &bytes, crc32c(&bytes) ^ flip)
    };
    let order = parse(&[2, 0, 3, 1], 0).unwrap();
    assert_eq!(order.neurons(), [2, 0, 3, 1]);
    for record in 0..4 {
        assert_eq!(order.record_of(order.neuron_of(record)), record);
    }
    assert_eq!(
        parse(order.neurons(), 0).unwrap().to_bytes(),
        order.to_bytes()
    );
    for (words, parts) in [
        (&[0, 1, 1, 3][..], ["neuron 1", "records 1 and 2"]),
        (&[0, 1, 4, 3], ["neuron 4", "record 2"]),
        (
            &[u32::MAX, 1, 2, 3],
            ["neuron 4294967295", "4 neurons once"],
        ),
    ] {
        let refused = parse(words, 0).unwrap_err().to_string();
        let named = parts.iter().all(|part| refused.contains(part));
        assert!(
            named && refused.contains("`mlp.neurons.order`"),
            "{refused}"
        );
    }
    // Two neurons that changed places are still a permutation.
    let refused = parse(&[0, 1, 2, 3], 1).unwrap_err().to_string();
    assert!(refused.contains("crc32c"), "{refused}");
}

#[test]
fn p1_p2_checksums_of_plain_tensors() {
    let matrix = spec("w", StoredDtype::F32, &[320, 64]); // 256 rows a block
    let sound = [matrix.clone(), spec("w.crc32c", StoredDtype::U32, &[2])];
    let parsed = index(&file(&sound)).unwrap();
    let (blocks, extent) = parsed.checksums_of("w").unwrap();
    assert_eq!((blocks.block_rows, extent.len_bytes), (256, 8));
    for wrong in [
        spec("w.crc32c", StoredDtype::U32, &[1]),
        spec("w.crc32c", StoredDtype::U32, &[320]),
        spec("w.crc32c", StoredDtype::F32, &[2]),
        spec("x.crc32c", StoredDtype::U32, &[2]),
    ] {
        let parsed = index(&file(&[matrix.clone(), wrong])).unwrap();
        let error = parsed.checksums_of("w").unwrap_err().to_string();
        assert!(
            error.contains("`w.crc32c`") && error.contains("U32 [2]"),
            "{error}"
        );
    }
    assert!(parsed.checksums_of("nothing").is_err());
    let vector = [
        spec("b", StoredDtype::F16, &[70000]),
        spec("b.crc32c", StoredDtype::U32, &[1]),
    ];
    assert_eq!(
        index(&file(&vector))
            .unwrap()
            .checksums_of("b")
            .unwrap()
            .0
            .block_count(),
        1
    );
}

#[test]
fn our_files_are_plain_safetensors() {
    let specs = [
        spec("a.neurons", StoredDtype::U8, &[7, 512]),
        spec("b \"quoted\" \u{1F525}", StoredDtype::Bf16, &[3, 5]),
        spec("v", StoredDtype::F16, &[3]),
        spec("s", StoredDtype::F32, &[]),
        spec("w", StoredDtype::F32, &[2, 2, 2]),
        spec("e", StoredDtype::F32, &[0]),
        spec("c", StoredDtype::U32, &[2]),
    ];
    let bytes = file(&specs);
    let parsed = index(&bytes).unwrap();
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(parsed.tensors.len(), theirs.len());
    for (name, view) in theirs.tensors() {
        let extent = parsed.get(&name).unwrap();
        assert_eq!(view.shape(), extent.shape);
        let start = extent.offset_bytes as usize;
        assert_eq!(
            view.data(),
            &bytes[start..start + extent.len_bytes as usize]
        );
        assert!(
            extent.shape.len() < 2 || start.is_multiple_of(4096),
            "{name} at {start}"
        );
    }
    let pads: Vec<&String> = parsed
        .tensors
        .keys()
        .filter(|name| name.ends_with(".pad"))
        .collect();
    assert_eq!(pads.len(), 4, "{pads:?}");
    assert_eq!(parsed.metadata["k\"1"], "v\n2");
}

#[test]
fn names_are_unique_in_a_plan() {
    let none = BTreeMap::new();
    for specs in [
        vec![
            spec("a", StoredDtype::U8, &[1]),
            spec("a", StoredDtype::U8, &[1]),
        ],
        vec![
            spec("a", StoredDtype::U8, &[1, 1]),
            spec("a.pad", StoredDtype::U8, &[1]),
        ],
        vec![spec("__metadata__", StoredDtype::U8, &[1])],
    ] {
        assert!(matches!(
            FileLayout::new(&specs, &none),
            Err(FormatError::Tensor { .. })
        ));
    }
}

#[test]
fn sizes_are_checked_in_a_plan() {
    let none = BTreeMap::new();
    for specs in [
        vec![spec("a", StoredDtype::F32, &[usize::MAX, 2])],
        vec![spec("a", StoredDtype::U8, &[usize::MAX])],
        vec![
            spec("a", StoredDtype::U8, &[1 << 62]),
            spec("b", StoredDtype::U8, &[1 << 62]),
        ],
    ] {
        assert!(matches!(
            FileLayout::new(&specs, &none),
            Err(FormatError::Overflow { .. })
        ));
    }
    let empty = FileLayout::new(&[], &none).unwrap();
    assert_eq!(empty.total_bytes(), 4096);
}
