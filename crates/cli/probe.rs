//! What bounds a decode on this machine: how fast the device reads in order and at random, and memory is read.
//!
//! Each rate is found by a contest: every setting gets one short round, the best [`FINALISTS`] then [`ROUNDS`]
//! longer ones by turns, and the highest median wins. All of it takes some seconds, up to 192 MiB for reads and,
//! after those are gone, up to 1 GiB for the memory probe; it belongs outside of any budget.
//!
//! Rates are bytes a second of what was asked for, without checksums. What competes with nobody is the floor: a
//! product that uses both the device and memory at once may find each slower.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use candle_wick::available_memory_bytes;
use rayon::prelude::*;
use serde::Serialize;
use wick_io::{advise_huge_pages, Engine, FlashFile, Reader};
use wick_kernels::{read_plain, read_streams};

use crate::draw::Draw;
use crate::read_load::{reader, Load};
use crate::spread::{Spread, ROUNDS};

const ENGINES: [Engine; 2] = [Engine::Pool, Engine::Uring];
/// Lengths of a read in order. The reader cuts the longest into requests of 512 KiB.
const SEQUENTIAL_BYTES: [usize; 3] = [256 << 10, 1 << 20, 4 << 20];
const SEQUENTIAL_IN_FLIGHT: [usize; 4] = [8, 16, 32, 64];
const RANDOM_IN_FLIGHT: [usize; 3] = [16, 32, 64];
/// Settings that get all rounds.
const FINALISTS: usize = 3;
const TRIAL_TIME: Duration = Duration::from_millis(40);
const ROUND_TIME: Duration = Duration::from_millis(100);
/// Memory that is read: more than any cache, and no more than a quarter of what is free. Tests want no true rate.
const MEMORY_BYTES: u64 = if cfg!(test) { 16 << 20 } else { 1 << 30 };
/// Memory that a thread reads at once: four streams of a quarter each.
const PIECE_BYTES: usize = 1 << 20;

/// Records that are read at random: `count` of `stride_bytes` each, one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Records {
    pub(crate) offset_bytes: u64,
    pub(crate) stride_bytes: usize,
    pub(crate) count: u64,
}

/// The rates that bound a decode.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Rates {
    /// The file in order.
    pub(crate) sequential: ReadRate,
    /// Records in any order.
    pub(crate) random: ReadRate,
    pub(crate) memory: MemoryRate,
}

/// A rate of reading a file, and the setting that reached it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct ReadRate {
    #[serde(flatten)]
    pub(crate) setting: ReadSetting,
    pub(crate) bytes_per_s: Spread,
}

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ReadSetting {
    #[serde(serialize_with = "display")]
    pub(crate) engine: Engine,
    pub(crate) read_bytes: usize,
    pub(crate) in_flight: usize,
}

/// A rate of reading memory, and the setting that reached it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct MemoryRate {
    #[serde(flatten)]
    pub(crate) setting: MemorySetting,
    /// Size of the memory that was read, once a round.
    pub(crate) buffer_bytes: usize,
    pub(crate) bytes_per_s: Spread,
}

/// How memory is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MemorySetting {
    pub(crate) threads: usize,
    /// Places read side by side, with prefetches; 1 is the plain loop.
    pub(crate) streams: usize,
}

fn display<S: serde::Serializer>(engine: &Engine, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(engine)
}

impl Rates {
    /// Measures all three on `file`, and `records` of it, with up to as many threads as the current rayon pool has.
    pub(crate) fn measure(file: &FlashFile, records: &Records) -> Result<Self> {
        Ok(Self {
            sequential: sequential(file)?,
            random: random(file, records)?,
            memory: memory(memory_bytes(), rayon::current_num_threads())?,
        })
    }

    /// Takes over each rate of `other` that is higher.
    pub(crate) fn keep_best(&mut self, other: Self) {
        let is_higher = |other: &Spread, own: &Spread| other.median > own.median;
        for (own, other) in [
            (&mut self.sequential, other.sequential),
            (&mut self.random, other.random),
        ] {
            if is_higher(&other.bytes_per_s, &own.bytes_per_s) {
                *own = other;
            }
        }
        if is_higher(&other.memory.bytes_per_s, &self.memory.bytes_per_s) {
            self.memory = other.memory;
        }
    }
}

/// The best rate of reading the file in order, from the start again when it ends.
fn sequential(file: &FlashFile) -> Result<ReadRate> {
    let mut settings = settings(&SEQUENTIAL_BYTES, &SEQUENTIAL_IN_FLIGHT)?;
    settings.retain(|setting| setting.read_bytes as u64 <= file.len_bytes());
    ensure!(
        !settings.is_empty(),
        "{}: {} bytes are too few to measure reads in order, which takes {}",
        file.path().display(),
        file.len_bytes(),
        SEQUENTIAL_BYTES[0]
    );
    // Goes on where the round before ended: what was just read may be remembered somewhere.
    let mut next = 0;
    contest(file, &settings, |read_bytes| {
        let fits = next + read_bytes as u64 <= file.len_bytes();
        let at = if fits { next } else { 0 };
        next = at + read_bytes as u64;
        at
    })
}

