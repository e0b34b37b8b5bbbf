//! Text to token ids and back, by the folder's `tokenizer.json`.
//!
//! Encoding adds special tokens as the file's post-processor says; decoding leaves them out. A [`TextStream`]
//! decodes token by token: a token alone may be a part of a character, or a word whose leading space depends on
//! what came before.
//!
//! Not here: choosing tokens (`generation`).

use std::path::Path;

use tokenizers::Tokenizer;

use crate::error::{Error, Result};

/// The tokenizer's file in a converted folder.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// What decoders write for bytes that are no character, or not yet.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;
/// Tokens of the text before a stream that decide how its first token reads.
const CONTEXT_TOKENS: usize = 8;

/// A model's tokenizer.
pub struct WickTokenizer {
    inner: Tokenizer,
}

impl WickTokenizer {
    /// The tokenizer of `folder`; `None` when it has no `tokenizer.json`.
    pub fn load(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(TOKENIZER_FILE);
        let json = match std::fs::read_to_string(&path) {
            Ok(json) => json,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::Tokenizer(format!("{}: {error}", path.display()))),
        };
        let parsed = Self::parse(&json);
        parsed
            .map(Some)
            .map_err(|error| Error::Tokenizer(format!("{}: {error}", path.display())))
    }

    fn parse(json: &str) -> tokenizers::Result<Self> {
        let mut inner: Tokenizer = json.parse()?;
        // Left in many files by training: they would cut a long prompt, or pad a short one.
        inner.with_truncation(None)?;
        inner.with_padding(None);
        Ok(Self { inner })
    }

    /// The ids of `text`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, true).map_err(trouble)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of `text` alone: nothing that a post-processor adds.
    pub fn encode_bare(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(trouble)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The special tokens that the post-processor puts before a text, such as a BOS.
    pub fn special_prefix(&self) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast("a", true).map_err(trouble)?;
        let ids = encoding.get_ids().iter().copied();
        let is_special = encoding.get_special_tokens_mask().iter();
        let prefix = ids.zip(is_special).take_while(|(_, mask)| **mask == 1);
        Ok(prefix.map(|(id, _)| id).collect())
    }

    /// The text of `ids`, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(trouble)
    }

    /// The id of a token as the vocabulary spells it, such as `</s>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Decodes the tokens that follow `before`.
    pub fn stream(&self, before: &[u32]) -> TextStream<'_> {
        let ids = before[before.len().saturating_sub(CONTEXT_TOKENS)..].to_vec();
        TextStream {
            tokenizer: self,
            given: ids.len(),
            ids,
        }
    }
}

fn trouble(error: tokenizers::Error) -> Error {
    Error::Tokenizer(error.to_string())
}

/// Decodes token by token.
///
/// Invariant: the pieces given, put together, are valid text that is never taken back.
pub struct TextStream<'a> {
    tokenizer: &'a WickTokenizer,
    /// The tokens of the last piece, which the next one is read against, then those not given yet.
    ids: Vec<u32>,
    /// How many of `ids` were given.
    given: usize,
}

