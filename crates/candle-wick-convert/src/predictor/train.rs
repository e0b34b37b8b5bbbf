//! Trained predictors: the closed form, taught on the text it was fitted on.
//!
//! For each layer, one after the other:
//! 1. the closed form of the highest rank is fitted, its lower ranks are its first directions;
//! 2. unless told otherwise, the rank is that with the least `cost` at the wanted recall, of the highest, its half, quarter and eighth:
//!    closed forms stand for what they will become, training all of them would take four times as long;
//! 3. the pair learns (`trainee`) from the closed form (`start`), or from random numbers; a part of the text that it does not
//!    learn from says when to stop, and where the threshold is;
//! 4. closed form and trained pair are measured on another such part.
//!
//! Finished layers are kept until the file is written (`work`): the same options on the same text go on where a killed run was, and
//! give the same file.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use candle::{DType, Device, Tensor};
use candle_wick::PredictorInput;
use wick_format::FfnLayer;

use super::factor::Factors;
use super::observed::{deciding, open, Observed, Wanted};
use super::parts::{count, Parts};
use super::place::place;
use super::threshold::Truth;
use super::trainee::{Lesson, Schedule, Trained, Trainee};
use super::work::Work;
use super::{cost, model_error, pair_bytes, problem_with, start};
use super::{FitOptions, FitProgress, Fitted, LayerQuality};
use crate::ConvertError;

/// Counts the changes of what is learnt from the same options and text. Layers that an earlier version of this code has left
/// are not taken up: whoever changes what `train` leads to, in this file, `trainee`, `start`, `cost`, `factor`, `cut` or
/// `parts`, adds 1.
const CODE_VERSION: u32 = 1;
/// Pairs of the layer's rank that learning holds at once: the closed form, the start, the best, the one that learns, its
/// gradients, two moments of them, and what comes and goes.
const PAIRS_HELD: u64 = 10;
/// The same of a batch's logits.
const BATCHES_HELD: u64 = 6;

/// Ranks that are compared: the highest and its halves.
const RANKS_COMPARED: usize = 4;

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// What the closed form needs as well: the rank of all but the last layers, the recall that thresholds
    /// reach, tokens, memory, the file to write.
    pub fit: FitOptions,
    /// How many layers at the end have a rank of their own; the paper found late layers harder to predict.
    pub last_layers: usize,
    /// Their rank. No rank is above that of a pair as large as the matrix it stands for.
    pub last_rank: usize,
    /// Take these ranks, and not the cheapest of them, their halves, quarters and eighths.
    pub keep_rank: bool,
    /// Times that the text is gone through at most.
    pub epochs: usize,
    /// Tokens of one step.
    pub batch_tokens: usize,
    /// Step size at its largest.
    pub learning_rate: f64,
    /// Another number gives another order of tokens, and other random numbers.
    pub seed: u64,
    /// Start at random numbers instead of the closed form.
    pub from_scratch: bool,
    /// Instead of thresholds that reach the recall: select what is active with this probability or more, by the pair's own
    /// weighted account. Each is measured, the first is written.
    pub probabilities: Vec<f64>,
    /// Where to train.
    pub device: Device,
}

impl Default for TrainOptions {
    fn default() -> Self {
        let fit = FitOptions {
            rank: 128,
            recall: 0.95,
            ..FitOptions::default()
        };
        Self {
            fit,
            last_layers: 4,
            last_rank: 1024,
            keep_rank: false,
            epochs: 4,
            batch_tokens: 256,
            learning_rate: 2e-3,
            seed: 1,
            from_scratch: false,
            probabilities: Vec::new(),
            device: Device::Cpu,
        }
    }
}

/// What was trained.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TrainReport {
    /// The file written.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Tokens learnt from, tokens for thresholds and the end of learning, tokens of the measures.
    pub tokens: [usize; 3],
    /// The layers, in order.
    pub layers: Vec<TrainedLayer>,
}

