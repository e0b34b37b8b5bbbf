//! Stock candle definitions from the same folder.

use candle::{DType, Device, Tensor};
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use candle_wick::{FlashFolder, FlashVarBuilder, IoOptions, Placement, SelectorKind};
use candle_wick_models::load;

use crate::support::{converted, expected, fixture, options};

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
