//! Every budget, and models of extreme shapes: the same numbers, or a refusal that names the floor.

use candle::{Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, mixtral, qwen3_moe};
use candle_wick::stock::{self, ExpertPolicy, StockOptions};
use candle_wick::{Error, Memory};
use serde_json::{json, Value};

use super::{checkpoint, config, in_memory, with_layer, Build, Forward, VOCAB};

fn mixtral(own: Value) -> Build {
    let mut all = json!({"sliding_window": 512, "num_local_experts": 5, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "max_position_embeddings": 512});
    all.as_object_mut()
        .unwrap()
        .extend(own.as_object().unwrap().clone());
    let config: mixtral::Config = config(all);
    Box::new(move |vb: VarBuilder| {
        let mut model = mixtral::Model::new(&config, vb)?;
        Ok(Box::new(move |ids: &Tensor, at| model.forward(ids, at)) as Forward)
    })
}

fn qwen3_moe(own: Value) -> Build {
    let mut all = json!({"decoder_sparse_step": 1, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
        "num_experts": 6, "norm_topk_prob": true, "num_hidden_layers": 2});
    all.as_object_mut()
        .unwrap()
        .extend(own.as_object().unwrap().clone());
    let config: qwen3_moe::Config = config(all);
    Box::new(move |vb: VarBuilder| {
        let mut model = qwen3_moe::ModelForCausalLM::new(&config, vb)?;
        Ok(Box::new(move |ids: &Tensor, at| model.forward(ids, at)) as Forward)
    })
}

fn llama(own: Value) -> Build {
    let config = config::<llama::LlamaConfig>(own).into_config(false);
    Box::new(move |vb| {
        let model = llama::Llama::load(vb, &config)?;
        let mut cache = llama::Cache::new(true, candle::DType::F32, &config, &Device::Cpu)?;
        Ok(Box::new(move |ids, at| model.forward(ids, at, &mut cache)))
    })
}

/// Bits of the logits after a prompt of `prompt` ids and three more.
fn few(
    prompt: usize,
    mut forward: impl FnMut(&Tensor, usize) -> candle::Result<Tensor>,
) -> Vec<Vec<u32>> {
    let ids: Vec<u32> = (0..prompt + 3)
        .map(|i| (i * i + 7) as u32 % VOCAB as u32)
        .collect();
    let mut all = Vec::new();
    for range in [
        0..prompt,
        prompt..prompt + 1,
        prompt + 1..prompt + 2,
        prompt + 2..prompt + 3,
    ] {
        let input = Tensor::new(&ids[range.clone()], &Device::Cpu).unwrap();
        let logits = forward(&input.unsqueeze(0).unwrap(), range.start).unwrap();
        let logits: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
        all.push(logits.into_iter().map(f32::to_bits).collect());
    }
    all
}

/// Runs the model at shares of its weights from 1 % on; gives back at how many it was streamed.
fn sweep(name: &str, build: &Build, prompt: usize, step: usize) -> usize {
    let folder = tempfile::tempdir().unwrap();
    checkpoint(folder.path(), build);
    let expected = few(prompt, in_memory(folder.path(), build));
    let (mut streamed, mut has_run) = (0, false);
    let both = [ExpertPolicy::Lfu, ExpertPolicy::Window];
    let policies = if name.contains("llama") {
        &both[..1]
    } else {
        &both
    };
    for percent in (1..=100).step_by(step) {
        for expert_policy in policies.iter().copied() {
            let options = StockOptions {
                memory: Some(Memory::Percent(percent as f64)),
                expert_policy,
                ..Default::default()
            };
            let what = format!("{name} at {percent} % {expert_policy:?}");
            match with_layer(|| stock::load(folder.path(), &options, build)) {
                Err(Error::BelowFloor {
                    budget_bytes,
                    floor_bytes,
                    ..
                }) => {
                    assert!(budget_bytes < floor_bytes, "{what}");
                    assert!(!has_run, "{what}: a smaller budget was enough");
                }
                Err(error) => panic!("{what}: {error}"),
                Ok((mut forward, handle)) => {
                    has_run = true;
                    let plan = handle.plan();
                    assert!(plan.total_bytes <= plan.budget_bytes, "{what}");
                    streamed += usize::from(plan.resident_fraction < 1.0);
                    let got = few(prompt, |ids, at| handle.forward(|| forward(ids, at)));
                    assert!(got == expected, "{what}");
                }
            }
        }
    }
    streamed
}

#[test]
fn every_share_gives_the_same_bits_or_names_the_floor() {
    for (name, build, step) in [
        ("llama", llama(json!({})), 4),
        (
            "llama of one layer",
            llama(json!({"num_hidden_layers": 1})),
            7,
        ),
        (
            "llama with a wide ffn",
            llama(json!({"intermediate_size": 800, "num_hidden_layers": 2})),
            5,
        ),
        ("mixtral", mixtral(json!({})), 7),
        ("qwen3 moe", qwen3_moe(json!({})), 7),
    ] {
        assert!(
            sweep(name, &build, 5, step) > 0,
            "{name} was never streamed"
        );
    }
}

#[test]
fn experts_of_every_number_and_size() {
    for (name, build, prompt) in [
        (
            "one expert",
            mixtral(json!({"num_local_experts": 1, "num_experts_per_tok": 1})),
            4,
        ),
        ("all experts", mixtral(json!({"num_experts_per_tok": 5})), 4),
        (
            "64 experts",
            qwen3_moe(json!({"num_experts": 64, "num_experts_per_tok": 8})),
            3,
        ),
        ("one token", mixtral(json!({})), 1),
        ("200 tokens", mixtral(json!({})), 200),
        // Every other layer has a dense FFN.
        (
            "sparse step",
            qwen3_moe(json!({"decoder_sparse_step": 2, "num_hidden_layers": 3})),
            4,
        ),
    ] {
        assert!(
            sweep(name, &build, prompt, 16) > 0,
            "{name} was never streamed"
        );
    }
}

#[test]
fn a_budget_in_bytes_is_never_exceeded_by_its_plan() {
    let folder = tempfile::tempdir().unwrap();
    let build = llama(json!({"intermediate_size": 400}));
    checkpoint(folder.path(), &build);
    let load = |memory, reserve_bytes| {
        let options = StockOptions {
            memory,
            reserve_bytes,
            ..Default::default()
        };
        with_layer(|| stock::load(folder.path(), &options, &build))
    };
    let whole = load(None, 0).unwrap().1.plan().total_bytes;
    let mut refused = 0;
    for budget in (0..=40).map(|step| whole / 40 * step).chain([1, u64::MAX]) {
        match load(Some(Memory::Bytes(budget)), 0) {
            Ok((_, handle)) => {
                assert_eq!(handle.plan().budget_bytes, budget);
                assert!(handle.plan().total_bytes <= budget);
            }
            Err(Error::BelowFloor { floor_bytes, .. }) => {
                assert!(budget < floor_bytes);
                refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 0);
    // Numbers at which sums overflow.
    for memory in [
        Memory::Bytes(1 << 40),
        Memory::Percent(50.0),
        Memory::Percent(f64::NAN),
    ] {
        let error = load(Some(memory), u64::MAX).err().expect("no room");
        assert!(
            matches!(
                error,
                Error::BelowFloor {
                    floor_bytes: u64::MAX,
                    ..
                }
            ) || matches!(memory, Memory::Percent(_)),
            "{error}"
        );
    }
}
