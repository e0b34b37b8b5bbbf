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

/// Refuses a hidden state that attention heads cannot share evenly.
pub(crate) fn check_heads(hidden_size: usize, heads: usize) -> Result<(), String> {
    if hidden_size.is_multiple_of(heads) {
        Ok(())
    } else {
        Err(format!(
            "hidden_size {hidden_size} cannot be split over {heads} attention heads"
        ))
    }
}

/// Refuses key heads that attention heads cannot share evenly.
pub(crate) fn check_kv_heads(heads: usize, kv_heads: usize) -> Result<(), String> {
    if heads.is_multiple_of(kv_heads) {
        Ok(())
    } else {
        Err(format!(
            "{heads} attention heads cannot share {kv_heads} key heads"
        ))
    }
}

/// Refuses a head whose values, all turned in pairs, leave one over.
pub(crate) fn check_rotary_head(head_dim: usize) -> Result<(), String> {
    if head_dim.is_multiple_of(2) {
        Ok(())
    } else {
        Err(format!("head_dim {head_dim} is odd"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_share_evenly_or_are_refused() {
        assert!(check_heads(64, 4).is_ok() && check_kv_heads(4, 2).is_ok());
        let reason = check_heads(64, 3).unwrap_err();
        assert!(
            reason.contains("64") && reason.contains("3 attention heads"),
            "{reason}"
        );
        assert!(check_rotary_head(16).is_ok() && check_rotary_head(15).is_err());
        let reason = check_kv_heads(4, 8).unwrap_err();
        assert!(reason.contains("8 key heads"), "{reason}");
    }

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
