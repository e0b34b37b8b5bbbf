//! A weight matrix outside the record files: in DRAM in its stored dtype, or read by rows when used.
//!
//! Both forms go through the same kernel row by row, so products are equal bit for bit.

use wick_io::advise_huge_pages;
use wick_kernels::{dot_rows, widen, WeightDtype};

use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::neurons::kernel_dtype;
use crate::stored::StoredMatrix;

/// `(rows, columns)` weights; a tensor of one dimension is one row.
pub(crate) struct Matrix {
    folder: FlashFolder,
    stored: StoredMatrix,
    dtype: WeightDtype,
    columns: usize,
    resident: Option<Vec<u8>>,
}

impl Matrix {
    /// Loads tensor `name` of the given shape, or leaves it on flash when not `resident`.
    pub(crate) fn load(
        folder: &FlashFolder,
        name: &str,
        shape: &[usize],
        resident: bool,
    ) -> Result<Self> {
        let extent = folder.extent(name).ok_or_else(|| folder.missing(name))?;
        let dtype = extent.dtype.weight().map(kernel_dtype);
        let dtype = dtype.ok_or_else(|| Error::Folder {
            path: folder.path().to_owned(),
            reason: format!("tensor {name} is {:?}, not a weight", extent.dtype),
        })?;
        Self::load_as(folder, name, dtype, shape, resident)
    }

    /// As [`Self::load`], of elements that the caller knows to be `dtype`.
    pub(crate) fn load_as(
        folder: &FlashFolder,
        name: &str,
        dtype: WeightDtype,
        shape: &[usize],
        resident: bool,
    ) -> Result<Self> {
        let extent = folder.extent(name).ok_or_else(|| folder.missing(name))?;
        if extent.shape != shape {
            let (expected, got) = (shape.to_vec(), extent.shape.clone());
            return Err(Error::Shape {
                name: name.to_owned(),
                expected,
                got,
            });
        }
        let stored = folder.stored_matrix(name)?;
        let columns = stored.row_bytes / dtype.size_bytes();
        let mut matrix = Self {
            folder: folder.clone(),
            stored,
            dtype,
            columns,
            resident: None,
        };
        if resident {
            matrix.resident = Some(resident_bytes(folder, &matrix.stored)?);
            // Checked already, and never read again.
            matrix.stored.checksums = None;
        }
        Ok(matrix)
    }

    pub(crate) fn rows(&self) -> usize {
        self.stored.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn is_resident(&self) -> bool {
        self.resident.is_some()
    }

    /// The element type in the file.
    #[cfg(feature = "wick-gemm")]
    pub(crate) fn dtype(&self) -> WeightDtype {
        self.dtype
    }

    /// Reads `rows` and calls `consume` with some of them at a time.
    pub(crate) fn for_each_rows(
        &self,
        rows: std::ops::Range<usize>,
        consume: impl FnMut(std::ops::Range<usize>, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut ring = self.folder.ring();
        self.stored
            .for_each_rows(self.folder.reader(), &mut ring, rows, consume)
    }

    /// `out[r * tokens + t] = dot(row r, x[t])` for `x` `(tokens, columns)`.
    pub(crate) fn product(&self, x: &[f32], tokens: usize, out: &mut [f32]) -> Result<()> {
        let row_bytes = self.stored.row_bytes;
        self.count_multiplied();
        if let Some(bytes) = &self.resident {
            let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
            dot_rows(self.dtype, self.stored.rows, row, x, tokens, out);
            return Ok(());
        }
        self.for_each_rows(0..self.stored.rows, |rows, bytes| {
            let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
            let out = &mut out[rows.start * tokens..rows.end * tokens];
            dot_rows(self.dtype, rows.len(), row, x, tokens, out);
            Ok(())
        })
    }

    /// Books one product with the whole matrix.
    pub(crate) fn count_multiplied(&self) {
        self.folder.count_multiplied(self.stored.len_bytes());
    }

    /// Row `row` as f32.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        let row_bytes = self.stored.row_bytes;
        if let Some(bytes) = &self.resident {
            widen(
                self.dtype,
                &bytes[row * row_bytes..(row + 1) * row_bytes],
                out,
            );
            return Ok(());
        }
        self.for_each_rows(row..row + 1, |_, bytes| {
            widen(self.dtype, bytes, out);
            Ok(())
        })
    }

    /// All values as f32, in row-major order.
    pub(crate) fn to_f32(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.stored.rows * self.columns];
        if let Some(bytes) = &self.resident {
            widen(self.dtype, bytes, &mut values);
            return Ok(values);
        }
        self.for_each_rows(0..self.stored.rows, |rows, bytes| {
            let range = rows.start * self.columns..rows.end * self.columns;
            widen(self.dtype, bytes, &mut values[range]);
            Ok(())
        })?;
        Ok(values)
    }

    /// The rows as bytes, when they are in DRAM.
    pub(crate) fn resident_rows(&self) -> Option<(WeightDtype, usize, &[u8])> {
        let bytes = self.resident.as_deref()?;
        Some((self.dtype, self.stored.row_bytes, bytes))
    }
}

/// All rows of a matrix, read and checked.
pub(crate) fn resident_bytes(folder: &FlashFolder, stored: &StoredMatrix) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(stored.len_bytes());
    advise_huge_pages(bytes.spare_capacity_mut());
    let mut ring = folder.ring();
    stored.for_each_rows(folder.reader(), &mut ring, 0..stored.rows, |_, rows| {
        bytes.extend_from_slice(rows);
        Ok(())
    })?;
    Ok(bytes)
}
