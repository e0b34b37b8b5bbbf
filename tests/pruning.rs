//! The selectors that dip is measured against keep what their names say, and as much as the density leaves them.

use candle::{Device, Module, Tensor};
use candle_wick::{
    Activation, DipOptions, FlashFolder, FlashMlp, FlashVarBuilder, IoOptions, Placement,
    SelectorKind,
};
use candle_wick_convert::Layout;
use candle_wick_models::{LoadOptions, LoadedModel};
use tempfile::TempDir;

use crate::exactness::fingerprint;
use crate::support::{converted_to, expected, fixture, largest, ConvertArgs};

const LLAMA: &str = "llama-2-silu";
const PRUNING: [SelectorKind; 4] = [
    SelectorKind::PruneGate,
    SelectorKind::PruneUp,
    SelectorKind::PruneGlu,
    SelectorKind::Cats,
];

fn by_neurons(name: &str) -> TempDir {
    converted_to(&fixture(name), &ConvertArgs::default(), Layout::Neuron)
}

fn open(folder: &TempDir) -> FlashFolder {
    FlashFolder::open(folder.path(), IoOptions::default()).unwrap()
}

fn density(density: f64) -> DipOptions {
    DipOptions {
        density,
        ..DipOptions::default()
    }
}

fn load(
    folder: &FlashFolder,
    selector: SelectorKind,
    dip: DipOptions,
    slots: Option<usize>,
) -> candle_wick_models::Result<LoadedModel> {
    let options = LoadOptions {
        selector: Some(selector),
        dip,
        slots_per_layer: slots,
        ..LoadOptions::default()
    };
    LoadedModel::load(folder.clone(), &options)
}

/// A threshold of the first tokens is one of numbers, and what is none stays to be seen.
#[test]
fn inputs_that_are_no_numbers_neither_vanish_nor_stay() {
    let out = by_neurons(LLAMA);
    let folder = open(&out);
    let clean = Tensor::randn(0f32, 1.0, (3, 64), &Device::Cpu).unwrap();
    let nan = Tensor::full(f32::NAN, (3, 64), &Device::Cpu).unwrap();
    for selector in PRUNING {
        let mut placement = Placement::resident(&folder, selector);
        placement.dip = density(0.8);
        let mlp = || {
            let vb = FlashVarBuilder::new(&folder, placement.clone()).pp("model.layers.0.mlp");
            FlashMlp::load(64, 176, Activation::Silu, vb).unwrap()
        };
        let values = |mlp: &FlashMlp, x: &Tensor| mlp.forward(x).unwrap().to_vec2::<f32>().unwrap();
        let expected = values(&mlp(), &clean);
        let poisoned = mlp();
        let seen = values(&poisoned, &nan);
        assert!(
            seen.iter().flatten().all(|value| value.is_nan()),
            "{selector}"
        );
        assert!(values(&poisoned, &clean) == expected, "{selector}");
    }
}

#[test]
fn a_density_of_one_is_dense_and_memory_never_counts() {
    let out = by_neurons(LLAMA);
    let folder = open(&out);
    let ids = expected(LLAMA).ids;
    let bits = |selector, share, slots| {
        let mut model = load(&folder, selector, density(share), slots).unwrap();
        fingerprint(&mut model, &ids)
    };
    let dense = bits(SelectorKind::Dense, 1.0, None);
    for selector in PRUNING {
        assert!(bits(selector, 1.0, Some(9)) == dense, "{selector}");
        let pruned = bits(selector, 0.8, None);
        assert!(pruned != dense, "{selector}: something is left out");
        assert!(bits(selector, 0.8, Some(9)) == pruned, "{selector}");
    }
}

