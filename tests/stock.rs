//! Stock candle definitions from the same folder.

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{falcon, llama, mistral, phi, qwen2};
use candle_wick::{FlashFolder, FlashVarBuilder, IoOptions, Placement, SelectorKind};
use candle_wick_models::load;
use serde::de::DeserializeOwned;
use serde_json::{json, Value};
use tempfile::TempDir;

use crate::support::{converted_as, expected, fixture, options, ConvertArgs};

/// A converted fixture, and what a stock definition is made from.
struct Stock {
    folder: TempDir,
    config: Value,
    vb: VarBuilder<'static>,
    ids: Vec<u32>,
    input: Tensor,
}

impl Stock {
    fn of(name: &str) -> Self {
        Self::converted_as(name, &ConvertArgs::default())
    }

    fn converted_as(name: &str, args: &ConvertArgs) -> Self {
        let folder = converted_as(&fixture(name), args);
        let config = std::fs::read(folder.path().join("config.json")).unwrap();
        let opened = FlashFolder::open(folder.path(), IoOptions::default()).unwrap();
        let placement = Placement::resident(&opened, SelectorKind::Dense);
        let ids = expected(name).ids;
        let input = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
        Self {
            folder,
            config: serde_json::from_slice(&config).unwrap(),
            vb: FlashVarBuilder::new(&opened, placement).dense(),
            ids,
            input: input.unsqueeze(0).unwrap(),
        }
    }

    /// The config, with the keys that candle wants to be told.
    fn config<C: DeserializeOwned>(&self, keys: &[(&str, Value)]) -> C {
        let mut config = self.config.clone();
        for (key, value) in keys {
            config[key] = value.clone();
        }
        serde_json::from_value(config).unwrap()
    }

    /// Compares our logits after the last id with theirs.
    fn agrees(&self, theirs: &Tensor) {
        let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let mut model = load(self.folder.path(), &options(SelectorKind::Dense, None)).unwrap();
        let ours = model.forward(&self.ids).unwrap();
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            assert!((ours - theirs).abs() < 1e-4, "{ours}, {theirs}");
        }
    }
}

#[test]
fn stock_llama_loads_from_the_converted_folder_and_agrees() {
    for name in ["llama-2-silu", "llama-3-rope-scaled-tied"] {
        let stock = Stock::of(name);
        let config = stock.config::<llama::LlamaConfig>(&[]).into_config(false);
        let theirs = llama::Llama::load(stock.vb.clone(), &config).unwrap();
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
        stock.agrees(&theirs.forward(&stock.input, 0, &mut cache).unwrap());
    }
}

/// Candle's Falcon has the tanh approximation of GELU.
#[test]
fn stock_falcon_loads_from_the_converted_folder_and_agrees() {
    let args = ConvertArgs {
        activation: Some("gelu_new".to_owned()),
    };
    let stock = Stock::converted_as("falcon-7b-multi-query", &args);
    let config = falcon::Config {
        vocab_size: 320,
        hidden_size: 80,
        num_hidden_layers: 3,
        num_attention_heads: 5,
        ..falcon::Config::falcon7b()
    };
    // It knows no tied head, and wants the copy that the first 7B files had.
    let vb = stock.vb.clone().rename_f(|name| match name {
        "lm_head.weight" => "transformer.word_embeddings.weight".to_owned(),
        other => other.to_owned(),
    });
    let mut theirs = falcon::Falcon::load(vb, config).unwrap();
    stock.agrees(&theirs.forward(&stock.input).unwrap());
}

/// Without a window: candle's lets a token see one position more than transformers' does.
#[test]
fn stock_mistral_loads_from_the_converted_folder_and_agrees() {
    let stock = Stock::of("mistral-no-window");
    let config: mistral::Config = stock.config(&[("rope_theta", json!(10_000.0))]);
    let mut theirs = mistral::Model::new(&config, stock.vb.clone()).unwrap();
    stock.agrees(&theirs.forward(&stock.input, 0).unwrap());
}

/// With a window beyond the text: candle's is there even where `use_sliding_window` is false.
#[test]
fn stock_qwen2_loads_from_the_converted_folder_and_agrees() {
    let stock = Stock::of("qwen2");
    let keys = [
        ("rope_theta", json!(10_000.0)),
        ("sliding_window", json!(64)),
    ];
    let config: qwen2::Config = stock.config(&keys);
    let mut theirs = qwen2::ModelForCausalLM::new(&config, stock.vb.clone()).unwrap();
    stock.agrees(&theirs.forward(&stock.input, 0).unwrap());
}

#[test]
fn stock_phi_loads_from_the_converted_folder_and_agrees() {
    let stock = Stock::of("phi-2");
    let mut theirs = phi::Model::new(&stock.config(&[]), stock.vb.clone()).unwrap();
    stock.agrees(&theirs.forward(&stock.input).unwrap());
}
