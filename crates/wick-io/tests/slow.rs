//! A disk that is slow, stops short, is busy or broken: the right bytes or a named error, at every setting, by both
//! engines, and always an end.

use crate::util::{is_filled, wish, TestFile};
use proptest::prelude::*;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};
use wick_io::{Engine, FlashFile, IoError, Reader, ReaderOptions};
use wick_io::{SlotBuffer, SlotRead, SlowDiskOptions, Ticket};

const SLOT_BYTES: usize = 4096;
const SLOTS: usize = 96;
const DEPTHS: [usize; 4] = [1, 2, 7, 64];

/// Records all over the file: some neighbours, some with a gap, some not aligned.
fn reads() -> Vec<SlotRead> {
    (0..SLOTS)
        .map(|i| {
            let record = (i * 2 + i / 5) as u64;
            match i % 7 {
                6 => wish(i, record * 4096 + 100, 3000),
                _ => wish(i, record * 4096, SLOT_BYTES),
            }
        })
        .collect()
}

fn reader(engine: Engine, depth: usize, disk: &SlowDiskOptions) -> Reader {
    let options = ReaderOptions {
        engine,
        depth,
        slow_disk: Some(disk.clone()),
        ..ReaderOptions::default()
    };
    Reader::with_options(&options).unwrap()
}

/// Each engine at each depth on this disk, by direct and by buffered reads.
fn each(disk: SlowDiskOptions, check: impl Fn(&Reader, &FlashFile)) {
    let test = TestFile::new(300 * SLOT_BYTES);
    for file in test.open() {
        for engine in [Engine::Pool, Engine::Uring] {
            for depth in DEPTHS {
                check(&reader(engine, depth, &disk), &file);
            }
        }
    }
}

fn assert_right(reader: &Reader, file: &FlashFile) {
    let buffer = SlotBuffer::new(SLOTS, SLOT_BYTES).unwrap();
    let reads = reads();
    let (buffer, outcome) = reader.submit(buffer, file, &reads).wait();
    outcome.unwrap();
    for read in &reads {
        let slot = buffer.slot(read.slot);
        assert!(
            is_filled(slot, read.offset_bytes, read.len_bytes),
            "{read:?} by {} x {}",
            reader.engine(),
            reader.threads()
        );
    }
}

#[test]
fn reads_that_stop_short_or_must_come_again_are_right() {
    for (short_every, busy_every) in [(1, 0), (2, 0), (3, 2), (0, 2), (5, 7)] {
        let disk = SlowDiskOptions {
            short_every,
            busy_every,
            ..SlowDiskOptions::default()
        };
        each(disk, assert_right);
    }
}

#[test]
fn a_disk_that_is_always_busy_is_an_error_and_no_hang() {
    let disk = SlowDiskOptions {
        busy_every: 1,
        ..SlowDiskOptions::default()
    };
    let test = TestFile::new(4 * SLOT_BYTES);
    for engine in [Engine::Pool, Engine::Uring] {
        let reader = reader(engine, 4, &disk);
        let buffer = SlotBuffer::new(1, SLOT_BYTES).unwrap();
        let reads = [wish(0, 0, SLOT_BYTES)];
        let (_, outcome) = reader.submit(buffer, &test.open()[0], &reads).wait();
        assert!(matches!(
            outcome,
            Err(IoError::Read {
                offset_bytes: 0,
                ..
            })
        ));
    }
}

