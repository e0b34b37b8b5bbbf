//! A tensor of the model, as it lies in the source: where its bytes are, and in which order its rows.
//!
//! Uploads put several matrices into one tensor, or order its rows otherwise, or store it turned. Nothing is
//! moved before it is written: the steps say where an element lies, and a [`RowOrder`] which stored row a row of
//! the model's tensor is. A vector has one element a row.
//!
//! [`SourceFolder::read`] is the one door through which weights leave a source.

use std::ops::Range;

use wick_format::Dtype;

use super::elements::Elements;
use super::SourceFolder;
use crate::ConvertError;

/// The elements of a tensor in a weight file.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(super) elements: Elements,
    /// Bytes of the file.
    pub(super) range: Range<usize>,
    /// Elements from one row to the next.
    row_step: usize,
    /// Elements from one column to the next.
    column_step: usize,
}

/// A tensor as a weight file lists it.
pub(super) struct StoredTensor {
    pub(super) name: String,
    pub(super) stored: Stored,
    pub(super) shape: Vec<usize>,
}

impl StoredTensor {
    /// A tensor whose elements lie side by side, the last dimension innermost.
    pub(super) fn packed(
        name: String,
        elements: Elements,
        shape: Vec<usize>,
        range: Range<usize>,
    ) -> Self {
        let stored = Stored {
            elements,
            range,
            row_step: shape.iter().skip(1).product(),
            column_step: 1,
        };
        Self {
            name,
            stored,
            shape,
        }
    }

    /// A tensor of another crate's reader, which proved that its extent holds all of it.
    pub(super) fn from_reader(tensor: wick_checkpoint::StoredTensor) -> Self {
        let packed = tensor.is_contiguous();
        let (start, len) = (tensor.offset_bytes, tensor.len_bytes);
        // The file is mapped, so its offsets fit usize.
        let range = start as usize..(start + len) as usize;
        let elements = Elements::of(&tensor.dtype, range.start);
        let mut this = Self::packed(tensor.name, elements, tensor.shape, range);
        match *tensor.strides {
            _ if packed => {}
            [row_step] => this.stored.row_step = row_step,
            [row_step, column_step] => {
                (this.stored.row_step, this.stored.column_step) = (row_step, column_step);
            }
            _ => {
                let strides = tensor.strides;
                this.stored.elements = Elements::Other(format!("stored with steps of {strides:?}"));
            }
        }
        this
    }
}

/// Which stored row is row `r`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The same.
    Same,
    /// `first + r / rows * step + r % rows`: groups of `rows` rows that begin every `step` rows, from `first` on.
    Groups {
        first: usize,
        rows: usize,
        step: usize,
    },
    /// Heads of `head_rows` rows whose halves rotate against each other, stored as pairs of neighbours.
    RotaryPairs { head_rows: usize },
    /// `groups` groups of some query heads, a key head and a value head, of `head_rows` rows each; stored with
    /// all queries first, then all keys, then all values.
    SeparatedGroups {
        groups: usize,
        queries: usize,
        head_rows: usize,
    },
}

impl RowOrder {
    fn stored_row(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::Groups { first, rows, step } => first + row / rows * step + row % rows,
            Self::RotaryPairs { head_rows } => {
                let (head, row) = (row / head_rows, row % head_rows);
                let half = head_rows / 2;
                head * head_rows + row % half * 2 + row / half
            }
            Self::SeparatedGroups {
                groups,
                queries,
                head_rows,
            } => {
                let (head, row) = (row / head_rows, row % head_rows);
                let (group, head) = (head / (queries + 2), head % (queries + 2));
                let stored_head = if head < queries {
                    group * queries + head
                } else {
                    head * groups + group // the key head is at `queries`, the value head behind it
                };
                stored_head * head_rows + row
            }
        }
    }
}

/// One tensor of the source, under its current name.
#[derive(Clone, Debug)]
pub(crate) struct SourceTensor {
    pub(super) shard: usize,
    /// Its name in the file.
    pub(super) stored_name: String,
    pub(super) stored: Stored,
    pub(crate) shape: Vec<usize>,
    /// From the stored rows to those of the model, each applied to the rows that the one before gives.
    pub(super) orders: Vec<RowOrder>,
}

impl SourceTensor {
    /// A tensor as it is stored, in this file of the source.
    pub(super) fn new(stored: StoredTensor, shard: usize) -> Self {
        Self {
            shard,
            stored_name: stored.name,
            stored: stored.stored,
            shape: stored.shape,
            orders: Vec::new(),
        }
    }

