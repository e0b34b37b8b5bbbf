//! Candle's quantized Llama, unmodified and without a patch, whose weights stay on flash.
//!
//! `ModelWeights::from_ggml` takes each weight as a `QTensor`, and how one multiplies is for anybody to say (`QuantizedType`). So the
//! products of gate, up and down go to [`SparseFfn`], those of other matrices to a [`Matrix`] in the stored dtype, in DRAM or
//! streamed, and nothing is quantised. It is all safe code, a read that fails is an error of the model's own `forward`, and the model
//! owns its weights.
//!
//! Rows of queries and keys are in another order there: the halves of a head interleaved.
//!
//! Not here: which models it can be (`llama_shape`).

use std::collections::HashMap;
use std::sync::Arc;

use candle::quantized::ggml_file::{Content, VersionedMagic, Vocab};
use candle::quantized::{GgmlDType, QStorage, QTensor, QuantizedType};
use candle::{bail, CpuStorage, DType, Device};
use half::f16;

use super::facts::read_config;
use super::ffn::SparseFfn;
use super::llama_shape::{LlamaShape, EMBEDDING};
use super::options::SparseOptions;
use super::planned::Planned;
use super::turns::Turns;
use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::linear::by_rows;
use crate::matrix::Matrix;
use crate::var_builder::{FfnPart, FlashVarBuilder};

/// Names of a layer's tensors, in ggml and in the folder.
const NORMS: [(&str, &str); 2] = [
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
];
const FFN: [(&str, &str); 3] = [
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
];

/// A weight as candle's quantized matmul takes it.
enum FlashWeight {
    Ffn {
        ffn: Arc<SparseFfn>,
        part: FfnPart,
        turns: Arc<Turns>,
    },
    Linear {
        name: String,
        matrix: Matrix,
        turns: Arc<Turns>,
        chunk_tokens: usize,
        /// Rows of a head, where ggml has its halves interleaved.
        interleave: Option<usize>,
    },
    /// What candle wants the values of.
    Values { name: String, matrix: Matrix },
}

impl FlashWeight {
    fn name(&self) -> &str {
        match self {
            Self::Ffn { ffn, part, .. } => ffn.name(*part),
            Self::Linear { name, .. } | Self::Values { name, .. } => name,
        }
    }

    /// `y` `(tokens, out_dim)` of `x` `(tokens, in_dim)`.
    fn product(&self, x: &[f32], y: &mut [f32]) -> std::result::Result<(), String> {
        match self {
            Self::Ffn { ffn, part, turns } => match part {
                FfnPart::Gate => {
                    // Candle asks for it first; what a forward that failed has left does not count.
                    ffn.forget();
                    ffn.begin(*part, x, y)
                }
                FfnPart::Up => ffn.begin(*part, x, y),
                FfnPart::Down => {
                    let x = ffn.finish(x, DType::F32)?;
                    turns.run(|| ffn.compute(&x, y))
                }
            },
            Self::Linear {
                name,
                matrix,
                turns,
                chunk_tokens,
                interleave,
            } => {
                let (rows, columns) = (matrix.rows(), matrix.columns());
                let chunks = x.chunks(chunk_tokens * columns);
                for (x, y) in chunks.zip(y.chunks_mut(chunk_tokens * rows)) {
                    let got = turns.run(|| by_rows(matrix, x.len() / columns, x));
                    let got = got.map_err(|error| format!("{name}: {error}"))?;
                    match interleave {
                        Some(head_dim) => interleaved(&got, *head_dim, y),
                        None => y.copy_from_slice(&got),
                    }
                }
                Ok(())
            }
            Self::Values { name, .. } => Err(format!("{name} is not a matrix of a linear layer")),
        }
    }
}

/// The rows of each head as ggml has them: one of its first half, one of its second, and so on.
fn interleaved(rows: &[f32], head_dim: usize, out: &mut [f32]) {
    for (rows, out) in rows.chunks(head_dim).zip(out.chunks_mut(head_dim)) {
        let (first, second) = rows.split_at(head_dim / 2);
        for (pair, (a, b)) in out.chunks_mut(2).zip(first.iter().zip(second)) {
            pair.copy_from_slice(&[*a, *b]);
        }
    }
}

