//! A stock struct with its FFNs on flash beside our own definition: one run along a text, one line of JSON.
//!
//! ```text
//! sparse FOLDER --by (own|stock|quantized) [--selector S] [--density P] [--memory M] [--text-file T] [--tokens N]
//! ```
//! The text's tokens go through the model one by one: the perplexity says whether both compute the same, the times how fast.
//! Without a text, for models of random weights, ids are made up. `scripts/bench_sparse.py` runs it in memory cgroups.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{bail, ensure, Context};
use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::quantized_llama::ModelWeights;
use candle_transformers::models::{falcon, llama};
use candle_wick::{
    peak_rss_bytes, Activation, DipOptions, FlashFolder, FlashVarBuilder, IoOptions, Memory,
    SelectorKind, SparseOptions,
};
use candle_wick_models::{logprob, LoadOptions, LoadedModel, WickTokenizer};
use clap::{Parser, ValueEnum};
use serde_json::{json, Value};

#[derive(Parser)]
struct Args {
    folder: PathBuf,
    #[arg(long)]
    by: By,
    #[arg(long)]
    selector: Option<SelectorKind>,
    #[arg(long, default_value_t = 0.5)]
    density: f64,
    #[arg(long)]
    memory: Option<Memory>,
    #[arg(long)]
    text_file: Option<PathBuf>,
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Tokens before those that are timed.
    #[arg(long, default_value_t = 16)]
    warmup: usize,
    /// What the stock struct computes in.
    #[arg(long)]
    f16: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum By {
    Own,
    Stock,
    /// Candle's quantized Llama, without the patch.
    Quantized,
}

/// Logits after one more token.
struct Model {
    forward: Box<dyn FnMut(u32, usize) -> anyhow::Result<Vec<f32>>>,
    planned_bytes: u64,
}

fn own(folder: FlashFolder, args: &Args, dip: DipOptions) -> anyhow::Result<Model> {
    let options = LoadOptions {
        memory: args.memory,
        selector: args.selector,
        dip,
        ctx: Some(args.tokens),
        ..LoadOptions::default()
    };
    let mut model = LoadedModel::load(folder, &options)?;
    let planned_bytes = model.plan().total_bytes;
    Ok(Model {
        forward: Box::new(move |id, _| Ok(model.forward(&[id])?)),
        planned_bytes,
    })
}

fn stock(folder: FlashFolder, args: &Args, dip: DipOptions) -> anyhow::Result<Model> {
    let dtype = if args.f16 { DType::F16 } else { DType::F32 };
    let config: Value = serde_json::from_str(&folder.config_json()?)?;
    // Random weights do not mind that their config says another one.
    let activation = match config["model_type"].as_str() {
        Some("llama") => Some(Activation::Silu),
        Some("falcon") => Some(Activation::GeluNew),
        _ => None,
    };
    let options = SparseOptions {
        activation,
        memory: args.memory,
        selector: args.selector,
        dip,
        dtype,
        ..SparseOptions::default()
    };
    let vb = FlashVarBuilder::for_stock(&folder, &options)?;
    let mut forward = build(&config, vb.sparse()?)?;
    let planned_bytes = vb.stock_plan().map_or(0, |plan| plan.total_bytes);
    Ok(Model {
        forward: Box::new(move |id, at| {
            let input = Tensor::new(&[[id]], &Device::Cpu)?;
            let logits = vb.forward(|| forward(&input, at))?;
            Ok(logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
        }),
        planned_bytes,
    })
}

fn quantized(folder: FlashFolder, args: &Args, dip: DipOptions) -> anyhow::Result<Model> {
    let options = SparseOptions {
        memory: args.memory,
        selector: args.selector,
        dip,
        ..SparseOptions::default()
    };
    let vb = FlashVarBuilder::for_quantized_llama(&folder, &options)?;
    let (content, gqa) = vb.ggml_content()?;
    let mut llama = ModelWeights::from_ggml(content, gqa)?;
    Ok(Model {
        forward: Box::new(move |id, at| {
            let logits = llama.forward(&Tensor::new(&[[id]], &Device::Cpu)?, at)?;
            Ok(logits.flatten_all()?.to_vec1()?)
        }),
        planned_bytes: vb.stock_plan().map_or(0, |plan| plan.total_bytes),
    })
}

type Forward = Box<dyn FnMut(&Tensor, usize) -> candle::Result<Tensor> + Send>;

/// Candle's own constructor and forward.
fn build(config: &Value, vb: VarBuilder<'static>) -> anyhow::Result<Forward> {
    match config["model_type"].as_str() {
        Some("llama") => {
            let config: llama::LlamaConfig = serde_json::from_value(config.clone())?;
            let config = config.into_config(false);
            let mut cache = llama::Cache::new(true, vb.dtype(), &config, &Device::Cpu)?;
            let model = llama::Llama::load(vb, &config)?;
            Ok(Box::new(move |ids, at| model.forward(ids, at, &mut cache)))
        }
        Some("falcon") => {
            let size = |key: &str| config[key].as_u64().map(|size| size as usize);
            let missing = "a size of the config";
            let config = falcon::Config {
                vocab_size: size("vocab_size").context(missing)?,
                hidden_size: size("hidden_size").context(missing)?,
                num_hidden_layers: size("num_hidden_layers").context(missing)?,
                num_attention_heads: size("num_attention_heads").context(missing)?,
                ..falcon::Config::falcon7b()
            };
            let mut model = falcon::Falcon::load(vb, config)?;
            Ok(Box::new(move |ids, _| model.forward(ids)))
        }
        other => bail!("no struct for {other:?}"),
    }
}

fn ids(args: &Args, vocab_size: usize) -> anyhow::Result<Vec<u32>> {
    let Some(path) = &args.text_file else {
        let made_up = (0..args.tokens).map(|at| (at * 7919 + 13) % vocab_size);
        return Ok(made_up.map(|id| id as u32).collect());
    };
    let text: String = std::fs::read_to_string(path)?
        .chars()
        .take(8 * args.tokens)
        .collect();
    let tokenizer = WickTokenizer::load(&args.folder)?.context("no tokenizer")?;
    let mut ids = tokenizer.encode_bare(&text)?;
    ids.truncate(args.tokens);
    Ok(ids)
}

fn main() -> anyhow::Result<()> {
    if std::env::args().nth(1).is_none_or(|word| word == "--bench") {
        println!("see scripts/bench_sparse.py");
        return Ok(());
    }
    let words = std::env::args().filter(|word| word != "--bench");
    let args = Args::parse_from(words);
    let dip = DipOptions {
        density: args.density,
        ..DipOptions::default()
    };
    let folder = FlashFolder::open(&args.folder, IoOptions::default())?;
    let config: Value = serde_json::from_str(&folder.config_json()?)?;
    let vocab_size = config["vocab_size"].as_u64().context("vocab_size")? as usize;
    let ids = ids(&args, vocab_size)?;
    ensure!(
        args.warmup + 1 < ids.len(),
        "{} tokens are too few",
        ids.len()
    );
    ensure!(
        !args.f16 || args.by == By::Stock,
        "--f16 is what candle's struct computes in"
    );
    let mut model = match args.by {
        By::Own => own(folder.clone(), &args, dip)?,
        By::Stock => stock(folder.clone(), &args, dip)?,
        By::Quantized => quantized(folder.clone(), &args, dip)?,
    };
    let (mut nll, mut millis) = (0.0, Vec::new());
    let mut read = 0;
    for (at, id) in ids.iter().enumerate() {
        if at == args.warmup {
            read = folder.io_counters().bytes;
        }
        let start = Instant::now();
        let logits = (model.forward)(*id, at)?;
        if at >= args.warmup {
            millis.push(1e3 * start.elapsed().as_secs_f64());
        }
        nll -= ids.get(at + 1).map_or(0.0, |next| logprob(&logits, *next));
    }
    millis.sort_by(f64::total_cmp);
    let read = folder.io_counters().bytes - read;
    let report = json!({
        "by": format!("{:?}", args.by).to_lowercase(), "model": config["model_type"],
        "memory": args.memory.map(|memory| memory.to_string()), "density": args.density,
        "selector": args.selector.map(|selector| selector.name()), "tokens": ids.len(),
        "perplexity": (nll / (ids.len() - 1) as f64).exp(), "planned_bytes": model.planned_bytes,
        "peak_bytes": peak_rss_bytes(), "read_bytes_per_token": read / millis.len() as u64,
        "ms_median": millis[millis.len() / 2], "ms_min": millis[0], "ms_max": millis[millis.len() - 1],
    });
    println!("{report}");
    Ok(())
}
