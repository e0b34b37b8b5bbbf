//! The text that a command works on: where it comes from, and its token ids.

use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use clap::Args;

use crate::args::{OpenedModel, TokenIds};
use crate::output;

/// How long a prompt may take to come through a pipe where there is another one to fall back on.
const PIPE_WAIT: Duration = Duration::from_millis(300);
/// Files that hold a tokenizer in a form that is not read here.
const OTHER_TOKENIZERS: [&str; 2] = ["tokenizer.model", "vocab.json"];

/// A text or its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Where the prompt of `run` comes from: one flag, else a pipe.
#[derive(Args, Debug)]
#[group(multiple = false)]
pub(crate) struct PromptArgs {
    /// Text to continue [default: what is piped in]
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// File with the text to continue, without its last line break; `-` is a pipe
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,

    /// Token ids to continue, such as 1,2,3; needs no tokenizer
    #[arg(long, value_name = "IDS")]
    ids: Option<TokenIds>,
}

impl PromptArgs {
    /// The prompt; `default` stands in where nothing was typed or piped in.
    pub(crate) fn read(&self, default: Option<&str>) -> Result<Prompt> {
        if let Some(TokenIds(ids)) = &self.ids {
            return Ok(Prompt::Ids(ids.clone()));
        }
        if let Some(text) = &self.prompt {
            return Ok(Prompt::Text(text.clone()));
        }
        let text = match &self.prompt_file {
            Some(path) if path.as_os_str() != "-" => read_file(path)?,
            Some(_) => read_stdin()?,
            None => match (std::io::stdin().is_terminal(), default) {
                (false, None) => read_stdin()?,
                (false, Some(default)) => stdin_or(default)?,
                (true, Some(default)) => default.to_owned(),
                (true, None) => {
                    bail!("no prompt: give --prompt, --prompt-file or --ids, or pipe a text in")
                }
            },
        };
        Ok(Prompt::Text(without_line_break(text)))
    }
}

impl Prompt {
    /// Token ids, by the model's tokenizer where it takes one.
    pub(crate) fn encode(self, model: &OpenedModel) -> Result<Vec<u32>> {
        match (self, &model.tokenizer) {
            (Self::Ids(ids), _) => Ok(ids),
            (Self::Text(text), Some(tokenizer)) => Ok(tokenizer.encode(&text)?),
            (Self::Text(_), None) => {
                let folder = model.folder.path();
                let other = OTHER_TOKENIZERS
                    .iter()
                    .find(|name| folder.join(name).exists());
                let other =
                    other.map_or(String::new(), |name| format!(" ({name} alone is not read)"));
                bail!(
                    "{} has no tokenizer.json{other}, so it takes no text: give token ids with --ids 1,2,3",
                    folder.display()
                )
            }
        }
    }
}

/// The text in a file.
pub(crate) fn read_file(path: &PathBuf) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn read_stdin() -> Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .context("standard input")?;
    Ok(text)
}

/// What is piped in; `default` when that is empty or a pipe that nobody writes to.
fn stdin_or(default: &str) -> Result<String> {
    let (sender, receiver) = mpsc::channel();
    // Left behind when nothing comes: it only waits, and ends with the process.
    std::thread::spawn(move || sender.send(read_stdin()));
    match receiver.recv_timeout(PIPE_WAIT) {
        Ok(Ok(text)) if text.is_empty() => Ok(default.to_owned()),
        Ok(text) => text,
        Err(_) => {
            output::complain("nothing came through the pipe: using the demo's own prompt");
            Ok(default.to_owned())
        }
    }
}

/// `text` without the line break that editors and `echo` put at the end.
pub(crate) fn without_line_break(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        prompt: PromptArgs,
    }

    fn read(words: &[&str]) -> Result<Prompt> {
        Command::try_parse_from(words.iter().copied())?
            .prompt
            .read(None)
    }

    #[test]
    fn flags_give_prompts() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(read(&["wick", "-p", "- It was"]).unwrap(), text("- It was"));
        assert_eq!(read(&["wick", "--prompt", ""]).unwrap(), text(""));
        assert_eq!(
            read(&["wick", "--ids", "3,4"]).unwrap(),
            Prompt::Ids(vec![3, 4])
        );
        assert!(read(&["wick", "-p", "a", "--ids", "1"]).is_err());
        let error = read(&["wick", "--prompt-file", "/no/such"]).unwrap_err();
        assert!(error.to_string().contains("/no/such"));
    }

    #[test]
    fn one_line_break_is_cut() {
        for (text, cut) in [
            ("a\n", "a"),
            ("a\r\n", "a"),
            ("a\n\n", "a\n"),
            ("a ", "a "),
            ("", ""),
        ] {
            assert_eq!(without_line_break(text.to_owned()), cut);
        }
    }
}
