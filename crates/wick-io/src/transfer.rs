//! One run on its way from the device into memory: what to ask for next, and what to make of the answer.
//!
//! A transfer makes no request itself; an engine does and tells it the answer, until there is nothing left to
//! ask for. Short reads continue where they stopped, in direct mode at the last aligned byte. A read that gets
//! nothing more has met the end of the file. Bounce runs pass through a buffer of [`RUN_BYTES_MAX`] bytes that
//! is asked for when first needed and kept.
//!
//! Memory is handled by raw pointers, because a kernel may write to it while no function of ours runs.
//!
//! Not here: who owns the memory (`batch`), which parts form a run (`plan`), who asks (`queue`, `ring`).

use crate::file::FlashFile;
use crate::pages::Pages;
use crate::plan::{Part, Route, RUN_BYTES_MAX, RUN_PARTS_MAX};
use crate::IoError;
use libc::iovec;
use std::io;
use std::ptr;
use std::time::Duration;

/// Most pieces of a request: parts, and the gaps between them.
const PIECES_MAX: usize = 2 * RUN_PARTS_MAX;
/// Memory of the list of pieces.
pub(crate) const PIECES_BYTES: usize = PIECES_MAX * size_of::<iovec>();
/// How often in a row a device may ask to come again before that counts as an error.
const BUSY_MAX: u32 = 200;
/// How long to leave a busy device alone.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// The state of a run; one at a time, many one after the other, without allocation.
pub(crate) struct Transfer {
    /// What the next request fills, from `piece` on.
    pieces: Vec<iovec>,
    piece: usize,
    /// Where the next request begins, and where the bytes that are needed of these pieces end.
    at_bytes: u64,
    end_bytes: u64,
    /// Where a bounce run's present chunk begins, and where the run ends.
    chunk_bytes: u64,
    run_end_bytes: u64,
    route: Route,
    alignment: u64,
    slots: *mut [u8],
    bounce: Option<Pages>,
    busy_count: u32,
}

/// Memory that a run may write to.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    /// Where the parts lie.
    pub(crate) slots: *mut [u8],
    /// Where gaps between parts go.
    pub(crate) sink: *mut [u8],
}

impl Transfer {
    pub(crate) fn new() -> Self {
        Self {
            pieces: Vec::with_capacity(PIECES_MAX),
            piece: 0,
            at_bytes: 0,
            end_bytes: 0,
            chunk_bytes: 0,
            run_end_bytes: 0,
            route: Route::Scatter,
            alignment: 1,
            slots: ptr::slice_from_raw_parts_mut(ptr::null_mut(), 0),
            bounce: None,
            busy_count: 0,
        }
    }

