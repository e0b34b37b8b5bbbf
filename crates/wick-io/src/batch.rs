//! A batch: the reads of one submit, shared by the threads that work on them.
//!
//! Lifecycle: 1. `assign` gives it the reads. 2. Its runs are read. 3. `clear` takes them away again, and another
//! submit may use what they were kept in. Of a run: 1. `claim` gives it to one thread. 2. `begin`, then requests
//! and `accept` until it is read. 3. `check`. 4. `count` takes it off the runs that are not finished.
//!
//! Invariants:
//! - A run is claimed once, so its parts have one writer.
//! - No byte of the buffer is written after `unfinished` became 0.
//! - After an error or a cancel, runs not yet begun are finished without being read.
//!
//! Not here: who waits for a batch, and who keeps it between two submits (`queue`).

use crate::device::Device;
use crate::file::FlashFile;
use crate::pages::Pages;
use crate::plan::{Check, Part, Plan, Route, SlotRead};
use crate::transfer::{Target, Transfer};
use crate::IoError;
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Reads on their way; holds its own share of the memory, so nobody else has to keep it alive.
#[derive(Default)]
pub(crate) struct Batch {
    /// `None` while there is nothing to read.
    job: Option<Job>,
    plan: Plan,
    next: AtomicUsize,
    unfinished: AtomicUsize,
    stopped: AtomicBool,
    error: Mutex<Option<IoError>>,
    /// For whoever waits until nothing is unfinished.
    pub(crate) finished: Condvar,
}

struct Job {
    pages: Arc<Pages>,
    slot_bytes: usize,
    file: FlashFile,
}

impl Batch {
    /// Makes this a batch that fills slots of `slot_bytes` in `pages`, with requests shared across gaps of at most
    /// `gap_bytes`, or not shared at all.
    ///
    /// # Safety
    /// - Until the batch is finished or gone, nothing but the batch touches the slots that `reads` name.
    /// - Each read fits into its slot, the slot lies in `pages`, and no slot is named twice.
    pub(crate) unsafe fn assign(
        &mut self,
        (pages, slot_bytes): (&Arc<Pages>, usize),
        file: &FlashFile,
        reads: &[SlotRead],
        gap_bytes: Option<usize>,
    ) {
        self.plan
            .lay_out(reads, slot_bytes, file.alignment_bytes(), gap_bytes);
        self.job = Some(Job {
            pages: Arc::clone(pages),
            slot_bytes,
            file: file.clone(),
        });
        *self.next.get_mut() = 0;
        *self.unfinished.get_mut() = self.plan.runs.len();
        *self.stopped.get_mut() = false;
    }

    /// Lets go of the memory and the file of a finished batch, and keeps its lists.
    pub(crate) fn clear(&mut self) {
        self.job = None;
    }

    /// How many parts the lists have room for.
    pub(crate) fn room(&self) -> usize {
        self.plan.parts.capacity()
    }

