//! A feed-forward layer whose neurons stay on flash: only what the tokens need is read and multiplied.
//!
//! `y = down · (act(gate x) * up x)` or `down · act(up x)`, with biases where the model has them. One `Step`
//! takes a token, or up to 128 tokens of a prompt, through
//! 1. `selector.select`: which neurons are needed;
//! 2. `cache.plan`: which of them are missing, and where they go, in passes;
//! 3. `submit`: the misses of a pass are read into their slots;
//! 4. `coefficients`: gate, up and activation of the hits meanwhile, then of the misses;
//! 5. `add_down`: one down product over the pass, added to the sums of the passes before;
//! 6. `commit`: the misses are residents, the window slides.
//!
//! `begin` goes as far as 3, for models that have something else to compute while reads are in flight.
//!
//! Some predictors look at the residual stream and not at the FFN's input: `forward_with` and `begin_with` take both.
//!
//! The result depends on the selection alone: each output element is one ascending sum over the selected
//! neurons, whatever the slots, the threads, the engine and the number of tokens in the step.
//!
//! Not here: the steps' work (`step`), choosing neurons (`selector`), the books of the slots (`neuron_cache`).

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use candle::{Device, Module, Tensor};
use wick_format::FfnLayer;
use wick_io::SlotBuffer;

use crate::activation::Activation;
use crate::ahead::{Ahead, Worth};
use crate::dip::DipLayer;
use crate::error::{Error, Result};
use crate::neuron_cache::NeuronCache;
use crate::neurons::{LayerNeurons, Rows};
use crate::predictor_kind::PredictorInput;
use crate::residuals::Residuals;
use crate::rows::{add_bias, check_width, with_f32};
use crate::selector::Selector;
use crate::step::{Inputs, Step};
use crate::var_builder::{lock, FlashVarBuilder, Switches};
use crate::workspace::{Workspace, CHUNK_TOKENS_MAX};

/// Neurons of one read when a whole layer is filled.
const FILL_NEURONS: usize = 1024;

/// The FFN of one layer: `x (.., hidden_size) -> (.., hidden_size)`.
///
/// Layers of one `FlashVarBuilder` take turns behind a lock, and compute on the current rayon pool meanwhile. Call
/// `forward` from a plain thread, or inside a pool that works for this model alone: a thread that waits for its products
/// picks up other tasks of its pool, and one that wants the same lock would make it wait for itself.
#[derive(Clone)]
pub struct FlashMlp(Ffn);

/// What a layer's weights are stored by.
#[derive(Clone)]
enum Ffn {
    Neurons(Arc<Shared>),
    /// The steps above are not its own: see `dip`.
    Columns(Arc<DipLayer>),
}

/// One layer.
pub(crate) struct Shared {
    /// The layer's place in the manifest.
    pub(crate) index: usize,
    pub(crate) slot_count: usize,
    pub(crate) neurons: LayerNeurons,
    pub(crate) selector: Selector,
    pub(crate) switches: Switches,
    /// The layer to read ahead for.
    pub(crate) next: OnceLock<Arc<Shared>>,
    workspace: Arc<Mutex<Workspace>>,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) cache: NeuronCache,
    /// Away while a step is on its way.
    pub(crate) slots: Option<SlotBuffer>,
    /// What was guessed for the next step.
    pub(crate) ahead: Option<Ahead>,
    /// What the last guesses were worth.
    pub(crate) worth: Worth,
}

impl State {
    /// Reads every neuron, in the order of the file. With a slot for each nothing is read again afterwards, and reading them as
    /// they are wanted would take longer.
    fn fill(&mut self, neurons: &LayerNeurons) -> Result<()> {
        let all: Vec<u32> = (0..neurons.layer.intermediate_size as u32).collect();
        let plan = self.cache.plan(&all, FILL_NEURONS);
        let mut reads = Vec::new();
        for first in (0..all.len()).step_by(FILL_NEURONS) {
            reads.clear();
            for record in first..all.len().min(first + FILL_NEURONS) {
                let neuron = neurons.records.neuron_of(record);
                neurons.push_reads(neuron as u32, plan.slot(neuron), &mut reads);
            }
            let slots = self.slots.take().expect("nobody else has a new layer");
            let (slots, result) = neurons.submit(slots, &reads).wait();
            self.slots = Some(slots);
            result?;
        }
        self.cache.commit(&all, plan, 0, |_| 0);
        Ok(())
    }
}

