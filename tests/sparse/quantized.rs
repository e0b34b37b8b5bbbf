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

/// The fixture `name`, converted, whose config is made to say something else.
fn with_config(name: &str, key: &str, value: Value) -> Stock {
    let stock = Stock::of(name);
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
            dense_prompt: true,
            ..DipOptions::default()
        };
        let selector = Some(SelectorKind::Dip);
        let options = SparseOptions {
            selector,
            dip,
            ..SparseOptions::default()
        };
        let vb = FlashVarBuilder::for_quantized_llama(&stock.folder, &options).unwrap();
        let mut model = built(&vb);
        let theirs = decode(&stock.ids, |ids, at| {
            vb.set_prompt(ids.len() > 1);
            values(model.forward(&input(ids)?, at)?)
        });
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
        // All of a prompt's and 60 % of seven tokens'.
        let (prompt, layers) = (stock.ids.len() as u64, vb.ffn_stats());
        for layer in layers {
            let share = layer.multiply_adds as f64 / layer.neurons as f64;
            let expected = (prompt as f64 + 0.6 * 7.0) / (prompt as f64 + 7.0);
            assert!(
                (share - expected).abs() < 0.02,
                "{name}: {share} {expected}"
            );
        }
    }
}

/// More tokens than a step takes, and with a part of the weights in memory as well.
#[test]
fn long_prompts_are_what_they_are_in_memory() {
    for name in LLAMAS {
        let stock = Stock::of(name);
        let config = parsed::<llama::LlamaConfig>(&stock.config).into_config(false);
        let len = config.max_position_embeddings.min(200);
        let ids: Vec<u32> = stock.ids.iter().cycle().take(len).copied().collect();
        let in_memory = llama::Llama::load(stock.dense(), &config).unwrap();
        let planned =
            FlashVarBuilder::for_quantized_llama(&stock.folder, &SparseOptions::default());
        let few = with(&stock, SelectorKind::Dense, Some(2));
        for (vb, reads) in [(planned.unwrap(), false), (few, true)] {
            let mut model = built(&vb);
            let text = input(&ids).unwrap();
            let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
            let theirs = values(in_memory.forward(&text, 0, &mut cache).unwrap()).unwrap();
            let ours = values(model.forward(&text, 0).unwrap()).unwrap();
            let distance = distance(&[ours], &[theirs]);
            assert!(distance < 1e-5, "{name} {reads}: {distance}");
            let before = stock.folder.io_counters().bytes;
            model.forward(&input(&ids[..1]).unwrap(), len).unwrap();
            assert_eq!(stock.folder.io_counters().bytes > before, reads, "{name}");
        }
    }
}

/// As many inputs and outputs as candle wants for packing weights anew, which would be of bytes that are not there.
#[test]
fn weights_of_packable_sizes_are_multiplied_here_at_every_number_of_tokens() {
    let source = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": false,
    });
    std::fs::write(source.path().join("config.json"), config.to_string()).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let shapes: [(String, &[usize]); 12] = [
        ("model.embed_tokens.weight".into(), &[320, 256]),
        ("model.norm.weight".into(), &[256]),
        ("lm_head.weight".into(), &[320, 256]),
        (layer("input_layernorm"), &[256]),
        (layer("post_attention_layernorm"), &[256]),
        (layer("self_attn.q_proj"), &[256, 256]),
        (layer("self_attn.k_proj"), &[128, 256]),
        (layer("self_attn.v_proj"), &[128, 256]),
        (layer("self_attn.o_proj"), &[256, 256]),
        (layer("mlp.gate_proj"), &[512, 256]),
        (layer("mlp.up_proj"), &[512, 256]),
        (layer("mlp.down_proj"), &[256, 512]),
    ];
    let tensors = shapes.map(|(name, shape)| {
        let values = Tensor::randn(0f32, 0.05, shape, &Device::Cpu).unwrap();
        (name, values)
    });
    let path = source.path().join("model.safetensors");
    candle::safetensors::save(&tensors.into_iter().collect(), path).unwrap();
    let out = converted_to(source.path(), &ConvertArgs::default(), Layout::Both);
    let folder = FlashFolder::open(out.path(), IoOptions::default()).unwrap();
    let vb = FlashVarBuilder::new(&folder, Placement::resident(&folder, SelectorKind::Dense));
    let config = parsed::<llama::LlamaConfig>(&config).into_config(false);
    let in_memory = llama::Llama::load(vb.dense(), &config).unwrap();
    let mut model = built(&vb);
    for tokens in [1, 4, 32] {
        let ids: Vec<u32> = (0..tokens).map(|at| at * 37 % 320).collect();
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
        let theirs = in_memory.forward(&input(&ids).unwrap(), 0, &mut cache);
        let theirs = values(theirs.unwrap()).unwrap();
        let ours = values(model.forward(&input(&ids).unwrap(), 0).unwrap()).unwrap();
        let distance = distance(&[ours], &[theirs]);
        assert!(distance < 1e-5, "{tokens}: {distance}");
    }
}