impl QuantizedType for FlashWeight {
    /// One of the dtypes that candle never packs anew behind the weight's back, and does not turn into a tensor.
    fn dtype(&self) -> GgmlDType {
        GgmlDType::Q5_1
    }

    fn matmul_t(
        &self,
        _: (usize, usize, usize),
        lhs: &[f32],
        dst: &mut [f32],
    ) -> candle::Result<()> {
        self.product(lhs, dst).map_err(candle::Error::msg)
    }

    fn matmul_t_f16(
        &self,
        _: (usize, usize, usize),
        _: &[f16],
        _: &mut [f16],
    ) -> candle::Result<()> {
        bail!("{} is multiplied with f32 alone", self.name())
    }

    fn embedding(&self, _: &[u32], _: usize, _: usize) -> candle::Result<CpuStorage> {
        bail!("rows of {} cannot be looked up", self.name())
    }

    fn dequantize(&self, _: usize) -> candle::Result<CpuStorage> {
        match self {
            Self::Values { matrix, .. } => Ok(CpuStorage::F32(matrix.to_f32()?)),
            _ => bail!(
                "{} stays on flash: CANDLE_DEQUANTIZE_ALL wants it in memory",
                self.name()
            ),
        }
    }

    /// None of its bytes can be had.
    fn storage_size_in_bytes(&self) -> usize {
        0
    }

    fn as_ptr(&self) -> *const u8 {
        std::ptr::NonNull::<u64>::dangling().as_ptr().cast()
    }

    fn block_size(&self) -> usize {
        1
    }

    fn from_float(&mut self, _: &[f32]) {
        unreachable!("candle quantises into storage of its own");
    }

    fn from_float_imatrix(&mut self, _: &[f32], _: &[f32], _: usize) {
        unreachable!("candle quantises into storage of its own");
    }

    fn size(&self) -> usize {
        0
    }
}

/// Collects the tensors by ggml's names.
struct Tensors<'a> {
    vb: &'a FlashVarBuilder,
    shape: LlamaShape,
    turns: Arc<Turns>,
    chunk_tokens: usize,
    ffns: Vec<Arc<SparseFfn>>,
    tensors: HashMap<String, QTensor>,
}

impl Tensors<'_> {
    /// A tensor that candle wants the values of.
    fn values(&mut self, name: &str, stored: String, shape: &[usize]) -> Result<()> {
        let matrix = Matrix::load(self.vb.folder(), &stored, shape, false)?;
        let weight = FlashWeight::Values {
            name: stored,
            matrix,
        };
        self.put(name, weight, shape)
    }

    /// The matrix of a linear layer.
    fn linear(
        &mut self,
        name: &str,
        stored: String,
        shape: [usize; 2],
        interleave: Option<usize>,
    ) -> Result<()> {
        let weight = FlashWeight::Linear {
            matrix: self.vb.matrix(&shape, &stored)?,
            name: stored,
            turns: self.turns.clone(),
            chunk_tokens: self.chunk_tokens,
            interleave,
        };
        self.put(name, weight, &shape)
    }

    /// One of the three matrices of an FFN.
    fn ffn(&mut self, name: &str, stored: &str) -> Result<()> {
        let mut ffns = self.ffns.iter();
        let found = ffns.find_map(|ffn| Some((ffn.clone(), ffn.part(stored)?)));
        let (ffn, part) = found.ok_or_else(|| self.vb.folder().missing(stored))?;
        let shape = ffn.shape(part);
        let turns = self.turns.clone();
        self.put(name, FlashWeight::Ffn { ffn, part, turns }, &shape)
    }

    fn put(&mut self, name: &str, weight: FlashWeight, shape: &[usize]) -> Result<()> {
        let weight = QTensor::new(QStorage::Cpu(Box::new(weight)), shape)?;
        self.tensors.insert(format!("{name}.weight"), weight);
        Ok(())
    }

    fn layer(&mut self, number: usize) -> Result<()> {
        let theirs = |name: &str| format!("layers.{number}.{name}");
        let ours = |name: &str| format!("model.layers.{number}.{name}.weight");
        let (hidden, head_dim) = (self.shape.hidden, self.shape.head_dim());
        for (name, stored) in NORMS {
            self.values(&theirs(name), ours(stored), &[hidden])?;
        }
        let keys = self.shape.kv_heads * head_dim;
        for (name, stored, rows, reordered) in [
            ("attention.wq", "self_attn.q_proj", hidden, true),
            ("attention.wk", "self_attn.k_proj", keys, true),
            ("attention.wv", "self_attn.v_proj", keys, false),
            ("attention.wo", "self_attn.o_proj", hidden, false),
        ] {
            let interleave = reordered.then_some(head_dim);
            self.linear(&theirs(name), ours(stored), [rows, hidden], interleave)?;
        }
        for (name, stored) in FFN {
            self.ffn(&theirs(name), &ours(stored))?;
        }
        Ok(())
    }
}

