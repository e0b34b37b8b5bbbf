//! The tasks: where their documents lie, and what an answer counts.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{bail, ensure, Result};
use serde::Serialize;

use super::documents::{Document, Documents};
use super::encoder::Encoder;
use super::results::{Record, Work};
use super::side::WorkReport;
use super::statistics::Estimate;

/// How a task is scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    /// The likeliest choice should be the right one.
    Choices,
    /// The same, and once more with each choice's log-probability divided by its characters: long ones are unlikely.
    ChoicesByLength,
    /// Greedy decoding should write the only choice.
    LastWord,
}

/// Name, the form of its documents that is usual, and how it is scored.
///
/// Choices of winogrande differ in the context and share the continuation (partial scoring); those of mmlu are letters:
/// both need no measure by length.
const TASKS: [(&str, &str, Measure); 7] = [
    ("arc_easy", "rc_0shot", Measure::ChoicesByLength),
    ("arc_challenge", "rc_0shot", Measure::ChoicesByLength),
    ("hellaswag", "rc_0shot", Measure::ChoicesByLength),
    ("piqa", "rc_0shot", Measure::ChoicesByLength),
    ("winogrande", "rc_0shot", Measure::Choices),
    ("lambada", "bpb_0shot", Measure::LastWord),
    ("mmlu", "mc_5shot", Measure::Choices),
];

/// A task in one of its forms, as typed: `piqa`, or `piqa/mc_5shot`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Task {
    name: &'static str,
    form: String,
    is_usual_form: bool,
    measure: Measure,
}

impl FromStr for Task {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, form) = match text.split_once('/') {
            Some((name, form)) => (name, Some(form)),
            None => (text, None),
        };
        let Some((name, usual, measure)) = TASKS.into_iter().find(|task| task.0 == name) else {
            let known: Vec<&str> = TASKS.iter().map(|task| task.0).collect();
            return Err(format!("unknown task; {} are known", known.join(", ")));
        };
        let form = form.unwrap_or(usual);
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if form.is_empty() || !form.chars().all(is_word) {
            return Err("a form is a folder's name, such as rc_0shot".to_owned());
        }
        Ok(Self {
            name,
            form: form.to_owned(),
            is_usual_form: form == usual,
            measure,
        })
    }
}

impl Task {
    /// What it is called in results.
    pub(super) fn name(&self) -> String {
        match self.is_usual_form {
            true => self.name.to_owned(),
            false => format!("{}/{}", self.name, self.form),
        }
    }

    /// The file of its documents in `data`.
    pub(super) fn file(&self, data: &Path) -> Result<PathBuf> {
        let folder = data.join(self.name).join(&self.form);
        let mut places = vec![
            folder.join("requests.jsonl.gz"),
            folder.join("requests.jsonl"),
        ];
        if self.is_usual_form {
            places.push(data.join(format!("{}.jsonl.gz", self.name)));
            places.push(data.join(format!("{}.jsonl", self.name)));
        }
        match places.iter().find(|place| place.is_file()) {
            Some(place) => Ok(place.clone()),
            None => bail!(
                "{}: no documents; {} is not there",
                self.name(),
                places[0].display()
            ),
        }
    }

    /// Reads through the documents of `path` and has each of them turned into tokens: what cannot be scored is told now
    /// and not after hours. Gives how many there are.
    ///
    /// # Errors
    /// There is none, or one of them is broken, does not suit the task, or has no tokens that the model could score.
    pub(super) fn check(
        &self,
        path: &Path,
        limit: Option<u64>,
        encoder: &Encoder<'_>,
    ) -> Result<u64> {
        let mut count = 0;
        for document in Documents::open(path, limit)? {
            let document = document?;
            if let Err(reason) = self.check_document(&document) {
                let line = document.choices.first().map_or(0, |choice| choice.line);
                bail!("{}, line {line}: {reason}", path.display());
            }
            encoder.encode(&document, path)?;
            count += 1;
        }
        ensure!(count > 0, "{} has no documents", path.display());
        Ok(count)
    }