#[test]
fn a_broken_block_is_an_error_that_says_where() {
    // Inside of record 150, which read 68 wants.
    let disk = SlowDiskOptions {
        broken_bytes: 149 * 4096 + 8..149 * 4096 + 9,
        short_every: 3,
        ..SlowDiskOptions::default()
    };
    each(disk, |reader, file| {
        let mut buffer = SlotBuffer::new(SLOTS + 1, SLOT_BYTES).unwrap();
        let spared = [wish(SLOTS, 4096, SLOT_BYTES)];
        (buffer, _) = reader.submit(buffer, file, &spared).wait();
        let (buffer, outcome) = reader.submit(buffer, file, &reads()).wait();
        let error = outcome.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, IoError::Read { .. }), "{text}");
        assert!(text.contains("neurons.bin"), "{text}");
        let IoError::Read {
            offset_bytes,
            source,
            ..
        } = error
        else {
            unreachable!()
        };
        assert_eq!(
            source.raw_os_error(),
            Some(rustix::io::Errno::IO.raw_os_error())
        );
        // The request that failed; it may have begun in a part before the broken byte.
        let broken = 149 * 4096;
        assert!(
            (broken - (256 << 10)..=broken).contains(&offset_bytes),
            "{text}"
        );
        assert!(
            is_filled(buffer.slot(SLOTS), 4096, SLOT_BYTES),
            "another slot was touched"
        );
        // What does not touch the block still works.
        let (buffer, outcome) = reader.submit(buffer, file, &spared).wait();
        outcome.unwrap();
        assert!(is_filled(buffer.slot(SLOTS), 4096, SLOT_BYTES));
    });
}

#[test]
fn tickets_given_up_on_a_slow_disk_do_no_harm() {
    let disk = SlowDiskOptions {
        latency: Duration::from_millis(2),
        short_every: 2,
        ..SlowDiskOptions::default()
    };
    each(disk, |reader, file| {
        for turn in 0..6 {
            let buffer = SlotBuffer::new(SLOTS, SLOT_BYTES).unwrap();
            let ticket = reader.submit(buffer, file, &reads());
            if turn % 2 == 0 {
                drop(ticket);
            } else if turn == 3 {
                std::mem::forget(ticket);
            } else {
                ticket.wait().1.unwrap();
            }
            // Memory that takes the place of the buffer, were it freed too early.
            let decoy = vec![0u8; SLOTS * SLOT_BYTES];
            std::thread::sleep(Duration::from_millis(1));
            assert!(decoy.iter().all(|&byte| byte == 0));
        }
    });
}

#[test]
fn a_rate_is_kept_whatever_is_in_flight() {
    let disk = SlowDiskOptions {
        bytes_per_s: NonZeroU64::new(8 << 20),
        ..SlowDiskOptions::default()
    };
    let file = &TestFile::new(300 * SLOT_BYTES).open()[0];
    for engine in [Engine::Pool, Engine::Uring] {
        for depth in DEPTHS {
            let reader = reader(engine, depth, &disk);
            let start = Instant::now();
            assert_right(&reader, file);
            let least = reader.counters().bytes as f64 / (8 << 20) as f64;
            let took = start.elapsed().as_secs_f64();
            assert!(took >= 0.95 * least, "{took} s of at least {least} s");
        }
    }
}

#[test]
fn latencies_overlap_as_far_as_requests_are_in_flight() {
    let disk = SlowDiskOptions {
        latency: Duration::from_millis(50),
        ..SlowDiskOptions::default()
    };
    let file = &TestFile::new(300 * SLOT_BYTES).open()[0];
    let far_apart: Vec<_> = (0..8)
        .map(|i| wish(i, i as u64 * 37 * 4096, SLOT_BYTES))
        .collect();
    for engine in [Engine::Pool, Engine::Uring] {
        let took = |depth| {
            let reader = reader(engine, depth, &disk);
            let buffer = SlotBuffer::new(8, SLOT_BYTES).unwrap();
            let start = Instant::now();
            reader.submit(buffer, file, &far_apart).wait().1.unwrap();
            assert_eq!(reader.counters().requests, 8);
            start.elapsed()
        };
        // One after the other takes eight latencies at least; at once it is one, and what a busy machine adds.
        assert!(took(1) >= Duration::from_millis(400));
        let best = (0..3).map(|_| took(8)).min().unwrap();
        assert!(best < Duration::from_millis(300), "{best:?} by {engine}");
    }
}

/// Everything at once, one disk worse than the other.
fn any_disk() -> impl Strategy<Value = SlowDiskOptions> {
    let rate = prop::sample::select(vec![None, NonZeroU64::new(64 << 20)]);
    let latency = prop::sample::select(vec![0, 300]).prop_map(Duration::from_micros);
    let broken = prop_oneof![Just(0..0), (8192u64..4 << 20).prop_map(|at| at..at + 9)];
    let busy_every = prop::sample::select(vec![0, 2, 3, 7]);
    (rate, latency, 0u32..4, busy_every, broken).prop_map(
        |(bytes_per_s, latency, short_every, busy_every, broken_bytes)| SlowDiskOptions {
            bytes_per_s,
            latency,
            short_every,
            busy_every,
            broken_bytes,
        },
    )
}

