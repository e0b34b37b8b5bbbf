//! A worse disk than the one at hand, for tests and for trying out what a slower one would do.
//!
//! The true device is always asked; its answer is held back, cut short or replaced. What a shortened answer
//! did not admit to is overwritten, so that code which forgets to read the rest gets wrong bytes.

use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Written over the bytes that a shortened read pretends not to have read.
const SCRIBBLE: u8 = 0xe7;
/// A shortened read stops at a multiple of this, as a device would.
const STOP_BYTES: usize = 512;

/// How much worse; the default is not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlowDiskOptions {
    /// Most bytes a second, over all requests.
    pub bytes_per_s: Option<NonZeroU64>,
    /// Added to each request.
    pub latency: Duration,
    /// Every so manieth request of more than 512 bytes stops half way; 0 for none.
    pub short_every: u32,
    /// Every so manieth request is not done and asked to come again, by `EINTR` and `EAGAIN` in turn; 0 for none.
    pub busy_every: u32,
    /// Requests that touch these bytes of a file fail with `EIO`.
    pub broken_bytes: Range<u64>,
}

/// A [`SlowDiskOptions`] at work.
pub(crate) struct SlowDisk {
    options: SlowDiskOptions,
    state: Mutex<State>,
}

struct State {
    request_count: u64,
    /// When the last byte asked for so far will have passed.
    free_at: Instant,
}

/// What becomes of one request.
pub(crate) struct Verdict {
    answer_at: Instant,
    fate: Fate,
}

enum Fate {
    Spared,
    Short { max_bytes: usize },
    Refused(rustix::io::Errno),
}

impl SlowDisk {
    pub(crate) fn new(options: SlowDiskOptions) -> Self {
        let (request_count, free_at) = (0, Instant::now());
        Self {
            options,
            state: Mutex::new(State {
                request_count,
                free_at,
            }),
        }
    }

    pub(crate) fn admit(&self, offset_bytes: u64, len_bytes: usize) -> Verdict {
        let options = &self.options;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.request_count += 1;
        let count = state.request_count;
        let is_turn = |every: u32| every != 0 && count.is_multiple_of(u64::from(every));
        let broken = &options.broken_bytes;
        let is_broken = !broken.is_empty()
            && offset_bytes < broken.end
            && broken.start < offset_bytes.saturating_add(len_bytes as u64);
        let fate = if is_turn(options.busy_every) {
            let turn = count / u64::from(options.busy_every);
            Fate::Refused(if turn.is_multiple_of(2) {
                rustix::io::Errno::AGAIN
            } else {
                rustix::io::Errno::INTR
            })
        } else if is_broken {
            Fate::Refused(rustix::io::Errno::IO)
        } else if is_turn(options.short_every) && len_bytes > STOP_BYTES {
            Fate::Short {
                max_bytes: (len_bytes / 2).next_multiple_of(STOP_BYTES),
            }
        } else {
            Fate::Spared
        };
        let now = Instant::now();
        if let Some(rate) = options.bytes_per_s {
            let passing = Duration::from_secs_f64(len_bytes as f64 / rate.get() as f64);
            state.free_at = state.free_at.max(now) + passing;
        }
        Verdict {
            answer_at: state.free_at.max(now) + options.latency,
            fate,
        }
    }
}

impl Verdict {
    /// Waits until the answer is due and makes it the one decided upon.
    ///
    /// # Safety
    /// - `pieces` is the memory of a finished request; nothing else reads or writes it but what lies in `sink`.
    pub(crate) unsafe fn execute(
        self,
        pieces: &[libc::iovec],
        sink: *const [u8],
        answer: io::Result<usize>,
    ) -> io::Result<usize> {
        std::thread::sleep(self.answer_at.saturating_duration_since(Instant::now()));
        match (self.fate, answer) {
            (Fate::Refused(errno), _) => Err(errno.into()),
            (Fate::Short { max_bytes }, Ok(got_bytes)) if got_bytes > max_bytes => {
                let sink = sink.cast::<u8>()..sink.cast::<u8>().wrapping_add(sink.len());
                let mut at = 0;
                for piece in pieces {
                    let base = piece.iov_base.cast::<u8>();
                    let kept = max_bytes.saturating_sub(at).min(piece.iov_len);
                    if !sink.contains(&base.cast_const()) {
                        // SAFETY: behind `kept` bytes of this piece, inside it; ours by the caller's promise.
                        unsafe { base.add(kept).write_bytes(SCRIBBLE, piece.iov_len - kept) };
                    }
                    at += piece.iov_len;
                }
                Ok(max_bytes)
            }
            (_, answer) => answer,
        }
    }
}
