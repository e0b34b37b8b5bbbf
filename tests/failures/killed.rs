//! `kill -9` in the middle of a conversion: the source is untouched, nothing looks finished, and a rerun gives the
//! bytes of an undisturbed conversion.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use safetensors::tensor::{serialize_to_file, Dtype, TensorView};

use super::{snapshot, text, wick};
use crate::support::llama_shapes;

const HIDDEN: usize = 1024;
const FFN: usize = 4096;
const LAYERS: usize = 6;
const KILLS: u32 = 6;

/// A Llama of 200 MB; what its weights are does not matter here.
fn checkpoint(folder: &Path) {
    let shapes = llama_shapes(HIDDEN, FFN, LAYERS, 320);
    // Small f16 numbers, another sequence in each tensor.
    let mut state = 7u16;
    let bytes: Vec<u8> = (0..FFN * HIDDEN + LAYERS * 1000)
        .flat_map(|_| {
            state = state.wrapping_mul(25173).wrapping_add(13849);
            (state & 0x9fff).to_le_bytes()
        })
        .collect();
    let views = shapes.iter().enumerate().map(|(index, (name, shape))| {
        let start = 2 * (index * 97 % 1000);
        let len = 2 * shape.iter().product::<usize>();
        (
            name,
            TensorView::new(Dtype::F16, shape.clone(), &bytes[start..start + len]).unwrap(),
        )
    });
    serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "vocab_size": 320,
        "num_hidden_layers": LAYERS, "num_attention_heads": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": false,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn a_rerun_completes_what_was_killed() {
    let root = tempfile::tempdir().unwrap();
    let [source, whole, out] = ["source", "whole", "out"].map(|name| root.path().join(name));
    fs::create_dir(&source).unwrap();
    checkpoint(&source);
    let before = snapshot(&source);
    let arguments = |out: &Path| {
        [
            "convert",
            text(&source),
            text(out),
            "--quiet",
            "--file-size",
            "48MiB",
        ]
        .map(str::to_owned)
    };
    let started = Instant::now();
    let words = arguments(&whole);
    wick(&words.each_ref().map(String::as_str), b"").is_success("undisturbed");
    let duration = started.elapsed();

    // Later and later moments: each run takes up what the one before left.
    let mut killed = 0;
    for kill in 1..=KILLS {
        let mut child = Command::new(env!("CARGO_BIN_EXE_wick"))
            .args(arguments(&out))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let share = f64::from(kill * 37 % 19 + 4) / 24.0;
        std::thread::sleep(Duration::from_secs_f64(
            duration.as_secs_f64() * share * 0.9,
        ));
        child.kill().unwrap();
        let finished = child.wait().unwrap().success();
        assert_eq!(finished, out.join("wick.json").exists(), "kill {kill}");
        if finished {
            break;
        }
        killed += 1;
        let run = wick(&["run", text(&out), "--ids", "1"], b"");
        run.is_refusal("a folder in the making", &[text(&out)]);
    }
    assert!(killed > 0, "never killed in the middle");
    let words = arguments(&out);
    wick(&words.each_ref().map(String::as_str), b"").is_success("rerun");
    assert!(
        snapshot(&out) == snapshot(&whole),
        "a rerun gave other bytes"
    );
    assert!(snapshot(&source) == before, "the source changed");
}
