//! Candle's own structs with their FFNs on flash, through wick-gemm.

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{falcon, llama, mistral, phi, qwen2};
use candle_wick::{
    DipOptions, FlashFolder, FlashVarBuilder, IoOptions, Placement, SelectorKind, SparseOptions,
};
use candle_wick_convert::Layout;
use serde::de::DeserializeOwned;
use serde_json::{json, Value};
use tempfile::TempDir;

use crate::support::{converted_to, expected, fixture, ConvertArgs};

mod numbers;
mod quantized;
mod threads;
mod wrong;

/// `forward(ids, position)` of any model: logits of the last position.
type Forward = Box<dyn FnMut(&[u32], usize) -> candle::Result<Vec<f32>> + Send>;

/// A converted fixture, and candle's constructor for it.
struct Stock {
    out: TempDir,
    folder: FlashFolder,
    build: fn(&Value, VarBuilder<'static>) -> candle::Result<Forward>,
    config: Value,
    ids: Vec<u32>,
}

/// Every fixture that one of candle's structs can be made of, with its struct.
const STOCK: [&str; 6] = [
    "llama-2-silu",
    "llama-3-rope-scaled-tied",
    "mistral-no-window",
    "qwen2",
    "phi-2",
    "falcon-7b-multi-query",
];

impl Stock {
    fn of(name: &str) -> Self {
        Self::stored(name, Layout::Both)
    }

    fn stored(name: &str, layout: Layout) -> Self {
        let out = converted_to(&fixture(name), &ConvertArgs::default(), layout);
        let folder = FlashFolder::open(out.path(), IoOptions::default()).unwrap();
        let config = std::fs::read(out.path().join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        // What candle wants to be told; without a window, which it has one position longer than transformers.
        let more = json!({"rope_theta": 10000.0, "sliding_window": 64, "use_sliding_window": false, "qk_layernorm": false});
        for (key, value) in more.as_object().unwrap() {
            if config.get(key).is_none() || key == "sliding_window" {
                config[key] = value.clone();
            }
        }
        let build = match config["model_type"].as_str().unwrap() {
            "llama" => build_llama,
            "mistral" => build_mistral,
            "qwen2" => build_qwen2,
            "phi" => build_phi,
            "falcon" => build_falcon,
            other => panic!("{other}"),
        };
        Self {
            out,
            folder,
            build,
            config,
            ids: expected(name).ids,
        }
    }

    /// All weights in memory, for any struct.
    fn dense(&self) -> VarBuilder<'static> {
        let placement = Placement::resident(&self.folder, SelectorKind::Dense);
        let vb = FlashVarBuilder::new(&self.folder, placement).dense();
        let mut tensors = self.folder.resident_tensors();
        let has_head = tensors.any(|(name, _)| name == "lm_head.weight");
        match self.config["model_type"].as_str() {
            // Candle's Falcon knows no tied head.
            Some("falcon") if !has_head => vb.rename_f(|name| match name {
                "lm_head.weight" => "transformer.word_embeddings.weight".to_owned(),
                other => other.to_owned(),
            }),
            _ => vb,
        }
    }

    /// The struct with all its weights in memory.
    fn in_memory(&self) -> Forward {
        (self.build)(&self.config, self.dense()).unwrap()
    }

    /// The struct on flash, with so many slots a layer or all, and what it must not outlive.
    fn with_slots(
        &self,
        selector: SelectorKind,
        slots: Option<usize>,
    ) -> (Forward, FlashVarBuilder) {
        self.sparse(FlashVarBuilder::new(
            &self.folder,
            self.placement(selector, slots),
        ))
    }

    fn placement(&self, selector: SelectorKind, slots: Option<usize>) -> Placement {
        let mut placement = Placement::resident(&self.folder, selector);
        if let Some(slots) = slots {
            placement.slots_per_layer.fill(slots);
            placement.channel_slots_per_layer.fill(slots);
            let mut tensors = self.folder.resident_tensors();
            let query = tensors.find(|(name, _)| name.contains("0.self_att"));
            placement
                .streamed
                .extend(query.map(|(name, _)| name.clone()));
        }
        placement
    }

    fn sparse(&self, vb: FlashVarBuilder) -> (Forward, FlashVarBuilder) {
        (
            (self.build)(&self.config, vb.sparse().unwrap()).unwrap(),
            vb,
        )
    }
}

fn parsed<C: DeserializeOwned>(config: &Value) -> C {
    serde_json::from_value(config.clone()).unwrap()
}

fn input(ids: &[u32]) -> candle::Result<Tensor> {
    Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)
}

fn values(logits: Tensor) -> candle::Result<Vec<f32>> {
    logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
}

fn build_llama(config: &Value, vb: VarBuilder<'static>) -> candle::Result<Forward> {
    let config = parsed::<llama::LlamaConfig>(config).into_config(false);
    let dtype = vb.dtype();
    let model = llama::Llama::load(vb, &config)?;
    let mut cache = llama::Cache::new(true, dtype, &config, &Device::Cpu)?;
    Ok(Box::new(move |ids, at| {
        if at == 0 {
            cache = llama::Cache::new(true, dtype, &config, &Device::Cpu)?;
        }
        values(model.forward(&input(ids)?, at, &mut cache)?)
    }))
}

fn build_mistral(config: &Value, vb: VarBuilder<'static>) -> candle::Result<Forward> {
    let mut model = mistral::Model::new(&parsed(config), vb)?;
    Ok(Box::new(move |ids, at| {
        if at == 0 {
            model.clear_kv_cache();
        }
        values(model.forward(&input(ids)?, at)?)
    }))
}

fn build_qwen2(config: &Value, vb: VarBuilder<'static>) -> candle::Result<Forward> {
    let mut model = qwen2::ModelForCausalLM::new(&parsed(config), vb)?;
    Ok(Box::new(move |ids, at| {
        if at == 0 {
            model.clear_kv_cache();
        }
        values(model.forward(&input(ids)?, at)?)
    }))
}

fn build_phi(config: &Value, vb: VarBuilder<'static>) -> candle::Result<Forward> {
    let mut model = phi::Model::new(&parsed(config), vb)?;
    Ok(Box::new(move |ids, at| {
        if at == 0 {
            model.clear_kv_cache();
        }
        values(model.forward(&input(ids)?)?)
    }))
}

fn build_falcon(config: &Value, vb: VarBuilder<'static>) -> candle::Result<Forward> {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let config = falcon::Config {
        vocab_size: size("vocab_size"),
        hidden_size: size("hidden_size"),
        num_hidden_layers: size("num_hidden_layers"),
        num_attention_heads: size("num_attention_heads"),
        ..falcon::Config::falcon7b()
    };
    let mut model = falcon::Falcon::load(vb, config)?;
    Ok(Box::new(move |ids, at| {
        if at == 0 {
            model.clear_kv_cache();
        }
        values(model.forward(&input(ids)?)?)
    }))
}

/// Logits after the prompt and after each of some tokens that greedy decoding adds.
fn decode(
    ids: &[u32],
    mut forward: impl FnMut(&[u32], usize) -> candle::Result<Vec<f32>>,
) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let (mut ids, mut position) = (ids.to_vec(), 0);
    for _ in 0..8 {
        let logits = forward(&ids, position).unwrap();
        position += ids.len();
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        ids = vec![best.unwrap().0 as u32];
        all.push(logits);
    }
    all
}

/// The largest difference between two lists of logits.
fn distance(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
