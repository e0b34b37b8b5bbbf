//! The output folder: files appear in it whole or not at all.
//!
//! A file is written as `.<name>.partial`, hashed on the way, flushed to the disk, then renamed,
//! and the folder is flushed too. Whatever goes wrong before the rename, the partial file is
//! removed.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use wick_format::{FileEntry, FileHasher};

use crate::ConvertError;

/// Room that is left for the manifest, the state and the file system's own needs.
const SPARE_BYTES: u64 = 1 << 20;

/// A folder that this process alone writes to.
pub(crate) struct OutputFolder {
    path: PathBuf,
    /// Open for the lock and for flushing.
    handle: File,
    created: bool,
}

impl OutputFolder {
    /// Opens the folder, makes it when needed, and proves that it can be written to.
    pub(crate) fn open(path: &Path) -> Result<Self, ConvertError> {
        let created = !path.exists();
        fs::create_dir_all(path).map_err(ConvertError::io(path, "create"))?;
        let handle = File::open(path).map_err(ConvertError::io(path, "open"))?;
        if let Err(TryLockError::WouldBlock) = handle.try_lock() {
            // Other errors: a file system without locks, where the user has to take care.
            return Err(ConvertError::output(
                path,
                "is being written by another conversion",
            ));
        }
        let folder = Self {
            path: path.to_path_buf(),
            handle,
            created,
        };
        let probe = folder.partial_path("probe");
        File::create(&probe).map_err(ConvertError::io(path, "write to"))?;
        fs::remove_file(&probe).map_err(ConvertError::io(path, "write to"))?;
        Ok(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn partial_path(&self, name: &str) -> PathBuf {
        self.path.join(partial_name(name))
    }

    /// Writes a file of `size_bytes` bytes under `name`.
    pub(crate) fn write_file(
        &self,
        name: &str,
        size_bytes: u64,
        content: impl FnOnce(&mut OutputFile) -> Result<(), ConvertError>,
    ) -> Result<FileEntry, ConvertError> {
        let target = self.path.join(name);
        let mut file = OutputFile::create(self.partial_path(name), &target, size_bytes)?;
        content(&mut file)?;
        let entry = file.finish(name)?;
        self.flush()?;
        Ok(entry)
    }

    /// Removes a file that this program wrote, if it is there.
    pub(crate) fn remove_file(&self, name: &str) -> Result<(), ConvertError> {
        let path = self.path.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(ConvertError::io(&path, "remove")(error))
            }
            _ => self.flush(),
        }
    }

    fn flush(&self) -> Result<(), ConvertError> {
        self.handle
            .sync_all()
            .map_err(ConvertError::io(&self.path, "flush"))
    }

    /// Refuses early when the file system has no room for `needed_bytes` more.
    pub(crate) fn check_room(&self, needed_bytes: u64) -> Result<(), ConvertError> {
        let needed_bytes = needed_bytes.saturating_add(SPARE_BYTES);
        match free_bytes(&self.path) {
            Some(free) if free < needed_bytes => Err(ConvertError::DiskFull {
                path: self.path.clone(),
                needed_bytes,
                free_bytes: Some(free),
            }),
            _ => Ok(()),
        }
    }

    /// After a failure: a folder that was made for nothing goes away. Only an empty one can be
    /// removed.
    pub(crate) fn undo(&self) {
        if self.created {
            let _still_used = fs::remove_dir(&self.path);
        }
    }
}

/// Bytes that a file in `folder` may have, where the file system says so.
pub(crate) fn room_bytes(folder: &Path) -> Option<u64> {
    free_bytes(folder).map(|free| free.saturating_sub(SPARE_BYTES))
}

#[cfg(unix)]
fn free_bytes(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

#[cfg(not(unix))]
fn free_bytes(_path: &Path) -> Option<u64> {
    None
}

/// Name under which `name` is written.
pub(crate) fn partial_name(name: &str) -> String {
    format!(".{name}.partial")
}

/// A file under its temporary name; removed when dropped unfinished.
pub(crate) struct OutputFile {
    file: File,
    partial: PathBuf,
    target: PathBuf,
    hasher: FileHasher,
    written_bytes: u64,
    size_bytes: u64,
    finished: bool,
}

impl OutputFile {
    fn create(partial: PathBuf, target: &Path, size_bytes: u64) -> Result<Self, ConvertError> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&partial)
            .map_err(|error| write_error(target, size_bytes, error))?;
        let (hasher, target) = (FileHasher::new(), target.to_path_buf());
        Ok(Self {
            file,
            partial,
            target,
            hasher,
            written_bytes: 0,
            size_bytes,
            finished: false,
        })
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.file
            .write_all(bytes)
            .map_err(|error| write_error(&self.target, self.size_bytes, error))?;
        self.hasher.update(bytes);
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }

    fn finish(mut self, name: &str) -> Result<FileEntry, ConvertError> {
        assert_eq!(
            self.written_bytes, self.size_bytes,
            "{name}: not the planned size"
        );
        let fail = |error| write_error(&self.target, self.size_bytes, error);
        self.file.sync_all().map_err(fail)?;
        fs::rename(&self.partial, &self.target).map_err(fail)?;
        self.finished = true;
        let (name, xxh3) = (name.to_string(), self.hasher.hex());
        Ok(FileEntry {
            name,
            size_bytes: self.size_bytes,
            xxh3,
        })
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if !self.finished {
            let _gone = fs::remove_file(&self.partial); // a leftover is harmless: rewritten next time
        }
    }
}