    /// The slots that the batch fills; of slots without bytes the first one.
    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        let slot_bytes = self.job().slot_bytes.max(1);
        self.plan.parts.iter().map(move |part| part.at / slot_bytes)
    }

    fn job(&self) -> &Job {
        self.job.as_ref().expect("a batch with runs has a job")
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

    /// The first error, once.
    pub(crate) fn outcome(&self) -> Result<(), IoError> {
        let mut error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        error.take().map_or(Ok(()), Err)
    }

    pub(crate) fn file(&self) -> &FlashFile {
        &self.job().file
    }

    /// Whether runs not yet begun, and what is left of the others, need not be read.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Reads the claimed run `first` and then all that are left to be claimed, one after the other on this thread;
    /// how many these were.
    pub(crate) fn work(&self, first: usize, transfer: &mut Transfer, device: &Device) -> usize {
        let (mut claimed, mut count) = (Some(first), 0);
        while let Some(index) = claimed {
            self.note(self.caught(|| {
                if self.is_stopped() {
                    return Ok(());
                }
                self.begin(index, transfer, device)?;
                self.read(index, transfer, device)?;
                self.check(index)
            }));
            count += 1;
            claimed = self.claim();
        }
        count
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
                path: self.file().path().to_owned(),
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
            slots: self.job().pages.raw(),
            sink: device.sink.raw(),
        };
        let alignment_bytes = self.file().alignment_bytes();
        // SAFETY: nobody else touches these parts by the promise given to `assign`, and no other thread of ours
        // does, because a run is claimed once. Engines hold the batch, and so the memory, and the device, and so
        // the sink, until no request is on its way.
        unsafe { transfer.begin(alignment_bytes, target, self.run(index), || device.bounce()) }
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
        unsafe { transfer.accept(parts, answer) }.map_err(|fault| fault.name(self.file(), parts))
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
            let answer = unsafe { device.read(self.file(), pieces, at_bytes) };
            // SAFETY: the request is finished; the transfer is about this run.
            unsafe { self.accept(index, transfer, answer)? };
        }
        Ok(())
    }

    /// Remembers the first error, after which nothing more is read.
    pub(crate) fn note(&self, result: Result<(), IoError>) {
        if let Err(error) = result {
            self.cancel();
            let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(error);
        }
    }

    /// Takes `count` claimed runs, read or not, off those that are not finished; whether none is left.
    pub(crate) fn count(&self, count: usize) -> bool {
        // Release: our writes to the slots happen before the end of the batch. Acquire: so do everybody's.
        self.unfinished.fetch_sub(count, Ordering::AcqRel) == count
    }

    /// Lets the page cache go and compares the checksums of a run that was read.
    pub(crate) fn check(&self, index: usize) -> Result<(), IoError> {
        let (parts, _) = self.run(index);
        if let (Some(first), Some(last)) = (parts.first(), parts.last()) {
            let len_bytes = last.end_bytes() - first.offset_bytes;
            self.file().drop_cached(first.offset_bytes, len_bytes);
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
        let got = crc32c::crc32c(unsafe { self.job().pages.bytes(at..at + len_bytes) });
        if got == expected {
            return Ok(());
        }
        let path = self.file().path().to_owned();
        Err(IoError::Checksum {
            path,
            offset_bytes,
            len_bytes: len_bytes as u64,
            expected,
            got,
        })
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
        let pages = Arc::new(Pages::new(200).unwrap());
        let mut batch = Batch::default();
        // SAFETY: the pages belong to the batch alone, slots do not overlap.
        unsafe { batch.assign((&pages, 100), &file, &[read(0), read(1)], Some(0)) };
        batch
    }

    #[test]
    fn a_panic_is_an_error_and_the_batch_ends() {
        let folder = tempfile::tempdir().unwrap();
        let batch = batch(&folder);
        assert_eq!((batch.claim(), batch.run_count()), (Some(0), 2));
        batch.note(batch.caught(|| panic!("expected by the test")));
        assert!(!batch.count(1) && !batch.is_finished());
        let device = Device::new(1, None, None).unwrap();
        let second = batch.claim().unwrap();
        assert_eq!(batch.work(second, &mut Transfer::new(), &device), 1);
        assert!(batch.count(1) && batch.is_finished() && batch.is_exhausted());
        assert_eq!(device.counters().requests, 0, "reads begun after an error");
        let outcome = batch.outcome();
        assert!(matches!(outcome, Err(IoError::WorkerPanicked { .. })));
    }

    #[test]
    fn a_cancelled_batch_finishes_without_reading() {
        let folder = tempfile::tempdir().unwrap();
        let batch = batch(&folder);
        batch.cancel();
        let device = Device::new(1, None, None).unwrap();
        let first = batch.claim().unwrap();
        assert_eq!(batch.work(first, &mut Transfer::new(), &device), 2);
        assert!(batch.count(2) && batch.outcome().is_ok());
        assert_eq!(device.counters().bytes, 0);
    }

    #[test]
    fn a_batch_in_use_again_forgets_what_it_was_and_takes_no_new_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut batch = batch(&folder);
        let (file, room) = (batch.file().clone(), batch.room());
        let device = Device::new(1, None, None).unwrap();
        batch.note(Err(IoError::OutOfMemory { bytes: 1 }));
        let first = batch.claim().unwrap();
        let count = batch.work(first, &mut Transfer::new(), &device);
        assert!(batch.count(count) && batch.outcome().is_err());
        batch.clear();
        let pages = Arc::new(Pages::new(100).unwrap());
        let read = SlotRead {
            slot: 0,
            offset_bytes: 9,
            len_bytes: 100,
            crc32c: None,
        };
        // SAFETY: the pages belong to the batch alone.
        unsafe { batch.assign((&pages, 100), &file, &[read], Some(0)) };
        assert!(!batch.is_finished() && !batch.is_stopped() && batch.room() == room);
        let first = batch.claim().unwrap();
        assert_eq!(batch.work(first, &mut Transfer::new(), &device), 1);
        assert!(batch.count(1) && batch.outcome().is_ok());
        // SAFETY: the batch is finished.
        assert_eq!(unsafe { pages.bytes(0..100) }, [5; 100]);
        batch.clear();
        assert_eq!(Arc::strong_count(&pages), 1, "a spare batch keeps memory");
    }
}
