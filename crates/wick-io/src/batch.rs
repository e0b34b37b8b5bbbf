//! A batch: the reads of one submit, shared by the threads that work on them.
//!
//! Lifecycle of a run: 1. `claim` gives it to one thread. 2. `begin`, then requests and `accept` until it is
//! read. 3. `check`. 4. `finish` counts it. When the last run is finished, whoever waits is woken.
//!
//! Invariants:
//! - A run is claimed once, so its parts have one writer.
//! - No byte of the buffer is written after `unfinished` became 0; `wait` returns only then.
//! - After an error or a cancel, runs not yet begun are finished without being read.

use crate::device::Device;
use crate::file::FlashFile;
use crate::pages::Pages;
use crate::plan::{Check, Part, Plan, Route};
use crate::transfer::{Target, Transfer};
use crate::IoError;
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Reads on their way; holds its own share of the memory, so nobody else has to keep it alive.
pub(crate) struct Batch {
    pages: Arc<Pages>,
    file: FlashFile,
    plan: Plan,
    next: AtomicUsize,
    unfinished: AtomicUsize,
    stopped: AtomicBool,
    outcome: Mutex<Outcome>,
    finished: Condvar,
}

#[derive(Default)]
struct Outcome {
    is_finished: bool,
    error: Option<IoError>,
}

impl Batch {
    /// A batch that fills parts of `pages`.
    ///
    /// # Safety
    /// - Until `wait` returns or the batch is gone, nothing but the batch touches the bytes
    ///   `[at, at + span_bytes)` of the plan's parts.
    /// - Those ranges do not overlap each other.
    pub(crate) unsafe fn new(pages: Arc<Pages>, file: FlashFile, plan: Plan) -> Self {
        let run_count = plan.runs.len();
        Self {
            pages,
            file,
            plan,
            next: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(run_count),
            stopped: AtomicBool::new(false),
            outcome: Mutex::new(Outcome {
                is_finished: run_count == 0,
                error: None,
            }),
            finished: Condvar::new(),
        }
    }

    pub(crate) fn run_count(&self) -> usize {
        self.plan.runs.len()
    }

