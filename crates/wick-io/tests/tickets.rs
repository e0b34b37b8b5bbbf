//! Who owns the buffer, and when: tickets dropped, forgotten, waited for, misused.

use crate::util::{is_filled, readers, wish, TestFile};
use std::panic::{catch_unwind, AssertUnwindSafe};
use wick_io::{Engine, Reader, ReaderOptions, SlotBuffer, SlotRead};

const SLOT_BYTES: usize = 4096;

fn reads(count: usize, turn: usize) -> Vec<SlotRead> {
    (0..count)
        .map(|i| wish(i, (SLOT_BYTES * ((i * 7 + turn) % 200)) as u64, SLOT_BYTES))
        .collect()
}

#[test]
fn tickets_dropped_while_reading_do_no_harm() {
    let test = TestFile::new(200 * SLOT_BYTES);
    for reader in readers(16) {
        for file in test.open() {
            for turn in 0..1000 {
                let buffer = SlotBuffer::new(16, SLOT_BYTES).unwrap();
                drop(reader.submit(buffer, &file, &reads(16, turn)));
                // Memory that takes the place of the buffer, were it freed too early.
                let decoy = vec![0u8; 16 * SLOT_BYTES];
                std::thread::yield_now();
                assert!(decoy.iter().all(|&byte| byte == 0));
            }
            let buffer = SlotBuffer::new(16, SLOT_BYTES).unwrap();
            reader
                .submit(buffer, &file, &reads(16, 0))
                .wait()
                .1
                .unwrap();
        }
    }
}

#[test]
fn forgotten_tickets_do_no_harm() {
    let test = TestFile::new(200 * SLOT_BYTES);
    for file in test.open() {
        for reader in readers(4) {
            for turn in 0..50 {
                let buffer = SlotBuffer::new(4, SLOT_BYTES).unwrap();
                std::mem::forget(reader.submit(buffer, &file, &reads(4, turn)));
            }
            drop(reader);
        }
    }
}

#[test]
fn a_reader_dropped_first_finishes_its_tickets() {
    let test = TestFile::new(200 * SLOT_BYTES);
    for file in test.open() {
        for reader in readers(2) {
            let clone = reader.clone();
            let tickets: Vec<_> = (0..20)
                .map(|_| {
                    reader.submit(
                        SlotBuffer::new(50, SLOT_BYTES).unwrap(),
                        &file,
                        &reads(50, 0),
                    )
                })
                .collect();
            drop(reader);
            assert_eq!(clone.threads(), 2);
            drop(clone);
            for ticket in tickets {
                assert!(ticket.is_finished());
                let (buffer, outcome) = ticket.wait();
                outcome.unwrap();
                assert!(is_filled(buffer.slot(1), 7 * SLOT_BYTES as u64, SLOT_BYTES));
            }
        }
    }
}

#[test]
fn slots_being_filled_cannot_be_seen() {
    let file = &TestFile::new(10 * SLOT_BYTES).open()[0];
    for reader in readers(2) {
        let (buffer, outcome) = reader
            .submit(
                SlotBuffer::new(3, SLOT_BYTES).unwrap(),
                file,
                &[wish(2, 512, 100)],
            )
            .wait();
        outcome.unwrap();
        let ticket = reader.submit(buffer, file, &[wish(0, 0, SLOT_BYTES), wish(1, 0, 0)]);
        assert!(is_filled(ticket.slot(2), 512, 100));
        for slot in [0, 1, 3] {
            assert!(catch_unwind(AssertUnwindSafe(|| ticket.slot(slot).len())).is_err());
        }
        let (buffer, outcome) = ticket.wait();
        outcome.unwrap();
        assert!(is_filled(buffer.slot(0), 0, SLOT_BYTES));
        assert!(is_filled(buffer.slot(2), 512, 100));
    }
}

#[test]
fn callers_mistakes_panic() {
    let file = &TestFile::new(10 * SLOT_BYTES).open()[0];
    for reader in readers(2) {
        let read = |slot, len_bytes| SlotRead {
            slot,
            offset_bytes: 0,
            len_bytes,
            crc32c: None,
        };
        for bad in [
            vec![read(2, 8)],
            vec![read(0, SLOT_BYTES + 1)],
            vec![read(1, 8), read(0, 8), read(1, 8)],
        ] {
            let buffer = SlotBuffer::new(2, SLOT_BYTES).unwrap();
            assert!(catch_unwind(AssertUnwindSafe(|| reader.submit(buffer, file, &bad))).is_err());
        }
        let buffer = SlotBuffer::new(2, SLOT_BYTES).unwrap();
        reader
            .submit(buffer, file, &[wish(0, 0, 8)])
            .wait()
            .1
            .unwrap();
    }
}

