//! One `FlashMlp` inside a plain candle model, beside the same model with its FFN in memory.
//!
//! Makes a tiny ReLU Llama, converts it, and puts the FFN of its only layer between two candle layers, with
//! room in memory for three quarters of the neurons. `cargo run --release --example flash_mlp`

use candle::{DType, Device, Module, Result, Tensor};
use candle_nn::{linear_no_bias, rms_norm, Linear, RmsNorm, VarBuilder, VarMap};
use candle_wick::{FlashFolder, FlashMlp, FlashVarBuilder, IoOptions, Placement, SelectorKind};

const HIDDEN: usize = 64;
const NEURONS: usize = 1024;
const VOCAB: usize = 256;
const CONFIG: &str = r#"{"model_type": "llama", "hidden_act": "relu", "hidden_size": 64, "intermediate_size": 1024,
    "vocab_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "rms_norm_eps": 1e-5}"#;

/// A model that does not know where its FFN is.
struct TinyModel<Mlp> {
    norm: RmsNorm,
    mlp: Mlp,
    head: Linear,
}

impl<Mlp: Module> Module for TinyModel<Mlp> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head
            .forward(&(x + self.mlp.forward(&self.norm.forward(x)?)?)?)
    }
}

/// What the FFN is when all of it is in memory.
fn dense_mlp(vb: VarBuilder) -> Result<impl Module> {
    let gate = linear_no_bias(HIDDEN, NEURONS, vb.pp("gate_proj"))?;
    let up = linear_no_bias(HIDDEN, NEURONS, vb.pp("up_proj"))?;
    let down = linear_no_bias(NEURONS, HIDDEN, vb.pp("down_proj"))?;
    let activated = move |x: &Tensor| gate.forward(x)?.relu()? * up.forward(x)?;
    Ok(candle_nn::func(move |x| down.forward(&activated(x)?)))
}

fn main() -> anyhow::Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu).pp("model");
    let layer = vb.pp("layers.0");
    let norm = rms_norm(HIDDEN, 1e-5, vb.pp("norm"))?;
    let mlp = dense_mlp(layer.pp("mlp"))?;
    let head = linear_no_bias(HIDDEN, VOCAB, vb.root().pp("lm_head"))?;
    let in_memory = TinyModel { norm, mlp, head };
    candle_nn::embedding(VOCAB, HIDDEN, vb.pp("embed_tokens"))?;
    for name in ["input_layernorm", "post_attention_layernorm"] {
        rms_norm(HIDDEN, 1e-5, layer.pp(name))?;
    }
    for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
        linear_no_bias(HIDDEN, HIDDEN, layer.pp("self_attn").pp(name))?;
    }

    let (source, out) = (tempfile::tempdir()?, tempfile::tempdir()?);
    varmap.save(source.path().join("model.safetensors"))?;
    std::fs::write(source.path().join("config.json"), CONFIG)?;
    candle_wick_convert::convert(source.path(), out.path(), &Default::default(), &|_| ())?;

    let folder = FlashFolder::open(out.path(), IoOptions::default())?;
    let mut placement = Placement::resident(&folder, SelectorKind::Oracle);
    placement.slots_per_layer = vec![NEURONS * 3 / 4];
    let vb = FlashVarBuilder::new(&folder, placement);
    let (relu, place) = ("relu".parse()?, vb.pp("model.layers.0.mlp"));
    let mlp = FlashMlp::load(HIDDEN, NEURONS, relu, place)?;
    let (norm, head) = (in_memory.norm.clone(), in_memory.head.clone());
    let on_flash = TinyModel { norm, mlp, head };
    let mut difference = 0f32;
    for _token in 0..50 {
        let x = Tensor::randn(0f32, 1.0, (1, 1, HIDDEN), &Device::Cpu)?;
        let gap = (on_flash.forward(&x)? - in_memory.forward(&x)?)?;
        difference = difference.max(gap.abs()?.max_all()?.to_scalar()?);
    }
    println!("largest difference of the outputs: {difference:e}");
    let stats = vb.ffn_stats()[0];
    println!("neurons used: {} of {}", stats.selected, stats.neurons);
    println!("{} were in memory, {} were read", stats.hits, stats.misses);
    Ok(())
}
