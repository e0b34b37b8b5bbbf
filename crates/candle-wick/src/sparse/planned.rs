//! What stock models of one `FlashVarBuilder` were planned as.

use candle::DType;

use super::facts::StockFacts;
use super::options::SparseOptions;
use crate::activation::Activation;
use crate::budget::BudgetPlan;
use crate::workspace::CHUNK_TOKENS_MAX;

/// What their weights are loaded by.
pub(crate) struct Planned {
    pub(super) plan: Option<BudgetPlan>,
    pub(super) facts: StockFacts,
    pub(super) activation: Activation,
    /// What the structs compute in.
    #[cfg_attr(
        not(feature = "wick-gemm"),
        expect(dead_code, reason = "the quantized Llama computes in F32")
    )]
    pub(super) dtype: DType,
    /// Tokens of one step.
    pub(super) chunk_tokens: usize,
}

impl Planned {
    /// For the struct that `facts` are of.
    pub(super) fn new(plan: BudgetPlan, facts: StockFacts, options: &SparseOptions) -> Self {
        Self {
            activation: options.activation.unwrap_or(facts.activation),
            dtype: options.dtype,
            chunk_tokens: plan.chunk_tokens,
            plan: Some(plan),
            facts,
        }
    }

    /// For a placement that somebody made without a plan.
    pub(super) fn without_plan(facts: StockFacts) -> Self {
        Self {
            plan: None,
            activation: facts.activation,
            dtype: DType::F32,
            chunk_tokens: CHUNK_TOKENS_MAX,
            facts,
        }
    }
}