impl FlashMlp {
    /// The FFN whose records lie at `vb`, for instance `model.layers.0.mlp`. Its slots are allocated here, and filled
    /// when there is one for each neuron and no window drops any.
    pub fn load(
        hidden_size: usize,
        intermediate_size: usize,
        activation: Activation,
        vb: FlashVarBuilder,
    ) -> Result<Self> {
        let layer = vb.ffn_layer()?;
        let (expected, got) = (
            [intermediate_size, hidden_size],
            [layer.intermediate_size, layer.hidden_size],
        );
        if expected != got {
            let (expected, got) = (expected.to_vec(), got.to_vec());
            return Err(Error::Shape {
                name: layer.neurons_tensor(),
                expected,
                got,
            });
        }
        Self::load_layer(&vb, activation, layer)
    }

    /// The FFN of `layer`, with the slots that the placement has for it.
    pub(crate) fn load_layer(
        vb: &FlashVarBuilder,
        activation: Activation,
        layer: FfnLayer,
    ) -> Result<Self> {
        let index = vb.folder().manifest().layer_index(&layer.prefix);
        let index = index.expect("it is one of them");
        let (placement, intermediate_size) = (vb.placement(), layer.intermediate_size);
        if placement.selector.reads_columns(vb.folder()) {
            let layer = DipLayer::load(vb, index, layer, activation)?;
            return Ok(Self(Ffn::Columns(Arc::new(layer))));
        }
        let slots = placement.slots_per_layer[index];
        let slot_count = slots.max(2).min(intermediate_size);
        let (policy, window_tokens) = (placement.cache_policy, placement.window_tokens);
        let cache = NeuronCache::new(intermediate_size, slot_count, policy, window_tokens);
        let switches = placement.switches;
        let neurons = LayerNeurons::load(vb.folder(), layer, activation, switches.bundling)?;
        let mut state = State {
            cache,
            slots: Some(neurons.new_slots(slot_count)?),
            ahead: None,
            worth: Worth::default(),
        };
        if slot_count == intermediate_size && placement.window_tokens.is_none() {
            state.fill(&neurons)?;
        }
        Ok(Self(Ffn::Neurons(Arc::new(Shared {
            index,
            slot_count,
            selector: Selector::load(vb, index, &neurons)?,
            neurons,
            switches,
            next: OnceLock::new(),
            workspace: vb.workspace().clone(),
            state: Mutex::new(state),
        }))))
    }

    /// Chooses the neurons of `x` `(.., hidden_size)` and starts to read them: what a caller computes until
    /// [`MlpTicket::finish`] overlaps with reading. A layer that goes by columns begins nothing.
    ///
    /// # Errors
    /// As of [`Module::forward`].
    pub fn begin(&self, x: &Tensor) -> candle::Result<MlpTicket> {
        self.refuse_other_inputs()?;
        self.begin_seen(x, Some(x), None)
    }

    /// As [`Self::begin`], for predictors that look at the layer's input too. Those that look at what attention gave
    /// begin nothing: [`MlpTicket::finish_with`] does all of it.
    pub fn begin_with(&self, x: &Tensor, layer_input: &Tensor) -> candle::Result<MlpTicket> {
        self.record(PredictorInput::LayerInput, layer_input)?;
        match self.0.input() {
            PredictorInput::FfnInput => self.begin_seen(x, Some(x), None),
            PredictorInput::LayerInput => self.begin_seen(x, Some(layer_input), Some(layer_input)),
            PredictorInput::AttentionResidual => self.begin_seen(x, None, None),
        }
    }

    /// Begins where `seen` is known; `kept` is what finishing needs of the residual stream.
    fn begin_seen(
        &self,
        x: &Tensor,
        seen: Option<&Tensor>,
        kept: Option<&Tensor>,
    ) -> candle::Result<MlpTicket> {
        let mut ticket = MlpTicket {
            mlp: self.clone(),
            x: x.clone(),
            layer_input: kept.cloned(),
            step: None,
        };
        let Ffn::Neurons(shared) = &self.0 else {
            return Ok(ticket);
        };
        if let (Some(seen), true) = (seen, shared.switches.overlap) {
            self.with_inputs(x, seen, |x, seen| {
                let first = shared.chunks(x).zip(shared.chunks(seen)).next();
                let work = &mut *lock(&shared.workspace);
                let begin = |(x, seen)| Step::begin(shared, Inputs { x, seen }, work);
                ticket.step = first.map(begin).transpose()?;
                Ok(())
            })?;
        }
        Ok(ticket)
    }

