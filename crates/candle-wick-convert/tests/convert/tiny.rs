//! Tiny checkpoints with pseudo-random weights, and readers for what comes out.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_wick_convert::{convert, ConvertError, ConvertOptions, ConvertReport};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype as FileDtype, SafeTensors};
use serde_json::{json, Value};
use wick_format::{Dtype, Manifest};

/// A tensor: dtype, shape, little-endian bytes.
pub(crate) type Stored = (FileDtype, Vec<usize>, Vec<u8>);

/// A checkpoint that can be changed before it is written.
pub(crate) struct Tiny {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Stored>,
    seed: u64,
}

pub(crate) const VOCAB: usize = 40;

impl Tiny {
    pub(crate) fn new(config: Value) -> Self {
        Self {
            config,
            tensors: BTreeMap::new(),
            seed: 1,
        }
    }

    /// Values between -1 and 1.
    fn values(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.seed = self
                .seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (self.seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    pub(crate) fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        let values = self.values(shape.iter().product());
        self.tensors
            .insert(name.into(), stored(dtype, shape, &values));
    }

    /// Two layers, grouped-query attention, own head.
    pub(crate) fn llama(hidden: usize, ffn: usize, dtype: Dtype) -> Self {
        Self::llama_of(hidden, ffn, 2, dtype)
    }

    pub(crate) fn llama_of(hidden: usize, ffn: usize, layers: usize, dtype: Dtype) -> Self {
        let mut tiny = Self::new(json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": VOCAB, "hidden_act": "silu", "rms_norm_eps": 1e-05,
        }));
        let kv = hidden / 2;
        tiny.add("model.embed_tokens.weight", dtype, &[VOCAB, hidden]);
        for n in 0..layers {
            let mut add = |name: &str, shape: &[usize]| {
                tiny.add(&format!("model.layers.{n}.{name}"), dtype, shape);
            };
            add("input_layernorm.weight", &[hidden]);
            add("post_attention_layernorm.weight", &[hidden]);
            add("self_attn.q_proj.weight", &[hidden, hidden]);
            add("self_attn.k_proj.weight", &[kv, hidden]);
            add("self_attn.v_proj.weight", &[kv, hidden]);
            add("self_attn.o_proj.weight", &[hidden, hidden]);
            add("mlp.gate_proj.weight", &[ffn, hidden]);
            add("mlp.up_proj.weight", &[ffn, hidden]);
            add("mlp.down_proj.weight", &[hidden, ffn]);
        }
        tiny.add("model.norm.weight", dtype, &[hidden]);
        tiny.add("lm_head.weight", dtype, &[VOCAB, hidden]);
        tiny
    }

    /// Two layers, tensors called `<prefix>decoder.`.
    pub(crate) fn opt(hidden: usize, ffn: usize, dtype: Dtype, prefix: &str) -> Self {
        let mut tiny = Self::new(json!({
            "model_type": "opt", "hidden_size": hidden, "ffn_dim": ffn, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 30,
            "activation_function": "relu", "do_layer_norm_before": true,
            "word_embed_proj_dim": hidden,
        }));
        let mut add = |name: String, shape: &[usize]| {
            tiny.add(&format!("{prefix}decoder.{name}"), dtype, shape);
        };
        add("embed_tokens.weight".into(), &[VOCAB, hidden]);
        add("embed_positions.weight".into(), &[32, hidden]);
        for layer in ["layers.0", "layers.1"] {
            for name in ["q_proj", "k_proj", "v_proj", "out_proj"] {
                add(
                    format!("{layer}.self_attn.{name}.weight"),
                    &[hidden, hidden],
                );
                add(format!("{layer}.self_attn.{name}.bias"), &[hidden]);
            }
            for norm in ["self_attn_layer_norm", "final_layer_norm"] {
                add(format!("{layer}.{norm}.weight"), &[hidden]);
                add(format!("{layer}.{norm}.bias"), &[hidden]);
            }
            add(format!("{layer}.fc1.weight"), &[ffn, hidden]);
            add(format!("{layer}.fc1.bias"), &[ffn]);
            add(format!("{layer}.fc2.weight"), &[hidden, ffn]);
            add(format!("{layer}.fc2.bias"), &[hidden]);
        }
        add("final_layer_norm.weight".into(), &[hidden]);
        add("final_layer_norm.bias".into(), &[hidden]);
        tiny
    }

    pub(crate) fn write_config(&self, folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
    }

    /// One weight file.
    pub(crate) fn write(&self, folder: &Path) {
        self.write_config(folder);
        let names: Vec<&String> = self.tensors.keys().collect();
        self.write_shard(&folder.join("model.safetensors"), &names);
    }

    /// Several weight files with an index; neighbours by name go to different files.
    pub(crate) fn write_sharded(&self, folder: &Path, count: usize) {
        self.write_config(folder);
        let mut weight_map = BTreeMap::new();
        for shard in 0..count {
            let file = format!("model-{:05}-of-{count:05}.safetensors", shard + 1);
            let names: Vec<&String> = self.tensors.keys().skip(shard).step_by(count).collect();
            self.write_shard(&folder.join(&file), &names);
            weight_map.extend(names.into_iter().map(|name| (name.clone(), file.clone())));
        }
        let index = json!({ "metadata": { "total_size": 1 }, "weight_map": weight_map });
        fs::write(
            folder.join("model.safetensors.index.json"),
            index.to_string(),
        )
        .unwrap();
    }

    fn write_shard(&self, path: &Path, names: &[&String]) {
        let views = names.iter().map(|&name| {
            let (dtype, shape, bytes) = &self.tensors[name];
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }
}

pub(crate) fn stored(dtype: Dtype, shape: &[usize], values: &[f32]) -> Stored {
    let encode = |&value: &f32| match dtype {
        Dtype::F32 => value.to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    };
    let file_dtype = match dtype {
        Dtype::F32 => FileDtype::F32,
        Dtype::F16 => FileDtype::F16,
        Dtype::Bf16 => FileDtype::BF16,
    };
    (
        file_dtype,
        shape.to_vec(),
        values.iter().flat_map(encode).collect(),
    )
}

/// Converts without watching.
pub(crate) fn run(
    source: &Path,
    out: &Path,
    options: &ConvertOptions,
) -> Result<ConvertReport, ConvertError> {
    convert(source, out, options, &|_| {})
}

/// Converts with default options.
pub(crate) fn run_default(source: &Path, out: &Path) -> Result<ConvertReport, ConvertError> {
    run(source, out, &ConvertOptions::default())
}

/// A checkpoint folder and an output path beside it.
pub(crate) struct Place {
    _folder: tempfile::TempDir,
    pub(crate) source: PathBuf,
    pub(crate) out: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (source, out) = (folder.path().join("source"), folder.path().join("out"));
        fs::create_dir(&source).unwrap();
        Self {
            _folder: folder,
            source,
            out,
        }
    }

    pub(crate) fn of(tiny: &Tiny) -> Self {
        let place = Self::new();
        tiny.write(&place.source);
        place
    }

    /// The error of a conversion that must leave neither output nor changes to the source.
    pub(crate) fn refused(&self) -> ConvertError {
        self.refused_with(&ConvertOptions::default())
    }

    pub(crate) fn refused_with(&self, options: &ConvertOptions) -> ConvertError {
        let before = snapshot(&self.source);
        let error = run(&self.source, &self.out, options).unwrap_err();
        assert_eq!(snapshot(&self.source), before, "the source was changed");
        assert!(
            !self.out.join("wick.json").exists(),
            "looks finished after: {error}"
        );
        assert!(!error.to_string().contains('\n'), "{error}");
        error
    }
}

/// Every file of a folder by name.
pub(crate) fn snapshot(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entry = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        (
            entry.file_name().into_string().unwrap(),
            fs::read(entry.path()).unwrap(),
        )
    };
    fs::read_dir(folder).unwrap().map(entry).collect()
}

pub(crate) fn manifest(out: &Path) -> Manifest {
    Manifest::parse(&fs::read_to_string(out.join("wick.json")).unwrap()).unwrap()
}

/// All tensors of all safetensors files of a folder, read with the safetensors crate.
pub(crate) fn all_tensors(folder: &Path) -> BTreeMap<String, Stored> {
    let mut all = BTreeMap::new();
    for (name, bytes) in snapshot(folder) {
        if name.ends_with(".safetensors") {
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
                assert!(all.insert(name, tensor).is_none());
            }
        }
    }
    all
}

/// The shared fixture of this name, or a line that says why the test is skipped.
pub(crate) fn fixture(name: &str) -> Option<PathBuf> {
    let folder = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../shared/fixtures"
    ))
    .join(name);
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: no fixture {}", folder.display());
    None
}