impl FlashVarBuilder {
    /// As [`Self::for_stock`], for candle's quantized Llama, which computes in F32 and has SiLU.
    ///
    /// # Errors
    /// As of [`Self::for_stock`], or candle's struct would compute something else than the folder's model.
    pub fn for_quantized_llama(folder: &FlashFolder, options: &SparseOptions) -> Result<Self> {
        let config = read_config(folder)?;
        let facts = LlamaShape::of(folder, &config)?.facts(folder, &config)?;
        let options = SparseOptions {
            dtype: DType::F32,
            activation: None,
            ..options.clone()
        };
        Self::planned_for(folder, facts, &options)
    }

    /// What candle's `quantized_llama::ModelWeights::from_ggml` is made of, and the query heads of each key head, which it wants to be
    /// told as well. Loads all weights; they go with the model.
    ///
    /// # Errors
    /// Candle's struct would compute something else than the folder's model, the budget was planned for another one, or a weight
    /// cannot be loaded.
    pub fn ggml_content(&self) -> Result<(Content, usize)> {
        let (folder, root) = (self.folder(), self.root());
        let config = read_config(folder)?;
        let shape = LlamaShape::of(folder, &config)?;
        let planned = match self.planned() {
            Some(planned) => planned.clone(),
            None => Planned::without_plan(shape.facts(folder, &config)?).into(),
        };
        if !planned.facts.head_apart {
            let reason =
                "the budget was planned for another struct: for_quantized_llama plans for this one";
            return Err(Error::Stock {
                reason: reason.to_owned(),
            });
        }
        let turns = Arc::new(Turns::new()?);
        let ffns = root.load_ffns(&planned)?;
        let (hparams, gqa) = (shape.hparams(ffns.len()), shape.heads / shape.kv_heads);
        let (layers, hidden, vocab) = (ffns.len(), shape.hidden, shape.vocab);
        let mut tensors = Tensors {
            vb: &root,
            shape,
            turns,
            chunk_tokens: planned.chunk_tokens,
            ffns,
            tensors: HashMap::new(),
        };
        tensors.values("tok_embeddings", EMBEDDING.to_owned(), &[vocab, hidden])?;
        tensors.values("norm", "model.norm.weight".to_owned(), &[hidden])?;
        tensors.linear("output", planned.facts.head.clone(), [vocab, hidden], None)?;
        for number in 0..layers {
            tensors.layer(number)?;
        }
        let tensors = tensors.tensors;
        if let Some(plan) = &planned.plan {
            plan.prove_scratch();
        }
        let content = Content {
            magic: VersionedMagic::GgjtV3,
            hparams,
            vocab: Vocab {
                token_score_pairs: Vec::new(),
            },
            tensors,
            device: Device::Cpu,
        };
        Ok((content, gqa))
    }
}
