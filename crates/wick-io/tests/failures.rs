//! Corrupt, short and odd files: an `Err` that says where, the buffer back, the pool alive.

use crate::util::{is_filled, readers, wish, TestFile};
use std::io::{Seek, SeekFrom, Write};
use wick_io::{DirectIo, FlashFile, IoError, IoMode, Reader, SlotBuffer, SlotRead};

/// The reader still works after a failure.
fn assert_alive(reader: &Reader, buffer: SlotBuffer, file: &FlashFile) {
    let (buffer, outcome) = reader.submit(buffer, file, &[wish(0, 0, 512)]).wait();
    outcome.unwrap();
    assert!(is_filled(buffer.slot(0), 0, 512));
}

#[test]
fn a_flipped_byte_is_an_error_that_says_where() {
    let test = TestFile::new(1 << 20);
    for reader in readers(4) {
        let mut writer = std::fs::OpenOptions::new()
            .write(true)
            .open(&test.path)
            .unwrap();
        writer.seek(SeekFrom::Start(20_000)).unwrap();
        writer
            .write_all(&[crate::util::byte(20_000) ^ 0x40])
            .unwrap();
        writer.sync_all().unwrap();
        for file in test.open() {
            let buffer = SlotBuffer::new(8, 4096).unwrap();
            let reads: Vec<_> = (0..8).map(|i| wish(i, 4096 * i as u64, 4096)).collect();
            let (buffer, outcome) = reader.submit(buffer, &file, &reads).wait();
            match outcome {
                Err(IoError::Checksum {
                    path,
                    offset_bytes: 16_384,
                    len_bytes: 4096,
                    expected,
                    got,
                }) => {
                    assert_eq!(path, test.path);
                    assert_eq!(Some(expected), reads[4].crc32c);
                    assert_ne!(expected, got);
                }
                other => panic!("{other:?}"),
            }
            assert_alive(&reader, buffer, &file);
        }
    }
}

#[test]
fn a_file_cut_short_is_an_error_that_says_where() {
    for cut in [1, 4096, 500_000] {
        let test = TestFile::new(1 << 20);
        for reader in readers(3) {
            let files = test.open();
            let whole = std::fs::OpenOptions::new()
                .write(true)
                .open(&test.path)
                .unwrap();
            whole.set_len((1 << 20) - cut).unwrap();
            for file in files {
                // The length it had when opened makes the read look possible.
                let buffer = SlotBuffer::new(3, 8192).unwrap();
                let reads = [wish(0, 0, 8192), wish(2, (1 << 20) - 8192, 8192)];
                let (buffer, outcome) = reader.submit(buffer, &file, &reads).wait();
                let error = outcome.unwrap_err();
                assert!(
                    matches!(error, IoError::EndOfFile { offset_bytes, .. } if offset_bytes == (1 << 20) - 8192)
                );
                assert!(
                    error.to_string().contains("neurons.bin")
                        && error.to_string().contains("1040384"),
                    "{error}"
                );
                assert_alive(&reader, buffer, &file);
            }
            let short = FlashFile::open(&test.path, DirectIo::Preferred).unwrap();
            assert_eq!(short.len_bytes(), (1 << 20) - cut);
        }
    }
}

#[test]
fn reads_beyond_the_end_are_errors_without_any_io() {
    let test = TestFile::new(5000);
    for reader in readers(2) {
        for file in test.open() {
            for (offset_bytes, len_bytes) in [
                (0, 5001),
                (5000, 1),
                (1 << 40, 8),
                (u64::MAX, 1),
                (u64::MAX - 3, 8),
            ] {
                let before = reader.counters();
                let buffer = SlotBuffer::new(2, 8192).unwrap();
                let reads = [
                    wish(1, 0, 512),
                    SlotRead {
                        slot: 0,
                        offset_bytes,
                        len_bytes,
                        crc32c: None,
                    },
                ];
                let (buffer, outcome) = reader.submit(buffer, &file, &reads).wait();
                assert!(matches!(
                    outcome,
                    Err(IoError::EndOfFile {
                        file_bytes: 5000,
                        ..
                    })
                ));
                assert_eq!(reader.counters(), before);
                assert_alive(&reader, buffer, &file);
            }
        }
    }
}

