//! The tokenizer in the metadata of a GGUF file (`tokenizer.ggml.*`).
//!
//! Kinds: `gpt2`, byte-level BPE with merges, whose `pre` names the cut into words (`split`); `llama`, a SentencePiece
//! vocabulary with scores (`pieces`). Ids are those of the model's original tokenizer.
//!
//! Not here: reading the file.

use std::collections::BTreeMap;

use super::document::{AddedToken, Document, Model, Template, Vocab};
use super::pieces::{Algorithm, Kind, Piece, Pieces, Prefix};
use super::settings::Specials;
use super::split::{byte_decoder, Split};

/// The values of `tokenizer.ggml.*`; empty or `None` where the file has no such key.
#[derive(Clone, Debug, Default)]
#[cfg_attr(test, derive(serde::Deserialize), serde(default))]
pub(crate) struct GgufVocab {
    /// `general.architecture`: says how older files without `pre` cut texts.
    pub(crate) architecture: String,
    pub(crate) model: String,
    pub(crate) pre: Option<String>,
    pub(crate) tokens: Vec<String>,
    pub(crate) scores: Vec<f32>,
    /// `token_type`.
    pub(crate) token_types: Vec<i32>,
    pub(crate) merges: Vec<String>,
    pub(crate) bos_token_id: Option<u32>,
    pub(crate) eos_token_id: Option<u32>,
    pub(crate) unknown_token_id: Option<u32>,
    pub(crate) padding_token_id: Option<u32>,
    pub(crate) add_bos_token: Option<bool>,
    pub(crate) add_eos_token: Option<bool>,
    pub(crate) add_space_prefix: Option<bool>,
}

/// The text of `tokenizer.json` for the vocabulary of a GGUF file.
///
/// # Errors
/// The rest of a sentence that begins with the file: its vocabulary is damaged, or of a kind that is not known. Either
/// is no reason not to convert: the model then takes token ids.
#[cfg_attr(not(test), expect(dead_code, reason = "for the reader of GGUF files"))]
pub(crate) fn from_gguf(vocab: &GgufVocab) -> Result<String, String> {
    vocab.check()?;
    let document = match vocab.model.as_str() {
        "gpt2" => vocab.byte_level()?,
        "llama" => vocab.sentence_piece()?,
        other => {
            return Err(format!(
                "has a tokenizer of the kind `{other}`, expected `gpt2` or `llama`"
            ))
        }
    };
    document.to_json()
}

impl GgufVocab {
    fn check(&self) -> Result<(), String> {
        let count = self.tokens.len();
        if count == 0 || u32::try_from(count).is_err() {
            return Err(format!("has a vocabulary of {count} tokens"));
        }
        for (what, len) in [
            ("scores", self.scores.len()),
            ("token types", self.token_types.len()),
        ] {
            if len != 0 && len != count {
                return Err(format!("has {len} {what} for {count} tokens"));
            }
        }
        for (what, id) in self.named() {
            if id.is_some_and(|id| id as usize >= count) {
                return Err(format!(
                    "names token {} as its {what}, but has {count}",
                    id.unwrap_or_default()
                ));
            }
        }
        Ok(())
    }

