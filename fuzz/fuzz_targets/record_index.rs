//! The header of our own files, and the records of a layer in it.
//!
//! Input: eight bytes, the file's length, then the header's JSON, which is padded to the alignment
//! here because no fuzzer would hit it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wick_format::{Dtype, FfnLayer, Layout, TensorExtent, TensorIndex, ALIGNMENT_BYTES};

fn layer(prefix: &str, records: &TensorExtent) -> Option<FfnLayer> {
    let &[intermediate_size, stride_bytes] = &records.shape[..] else {
        return None;
    };
    Some(FfnLayer {
        prefix: prefix.into(),
        file: "ffn.safetensors".into(),
        layout: Layout::Neuron,
        hidden_size: 64,
        intermediate_size,
        stride_bytes,
        column_strides: None,
        dtype: Dtype::F16,
        gate: None,
        up: "up".into(),
        down: "down".into(),
        gate_bias: None,
        up_bias: None,
        down_bias: None,
    })
}

fn check(extent: &TensorExtent, data_start: u64, file_len: u64) {
    let end = extent.offset_bytes.checked_add(extent.len_bytes);
    assert!(extent.offset_bytes >= data_start, "{extent:?}");
    assert!(end.is_some_and(|end| end <= file_len), "{extent:?}");
}

fuzz_target!(|bytes: &[u8]| {
    let Some((first8, json)) = bytes.split_first_chunk::<8>() else {
        return;
    };
    let file_len = u64::from_le_bytes(*first8);
    if let Ok(len) = TensorIndex::header_len_bytes(*first8, bytes.len() as u64) {
        let _unpadded = TensorIndex::parse(&json[..len], bytes.len() as u64);
    }
    let mut header = json.to_vec();
    let total = (8 + header.len()).next_multiple_of(ALIGNMENT_BYTES as usize);
    header.resize(total - 8, b' ');
    let Ok(index) = TensorIndex::parse(&header, file_len) else {
        return;
    };
    for (name, extent) in &index.tensors {
        check(extent, index.data_start_bytes, file_len);
        let Some(prefix) = name.strip_suffix(".neurons") else {
            continue;
        };
        let Some(layer) = layer(prefix, extent) else {
            continue;
        };
        if let Ok((records, checksums)) = layer.extents(&index) {
            assert_eq!(records.offset_bytes, extent.offset_bytes);
            assert_eq!(checksums.len_bytes, 4 * layer.intermediate_size as u64);
            let records_bytes = layer.intermediate_size as u64 * layer.stride_bytes as u64;
            assert_eq!(records.len_bytes, records_bytes);
        }
    }
});
