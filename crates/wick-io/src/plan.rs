//! The plan of a batch: which reads go to the device together, and by which route.
//!
//! Reads are sorted by offset and cut into *runs*, each of which is one request to the device:
//! - *scatter*: offset, memory and rounded length of every part suit the device; read straight into slots.
//! - *bounce*: they do not; an aligned superset goes into a buffer of the request's own and is copied.
//!
//! A part whose end is not aligned is rounded up within its slot's room. Parts with a small gap between them
//! share one request: the gap is read into the room behind the first of them where that is large enough, else
//! into a sink that nobody reads. So bytes of a slot behind the part's `len_bytes` are unspecified afterwards.
//!
//! Invariants:
//! - A run is at most [`RUN_BYTES_MAX`] and [`RUN_PARTS_MAX`] parts, unless it is one part.
//! - A part writes `[at, at + span_bytes)` with `span_bytes <= room_bytes`: never outside its slot, and two
//!   parts never write the same byte.
//! - In a scatter run `offset + span` of one part is at most `offset` of the next, and what lies between is at
//!   most the gap limit, at both ends aligned.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

/// Most bytes of a run of several parts, and size of a bounce buffer.
pub const RUN_BYTES_MAX: usize = 256 << 10;
/// Most parts of a scatter run: pieces of one `preadv`.
pub(crate) const RUN_PARTS_MAX: usize = 256;
/// A read longer than this is split so that several threads work on it.
const SPLIT_BYTES_MIN: usize = 1 << 20;
/// Length of the pieces of a split read.
const SPLIT_PART_BYTES: usize = 512 << 10;

/// A wish: `len_bytes` bytes at `offset_bytes` of a file into a slot, from the slot's first byte on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRead {
    /// The slot to fill.
    pub slot: usize,
    /// Where the bytes begin in the file.
    pub offset_bytes: u64,
    /// How many bytes; at most the slot's size. Bytes of the slot behind them are unspecified afterwards.
    pub len_bytes: usize,
    /// The checksum these bytes must have.
    pub crc32c: Option<u32>,
}

/// How a run travels from the device to the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Scatter,
    Bounce,
}

/// What is left to do once a part is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    None,
    /// Compare the part's checksum.
    Crc32c(u32),
    /// Part of the split read of this index; the last part to finish compares.
    Split(usize),
}

/// A contiguous piece of the file that goes to a contiguous piece of the buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) offset_bytes: u64,
    /// Position in the buffer.
    pub(crate) at: usize,
    pub(crate) len_bytes: usize,
    /// `len_bytes`, and what a scatter run reads behind it.
    pub(crate) span_bytes: usize,
    /// Bytes from `at` on that no other part writes.
    room_bytes: usize,
    pub(crate) check: Check,
}

impl Part {
    /// A part outside of any buffer.
    pub(crate) fn whole(offset_bytes: u64, len_bytes: usize) -> Self {
        let (span_bytes, room_bytes) = (len_bytes, len_bytes);
        Self {
            offset_bytes,
            at: 0,
            len_bytes,
            span_bytes,
            room_bytes,
            check: Check::None,
        }
    }

    pub(crate) fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.len_bytes as u64
    }
}

/// Consecutive parts that are one request.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) parts: Range<usize>,
    pub(crate) route: Route,
}

/// A read of several parts that has a checksum.
#[derive(Debug)]
pub(crate) struct SplitRead {
    pub(crate) offset_bytes: u64,
    pub(crate) at: usize,
    pub(crate) len_bytes: usize,
    pub(crate) crc32c: u32,
    pub(crate) unfinished: AtomicUsize,
}

/// The runs of a batch, in file order.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) parts: Vec<Part>,
    pub(crate) runs: Vec<Run>,
    pub(crate) splits: Vec<SplitRead>,
}

