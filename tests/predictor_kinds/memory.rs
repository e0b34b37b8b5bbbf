//! What predictors take in memory beside their tensors is planned.

use candle_wick::{BudgetPlan, SelectorKind};
use candle_wick_models::{plan, LoadOptions};
use wick_format::StoredDtype;
use wick_kernels::PackedBits;

use super::file::PredictorTensors;
use super::Case;

fn plan_with(case: &Case, file: &PredictorTensors, selector: Option<SelectorKind>) -> BudgetPlan {
    let options = LoadOptions {
        selector,
        ..LoadOptions::default()
    };
    plan(&case.with(file).unwrap(), &options).unwrap()
}

fn scratch_bytes(plan: &BudgetPlan) -> u64 {
    let line = plan.lines.iter().find(|line| line.label == "scratch");
    line.unwrap().bytes
}

/// A pair keeps what lies between its matrices twice, by row and by token, in f32: for the tokens of a step, and the highest
/// rank of all layers.
#[test]
fn what_lies_between_a_pair_is_in_the_plan() {
    let case = Case::of("opt-pre-ln");
    let folder = case.open();
    let gate = PredictorTensors::gate(&folder, "ffn_input", PackedBits::Two);
    let pair = PredictorTensors::low_rank(&folder, "ffn_input", "relu", StoredDtype::F16);
    let mut higher = pair.clone();
    higher.retype("layers.1.predictor.down.weight", None, &[200, 64]);
    higher.retype("layers.1.predictor.up.weight", None, &[256, 200]);
    let without = plan_with(&case, &gate, None);
    let plans = [(8, &pair), (200, &higher)];
    for (rank, file) in plans {
        let with = plan_with(&case, file, None);
        assert_eq!(with.chunk_tokens, without.chunk_tokens);
        let added = scratch_bytes(&with) - scratch_bytes(&without);
        assert_eq!(added, 2 * 4 * rank * with.chunk_tokens as u64);
        let dense = plan_with(&case, file, Some(SelectorKind::Dense));
        assert_eq!(scratch_bytes(&dense), scratch_bytes(&without));
    }
    // A number that no file backs is none of a rank: it is refused at load, and nothing is planned by it.
    let mut lie = pair.clone();
    lie.retype("layers.1.predictor.down.weight", None, &[5000, 0]);
    let plan = plan_with(&case, &lie, None);
    assert_eq!(
        scratch_bytes(&plan),
        scratch_bytes(&plan_with(&case, &pair, None))
    );
}
