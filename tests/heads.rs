//! Tied and own heads, stored or not: what the head is, by the logits of the whole model.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_wick::SelectorKind;
use candle_wick_models::load;
use safetensors::tensor::TensorView;
use safetensors::SafeTensors;
use serde_json::{json, Value};

use crate::support::{converted, expected, fixture, options};

const HEAD: &str = "lm_head.weight";

/// What a checkpoint holds as its head.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    Nothing,
    /// The embedding again.
    Copy,
    /// Row `r` is row `r + 1` of the embedding, the last row its first.
    Shifted,
}

/// The fixture's checkpoint with this head and this `tie_word_embeddings`.
fn write_variant(name: &str, embedding: &str, tied: bool, stored: Stored, out: &Path) {
    let config = fs::read(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["tie_word_embeddings"] = json!(tied);
    fs::write(out.join("config.json"), config.to_string()).unwrap();
    let bytes = fs::read(fixture(name).join("model.safetensors")).unwrap();
    let source = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: HashMap<String, TensorView<'_>> = source.tensors().into_iter().collect();
    tensors.remove(HEAD);
    let embedding = source.tensor(embedding).unwrap();
    let mut head = embedding.data().to_vec();
    if stored == Stored::Shifted {
        let row_bytes = head.len() / embedding.shape()[0];
        head.rotate_left(row_bytes);
    }
    if stored != Stored::Nothing {
        let shape = embedding.shape().to_vec();
        let head = TensorView::new(embedding.dtype(), shape, &head).unwrap();
        tensors.insert(HEAD.to_owned(), head);
    }
    safetensors::serialize_to_file(tensors, None, &out.join("model.safetensors")).unwrap();
}

fn logit_bits(name: &str, embedding: &str, tied: bool, stored: Stored) -> Vec<u32> {
    let source = tempfile::tempdir().unwrap();
    write_variant(name, embedding, tied, stored, source.path());
    let folder = converted(source.path());
    let mut model = load(folder.path(), &options(SelectorKind::Dense, None)).unwrap();
    let logits = model.forward(&expected(name).ids[..8]).unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

/// A stored head is used unless it repeats the embedding, whatever the config says; without one the embedding is
/// the head, whatever the config says.
#[test]
fn the_head_is_what_is_stored_or_else_the_embedding() {
    for (name, embedding) in [
        ("llama-3-rope-scaled-tied", "model.embed_tokens.weight"),
        ("opt-pre-ln", "model.decoder.embed_tokens.weight"),
        ("opt-350m-post-ln", "model.decoder.embed_tokens.weight"),
        ("persimmon", "model.embed_tokens.weight"),
    ] {
        let by_embedding = logit_bits(name, embedding, true, Stored::Nothing);
        let mut shifted = by_embedding.clone();
        shifted.rotate_left(1);
        for tied in [true, false] {
            for stored in [Stored::Nothing, Stored::Copy, Stored::Shifted] {
                let expected = match stored {
                    Stored::Nothing | Stored::Copy => &by_embedding,
                    Stored::Shifted => &shifted,
                };
                let got = logit_bits(name, embedding, tied, stored);
                assert!(got == *expected, "{name} tied {tied} {stored:?}");
            }
        }
    }
}
