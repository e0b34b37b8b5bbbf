//! What of the reader `wick bench io` does not measure: reads in order with checksums, gaps, the engines' trial.
//!
//! `cargo bench -p wick-io` writes a file of 2 GiB beside the build; `-- --test` a small one, to see that it runs.
//! Goals: at which gap one request is cheaper than two; what checksums leave of the rate of reads in order, and the
//! processor time of a request. Medians of five rounds, in which the engines take turns, with the least and the
//! most. Non-goals: the device's own limit, which takes a tool without slots.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};
use wick_io::{DirectIo, Engine, EngineProbe, FlashFile, Reader, ReaderOptions};
use wick_io::{SlotBuffer, SlotRead, Ticket};

const BLOCK_BYTES: usize = 1 << 20;
const ENGINES: [Engine; 2] = [Engine::Pool, Engine::Uring];
const KIB: usize = 1 << 10;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome {
    let is_test = std::env::args().any(|argument| argument == "--test");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let path = folder.path().join("read.bin");
    let sums = write_file(&path, if is_test { 16 << 20 } else { 2 << 30 })?;
    let plan = Plan {
        rounds: if is_test { 1 } else { 5 },
        round_time: Duration::from_millis(if is_test { 5 } else { 300 }),
    };
    for direct in [DirectIo::Preferred, DirectIo::Off] {
        let file = FlashFile::open(&path, direct)?;
        println!("\n{}, {} MiB\n", file.mode(), file.len_bytes() >> 20);
        for _ in 0..3 {
            println!("{:?}", EngineProbe::run(&file, &ReaderOptions::default())?);
        }
        println!("\n| request | in flight | engine | MB/s | min..max | us of processor a request | min..max |");
        println!("|---|---|---|---|---|---|---|");
        plan.sequential(&file, &sums)?;
        if direct == DirectIo::Off {
            break;
        }
        println!("\n| two of 16 KiB with a gap of | engine | as one request / as two, time | processor time |");
        println!("|---|---|---|---|");
        for gap in [0, 4, 8, 12, 16, 24, 32, 64] {
            for engine in ENGINES {
                plan.gap(&file, engine, gap * KIB)?;
            }
        }
    }
    Ok(())
}

/// Writes the file and returns the checksum of each 256 KiB.
fn write_file(path: &Path, file_bytes: usize) -> Result<Vec<u32>, std::io::Error> {
    let mut file = std::fs::File::create(path)?;
    let mut sums = Vec::new();
    let mut block = vec![0u8; BLOCK_BYTES];
    let mut draw = Draw(1);
    for _ in 0..file_bytes / BLOCK_BYTES {
        for word in block.chunks_exact_mut(8) {
            word.copy_from_slice(&draw.next().to_le_bytes());
        }
        sums.extend(block.chunks(256 * KIB).map(crc32c::crc32c));
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(sums)
}

/// What a round of a measurement took.
#[derive(Clone, Copy)]
struct Sample {
    wall_s: f64,
    cpu_s: f64,
    requests: f64,
    bytes: f64,
}

impl Sample {
    fn take(reader: &Reader, body: impl FnOnce() -> Outcome) -> Outcome<Self> {
        let (wall, cpu, before) = (Instant::now(), cpu_time(), reader.counters());
        body()?;
        let after = reader.counters();
        Ok(Self {
            wall_s: wall.elapsed().as_secs_f64(),
            cpu_s: (cpu_time() - cpu).as_secs_f64(),
            requests: (after.requests - before.requests) as f64,
            bytes: (after.bytes - before.bytes) as f64,
        })
    }
}

struct Plan {
    rounds: usize,
    round_time: Duration,
}

impl Plan {
    /// A row for each engine; the engines take turns.
    fn sequential(&self, file: &FlashFile, sums: &[u32]) -> Outcome {
        let depth = 32;
        let readers = [reader(ENGINES[0], depth, 0)?, reader(ENGINES[1], depth, 0)?];
        let mut samples = [Vec::new(), Vec::new()];
        for _ in 0..self.rounds {
            for (reader, samples) in readers.iter().zip(&mut samples) {
                samples.push(Sample::take(reader, || sequential(file, reader, sums))?);
            }
        }
        for (reader, samples) in readers.iter().zip(&samples) {
            let rate = Spread::of(samples.iter().map(|s| s.bytes / s.wall_s / 1e6));
            let cpu = Spread::of(samples.iter().map(|s| s.cpu_s / s.requests * 1e6));
            println!(
                "| sequential 256 KiB, checked | {depth} | {} | {:.0} | {:.0}..{:.0} | {:.1} | {:.1}..{:.1} |",
                reader.engine(),
                rate.median,
                rate.min,
                rate.max,
                cpu.median,
                cpu.min,
                cpu.max
            );
        }
        Ok(())
    }

    /// Pairs of records with a gap between them: joined by the gap limit, and apart.
    fn gap(&self, file: &FlashFile, engine: Engine, gap_bytes: usize) -> Outcome {
        let joined = reader(engine, 32, gap_bytes)?;
        let apart = reader(engine, 32, 0)?;
        let mut ratios = [Vec::new(), Vec::new()];
        for _ in 0..self.rounds {
            let [one, two] = [&joined, &apart].map(|reader| {
                let mut count = 0;
                Sample::take(reader, || {
                    count = pairs(file, reader, gap_bytes, self.round_time)?;
                    Ok(())
                })
                .map(|sample| (sample.wall_s / count as f64, sample.cpu_s / count as f64))
            });
            let (one, two) = (one?, two?);
            ratios[0].push(one.0 / two.0);
            ratios[1].push(one.1 / two.1);
        }
        let [wall, cpu] = ratios.map(|ratios| Spread::of(ratios.into_iter()));
        println!(
            "| {} KiB | {engine} | {:.2} ({:.2}..{:.2}) | {:.2} |",
            gap_bytes / KIB,
            wall.median,
            wall.min,
            wall.max,
            cpu.median
        );
        Ok(())
    }
}

struct Spread {
    min: f64,
    median: f64,
    max: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        Self {
            min: values[0],
            median: values[values.len() / 2],
            max: values[values.len() - 1],
        }
    }
}

