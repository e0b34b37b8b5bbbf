//! How byte-level vocabularies cut a text into the words that the merges work in.
//!
//! Names are those of `tokenizer.ggml.pre` in GGUF files; the cuts are those of each model's own `tokenizer.json`.
//! A wrong cut gives wrong ids without a sign of it, so a name that is not here is no tokenizer at all.

use serde_json::{json, Value};

/// Contractions, words, numbers of up to three digits, marks, white space.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with every digit alone.
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// CJK ideographs and what DeepSeek counts among them.
const DEEPSEEK_CJK: &str = "[一-龥ࠀ-一가-퟿]+";

/// A way to cut.
pub(super) struct Split {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    /// See `Model::Bpe`.
    pub(super) ignore_merges: bool,
    /// Whether texts begin with the BOS token where nobody says.
    pub(super) add_bos: bool,
}

impl Split {
    /// The way of this name, with a space before the text where `add_prefix_space` says so.
    pub(super) fn named(name: &str, add_prefix_space: bool) -> Option<Self> {
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex});
        let nfc = json!({"type": "NFC"});
        let (normalizer, parts) = match name {
            "gpt-2" | "phi-2" => (Value::Null, vec![bytes(true)]),
            "mpt" | "olmo" => (nfc, vec![bytes(true)]),
            "falcon" => (
                Value::Null,
                vec![
                    json!({"type": "Punctuation", "behavior": "Contiguous"}),
                    bytes(true),
                    digits(false),
                    isolated("[0-9][0-9][0-9]"),
                ],
            ),
            "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" => {
                (Value::Null, vec![digits(true), bytes(true)])
            }
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "smaug-bpe" | "dbrx" => {
                (Value::Null, vec![isolated(LLAMA_3), bytes(false)])
            }
            "qwen2" => (nfc, vec![isolated(QWEN_2), bytes(false)]),
            "deepseek-llm" => (
                Value::Null,
                vec![
                    isolated(r"[\r\n]"),
                    isolated(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
                    isolated(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
                    isolated(r"\s+$"),
                    isolated(DEEPSEEK_CJK),
                    digits(false),
                    bytes(false),
                ],
            ),
            "deepseek-coder" => (
                Value::Null,
                vec![
                    isolated(r"[\r\n]"),
                    isolated(r"\s?\p{L}+"),
                    isolated(r"\s?\p{P}+"),
                    isolated(DEEPSEEK_CJK),
                    digits(true),
                    bytes(false),
                ],
            ),
            _ => return None,
        };
        let is_llama_3 = matches!(name, "llama-bpe" | "llama3" | "llama-v3" | "falcon3");
        Some(Self {
            normalizer,
            pre_tokenizer: json!({"type": "Sequence", "pretokenizers": parts}),
            ignore_merges: is_llama_3,
            add_bos: is_llama_3,
        })
    }
}

/// Every match is a word.
fn isolated(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

fn digits(individual_digits: bool) -> Value {
    json!({"type": "Digits", "individual_digits": individual_digits})
}

/// How byte-level tokens become text.
pub(super) fn byte_decoder() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
}
