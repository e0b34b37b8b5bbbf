//! Integration tests: whole models, real files, the built `wick`.

mod advice;
mod bench;
mod budget;
mod cache_policies;
mod decode_bench;
mod demo;
mod engines;
mod exactness;
mod failures;
mod fixtures;
mod heads;
mod hub;
mod import_predictors;
mod predictor_kinds;
mod predictors;
mod prompt_bench;
mod reorder;
mod score;
mod stock;
mod support;
mod sweep_bench;
mod synth;
mod tidy;
mod tokenizers;
mod trace;
mod unmodified;
