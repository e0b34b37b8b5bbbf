//! What goes wrong is one clear error.

use std::panic::{catch_unwind, AssertUnwindSafe};

use candle::Module;
use candle_nn::{linear_no_bias, Linear};
use candle_wick::{Activation, Memory};

use super::*;
use crate::failures::replace_listed;

const HIDDEN: usize = 64;
const FFN: usize = 176;

fn options(selector: SelectorKind, memory: Option<Memory>) -> SparseOptions {
    SparseOptions {
        selector: Some(selector),
        memory,
        ..SparseOptions::default()
    }
}

fn sparse(stock: &Stock) -> FlashVarBuilder {
    FlashVarBuilder::for_stock(&stock.folder, &options(SelectorKind::Dense, None)).unwrap()
}

/// The three matrices of the first FFN.
fn matrices(vb: &FlashVarBuilder) -> [Linear; 3] {
    let vb = vb.sparse().unwrap().pp("model.layers.0.mlp");
    [
        linear_no_bias(HIDDEN, FFN, vb.pp("gate_proj")).unwrap(),
        linear_no_bias(HIDDEN, FFN, vb.pp("up_proj")).unwrap(),
        linear_no_bias(FFN, HIDDEN, vb.pp("down_proj")).unwrap(),
    ]
}

fn row() -> Tensor {
    Tensor::arange(0f32, HIDDEN as f32, &Device::Cpu)
        .and_then(|x| (x / 64.0)?.reshape((1, HIDDEN)))
        .unwrap()
}

type Case<'a> = dyn Fn() -> candle::Result<Tensor> + Sync + 'a;

/// The error of a forward that `run` stands for.
fn refused<T: Send>(
    vb: &FlashVarBuilder,
    run: impl FnOnce() -> candle::Result<T> + Send,
) -> String {
    vb.forward(run).err().expect("an error").to_string()
}

#[test]
fn an_ffn_that_is_not_one_is_an_error() {
    let stock = Stock::of("llama-2-silu");
    let vb = sparse(&stock);
    let [gate, up, down] = matrices(&vb);
    let x = row();
    let silu = |x: &Tensor| candle_nn::ops::silu(x);
    // As it should be, with up first.
    let fine = vb.forward(|| {
        let up = up.forward(&x)?;
        down.forward(&(silu(&gate.forward(&x)?)? * up)?)
    });
    let other = (&x * 2.0).unwrap();
    let cases: [(&str, &Case); 8] = [
        ("its down projection never came", &|| gate.forward(&x)),
        ("asked for twice before down", &|| {
            up.forward(&x)?;
            up.forward(&other)
        }),
        ("activation is relu, not silu", &|| {
            down.forward(&(gate.forward(&x)?.relu()? * up.forward(&x)?)?)
        }),
        ("does not multiply down with silu(gate) * up", &|| {
            down.forward(&(silu(&gate.forward(&x)?)? + up.forward(&x)?)?)
        }),
        ("have different inputs", &|| {
            down.forward(&(silu(&gate.forward(&x)?)? * up.forward(&other)?)?)
        }),
        ("they are not one FFN", &|| down.forward(&gate.forward(&x)?)),
        ("they are not one FFN", &|| {
            down.forward(&Tensor::ones((1, FFN), DType::F32, &Device::Cpu)?)
        }),
        ("they are not one FFN", &|| {
            let both = (silu(&gate.forward(&x)?)? * up.forward(&x)?)?;
            down.forward(&both.repeat((2, 1))?)
        }),
    ];
    for (expected, case) in cases {
        let error = refused(&vb, case);
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("model.layers.0.mlp"), "{error}");
    }
    let again = vb.forward(|| down.forward(&(silu(&gate.forward(&x)?)? * up.forward(&x)?)?));
    let [fine, again] = [fine, again].map(|y| y.unwrap().to_vec2::<f32>().unwrap());
    assert_eq!(fine, again);
}

#[test]
fn another_activation_than_the_folders_has_to_be_named() {
    let stock = Stock::of("falcon-7b-multi-query");
    let wrong = SparseOptions {
        activation: Some(Activation::Gelu),
        ..SparseOptions::default()
    };
    let vb = FlashVarBuilder::for_stock(&stock.folder, &wrong).unwrap();
    let (mut forward, vb) = stock.sparse(vb);
    let error = refused(&vb, || forward(&stock.ids, 0));
    assert!(
        error.contains("activation is gelu_new, not gelu"),
        "{error}"
    );
    assert!(error.contains("transformer.h.0.mlp"), "{error}");
}

