//! Models of the user's own, with candle's spans, that do what `candle_transformers` does not (always) do.

use std::cell::Cell;

use candle::{DType, Device, Module, Result, Tensor};
use candle_nn::init::DEFAULT_KAIMING_NORMAL;
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::with_tracing::{linear_no_bias, Linear};
use candle_wick::stock::{self, StockHandle, StockOptions};
use candle_wick::Memory;

use super::with_layer;

const WIDTH: usize = 64;

type Model = Box<dyn Fn(&Tensor) -> Result<Tensor>>;
type Build = dyn Fn(VarBuilder) -> Result<Model>;

/// A model after two ordinary layers, so that there is something else to keep or to stream.
fn after_two(build: impl Fn(VarBuilder) -> Result<Model>) -> impl Fn(VarBuilder) -> Result<Model> {
    move |vb| {
        let first = linear_no_bias(WIDTH, WIDTH, vb.pp("first"))?;
        let second = linear_no_bias(WIDTH, WIDTH, vb.pp("second"))?;
        let own = build(vb.pp("own"))?;
        Ok(Box::new(move |x| own(&second.forward(&first.forward(x)?)?)))
    }
}

fn streamed(
    build: &impl Fn(VarBuilder) -> Result<Model>,
    percent: f64,
) -> (Vec<f32>, std::result::Result<(Model, StockHandle), String>) {
    let folder = tempfile::tempdir().unwrap();
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let expected = build(vb).unwrap()(&input()).unwrap();
    let path = folder.path().join("model.safetensors");
    varmap.save(&path).unwrap();
    let options = StockOptions {
        memory: Some(Memory::Percent(percent)),
        ..Default::default()
    };
    let loaded = with_layer(|| stock::load(&path, &options, build));
    let loaded = loaded.map_err(|error| error.to_string());
    (expected.flatten_all().unwrap().to_vec1().unwrap(), loaded)
}

fn input() -> Tensor {
    Tensor::arange(0f32, WIDTH as f32, &Device::Cpu)
        .and_then(|x| x.reshape((1, WIDTH)))
        .unwrap()
}

fn weight(vb: &VarBuilder, name: &str) -> Result<Tensor> {
    vb.get_with_hints((WIDTH, WIDTH), name, DEFAULT_KAIMING_NORMAL)
}

/// Zeros in their place would be transformed to zeros and stay that.
#[test]
fn weights_that_are_transformed_while_the_model_is_built_are_refused() {
    let transforms: [fn(Tensor) -> Result<Tensor>; 4] = [
        |w| w.t()?.contiguous(),
        |w| w.to_dtype(DType::F16)?.to_dtype(DType::F32),
        |w| Tensor::cat(&[&w, &w], 0),
        |w| w * 2.0,
    ];
    for transform in transforms {
        let build = after_two(|vb| {
            let own = Linear::from_weights(transform(weight(&vb, "weight")?)?, None);
            Ok(Box::new(move |x| own.forward(x)))
        });
        let (_, loaded) = streamed(&build, 60.0);
        let error = loaded.err().expect("refused");
        assert!(error.contains("while it is built"), "{error}");
    }
}

#[test]
fn views_of_a_weight_see_its_values() {
    let build = after_two(|vb| {
        let w = weight(&vb, "weight")?;
        let own = Linear::from_weights(w.narrow(0, 8, 16)?, None);
        Ok(Box::new(move |x| own.forward(x)))
    });
    let (expected, loaded) = streamed(&build, 34.0);
    let (model, handle) = loaded.unwrap();
    assert_eq!(handle.plan().resident_fraction, 0.0);
    let got = handle.forward(|| model(&input())).unwrap();
    assert_eq!(
        got.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
        expected
    );
}

/// `plain` has no span, and the next span is not its own: nobody can tell until it is used.
#[test]
fn a_span_of_another_layer_does_not_hide_that_a_matrix_has_none() {
    let build = after_two(|vb| {
        let plain = candle_nn::linear_no_bias(WIDTH, WIDTH, vb.pp("plain"))?;
        let table = vb.get((WIDTH, WIDTH), "table")?;
        let other = Linear::from_weights(table, None);
        Ok(Box::new(move |x| other.forward(&plain.forward(x)?)))
    });
    let (_, loaded) = streamed(&build, 55.0);
    let (model, handle) = loaded.unwrap();
    let error = handle.forward(|| model(&input())).unwrap_err().to_string();
    assert!(error.contains("outside its span"), "{error}");
}

#[test]
fn one_tensor_for_two_layers_and_one_in_two_dtypes() {
    let twice = after_two(|vb| {
        let (a, b) = (vb.pp("shared"), vb.pp("shared"));
        let own = (
            linear_no_bias(WIDTH, WIDTH, a)?,
            linear_no_bias(WIDTH, WIDTH, b)?,
        );
        Ok(Box::new(move |x| own.1.forward(&own.0.forward(x)?)))
    });
    let two_dtypes = after_two(|vb| {
        let own = linear_no_bias(WIDTH, WIDTH, vb.pp("shared"))?;
        let narrow = linear_no_bias(WIDTH, WIDTH, vb.pp("shared").to_dtype(DType::F16))?;
        Ok(Box::new(move |x| {
            let x = own.forward(x)?.to_dtype(DType::F16)?;
            narrow.forward(&x)?.to_dtype(DType::F32)
        }))
    });
    let builds: [&Build; 2] = [&twice, &two_dtypes];
    for (build, percent) in builds.into_iter().zip([34.0, 80.0]) {
        // A variable has one dtype, so the model in memory is made of tensors.
        let folder = tempfile::tempdir().unwrap();
        let names = ["first.weight", "second.weight", "own.shared.weight"];
        let tensors = names.map(|name| {
            let values = Tensor::randn(0f32, 0.1, (WIDTH, WIDTH), &Device::Cpu);
            (name.to_owned(), values.unwrap())
        });
        let tensors = std::collections::HashMap::from(tensors);
        let path = folder.path().join("model.safetensors");
        candle::safetensors::save(&tensors, &path).unwrap();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let expected = build(vb).unwrap()(&input()).unwrap();
        let options = StockOptions {
            memory: Some(Memory::Percent(percent)),
            ..Default::default()
        };
        let (model, handle) = with_layer(|| stock::load(&path, &options, build)).unwrap();
        assert!(handle.plan().resident_fraction < 1.0);
        for _ in 0..3 {
            let got = handle.forward(|| model(&input())).unwrap();
            let [got, expected] = [&got, &expected].map(|t| t.to_vec2::<f32>().unwrap());
            assert_eq!(got, expected);
        }
    }
}

#[test]
fn a_constructor_that_asks_for_something_else_the_second_time_is_refused() {
    for is_more_later in [true, false] {
        let calls = Cell::new(0);
        let build = after_two(|vb| {
            calls.set(calls.get() + 1);
            // The first call fills the file.
            let own = linear_no_bias(WIDTH, WIDTH, vb.pp("own"))?;
            if calls.get() == 1 || (calls.get() == 3) == is_more_later {
                linear_no_bias(WIDTH, WIDTH, vb.pp("sometimes"))?;
            }
            Ok(Box::new(move |x| own.forward(x)))
        });
        let (_, loaded) = streamed(&build, 60.0);
        let error = loaded.err().expect("refused");
        assert!(error.contains("sometimes.weight"), "{error}");
    }
}
