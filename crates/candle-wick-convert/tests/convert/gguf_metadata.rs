//! What a GGUF file says besides weights: the config and the tokenizer that come of it, and what is refused.

use std::fs;

use candle::quantized::GgmlDType;
use serde_json::{json, Value};
use wick_format::Dtype;

use crate::gguf::{config, gguf_of, place, tiny, HEADS};
use crate::gguf_file::{paired, rows_in_order, GgufFile, Value as GgufValue};
use crate::tiny::{all_tensors, run_default, snapshot, stored, Tiny};

#[test]
fn the_config_of_the_same_model() {
    let place = place(&gguf_of(&tiny()));
    run_default(&place.source, &place.out).unwrap();
    let expected = json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 176,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false,
        "bos_token_id": 1, "eos_token_id": 2,
    });
    assert_eq!(config(&place.out), expected);

    let mut tied = gguf_of(&tiny())
        .without("llama.rope.freq_base")
        .without("llama.attention.head_count_kv");
    tied.tensors.retain(|(name, ..)| {
        !name.starts_with("output.") && !name.contains("attn_k") && !name.contains("attn_v")
    });
    for (part, order) in [("k", paired(HEADS, 16)), ("v", (0..64).collect())] {
        let mut square = Tiny::llama(64, 8, Dtype::F32);
        square.add("x", Dtype::F32, &[64, 64]);
        for layer in 0..2 {
            tied.add(
                &format!("blk.{layer}.attn_{part}.weight"),
                &rows_in_order(&square.tensors["x"], &order),
            );
        }
    }
    tied.set("llama.rope.scaling.type", "linear");
    tied.set("llama.rope.scaling.factor", 4.0);
    tied.set("llama.expert_count", 0);
    let place = self::place(&tied);
    run_default(&place.source, &place.out).unwrap();
    let config = config(&place.out);
    assert_eq!(config["tie_word_embeddings"], true);
    assert_eq!(config["num_key_value_heads"], 4);
    assert_eq!(config["rope_theta"], 10000.0);
    assert_eq!(
        config["rope_scaling"],
        json!({ "rope_type": "linear", "factor": 4.0 })
    );
}

/// What is done to a file before it is converted.
type Edit = fn(&mut GgufFile);