#[test]
fn nothing_to_read_is_done_at_once() {
    let file = &TestFile::new(100).open()[0];
    for reader in readers(1) {
        let ticket = reader.submit(SlotBuffer::new(2, 8).unwrap(), file, &[]);
        assert!(ticket.is_finished());
        assert_eq!(ticket.slot(1), [0; 8]);
        ticket.wait().1.unwrap();
        assert_eq!(reader.counters().requests, 0);
    }
}

#[test]
fn many_threads_share_a_reader() {
    let test = TestFile::new(200 * SLOT_BYTES);
    for reader in readers(32) {
        std::thread::scope(|scope| {
            for thread in 0..12 {
                let (reader, file) = (reader.clone(), test.open()[thread % 2].clone());
                scope.spawn(move || {
                    let mut buffer = SlotBuffer::new(40, SLOT_BYTES).unwrap();
                    for turn in 0..50 {
                        let reads = reads(40, turn + thread);
                        let (back, outcome) = reader.submit(buffer, &file, &reads).wait();
                        outcome.unwrap();
                        buffer = back;
                        let filled = |read: &SlotRead| {
                            is_filled(buffer.slot(read.slot), read.offset_bytes, SLOT_BYTES)
                        };
                        assert!(reads.iter().all(filled));
                    }
                });
            }
        });
        assert!(reader.counters().bytes >= 12 * 50 * 40 * SLOT_BYTES as u64);
    }
}

#[test]
fn neighbours_are_one_request() {
    let file = &TestFile::new(200 * SLOT_BYTES).open()[0];
    for reader in readers(4) {
        let reads: Vec<_> = (0..64)
            .map(|i| wish(63 - i, (i * SLOT_BYTES) as u64, SLOT_BYTES))
            .collect();
        reader
            .submit(SlotBuffer::new(64, SLOT_BYTES).unwrap(), file, &reads)
            .wait()
            .1
            .unwrap();
        let counters = reader.counters();
        assert_eq!(
            (counters.requests, counters.bytes),
            (1, 64 * SLOT_BYTES as u64)
        );
    }
}

#[test]
fn without_sharing_each_read_is_a_request() {
    let file = &TestFile::new(200 * SLOT_BYTES).open()[0];
    for engine in [Engine::Pool, Engine::Uring] {
        let options = ReaderOptions {
            engine,
            depth: 4,
            coalesce: false,
            ..ReaderOptions::default()
        };
        let reader = Reader::with_options(&options).unwrap();
        // Neighbours, and some that are not aligned.
        let reads: Vec<_> = (0..64)
            .map(|i| wish(i, (i * SLOT_BYTES + i / 60) as u64, SLOT_BYTES))
            .collect();
        let buffer = SlotBuffer::new(64, SLOT_BYTES).unwrap();
        let (buffer, outcome) = reader.submit(buffer, file, &reads).wait();
        outcome.unwrap();
        assert_eq!(reader.counters().requests, 64);
        assert!(reads.iter().all(|read| is_filled(
            buffer.slot(read.slot),
            read.offset_bytes,
            SLOT_BYTES
        )));
    }
}

/// Their batches are used again by others, and must not be before nobody reads for them any more.
#[test]
fn tickets_waited_for_dropped_and_forgotten_by_turns_do_no_harm() {
    let test = TestFile::new(200 * SLOT_BYTES);
    for reader in readers(8) {
        for file in test.open() {
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let (reader, file) = (&reader, &file);
                    scope.spawn(move || {
                        for turn in 0..200 {
                            let count = 1 + (turn * 7 + thread) % 24;
                            let reads = reads(count, turn + thread);
                            let buffer = SlotBuffer::new(count, SLOT_BYTES).unwrap();
                            let ticket = reader.submit(buffer, file, &reads);
                            match turn % 8 {
                                3 => drop(ticket),
                                7 => std::mem::forget(ticket),
                                _ => {
                                    let (buffer, outcome) = ticket.wait();
                                    outcome.unwrap();
                                    let filled = |read: &SlotRead| {
                                        is_filled(
                                            buffer.slot(read.slot),
                                            read.offset_bytes,
                                            SLOT_BYTES,
                                        )
                                    };
                                    assert!(reads.iter().all(filled));
                                }
                            }
                        }
                    });
                }
            });
        }
    }
}

