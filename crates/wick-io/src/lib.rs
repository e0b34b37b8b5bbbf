//! Bytes of files into aligned memory: direct I/O by a pool of threads or io_uring.
//!
//! A [`FlashFile`] is a file opened so that reading it leaves the page cache alone. A [`SlotBuffer`] is memory
//! cut into slots of one size. A [`Reader`] takes the buffer, fills the slots named by a list of [`SlotRead`]s
//! and hands the buffer back through a [`Ticket`]. A [`SourceFile`] is a mapped file for conversion, where the
//! page cache is welcome. [`peak_rss_bytes`] and its siblings say what all of it costs.
//!
//! ```
//! use wick_io::{DirectIo, FlashFile, Reader, SlotBuffer, SlotRead};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("neurons");
//! # std::fs::write(&path, vec![7u8; 20_000])?;
//! let file = FlashFile::open(&path, DirectIo::Preferred)?;
//! let reader = Reader::new(4)?;
//! let buffer = SlotBuffer::new(2, 4096)?;
//! let read = SlotRead { slot: 1, offset_bytes: 8192, len_bytes: 4096, crc32c: None };
//! let (buffer, outcome) = reader.submit(buffer, &file, &[read]).wait();
//! outcome?;
//! assert_eq!(buffer.slot(1), [7u8; 4096]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Units: offsets and lengths are bytes; a slot is an index.
//!
//! Invariants:
//! - Memory that a reading thread or the kernel may write is owned by the reader until [`Ticket::wait`] returns
//!   it; no rule rests on a destructor, so a ticket may be dropped or forgotten.
//! - All memory is initialised when it is allocated: no byte of a slot is ever undefined, whatever fails.
//! - Reading the same again allocates nothing: what a submit needed is kept for the next, without the slots and the
//!   file it was for. What a reader keeps is bounded, see `reader.rs`.
//! - Trouble with a file, a device or a setting is an [`IoError`] that names the file; a caller's mistake is a panic.
//!
//! Platforms: Unix. Direct I/O is `O_DIRECT` on Linux and `F_NOCACHE` on macOS; elsewhere reads are buffered. The
//! io_uring engine is for Linux; elsewhere, and where the kernel refuses it, the pool takes its place.
//!
//! Not here: what the bytes mean (`wick-format`), which of them are wanted (`candle-wick`).

mod batch;
mod buffer;
mod cgroup;
mod device;
mod error;
mod file;
mod huge;
mod memory;
mod options;
mod pages;
mod plan;
mod probe;
mod queue;
mod reader;
mod release;
#[cfg(target_os = "linux")]
mod ring;
mod slice;
mod slow;
mod source;
#[cfg(test)]
mod tests;
mod ticket;
mod transfer;

pub use buffer::SlotBuffer;
pub use cgroup::cpu_quota;
pub use device::IoCounters;
pub use error::IoError;
pub use file::{DirectIo, FlashFile, IoMode};
pub use huge::advise_huge_pages;
pub use memory::{
    available_memory_bytes, current_rss_bytes, memory_limits, peak_rss_bytes, release_free_heap,
    share_one_heap, total_memory_bytes, MemoryLimit,
};
pub use options::{Engine, ReaderOptions};
pub use plan::{SlotRead, RUN_BYTES_MAX};
pub use probe::{EngineProbe, EngineRate};
pub use reader::{
    try_uring, Reader, READER_BOUNCE_BYTES, READER_THREADS_MAX, READER_THREAD_BYTES_MAX,
};
pub use release::{release_to_zeros, release_zeros};
pub use slow::SlowDiskOptions;
pub use source::SourceFile;
pub use ticket::Ticket;
