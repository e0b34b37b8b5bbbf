//! A vocabulary of SentencePiece: pieces with scores, whether it comes from `tokenizer.model` or from a GGUF file.
//!
//! BPE vocabularies have no list of merges: every way to put a piece together from two others is one, and the piece
//! with the highest score goes first, as `SentencePieceExtractor` of transformers has it. Text becomes pieces as with
//! `LlamaTokenizerFast`.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{json, Value};

use super::document::{AddedToken, Document, Model, Vocab};
use super::settings::Specials;

/// Stands for a space.
const SPACE: &str = "▁";
/// Longer pieces are no words; cutting them at every character would take long.
const PIECE_BYTES_MAX: usize = 256;
/// Bytes of all merges as text; the largest known vocabularies have 10 MB.
const MERGE_BYTES_MAX: usize = 64 << 20;

/// What a piece is for; the numbers are those of both file formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

impl Kind {
    pub(super) fn of(number: i32) -> Option<Self> {
        let kinds = [
            Self::Normal,
            Self::Unknown,
            Self::Control,
            Self::UserDefined,
            Self::Unused,
            Self::Byte,
        ];
        kinds.into_iter().find(|kind| *kind as i32 == number)
    }
}

/// A token.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: Kind,
}

/// How pieces are found in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Bpe,
    Unigram,
}

/// A vocabulary; ids are positions.
pub(super) struct Pieces {
    pub(super) pieces: Vec<Piece>,
    pub(super) algorithm: Algorithm,
    /// Stands for what no piece covers.
    pub(super) unk: Option<u32>,
}

/// Where a text gets the space that it does not have at its start.
#[derive(Clone, Copy)]
pub(super) enum Prefix {
    None,
    /// At the start of the text.
    First,
    /// At the start of the text and after every added token.
    Always,
}

impl Pieces {
    /// The tokens by id.
    pub(super) fn vocab(&self) -> Vocab {
        let texts = self.pieces.iter().map(|piece| piece.text.clone());
        (0..).zip(texts).collect()
    }

    /// Control pieces, which are special, and pieces that a user defined.
    pub(super) fn added_tokens(&self) -> Vec<AddedToken> {
        let added = |(id, piece): (u32, &Piece)| {
            let special = piece.kind == Kind::Control;
            (special || piece.kind == Kind::UserDefined).then(|| AddedToken {
                id,
                content: piece.text.clone(),
                special,
                ..Default::default()
            })
        };
        (0..).zip(&self.pieces).filter_map(added).collect()
    }

    /// The tokenizer; `vocab` has the pieces and what `specials` adds.
    ///
    /// # Errors
    /// The rest of a sentence: scores that are no numbers, no way to write an unknown character, pieces that are too
    /// long.
    pub(super) fn document(
        &self,
        vocab: Vocab,
        mut specials: Specials,
        prefix: Prefix,
    ) -> Result<Document, String> {
        self.check()?;
        for token in self.added_tokens() {
            specials.added_tokens.entry(token.id).or_insert(token);
        }
        let model = match self.algorithm {
            Algorithm::Bpe => Model::Bpe {
                merges: self.merges(&vocab)?,
                unk: self.unk.and_then(|unk| vocab.get(&unk)).cloned(),
                vocab,
                byte_fallback: true,
                ignore_merges: false,
            },
            Algorithm::Unigram => self.unigram(&vocab)?,
        };
        Ok(Document {
            added_tokens: specials.added_tokens,
            normalizer: prefix.normalizer(),
            pre_tokenizer: prefix.pre_tokenizer(),
            template: specials.template,
            decoder: prefix.decoder(),
            model,
        })
    }

