//! What the tests share: checkpoints with transformers' numbers, and conversions of them.

use std::path::{Path, PathBuf};

use candle_wick::{Memory, SelectorKind};
use candle_wick_convert::{convert, ConvertOptions, Layout};
use candle_wick_models::{LoadOptions, LoadedModel};
use serde::Deserialize;

mod command;

pub use command::{field, json, refused, text, wick};

/// `expected.json` of a fixture.
#[derive(Deserialize)]
pub struct Expected {
    pub ids: Vec<u32>,
    pub logprobs: Vec<f64>,
    pub last_logits: Vec<f32>,
    pub greedy: Vec<u32>,
    /// The smallest gap between the best and the second logit along `greedy`.
    pub greedy_margin_min: f64,
    #[serde(default)]
    pub convert: ConvertArgs,
}

/// What `wick convert` has to be told for a fixture.
#[derive(Default, Deserialize)]
pub struct ConvertArgs {
    pub activation: Option<String>,
}

/// A fixture's folder.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// What transformers computed for a fixture.
pub fn expected(name: &str) -> Expected {
    let json = std::fs::read_to_string(fixture(name).join("expected.json")).unwrap();
    serde_json::from_str(&json).unwrap()
}

/// Converts a checkpoint into a folder that lives as long as the result.
pub fn converted(source: &Path) -> tempfile::TempDir {
    converted_as(source, &ConvertArgs::default())
}

/// As [`converted`], with options.
pub fn converted_as(source: &Path, args: &ConvertArgs) -> tempfile::TempDir {
    converted_to(source, args, Layout::Neuron)
}

/// As [`converted_as`], with records of another kind.
pub fn converted_to(source: &Path, args: &ConvertArgs, layout: Layout) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let options = ConvertOptions {
        activation: args.activation.clone(),
        layout,
        ..ConvertOptions::default()
    };
    convert(source, out.path(), &options, &|_| {}).unwrap();
    out
}

/// The positions of the `count` largest of `values`, by size.
pub fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].abs().total_cmp(&values[*a].abs()));
    order.truncate(count);
    order
}

/// Options for a selector, everything else as by default.
pub fn options(selector: SelectorKind, memory: Option<Memory>) -> LoadOptions {
    LoadOptions {
        selector: Some(selector),
        memory,
        ..LoadOptions::default()
    }
}

/// The logits after each id.
pub fn all_logits(model: &mut LoadedModel, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let mut keep = |_, logits: &[f32]| {
        all.push(logits.to_vec());
        Ok(())
    };
    model.forward_each(ids, &mut keep).unwrap();
    all
}

/// `count` ids of greedy decoding after `ids`.
pub fn greedy(model: &mut LoadedModel, ids: &[u32], count: usize) -> Vec<u32> {
    let mut logits = model.forward(ids).unwrap();
    let mut out = Vec::new();
    for _ in 0..count {
        let best = argmax(&logits);
        out.push(best);
        if out.len() < count {
            logits = model.forward(&[best]).unwrap();
        }
    }
    out
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0 as u32
}

/// Natural log of the softmax at `id`.
pub fn logprob(logits: &[f32], id: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|logit| f64::from(logit - largest).exp())
        .sum();
    f64::from(logits[id as usize] - largest) - sum.ln()
}

/// Names and shapes of a Llama's tensors, own head, as many key heads as heads.
pub fn llama_shapes(
    hidden: usize,
    ffn: usize,
    layers: usize,
    vocab: usize,
) -> Vec<(String, Vec<usize>)> {
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("lm_head.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[usize]| {
            shapes.push((
                format!("model.layers.{layer}.{name}.weight"),
                shape.to_vec(),
            ));
        };
        for name in ["q", "k", "v", "o"] {
            add(&format!("self_attn.{name}_proj"), &[hidden, hidden]);
        }
        add("mlp.gate_proj", &[ffn, hidden]);
        add("mlp.up_proj", &[ffn, hidden]);
        add("mlp.down_proj", &[hidden, ffn]);
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
    }
    shapes
}
