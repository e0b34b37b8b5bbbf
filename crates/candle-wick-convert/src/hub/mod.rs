//! Models of the Hugging Face hub: downloaded into the hub's own cache, where they are a folder like
//! any other.
//!
//! hf-hub speaks with the server and lays out the cache. What it leaves open is done here: which
//! files (`select`), whether each came whole (`fetch`), and what a refusal means (`error`).
//!
//! - `HF_HOME` says where the cache and the token file are, `HF_TOKEN` goes before that file,
//!   `HF_ENDPOINT` names another hub. hf-hub would read the first and the last; an empty variable
//!   counts as none here.
//! - A revision is resolved to its commit once, and all files are asked for by that commit: a push
//!   in the middle of a download cannot mix two versions.
//! - hf-hub sets no time limit. The work is therefore done in a thread, and given up when it reports
//!   nothing for `PATIENCE`; such a thread ends with the process, or when the server answers.
//!
//! Not here: reading the files (`source`), and anything but models.

mod error;
mod fetch;
mod select;

use std::any::Any;
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{sync_channel, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

pub use error::HubError;

use crate::config::{ModelConfig, CONFIG_FILE};
use crate::family::family_of;
use select::Selection;

/// Name of the threads that [`download`] starts. hf-hub panics over answers that no hub gives; the
/// error says so, and a program may keep its panic hook silent for this name.
pub const THREAD_NAME: &str = "hub";

/// The revision when none is asked for.
const DEFAULT_REVISION: &str = "main";

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// How long a server may send nothing; `HF_HUB_DOWNLOAD_TIMEOUT` has another number of seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest name of a model on the hub.
const REPO_NAME_MAX: usize = 96;

/// Reports under way between the two threads.
const REPORTS_MAX: usize = 64;

/// A model that lies in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    /// What to convert: the snapshot's folder, or the GGUF file in it that was chosen.
    pub path: PathBuf,
    /// What the user should know, a sentence each.
    pub notes: Vec<String>,
}

/// How far the download of one file is. Files come one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownloadProgress<'a> {
    /// The file.
    pub file: &'a str,
    /// Bytes of it that are there, those of an earlier call included.
    pub done_bytes: u64,
    /// Its size.
    pub total_bytes: u64,
}

/// Whether `text` has the form of a model's name on the hub, `ORG/NAME`.
pub fn is_repo_name(text: &str) -> bool {
    let is_part = |part: &str| {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let ends = [part.chars().next(), part.chars().last()];
        let edge = |end: &Option<char>| end.is_some_and(|c| !"-.".contains(c));
        ends.iter().all(edge) && part.chars().all(good)
    };
    text.split_once('/')
        .is_some_and(|(org, name)| is_part(org) && is_part(name))
        && text.len() <= REPO_NAME_MAX
        && !text.contains("--")
        && !text.contains("..")
}

