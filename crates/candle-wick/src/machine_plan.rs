//! A plan for this machine: with what the process holds by now, and within the memory that is free.
//!
//! Not here: sharing out the budget (`budget`).

use wick_io::{available_memory_bytes, current_rss_bytes, release_free_heap};

use crate::budget::{BudgetPlan, ModelNeeds, PlanOptions};
use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::memory::Memory;

/// What a compute thread touches of its stack and of its queues once it computes: with 200 of them a process grew by 10 MB after planning.
const STACK_BYTES: u64 = 56 << 10;
/// Without a budget, this share of the memory that is free may be used.
const FREE_SHARE: f64 = 0.9;

impl BudgetPlan {
    /// As [`Self::new`], `process_bytes` being what is measured now and comes with threads; without a budget as much as 90 % of the
    /// free memory allows.
    ///
    /// # Errors
    /// As of [`Self::new`], or a plan by percent needs more memory than is free.
    pub fn for_machine(
        folder: &FlashFolder,
        needs: &ModelNeeds,
        mut options: PlanOptions,
    ) -> Result<Self> {
        // What was left free would be counted here and used again below.
        release_free_heap();
        let stacks = STACK_BYTES * rayon::current_num_threads() as u64;
        options.process_bytes = current_rss_bytes().unwrap_or(0) + stacks;
        let plan = Self::new(folder, needs, &options)?;
        let Some(available_bytes) = available_memory_bytes() else {
            return Ok(plan);
        };
        let free_bytes = (available_bytes as f64 * FREE_SHARE) as u64;
        let needed_bytes = plan.total_bytes.saturating_sub(options.process_bytes);
        match options.memory {
            None if plan.total_bytes > free_bytes => {
                options.memory = Some(Memory::Bytes(free_bytes));
                Self::new(folder, needs, &options)
            }
            // A share of the weights does not bound the rest, above all the KV cache of a long context.
            Some(Memory::Percent(_)) if needed_bytes > available_bytes => Err(Error::MemoryFull {
                needed_bytes,
                available_bytes,
            }),
            _ => Ok(plan),
        }
    }
}
