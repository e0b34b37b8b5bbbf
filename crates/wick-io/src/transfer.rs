//! One run from the device into memory.
//!
//! Short reads continue where they stopped, in direct mode at the last aligned byte. A read that gets nothing
//! more has met the end of the file. Bounce runs pass through a buffer of [`RUN_BYTES_MAX`] bytes a thread,
//! allocated when first needed and kept.
//!
//! Not here: who owns the memory (`batch`), which parts form a run (`plan`).

use crate::file::FlashFile;
use crate::pages::Pages;
use crate::plan::{Part, Route, RUN_BYTES_MAX, RUN_PARTS_MAX};
use crate::IoError;
use std::io::{self, IoSliceMut};
use std::sync::atomic::{AtomicU64, Ordering};

/// What came from the device so far, over all threads of a reader.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) bytes: AtomicU64,
    pub(crate) requests: AtomicU64,
}

/// A thread's own aligned buffer.
#[derive(Default)]
pub(crate) struct Bounce {
    pages: Option<Pages>,
}

impl Bounce {
    fn memory(&mut self) -> Result<&mut [u8], IoError> {
        let pages = match self.pages.take() {
            Some(pages) => pages,
            None => Pages::new(RUN_BYTES_MAX)?,
        };
        Ok(self.pages.insert(pages).as_mut_slice())
    }
}

/// Reads the parts of one run into their places in `pages`.
///
/// # Safety
/// - Nothing else reads or writes `[at, at + span_bytes)` of any part during the call.
/// - Those ranges do not overlap each other.
pub(crate) unsafe fn read_run(
    file: &FlashFile,
    pages: &Pages,
    (parts, route): (&[Part], Route),
    bounce: &mut Bounce,
    counters: &Counters,
) -> Result<(), IoError> {
    let piece = |part: &Part| {
        // SAFETY: this part's range is ours alone by the caller's promise, and is borrowed once at a time.
        unsafe { pages.bytes_mut(part.at..part.at + part.span_bytes) }
    };
    match (route, parts) {
        (Route::Bounce, _) => gather(file, parts, bounce, counters, |part, at, bytes| {
            piece(part)[at..at + bytes.len()].copy_from_slice(bytes);
        }),
        (Route::Scatter, [part]) => {
            scatter(file, parts, &mut [IoSliceMut::new(piece(part))], counters)
        }
        (Route::Scatter, _) => {
            assert!(
                parts.len() <= RUN_PARTS_MAX,
                "a run of {} parts",
                parts.len()
            );
            let mut pieces: [IoSliceMut<'_>; RUN_PARTS_MAX] =
                std::array::from_fn(|_| IoSliceMut::new(&mut []));
            for (place, part) in pieces.iter_mut().zip(parts) {
                *place = IoSliceMut::new(piece(part));
            }
            scatter(file, parts, &mut pieces[..parts.len()], counters)
        }
    }
}

/// Fills `out` with the bytes at `offset_bytes` by way of the bounce buffer.
pub(crate) fn read_into(
    file: &FlashFile,
    offset_bytes: u64,
    out: &mut [u8],
    bounce: &mut Bounce,
    counters: &Counters,
) -> Result<(), IoError> {
    if !file.holds(offset_bytes, out.len()) {
        return Err(end_of_file(file, offset_bytes, out.len()));
    }
    let part = Part::whole(offset_bytes, out.len());
    if file.alignment_bytes() == 1 {
        return scatter(file, &[part], &mut [IoSliceMut::new(out)], counters);
    }
    gather(file, &[part], bounce, counters, |_, at, bytes| {
        out[at..at + bytes.len()].copy_from_slice(bytes)
    })
}

/// The error of a read that the file is too short for.
pub(crate) fn end_of_file(file: &FlashFile, offset_bytes: u64, len_bytes: usize) -> IoError {
    IoError::EndOfFile {
        path: file.path().to_owned(),
        offset_bytes,
        len_bytes: len_bytes as u64,
        file_bytes: file.len_bytes(),
    }
}

/// Adjacent parts straight into `pieces`.
fn scatter(
    file: &FlashFile,
    parts: &[Part],
    pieces: &mut [IoSliceMut<'_>],
    counters: &Counters,
) -> Result<(), IoError> {
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
        return Ok(());
    };
    let needed = last.end_bytes() - first.offset_bytes;
    let filled = fill(file, pieces, first.offset_bytes, needed, counters);
    file.drop_cached(first.offset_bytes, needed);
    filled.map_err(|fault| fault.name(file, parts))
}

/// The aligned superset of the parts, chunk by chunk; `put(part, at, bytes)` takes what belongs to a part.
fn gather(
    file: &FlashFile,
    parts: &[Part],
    bounce: &mut Bounce,
    counters: &Counters,
    mut put: impl FnMut(&Part, usize, &[u8]),
) -> Result<(), IoError> {
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
        return Ok(());
    };
    let alignment = file.alignment_bytes() as u64;
    let end = last.end_bytes();
    let mut start = first.offset_bytes / alignment * alignment;
    if first.offset_bytes == end {
        return Ok(());
    }
    let memory = bounce.memory()?;
    while start < end {
        let needed = (end - start).min(memory.len() as u64);
        let room = needed.next_multiple_of(alignment) as usize;
        let chunk = &mut memory[..room];
        fill(file, &mut [IoSliceMut::new(chunk)], start, needed, counters)
            .map_err(|fault| fault.name(file, parts))?;
        for part in parts {
            let from = part.offset_bytes.max(start);
            let to = part.end_bytes().min(start + needed);
            if from < to {
                let bytes = &chunk[(from - start) as usize..(to - start) as usize];
                put(part, (from - part.offset_bytes) as usize, bytes);
            }
        }
        start += needed;
    }
    Ok(())
}

