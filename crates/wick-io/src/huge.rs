//! Large pages for memory of a model's size: products walk all of it for each token, and with pages of 4 KiB the
//! processor spends a good part of that time looking up where they lie.
//!
//! Advice, never a promise: without it, or where the system has no large page left, small ones do.

use std::mem::MaybeUninit;

/// Size and alignment of a large page, where there are any; advice elsewhere does no harm.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory below this is left alone: it may come from a heap that will be used for other things, of which a touch of
/// one byte would then take a whole large page.
pub(crate) const ADVISED_BYTES_MIN: usize = 2 * HUGE_PAGE_BYTES;

/// Asks for large pages behind `memory`, which should not have been touched yet. The last, incomplete large page is left
/// out, so that no more memory is taken than `memory` has.
pub fn advise_huge_pages<T>(memory: &mut [MaybeUninit<T>]) {
    let start = memory.as_mut_ptr().cast::<u8>();
    let whole = (start as usize + size_of_val(memory)) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    let offset = start as usize % rustix::param::page_size();
    // From the start of the page that `memory` begins in: in an allocation of this size, that page is its own.
    let len = (whole + offset).saturating_sub(start as usize);
    if size_of_val(memory) >= ADVISED_BYTES_MIN {
        advise(start.wrapping_sub(offset), len);
    }
}

#[cfg(target_os = "linux")]
fn advise(start: *mut u8, len_bytes: usize) {
    use rustix::mm::{madvise, Advice};
    // SAFETY: the range is whole mapped pages, and this advice changes no byte of them.
    let outcome = unsafe { madvise(start.cast(), len_bytes, Advice::LinuxHugepage) };
    // Kernels without large pages refuse.
    let _small_pages_do = outcome;
}

#[cfg(not(target_os = "linux"))]
fn advise(_: *mut u8, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_changes_nothing_but_the_pages() {
        for len in [0, 1, 4096, HUGE_PAGE_BYTES - 1, 3 * HUGE_PAGE_BYTES + 17] {
            let mut bytes: Vec<u8> = Vec::with_capacity(len);
            advise_huge_pages(bytes.spare_capacity_mut());
            bytes.resize(len, 5);
            assert!(bytes.iter().all(|byte| *byte == 5));
            let mut floats: Vec<f32> = Vec::with_capacity(len);
            floats.push(1.0);
            advise_huge_pages(floats.spare_capacity_mut());
            assert_eq!(floats, [1.0]);
        }
    }
}
