//! Limits of the numbers in a config: beyond them is damage, which would overflow sums of sizes or divide by zero.
//!
//! Errors are reasons without the file's name.

/// The largest size that is believed: that of the folder format.
const SIZE_MAX: usize = 1 << 24;

/// Refuses a size of zero or beyond belief.
pub(crate) fn check_sizes(sizes: &[(&str, usize)]) -> Result<(), String> {
    match sizes
        .iter()
        .find(|(_, size)| !(1..=SIZE_MAX).contains(size))
    {
        Some((key, size)) => Err(format!("{key} is {size}, expected 1 to {SIZE_MAX}")),
        None => Ok(()),
    }
}

/// Refuses a number that is not finite, not above zero.
pub(crate) fn check_positive(key: &str, number: f64) -> Result<(), String> {
    if number.is_finite() && number > 0.0 {
        Ok(())
    } else {
        Err(format!("{key} is {number}, expected more than 0"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_numbers_are_named() {
        assert!(check_sizes(&[("hidden_size", 1), ("vocab_size", SIZE_MAX)]).is_ok());
        for size in [0, SIZE_MAX + 1, usize::MAX] {
            let reason = check_sizes(&[("hidden_size", 64), ("head_dim", size)]).unwrap_err();
            assert!(
                reason.starts_with(&format!("head_dim is {size}")),
                "{reason}"
            );
        }
        for number in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(check_positive("rope_theta", number).is_err(), "{number}");
        }
    }
}