    /// Begins a run; whatever the transfer did before must be finished. The first bounce run takes a buffer of
    /// [`RUN_BYTES_MAX`] bytes from `bounce`.
    ///
    /// # Safety
    /// - Until the run is finished or given up with no request on its way, both parts of `target` stay allocated
    ///   and nothing else reads or writes `[at, at + span_bytes)` of any part.
    /// - Those ranges do not overlap each other, and nobody ever reads the sink.
    pub(crate) unsafe fn begin(
        &mut self,
        alignment_bytes: usize,
        target: Target,
        (parts, route): (&[Part], Route),
        bounce: impl FnOnce() -> Result<Pages, IoError>,
    ) -> Result<(), IoError> {
        self.pieces.clear();
        (self.piece, self.busy_count, self.route) = (0, 0, route);
        (self.at_bytes, self.end_bytes, self.run_end_bytes) = (0, 0, 0);
        (self.alignment, self.slots) = (alignment_bytes as u64, target.slots);
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
            return Ok(());
        };
        assert!(
            parts.iter().all(|part| part.at <= target.slots.len()
                && part.span_bytes <= target.slots.len() - part.at),
            "a part outside of the memory"
        );
        if first.offset_bytes == last.end_bytes() {
            return Ok(());
        }
        self.run_end_bytes = last.end_bytes();
        if route == Route::Bounce {
            if self.bounce.is_none() {
                self.bounce = Some(bounce()?);
            }
            self.begin_chunk(first.offset_bytes / self.alignment * self.alignment);
            return Ok(());
        }
        assert!(
            parts.len() == 1 || parts.len() <= RUN_PARTS_MAX,
            "a run of {} parts",
            parts.len()
        );
        (self.at_bytes, self.end_bytes) = (first.offset_bytes, self.run_end_bytes);
        let mut at_bytes = first.offset_bytes;
        for part in parts {
            let gap = (part.offset_bytes - at_bytes) as usize;
            if gap > 0 {
                assert!(gap <= target.sink.len(), "a gap of {gap} bytes");
                self.push(target.sink.cast(), gap);
            }
            // SAFETY: inside of the slots by the assertion above.
            self.push(
                unsafe { target.slots.cast::<u8>().add(part.at) },
                part.span_bytes,
            );
            at_bytes = part.offset_bytes + part.span_bytes as u64;
        }
        Ok(())
    }

    fn push(&mut self, base: *mut u8, len_bytes: usize) {
        self.pieces.push(iovec {
            iov_base: base.cast(),
            iov_len: len_bytes,
        });
    }

    /// The next chunk of a bounce run, aligned at both ends.
    fn begin_chunk(&mut self, start_bytes: u64) {
        let Some(bounce) = &self.bounce else { return };
        let (base, room) = (bounce.raw().cast(), bounce.len_bytes() as u64);
        let needed = (self.run_end_bytes - start_bytes).min(room);
        self.pieces.clear();
        self.piece = 0;
        self.push(base, needed.next_multiple_of(self.alignment) as usize);
        (self.chunk_bytes, self.at_bytes) = (start_bytes, start_bytes);
        self.end_bytes = start_bytes + needed;
    }

    /// What to read next, and from where; `None` once the run is finished.
    pub(crate) fn request(&self) -> Option<(&[iovec], u64)> {
        (self.at_bytes < self.end_bytes).then(|| (&self.pieces[self.piece..], self.at_bytes))
    }

    /// Takes the answer to the request: the bytes read, which may be fewer than asked for.
    ///
    /// # Safety
    /// - `parts` are those the run began with, and the request is finished.
    pub(crate) unsafe fn accept(
        &mut self,
        parts: &[Part],
        answer: io::Result<usize>,
    ) -> Result<(), Fault> {
        let got = match answer {
            Ok(got) => got as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && self.busy_count < BUSY_MAX =>
            {
                self.busy_count += 1;
                std::thread::sleep(BUSY_PAUSE);
                return Ok(());
            }
            Err(source) => {
                return Err(Fault {
                    offset_bytes: self.at_bytes,
                    source: Some(source),
                })
            }
        };
        self.busy_count = 0;
        if self.at_bytes + got >= self.end_bytes {
            if self.route == Route::Bounce {
                // SAFETY: the chunk is read, and the parts are ours by the promise given to `begin`.
                unsafe { self.unpack(parts) };
            }
            self.at_bytes = self.end_bytes;
            if self.end_bytes < self.run_end_bytes {
                self.begin_chunk(self.end_bytes);
            }
            return Ok(());
        }
        // `at_bytes` stays aligned. No whole block more means that the file ends inside this one.
        let step = got / self.alignment * self.alignment;
        if step == 0 {
            return Err(Fault {
                offset_bytes: self.at_bytes + got,
                source: None,
            });
        }
        self.at_bytes += step;
        self.advance(step as usize);
        Ok(())
    }

    /// Takes the first `step` bytes off the pieces.
    fn advance(&mut self, mut step: usize) {
        while let Some(piece) = self.pieces.get_mut(self.piece) {
            if step < piece.iov_len {
                // SAFETY: inside of the piece.
                piece.iov_base = unsafe { piece.iov_base.cast::<u8>().add(step) }.cast();
                piece.iov_len -= step;
                return;
            }
            step -= piece.iov_len;
            self.piece += 1;
        }
    }

    /// Copies what the chunk holds of each part.
    ///
    /// # Safety
    /// - The chunk is read and the parts are those of the run.
    unsafe fn unpack(&self, parts: &[Part]) {
        let Some(bounce) = &self.bounce else { return };
        for part in parts {
            let from = part.offset_bytes.max(self.chunk_bytes);
            let to = part.end_bytes().min(self.end_bytes);
            if from < to {
                let start = (from - self.chunk_bytes) as usize;
                // SAFETY: no request is on its way, so nobody writes to the bounce buffer.
                let bytes = unsafe { bounce.bytes(start..start + (to - from) as usize) };
                let at = part.at + (from - part.offset_bytes) as usize;
                assert!(at + bytes.len() <= self.slots.len(), "a part outside");
                // SAFETY: inside of the slots, in a range that is ours by the promise given to `begin`.
                unsafe {
                    let place = self.slots.cast::<u8>().add(at);
                    place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                }
            }
        }
    }
}