/// Where a read stopped, and why: no source means the end of the file.
#[derive(Debug)]
struct Fault {
    offset_bytes: u64,
    source: Option<io::Error>,
}

impl Fault {
    /// The error of the part in which the read stopped.
    fn name(self, file: &FlashFile, parts: &[Part]) -> IoError {
        let hit = parts
            .iter()
            .find(|part| part.end_bytes() > self.offset_bytes)
            .or(parts.last());
        let (offset_bytes, len_bytes) = hit.map_or((self.offset_bytes, 0), |part| {
            (part.offset_bytes, part.len_bytes)
        });
        match self.source {
            None => end_of_file(file, offset_bytes, len_bytes),
            Some(source) => IoError::Read {
                path: file.path().to_owned(),
                offset_bytes,
                len_bytes: len_bytes as u64,
                source,
            },
        }
    }
}

/// Reads until `needed` bytes from `offset_bytes` on are in; the pieces may have room for more.
fn fill(
    file: &FlashFile,
    pieces: &mut [IoSliceMut<'_>],
    offset_bytes: u64,
    needed: u64,
    counters: &Counters,
) -> Result<(), Fault> {
    let read = |pieces: &mut [IoSliceMut<'_>], offset| {
        let got = file.preadv(pieces, offset)?;
        counters.requests.fetch_add(1, Ordering::Relaxed);
        counters.bytes.fetch_add(got as u64, Ordering::Relaxed);
        Ok(got)
    };
    fill_by(
        read,
        file.alignment_bytes() as u64,
        pieces,
        offset_bytes,
        needed,
    )
}

/// The loop of [`fill`] over any device that reads at multiples of `alignment` and may stop short.
fn fill_by(
    mut read: impl FnMut(&mut [IoSliceMut<'_>], u64) -> io::Result<usize>,
    alignment: u64,
    mut pieces: &mut [IoSliceMut<'_>],
    offset_bytes: u64,
    needed: u64,
) -> Result<(), Fault> {
    let mut done = 0;
    while done < needed {
        let at = offset_bytes + done;
        let got = read(pieces, at).map_err(|source| Fault {
            offset_bytes: at,
            source: Some(source),
        })? as u64;
        if done + got >= needed {
            return Ok(());
        }
        // `done` stays aligned. No whole block more means that the file ends inside this one.
        let step = got / alignment * alignment;
        if step == 0 {
            return Err(Fault {
                offset_bytes: at + got,
                source: None,
            });
        }
        IoSliceMut::advance_slices(&mut pieces, step as usize);
        done += step;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A device that stops after `stops[i]` bytes yields the same bytes as one that never does.
        #[test]
        fn short_reads_continue(
            alignment in prop::sample::select(vec![1u64, 64]),
            stops in prop::collection::vec(1usize..300, 1..40),
            sizes in prop::collection::vec(1usize..6, 1..20),
            file_bytes in 0usize..4000,
            cut in 0usize..64,
        ) {
            let content: Vec<u8> = (0..file_bytes).map(|i| (i % 253) as u8).collect();
            let mut memory: Vec<Vec<u8>> = sizes.iter().map(|n| vec![0; n * 64]).collect();
            let room: usize = memory.iter().map(Vec::len).sum();
            let needed = room - cut;
            let mut pieces: Vec<_> = memory.iter_mut().map(|m| IoSliceMut::new(m)).collect();
            let mut stops = stops.into_iter().cycle();
            let device = |pieces: &mut [IoSliceMut<'_>], offset: u64| {
                prop_assert_aligned(offset, alignment);
                let limit = stops.next().unwrap().next_multiple_of(alignment as usize);
                let rest = &content[(offset as usize).min(file_bytes)..];
                let rest = &rest[..rest.len().min(limit)];
                let mut taken = 0;
                for piece in pieces {
                    let n = piece.len().min(rest.len() - taken);
                    piece[..n].copy_from_slice(&rest[taken..taken + n]);
                    taken += n;
                }
                Ok(taken)
            };
            let filled = fill_by(device, alignment, &mut pieces, 128, needed as u64);
            prop_assert_eq!(filled.is_ok(), 128 + needed <= file_bytes);
            if filled.is_ok() {
                prop_assert_eq!(&memory.concat()[..needed], &content[128..128 + needed]);
            }
        }
    }

    fn prop_assert_aligned(offset: u64, alignment: u64) {
        assert!(
            offset.is_multiple_of(alignment),
            "offset {offset} reached a device of {alignment}"
        );
    }

    #[test]
    fn an_error_names_the_byte_where_it_stopped() {
        let mut memory = [0u8; 256];
        let mut calls = 0;
        let device = |_: &mut [IoSliceMut<'_>], _| {
            calls += 1;
            if calls == 1 {
                Ok(64)
            } else {
                Err(io::Error::other("worn out"))
            }
        };
        let fault = fill_by(device, 64, &mut [IoSliceMut::new(&mut memory)], 640, 256).unwrap_err();
        assert_eq!((fault.offset_bytes, fault.source.is_some()), (704, true));
    }
}
