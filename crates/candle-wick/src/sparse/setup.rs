//! How stock models of one `FlashVarBuilder` are loaded: by a plan, or for a placement that somebody made.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use candle::DType;

use super::facts::{StockFacts, StructKind};
use super::options::SparseOptions;
use crate::activation::Activation;
use crate::budget::BudgetPlan;
use crate::error::{Error, Result};
use crate::var_builder::FlashVarBuilder;
use crate::workspace::CHUNK_TOKENS_MAX;

/// What their weights are loaded by.
pub(crate) struct StockSetup {
    pub(super) plan: Option<BudgetPlan>,
    pub(super) facts: StockFacts,
    pub(super) activation: Activation,
    /// What the structs compute in.
    #[cfg_attr(
        not(feature = "wick-gemm"),
        expect(dead_code, reason = "the quantized Llama has but one")
    )]
    pub(super) dtype: DType,
    /// Tokens of one step.
    pub(super) chunk_tokens: usize,
    /// Whether the weights of the plan are there.
    is_loaded: AtomicBool,
}

impl StockSetup {
    pub(super) fn planned(
        plan: BudgetPlan,
        facts: StockFacts,
        activation: Activation,
        options: &SparseOptions,
    ) -> Self {
        Self {
            activation,
            dtype: options.dtype,
            chunk_tokens: plan.chunk_tokens,
            plan: Some(plan),
            facts,
            is_loaded: AtomicBool::new(false),
        }
    }

    fn for_placement(facts: StockFacts, activation: Activation) -> Self {
        Self {
            plan: None,
            activation,
            dtype: DType::F32,
            chunk_tokens: CHUNK_TOKENS_MAX,
            facts,
            is_loaded: AtomicBool::new(false),
        }
    }

    /// Runs `load`, but not a second time where what it loads was planned once.
    pub(super) fn load_once<T>(&self, load: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.plan.is_some() && self.is_loaded.swap(true, Ordering::Relaxed) {
            let reason =
                "the planned weights are loaded already: clone the model, or plan for another one";
            return Err(Error::Stock {
                reason: reason.to_owned(),
            });
        }
        let loaded = load();
        if loaded.is_err() {
            self.is_loaded.store(false, Ordering::Relaxed);
        }
        loaded
    }
}

impl FlashVarBuilder {
    /// What was planned for structs of this kind, or else what `facts` say.
    pub(super) fn setup_for(
        &self,
        kind: StructKind,
        facts: impl FnOnce() -> Result<StockFacts>,
    ) -> Result<Arc<StockSetup>> {
        match self.setup() {
            None => {
                let facts = facts()?;
                let activation = facts.activation_for(self.folder(), None)?;
                Ok(StockSetup::for_placement(facts, activation).into())
            }
            Some(setup) if setup.facts.kind == kind => Ok(setup.clone()),
            Some(_) => {
                let constructor = kind.constructor();
                let reason = format!("the budget was planned for another struct: FlashVarBuilder::{constructor} plans for this one");
                Err(Error::Stock { reason })
            }
        }
    }
}
