//! `tokenizer.model`: a SentencePiece model, as Llama and Persimmon have it.
//!
//! The file is a protobuf message (`sentencepiece_model.proto` of that project); only the fields that decide ids are
//! declared here, the others are skipped. The same ids as `LlamaTokenizerFast` of transformers, which does without the
//! model's own normaliser; where there is one, that is a note.

use std::path::Path;

use prost::Message;

use super::pieces::{Algorithm, Kind, Piece, Pieces, Prefix};
use super::settings::Settings;
use super::Assembled;
use crate::source::read_small;
use crate::ConvertError;

pub(super) const MODEL_FILE: &str = "tokenizer.model";

/// Larger files are refused before they are decoded, because decoding takes up to 30 times as much memory. The largest
/// known ones, with 262 thousand pieces, have 5 MB.
const MODEL_BYTES_MAX: usize = 16 << 20;

/// What Llama's class says where no file does.
const DEFAULTS: [(&str, &str); 3] = [
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("unk_token", "<unk>"),
];

/// What Persimmon's files say, for checkpoints without them.
const PERSIMMON_DEFAULTS: [(&str, &str); 3] = [
    ("bos_token", "|ENDOFTEXT|"),
    ("eos_token", "|ENDOFTEXT|"),
    ("unk_token", "<unk>"),
];

/// `ModelProto`.
#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<PieceProto>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<TrainerProto>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<NormalizerProto>,
}

