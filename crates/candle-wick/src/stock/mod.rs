//! Unmodified `candle_transformers` models with less memory than their weights, exactly.
//!
//! ```no_run
//! # use candle::{DType, Tensor}; use candle_wick::stock; use tracing_subscriber::layer::SubscriberExt;
//! # use tracing_subscriber::util::SubscriberInitExt;
//! # fn build(vb: candle_nn::VarBuilder) -> candle::Result<candle_nn::Linear> { candle_nn::linear(1, 1, vb) }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! tracing_subscriber::registry().with(stock::layer()).init();
//! let options = stock::StockOptions { memory: Some("4GiB".parse()?), ..Default::default() };
//! let (model, handle) = stock::load("llama-2-7b", &options, |vb| build(vb))?; // candle's own constructor
//! # let x = Tensor::zeros((1, 1), DType::F32, &candle::Device::Cpu)?;
//! let logits = handle.forward(|| candle::Module::forward(&model, &x))?;
//! # Ok(()) }
//! ```
//!
//! The `VarBuilder` hands out tensors without values for the linear matrices that do not fit. Candle wraps each linear
//! layer in a tracing span; [`layer`] brings the values in when the span is entered and takes them out when it is left.
//! The numbers are those of the model in memory, bit for bit: the same values meet the same kernels. Used at any other
//! time, by a model that computes with its weights while it is built or once the layer is gone, such a tensor is an
//! error.
//!
//! [`load`] calls its closure twice: once to see what the model asks for, once to build it.
//!
//! Works with models whose linear layers have spans (`candle_transformers::models::with_tracing`): Llama,
//! Mistral, Phi, Phi-3, Qwen2, Qwen3, Mixtral, Qwen3-MoE and others. Of a mixture of experts only the experts
//! that were routed to are read. Others are refused when they are built.
//!
//! Not here: sparsity inside an FFN: [`FlashVarBuilder::sparse`](crate::FlashVarBuilder), with another gemm, or our own definitions
//! (`candle-wick-models`).

mod backend;
pub(crate) mod buffer;
mod layer;
mod plan;
mod pool;
mod source;
mod store;
#[cfg(test)]
mod tests;
mod unit;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use candle::{DType, Device};
use candle_nn::VarBuilder;

use self::backend::{no_span, other_build, Recorder, Request, Requests, Unclaimed, Weights};
use self::buffer::{is_away, without_values};
use self::layer::{announce, check_compiled_in};
use self::plan::Besides;
use self::source::StockSource;
use self::store::{Store, LOADERS};
use self::unit::{largest_block_bytes, StreamedMatrix, Unit};
use crate::error::{Error, Result};
use crate::io_options::IoOptions;
use crate::memory::Memory;
use crate::stored::StreamRing;

pub use self::layer::{layer, StockLayer};
pub use self::plan::StockPlan;

/// Pages that a process still touches after planning: code, stacks, small allocations.
const LATER_PAGES_BYTES: u64 = 4 << 20;

/// How to run a stock model.
#[derive(Clone, Debug)]
pub struct StockOptions {
    /// The budget; `None` keeps everything in DRAM.
    pub memory: Option<Memory>,
    /// The dtype that the model computes in: F32, F16 or BF16.
    pub dtype: DType,
    /// What the model allocates itself, for the budget: KV cache, activations, logits.
    ///
    /// The default is enough for short prompts of models of a few hundred million parameters. The KV cache takes
    /// `2 * layers * kv_heads * head_dim * dtype bytes` a token, the activations of a prompt of `n` tokens about
    /// `4 n (4 * intermediate_size + 3 * heads * n)` bytes: 512 tokens of a model of hidden size 1024 with FFNs of 4096
    /// and 16 heads took 90 MiB, those of a 7B model need 0.2 GB, and 0.5 GB of KV cache in F32.
    pub reserve_bytes: u64,
    /// Which expert leaves when another one needs its place.
    pub expert_policy: ExpertPolicy,
    /// How files are read.
    pub io: IoOptions,
}

