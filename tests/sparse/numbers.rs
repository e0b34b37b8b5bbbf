//! What stock structs compute with their FFNs on flash, beside the same structs in memory and our own definitions.

use std::path::Path;

use candle::Module;
use candle_wick::{FlashMlp, Memory};
use candle_wick_convert::predictor::{fit, FitOptions};
use candle_wick_models::{LoadOptions, LoadedModel};

use super::*;

#[test]
fn dense_gives_the_logits_of_the_struct_in_memory() {
    for name in STOCK {
        let stock = Stock::of(name);
        let theirs = decode(&stock.ids, stock.in_memory());
        for slots in [None, Some(30)] {
            let (mut forward, vb) = stock.with_slots(SelectorKind::Dense, slots);
            let ours = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
            let distance = distance(&ours, &theirs);
            assert!(distance < 1e-5, "{name} {slots:?}: {distance}");
            let (tokens, layers) = (stock.ids.len() + 7, vb.ffn_stats());
            assert!(
                layers.iter().all(|layer| layer.tokens == tokens as u64),
                "{name}"
            );
        }
    }
}

/// Layers by neurons and by columns; the folder of one fixture is of f16.
#[test]
fn every_number_of_slots_and_layout_gives_the_same_bits() {
    for name in ["llama-2-silu", "qwen2", "phi-2"] {
        for layout in [Layout::Neuron, Layout::Channel] {
            let stock = Stock::stored(name, layout);
            let mut reference = None;
            for slots in [Some(2), Some(25), None] {
                let (mut forward, vb) = stock.with_slots(SelectorKind::Dense, slots);
                let got = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
                let expected = reference.get_or_insert_with(|| got.clone());
                assert!(got == *expected, "{name} {layout:?} {slots:?}");
            }
        }
    }
}

#[test]
fn a_relufied_struct_computes_the_same_with_the_active_neurons_alone() {
    let stock = Stock::of("phi-relu");
    let theirs = decode(&stock.ids, stock.in_memory());
    let run = |selector| {
        let (mut forward, vb) = stock.with_slots(selector, Some(20));
        let logits = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
        let selected: u64 = vb.ffn_stats().iter().map(|layer| layer.selected).sum();
        (logits, selected)
    };
    let (dense, all) = run(SelectorKind::Dense);
    let (oracle, active) = run(SelectorKind::Oracle);
    assert!(oracle == dense);
    assert!(active < all * 3 / 4, "{active} of {all}");
    assert!(distance(&oracle, &theirs) < 1e-5);
}

/// Low-rank predictors for a model of 96 ids, which stand for as many words.
fn fit_predictors(folder: &Path) {
    let words: serde_json::Map<String, Value> =
        (0..96).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let text: Vec<String> = (0..3000u64)
        .map(|at| format!("w{}", at * at * 31 % 96))
        .collect();
    let path = folder.join("words.txt");
    std::fs::write(&path, text.join(" ")).unwrap();
    let options = FitOptions {
        rank: 16,
        ..FitOptions::default()
    };
    fit(folder, &path, &options, &|_| {}).unwrap();
}

#[test]
fn low_rank_predictors_choose_as_in_our_own_definition() {
    let mut stock = Stock::of("phi-relu");
    fit_predictors(stock.out.path());
    stock.folder = FlashFolder::open(stock.out.path(), IoOptions::default()).unwrap();
    let options = LoadOptions::default();
    let mut model = LoadedModel::load(stock.folder.clone(), &options).unwrap();
    let ours = decode(&stock.ids, |ids, _| {
        model.forward(ids).map_err(candle::Error::wrap)
    });
    // The selector that both take of themselves.
    assert_eq!(model.plan().selector, SelectorKind::LowRank);
    let vb = FlashVarBuilder::for_stock(&stock.folder, &SparseOptions::default()).unwrap();
    for vb in [
        vb,
        FlashVarBuilder::new(
            &stock.folder,
            stock.placement(SelectorKind::LowRank, Some(20)),
        ),
    ] {
        let (mut forward, vb) = stock.sparse(vb);
        let theirs = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
        assert!(distance(&ours, &theirs) < 1e-5);
        let selected: u64 = vb.ffn_stats().iter().map(|layer| layer.selected).sum();
        let neurons: u64 = vb.ffn_stats().iter().map(|layer| layer.neurons).sum();
        assert_eq!(selected, model.stats().selected);
        assert!(selected < neurons, "{selected} of {neurons}");
    }
}