/// What a forward that was given up has asked for does not count in the next.
#[test]
fn a_gate_begins_its_ffn_anew() {
    let stock = Stock::of("llama-2-silu");
    let (content, _) = with(&stock, SelectorKind::Dense, None)
        .ggml_content()
        .unwrap();
    let weight = |name: &str| &content.tensors[&format!("layers.0.feed_forward.{name}.weight")];
    let [w1, w2, w3] = ["w1", "w2", "w3"].map(weight);
    let x = Tensor::randn(0f32, 1.0, (3, 64), &Device::Cpu).unwrap();
    let ffn = |x: &Tensor| {
        let gate = x.apply_op1_no_bwd(w1)?.silu()?;
        let up = x.apply_op1_no_bwd(w3)?;
        (gate * up)?.apply_op1_no_bwd(w2)
    };
    let expected = ffn(&x).unwrap().to_vec2::<f32>().unwrap();
    let other = (&x * 2.0).unwrap();
    other.apply_op1_no_bwd(w1).unwrap();
    other.apply_op1_no_bwd(w3).unwrap();
    assert!(ffn(&x).unwrap().to_vec2::<f32>().unwrap() == expected);
    // Down alone is nothing.
    let wide = Tensor::ones((3, 176), DType::F32, &Device::Cpu).unwrap();
    let error = wide.apply_op1_no_bwd(w2).unwrap_err().to_string();
    assert!(error.contains("does not follow"), "{error}");
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
            "rope_scaling is {",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "llama3"}),
            "rope_parameters.rope_type is \"llama3\"",
        ),
        (
            "rope_parameters",
            json!({"type": "yarn"}),
            "rope_parameters.type is \"yarn\"",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 500.0}),
            "rope_theta is 500",
        ),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_type": "llama3"}}),
            "rope_parameters.full_attention is {",
        ),
        ("rope_theta", json!("500000"), "rope_theta is \"500000\""),
        ("hidden_act", json!(["silu"]), "hidden_act is ["),
        ("rms_norm_eps", json!("1e-5"), "rms_norm_eps is \"1e-5\""),
        (
            "hidden_size",
            json!(u64::MAX),
            "hidden_size is 18446744073709551615",
        ),
        ("head_dim", json!(32), "head_dim is 32"),
        ("num_attention_heads", json!(0), "of 0 heads"),
        ("num_attention_heads", json!(3), "of 3 heads"),
        ("num_key_value_heads", json!(3), "of 4 heads, 3 for keys"),
    ] {
        let stock = with_config("llama-2-silu", key, value);
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
    // Of a model with biases whose config is changed to say silu.
    let biased = with_config("llama-biases", "hidden_act", json!("silu"));
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
    let vb = FlashVarBuilder::for_quantized_llama(&stock.folder, &SparseOptions::default());
    let vb = vb.unwrap();
    let error = vb.sparse().err().unwrap().to_string();
    assert!(error.contains("FlashVarBuilder::for_stock"), "{error}");
    vb.ggml_content().unwrap();
    let error = vb.ggml_content().err().unwrap().to_string();
    assert!(error.contains("loaded already"), "{error}");
    for options in [
        SparseOptions {
            dtype: DType::F16,
            ..SparseOptions::default()
        },
        SparseOptions {
            activation: Some(candle_wick::Activation::Relu),
            ..SparseOptions::default()
        },
    ] {
        let made = FlashVarBuilder::for_quantized_llama(&stock.folder, &options);
        let error = made.err().unwrap().to_string();
        assert!(error.contains("computes in F32 and has silu"), "{error}");
    }
    let options = SparseOptions {
        memory: Some(Memory::Bytes(1 << 20)),
        ..SparseOptions::default()
    };
    let made = FlashVarBuilder::for_quantized_llama(&stock.folder, &options);
    let error = made.err().unwrap().to_string();
    assert!(error.contains("below the floor"), "{error}");
}