/// `ModelProto.SentencePiece`.
#[derive(Clone, PartialEq, Message)]
struct PieceProto {
    #[prost(string, optional, tag = "1")]
    text: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

/// `TrainerSpec`.
#[derive(Clone, PartialEq, Message)]
struct TrainerProto {
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
}

/// `NormalizerSpec`.
#[derive(Clone, PartialEq, Message)]
struct NormalizerProto {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    add_dummy_prefix: Option<bool>,
}

/// A decoded model.
struct SentencePieceModel {
    pieces: Pieces,
    add_prefix_space: bool,
    /// The name of a normaliser that changes texts.
    normalizer: Option<String>,
}

/// The tokenizer of `tokenizer.model` in `folder`.
pub(super) fn assemble(folder: &Path, settings: &Settings) -> Result<Assembled, ConvertError> {
    if let Some(class) = settings
        .class
        .as_deref()
        .filter(|class| !is_llama_like(class))
    {
        let reason = format!("{MODEL_FILE} is there, but how a {class} reads it is not known");
        return Ok(Assembled::none(&reason));
    }
    let path = folder.join(MODEL_FILE);
    let broken = |problem: String| ConvertError::checkpoint(&path, problem);
    let model = decode(&read_small(&path)?).map_err(broken)?;
    let prefix = match (
        settings.add_prefix_space.unwrap_or(model.add_prefix_space),
        settings.legacy,
    ) {
        (false, _) => Prefix::None,
        (true, Some(false)) => Prefix::First,
        (true, _) => Prefix::Always,
    };
    let mut vocab = model.pieces.vocab();
    let is_persimmon = settings.model_type == "persimmon";
    let defaults = if is_persimmon {
        &PERSIMMON_DEFAULTS
    } else {
        &DEFAULTS
    };
    let specials = settings
        .specials(&mut vocab, defaults, true)
        .map_err(broken)?;
    let document = model
        .pieces
        .document(vocab, specials, prefix)
        .map_err(broken)?;
    let notes = model.normalizer.map(|name| {
        format!(
            "{MODEL_FILE} normalises texts ({name}); {} does not, as in transformers",
            super::TOKENIZER_FILE
        )
    });
    Ok(Assembled {
        json: Some(document.to_json().map_err(broken)?),
        notes: notes.into_iter().collect(),
    })
}

/// Classes that read a model as Llama's does.
fn is_llama_like(class: &str) -> bool {
    let class = class.trim_end_matches("Fast");
    matches!(
        class,
        "LlamaTokenizer" | "PreTrainedTokenizer" | "TokenizersBackend"
    )
}

fn decode(bytes: &[u8]) -> Result<SentencePieceModel, String> {
    if bytes.len() > MODEL_BYTES_MAX {
        return Err(format!(
            "has {} bytes, too many for a vocabulary (up to {MODEL_BYTES_MAX})",
            bytes.len()
        ));
    }
    let proto =
        ModelProto::decode(bytes).map_err(|error| format!("is no SentencePiece model: {error}"))?;
    let algorithm = match proto.trainer.and_then(|trainer| trainer.model_type) {
        None | Some(1) => Algorithm::Unigram,
        Some(2) => Algorithm::Bpe,
        Some(other) => {
            return Err(format!(
                "is a SentencePiece model of type {other}, expected 1 (unigram) or 2 (BPE)"
            ))
        }
    };
    let mut pieces = Vec::with_capacity(proto.pieces.len());
    for (id, piece) in proto.pieces.into_iter().enumerate() {
        let number = piece.kind.unwrap_or(Kind::Normal as i32);
        let kind = Kind::of(number)
            .ok_or_else(|| format!("has piece {id} of type {number}, expected 1 to 6"))?;
        let (text, score) = (
            piece.text.unwrap_or_default(),
            piece.score.unwrap_or_default(),
        );
        pieces.push(Piece { text, score, kind });
    }
    let unk = (0..)
        .zip(&pieces)
        .find(|(_, piece)| piece.kind == Kind::Unknown);
    let unk = unk.map(|(id, _)| id);
    let normalizer = proto.normalizer.unwrap_or_default();
    let changes_text = normalizer
        .precompiled_charsmap
        .is_some_and(|map| !map.is_empty());
    Ok(SentencePieceModel {
        pieces: Pieces {
            pieces,
            algorithm,
            unk,
        },
        add_prefix_space: normalizer.add_dummy_prefix.unwrap_or(true),
        normalizer: changes_text.then(|| {
            normalizer
                .name
                .unwrap_or_else(|| "by a table of its own".into())
        }),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::str::FromStr;

    use proptest::prelude::*;
    use serde_json::{json, Value};
    use tokenizers::Tokenizer;

    use super::*;

    type Row = (&'static str, f32, Kind);

    /// The bytes 0xC3 and 0xA9 ("é") and no others.
    const BPE: [Row; 13] = [
        ("<unk>", 0.0, Kind::Unknown),
        ("<s>", 0.0, Kind::Control),
        ("</s>", 0.0, Kind::Control),
        ("<0xC3>", 0.0, Kind::Byte),
        ("<0xA9>", 0.0, Kind::Byte),
        ("ab", -1.0, Kind::Normal),
        ("▁a", -2.0, Kind::Normal),
        ("abc", -3.0, Kind::Normal),
        ("▁", -4.0, Kind::Normal),
        ("a", -5.0, Kind::Normal),
        ("b", -6.0, Kind::Normal),
        ("c", -7.0, Kind::Normal),
        ("[x]", 0.0, Kind::UserDefined),
    ];

    /// As Persimmon: log probabilities, and a BOS that is a control piece of its own.
    const UNIGRAM: [Row; 7] = [
        ("<unk>", 0.0, Kind::Unknown),
        ("▁", -2.5, Kind::Normal),
        ("a", -3.5, Kind::Normal),
        ("b", -3.5, Kind::Normal),
        ("▁a", -9.5, Kind::Normal),
        ("ab", -4.25, Kind::Normal),
        ("|ENDOFTEXT|", 0.0, Kind::Control),
    ];

    fn proto(rows: &[Row], model_type: i32) -> ModelProto {
        let piece = |(text, score, kind): &Row| PieceProto {
            text: Some(text.to_string()),
            score: Some(*score),
            kind: (*kind != Kind::Normal).then_some(*kind as i32),
        };
        ModelProto {
            pieces: rows.iter().map(piece).collect(),
            trainer: Some(TrainerProto {
                model_type: Some(model_type),
            }),
            normalizer: None,
        }
    }

    fn assembled_of(
        proto: &ModelProto,
        settings: &Value,
        model_type: &str,
    ) -> Result<Assembled, ConvertError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(MODEL_FILE), proto.encode_to_vec()).unwrap();
        fs::write(
            folder.path().join("tokenizer_config.json"),
            settings.to_string(),
        )
        .unwrap();
        crate::tokenizer::assemble(folder.path(), model_type)
    }

    fn tokenizer(proto: &ModelProto, settings: Value) -> Tokenizer {
        tokenizer_of(proto, settings, "llama")
    }

    fn tokenizer_of(proto: &ModelProto, settings: Value, model_type: &str) -> Tokenizer {
        let json = assembled_of(proto, &settings, model_type)
            .unwrap()
            .json
            .unwrap();
        Tokenizer::from_str(&json).unwrap()
    }

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, true).unwrap().get_ids().to_vec()
    }

