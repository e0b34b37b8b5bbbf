//! The closed-form predictor of one layer: the best rank-`r` approximation of the matrix that decides which
//! neurons are active, where "best" is measured on the inputs that the layer really sees.
//!
//! For inputs with mean `m` and covariance `C = L Lᵀ`, the expected squared error of `A B (x - m)` against
//! `W (x - m)` is `|(W - A B) L|²`, so `A B L` is the truncated singular value decomposition of `W L`:
//! with `V` its first right singular vectors, `A = W L V` and `B = Vᵀ L⁻¹`. The mean and the layer's bias go
//! into one bias: `W m + b - A B m`.
//!
//! `V` comes from subspace iteration on `Lᵀ Wᵀ W L`, which is never formed: products are candle's, the small
//! orthogonalisations are in f64.

use candle::{DType, Device, Result, Tensor};
use nalgebra::{Cholesky, DMatrix, SymmetricEigen};
use wick_format::PredictorPart;

/// Columns beyond the rank, which make the wanted ones converge.
const EXTRA_COLUMNS: usize = 16;
const ITERATIONS: usize = 10;
/// Variance added to every direction, relative to the mean: inputs may lie in a subspace.
const RIDGE: f64 = 1e-5;
/// Rows of inputs multiplied at a time, so that f32 sums stay short.
const ROWS: usize = 4096;

/// `up (down x) + bias`, row-major.
pub(super) struct Factors {
    /// `(rank, hidden)`.
    pub(super) down: Tensor,
    /// `(intermediate, rank)`.
    pub(super) up: Tensor,
    /// `(intermediate)`.
    pub(super) bias: Tensor,
}

impl Factors {
    /// Fits `weight` `(intermediate, hidden)` and `bias` to inputs `x` `(tokens, hidden)`.
    pub(super) fn fit(weight: &Tensor, bias: &Tensor, x: &Tensor, rank: usize) -> Result<Self> {
        let (mean, covariance) = moments(x)?;
        let hidden = mean.len();
        let cholesky = Cholesky::new(covariance)
            .ok_or_else(|| candle::Error::msg("the inputs' covariance is not finite"))?;
        let l = cholesky.l();
        let v = leading_directions(weight, &to_tensor(&l)?, rank)?;
        let down = l
            .tr_solve_lower_triangular(&v)
            .ok_or_else(|| candle::Error::msg("the inputs' covariance is singular"))?
            .transpose();
        let up = weight.matmul(&to_tensor(&(&l * &v))?)?;
        let down = to_tensor(&down)?;
        let mean: Vec<f32> = mean.iter().map(|value| *value as f32).collect();
        let mean = Tensor::from_vec(mean, (hidden, 1), &Device::Cpu)?;
        let predicted = up.matmul(&down.matmul(&mean)?)?;
        let bias = (bias + (weight.matmul(&mean)? - predicted)?.squeeze(1)?)?;
        Ok(Self { down, up, bias })
    }

    /// How many values lie between the two matrices.
    pub(super) fn rank(&self) -> usize {
        self.down.dims().first().copied().unwrap_or(0)
    }

    /// The first `rank` directions alone, the best so many, for inputs whose mean is `mean` `(hidden)`.
    pub(super) fn narrowed(&self, rank: usize, mean: &Tensor) -> Result<Self> {
        let rest = self.rank() - rank;
        let (down, up) = (
            self.down.narrow(0, rank, rest)?,
            self.up.narrow(1, rank, rest)?,
        );
        let lost = up.matmul(&down.matmul(&mean.unsqueeze(1)?)?)?.squeeze(1)?;
        Ok(Self {
            down: self.down.narrow(0, 0, rank)?.contiguous()?,
            up: self.up.narrow(1, 0, rank)?.contiguous()?,
            bias: (&self.bias + lost)?,
        })
    }

    /// The bytes of a part in the predictor file, where matrices have 16-bit numbers.
    ///
    /// # Errors
    /// A pair of such numbers has no such part.
    pub(super) fn stored_bytes(&self, part: PredictorPart) -> Result<Vec<u8>> {
        let halves = |tensor: &Tensor| -> Result<Vec<u8>> {
            let values = tensor.flatten_all()?.to_dtype(DType::F16)?;
            let values = values.to_vec1::<half::f16>()?;
            Ok(values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect())
        };
        match part {
            PredictorPart::Down => halves(&self.down),
            PredictorPart::Up => halves(&self.up),
            PredictorPart::UpBias => {
                let values = self.bias.to_vec1::<f32>()?;
                Ok(values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect())
            }
            other => candle::bail!("a pair of 16-bit numbers has no {}", other.name()),
        }
    }

    /// The matrices with values that `dtype` can hold.
    ///
    /// # Errors
    /// One of them is too large for that.
    pub(super) fn rounded(self, dtype: DType) -> Result<Self> {
        let round = |tensor: &Tensor| {
            let rounded = tensor.to_dtype(dtype)?.to_dtype(DType::F32)?;
            // Zero times what is not finite is no number.
            match rounded.affine(0.0, 0.0)?.sum_all()?.to_scalar::<f32>()? {
                0.0 => Ok(rounded),
                _ => candle::bail!("a predictor's weights are beyond what {dtype:?} holds"),
            }
        };
        Ok(Self {
            down: round(&self.down)?,
            up: round(&self.up)?,
            bias: self.bias,
        })
    }

    /// Scores `(tokens, intermediate)` of inputs `x` `(tokens, hidden)`.
    pub(super) fn scores(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.down.t()?)?
            .matmul(&self.up.t()?)?
            .broadcast_add(&self.bias)
    }
}

