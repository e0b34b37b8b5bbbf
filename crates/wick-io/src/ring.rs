//! The io_uring engine: one thread that keeps many requests with the kernel at once.
//!
//! Lifecycle of a flight, of which there are as many as requests may be on their way: 1. idle. 2. `start` gives
//! it a claimed run. 3. `send` puts a request into the submission queue; `enter` gives it to the kernel. 4. A
//! completion says that the kernel is done with the memory: `land` sends the next request of the run, or frees
//! the flight for another run and then checks what was read.
//!
//! Invariants:
//! - A flight holds its batch, and so slots and file, from `start` until the completion of its last request.
//!   Whether a ticket is dropped, forgotten or waited for makes no difference to it.
//! - The kernel has no request whenever `work` returns; if `work` panics, nothing may be freed, and the process
//!   ends.
//! - A kernel that begins to refuse entry gets no more requests: those it has not taken are read here instead,
//!   those it has are waited for.

use crate::batch::Batch;
use crate::queue::Queue;
use crate::slow::Verdict;
use crate::transfer::Transfer;
use crate::IoError;
use io_uring::{opcode, types, IoUring};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Between two looks at completions when the kernel cannot be waited for.
const POLL_PAUSE: Duration = Duration::from_millis(1);

pub(crate) struct Ring {
    uring: IoUring,
    flights: Vec<Flight>,
    /// Flights without a run.
    idle: Vec<usize>,
    /// Flights whose request the kernel has not taken yet, in the order of the submission queue.
    unsent: VecDeque<usize>,
    is_refused: bool,
}

struct Flight {
    transfer: Transfer,
    run: Option<(Arc<Batch>, usize)>,
    verdict: Option<Verdict>,
}

impl Ring {
    /// A ring for `depth` requests at once, if the kernel has one and lets this thread use it.
    pub(crate) fn new(depth: usize) -> io::Result<Self> {
        let entries = u32::try_from(depth).map_err(|_| io::ErrorKind::InvalidInput)?;
        // Without interrupting this thread for each completion; older kernels (before 6.0) do not know how.
        let uring = IoUring::builder()
            .setup_coop_taskrun()
            .setup_single_issuer()
            .build(entries)
            .or_else(|_| IoUring::new(entries))?;
        let features = uring.params();
        if !(features.is_feature_nodrop() && features.is_feature_submit_stable()) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let flight = |_| Flight {
            transfer: Transfer::new(),
            run: None,
            verdict: None,
        };
        let mut ring = Self {
            uring,
            flights: (0..depth).map(flight).collect(),
            idle: (0..depth).rev().collect(),
            unsent: VecDeque::with_capacity(depth),
            is_refused: false,
        };
        ring.try_out()?;
        Ok(ring)
    }

