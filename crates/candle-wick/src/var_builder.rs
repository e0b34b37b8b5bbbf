//! A `VarBuilder` over a converted folder that also knows where the neurons are.
//!
//! Paths and names are those of the Hugging Face checkpoint. `get` gives small tensors as f32; matrices go to
//! [`FlashLinear`](crate::FlashLinear), [`FlashEmbedding`](crate::FlashEmbedding) and
//! [`FlashMlp`](crate::FlashMlp), which ask the [`Placement`] what stays in DRAM. `dense()` is candle's own
//! `VarBuilder` over the same folder.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use candle::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::VarBuilder;
use wick_format::{ColumnKind, FfnLayer};

use crate::column_cache::COLUMN_SLOTS_MIN;
use crate::dip::DipOptions;
use crate::error::{Error, Result};
use crate::eviction_order::CachePolicy;
use crate::folder::FlashFolder;
use crate::lookahead::Lookahead;
use crate::matrix::Matrix;
use crate::predictor_kind::PredictorInput;
use crate::selector_kind::SelectorKind;
use crate::sparse::StockSetup;
#[cfg(feature = "wick-gemm")]
use crate::sparse::Store;
use crate::stats::FfnStats;
use crate::trace::ActivityTrace;
use crate::workspace::{FfnRecorder, SelectionRecorder, Workspace};

/// What a model's layers keep in DRAM and how they choose neurons.
#[derive(Clone, Debug)]
pub struct Placement {
    /// Who chooses the neurons.
    pub selector: SelectorKind,
    /// What selectors with a density keep.
    pub dip: DipOptions,
    /// Slots of each layer's neuron cache, in the manifest's order; two are the least, one a neuron the most. In a layer
    /// that goes by columns: of its cache of down columns.
    pub slots_per_layer: Vec<usize>,
    /// Slots of each layer's cache of channels, where layers go by columns; two are the least, one a channel the most.
    pub channel_slots_per_layer: Vec<usize>,
    /// Drop a neuron when none of this many tokens used it; `None` keeps it until its slot is wanted.
    pub window_tokens: Option<usize>,
    /// Which neuron leaves when its slot is wanted.
    pub cache_policy: CachePolicy,
    /// Matrices that are read from flash whenever they are used, by full name.
    pub streamed: BTreeSet<String>,
    /// What is switched off and on.
    pub switches: Switches,
    /// Neurons to use instead of those that predictors choose: for measuring with random weights.
    pub trace: Option<ActivityTrace>,
}

/// Parts of the method that can be switched off and on, to see what each brings. They change times, never results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// Compute while reads are in flight.
    pub overlap: bool,
    /// Read a neuron's rows and column together. Where they are read apart nothing is checked: checksums are those of
    /// whole records.
    pub bundling: bool,
    /// Read what the next layer will probably want. Off by default: reading takes processor time that small machines
    /// miss elsewhere, and a part of it is in vain (docs/bench/decode.md).
    pub lookahead: Lookahead,
}

impl Default for Switches {
    /// Everything on but `lookahead`.
    fn default() -> Self {
        Self {
            overlap: true,
            bundling: true,
            lookahead: Lookahead::Off,
        }
    }
}

impl Placement {
    /// Everything in DRAM, neurons too: a layer with a slot for each is filled when it is loaded.
    pub fn resident(folder: &FlashFolder, selector: SelectorKind) -> Self {
        let slots = folder
            .manifest()
            .layers
            .iter()
            .map(|layer| layer.intermediate_size);
        let layers = folder.manifest().layers.iter();
        Self {
            selector,
            dip: DipOptions::default(),
            slots_per_layer: slots.collect(),
            channel_slots_per_layer: layers.map(|layer| layer.hidden_size).collect(),
            window_tokens: None,
            cache_policy: CachePolicy::default(),
            streamed: BTreeSet::new(),
            switches: Switches::default(),
            trace: None,
        }
    }

    /// Slots for columns of this kind in layer `index`.
    pub(crate) fn column_slots(&self, kind: ColumnKind, index: usize) -> usize {
        match kind {
            ColumnKind::Channel => {
                let slots = self.channel_slots_per_layer.get(index);
                slots.copied().unwrap_or(COLUMN_SLOTS_MIN)
            }
            ColumnKind::Down => self.slots_per_layer[index],
        }
    }
}