    /// Elements of a row; a vector has one element a row.
    pub(crate) fn width(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Rows, as [`Self::width`] counts them.
    pub(crate) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Whether its elements are blocks of a quantised type.
    pub(crate) fn is_quantised(&self) -> bool {
        matches!(self.stored.elements, Elements::Blocks(_))
    }

    pub(super) fn push_order(&mut self, order: RowOrder) {
        if order != RowOrder::Same {
            self.orders.push(order);
        }
    }

    fn stored_row(&self, row: usize) -> usize {
        let orders = self.orders.iter().rev();
        orders.fold(row, |row, order| order.stored_row(row))
    }

    /// Whether rows that follow each other are one piece of the file.
    fn is_packed(&self) -> bool {
        let Stored {
            row_step,
            column_step,
            ..
        } = self.stored;
        self.orders.is_empty() && row_step == self.width() && column_step == 1
    }
}

impl SourceFolder {
    /// Elements `columns` of the rows `rows` as `to` into `target`, one row after the other.
    ///
    /// # Errors
    /// Its dtype is none for weights, or a value does not fit into `to`.
    pub(crate) fn read(
        &self,
        tensor: &SourceTensor,
        rows: Range<usize>,
        columns: Range<usize>,
        to: Dtype,
        target: &mut [u8],
    ) -> Result<(), ConvertError> {
        self.dtype(tensor)?;
        let width = tensor.width();
        let stored = &tensor.stored;
        let bytes = &self.shards[tensor.shard].bytes()[stored.range.clone()];
        let out_of_range = |value| self.out_of_range(tensor, to, value);
        let elements = &stored.elements;
        if tensor.is_packed() && columns.len() == width {
            let span = rows.start * width..rows.end * width;
            return elements.read(bytes, span, to, target).map_err(out_of_range);
        }
        let row_bytes = (columns.len() * to.size_bytes()).max(1);
        let mut gathered = Vec::new();
        for (row, target) in rows.zip(target.chunks_mut(row_bytes)) {
            let row_start = tensor.stored_row(row) * stored.row_step;
            if stored.column_step == 1 {
                let span = row_start + columns.start..row_start + columns.end;
                elements.read(bytes, span, to, target)
            } else {
                let places = columns.clone().map(|n| row_start + n * stored.column_step);
                elements.gather(bytes, places, &mut gathered);
                elements.read(&gathered, 0..columns.len(), to, target)
            }
            .map_err(out_of_range)?;
        }
        Ok(())
    }

    /// Lets go of the memory behind some rows; they can be read again.
    pub(crate) fn release(&self, tensor: &SourceTensor, rows: Range<usize>) {
        let stored = &tensor.stored;
        let whole = 0..stored.range.len();
        let span = if stored.column_step == 1 && !rows.is_empty() {
            // Rows may be shorter than a page, so what lies between them is let go of too.
            let stored_rows = || rows.clone().map(|row| tensor.stored_row(row));
            let first = stored_rows().min().unwrap_or(0) * stored.row_step;
            let last = stored_rows().max().unwrap_or(0) * stored.row_step;
            stored.elements.byte_range(first..last + tensor.width())
        } else {
            whole.clone()
        };
        let start = stored.range.start;
        let span = span.start.min(whole.end)..span.end.min(whole.end);
        self.shards[tensor.shard].release(start + span.start..start + span.end);
    }

    /// The error for a value that the wanted dtype cannot hold.
    fn out_of_range(&self, tensor: &SourceTensor, to: Dtype, value: f64) -> ConvertError {
        let got = format!("too large for {to} with a value of {value}");
        let limit = crate::transcode::largest(to);
        let expected = format!("at most {limit} in magnitude (f32 or bf16 would hold it)");
        self.wrong(tensor, got, expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(order: RowOrder, rows: usize) -> Vec<usize> {
        (0..rows).map(|row| order.stored_row(row)).collect()
    }

    #[test]
    fn groups_pick_their_rows() {
        // Three heads of [q, k, v] with two rows each: the keys.
        let keys = RowOrder::Groups {
            first: 2,
            rows: 2,
            step: 6,
        };
        assert_eq!(picked(keys, 6), [2, 3, 8, 9, 14, 15]);
    }

    #[test]
    fn rotary_pairs_become_halves() {
        let order = RowOrder::RotaryPairs { head_rows: 6 };
        assert_eq!(picked(order, 12), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }

    #[test]
    fn separated_groups_come_together() {
        // Two groups of two queries, a key and a value, a row each: stored as q0 q1 q2 q3 k0 k1 v0 v1.
        let order = RowOrder::SeparatedGroups {
            groups: 2,
            queries: 2,
            head_rows: 1,
        };
        assert_eq!(picked(order, 8), [0, 1, 4, 6, 2, 3, 5, 7]);
        let order = RowOrder::SeparatedGroups {
            groups: 1,
            queries: 2,
            head_rows: 3,
        };
        assert_eq!(picked(order, 12), (0..12).collect::<Vec<_>>());
    }
}
