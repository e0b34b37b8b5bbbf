//! A model with every neuron, and the same model with the selector that was asked for: one after the other, each
//! inside the whole budget, and loaded no sooner than something has to be computed.

use anyhow::Result;
use candle_wick::SelectorKind;
use candle_wick_models::{plan, ContinuationScore, Error, LoadedModel};
use serde::Serialize;

use super::results::{Record, Results, Settings, Work};
use crate::args::OpenedModel;
use crate::selectors::load_with;

/// What is asked of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question<'a> {
    pub(super) task: &'a str,
    pub(super) doc: u64,
    pub(super) ids_crc32c: u32,
    pub(super) choices: usize,
    pub(super) cut_tokens: u64,
}

/// One selector's runs.
pub(super) struct Side<'a> {
    opened: &'a OpenedModel,
    selector: SelectorKind,
    model: Option<LoadedModel>,
}

impl<'a> Side<'a> {
    pub(super) fn new(opened: &'a OpenedModel, selector: SelectorKind) -> Self {
        Self {
            opened,
            selector,
            model: None,
        }
    }

    /// Its selector.
    pub(super) fn selector(&self) -> SelectorKind {
        self.selector
    }

    /// The record that answers `question`: from `results`, or by `score`, and then kept there.
    pub(super) fn answer(
        &mut self,
        question: Question<'_>,
        results: &mut Results,
        score: impl FnOnce(&mut LoadedModel) -> candle_wick_models::Result<Vec<ContinuationScore>>,
    ) -> Result<Record> {
        let Question { task, doc, .. } = question;
        let key = (self.selector.name(), task, doc);
        if let Some(found) = results.get(key, question.ids_crc32c, question.choices)? {
            return Ok(found.clone());
        }
        let interrupt = &self.opened.options.interrupt;
        if interrupt.is_triggered() {
            return Err(Error::Interrupted.into());
        }
        let model = match &mut self.model {
            Some(model) => model,
            empty => empty.insert(load_with(self.opened, self.selector)?),
        };
        model.reset_stats();
        let bytes_before = model.folder().io_counters().bytes;
        let scores = score(model)?;
        let (stats, layers) = (model.stats(), model.folder().manifest().layers.len());
        let record = Record {
            selector: self.selector.name().to_owned(),
            task: task.to_owned(),
            doc,
            ids_crc32c: question.ids_crc32c,
            logprobs: scores.iter().map(|score| score.logprob).collect(),
            is_greedy: scores.iter().map(|score| score.is_greedy).collect(),
            cut_tokens: question.cut_tokens,
            work: Work {
                tokens: stats.tokens / layers.max(1) as u64,
                bytes_read: model.folder().io_counters().bytes - bytes_before,
                selected: stats.selected,
                neurons: stats.neurons,
            },
        };
        results.push(record.clone())?;
        Ok(record)
    }
}

/// What a side's runs took, added up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct WorkReport {
    /// Tokens that went through the model.
    tokens: u64,
    bytes_read_per_token: f64,
    /// Share of the FFN's neurons that a token selected.
    selected_fraction: f64,
}

impl WorkReport {
    pub(super) fn of(work: Work) -> Self {
        let ratio = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        Self {
            tokens: work.tokens,
            bytes_read_per_token: ratio(work.bytes_read, work.tokens),
            selected_fraction: ratio(work.selected, work.neurons),
        }
    }

    /// For people.
    pub(super) fn to_text(self) -> String {
        format!(
            "{:.1} % of the FFN selected, {} read per token, {} tokens computed",
            100.0 * self.selected_fraction,
            candle_wick::HumanBytes(self.bytes_read_per_token as u64),
            self.tokens
        )
    }
}

/// What the scores of a run depend on.
pub(super) fn settings(opened: &OpenedModel, special_tokens: bool) -> Result<Settings> {
    let options = &opened.options;
    let crc = |text: &str| crc32c::crc32c(text.as_bytes());
    let predictors = opened.folder.predictors().ok().flatten();
    Ok(Settings {
        wick_results: Settings::VERSION,
        model: crc(&opened.folder.manifest().to_json()),
        predictors: predictors.map(|found| crc(&format!("{:?}", found.to_map()))),
        special_tokens,
        ctx: plan(&opened.folder, options)?.ctx,
        memory: options.memory.map(|memory| memory.to_string()),
        slots: options.slots_per_layer,
        window: options.window_tokens,
        cache_policy: options.cache_policy.name().to_owned(),
        lookahead: options.switches.lookahead.to_string(),
    })
}

/// crc32c of lists of tokens, one after the other.
pub(super) fn ids_crc32c<'a>(lists: impl Iterator<Item = &'a [u32]>) -> u32 {
    let mut crc = 0;
    for ids in lists {
        crc = crc32c::crc32c_append(crc, &(ids.len() as u64).to_le_bytes());
        for id in ids {
            crc = crc32c::crc32c_append(crc, &id.to_le_bytes());
        }
    }
    crc
}

/// Whether an error says only that somebody asked to stop.
pub(super) fn is_interruption(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Interrupted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_list_ends_counts() {
        let crc = |lists: &[&[u32]]| ids_crc32c(lists.iter().copied());
        assert_eq!(crc(&[&[1, 2], &[3]]), crc(&[&[1, 2], &[3]]));
        assert_ne!(crc(&[&[1, 2], &[3]]), crc(&[&[1], &[2, 3]]));
        assert_ne!(crc(&[&[1, 2]]), crc(&[&[2, 1]]));
    }

    #[test]
    fn nothing_computed_is_finite() {
        let report = WorkReport::of(Work::default());
        assert_eq!(report.bytes_read_per_token, 0.0);
        assert!(report.to_text().contains("0 tokens"));
    }
}
