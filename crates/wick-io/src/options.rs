//! How a reader reads: by which engine, how much at once, and across which gaps.

use crate::plan::RUN_BYTES_MAX;
use crate::probe::EngineProbe;
use crate::slow::SlowDiskOptions;
use crate::{FlashFile, IoError};
use std::fmt;

/// Requests in flight where nothing else is asked for.
const DEPTH: usize = 32;

/// Most bytes read for nothing where nothing else is asked for. Where it was measured (`docs/bench/io.md`), one
/// request was cheaper than two up to this gap and about even at 12 to 16 KiB.
pub(crate) const GAP_BYTES: usize = 8192;

/// Who makes the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// The one that a trial on a file prefers, see [`ReaderOptions::probe`]; without a trial the pool.
    #[default]
    Auto,
    /// As many threads as requests in flight, each waiting for its own.
    Pool,
    /// One thread and the kernel's io_uring; where there is none, or it may not be used, the pool.
    Uring,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Pool => "pool",
            Self::Uring => "io_uring",
        })
    }
}

/// Everything that can be chosen about a [`Reader`](crate::Reader).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReaderOptions {
    /// Who makes the requests.
    pub engine: Engine,
    /// Most requests in flight, 1 to [`READER_THREADS_MAX`](crate::READER_THREADS_MAX).
    pub depth: usize,
    /// Most bytes read for nothing so that two reads share a request; 256 KiB and above are alike.
    pub gap_bytes: usize,
    /// A worse disk to pretend; `None` for the one there is.
    pub slow_disk: Option<SlowDiskOptions>,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            engine: Engine::Auto,
            depth: DEPTH,
            gap_bytes: GAP_BYTES,
            slow_disk: None,
        }
    }
}

impl ReaderOptions {
    /// These options with [`Engine::Auto`] replaced by the engine that a trial of some 50 ms on `file` prefers.
    /// Other engines are left as they are, without a trial.
    pub fn probe(mut self, file: &FlashFile) -> Result<Self, IoError> {
        if self.engine == Engine::Auto {
            self.engine = EngineProbe::run(file, &self)?.choice();
        }
        Ok(self)
    }

    pub(crate) fn gap_bytes(&self) -> usize {
        self.gap_bytes.min(RUN_BYTES_MAX)
    }
}
