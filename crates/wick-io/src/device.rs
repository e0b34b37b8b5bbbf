//! The device as all requests of a reader meet it: counted, and slowed down where a test asks for it.
//!
//! Both engines pass here twice a request: `admit` before the device is asked, `judge` with its answer. The memory
//! that they need beside the slots is here too: a sink for all, and a bounce buffer for each request in flight.

use crate::file::FlashFile;
use crate::pages::Pages;
use crate::plan::RUN_BYTES_MAX;
use crate::slow::{SlowDisk, SlowDiskOptions, Verdict};
use crate::IoError;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What a reader got from the device since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounters {
    /// Bytes, with what was read only for alignment or to bridge a gap.
    pub bytes: u64,
    /// Read calls.
    pub requests: u64,
}

pub(crate) struct Device {
    bytes: AtomicU64,
    requests: AtomicU64,
    slow: Option<SlowDisk>,
    /// Where the bytes between two parts of a run go. Written by several requests at once, read by nobody.
    pub(crate) sink: Pages,
    bounces: Mutex<Bounces>,
}

/// Bounce buffers that no transfer has taken yet.
struct Bounces {
    spare: Vec<Pages>,
    missing_count: usize,
}

impl Device {
    /// A device of at most `depth` requests in flight, over gaps of at most `gap_bytes` if any.
    pub(crate) fn new(
        depth: usize,
        gap_bytes: Option<usize>,
        slow: Option<SlowDiskOptions>,
    ) -> Result<Self, IoError> {
        Ok(Self {
            bytes: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            slow: slow.map(SlowDisk::new),
            sink: Pages::new(gap_bytes.unwrap_or(0))?,
            bounces: Mutex::new(Bounces {
                spare: Vec::new(),
                missing_count: depth,
            }),
        })
    }

    /// A bounce buffer for a transfer to keep. The first that is asked for brings those of all other requests in
    /// flight with it: which thread meets an unaligned read when is chance, and later submits are to allocate
    /// nothing.
    pub(crate) fn bounce(&self) -> Result<Pages, IoError> {
        let mut bounces = self.bounces.lock().unwrap_or_else(PoisonError::into_inner);
        while bounces.missing_count > 0 {
            bounces.spare.push(Pages::new(RUN_BYTES_MAX)?);
            bounces.missing_count -= 1;
        }
        // There are more transfers than that only where the pool takes the place of a ring.
        let spare = bounces.spare.pop();
        spare.map_or_else(|| Pages::new(RUN_BYTES_MAX), Ok)
    }

    pub(crate) fn counters(&self) -> IoCounters {
        IoCounters {
            bytes: self.bytes.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
        }
    }

    /// Decides what becomes of a request that is about to be made; `None` on a device left alone.
    pub(crate) fn admit(&self, pieces: &[libc::iovec], offset_bytes: u64) -> Option<Verdict> {
        let slow = self.slow.as_ref()?;
        let len_bytes = pieces.iter().map(|piece| piece.iov_len).sum();
        Some(slow.admit(offset_bytes, len_bytes))
    }

    /// The answer to the request, as the caller is to see it.
    ///
    /// # Safety
    /// - `pieces` is the memory of a finished request, which nothing else reads or writes but a sink.
    pub(crate) unsafe fn judge(
        &self,
        verdict: Option<Verdict>,
        pieces: &[libc::iovec],
        answer: io::Result<usize>,
    ) -> io::Result<usize> {
        let answer = match verdict {
            None => answer,
            // SAFETY: as promised by the caller.
            Some(verdict) => unsafe { verdict.execute(pieces, self.sink.raw(), answer) },
        };
        if let Ok(got_bytes) = answer {
            self.requests.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add(got_bytes as u64, Ordering::Relaxed);
        }
        answer
    }

    /// One request, waited for on this thread.
    ///
    /// # Safety
    /// - Nothing else reads or writes the memory of `pieces` during the call, but for a sink.
    pub(crate) unsafe fn read(
        &self,
        file: &FlashFile,
        pieces: &[libc::iovec],
        offset_bytes: u64,
    ) -> io::Result<usize> {
        let verdict = self.admit(pieces, offset_bytes);
        // SAFETY: as promised by the caller.
        let answer = unsafe { file.preadv(pieces, offset_bytes) };
        // SAFETY: the request above is finished.
        unsafe { self.judge(verdict, pieces, answer) }
    }
}
