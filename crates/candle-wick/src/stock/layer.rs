//! The `tracing_subscriber` layer that brings matrices in when their span is entered.
//!
//! Candle's `with_tracing::Linear` makes a span "linear" right after it asked the `VarBuilder` for its weight.
//! Whoever hands out a placeholder leaves its matrix in [`announce`]; the next "linear" span of the thread is its
//! own. The matrix is kept in the span's extensions, so layers, subscribers and models do not know each other.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::Subscriber;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::Layer;

use super::store::Store;
use crate::error::{Error, Result};

/// The name of the span around every linear layer of `candle_transformers`.
const LINEAR: &str = "linear";

/// A matrix whose span is awaited.
pub(super) struct Announced {
    pub(super) name: String,
    /// The matrix to bring in; `None` while a model is only being looked at.
    pub(super) matrix: Option<(Arc<Store>, usize)>,
    /// Counts the spans that came.
    pub(super) found: Arc<AtomicUsize>,
}

thread_local! {
    static ANNOUNCED: RefCell<Option<Announced>> = const { RefCell::new(None) };
}

/// Announces a matrix on this thread; gives back one whose span has not come.
pub(super) fn announce(announced: Option<Announced>) -> Option<Announced> {
    ANNOUNCED.with(|place| place.replace(announced))
}

/// Refuses a build whose `tracing` leaves spans out (features `max_level_*` and `release_max_level_*`).
pub(super) fn check_compiled_in(max: LevelFilter) -> Result<()> {
    if max >= LevelFilter::TRACE {
        return Ok(());
    }
    Err(Error::Stock {
        reason: format!(
            "this build leaves out spans of level TRACE: a crate of it switches on a feature of tracing that limits \
             levels to {max} (max_level_* or release_max_level_*)"
        ),
    })
}

/// The layer; one serves all models. See [`layer`].
pub struct StockLayer {
    _private: (),
}

/// A layer for the subscriber under which models are built with [`load`](super::load) and run.
///
/// It needs to see spans of level TRACE: filter other layers one by one (`Layer::with_filter`), not the whole
/// subscriber.
pub fn layer() -> StockLayer {
    StockLayer { _private: () }
}

/// A span's own matrix.
#[derive(Clone)]
struct Bound {
    store: Arc<Store>,
    matrix: usize,
}

impl<S> Layer<S> for StockLayer
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, ctx: Context<'_, S>) {
        if attributes.metadata().name() != LINEAR {
            return;
        }
        let Some(announced) = announce(None) else {
            return;
        };
        announced.found.fetch_add(1, Ordering::Relaxed);
        if let (Some((store, matrix)), Some(span)) = (announced.matrix, ctx.span(id)) {
            span.extensions_mut().replace(Bound { store, matrix });
        }
    }

    fn on_enter(&self, id: &Id, ctx: Context<'_, S>) {
        if let Some(Bound { store, matrix }) = bound(id, &ctx) {
            store.shared().enter(matrix);
        }
    }

    fn on_exit(&self, id: &Id, ctx: Context<'_, S>) {
        if let Some(Bound { store, matrix }) = bound(id, &ctx) {
            store.shared().exit(matrix);
        }
    }
}

/// A copy, so that nothing of the span is locked while its matrix is waited for.
fn bound<S>(id: &Id, ctx: &Context<'_, S>) -> Option<Bound>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    let span = ctx.span(id)?;
    let extensions = span.extensions();
    extensions.get::<Bound>().cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_spans_is_refused_by_its_feature() {
        assert!(check_compiled_in(LevelFilter::TRACE).is_ok());
        for max in [LevelFilter::OFF, LevelFilter::INFO, LevelFilter::DEBUG] {
            let message = check_compiled_in(max).unwrap_err().to_string();
            assert!(message.contains("release_max_level_"), "{message}");
        }
    }
}
