//! Integration tests: whole models, real files, the built `wick`.

mod bench;
mod budget;
mod demo;
mod exactness;
mod failures;
mod fixtures;
mod heads;
mod hub;
mod score;
mod stock;
mod support;
mod tidy;
mod tokenizers;
mod unmodified;
