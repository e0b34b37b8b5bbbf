//! Candle's own structs through `candle_wick::stock`: the numbers of the same struct in memory, bit for bit.

use std::path::Path;

use candle::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::{llama, mistral, mixtral, phi, phi3, qwen2, qwen3, qwen3_moe};
use candle_wick::{stock, Memory};
use serde::de::DeserializeOwned;
use serde_json::{json, Value};
use tracing_subscriber::layer::SubscriberExt;

mod budgets;
mod files;
mod own;
mod sources;
mod subscribers;
mod wrong;

/// Ids of a prompt, and how many tokens are decoded after it.
const PROMPT: [u32; 7] = [3, 14, 15, 92, 65, 35, 89];
const DECODED: usize = 32;
const VOCAB: usize = 101;

/// `forward(ids, position)` of any model: logits of the last position.
type Forward = Box<dyn FnMut(&Tensor, usize) -> candle::Result<Tensor>>;

/// Candle's constructor of a model, and the call of its forward.
type Build = Box<dyn Fn(VarBuilder) -> candle::Result<Forward>>;

fn config<C: DeserializeOwned>(own: Value) -> C {
    let mut config = json!({
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "use_sliding_window": false, "max_window_layers": 3,
        "attention_bias": false, "use_flash_attn": false, "partial_rotary_factor": 0.5,
        "qk_layernorm": false,
    });
    let keys = own.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(keys);
    serde_json::from_value(config).unwrap()
}

fn build_llama() -> Build {
    let config = config::<llama::LlamaConfig>(json!({})).into_config(false);
    Box::new(move |vb| {
        let model = llama::Llama::load(vb, &config)?;
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at, &mut cache)))
    })
}

/// Every struct whose linear layers have spans.
fn models() -> Vec<(&'static str, Build)> {
    macro_rules! build {
        ($model:ty, $own:tt) => {{
            let config = config(json!($own));
            Box::new(move |vb: VarBuilder| {
                let mut model = <$model>::new(&config, vb)?;
                Ok(Box::new(move |ids: &Tensor, at| model.forward(ids, at)) as Forward)
            })
        }};
    }
    let phi_config = config::<phi::Config>(json!({"hidden_act": "gelu"}));
    let build_phi = move |vb: VarBuilder| {
        let mut model = phi::Model::new(&phi_config, vb)?;
        Ok(Box::new(move |ids: &Tensor, _| model.forward(ids)) as Forward)
    };
    vec![
        ("llama", build_llama()),
        ("mistral", build!(mistral::Model, {"sliding_window": 16})),
        ("phi", Box::new(build_phi)),
        ("phi3", build!(phi3::Model, {})),
        (
            "qwen2",
            build!(qwen2::ModelForCausalLM, {"sliding_window": 64}),
        ),
        (
            "qwen2 tied",
            build!(qwen2::ModelForCausalLM, {"sliding_window": 64, "tie_word_embeddings": true}),
        ),
        ("qwen3", build!(qwen3::ModelForCausalLM, {})),
        (
            "mixtral",
            build!(mixtral::Model, {
            "sliding_window": 64, "num_local_experts": 5, "num_experts_per_tok": 2}),
        ),
        (
            "qwen3 moe",
            build!(qwen3_moe::ModelForCausalLM, {
            "decoder_sparse_step": 1, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
            "num_experts": 6, "norm_topk_prob": true}),
        ),
    ]
}

/// Random weights of everything that the model asks for.
fn checkpoint(folder: &Path, build: &Build) {
    let varmap = VarMap::new();
    drop(build(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap());
    varmap.save(folder.join("model.safetensors")).unwrap();
}

fn in_memory(folder: &Path, build: &Build) -> Forward {
    let tensors = candle::safetensors::load(folder.join("model.safetensors"), &Device::Cpu);
    let vb = VarBuilder::from_tensors(tensors.unwrap(), DType::F32, &Device::Cpu);
    build(vb).unwrap()
}

/// Bits of the logits after the prompt and after each token that greedy decoding adds.
fn decode(mut forward: impl FnMut(&Tensor, usize) -> candle::Result<Tensor>) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    let (mut ids, mut position) = (PROMPT.to_vec(), 0);
    for _ in 0..=DECODED {
        let input = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
        let logits = forward(&input.unsqueeze(0).unwrap(), position).unwrap();
        let logits: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
        position += ids.len();
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        ids = vec![best.unwrap().0 as u32];
        all.push(logits.into_iter().map(f32::to_bits).collect());
    }
    all
}

fn with_layer<T>(run: impl FnOnce() -> T) -> T {
    let subscriber = tracing_subscriber::registry().with(stock::layer());
    tracing::subscriber::with_default(subscriber, run)
}

fn options(percent: f64) -> stock::StockOptions {
    stock::StockOptions {
        memory: Some(Memory::Percent(percent)),
        ..Default::default()
    }
}

#[test]
fn every_struct_gives_the_same_bits_at_every_budget() {
    for (name, build) in models() {
        let folder = tempfile::tempdir().unwrap();
        checkpoint(folder.path(), &build);
        let expected = decode(in_memory(folder.path(), &build));
        with_layer(|| {
            for percent in [40.0, 60.0, 85.0] {
                let loaded = stock::load(folder.path(), &options(percent), &build);
                let (mut forward, handle) = loaded.unwrap();
                let got = decode(|ids, at| handle.forward(|| forward(ids, at)));
                assert!(got == expected, "{name} at {percent} %");
                let (plan, stats) = (handle.plan(), handle.stats());
                assert!(plan.resident_fraction < 1.0, "{name} at {percent} %");
                assert!(stats.loads > 0, "{name} {stats:?}");
            }
        });
    }
}
