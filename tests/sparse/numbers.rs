//! What stock structs compute with their FFNs on flash, beside the same structs in memory and our own definitions.

use std::path::Path;

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
            let theirs = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
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
    let narrow = vb.sparse().unwrap().to_dtype(DType::F16);
    let mut forward = (stock.build)(&stock.config, narrow).unwrap();
    let ours = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
    let theirs = decode(&stock.ids, stock.in_memory());
    let distance = distance(&ours[..1], &theirs[..1]);
    assert!(distance > 0.0 && distance < 0.05, "{distance}");
}