impl Plan {
    /// Plans reads into slots of `slot_bytes`, each slot named once, for a device of `alignment` (1: any), that
    /// share a request across gaps of at most `gap_bytes`, or never (`None`). Forgets what was planned before.
    pub(crate) fn lay_out(
        &mut self,
        reads: &[SlotRead],
        slot_bytes: usize,
        alignment: usize,
        gap_bytes: Option<usize>,
    ) {
        self.parts.clear();
        self.runs.clear();
        self.splits.clear();
        // Room for the worst case, so that the next plan of this size finds it whatever it looks like.
        self.parts.reserve(reads.len());
        if slot_bytes > SPLIT_BYTES_MIN {
            self.splits.reserve(reads.len());
        }
        for read in reads {
            self.push_parts(read, slot_bytes, alignment);
        }
        self.runs.reserve(self.parts.len());
        self.parts.sort_unstable_by_key(|part| part.offset_bytes);
        for index in 0..self.parts.len() {
            self.place(index, alignment, gap_bytes);
        }
    }

    /// Appends the read as one part, or as several when it is long.
    fn push_parts(&mut self, read: &SlotRead, slot_bytes: usize, alignment: usize) {
        let at = read.slot * slot_bytes;
        let whole = read.len_bytes <= SPLIT_BYTES_MIN;
        let step = if whole {
            read.len_bytes.max(1)
        } else {
            SPLIT_PART_BYTES
        };
        let check = match read.crc32c {
            None => Check::None,
            Some(crc32c) if whole => Check::Crc32c(crc32c),
            Some(crc32c) => {
                self.splits.push(SplitRead {
                    offset_bytes: read.offset_bytes,
                    at,
                    len_bytes: read.len_bytes,
                    crc32c,
                    unfinished: AtomicUsize::new(read.len_bytes.div_ceil(step)),
                });
                Check::Split(self.splits.len() - 1)
            }
        };
        let mut start = 0;
        loop {
            let len_bytes = step.min(read.len_bytes - start);
            let is_last = start + len_bytes == read.len_bytes;
            let room_bytes = if is_last {
                slot_bytes - start
            } else {
                len_bytes
            };
            self.parts.push(Part {
                offset_bytes: read.offset_bytes + start as u64,
                at: at + start,
                len_bytes,
                span_bytes: len_bytes.next_multiple_of(alignment).min(room_bytes),
                room_bytes,
                check,
            });
            start += len_bytes;
            if is_last {
                return;
            }
        }
    }

    /// Adds the part to the last run if they can share a request, else begins a run with it.
    fn place(&mut self, index: usize, alignment: usize, gap_bytes: Option<usize>) {
        let part = self.parts[index];
        let fits = part.offset_bytes.is_multiple_of(alignment as u64)
            && part.at.is_multiple_of(alignment)
            && part.span_bytes.is_multiple_of(alignment);
        let route = if fits { Route::Scatter } else { Route::Bounce };
        let joined = self
            .runs
            .last()
            .filter(|run| run.route == route)
            .and_then(|run| {
                let run = &self.parts[run.parts.clone()];
                join_span(run, &part, (route, alignment), gap_bytes?)
            });
        match (joined, self.runs.last_mut()) {
            (Some(span_bytes), Some(run)) => {
                self.parts[run.parts.end - 1].span_bytes = span_bytes;
                run.parts.end = index + 1;
            }
            _ => self.runs.push(Run {
                parts: index..index + 1,
                route,
            }),
        }
    }
}