/// The FFN as candle computes it, with what is left out at zero, against the layer.
#[test]
fn a_layer_computes_what_candle_does_of_what_is_kept() {
    let out = by_neurons(LLAMA);
    let folder = open(&out);
    let layer = folder.manifest().layers[0].clone();
    let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
    let share = 0.8;
    for selector in PRUNING {
        let placement = Placement {
            dip: density(share),
            ..Placement::resident(&folder, selector)
        };
        let vb = FlashVarBuilder::new(&folder, placement);
        let at = vb.pp("model.layers.0.mlp");
        let mlp = FlashMlp::load(hidden, ffn, Activation::Silu, at).unwrap();
        let dense = vb.dense().pp("model.layers.0.mlp");
        let [gate, up] = ["gate_proj", "up_proj"]
            .map(|name| candle_nn::linear_no_bias(hidden, ffn, dense.pp(name)).unwrap());
        let down = candle_nn::linear_no_bias(ffn, hidden, dense.pp("down_proj")).unwrap();
        let x = (0..3 * hidden).map(|i| ((i * 7) as f32 * 0.61).sin());
        let x = Tensor::from_iter(x, &Device::Cpu).unwrap();
        let x = x.reshape((3, hidden)).unwrap();
        let gate = gate.forward(&x).unwrap().silu().unwrap();
        let up = up.forward(&x).unwrap();
        let glu = (&gate * &up).unwrap();
        let (deciding, kept_share) = match selector {
            SelectorKind::PruneUp => (up, (3.0 * share - 1.0) / 2.0),
            SelectorKind::PruneGlu => (glu.clone(), 3.0 * share - 2.0),
            _ => (gate, (3.0 * share - 1.0) / 2.0),
        };
        let deciding = deciding.to_vec2::<f32>().unwrap();
        let mut mask = vec![0.0f32; 3 * ffn];
        if selector == SelectorKind::Cats {
            // One threshold for all three tokens: those that are not among the smallest of all.
            let all = deciding.concat();
            let below = ((1.0 - kept_share) * all.len() as f64) as usize;
            for at in largest(&all, all.len() - below) {
                mask[at] = 1.0;
            }
        } else {
            for (token, values) in deciding.iter().enumerate() {
                for at in largest(values, (kept_share * ffn as f64) as usize) {
                    mask[token * ffn + at] = 1.0;
                }
            }
        }
        let mask = Tensor::from_vec(mask, (3, ffn), &Device::Cpu).unwrap();
        let expected = down.forward(&(glu * mask).unwrap()).unwrap();
        let got = mlp.forward(&x).unwrap();
        let gap = (got - expected).unwrap().abs().unwrap();
        let gap = gap.max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(gap < 1e-5, "{selector} {gap}");
    }
}

#[test]
fn thresholds_are_those_of_the_first_tokens() {
    let out = by_neurons(LLAMA);
    let folder = open(&out);
    let ids = expected(LLAMA).ids;
    let mut model = load(&folder, SelectorKind::Cats, density(0.7), None).unwrap();
    let first = model.forward(&ids).unwrap();
    let share = model.stats().selected_fraction();
    let wanted = (3.0 * 0.7 - 1.0) / 2.0;
    assert!((share - wanted).abs() < 0.02, "{share} is not {wanted}");
    model.reset();
    model.forward(&ids[..2]).unwrap();
    model.reset();
    assert_eq!(model.forward(&ids).unwrap(), first);
}

#[test]
fn what_cannot_be_is_refused() {
    let gated = by_neurons(LLAMA);
    let ungated = by_neurons("phi-2");
    for (out, selector, share, named) in [
        (&gated, SelectorKind::PruneGlu, 0.66, "0.667 of the FFN"),
        (&gated, SelectorKind::PruneGate, 0.33, "0.333 of the FFN"),
        (&gated, SelectorKind::Cats, 1.5, "density is 1.5"),
        (&ungated, SelectorKind::PruneGlu, 0.5, "0.500 of the FFN"),
        (&ungated, SelectorKind::PruneGate, 0.9, "no gate"),
        (&ungated, SelectorKind::PruneUp, 0.9, "no gate"),
        (&ungated, SelectorKind::Cats, 0.9, "no gate"),
    ] {
        let error = load(&open(out), selector, density(share), None)
            .err()
            .unwrap();
        let error = error.to_string();
        assert!(error.contains(named) && !error.contains('\n'), "{error}");
    }
    let mut model = load(&open(&ungated), SelectorKind::PruneGlu, density(0.8), None).unwrap();
    model.forward(&expected("phi-2").ids).unwrap();
    let share = model.stats().selected_fraction();
    assert!((share - 0.6).abs() < 0.02, "{share}");
}
