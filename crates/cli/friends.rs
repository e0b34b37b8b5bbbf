//! `wick friends`: who fires with whom in a recorded trace, and what bundling closest friends would read.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_wick_convert::reorder::{friends, Friends, LayerFriends};
use clap::Args;

use crate::args::share;
use crate::output;

#[derive(Args, Debug)]
pub(crate) struct FriendsArgs {
    /// What `wick trace` recorded
    trace: PathBuf,

    /// Share of each layer's neurons that is in memory
    #[arg(long, value_name = "SHARE", default_value = "25%", value_parser = share)]
    resident: f64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &FriendsArgs) -> Result<ExitCode> {
    let found = friends(&args.trace, args.resident)?;
    if args.json {
        output::print_json(&found)?;
    } else {
        output::print(&table(&found))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(found: &Friends) -> String {
    let mut lines = vec![
        format!(
            "{} tokens; shares in %; of the neurons that fire in 10 tokens or more",
            found.tokens
        ),
        "       ---- neurons ----  -- of a neuron's tokens: fires too --  ------ closest friends ------"
            .to_owned(),
        "layer     all  fire in  closest  second  fourth  eighth  low 10  different  of one  of 8  fire in"
            .to_owned(),
    ];
    let percent = |share: f64| 100.0 * share;
    for (index, layer) in found.layers.iter().enumerate() {
        let LayerFriends {
            with_friends,
            fires_in,
            together,
            closest_deciles,
            distinct_friends,
            friend_of,
            friend_fires_in,
            ..
        } = layer;
        lines.push(format!(
            "{index:>5}  {with_friends:>6}  {:>7.1}  {:>7.1}  {:>6.1}  {:>6.1}  {:>6.1}  {:>6.1}  {distinct_friends:>9}  {:>6.1}  {:>4.1}  {:>7.1}",
            percent(*fires_in),
            percent(together[0]),
            percent(together[1]),
            percent(together[2]),
            percent(together[3]),
            percent(closest_deciles[0]),
            percent(friend_of[0]),
            percent(friend_of[1]),
            percent(*friend_fires_in)
        ));
    }
    lines.push(format!(
        "a token with {:.0} % of the neurons in memory, if each record came with that of the closest friend",
        percent(found.resident)
    ));
    lines.push(
        "layer  misses  bundles  friends: wanted  again  in memory  unwanted  records read"
            .to_owned(),
    );
    for (index, layer) in found.layers.iter().enumerate() {
        let reads = layer.bundles;
        let friends = reads.wanted + reads.again + reads.in_memory + reads.unwanted;
        lines.push(format!(
            "{index:>5}  {:>6.1}  {:>7.1}  {:>15.1}  {:>5.1}  {:>9.1}  {:>8.1}  {:>10.2} x",
            reads.misses,
            reads.bundles,
            reads.wanted,
            reads.again,
            reads.in_memory,
            reads.unwanted,
            (reads.bundles + friends) / reads.misses.max(f64::MIN_POSITIVE)
        ));
    }
    lines.join("\n") + "\n"
}
