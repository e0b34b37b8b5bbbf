//! Page-aligned memory of a fixed size, zeroed and resident from birth, in large pages where there are some.
//!
//! Invariants:
//! - `base` is aligned to [`PAGE_BYTES`] and valid for `len_bytes()` initialised bytes until drop.
//! - Every page was written once in `new`, so it counts in the resident set before it is used.
//!
//! Not here: who may touch which bytes; that is for the users of `bytes` and `raw` to say.

use crate::huge::{advise_huge_pages, ADVISED_BYTES_MIN, HUGE_PAGE_BYTES};
use crate::IoError;
use std::alloc::Layout;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;

/// Alignment of the memory; no device wants more for its memory addresses.
pub(crate) const PAGE_BYTES: usize = 4096;

/// An owned block of memory that several threads may use at disjoint ranges.
pub(crate) struct Pages {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: `Pages` owns plain bytes, tied to no thread. Shared references give access only through
// `bytes` and `raw`, whose users rule out a writer overlapping anyone else.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `bytes` bytes, rounded up to whole pages and never empty.
    pub(crate) fn new(bytes: usize) -> Result<Self, IoError> {
        let no_room = || IoError::OutOfMemory { bytes };
        let rounded = bytes
            .max(1)
            .checked_next_multiple_of(PAGE_BYTES)
            .ok_or_else(no_room)?;
        let align = match rounded {
            ADVISED_BYTES_MIN.. => HUGE_PAGE_BYTES,
            _ => PAGE_BYTES,
        };
        let layout = Layout::from_size_align(rounded, align).map_err(|_| no_room())?;
        // SAFETY: the size of `layout` is not zero.
        let base = unsafe { std::alloc::alloc(layout) };
        let base = NonNull::new(base).ok_or_else(no_room)?;
        // SAFETY: the allocation, of which nobody else knows; its bytes need not be initialised.
        let memory = unsafe {
            std::slice::from_raw_parts_mut(base.as_ptr().cast::<MaybeUninit<u8>>(), rounded)
        };
        advise_huge_pages(memory);
        memory.fill(MaybeUninit::new(0));
        Ok(Self { base, layout })
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.layout.size()
    }

    /// All of it, for requests whose memory a kernel writes to.
    pub(crate) fn raw(&self) -> *mut [u8] {
        std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.len_bytes())
    }

    /// The bytes at `range`.
    ///
    /// # Safety
    /// - No thread writes any byte of `range` while the result lives.
    pub(crate) unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(
            range.start <= range.end && range.end <= self.len_bytes(),
            "range outside of the memory"
        );
        // SAFETY: in bounds by the assertion, initialised by `new`; no writer by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(range.start), range.len()) }
    }

    /// All bytes, to be written by the only owner.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: valid and initialised by `new`; `&mut self` is the only reference to the memory.
        unsafe { &mut *self.raw() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed only here.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_whole_pages() {
        for bytes in [0, 1, 4095, 4096, 4097, 1 << 20] {
            let mut pages = Pages::new(bytes).unwrap();
            assert_eq!(pages.len_bytes(), bytes.max(1).next_multiple_of(PAGE_BYTES));
            let slice = pages.as_mut_slice();
            assert_eq!(slice.as_ptr().align_offset(PAGE_BYTES), 0);
            assert!(slice.iter().all(|&byte| byte == 0));
            slice.fill(9);
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for bytes in [
            usize::MAX,
            isize::MAX as usize,
            isize::MAX as usize - 4096,
            1 << 60,
        ] {
            assert!(
                matches!(Pages::new(bytes), Err(IoError::OutOfMemory { bytes: b }) if b == bytes)
            );
        }
    }

    #[test]
    #[should_panic(expected = "range outside of the memory")]
    fn a_range_outside_panics() {
        let pages = Pages::new(4096).unwrap();
        // SAFETY: nobody writes.
        let _ = unsafe { pages.bytes(4000..4097) };
    }
}