/// Waits for a ticket, but not for ever.
fn wait_a_minute(ticket: Ticket) -> (SlotBuffer, Result<(), IoError>) {
    let start = Instant::now();
    while !ticket.is_finished() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{ticket:?} hangs"
        );
        std::thread::sleep(Duration::from_micros(200));
    }
    ticket.wait()
}

/// Whether the outcome is what must come of reading these bytes; what lies between them may count as broken too.
fn is_possible(
    outcome: &Result<(), IoError>,
    reads: &[SlotRead],
    broken: &std::ops::Range<u64>,
) -> bool {
    let is_hit = |read: &SlotRead| {
        let end = read.offset_bytes + read.len_bytes as u64;
        !broken.is_empty() && read.offset_bytes < broken.end && broken.start < end
    };
    match outcome {
        Ok(()) => !reads.iter().any(is_hit),
        Err(IoError::Read { path, source, .. }) => {
            let errno = source.raw_os_error();
            !broken.is_empty()
                && path.ends_with("neurons.bin")
                && errno == Some(rustix::io::Errno::IO.raw_os_error())
        }
        Err(_) => false,
    }
}

/// On any disk, by any reader: short reads and long ones that are split, aligned or not, again and again.
#[test]
fn the_worst_disks_give_the_right_bytes_or_a_named_error() {
    const LONG_BYTES: usize = 1_300_000;
    let test = TestFile::new((5 << 20) + 77);
    let wishes = prop::collection::vec((0u64..3 << 20, 0usize..20_000, 0usize..8), 1..16);
    let engine = prop::sample::select(vec![Engine::Pool, Engine::Uring]);
    let depth = prop::sample::select(DEPTHS.to_vec());
    let config = ProptestConfig::with_cases(60);
    proptest!(config, |(disk in any_disk(), wishes in wishes, engine in engine, depth in depth,
        coalesce: bool, is_buffered: bool, has_wrong_sum: bool)| {
        let options = ReaderOptions { engine, depth, coalesce, slow_disk: Some(disk.clone()), ..ReaderOptions::default() };
        let reader = Reader::with_options(&options).unwrap();
        let file = &test.open()[usize::from(is_buffered)];
        let mut reads: Vec<_> = wishes.iter().enumerate().map(|(slot, &(offset, len, kind))| match kind {
            0 => wish(slot, offset, LONG_BYTES),
            1..4 => wish(slot, offset, len),
            _ => wish(slot, offset / 4096 * 4096, len / 4096 * 4096),
        }).collect();
        let mut buffer = SlotBuffer::new(reads.len(), LONG_BYTES.next_multiple_of(4096)).unwrap();
        for _ in 0..2 {
            let (back, outcome) = wait_a_minute(reader.submit(buffer, file, &reads));
            buffer = back;
            prop_assert!(is_possible(&outcome, &reads, &disk.broken_bytes), "{:?}", outcome);
            for read in reads.iter().filter(|_| outcome.is_ok()) {
                prop_assert!(is_filled(buffer.slot(read.slot), read.offset_bytes, read.len_bytes), "{:?}", read);
            }
        }
        if has_wrong_sum {
            reads[0].crc32c = reads[0].crc32c.map(|sum| !sum);
            let (back, outcome) = wait_a_minute(reader.submit(buffer, file, &reads));
            buffer = back;
            match outcome {
                Err(IoError::Checksum { offset_bytes, .. }) => prop_assert_eq!(offset_bytes, reads[0].offset_bytes),
                outcome => prop_assert!(outcome.is_err() && is_possible(&outcome, &reads, &disk.broken_bytes)),
            }
        }
        // Whatever went wrong, what does not touch the broken bytes is read.
        let (buffer, outcome) = wait_a_minute(reader.submit(buffer, file, &[wish(0, 0, 512)]));
        prop_assert!(outcome.is_ok() && is_filled(buffer.slot(0), 0, 512), "{:?}", outcome);
    });
}
