//! `kill -9` in the middle of a conversion: the source is untouched, nothing looks finished, and a rerun gives the
//! bytes of an undisturbed conversion.
//!
//! The moments are random, from a seed that is printed; `WICK_KILL_SEED` sets it.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use safetensors::tensor::{serialize_to_file, Dtype, TensorView};

use super::{snapshot, text, wick};
use crate::support::llama_shapes;

const HIDDEN: usize = 1024;
const FFN: usize = 4096;
const LAYERS: usize = 6;
/// Folders that are killed in the middle.
const KILLS: usize = 10;
/// Conversions that may be through before the blow falls.
const MISSES_MAX: usize = 50;

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

/// Random shares of a duration.
struct Moments(u64);

impl Moments {
    fn new() -> Self {
        let seed = match std::env::var("WICK_KILL_SEED") {
            Ok(seed) => seed.parse().unwrap(),
            Err(_) => SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs(),
        };
        println!("WICK_KILL_SEED={seed}");
        Self(seed)
    }

    fn next(&mut self) -> f64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn arguments<'a>(source: &'a Path, out: &'a Path) -> [&'a str; 6] {
    let [source, out] = [source, out].map(text);
    ["convert", source, out, "--quiet", "--file-size", "48MiB"]
}

/// Starts a conversion and kills it after `moment`; whether it was killed before its end.
fn kill_at(source: &Path, out: &Path, moment: Duration) -> bool {
    let mut child = Command::new(env!("CARGO_BIN_EXE_wick"))
        .args(arguments(source, out))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(moment);
    child.kill().unwrap();
    let finished = child.wait().unwrap().success();
    assert_eq!(finished, out.join("wick.json").exists(), "at {moment:?}");
    if !finished {
        let run = wick(&["run", text(out), "--ids", "1"], b"");
        run.is_refusal("a folder in the making", &[text(out)]);
    }
    !finished
}

#[test]
fn a_rerun_completes_what_was_killed() {
    let root = tempfile::tempdir().unwrap();
    let [source, whole, out] = ["source", "whole", "out"].map(|name| root.path().join(name));
    fs::create_dir(&source).unwrap();
    checkpoint(&source);
    let before = snapshot(&source);
    let started = Instant::now();
    wick(&arguments(&source, &whole), b"").is_success("undisturbed");
    let duration = started.elapsed();
    let undisturbed = snapshot(&whole);

    let mut moments = Moments::new();
    let mut moment = || duration.mul_f64(moments.next());
    let (mut killed, mut missed) = (0, 0);
    while killed < KILLS {
        let first = moment();
        if !kill_at(&source, &out, first) {
            missed += 1;
            assert!(missed < MISSES_MAX, "{killed} killed, {missed} missed");
        } else {
            killed += 1;
            if killed % 3 == 0 {
                // Once more, while it completes what the first kill left.
                kill_at(&source, &out, moment());
            }
        }
        wick(&arguments(&source, &out), b"").is_success("rerun");
        let same = snapshot(&out) == undisturbed;
        assert!(same, "killed after {first:?}: a rerun gave other bytes");
        fs::remove_dir_all(&out).unwrap();
    }
    println!("killed {killed}, through before {missed}, of {duration:?}");
    assert!(snapshot(&source) == before, "the source changed");
}
