//! Random numbers for places in a file and tokens of a text that means nothing; no two runs have the same.

/// A row of random numbers.
pub(crate) struct Draw(u64);

impl Draw {
    /// Other numbers each time: a device, or whoever pretends to be one, may remember what it read.
    pub(crate) fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self(now.map_or(1, |since| since.as_nanos() as u64))
    }

    /// A number below `limit`, or 0 where there is none (splitmix64).
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_below_their_limit() {
        let mut draw = Draw::new();
        assert!((0..1000).all(|_| draw.below(7) < 7));
        assert_eq!((draw.below(1), draw.below(0)), (0, 0));
        let seen: std::collections::HashSet<u64> = (0..200).map(|_| draw.below(4)).collect();
        assert_eq!(seen.len(), 4);
    }
}