/// What our own definition of the model gives, as `decode` asks for it.
fn own(stock: &Stock, options: &LoadOptions) -> Vec<Vec<f32>> {
    let mut model = LoadedModel::load(stock.folder.clone(), options).unwrap();
    decode(&stock.ids, |ids, _| {
        model.forward(ids).map_err(candle::Error::wrap)
    })
}

/// `dip` leaves a good part out, so that what differs by rounding stays so only while both choose alike.
#[test]
fn dip_chooses_as_in_our_own_definitions() {
    for name in ["llama-2-silu", "phi-2", "qwen2"] {
        let stock = Stock::of(name);
        for (selector, dense_prompt) in [
            (SelectorKind::Dip, false),
            (SelectorKind::Dip, true),
            (SelectorKind::PruneGlu, false),
        ] {
            let dip = DipOptions {
                density: 0.7,
                dense_prompt,
                ..DipOptions::default()
            };
            let placement = Placement {
                dip,
                ..stock.placement(selector, Some(25))
            };
            let (mut forward, vb) = stock.sparse(FlashVarBuilder::new(&stock.folder, placement));
            let theirs = decode(&stock.ids, |ids, at| {
                vb.set_prompt(ids.len() > 1);
                vb.forward(|| forward(ids, at))
            });
            let load = LoadOptions {
                selector: Some(selector),
                dip,
                ..LoadOptions::default()
            };
            let distance = distance(&own(&stock, &load), &theirs);
            assert!(
                distance < 1e-4,
                "{name} {selector} {dense_prompt}: {distance}"
            );
        }
    }
}

#[test]
fn dip_ca_reads_less_and_begins_anew_with_a_sequence() {
    let stock = Stock::of("llama-2-silu");
    let run = |selector| {
        let placement = Placement {
            dip: DipOptions {
                density: 0.4,
                ..DipOptions::default()
            },
            ..stock.placement(selector, Some(40))
        };
        let (mut forward, vb) = stock.sparse(FlashVarBuilder::new(&stock.folder, placement));
        let mut all = || {
            vb.begin_sequence();
            decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)))
        };
        let (first, second) = (all(), all());
        assert!(first == second, "{selector}");
        vb.ffn_stats().iter().map(|layer| layer.hits).sum::<u64>()
    };
    assert!(run(SelectorKind::DipCa) > run(SelectorKind::Dip));
}

#[test]
fn in_f16_the_struct_has_the_numbers_of_f16() {
    let stock = Stock::of("llama-2-silu");
    let sparse = SparseOptions {
        dtype: DType::F16,
        ..SparseOptions::default()
    };
    let vb = FlashVarBuilder::for_stock(&stock.folder, &sparse).unwrap();
    let (mut forward, vb) = stock.sparse(vb);
    let ours = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
    let narrow = stock.dense().to_dtype(DType::F16);
    let theirs = decode(&stock.ids, (stock.build)(&stock.config, narrow).unwrap());
    let wide = decode(&stock.ids, stock.in_memory());
    // Sums are f32 here, f16 there; both are off by f16's roundings.
    let (apart, off) = (distance(&ours, &theirs), distance(&wide, &theirs));
    assert!(apart < 2.0 * off && off < 0.05, "{apart}, {off}");
    let wrong = vb.sparse().unwrap().to_dtype(DType::F32);
    let error = (stock.build)(&stock.config, wrong)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("planned was F16"), "{error}");
}

