//! The manifest: what parses is written and parsed again to the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wick_format::{is_plain_file_name, Manifest};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(manifest) = Manifest::parse(text) {
        assert_eq!(Manifest::parse(&manifest.to_json()).unwrap(), manifest);
        for file in manifest.files.iter().chain(&manifest.sources) {
            assert!(is_plain_file_name(&file.name));
        }
        for layer in &manifest.layers {
            assert!(manifest.file(&layer.file).is_some());
            assert!(layer.record_layout().down_range().end <= layer.stride_bytes);
        }
    }
});