    /// The FFN of `x` `(.., hidden_size)`, with the residual stream of the same tokens for predictors that look at it.
    pub fn forward_with(&self, x: &Tensor, residuals: Residuals<'_>) -> candle::Result<Tensor> {
        let Residuals {
            layer_input,
            after_attention,
        } = residuals;
        self.record(PredictorInput::LayerInput, layer_input)?;
        self.record(PredictorInput::AttentionResidual, after_attention)?;
        let seen = match self.0.input() {
            PredictorInput::FfnInput => x,
            PredictorInput::LayerInput => layer_input,
            PredictorInput::AttentionResidual => after_attention,
        };
        self.compute(x, seen, None)
    }

    /// Refuses to run without the residual stream where the predictors were made for it.
    pub(crate) fn refuse_other_inputs(&self) -> Result<()> {
        match &self.0 {
            Ffn::Neurons(shared) if shared.selector.input() != PredictorInput::FfnInput => {
                Err(Error::PredictorInput {
                    prefix: shared.neurons.layer.prefix.clone(),
                    input: shared.selector.input(),
                })
            }
            _ => Ok(()),
        }
    }

    /// Shows `rows` to who asked for inputs of this kind.
    fn record(&self, kind: PredictorInput, rows: &Tensor) -> candle::Result<()> {
        let (index, workspace) = match &self.0 {
            Ffn::Neurons(shared) => (shared.index, &shared.workspace),
            Ffn::Columns(layer) => (layer.index, &layer.workspace),
        };
        let work = &mut *lock(workspace);
        match work.recorder(kind) {
            None => Ok(()),
            Some(record) => with_f32(rows, |values| {
                record(index, values);
                Ok(())
            }),
        }
    }

    /// Calls `f` with the values of `x` and of `seen`, which are for the same tokens.
    fn with_inputs<T>(
        &self,
        x: &Tensor,
        seen: &Tensor,
        f: impl FnOnce(&[f32], &[f32]) -> candle::Result<T>,
    ) -> candle::Result<T> {
        let hidden = self.0.hidden_size();
        check_width(x, hidden)?;
        check_width(seen, hidden)?;
        if x.elem_count() != seen.elem_count() {
            let (x, seen) = (x.dims(), seen.dims());
            candle::bail!("the input is {x:?}, what its predictors look at {seen:?}");
        }
        with_f32(x, |x| with_f32(seen, |seen| f(x, seen)))
    }

    /// The FFN of rows of f32, `x` and `y` `(tokens, hidden_size)`: what `forward` does, without tensors. Nothing is
    /// allocated once its buffers have grown.
    ///
    /// # Errors
    /// As of [`Module::forward`].
    ///
    /// # Panics
    /// When the lengths differ or are no multiple of `hidden_size`.
    pub fn forward_rows(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.refuse_other_inputs()?;
        self.finish_rows(x, x, y, None)
    }

    /// The FFN of `x`, whose first chunk may have begun; the selector looks at `seen`.
    fn finish_rows(
        &self,
        x: &[f32],
        seen: &[f32],
        y: &mut [f32],
        mut begun: Option<Step>,
    ) -> Result<()> {
        let hidden = self.0.hidden_size();
        assert!(
            x.len() == y.len() && x.len().is_multiple_of(hidden),
            "{} and {} values in rows of {hidden}",
            x.len(),
            y.len()
        );
        let shared = match &self.0 {
            Ffn::Neurons(shared) => shared,
            Ffn::Columns(layer) => return layer.forward_rows(x, y),
        };
        let chunks = y.chunks_mut(CHUNK_TOKENS_MAX * hidden);
        let inputs = shared.chunks(x).zip(shared.chunks(seen));
        for ((x, seen), y) in inputs.zip(chunks) {
            let inputs = Inputs { x, seen };
            let work = &mut *lock(&shared.workspace);
            let step = match begun.take() {
                Some(step) => step,
                None => Step::begin(shared, inputs, work)?,
            };
            step.finish(inputs, y, work)?;
        }
        Ok(())
    }

