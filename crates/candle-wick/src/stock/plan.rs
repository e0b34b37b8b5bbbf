//! What of a stock model stays in DRAM.
//!
//! Every linear matrix but an expert's is used once a token, so a byte of one costs as much time as a byte of
//! any other, and requests make small ones dearer: they stay first. Experts are used by chance and get what is
//! left. Streamed dense units need room for the one in use and the ones read ahead; experts for one at least.
//!
//! Invariant: `total_bytes <= budget_bytes`.

use serde::Serialize;

use super::unit::Unit;
use crate::budget::PlanLine;
use crate::error::{Error, Result};
use crate::memory::Memory;

/// Dense units in memory at a time: one in use, the others read ahead.
const UNITS_AHEAD: u64 = 3;

/// What will be in DRAM.
#[derive(Clone, Debug, Serialize)]
pub struct StockPlan {
    /// What was asked for in bytes, or the sum of a plan by percent.
    pub budget_bytes: u64,
    /// The sum of `lines`.
    pub total_bytes: u64,
    /// The smallest budget that works.
    pub floor_bytes: u64,
    /// The items.
    pub lines: Vec<PlanLine>,
    /// Linear matrices that stay in DRAM, as a share of all their bytes.
    pub resident_fraction: f64,
    /// For dense units on flash.
    pub(super) dense_bytes: u64,
    /// For experts on flash.
    pub(super) expert_bytes: u64,
    /// Whether each unit stays in DRAM.
    pub(super) is_resident: Vec<bool>,
}

/// What is not a linear matrix.
pub(super) struct Besides {
    pub(super) process: u64,
    pub(super) tensors: u64,
    pub(super) rings: u64,
    /// What candle's kernels allocate beside a matrix that they use.
    pub(super) scratch: u64,
    pub(super) reserve: u64,
}

/// A choice of what stays.
struct Choice {
    is_resident: Vec<bool>,
    resident_bytes: u64,
    dense_bytes: u64,
    expert_bytes: u64,
}

impl StockPlan {
    /// Plans for `units`; the error names the floor when the budget is below it.
    pub(super) fn new(units: &[Unit], besides: &Besides, memory: Option<Memory>) -> Result<Self> {
        let linear: u64 = units.iter().map(Unit::bytes).sum();
        let parts = [
            besides.process,
            besides.tensors,
            besides.rings,
            besides.scratch,
            besides.reserve,
        ];
        let fixed = parts.into_iter().fold(0, u64::saturating_add);
        let floor =
            (fixed.saturating_add(largest(units, false))).saturating_add(largest(units, true));
        let budget_bytes = match memory {
            None => u64::MAX,
            Some(Memory::Bytes(bytes)) => bytes,
            Some(Memory::Percent(percent)) => {
                let weights = (linear + besides.tensors) as f64 * percent / 100.0;
                (fixed - besides.tensors).saturating_add(weights as u64)
            }
        };
        let available = budget_bytes.checked_sub(fixed);
        let choice = available.and_then(|available| Choice::best(units, available));
        let choice = choice.ok_or_else(|| below_floor(budget_bytes, floor, besides, units))?;
        let lines = vec![
            line("process (code, tokenizer, threads)", besides.process),
            line("embeddings, norms and biases", besides.tensors),
            line("resident linear matrices", choice.resident_bytes),
            line("linear matrices read when used", choice.dense_bytes),
            line("experts read when used", choice.expert_bytes),
            line("stream rings", besides.rings),
            line("widened matrix (BF16)", besides.scratch),
            line("reserve for KV cache and activations", besides.reserve),
        ];
        let total_bytes = lines
            .iter()
            .fold(0, |sum: u64, line| sum.saturating_add(line.bytes));
        Ok(Self {
            budget_bytes: match memory {
                Some(Memory::Bytes(_)) => budget_bytes,
                _ => total_bytes,
            },
            total_bytes,
            floor_bytes: floor,
            lines,
            resident_fraction: choice.resident_bytes as f64 / linear.max(1) as f64,
            dense_bytes: choice.dense_bytes,
            expert_bytes: choice.expert_bytes,
            is_resident: choice.is_resident,
        })
    }
}

fn line(label: &'static str, bytes: u64) -> PlanLine {
    PlanLine { label, bytes }
}

/// Bytes of the largest unit of a kind, 0 without any.
fn largest(units: &[Unit], is_expert: bool) -> u64 {
    let of_kind = units.iter().filter(|unit| unit.is_expert == is_expert);
    of_kind.map(Unit::bytes).max().unwrap_or(0)
}

impl Choice {
    /// The choice that leaves the fewest dense bytes on flash; `None` when one unit of a kind does not fit.
    fn best(units: &[Unit], available: u64) -> Option<Self> {
        if units.iter().map(Unit::bytes).sum::<u64>() <= available {
            return Some(Self {
                is_resident: vec![true; units.len()],
                resident_bytes: units.iter().map(Unit::bytes).sum(),
                dense_bytes: 0,
                expert_bytes: 0,
            });
        }
        let mut order: Vec<usize> = (0..units.len())
            .filter(|&unit| !units[unit].is_expert)
            .collect();
        order.sort_by_key(|&unit| units[unit].bytes());
        let small_first = Self::keeping(units, &order, available);
        // The largest, often the head, may cost more room to stream than to keep.
        order.reverse();
        let large_first = Self::keeping(units, &order, available);
        let choices = small_first.into_iter().chain(large_first);
        choices.max_by_key(|choice| choice.resident_bytes)
    }

    /// Keeps dense units in `order` as long as the others can be streamed in what is left.
    fn keeping(units: &[Unit], order: &[usize], available: u64) -> Option<Self> {
        let expert_floor = largest(units, true);
        let available = available.checked_sub(expert_floor)?;
        let mut best = None;
        let mut resident_bytes = 0;
        for kept in 0..=order.len() {
            let (keep, stream) = order.split_at(kept);
            let largest = stream.iter().map(|&unit| units[unit].bytes()).max();
            let largest = largest.unwrap_or(0);
            let needed = largest * UNITS_AHEAD.min(stream.len() as u64);
            let Some(left) = available.checked_sub(resident_bytes) else {
                break;
            };
            // Reading ahead is worth more than the last bytes kept, but not a condition.
            if left >= needed || (kept == 0 && left >= largest) {
                let mut is_resident = vec![false; units.len()];
                keep.iter().for_each(|&unit| is_resident[unit] = true);
                let dense_bytes = left.min(needed);
                let has_experts = units.iter().any(|unit| unit.is_expert);
                best = Some(Self {
                    is_resident,
                    resident_bytes,
                    dense_bytes,
                    expert_bytes: match has_experts {
                        true => expert_floor + left - dense_bytes,
                        false => 0,
                    },
                });
            }
            if let Some(&unit) = stream.first() {
                resident_bytes += units[unit].bytes();
            }
        }
        best
    }
}

fn below_floor(budget_bytes: u64, floor: u64, besides: &Besides, units: &[Unit]) -> Error {
    use crate::memory::HumanBytes;
    let parts = [
        ("process", besides.process),
        ("embeddings, norms and biases", besides.tensors),
        ("stream rings", besides.rings),
        ("widened matrix (BF16)", besides.scratch),
        ("reserve", besides.reserve),
        ("largest linear matrix", largest(units, false)),
        ("largest expert", largest(units, true)),
    ];
    let listed = parts.map(|(label, bytes)| format!("{label} {}", HumanBytes(bytes)));
    Error::below_floor(budget_bytes, floor, listed.join(", "))
}
