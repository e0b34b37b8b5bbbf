//! Candle's quantized Llama with its weights on flash, which needs no patch.

use candle_transformers::models::quantized_llama::ModelWeights;
use candle_wick::Memory;
use candle_wick_models::{LoadOptions, LoadedModel};

use super::*;
use crate::failures::replace_listed;

/// Queries and keys of as many heads; queries of twice as many, and a tied head in f16.
const LLAMAS: [&str; 2] = ["llama-2-silu", "llama-tied-duplicate-head"];

fn built(vb: &FlashVarBuilder) -> ModelWeights {
    let (content, gqa) = vb.ggml_content().unwrap();
    ModelWeights::from_ggml(content, gqa).unwrap()
}

fn decoded(ids: &[u32], vb: &FlashVarBuilder) -> Vec<Vec<f32>> {
    let mut model = built(vb);
    decode(ids, |ids, at| values(model.forward(&input(ids)?, at)?))
}

fn with(stock: &Stock, selector: SelectorKind, slots: Option<usize>) -> FlashVarBuilder {
    FlashVarBuilder::new(&stock.folder, stock.placement(selector, slots))
}

/// Whole, and where the config said something else.
fn changed(key: &str, value: Value) -> Stock {
    let stock = Stock::of("llama-2-silu");
    let mut config: Value = serde_json::from_str(&stock.folder.config_json().unwrap()).unwrap();
    config[key] = value;
    let text = config.to_string();
    replace_listed(stock.out.path(), "config.json", text.as_bytes());
    let folder = FlashFolder::open(stock.out.path(), IoOptions::default()).unwrap();
    Stock { folder, ..stock }
}

#[test]
fn dense_gives_the_logits_of_the_struct_in_memory_at_every_number_of_slots() {
    for name in LLAMAS {
        for layout in [Layout::Neuron, Layout::Channel] {
            let stock = Stock::stored(name, layout);
            let theirs = decode(&stock.ids, stock.in_memory());
            let mut reference = None;
            for slots in [None, Some(25), Some(2)] {
                let vb = with(&stock, SelectorKind::Dense, slots);
                let ours = decoded(&stock.ids, &vb);
                let distance = distance(&ours, &theirs);
                assert!(distance < 1e-5, "{name} {layout:?} {slots:?}: {distance}");
                assert!(
                    *reference.get_or_insert_with(|| ours.clone()) == ours,
                    "{name}"
                );
                let tokens = stock.ids.len() as u64 + 7;
                let stats = vb.ffn_stats();
                assert!(stats.iter().all(|layer| layer.tokens == tokens), "{name}");
            }
        }
    }
}

#[test]
fn dip_chooses_as_in_our_own_definition() {
    for name in LLAMAS {
        let stock = Stock::of(name);
        let dip = DipOptions {
            density: 0.6,
            ..DipOptions::default()
        };
        let selector = Some(SelectorKind::Dip);
        let options = SparseOptions {
            selector,
            dip,
            ..SparseOptions::default()
        };
        let vb = FlashVarBuilder::for_quantized_llama(&stock.folder, &options).unwrap();
        let theirs = decoded(&stock.ids, &vb);
        let load = LoadOptions {
            selector,
            dip,
            ..LoadOptions::default()
        };
        let mut own = LoadedModel::load(stock.folder.clone(), &load).unwrap();
        let own = decode(&stock.ids, |ids, _| {
            own.forward(ids).map_err(candle::Error::wrap)
        });
        let distance = distance(&own, &theirs);
        assert!(distance < 1e-4, "{name}: {distance}");
        let layers = vb.ffn_stats();
        assert!(layers
            .iter()
            .all(|layer| layer.multiply_adds * 10 < layer.neurons * 7));
    }
}

/// Models in pools whose threads pick up each other's work, and in threads of their own.
#[test]
fn clones_in_many_threads_give_what_one_gives() {
    use rayon::prelude::*;
    let stock = Stock::of("llama-2-silu");
    let vb = with(&stock, SelectorKind::Dense, Some(30));
    let model = built(&vb);
    drop(vb);
    let run = |model: &ModelWeights| {
        let mut model = model.clone();
        decode(&stock.ids, |ids, at| {
            values(model.forward(&input(ids)?, at)?)
        })
    };
    let expected = run(&model);
    let all: Vec<_> = (0..16).into_par_iter().map(|_| run(&model)).collect();
    assert!(all.iter().all(|got| *got == expected));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert!(run(&model) == expected));
        }
    });
}

