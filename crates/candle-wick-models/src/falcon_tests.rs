//! Which variant a config means, and where the rows of the fused projection go.

use candle::Device;
use serde_json::{json, Value};

use super::*;

fn config(changes: Value) -> std::result::Result<FalconConfig, String> {
    let mut json = json!({
        "hidden_size": 48, "vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    });
    for (key, value) in changes.as_object().unwrap() {
        json[key] = value.clone();
    }
    let config: FalconConfig = serde_json::from_value(json).map_err(|e| e.to_string())?;
    config.validate().map(|()| config)
}

/// Columns of a token's fused projection that each head got, by what is in them.
fn columns(heads: &Tensor, token: usize) -> Vec<Vec<f32>> {
    let heads = heads.squeeze(0).unwrap().narrow(1, token, 1).unwrap();
    heads.squeeze(1).unwrap().to_vec2().unwrap()
}

#[test]
fn fused_rows_go_to_their_heads() {
    // (kv_heads, share): grouped, multi-query, one key head for each query head; heads are 2 wide.
    for (kv_heads, share) in [(2, 3), (1, 5), (4, 1)] {
        let width = kv_heads * (share + 2) * 2;
        let values: Vec<f32> = (0..3 * width).map(|value| value as f32).collect();
        let fused = Tensor::from_vec(values, (1, 3, width), &Device::Cpu).unwrap();
        let (q, k, v) = split_qkv(&fused, kv_heads, share).unwrap();
        assert_eq!(q.dims(), [1, kv_heads * share, 3, 2]);
        for token in 0..3 {
            // The head that lies `index` heads into the group.
            let head = |group: usize, index: usize| {
                let first = (token * width + (group * (share + 2) + index) * 2) as f32;
                vec![first, first + 1.0]
            };
            let of_all = |index| (0..kv_heads).map(|g| head(g, index)).collect::<Vec<_>>();
            let queries: Vec<_> = (0..kv_heads * share)
                .map(|h| head(h / share, h % share))
                .collect();
            assert_eq!(columns(&q, token), queries);
            assert_eq!(columns(&k, token), of_all(share));
            assert_eq!(columns(&v, token), of_all(share + 1));
        }
    }
}

#[test]
fn key_heads_and_widths_follow_the_variant() {
    // Changes, key heads, fused width, norms of a parallel block (0: the block is sequential).
    for (changes, kv_heads, qkv_dim, norms) in [
        (json!({}), 1, 64, 1),
        (json!({"num_kv_heads": 6}), 1, 64, 1),
        (json!({"multi_query": false, "num_kv_heads": 2}), 6, 144, 1),
        (
            json!({"parallel_attn": false, "num_ln_in_parallel_attn": 2}),
            1,
            64,
            0,
        ),
        (json!({"new_decoder_architecture": true}), 6, 144, 2),
        (
            json!({"new_decoder_architecture": true, "num_kv_heads": 2}),
            2,
            80,
            2,
        ),
        (
            json!({"new_decoder_architecture": true, "parallel_attn": false,
                "num_kv_heads": 3, "num_ln_in_parallel_attn": 1}),
            3,
            96,
            1,
        ),
    ] {
        let config = config(changes.clone()).unwrap();
        assert_eq!(config.kv_heads(), kv_heads, "{changes}");
        assert_eq!(config.qkv_dim(), qkv_dim, "{changes}");
        let got = if config.is_parallel() {
            config.parallel_norms()
        } else {
            0
        };
        assert_eq!(got, norms, "{changes}");
        assert_eq!(config.ffn_dim(), 192);
        // Two layers, keys and values of f32, and one row of cosines and sines.
        let needs = config.needs(16);
        let kv_bytes = 2 * 2 * 4 * 8 * kv_heads as u64 + 4 * 8;
        assert_eq!(needs.kv_position_bytes, kv_bytes, "{changes}");
    }
}

#[test]
fn impossible_configs_are_refused() {
    let new = |key: &str, value: Value| json!({"new_decoder_architecture": true, key: value});
    for (changes, expected) in [
        (
            json!({"num_attention_heads": 0}),
            "num_attention_heads is 0",
        ),
        (json!({"num_attention_heads": 5}), "over 5 attention heads"),
        (json!({"num_attention_heads": 16}), "head_dim 3 is odd"),
        (
            json!({"hidden_size": u64::MAX}),
            "hidden_size is 18446744073709551615",
        ),
        (
            json!({"hidden_size": 1 << 23}),
            "ffn_hidden_size is 33554432",
        ),
        (json!({"ffn_hidden_size": 0}), "ffn_hidden_size is 0"),
        (json!({"vocab_size": 0}), "vocab_size is 0"),
        (
            json!({"max_position_embeddings": 1u64 << 40}),
            "max_position_embeddings is",
        ),
        (
            json!({"layer_norm_epsilon": 0.0}),
            "layer_norm_epsilon is 0",
        ),
        (
            json!({"num_ln_in_parallel_attn": 2}),
            "num_ln_in_parallel_attn is 2",
        ),
        (json!({"rope_theta": -1.0}), "rope_theta is -1"),
        (
            json!({"rope_scaling": {"type": "yarn"}}),
            "\"yarn\" is not supported",
        ),
        (
            json!({"alibi": true, "rope_scaling": {"type": "linear", "factor": 2.0}}),
            "rope_scaling in a model with alibi",
        ),
        (new("num_kv_heads", json!(0)), "num_kv_heads is 0"),
        (new("num_kv_heads", json!(4)), "cannot share 4 key heads"),
        (new("num_kv_heads", json!(12)), "cannot share 12 key heads"),
        (
            new("num_ln_in_parallel_attn", json!(3)),
            "num_ln_in_parallel_attn is 3",
        ),
        (
            new("num_ln_in_parallel_attn", json!(0)),
            "num_ln_in_parallel_attn is 0",
        ),
    ] {
        let reason = config(changes.clone()).err().unwrap();
        assert!(reason.contains(expected), "{changes}: {reason}");
    }
    // Without rotary embeddings an odd width is as good as any.
    assert!(config(json!({"num_attention_heads": 16, "alibi": true})).is_ok());
}
