//! A file that is read without filling the page cache.
//!
//! Opening decides, once, how the file is read and keeps the answer: directly, at the alignment that a trial
//! read showed to work, or buffered with the pages dropped after each read. A file system may accept the open
//! and refuse the read, so an accepted open is no proof.
//!
//! Invariants:
//! - `mode` never changes after `open`; in direct mode `alignment_bytes` is a power of two, 512 to 65536.
//! - The file is expected not to change while open; a file cut short is an `Err` of the read that misses it.
//!
//! Not here: the pool (`reader`), the loops around short reads (`transfer`).

use crate::transfer;
use crate::IoError;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// Whether a file must be read past the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DirectIo {
    /// Refuse a file that cannot be read directly.
    Required,
    /// Read directly where the file system allows it, else buffered.
    #[default]
    Preferred,
    /// Always read through the page cache, and drop the pages afterwards.
    Off,
}

impl DirectIo {
    const ALL: [Self; 3] = [Self::Preferred, Self::Required, Self::Off];

    /// The name it goes by on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Preferred => "auto",
            Self::Required => "direct",
            Self::Off => "buffered",
        }
    }
}

impl fmt::Display for DirectIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// By [`DirectIo::name`].
impl FromStr for DirectIo {
    type Err = IoError;

    fn from_str(name: &str) -> Result<Self, IoError> {
        let mut all = Self::ALL.into_iter();
        all.find(|direct| direct.name() == name)
            .ok_or_else(|| IoError::DirectName {
                got: name.to_owned(),
            })
    }
}

/// How a file is really read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoMode {
    /// Past the page cache, at multiples of the alignment.
    Direct {
        /// Alignment of offsets, lengths and memory that the device takes.
        alignment_bytes: usize,
    },
    /// Through the page cache, which is asked to drop the pages after each read.
    Buffered,
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct { alignment_bytes } => write!(f, "direct, {alignment_bytes} B aligned"),
            Self::Buffered => write!(f, "buffered, page cache dropped"),
        }
    }
}

/// A regular file open for reading; clones share it.
#[derive(Clone, Debug)]
pub struct FlashFile {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    path: PathBuf,
    len_bytes: u64,
    mode: IoMode,
}

impl FlashFile {
    /// Opens `path` and finds out by a trial read how it can be read.
    pub fn open(path: &Path, direct: DirectIo) -> Result<Self, IoError> {
        // Asked before the open, which would wait for ever on a pipe without a writer.
        let metadata = std::fs::metadata(path).map_err(|source| open_error(path, source))?;
        if !metadata.is_file() {
            return Err(IoError::NotAFile {
                path: path.to_owned(),
            });
        }
        if direct != DirectIo::Off {
            match open_direct(path) {
                Ok(Direct::Works {
                    file,
                    alignment_bytes,
                }) => {
                    return Self::with_mode(path, file, IoMode::Direct { alignment_bytes });
                }
                Ok(Direct::Refused(source)) if direct == DirectIo::Required => {
                    return Err(IoError::DirectRefused {
                        path: path.to_owned(),
                        source,
                    });
                }
                Ok(Direct::Refused(_)) => {}
                Err(source) => return Err(open_error(path, source)),
            }
        }
        let file = File::open(path).map_err(|source| open_error(path, source))?;
        begin_uncached(&file);
        Self::with_mode(path, file, IoMode::Buffered)
    }

