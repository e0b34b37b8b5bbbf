//! How the files of a folder are read: past the page cache or not, how much at once, and by whom.

use wick_io::{DirectIo, Engine, FlashFile, Reader, ReaderOptions, SlowDiskOptions};

use crate::error::Result;

/// Files from this size on are worth a trial of the engines, which reads some 50 MB.
const TRIAL_FILE_BYTES: u64 = 1 << 30;

/// How files are read.
#[derive(Clone, Debug)]
pub struct IoOptions {
    /// Whether reads bypass the page cache.
    pub direct: DirectIo,
    /// Reads in flight at most; also the pool's threads.
    pub threads: usize,
    /// Who makes the requests; `Auto` tries both on a large file when the folder is opened.
    pub engine: Engine,
    /// Whether neighbouring records share a request; only measurements want it off.
    pub coalesce: bool,
    /// Most bytes read for nothing so that two records share a request.
    pub gap_bytes: usize,
    /// A worse disk to pretend: for tests.
    pub slow_disk: Option<SlowDiskOptions>,
}

impl Default for IoOptions {
    /// Direct where the filesystem allows it, 32 reads in flight (the paper's number).
    fn default() -> Self {
        let reader = ReaderOptions::default();
        Self {
            direct: DirectIo::Preferred,
            threads: reader.depth,
            engine: Engine::Auto,
            coalesce: true,
            gap_bytes: reader.gap_bytes,
            slow_disk: None,
        }
    }
}

impl IoOptions {
    /// A reader for these files. A trial of engines takes longer than reading small ones.
    pub(crate) fn reader<'a>(&self, files: impl Iterator<Item = &'a FlashFile>) -> Result<Reader> {
        let options = ReaderOptions {
            engine: self.engine,
            depth: self.threads,
            coalesce: self.coalesce,
            gap_bytes: self.gap_bytes,
            slow_disk: self.slow_disk.clone(),
        };
        let largest = files.max_by_key(|file| file.len_bytes());
        let options = match largest {
            Some(file) if file.len_bytes() >= TRIAL_FILE_BYTES => options.probe(file)?,
            _ => options,
        };
        Ok(Reader::with_options(&options)?)
    }
}
