//! A file opened to be measured: past the page cache, or through a page cache that is emptied first.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use wick_io::{DirectIo, FlashFile, IoMode};

/// The file, opened in one way.
#[derive(Debug, Serialize)]
pub(crate) struct Access {
    pub(crate) io: &'static str,
    /// How the file is really read.
    effective: String,
    alignment_bytes: usize,
    /// Whether the system took the advice to drop the file's pages; only where they matter.
    cache_dropped: Option<bool>,
    #[serde(skip)]
    pub(crate) file: FlashFile,
    /// Asked to drop the pages.
    #[serde(skip)]
    plain: File,
}

impl Access {
    /// Opens the file for direct reads or none, `IoError::DirectRefused`, or for buffered ones.
    pub(crate) fn open(path: &Path, direct: DirectIo) -> Result<Self> {
        let plain = File::open(path).with_context(|| format!("opening {}", path.display()))?;
        // Pages that a writer left are not dropped, and would be written while others are read.
        let is_synced = plain.sync_all().is_ok();
        let file = FlashFile::open(path, direct)?;
        let is_buffered = file.mode() == IoMode::Buffered;
        Ok(Self {
            io: direct.name(),
            effective: file.mode().to_string(),
            alignment_bytes: file.alignment_bytes(),
            cache_dropped: is_buffered.then(|| is_synced && drop_cached(&plain)),
            file,
            plain,
        })
    }

    /// To be done before each round.
    pub(crate) fn prepare(&self) {
        if self.cache_dropped == Some(true) {
            drop_cached(&self.plain);
        }
    }

    /// How the file is read, in words.
    pub(crate) fn description(&self) -> String {
        let dropped = match self.cache_dropped {
            None => "",
            Some(true) => ", the file's pages also dropped before each round",
            Some(false) => {
                ", but the file's pages could not be dropped before: some reads may be from memory"
            }
        };
        format!("{}{dropped}", self.effective)
    }
}

/// Whether the system took the advice to forget the file's pages.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn drop_cached(file: &File) -> bool {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).is_ok()
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn drop_cached(_file: &File) -> bool {
    false
}
