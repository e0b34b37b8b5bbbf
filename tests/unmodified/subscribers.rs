//! What else may be in the subscriber, and what may become of it while a model lives.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use candle::{Device, Tensor};
use candle_wick::stock;
use tracing::span::{Attributes, Id};
use tracing::Subscriber;
use tracing_subscriber::filter::{filter_fn, LevelFilter};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{reload, Layer};

use super::{build_llama, checkpoint, decode, in_memory, options};

/// Keeps something of its own in each span, as layers that print or time them do.
struct Notes(Arc<AtomicUsize>);

struct Note(usize);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Notes {
    fn on_new_span(&self, _: &Attributes<'_>, id: &Id, ctx: Context<'_, S>) {
        ctx.span(id).unwrap().extensions_mut().insert(Note(0));
    }

    fn on_enter(&self, id: &Id, ctx: Context<'_, S>) {
        let span = ctx.span(id).unwrap();
        let mut extensions = span.extensions_mut();
        extensions.get_mut::<Note>().unwrap().0 += 1;
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn other_layers_above_and_below_with_filters_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let build = build_llama();
    checkpoint(folder.path(), &build);
    let expected = decode(in_memory(folder.path(), &build));
    let count = || Arc::new(AtomicUsize::new(0));
    let (above, below, silent) = (count(), count(), count());
    let is_linear = filter_fn(|metadata| metadata.name() == "linear");
    let subscriber = tracing_subscriber::registry()
        .with(Notes(below.clone()).with_filter(is_linear))
        .with(stock::layer().with_filter(LevelFilter::TRACE))
        .with(Notes(silent.clone()).with_filter(LevelFilter::INFO));
    let alone = tracing_subscriber::registry()
        .with(stock::layer())
        .with(Notes(above.clone()));
    for subscriber in [
        Box::new(subscriber) as Box<dyn Subscriber + Send + Sync>,
        Box::new(alone),
    ] {
        tracing::subscriber::with_default(subscriber, || {
            let (mut forward, handle) = stock::load(folder.path(), &options(50.0), &build).unwrap();
            assert!(decode(|ids, at| handle.forward(|| forward(ids, at))) == expected);
        });
    }
    let counts = [above, below, silent].map(|count| count.load(Ordering::Relaxed));
    assert!(
        counts[0] > 0 && counts[1] > 0 && counts[2] == 0,
        "{counts:?}"
    );
}

/// A span belongs to the subscriber that it was made under.
#[test]
fn the_model_runs_where_there_is_no_subscriber_or_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let build = build_llama();
    checkpoint(folder.path(), &build);
    let expected = decode(in_memory(folder.path(), &build));
    let built = || {
        let built = super::with_layer(|| stock::load(folder.path(), &options(50.0), &build));
        built.unwrap()
    };
    let (mut forward, handle) = built();
    assert!(decode(|ids, at| handle.forward(|| forward(ids, at))) == expected);
    let (mut forward, handle) = built();
    let other = tracing_subscriber::registry().with(LevelFilter::ERROR);
    tracing::subscriber::with_default(other, || {
        assert!(decode(|ids, at| handle.forward(|| forward(ids, at))) == expected);
    });
    // The model's spans keep what they need, with or without the handle.
    let (forward, handle) = built();
    drop(handle);
    assert!(decode(forward) == expected);
}

#[test]
fn a_layer_that_goes_away_is_an_error_and_never_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let build = build_llama();
    checkpoint(folder.path(), &build);
    let (layer, reloads) = reload::Layer::new(Some(stock::layer()));
    let subscriber = tracing_subscriber::registry().with(layer);
    tracing::subscriber::with_default(subscriber, || {
        let (mut forward, handle) = stock::load(folder.path(), &options(50.0), &build).unwrap();
        reloads.reload(None).unwrap();
        let ids = Tensor::new(&[[1u32]], &Device::Cpu).unwrap();
        let error = handle.forward(|| forward(&ids, 0)).unwrap_err().to_string();
        assert!(
            error.contains("layer() is not in its subscriber"),
            "{error}"
        );
        assert!(forward(&ids, 0).is_err());
        reloads.reload(Some(stock::layer())).unwrap();
        assert!(handle.forward(|| forward(&ids, 1)).is_ok());
    });
}
