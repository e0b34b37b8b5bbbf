//! Recording which neurons the tokens of a text have, while a model runs over it.
//!
//! The neurons of a token depend on the tokens before it alone, not on how many are computed together.
//!
//! Not here: the file (`candle_wick::RecordedTrace`).

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use candle_wick::{SelectorKind, TraceMetadata, TraceRecorder};

use crate::error::Result;
use crate::load::LoadedModel;

/// Runs `model` over `ids`, in sequences of its context, and records what its selector chose into the file `path`;
/// gives the file's size. `on_tokens` is told how many tokens are done each time.
///
/// # Errors
/// The selector chooses all neurons, which is nothing to record; the model fails; or the file cannot be written.
pub fn record_trace(
    model: &mut LoadedModel,
    ids: &[u32],
    path: &Path,
    on_tokens: &dyn Fn(usize),
) -> Result<u64> {
    let selector = model.plan().selector;
    if selector == SelectorKind::Dense {
        return Err(candle_wick::Error::Selector {
            selector: selector.name(),
            reason:
                "every token has every neuron, which is nothing to record; use oracle, lowrank or gate"
                    .to_owned(),
        }
        .into());
    }
    let manifest = model.folder().manifest();
    let metadata = TraceMetadata {
        model_type: manifest.model_type.clone(),
        model_hash: manifest.neurons_hash().to_owned(),
        selector: selector.name().to_owned(),
        is_replayed: model.is_replaying(),
        sequence_tokens: model.ctx(),
    };
    let widths = manifest.layers.iter().map(|layer| layer.intermediate_size);
    let recorder = TraceRecorder::create(path, metadata, widths)?;
    let recorder = Arc::new(Mutex::new(recorder));
    let shared = recorder.clone();
    model.record_selections(Some(Box::new(move |layer, neurons| {
        let recorder = shared.lock();
        recorder
            .unwrap_or_else(PoisonError::into_inner)
            .push(layer, neurons);
    })));
    let ran = run(model, ids, on_tokens);
    model.record_selections(None);
    ran?;
    let recorder = Arc::into_inner(recorder).expect("the model has let go of it");
    let recorder = recorder.into_inner();
    Ok(recorder.unwrap_or_else(PoisonError::into_inner).finish()?)
}

fn run(model: &mut LoadedModel, ids: &[u32], on_tokens: &dyn Fn(usize)) -> Result<()> {
    let mut done = 0;
    for sequence in ids.chunks(model.ctx()) {
        model.reset();
        for chunk in sequence.chunks(model.plan().chunk_tokens) {
            model.forward(chunk)?;
            done += chunk.len();
            on_tokens(done);
        }
    }
    Ok(())
}