    fn check_document(&self, document: &Document) -> Result<(), String> {
        let (id, count) = (document.id, document.choices.len());
        match self.measure {
            Measure::LastWord if count != 1 => {
                Err(format!("document {id} has {count} continuations, not one"))
            }
            Measure::LastWord => Ok(()),
            _ if count < 2 => Err(format!("document {id} has a single choice")),
            _ => match document.label {
                Some(label) if label < count as u64 => Ok(()),
                Some(label) => Err(format!(
                    "document {id} of {count} choices has label {label}"
                )),
                None => Err(format!(
                    "the label of document {id} is no number of a choice"
                )),
            },
        }
    }
}

/// What a selector's answers to a task's documents add up to.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// A number a document: 1 where the answer was right.
    acc: Vec<f64>,
    acc_norm: Vec<f64>,
    /// `-ln p` of the last word.
    nll: Vec<f64>,
    /// Documents whose context was cut.
    pub(super) cut_documents: u64,
    pub(super) work: Work,
}

/// The scores of a task under one selector.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct TaskScores {
    /// Documents that are done.
    pub(super) documents: usize,
    pub(super) acc: Option<Estimate>,
    pub(super) acc_norm: Option<Estimate>,
    pub(super) nll: Option<Estimate>,
    pub(super) perplexity: Option<f64>,
    pub(super) work: WorkReport,
}

/// Sparse minus dense, paired by document.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct TaskDifference {
    pub(super) acc: Option<Estimate>,
    pub(super) acc_norm: Option<Estimate>,
    pub(super) nll: Option<Estimate>,
}

impl Tally {
    /// Adds the answer to `document`.
    pub(super) fn add(&mut self, task: &Task, document: &Document, record: &Record) {
        let right = |is_right: bool| f64::from(u8::from(is_right));
        match task.measure {
            Measure::LastWord => {
                self.acc.push(right(record.is_greedy.iter().all(|is| *is)));
                self.nll.push(-record.logprobs.iter().sum::<f64>());
            }
            measure => {
                let is_label = |choice: Option<usize>| {
                    right(choice.is_some() && choice.map(|choice| choice as u64) == document.label)
                };
                let logprobs = &record.logprobs;
                self.acc.push(is_label(largest(logprobs.iter().copied())));
                if measure == Measure::ChoicesByLength {
                    let lengths = document
                        .choices
                        .iter()
                        .map(|choice| length(&choice.continuation));
                    let by_length = logprobs
                        .iter()
                        .zip(lengths)
                        .map(|(sum, length)| sum / length);
                    self.acc_norm.push(is_label(largest(by_length)));
                }
            }
        }
        self.cut_documents += u64::from(record.cut_tokens > 0);
        self.work += record.work;
    }

    /// Documents that are done.
    pub(super) fn documents(&self) -> usize {
        self.acc.len()
    }

    pub(super) fn scores(&self) -> TaskScores {
        let nll = Estimate::of(&self.nll);
        TaskScores {
            documents: self.documents(),
            acc: Estimate::of(&self.acc),
            acc_norm: Estimate::of(&self.acc_norm),
            nll,
            perplexity: nll.map(|nll| nll.mean.exp()),
            work: WorkReport::of(self.work),
        }
    }

    /// `sparse` minus this one.
    pub(super) fn difference(&self, sparse: &Self) -> TaskDifference {
        TaskDifference {
            acc: Estimate::of_difference(&self.acc, &sparse.acc),
            acc_norm: Estimate::of_difference(&self.acc_norm, &sparse.acc_norm),
            nll: Estimate::of_difference(&self.nll, &sparse.nll),
        }
    }
}

/// The first of the largest numbers, as torch's `argmax` has it.
fn largest(numbers: impl Iterator<Item = f64>) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (index, number) in numbers.enumerate() {
        if best.is_none_or(|(_, largest)| number > largest) {
            best = Some((index, number));
        }
    }
    best.map(|(index, _)| index)
}