fn reader(engine: Engine, depth: usize, gap_bytes: usize) -> Outcome<Reader> {
    Ok(Reader::with_options(&ReaderOptions {
        engine,
        depth,
        gap_bytes,
        ..ReaderOptions::default()
    })?)
}

/// Pairs of 16 KiB with `gap_bytes` between them; the number of pairs.
fn pairs(file: &FlashFile, reader: &Reader, gap_bytes: usize, limit: Duration) -> Outcome<usize> {
    const BYTES: usize = 16 * KIB;
    let pair_bytes = (2 * BYTES + gap_bytes) as u64;
    let place_count = (file.len_bytes() - pair_bytes) / 4096;
    let mut first = 0;
    let count = repeat(file, reader, 256, BYTES, limit, |slot, draw| {
        if slot % 2 == 0 {
            first = draw.below(place_count) * 4096;
        } else {
            first += (BYTES + gap_bytes) as u64;
        }
        SlotRead {
            slot,
            offset_bytes: first,
            len_bytes: BYTES,
            crc32c: None,
        }
    })?;
    Ok(count / 2)
}

/// Submits of `count` reads, one after the other until the time is over; the number of reads.
fn repeat(
    file: &FlashFile,
    reader: &Reader,
    count: usize,
    bytes: usize,
    limit: Duration,
    mut wish: impl FnMut(usize, &mut Draw) -> SlotRead,
) -> Outcome<usize> {
    let start = Instant::now();
    // Another place in each round: the device may remember what it read.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let mut draw = Draw(now.as_micros() as u64);
    let mut buffer = SlotBuffer::new(count, bytes)?;
    let mut reads = Vec::with_capacity(count);
    let mut total = 0;
    while total == 0 || start.elapsed() < limit {
        reads.clear();
        reads.extend((0..count).map(|slot| wish(slot, &mut draw)));
        let (back, outcome) = reader.submit(buffer, file, &reads).wait();
        outcome?;
        buffer = back;
        total += count;
    }
    Ok(total)
}

/// The file in order, checked, 32 records of 256 KiB a submit and two submits in flight.
fn sequential(file: &FlashFile, reader: &Reader, sums: &[u32]) -> Outcome {
    const BYTES: usize = 256 * KIB;
    let mut spare = vec![SlotBuffer::new(32, BYTES)?, SlotBuffer::new(32, BYTES)?];
    let mut tickets = std::collections::VecDeque::new();
    let window_max = sums.len().min(2048) / 32;
    for (window, sums) in sums.chunks(32).take(window_max).enumerate() {
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
    Ok(())
}

fn next_buffer(tickets: &mut std::collections::VecDeque<Ticket>) -> Outcome<SlotBuffer> {
    let (buffer, outcome) = tickets.pop_front().ok_or("no ticket")?.wait();
    outcome?;
    Ok(buffer)
}

/// Knuth's linear congruential generator.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ (self.0 >> 29)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 16) % limit
    }
}

/// User and system time of this process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
