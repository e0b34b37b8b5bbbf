//! The text of a `tokenizer.json`: what the Hugging Face `tokenizers` library reads.
//!
//! Everything in it is in the order of ids or ranks, so the same tokenizer gives the same bytes. No text leaves here
//! that the library does not read, or reads with other ids.
//!
//! Not here: where vocabulary and settings come from (`byte_level`, `pieces`).

use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{json, Value};

/// Tokens by id.
pub(super) type Vocab = BTreeMap<u32, String>;

/// A token that is looked for in the text before the model sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct AddedToken {
    #[serde(skip_deserializing)]
    pub(super) id: u32,
    pub(super) content: String,
    pub(super) single_word: bool,
    pub(super) lstrip: bool,
    pub(super) rstrip: bool,
    /// Whether it is looked for in the normalised text.
    pub(super) normalized: bool,
    /// Whether decoding leaves it out.
    pub(super) special: bool,
}

/// The model: how a piece of text becomes tokens.
pub(super) enum Model {
    Bpe {
        vocab: Vocab,
        /// The first is done first.
        merges: Vec<(String, String)>,
        unk: Option<String>,
        /// As SentencePiece: unknown characters become their bytes, else one unknown token.
        byte_fallback: bool,
        /// A word that is a token is that token, whatever the merges say.
        ignore_merges: bool,
    },
    Unigram {
        /// Pieces with scores, by id.
        pieces: Vec<(String, f64)>,
        unk: u32,
    },
}

/// What stands around every text.
#[derive(Default)]
pub(super) struct Template {
    pub(super) bos: Option<AddedToken>,
    pub(super) eos: Option<AddedToken>,
}

/// A tokenizer.
pub(super) struct Document {
    /// By id.
    pub(super) added_tokens: BTreeMap<u32, AddedToken>,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) template: Template,
    pub(super) decoder: Value,
    pub(super) model: Model,
}

impl Document {
    /// The text of the file.
    ///
    /// # Errors
    /// The rest of a sentence: two tokens are the same, a merge or an added token does not fit the vocabulary.
    pub(super) fn to_json(&self) -> Result<String, String> {
        if let Model::Bpe { vocab, merges, .. } = &self.model {
            check_bpe(vocab, merges)?;
        }
        let file = File {
            version: "1.0",
            truncation: (),
            padding: (),
            added_tokens: self.added_tokens.values().collect(),
            normalizer: &self.normalizer,
            pre_tokenizer: &self.pre_tokenizer,
            post_processor: self.template.post_processor(),
            decoder: &self.decoder,
            model: self.model.part(),
        };
        let json = serde_json::to_string(&file).map_err(|error| error.to_string())?;
        let refused = |error| format!("gives a tokenizer that cannot be read back: {error}");
        let tokenizer = tokenizers::Tokenizer::from_str(&json).map_err(refused)?;
        for token in self.added_tokens.values() {
            let got = tokenizer.token_to_id(&token.content);
            if got != Some(token.id) {
                let got = got.map_or("none".into(), |id| id.to_string());
                let (content, id) = (&token.content, token.id);
                return Err(format!("gives token `{content}` the id {got}, not {id}"));
            }
        }
        Ok(json)
    }
}

/// Every token once, and every merge of known tokens into a known one.
fn check_bpe(vocab: &Vocab, merges: &[(String, String)]) -> Result<(), String> {
    let mut ids = HashMap::with_capacity(vocab.len());
    for (id, token) in vocab {
        if let Some(other) = ids.insert(token.as_str(), id) {
            return Err(format!("gives token `{token}` two ids, {other} and {id}"));
        }
    }
    for (number, (left, right)) in merges.iter().enumerate() {
        let merged = format!("{left}{right}");
        for token in [left, right, &merged] {
            if !ids.contains_key(token.as_str()) {
                let number = number + 1;
                return Err(format!(
                    "has no token `{token}`, which merge {number} of `{left}` and `{right}` takes"
                ));
            }
        }
    }
    Ok(())
}

impl Template {
    fn post_processor(&self) -> Value {
        if self.bos.is_none() && self.eos.is_none() {
            return Value::Null;
        }
        let part =
            |token: &AddedToken| json!({"SpecialToken": {"id": token.content, "type_id": 0}});
        let (bos, eos) = (self.bos.iter(), self.eos.iter());
        let mut single: Vec<Value> = bos.clone().map(part).collect();
        single.push(json!({"Sequence": {"id": "A", "type_id": 0}}));
        single.extend(eos.clone().map(part));
        let mut pair = single.clone();
        pair.push(json!({"Sequence": {"id": "B", "type_id": 1}}));
        let known = bos.chain(eos).map(|token| {
            let content = &token.content;
            (
                content.clone(),
                json!({"id": content, "ids": [token.id], "tokens": [content]}),
            )
        });
        let special_tokens: BTreeMap<String, Value> = known.collect();
        json!({
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": special_tokens,
        })
    }
}