    fn named(&self) -> [(&'static str, Option<u32>); 4] {
        [
            ("BOS", self.bos_token_id),
            ("EOS", self.eos_token_id),
            ("unknown", self.unknown_token_id),
            ("padding", self.padding_token_id),
        ]
    }

    fn kind(&self, id: usize) -> Kind {
        let number = self.token_types.get(id).copied();
        number.and_then(Kind::of).unwrap_or(Kind::Normal)
    }

    /// The text of a token; one without any gets a text that no other has.
    fn text(&self, id: usize) -> String {
        let text = &self.tokens[id];
        if text.is_empty() {
            format!("[EMPTY_{id}]")
        } else {
            text.clone()
        }
    }

    fn token(&self, id: u32, special: bool) -> AddedToken {
        AddedToken {
            id,
            content: self.text(id as usize),
            special,
            ..Default::default()
        }
    }

    /// Special tokens by type and by name, tokens that a user defined, and what stands around a text.
    fn specials(&self, add_bos: bool) -> Result<Specials, String> {
        let mut added_tokens = BTreeMap::new();
        for id in 0..self.tokens.len() {
            let kind = self.kind(id);
            if matches!(kind, Kind::Control | Kind::UserDefined) {
                let id = id as u32;
                added_tokens.insert(id, self.token(id, kind == Kind::Control));
            }
        }
        // A file may take ids from a config that is about another vocabulary: ordinary words stay words.
        let has_types = !self.token_types.is_empty();
        let is_word = |id: &u32| has_types && self.kind(*id as usize) == Kind::Normal;
        let named = self.named().into_iter().filter_map(|(_, id)| id);
        added_tokens.extend(
            named
                .filter(|id| !is_word(id))
                .map(|id| (id, self.token(id, true))),
        );
        let around = |is_wanted: bool, what: &str, id: Option<u32>| match (is_wanted, id) {
            (true, None) => Err(format!("wants a {what} token around texts and names none")),
            (true, Some(id)) => Ok(Some(self.token(id, true))),
            (false, _) => Ok(None),
        };
        let template = Template {
            bos: around(add_bos, "BOS", self.bos_token_id)?,
            eos: around(
                self.add_eos_token.unwrap_or(false),
                "EOS",
                self.eos_token_id,
            )?,
        };
        Ok(Specials {
            added_tokens,
            template,
        })
    }

    fn byte_level(&self) -> Result<Document, String> {
        let name = self.split_name()?;
        let add_prefix_space = self.add_space_prefix.unwrap_or(false);
        let split = Split::named(name, add_prefix_space)
            .ok_or_else(|| format!("cuts texts into words as `{name}` does, which is not known"))?;
        let merge = |(index, line): (usize, &String)| {
            // A token may itself begin with a space.
            let space = line.char_indices().skip(1).find(|(_, char)| *char == ' ');
            let (at, _) =
                space.ok_or_else(|| format!("has no two tokens in merge {}", index + 1))?;
            Ok((line[..at].to_string(), line[at + 1..].to_string()))
        };
        let specials = self.specials(self.add_bos_token.unwrap_or(split.add_bos))?;
        let vocab: Vocab = (0..)
            .zip((0..self.tokens.len()).map(|id| self.text(id)))
            .collect();
        Ok(Document {
            added_tokens: specials.added_tokens,
            normalizer: split.normalizer,
            pre_tokenizer: split.pre_tokenizer,
            template: specials.template,
            decoder: byte_decoder(),
            model: Model::Bpe {
                vocab,
                merges: self
                    .merges
                    .iter()
                    .enumerate()
                    .map(merge)
                    .collect::<Result<_, String>>()?,
                unk: None,
                byte_fallback: false,
                ignore_merges: split.ignore_merges,
            },
        })
    }

    /// `pre`, or what it would be for an older file.
    fn split_name(&self) -> Result<&str, String> {
        match (self.pre.as_deref(), self.architecture.as_str()) {
            (None | Some("default"), "gpt2" | "phi2") => Ok("gpt-2"),
            (None | Some("default"), "falcon") => Ok("falcon"),
            (None | Some("default"), other) => Err(format!(
                "does not say how its {other} model cuts texts into words (tokenizer.ggml.pre)"
            )),
            (Some(pre), _) => Ok(pre),
        }
    }

    fn sentence_piece(&self) -> Result<Document, String> {
        if self.scores.is_empty() {
            return Err("has no scores for its tokens".into());
        }
        let piece = |id: usize| Piece {
            text: self.text(id),
            score: self.scores[id],
            kind: self.kind(id),
        };
        let pieces: Vec<Piece> = (0..self.tokens.len()).map(piece).collect();
        let unk = pieces.iter().position(|piece| piece.kind == Kind::Unknown);
        let pieces = Pieces {
            algorithm: algorithm(&pieces),
            unk: self.unknown_token_id.or(unk.map(|id| id as u32)),
            pieces,
        };
        let prefix = if self.add_space_prefix.unwrap_or(true) {
            Prefix::Always
        } else {
            Prefix::None
        };
        let specials = self.specials(self.add_bos_token.unwrap_or(true))?;
        pieces.document(pieces.vocab(), specials, prefix)
    }
}

/// The file does not say: BPE scores are ranks, whole numbers, unigram scores are log probabilities.
fn algorithm(pieces: &[Piece]) -> Algorithm {
    let mut normal = pieces.iter().filter(|piece| piece.kind == Kind::Normal);
    if normal.all(|piece| piece.score.fract() == 0.0) {
        Algorithm::Bpe
    } else {
        Algorithm::Unigram
    }
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use serde_json::{json, Value};
    use tokenizers::Tokenizer;

    use super::*;

    fn vocab(value: Value) -> GgufVocab {
        serde_json::from_value(value).unwrap()
    }

    fn gpt2() -> GgufVocab {
        vocab(
            json!({"architecture": "gpt2", "model": "gpt2", "pre": "gpt-2",
            "tokens": ["<|eot|>", "a", "b", "ab", "1", "2", "12", "", "<u>"],
            "token_types": [3, 1, 1, 1, 1, 1, 1, 1, 4], "merges": ["a b", "1 2"],
            "bos_token_id": 0, "eos_token_id": 0}),
        )
    }

    fn llama(scores: &[f32]) -> GgufVocab {
        vocab(
            json!({"architecture": "llama", "model": "llama", "pre": "default",
            "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"], "scores": scores,
            "token_types": [2, 3, 3, 1, 1, 1, 1, 1], "bos_token_id": 1, "eos_token_id": 2}),
        )
    }

