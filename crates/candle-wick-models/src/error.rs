//! What can go wrong with a model, one sentence each.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Trouble with a config, a tokenizer or a prompt, or below.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Trouble with the folder, the device or the budget.
    #[error(transparent)]
    Wick(#[from] candle_wick::Error),
    /// An error of candle's own.
    #[error(transparent)]
    Candle(#[from] candle::Error),
    /// The model's config is not one that this crate can run.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The config file.
        path: std::path::PathBuf,
        /// The key and its value.
        reason: String,
    },
    /// A tokenizer file is broken, or a text cannot be encoded.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A model continues at least one token.
    #[error("the prompt has 0 tokens; a model needs at least one to continue")]
    EmptyPrompt,
    /// The prompt and what was asked for exceed the context.
    #[error("{position} tokens and {tokens} more exceed the context of {ctx}")]
    ContextFull {
        /// Tokens seen so far.
        position: usize,
        /// Tokens to add.
        tokens: usize,
        /// The context.
        ctx: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    UnknownId {
        /// The id.
        id: u32,
        /// The vocabulary's size.
        vocab_size: usize,
    },
    /// A block's first token is given, so one token predicts nothing.
    #[error("a block of {block_tokens} tokens predicts nothing; it needs at least 2")]
    BlockTokens {
        /// What was asked for.
        block_tokens: usize,
    },
    /// A text is shorter than one block, or no block was asked for.
    #[error("the text has {tokens} tokens, not one block of {block_tokens}")]
    NoBlock {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens of a block.
        block_tokens: usize,
    },
    /// The first token of a text is predicted by nothing.
    #[error("nothing precedes the continuation, so nothing predicts its first token")]
    NoContext,
    /// There is nothing to score.
    #[error("the continuation adds no token to its context")]
    NoContinuation,
    /// A continuation does not fit, even without its context.
    #[error("a continuation of {tokens} tokens leaves no place for what precedes it in a context of {ctx}")]
    ContinuationLength {
        /// Its tokens.
        tokens: usize,
        /// The context.
        ctx: usize,
    },
    /// No token is the likeliest, and no probability is known.
    #[error("the model's logits are not finite: its weights are damaged, or overflow")]
    NotFinite,
    /// Somebody asked to stop.
    #[error("interrupted")]
    Interrupted,
}