impl Default for StockOptions {
    fn default() -> Self {
        Self {
            memory: None,
            dtype: DType::F32,
            reserve_bytes: 64 << 20,
            expert_policy: ExpertPolicy::Lfu,
            io: IoOptions::default(),
        }
    }
}

/// Which expert leaves when another one needs its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPolicy {
    /// The one used fewest times, of those the one used the longest ago.
    Lfu,
    /// The one used the longest ago.
    Window,
}

/// What was read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StockStats {
    /// Units loaded: matrices, or what is read together with them.
    pub loads: u64,
    /// Times that a unit was used.
    pub uses: u64,
    /// Times that it was still on flash then, and not on its way.
    pub misses: u64,
    /// Bytes read from the device, with those of loading.
    pub bytes: u64,
}

/// A built model's side of the store.
pub struct StockHandle {
    store: Arc<Store>,
    plan: StockPlan,
    running: Mutex<()>,
}

impl StockHandle {
    /// Runs a forward pass (or several).
    ///
    /// # Errors
    /// Another one of this model is running, `forward` failed, or weights could not be read.
    pub fn forward<T>(&self, forward: impl FnOnce() -> candle::Result<T>) -> candle::Result<T> {
        let _running = match self.running.try_lock() {
            Ok(running) => running,
            // The spans of a forward that panicked were left one by one, so nothing is amiss.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let reason = "a forward of this model is running: one at a time".to_owned();
                return Err(Error::Stock { reason }.into());
            }
        };
        drop(self.store.shared().take_error()); // of a forward that did not come through here, or panicked
        let result = forward();
        match self.store.shared().take_error() {
            Some(error) => Err(error.into()),
            None => result.map_err(explained),
        }
    }

    /// What is in DRAM.
    pub fn plan(&self) -> &StockPlan {
        &self.plan
    }

    /// What was read so far.
    pub fn stats(&self) -> StockStats {
        self.store.shared().stats()
    }
}

