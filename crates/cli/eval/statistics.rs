//! Means and their standard errors.

use serde::Serialize;

/// A mean over documents or blocks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Estimate {
    pub(super) mean: f64,
    /// Standard deviation of the sample over the root of its size; `None` for a single value.
    pub(super) stderr: Option<f64>,
}

impl Estimate {
    /// Of `values`; `None` of nothing.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let count = values.len() as f64;
        if values.is_empty() {
            return None;
        }
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let stderr = (values.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt());
        Some(Self { mean, stderr })
    }

    /// Of `after - before`, value by value, as far as both go.
    pub(super) fn of_difference(before: &[f64], after: &[f64]) -> Option<Self> {
        let pairs = before.iter().zip(after);
        let differences: Vec<f64> = pairs.map(|(before, after)| after - before).collect();
        Self::of(&differences)
    }

    /// `1.234 ± 0.012`, or the mean alone.
    pub(super) fn to_text(self, digits: usize) -> String {
        match self.stderr {
            Some(stderr) => format!("{:.digits$} ± {stderr:.digits$}", self.mean),
            None => format!("{:.digits$}", self.mean),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_error_is_that_of_the_sample() {
        let estimate = Estimate::of(&[1.0, 2.0, 3.0, 6.0]).unwrap();
        assert_eq!(estimate.mean, 3.0);
        // Variance (4 + 1 + 0 + 9) / 3 over 4 values.
        assert!((estimate.stderr.unwrap() - (14f64 / 12.0).sqrt()).abs() < 1e-15);
        assert_eq!(estimate.to_text(2), "3.00 ± 1.08");
        assert_eq!(Estimate::of(&[2.5]).unwrap().to_text(1), "2.5");
        assert_eq!(Estimate::of(&[]), None);
    }

    #[test]
    fn paired_differences_are_surer_than_the_values() {
        let before = [1.0, 5.0, 9.0];
        let after = [1.5, 5.5, 9.5, 100.0];
        let difference = Estimate::of_difference(&before, &after).unwrap();
        assert_eq!((difference.mean, difference.stderr), (0.5, Some(0.0)));
    }
}
