//! The FFN of one layer of a stock struct, which asks for its three products one after the other.
//!
//! The first products, gate and up, are kept for the last: they note their input `x` and answer with known values, other ones for
//! each row and neuron. What then arrives at the product with down tells what the struct made of them, which must be
//! `act(gate) * up`, or `act(up)` without a gate, as far as the struct's dtype can tell: then the FFN of `x` is what it wants, and
//! [`FlashMlp`] computes it, as in our own definitions to the bit. (With real gate and up values neurons that were read for
//! them would have to be read again for down wherever not all of them fit.)
//!
//! A forward runs on one thread, so what has begun is kept by thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use candle::DType;
use wick_format::FfnLayer;

use crate::activation::Activation;
use crate::error::{Error, Result};
use crate::mlp::FlashMlp;
use crate::neurons::optional_values;
use crate::var_builder::{FfnPart, FlashVarBuilder};

/// What gate and up answer: where activations differ from each other, and no two alike.
const GATES: [f32; 13] = [
    -3.0, 1.5, -0.75, 0.4, 2.5, -1.3, 0.1, -0.2, 7.0, 3.5, -6.0, 0.02, 11.0,
];
const UPS: [f32; 13] = [
    1.0, -0.5, 2.0, 0.8, -1.25, 1.6, 0.7, -2.2, 1.1, -0.9, 1.4, 1.9, 0.6,
];

thread_local! {
    /// What has begun on this thread, by layer.
    static BEGUN: RefCell<HashMap<u64, Begun>> = RefCell::default();
}

/// Distinguishes layers for as long as the process lives, which addresses would not.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Drops what an earlier forward of this thread began and did not end.
#[cfg(feature = "wick-gemm")]
pub(super) fn forget_begun() {
    BEGUN.take();
}

/// The input of gate and up, and which of them have been asked for.
struct Begun {
    x: Vec<f32>,
    gate: bool,
    up: bool,
}

/// How far what a struct makes of the answers may be from what we make of them.
#[derive(Clone, Copy)]
struct Tolerance {
    absolute: f32,
    relative: f32,
    of_bias: f32,
}

impl Tolerance {
    /// What rounding in `dtype` does to values of the answers' size, in candle's approximations of functions, too; and to answers from
    /// which a bias is taken before candle adds it.
    fn of(dtype: DType) -> Self {
        let (absolute, relative, of_bias) = match dtype {
            DType::F16 => (1e-3, 4e-3, 4e-3),
            _ => (1e-5, 1e-4, 1e-6),
        };
        Self {
            absolute,
            relative,
            of_bias,
        }
    }
}

/// One layer.
pub(super) struct SparseFfn {
    id: u64,
    mlp: FlashMlp,
    layer: FfnLayer,
    activation: Activation,
    chunk_tokens: usize,
    /// What the struct adds to the answers of gate and of up.
    gate_bias: Option<Vec<f32>>,
    up_bias: Option<Vec<f32>>,
}

