//! What can go wrong between a file and memory.
//!
//! Offsets and lengths are bytes. The operating system's own error is the `source`, not part of the text.

use std::io;
use std::path::PathBuf;

/// Trouble with a file, a device, memory or a setting; never a mistake of the caller, which panics.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// The file is missing or may not be read.
    #[error("cannot open {path}", path = path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The reason given by the operating system.
        source: io::Error,
    },
    /// The path is a directory, a pipe or a device.
    #[error("{path} is not a regular file", path = path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// Direct I/O was required and this file's file system does not offer it.
    #[error("direct I/O is required, but the file system of {path} refuses it", path = path.display())]
    DirectRefused {
        /// The file.
        path: PathBuf,
        /// What the refused call returned.
        source: io::Error,
    },
    /// The device failed while it was read.
    #[error("cannot read {path} at offset {offset_bytes} ({len_bytes} bytes)", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where the read that failed begins.
        offset_bytes: u64,
        /// Length of that read.
        len_bytes: u64,
        /// The reason given by the operating system.
        source: io::Error,
    },
    /// The file is shorter than the read wants it to be.
    #[error(
        "{path} ends before offset {offset_bytes} + {len_bytes} bytes; it had {file_bytes} bytes when opened",
        path = path.display()
    )]
    EndOfFile {
        /// The file.
        path: PathBuf,
        /// Where the read begins.
        offset_bytes: u64,
        /// Length of the read.
        len_bytes: u64,
        /// Length of the file when it was opened.
        file_bytes: u64,
    },
    /// The bytes read are not the bytes that were written.
    #[error(
        "{path} is corrupt at offset {offset_bytes} ({len_bytes} bytes): expected crc32c {expected:#010x}, got {got:#010x}",
        path = path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Where the read begins.
        offset_bytes: u64,
        /// Length of the read.
        len_bytes: u64,
        /// The checksum the caller expects.
        expected: u32,
        /// The checksum of the bytes read.
        got: u32,
    },
    /// The size of a slot buffer does not fit in an address.
    #[error(
        "a buffer of {slot_count} slots of {slot_bytes} bytes is larger than the address space"
    )]
    BufferTooLarge {
        /// Slots asked for.
        slot_count: usize,
        /// Bytes of one slot.
        slot_bytes: usize,
    },
    /// The allocator has no room.
    #[error("cannot allocate {bytes} bytes of memory")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The number of reader threads is zero or absurd.
    #[error("a reader has 1 to {max} threads, got {got}")]
    ThreadCount {
        /// Threads asked for.
        got: usize,
        /// The most that are allowed.
        max: usize,
    },
    /// No engine has this name.
    #[error("no engine is called {got:?}; there are auto, pool and io_uring")]
    EngineName {
        /// The name asked for.
        got: String,
    },
    /// No way of reading has this name.
    #[error("no way of reading is called {got:?}; there are auto, direct and buffered")]
    DirectName {
        /// The name asked for.
        got: String,
    },
    /// The operating system refused a thread.
    #[error("cannot start reader thread {index}")]
    Thread {
        /// Which of the threads, from 0.
        index: usize,
        /// The reason given by the operating system.
        source: io::Error,
    },
    /// A reader thread panicked, which is a bug of this crate; the reads of that ticket are void.
    #[error("a reader thread panicked while reading {path}", path = path.display())]
    WorkerPanicked {
        /// The file being read.
        path: PathBuf,
    },
    /// The file cannot be mapped.
    #[error("cannot map {path} into memory", path = path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// The reason given by the operating system.
        source: io::Error,
    },
}
