//! The same model with every neuron and with those that a selector chooses, to be set side by side.

use anyhow::{Context, Result};
use candle_wick::SelectorKind;
use candle_wick_models::{plan, LoadOptions, LoadedModel, WickTokenizer};

use crate::args::OpenedModel;

/// `dense`, and the selector that was asked for or is the model's default, where that is another.
pub(crate) fn to_compare(opened: &OpenedModel) -> Result<Vec<SelectorKind>> {
    Ok(match plan(&opened.folder, &opened.options)?.selector {
        SelectorKind::Dense => vec![SelectorKind::Dense],
        sparse => vec![SelectorKind::Dense, sparse],
    })
}

/// Loads `opened` with another selector; the model that was loaded before must be gone, to leave it the budget.
pub(crate) fn load_with(opened: &OpenedModel, selector: SelectorKind) -> Result<LoadedModel> {
    let options = LoadOptions {
        selector: Some(selector),
        ..opened.options.clone()
    };
    Ok(LoadedModel::load(opened.folder.clone(), &options)?)
}

/// The tokenizer of a model that is given text.
pub(crate) fn tokenizer(opened: &OpenedModel) -> Result<&WickTokenizer> {
    let path = opened.folder.path();
    let tokenizer = opened.tokenizer.as_ref();
    tokenizer.with_context(|| {
        format!(
            "{} has no tokenizer.json, so it takes no text",
            path.display()
        )
    })
}
