//! What must be an error, or right all the same.

use std::sync::Arc;

use candle::{DType, Device, Module, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::falcon;
use candle_wick::{stock, Memory};
use serde_json::json;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::Layer;

use super::{build_llama, checkpoint, config, decode, in_memory, options, with_layer, VOCAB};

#[test]
fn a_missing_or_filtered_layer_is_an_error_when_the_model_is_built() {
    let folder = tempfile::tempdir().unwrap();
    let build = build_llama();
    checkpoint(folder.path(), &build);
    let refused = || {
        let error = stock::load(folder.path(), &options(60.0), &build).err();
        let message = error.expect("no span can have come").to_string();
        assert!(
            message.contains("lm_head.weight") && message.contains("layer()"),
            "{message}"
        );
    };
    refused();
    tracing::subscriber::with_default(tracing_subscriber::registry(), refused);
    let filtered = tracing_subscriber::registry()
        .with(stock::layer())
        .with(LevelFilter::INFO);
    tracing::subscriber::with_default(filtered, refused);
    let filtered =
        tracing_subscriber::registry().with(stock::layer().with_filter(LevelFilter::INFO));
    tracing::subscriber::with_default(filtered, refused);
    // The thread is none the worse for it.
    with_layer(|| assert!(stock::load(folder.path(), &options(60.0), &build).is_ok()));
}

#[test]
fn a_model_without_spans_is_an_error_when_it_is_built() {
    let folder = tempfile::tempdir().unwrap();
    let own = json!({
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "use_cache": true, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "n_head_kv": null,
        "alibi": false, "new_decoder_architecture": false, "multi_query": true, "parallel_attn": true,
        "bias": false,
    });
    let config = config::<falcon::Config>(own);
    let build: super::Build = Box::new(move |vb: VarBuilder| {
        let mut model = falcon::Falcon::load(vb, config.clone())?;
        Ok(Box::new(move |ids: &Tensor, _| model.forward(ids)))
    });
    checkpoint(folder.path(), &build);
    with_layer(|| {
        let error = stock::load(folder.path(), &options(60.0), &build).err();
        let message = error.expect("Falcon has no spans").to_string();
        assert!(message.contains("no spans"), "{message}");
    });
}

#[test]
fn a_last_layer_without_a_span_is_found_too() {
    let folder = tempfile::tempdir().unwrap();
    let build = |vb: VarBuilder| candle_nn::linear_no_bias(8, VOCAB, vb.pp("head"));
    let varmap = candle_nn::VarMap::new();
    build(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
    varmap
        .save(folder.path().join("model.safetensors"))
        .unwrap();
    with_layer(|| {
        let message = stock::load(folder.path(), &options(60.0), build);
        let message = message.err().unwrap().to_string();
        assert!(message.contains("head.weight"), "{message}");
    });
}

#[test]
fn two_models_and_two_threads_at_once() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    with_layer(|| {
        let dispatch = tracing::dispatcher::get_default(|dispatch| dispatch.clone());
        std::thread::scope(|scope| {
            for folder in &folders {
                let dispatch = dispatch.clone();
                scope.spawn(move || {
                    let build = build_llama();
                    checkpoint(folder.path(), &build);
                    let expected = decode(in_memory(folder.path(), &build));
                    tracing::dispatcher::with_default(&dispatch, || {
                        let loaded = stock::load(folder.path(), &options(50.0), &build);
                        let (mut forward, handle) = loaded.unwrap();
                        let got = decode(|ids, at| handle.forward(|| forward(ids, at)));
                        assert!(got == expected);
                    });
                });
            }
        });
    });
}

/// A linear layer with candle's span.
fn traced(
    folder: &std::path::Path,
) -> (
    candle_transformers::models::with_tracing::Linear,
    stock::StockHandle,
) {
    use candle_transformers::models::with_tracing::linear_no_bias;
    let build = |vb: VarBuilder| linear_no_bias(64, VOCAB, vb.pp("head"));
    if !folder.join("model.safetensors").exists() {
        let varmap = candle_nn::VarMap::new();
        build(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
        varmap.save(folder.join("model.safetensors")).unwrap();
    }
    let streamed = stock::StockOptions {
        memory: Some(Memory::Percent(99.9)),
        ..Default::default()
    };
    // One matrix alone is above 99.9 % of itself, so it cannot be streamed: two of them can.
    let two = |vb: VarBuilder| {
        Ok((
            build(vb.clone())?,
            linear_no_bias(64, VOCAB, vb.pp("other"))?,
        ))
    };
    let varmap = candle_nn::VarMap::new();
    two(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
    varmap.save(folder.join("model.safetensors")).unwrap();
    let ((head, _), handle) = stock::load(folder, &streamed, two).unwrap();
    (head, handle)
}

#[test]
fn one_forward_at_a_time_and_one_after_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    with_layer(|| {
        let (head, handle) = traced(folder.path());
        let x = Tensor::ones((1, 64), DType::F32, &Device::Cpu).unwrap();
        let expected: Vec<Vec<f32>> = handle
            .forward(|| head.forward(&x))
            .unwrap()
            .to_vec2()
            .unwrap();
        let nested = handle.forward(|| handle.forward(|| head.forward(&x)));
        assert!(nested.unwrap_err().to_string().contains("one at a time"));
        let handle = Arc::new(handle);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            handle.forward(|| -> candle::Result<()> { panic!("in the middle") })
        }));
        assert!(panicked.is_err());
        let again = handle.forward(|| head.forward(&x)).unwrap();
        assert_eq!(again.to_vec2::<f32>().unwrap(), expected);
    });
}

#[test]
fn the_layer_twice_is_as_good_as_once() {
    let folder = tempfile::tempdir().unwrap();
    let build = build_llama();
    checkpoint(folder.path(), &build);
    let expected = decode(in_memory(folder.path(), &build));
    let twice = tracing_subscriber::registry()
        .with(stock::layer())
        .with(stock::layer());
    tracing::subscriber::with_default(twice, || {
        let (mut forward, handle) = stock::load(folder.path(), &options(50.0), &build).unwrap();
        assert!(decode(|ids, at| handle.forward(|| forward(ids, at))) == expected);
    });
}

#[test]
fn weights_that_cannot_be_read_are_an_error_until_they_can_be_again() {
    let folder = tempfile::tempdir().unwrap();
    let build = build_llama();
    checkpoint(folder.path(), &build);
    let expected = decode(in_memory(folder.path(), &build));
    with_layer(|| {
        let (mut forward, handle) = stock::load(folder.path(), &options(50.0), &build).unwrap();
        let ids = Tensor::new(&[[1u32, 2]], &Device::Cpu).unwrap();
        let path = folder.path().join("model.safetensors");
        let whole = std::fs::read(&path).unwrap();
        // The inode stays, as when a network file system comes back.
        std::fs::write(&path, &whole[..100]).unwrap();
        for _ in 0..3 {
            let error = handle.forward(|| forward(&ids, 0)).unwrap_err().to_string();
            assert!(error.contains("model.safetensors"), "{error}");
            assert!(
                forward(&ids, 0).is_err(),
                "who does not ask the handle sees it too"
            );
        }
        std::fs::write(&path, &whole).unwrap();
        assert!(decode(|ids, at| handle.forward(|| forward(ids, at))) == expected);
    });
}