/// More tokens than a step of the FFN takes, and two texts at once.
#[test]
fn long_prompts_and_batches_are_what_they_are_in_memory() {
    let stock = Stock::of("llama-2-silu");
    let ids: Vec<u32> = stock.ids.iter().cycle().take(2 * 100).copied().collect();
    let config = parsed::<llama::LlamaConfig>(&stock.config).into_config(false);
    let run = |vb: VarBuilder<'static>,
               forward: &dyn Fn(&mut Pass<'_>) -> candle::Result<Tensor>| {
        let model = llama::Llama::load(vb, &config).unwrap();
        let mut all = Vec::new();
        for shape in [(1, 200), (2, 100)] {
            let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
            let input =
                Tensor::new(ids.as_slice(), &Device::Cpu).and_then(|ids| ids.reshape(shape));
            let input = input.unwrap();
            let mut pass = || model.forward(&input, 0, &mut cache);
            all.push(values(forward(&mut pass).unwrap()).unwrap());
        }
        all
    };
    let theirs = run(stock.dense(), &|pass| pass());
    for slots in [None, Some(30)] {
        let vb = FlashVarBuilder::new(&stock.folder, stock.placement(SelectorKind::Dense, slots));
        // From wherever in the tree.
        let ours = run(vb.pp("model").sparse().unwrap(), &|pass| vb.forward(pass));
        let distance = distance(&ours, &theirs);
        assert!(distance < 1e-5, "{slots:?}: {distance}");
    }
}

type Pass<'a> = dyn FnMut() -> candle::Result<Tensor> + Send + 'a;

#[test]
fn an_ffn_is_flash_mlps_to_the_bit() {
    let stock = Stock::of("llama-2-silu");
    let prefix = "model.layers.1.mlp";
    let x = Tensor::randn(0f32, 1.0, (5, 64), &Device::Cpu).unwrap();
    for selector in [SelectorKind::Dense, SelectorKind::Dip, SelectorKind::Cats] {
        let vb = FlashVarBuilder::new(&stock.folder, stock.placement(selector, Some(40)));
        let mlp = FlashMlp::load(64, 176, "silu".parse().unwrap(), vb.pp(prefix)).unwrap();
        let expected = mlp.forward(&x).unwrap().to_vec2::<f32>().unwrap();
        let stand_ins = vb.sparse().unwrap().pp(prefix);
        let [gate, up] = ["gate_proj", "up_proj"]
            .map(|name| candle_nn::linear_no_bias(64, 176, stand_ins.pp(name)).unwrap());
        let down = candle_nn::linear_no_bias(176, 64, stand_ins.pp("down_proj")).unwrap();
        let got = vb.forward(|| down.forward(&(gate.forward(&x)?.silu()? * up.forward(&x)?)?));
        assert!(
            got.unwrap().to_vec2::<f32>().unwrap() == expected,
            "{selector}"
        );
    }
}

#[test]
fn a_plan_counts_what_candle_holds() {
    let stock = Stock::of("falcon-7b-multi-query");
    let limit = 1u64 << 30;
    for memory in [Memory::Bytes(limit), Memory::Percent(100.0)] {
        let options = SparseOptions {
            memory: Some(memory),
            reserve_bytes: 100 << 20,
            ..SparseOptions::default()
        };
        let vb = FlashVarBuilder::for_stock(&stock.folder, &options).unwrap();
        let plan = vb.stock_plan().unwrap();
        let mut lines = plan.lines.iter();
        let candle = lines
            .find(|line| line.label.starts_with("candle"))
            .unwrap()
            .bytes;
        // The embedding in f32, and tables of rotary embeddings for 5000 positions in each of 3 layers.
        let embedding = 320 * 80 * 4;
        let rope = (2 * 3 + 3) * 5000 * 16 * 4;
        assert_eq!(candle, options.reserve_bytes + embedding + rope);
        assert!(plan.total_bytes <= limit);
        let (mut forward, vb) = stock.sparse(vb);
        let got = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
        assert!(distance(&got, &decode(&stock.ids, stock.in_memory())) < 1e-5);
    }
}