/// Characters of a choice: of its continuation without the space that sets it off from the context.
fn length(continuation: &str) -> f64 {
    let choice = continuation.strip_prefix(' ').unwrap_or(continuation);
    choice.chars().count().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::super::documents::Choice;
    use super::*;

    fn document(continuations: &[&str], label: Option<u64>) -> Document {
        let choices = continuations.iter().map(|continuation| Choice {
            context: "c".to_owned(),
            continuation: (*continuation).to_owned(),
            line: 1,
        });
        Document {
            id: 4,
            choices: choices.collect(),
            label,
        }
    }

    fn record(logprobs: &[f64], is_greedy: &[bool]) -> Record {
        Record {
            selector: "dense".to_owned(),
            task: "t".to_owned(),
            doc: 4,
            ids_crc32c: 0,
            logprobs: logprobs.to_vec(),
            is_greedy: is_greedy.to_vec(),
            cut_tokens: 3,
            work: Work::default(),
        }
    }

    #[test]
    fn names_lead_to_files_and_others_are_refused() {
        let task: Task = "piqa".parse().unwrap();
        assert_eq!(
            (task.name(), task.form.as_str()),
            ("piqa".to_owned(), "rc_0shot")
        );
        let other: Task = "piqa/mc_5shot".parse().unwrap();
        assert_eq!(other.name(), "piqa/mc_5shot");
        let usual: Task = "piqa/rc_0shot".parse().unwrap();
        assert_eq!(usual, task);
        for bad in ["", "boolq", "piqa/", "piqa/../x", "piqa/a/b", "/piqa"] {
            assert!(bad.parse::<Task>().is_err(), "{bad}");
        }
        let folder = tempfile::tempdir().unwrap();
        let error = task.file(folder.path()).unwrap_err().to_string();
        assert!(error.contains("piqa/rc_0shot/requests.jsonl.gz"), "{error}");
        let plain = folder.path().join("piqa.jsonl");
        std::fs::write(&plain, "").unwrap();
        assert_eq!(task.file(folder.path()).unwrap(), plain);
        assert!(other.file(folder.path()).is_err());
    }

    #[test]
    fn documents_that_do_not_suit_a_task_are_refused() {
        let choices: Task = "winogrande".parse().unwrap();
        let word: Task = "lambada".parse().unwrap();
        assert_eq!(
            choices.check_document(&document(&[" a", " b"], Some(1))),
            Ok(())
        );
        assert_eq!(word.check_document(&document(&[" a"], None)), Ok(()));
        for (task, document, expected) in [
            (
                &choices,
                document(&[" a", " b"], Some(2)),
                "2 choices has label 2",
            ),
            (
                &choices,
                document(&[" a", " b"], None),
                "no number of a choice",
            ),
            (&choices, document(&[" a"], Some(0)), "single choice"),
            (&word, document(&[" a", " b"], None), "2 continuations"),
        ] {
            let reason = task.check_document(&document).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        }
    }

    #[test]
    fn length_decides_where_a_task_asks_for_it() {
        let document = document(&[" ab", " abcd"], Some(1));
        let answer = record(&[-2.0, -3.0], &[false, false]);
        let mut by_length = Tally::default();
        by_length.add(&"piqa".parse().unwrap(), &document, &answer);
        assert_eq!(
            (&by_length.acc[..], &by_length.acc_norm[..]),
            (&[0.0][..], &[1.0][..])
        );
        assert_eq!(by_length.cut_documents, 1);
        let mut plain = Tally::default();
        plain.add(&"mmlu".parse().unwrap(), &document, &answer);
        assert_eq!((plain.acc.len(), plain.acc_norm.len()), (1, 0));
        let difference = plain.difference(&by_length);
        assert_eq!(difference.acc.unwrap().mean, 0.0);
        assert!(difference.acc_norm.is_none());
        // Characters, not bytes, and nothing is divided by nothing.
        assert_eq!((length(" äö"), length("äö"), length(" ")), (2.0, 2.0, 1.0));
    }

    #[test]
    fn a_last_word_is_right_when_greedy_decoding_writes_it() {
        let task: Task = "lambada".parse().unwrap();
        let mut tally = Tally::default();
        tally.add(
            &task,
            &document(&[" word"], None),
            &record(&[-2.0], &[true]),
        );
        tally.add(
            &task,
            &document(&[" word"], None),
            &record(&[-4.0], &[false]),
        );
        let scores = tally.scores();
        assert_eq!(scores.acc.unwrap().mean, 0.5);
        assert_eq!(scores.perplexity, Some(3f64.exp()));
        assert_eq!(largest([1.0, 2.0, 2.0].into_iter()), Some(1));
    }
}
