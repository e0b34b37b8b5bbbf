//! OPT with norms before attention and FFN: every size but 350m.
//!
//! Uploads from before 2022-07 call the tensors `decoder.`; they get their present names,
//! `model.decoder.`.

use super::{unsupported, Family, LayerSpec, ModelSpec, TensorNeed, CURRENT};
use crate::config::ModelConfig;
use crate::ConvertError;

/// The position table has this many rows before position 0.
const POSITION_OFFSET: usize = 2;

pub(super) const FAMILY: Family = Family {
    model_types: &["opt"],
    supported: "opt (norms before attention and FFN, embeddings as wide as the layers)",
    activation_key: "activation_function",
    rename,
    spec,
    ..CURRENT
};

fn rename(name: &str) -> String {
    match name.strip_prefix("decoder.") {
        Some(rest) => format!("model.decoder.{rest}"),
        None => name.to_string(),
    }
}

fn spec(config: &ModelConfig) -> Result<ModelSpec, ConvertError> {
    let hidden = config.size("hidden_size")?;
    let vocab = config.size("vocab_size")?;
    let positions = config.size("max_position_embeddings")? + POSITION_OFFSET;
    let intermediate = config.size("ffn_dim")?;
    let layer_count = config.layer_count("num_hidden_layers")?;
    check_variant(config, hidden)?;
    let bias = config.flag_or("enable_bias", true)?;

    let embedding = "model.decoder.embed_tokens.weight".to_string();
    let mut resident = vec![
        TensorNeed::new(&embedding, &[vocab, hidden]),
        TensorNeed::new("model.decoder.embed_positions.weight", &[positions, hidden]),
    ];
    let mut layers = Vec::with_capacity(layer_count);
    for n in 0..layer_count {
        let prefix = format!("model.decoder.layers.{n}");
        for name in ["q", "k", "v", "out"] {
            let name = format!("{prefix}.self_attn.{name}_proj");
            resident.push(TensorNeed::new(format!("{name}.weight"), &[hidden, hidden]));
            if bias {
                resident.push(TensorNeed::new(format!("{name}.bias"), &[hidden]));
            }
        }
        push_norm(
            &format!("{prefix}.self_attn_layer_norm"),
            hidden,
            &mut resident,
        );
        push_norm(&format!("{prefix}.final_layer_norm"), hidden, &mut resident);
        if bias {
            resident.push(TensorNeed::new(
                format!("{prefix}.fc1.bias"),
                &[intermediate],
            ));
            resident.push(TensorNeed::new(format!("{prefix}.fc2.bias"), &[hidden]));
        }
        layers.push(ffn(prefix, intermediate, bias));
    }
    push_norm("model.decoder.final_layer_norm", hidden, &mut resident);
    Ok(ModelSpec {
        hidden_size: hidden,
        layers,
        resident,
        embedding,
        head: TensorNeed::new("lm_head.weight", &[vocab, hidden]),
        tied: config.flag_or("tie_word_embeddings", true)?,
        computed: &[],
    })
}

/// Refuses the variants that the model definition does not compute.
fn check_variant(config: &ModelConfig, hidden: usize) -> Result<(), ConvertError> {
    let heads = config.size("num_attention_heads")?;
    if !hidden.is_multiple_of(heads) {
        return Err(config.wrong("num_attention_heads", format!("a divisor of {hidden}")));
    }
    if !config.flag_or("do_layer_norm_before", true)? {
        return Err(unsupported(
            "opt with `do_layer_norm_before` false (as in opt-350m)",
        ));
    }
    let width = config.size_or("word_embed_proj_dim", hidden)?;
    if width != hidden {
        let got = format!("opt with `word_embed_proj_dim` {width} and `hidden_size` {hidden}");
        return Err(unsupported(got));
    }
    Ok(())
}

fn push_norm(name: &str, hidden: usize, resident: &mut Vec<TensorNeed>) {
    resident.push(TensorNeed::new(format!("{name}.weight"), &[hidden]));
    resident.push(TensorNeed::new(format!("{name}.bias"), &[hidden]));
}

fn ffn(prefix: String, intermediate_size: usize, bias: bool) -> LayerSpec {
    LayerSpec {
        intermediate_size,
        gate: None,
        up: format!("{prefix}.fc1.weight"),
        down: format!("{prefix}.fc2.weight"),
        gate_bias: None,
        up_bias: bias.then(|| format!("{prefix}.fc1.bias")),
        down_bias: bias.then(|| format!("{prefix}.fc2.bias")),
        prefix,
    }
}
