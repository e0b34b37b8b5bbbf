//! The reader against the naive one: `std::fs::read` and a slice.

use crate::{DirectIo, Engine, FlashFile, IoMode, Reader, ReaderOptions, SlotBuffer, SlotRead};
use proptest::prelude::*;
use std::path::Path;
use std::sync::OnceLock;

const FILE_BYTES: usize = 6_000_123;

struct Fixture {
    content: Vec<u8>,
    /// Each as the file system allows, at the alignments a device may have.
    files: Vec<FlashFile>,
    /// Both engines, with different limits for gaps.
    readers: Vec<Reader>,
    _folders: Vec<tempfile::TempDir>,
}

fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let mut state = 1u32;
        let content: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .take(FILE_BYTES)
        .collect();
        let memory = Path::new("/dev/shm");
        let places = [
            Some(std::env::temp_dir()),
            memory.is_dir().then(|| memory.to_owned()),
        ];
        let (mut files, mut folders) = (Vec::new(), Vec::new());
        for place in places.into_iter().flatten() {
            let folder = tempfile::tempdir_in(place).unwrap();
            let path = folder.path().join("content");
            std::fs::write(&path, &content).unwrap();
            std::fs::File::open(&path).unwrap().sync_all().unwrap();
            files.push(FlashFile::open(&path, DirectIo::Off).unwrap());
            let preferred = FlashFile::open(&path, DirectIo::Preferred).unwrap();
            if let IoMode::Direct { alignment_bytes } = preferred.mode() {
                let more = [4096, 65_536].into_iter().filter(|&a| a > alignment_bytes);
                files.extend(more.map(|alignment| preferred.pretend_alignment(alignment)));
            }
            files.push(preferred);
            folders.push(folder);
        }
        Fixture {
            content,
            files,
            readers: [
                (Engine::Pool, 4096),
                (Engine::Uring, 0),
                (Engine::Uring, 30_000),
            ]
            .map(reader)
            .into(),
            _folders: folders,
        }
    })
}

fn reader((engine, gap_bytes): (Engine, usize)) -> Reader {
    let options = ReaderOptions {
        engine,
        depth: 5,
        gap_bytes,
        ..ReaderOptions::default()
    };
    Reader::with_options(&options).unwrap()
}

/// Reads in every file of the fixture and compares each slot, and the slots that were not named.
fn check(reads: &[SlotRead], slot_count: usize, slot_bytes: usize) {
    let Fixture {
        content,
        files,
        readers,
        ..
    } = fixture();
    let mut buffer = SlotBuffer::new(slot_count, slot_bytes).unwrap();
    for (file, reader) in pairs(files, readers) {
        let others: Vec<usize> = (0..slot_count)
            .filter(|i| reads.iter().all(|read| read.slot != *i))
            .collect();
        let before: Vec<Vec<u8>> = others.iter().map(|&i| buffer.slot(i).to_vec()).collect();
        let ticket = reader.submit(buffer, file, reads);
        assert!(others
            .iter()
            .zip(&before)
            .all(|(&i, bytes)| ticket.slot(i) == bytes));
        let (filled, outcome) = ticket.wait();
        buffer = filled;
        outcome.unwrap();
        for read in reads {
            let start = read.offset_bytes as usize;
            let expected = &content[start..start + read.len_bytes];
            assert!(
                buffer.slot(read.slot)[..read.len_bytes] == *expected,
                "{read:?} by {} and {}",
                file.mode(),
                reader.engine()
            );
        }
        assert!(others
            .iter()
            .zip(&before)
            .all(|(&i, bytes)| buffer.slot(i) == bytes));
    }
}

fn pairs<'a>(
    files: &'a [FlashFile],
    readers: &'a [Reader],
) -> impl Iterator<Item = (&'a FlashFile, &'a Reader)> {
    files
        .iter()
        .flat_map(|file| readers.iter().map(move |reader| (file, reader)))
}