    /// Whether every run has been claimed.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.plan.runs.len()
    }

    /// Whether every run is finished.
    pub(crate) fn is_finished(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) == 0
    }

    /// Runs not yet begun will not be read.
    pub(crate) fn cancel(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Blocks until all runs are finished; the first error, if any.
    pub(crate) fn wait(&self) -> Result<(), IoError> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        while !outcome.is_finished {
            outcome = self
                .finished
                .wait(outcome)
                .unwrap_or_else(PoisonError::into_inner);
        }
        outcome.error.take().map_or(Ok(()), Err)
    }

    pub(crate) fn file(&self) -> &FlashFile {
        &self.file
    }

    /// Whether runs not yet begun, and what is left of the others, need not be read.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Claims runs and reads them, one after the other on this thread, until none is left.
    pub(crate) fn work(&self, transfer: &mut Transfer, device: &Device) {
        while let Some(index) = self.claim() {
            let result = self.caught(|| {
                if self.is_stopped() {
                    return Ok(());
                }
                self.begin(index, transfer, device)?;
                self.read(index, transfer, device)?;
                self.check(index)
            });
            self.finish(result);
        }
    }

    /// A run that from now on is the caller's to read and to finish.
    pub(crate) fn claim(&self) -> Option<usize> {
        // Exhausted batches are asked once more by each thread, far from wrapping around.
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.plan.runs.len()).then_some(index)
    }

    /// Runs `body`; a panic of it is an error.
    pub(crate) fn caught<T>(
        &self,
        body: impl FnOnce() -> Result<T, IoError>,
    ) -> Result<T, IoError> {
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
            Err(IoError::WorkerPanicked {
                path: self.file.path().to_owned(),
            })
        })
    }

    fn run(&self, index: usize) -> (&[Part], Route) {
        let run = &self.plan.runs[index];
        (&self.plan.parts[run.parts.clone()], run.route)
    }

    /// Makes a claimed run the one that `transfer` is about.
    pub(crate) fn begin(
        &self,
        index: usize,
        transfer: &mut Transfer,
        device: &Device,
    ) -> Result<(), IoError> {
        let target = Target {
            slots: self.pages.raw(),
            sink: device.sink.raw(),
        };
        // SAFETY: nobody else touches these parts by the promise given to `new`, and no other thread of ours
        // does, because a run is claimed once. Engines hold the batch, and so the memory, and the device, and so
        // the sink, until no request is on its way.
        unsafe { transfer.begin(self.file.alignment_bytes(), target, self.run(index)) }
    }

    /// Takes the device's answer to a request of the run.
    ///
    /// # Safety
    /// - `transfer` began with this run, and its request is finished.
    pub(crate) unsafe fn accept(
        &self,
        index: usize,
        transfer: &mut Transfer,
        answer: io::Result<usize>,
    ) -> Result<(), IoError> {
        let (parts, _) = self.run(index);
        // SAFETY: as promised by the caller.
        unsafe { transfer.accept(parts, answer) }.map_err(|fault| fault.name(&self.file, parts))
    }

    /// Reads what is left of a begun run on this thread.
    pub(crate) fn read(
        &self,
        index: usize,
        transfer: &mut Transfer,
        device: &Device,
    ) -> Result<(), IoError> {
        while let Some((pieces, at_bytes)) = transfer.request() {
            // SAFETY: the run is ours, see `begin`.
            let answer = unsafe { device.read(&self.file, pieces, at_bytes) };
            // SAFETY: the request is finished; the transfer is about this run.
            unsafe { self.accept(index, transfer, answer)? };
        }
        Ok(())
    }

    /// Counts a claimed run, read or not, as done.
    pub(crate) fn finish(&self, result: Result<(), IoError>) {
        if let Err(error) = result {
            self.cancel();
            let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            outcome.error.get_or_insert(error);
        }
        // Release: our writes to the slots happen before the end of the batch. Acquire: so do everybody's.
        if self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            outcome.is_finished = true;
            self.finished.notify_all();
        }
    }

    /// Lets the page cache go and compares the checksums of a run that was read.
    pub(crate) fn check(&self, index: usize) -> Result<(), IoError> {
        let (parts, _) = self.run(index);
        if let (Some(first), Some(last)) = (parts.first(), parts.last()) {
            let len_bytes = last.end_bytes() - first.offset_bytes;
            self.file.drop_cached(first.offset_bytes, len_bytes);
        }
        parts.iter().try_for_each(|part| self.check_part(part))
    }

    /// Compares the checksum of a part that was read.
    fn check_part(&self, part: &Part) -> Result<(), IoError> {
        let (offset_bytes, at, len_bytes, expected) = match part.check {
            Check::None => return Ok(()),
            Check::Crc32c(expected) => (part.offset_bytes, part.at, part.len_bytes, expected),
            Check::Split(index) => {
                let split = &self.plan.splits[index];
                // The last to come has acquired what the others released: the whole read is visible to it.
                if split.unfinished.fetch_sub(1, Ordering::AcqRel) != 1 {
                    return Ok(());
                }
                (split.offset_bytes, split.at, split.len_bytes, split.crc32c)
            }
        };
        // SAFETY: the part, or all parts of the split read, are read, and nobody writes them again.
        let got = crc32c::crc32c(unsafe { self.pages.bytes(at..at + len_bytes) });
        if got == expected {
            return Ok(());
        }
        let path = self.file.path().to_owned();
        Err(IoError::Checksum {
            path,
            offset_bytes,
            len_bytes: len_bytes as u64,
            expected,
            got,
        })
    }

    /// Finishes a batch whose reads cannot be begun; no run was claimed, and none will be.
    pub(crate) fn fail(&self, error: IoError) {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(outcome.is_finished, "a batch with runs fails by its runs");
        outcome.error.get_or_insert(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DirectIo, SlotRead};

    /// A batch of two runs over a file of two far apart blocks.
    fn batch(folder: &tempfile::TempDir) -> Batch {
        let path = folder.path().join("blocks");
        std::fs::write(&path, vec![5u8; 1 << 20]).unwrap();
        let file = FlashFile::open(&path, DirectIo::Off).unwrap();
        let read = |slot| SlotRead {
            slot,
            offset_bytes: slot as u64 * 600_000,
            len_bytes: 100,
            crc32c: None,
        };
        let plan = Plan::new(&[read(0), read(1)], 100, 1, 0);
        // SAFETY: the pages belong to the batch alone, slots do not overlap.
        unsafe { Batch::new(Arc::new(Pages::new(200).unwrap()), file, plan) }
    }

    #[test]
    fn a_panic_is_an_error_and_the_waiter_wakes() {
        let folder = tempfile::tempdir().unwrap();
        let batch = batch(&folder);
        assert_eq!((batch.claim(), batch.run_count()), (Some(0), 2));
        batch.finish(batch.caught(|| panic!("expected by the test")));
        assert!(!batch.is_finished());
        let device = Device::new(0, None).unwrap();
        batch.work(&mut Transfer::new(), &device);
        assert!(batch.is_finished() && batch.is_exhausted());
        assert_eq!(device.counters().requests, 0, "reads begun after an error");
        assert!(matches!(batch.wait(), Err(IoError::WorkerPanicked { .. })));
    }

    #[test]
    fn a_cancelled_batch_finishes_without_reading() {
        let folder = tempfile::tempdir().unwrap();
        let batch = batch(&folder);
        batch.cancel();
        let device = Device::new(0, None).unwrap();
        batch.work(&mut Transfer::new(), &device);
        assert!(batch.wait().is_ok());
        assert_eq!(device.counters().bytes, 0);
    }
}
