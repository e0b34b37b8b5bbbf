//! No bytes make a parser panic, and what a writer plans a reader finds again.

use std::collections::BTreeMap;

use proptest::prelude::*;
use wick_format::{FileLayout, Manifest, RawHeader, StoredDtype, TensorIndex, TensorSpec};

const DTYPES: [StoredDtype; 5] = [
    StoredDtype::F32,
    StoredDtype::F16,
    StoredDtype::Bf16,
    StoredDtype::U8,
    StoredDtype::U32,
];

fn specs() -> impl Strategy<Value = Vec<TensorSpec>> {
    let tensor = (0..DTYPES.len(), prop::collection::vec(0usize..40, 0..4));
    prop::collection::vec(tensor, 0..12).prop_map(|tensors| {
        let spec = |(n, (dtype, shape)): (usize, (usize, Vec<usize>))| {
            TensorSpec::new(format!("t{n}"), DTYPES[dtype], &shape)
        };
        tensors.into_iter().enumerate().map(spec).collect()
    })
}

/// Text that looks enough like a header to get far.
fn header_like() -> impl Strategy<Value = String> {
    let number = prop_oneof![
        Just("0".to_string()),
        Just("4096".to_string()),
        Just(u64::MAX.to_string()),
        any::<u64>().prop_map(|n| n.to_string()),
        Just("-1".to_string()),
        Just("1e3".to_string()),
    ];
    let dtype = prop_oneof![Just("F32"), Just("U8"), Just("I64"), Just("x")];
    let shape = prop::collection::vec(number.clone(), 0..4);
    let entry = ("[a-c]{1}", dtype, shape, number.clone(), number);
    prop::collection::vec(entry, 0..4).prop_map(|entries| {
        let entry = |(name, dtype, shape, start, end): (
            String,
            &str,
            Vec<String>,
            String,
            String,
        )| {
            let shape = shape.join(",");
            format!(
                r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}"#
            )
        };
        format!(
            "{{{}}}",
            entries.into_iter().map(entry).collect::<Vec<_>>().join(",")
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300), len in any::<u64>()) {
        let _any = TensorIndex::parse(&bytes, len);
        let _any = TensorIndex::parse(&[b"{", bytes.as_slice()].concat(), len);
        let _any = Manifest::parse(&String::from_utf8_lossy(&bytes));
        if let Some(first8) = bytes.first_chunk::<8>() {
            if let Ok(header_len) = TensorIndex::header_len_bytes(*first8, len) {
                prop_assert!(header_len as u64 + 8 <= len && header_len <= 100_000_000);
            }
        }
    }

    #[test]
    fn any_header(text in header_like(), len in any::<u64>()) {
        let _any = TensorIndex::parse(text.as_bytes(), len);
        let mut padded = text.clone().into_bytes();
        padded.resize(4088, b' ');
        let _any = TensorIndex::parse(&padded, 4096);
        if let Ok(raw) = RawHeader::parse(text.as_bytes()) {
            let total: u64 = raw.tensors.values().map(|tensor| tensor.len_bytes).sum();
            prop_assert_eq!(raw.data_start_bytes + total, raw.data_end_bytes);
        }
    }

    #[test]
    fn plans_are_read_back(specs in specs()) {
        let layout = FileLayout::new(&specs, &BTreeMap::new()).unwrap();
        let header = layout.header_bytes();
        let first8 = *header.first_chunk().unwrap();
        let header_len = TensorIndex::header_len_bytes(first8, layout.total_bytes()).unwrap();
        prop_assert_eq!(header_len + 8, header.len());
        let index = TensorIndex::parse(&header[8..], layout.total_bytes()).unwrap();
        prop_assert_eq!(index.tensors.len(), layout.entries().len());
        for spec in &specs {
            let extent = index.expect(&spec.name, spec.dtype, &spec.shape).unwrap();
            prop_assert_eq!(Some(extent), layout.extent(&spec.name));
        }
    }

    #[test]
    fn a_damaged_header_is_refused_or_sound(
        specs in specs(),
        position in any::<prop::sample::Index>(),
        bit in 0..8u32,
    ) {
        let layout = FileLayout::new(&specs, &BTreeMap::new()).unwrap();
        let mut json = layout.header_bytes()[8..].to_vec();
        let position = position.index(json.len());
        json[position] ^= 1 << bit;
        if let Ok(index) = TensorIndex::parse(&json, layout.total_bytes()) {
            for extent in index.tensors.values() {
                prop_assert!(extent.offset_bytes + extent.len_bytes <= layout.total_bytes());
            }
        }
    }
}
