//! Turns documents into tokens that a model can score.
//!
//! Not here: scoring them (`candle_wick_models`), reading them (`documents`).

use std::path::Path;

use anyhow::{Context, Result};
use candle_wick_models::{Continuation, WickTokenizer};

use super::documents::Document;

/// How a model wants its text.
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: &'a WickTokenizer,
    /// Special tokens before each context.
    pub(super) before: Vec<u32>,
    pub(super) ctx: usize,
}

impl Encoder<'_> {
    /// The choices of a document of the file at `path`, and how many tokens had to be cut from their contexts.
    ///
    /// # Errors
    /// A continuation is too long for the model's context, or it or what precedes it is no token; names file and line.
    pub(super) fn encode(
        &self,
        document: &Document,
        path: &Path,
    ) -> Result<(Vec<Continuation>, u64)> {
        let (mut continuations, mut cut_tokens) = (Vec::new(), 0);
        for choice in &document.choices {
            let (context, text) = (&choice.context, &choice.continuation);
            let encoded = Continuation::encode(self.tokenizer, &self.before, context, text);
            let cut = encoded.and_then(|mut continuation| {
                let cut = continuation.cut_to(self.ctx)?;
                Ok((continuation, cut))
            });
            let (continuation, cut) = cut.with_context(|| {
                let (path, id) = (path.display(), document.id);
                format!("{path}, line {}, document {id}", choice.line)
            })?;
            cut_tokens += cut as u64;
            continuations.push(continuation);
        }
        Ok((continuations, cut_tokens))
    }
}
