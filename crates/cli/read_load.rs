//! A load on a reader: reads of one length, kept coming for a while.
//!
//! Two submits are under way at any time, together with no fewer reads than can be in flight, so that the device
//! hardly waits for the next submit. What a sample counts ends when the last of its reads has.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::time::{clock_gettime, ClockId};
use wick_io::{Engine, FlashFile, Reader, ReaderOptions, SlotBuffer, SlotRead, Ticket};

/// Least and most bytes of a submit: enough reads to be worth it, no more memory and time than that takes.
const SUBMIT_BYTES_MIN: usize = 1 << 20;
const SUBMIT_BYTES_MAX: usize = 32 << 20;
/// Most requests in flight that two submits can always provide, of up to 1 MiB each.
pub(crate) const IN_FLIGHT_MAX: usize = 64;

/// The file, and memory to read it into.
pub(crate) struct Load<'a> {
    file: &'a FlashFile,
    read_bytes: usize,
    spare: Vec<SlotBuffer>,
    reads: Vec<SlotRead>,
    read_count: usize,
}

/// What a load took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) wall: Duration,
    /// Processor time of the process.
    pub(crate) processor: Duration,
    /// Bytes asked for.
    pub(crate) bytes: u64,
    /// Requests that the device got: more than reads where those are split, fewer where neighbours share one.
    pub(crate) requests: u64,
}

impl Sample {
    pub(crate) fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.wall.as_secs_f64().max(1e-9)
    }

    pub(crate) fn requests_per_s(&self) -> f64 {
        self.requests as f64 / self.wall.as_secs_f64().max(1e-9)
    }

    pub(crate) fn processor_us_per_request(&self) -> f64 {
        1e6 * self.processor.as_secs_f64() / self.requests.max(1) as f64
    }
}

impl<'a> Load<'a> {
    /// Memory for reads of `read_bytes` with up to `in_flight` requests, at most [`IN_FLIGHT_MAX`].
    pub(crate) fn new(file: &'a FlashFile, read_bytes: usize, in_flight: usize) -> Result<Self> {
        let reads_of = |submit_bytes: usize| (submit_bytes / read_bytes.max(1)).max(1);
        let read_count = (2 * in_flight)
            .max(reads_of(SUBMIT_BYTES_MIN))
            .min(reads_of(SUBMIT_BYTES_MAX));
        let buffer = || SlotBuffer::new(read_count, read_bytes);
        Ok(Self {
            file,
            read_bytes,
            spare: vec![buffer()?, buffer()?],
            reads: Vec::with_capacity(read_count),
            read_count,
        })
    }

    /// Reads at the offsets that `next_offset` names, for at least `time` and at least one submit.
    ///
    /// The load is of no further use after an error.
    pub(crate) fn run(
        &mut self,
        reader: &Reader,
        time: Duration,
        mut next_offset: impl FnMut() -> u64,
    ) -> Result<Sample> {
        let mut tickets = VecDeque::with_capacity(self.spare.len());
        let (start, processor, before) = (Instant::now(), processor_time(), reader.counters());
        let mut bytes = 0;
        while bytes == 0 || start.elapsed() < time {
            let buffer = match self.spare.pop() {
                Some(buffer) => buffer,
                None => land(&mut tickets)?,
            };
            self.reads.clear();
            self.reads.extend((0..self.read_count).map(|slot| SlotRead {
                slot,
                offset_bytes: next_offset(),
                len_bytes: self.read_bytes,
                crc32c: None,
            }));
            tickets.push_back(reader.submit(buffer, self.file, &self.reads));
            bytes += (self.read_count * self.read_bytes) as u64;
        }
        while !tickets.is_empty() {
            self.spare.push(land(&mut tickets)?);
        }
        Ok(Sample {
            wall: start.elapsed(),
            processor: processor_time().saturating_sub(processor),
            bytes,
            requests: reader.counters().requests - before.requests,
        })
    }
}

/// A reader that reads nothing for nothing: neighbours share a request only where they touch.
pub(crate) fn reader(engine: Engine, depth: usize) -> Result<Reader> {
    Ok(Reader::with_options(&ReaderOptions {
        engine,
        depth,
        gap_bytes: 0,
        ..ReaderOptions::default()
    })?)
}

/// Waits for the oldest submit.
fn land(tickets: &mut VecDeque<Ticket>) -> Result<SlotBuffer> {
    let ticket = tickets.pop_front().context("an earlier read failed")?;
    let (buffer, outcome) = ticket.wait();
    outcome?;
    Ok(buffer)
}

/// User and system time of this process.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use wick_io::DirectIo;

    use super::*;

    #[test]
    fn a_sample_counts_what_was_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![3; 8 << 20]).unwrap();
        let file = FlashFile::open(&path, DirectIo::Off).unwrap();
        let reader = Reader::new(2).unwrap();
        // Every other block, so that no two share a request.
        let (mut at, mut count) = (0, 0);
        let next = || {
            at = (at + 128 * 1024) % (8 << 20);
            count += 1;
            at
        };
        let mut load = Load::new(&file, 64 << 10, 2).unwrap();
        let sample = load.run(&reader, Duration::ZERO, next).unwrap();
        assert_eq!((sample.requests, sample.bytes), (16, 1 << 20));
        assert!(sample.bytes_per_s() > 0.0 && sample.requests_per_s() > 0.0);
        assert!(sample.processor_us_per_request().is_finite());
        assert_eq!(count, 16);
        let error = load.run(&reader, Duration::ZERO, || 8 << 20).unwrap_err();
        assert!(error.to_string().contains("file"), "{error}");
    }

    #[test]
    fn submits_hold_what_can_be_in_flight_and_bounded_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [0; 100]).unwrap();
        let file = FlashFile::open(&path, DirectIo::Off).unwrap();
        for (read_bytes, in_flight, expected) in [
            (4096, 1, 256),
            (32 << 10, 64, 128),
            (1 << 20, 1, 2),
            (1 << 20, 64, 32),
            (4 << 20, 64, 8),
        ] {
            let load = Load::new(&file, read_bytes, in_flight).unwrap();
            assert_eq!(load.read_count, expected);
            assert_eq!(load.spare.len(), 2);
        }
    }
}