/// A place in a checkpoint's tree of names; cheap to clone.
#[derive(Clone)]
pub struct FlashVarBuilder {
    folder: FlashFolder,
    placement: Arc<Placement>,
    /// One scratch for all layers, which take turns.
    workspace: Arc<Mutex<Workspace>>,
    /// For stock models, when they were planned for.
    setup: Option<Arc<StockSetup>>,
    #[cfg(feature = "wick-gemm")]
    store: Arc<Store>,
    prefix: String,
}

impl FlashVarBuilder {
    /// The root of the tree.
    ///
    /// # Panics
    /// When `placement` was made for another number of layers.
    pub fn new(folder: &FlashFolder, placement: Placement) -> Self {
        assert_eq!(
            placement.slots_per_layer.len(),
            folder.manifest().layers.len()
        );
        let workspace = Workspace::new(folder.manifest().layers.len());
        Self {
            folder: folder.clone(),
            placement: Arc::new(placement),
            workspace: Arc::new(Mutex::new(workspace)),
            setup: None,
            #[cfg(feature = "wick-gemm")]
            store: Arc::default(),
            prefix: String::new(),
        }
    }

    /// As [`Self::new`], for stock models that are loaded by `setup`.
    pub(crate) fn with_setup(
        folder: &FlashFolder,
        placement: Placement,
        setup: StockSetup,
    ) -> Self {
        Self {
            setup: Some(Arc::new(setup)),
            ..Self::new(folder, placement)
        }
    }

    /// How stock models are loaded, when they were planned for.
    pub(crate) fn setup(&self) -> Option<&Arc<StockSetup>> {
        self.setup.as_ref()
    }

    /// What its clones share for stock models.
    #[cfg(feature = "wick-gemm")]
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The root of the tree.
    pub(crate) fn root(&self) -> Self {
        Self {
            prefix: String::new(),
            ..self.clone()
        }
    }

    /// One step down the tree, as in candle's `VarBuilder`.
    pub fn pp(&self, name: impl ToString) -> Self {
        Self {
            prefix: self.path(&name.to_string()),
            ..self.clone()
        }
    }

    /// Where in the tree this is.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The folder behind it.
    pub fn folder(&self) -> &FlashFolder {
        &self.folder
    }

    /// What each FFN loaded from here did so far, in the manifest's order.
    pub fn ffn_stats(&self) -> Vec<FfnStats> {
        lock(&self.workspace).stats.clone()
    }

    /// Starts counting anew.
    pub fn reset_ffn_stats(&self) {
        lock(&self.workspace).stats.fill(FfnStats::default());
    }

    /// Shows the inputs of every FFN loaded from here to `recorder` from now on, or to nobody.
    pub fn record_ffn_inputs(&self, recorder: Option<FfnRecorder>) {
        self.record_inputs(PredictorInput::FfnInput, recorder);
    }

    /// Shows what predictors of this kind would look at, in every FFN loaded from here, to `recorder` from now on, or to
    /// nobody. The residual stream is seen by those FFNs alone that are given it (`forward_with`, `begin_with`).
    pub fn record_inputs(&self, kind: PredictorInput, recorder: Option<FfnRecorder>) {
        *lock(&self.workspace).recorder(kind) = recorder;
    }

    /// Shows what each token's neurons are, in every FFN loaded from here, to `recorder` from now on, or to nobody.
    pub fn record_selections(&self, recorder: Option<SelectionRecorder>) {
        lock(&self.workspace).selection_recorder = recorder;
    }

    /// Whether what is computed from now on are the tokens of a prompt: `dip` and `dip-ca` may keep all of theirs.
    pub fn set_prompt(&self, is_prompt: bool) {
        lock(&self.workspace).is_prompt = is_prompt;
    }

    /// Whether what a token gives depends on more than the tokens before it: on what is in memory, or on whether it was part of a prompt.
    pub fn depends_on_history(&self) -> bool {
        let Placement { selector, dip, .. } = &*self.placement;
        *selector == SelectorKind::DipCa || (selector.is_dip() && dip.dense_prompt)
    }

    /// What is computed from now on is a new sequence: `dip-ca`, whose choice depends on what is in memory, begins each with
    /// empty caches, so that its numbers can be had again.
    pub fn begin_sequence(&self) {
        lock(&self.workspace).sequence += 1;
    }