/// Candle's Llama has SiLU and no biases, whatever the folder has.
#[test]
fn a_struct_that_would_compute_another_model_is_refused() {
    let relu = Stock::of("llama-relu-gqa-f16");
    let error = |vb: candle_wick::Error| vb.to_string();
    let planned = FlashVarBuilder::for_stock(&relu.folder, &SparseOptions::default());
    let placed = relu.placement(SelectorKind::Dense, None);
    let placed = FlashVarBuilder::new(&relu.folder, placed).sparse();
    for refusal in [error(planned.err().unwrap()), error(placed.err().unwrap())] {
        assert!(refusal.contains("config.json"), "{refusal}");
        assert!(
            refusal.contains("is relu, candle's struct has silu"),
            "{refusal}"
        );
    }
    let silu = SparseOptions {
        activation: Some(Activation::Silu),
        ..SparseOptions::default()
    };
    let vb = FlashVarBuilder::for_stock(&relu.folder, &silu).unwrap();
    let (mut forward, vb) = relu.sparse(vb);
    let theirs = decode(&relu.ids, relu.in_memory());
    let ours = decode(&relu.ids, |ids, at| vb.forward(|| forward(ids, at)));
    assert!(distance(&ours, &theirs) < 1e-5);
    // Qwen2's biases are nothing that a Llama asks for.
    let mut qwen = Stock::of("qwen2");
    qwen.build = build_llama;
    let (mut forward, vb) = qwen.with_slots(SelectorKind::Dense, None);
    let error = refused(&vb, || forward(&qwen.ids, 0));
    assert!(error.contains("_proj.bias was never asked for"), "{error}");
}

/// Candle's linear layers of the first attention, of one struct.
fn attention<const N: usize>(vb: &FlashVarBuilder, names: [&str; N]) -> [Linear; N] {
    let vb = vb.sparse().unwrap().pp("model.layers.0.self_attn");
    names.map(|name| linear_no_bias(HIDDEN, HIDDEN, vb.pp(name)).unwrap())
}

#[test]
fn a_weight_that_is_used_otherwise_is_an_error() {
    let stock = Stock::of("llama-2-silu");
    let vb = sparse(&stock);
    let [query, key] = attention(&vb, ["q_proj", "k_proj"]);
    // It is seen as soon as others of the struct are multiplied.
    let sum = || query.weight().sum_all();
    assert_eq!(vb.forward(|| sum()?.to_scalar::<f32>()).unwrap(), 0.0);
    let otherwise = || key.forward(&row())?.broadcast_add(&sum()?);
    let error = refused(&vb, otherwise);
    assert!(
        error.contains("q_proj.weight was not multiplied"),
        "{error}"
    );
    let error = refused(&vb, || query.weight().matmul(&row().t()?));
    assert!(error.contains("on the left side"), "{error}");
    let error = refused(&vb, || row().matmul(&query.weight().narrow(0, 0, 8)?.t()?));
    assert!(error.contains("in part"), "{error}");
    vb.forward(|| query.forward(&row())).unwrap();
    vb.forward(|| key.forward(&row())).unwrap();
    // A second struct has weights of its own, which the first one's use does not hide.
    let [query, key] = attention(&vb, ["q_proj", "k_proj"]);
    let otherwise = || {
        key.forward(&row())?
            .broadcast_add(&query.weight().sum_all()?)
    };
    let error = refused(&vb, otherwise);
    assert!(
        error.contains("q_proj.weight was not multiplied"),
        "{error}"
    );
    vb.forward(|| query.forward(&row())).unwrap();
    // What it gives after a panic is what it gave before.
    let panics = || vb.forward(|| -> candle::Result<()> { panic!("as asked") });
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    vb.forward(|| vb.forward(|| query.forward(&row()))).unwrap();
    // There is nobody to give an error to outside of a forward.
    let outside = catch_unwind(AssertUnwindSafe(|| query.forward(&row())));
    let panic = outside.err().unwrap().downcast::<String>().unwrap();
    assert!(
        panic.contains("outside of FlashVarBuilder::forward"),
        "{panic}"
    );
}

