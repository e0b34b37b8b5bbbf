//! A model with every neuron, and the same model with the selector that was asked for: one after the other, each
//! inside the whole budget, and loaded no sooner than something has to be computed.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{ensure, Context, Result};
use candle_wick::SelectorKind;
use candle_wick_models::{plan, ContinuationScore, Error, LoadedModel};
use serde::Serialize;

use super::results::{Record, Results, Settings, Work};
use crate::args::OpenedModel;
use crate::selectors::load_with;

/// Bytes of a file in memory at one time.
const READ_BYTES: usize = 1 << 16;

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
///
/// # Errors
/// They are to be kept in `results`, and depend on which document came first.
pub(super) fn settings(
    opened: &OpenedModel,
    special_tokens: bool,
    results: Option<&Path>,
) -> Result<Settings> {
    let options = &opened.options;
    ensure!(
        results.is_none() || options.selector != Some(SelectorKind::Cats),
        "--selector cats takes its thresholds from the first tokens that it sees: what is taken up from --results would have others"
    );
    let has_density = options.selector.is_some_and(SelectorKind::has_density);
    let predictors = opened.folder.predictors_path();
    let plan = plan(&opened.folder, options)?;
    let caches = format!(
        "{:?} {:?}",
        plan.slots_per_layer, plan.channel_slots_per_layer
    );
    Ok(Settings {
        wick_results: Settings::VERSION,
        wick_version: env!("CARGO_PKG_VERSION"),
        isa: wick_kernels::isa_name(),
        model: crc32c::crc32c(opened.folder.manifest().to_json().as_bytes()),
        predictors: predictors.map(file_crc32c).transpose()?,
        special_tokens,
        dip: has_density.then(|| options.dip.to_string()),
        caches: (plan.selector == SelectorKind::DipCa).then(|| crc32c::crc32c(caches.as_bytes())),
        ctx: plan.ctx,
        memory: options.memory.map(|memory| memory.to_string()),
        slots: options.slots_per_layer,
        window: options.window_tokens,
        cache_policy: options.cache_policy.name().to_owned(),
        lookahead: options.switches.lookahead.to_string(),
    })
}

/// crc32c of a file's bytes.
fn file_crc32c(path: &Path) -> Result<u32> {
    let named = || path.display().to_string();
    let mut file = File::open(path).with_context(named)?;
    let (mut buffer, mut crc) = (vec![0; READ_BYTES], 0);
    loop {
        match file.read(&mut buffer).with_context(named)? {
            0 => return Ok(crc),
            count => crc = crc32c::crc32c_append(crc, &buffer[..count]),
        }
    }
}

/// crc32c of texts as tokens, one after the other, each with the place of its first target.
pub(super) fn ids_crc32c<'a>(texts: impl Iterator<Item = (&'a [u32], usize)>) -> u32 {
    let mut crc = 0;
    for (ids, start) in texts {
        for number in [ids.len(), start] {
            crc = crc32c::crc32c_append(crc, &(number as u64).to_le_bytes());
        }
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
    fn where_a_text_ends_and_where_its_targets_start_counts() {
        let crc = |texts: &[(&[u32], usize)]| ids_crc32c(texts.iter().copied());
        assert_eq!(
            crc(&[(&[1, 2], 1), (&[3], 0)]),
            crc(&[(&[1, 2], 1), (&[3], 0)])
        );
        assert_ne!(
            crc(&[(&[1, 2], 1), (&[3], 0)]),
            crc(&[(&[1], 1), (&[2, 3], 0)])
        );
        assert_ne!(crc(&[(&[1, 2], 1)]), crc(&[(&[2, 1], 1)]));
        assert_ne!(crc(&[(&[1, 2, 3], 1)]), crc(&[(&[1, 2, 3], 2)]));
    }

    #[test]
    fn every_byte_of_a_long_file_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut bytes = vec![7; READ_BYTES + 9];
        let mut crcs = Vec::new();
        for at in [0, READ_BYTES - 1, READ_BYTES, READ_BYTES + 8] {
            bytes[at] += 1;
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(file_crc32c(&path).unwrap(), crc32c::crc32c(&bytes));
            crcs.push(crc32c::crc32c(&bytes));
        }
        crcs.dedup();
        assert_eq!(crcs.len(), 4);
        let error = format!(
            "{:#}",
            file_crc32c(&folder.path().join("gone")).unwrap_err()
        );
        assert!(error.contains("gone"), "{error}");
    }

    #[test]
    fn nothing_computed_is_finite() {
        let report = WorkReport::of(Work::default());
        assert_eq!(report.bytes_read_per_token, 0.0);
        assert!(report.to_text().contains("0 tokens"));
    }
}
