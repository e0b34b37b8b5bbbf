//! Reading memory and nothing else: the floor under every product that meets its weights once.
//!
//! Two ways to touch all bytes of slices, to be timed. [`read_plain`] is the loop a compiler makes of
//! a sum. [`read_streams`] walks four slices side by side and asks for each line early, the fastest
//! of the ways tried (2 to 16 slices, 512 to 4096 bytes ahead): 1.4 to 1.7 times the plain loop where
//! it was measured. The better of the two is the rate to hold a kernel against. They return a sum so
//! that no read can be left out.
//!
//! Single-threaded; not here: splitting memory over threads, and the clock.

/// How far ahead of the read a line is asked for.
const AHEAD_BYTES: usize = 1024;

/// The wrapping sum of the native-order 8-byte words of `bytes`, the last one filled up with zeros.
pub fn read_plain(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<128>();
    let mut sums = [0u64; 16];
    blocks.iter().for_each(|block| add_words(block, &mut sums));
    total(&sums).wrapping_add(sum_rest(rest))
}

/// The wrapping sum of [`read_plain`] of each of four slices, best of one length.
pub fn read_streams(slices: [&[u8]; 4]) -> u64 {
    let shared = slices.iter().map(|slice| slice.len()).min().unwrap_or(0) / 64 * 64;
    let [a, b, c, d] = slices.map(|slice| slice[..shared].as_chunks::<64>().0);
    let mut sums = [0u64; 8];
    for ((a, b), (c, d)) in a.iter().zip(b).zip(c.iter().zip(d)) {
        for block in [a, b, c, d] {
            prefetch(block.as_ptr().wrapping_add(AHEAD_BYTES));
            add_words(block, &mut sums);
        }
    }
    slices.iter().fold(total(&sums), |sum, slice| {
        sum.wrapping_add(read_plain(&slice[shared..]))
    })
}

/// Adds the words of a block to as many sums.
fn add_words<const BYTES: usize, const WORDS: usize>(block: &[u8; BYTES], sums: &mut [u64; WORDS]) {
    for (sum, word) in sums.iter_mut().zip(block.as_chunks().0) {
        *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
    }
}

fn total(sums: &[u64]) -> u64 {
    sums.iter().fold(0, |sum, part| sum.wrapping_add(*part))
}

/// Less than a block.
fn sum_rest(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0, |sum: u64, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        sum.wrapping_add(u64::from_ne_bytes(word))
    })
}

/// Hints that the line at an address, which may be any, will be read.
#[inline]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and it never faults.
    unsafe {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Word by word.
    fn naive(bytes: &[u8]) -> u64 {
        let mut sum = 0u64;
        for (at, byte) in bytes.iter().enumerate() {
            let mut word = [0; 8];
            word[at % 8] = *byte;
            sum = sum.wrapping_add(u64::from_ne_bytes(word));
        }
        sum
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Every byte counts, once, at any length and alignment.
        #[test]
        fn all_bytes_are_read_once(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            cuts in prop::array::uniform4(0usize..3000),
        ) {
            prop_assert_eq!(read_plain(&bytes), naive(&bytes));
            let slices = cuts.map(|cut| &bytes[cut.min(bytes.len())..]);
            let sum = slices.iter().fold(0u64, |sum, slice| sum.wrapping_add(naive(slice)));
            prop_assert_eq!(read_streams(slices), sum);
        }
    }
}