/// A refused write, a full disk as such.
fn write_error(path: &Path, needed_bytes: u64, error: io::Error) -> ConvertError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            let free_bytes = path.parent().and_then(free_bytes);
            ConvertError::DiskFull {
                path: path.to_path_buf(),
                needed_bytes,
                free_bytes,
            }
        }
        _ => ConvertError::io(path, "write")(error),
    }
}

/// Name, size and hash of a file, read in pieces; `on_piece` is told the length of each.
pub(crate) fn hash_file(
    path: &Path,
    name: &str,
    on_piece: impl Fn(u64),
) -> Result<FileEntry, ConvertError> {
    let mut hasher = FileHasher::new();
    let mut size_bytes = 0;
    read_pieces(path, |piece| {
        hasher.update(piece);
        size_bytes += piece.len() as u64;
        on_piece(piece.len() as u64);
        Ok(())
    })?;
    Ok(FileEntry {
        name: name.into(),
        size_bytes,
        xxh3: hasher.hex(),
    })
}

/// Reads a file from start to end in pieces of 4 MiB.
pub(crate) fn read_pieces(
    path: &Path,
    mut on_piece: impl FnMut(&[u8]) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    let mut file = File::open(path).map_err(ConvertError::io(path, "read"))?;
    let mut piece = vec![0; 4 << 20];
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(len) => on_piece(&piece[..len])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ConvertError::io(path, "read")(error)),
        }
    }
}

/// Refuses an output folder that is the source itself, or lies in it.
pub(crate) fn refuse_inside(source: &Path, out: &Path) -> Result<(), ConvertError> {
    let source = fs::canonicalize(source).map_err(ConvertError::io(source, "read"))?;
    let kind = if source.is_dir() { "folder" } else { "file" };
    let out_real = real_path(out)?;
    let place = if out_real == source {
        format!("is the source {kind} itself")
    } else if out_real.starts_with(&source) {
        format!("lies in the source {kind}, which is only read")
    } else {
        return Ok(());
    };
    Err(ConvertError::output(out, place + ": choose another one"))
}

/// The absolute path without links, of a folder that need not exist yet.
fn real_path(path: &Path) -> Result<PathBuf, ConvertError> {
    let absolute = std::path::absolute(path).map_err(ConvertError::io(path, "resolve"))?;
    let mut real = PathBuf::new();
    for component in absolute.components() {
        match component {
            Component::ParentDir => {
                real.pop();
            }
            other => real.push(other),
        }
        if let Ok(resolved) = fs::canonicalize(&real) {
            real = resolved;
        }
    }
    Ok(real)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named_as_such() {
        let full = PathBuf::from("/dev/full");
        if !full.exists() {
            eprintln!("skipped: this system has no /dev/full");
            return;
        }
        let mut file = OutputFile {
            file: OpenOptions::new().write(true).open(&full).unwrap(),
            partial: PathBuf::from("/nonexistent/.x.partial"),
            target: PathBuf::from("nowhere/x"),
            hasher: FileHasher::new(),
            written_bytes: 0,
            size_bytes: 1234,
            finished: false,
        };
        let error = file.write(&[0; 64]).unwrap_err();
        assert!(
            matches!(
                &error,
                ConvertError::DiskFull {
                    needed_bytes: 1234,
                    ..
                }
            ),
            "{error}"
        );
        assert!(error
            .to_string()
            .starts_with("no room on the disk for nowhere/x: 1234 bytes"));
    }

    #[test]
    fn a_failed_file_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let output = OutputFolder::open(folder.path()).unwrap();
        let failed = output.write_file("a", 3, |file| {
            file.write(b"ab")?;
            Err(ConvertError::output(Path::new("x"), "fails"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let entry = output
            .write_file("a", 3, |file| file.write(b"abc"))
            .unwrap();
        assert_eq!(
            entry,
            hash_file(&folder.path().join("a"), "a", |_| {}).unwrap()
        );
    }

    #[test]
    fn two_conversions_do_not_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let _first = OutputFolder::open(folder.path()).unwrap();
        let second = OutputFolder::open(folder.path()).err().unwrap();
        assert!(
            second.to_string().contains("another conversion"),
            "{second}"
        );
    }

    #[test]
    fn room_is_checked_before() {
        let folder = tempfile::tempdir().unwrap();
        let output = OutputFolder::open(folder.path()).unwrap();
        output.check_room(1).unwrap();
        let error = output.check_room(1 << 60).unwrap_err();
        assert!(
            matches!(
                error,
                ConvertError::DiskFull {
                    free_bytes: Some(_),
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn the_source_is_not_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        fs::create_dir(&source).unwrap();
        assert!(refuse_inside(&source, &source).is_err());
        assert!(refuse_inside(&source, &source.join("out")).is_err());
        assert!(refuse_inside(&source, &folder.path().join("x/../source/out")).is_err());
        refuse_inside(&source, &folder.path().join("out")).unwrap();
        refuse_inside(&source, &folder.path().join("source2")).unwrap();
    }
}
