//! Zip archives of `torch.save`: which entry holds which storage.
//!
//! Invariants of an opened archive:
//! - no name occurs twice, no two entries overlap, and all end before the directory;
//! - an entry that is used is stored as it is, neither compressed nor encrypted.
//!
//! What the zip crate is kept from: looking for the archive anywhere but at the file's start, which
//! would scan the data, and reading a directory of more than [`DIRECTORY_BYTES_MAX`].

use std::collections::BTreeMap;
use std::io::{Cursor, Error, Read, Seek, SeekFrom};

use zip::read::{ArchiveOffset, Config};
use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

use super::place::{place, Extent};
use super::{machine, state};
use crate::bytes::Bytes;
use crate::{CheckpointError, StoredTensor};

/// A directory entry of PyTorch has some hundred bytes, and a storage has one.
const DIRECTORY_BYTES_MAX: usize = 1 << 25;

/// Reads the tensors of an archive.
pub(super) fn read(file: &[u8]) -> Result<Vec<StoredTensor>, CheckpointError> {
    let archive = Archive::open(file)?;
    let extent = archive.extent("data.pkl")?;
    let end = (extent.offset_bytes + extent.len_bytes) as usize; // in the file
    let mut bytes = Bytes::starting_at(&file[..end], extent.offset_bytes as usize);
    let pickle = machine::run(&mut bytes)?;
    let tensors = state::tensors(&pickle)?;
    let file_len = file.len() as u64;
    let placed = tensors.into_iter().map(|(name, view)| {
        let root = archive.extent(&format!("data/{}", view.storage.key))?;
        place(name, view, root, file_len)
    });
    placed.collect()
}

struct Archive {
    /// Folder in which all entries lie.
    root: String,
    entries: BTreeMap<String, Entry>,
}

struct Entry {
    header_start: u64,
    extent: Extent,
    /// What keeps the entry from being read in place.
    obstacle: Option<String>,
}

impl Archive {
    fn open(file: &[u8]) -> Result<Self, CheckpointError> {
        let config = Config {
            archive_offset: ArchiveOffset::Known(0),
        };
        let reader = Metered {
            file: Cursor::new(file),
            left: DIRECTORY_BYTES_MAX,
        };
        let directory = |source| CheckpointError::Directory { source };
        let mut zip = ZipArchive::with_config(config, reader).map_err(directory)?;
        let mut twice = zip.has_duplicate_names();
        let limit = zip.central_directory_start().min(file.len() as u64);
        let mut entries = BTreeMap::new();
        for index in 0..zip.len() {
            let (name, entry) = entry(&mut zip, index, limit)?;
            // The same name in another encoding.
            twice |= entries.insert(name, entry).is_some();
        }
        if twice {
            return Err(directory(ZipError::UnsupportedArchive(
                "it names an entry twice",
            )));
        }
        check_apart(&entries)?;
        let root = root(&entries)?;
        let archive = Self { root, entries };
        archive.check_byte_order(file)?;
        Ok(archive)
    }

    /// Where an entry's bytes lie, whose name is given without the root.
    fn extent(&self, name: &str) -> Result<Extent, CheckpointError> {
        let name = format!("{}/{name}", self.root);
        let fail = |problem: &str| CheckpointError::Entry {
            entry: name.clone(),
            problem: problem.into(),
        };
        let entry = self.entries.get(&name).ok_or_else(|| fail("is missing"))?;
        match &entry.obstacle {
            Some(obstacle) => Err(fail(obstacle)),
            None => Ok(entry.extent),
        }
    }

    /// Versions before 2.1 do not say the order: it is that of the machine, little-endian.
    fn check_byte_order(&self, file: &[u8]) -> Result<(), CheckpointError> {
        if !self
            .entries
            .contains_key(&format!("{}/byteorder", self.root))
        {
            return Ok(());
        }
        let extent = self.extent("byteorder")?;
        let order = Bytes::starting_at(file, extent.offset_bytes as usize)
            .take("the byte order", extent.len_bytes)?;
        if order == b"little" {
            return Ok(());
        }
        Err(CheckpointError::Kind {
            found: format!(
                "a PyTorch file whose byte order is `{}`",
                String::from_utf8_lossy(&order[..order.len().min(8)])
            ),
            expected: "`little`",
        })
    }
}

