//! One layer beside candle's products of what is kept.

use candle_nn::{linear_no_bias, Linear};

use super::*;

/// Magnitudes of `values`, the `count` largest kept and the others zero.
fn kept(values: &[f32], count: usize) -> Vec<f32> {
    let mut kept = vec![0.0; values.len()];
    for number in largest(values, count) {
        kept[number] = values[number];
    }
    kept
}

/// The first FFN as candle computes it.
struct InMemory {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl InMemory {
    fn load(vb: &FlashVarBuilder, hidden: usize, ffn: usize) -> Self {
        let vb = vb.dense().pp("model.layers.0.mlp");
        let linear = |from, to, name: &str| linear_no_bias(from, to, vb.pp(name)).unwrap();
        Self {
            gate: linear(hidden, ffn, "gate_proj"),
            up: linear(hidden, ffn, "up_proj"),
            down: linear(ffn, hidden, "down_proj"),
        }
    }

    fn glu(&self, x: Vec<f32>) -> Vec<f32> {
        let x = row(x);
        let silu = self.gate.forward(&x).unwrap().silu().unwrap();
        let glu = (silu * self.up.forward(&x).unwrap()).unwrap();
        glu.flatten_all().unwrap().to_vec1().unwrap()
    }
}

fn row(values: Vec<f32>) -> Tensor {
    let width = values.len();
    Tensor::from_vec(values, (1, width), &Device::Cpu).unwrap()
}

/// An input of no pattern.
fn input(hidden: usize, seed: usize) -> Vec<f32> {
    let values = (0..hidden).map(|i| ((i * 7 + seed * 13) as f32 * 0.61).sin());
    values.collect()
}

/// The published shares of a half.
fn counts(hidden: usize, ffn: usize) -> [usize; 2] {
    [
        (0.574_385 * hidden as f64) as usize,
        (0.351_230 * ffn as f64) as usize,
    ]
}

/// The FFN as candle computes it, of what is kept, against the layer.
#[test]
fn a_layer_computes_what_candle_does_of_what_is_kept() {
    let out = by_columns(LLAMA);
    let folder = open(&out);
    let layer = folder.manifest().layers[0].clone();
    let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
    let placement = Placement {
        dip: dip(0.5, 0.2),
        slots_per_layer: vec![20; 3],
        channel_slots_per_layer: vec![20; 3],
        ..Placement::resident(&folder, SelectorKind::Dip)
    };
    let vb = FlashVarBuilder::new(&folder, placement);
    let at = vb.pp("model.layers.0.mlp");
    let mlp = FlashMlp::load(hidden, ffn, Activation::Silu, at).unwrap();
    let in_memory = InMemory::load(&vb, hidden, ffn);
    let [inputs, neurons] = counts(hidden, ffn);
    for seed in 0..5 {
        let x = input(hidden, seed);
        let glu = in_memory.glu(kept(&x, inputs));
        let expected = in_memory.down.forward(&row(kept(&glu, neurons))).unwrap();
        let got = mlp.forward(&row(x)).unwrap();
        assert!(difference(&got, &expected) < 1e-5);
    }
}

/// Each of the two choices prefers what its own cache holds, and a new sequence begins with neither.
#[test]
fn a_second_token_prefers_what_the_first_has_read() {
    const GAMMA: f32 = 0.3;
    let out = by_columns(LLAMA);
    let folder = open(&out);
    let layer = folder.manifest().layers[0].clone();
    let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
    let placement = Placement {
        dip: dip(0.5, GAMMA.into()),
        ..Placement::resident(&folder, SelectorKind::DipCa)
    };
    let vb = FlashVarBuilder::new(&folder, placement);
    let at = vb.pp("model.layers.0.mlp");
    let mlp = FlashMlp::load(hidden, ffn, Activation::Silu, at).unwrap();
    let in_memory = InMemory::load(&vb, hidden, ffn);
    let [inputs, neurons] = counts(hidden, ffn);
    // There is room for all, so that what was read stays.
    let choose = |values: &[f32], count: usize, resident: &[usize]| {
        let weighed = values.iter().enumerate();
        let weighed = weighed.map(|(number, value)| match resident.contains(&number) {
            true => *value,
            false => GAMMA * value,
        });
        largest(&weighed.collect::<Vec<f32>>(), count)
    };
    let only = |values: &[f32], numbers: &[usize]| {
        let mut kept = vec![0.0; values.len()];
        numbers
            .iter()
            .for_each(|number| kept[*number] = values[*number]);
        kept
    };
    let step = |x: &[f32], [channels, downs]: [&[usize]; 2]| {
        let channels = choose(x, inputs, channels);
        let glu = in_memory.glu(only(x, &channels));
        let downs = choose(&glu, neurons, downs);
        let y = in_memory.down.forward(&row(only(&glu, &downs))).unwrap();
        (y, channels, downs)
    };
    let (first, second) = (input(hidden, 1), input(hidden, 2));
    let (_, channels, downs) = step(&first, [&[], &[]]);
    let (cold, ..) = step(&second, [&[], &[]]);
    let (warm, ..) = step(&second, [&channels, &downs]);
    assert!(difference(&cold, &warm) > 1e-3, "nothing is preferred");
    mlp.clear_neuron_cache();
    vb.begin_sequence();
    mlp.forward(&row(first)).unwrap();
    let got = mlp.forward(&row(second.clone())).unwrap();
    assert!(difference(&got, &warm) < 1e-5);
    vb.begin_sequence();
    let got = mlp.forward(&row(second)).unwrap();
    assert!(difference(&got, &cold) < 1e-5);
}