/// Downloads what a conversion of the model `repo` reads, or finds it in the cache.
///
/// `revision` is a branch, tag or commit, `file` the GGUF file to take. Without a network a complete
/// copy in the cache is used, with a note. What an earlier call left unfinished is taken up.
///
/// # Errors
/// The hub cannot be reached, has no such model or refuses it, sends something else, or breaks off;
/// the model has no files that can be converted; the disk is full.
pub fn download(
    repo: &str,
    revision: Option<&str>,
    file: Option<&str>,
    progress: &dyn Fn(DownloadProgress<'_>),
) -> Result<HubModel, HubError> {
    let hub = Hub::from_env(repo, revision.unwrap_or(DEFAULT_REVISION))?;
    let patience = patience();
    let lister = hub.clone();
    match watched(&hub, patience, progress, move |_| lister.list()) {
        Err(error) if error.is_unreachable() => hub.cached(file, error),
        listing => {
            let (listing, fetcher, file) = (listing?, hub.clone(), file.map(str::to_owned));
            let fetch = move |report: &Report<'_>| fetcher.fetch(&listing, file.as_deref(), report);
            watched(&hub, patience, progress, fetch)
        }
    }
}

/// Where a model is, and how to ask for it.
#[derive(Clone)]
struct Hub {
    api: Api,
    cache: Cache,
    endpoint: String,
    has_token: bool,
    repo: String,
    revision: String,
}

/// What a revision of a model is.
struct Listing {
    commit: String,
    /// Files that could be asked for.
    names: BTreeSet<String>,
}

impl Hub {
    fn from_env(repo: &str, revision: &str) -> Result<Self, HubError> {
        if !is_repo_name(repo) {
            return Err(HubError::Name {
                what: "a model on the hub, ORG/NAME",
                got: repo.to_owned(),
            });
        }
        if !is_revision(revision) {
            return Err(HubError::Name {
                what: "a branch, tag or commit",
                got: revision.to_owned(),
            });
        }
        let home = set("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = |home: PathBuf| home.join(".cache/huggingface");
            env::home_dir().map(cache)
        });
        let cache = Cache::new(home.ok_or(HubError::NoHome)?.join("hub"));
        let token = set("HF_TOKEN").or_else(|| cache.token());
        let is_sendable = |token: &String| token.bytes().all(|byte| byte.is_ascii_graphic());
        if !token.as_ref().is_none_or(is_sendable) {
            let token_path = cache.token_path();
            return Err(HubError::Token { token_path });
        }
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let has_token = token.is_some();
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(endpoint.clone())
            .with_token(token)
            .build();
        Ok(Self {
            api: api.map_err(|error| HubError::NotAHub {
                endpoint: endpoint.clone(),
                problem: error.to_string(),
            })?,
            cache,
            endpoint,
            has_token,
            repo: repo.to_owned(),
            revision: revision.to_owned(),
        })
    }

    /// The model at a revision, for hf-hub.
    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, revision.to_owned())
    }

    fn list(&self) -> Result<Listing, HubError> {
        let info = self.api.repo(self.at(&self.revision)).info();
        let info = info.map_err(|error| HubError::of(error, self, None))?;
        if !is_commit(&info.sha) {
            let problem = format!("`{}` is no commit", info.sha);
            return Err(self.not_a_hub(problem));
        }
        let names = info.siblings.into_iter().map(|file| file.rfilename);
        Ok(Listing {
            commit: info.sha,
            names: names.filter(|name| select::is_fetchable(name)).collect(),
        })
    }

    /// Brings everything that is selected, small files first.
    fn fetch(
        &self,
        listing: &Listing,
        file: Option<&str>,
        report: &Report<'_>,
    ) -> Result<HubModel, HubError> {
        let Listing { commit, names } = listing;
        let remote: ApiRepo = self.api.repo(self.at(commit));
        let fetch = |name: &str| self.fetch_file(&remote, commit, name, report);
        let selection = Selection::of(names, file, |index| Ok(fs::read(fetch(index)?).ok()))
            .map_err(|error| error.in_repo(&self.repo))?;
        for name in &selection.companions {
            let path = fetch(name)?;
            if name == CONFIG_FILE && selection.gguf.is_none() {
                self.check_config(&path)?;
            }
        }
        for name in &selection.weights {
            fetch(name)?;
        }
        let cached = self.cache.repo(self.at(&self.revision));
        let noted = cached.create_ref(commit);
        noted.map_err(HubError::cache(self.cache.path(), "write to"))?;
        let folder = cached.pointer_path(commit);
        let note = format!("{} is commit {commit}, in {}", self.repo, folder.display());
        Ok(selection.model(folder, note))
    }

    /// What cannot be converted need not be downloaded.
    fn check_config(&self, path: &Path) -> Result<(), HubError> {
        let folder = path.parent().unwrap_or(path);
        let supported = ModelConfig::read(folder).and_then(|mut config| {
            let family = family_of(&config)?;
            (family.modernise)(&mut config)?;
            (family.spec)(&config).map(|_| ())
        });
        supported.map_err(|error| HubError::Model {
            repo: self.repo.clone(),
            error: Box::new(error),
        })
    }

    /// The copy in the cache, when it is complete; `unreachable` otherwise.
    fn cached(&self, file: Option<&str>, unreachable: HubError) -> Result<HubModel, HubError> {
        let cached = self.cache.repo(self.at(&self.revision));
        let repo = self
            .cache
            .path()
            .join(self.at(&self.revision).folder_name());
        let noted = fs::read_to_string(repo.join("refs").join(&self.revision));
        let commit = noted.unwrap_or_else(|_| self.revision.clone());
        let commit = commit.trim();
        if !is_commit(commit) {
            return Err(unreachable);
        }
        let folder = cached.pointer_path(commit);
        let Ok(entries) = fs::read_dir(&folder) else {
            return Err(unreachable);
        };
        let whole = entries.flatten().filter(|entry| entry.path().is_file());
        let names = whole.filter_map(|entry| entry.file_name().into_string().ok());
        let names = names.filter(|name| select::is_fetchable(name)).collect();
        let read = |index: &str| Ok(fs::read(folder.join(index)).ok());
        let Ok(selection) = Selection::of(&names, file, read) else {
            return Err(unreachable);
        };
        let note = format!(
            "{} is out of reach: converted from the copy of commit {commit} in {}",
            self.endpoint,
            folder.display()
        );
        Ok(selection.model(folder, note))
    }

    fn not_a_hub(&self, problem: impl Into<String>) -> HubError {
        HubError::NotAHub {
            endpoint: self.endpoint.clone(),
            problem: problem.into(),
        }
    }
}