/// What became of a layer.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TrainedLayer {
    /// Rank of the pair.
    pub rank: usize,
    /// Epochs that led to the pair; 0 where learning found no better one than the start.
    pub epochs: usize,
    /// The closed form of the same rank, at the wanted recall.
    pub closed_form: LayerQuality,
    /// The trained pair, one entry for each threshold that was asked for; the first is in the file.
    pub trained: Vec<LayerQuality>,
}

impl TrainOptions {
    fn check(&self, model: &Path) -> Result<(), ConvertError> {
        let probability = |p: &f64| *p > 0.0 && *p < 1.0;
        let problem = if self.fit.rank == 0 || self.last_rank == 0 || self.batch_tokens == 0 {
            "needs ranks and tokens of a step of at least 1"
        } else if !(self.fit.recall > 0.0 && self.fit.recall <= 1.0) {
            "needs a recall above 0, at most 1"
        } else if !(self.learning_rate > 0.0 && self.learning_rate.is_finite()) {
            "needs a learning rate above 0"
        } else if !self.probabilities.iter().all(probability) {
            "needs thresholds between 0 and 1"
        } else {
            return Ok(());
        };
        Err(problem_with(model, problem.to_owned()))
    }

    /// The highest rank of layer `index` of `layers`.
    fn rank(&self, index: usize, layers: usize, layer: &FfnLayer) -> usize {
        let is_last = index + self.last_layers >= layers;
        let rank = if is_last {
            self.last_rank
        } else {
            self.fit.rank
        };
        rank.min(cost::rank_max(layer))
    }

    fn schedule(&self, index: usize) -> Schedule {
        Schedule {
            epochs: self.epochs,
            batch_tokens: self.batch_tokens,
            learning_rate: self.learning_rate,
            recall: self.fit.recall,
            seed: self.seed.wrapping_mul(1_000_003).wrapping_add(index as u64),
        }
    }

    /// Bytes that learning takes in `layer`, for so many tokens.
    fn layer_bytes(&self, layer: &FfnLayer, tokens: u64) -> u64 {
        let neurons = layer.intermediate_size as u64;
        let rank = self.fit.rank.max(self.last_rank).min(cost::rank_max(layer));
        let labels = (tokens / 8).saturating_mul(neurons);
        let logits = (4 * BATCHES_HELD * neurons).saturating_mul(self.batch_tokens as u64);
        let pairs = PAIRS_HELD * pair_bytes(layer, rank);
        pairs.saturating_add(labels).saturating_add(logits)
    }

    /// Everything that a trained pair depends on, but for the text's tokens: `parts` says what those are for, `version`
    /// counts the changes of the code.
    fn describe(&self, neurons_hash: &str, device: &str, parts: &Parts, version: u32) -> String {
        let Self {
            fit,
            last_layers,
            last_rank,
            keep_rank,
            epochs,
            batch_tokens,
            learning_rate,
            seed,
            from_scratch,
            ..
        } = self;
        format!(
            "{version} {parts:?} {neurons_hash} {device} {} {} {last_layers} {last_rank} {keep_rank} {epochs} {batch_tokens} {learning_rate} \
             {seed} {from_scratch} {}",
            fit.rank,
            fit.recall,
            env!("CARGO_PKG_VERSION")
        )
    }
}

/// Trains a predictor for each layer of the converted model on `texts`, one after the other, and writes them into a file.
///
/// # Errors
/// Options that cannot be, a model whose neurons are never exactly zero, too little text, an interrupt, or a disk that
/// refuses.
pub fn train(
    model: &Path,
    texts: &[PathBuf],
    options: &TrainOptions,
    progress: &dyn Fn(FitProgress),
) -> Result<TrainReport, ConvertError> {
    options.check(model)?;
    let out = place(model, options.fit.out.as_deref())?;
    let wanted = Wanted {
        input: PredictorInput::FfnInput,
        layer_bytes: &|layer, tokens| options.layer_bytes(layer, tokens),
    };
    let folder = open(model, None)?;
    let observed = Observed::on(folder, texts, &options.fit, &wanted, progress)?;
    let (manifest, parts) = (observed.manifest(), &observed.parts);
    let device = format!("{:?}", options.device.location());
    let described = options.describe(manifest.neurons_hash(), &device, parts, CODE_VERSION);
    let work = Work::open(&out, &described, &observed.ids)?;
    let run = Run {
        observed: &observed,
        options,
        work: &work,
        progress,
    };
    let mut fitted = Vec::new();
    let layers = observed.for_each_layer(&options.fit, &|_| {}, |index, layer| {
        let (pair, trained) = run.layer(index, layer)?;
        fitted.push(pair);
        Ok(trained)
    })?;
    let bytes = super::write_fitted(&out, manifest, &fitted, "trained")?;
    work.remove()?;
    Ok(TrainReport {
        path: out,
        bytes,
        tokens: parts.counts(),
        layers,
    })
}