impl Model {
    fn part(&self) -> ModelPart<'_> {
        match self {
            Self::Bpe {
                vocab,
                merges,
                unk,
                byte_fallback,
                ignore_merges,
            } => ModelPart::Bpe {
                dropout: (),
                unk_token: unk.as_deref(),
                continuing_subword_prefix: (),
                end_of_word_suffix: (),
                fuse_unk: *byte_fallback,
                byte_fallback: *byte_fallback,
                ignore_merges: *ignore_merges,
                vocab,
                merges,
            },
            Self::Unigram { pieces, unk } => ModelPart::Unigram {
                unk_id: *unk,
                vocab: pieces,
                byte_fallback: true,
            },
        }
    }
}

#[derive(Serialize)]
struct File<'a> {
    version: &'a str,
    truncation: (),
    padding: (),
    added_tokens: Vec<&'a AddedToken>,
    normalizer: &'a Value,
    pre_tokenizer: &'a Value,
    post_processor: Value,
    decoder: &'a Value,
    model: ModelPart<'a>,
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum ModelPart<'a> {
    #[serde(rename = "BPE")]
    Bpe {
        dropout: (),
        unk_token: Option<&'a str>,
        continuing_subword_prefix: (),
        end_of_word_suffix: (),
        fuse_unk: bool,
        byte_fallback: bool,
        ignore_merges: bool,
        #[serde(serialize_with = "ids_by_token")]
        vocab: &'a Vocab,
        merges: &'a [(String, String)],
    },
    Unigram {
        unk_id: u32,
        vocab: &'a [(String, f64)],
        byte_fallback: bool,
    },
}

/// The other way round, still in the order of ids.
fn ids_by_token<S: Serializer>(vocab: &Vocab, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(vocab.iter().map(|(id, token)| (token, id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(id: u32, content: &str) -> AddedToken {
        AddedToken {
            id,
            content: content.into(),
            special: true,
            ..Default::default()
        }
    }

    fn document(tokens: &[&str], merges: &[(&str, &str)], specials: Vec<AddedToken>) -> Document {
        let vocab = tokens
            .iter()
            .zip(0..)
            .map(|(token, id)| (id, token.to_string()));
        let merges = merges
            .iter()
            .map(|(left, right)| (left.to_string(), right.to_string()));
        Document {
            added_tokens: specials
                .into_iter()
                .map(|token| (token.id, token))
                .collect(),
            normalizer: Value::Null,
            pre_tokenizer: Value::Null,
            template: Template::default(),
            decoder: Value::Null,
            model: Model::Bpe {
                vocab: vocab.collect(),
                merges: merges.collect(),
                unk: None,
                byte_fallback: false,
                ignore_merges: false,
            },
        }
    }

    fn ids(document: &Document, text: &str) -> Vec<u32> {
        let json = document.to_json().unwrap();
        let tokenizer = tokenizers::Tokenizer::from_str(&json).unwrap();
        tokenizer.encode(text, true).unwrap().get_ids().to_vec()
    }

    #[test]
    fn templates_stand_around_the_text() {
        let mut document = document(
            &["<s>", "a", "</s>"],
            &[],
            vec![added(0, "<s>"), added(2, "</s>")],
        );
        assert_eq!(ids(&document, "a<s>a"), [1, 0, 1]);
        document.template.bos = Some(added(0, "<s>"));
        assert_eq!(ids(&document, "a"), [0, 1]);
        document.template.eos = Some(added(2, "</s>"));
        assert_eq!(ids(&document, "a"), [0, 1, 2]);
        document.template.eos = Some(added(0, "<s>"));
        assert_eq!(ids(&document, "a"), [0, 1, 0]);
    }

    #[test]
    fn what_does_not_fit_is_a_sentence() {
        let twice = document(&["a", "b", "a"], &[], vec![]);
        assert_eq!(
            twice.to_json().unwrap_err(),
            "gives token `a` two ids, 0 and 2"
        );
        let merge = document(&["a", "b"], &[("a", "b")], vec![]);
        assert_eq!(
            merge.to_json().unwrap_err(),
            "has no token `ab`, which merge 1 of `a` and `b` takes"
        );
        let elsewhere = document(&["a", "b"], &[], vec![added(7, "<s>")]);
        assert_eq!(
            elsewhere.to_json().unwrap_err(),
            "gives token `<s>` the id 2, not 7"
        );
    }

    #[test]
    fn holes_in_the_vocabulary_keep_the_ids() {
        let mut holes = document(&["a"], &[], vec![added(900, "<s>")]);
        if let Model::Bpe { vocab, .. } = &mut holes.model {
            vocab.insert(900, "<s>".into());
        }
        assert_eq!(ids(&holes, "a<s>"), [0, 900]);
        assert_eq!(holes.to_json(), holes.to_json());
    }
}
