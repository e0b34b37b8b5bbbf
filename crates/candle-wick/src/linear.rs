//! A linear layer: `y = x wᵀ + b`, its weight in DRAM or read from flash, by rows or by columns.
//!
//! A weight that lies in the records of columns of an FFN is multiplied column by column, and so may leave some out;
//! any other is a [`Matrix`], multiplied row by row. Weights stay in the stored dtype, sums are f32. A product depends
//! neither on what is in DRAM nor on threads, bit for bit.

use std::sync::{Arc, Mutex};

use candle::{Module, Tensor};

use crate::column_cache::ColumnCache;
use crate::error::{Error, Result};
use crate::matrix::Matrix;
use crate::neurons::Rows;
use crate::rows::{add_bias, map_rows};
use crate::selection::{all_of, Selection};
use crate::stats::Clock;
use crate::var_builder::{ffn_matrix, lock, FlashVarBuilder};
use crate::workspace::{Workspace, CHUNK_TOKENS_MAX};

/// `x (.., in_dim) -> (.., out_dim)`, as `candle_nn::Linear`.
#[derive(Clone)]
pub struct FlashLinear {
    weight: Weight,
    bias: Option<Arc<[f32]>>,
}

#[derive(Clone)]
enum Weight {
    Rows(Arc<Matrix>),
    Columns(Arc<Columns>),
}

/// One matrix of an FFN that is stored by columns.
struct Columns {
    cache: ColumnCache,
    workspace: Arc<Mutex<Workspace>>,
}

impl FlashLinear {
    /// `weight` `(out_dim, in_dim)`, and `bias` `(out_dim)` when the model has one.
    ///
    /// By columns each layer has a cache of its own, of whole records: gate and up, which share them, take both twice. A model's FFN is a
    /// [`FlashMlp`](crate::FlashMlp), which has them once; the budget counts that.
    pub fn load(in_dim: usize, out_dim: usize, vb: FlashVarBuilder) -> Result<Self> {
        let weight = match Columns::load(in_dim, out_dim, &vb)? {
            Some(columns) => Weight::Columns(Arc::new(columns)),
            None => Weight::Rows(Arc::new(vb.matrix(&[out_dim, in_dim], "weight")?)),
        };
        Self::new(weight, &vb)
    }

    /// A matrix that is loaded already, and the `bias` at `vb` when the model has one.
    pub(crate) fn with_weight(weight: Arc<Matrix>, vb: &FlashVarBuilder) -> Result<Self> {
        Self::new(Weight::Rows(weight), vb)
    }

    fn new(weight: Weight, vb: &FlashVarBuilder) -> Result<Self> {
        let bias = if vb.contains_tensor("bias") {
            Some(vb.values(weight.out_dim(), "bias")?.into())
        } else {
            None
        };
        Ok(Self { weight, bias })
    }

    /// Whether the weight is in DRAM.
    pub fn is_resident(&self) -> bool {
        match &self.weight {
            Weight::Rows(matrix) => matrix.is_resident(),
            Weight::Columns(columns) => columns.cache.is_resident(),
        }
    }

    /// `y = b + sum of x_i * column_i` over the inputs `ids`, ascending and none twice, for every row of `x` `(.., in_dim)`. By
    /// columns only those of `ids` are read and multiplied. A weight that is stored by rows is multiplied in whole, with
    /// zeros for the other inputs: the same value, and nothing saved.
    ///
    /// # Errors
    /// `ids` are not ascending, or not those of inputs; or reading fails.
    pub fn forward_selected(&self, x: &Tensor, ids: &[u32]) -> candle::Result<Tensor> {
        let in_dim = self.weight.in_dim();
        let is_ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
        let last = ids.last().map_or(0, |last| *last as usize);
        if !is_ascending || last >= in_dim {
            candle::bail!("inputs to select must be ascending numbers below {in_dim}, none twice");
        }
        self.compute(x, |tokens, values| match &self.weight {
            Weight::Columns(columns) => columns.product(tokens, values, ids.iter().copied()),
            Weight::Rows(matrix) => {
                let mut selected = vec![0.0; values.len()];
                let rows = values.chunks(in_dim).zip(selected.chunks_mut(in_dim));
                for (values, selected) in rows {
                    for id in ids {
                        selected[*id as usize] = values[*id as usize];
                    }
                }
                by_rows(matrix, tokens, &selected)
            }
        })
    }