/// Builds a model from the weights at `path`: a converted folder, or safetensors as they were downloaded.
///
/// `build` is called twice and has to ask for the same tensors both times.
///
/// # Errors
/// The weights are damaged or lack a tensor, the budget is below the floor, or spans do not reach [`layer`].
pub fn load<M>(
    path: impl AsRef<Path>,
    options: &StockOptions,
    build: impl Fn(VarBuilder<'static>) -> candle::Result<M>,
) -> Result<(M, StockHandle)> {
    check_compiled_in(tracing::level_filters::STATIC_MAX_LEVEL)?;
    let source = Arc::new(StockSource::open(path.as_ref(), options.io.clone())?);
    let dtype = options.dtype;
    let list = asked_for(&source, &build, dtype)?;
    let (units, names) = units_of(&source, &list)?;
    let rings = 1 + LOADERS as u64;
    let block_bytes = largest_block_bytes(&units).max(source.block_bytes());
    // Several loaders read at once: short rings keep the device busy.
    let ring = StreamRing::new(block_bytes, 0)?;
    let besides = Besides {
        process: wick_io::current_rss_bytes().unwrap_or(0) + LATER_PAGES_BYTES,
        tensors: other_bytes(&list, &names),
        rings: (rings - 1) * ring.bytes(),
        scratch: widened_bytes(&list),
        reserve: options.reserve_bytes,
    };
    let plan = StockPlan::new(&units, &besides, options.memory)?;
    let (units, matrices) = streamed(&plan, units, &names, &list)?;
    let streamed = matrices.iter().enumerate();
    let streamed: BTreeMap<String, usize> = streamed
        .map(|(index, matrix)| (matrix.name.clone(), index))
        .collect();
    let policy = options.expert_policy;
    let (dense_bytes, expert_bytes) = (plan.dense_bytes, plan.expert_bytes);
    let store = Store::new(
        source.clone(),
        units,
        matrices,
        dense_bytes,
        expert_bytes,
        policy,
    )?;
    let store = Arc::new(store);
    let requests = Arc::new(Requests::default());
    let unclaimed = Arc::new(Mutex::new(counted(&list)));
    let weights = Weights {
        source,
        ring: Mutex::new(ring),
        store: store.clone(),
        streamed,
        unclaimed: unclaimed.clone(),
        requests: requests.clone(),
    };
    let is_streamed: Vec<String> = weights.streamed.keys().cloned().collect();
    let model = built(&build, Box::new(weights), &requests, dtype)?;
    let unclaimed = unclaimed.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(((name, _), _)) = unclaimed.iter().find(|(_, times)| **times > 0) {
        return Err(other_build(name));
    }
    check_spans(&list, &requests, |request| {
        is_streamed.binary_search(&request.name).is_ok()
    })?;
    let running = Mutex::new(());
    Ok((
        model,
        StockHandle {
            store,
            plan,
            running,
        },
    ))
}

/// What a model asks for, seen by building it once.
fn asked_for<M>(
    source: &Arc<StockSource>,
    build: &impl Fn(VarBuilder<'static>) -> candle::Result<M>,
    dtype: DType,
) -> Result<Vec<Request>> {
    let requests = Arc::new(Requests::default());
    let recorder = Recorder {
        source: source.clone(),
        requests: requests.clone(),
    };
    drop(built(build, Box::new(recorder), &requests, dtype)?);
    let list = requests.take();
    check_spans(&list, &requests, |_| true)?;
    Ok(list)
}

/// Candle's error about a matrix on flash, with what it comes from.
fn explained(error: candle::Error) -> candle::Error {
    if !is_away(&error) {
        return error;
    }
    let reason = format!(
        "a linear matrix on flash was used outside its span: the model computes with it elsewhere than in its linear \
         layer, or while it is built, or candle_wick::stock::layer() is not in its subscriber any more ({error})"
    );
    Error::Stock { reason }.into()
}

fn built<M>(
    build: &impl Fn(VarBuilder<'static>) -> candle::Result<M>,
    backend: Box<dyn candle_nn::var_builder::SimpleBackend>,
    requests: &Requests,
    dtype: DType,
) -> Result<M> {
    announce(None); // left by a build that panicked
    let build = || build(VarBuilder::from_backend(backend, dtype, Device::Cpu));
    let built = catch_unwind(AssertUnwindSafe(build));
    let left = announce(None);
    let model = match (built, requests.refused.get()) {
        (Ok(built), _) => built.map_err(explained)?,
        // Candle's Llama unwraps what the builder answers.
        (Err(_), Some(reason)) => {
            let reason = reason.clone();
            return Err(Error::Stock { reason });
        }
        (Err(panic), None) => resume_unwind(panic),
    };
    if let Some(left) = left {
        requests.without_span.get_or_init(|| left.name);
    }
    Ok(model)
}

/// How often each tensor was asked for.
fn counted(list: &[Request]) -> Unclaimed {
    let mut times = Unclaimed::new();
    for request in list {
        *times
            .entry((request.name.clone(), request.dtype))
            .or_default() += 1;
    }
    times
}

/// As many spans came as linear layers were asked for.
fn check_spans(
    list: &[Request],
    requests: &Requests,
    is_awaited: impl Fn(&Request) -> bool,
) -> Result<()> {
    let mut awaited = list.iter().filter(|r| r.is_linear && is_awaited(r));
    if let Some(name) = requests.without_span.get() {
        return Err(no_span(name));
    }
    match awaited.next() {
        Some(first) if requests.span_count() != 1 + awaited.count() => Err(no_span(&first.name)),
        _ => Ok(()),
    }
}

/// The part of a name that says which expert of which layer a matrix belongs to.
fn expert_of(name: &str) -> Option<&str> {
    let start = name.find(".experts.")? + ".experts.".len();
    let number = name[start..].find('.')?;
    let is_number = name[start..start + number]
        .bytes()
        .all(|byte| byte.is_ascii_digit());
    is_number.then(|| &name[..start + number])
}

/// The units of the linear matrices that may be streamed, with the names in each.
fn units_of(source: &StockSource, list: &[Request]) -> Result<(Vec<Unit>, Vec<Vec<String>>)> {
    let mut groups: Vec<(String, bool, Vec<&Request>)> = Vec::new();
    let mut group_of: BTreeMap<String, usize> = BTreeMap::new();
    let first: BTreeMap<&str, &Request> = list.iter().rev().map(|r| (r.name.as_str(), r)).collect();
    // Not an embedding that is also the head, nor what is wanted in two dtypes.
    let others = list
        .iter()
        .filter(|r| !r.is_linear || r.dtype != first[r.name.as_str()].dtype);
    let others: BTreeSet<&str> = others.map(|r| r.name.as_str()).collect();
    for request in list.iter().filter(|request| request.is_linear) {
        if others.contains(request.name.as_str()) {
            continue;
        }
        let expert = expert_of(&request.name);
        let key = expert.map_or_else(|| source.group(&request.name), str::to_owned);
        let index = *group_of.entry(key.clone()).or_insert(groups.len());
        if index == groups.len() {
            groups.push((key, expert.is_some(), Vec::new()));
        }
        let members = &mut groups[index].2;
        if members.iter().all(|member| member.name != request.name) {
            members.push(request);
        }
    }
    let mut units = Vec::with_capacity(groups.len());
    let mut names = Vec::with_capacity(groups.len());
    for (_, is_expert, members) in groups {
        let of_unit: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
        let extents = if is_expert {
            let each = of_unit.iter().map(|name| source.extents(&[name]));
            each.collect::<Result<_>>()?
        } else {
            vec![source.extents(&of_unit)?]
        };
        let sizes = members.iter().map(|m| (m.dtype, m.shape.elem_count()));
        units.push(Unit {
            extents,
            sizes: sizes.collect(),
            is_expert,
        });
        names.push(of_unit.into_iter().map(str::to_owned).collect());
    }
    Ok((units, names))
}

/// Bytes of everything that is not in a unit, each time that it was asked for.
fn other_bytes(list: &[Request], names: &[Vec<String>]) -> u64 {
    let in_units: BTreeSet<&String> = names.iter().flatten().collect();
    let others = list
        .iter()
        .filter(|request| !in_units.contains(&request.name));
    others
        .map(|request| (request.dtype.size_in_bytes() * request.shape.elem_count()) as u64)
        .sum()
}

/// Candle has no BF16 kernel: it multiplies by an F32 copy of the whole matrix.
fn widened_bytes(list: &[Request]) -> u64 {
    let wide = list
        .iter()
        .filter(|r| r.is_linear && r.dtype == DType::BF16);
    let wide = wide.map(|r| (r.shape.elem_count() * DType::F32.size_in_bytes()) as u64);
    wide.max().unwrap_or(0)
}

/// The units on flash, and their matrices.
fn streamed(
    plan: &StockPlan,
    units: Vec<Unit>,
    names: &[Vec<String>],
    list: &[Request],
) -> Result<(Vec<Unit>, Vec<StreamedMatrix>)> {
    let requests: BTreeMap<&str, &Request> = list.iter().map(|r| (r.name.as_str(), r)).collect();
    let mut kept = Vec::new();
    let mut matrices = Vec::new();
    for ((unit, names), is_resident) in units.into_iter().zip(names).zip(&plan.is_resident) {
        if *is_resident {
            continue;
        }
        for (member, name) in names.iter().enumerate() {
            let Request { shape, dtype, .. } = requests[name.as_str()];
            matrices.push(StreamedMatrix {
                name: name.clone(),
                tensor: without_values(*dtype, shape.clone())?,
                unit: kept.len(),
                member,
            });
        }
        kept.push(unit);
    }
    Ok((kept, matrices))
}