#[test]
fn empty_and_tiny_files_open_and_read() {
    for reader in readers(2) {
        for len in [0usize, 1, 8, 511, 512, 513, 4095, 4097] {
            for file in TestFile::new(len).open() {
                assert_eq!(file.len_bytes(), len as u64);
                let buffer = SlotBuffer::new(2, 5000).unwrap();
                let (buffer, outcome) = reader.submit(buffer, &file, &[wish(1, 0, len)]).wait();
                outcome.unwrap();
                assert!(is_filled(buffer.slot(1), 0, len));
            }
        }
    }
}

#[test]
fn zero_length_reads_check_their_sum() {
    let file = &TestFile::new(5000).open()[0];
    for reader in readers(2) {
        let buffer = SlotBuffer::new(3, 16).unwrap();
        let empty = |slot, crc32c| SlotRead {
            slot,
            offset_bytes: 17,
            len_bytes: 0,
            crc32c,
        };
        let (buffer, outcome) = reader
            .submit(buffer, file, &[empty(0, None), empty(2, Some(0))])
            .wait();
        outcome.unwrap();
        assert_eq!(reader.counters().bytes, 0);
        let (_, outcome) = reader.submit(buffer, file, &[empty(0, Some(7))]).wait();
        assert!(matches!(
            outcome,
            Err(IoError::Checksum {
                expected: 7,
                got: 0,
                ..
            })
        ));
    }
}

#[test]
fn required_means_direct_or_an_error() {
    let test = TestFile::new(10_000);
    match FlashFile::open(&test.path, DirectIo::Required) {
        Ok(file) => {
            assert!(matches!(file.mode(), IoMode::Direct { .. }) && file.alignment_bytes() >= 512)
        }
        Err(error) => assert!(
            error.to_string().contains("direct I/O is required"),
            "{error}"
        ),
    }
    let file = FlashFile::open(&test.path, DirectIo::Off).unwrap();
    assert_eq!((file.mode(), file.alignment_bytes()), (IoMode::Buffered, 1));
}

/// `/proc` has no direct I/O on any kernel, and says so only when asked.
#[cfg(target_os = "linux")]
#[test]
fn a_file_system_without_direct_io_is_read_buffered() {
    let path = std::path::Path::new("/proc/self/status");
    let file = FlashFile::open(path, DirectIo::Preferred).unwrap();
    assert_eq!(file.mode(), IoMode::Buffered);
    let error = FlashFile::open(path, DirectIo::Required).unwrap_err();
    assert!(std::error::Error::source(&error).is_some());
    assert!(
        error.to_string().contains("direct I/O is required"),
        "{error}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn buffered_reads_leave_the_page_cache_empty() {
    let test = TestFile::new(8 << 20);
    for reader in readers(4) {
        let file = FlashFile::open(&test.path, DirectIo::Off).unwrap();
        let mut buffer = SlotBuffer::new(1, 1 << 20).unwrap();
        for i in 0..8 {
            let (back, outcome) = reader
                .submit(buffer, &file, &[wish(0, i << 20, 1 << 20)])
                .wait();
            outcome.unwrap();
            buffer = back;
        }
        // Pages written and synced were cached; reading them has dropped them all.
        let map = std::fs::File::open(&test.path).unwrap();
        let cached = cached_share(&map, 8 << 20);
        assert!(
            cached.is_none_or(|share| share < 0.02),
            "{cached:?} of the file is still cached"
        );
    }
}

/// Share of the file's first bytes that a read answers without waiting for the device.
#[cfg(target_os = "linux")]
fn cached_share(file: &std::fs::File, len_bytes: u64) -> Option<f64> {
    use rustix::io::{preadv2, Errno, ReadWriteFlags};
    let pages = len_bytes / 4096;
    let mut cached = 0u64;
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random).ok()?;
    for page in 0..pages {
        let mut memory = [0u8; 1];
        let pieces = &mut [std::io::IoSliceMut::new(&mut memory)];
        match preadv2(file, pieces, page * 4096, ReadWriteFlags::NOWAIT) {
            Ok(_) => cached += 1,
            Err(Errno::AGAIN) => {}
            Err(_) => return None,
        }
    }
    Some(cached as f64 / pages as f64)
}

#[test]
fn thread_counts_out_of_range_are_errors() {
    for threads in [0, wick_io::READER_THREADS_MAX + 1, usize::MAX] {
        assert!(matches!(
            Reader::new(threads),
            Err(IoError::ThreadCount { .. })
        ));
    }
}