/// The span that the run's last part gets when `next` shares its request; `None` if it must not.
fn join_span(
    run: &[Part],
    next: &Part,
    (route, alignment): (Route, usize),
    gap_bytes: usize,
) -> Option<usize> {
    let (first, last) = (run.first()?, run.last()?);
    let distance = usize::try_from(next.offset_bytes.checked_sub(last.offset_bytes)?).ok()?;
    // What lies between is read for nothing, except for what the device reads anyway to reach an aligned end.
    let block = alignment as u64;
    let end = last.end_bytes().checked_next_multiple_of(block)?;
    let gap = (next.offset_bytes / block * block).saturating_sub(end);
    let total =
        next.end_bytes().checked_next_multiple_of(block)? - first.offset_bytes / block * block;
    if distance < last.len_bytes || gap > gap_bytes as u64 || total > RUN_BYTES_MAX as u64 {
        return None;
    }
    match route {
        Route::Bounce => Some(last.span_bytes),
        Route::Scatter if run.len() == RUN_PARTS_MAX => None,
        Route::Scatter if distance <= last.room_bytes => Some(distance),
        Route::Scatter => (distance >= last.span_bytes).then_some(last.span_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GAP: Option<usize> = Some(4096);

    fn plan(
        reads: &[SlotRead],
        slot_bytes: usize,
        alignment: usize,
        gap_bytes: Option<usize>,
    ) -> Plan {
        let mut plan = Plan::default();
        plan.lay_out(reads, slot_bytes, alignment, gap_bytes);
        plan
    }

    fn read(slot: usize, offset_bytes: u64, len_bytes: usize) -> SlotRead {
        SlotRead {
            slot,
            offset_bytes,
            len_bytes,
            crc32c: Some(0),
        }
    }

    /// `(parts of the run, route)` of each run.
    fn shape(reads: &[SlotRead], slot_bytes: usize, alignment: usize) -> Vec<(usize, Route)> {
        let plan = plan(reads, slot_bytes, alignment, GAP);
        plan.runs
            .iter()
            .map(|run| (run.parts.len(), run.route))
            .collect()
    }

    #[test]
    fn neighbours_share_a_request_up_to_its_limits() {
        let records = |count: usize, bytes: usize| -> Vec<SlotRead> {
            (0..count)
                .rev()
                .map(|i| read(i, (i * bytes) as u64, bytes))
                .collect()
        };
        assert_eq!(
            shape(&records(20, 16 << 10), 16 << 10, 512),
            [(16, Route::Scatter), (4, Route::Scatter)]
        );
        assert_eq!(
            shape(&records(300, 512), 512, 512),
            [(256, Route::Scatter), (44, Route::Scatter)]
        );
        assert_eq!(shape(&records(2, 1 << 20), 1 << 20, 512).len(), 2);
    }

    #[test]
    fn padding_behind_a_record_is_bridged_within_the_slot() {
        let records = [read(0, 0, 3000), read(1, 4096, 3000), read(2, 8192, 3000)];
        assert_eq!(shape(&records, 4096, 512), [(3, Route::Scatter)]);
        assert_eq!(shape(&records, 4096, 1), [(3, Route::Scatter)]);
        assert_eq!(
            shape(&records, 3072, 512),
            [(3, Route::Scatter)],
            "no room to bridge, so by the sink"
        );
        assert_eq!(
            shape(&records, 3000, 512),
            [(3, Route::Bounce)],
            "no room to round up"
        );
    }

    #[test]
    fn gaps_are_bridged_up_to_the_limit_and_by_whole_blocks() {
        let runs = |second: u64, gap_bytes: usize| {
            let reads = [read(0, 0, 4000), read(1, second, 4096)];
            plan(&reads, 4096, 512, Some(gap_bytes)).runs.len()
        };
        // The block in which the first read ends is read anyway.
        assert_eq!([runs(4096, 0), runs(4608, 0), runs(4608, 511)], [1, 2, 2]);
        assert_eq!(
            [runs(4608, 512), runs(12_288, 8192), runs(12_800, 8192)],
            [1, 1, 2]
        );
    }

    #[test]
    fn without_sharing_each_part_is_a_request() {
        let mut plan = plan(&[], 4096, 512, GAP);
        for (slot_bytes, alignment, part_count) in [
            (4096, 512, 20),
            (4000, 512, 20),
            (4096, 1, 20),
            (3 << 20, 512, 6 * 20),
        ] {
            let neighbours: Vec<_> = (0..20)
                .map(|i| read(i, (i * slot_bytes) as u64, slot_bytes))
                .collect();
            plan.lay_out(&neighbours, slot_bytes, alignment, Some(0));
            let shared_count = plan.runs.len();
            plan.lay_out(&neighbours, slot_bytes, alignment, None);
            assert_eq!(
                (plan.parts.len(), plan.runs.len()),
                (part_count, part_count)
            );
            assert!(plan.runs.iter().all(|run| run.parts.len() == 1));
            assert_eq!(shared_count < part_count, slot_bytes < 1 << 20);
        }
    }

    #[test]
    fn a_plan_in_use_again_is_as_if_it_were_new_and_takes_no_new_memory() {
        let far_apart: Vec<_> = (0..40)
            .map(|i| read(i, (i * 40_000) as u64, 4096))
            .collect();
        let long = [read(0, 0, 2 << 20), read(1, 8 << 20, 100)];
        let mut used = plan(&far_apart, 4096, 512, GAP);
        used.lay_out(&long, 2 << 20, 512, GAP);
        let rooms = |plan: &Plan| {
            let (parts, runs) = (plan.parts.capacity(), plan.runs.capacity());
            (parts, runs, plan.splits.capacity())
        };
        let before = rooms(&used);
        for (reads, slot_bytes) in [(&far_apart[..], 4096), (&long, 2 << 20), (&[], 1)] {
            used.lay_out(reads, slot_bytes, 512, GAP);
            let new = plan(reads, slot_bytes, 512, GAP);
            assert_eq!(format!("{used:?}"), format!("{new:?}"));
        }
        assert_eq!(rooms(&used), before);
    }

    #[test]
    fn long_reads_are_split_and_only_they() {
        assert_eq!(
            plan(&[read(0, 0, 1 << 20)], 1 << 20, 512, GAP).parts.len(),
            1
        );
        let plan = plan(&[read(0, 512, (1 << 20) + 100)], 2 << 20, 512, GAP);
        let lengths: Vec<_> = plan
            .parts
            .iter()
            .map(|part| (part.len_bytes, part.span_bytes))
            .collect();
        assert_eq!(
            lengths,
            [(512 << 10, 512 << 10), (512 << 10, 512 << 10), (100, 512)]
        );
        assert_eq!(plan.splits.len(), 1);
        assert!(plan.parts.iter().all(|part| part.check == Check::Split(0)));
    }

    proptest! {
        /// The invariants at the head of this file, for any reads.
        #[test]
        fn the_plan_keeps_its_invariants(
            wishes in prop::collection::vec((0u64..2000, 0u64..700, 0usize..3_000_000), 0..40),
            slot_bytes in prop::sample::select(vec![512usize, 1000, 4096, 16384, 1_500_000, 3_000_000]),
            alignment in prop::sample::select(vec![1usize, 512, 4096]),
            gap_bytes in prop::sample::select(vec![None, Some(0usize), Some(4096), Some(40_000)]),
        ) {
            let reads: Vec<_> = wishes.iter().enumerate().map(|(slot, &(block, offset, len))| {
                let offset = if offset < 512 { 0 } else { offset };
                read(slot, block * 512 + offset, len % (slot_bytes + 1))
            }).collect();
            let plan = plan(&reads, slot_bytes, alignment, gap_bytes);
            let mut written = vec![false; reads.len() * slot_bytes];
            for part in &plan.parts {
                prop_assert!(part.len_bytes <= part.span_bytes && part.span_bytes <= part.room_bytes);
                let slot = part.at / slot_bytes;
                prop_assert!(part.at + part.room_bytes <= (slot + 1) * slot_bytes);
                let bytes = &mut written[part.at..part.at + part.span_bytes];
                prop_assert!(bytes.iter().all(|&w| !w));
                bytes.fill(true);
            }
            let sum = |lengths: &mut dyn Iterator<Item = usize>| lengths.sum::<usize>();
            prop_assert_eq!(sum(&mut plan.parts.iter().map(|p| p.len_bytes)), sum(&mut reads.iter().map(|r| r.len_bytes)));
            let mut next = 0;
            for run in &plan.runs {
                prop_assert_eq!(run.parts.start, next);
                next = run.parts.end;
                let parts = &plan.parts[run.parts.clone()];
                let total = parts.last().unwrap().end_bytes() - parts[0].offset_bytes;
                prop_assert!(parts.len() == 1 || total <= RUN_BYTES_MAX as u64);
                prop_assert!(parts.len() == 1 || gap_bytes.is_some());
                if run.route == Route::Scatter {
                    prop_assert!(parts.len() <= RUN_PARTS_MAX);
                    for part in parts {
                        prop_assert!(part.offset_bytes % alignment as u64 == 0);
                        prop_assert!(part.at % alignment == 0 && part.span_bytes % alignment == 0);
                    }
                    for pair in parts.windows(2) {
                        let end = pair[0].offset_bytes + pair[0].span_bytes as u64;
                        prop_assert!(end <= pair[1].offset_bytes);
                        prop_assert!(pair[1].offset_bytes - end <= gap_bytes.unwrap() as u64);
                        prop_assert_eq!((pair[1].offset_bytes - end) % alignment as u64, 0);
                    }
                }
            }
            prop_assert_eq!(next, plan.parts.len());
        }
    }
}