/// What all layers share.
struct Run<'a> {
    observed: &'a Observed,
    options: &'a TrainOptions,
    work: &'a Work,
    progress: &'a dyn Fn(FitProgress),
}

impl Run<'_> {
    /// The pair of one layer, and what it is worth.
    fn layer(
        &self,
        index: usize,
        layer: &FfnLayer,
    ) -> Result<(Fitted, TrainedLayer), ConvertError> {
        let (options, observed) = (self.options, self.observed);
        let (weight, bias) = deciding(&observed.folder, layer).map_err(model_error)?;
        let truth = Truth {
            weight: &weight,
            bias: &bias,
            activation: observed.activation,
        };
        let fit = observed.inputs(index, &observed.parts.fit)?;
        let tune = observed.inputs(index, &observed.parts.tune)?;
        let highest = options.rank(index, observed.manifest().layers.len(), layer);
        let (rank, closed) = self
            .closed_form(layer, &truth, [&fit, &tune], highest)
            .map_err(model_error)?;
        let trained = match self.work.finished(index, layer, rank) {
            Some(trained) => trained,
            None => {
                let trained = self.learn(index, &truth, [&fit, &tune], &closed);
                let trained = trained.map_err(|error| self.stopped(error))?;
                self.work.keep(index, &trained)?;
                trained
            }
        };
        self.report(index + 1, 0);
        drop(fit);
        let measure = observed.inputs(index, &observed.parts.measure)?;
        let recall = options.fit.recall;
        let measured = |pair: &Factors, threshold| truth.quality(pair, &measure, threshold);
        let threshold = |pair: &Factors| truth.threshold(pair, &tune, recall);
        let results = || -> candle::Result<_> {
            let closed_form = measured(&closed, threshold(&closed)?)?;
            let pair = &trained.factors;
            let thresholds = match &options.probabilities[..] {
                [] => vec![threshold(pair)?],
                all => all.iter().map(|p| (p / (1.0 - p)).ln() as f32).collect(),
            };
            let each = thresholds.into_iter().map(|at| measured(pair, at));
            Ok((closed_form, each.collect::<candle::Result<_>>()?))
        };
        let (closed_form, of_trained): (_, Vec<LayerQuality>) = results().map_err(model_error)?;
        let Trained { factors, epochs } = trained;
        let fitted = Fitted::of(&factors, of_trained[0]).map_err(model_error)?;
        let report = TrainedLayer {
            rank,
            epochs,
            closed_form,
            trained: of_trained,
        };
        Ok((fitted, report))
    }

    /// The rank to train, and the closed form of that rank as a file would hold it.
    fn closed_form(
        &self,
        layer: &FfnLayer,
        truth: &Truth<'_>,
        [fit, tune]: [&Tensor; 2],
        highest: usize,
    ) -> candle::Result<(usize, Factors)> {
        let widest = Factors::fit(truth.weight, truth.bias, fit, highest)?;
        let mean = fit.mean(0)?;
        let of_rank = |rank: usize| widest.narrowed(rank, &mean)?.rounded(DType::F16);
        if self.options.keep_rank {
            return Ok((highest, of_rank(highest)?));
        }
        let mut best: Option<(f64, usize, Factors)> = None;
        let mut memory_bytes = None;
        for halvings in 0..RANKS_COMPARED {
            let rank = (highest >> halvings).max(1);
            let pair = of_rank(rank)?;
            let threshold = truth.threshold(&pair, tune, self.options.fit.recall)?;
            let quality = truth.quality(&pair, tune, threshold)?;
            let memory_bytes =
                *memory_bytes.get_or_insert_with(|| cost::memory_bytes(layer, rank, &quality));
            let bytes = cost::token_bytes(layer, rank, &quality, memory_bytes);
            // Of ranks that cost the same, the lowest multiplies least.
            if best.as_ref().is_none_or(|(least, ..)| bytes <= *least) {
                best = Some((bytes, rank, pair));
            }
        }
        let (_, rank, pair) = best.expect("at least one rank is compared");
        Ok((rank, pair))
    }

    fn learn(
        &self,
        index: usize,
        truth: &Truth<'_>,
        [fit, tune]: [&Tensor; 2],
        closed: &Factors,
    ) -> candle::Result<Trained> {
        let lesson = |x: &Tensor| -> candle::Result<Lesson> {
            let labels = truth.labels(x)?;
            Ok(Lesson {
                x: x.clone(),
                labels,
            })
        };
        let (lesson, exam) = (lesson(fit)?, lesson(tune)?);
        let schedule = self.options.schedule(index);
        let first = if self.options.from_scratch {
            let (neurons, hidden) = truth.weight.dims2()?;
            start::random(hidden, neurons, closed.rank(), schedule.seed)?
        } else {
            let negative = lesson.labels.active_fraction() + super::trainee::NEGATIVE_WEIGHT_MIN;
            start::calibrated(closed, truth, fit, negative)?
        };
        let step = Cell::new(0);
        let mut on_step = || {
            step.set(step.get() + 1);
            self.report(index, step.get());
            match self.options.fit.interrupt.is_triggered() {
                true => Err(candle::Error::msg("interrupted")),
                false => Ok(()),
            }
        };
        Trainee::new(&first, &self.options.device)?.learn(&lesson, &exam, &schedule, &mut on_step)
    }

    /// An interrupt, or what else ended learning.
    fn stopped(&self, error: candle::Error) -> ConvertError {
        match self.options.fit.interrupt.is_triggered() {
            true => candle_wick_models::Error::Interrupted.into(),
            false => model_error(error),
        }
    }

    /// Tells that `layers` layers and `steps` steps are done.
    fn report(&self, layers: usize, steps: usize) {
        let of_layer = self
            .options
            .schedule(0)
            .steps(count(&self.observed.parts.fit));
        (self.progress)(FitProgress {
            step: "steps",
            done: layers * of_layer + steps,
            total: self.observed.manifest().layers.len() * of_layer,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was kept by a killed run is taken up by the same code for the same work alone.
    #[test]
    fn layers_of_other_options_tokens_or_code_go_by_another_name() {
        let parts = Parts::of(&[1000, 500]);
        let options = TrainOptions::default();
        let key = options.describe("hash", "cpu", &parts, CODE_VERSION);
        assert_eq!(key, options.describe("hash", "cpu", &parts, CODE_VERSION));
        let mut others = vec![
            options.describe("hash", "cpu", &parts, CODE_VERSION + 1),
            options.describe("hash", "cpu", &Parts::of(&[1500]), CODE_VERSION),
            options.describe("hash", "cuda", &parts, CODE_VERSION),
            options.describe("other", "cpu", &parts, CODE_VERSION),
        ];
        let changes: [fn(&mut TrainOptions); 10] = [
            |options| options.fit.rank += 1,
            |options| options.fit.recall = 0.5,
            |options| options.last_layers += 1,
            |options| options.last_rank += 1,
            |options| options.keep_rank = true,
            |options| options.epochs += 1,
            |options| options.batch_tokens += 1,
            |options| options.learning_rate = 1.0,
            |options| options.seed += 1,
            |options| options.from_scratch = true,
        ];
        for change in changes {
            let mut options = TrainOptions::default();
            change(&mut options);
            others.push(options.describe("hash", "cpu", &parts, CODE_VERSION));
        }
        for (index, other) in others.iter().enumerate() {
            assert_ne!(&key, other, "{index}");
            assert!(!others[..index].contains(other), "{index}");
        }
    }
}
