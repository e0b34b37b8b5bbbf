//! Candle's own Llama and Mixtral through `candle_wick::stock`, on random weights: one run, one line of JSON.
//!
//! ```text
//! stock make (llama|mixtral) DIR                  writes a checkpoint, f32
//! stock run DIR [--memory M] [-n N]               decodes N tokens; without M everything is in DRAM
//! ```
//! `scripts/bench_stock.py` runs it in memory cgroups.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::{llama, mixtral};
use candle_wick::stock::{self, StockOptions};
use candle_wick::{peak_rss_bytes, DirectIo, IoOptions, Memory};
use clap::{Parser, ValueEnum};
use serde_json::{json, Value};
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};
use wick_io::{FlashFile, Reader, SlotBuffer, SlotRead, Ticket};

/// What the KV cache and the activations of these models take at most.
const RESERVE_BYTES: u64 = 32 << 20;
const PROBE_BYTES: usize = 1 << 20;
const PROBE_AT_ONCE: usize = 16;

#[derive(Parser)]
enum Command {
    Make { model: Kind, folder: PathBuf },
    Run(Run),
}

#[derive(clap::Args)]
struct Run {
    folder: PathBuf,
    #[arg(long)]
    memory: Option<Memory>,
    #[arg(short, default_value_t = 16)]
    n: usize,
    /// `cargo bench` says so.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Llama,
    Mixtral,
}

impl Kind {
    /// FFNs of 403 MB and 705 MB.
    fn config(self) -> Value {
        let mut config = json!({
            "vocab_size": 8000, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false, "hidden_act": "silu", "use_flash_attn": false, "sliding_window": 512,
        });
        let own = match self {
            Self::Llama => {
                json!({"model": "llama", "hidden_size": 1024, "intermediate_size": 4096})
            }
            Self::Mixtral => {
                json!({"model": "mixtral", "hidden_size": 512, "intermediate_size": 1792,
                "num_local_experts": 8, "num_experts_per_tok": 2})
            }
        };
        let own = own.as_object().cloned().unwrap_or_default();
        config.as_object_mut().expect("made above").extend(own);
        config
    }
}

type Forward = Box<dyn FnMut(&Tensor, usize) -> candle::Result<Tensor>>;

/// Candle's own constructor and forward.
fn build(config: &Value, vb: VarBuilder) -> candle::Result<Forward> {
    let config = config.clone();
    if config["model"] == "llama" {
        let config: llama::LlamaConfig =
            serde_json::from_value(config).map_err(candle::Error::wrap)?;
        let config = config.into_config(false);
        let model = llama::Llama::load(vb, &config)?;
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
        return Ok(Box::new(move |ids, at| model.forward(ids, at, &mut cache)));
    }
    let config: mixtral::Config = serde_json::from_value(config).map_err(candle::Error::wrap)?;
    let mut model = mixtral::Model::new(&config, vb)?;
    Ok(Box::new(move |ids, at| model.forward(ids, at)))
}

/// Writes random weights of everything that the model asks for.
fn make(kind: Kind, folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    let config = kind.config();
    let varmap = VarMap::new();
    drop(build(
        &config,
        VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu),
    )?);
    varmap.save(folder.join("model.safetensors"))?;
    let mut file = BufWriter::new(File::create(folder.join("config.json"))?);
    file.write_all(config.to_string().as_bytes())?;
    file.flush()?;
    Ok(())
}