    /// Proves by a request that does nothing that the ring may be entered, not only be had.
    fn try_out(&mut self) -> io::Result<()> {
        let nop = opcode::Nop::new().build();
        // SAFETY: a request without memory.
        unsafe { self.uring.submission().push(&nop) }.map_err(io::Error::other)?;
        loop {
            match self.uring.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(_) => break,
            }
        }
        let answer = self.uring.completion().next().map(|entry| entry.result());
        if answer == Some(0) {
            Ok(())
        } else {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    /// The life of the thread: until the reader is gone and all is read, or the kernel refuses the ring.
    pub(crate) fn work(&mut self, queue: &Queue) {
        loop {
            self.fill(queue, true);
            if self.idle.len() == self.flights.len() {
                return;
            }
            self.enter(1, queue);
            self.land_all(queue);
        }
    }

    /// Gives the idle flights runs; may wait for the first if nothing else is to be waited for.
    fn fill(&mut self, queue: &Queue, may_wait: bool) {
        while let Some(&index) = self.idle.last() {
            if self.is_refused {
                return;
            }
            let claimed = if may_wait && self.idle.len() == self.flights.len() {
                queue.claim()
            } else {
                queue.try_claim()
            };
            let Some((batch, run)) = claimed else { return };
            self.idle.pop();
            self.start(index, batch, run, queue);
        }
    }

    /// Begins a run in a flight taken from the idle ones.
    fn start(&mut self, index: usize, batch: Arc<Batch>, run: usize, queue: &Queue) {
        let transfer = &mut self.flights[index].transfer;
        let begun = batch.caught(|| {
            if batch.is_stopped() {
                return Ok(false);
            }
            batch.begin(run, transfer, &queue.device)?;
            Ok(transfer.request().is_some())
        });
        match begun {
            Ok(true) => {
                self.flights[index].run = Some((batch, run));
                self.send(index, queue);
            }
            Ok(false) if batch.is_stopped() => self.release(index, batch, Ok(()), queue),
            Ok(false) => {
                let checked = batch.caught(|| batch.check(run));
                self.release(index, batch, checked, queue);
            }
            Err(error) => self.release(index, batch, Err(error), queue),
        }
    }

    /// Makes a flight idle and settles its run.
    fn release(
        &mut self,
        index: usize,
        batch: Arc<Batch>,
        result: Result<(), IoError>,
        queue: &Queue,
    ) {
        self.idle.push(index);
        batch.note(result);
        queue.settle(batch, 1);
    }

    /// Reads and checks here what is left of the run of a flight.
    fn read_here(&mut self, index: usize, batch: Arc<Batch>, run: usize, queue: &Queue) {
        let transfer = &mut self.flights[index].transfer;
        let result = batch.caught(|| {
            batch.read(run, transfer, &queue.device)?;
            batch.check(run)
        });
        self.release(index, batch, result, queue);
    }

    /// Puts the next request of a flight into the submission queue.
    fn send(&mut self, index: usize, queue: &Queue) {
        let flight = &mut self.flights[index];
        let (Some((batch, _)), Some((pieces, at_bytes))) = (&flight.run, flight.transfer.request())
        else {
            return;
        };
        flight.verdict = queue.device.admit(pieces, at_bytes);
        let descriptor = types::Fd(batch.file().descriptor());
        let request = opcode::Readv::new(descriptor, pieces.as_ptr(), pieces.len() as u32)
            .offset(at_bytes)
            .build()
            .user_data(index as u64);
        // SAFETY: the flight keeps the list of pieces, their memory and the file until the completion.
        let pushed = unsafe { self.uring.submission().push(&request) };
        pushed.expect("the queue has an entry for each flight, and a flight has one request");
        self.unsent.push_back(index);
    }

    /// Gives the kernel what is in the submission queue and waits for `wanted` completions.
    fn enter(&mut self, wanted: usize, queue: &Queue) {
        if self.is_refused {
            std::thread::sleep(POLL_PAUSE);
            return;
        }
        let entered = self.uring.submit_and_wait(wanted);
        let left = self.uring.submission().len();
        while self.unsent.len() > left {
            self.unsent.pop_front();
        }
        match entered.map_err(|error| Errno::from_io_error(&error)) {
            Ok(_) | Err(Some(Errno::INTR)) => {}
            // Short of memory, or completions to be taken first.
            Err(Some(Errno::AGAIN | Errno::BUSY | Errno::NOMEM)) => std::thread::sleep(POLL_PAUSE),
            Err(_) => self.recall(queue),
        }
    }

    /// Stops using the kernel's ring: reads here what is still in the submission queue.
    fn recall(&mut self, queue: &Queue) {
        self.is_refused = true;
        while let Some(index) = self.unsent.pop_front() {
            if let Some((batch, run)) = self.flights[index].run.take() {
                self.read_here(index, batch, run, queue);
            }
        }
    }

    /// Takes all completions there are.
    fn land_all(&mut self, queue: &Queue) {
        loop {
            let Some(entry) = self.uring.completion().next() else {
                return;
            };
            self.land(entry.user_data() as usize, entry.result(), queue);
        }
    }

    /// Takes the answer to the request of a flight.
    fn land(&mut self, index: usize, result: i32, queue: &Queue) {
        let flight = &mut self.flights[index];
        let Some((batch, run)) = flight.run.take() else {
            return;
        };
        let answer = usize::try_from(result)
            .map_err(|_| io::Error::from_raw_os_error(result.saturating_neg()));
        let transfer = &mut flight.transfer;
        let verdict = flight.verdict.take();
        let accepted = batch.caught(|| {
            let pieces = transfer.request().map_or(&[][..], |(pieces, _)| pieces);
            // SAFETY: the kernel is done with the request, and the run is this flight's.
            let answer = unsafe { queue.device.judge(verdict, pieces, answer) };
            // SAFETY: as above; the transfer began with this run.
            unsafe { batch.accept(run, transfer, answer) }
        });
        match accepted {
            Err(error) => self.release(index, batch, Err(error), queue),
            Ok(()) if transfer.request().is_none() => self.land_whole(index, batch, run, queue),
            Ok(()) if batch.is_stopped() => self.release(index, batch, Ok(()), queue),
            Ok(()) if self.is_refused => self.read_here(index, batch, run, queue),
            Ok(()) => {
                flight.run = Some((batch, run));
                self.send(index, queue);
            }
        }
    }

    /// Sends the next run on its way before checking the one that is read, so that the device does not wait for
    /// the checks.
    fn land_whole(&mut self, index: usize, batch: Arc<Batch>, run: usize, queue: &Queue) {
        self.idle.push(index);
        self.fill(queue, false);
        if 4 * self.unsent.len() >= self.flights.len() {
            self.enter(0, queue);
        }
        batch.note(batch.caught(|| batch.check(run)));
        queue.settle(batch, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::pages::Pages;
    use crate::plan::SlotRead;
    use crate::{DirectIo, Engine, FlashFile, Reader, ReaderOptions, SlotBuffer};

    const COUNT: usize = 40;
    const BYTES: usize = 4096;

    fn file(folder: &tempfile::TempDir) -> FlashFile {
        let path = folder.path().join("records");
        let bytes: Vec<u8> = (0..3 * COUNT * BYTES).map(|i| (i / BYTES) as u8).collect();
        std::fs::write(&path, bytes).unwrap();
        FlashFile::open(&path, DirectIo::Preferred).unwrap()
    }

    /// Every third record, so that none share a request.
    fn reads() -> Vec<SlotRead> {
        let read = |slot| SlotRead {
            slot,
            offset_bytes: (3 * slot * BYTES) as u64,
            len_bytes: BYTES,
            crc32c: None,
        };
        (0..COUNT).map(read).collect()
    }

    #[test]
    fn the_ring_is_used_where_there_is_one() {
        let reader = Reader::with_options(&ReaderOptions {
            engine: Engine::Uring,
            ..ReaderOptions::default()
        });
        let is_there = Ring::new(2).is_ok();
        assert_eq!(reader.unwrap().engine() == Engine::Uring, is_there);
    }

    /// A kernel that begins to refuse the ring while some requests are with it, some not sent, some not begun.
    #[test]
    fn a_ring_that_is_refused_later_loses_nothing() {
        let folder = tempfile::tempdir().unwrap();
        for sent in [0, 3] {
            // Nothing to be tested where the kernel has no ring.
            let Ok(mut ring) = Ring::new(8) else { return };
            let queue = Queue::new(Device::new(8, Some(0), None).unwrap());
            let pages = Arc::new(Pages::new(COUNT * BYTES).unwrap());
            let mut batch = Batch::default();
            // SAFETY: nobody else touches the pages before `wait` has returned; slots do not overlap.
            unsafe { batch.assign((&pages, BYTES), &file(&folder), &reads(), Some(0)) };
            let batch = Arc::new(batch);
            queue.push(Arc::clone(&batch));
            queue.stop();
            if sent > 0 {
                ring.fill(&queue, true);
                ring.enter(sent, &queue);
                let entry = ring.uring.completion().next().unwrap();
                ring.land(entry.user_data() as usize, entry.result(), &queue);
            }
            ring.fill(&queue, true);
            ring.recall(&queue);
            ring.work(&queue);
            assert_eq!(ring.idle.len(), 8);
            drop(ring);
            queue.work(Transfer::new());
            queue.wait(&batch);
            queue.recycle(batch).unwrap();
            for slot in 0..COUNT {
                // SAFETY: the batch is finished.
                let bytes = unsafe { pages.bytes(slot * BYTES..(slot + 1) * BYTES) };
                assert!(bytes.iter().all(|&byte| byte == (3 * slot) as u8));
            }
        }
    }

    /// Where system calls are filtered, as in many containers, the pool does the work.
    #[test]
    fn a_kernel_that_refuses_the_ring_gets_the_pool() {
        let folder = tempfile::tempdir().unwrap();
        let file = file(&folder);
        for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter] {
            let file = file.clone();
            let thread = std::thread::spawn(move || {
                forbid(call);
                let reader = Reader::with_options(&ReaderOptions {
                    engine: Engine::Uring,
                    depth: 4,
                    ..ReaderOptions::default()
                });
                let reader = reader.unwrap();
                assert_eq!((reader.engine(), reader.threads()), (Engine::Pool, 4));
                let buffer = SlotBuffer::new(COUNT, BYTES).unwrap();
                let (buffer, outcome) = reader.submit(buffer, &file, &reads()).wait();
                outcome.unwrap();
                assert_eq!(buffer.slot(7), [21; BYTES]);
            });
            thread.join().unwrap();
        }
    }

    /// Makes a system call fail with `EPERM` for this thread and those it starts.
    fn forbid(call: libc::c_long) {
        let step = |code: u32, jt, jf, k| libc::sock_filter {
            code: code as u16,
            jt,
            jf,
            k,
        };
        let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
        let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        let answer = libc::BPF_RET | libc::BPF_K;
        let mut steps = [
            step(load, 0, 0, 0),
            step(equal, 0, 1, call as u32),
            step(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog {
            len: steps.len() as u16,
            filter: steps.as_mut_ptr(),
        };
        // SAFETY: the program is valid during the call; the kernel copies it. The filter ends with the thread.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    std::ptr::from_ref(&program),
                ) == 0
        };
        assert!(done, "{}", io::Error::last_os_error());
    }
}