    fn ids(vocab: &GgufVocab, text: &str) -> Vec<u32> {
        let tokenizer = Tokenizer::from_str(&from_gguf(vocab).unwrap()).unwrap();
        tokenizer.encode(text, true).unwrap().get_ids().to_vec()
    }

    #[test]
    fn byte_level_vocabularies_cut_by_name() {
        assert_eq!(ids(&gpt2(), "ab12<|eot|><u>"), [3, 6, 0, 8]);
        let digits = GgufVocab {
            pre: Some("smollm".into()),
            ..gpt2()
        };
        assert_eq!(ids(&digits, "ab12"), [3, 4, 5]);
        let words = GgufVocab {
            bos_token_id: Some(1),
            ..gpt2()
        };
        assert_eq!(ids(&words, "ab"), [3], "a word that is named as BOS");
        let with_bos = GgufVocab {
            add_bos_token: Some(true),
            add_eos_token: Some(true),
            ..gpt2()
        };
        assert_eq!(ids(&with_bos, "ab"), [0, 3, 0]);
        let llama_3 = GgufVocab {
            pre: Some("llama-bpe".into()),
            merges: vec!["1 2".into()],
            ..gpt2()
        };
        assert_eq!(
            ids(&llama_3, "ab12"),
            [0, 3, 6],
            "its BOS, and a word that is a token without merges"
        );
    }

    #[test]
    fn older_files_cut_as_their_architecture_does() {
        for architecture in ["gpt2", "phi2", "falcon"] {
            let older = GgufVocab {
                pre: None,
                architecture: architecture.into(),
                ..gpt2()
            };
            assert_eq!(ids(&older, "ab12"), [3, 6], "{architecture}");
        }
        let unknown = GgufVocab {
            pre: None,
            architecture: "llama".into(),
            ..gpt2()
        };
        assert!(from_gguf(&unknown)
            .unwrap_err()
            .contains("tokenizer.ggml.pre"));
        let named = GgufVocab {
            pre: Some("tekken".into()),
            ..gpt2()
        };
        assert!(from_gguf(&named).unwrap_err().contains("`tekken`"));
    }

    #[test]
    fn scores_tell_bpe_from_unigram() {
        let bpe = llama(&[0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -2.0, -1.0]);
        assert_eq!(ids(&bpe, "ab a"), [1, 3, 7, 6]);
        let unigram = llama(&[0.0, 0.0, 0.0, -1.5, -2.5, -2.5, -9.0, -9.0]);
        assert_eq!(ids(&unigram, "ab a"), [1, 3, 4, 5, 3, 4]);
        let bare = GgufVocab {
            add_bos_token: Some(false),
            add_space_prefix: Some(false),
            ..bpe
        };
        assert_eq!(ids(&bare, "ab"), [7]);
    }

    #[test]
    fn damaged_vocabularies_are_sentences() {
        let scored = || llama(&[0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -2.0, -1.0]);
        let no_bos = || GgufVocab {
            bos_token_id: None,
            ..gpt2()
        };
        type Damage = fn(&mut GgufVocab);
        let broken: [(GgufVocab, Damage, &str); 13] = [
            (gpt2(), |vocab| vocab.tokens.clear(), "0 tokens"),
            (gpt2(), |vocab| vocab.model = "bert".into(), "`bert`"),
            (gpt2(), |vocab| vocab.scores = vec![0.0], "1 scores for 9"),
            (
                gpt2(),
                |vocab| vocab.token_types = vec![1; 8],
                "8 token types",
            ),
            (gpt2(), |vocab| vocab.bos_token_id = Some(9), "9 as its BOS"),
            (
                no_bos(),
                |vocab| vocab.add_bos_token = Some(true),
                "names none",
            ),
            (gpt2(), |vocab| vocab.merges = vec!["ab".into()], "merge 1"),
            (
                gpt2(),
                |vocab| vocab.merges = vec!["a 1".into()],
                "no token `a1`",
            ),
            (gpt2(), |vocab| vocab.tokens[1] = "b".into(), "two ids"),
            (scored(), |vocab| vocab.scores.clear(), "no scores"),
            (scored(), |vocab| vocab.scores[3] = f32::NAN, "score NaN"),
            (scored(), |vocab| vocab.tokens[3] = "a".into(), "twice"),
            (
                scored(),
                |vocab| vocab.token_types[0] = 1,
                "unknown characters",
            ),
        ];
        for (mut vocab, damage, part) in broken {
            damage(&mut vocab);
            let error = from_gguf(&vocab).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