    fn with_mode(path: &Path, file: File, mode: IoMode) -> Result<Self, IoError> {
        let metadata = file.metadata().map_err(|source| open_error(path, source))?;
        let inner = Inner {
            file,
            path: path.to_owned(),
            len_bytes: metadata.len(),
            mode,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The same file as if its device needed `alignment_bytes`, a multiple of what it does need.
    #[cfg(test)]
    pub(crate) fn pretend_alignment(&self, alignment_bytes: usize) -> Self {
        assert!(alignment_bytes.is_multiple_of(self.alignment_bytes()));
        let file = self.inner.file.try_clone().unwrap();
        Self::with_mode(&self.inner.path, file, IoMode::Direct { alignment_bytes }).unwrap()
    }

    /// The path given to [`open`](Self::open).
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Length of the file when it was opened.
    pub fn len_bytes(&self) -> u64 {
        self.inner.len_bytes
    }

    /// How the file is read.
    pub fn mode(&self) -> IoMode {
        self.inner.mode
    }

    /// The alignment at which a read needs no copy; 1 when buffered.
    pub fn alignment_bytes(&self) -> usize {
        match self.inner.mode {
            IoMode::Direct { alignment_bytes } => alignment_bytes,
            IoMode::Buffered => 1,
        }
    }

    /// Fills `out` with the bytes at `offset_bytes`, on the calling thread: for headers and manifests, not for
    /// records. Direct files are read through a temporary buffer of at most 256 KiB.
    pub fn read_exact_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), IoError> {
        transfer::read_into(self, offset_bytes, out)
    }

    /// Whether `[offset_bytes, offset_bytes + len_bytes)` lay inside the file when it was opened.
    pub(crate) fn holds(&self, offset_bytes: u64, len_bytes: usize) -> bool {
        u64::try_from(len_bytes)
            .ok()
            .and_then(|len| offset_bytes.checked_add(len))
            .is_some_and(|end| end <= self.inner.len_bytes)
    }

    /// One positioned read over several pieces of memory; may be short, or interrupted.
    ///
    /// # Safety
    /// - Each piece is allocated, and nothing but other reads into the same sink touches it during the call.
    pub(crate) unsafe fn preadv(&self, pieces: &[libc::iovec], offset: u64) -> io::Result<usize> {
        let count = libc::c_int::try_from(pieces.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let descriptor = self.inner.file.as_raw_fd();
        // The plain call takes offsets as wide as the C library's default, which is 32 bits on some.
        #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
        use libc::preadv;
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        use libc::preadv64 as preadv;
        let offset = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the descriptor is open, the list is `count` long, its memory is ours by the caller's promise.
        let got = unsafe { preadv(descriptor, pieces.as_ptr(), count, offset) };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }

    /// The descriptor, open as long as any clone of this file.
    #[cfg(target_os = "linux")]
    pub(crate) fn descriptor(&self) -> std::os::fd::RawFd {
        self.inner.file.as_raw_fd()
    }

    /// Takes the pages of a finished read out of the page cache; nothing to do in direct mode.
    pub(crate) fn drop_cached(&self, offset_bytes: u64, len_bytes: u64) {
        if self.inner.mode == IoMode::Buffered {
            advise_dont_need(&self.inner.file, offset_bytes, len_bytes);
        }
    }
}

fn open_error(path: &Path, source: io::Error) -> IoError {
    IoError::Open {
        path: path.to_owned(),
        source,
    }
}

/// The outcome of trying to read a file directly.
#[cfg_attr(
    not(any(target_os = "linux", target_os = "android", target_os = "macos")),
    expect(dead_code, reason = "these systems refuse always")
)]
enum Direct {
    Works { file: File, alignment_bytes: usize },
    Refused(io::Error),
}

/// The smallest alignment at which `read(offset_bytes, memory)` works, or the refusal.
///
/// Each trial is as badly aligned as its alignment allows: a read of 512 bytes at offset 512 into memory at an
/// odd multiple of 512. Errors other than a refusal are returned as such.
#[cfg(any(target_os = "linux", target_os = "android", test))]
fn probe_alignment(
    candidates: &[usize],
    file_bytes: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
) -> io::Result<Result<usize, io::Error>> {
    use crate::pages;
    let mut refusal = io::Error::from(io::ErrorKind::Unsupported);
    for &alignment in candidates {
        let mut memory = pages::Pages::new(pages::PAGE_BYTES + alignment)
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        let memory = &mut memory.as_mut_slice()[alignment % pages::PAGE_BYTES..][..alignment];
        let offset = alignment as u64;
        match read(if file_bytes > offset { offset } else { 0 }, memory) {
            Ok(_) => return Ok(Ok(alignment)),
            Err(error) if is_refusal(&error) => refusal = error,
            Err(error) => return Err(error),
        }
    }
    Ok(Err(refusal))
}

/// Whether the error means "not in this way" rather than "the device is broken".
#[cfg(any(target_os = "linux", target_os = "android", test))]
fn is_refusal(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let code = error.raw_os_error();
    [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOSYS]
        .iter()
        .any(|e| code == Some(e.raw_os_error()))
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn open_direct(path: &Path) -> io::Result<Direct> {
    use crate::pages::PAGE_BYTES;
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
    let file = match rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from) {
        Ok(descriptor) => File::from(descriptor),
        Err(error) if is_refusal(&error) => return Ok(Direct::Refused(error)),
        Err(error) => return Err(error),
    };
    let candidates = match stated_alignment(&file) {
        Some(0) => return Ok(Direct::Refused(io::ErrorKind::Unsupported.into())),
        Some(stated) if stated > PAGE_BYTES => vec![stated],
        stated => [512, PAGE_BYTES]
            .into_iter()
            .filter(|&a| stated.is_none_or(|s| s <= a))
            .collect(),
    };
    let file_bytes = file.metadata()?.len();
    let probed = probe_alignment(&candidates, file_bytes, |offset, memory| loop {
        match rustix::io::pread(&file, &mut *memory, offset) {
            Err(rustix::io::Errno::INTR) => {}
            done => return Ok(done?),
        }
    })?;
    Ok(match probed {
        Ok(alignment_bytes) => Direct::Works {
            file,
            alignment_bytes,
        },
        Err(refusal) => Direct::Refused(refusal),
    })
}

