//! Where the weights come from, in which dtype, and what is read of them.

use std::collections::HashMap;
use std::path::Path;

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama;
use candle_wick::stock::{self, ExpertPolicy, StockOptions};
use candle_wick::Memory;
use candle_wick_convert::{convert, ConvertOptions};
use serde_json::json;

use super::{build_llama, checkpoint, decode, in_memory, models, options, with_layer};

fn tensors(folder: &Path) -> HashMap<String, Tensor> {
    candle::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap()
}

fn assert_streamed_equals(folder: &Path, expected: &[Vec<u32>], what: &str) {
    with_layer(|| {
        let (mut forward, handle) = stock::load(folder, &options(60.0), build_llama()).unwrap();
        assert!(handle.plan().resident_fraction < 1.0, "{what}");
        let got = decode(|ids, at| handle.forward(|| forward(ids, at)));
        assert!(got == expected, "{what}");
    });
}

#[test]
fn shards_with_an_index() {
    let (whole, sharded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let build = build_llama();
    checkpoint(whole.path(), &build);
    let mut parts = [HashMap::new(), HashMap::new()];
    let mut weight_map = serde_json::Map::new();
    for (index, (name, tensor)) in tensors(whole.path()).into_iter().enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", index % 2 + 1);
        weight_map.insert(name.clone(), file.into());
        parts[index % 2].insert(name, tensor);
    }
    for (index, part) in parts.iter().enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", index + 1);
        candle::safetensors::save(part, sharded.path().join(file)).unwrap();
    }
    let index = json!({ "weight_map": weight_map }).to_string();
    std::fs::write(sharded.path().join("model.safetensors.index.json"), index).unwrap();
    let expected = decode(in_memory(whole.path(), &build));
    assert_streamed_equals(sharded.path(), &expected, "shards");
}

#[test]
fn a_converted_folder() {
    let (source, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let build = build_llama();
    checkpoint(source.path(), &build);
    let config = json!({
        "model_type": "llama", "vocab_size": super::VOCAB, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false,
    });
    std::fs::write(source.path().join("config.json"), config.to_string()).unwrap();
    convert(
        source.path(),
        folder.path(),
        &ConvertOptions::default(),
        &|_| {},
    )
    .unwrap();
    let expected = decode(in_memory(source.path(), &build));
    assert_streamed_equals(folder.path(), &expected, "converted");
}

/// From each stored dtype into each that a model can compute in, as candle converts them.
#[test]
fn every_dtype_from_every_dtype() {
    let whole = tempfile::tempdir().unwrap();
    checkpoint(whole.path(), &build_llama());
    let config = super::config::<llama::LlamaConfig>(json!({})).into_config(false);
    let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).unwrap();
    let bits = |model: &llama::Llama, dtype: DType| -> Vec<u32> {
        let mut cache = llama::Cache::new(true, dtype, &config, &Device::Cpu).unwrap();
        let logits = model.forward(&ids, 0, &mut cache).unwrap();
        let logits = logits.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        let values = logits.to_vec1::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    for stored in dtypes {
        let folder = tempfile::tempdir().unwrap();
        let narrowed = tensors(whole.path());
        let narrowed = narrowed
            .into_iter()
            .map(|(name, t)| (name, t.to_dtype(stored).unwrap()));
        let narrowed: HashMap<String, Tensor> = narrowed.collect();
        let path = folder.path().join("model.safetensors");
        candle::safetensors::save(&narrowed, &path).unwrap();
        for dtype in dtypes {
            let vb = VarBuilder::from_tensors(narrowed.clone(), dtype, &Device::Cpu);
            let expected = bits(&llama::Llama::load(vb, &config).unwrap(), dtype);
            let options = StockOptions {
                dtype,
                ..options(60.0)
            };
            with_layer(|| {
                let build = |vb: VarBuilder<'static>| llama::Llama::load(vb, &config);
                let (model, handle) = stock::load(&path, &options, build).unwrap();
                let got = handle.forward(|| Ok(bits(&model, dtype))).unwrap();
                assert!(got == expected, "{stored:?} as {dtype:?}");
                assert!(handle.stats().loads > 0);
            });
        }
    }
}

/// Of the experts only those that a token was routed to are read, and those still there are not read again.
#[test]
fn experts_are_read_once_for_each_miss() {
    for (name, build) in models() {
        let expert_bytes = match name {
            "mixtral" => 3 * 48 * 80 * 4,
            "qwen3 moe" => 3 * 48 * 24 * 4,
            _ => continue,
        };
        let folder = tempfile::tempdir().unwrap();
        checkpoint(folder.path(), &build);
        let expected = decode(in_memory(folder.path(), &build));
        let mut misses = Vec::new();
        for policy in [ExpertPolicy::Lfu, ExpertPolicy::Window] {
            for percent in [70.0, 90.0] {
                let options = StockOptions {
                    memory: Some(Memory::Percent(percent)),
                    expert_policy: policy,
                    ..Default::default()
                };
                with_layer(|| {
                    let (mut forward, handle) =
                        stock::load(folder.path(), &options, &build).unwrap();
                    let before = handle.stats();
                    let got = decode(|ids, at| handle.forward(|| forward(ids, at)));
                    assert!(got == expected, "{name} {policy:?} {percent}");
                    let stats = handle.stats();
                    // Reads are rounded to what the device can address, so a few bytes more.
                    let read = stats.bytes - before.bytes;
                    assert_eq!(stats.loads, stats.misses, "{name} {policy:?} {percent}");
                    assert!(
                        read >= stats.misses * expert_bytes,
                        "{name} {policy:?} {percent}"
                    );
                    assert!(stats.misses < stats.uses, "{name} {policy:?} {percent}");
                    misses.push(stats.misses);
                });
            }
        }
        // More room, fewer misses.
        assert!(
            misses[1] < misses[0] && misses[3] < misses[2],
            "{name} {misses:?}"
        );
    }
}
