//! Numbers that look random and are the same for the same seed (splitmix64).

/// A row of them, by its state.
pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform between `-radius` and `radius`.
    pub(super) fn uniform(&mut self, radius: f32) -> f32 {
        // 24 bits, as many as a f32 has places.
        let share = (self.next() >> 40) as f32 / (1u32 << 24) as f32;
        radius * (2.0 * share - 1.0)
    }

    pub(super) fn shuffle(&mut self, values: &mut [u32]) {
        for last in (1..values.len()).rev() {
            let other = self.next() % (last as u64 + 1);
            values.swap(last, other as usize);
        }
    }

    /// A matrix of nearly normal numbers of variance 1: each is the sum of twelve uniform ones.
    #[cfg(test)]
    pub(super) fn normal(&mut self, rows: usize, columns: usize) -> candle::Result<candle::Tensor> {
        let sum = |_| (0..12).map(|_| self.uniform(0.5)).sum::<f32>();
        let values = (0..rows * columns).map(sum).collect();
        candle::Tensor::from_vec(values, (rows, columns), &candle::Device::Cpu)
    }
}
