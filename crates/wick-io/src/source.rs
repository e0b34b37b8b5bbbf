//! A source checkpoint, mapped read-only: the one memory map of the project.
//!
//! Conversion walks files larger than memory in any order, and page cache is welcome there; at run time it is
//! not, and [`FlashFile`](crate::FlashFile) is used instead.
//!
//! Contract: the file must not be changed or cut short while it is mapped. Nothing can enforce that: another
//! process that writes to it changes the bytes under the reader, and one that truncates it makes the kernel end
//! this process with a bus error on the next touch. Checkpoints are written once and replaced by renaming, which
//! is harmless: the map keeps the old file.

use crate::IoError;
use memmap2::{Mmap, UncheckedAdvice};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A read-only file in memory, paged in as it is touched.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl SourceFile {
    /// Maps the file at `path`, which must stay as it is while mapped (see the module's contract).
    pub fn open(path: &Path) -> Result<Self, IoError> {
        let open_error = |source| IoError::Open {
            path: path.to_owned(),
            source,
        };
        if !std::fs::metadata(path).map_err(open_error)?.is_file() {
            return Err(IoError::NotAFile {
                path: path.to_owned(),
            });
        }
        let file = File::open(path).map_err(open_error)?;
        if file.metadata().map_err(open_error)?.len() == 0 {
            return Ok(Self {
                path: path.to_owned(),
                map: None,
            });
        }
        // SAFETY: the map is private to this value and only read. That the file stays as it is, is the
        // contract stated above, which the user of the converter keeps.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| IoError::Map {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            path: path.to_owned(),
            map: Some(map),
        })
    }

    /// The path given to [`open`](Self::open).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The contents of the file.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Lets the memory of the whole pages inside `range` go; touching them again reads the file again.
    ///
    /// # Panics
    /// When the range is not inside the file.
    pub fn release(&self, range: Range<usize>) {
        let len = self.bytes().len();
        assert!(
            range.start <= range.end && range.end <= len,
            "range {range:?} of {len} bytes"
        );
        let page = rustix::param::page_size();
        let start = range.start.next_multiple_of(page);
        // The file's last page has nothing behind its last byte, so it counts as whole.
        let end = if range.end == len {
            len
        } else {
            range.end / page * page
        };
        if let (Some(map), true) = (&self.map, start < end) {
            // SAFETY: the map is a read-only view of a file: the pages come back with the same bytes.
            // Advice; a refusal changes nothing.
            let _ = unsafe {
                map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_survive_a_release() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("source");
        let bytes: Vec<u8> = (0..100_001u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let source = SourceFile::open(&path).unwrap();
        assert_eq!(source.bytes(), bytes);
        for range in [
            0..0,
            0..1,
            1..100_001,
            5000..9000,
            0..100_001,
            100_001..100_001,
        ] {
            source.release(range);
            assert_eq!(source.bytes(), bytes);
        }
    }

    #[test]
    fn a_release_shrinks_the_resident_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        std::fs::write(&path, vec![1u8; 64 << 20]).unwrap();
        let source = SourceFile::open(&path).unwrap();
        let sum: u64 = source.bytes().iter().map(|&byte| u64::from(byte)).sum();
        assert_eq!(sum, 64 << 20);
        let Some(before) = resident_kib(&path) else {
            return;
        };
        source.release(0..source.bytes().len());
        assert_eq!((before, resident_kib(&path)), (64 << 10, Some(0)));
    }

    /// What of the mapped file is in this process's memory; the process as a whole is busy with other tests.
    fn resident_kib(path: &Path) -> Option<u64> {
        let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let (_, map) = maps.split_once(path.to_str()?)?;
        let value = map.lines().find_map(|line| line.strip_prefix("Rss:"))?;
        value.trim().strip_suffix("kB")?.trim().parse().ok()
    }

    #[test]
    fn odd_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("empty");
        std::fs::write(&path, b"").unwrap();
        let empty = SourceFile::open(&path).unwrap();
        assert!(empty.bytes().is_empty());
        empty.release(0..0);
        assert!(matches!(
            SourceFile::open(folder.path()),
            Err(IoError::NotAFile { .. })
        ));
        assert!(matches!(
            SourceFile::open(&folder.path().join("no")),
            Err(IoError::Open { .. })
        ));
    }
}
