//! Files that are odd, and files that are damaged.

use std::path::Path;

use candle::{DType, Device, Module, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::with_tracing::{linear_no_bias, Linear};
use candle_wick::{stock, Memory};
use candle_wick_convert::{convert, ConvertOptions};
use serde_json::{json, Value};

use super::{build_llama, checkpoint, decode, in_memory, options, with_layer};

/// A safetensors file as another tool might write it: any header text, then the data.
fn write(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    std::fs::write(path, bytes).unwrap();
}

fn read(path: &Path) -> (Value, Vec<u8>) {
    let bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
    let json = serde_json::from_slice(&bytes[8..header]).unwrap();
    (json, bytes[header..].to_vec())
}

#[test]
fn values_at_odd_addresses_and_tensors_of_other_kinds_between_them() {
    let (folder, odd) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let build = build_llama();
    checkpoint(folder.path(), &build);
    let expected = decode(in_memory(folder.path(), &build));
    let (header, data) = read(&folder.path().join("model.safetensors"));
    let mut header = header;
    let tensors = header.as_object_mut().unwrap();
    for tensor in tensors.values_mut() {
        for offset in tensor["data_offsets"].as_array_mut().into_iter().flatten() {
            *offset = (offset.as_u64().unwrap() + 11).into();
        }
    }
    let extra = [("U8", 0, 3), ("I64", 3, 11), ("F8_E4M3", 11, 11)];
    for (dtype, start, end) in extra {
        let size = if dtype == "I64" { 8 } else { 1 };
        let shape = [(end - start) / size];
        let tensor = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        tensors.insert(format!("extra.{dtype}"), tensor);
    }
    for padding in 0..4 {
        let text = header.to_string() + &" ".repeat(padding);
        let data = [&[9; 11], data.as_slice()].concat();
        write(&odd.path().join("model.safetensors"), &text, &data);
        with_layer(|| {
            let (mut forward, handle) = stock::load(odd.path(), &options(50.0), &build).unwrap();
            let got = decode(|ids, at| handle.forward(|| forward(ids, at)));
            assert!(got == expected, "padding {padding}");
        });
    }
}

#[test]
fn a_row_longer_than_any_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    const LONG: usize = (6 << 20) + 1;
    let values = |rows: usize, columns: usize| {
        let value = |index: usize| half::f16::from_f32((index % 7) as f32 * 0.01 - 0.03);
        let values: Vec<half::f16> = (0..LONG).map(value).collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
    };
    let tensors = [
        ("up.weight".to_owned(), values(LONG, 1)),
        ("down.weight".to_owned(), values(1, LONG)),
        ("scale".to_owned(), values(1, LONG).flatten_all().unwrap()),
    ];
    let tensors = std::collections::HashMap::from(tensors);
    candle::safetensors::save(&tensors, &path).unwrap();
    let build = |vb: VarBuilder| -> candle::Result<(Linear, Linear, Tensor)> {
        let up = linear_no_bias(1, LONG, vb.pp("up"))?;
        Ok((
            up,
            linear_no_bias(LONG, 1, vb.pp("down"))?,
            vb.get(LONG, "scale")?,
        ))
    };
    let options = stock::StockOptions {
        memory: Some(Memory::Percent(70.0)),
        dtype: DType::F16,
        ..Default::default()
    };
    let (model, handle) = with_layer(|| stock::load(&path, &options, build)).unwrap();
    assert!(handle.plan().resident_fraction < 0.6);
    let run = |(up, down, scale): &(Linear, Linear, Tensor)| {
        let x = Tensor::ones((1, 1), DType::F16, &Device::Cpu)?;
        let sum = down.forward(&up.forward(&x)?.broadcast_mul(scale)?)?;
        sum.to_dtype(DType::F32)?.to_vec2::<f32>()
    };
    let vb = VarBuilder::from_tensors(tensors, DType::F16, &Device::Cpu);
    assert_eq!(
        handle.forward(|| run(&model)).unwrap(),
        run(&build(vb).unwrap()).unwrap()
    );
}

#[test]
fn a_checkpoint_that_does_not_fit_the_model_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let build = build_llama();
    checkpoint(folder.path(), &build);
    let path = folder.path().join("model.safetensors");
    let (header, data) = read(&path);
    let name = "model.layers.1.mlp.up_proj.weight";
    let refused = |change: &dyn Fn(&mut Value), words: &[&str]| {
        let mut header = header.clone();
        change(&mut header[name]);
        header
            .as_object_mut()
            .unwrap()
            .retain(|_, tensor| !tensor.is_null());
        write(&path, &header.to_string(), &data);
        let loaded = with_layer(|| stock::load(&path, &options(60.0), &build));
        let error = loaded.err().expect("refused").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    refused(
        &|tensor| tensor["shape"] = json!([48, 80]),
        &[name, "[48, 80]"],
    );
    refused(&|tensor| tensor["shape"] = json!([3840]), &[name]);
    refused(&|tensor| tensor["dtype"] = "I32".into(), &[name, "I32"]);
    refused(&|tensor| tensor["dtype"] = "F8_E4M3".into(), &[name]);
    refused(&|tensor| *tensor = Value::Null, &[]);
    refused(
        &|tensor| tensor["data_offsets"] = json!([0, u64::MAX]),
        &[name],
    );
}

#[test]
fn an_index_that_names_what_it_should_not() {
    let folder = tempfile::tempdir().unwrap();
    let build = build_llama();
    for (file, word) in [
        ("../model.safetensors", "../model"),
        ("/etc/passwd", "/etc/passwd"),
        ("", "\"\""),
        ("..", ".."),
        ("gone.safetensors", "gone.safetensors"),
    ] {
        let index = json!({"weight_map": {"lm_head.weight": file}}).to_string();
        std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        let error = stock::load(folder.path(), &options(60.0), &build);
        let error = error.err().expect("refused").to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn a_damaged_record_of_a_converted_folder_is_an_error() {
    let (source, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let build = build_llama();
    checkpoint(source.path(), &build);
    let config = json!({
        "model_type": "llama", "vocab_size": super::VOCAB, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false,
    });
    std::fs::write(source.path().join("config.json"), config.to_string()).unwrap();
    let options = ConvertOptions::default();
    convert(source.path(), folder.path(), &options, &|_| {}).unwrap();
    let expected = decode(in_memory(source.path(), &build));
    let mut found = 0;
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        let whole = std::fs::read(&path).unwrap();
        if path.extension().is_none_or(|end| end != "safetensors") {
            continue;
        }
        let mut damaged = whole.clone();
        let at = whole.len() - 3;
        damaged[at] ^= 0x10;
        std::fs::write(&path, &damaged).unwrap();
        with_layer(|| {
            let loaded = stock::load(folder.path(), &super::options(40.0), &build);
            let error = match loaded {
                Err(error) => error.to_string(),
                Ok((mut forward, handle)) => {
                    let ids = Tensor::new(&[[1u32, 2]], &Device::Cpu).unwrap();
                    handle.forward(|| forward(&ids, 0)).unwrap_err().to_string()
                }
            };
            assert!(
                error.contains("checksum") || error.contains("crc32c"),
                "{error}"
            );
        });
        std::fs::write(&path, &whole).unwrap();
        found += 1;
    }
    assert!(found > 0);
    with_layer(|| {
        let (mut forward, handle) =
            stock::load(folder.path(), &super::options(40.0), &build).unwrap();
        assert!(decode(|ids, at| handle.forward(|| forward(ids, at))) == expected);
    });
}