#[test]
fn a_plan_counts_the_tied_head_beside_candles_embedding() {
    let stock = Stock::of("llama-tied-duplicate-head");
    let options = SparseOptions::default();
    let total = |vb: FlashVarBuilder| vb.stock_plan().unwrap().weight_bytes;
    let quantized = FlashVarBuilder::for_quantized_llama(&stock.folder, &options).unwrap();
    let patched = FlashVarBuilder::for_stock(&stock.folder, &options).unwrap();
    // 96 ids of 32 values in f16.
    assert_eq!(total(quantized), total(patched) + 96 * 32 * 2);
}

#[test]
fn a_damaged_record_is_the_forwards_error_and_the_next_forward_begins_anew() {
    let stock = Stock::of("llama-2-silu");
    let vb = with(&stock, SelectorKind::Dense, Some(2));
    let mut model = built(&vb);
    let mut forward = || values(model.forward(&input(&stock.ids)?, 0)?);
    let expected = forward().unwrap();
    let path = stock.out.path().join("ffn-00001-of-00001.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    let half = damaged.len() / 2;
    damaged[half..].iter_mut().for_each(|byte| *byte ^= 0x40);
    std::fs::write(&path, damaged).unwrap();
    let error = forward().unwrap_err().to_string();
    assert!(error.contains("model.layers."), "{error}");
    assert!(error.contains("ffn-00001-of-00001.safetensors"), "{error}");
    std::fs::write(&path, whole).unwrap();
    assert!(forward().unwrap() == expected);
}

#[test]
fn weights_on_flash_are_no_tensors() {
    let stock = Stock::of("llama-2-silu");
    let (content, _) = with(&stock, SelectorKind::Dense, None)
        .ggml_content()
        .unwrap();
    for (name, stored) in [
        (
            "layers.0.feed_forward.w1.weight",
            "model.layers.0.mlp.gate_proj.weight",
        ),
        (
            "layers.0.attention.wq.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
    ] {
        let tensor = &content.tensors[name];
        let error = tensor.dequantize(&Device::Cpu).unwrap_err().to_string();
        assert!(
            error.contains(stored) && error.contains("stays on flash"),
            "{error}"
        );
        assert_eq!(tensor.storage_size_in_bytes(), 0);
        assert!(tensor.data().unwrap().is_empty());
        let half = Tensor::zeros((1, tensor.shape().dims()[1]), DType::F16, &Device::Cpu).unwrap();
        let product = half.apply_op1_no_bwd(tensor);
        assert!(product.unwrap_err().to_string().contains("f32 alone"));
    }
}

#[test]
fn models_that_candles_constructor_cannot_be_told_are_refused() {
    for (key, value, expected) in [
        ("rope_theta", json!(500000.0), "rope_theta is 500000"),
        ("rms_norm_eps", json!(1e-6), "rms_norm_eps is 1e-6"),
        ("hidden_act", json!("relu"), "hidden_act is \"relu\""),
        ("model_type", json!("mistral"), "model_type is \"mistral\""),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 2.0}),
            "is scaled by",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "llama3"}),
            "scaled by \"llama3\"",
        ),
        ("head_dim", json!(32), "head_dim is 32"),
        ("num_attention_heads", json!(0), "of 0 heads"),
        ("num_attention_heads", json!(3), "of 3 heads"),
        ("num_key_value_heads", json!(3), "of 4 heads, 3 for keys"),
    ] {
        let stock = changed(key, value);
        let options = SparseOptions::default();
        for made in [
            FlashVarBuilder::for_quantized_llama(&stock.folder, &options).map(drop),
            with(&stock, SelectorKind::Dense, None)
                .ggml_content()
                .map(drop),
        ] {
            let error = made.unwrap_err().to_string();
            assert!(error.contains(expected), "{key}: {error}");
            assert!(error.contains("config.json"), "{error}");
        }
    }
    let other = Stock::of("falcon-7b-multi-query");
    let made = FlashVarBuilder::for_quantized_llama(&other.folder, &SparseOptions::default());
    let error = made.err().unwrap().to_string();
    assert!(error.contains("model_type is \"falcon\""), "{error}");
    let biased = Stock::of("llama-biases");
    let made = FlashVarBuilder::for_quantized_llama(&biased.folder, &SparseOptions::default());
    let error = made.err().unwrap().to_string();
    assert!(error.contains(".bias, which"), "{error}");
}

#[test]
fn a_plan_for_another_struct_and_a_budget_too_small_are_refused() {
    let stock = Stock::of("llama-2-silu");
    let vb = FlashVarBuilder::for_stock(&stock.folder, &SparseOptions::default()).unwrap();
    let error = vb.ggml_content().err().unwrap().to_string();
    assert!(error.contains("for_quantized_llama"), "{error}");
    let options = SparseOptions {
        memory: Some(Memory::Bytes(1 << 20)),
        ..SparseOptions::default()
    };
    let made = FlashVarBuilder::for_quantized_llama(&stock.folder, &options);
    let error = made.err().unwrap().to_string();
    assert!(error.contains("below the floor"), "{error}");
}