    fn check(&self) -> Result<(), String> {
        if self.pieces.is_empty() {
            return Err("has no pieces".into());
        }
        let mut ids = HashMap::with_capacity(self.pieces.len());
        for (id, piece) in self.pieces.iter().enumerate() {
            let text = &piece.text;
            if text.is_empty() {
                return Err(format!("has no text for piece {id}"));
            }
            if !piece.score.is_finite() {
                return Err(format!(
                    "has the score {} for piece {id} (`{text}`)",
                    piece.score
                ));
            }
            if let Some(other) = ids.insert(text.as_str(), id) {
                return Err(format!("has piece `{text}` twice, as {other} and {id}"));
            }
        }
        if self
            .unk
            .is_some_and(|unk| unk as usize >= self.pieces.len())
        {
            return Err(format!(
                "has {} pieces, but number {:?} is to be the unknown one",
                self.pieces.len(),
                self.unk
            ));
        }
        let has_bytes =
            (0..=u8::MAX).all(|byte| ids.contains_key(format!("<0x{byte:02X}>").as_str()));
        if self.unk.is_none() && (self.algorithm == Algorithm::Unigram || !has_bytes) {
            return Err("has no piece for unknown characters".into());
        }
        Ok(())
    }

    fn unigram(&self, vocab: &Vocab) -> Result<Model, String> {
        let unk = self.unk.ok_or("has no piece for unknown characters")?;
        let scored = (0..).zip(&self.pieces).map(|(id, piece)| {
            // An added token may have taken the place of a piece.
            let text = vocab.get(&id).unwrap_or(&piece.text);
            (text.clone(), f64::from(piece.score))
        });
        Ok(Model::Unigram {
            pieces: scored.collect(),
            unk,
        })
    }

    /// Every way to put a normal piece together from two others, the best piece first.
    fn merges(&self, vocab: &Vocab) -> Result<Vec<(String, String)>, String> {
        let normal = (0..)
            .zip(&self.pieces)
            .filter(|(id, piece)| piece.kind == Kind::Normal && vocab.get(id) == Some(&piece.text));
        let by_text: HashMap<&str, &Piece> = normal
            .clone()
            .map(|(_, piece)| (piece.text.as_str(), piece))
            .collect();
        let mut merges = Vec::new();
        let mut text_bytes = 0;
        for (id, piece) in normal {
            let text = piece.text.as_str();
            if text.len() > PIECE_BYTES_MAX {
                let bytes = text.len();
                return Err(format!(
                    "has a piece of {bytes} bytes, number {id}: words have up to {PIECE_BYTES_MAX}"
                ));
            }
            let chars = text.chars().count();
            for (left_chars, (at, _)) in text.char_indices().enumerate().skip(1) {
                let (left, right) = text.split_at(at);
                if by_text.contains_key(left) && by_text.contains_key(right) {
                    text_bytes += text.len();
                    let lengths = Reverse((left_chars, chars - left_chars));
                    merges.push((piece.score, lengths, left, right));
                }
            }
            if text_bytes > MERGE_BYTES_MAX {
                return Err("has pieces that can be put together in too many ways".into());
            }
        }
        // Stable: merges of equal score and lengths stay in the order of ids.
        merges.sort_by(|(score, lengths, ..), (other_score, other_lengths, ..)| {
            other_score
                .total_cmp(score)
                .then(lengths.cmp(other_lengths))
        });
        let owned = merges
            .into_iter()
            .map(|(_, _, left, right)| (left.to_string(), right.to_string()));
        Ok(owned.collect())
    }
}

impl Prefix {
    fn normalizer(self) -> Value {
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        match self {
            Self::None => spaces,
            Self::First => Value::Null,
            Self::Always => {
                let prepend = json!({"type": "Prepend", "prepend": SPACE});
                json!({"type": "Sequence", "normalizers": [prepend, spaces]})
            }
        }
    }

    fn pre_tokenizer(self) -> Value {
        match self {
            Self::None | Self::Always => Value::Null,
            Self::First => json!({
                "type": "Metaspace",
                "replacement": SPACE,
                "prepend_scheme": "first",
                "split": false,
            }),
        }
    }

    fn decoder(self) -> Value {
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if !matches!(self, Self::None) {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({"type": "Sequence", "decoders": decoders})
    }
}
