//! Layouts `channel` and `both`: every column of the source is in the record that the format says, checked and padded.

use std::collections::BTreeMap;
use std::path::Path;

use candle_wick_convert::ConvertOptions;
use wick_format::{crc32c, ChecksumBlocks, ColumnKind, Dtype, FfnLayer, Layout};

use crate::tiny::{all_tensors, fixture, manifest, run, run_default, Place, Stored, Tiny};

fn options(layout: Layout) -> ConvertOptions {
    ConvertOptions {
        layout,
        ..ConvertOptions::default()
    }
}

/// Column `column` of a matrix of the source.
fn column(matrix: &Stored, column: usize, size: usize) -> Vec<u8> {
    let (_, shape, bytes) = matrix;
    let rows = bytes.chunks(size * shape[1]);
    rows.flat_map(|row| row[column * size..][..size].to_vec())
        .collect()
}

/// Checks the column records of a layer against the source's matrices.
fn check_columns(layer: &FfnLayer, from: &BTreeMap<String, Stored>, to: &BTreeMap<String, Stored>) {
    let size = layer.dtype.size_bytes();
    for (kind, matrices) in [
        (
            ColumnKind::Channel,
            layer.gate.iter().chain([&layer.up]).collect::<Vec<_>>(),
        ),
        (ColumnKind::Down, vec![&layer.down]),
    ] {
        let layout = layer.column_layout(kind).unwrap();
        let name = layer.columns_tensor(kind);
        let (_, shape, records) = &to[&name];
        let count = layer.column_count(kind);
        assert_eq!(shape, &vec![count, layout.stride_bytes], "{name}");
        for (n, record) in records.chunks(layout.stride_bytes).enumerate() {
            for (index, matrix) in matrices.iter().enumerate() {
                let expected = column(&from[*matrix], n, size);
                let got = &record[layout.column_range(index)];
                assert!(got == expected, "{name}: {matrix}, record {n}");
            }
            let padding = &record[layout.record_bytes()..];
            assert!(padding.iter().all(|byte| *byte == 0), "{name} record {n}");
        }
        let checksums = records.chunks(layout.stride_bytes).map(crc32c);
        let checksums: Vec<u8> = checksums.flat_map(u32::to_le_bytes).collect();
        assert_eq!(to[&ChecksumBlocks::tensor_name(&name)].2, checksums);
    }
}

/// Converts in both layouts, and checks them against the source and the default one.
fn check(source: &Path) {
    check_layouts(source, &[Layout::Channel, Layout::Both]);
}

fn check_layouts(source: &Path, layouts: &[Layout]) {
    let from = all_tensors(source);
    let place = Place::new();
    run_default(source, &place.out).unwrap();
    let by_neuron = all_tensors(&place.out);
    for &layout in layouts {
        let out = place.out.with_extension(layout.name());
        run(source, &out, &options(layout)).unwrap();
        let (to, manifest) = (all_tensors(&out), manifest(&out));
        for layer in &manifest.layers {
            assert_eq!(layer.layout, layout);
            check_columns(layer, &from, &to);
        }
        // What is not a column is as it always was.
        for (name, tensor) in &by_neuron {
            let is_neuron = name.contains(".neurons");
            match to.get(name) {
                Some(found) => assert_eq!(found, tensor, "{name}"),
                None => assert!(is_neuron && layout == Layout::Channel, "{name}"),
            }
        }
    }
}

#[test]
fn every_column_arrives() {
    for dtype in [Dtype::F32, Dtype::F16] {
        check(&Place::of(&Tiny::llama(64, 176, dtype)).source);
    }
    check(&Place::of(&Tiny::opt(32, 96, Dtype::Bf16, "model.")).source);
    check(&fixture("phi-2"));
}

#[test]
fn sizes_that_fill_no_tile_and_more_than_a_block() {
    for (hidden, ffn) in [(8, 1), (264, 3), (520, 777)] {
        check(&Place::of(&Tiny::llama(hidden, ffn, Dtype::Bf16)).source);
    }
    // 600 records of channels, 112 KiB each.
    let large = Place::of(&Tiny::llama_of(600, 14_000, 1, Dtype::F32));
    check_layouts(&large.source, &[Layout::Channel]);
}

#[test]
fn another_layout_is_another_job_and_permuted_is_none() {
    let place = Place::of(&Tiny::llama(64, 176, Dtype::F16));
    let error = place.refused_with(&options(Layout::Permuted)).to_string();
    assert!(error.contains("wick reorder"), "{error}");
    run(&place.source, &place.out, &options(Layout::Channel)).unwrap();
    run(&place.source, &place.out, &options(Layout::Channel)).unwrap();
    let error = run_default(&place.source, &place.out).unwrap_err();
    assert!(error.to_string().contains("other options"), "{error}");
}
