//! A file of known bytes in a temporary folder.

use std::path::PathBuf;
use wick_io::{DirectIo, Engine, FlashFile, Reader, ReaderOptions, SlotRead};

/// Byte `i` of every file made here.
pub(crate) fn byte(i: u64) -> u8 {
    (i % 251) as u8 ^ (i / 4096) as u8
}

pub(crate) struct TestFile {
    pub(crate) path: PathBuf,
    _folder: tempfile::TempDir,
}

impl TestFile {
    pub(crate) fn new(len_bytes: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("neurons.bin");
        let bytes: Vec<u8> = (0..len_bytes as u64).map(byte).collect();
        std::fs::write(&path, bytes).unwrap();
        std::fs::File::open(&path).unwrap().sync_all().unwrap();
        Self {
            path,
            _folder: folder,
        }
    }

    /// The file in both modes.
    pub(crate) fn open(&self) -> [FlashFile; 2] {
        [DirectIo::Preferred, DirectIo::Off]
            .map(|direct| FlashFile::open(&self.path, direct).unwrap())
    }
}

/// A read with the right checksum.
pub(crate) fn wish(slot: usize, offset_bytes: u64, len_bytes: usize) -> SlotRead {
    let bytes: Vec<u8> = (offset_bytes..offset_bytes + len_bytes as u64)
        .map(byte)
        .collect();
    SlotRead {
        slot,
        offset_bytes,
        len_bytes,
        crc32c: Some(crc32c::crc32c(&bytes)),
    }
}

/// Whether the slot begins with the bytes of the file at `offset_bytes`.
pub(crate) fn is_filled(slot: &[u8], offset_bytes: u64, len_bytes: usize) -> bool {
    slot[..len_bytes]
        .iter()
        .zip(offset_bytes..)
        .all(|(&got, i)| got == byte(i))
}

/// A reader of each engine.
pub(crate) fn readers(depth: usize) -> Vec<Reader> {
    let reader = |engine| {
        let options = ReaderOptions {
            engine,
            depth,
            ..ReaderOptions::default()
        };
        Reader::with_options(&options).unwrap()
    };
    [Engine::Pool, Engine::Uring].map(reader).into()
}