/// The best rate of reading single records.
fn random(file: &FlashFile, records: &Records) -> Result<ReadRate> {
    let Records {
        offset_bytes,
        stride_bytes,
        count,
    } = *records;
    let end = count
        .checked_mul(stride_bytes as u64)
        .and_then(|bytes| bytes.checked_add(offset_bytes));
    ensure!(
        count > 0 && stride_bytes > 0 && end.is_some_and(|end| end <= file.len_bytes()),
        "{}: {count} records of {stride_bytes} bytes from {offset_bytes} on are none, or not in its {} bytes",
        file.path().display(),
        file.len_bytes()
    );
    let mut draw = Draw::new();
    let settings = settings(&[stride_bytes], &RANDOM_IN_FLIGHT)?;
    contest(file, &settings, |stride_bytes| {
        offset_bytes + draw.below(count) * stride_bytes as u64
    })
}

/// All settings of the engines that there are.
fn settings(lengths: &[usize], depths: &[usize]) -> Result<Vec<ReadSetting>> {
    let mut settings = Vec::new();
    for engine in ENGINES {
        if reader(engine, 1)?.engine() == engine {
            for &read_bytes in lengths {
                let with = |&in_flight| ReadSetting {
                    engine,
                    read_bytes,
                    in_flight,
                };
                settings.extend(depths.iter().map(with));
            }
        }
    }
    Ok(settings)
}

/// The setting that reads best; `next_offset` says where the next read of a length begins.
fn contest(
    file: &FlashFile,
    settings: &[ReadSetting],
    mut next_offset: impl FnMut(usize) -> u64,
) -> Result<ReadRate> {
    let mut tried = Vec::with_capacity(settings.len());
    for &setting in settings {
        let rate = Entrant::new(file, setting)?.round(TRIAL_TIME, &mut next_offset)?;
        tried.push((setting, rate));
    }
    tried.sort_by(|a, b| b.1.total_cmp(&a.1));
    let finalists = tried.iter().take(FINALISTS);
    let finalists = finalists.map(|&(setting, _)| Entrant::new(file, setting));
    let mut finalists = finalists.collect::<Result<Vec<_>>>()?;
    let indices: Vec<usize> = (0..finalists.len()).collect();
    let (winner, bytes_per_s) = best(&indices, |index| {
        finalists[index].round(ROUND_TIME, &mut next_offset)
    })?;
    Ok(ReadRate {
        setting: finalists[winner].setting,
        bytes_per_s,
    })
}

/// A setting, ready to read.
struct Entrant<'a> {
    setting: ReadSetting,
    reader: Reader,
    load: Load<'a>,
}

impl<'a> Entrant<'a> {
    fn new(file: &'a FlashFile, setting: ReadSetting) -> Result<Self> {
        Ok(Self {
            setting,
            reader: reader(setting.engine, setting.in_flight)?,
            load: Load::new(file, setting.read_bytes, setting.in_flight)?,
        })
    }

    /// Bytes a second.
    fn round(&mut self, time: Duration, next_offset: &mut impl FnMut(usize) -> u64) -> Result<f64> {
        let read_bytes = self.setting.read_bytes;
        let sample = self
            .load
            .run(&self.reader, time, || next_offset(read_bytes))?;
        Ok(sample.bytes_per_s())
    }
}

/// The setting with the highest median of [`ROUNDS`] rounds, in which all take turns.
fn best<T: Copy>(settings: &[T], mut round: impl FnMut(T) -> Result<f64>) -> Result<(T, Spread)> {
    let mut rates = vec![Vec::with_capacity(ROUNDS); settings.len()];
    for _ in 0..ROUNDS {
        for (&setting, rates) in settings.iter().zip(&mut rates) {
            rates.push(round(setting)?);
        }
    }
    let spreads = rates.into_iter().map(Spread::of);
    let spreads = settings.iter().copied().zip(spreads);
    spreads
        .max_by(|a, b| a.1.median.total_cmp(&b.1.median))
        .context("no setting to try")
}

/// What may be taken for the memory probe.
fn memory_bytes() -> usize {
    let free = available_memory_bytes().unwrap_or(MEMORY_BYTES);
    let bytes = MEMORY_BYTES.min(free / 4).max(PIECE_BYTES as u64);
    bytes as usize / PIECE_BYTES * PIECE_BYTES
}