/// A read of `len` bytes at `offset`, moved into the file, with its checksum.
fn wish(slot: usize, offset: usize, len: usize) -> SlotRead {
    let offset = offset.min(FILE_BYTES - len);
    let crc32c = Some(crc32c::crc32c(&fixture().content[offset..offset + len]));
    SlotRead {
        slot,
        offset_bytes: offset as u64,
        len_bytes: len,
        crc32c,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any offsets and lengths, in any order, into any of the slots.
    #[test]
    fn scattered_reads_equal_the_naive_ones(
        wishes in prop::collection::vec((0usize..FILE_BYTES, 0usize..20_000, 0usize..4), 0..40),
        slot_bytes in prop::sample::select(vec![1usize, 500, 512, 3000, 4096, 8192, 20_000]),
        turn in 0usize..64,
    ) {
        let reads: Vec<_> = wishes.iter().enumerate().map(|(i, &(offset, len, kind))| {
            // A quarter each: aligned to 4096, to 512, at the file's end, anywhere.
            let offset = [offset / 4096 * 4096, offset / 512 * 512, FILE_BYTES, offset][kind];
            wish((i * 37 + turn) % 64, offset, len % (slot_bytes + 1))
        }).collect();
        check(&reads, 64, slot_bytes);
    }

    /// Records of one stride, some of them wanted: the shape of a layer.
    #[test]
    fn records_equal_the_naive_ones(
        wanted in prop::collection::btree_set(0usize..200, 1..120),
        base in prop::sample::select(vec![0usize, 512, 4096, 777]),
        stride in prop::sample::select(vec![512usize, 1536, 4096, 6000, 12_288]),
        padding in 0usize..600,
        room in prop::sample::select(vec![0usize, 100, 4096]),
    ) {
        let len = stride - padding.min(stride / 2);
        let reads: Vec<_> = wanted.iter().enumerate()
            .map(|(i, &record)| wish(199 - i, base + record * stride, len)).collect();
        check(&reads, 200, len + room);
    }
}

#[test]
fn long_reads_equal_the_naive_ones() {
    for (offset, len) in [
        (0, 5_000_000),
        (512, 3 << 20),
        (777, 2_500_001),
        (4096, (1 << 20) + 1),
        (9, 1 << 20),
    ] {
        check(&[wish(1, offset, len), wish(0, 100, 300_000)], 3, 5_000_192);
        check(&[wish(1, offset, len)], 2, 5_000_001);
    }
    check(&[wish(0, 0, FILE_BYTES)], 1, FILE_BYTES);
}

#[test]
fn a_split_read_with_a_wrong_checksum_fails() {
    let Fixture { files, readers, .. } = fixture();
    for (file, reader) in pairs(files, readers) {
        let mut read = wish(0, 4096, 4 << 20);
        read.crc32c = read.crc32c.map(|crc| crc ^ 1);
        let (_, outcome) = reader
            .submit(SlotBuffer::new(1, 4 << 20).unwrap(), file, &[read])
            .wait();
        let text = outcome.unwrap_err().to_string();
        assert!(
            text.contains("offset 4096") && text.contains("crc32c"),
            "{text}"
        );
    }
}

#[test]
fn a_blocking_read_equals_the_naive_one() {
    let Fixture { content, files, .. } = fixture();
    for file in files {
        for (offset, len) in [
            (0, 8),
            (8, 5000),
            (777, 600_000),
            (FILE_BYTES - 3, 3),
            (FILE_BYTES, 0),
            (0, 0),
        ] {
            let mut out = vec![0; len];
            file.read_exact_at(offset as u64, &mut out).unwrap();
            assert!(
                out == content[offset..offset + len],
                "{offset} {len} by {}",
                file.mode()
            );
        }
        assert!(file.read_exact_at(FILE_BYTES as u64, &mut [0]).is_err());
        assert!(file.read_exact_at(u64::MAX, &mut [0]).is_err());
    }
}