    /// What `product` makes of the rows of `x`, and the bias.
    fn compute(
        &self,
        x: &Tensor,
        product: impl FnOnce(usize, &[f32]) -> Result<Vec<f32>>,
    ) -> candle::Result<Tensor> {
        let (in_dim, out_dim) = (self.weight.in_dim(), self.weight.out_dim());
        map_rows(x, in_dim, out_dim, |tokens, x| {
            let mut y = product(tokens, x)?;
            add_bias(&mut y, self.bias.as_deref());
            Ok(y)
        })
    }
}

impl Module for FlashLinear {
    fn forward(&self, x: &Tensor) -> candle::Result<Tensor> {
        self.compute(x, |tokens, x| match &self.weight {
            Weight::Rows(matrix) => by_rows(matrix, tokens, x),
            Weight::Columns(columns) => columns.product(tokens, x, 0..columns.cache.count() as u32),
        })
    }
}

impl Weight {
    fn in_dim(&self) -> usize {
        match self {
            Self::Rows(matrix) => matrix.columns(),
            Self::Columns(columns) => columns.cache.count(),
        }
    }

    fn out_dim(&self) -> usize {
        match self {
            Self::Rows(matrix) => matrix.rows(),
            Self::Columns(columns) => columns.cache.width(),
        }
    }
}

impl Columns {
    /// The columns of the matrix at `vb`, where it is one of an FFN that has such records. A channel's columns of gate and up
    /// are read together, also where one of them is asked for.
    fn load(in_dim: usize, out_dim: usize, vb: &FlashVarBuilder) -> Result<Option<Self>> {
        let (folder, placement) = (vb.folder(), vb.placement());
        let name = format!("{}.weight", vb.prefix());
        let Some((layer, part)) = ffn_matrix(folder, &name) else {
            return Ok(None);
        };
        let index = folder.manifest().layer_index(&layer.prefix);
        let index = index.expect("it is one of them");
        let (kind, matrix) = part.in_columns(layer);
        let slots = placement.column_slots(kind, index);
        let Some(layout) = layer.column_layout(kind) else {
            return Ok(None);
        };
        let (expected, got) = ([out_dim, in_dim], [layout.rows, layer.column_count(kind)]);
        if expected != got {
            let (expected, got) = (expected.to_vec(), got.to_vec());
            return Err(Error::Shape {
                name,
                expected,
                got,
            });
        }
        let place = layout.column_range(matrix);
        Ok(Some(Self {
            cache: ColumnCache::load(folder, layer, kind, place, slots, placement)?,
            workspace: vb.workspace().clone(),
        }))
    }

    /// `(tokens, out_dim)` of `x` `(tokens, in_dim)`, over the inputs `ids`.
    fn product(
        &self,
        tokens: usize,
        x: &[f32],
        ids: impl Iterator<Item = u32>,
    ) -> Result<Vec<f32>> {
        let (in_dim, out_dim) = (self.cache.count(), self.cache.width());
        let mut selection = Selection::default();
        ids.for_each(|id| selection.push(id, 1));
        let mut y = vec![0.0; tokens * out_dim];
        let work = &mut *lock(&self.workspace);
        let chunks = y.chunks_mut(CHUNK_TOKENS_MAX * out_dim);
        for (values, y) in x.chunks(CHUNK_TOKENS_MAX * in_dim).zip(chunks) {
            let x = Rows {
                tokens: values.len() / in_dim,
                values,
            };
            selection.wanted_by.fill(all_of(x.tokens));
            // Statistics are those of whole FFNs.
            self.cache
                .multiply(&selection, x, work, &mut Clock::start())?;
            work.sums.write_to(y);
        }
        Ok(y)
    }
}

/// `(tokens, rows)` of `x` `(tokens, columns)`.
pub(crate) fn by_rows(matrix: &Matrix, tokens: usize, x: &[f32]) -> Result<Vec<f32>> {
    let mut by_row = vec![0.0; matrix.rows() * tokens];
    matrix.product(x, tokens, &mut by_row)?;
    Ok(transposed(by_row, matrix.rows(), tokens))
}

/// `(rows, tokens)` values as `(tokens, rows)`.
pub(crate) fn transposed(by_row: Vec<f32>, rows: usize, tokens: usize) -> Vec<f32> {
    if tokens == 1 {
        return by_row;
    }
    let mut by_token = vec![0.0; by_row.len()];
    for (row, values) in by_row.chunks(tokens.max(1)).enumerate() {
        for (token, value) in values.iter().enumerate() {
            by_token[token * rows + row] = *value;
        }
    }
    by_token
}