/// What the working thread tells.
enum Message<T> {
    /// Bytes of a file, or only that the server answered.
    Progress(Option<(String, u64, u64)>),
    Done(Result<T, HubError>),
}

/// Tells the watching thread of bytes done of a file's, or that there was an answer.
type Report<'a> = dyn Fn(Option<(&str, u64, u64)>) + 'a;

/// Does `work` in a thread, and gives up when it reports nothing for `patience`.
fn watched<T: Send + 'static>(
    hub: &Hub,
    patience: Duration,
    progress: &dyn Fn(DownloadProgress<'_>),
    work: impl FnOnce(&Report<'_>) -> Result<T, HubError> + Send + 'static,
) -> Result<T, HubError> {
    let (sender, messages) = sync_channel(REPORTS_MAX);
    let run = move |sender: SyncSender<Message<T>>| {
        // A send fails only when the other side has given up, and then nobody is interested.
        let report = |bytes: Option<(&str, u64, u64)>| {
            let bytes = bytes.map(|(file, done, total)| (file.to_owned(), done, total));
            let _given_up = sender.send(Message::Progress(bytes));
        };
        let done = work(&report);
        let _given_up = sender.send(Message::Done(done));
    };
    let thread = thread::Builder::new().name(THREAD_NAME.to_owned());
    let started = thread.spawn(move || run(sender));
    let started = started.map_err(HubError::cache(hub.cache.path(), "start a thread for"))?;
    loop {
        match messages.recv_timeout(patience) {
            Ok(Message::Progress(None)) => {}
            Ok(Message::Progress(Some((file, done_bytes, total_bytes)))) => {
                progress(DownloadProgress {
                    file: &file,
                    done_bytes,
                    total_bytes,
                });
            }
            Ok(Message::Done(result)) => return result,
            Err(RecvTimeoutError::Timeout) => {
                return Err(HubError::Stalled {
                    endpoint: hub.endpoint.clone(),
                    seconds: patience.as_secs(),
                })
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(hub.not_a_hub(panic_message(started.join().err())))
            }
        }
    }
}

/// What a thread said when it panicked.
fn panic_message(payload: Option<Box<dyn Any + Send>>) -> String {
    let text = payload.as_deref().and_then(|payload| {
        let owned = payload.downcast_ref::<String>().map(String::as_str);
        owned.or_else(|| payload.downcast_ref::<&str>().copied())
    });
    text.unwrap_or("its answer makes no sense").to_owned()
}

/// An environment variable that is not empty.
fn set(name: &str) -> Option<String> {
    let value = env::var(name).ok()?.trim().to_owned();
    (!value.is_empty()).then_some(value)
}

fn patience() -> Duration {
    let seconds = set("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.parse().ok());
    seconds
        .filter(|&seconds| seconds > 0)
        .map_or(PATIENCE, Duration::from_secs)
}

/// Whether this can be part of an address and of a path below `refs`.
fn is_revision(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_./+@".contains(c);
    let parts = || text.split('/');
    text.chars().all(good)
        && parts().all(|part| !part.is_empty() && !part.starts_with('.'))
        && !text.contains("..")
}

/// Whether this is a commit's hash.
fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_recognised() {
        for good in ["facebook/opt-125m", "a/b", "01-ai/Yi_1.5", "_x/y_"] {
            assert!(is_repo_name(good), "{good}");
        }
        let long = format!("a/{}", "b".repeat(100));
        let bad = [
            "gpt2", "", "/", "a/", "/b", "a/b/c", "./a", "../a", "a/.b", "a/b--c", "a/b..c",
            "a b/c", "-a/b", "a/b-", "a/b.", "~/b", "a/b?c", &long,
        ];
        for bad in bad {
            assert!(!is_repo_name(bad), "{bad}");
        }
    }

    #[test]
    fn revisions_stay_in_their_folder() {
        for good in ["main", "refs/pr/1", "v1.0", "0123abc", "a+b@c"] {
            assert!(is_revision(good), "{good}");
        }
        for bad in [
            "", "..", "../x", "a/../b", "/a", "a/", "a//b", "a b", "a?b", "a#", ".a", "a/.b", "%2e",
        ] {
            assert!(!is_revision(bad), "{bad}");
        }
        assert!(is_commit("0123456789abcdef0123456789abcdef01234567"));
        for bad in ["", "main", "../../../..", "0123456789abcdeg"] {
            assert!(!is_commit(bad), "{bad}");
        }
    }
}