#[test]
fn what_the_budget_does_not_count_is_refused() {
    let stock = Stock::of("llama-2-silu");
    let vb = sparse(&stock);
    let names = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ];
    for name in names {
        let error = vb
            .sparse()
            .unwrap()
            .get_unchecked(name)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("neither the weight of a linear layer"),
            "{error}"
        );
    }
    let vb = vb.sparse().unwrap();
    let error = vb.get((3, 3), "model.norm.weight").unwrap_err().to_string();
    assert!(
        error.contains("[64]") && error.contains("[3, 3]"),
        "{error}"
    );
    assert!(vb
        .get(3, "nothing")
        .unwrap_err()
        .to_string()
        .contains("nothing"));
    let narrow = vb.to_dtype(DType::BF16).pp("model.layers.0.mlp.up_proj");
    let error = linear_no_bias(HIDDEN, FFN, narrow).unwrap_err().to_string();
    assert!(error.contains("BF16"), "{error}");
    let bf16 = SparseOptions {
        dtype: DType::BF16,
        ..SparseOptions::default()
    };
    assert!(FlashVarBuilder::for_stock(&stock.folder, &bf16).is_err());
}

#[test]
fn a_damaged_record_is_the_forwards_error() {
    let stock = Stock::of("llama-2-silu");
    let (mut forward, vb) = stock.with_slots(SelectorKind::Dense, Some(20));
    vb.forward(|| forward(&stock.ids, 0)).unwrap();
    let path = stock.out.path().join("ffn-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last / 2..].iter_mut().for_each(|byte| *byte ^= 0x40);
    std::fs::write(&path, bytes).unwrap();
    let error = refused(&vb, || forward(&stock.ids, 0));
    assert!(error.contains("ffn-00001-of-00001.safetensors"), "{error}");
}

#[test]
fn budgets_and_selectors_that_cannot_be_are_refused_before_anything_is_loaded() {
    let stock = Stock::of("llama-2-silu");
    let error = |options| {
        let vb = FlashVarBuilder::for_stock(&stock.folder, &options);
        vb.err().expect("refused").to_string()
    };
    let small = error(options(SelectorKind::Dense, Some("1MiB".parse().unwrap())));
    assert!(small.contains("below the floor"), "{small}");
    let little = error(options(SelectorKind::Dense, Some(Memory::Percent(1.0))));
    assert!(little.contains("below the floor"), "{little}");
    assert!(little.contains("% will do"), "{little}");
    let oracle = error(options(SelectorKind::Oracle, None));
    assert!(oracle.contains("silu is never exactly zero"), "{oracle}");
    let lowrank = error(SparseOptions {
        activation: Some(Activation::Relu),
        ..options(SelectorKind::LowRank, None)
    });
    assert!(lowrank.contains("predictors"), "{lowrank}");
}

/// As a hostile config could be: candle would run with it, divide by zero or allocate without end.
#[test]
fn a_config_of_another_model_is_refused() {
    for (key, value, expected) in [
        ("num_hidden_layers", json!(2), "the folder holds 3 layers"),
        (
            "num_hidden_layers",
            json!(10_000_000_000u64),
            "the folder holds 3 layers",
        ),
        ("num_attention_heads", json!(0), "num_attention_heads is 0"),
        (
            "max_position_embeddings",
            json!(u64::MAX),
            "below the floor",
        ),
    ] {
        let stock = Stock::of("llama-2-silu");
        let mut config: Value = serde_json::from_str(&stock.folder.config_json().unwrap()).unwrap();
        config[key] = value.clone();
        replace_listed(
            stock.out.path(),
            "config.json",
            config.to_string().as_bytes(),
        );
        let folder = FlashFolder::open(stock.out.path(), IoOptions::default()).unwrap();
        for memory in [None, Some(Memory::Percent(100.0))] {
            let made = FlashVarBuilder::for_stock(&folder, &options(SelectorKind::Dense, memory));
            let error = made.err().expect("refused").to_string();
            assert!(
                error.contains(expected) || error.contains("free"),
                "{key} {value}: {error}"
            );
        }
    }
}