impl TextStream<'_> {
    /// The text that token `id` completes; empty while a character is incomplete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let piece = self.pending()?;
        if piece.is_empty() || piece.ends_with(REPLACEMENT) {
            return Ok(String::new());
        }
        // A piece that began with the end of a character is no ground to read the next one against.
        let ground = self.tokenizer.decode(&self.ids[self.given..])?;
        if !ground.starts_with(REPLACEMENT) {
            self.ids.drain(..self.given);
        }
        self.given = self.ids.len();
        Ok(piece)
    }

    /// What is left at the end: bytes that never became a character.
    pub fn finish(self) -> Result<String> {
        self.pending()
    }

    fn pending(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[..self.given])?;
        let now = self.tokenizer.decode(&self.ids)?;
        // A character that the text before left incomplete is complete by now, or still pending.
        let before = before.trim_end_matches(REPLACEMENT);
        let same = before
            .chars()
            .zip(now.chars())
            .take_while(|(before, now)| before == now);
        let same_bytes: usize = same.map(|(before, _)| before.len_utf8()).sum();
        Ok(now[same_bytes..].to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Byte-level BPE without merges, as GPT-2 and OPT: "é" is the bytes C3 A9, spelt "Ã" and "©".
    const BYTE_LEVEL: &str = r#"{
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "</s>"},
        "added_tokens": [{"id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [0], "tokens": ["</s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": {"</s>": 0, "a": 1, "Ġ": 2, "Ã": 3, "©": 4, "ð": 5, "Ł": 6, "ĺ": 7, "Ģ": 8}, "merges": []}
    }"#;

    /// As Llama 2: words carry "▁", unknown characters fall back to bytes.
    const SENTENCE_PIECE: &str = r#"{
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "vocab": {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "▁b": 5, "<0xC3>": 6, "<0xA9>": 7, "<0xFF>": 8},
            "merges": [["▁", "a"], ["▁", "b"]]}
    }"#;

    fn pieces(tokenizer: &WickTokenizer, before: &[u32], ids: &[u32]) -> (Vec<String>, String) {
        let mut stream = tokenizer.stream(before);
        let pieces = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        (pieces, stream.finish().unwrap())
    }

    #[test]
    fn encodes_with_the_files_special_tokens_and_without_its_truncation() {
        let tokenizer = WickTokenizer::parse(BYTE_LEVEL).unwrap();
        assert_eq!(tokenizer.encode("a aé").unwrap(), [0, 1, 2, 1, 3, 4]);
        assert_eq!(tokenizer.encode_bare("a aé").unwrap(), [1, 2, 1, 3, 4]);
        assert_eq!(tokenizer.encode("").unwrap(), [0]);
        assert_eq!(tokenizer.special_prefix().unwrap(), [0]);
        assert_eq!(tokenizer.decode(&[0, 1, 2, 1, 3, 4]).unwrap(), "a aé");
        assert_eq!(tokenizer.token_id("</s>"), Some(0));
        assert_eq!(tokenizer.token_id("<s>"), None);
    }

    #[test]
    fn never_splits_a_character() {
        let tokenizer = WickTokenizer::parse(BYTE_LEVEL).unwrap();
        let (given, rest) = pieces(&tokenizer, &[0], &[1, 3, 4, 5, 6, 7, 8, 0, 2, 1]);
        assert_eq!(given, ["a", "", "é", "", "", "", "😀", "", " ", "a"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn an_incomplete_character_is_held_until_the_text_goes_on_or_ends() {
        let tokenizer = WickTokenizer::parse(BYTE_LEVEL).unwrap();
        assert_eq!(
            pieces(&tokenizer, &[], &[1, 5, 6]),
            (
                vec!["a".into(), String::new(), String::new()],
                "\u{fffd}".into()
            )
        );
        let (given, rest) = pieces(&tokenizer, &[], &[3, 1, 4, 1]);
        assert_eq!(given, ["", "\u{fffd}a", "", "\u{fffd}a"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn completes_what_the_prompt_left_incomplete() {
        let tokenizer = WickTokenizer::parse(BYTE_LEVEL).unwrap();
        assert_eq!(pieces(&tokenizer, &[1, 3], &[4, 1]).0, ["é", "a"]);
    }

    #[test]
    fn leading_spaces_depend_on_the_text_before() {
        let tokenizer = WickTokenizer::parse(SENTENCE_PIECE).unwrap();
        assert_eq!(tokenizer.encode("a b").unwrap(), [4, 5]);
        assert_eq!(pieces(&tokenizer, &[4], &[5, 3, 4]).0, [" b", "b", " a"]);
        assert_eq!(pieces(&tokenizer, &[], &[5, 4]).0, ["b", " a"]);
    }

    #[test]
    fn byte_tokens_wait_for_each_other() {
        let tokenizer = WickTokenizer::parse(SENTENCE_PIECE).unwrap();
        let (given, rest) = pieces(&tokenizer, &[4], &[6, 7, 6, 7, 2]);
        assert_eq!(given, ["", "é", "", "é", "a"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn pieces_add_up_to_the_whole_text() {
        let tokenizer = WickTokenizer::parse(SENTENCE_PIECE).unwrap();
        let ids = [4, 6, 7, 5, 1, 1, 2, 6, 7, 6, 7, 3, 4];
        let (given, rest) = pieces(&tokenizer, &[], &ids);
        assert_eq!(given.concat() + &rest, tokenizer.decode(&ids).unwrap());
    }

    #[test]
    fn a_missing_file_is_no_tokenizer_and_a_broken_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(WickTokenizer::load(folder.path()).unwrap().is_none());
        std::fs::write(folder.path().join(TOKENIZER_FILE), "{").unwrap();
        let error = WickTokenizer::load(folder.path())
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(TOKENIZER_FILE), "{error}");
    }
}
