//! Rows of weights in 1, 2 or 4 bits: how they lie in memory, and how weights become such rows.
//!
//! ```text
//! a row of k weights: groups of 64, the last one filled up    (k / 64, rounded up)
//!     a group:  [8 * bits]u8, and a scale, f16, kept elsewhere
//!     weight i of a group: the bits from bits * (i / (8 * bits)) on of byte i % (8 * bits)
//!     its value: (those bits - (2^bits - 1) / 2) * scale
//! ```
//! So levels lie half a step from zero on both sides: one bit is a sign times half the scale, two bits are -1.5, -0.5,
//! 0.5 and 1.5 scales. Eight bytes side by side hold the same bits of eight weights that follow each other, which is
//! what a vector wants. What fills up the last group means nothing.
//!
//! Not here: products with them (`packed_dot`), files.

use half::f16;

/// Weights that share a scale.
pub const PACKED_GROUP: usize = 64;

/// Scales tried for a group: so many steps from the one that reaches its largest weight down to nothing.
const SCALES_TRIED: usize = 24;

/// Bits of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedBits {
    /// A sign.
    One,
    /// Four levels.
    Two,
    /// Sixteen levels.
    Four,
}

impl PackedBits {
    /// All of them, fewest bits first.
    pub const ALL: [Self; 3] = [Self::One, Self::Two, Self::Four];

    /// How many.
    pub const fn count(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// Those of which there are `count`.
    pub fn from_count(count: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|bits| bits.count() == count)
    }

    /// Bytes of a row of `width` weights, without its scales.
    pub const fn row_bytes(self, width: usize) -> usize {
        packed_groups(width) * self.group_bytes()
    }

    const fn group_bytes(self) -> usize {
        self.count() * PACKED_GROUP / 8
    }

    /// The level farthest from zero, in scales.
    fn level_max(self) -> f32 {
        ((1 << self.count()) - 1) as f32 / 2.0
    }

    /// The code of the level nearest to `weight`, by which it is stored.
    fn code(self, weight: f32, scale: f32) -> u8 {
        let levels = 1 << self.count();
        // A scale of 0 makes a NaN or an infinity of the quotient, and any code will do.
        let code = (weight / scale).floor() + (levels / 2) as f32;
        code.clamp(0.0, (levels - 1) as f32) as u8
    }
}

/// Groups, and so scales, of a row of `width` weights.
pub const fn packed_groups(width: usize) -> usize {
    width.div_ceil(PACKED_GROUP)
}

/// Packs `weights` into `packed`, with a scale a group, little-endian f16, into `scales`: those that make
/// the sum of `importance[i] * (weights[i] - packed[i])^2` small.
///
/// Weights should be finite: others give a scale that is not, or that says nothing.
///
/// # Panics
/// When `importance` is not as long as `weights`, or `packed` and `scales` are not exactly the bytes of the row.
pub fn pack_row(
    bits: PackedBits,
    weights: &[f32],
    importance: &[f32],
    packed: &mut [u8],
    scales: &mut [u8],
) {
    assert_eq!(weights.len(), importance.len(), "one importance a weight");
    assert_eq!(
        packed.len(),
        bits.row_bytes(weights.len()),
        "bytes of the row"
    );
    assert_eq!(
        scales.len(),
        2 * packed_groups(weights.len()),
        "bytes of the scales"
    );
    let groups = weights
        .chunks(PACKED_GROUP)
        .zip(importance.chunks(PACKED_GROUP));
    let targets = packed
        .chunks_mut(bits.group_bytes())
        .zip(scales.chunks_mut(2));
    for ((weights, importance), (packed, scale)) in groups.zip(targets) {
        let best = best_scale(bits, weights, importance);
        scale.copy_from_slice(&best.to_le_bytes());
        packed.fill(0);
        for (i, weight) in weights.iter().enumerate() {
            let (byte, field) = (i % packed.len(), i / packed.len());
            packed[byte] |= bits.code(*weight, best.to_f32()) << (field * bits.count());
        }
    }
}

/// The scale of least error: of some from the largest weight's down, each moved once to where the levels that it
/// chooses fit best.
fn best_scale(bits: PackedBits, weights: &[f32], importance: &[f32]) -> f16 {
    let largest = weights
        .iter()
        .fold(0f32, |most, weight| most.max(weight.abs()));
    let reaching = largest / bits.level_max();
    // One bit has one level on each side: its best scale does not depend on where it is looked for.
    let tried = match bits {
        PackedBits::One => 1,
        PackedBits::Two | PackedBits::Four => SCALES_TRIED,
    };
    let mut best = (f32::INFINITY, to_f16(reaching));
    for step in (1..=tried).rev() {
        let scale = reaching * step as f32 / tried as f32;
        let scale = to_f16(fitted_scale(bits, weights, importance, scale));
        let error = error_of(bits, weights, importance, scale.to_f32());
        if error < best.0 {
            best = (error, scale);
        }
    }
    best.1
}

/// Where the levels that `scale` chooses fit the weights best.
fn fitted_scale(bits: PackedBits, weights: &[f32], importance: &[f32], scale: f32) -> f32 {
    let (mut of_weights, mut of_levels) = (0f32, 0f32);
    for (weight, importance) in weights.iter().zip(importance) {
        let level = f32::from(bits.code(*weight, scale)) - bits.level_max();
        of_weights += importance * weight * level;
        of_levels += importance * level * level;
    }
    match of_levels > 0.0 {
        true => of_weights / of_levels,
        false => scale,
    }
}

fn error_of(bits: PackedBits, weights: &[f32], importance: &[f32], scale: f32) -> f32 {
    let error = |(weight, importance): (&f32, &f32)| {
        let value = (f32::from(bits.code(*weight, scale)) - bits.level_max()) * scale;
        importance * (weight - value) * (weight - value)
    };
    weights.iter().zip(importance).map(error).sum()
}

/// The nearest f16 that is not infinite.
fn to_f16(scale: f32) -> f16 {
    let max = f16::MAX.to_f32();
    f16::from_f32(scale.clamp(-max, max))
}
