//! What making predictors takes in memory: the model is gone before the work on its layers begins, and that work holds a
//! layer's inputs once.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::demo::{assets, demo};

/// Tokens whose inputs are nothing beside the model, and so many that they are larger than it.
const FEW: u64 = 2_560;
const MANY: u64 = 25_600;
const HIDDEN: u64 = 256;
const NEURONS: u64 = 2048;
/// Text with as many, and not many more: making tokens of a text takes a hundred times its size.
const TEXT_CHARS: usize = 115_000;

/// The most memory that `wick predictor` had while it made predictors from `tokens` tokens; `None` where the system does not
/// say.
fn peak_bytes(model: &Path, text: &Path, words: &[&str], tokens: u64) -> Option<u64> {
    let out = model.join("made.safetensors");
    let mut child = Command::new(env!("CARGO_BIN_EXE_wick"))
        .args(["predictor", words[0]])
        .arg(model)
        .arg("--text-file")
        .arg(text)
        .arg("--out")
        .arg(&out)
        .args(["--tokens", &tokens.to_string()])
        .args(&words[1..])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = None;
    loop {
        // The mark only rises, and the work goes on for long after its highest point: the last look has it.
        let now = std::fs::read_to_string(&status).unwrap_or_default();
        let mark = now.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = mark.and_then(|mark| mark.trim().trim_end_matches(" kB").parse::<u64>().ok());
        peak = kib.map(|kib| kib * 1024).max(peak);
        if let Some(ended) = child.try_wait().unwrap() {
            assert!(ended.success(), "{words:?}");
            std::fs::remove_file(&out).unwrap();
            return peak;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn many_tokens_take_their_inputs_once_and_no_model_beside() {
    let model = demo();
    let text = model.path().join("text.txt");
    let whole = std::fs::read_to_string(assets().join("calibration.txt")).unwrap();
    std::fs::write(&text, whole.chars().take(TEXT_CHARS).collect::<String>()).unwrap();
    let gate = ["gate", "--bits", "1"];
    let train = "train --last-layers 0 --keep-rank --rank 8 --epochs 0";
    let train: Vec<&str> = train.split(' ').collect();
    // Those of one layer that are learnt from, in f32, and who is active, a bit a neuron.
    let inputs = MANY * 8 / 10 * HIDDEN * 4;
    let labels = MANY * 8 / 10 * NEURONS / 8;
    // Quantising needs hardly more than the model did; learning holds labels, and pieces of the inputs as they are copied.
    for (words, more) in [(&gate[..], inputs / 2), (&train[..], inputs + labels)] {
        let peaks = [FEW, MANY].map(|tokens| peak_bytes(model.path(), &text, words, tokens));
        let [Some(few), Some(many)] = peaks else {
            eprintln!("skipped: this system does not say what a process has had");
            return;
        };
        println!("{words:?}: {few} bytes for {FEW} tokens, {many} for {MANY}, inputs {inputs}");
        assert!(many < few + more, "{words:?}: {few}, {many}, {more}");
    }
}
