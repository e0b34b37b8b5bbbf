//! How fast the reader is: random records and a sequential sweep over a temporary file.
//!
//! `cargo bench -p wick-io` writes a file of 1 GiB beside the build; `-- --test` a small one, to see that it runs.
//! Goals: megabytes a second as a user of [`wick_io::Reader`] sees them, and the processor time they cost.
//! Non-goals: the device's own limit, which takes a tool without checksums and slots.

use std::io::Write;
use std::path::Path;
use std::time::Instant;
use wick_io::{DirectIo, FlashFile, Reader, SlotBuffer, SlotRead};

const BLOCK_BYTES: usize = 1 << 20;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> Outcome {
    let is_test = std::env::args().any(|argument| argument == "--test");
    let file_bytes = if is_test { 16 << 20 } else { 1 << 30 };
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let path = folder.path().join("read.bin");
    let sums = write_file(&path, file_bytes)?;
    for direct in [DirectIo::Preferred, DirectIo::Off] {
        let file = FlashFile::open(&path, direct)?;
        println!("{} ({} MiB)", file.mode(), file_bytes >> 20);
        for (threads, bytes) in [
            (1, 16 << 10),
            (8, 16 << 10),
            (32, 16 << 10),
            (32, 32 << 10),
            (32, 128 << 10),
        ] {
            let count = (if is_test { 1024 } else { 12_000 << 4 }) / (bytes >> 10);
            random(&file, threads, bytes, count)?;
        }
        sequential(&file, 32, &sums)?;
    }
    Ok(())
}

/// Writes the file and returns the checksum of each 256 KiB.
fn write_file(path: &Path, file_bytes: usize) -> Result<Vec<u32>, std::io::Error> {
    let mut file = std::fs::File::create(path)?;
    let mut sums = Vec::new();
    let mut block = vec![0u8; BLOCK_BYTES];
    let mut state = 1u64;
    for _ in 0..file_bytes / BLOCK_BYTES {
        for word in block.chunks_exact_mut(8) {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&(state ^ (state >> 29)).to_le_bytes());
        }
        sums.extend(block.chunks(256 << 10).map(crc32c::crc32c));
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(sums)
}

/// Records of `bytes` bytes in random order, 256 a submit.
fn random(file: &FlashFile, threads: usize, bytes: usize, count: usize) -> Outcome {
    let reader = Reader::new(threads)?;
    let records = file.len_bytes() / bytes as u64;
    let mut state = 7u64;
    let mut buffer = SlotBuffer::new(256, bytes)?;
    let start = Clock::now();
    for first in (0..count).step_by(256) {
        let reads: Vec<_> = (0..256.min(count - first))
            .map(|slot| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let offset_bytes = (state >> 33) % records * bytes as u64;
                SlotRead {
                    slot,
                    offset_bytes,
                    len_bytes: bytes,
                    crc32c: None,
                }
            })
            .collect();
        let (back, outcome) = reader.submit(buffer, file, &reads).wait();
        outcome?;
        buffer = back;
    }
    start.report(
        &format!("random {} KiB x {threads} threads", bytes >> 10),
        &reader,
    );
    Ok(())
}

/// The whole file in order, checked, 32 records of 256 KiB a submit and two submits in flight.
fn sequential(file: &FlashFile, threads: usize, sums: &[u32]) -> Outcome {
    const BYTES: usize = 256 << 10;
    let reader = Reader::new(threads)?;
    let mut spare = vec![SlotBuffer::new(32, BYTES)?, SlotBuffer::new(32, BYTES)?];
    let mut tickets = std::collections::VecDeque::new();
    let start = Clock::now();
    for (window, sums) in sums.chunks(32).enumerate() {
        let wish = |(slot, &sum): (usize, &u32)| SlotRead {
            slot,
            offset_bytes: ((window * 32 + slot) * BYTES) as u64,
            len_bytes: BYTES,
            crc32c: Some(sum),
        };
        let reads: Vec<_> = sums.iter().enumerate().map(wish).collect();
        let buffer = match spare.pop() {
            Some(buffer) => buffer,
            None => next_buffer(&mut tickets)?,
        };
        tickets.push_back(reader.submit(buffer, file, &reads));
    }
    while !tickets.is_empty() {
        next_buffer(&mut tickets)?;
    }
    start.report(
        &format!("sequential 256 KiB x {threads} threads, checked"),
        &reader,
    );
    Ok(())
}

fn next_buffer(
    tickets: &mut std::collections::VecDeque<wick_io::Ticket>,
) -> Result<SlotBuffer, Box<dyn std::error::Error>> {
    let (buffer, outcome) = tickets.pop_front().ok_or("no ticket")?.wait();
    outcome?;
    Ok(buffer)
}

/// Wall time and processor time.
struct Clock {
    wall: Instant,
    cpu_ticks: u64,
}

impl Clock {
    fn now() -> Self {
        Self {
            wall: Instant::now(),
            cpu_ticks: cpu_ticks(),
        }
    }

    fn report(&self, what: &str, reader: &Reader) {
        let seconds = self.wall.elapsed().as_secs_f64();
        let counters = reader.counters();
        let cpu_us = (cpu_ticks() - self.cpu_ticks) as f64 * 1e4 / counters.requests.max(1) as f64;
        let rate = counters.bytes as f64 / seconds / 1e6;
        println!("  {what:45} {rate:7.0} MB/s  {cpu_us:6.1} us of processor a request");
    }
}

/// User and system time of this process in hundredths of a second; 0 where `/proc` does not say.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace();
    fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum()
}
