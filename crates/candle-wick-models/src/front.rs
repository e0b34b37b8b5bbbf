//! The first layers of a model, with its embedding and head: what they take says what all of them will.
//!
//! It computes nothing that makes sense: a model that ends early writes noise. The layers, their places in DRAM and on
//! flash, kernels and reads are those of the whole model.
//!
//! Not here: choosing the plan, and what to make of the times (the command).

use candle_wick::{BudgetPlan, ComputePool, FlashFolder};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::load::{parse, read_config, LoadOptions, LoadedModel};

/// Config keys with an entry for each layer.
const PER_LAYER: [&str; 1] = ["layer_types"];

impl LoadedModel {
    /// Loads the first `layers` layers of an opened folder as `plan`, one of the whole model, places them.
    ///
    /// # Errors
    /// `layers` is none, or more than there are; otherwise as [`Self::load`].
    pub fn load_front(
        folder: FlashFolder,
        plan: BudgetPlan,
        layers: usize,
        options: &LoadOptions,
    ) -> Result<Self> {
        let (whole, mut json) = read_config(&folder)?;
        let path = folder.path().join("config.json");
        if layers == 0 || layers > whole.num_hidden_layers() {
            let found = whole.num_hidden_layers();
            let reason = format!("the first {layers} layers were asked for, the model has {found}");
            return Err(Error::Config { path, reason });
        }
        json["num_hidden_layers"] = Value::from(layers);
        for key in PER_LAYER {
            if let Some(Value::Array(entries)) = json.get_mut(key) {
                entries.truncate(layers);
            }
        }
        let (config, json) = parse(&path, &json.to_string())?;
        let pool = ComputePool::new()?;
        Self::load_planned(folder, (config.as_ref(), &json), pool, plan, options)
    }
}