/// Fills `out` with the bytes at `offset_bytes`, on the calling thread.
pub(crate) fn read_into(
    file: &FlashFile,
    offset_bytes: u64,
    out: &mut [u8],
) -> Result<(), IoError> {
    if !file.holds(offset_bytes, out.len()) {
        return Err(end_of_file(file, offset_bytes, out.len()));
    }
    let parts = [Part::whole(offset_bytes, out.len())];
    let route = if file.alignment_bytes() == 1 {
        Route::Scatter
    } else {
        Route::Bounce
    };
    let target = Target {
        slots: ptr::from_mut(out),
        sink: ptr::slice_from_raw_parts_mut(ptr::null_mut(), 0),
    };
    let mut transfer = Transfer::new();
    let bounce = || Pages::new(RUN_BYTES_MAX);
    // SAFETY: `out` is borrowed exclusively until we return, and then no request is on its way.
    unsafe { transfer.begin(file.alignment_bytes(), target, (&parts, route), bounce)? };
    while let Some((pieces, at_bytes)) = transfer.request() {
        // SAFETY: the pieces lie in `out` or in the transfer's own buffer.
        let answer = unsafe { file.preadv(pieces, at_bytes) };
        // SAFETY: the parts of `begin`; the request is finished.
        unsafe { transfer.accept(&parts, answer) }.map_err(|fault| fault.name(file, &parts))?;
    }
    file.drop_cached(offset_bytes, parts[0].len_bytes as u64);
    Ok(())
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

/// Where a read stopped, and why: no source means the end of the file.
#[derive(Debug)]
pub(crate) struct Fault {
    offset_bytes: u64,
    source: Option<io::Error>,
}

impl Fault {
    /// The error of the part in which the read stopped.
    pub(crate) fn name(self, file: &FlashFile, parts: &[Part]) -> IoError {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reads one run of a device that answers `read(offset, room)` with the bytes it has there.
    fn run(
        memory: &mut [u8],
        parts: &[Part],
        (alignment, route): (usize, Route),
        mut read: impl FnMut(u64, usize) -> io::Result<Vec<u8>>,
    ) -> Result<(), Fault> {
        let mut sink = [0u8; 4096];
        let target = Target {
            slots: memory,
            sink: &mut sink,
        };
        let mut transfer = Transfer::new();
        let bounce = || Pages::new(RUN_BYTES_MAX);
        // SAFETY: memory and sink are ours until the end of this function.
        unsafe { transfer.begin(alignment, target, (parts, route), bounce) }.unwrap();
        while let Some((pieces, offset)) = transfer.request() {
            assert!(offset.is_multiple_of(alignment as u64), "offset {offset}");
            let room = pieces.iter().map(|piece| piece.iov_len).sum();
            let answer = read(offset, room).map(|bytes| {
                assert!(bytes.len() <= room);
                let mut rest = &bytes[..];
                for piece in pieces {
                    let (now, later) = rest.split_at(rest.len().min(piece.iov_len));
                    // SAFETY: a piece is `iov_len` bytes of our memory.
                    unsafe {
                        piece
                            .iov_base
                            .cast::<u8>()
                            .copy_from(now.as_ptr(), now.len());
                    }
                    rest = later;
                }
                bytes.len()
            });
            // SAFETY: the parts of `begin`; the request is finished.
            unsafe { transfer.accept(parts, answer) }?;
        }
        Ok(())
    }

    fn part(offset_bytes: u64, at: usize, len_bytes: usize, alignment: usize) -> Part {
        let mut part = Part::whole(offset_bytes, len_bytes);
        (part.at, part.span_bytes) = (at, len_bytes.next_multiple_of(alignment));
        part
    }

    proptest! {
        /// A device that stops after `stops[i]` bytes, asks to come again and has gaps between what is wanted,
        /// yields the same bytes as one that never does.
        #[test]
        fn short_reads_continue(
            alignment in prop::sample::select(vec![1usize, 64]),
            route in prop::sample::select(vec![Route::Scatter, Route::Bounce]),
            stops in prop::collection::vec(0usize..300, 1..40),
            sizes in prop::collection::vec((1usize..400, 0usize..3), 1..20),
            file_bytes in 0usize..9000,
        ) {
            // The last stop is not zero: such a device would never come to an end.
            let stops: Vec<_> = stops.into_iter().chain([64]).collect();
            let content: Vec<u8> = (0..file_bytes).map(|i| (i % 253) as u8).collect();
            let (mut parts, mut offset, mut at) = (Vec::new(), 128, 0);
            for (len, gap) in sizes {
                parts.push(part(offset as u64, at, len, alignment));
                offset += len.next_multiple_of(64) + gap * 64;
                at += len.next_multiple_of(64);
            }
            let mut memory = vec![0u8; at];
            let mut stops = stops.into_iter().cycle();
            let outcome = run(&mut memory, &parts, (alignment, route), |offset, room| {
                let limit = stops.next().unwrap().next_multiple_of(alignment);
                if limit == 0 {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                let rest = &content[(offset as usize).min(file_bytes)..];
                Ok(rest[..rest.len().min(limit).min(room)].to_vec())
            });
            prop_assert_eq!(outcome.is_ok(), parts.last().unwrap().end_bytes() as usize <= file_bytes);
            if outcome.is_ok() {
                for part in parts {
                    let start = part.offset_bytes as usize;
                    prop_assert_eq!(
                        &memory[part.at..part.at + part.len_bytes],
                        &content[start..start + part.len_bytes]
                    );
                }
            }
        }
    }

    #[test]
    fn an_error_names_the_byte_where_it_stopped() {
        let mut memory = [0u8; 256];
        let mut calls = 0;
        let device = |_, _| {
            calls += 1;
            if calls == 1 {
                Ok(vec![0; 64])
            } else {
                Err(io::Error::other("worn out"))
            }
        };
        let parts = [part(640, 0, 256, 64)];
        let fault = run(&mut memory, &parts, (64, Route::Scatter), device).unwrap_err();
        assert_eq!((fault.offset_bytes, fault.source.is_some()), (704, true));
    }

    #[test]
    fn a_device_that_is_busy_for_ever_is_an_error() {
        let mut memory = [0u8; 256];
        let parts = [part(640, 0, 256, 64)];
        let busy = |_, _| Err(io::ErrorKind::WouldBlock.into());
        let fault = run(&mut memory, &parts, (64, Route::Scatter), busy).unwrap_err();
        assert_eq!(fault.offset_bytes, 640);
    }
}
