//! What `wick eval tasks` found, as a table and as a JSON object.

use std::fmt;

use serde::Serialize;

use super::results::{Settings, Work};
use super::side::WorkReport;
use super::statistics::Estimate;
use super::task::{Tally, TaskDifference, TaskScores};
use super::tasks::TaskFile;

/// All tasks under both selectors.
#[derive(Serialize)]
pub(super) struct TasksReport {
    model: String,
    ctx: usize,
    /// Whether special tokens, such as a BOS, preceded the contexts.
    special_tokens: bool,
    /// Whether somebody stopped the run before all documents were done.
    pub(super) is_interrupted: bool,
    /// `dense` first, then the selector that was asked for where it is another.
    selectors: Vec<SelectorReport>,
    tasks: Vec<TaskReport>,
}

/// What a selector took for all tasks.
#[derive(Serialize)]
struct SelectorReport {
    selector: &'static str,
    work: WorkReport,
}

/// One task.
#[derive(Serialize)]
struct TaskReport {
    task: String,
    documents: u64,
    /// Documents whose context was longer than the model's and lost its beginning.
    cut_documents: u64,
    dense: TaskScores,
    sparse: Option<TaskScores>,
    /// Sparse minus dense.
    difference: Option<TaskDifference>,
}

impl TasksReport {
    /// Of the tallies of each selector: one for each of `files`.
    pub(super) fn new(
        model: String,
        settings: &Settings,
        files: &[TaskFile],
        tallies: &[(&'static str, Vec<Tally>)],
    ) -> Self {
        let of_selector = |(selector, tallies): &(&'static str, Vec<Tally>)| {
            let mut work = Work::default();
            tallies.iter().for_each(|tally| work += tally.work);
            SelectorReport {
                selector,
                work: WorkReport::of(work),
            }
        };
        let of_task = |(index, file): (usize, &TaskFile)| {
            let tally = |side: usize| tallies.get(side).map(|(_, tallies)| &tallies[index]);
            let dense = tally(0).expect("dense is always among the selectors");
            let sparse = tally(1);
            TaskReport {
                task: file.task.name(),
                documents: file.documents,
                cut_documents: dense.cut_documents,
                dense: dense.scores(),
                sparse: sparse.map(Tally::scores),
                difference: sparse.map(|sparse| dense.difference(sparse)),
            }
        };
        let is_done = |tallies: &Vec<Tally>| {
            let counts = tallies.iter().map(|tally| tally.documents() as u64);
            counts.eq(files.iter().map(|file| file.documents))
        };
        Self {
            model,
            ctx: settings.ctx,
            special_tokens: settings.special_tokens,
            is_interrupted: !tallies.iter().all(|(_, tallies)| is_done(tallies)),
            selectors: tallies.iter().map(of_selector).collect(),
            tasks: files.iter().enumerate().map(of_task).collect(),
        }
    }
}

/// A cell of the table.
fn cell(estimate: Option<Estimate>) -> String {
    estimate.map_or("-".to_owned(), |estimate| estimate.to_text(4))
}

impl fmt::Display for TasksReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let specials = match self.special_tokens {
            true => "with",
            false => "without",
        };
        writeln!(
            f,
            "{}: context {}, {specials} special tokens\n\n\
             | task | documents | selector | acc | acc_norm | perplexity |\n|---|---|---|---|---|---|",
            self.model, self.ctx
        )?;
        for task in &self.tasks {
            let sides = [Some(&task.dense), task.sparse.as_ref()];
            for (selector, scores) in self.selectors.iter().zip(sides.into_iter().flatten()) {
                let perplexity = scores
                    .perplexity
                    .map_or("-".to_owned(), |ppl| format!("{ppl:.3}"));
                writeln!(
                    f,
                    "| {} | {} of {} | {} | {} | {} | {perplexity} |",
                    task.task,
                    scores.documents,
                    task.documents,
                    selector.selector,
                    cell(scores.acc),
                    cell(scores.acc_norm)
                )?;
            }
            if let Some(difference) = &task.difference {
                let ratio = difference
                    .nll
                    .map_or("-".to_owned(), |nll| format!("x {:.4}", nll.mean.exp()));
                writeln!(
                    f,
                    "| {} | | difference | {} | {} | {ratio} |",
                    task.task,
                    cell(difference.acc),
                    cell(difference.acc_norm)
                )?;
            }
        }
        writeln!(f)?;
        for selector in &self.selectors {
            writeln!(f, "{}: {}", selector.selector, selector.work.to_text())?;
        }
        for task in self.tasks.iter().filter(|task| task.cut_documents > 0) {
            let (name, count) = (&task.task, task.cut_documents);
            writeln!(f, "{name}: {count} documents lost the beginning of their context; --ctx COUNT keeps more")?;
        }
        if self.is_interrupted {
            writeln!(f, "interrupted: what was scored until then")?;
        }
        Ok(())
    }
}
