//! The kernel judges the budget: `wick run` in a memory cgroup of exactly the bytes it was given.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::f16;
use safetensors::tensor::{serialize_to_file, Dtype, TensorView};
use serde_json::Value;

use crate::support::{converted, llama_shapes};

/// Sizes of a Llama.
struct Sizes {
    hidden: usize,
    ffn: usize,
    layers: usize,
    vocab: usize,
}

/// 400 MB, 68 % of it FFN.
const LARGE: Sizes = Sizes {
    hidden: 1024,
    ffn: 4096,
    layers: 11,
    vocab: 8000,
};

/// 110 MB in many small matrices, and a vocabulary that is large beside them.
const DEEP: Sizes = Sizes {
    hidden: 320,
    ffn: 864,
    layers: 30,
    vocab: 24_000,
};

/// A Llama with random weights.
fn random_llama(folder: &Path, sizes: &Sizes) {
    let Sizes {
        hidden,
        ffn,
        layers,
        vocab,
    } = *sizes;
    let shapes = llama_shapes(hidden, ffn, layers, vocab);
    let mut state = 1u64;
    let mut random = move || {
        // splitmix64: no two weights are related in a way that could hide a mistake.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        f16::from_f32(((z >> 40) as f32 / (1 << 24) as f32 - 0.5) * 0.07)
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let count = shape.iter().product::<usize>();
            let value = |_| if shape.len() == 1 { f16::ONE } else { random() };
            let bytes = (0..count).map(value).flat_map(f16::to_le_bytes).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (
            name,
            TensorView::new(Dtype::F16, shape.clone(), bytes).unwrap(),
        )
    });
    serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab,
        "num_hidden_layers": layers, "num_attention_heads": 16, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "torch_dtype": "float16", "eos_token_id": 2,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// A memory cgroup with a limit, removed when dropped.
struct Cgroup {
    path: PathBuf,
    v1: bool,
}

impl Cgroup {
    /// Under the v1 memory controller where it is mounted, else v2; `None` where none can be made.
    fn new(limit_bytes: u64) -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("wick-budget-{}-{count}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists();
        let (root, limit) = if v1 {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        } else {
            ("/sys/fs/cgroup", "memory.max")
        };
        let path = Path::new(root).join(name);
        fs::create_dir(&path).ok()?;
        let group = Self { path, v1 };
        fs::write(group.path.join(limit), limit_bytes.to_string()).ok()?;
        if !v1 {
            let _no_swap_here = fs::write(group.path.join("memory.swap.max"), "0");
        }
        Some(group)
    }

    fn oom_kills(&self) -> u64 {
        let file = if self.v1 {
            "memory.oom_control"
        } else {
            "memory.events"
        };
        let text = fs::read_to_string(self.path.join(file)).unwrap();
        let line = text
            .lines()
            .find(|line| line.starts_with("oom_kill "))
            .unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _busy = fs::remove_dir(&self.path);
    }
}

fn wick(arguments: &[&str], group: Option<&Cgroup>) -> (bool, Value) {
    let binary = env!("CARGO_BIN_EXE_wick");
    let mut command = match group {
        Some(group) => {
            let mut command = Command::new("sh");
            let procs = group.path.join("cgroup.procs");
            command
                .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
                .arg(procs)
                .arg(binary);
            command
        }
        None => Command::new(binary),
    };
    let output = command.args(arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let line = output
        .stdout
        .split(|byte| *byte == b'\n')
        .rfind(|line| !line.is_empty());
    let value = line.and_then(|line| serde_json::from_slice(line).ok());
    (
        output.status.success(),
        value.unwrap_or_else(|| panic!("no JSON: {stderr}")),
    )
}

#[test]
fn the_peak_stays_under_the_budget_and_near_the_plan() {
    check_peak(&LARGE);
}

#[test]
fn many_small_matrices_stay_under_the_budget_too() {
    check_peak(&DEEP);
}

fn check_peak(sizes: &Sizes) {
    let source = tempfile::tempdir().unwrap();
    random_llama(source.path(), sizes);
    let folder = converted(source.path());
    let folder = folder.path().to_str().unwrap();
    let (_, at_half) = wick(&["plan", folder, "--memory", "50%", "--json"], None);
    let floor = at_half["floor_bytes"].as_u64().unwrap();
    let half = at_half["total_bytes"].as_u64().unwrap();
    for (label, budget) in [("floor + 1 MiB", floor + (1 << 20)), ("50 %", half)] {
        let Some(group) = Cgroup::new(budget) else {
            eprintln!(
                "skipped: no memory cgroup can be made here (needs root and a memory controller)"
            );
            return;
        };
        let budget_text = budget.to_string();
        let (_, plan) = wick(&["plan", folder, "--memory", &budget_text, "--json"], None);
        let planned = plan["total_bytes"].as_u64().unwrap() as f64;
        // A prompt of several chunks, then decoding; chunks are longer where there is room.
        let count = if label == "50 %" { 300 } else { 70 };
        let ids: Vec<String> = (0..count).map(|id| (id * 7).to_string()).collect();
        let ids = ids.join(",");
        let run = [
            "run",
            folder,
            "--ids",
            &ids,
            "-n",
            "4",
            "--memory",
            &budget_text,
            "--json",
        ];
        let (succeeded, report) = wick(&run, Some(&group));
        let peak = report["peak_bytes"].as_u64().unwrap() as f64;
        println!("{label}: budget {budget}, plan {planned}, peak {peak} bytes");
        let sampled = [
            "run",
            folder,
            "--ids",
            "1",
            "-n",
            "2",
            "--temperature",
            "1",
            "--top-p",
            "0.9",
        ];
        let scored = ["score", folder, "--ids", &ids];
        for other in [&sampled[..], &scored[..]] {
            let words = [other, &["--memory", &budget_text, "--json"]].concat();
            assert!(wick(&words, Some(&group)).0, "{label}: {other:?}");
        }
        assert!(succeeded && group.oom_kills() == 0, "{label}: killed");
        assert!(peak <= budget as f64, "{label}: peak {peak} over {budget}");
        assert!(
            peak >= 0.85 * budget as f64,
            "{label}: peak {peak} wastes {budget}"
        );
        assert!(
            (peak / planned - 1.0).abs() < 0.08,
            "{label}: peak {peak}, planned {planned}"
        );
    }
}
/// Of a small budget, what loading leaves behind for a moment is a large part; it depends on the turns of threads.
#[test]
fn a_small_model_stays_under_its_budget_run_after_run() {
    let out = crate::demo::demo();
    let folder = out.path().to_str().unwrap();
    for (extra, mib) in [
        (&[][..], 35),
        (&["--threads", "1"], 35),
        (&["--io-engine", "io_uring"], 35),
        // Each of them has a stack and a queue.
        (&["--threads", "200"], 56),
    ] {
        let memory = format!("{mib}MiB");
        for _ in 0..4 {
            let flags = [
                "run",
                folder,
                "--ids",
                "1765,352,260",
                "-n",
                "4",
                "--memory",
                &memory,
                "--json",
            ];
            let (succeeded, report) = wick(&[&flags, extra].concat(), None);
            let [peak, budget] = ["peak_bytes", "budget_bytes"].map(|name| report[name].as_u64());
            assert!(succeeded && budget == Some(mib << 20), "{report}");
            assert!(peak <= budget, "{report}");
        }
    }
}
