//! How a reader reads: by which engine, how much at once, and across which gaps.

use crate::plan::RUN_BYTES_MAX;
use crate::probe::EngineProbe;
use crate::slow::SlowDiskOptions;
use crate::{FlashFile, IoError};
use std::fmt;
use std::str::FromStr;

/// Requests in flight where nothing else is asked for.
const DEPTH: usize = 32;

/// Most bytes read for nothing where nothing else is asked for. Where it was measured (`docs/bench/io.md`), one
/// request was cheaper than two up to this gap and about even at 12 to 16 KiB.
const GAP_BYTES: usize = 8192;

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

/// By the name it prints as; `uring` for short.
impl FromStr for Engine {
    type Err = IoError;

    fn from_str(name: &str) -> Result<Self, IoError> {
        match name {
            "auto" => Ok(Self::Auto),
            "pool" => Ok(Self::Pool),
            "uring" | "io_uring" => Ok(Self::Uring),
            _ => Err(IoError::EngineName {
                got: name.to_owned(),
            }),
        }
    }
}

/// Everything that can be chosen about a [`Reader`](crate::Reader).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReaderOptions {
    /// Who makes the requests.
    pub engine: Engine,
    /// Most requests in flight, 1 to [`READER_THREADS_MAX`](crate::READER_THREADS_MAX).
    pub depth: usize,
    /// Whether reads may share a request. `false` makes one request of each read, neighbours or not (and several of
    /// one longer than 1 MiB, as always), to measure what sharing brings.
    pub coalesce: bool,
    /// Most bytes read for nothing so that two reads share a request; 256 KiB and above are alike. Of no account
    /// without `coalesce`.
    pub gap_bytes: usize,
    /// A worse disk to pretend; `None` for the one there is.
    pub slow_disk: Option<SlowDiskOptions>,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            engine: Engine::Auto,
            depth: DEPTH,
            coalesce: true,
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

    /// The gap limit in force; `None` where no two reads share a request.
    pub(crate) fn gap_limit_bytes(&self) -> Option<usize> {
        self.coalesce.then(|| self.gap_bytes.min(RUN_BYTES_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_have_the_names_they_print_as() {
        for engine in [Engine::Auto, Engine::Pool, Engine::Uring] {
            assert_eq!(engine.to_string().parse::<Engine>().unwrap(), engine);
        }
        assert_eq!("uring".parse::<Engine>().unwrap(), Engine::Uring);
        for name in ["", "Pool", " pool", "aio\n"] {
            let error = name.parse::<Engine>().unwrap_err();
            assert!(matches!(&error, IoError::EngineName { got } if got == name));
            let text = error.to_string();
            assert!(text.contains(&format!("{name:?}")), "{text}");
            assert!(
                ["auto", "pool", "io_uring"]
                    .iter()
                    .all(|known| text.contains(known)),
                "{text}"
            );
        }
    }
}
