//! Dynamic input pruning: an FFN that is multiplied with the values of largest magnitude alone (Federici et al., 2024).
//!
//! `y = down · (act(gate x) * up x)`: of `x` the largest values are kept, the same ones for gate and up, so that a channel's
//! columns of both are read together; of the product the largest are kept for down. Nothing is predicted, nothing is scaled
//! to make up for what is left out. Where the FFN has no gate (Phi, Falcon, OPT) the same is done to the inputs of its first
//! and of its second matrix, which the paper does not have.
//!
//! `dip-ca` makes a value smaller by a factor gamma before the choice when its column is not in memory: it reads less, and
//! its numbers depend on what is. Everybody else's do not.
//!
//! Where the paper's cache counts uses for ever and lets in a random part of a mask that is larger than itself, ours halves its
//! counts every 128 tokens, takes the older of two that were used as often, and keeps a ring of slots that what does not fit
//! streams through. What `dip-ca` prefers goes by that.
//!
//! Not here: reading and adding columns (`column_cache`).

mod layer;
mod mask;
mod options;

pub(crate) use layer::DipLayer;
pub(crate) use mask::{keep_largest, MaskScratch};
pub use options::DipOptions;