/// The best rate of reading `buffer_bytes` of memory with 1, 2, 4 .. `threads` threads.
fn memory(buffer_bytes: usize, threads: usize) -> Result<MemoryRate> {
    let mut buffer = Vec::new();
    buffer
        .try_reserve_exact(buffer_bytes)
        .with_context(|| format!("{buffer_bytes} bytes of memory to read"))?;
    // As the memory that products read.
    advise_huge_pages(buffer.spare_capacity_mut());
    // Not zeros: those may all be one and the same page.
    buffer.resize(buffer_bytes, 1u8);
    let counts = std::iter::successors(Some(1), |count| Some(2 * count));
    let mut pools = Vec::new();
    for count in counts.take_while(|&count| count < threads).chain([threads]) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count).build();
        pools.push(pool.with_context(|| format!("starting {count} threads"))?);
    }
    let settings: Vec<(&rayon::ThreadPool, usize)> = pools
        .iter()
        .flat_map(|pool| [(pool, 1), (pool, 4)])
        .collect();
    let ((pool, streams), bytes_per_s) = best(&settings, |(pool, streams)| {
        let sum = if streams == 1 {
            read_plain
        } else {
            read_quarters
        };
        let start = Instant::now();
        let pieces = || buffer.par_chunks(PIECE_BYTES).map(sum);
        black_box(pool.install(|| pieces().reduce(|| 0, u64::wrapping_add)));
        Ok(buffer.len() as f64 / start.elapsed().as_secs_f64().max(1e-9))
    })?;
    let threads = pool.current_num_threads();
    Ok(MemoryRate {
        setting: MemorySetting { threads, streams },
        buffer_bytes,
        bytes_per_s,
    })
}

/// The quarters of a piece side by side.
fn read_quarters(bytes: &[u8]) -> u64 {
    let (left, right) = bytes.split_at(bytes.len() / 2);
    let (a, b) = left.split_at(left.len() / 2);
    let (c, d) = right.split_at(right.len() / 2);
    read_streams([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use wick_io::DirectIo;

    use super::*;

    fn file(folder: &tempfile::TempDir, bytes: usize) -> FlashFile {
        let path = folder.path().join("records");
        std::fs::write(&path, vec![5; bytes]).unwrap();
        FlashFile::open(&path, DirectIo::Preferred).unwrap()
    }

    #[test]
    fn all_rates_are_found_and_named() {
        let folder = tempfile::tempdir().unwrap();
        // The last record ends in the middle of a block, and so does the file.
        let file = file(&folder, (8 << 20) + 700);
        let records = Records {
            offset_bytes: 700,
            stride_bytes: 16 << 10,
            count: 512,
        };
        let rates = Rates::measure(&file, &records).unwrap();
        for rate in [
            rates.sequential.bytes_per_s,
            rates.random.bytes_per_s,
            rates.memory.bytes_per_s,
        ] {
            assert!(
                rate.min > 0.0 && rate.min <= rate.median && rate.median <= rate.max,
                "{rates:?}"
            );
        }
        assert_eq!(rates.random.setting.read_bytes, 16 << 10);
        assert!(RANDOM_IN_FLIGHT.contains(&rates.random.setting.in_flight));
        assert!(SEQUENTIAL_BYTES.contains(&rates.sequential.setting.read_bytes));
        assert!((1..=rayon::current_num_threads()).contains(&rates.memory.setting.threads));
        let json = serde_json::to_value(rates).unwrap();
        assert!(json["random"]["bytes_per_s"]["median"].is_f64(), "{json}");
        assert!(["pool", "io_uring"].contains(&json["random"]["engine"].as_str().unwrap()));
        assert_eq!(json["memory"]["buffer_bytes"], memory_bytes());
        assert!((1..=3).contains(&memory(PIECE_BYTES, 3).unwrap().setting.threads));
    }

    #[test]
    fn files_that_are_too_short_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = file(&folder, 200 << 10);
        let said = |outcome: Result<ReadRate>| outcome.unwrap_err().to_string();
        assert!(said(sequential(&file)).contains("204800 bytes are too few"));
        for (offset_bytes, stride_bytes, count) in [
            (0, 16 << 10, 13),
            (8193, 16 << 10, 12),
            (0, 16 << 10, 0),
            (0, 0, 10),
            (u64::MAX, 16 << 10, 1),
            (0, usize::MAX, u64::MAX),
        ] {
            let records = Records {
                offset_bytes,
                stride_bytes,
                count,
            };
            let said = said(random(&file, &records));
            assert!(
                said.contains("records: ") && said.contains("204800"),
                "{said}"
            );
        }
    }

    #[test]
    fn the_best_is_the_highest_median() {
        let mut calls = 0;
        let (setting, spread) = best(&[10.0, 20.0], |setting| {
            calls += 1;
            // The first has one round that nobody repeats.
            Ok(if setting == 10.0 && calls == 1 {
                99.0
            } else {
                setting
            })
        })
        .unwrap();
        assert_eq!((setting, spread.median, calls), (20.0, 20.0, 2 * ROUNDS));
        assert!(best(&[1.0], |_| anyhow::bail!("broken")).is_err());
        assert!(best(&[], |one: f64| Ok(one)).is_err());
    }

    #[test]
    fn the_memory_probe_leaves_room() {
        let bytes = memory_bytes();
        assert!(bytes >= PIECE_BYTES && bytes <= MEMORY_BYTES as usize);
        assert_eq!(bytes % PIECE_BYTES, 0);
    }
}
