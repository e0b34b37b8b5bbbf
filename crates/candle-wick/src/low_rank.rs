//! A low-rank pair of matrices: `up . between(down . x)`, in the dtypes that the file has.
//!
//! `down` is `(rank, hidden)`, `up` `(intermediate, rank)`. A matrix of whole numbers (I8) has an f32 scale for each of
//! its rows; one of floats has none.
//!
//! Not here: bias and threshold (`predictor`).

use std::ops::Range;

use wick_format::{FfnLayer, PredictorPart, StoredDtype};
use wick_kernels::{dot_rows, WeightDtype};

use crate::error::Result;
use crate::folder::FlashFolder;
use crate::matrix::Matrix;
use crate::neurons::{kernel_dtype, Rows};
use crate::predictor::{expect_tensor, finite_values, predictor_error, tensor_extent};
use crate::predictor_kind::Between;
use crate::workspace::sized;

/// What a matrix may be stored in.
const DTYPES: [StoredDtype; 4] = [
    StoredDtype::F32,
    StoredDtype::F16,
    StoredDtype::Bf16,
    StoredDtype::I8,
];
/// A matrix, and the scales of its rows.
const DOWN: [PredictorPart; 2] = [PredictorPart::Down, PredictorPart::DownScale];
const UP: [PredictorPart; 2] = [PredictorPart::Up, PredictorPart::UpScale];

/// The two matrices of one layer.
pub(crate) struct LowRank {
    down: ScaledMatrix,
    up: ScaledMatrix,
    between: Between,
}

/// A matrix in DRAM, and what its rows are multiplied by.
struct ScaledMatrix {
    matrix: Matrix,
    scales: Option<Vec<f32>>,
}

impl LowRank {
    pub(crate) fn load(folder: &FlashFolder, layer: &FfnLayer, between: Between) -> Result<Self> {
        let rank = rank(folder, layer)?;
        let (ffn, hidden) = (layer.intermediate_size, layer.hidden_size);
        Ok(Self {
            down: ScaledMatrix::load(folder, layer, DOWN, [rank, hidden])?,
            up: ScaledMatrix::load(folder, layer, UP, [ffn, rank])?,
            between,
        })
    }

    /// What `up` multiplies, `(tokens, rank)`, in `by_token`.
    pub(crate) fn query<'a>(
        &self,
        x: Rows<'_>,
        products: &mut Vec<f32>,
        by_token: &'a mut Vec<f32>,
    ) -> Result<&'a [f32]> {
        let (tokens, rank) = (x.tokens, self.down.matrix.rows());
        let products = sized(products, rank * tokens);
        self.down.matrix.product(x.values, tokens, products)?;
        self.down.scale(0..rank, tokens, products);
        if self.between == Between::Relu {
            // `max` would make a number of what is none, and select by it.
            let negative = products.iter_mut().filter(|value| **value < 0.0);
            negative.for_each(|value| *value = 0.0);
        }
        let by_token = sized(by_token, rank * tokens);
        for (r, values) in products.chunks(tokens).enumerate() {
            for (token, value) in values.iter().enumerate() {
                by_token[token * rank + r] = *value;
            }
        }
        self.up.matrix.count_multiplied();
        Ok(by_token)
    }

    /// The products `(neurons, tokens)` of some rows of `up`.
    pub(crate) fn scores(
        &self,
        neurons: Range<usize>,
        query: &[f32],
        tokens: usize,
        out: &mut [f32],
    ) {
        let (dtype, row_bytes, rows) = self.up.matrix.resident_rows().expect("loaded as resident");
        let row = |r: usize| {
            let first = (neurons.start + r) * row_bytes;
            &rows[first..first + row_bytes]
        };
        dot_rows(dtype, neurons.len(), row, query, tokens, out);
        self.up.scale(neurons, tokens, out);
    }
}

/// The rank of a layer's pair, by the header of the file.
pub(crate) fn rank(folder: &FlashFolder, layer: &FfnLayer) -> Result<usize> {
    let name = layer.predictor_tensor(PredictorPart::Down);
    match tensor_extent(folder, &name)?.shape.first() {
        Some(&rank) if rank > 0 => Ok(rank),
        // Scores of biases alone: the same neurons for every token.
        _ => Err(predictor_error(
            folder,
            format!("tensor {name} is of rank 0"),
        )),
    }
}

impl ScaledMatrix {
    /// A matrix of a layer's predictor, never streamed, whatever the placement says of other matrices.
    fn load(
        folder: &FlashFolder,
        layer: &FfnLayer,
        parts: [PredictorPart; 2],
        shape: [usize; 2],
    ) -> Result<Self> {
        let [name, scale] = parts.map(|part| layer.predictor_tensor(part));
        let stored = expect_tensor(folder, &name, &DTYPES, &shape)?;
        let dtype = match stored.weight() {
            None => WeightDtype::I8,
            Some(_) if folder.extent(&scale).is_some() => {
                let reason = format!("tensor {name} is {stored}, and {scale} is for one of I8");
                return Err(predictor_error(folder, reason));
            }
            Some(float) => kernel_dtype(float),
        };
        let matrix = Matrix::load_as(folder, &name, dtype, &shape, true)?;
        let scales = match dtype {
            WeightDtype::I8 => Some(finite_values(folder, &scale, shape[0])?),
            _ => None,
        };
        Ok(Self { matrix, scales })
    }

    /// Multiplies products `(rows, tokens)` of some rows by the rows' scales.
    fn scale(&self, rows: Range<usize>, tokens: usize, products: &mut [f32]) {
        let Some(scales) = &self.scales else {
            return;
        };
        for (products, scale) in products.chunks_mut(tokens).zip(&scales[rows]) {
            products.iter_mut().for_each(|product| *product *= scale);
        }
    }
}
