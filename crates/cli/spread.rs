//! The rounds of a measurement in three numbers.

use std::fmt;

use serde::Serialize;

/// Rounds that a figure is the median of.
pub(crate) const ROUNDS: usize = 5;

/// Median, least and most of some rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// The spread of `values`, in any order; all zero when there are none.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
        let last = values.len().saturating_sub(1);
        Self {
            median: (at(last / 2) + at(values.len() / 2)) / 2.0,
            min: at(0),
            max: at(last),
        }
    }
}

/// `median (least..most)`, with as many digits as the formatter asks for.
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(0);
        let Self { median, min, max } = self;
        write!(f, "{median:.digits$} ({min:.digits$}..{max:.digits$})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_of_the_sorted_values() {
        let of = |values: &[f64]| {
            let Spread { median, min, max } = Spread::of(values.iter().copied());
            (median, min, max)
        };
        assert_eq!(of(&[5.0, 1.0, 4.0, 2.0, 3.0]), (3.0, 1.0, 5.0));
        assert_eq!(of(&[4.0, 1.0, 2.0, 10.0]), (3.0, 1.0, 10.0));
        assert_eq!(of(&[7.0]), (7.0, 7.0, 7.0));
        assert_eq!(of(&[]), (0.0, 0.0, 0.0));
    }

    #[test]
    fn it_prints_as_in_the_tables() {
        let spread = Spread::of([1.0, 2.25, 9.5]);
        assert_eq!(format!("{spread:.1}"), "2.2 (1.0..9.5)");
        assert_eq!(spread.to_string(), "2 (1..10)");
    }
}
