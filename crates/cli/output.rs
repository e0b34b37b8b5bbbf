//! Writing to stdout and stderr: objects, sentences, and what became of the reader.
//!
//! Nothing here panics when the other side is closed, as `println!` would.

use std::io::{self, Write};

use anyhow::Result;
use candle_wick_convert::ConvertProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// One JSON object on one line of stdout.
pub(crate) fn print_json(value: &impl Serialize) -> Result<()> {
    let mut json = serde_json::to_string(value)?;
    json.push('\n');
    print(&json)
}

/// Text on stdout, there at once.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// A line on stderr, when there is somebody to read it.
pub(crate) fn note(text: &str) {
    let _closed = writeln!(io::stderr().lock(), "{text}");
}

/// A line on stderr in the program's name.
pub(crate) fn complain(text: &str) {
    note(&format!("wick: {text}"));
}

/// Progress in bytes, with their rate.
pub(crate) const BYTES_BAR: &str =
    "{bar:20} {bytes:>10} of {total_bytes}  {binary_bytes_per_sec}  {eta} left  {wide_msg}";
/// Progress in whatever the message says.
pub(crate) const COUNT_BAR: &str = "{bar:32} {pos:>8} of {len} {msg}  {eta} left";

/// What is done and what is left on stderr, where that is a terminal, in the form of one of the templates here.
pub(crate) fn progress_bar(template: &str, is_quiet: bool) -> ProgressBar {
    let target = if is_quiet {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr()
    };
    let bar = ProgressBar::with_draw_target(None, target);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Moves a bar of [`BYTES_BAR`] to where the writing of a folder is.
pub(crate) fn show_progress(bar: &ProgressBar, progress: ConvertProgress<'_>) {
    bar.set_length(progress.total_bytes);
    bar.set_position(progress.done_bytes);
    if bar.message() != progress.step {
        bar.set_message(progress.step.to_owned());
    }
}

/// Whether an error means only that the reader of a pipe has seen enough.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// An error and its causes in one line: a cause that is part of the sentence before it is not repeated, and
/// frames of a backtrace are left out.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut sentence = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let lines = text.lines().map(str::trim);
        let lines: Vec<&str> = lines.take_while(|line| !is_frame(line)).collect();
        let text = lines.join(" ");
        if sentence.is_empty() {
            sentence = text;
        } else if !sentence.contains(&text) {
            sentence = format!("{sentence}: {text}");
        }
    }
    // A name in a file may hold anything, even commands to a terminal.
    sentence.replace(char::is_control, " ")
}

/// `12: some::function`, as backtraces have it.
fn is_frame(line: &str) -> bool {
    let number = line.split(':').next().unwrap_or_default();
    line.contains(": ") && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn causes_are_told_once_and_in_one_line() {
        let cause = anyhow!("disk is full")
            .context("a.txt: disk is full")
            .context("cannot write");
        assert_eq!(one_line(&cause), "cannot write: a.txt: disk is full");
        let traced = anyhow!("shapes differ\n   0: candle::Error::bt\n   1: main\n  at main.rs:3");
        assert_eq!(one_line(&traced), "shapes differ");
        assert_eq!(one_line(&anyhow!("first\nsecond: 2")), "first second: 2");
    }

    #[test]
    fn a_broken_pipe_is_found_below_other_errors() {
        let broken = anyhow::Error::new(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(is_broken_pipe(&broken.context("writing")));
        assert!(!is_broken_pipe(&anyhow!("no pipe")));
    }
}
