//! Memory given back to the system while its owner keeps it: the same bytes, all zero, and no pages behind them.

/// Sets `bytes` to zero; what they fill of whole pages goes back to the system until it is written again.
///
/// Takes time for every page that was in use, nothing for pages that never were. The memory has to be an allocator's: of a mapped file
/// the file's bytes would come back.
pub fn release_to_zeros(bytes: &mut [u8]) {
    let (head, pages, tail) = at_whole_pages(bytes);
    head.fill(0);
    tail.fill(0);
    if !drop_pages(pages) {
        pages.fill(0);
    }
}

/// As [`release_to_zeros`], of `bytes` that are zeros already: none of them is written.
pub fn release_zeros(bytes: &mut [u8]) {
    let (_, pages, _) = at_whole_pages(bytes);
    drop_pages(pages);
}

/// `bytes` before their whole pages, those pages, and what comes after them.
fn at_whole_pages(bytes: &mut [u8]) -> (&mut [u8], &mut [u8], &mut [u8]) {
    let page = rustix::param::page_size();
    let start = bytes.as_ptr().align_offset(page).min(bytes.len());
    let (head, rest) = bytes.split_at_mut(start);
    let whole = rest.len() / page * page;
    let (pages, tail) = rest.split_at_mut(whole);
    (head, pages, tail)
}

/// Whether the system took the pages back and gives zeros in their place.
#[cfg(target_os = "linux")]
fn drop_pages(pages: &mut [u8]) -> bool {
    use rustix::mm::{madvise, Advice};
    if pages.is_empty() {
        return true;
    }
    // SAFETY: the range is whole pages of memory that `pages` borrows exclusively. An allocator's memory is private
    // and anonymous, and of such memory Linux promises zeros on the next touch: what `fill(0)` would leave. The
    // pages stay mapped, so the owner may use and free them as before.
    let outcome = unsafe {
        madvise(
            pages.as_mut_ptr().cast(),
            pages.len(),
            Advice::LinuxDontNeed,
        )
    };
    // Locked pages are refused. Reading one byte proves nothing more than the promise above and costs a page.
    outcome.is_ok()
}

#[cfg(not(target_os = "linux"))]
fn drop_pages(_: &mut [u8]) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_zeros_and_nothing_resident() {
        for (len, from, to) in [
            (0, 0, 0),
            (100, 3, 90),
            (5000, 1, 4999),
            (9 << 20, 7, (9 << 20) - 5),
        ] {
            let mut bytes = vec![7u8; len];
            release_to_zeros(&mut bytes[from..to]);
            assert!(bytes[from..to].iter().all(|&byte| byte == 0));
            assert!(bytes[..from]
                .iter()
                .chain(&bytes[to..])
                .all(|&byte| byte == 7));
            bytes.fill(1);
            assert!(bytes.iter().all(|&byte| byte == 1));
        }
        let before = crate::current_rss_bytes();
        let mut large = vec![1u8; 512 << 20];
        let with = crate::current_rss_bytes();
        release_to_zeros(&mut large);
        if let (Some(before), Some(with), Some(after)) = (before, with, crate::current_rss_bytes())
        {
            // Other tests of this process hold a few megabytes more or less.
            assert!(with > before + (400 << 20), "{before} {with}");
            assert!(after < before + (100 << 20), "{before} {after}");
        }
        assert_eq!(large[large.len() / 2], 0);
    }
}
