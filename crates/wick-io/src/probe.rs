//! A short trial of both engines on a file: which of them reads random records faster, for less processor time.
//!
//! Random reads of 16 KiB, the size of a small record, in short rounds by turns, so that a disturbance hits both.
//!
//! Not here: the device's limits, which take longer to find (`benches/read.rs`).

use crate::options::{Engine, ReaderOptions};
use crate::plan::SlotRead;
use crate::{FlashFile, IoError, IoMode, Reader, SlotBuffer};
use std::time::{Duration, Instant};

const RECORD_BYTES: usize = 16 << 10;
/// Records of a submit.
const BATCH_COUNT: usize = 64;
/// Rounds of each engine, and how long one lasts at least.
const ROUNDS: usize = 3;
const ROUND_TIME: Duration = Duration::from_millis(8);
/// The ring is chosen for at least this multiple of the pool's throughput and at most this share of its processor
/// time. Cheaper alone is not enough: where others compute, a thread for each request gets the pool more turns on
/// the processor than the ring's one thread gets, which a trial cannot see (`docs/bench/io.md`).
const RING_RATE_MIN: f64 = 1.1;
const RING_CPU_MAX: f64 = 0.8;

/// What an engine did in a trial.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineRate {
    /// The best round.
    pub bytes_per_s: f64,
    /// Processor time of the process, over all rounds.
    pub cpu_s_per_request: f64,
}

/// The trial's outcome.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineProbe {
    /// The pool.
    pub pool: EngineRate,
    /// The ring; `None` where there is none, and for files that are read through the page cache or are shorter than
    /// a record, which the pool reads without a trial.
    pub uring: Option<EngineRate>,
}

impl EngineProbe {
    /// Tries both engines with the depth of `options` on `file`.
    pub fn run(file: &FlashFile, options: &ReaderOptions) -> Result<Self, IoError> {
        let reader = |engine| {
            Reader::with_options(&ReaderOptions {
                engine,
                ..options.clone()
            })
        };
        let mut probe = Self {
            pool: EngineRate::default(),
            uring: None,
        };
        // Through the page cache, the ring's one thread would do all of the copying that the pool shares.
        if file.mode() == IoMode::Buffered || file.len_bytes() < RECORD_BYTES as u64 {
            return Ok(probe);
        }
        let ring = reader(Engine::Uring)?;
        if ring.engine() != Engine::Uring {
            return Ok(probe);
        }
        let pool = reader(Engine::Pool)?;
        let mut trial = Trial::new(file)?;
        for _ in 0..ROUNDS {
            trial.round(&pool, &mut probe.pool)?;
            trial.round(&ring, probe.uring.get_or_insert_default())?;
        }
        for (rate, reader) in [
            (Some(&mut probe.pool), &pool),
            (probe.uring.as_mut(), &ring),
        ] {
            if let Some(rate) = rate {
                rate.cpu_s_per_request /= reader.counters().requests.max(1) as f64;
            }
        }
        Ok(probe)
    }

    /// The engine to use: the ring where it reads clearly faster than the pool, for clearly less processor time.
    pub fn choice(&self) -> Engine {
        let is_better = |ring: EngineRate| {
            ring.bytes_per_s >= RING_RATE_MIN * self.pool.bytes_per_s
                && ring.cpu_s_per_request <= RING_CPU_MAX * self.pool.cpu_s_per_request
        };
        if self.uring.is_some_and(is_better) {
            Engine::Uring
        } else {
            Engine::Pool
        }
    }
}

struct Trial<'a> {
    file: &'a FlashFile,
    buffer: Option<SlotBuffer>,
    reads: Vec<SlotRead>,
    seed: u64,
}

impl<'a> Trial<'a> {
    fn new(file: &'a FlashFile) -> Result<Self, IoError> {
        Ok(Self {
            file,
            buffer: Some(SlotBuffer::new(BATCH_COUNT, RECORD_BYTES)?),
            reads: Vec::with_capacity(BATCH_COUNT),
            seed: 1,
        })
    }

    /// Reads for [`ROUND_TIME`], adding what it took to `rate`.
    fn round(&mut self, reader: &Reader, rate: &mut EngineRate) -> Result<(), IoError> {
        let (start, cpu, before) = (Instant::now(), cpu_time(), reader.counters().bytes);
        while start.elapsed() < ROUND_TIME {
            let Some(buffer) = self.buffer.take() else {
                break;
            };
            self.draw();
            let (buffer, outcome) = reader.submit(buffer, self.file, &self.reads).wait();
            self.buffer = Some(buffer);
            outcome?;
        }
        let bytes = (reader.counters().bytes - before) as f64;
        rate.bytes_per_s = rate.bytes_per_s.max(bytes / start.elapsed().as_secs_f64());
        rate.cpu_s_per_request += cpu_time().saturating_sub(cpu).as_secs_f64();
        Ok(())
    }

    /// Draws the records of the next submit.
    fn draw(&mut self) {
        let record_count = self.file.len_bytes() / RECORD_BYTES as u64;
        self.reads.clear();
        for slot in 0..BATCH_COUNT {
            // Knuth's linear congruential generator; its upper bits are the good ones.
            self.seed = self
                .seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            self.reads.push(SlotRead {
                slot,
                offset_bytes: (self.seed >> 33) % record_count * RECORD_BYTES as u64,
                len_bytes: RECORD_BYTES,
                crc32c: None,
            });
        }
    }
}

/// Processor time of this process so far, user and system.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_chosen_only_where_it_pays() {
        let rate = |bytes_per_s, cpu_s_per_request| EngineRate {
            bytes_per_s,
            cpu_s_per_request,
        };
        let pool = rate(1e9, 6e-6);
        let choice = |uring| EngineProbe { pool, uring }.choice();
        assert_eq!(choice(None), Engine::Pool);
        assert_eq!(choice(Some(rate(1.2e9, 3e-6))), Engine::Uring);
        assert_eq!(choice(Some(rate(1.05e9, 3e-6))), Engine::Pool);
        assert_eq!(choice(Some(rate(1.2e9, 5.5e-6))), Engine::Pool);
    }

    #[test]
    fn a_trial_reads_any_file_and_ends_soon() {
        let folder = tempfile::tempdir().unwrap();
        for len in [0, 100, RECORD_BYTES, 3 << 20] {
            let path = folder.path().join("sample");
            std::fs::write(&path, vec![7; len]).unwrap();
            let file = FlashFile::open(&path, crate::DirectIo::Preferred).unwrap();
            let start = Instant::now();
            let options = ReaderOptions::default().probe(&file).unwrap();
            assert_ne!(options.engine, Engine::Auto);
            assert!(start.elapsed() < Duration::from_secs(10));
            let fixed = ReaderOptions {
                engine: Engine::Uring,
                ..options
            };
            assert_eq!(fixed.clone().probe(&file).unwrap(), fixed);
        }
    }

    #[test]
    fn a_broken_file_is_an_error_of_the_trial() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sample");
        std::fs::write(&path, vec![7; 3 << 20]).unwrap();
        let file = FlashFile::open(&path, crate::DirectIo::Preferred).unwrap();
        std::fs::write(&path, b"").unwrap();
        let outcome = ReaderOptions::default().probe(&file);
        // Without a ring or direct reads there is nothing to choose, and nothing is read.
        let is_pool = |options: ReaderOptions| options.engine == Engine::Pool;
        assert!(outcome.map_or_else(|error| error.to_string().contains("sample"), is_pool));
    }
}