fn run(args: &Run) -> anyhow::Result<()> {
    tracing_subscriber::registry().with(stock::layer()).init();
    let config = std::fs::read(args.folder.join("config.json"))?;
    let config: Value = serde_json::from_slice(&config)?;
    let options = StockOptions {
        memory: args.memory,
        reserve_bytes: RESERVE_BYTES,
        ..Default::default()
    };
    let (mut forward, handle) = stock::load(&args.folder, &options, |vb| build(&config, vb))?;
    let loaded = handle.stats();
    let mut ids = vec![1u32, 7, 77, 777];
    let (mut position, mut checksum) = (0, 0u64);
    let mut seconds = Vec::new();
    let mut bytes = Vec::new();
    for _ in 0..args.n {
        let (start, before) = (Instant::now(), handle.stats().bytes);
        let input = Tensor::new(&ids[position..], &Device::Cpu)?.unsqueeze(0)?;
        let logits = handle.forward(|| forward(&input, position))?;
        let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        position = ids.len();
        seconds.push(start.elapsed().as_secs_f64());
        bytes.push(handle.stats().bytes - before);
        let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        ids.push(best.map_or(0, |(id, _)| id as u32));
        for logit in logits {
            checksum = checksum.rotate_left(5) ^ u64::from(logit.to_bits());
        }
    }
    let peak = peak_rss_bytes();
    let (plan, stats) = (handle.plan().clone(), handle.stats());
    // The probe needs room of its own.
    drop((forward, handle));
    // The prompt and the token on which the order is learnt are not what follows.
    let (later, read): (f64, u64) = (seconds[2..].iter().sum(), bytes[2..].iter().sum());
    let probed = probe(&args.folder.join("model.safetensors"))?;
    let report = json!({
        "model": config["model"], "weights": "random", "memory": args.memory.map(|m| format!("{m:?}")),
        "budget_bytes": plan.budget_bytes, "planned_bytes": plan.total_bytes, "peak_bytes": peak,
        "resident_fraction": plan.resident_fraction, "tokens": args.n, "loads": stats.loads - loaded.loads,
        "uses": stats.uses, "misses": stats.misses, "read_bytes": stats.bytes - loaded.bytes,
        "seconds_per_token": later / (args.n - 2) as f64, "read_bytes_per_token": read / (args.n as u64 - 2),
        "read_bytes_per_second": read as f64 / later, "sequential_bytes_per_second": probed,
        "of_sequential": read as f64 / later / probed, "logits_checksum": format!("{checksum:016x}"),
    });
    println!("{report}");
    Ok(())
}

/// Bytes a second of reading a file from start to end, by direct I/O, with large reads in flight.
fn probe(path: &Path) -> anyhow::Result<f64> {
    let file = FlashFile::open(path, DirectIo::Preferred)?;
    let reader = Reader::new(IoOptions::default().threads)?;
    let mut buffers = [
        Some(SlotBuffer::new(PROBE_AT_ONCE, PROBE_BYTES)?),
        Some(SlotBuffer::new(PROBE_AT_ONCE, PROBE_BYTES)?),
    ];
    let mut reading: Option<(usize, Ticket)> = None;
    let (start, mut offset) = (Instant::now(), 0);
    let batch = (PROBE_AT_ONCE * PROBE_BYTES) as u64;
    for turn in (0..2).cycle() {
        let ends = offset + batch > file.len_bytes();
        if !ends {
            let reads = (0..PROBE_AT_ONCE).map(|slot| SlotRead {
                slot,
                offset_bytes: offset + (slot * PROBE_BYTES) as u64,
                len_bytes: PROBE_BYTES,
                crc32c: None,
            });
            let reads: Vec<SlotRead> = reads.collect();
            let buffer = buffers[turn].take().expect("its ticket was waited for");
            let next = (turn, reader.submit(buffer, &file, &reads));
            offset += batch;
            if let Some((other, ticket)) = reading.replace(next) {
                let (buffer, outcome) = ticket.wait();
                outcome?;
                buffers[other] = Some(buffer);
            }
        } else {
            if let Some((_, ticket)) = reading.take() {
                ticket.wait().1?;
            }
            break;
        }
    }
    Ok(offset as f64 / start.elapsed().as_secs_f64())
}

fn main() -> anyhow::Result<()> {
    if std::env::args().nth(1).is_none_or(|word| word == "--bench") {
        println!("see scripts/bench_stock.py");
        return Ok(());
    }
    match Command::parse() {
        Command::Make { model, folder } => make(model, &folder),
        Command::Run(args) => run(&args),
    }
}
