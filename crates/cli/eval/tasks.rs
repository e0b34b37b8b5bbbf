//! `wick eval tasks`: accuracy with every neuron and with those that a selector chooses.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{ensure, Result};
use candle_wick_models::{score_continuations, Continuation};
use clap::Args;

use super::documents::Documents;
use super::encoder::Encoder;
use super::results::{Record, Results};
use super::side::{ids_crc32c, is_interruption, settings, Question, Side};
use super::task::{Tally, Task};
use super::tasks_report::TasksReport;
use crate::args::ModelArgs;
use crate::interrupt::{CtrlC, INTERRUPTED_STATUS};
use crate::output;
use crate::selectors::{to_compare, tokenizer};

#[derive(Args, Debug)]
pub(super) struct TasksArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Tasks, of arc_easy, arc_challenge, hellaswag, piqa, winogrande, lambada and mmlu; `piqa/mc_5shot` takes the
    /// documents of another form than the usual one
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    tasks: Vec<Task>,

    /// Folder of their documents, as in OLMo's evaluations: TASK/FORM/requests.jsonl.gz, or TASK.jsonl
    #[arg(long, value_name = "DIR")]
    data: PathBuf,

    /// Take the documents alone whose id is below COUNT
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,

    /// Leave out the special tokens that the tokenizer adds to a text, such as a BOS
    #[arg(long)]
    no_bos: bool,

    /// Keep each document's scores in FILE as they come; a second start goes on from there
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A task, its documents' file and their number.
pub(super) struct TaskFile {
    pub(super) task: Task,
    path: PathBuf,
    pub(super) documents: u64,
}

pub(super) fn run(args: &TasksArgs) -> Result<ExitCode> {
    let ctrl_c = CtrlC::watch()?;
    let opened = args.model.open(ctrl_c.flag())?;
    let settings = settings(&opened, !args.no_bos, args.results.as_deref())?;
    let tokenizer = tokenizer(&opened)?;
    let encoder = Encoder {
        tokenizer,
        before: match args.no_bos {
            true => Vec::new(),
            false => tokenizer.special_prefix()?,
        },
        ctx: settings.ctx,
    };
    let files = args.files(&encoder)?;
    let selectors = to_compare(&opened)?;
    let mut results = Results::open(args.results.as_deref(), &settings)?;
    if let Some(tuned) = opened.tuned_line() {
        output::note(&format!("tuned: {tuned}"));
    }
    ctrl_c.arm();
    let bar = output::progress_bar(output::COUNT_BAR, false);
    let documents: u64 = files.iter().map(|file| file.documents).sum();
    bar.set_length(documents * selectors.len() as u64);
    let mut tallies = Vec::new();
    for &selector in &selectors {
        let mut side = Side::new(&opened, selector);
        let mut of_side = Vec::new();
        for file in &files {
            bar.set_message(format!("documents, {selector} {}", file.task.name()));
            let on_document = || bar.inc(1);
            let tally = args.tally(file, &encoder, &mut side, &mut results, &on_document)?;
            of_side.push(tally);
        }
        tallies.push((selector.name(), of_side));
    }
    bar.finish_and_clear();
    let model = opened.folder.path().display().to_string();
    let report = TasksReport::new(model, &settings, &files, &tallies);
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&report.to_string())?,
    }
    Ok(match report.is_interrupted {
        true => ExitCode::from(INTERRUPTED_STATUS),
        false => ExitCode::SUCCESS,
    })
}

impl TasksArgs {
    /// Finds the files, and checks each document before the first is scored.
    fn files(&self, encoder: &Encoder<'_>) -> Result<Vec<TaskFile>> {
        let mut files: Vec<TaskFile> = Vec::new();
        for task in &self.tasks {
            let is_new = files.iter().all(|file| file.task != *task);
            ensure!(is_new, "--tasks names {} twice", task.name());
            files.push(TaskFile {
                task: task.clone(),
                path: task.file(&self.data)?,
                documents: 0,
            });
        }
        for file in &mut files {
            file.documents = file.task.check(&file.path, self.limit, encoder)?;
        }
        Ok(files)
    }

    /// A side's answers to the documents of a file, or to those until somebody interrupts.
    fn tally(
        &self,
        file: &TaskFile,
        encoder: &Encoder<'_>,
        side: &mut Side<'_>,
        results: &mut Results,
        on_document: &dyn Fn(),
    ) -> Result<Tally> {
        let mut tally = Tally::default();
        let name = file.task.name();
        for document in Documents::open(&file.path, self.limit)? {
            let document = document?;
            let (continuations, cut_tokens) = encoder.encode(&document, &file.path)?;
            match answer(
                side,
                results,
                &name,
                document.id,
                &continuations,
                cut_tokens,
            ) {
                Ok(record) => tally.add(&file.task, &document, &record),
                Err(error) if is_interruption(&error) => break,
                Err(error) => {
                    let (path, id) = (file.path.display(), document.id);
                    return Err(error.context(format!("{path}, document {id}")));
                }
            }
            on_document();
        }
        Ok(tally)
    }
}

fn answer(
    side: &mut Side<'_>,
    results: &mut Results,
    task: &str,
    doc: u64,
    continuations: &[Continuation],
    cut_tokens: u64,
) -> Result<Record> {
    let question = Question {
        task,
        doc,
        ids_crc32c: ids_crc32c(continuations.iter().map(|text| (text.ids(), text.start()))),
        choices: continuations.len(),
        cut_tokens,
    };
    side.answer(question, results, |model| {
        score_continuations(model, continuations)
    })
}
