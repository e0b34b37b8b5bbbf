//! Stock candle definitions from the same folder.

use candle::{DType, Device, Tensor};
use candle_transformers::models::falcon;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use candle_wick::{FlashFolder, FlashVarBuilder, IoOptions, Placement, SelectorKind};
use candle_wick_models::load;

use crate::support::{converted, converted_as, expected, fixture, options, ConvertArgs};

#[test]
fn stock_llama_loads_from_the_converted_folder_and_agrees() {
    for name in ["llama-2-silu", "llama-3-rope-scaled-tied"] {
        let folder = converted(&fixture(name));
        let ids = expected(name).ids;
        let config = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
        let config: LlamaConfig = serde_json::from_str(&config).unwrap();
        let config = config.into_config(false);
        let opened = FlashFolder::open(folder.path(), IoOptions::default()).unwrap();
        let placement = Placement::resident(&opened, SelectorKind::Dense);
        let vb = FlashVarBuilder::new(&opened, placement).dense();
        let stock = Llama::load(vb, &config).unwrap();
        let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
        let input = Tensor::new(ids.as_slice(), &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let theirs = stock
            .forward(&input, 0, &mut cache)
            .unwrap()
            .flatten_all()
            .unwrap();
        let mut model = load(folder.path(), &options(SelectorKind::Dense, None)).unwrap();
        let ours = model.forward(&ids).unwrap();
        for (ours, theirs) in ours.iter().zip(theirs.to_vec1::<f32>().unwrap()) {
            assert!((ours - theirs).abs() < 1e-4, "{name}: {ours}, {theirs}");
        }
    }
}

#[test]
fn stock_falcon_loads_from_the_converted_folder_and_agrees() {
    let name = "falcon-7b-multi-query";
    // Candle's Falcon has the tanh approximation of GELU.
    let args = ConvertArgs {
        activation: Some("gelu_new".to_owned()),
    };
    let folder = converted_as(&fixture(name), &args);
    let ids = expected(name).ids;
    let config = falcon::Config {
        vocab_size: 320,
        hidden_size: 80,
        num_hidden_layers: 3,
        num_attention_heads: 5,
        ..falcon::Config::falcon7b()
    };
    let opened = FlashFolder::open(folder.path(), IoOptions::default()).unwrap();
    let placement = Placement::resident(&opened, SelectorKind::Dense);
    // It knows no tied head, and wants the copy that the first 7B files had.
    let vb = FlashVarBuilder::new(&opened, placement).dense();
    let vb = vb.rename_f(|name| match name {
        "lm_head.weight" => "transformer.word_embeddings.weight".to_owned(),
        other => other.to_owned(),
    });
    let mut stock = falcon::Falcon::load(vb, config).unwrap();
    let input = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
    let theirs = stock.forward(&input.unsqueeze(0).unwrap()).unwrap();
    let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let mut model = load(folder.path(), &options(SelectorKind::Dense, None)).unwrap();
    let ours = model.forward(&ids).unwrap();
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!((ours - theirs).abs() < 1e-4, "{ours}, {theirs}");
    }
}