    #[test]
    fn bpe_merges_in_the_order_of_scores() {
        let llama = json!({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"});
        let tokenizer = tokenizer(&proto(&BPE, 2), llama);
        // "ab" before "▁a", though "▁a" comes first in the text.
        assert_eq!(ids(&tokenizer, "abc"), [1, 8, 7]);
        assert_eq!(ids(&tokenizer, "a b"), [1, 6, 8, 10]);
        assert_eq!(ids(&tokenizer, "é"), [1, 8, 3, 4]);
        assert_eq!(
            ids(&tokenizer, "dd"),
            [1, 8, 0],
            "no bytes for d: one unknown token"
        );
        assert_eq!(ids(&tokenizer, "b[x]</s>"), [1, 8, 10, 12, 2]);
        assert_eq!(
            tokenizer.decode(&[1, 8, 7, 8, 3, 4], true).unwrap(),
            "abc é"
        );
        // Literal names of special pieces are not put together from their letters.
        assert_eq!(ids(&tokenizer, "<s>"), [1, 1]);
    }

    #[test]
    fn settings_say_what_stands_around_the_text() {
        let model = proto(&BPE, 2);
        let around = json!({"bos_token": "<s>", "add_bos_token": false, "add_eos_token": true});
        assert_eq!(ids(&tokenizer(&model, around), "abc"), [8, 7, 2]);
        let none = json!({"bos_token": "<s>", "add_prefix_space": false});
        assert_eq!(ids(&tokenizer(&model, none.clone()), "abc a"), [1, 7, 6]);
        assert_eq!(
            tokenizer(&model, none).decode(&[6, 7], true).unwrap(),
            " aabc"
        );
        // The space before the text: once, or again after every special token.
        let legacy = json!({"bos_token": "<s>"});
        assert_eq!(
            ids(&tokenizer(&model, legacy), "c</s>c"),
            [1, 8, 11, 2, 8, 11]
        );
        let first = json!({"bos_token": "<s>", "legacy": false});
        assert_eq!(
            ids(&tokenizer(&model, first), "c</s>c c"),
            [1, 8, 11, 2, 11, 8, 11]
        );
        let mut no_prefix = model;
        no_prefix.normalizer = Some(NormalizerProto {
            add_dummy_prefix: Some(false),
            ..Default::default()
        });
        assert_eq!(
            ids(&tokenizer(&no_prefix, json!({"bos_token": "<s>"})), "abc"),
            [1, 7]
        );
    }

    #[test]
    fn unigram_takes_the_most_likely_pieces() {
        let settings = json!({"tokenizer_class": "LlamaTokenizerFast"});
        let tokenizer = tokenizer_of(&proto(&UNIGRAM, 1), settings, "persimmon");
        assert_eq!(ids(&tokenizer, "a"), [6, 1, 2], "the BOS of Persimmon");
        assert_eq!(ids(&tokenizer, "ab b"), [6, 1, 5, 1, 3]);
        assert_eq!(ids(&tokenizer, "a|ENDOFTEXT|"), [6, 1, 2, 6]);
        assert_eq!(ids(&tokenizer, "zz"), [6, 1, 0]);
    }

    #[test]
    fn a_normaliser_is_a_note() {
        let mut model = proto(&BPE, 2);
        model.normalizer = Some(NormalizerProto {
            name: Some("nmt_nfkc".into()),
            precompiled_charsmap: Some(vec![1]),
            add_dummy_prefix: None,
        });
        let assembled = assembled_of(&model, &json!({"bos_token": "<s>"}), "llama").unwrap();
        assert!(assembled.json.is_some() && assembled.notes[0].contains("nmt_nfkc"));
    }

    #[test]
    fn broken_models_are_sentences() {
        let refused = |proto: &ModelProto, part: &str| {
            let error = assembled_of(proto, &json!({}), "llama").err().expect(part);
            let error = error.to_string();
            assert!(
                error.contains(MODEL_FILE) && error.contains(part),
                "{error}"
            );
        };
        let changed = |change: fn(&mut ModelProto)| {
            let mut model = proto(&BPE, 2);
            change(&mut model);
            model
        };
        refused(&ModelProto::default(), "no pieces");
        refused(&proto(&BPE, 3), "type 3");
        refused(
            &changed(|model| model.pieces[7].score = Some(f32::NAN)),
            "NaN for piece 7",
        );
        refused(
            &changed(|model| model.pieces[7].text = Some("a".into())),
            "`a` twice, as 7 and 9",
        );
        refused(
            &changed(|model| model.pieces[7].text = None),
            "no text for piece 7",
        );
        refused(
            &changed(|model| model.pieces[7].kind = Some(9)),
            "piece 7 of type 9",
        );
        refused(
            &changed(|model| model.pieces[0].kind = None),
            "unknown characters",
        );
        refused(
            &changed(|model| model.pieces[7].text = Some("a".repeat(257))),
            "257 bytes",
        );
        refused(&proto(&UNIGRAM[1..], 1), "unknown characters");
    }

    #[test]
    fn pieces_without_end_are_refused() {
        // Every a…ab…b of up to 256 letters: each can be put together in as many ways as it has letters.
        let mut texts = Vec::new();
        for length in 1..=256 {
            texts.extend((0..=length).map(|count| "a".repeat(count) + &"b".repeat(length - count)));
        }
        let mut model = proto(&BPE[..3], 2);
        model
            .pieces
            .extend(texts.into_iter().map(|text| PieceProto {
                text: Some(text),
                ..Default::default()
            }));
        let error = assembled_of(&model, &json!({}), "llama")
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("too many ways"), "{error}");
        assert!(decode(&vec![0; MODEL_BYTES_MAX + 1])
            .err()
            .unwrap()
            .contains("too many"));
    }

    #[test]
    fn text_that_is_no_utf_8_is_refused() {
        let error = decode(b"\x0a\x04\x0a\x02\xc3\x28").err().unwrap();
        assert!(error.contains("UTF-8"), "{error}");
    }

    proptest! {
        #[test]
        fn bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), at in 0_usize..300, byte in any::<u8>()) {
            let _whatever = decode(&bytes);
            let mut changed = proto(&BPE, 2).encode_to_vec();
            let at = at % changed.len();
            changed[at] = byte;
            if let Ok(model) = decode(&changed) {
                let vocab = model.pieces.vocab();
                let settings = Settings::read(Path::new("/nowhere"), "llama").unwrap();
                let mut with_added = vocab.clone();
                if let Ok(specials) = settings.specials(&mut with_added, &DEFAULTS, true) {
                    let _json = model.pieces.document(with_added, specials, Prefix::Always).and_then(|document| document.to_json());
                }
            }
        }
    }
}
