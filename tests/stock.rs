//! Stock candle definitions from the same folder.

use std::path::Path;

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use candle_transformers::models::phi;
use candle_wick::{FlashFolder, FlashVarBuilder, IoOptions, Placement, SelectorKind};
use candle_wick_models::load;
use serde::de::DeserializeOwned;

use crate::support::{converted, expected, fixture, options};

/// The config and candle's builder of a converted folder.
fn stock<C: DeserializeOwned>(folder: &Path) -> (C, VarBuilder<'static>) {
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let opened = FlashFolder::open(folder, IoOptions::default()).unwrap();
    let placement = Placement::resident(&opened, SelectorKind::Dense);
    let vb = FlashVarBuilder::new(&opened, placement).dense();
    (serde_json::from_str(&config).unwrap(), vb)
}

fn input(ids: &[u32]) -> Tensor {
    Tensor::new(ids, &Device::Cpu)
        .unwrap()
        .unsqueeze(0)
        .unwrap()
}

/// Our logits after the last id are `theirs`.
fn agrees(name: &str, folder: &Path, ids: &[u32], theirs: &Tensor) {
    let mut model = load(folder, &options(SelectorKind::Dense, None)).unwrap();
    let ours = model.forward(ids).unwrap();
    let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!((ours - theirs).abs() < 1e-4, "{name}: {ours}, {theirs}");
    }
}

#[test]
fn stock_llama_loads_from_the_converted_folder_and_agrees() {
    for name in ["llama-2-silu", "llama-3-rope-scaled-tied"] {
        let folder = converted(&fixture(name));
        let ids = expected(name).ids;
        let (config, vb) = stock::<LlamaConfig>(folder.path());
        let config = config.into_config(false);
        let llama = Llama::load(vb, &config).unwrap();
        let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
        let theirs = llama.forward(&input(&ids), 0, &mut cache).unwrap();
        agrees(name, folder.path(), &ids, &theirs);
    }
}

#[test]
fn stock_phi_loads_from_the_converted_folder_and_agrees() {
    let name = "phi-2";
    let folder = converted(&fixture(name));
    let ids = expected(name).ids;
    let (config, vb) = stock::<phi::Config>(folder.path());
    let theirs = phi::Model::new(&config, vb)
        .unwrap()
        .forward(&input(&ids))
        .unwrap();
    agrees(name, folder.path(), &ids, &theirs);
}