    fn compute(&self, x: &Tensor, seen: &Tensor, begun: Option<Step>) -> candle::Result<Tensor> {
        let y = self.with_inputs(x, seen, |x, seen| {
            let mut y = vec![0.0; x.len()];
            self.finish_rows(x, seen, &mut y, begun)?;
            Ok(y)
        })?;
        Tensor::from_vec(y, x.shape(), &Device::Cpu)?
            .to_dtype(x.dtype())?
            .to_device(x.device())
    }

    /// Lets this layer guess, from its own input, what `next` will want, and start to read it: for models whose FFNs
    /// come after attention. Only the first call counts.
    pub fn look_ahead_to(&self, next: &Self) {
        let (Ffn::Neurons(this), Ffn::Neurons(next)) = (&self.0, &next.0) else {
            return;
        };
        let hidden = |shared: &Shared| shared.neurons.layer.hidden_size;
        if hidden(this) == hidden(next) && !Arc::ptr_eq(this, next) {
            let _is_first = this.next.set(next.clone());
        }
    }

    /// Forgets which neurons are in DRAM: each is read again when it is wanted.
    pub fn clear_neuron_cache(&self) {
        match &self.0 {
            Ffn::Neurons(shared) => shared.state().cache.clear(),
            Ffn::Columns(layer) => layer.clear_cache(),
        }
    }
}

impl Ffn {
    fn hidden_size(&self) -> usize {
        match self {
            Self::Neurons(shared) => shared.neurons.layer.hidden_size,
            Self::Columns(layer) => layer.hidden_size(),
        }
    }

    /// What chooses looks at.
    fn input(&self) -> PredictorInput {
        match self {
            Self::Neurons(shared) => shared.selector.input(),
            Self::Columns(_) => PredictorInput::FfnInput,
        }
    }
}

/// A result of [`FlashMlp::begin`] that is on its way. One that is dropped gives up what it has read.
#[must_use = "a dropped ticket has read in vain"]
pub struct MlpTicket {
    mlp: FlashMlp,
    x: Tensor,
    /// What the selector looks at, where that is not `x`.
    layer_input: Option<Tensor>,
    /// The step of the first chunk.
    step: Option<Step>,
}

impl MlpTicket {
    /// The FFN of the inputs that the ticket was given for.
    ///
    /// # Errors
    /// The predictors look at what attention gave, which only [`Self::finish_with`] is told.
    pub fn finish(self) -> candle::Result<Tensor> {
        if self.mlp.0.input() == PredictorInput::AttentionResidual {
            self.mlp.refuse_other_inputs()?;
        }
        let seen = self.layer_input.as_ref().unwrap_or(&self.x);
        self.mlp.compute(&self.x, seen, self.step)
    }

    /// As [`Self::finish`], with the residual stream after attention for predictors that look at it.
    pub fn finish_with(self, after_attention: &Tensor) -> candle::Result<Tensor> {
        let kind = PredictorInput::AttentionResidual;
        self.mlp.record(kind, after_attention)?;
        if self.mlp.0.input() == kind {
            return self.mlp.compute(&self.x, after_attention, self.step);
        }
        self.finish()
    }
}

/// Errs by name where the predictors look at the residual stream, which only [`FlashMlp::forward_with`] is given.
impl Module for FlashMlp {
    fn forward(&self, x: &Tensor) -> candle::Result<Tensor> {
        self.refuse_other_inputs()?;
        self.compute(x, x, None)
    }
}

impl Shared {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // A panic in the books leaves them half-written.
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            state.cache.clear();
            self.state.clear_poison();
            state
        })
    }

    /// Inputs `(tokens, hidden)` in pieces of one step each.
    fn chunks<'a>(&self, x: &'a [f32]) -> impl Iterator<Item = Rows<'a>> {
        let hidden = self.neurons.layer.hidden_size;
        x.chunks(CHUNK_TOKENS_MAX * hidden).map(move |values| Rows {
            tokens: values.len() / hidden,
            values,
        })
    }

    /// What is wrong when the slots are away.
    pub(crate) fn busy(&self) -> Error {
        Error::Busy {
            prefix: self.neurons.layer.prefix.clone(),
        }
    }

    pub(crate) fn add_down_bias(&self, y: &mut [f32]) {
        add_bias(y, self.neurons.down_bias.as_deref());
    }
}
