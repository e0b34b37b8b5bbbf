//! PyTorch files: the bytes as a file, and as the pickle of a sound archive with two storages.
#![no_main]

use std::io::{Cursor, Write};

use libfuzzer_sys::fuzz_target;
use wick_checkpoint::read_torch;
use wick_fuzz::assert_sound;
use zip::write::SimpleFileOptions;
use zip::ZipWriter;

fn archive_of(pickle: &[u8]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default();
    let entries: [(&str, &[u8]); 3] = [
        ("archive/data.pkl", pickle),
        ("archive/data/0", &[0; 96]),
        ("archive/data/1", &[0; 40]),
    ];
    for (name, content) in entries {
        writer.start_file(name, options).unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

fn check(file: &[u8]) {
    if let Ok(tensors) = read_torch(file) {
        assert_sound(&tensors, file.len());
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if !bytes.starts_with(b"PK") {
        check(&archive_of(bytes));
    }
});