    /// Whether a made-up history stands in for what the selector chooses.
    pub fn is_replaying(&self) -> bool {
        self.placement.trace.is_some() && self.placement.selector.form().is_some()
    }

    pub(crate) fn workspace(&self) -> &Arc<Mutex<Workspace>> {
        &self.workspace
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    fn path(&self, name: &str) -> String {
        if self.prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.prefix)
        }
    }

    /// Whether there is a tensor of this name, FFN matrices included.
    pub fn contains_tensor(&self, name: &str) -> bool {
        let path = self.path(name);
        self.folder.extent(&path).is_some() || ffn_matrix(&self.folder, &path).is_some()
    }

    /// The shape of the tensor of this full name, FFN matrices included.
    #[cfg(feature = "wick-gemm")]
    pub(crate) fn weight_shape(&self, name: &str) -> Option<Vec<usize>> {
        if let Some(extent) = self.folder.extent(name) {
            return Some(extent.shape.clone());
        }
        let (layer, part) = ffn_matrix(&self.folder, name)?;
        Some(part.shape(layer).to_vec())
    }

    /// A tensor as f32 on the CPU.
    pub fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        let shape = shape.into();
        let matrix = Matrix::load(&self.folder, &self.path(name), shape.dims(), false)?;
        Ok(Tensor::from_vec(matrix.to_f32()?, shape, &Device::Cpu)?)
    }

    /// A vector as f32.
    pub(crate) fn values(&self, len: usize, name: &str) -> Result<Vec<f32>> {
        Matrix::load(&self.folder, &self.path(name), &[len], false)?.to_f32()
    }

    /// A matrix, in DRAM or streamed as the placement says.
    pub(crate) fn matrix(&self, shape: &[usize], name: &str) -> Result<Matrix> {
        let path = self.path(name);
        let resident = !self.placement.streamed.contains(&path);
        Matrix::load(&self.folder, &path, shape, resident)
    }

    /// A matrix that stays on flash.
    pub(crate) fn matrix_on_flash(&self, shape: &[usize], name: &str) -> Result<Matrix> {
        Matrix::load(&self.folder, &self.path(name), shape, false)
    }

    /// The FFN records of the layer at this place.
    pub(crate) fn ffn_layer(&self) -> Result<FfnLayer> {
        let manifest = self.folder.manifest();
        let index = manifest.layer_index(&self.prefix);
        let index = index.ok_or_else(|| self.folder.missing(&self.path("neurons")))?;
        Ok(manifest.layers[index].clone())
    }

    /// Candle's own `VarBuilder` over the same folder, from its root: dense tensors, rebuilt from the records
    /// where needed, so that any candle model loads unchanged. In f32 on the CPU until `to_dtype` and
    /// `set_device` say otherwise.
    pub fn dense(&self) -> VarBuilder<'static> {
        let backend = DenseBackend {
            folder: self.folder.clone(),
        };
        VarBuilder::from_backend(Box::new(backend), DType::F32, Device::Cpu)
    }
}

/// The scratch holds nothing between steps, so one left behind by a panic is as good as any.
pub(crate) fn lock(workspace: &Mutex<Workspace>) -> MutexGuard<'_, Workspace> {
    workspace
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Which of the three matrices of a layer a name means.
#[derive(Clone, Copy)]
pub(crate) enum FfnPart {
    Gate,
    Up,
    Down,
}

impl FfnPart {
    /// Which matrix of `layer` has this name.
    pub(crate) fn of(layer: &FfnLayer, name: &str) -> Option<Self> {
        if layer.gate.as_deref() == Some(name) {
            Some(Self::Gate)
        } else if layer.up == name {
            Some(Self::Up)
        } else {
            (layer.down == name).then_some(Self::Down)
        }
    }

    /// `[out_dim, in_dim]` of this matrix of `layer`.
    pub(crate) fn shape(self, layer: &FfnLayer) -> [usize; 2] {
        let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
        match self {
            Self::Gate | Self::Up => [ffn, hidden],
            Self::Down => [hidden, ffn],
        }
    }

    /// The records of columns that hold this matrix of `layer`, and its place among the matrices there.
    pub(crate) fn in_columns(self, layer: &FfnLayer) -> (ColumnKind, usize) {
        match self {
            Self::Gate => (ColumnKind::Channel, 0),
            Self::Up => (ColumnKind::Channel, usize::from(layer.gate.is_some())),
            Self::Down => (ColumnKind::Down, 0),
        }
    }
}

