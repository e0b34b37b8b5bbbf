//! The `VarBuilder` backends that a stock model is built from: one that only writes down what is asked for, and
//! one that hands out weights and placeholders.
//!
//! What belongs to a linear layer is known by the initialisation that `candle_nn` asks for with it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;

use super::buffer::without_values;
use super::layer::{announce, Announced};
use super::source::{load_one, StockSource};
use super::store::Store;
use crate::error::{Error, Result};
use crate::stored::StreamRing;

/// A tensor that a model asked for.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) name: String,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
    /// Whether it is the weight of a linear layer.
    pub(super) is_linear: bool,
}

/// What a model asked for, in order, and how many "linear" spans came of it.
#[derive(Default)]
pub(super) struct Requests {
    pub(super) list: Mutex<Vec<Request>>,
    pub(super) spans: Arc<AtomicUsize>,
    /// The first matrix whose span did not come before the next matrix was asked for.
    pub(super) without_span: OnceLock<String>,
    /// The first request that was refused.
    pub(super) refused: OnceLock<String>,
}

impl Requests {
    pub(super) fn take(&self) -> Vec<Request> {
        std::mem::take(&mut self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn span_count(&self) -> usize {
        self.spans.load(Ordering::Relaxed)
    }

    /// Keeps a refusal, for constructors that panic on it.
    fn noting<T>(&self, outcome: Result<T>) -> candle::Result<T> {
        if let Err(error) = &outcome {
            self.refused.get_or_init(|| error.to_string());
        }
        Ok(outcome?)
    }
}

/// Times that a tensor may be asked for, by name and dtype.
pub(super) type Unclaimed = HashMap<(String, DType), usize>;

/// Writes down requests and answers with placeholders.
pub(super) struct Recorder {
    pub(super) source: Arc<StockSource>,
    pub(super) requests: Arc<Requests>,
}

/// Hands out the weights that stay in DRAM, and placeholders of those that do not.
pub(super) struct Weights {
    pub(super) source: Arc<StockSource>,
    pub(super) ring: Mutex<StreamRing>,
    pub(super) store: Arc<Store>,
    /// Matrix number of each placeholder.
    pub(super) streamed: BTreeMap<String, usize>,
    /// How often each tensor was planned for and not asked for yet.
    pub(super) unclaimed: Arc<Mutex<Unclaimed>>,
    pub(super) requests: Arc<Requests>,
}

/// The sentence for a matrix whose span did not come.
pub(super) fn no_span(name: &str) -> Error {
    Error::Stock {
        reason: format!(
            "no span followed the linear layer of {name}: either candle_wick::stock::layer() is not part of the \
             current tracing subscriber, or the subscriber or the build (release_max_level_*) leaves out spans \
             of level TRACE, or this model's linear layers have no spans (Falcon, Gemma and OLMo of \
             candle_transformers) and cannot be streamed"
        ),
    }
}

/// Awaits the span of a matrix.
///
/// That another one's did not come is noted and no error yet: some constructors panic on errors, and the builder is
/// asked for the note in the end.
fn expect_span(name: &str, matrix: Option<(Arc<Store>, usize)>, requests: &Requests) {
    let before = announce(Some(Announced {
        name: name.to_owned(),
        matrix,
        found: requests.spans.clone(),
    }));
    if let Some(before) = before {
        requests.without_span.get_or_init(|| before.name);
    }
}

fn check(source: &StockSource, shape: &Shape, name: &str, device: &Device) -> Result<()> {
    if !device.is_cpu() {
        let reason = "weights are streamed to the CPU only".to_owned();
        return Err(Error::Stock { reason });
    }
    let got = source.shape(name).ok_or_else(|| no_tensor(name))?;
    if got != shape.dims() {
        let (name, expected) = (name.to_owned(), shape.dims().to_vec());
        return Err(Error::Shape {
            name,
            expected,
            got,
        });
    }
    Ok(())
}

/// The sentence for a constructor that asks for something else the second time.
pub(super) fn other_build(name: &str) -> Error {
    Error::Stock {
        reason: format!(
            "the model was built twice and did not ask for {name} in the same dtype and as often both times: a plan \
             made from the first build does not fit the second"
        ),
    }
}

fn no_tensor(name: &str) -> Error {
    Error::Stock {
        reason: format!("the weights have no tensor {name}"),
    }
}

impl Recorder {
    fn answer(&self, request: Request, device: &Device) -> Result<Tensor> {
        check(&self.source, &request.shape, &request.name, device)?;
        // Neither takes memory. A model may look at what is no linear matrix while it is built.
        let tensor = if request.is_linear {
            expect_span(&request.name, None, &self.requests);
            without_values(request.dtype, request.shape.clone())?
        } else {
            let zero = Tensor::zeros((), request.dtype, &Device::Cpu)?;
            zero.broadcast_as(request.shape.clone())?
        };
        let mut list = self
            .requests
            .list
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        list.push(request);
        Ok(tensor)
    }
}

impl SimpleBackend for Recorder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle::Result<Tensor> {
        let request = Request {
            name: name.to_owned(),
            is_linear: shape.rank() == 2 && matches!(init, Init::Kaiming { .. }),
            shape,
            dtype,
        };
        self.requests.noting(self.answer(request, device))
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle::Result<Tensor> {
        let shape = self.source.shape(name).ok_or_else(|| no_tensor(name));
        let shape = self.requests.noting(shape)?;
        self.get(shape.into(), name, Init::Const(0.0), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.source.shape(name).is_some()
    }
}

impl Weights {
    fn answer(&self, shape: Shape, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        check(&self.source, &shape, name, device)?;
        let unclaimed = self.unclaimed.lock();
        let mut unclaimed = unclaimed.unwrap_or_else(PoisonError::into_inner);
        match unclaimed.get_mut(&(name.to_owned(), dtype)) {
            Some(times) if *times > 0 => *times -= 1,
            _ => return Err(other_build(name)),
        }
        drop(unclaimed);
        if let Some(&matrix) = self.streamed.get(name) {
            expect_span(name, Some((self.store.clone(), matrix)), &self.requests);
            return Ok(self.store.shared().placeholder(matrix));
        }
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        load_one(&self.source, &mut ring, name, dtype)?.into_tensor(shape)
    }
}

impl SimpleBackend for Weights {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle::Result<Tensor> {
        self.requests
            .noting(self.answer(shape, name, dtype, device))
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle::Result<Tensor> {
        let shape = self.source.shape(name).ok_or_else(|| no_tensor(name));
        let shape = self.requests.noting(shape)?;
        self.get(shape.into(), name, Init::Const(0.0), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.source.shape(name).is_some()
    }
}
