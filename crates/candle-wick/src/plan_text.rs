//! The plan as `wick plan` prints it: an item a line, with its bytes.

use std::fmt;

use crate::budget::BudgetPlan;
use crate::memory::HumanBytes;

impl fmt::Display for BudgetPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(
                f,
                "{:<36} {:>12} {:>14}",
                line.label,
                HumanBytes(line.bytes).to_string(),
                line.bytes
            )?;
        }
        let total = HumanBytes(self.total_bytes).to_string();
        writeln!(
            f,
            "{:<36} {total:>12} {:>14}",
            "planned peak", self.total_bytes
        )?;
        let floor = HumanBytes(self.floor_bytes).to_string();
        writeln!(f, "{:<36} {floor:>12} {:>14}", "floor", self.floor_bytes)?;
        let share = 100.0 * self.weight_bytes as f64 / self.dense_weight_bytes.max(1) as f64;
        writeln!(
            f,
            "{:<36} {share:>11.1}%",
            "weights in DRAM, of the dense model"
        )?;
        let slots_label = match self.goes_by_columns() {
            true => "down slots per layer",
            false => "slots per layer",
        };
        for (label, slots) in [
            (slots_label, &self.slots_per_layer),
            ("channel slots per layer", &self.channel_slots_per_layer),
        ] {
            let (fewest, most) = (slots.iter().min(), slots.iter().max());
            let slots = match (fewest, most) {
                (Some(fewest), Some(most)) if fewest == most => format!("{most}"),
                (Some(fewest), Some(most)) => format!("{fewest}..{most}"),
                _ => continue,
            };
            writeln!(f, "{label:<36} {slots:>12}")?;
        }
        writeln!(f, "{:<36} {:>12}", "selector", self.selector.name())?;
        let streamed = self.streamed.len();
        write!(
            f,
            "{:<36} {streamed:>12}",
            "matrices read from flash when used"
        )
    }
}