/// The layer whose records hold matrix `name`, and which part of them it is.
pub(crate) fn ffn_matrix<'a>(
    folder: &'a FlashFolder,
    name: &str,
) -> Option<(&'a FfnLayer, FfnPart)> {
    let mut layers = folder.manifest().layers.iter();
    layers.find_map(|layer| Some((layer, FfnPart::of(layer, name)?)))
}

struct DenseBackend {
    folder: FlashFolder,
}

impl DenseBackend {
    fn tensor(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some((layer, part)) = ffn_matrix(&self.folder, name) {
            return self.ffn_tensor(layer, part, dtype, device);
        }
        let extent = self
            .folder
            .extent(name)
            .ok_or_else(|| self.folder.missing(name))?;
        let shape = extent.shape.clone();
        let values = Matrix::load(&self.folder, name, &shape, false)?.to_f32()?;
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?
            .to_dtype(dtype)?
            .to_device(device)?)
    }

    fn ffn_tensor(
        &self,
        layer: &FfnLayer,
        part: FfnPart,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        if !layer.layout.has_neurons() {
            let tensor = self.column_tensor(layer, part)?.to_dtype(dtype)?;
            return Ok(tensor.to_device(device)?);
        }
        let layout = layer.record_layout();
        let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
        let range = match part {
            FfnPart::Gate => layout.gate_range().expect("only gated layers name a gate"),
            FfnPart::Up => layout.up_range(),
            FfnPart::Down => layout.down_range(),
        };
        let kernel_dtype = crate::neurons::kernel_dtype(layer.dtype);
        let mut values = vec![0.0; ffn * hidden];
        let records = self.folder.records(layer)?;
        let mut ring = self.folder.ring();
        records.for_each(self.folder.reader(), &mut ring, |numbers, bytes| {
            for (number, record) in numbers.zip(bytes.chunks(layer.stride_bytes)) {
                let first = records.neuron_of(number) * hidden;
                let values = &mut values[first..first + hidden];
                wick_kernels::widen(kernel_dtype, &record[range.clone()], values);
            }
            Ok(())
        })?;
        let tensor = Tensor::from_vec(values, (ffn, hidden), &Device::Cpu)?.to_dtype(dtype)?;
        let tensor = match part {
            FfnPart::Down => tensor.t()?.contiguous()?,
            FfnPart::Gate | FfnPart::Up => tensor,
        };
        Ok(tensor.to_device(device)?)
    }

    /// A matrix of an FFN that is stored by columns alone.
    fn column_tensor(&self, layer: &FfnLayer, part: FfnPart) -> Result<Tensor> {
        let (kind, matrix) = part.in_columns(layer);
        let records = self.folder.columns(layer, kind)?;
        let layout = layer.column_layout(kind).expect("it has such records");
        let place = layout.column_range(matrix);
        let kernel_dtype = crate::neurons::kernel_dtype(layer.dtype);
        let (columns, rows) = (records.rows, layout.rows);
        let mut values = vec![0.0; columns * rows];
        let (reader, mut ring) = (self.folder.reader(), self.folder.ring());
        records.for_each_rows(reader, &mut ring, 0..columns, |numbers, bytes| {
            let records = bytes.chunks(layout.stride_bytes);
            for (number, record) in numbers.zip(records) {
                let values = &mut values[number * rows..(number + 1) * rows];
                wick_kernels::widen(kernel_dtype, &record[place.clone()], values);
            }
            Ok(())
        })?;
        let turned = Tensor::from_vec(values, (columns, rows), &Device::Cpu)?;
        Ok(turned.t()?.contiguous()?)
    }
}

impl SimpleBackend for DenseBackend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle::Result<Tensor> {
        let tensor = self.tensor(name, dtype, device)?;
        if tensor.shape() != &shape {
            let (expected, got) = (shape.into_dims(), tensor.dims().to_vec());
            return Err(Error::Shape {
                name: name.to_owned(),
                expected,
                got,
            }
            .into());
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle::Result<Tensor> {
        Ok(self.tensor(name, dtype, device)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.folder.extent(name).is_some() || ffn_matrix(&self.folder, name).is_some()
    }
}