impl SparseFfn {
    /// The FFN of `layer` with slots as the placement of `vb` says, in steps of up to `chunk_tokens`.
    pub(super) fn load(
        vb: &FlashVarBuilder,
        layer: FfnLayer,
        activation: Activation,
        chunk_tokens: usize,
    ) -> Result<Self> {
        let (folder, ffn) = (vb.folder(), layer.intermediate_size);
        let mlp = FlashMlp::load_layer(vb, activation, without_down_bias(layer.clone()))?;
        mlp.refuse_other_inputs()?;
        let gate_bias = optional_values(folder, &layer.gate_bias, ffn)?;
        let up_bias = optional_values(folder, &layer.up_bias, ffn)?;
        let mut biases = gate_bias.iter().chain(&up_bias).flatten();
        if biases.any(|bias| !bias.is_finite()) {
            let reason = format!("{}: a bias is not a finite number", layer.prefix);
            return Err(Error::Stock { reason });
        }
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            mlp,
            activation,
            chunk_tokens,
            gate_bias,
            up_bias,
            layer,
        })
    }

    /// See [`FlashMlp::look_ahead_to`].
    pub(super) fn look_ahead_to(&self, next: &Self) {
        self.mlp.look_ahead_to(&next.mlp);
    }

    /// What is wrong when this thread's forward has ended and this FFN was begun and not finished.
    #[cfg(feature = "wick-gemm")]
    pub(super) fn unfinished(&self) -> Option<String> {
        let is_begun = BEGUN.with_borrow(|begun| begun.contains_key(&self.id));
        is_begun.then(|| self.fault("its down projection never came"))
    }

    /// Drops what was begun of this layer on this thread.
    pub(super) fn forget(&self) {
        BEGUN.with_borrow_mut(|begun| begun.remove(&self.id));
    }

    /// What one of the layer's matrices is called.
    pub(super) fn name(&self, part: FfnPart) -> &str {
        match part {
            FfnPart::Gate => self.layer.gate.as_deref().unwrap_or_default(),
            FfnPart::Up => &self.layer.up,
            FfnPart::Down => &self.layer.down,
        }
    }

    /// `[out_dim, in_dim]` of one of the layer's matrices.
    pub(super) fn shape(&self, part: FfnPart) -> [usize; 2] {
        part.shape(&self.layer)
    }

    /// Notes the input `x` of gate or up, and answers with what [`Self::finish`] knows.
    pub(super) fn begin(
        &self,
        part: FfnPart,
        x: &[f32],
        y: &mut [f32],
    ) -> std::result::Result<(), String> {
        BEGUN.with_borrow_mut(|begun| {
            let is_gate = matches!(part, FfnPart::Gate);
            let begun = begun.entry(self.id).or_insert_with(|| Begun {
                x: x.to_vec(),
                gate: false,
                up: false,
            });
            if (is_gate && begun.gate) || (!is_gate && begun.up) {
                return Err(self.fault("its gate or up projection is asked for twice before down"));
            }
            // By their bits: a NaN is the same input, too.
            if !begun
                .x
                .iter()
                .map(|x| x.to_bits())
                .eq(x.iter().map(|x| x.to_bits()))
            {
                return Err(self.fault("its gate and its up have different inputs"));
            }
            *(if is_gate {
                &mut begun.gate
            } else {
                &mut begun.up
            }) = true;
            Ok(())
        })?;
        let (known, bias) = match part {
            FfnPart::Gate => (&GATES, &self.gate_bias),
            _ if self.layer.gate.is_none() => (&GATES, &self.up_bias),
            _ => (&UPS, &self.up_bias),
        };
        for (row, y) in y.chunks_mut(self.layer.intermediate_size).enumerate() {
            for (neuron, y) in y.iter_mut().enumerate() {
                let bias = bias.as_ref().map_or(0.0, |bias| bias[neuron]);
                *y = known[(row + neuron) % known.len()] - bias;
            }
        }
        Ok(())
    }

    /// Checks what the struct made of the answers, and gives the input that they were for.
    pub(super) fn finish(
        &self,
        activated: &[f32],
        dtype: DType,
    ) -> std::result::Result<Vec<f32>, String> {
        let (hidden, ffn) = (self.layer.hidden_size, self.layer.intermediate_size);
        let is_gated = self.layer.gate.is_some();
        let begun = BEGUN.with_borrow_mut(|begun| begun.remove(&self.id));
        let begun = begun.filter(|begun| begun.up && (begun.gate || !is_gated));
        let begun = begun.filter(|begun| begun.x.len() / hidden == activated.len() / ffn);
        let Begun { x, .. } = begun.ok_or_else(|| {
            self.fault("its down projection does not follow the others of the same tokens: they are not one FFN")
        })?;
        self.check(activated, Tolerance::of(dtype))
            .map_err(|reason| self.fault(&reason))?;
        Ok(x)
    }

    /// `y` of the whole FFN.
    pub(super) fn compute(&self, x: &[f32], y: &mut [f32]) -> std::result::Result<(), String> {
        let chunk = self.chunk_tokens * self.layer.hidden_size;
        for (x, y) in x.chunks(chunk).zip(y.chunks_mut(chunk)) {
            let computed = self.mlp.forward_rows(x, y);
            computed.map_err(|error| self.fault(&error.to_string()))?;
        }
        Ok(())
    }

    fn fault(&self, reason: &str) -> String {
        format!("{}: {reason}", self.layer.prefix)
    }

    fn check(&self, activated: &[f32], tolerance: Tolerance) -> std::result::Result<(), String> {
        if self.is_by(self.activation, activated, tolerance) {
            return Ok(());
        }
        let is = |other: &Activation| self.is_by(*other, activated, tolerance);
        let ours = self.activation.name();
        Err(match Activation::all().find(is) {
            Some(other) => format!(
                "the struct's activation is {}, not {ours} as expected: it is another model's, or SparseOptions::activation says it wrongly",
                other.name()
            ),
            None => format!("the model does not multiply down with {ours}(gate) * up, or {ours}(up) without a gate"),
        })
    }

    /// Whether the values are what this activation makes of the answers.
    fn is_by(&self, activation: Activation, activated: &[f32], tolerance: Tolerance) -> bool {
        let known = GATES
            .iter()
            .zip(&UPS)
            .map(|(gate, up)| match self.layer.gate {
                Some(_) => activation.apply(*gate) * up,
                None => activation.apply(*gate),
            });
        let known: Vec<f32> = known.collect();
        let mut rows = activated.chunks(self.layer.intermediate_size).enumerate();
        rows.all(|(row, values)| {
            values.iter().enumerate().all(|(neuron, value)| {
                let known = known[(row + neuron) % known.len()];
                let biases = [&self.gate_bias, &self.up_bias].into_iter().flatten();
                let bias: f32 = biases.map(|bias| bias[neuron].abs()).sum();
                let most = tolerance.absolute + tolerance.relative * known.abs();
                (value - known).abs() <= most + tolerance.of_bias * bias
            })
        })
    }
}

impl Drop for SparseFfn {
    fn drop(&mut self) {
        self.forget();
    }
}

/// The FFN that the matrix `name` is of, and which of its matrices it is.
pub(super) fn ffn_of(ffns: &[Arc<SparseFfn>], name: &str) -> Option<(Arc<SparseFfn>, FfnPart)> {
    let mut ffns = ffns.iter();
    ffns.find_map(|ffn| Some((ffn.clone(), FfnPart::of(&ffn.layer, name)?)))
}

/// The layer as a stock struct has it, which adds the biases of linear layers itself.
fn without_down_bias(layer: FfnLayer) -> FfnLayer {
    FfnLayer {
        down_bias: None,
        ..layer
    }
}