/// The archive's directory and local headers, of which only so much is read.
struct Metered<'a> {
    file: Cursor<&'a [u8]>,
    left: usize,
}

impl Read for Metered<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let count = self.file.read(buffer)?;
        self.left = self.left.checked_sub(count).ok_or_else(|| {
            Error::other(format!(
                "a directory of more than {DIRECTORY_BYTES_MAX} bytes"
            ))
        })?;
        Ok(count)
    }
}

impl Seek for Metered<'_> {
    fn seek(&mut self, to: SeekFrom) -> Result<u64, Error> {
        self.file.seek(to)
    }
}

fn entry(
    zip: &mut ZipArchive<Metered<'_>>,
    index: usize,
    limit: u64,
) -> Result<(String, Entry), CheckpointError> {
    let directory = |source| CheckpointError::Directory { source };
    let name = zip.name_for_index(index).unwrap_or(Ok("".into()));
    let name = name.map_err(directory)?.into_owned();
    let fail = |problem: String| CheckpointError::Entry {
        entry: name.clone(),
        problem,
    };
    let file = zip
        .by_index_raw(index)
        .map_err(|source| fail(format!("has no readable header: {source}")))?;
    let (size, stored_size) = (file.size(), file.compressed_size());
    let offset_bytes = file
        .data_start()
        .ok_or_else(|| fail("has no data".into()))?;
    if offset_bytes
        .checked_add(stored_size)
        .is_none_or(|end| end > limit)
    {
        return Err(fail(format!(
            "reaches {stored_size} bytes from byte {offset_bytes}, beyond byte {limit}"
        )));
    }
    let obstacle = if file.encrypted() {
        Some("is encrypted, which weights never are".into())
    } else if file.compression() != CompressionMethod::Stored {
        Some(format!(
            "is compressed ({}), but PyTorch stores entries as they are: repack the archive without compression",
            file.compression()
        ))
    } else if size != stored_size {
        Some(format!("has {stored_size} bytes, but {size} by its header"))
    } else {
        None
    };
    let header_start = file.header_start();
    let extent = Extent {
        offset_bytes,
        len_bytes: stored_size,
    };
    let entry = Entry {
        header_start,
        extent,
        obstacle,
    };
    Ok((name, entry))
}

fn check_apart(entries: &BTreeMap<String, Entry>) -> Result<(), CheckpointError> {
    let mut in_order: Vec<(&String, &Entry)> = entries.iter().collect();
    in_order.sort_by_key(|(_, entry)| entry.header_start);
    for ((before, first), (name, second)) in in_order.iter().zip(in_order.iter().skip(1)) {
        let end = first.extent.offset_bytes + first.extent.len_bytes; // in the file
        if end > second.header_start {
            return Err(CheckpointError::Entry {
                entry: name.to_string(),
                problem: format!(
                    "starts at byte {}, before `{before}` ends at {end}",
                    second.header_start
                ),
            });
        }
    }
    Ok(())
}

/// The one folder with a `data.pkl`.
fn root(entries: &BTreeMap<String, Entry>) -> Result<String, CheckpointError> {
    let kind = |found: String| CheckpointError::Kind {
        found,
        expected: "one that torch.save wrote, with one `<root>/data.pkl`",
    };
    let is_root = |root: &&str| !root.is_empty() && !root.contains('/');
    let mut roots = entries
        .keys()
        .filter_map(|name| name.strip_suffix("/data.pkl"))
        .filter(is_root);
    let (Some(root), None) = (roots.next(), roots.next()) else {
        let names: Vec<&String> = entries.keys().take(4).collect();
        return Err(kind(format!("a zip archive that starts with {names:?}")));
    };
    if entries.contains_key(&format!("{root}/constants.pkl")) {
        return Err(kind("a TorchScript archive, which is a program".into()));
    }
    Ok(root.into())
}