/// Mean, and covariance with a ridge, of the rows of `x`.
fn moments(x: &Tensor) -> Result<(Vec<f64>, DMatrix<f64>)> {
    let (tokens, hidden) = x.dims2()?;
    let mean = x.mean(0)?;
    let mut covariance = DMatrix::<f64>::zeros(hidden, hidden);
    for start in (0..tokens).step_by(ROWS) {
        let rows = x
            .narrow(0, start, ROWS.min(tokens - start))?
            .broadcast_sub(&mean)?;
        let products = rows.t()?.matmul(&rows)?.flatten_all()?.to_vec1::<f32>()?;
        for (sum, product) in covariance.iter_mut().zip(products) {
            *sum += f64::from(product);
        }
    }
    covariance /= tokens.max(1) as f64;
    let ridge = RIDGE * covariance.trace() / hidden.max(1) as f64;
    for i in 0..hidden {
        covariance[(i, i)] += ridge.max(f64::MIN_POSITIVE);
    }
    let mean = mean.to_vec1::<f32>()?.into_iter().map(f64::from).collect();
    Ok((mean, covariance))
}

/// The `rank` leading eigenvectors of `Lᵀ Wᵀ W L`, as columns.
fn leading_directions(weight: &Tensor, l: &Tensor, rank: usize) -> Result<DMatrix<f64>> {
    let hidden = l.dim(0)?;
    let columns = (rank + EXTRA_COLUMNS).min(hidden);
    let (weight_t, l_t) = (weight.t()?, l.t()?);
    let apply = |q: &DMatrix<f64>| -> Result<DMatrix<f64>> {
        let product = weight.matmul(&l.matmul(&to_tensor(q)?)?)?;
        to_matrix(&l_t.matmul(&weight_t.matmul(&product)?)?)
    };
    let mut q = start(hidden, columns).qr().q();
    for _ in 0..ITERATIONS {
        q = apply(&q)?.qr().q();
    }
    let eigen = SymmetricEigen::new(q.transpose() * apply(&q)?);
    let mut order: Vec<usize> = (0..columns).collect();
    order.sort_by(|a, b| eigen.eigenvalues[*b].total_cmp(&eigen.eigenvalues[*a]));
    let leading = eigen
        .eigenvectors
        .select_columns(&order[..rank.min(columns)]);
    Ok(q * leading)
}

/// Columns that look random and are the same every time (a Weyl sequence).
fn start(rows: usize, columns: usize) -> DMatrix<f64> {
    DMatrix::from_fn(rows, columns, |row, column| {
        let index = (row * columns + column + 1) as f64;
        (index * std::f64::consts::SQRT_2).fract() + (index * 3f64.sqrt()).fract() - 1.0
    })
}

fn to_tensor(matrix: &DMatrix<f64>) -> Result<Tensor> {
    // Columns of the matrix are rows of its transpose.
    let values: Vec<f32> = matrix
        .transpose()
        .iter()
        .map(|value| *value as f32)
        .collect();
    Tensor::from_vec(values, (matrix.nrows(), matrix.ncols()), &Device::Cpu)
}

fn to_matrix(tensor: &Tensor) -> Result<DMatrix<f64>> {
    let (rows, columns) = tensor.dims2()?;
    let values = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(DMatrix::from_row_iterator(
        rows,
        columns,
        values.into_iter().map(f64::from),
    ))
}

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::*;

    #[test]
    fn full_rank_reproduces_the_layer_and_low_rank_keeps_the_strong_directions() -> Result<()> {
        let (tokens, hidden, ffn) = (600, 12, 40);
        // Inputs with uneven variances and a mean, as a norm with a strong scale gives.
        let scale: Vec<f32> = (0..hidden).map(|i| 4.0 / (1 + i) as f32).collect();
        let scale = Tensor::from_vec(scale, hidden, &Device::Cpu)?;
        let mut random = Random(6);
        let x = (random.normal(tokens, hidden)? + 0.5)?.broadcast_mul(&scale)?;
        let weight = random.normal(ffn, hidden)?;
        let bias = random.normal(1, ffn)?.squeeze(0)?;
        let exact = x.matmul(&weight.t()?)?.broadcast_add(&bias)?;
        let error = |rank: usize| -> Result<f32> {
            let factors = Factors::fit(&weight, &bias, &x, rank)?;
            (factors.scores(&x)? - &exact)?
                .sqr()?
                .mean_all()?
                .to_scalar::<f32>()
        };
        assert!(error(hidden)? < 1e-6, "{}", error(hidden)?);
        // Fewer directions of a fit are the fit of fewer.
        let (all, mean) = (Factors::fit(&weight, &bias, &x, hidden)?, x.mean(0)?);
        for rank in [1, 4, hidden] {
            let narrowed = all.narrowed(rank, &mean)?.scores(&x)?;
            let narrowed = (narrowed - &exact)?.sqr()?.mean_all()?.to_scalar::<f32>()?;
            assert!(
                (narrowed - error(rank)?).abs() < 1e-3 * (1.0 + narrowed),
                "{narrowed}"
            );
        }
        // Variances fall as 1/i²: four directions hold about 90 % of it, and each rank more helps.
        let power = exact
            .broadcast_sub(&exact.mean(0)?)?
            .sqr()?
            .mean_all()?
            .to_scalar::<f32>()?;
        assert!(error(4)? < 0.2 * power && error(1)? > error(4)? && error(4)? > error(8)?);
        Ok(())
    }
}
