//! `wick plan`: what a model would keep in memory, and with `--predict` what it would do.

use std::process::ExitCode;

use anyhow::{ensure, Result};
use candle_wick::BudgetPlan;
use candle_wick_models::Interrupt;
use clap::Args;
use serde::Serialize;

use crate::args::{positive, ModelArgs};
use crate::output;
use crate::predict::{predict, Prediction};
use crate::predictors::Predictors;

#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Also say how fast it will be: tries the first layers on this machine, for some seconds
    #[arg(long)]
    predict: bool,

    /// Tokens of the prompt that the prediction is for
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = positive, requires = "predict")]
    prompt_tokens: usize,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The plan, and what it leads to.
#[derive(Serialize)]
struct Outlook {
    #[serde(flatten)]
    plan: BudgetPlan,
    /// What chooses the neurons, where predictors do.
    #[serde(skip_serializing_if = "Option::is_none")]
    predictors: Option<Predictors>,
    /// Settings of `wick tune` that are used.
    #[serde(skip_serializing_if = "Option::is_none")]
    tuned: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prediction: Option<Prediction>,
}

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    let model = args.model.open(Interrupt::new())?;
    let plan = candle_wick_models::plan(&model.folder, &model.options)?;
    ensure!(
        !(args.predict && plan.goes_by_columns()),
        "--predict knows nothing of layers that go by columns: what they miss depends on the text; `wick bench decode` measures it"
    );
    let prediction = match args.predict {
        true => Some(predict(&model, &plan, args.prompt_tokens)?),
        false => None,
    };
    let predictors = match plan.selector.form() {
        Some(_) => Predictors::of(&model.folder)?,
        None => None,
    };
    let outlook = Outlook {
        plan,
        predictors,
        tuned: model.tuned_line(),
        prediction,
    };
    if args.json {
        output::print_json(&outlook)?;
    } else {
        output::print(&format!("{}\n", outlook.plan))?;
        if let Some(predictors) = &outlook.predictors {
            output::print(&format!("{:<36} {predictors}\n", "predictors used"))?;
        }
        if let Some(tuned) = &outlook.tuned {
            output::print(&format!("{:<36} {tuned}\n", "tuned"))?;
        }
        if let Some(prediction) = &outlook.prediction {
            output::print(&format!("\n{prediction}\n"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