/// llama.cpp's divisors for Llama 3.
fn llama3_divisors(theta: f64, head_dim: usize, factor: f64) -> Vec<f32> {
    let divisor = |pair: usize| {
        let wavelength = std::f64::consts::TAU * theta.powf((2 * pair) as f64 / head_dim as f64);
        let (low, high) = (8192.0, 8192.0 / 4.0);
        if wavelength < high {
            1.0
        } else if wavelength > low {
            factor
        } else {
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(|pair| divisor(pair) as f32).collect()
}

#[test]
fn rotary_frequencies_of_llama_3() {
    let with = |divisors: &[f32]| {
        let mut file = gguf_of(&tiny());
        file.set("llama.rope.freq_base", 500_000.0);
        file.add(
            "rope_freqs.weight",
            &stored(Dtype::F32, &[divisors.len()], divisors),
        );
        place(&file)
    };
    for factor in [8.0, 32.0] {
        let divisors = llama3_divisors(500_000.0, 16, factor);
        assert!(
            divisors.iter().any(|&d| d > 1.0 && f64::from(d) < factor),
            "{divisors:?}"
        );
        let place = with(&divisors);
        let report = run_default(&place.source, &place.out).unwrap();
        assert_eq!(report.ignored_tensors, Vec::<String>::new());
        let expected = json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        assert_eq!(config(&place.out)["rope_scaling"], expected);
    }
    let place = with(&[1.0; 8]);
    run_default(&place.source, &place.out).unwrap();
    assert_eq!(config(&place.out).get("rope_scaling"), None);

    let mut others = llama3_divisors(500_000.0, 16, 8.0);
    others[4] *= 1.01;
    for (divisors, part) in [
        (&others[..], "that of Llama 3"),
        (&[f32::NAN; 8], "that of Llama 3"),
        (&[1.0; 9], "[8], half a head"),
    ] {
        let text = with(divisors).refused().to_string();
        assert!(
            text.contains("rope_freqs.weight") && text.contains(part),
            "{text}"
        );
    }
}

#[test]
fn metadata_that_is_missing() {
    for (key, _) in gguf_of(&tiny()).metadata {
        let place = place(&gguf_of(&tiny()).without(&key));
        let optional = ["rope.", "head_count_kv", "tokenizer."]
            .iter()
            .any(|part| key.contains(part));
        match run_default(&place.source, &place.out) {
            Ok(_) => assert!(optional, "{key}"),
            // Without grouping, k and v have too few rows.
            Err(error) if key.contains("head_count_kv") => {
                assert!(error.to_string().contains("attn_k"), "{error}")
            }
            Err(error) => assert!(!optional && error.to_string().contains(&key), "{error}"),
        }
    }
}

#[test]
fn metadata_that_contradicts_itself_or_is_not_supported() {
    let cases: [(Edit, &[&str]); 13] = [
        (
            |file| file.set("general.architecture", "mamba"),
            &["`mamba`", "llama, falcon, phi2, persimmon, qwen2"],
        ),
        (
            |file| file.set("llama.expert_count", 8),
            &["llama.expert_count"],
        ),
        (
            |file| file.set("llama.logit_scale", 0.5),
            &["llama.logit_scale"],
        ),
        (
            |file| file.set("llama.rope.scaling.type", "yarn"),
            &["rope.scaling.type", "yarn", "linear"],
        ),
        (
            |file| file.set("llama.rope.dimension_count", 8),
            &["rope.dimension_count", "8", "16"],
        ),
        (
            |file| file.set("llama.attention.head_count_kv", 3),
            &["head_count_kv", "3", "4"],
        ),
        (
            |file| file.set("llama.attention.head_count", 0),
            &["head_count", "0"],
        ),
        (
            |file| file.set("llama.attention.head_count", "four"),
            &["head_count", "string"],
        ),
        (
            |file| file.set("llama.attention.key_length", 15),
            &["key_length", "15", "even"],
        ),
        (
            |file| file.set("llama.attention.value_length", 8),
            &["value_length", "8", "16"],
        ),
        (
            |file| file.set("llama.embedding_length", 1 << 30),
            &["embedding_length", "1073741824"],
        ),
        (
            |file| file.set("llama.embedding_length", 66),
            &["head_count", "divisor"],
        ),
        (
            |file| {
                file.tensors
                    .retain(|(name, ..)| name != "token_embd.weight")
            },
            &["token_embd.weight"],
        ),
    ];
    for (edit, parts) in cases {
        let mut file = gguf_of(&tiny());
        edit(&mut file);
        let text = place(&file).refused().to_string();
        for part in parts {
            assert!(text.contains(part), "`{part}` not in: {text}");
        }
    }
}

/// Byte-level BPE over `a`, `b` and a space, with one merge.
fn with_vocabulary(file: &mut GgufFile) {
    let tokens = ["<s>", "</s>", "a", "b", "\u{120}", "ab"];
    let mut texts: Vec<String> = tokens.map(String::from).into();
    texts.extend((texts.len()..40).map(|n| format!("unused{n}")));
    file.set("tokenizer.ggml.model", "gpt2");
    file.set("tokenizer.ggml.pre", "gpt-2");
    file.set(
        "tokenizer.ggml.token_type",
        GgufValue::Ints((0..40).map(|n| if n < 2 { 3 } else { 1 }).collect()),
    );
    file.set("tokenizer.ggml.tokens", GgufValue::Texts(texts));
    file.set(
        "tokenizer.ggml.merges",
        GgufValue::Texts(vec!["a b".into()]),
    );
    file.set("tokenizer.ggml.bos_token_id", 0);
    file.set("tokenizer.ggml.eos_token_id", 1);
    file.set("tokenizer.ggml.padding_token_id", u32::MAX as usize);
    file.set("tokenizer.ggml.add_bos_token", true);
}

#[test]
fn the_vocabulary_becomes_a_tokenizer() {
    let mut file = gguf_of(&tiny());
    with_vocabulary(&mut file);
    let whole = place(&file);
    let report = run_default(&whole.source, &whole.out).unwrap();
    assert_eq!(report.notes, Vec::<String>::new());
    let json: Value = serde_json::from_slice(&snapshot(&whole.out)["tokenizer.json"]).unwrap();
    assert_eq!(json["model"]["vocab"]["ab"], 5);
    assert_eq!(json["added_tokens"][0]["content"], "<s>");

    let broken: [(Edit, &str); 4] = [
        (|file| file.set("tokenizer.ggml.model", "bert"), "`bert`"),
        (
            |file| *file = file.clone().without("tokenizer.ggml.model"),
            "tokenizer.ggml.model",
        ),
        (
            |file| file.set("tokenizer.ggml.tokens", "abc"),
            "tokenizer.ggml.tokens",
        ),
        (|file| file.set("tokenizer.ggml.bos_token_id", 40), "40"),
    ];
    for (edit, part) in broken {
        let mut file = file.clone();
        edit(&mut file);
        let place = place(&file);
        let report = run_default(&place.source, &place.out).unwrap();
        let note = report.notes.last().unwrap();
        assert!(
            note.starts_with("no tokenizer.json: tiny.gguf") && note.contains(part),
            "{note}"
        );
        assert!(!place.out.join("tokenizer.json").exists());
        assert_eq!(all_tensors(&place.out), all_tensors(&whole.out));
    }
}

#[test]
fn flipped_bytes_of_the_head_never_panic() {
    let mut file = gguf_of(&Tiny::llama_of(32, 32, 1, Dtype::F16));
    file.quantise(GgmlDType::Q8_0);
    file.set("llama.attention.key_length", 8);
    file.set("llama.rope.scaling.factor", 2.0);
    file.add("rope_freqs.weight", &stored(Dtype::F32, &[4], &[1.0; 4]));
    let bytes = file.bytes();
    let data_bytes: usize = file.tensors.iter().map(|tensor| tensor.3.len()).sum();
    let place = place(&file);
    let path = place.source.join("tiny.gguf");
    for position in 0..bytes.len() - data_bytes {
        let mut flipped = bytes.clone();
        flipped[position] ^= 1 << (position % 8);
        fs::write(&path, &flipped).unwrap();
        // Some flips still are a model, with another number of positions for instance.
        if run_default(&place.source, &place.out).is_ok() {
            fs::remove_dir_all(&place.out).unwrap();
        }
    }
}