#[test]
fn a_ticket_waited_for_lets_go_of_memory_and_file() {
    let test = TestFile::new(100 * SLOT_BYTES);
    for reader in readers(4) {
        for _ in 0..20 {
            let [file, _] = test.open();
            let buffer = SlotBuffer::new(8, SLOT_BYTES).unwrap();
            reader.submit(buffer, &file, &reads(8, 0)).wait().1.unwrap();
        }
        assert_eq!(
            open_count(&test.path),
            0,
            "a spare batch keeps its file open"
        );
    }
}

/// How many descriptors of this process are open on the file; 0 where the system does not say.
fn open_count(path: &std::path::Path) -> usize {
    let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else {
        return 0;
    };
    descriptors
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target == path)
        .count()
}

#[test]
fn a_second_submit_follows_the_first_and_each_is_waited_for() {
    let test = TestFile::new(400 * SLOT_BYTES);
    for reader in readers(4) {
        for file in test.open() {
            let mut buffer = SlotBuffer::new(12, SLOT_BYTES).unwrap();
            let part = |part: usize, turn: usize| -> Vec<SlotRead> {
                let slots = part * 4..part * 4 + 4;
                let offset = |slot: usize| (SLOT_BYTES * (slot * 31 + turn)) as u64;
                slots
                    .map(|slot| wish(slot, offset(slot), SLOT_BYTES))
                    .collect()
            };
            for _ in 0..20 {
                let mut ticket = reader.submit(buffer, &file, &part(0, 0));
                for turn in 0..9 {
                    assert_eq!(ticket.in_flight(), 1);
                    reader.submit_behind(&mut ticket, &file, &part((turn + 1) % 3, turn + 1));
                    ticket.wait_first().unwrap();
                    for read in part(turn % 3, turn) {
                        let slot = ticket.slot(read.slot);
                        assert!(is_filled(slot, read.offset_bytes, SLOT_BYTES));
                    }
                    let unread = (turn + 1) % 3 * 4;
                    let look = AssertUnwindSafe(|| ticket.slot(unread)[0]);
                    assert!(catch_unwind(look).is_err(), "slot {unread} is being filled");
                }
                let outcome;
                (buffer, outcome) = ticket.wait();
                outcome.unwrap();
            }
            let mut idle = reader.submit(buffer, &file, &[]);
            assert_eq!((idle.in_flight(), idle.is_finished()), (0, true));
            idle.wait_first().unwrap();
        }
    }
}

#[test]
fn an_error_of_the_first_submit_leaves_the_second_to_be_waited_for() {
    let test = TestFile::new(200 * SLOT_BYTES);
    for reader in readers(4) {
        for file in test.open() {
            let mut bad = reads(4, 0);
            bad[2].crc32c = bad[2].crc32c.map(|sum| !sum);
            let behind = wish(5, 8192, SLOT_BYTES);
            let buffer = SlotBuffer::new(6, SLOT_BYTES).unwrap();
            let mut ticket = reader.submit(buffer, &file, &bad);
            reader.submit_behind(&mut ticket, &file, &[behind]);
            assert!(ticket.wait_first().is_err());
            let mut buffer = {
                let (buffer, outcome) = ticket.wait();
                outcome.unwrap();
                assert!(is_filled(buffer.slot(5), 8192, SLOT_BYTES));
                buffer
            };
            // Outside of the file: refused without reading, and the slots come back all the same.
            let outside = SlotRead {
                offset_bytes: u64::MAX,
                ..behind
            };
            for reads in [[outside, wish(0, 0, 9)], [wish(0, 0, 9), outside]] {
                let mut ticket = reader.submit(buffer, &file, &reads[..1]);
                reader.submit_behind(&mut ticket, &file, &reads[1..]);
                let outcome;
                (buffer, outcome) = ticket.wait();
                outcome.unwrap_err();
                assert_eq!(buffer.slot(5).len(), SLOT_BYTES);
            }
        }
    }
}

#[test]
fn a_third_submit_and_a_slot_in_flight_are_refused() {
    let test = TestFile::new(200 * SLOT_BYTES);
    let [file, _] = test.open();
    let reader = Reader::new(2).unwrap();
    let submit = |slots: &[usize]| {
        let mut ticket = reader.submit(SlotBuffer::new(4, SLOT_BYTES).unwrap(), &file, &[]);
        for &slot in slots {
            reader.submit_behind(&mut ticket, &file, &[wish(slot, 0, SLOT_BYTES)]);
        }
        ticket.wait().1
    };
    submit(&[0, 1]).unwrap();
    for slots in [&[0, 1, 2][..], &[0, 0]] {
        assert!(catch_unwind(AssertUnwindSafe(|| submit(slots))).is_err());
    }
}
