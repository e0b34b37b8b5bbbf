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

use super::facts::{read_config, StructKind};
use super::ffn::{ffn_of, SparseFfn};
use super::linear_product;
use super::llama_shape::{LlamaShape, EMBEDDING};
use super::options::SparseOptions;
use super::setup::StockSetup;
use super::turns::Turns;
use crate::activation::Activation;
use crate::error::{Error, Result};
use crate::folder::FlashFolder;
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
        /// Of queries and keys, whose rows are in another order there.
        head_dim: Option<usize>,
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
                head_dim,
            } => {
                turns.run(|| linear_product((name, matrix), *chunk_tokens, x, y))?;
                if let Some(head_dim) = head_dim {
                    interleave(y, *head_dim);
                }
                Ok(())
            }
            Self::Values { name, .. } => Err(format!("{name} is not a matrix of a linear layer")),
        }
    }
}

/// Puts the rows of each head, halves one after the other, in ggml's order: one of the first half, one of the second, and so on.
fn interleave(rows: &mut [f32], head_dim: usize) {
    let mut head = vec![0.0; head_dim];
    for rows in rows.chunks_mut(head_dim) {
        head.copy_from_slice(rows);
        let (first, second) = head.split_at(head_dim / 2);
        for (pair, (a, b)) in rows.chunks_mut(2).zip(first.iter().zip(second)) {
            pair.copy_from_slice(&[*a, *b]);
        }
    }
}

impl QuantizedType for FlashWeight {
    /// Weights of other dtypes are not asked for their products: those that candle packs anew (`select` in `quantized/repack*.rs`: some
    /// on x86, some on aarch64), and floats, which become tensors (`QMatMul::from_arc`).
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
                "{} stays on flash and is no tensor (candle asks for one where CANDLE_DEQUANTIZE_ALL or CANDLE_DEQUANTIZE_ALL_F16 is set)",
                self.name()
            ),
        }
    }

    /// Candle makes a slice of this length at [`Self::as_ptr`]: an empty one, which needs an aligned pointer that is not null.
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
struct GgmlTensors<'a> {
    vb: &'a FlashVarBuilder,
    shape: LlamaShape,
    turns: Arc<Turns>,
    chunk_tokens: usize,
    ffns: Vec<Arc<SparseFfn>>,
    tensors: HashMap<String, QTensor>,
}

impl GgmlTensors<'_> {
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
        head_dim: Option<usize>,
    ) -> Result<()> {
        let weight = FlashWeight::Linear {
            matrix: self.vb.matrix(&shape, &stored)?,
            name: stored,
            turns: self.turns.clone(),
            chunk_tokens: self.chunk_tokens,
            head_dim,
        };
        self.put(name, weight, &shape)
    }

    /// One of the three matrices of an FFN.
    fn ffn(&mut self, name: &str, stored: &str) -> Result<()> {
        let found = ffn_of(&self.ffns, stored);
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
        let (kv_rows, reordered) = (self.shape.kv_heads * head_dim, Some(head_dim));
        for (name, stored, rows, head_dim) in [
            ("attention.wq", "self_attn.q_proj", hidden, reordered),
            ("attention.wk", "self_attn.k_proj", kv_rows, reordered),
            ("attention.wv", "self_attn.v_proj", kv_rows, None),
            ("attention.wo", "self_attn.o_proj", hidden, None),
        ] {
            self.linear(&theirs(name), ours(stored), [rows, hidden], head_dim)?;
        }
        for (name, stored) in FFN {
            self.ffn(&theirs(name), &ours(stored))?;
        }
        Ok(())
    }
}

impl FlashVarBuilder {
    /// The root of the tree for candle's quantized Llama, which computes in F32, has SiLU and takes 4096 positions at most: plans the
    /// budget, with what candle keeps in DRAM itself.
    ///
    /// # Errors
    /// The budget is below the floor, the selector does not suit the folder, or candle's struct would compute something else than
    /// the folder's model.
    pub fn for_quantized_llama(folder: &FlashFolder, options: &SparseOptions) -> Result<Self> {
        let config = read_config(folder)?;
        let facts = LlamaShape::of(folder, &config)?.facts(folder, &config)?;
        let is_silu = |activation| activation == Activation::Silu;
        if options.dtype != DType::F32 || !options.activation.is_none_or(is_silu) {
            let reason = "candle's quantized Llama computes in F32 and has silu";
            return Err(Error::Stock {
                reason: reason.to_owned(),
            });
        }
        Self::for_struct(folder, facts, options)
    }

    /// What candle's `quantized_llama::ModelWeights::from_ggml` is made of, and the query heads of each key head, which it wants to be
    /// told as well. Loads all weights; they go with the model.
    ///
    /// The model takes turns for its products, on threads of its own. `self` is there for [`Self::ffn_stats`], and with `dip-ca` and
    /// dense prompts for [`Self::begin_sequence`] and [`Self::set_prompt`].
    ///
    /// # Errors
    /// Candle's struct would compute something else than the folder's model, the budget was planned for another one or is spent
    /// already, or a weight cannot be loaded.
    pub fn ggml_content(&self) -> Result<(Content, usize)> {
        let folder = self.folder();
        let config = read_config(folder)?;
        let shape = LlamaShape::of(folder, &config)?;
        let facts = || shape.facts(folder, &config);
        let setup = self.setup_for(StructKind::QuantizedLlama, facts)?;
        setup.load_once(|| self.load_content(shape, &setup))
    }

    fn load_content(&self, shape: LlamaShape, setup: &StockSetup) -> Result<(Content, usize)> {
        let root = self.root();
        let turns = Arc::new(Turns::new()?);
        let ffns = root.load_ffns(setup)?;
        let (hparams, gqa) = (shape.hparams(ffns.len()), shape.heads / shape.kv_heads);
        let (layers, hidden, vocab) = (ffns.len(), shape.hidden, shape.vocab);
        let mut tensors = GgmlTensors {
            vb: &root,
            shape,
            turns,
            chunk_tokens: setup.chunk_tokens,
            ffns,
            tensors: HashMap::new(),
        };
        tensors.values("tok_embeddings", EMBEDDING.to_owned(), &[vocab, hidden])?;
        tensors.values("norm", "model.norm.weight".to_owned(), &[hidden])?;
        tensors.linear("output", setup.facts.head.clone(), [vocab, hidden], None)?;
        for number in 0..layers {
            tensors.layer(number)?;
        }
        let tensors = tensors.tensors;
        if let Some(plan) = &setup.plan {
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