/// What the kernel itself says (Linux 6.1): the alignment for both offsets and memory, `Some(0)` when the file
/// has no direct I/O, `None` when the kernel or the file system does not say.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn stated_alignment(file: &File) -> Option<usize> {
    use rustix::fs::{AtFlags, StatxFlags};
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    if stat.stx_dio_offset_align == 0 || stat.stx_dio_mem_align == 0 {
        return Some(0);
    }
    let stated = stat.stx_dio_offset_align.max(stat.stx_dio_mem_align) as usize;
    (stated.is_power_of_two() && stated <= 65_536).then_some(stated)
}

/// `F_NOCACHE` takes any alignment, but only whole pages pass the cache by.
#[cfg(target_os = "macos")]
fn open_direct(path: &Path) -> io::Result<Direct> {
    let file = File::open(path)?;
    Ok(match rustix::fs::fcntl_nocache(&file, true) {
        Ok(()) => Direct::Works {
            file,
            alignment_bytes: crate::pages::PAGE_BYTES,
        },
        Err(error) => Direct::Refused(error.into()),
    })
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "macos")))]
fn open_direct(_path: &Path) -> io::Result<Direct> {
    Ok(Direct::Refused(io::ErrorKind::Unsupported.into()))
}

/// Empties the page cache of the file, once, and forbids read-ahead into it. The first is for what a writer left
/// there: its pages may be larger than a read, and a page is only dropped as a whole. Advice; a refusal changes
/// nothing.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn begin_uncached(file: &File) {
    use rustix::fs::Advice;
    let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
    let _ = rustix::fs::fadvise(file, 0, None, Advice::Random);
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn begin_uncached(_file: &File) {}

/// Drops the pages that the range touches, the partial ones too. Advice; a refusal changes nothing.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn advise_dont_need(file: &File, offset_bytes: u64, len_bytes: u64) {
    let page = rustix::param::page_size() as u64;
    let start = offset_bytes / page * page;
    let end = offset_bytes
        .saturating_add(len_bytes)
        .div_ceil(page)
        .saturating_mul(page);
    let len = std::num::NonZeroU64::new(end - start);
    let _ = rustix::fs::fadvise(file, start, len, rustix::fs::Advice::DontNeed);
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn advise_dont_need(_file: &File, _offset_bytes: u64, _len_bytes: u64) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::PAGE_BYTES;

    fn refuse() -> io::Error {
        io::Error::from_raw_os_error(rustix::io::Errno::INVAL.raw_os_error())
    }

    /// A device that wants multiples of `needed` for offset, length and address.
    fn device(needed: usize) -> impl FnMut(u64, &mut [u8]) -> io::Result<usize> {
        move |offset, memory| {
            let aligned = offset.is_multiple_of(needed as u64)
                && memory.len().is_multiple_of(needed)
                && (memory.as_ptr() as usize).is_multiple_of(needed.min(PAGE_BYTES));
            if aligned {
                Ok(memory.len())
            } else {
                Err(refuse())
            }
        }
    }

    #[test]
    fn ways_of_reading_have_the_names_they_print_as() {
        for direct in DirectIo::ALL {
            assert_eq!(direct.to_string().parse::<DirectIo>().unwrap(), direct);
        }
        for name in ["", "Auto", " direct", "preferred"] {
            let error = name.parse::<DirectIo>().unwrap_err();
            assert!(matches!(&error, IoError::DirectName { got } if got == name));
        }
    }

    #[test]
    fn the_probe_finds_what_the_device_needs() {
        for (needed, file_bytes, found) in [
            (1, 1 << 20, 512),
            (512, 1 << 20, 512),
            (4096, 1 << 20, 4096),
            (4096, 600, 4096),
            (4096, 0, 4096),
        ] {
            assert_eq!(
                probe_alignment(&[512, 4096], file_bytes, device(needed))
                    .unwrap()
                    .unwrap(),
                found
            );
        }
    }

    #[test]
    fn a_device_that_refuses_all_is_a_refusal_and_a_broken_one_an_error() {
        let refused = probe_alignment(&[512, 4096], 1 << 20, |_, _| Err(refuse())).unwrap();
        assert_eq!(refused.unwrap_err().raw_os_error(), refuse().raw_os_error());
        let broken = || io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error());
        assert!(probe_alignment(&[512, 4096], 1 << 20, |_, _| Err(broken())).is_err());
    }

    #[test]
    fn modes_print_as_people_read_them() {
        assert_eq!(
            IoMode::Direct {
                alignment_bytes: 512
            }
            .to_string(),
            "direct, 512 B aligned"
        );
        assert_eq!(IoMode::Buffered.to_string(), "buffered, page cache dropped");
    }

    #[test]
    fn a_directory_and_a_missing_file_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        for direct in [DirectIo::Required, DirectIo::Preferred, DirectIo::Off] {
            assert!(matches!(
                FlashFile::open(folder.path(), direct),
                Err(IoError::NotAFile { .. })
            ));
            let missing = FlashFile::open(&folder.path().join("none"), direct).unwrap_err();
            assert!(
                matches!(&missing, IoError::Open { .. }) && missing.to_string().contains("none")
            );
        }
    }
}
