//! GGUF files.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wick_checkpoint::read_gguf;
use wick_fuzz::assert_sound;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(file) = read_gguf(bytes) {
        assert_sound(&file.tensors, bytes.len());
        for key in file.metadata.0.keys() {
            // One of the two is an error with a description of the value.
            let text = file.metadata.get::<&str>(key).is_ok();
            let numbers = file.metadata.get::<Vec<u64>>(key).is_ok();
            assert!(!(text && numbers));
        }
    }
});
