//! OPT, Falcon, Llama, Phi and Persimmon with their feed-forward weights on flash, and text generation.
//!
//! Each family is one file, shaped like candle's own definitions. [`load`] picks the family from the config of
//! a converted folder and spends the budget.
#![forbid(unsafe_code)]

mod blocks;
mod continuation;
mod error;
pub mod falcon;
mod family;
mod front;
mod generation;
mod interrupt;
mod layers;
mod limits;
pub mod llama;
mod load;
pub mod opt;
pub mod persimmon;
pub mod phi;
mod rope;
mod score;
mod tokenizer;
mod trace;

pub use blocks::{block_nll, Blocks};
pub use continuation::{score_continuations, Continuation, ContinuationScore};
pub use error::{Error, Result};
pub use family::{CausalLm, ModelConfig};
pub use generation::{Sampler, Sampling, Stop, TextGenerator};
pub use interrupt::Interrupt;
pub use load::{check_config, load, plan, ForwardTimes, LoadOptions, LoadedModel};
pub use rope::RopeParameters;
pub use score::{likeliest, logprob, score, score_each, Score};
pub use tokenizer::{TextStream, WickTokenizer};
pub use trace::record_trace;
