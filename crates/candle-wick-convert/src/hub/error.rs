//! What can go wrong with the hub: one sentence each, which ends with what to do.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use hf_hub::api::sync::ApiError;
use thiserror::Error;

use super::Hub;
use crate::ConvertError;

/// What is asked for before any file.
const LIST: &str = "the list of files";

/// A download that did not happen, or stopped. What has come stays in the cache.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HubError {
    /// A name that no model, branch, tag or commit can have.
    #[error("`{got}` is no name of {what}")]
    Name {
        /// What it should be the name of.
        what: &'static str,
        /// The name.
        got: String,
    },
    /// A token that cannot be sent.
    #[error("the token in HF_TOKEN or {} is no token: it has spaces or other odd characters", token_path.display())]
    Token {
        /// The token file.
        token_path: PathBuf,
    },
    /// Nowhere to put the cache.
    #[error("there is no home folder for the hub's cache: set HF_HOME to a folder for it")]
    NoHome,
    /// No connection.
    #[error(
        "{endpoint} cannot be reached ({problem}): check the network and HF_ENDPOINT, or download the \
         model by other means and give its folder"
    )]
    Unreachable {
        /// The hub's address.
        endpoint: String,
        /// What the system says.
        problem: String,
    },
    /// A server that stays silent.
    #[error(
        "{endpoint} sent nothing for {seconds} s: run the same command again, it goes on where this \
         one stopped (HF_HUB_DOWNLOAD_TIMEOUT=SECONDS waits longer)"
    )]
    Stalled {
        /// The hub's address.
        endpoint: String,
        /// How long was waited.
        seconds: u64,
    },
    /// A model that not everybody may read, or that does not exist: hubs do not say which.
    #[error(
        "{page} refuses {what} {} (status {status}): check the spelling; for a gated model accept its \
         licence on that page, then put a token into HF_TOKEN or {}",
        if *has_token { "with the token in use" } else { "without a token" },
        token_path.display()
    )]
    Refused {
        /// The model's page.
        page: String,
        /// The file, or the list of files.
        what: String,
        /// Whether a token was sent.
        has_token: bool,
        /// 401 or 403.
        status: u16,
        /// The token file.
        token_path: PathBuf,
    },
    /// No such model, revision or file.
    #[error(
        "{page} has no {what} (status 404): check the spelling; a private model is answered like that \
         without a token that may read it (HF_TOKEN)"
    )]
    NotFound {
        /// The model's page.
        page: String,
        /// The revision, or the file at it.
        what: String,
    },
    /// Too many requests.
    #[error(
        "{endpoint} answers no more requests for now (status 429): run the same command again in some \
         minutes{}",
        if *has_token { "" } else { ", or with a token in HF_TOKEN, which allows more" }
    )]
    RateLimited {
        /// The hub's address.
        endpoint: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// A server in trouble.
    #[error("{endpoint} answered with status {status}: run the same command again later")]
    Status {
        /// The hub's address.
        endpoint: String,
        /// The status.
        status: u16,
    },
    /// Something that answers, but not as a hub does.
    #[error(
        "{endpoint} does not answer as the hub does ({problem}): check HF_ENDPOINT, and whether a \
         proxy or a login page stands in between"
    )]
    NotAHub {
        /// The address.
        endpoint: String,
        /// What is odd about the answer.
        problem: String,
    },
    /// A server that sends whole files only.
    #[error(
        "{endpoint} does not send parts of files (HTTP Range), as it must for {file}: download the \
         model by other means and give its folder"
    )]
    NoRanges {
        /// The hub's address.
        endpoint: String,
        /// The file.
        file: String,
    },
    /// A connection that ended before the file did.
    #[error(
        "the download of {file} broke off after {done_bytes} bytes ({problem}): run the same command \
         again, it goes on from there"
    )]
    BrokenOff {
        /// The file.
        file: String,
        /// Bytes of it in the cache.
        done_bytes: u64,
        /// What the system says.
        problem: String,
    },
    /// A file that came in another size than the server said, twice.
    #[error(
        "{file} came with {got} bytes instead of {expected}, and was removed: run the same command \
         again, or download the model by other means and give its folder"
    )]
    WrongSize {
        /// The file.
        file: String,
        /// Bytes that came.
        got: u64,
        /// Bytes that the server has.
        expected: u64,
    },
    /// The disk has no room.
    #[error(
        "no room on the disk for {file} in {}: make room, or set HF_HOME to a folder on another disk, \
         then run the same command again", cache.display()
    )]
    DiskFull {
        /// The file.
        file: String,
        /// The cache's folder.
        cache: PathBuf,
    },
    /// Another process at work on the same file.
    #[error(
        "another process downloads the same file ({} is locked): wait until it is done, then run the \
         same command again", path.display()
    )]
    Locked {
        /// The lock.
        path: PathBuf,
    },
    /// The cache cannot be read or written.
    #[error("cannot {action} {}: {source}; HF_HOME can name another folder", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// A model without the files that a conversion needs.
    #[error("{repo} {problem}")]
    Repo {
        /// The model.
        repo: String,
        /// The rest of the sentence.
        problem: String,
    },
    /// A model that cannot be converted, by its `config.json`.
    #[error("the weights of {repo} were not downloaded, because {error}")]
    Model {
        /// The model.
        repo: String,
        /// Why it cannot be converted.
        error: Box<ConvertError>,
    },
}

impl HubError {
    /// Whether the hub could not be spoken to at all, or is out of order.
    pub(super) fn is_unreachable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Stalled { .. } => true,
            Self::Status { status, .. } => *status >= 500,
            _ => false,
        }
    }

    /// Whether the hub has no such model, as far as it says.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::NotFound { .. } => true,
            Self::Refused { what, .. } => what == LIST,
            _ => false,
        }
    }

    /// For `map_err`: the system's refusal with path and action.
    pub(super) fn cache(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Cache {
            path,
            action,
            source,
        }
    }

    /// What hf-hub's error means. `file` is the file that was asked for and its bytes in the cache,
    /// `None` for the list of files.
    pub(super) fn of(error: ApiError, hub: &Hub, file: Option<(&str, u64)>) -> Self {
        let name = file.map_or(LIST, |(name, _)| name).to_owned();
        match error {
            ApiError::RequestError(error) => match (*error, file) {
                (ureq::Error::StatusCode(status), _) => Self::of_status(status, hub, file),
                // In the middle of a file it is a connection like any other that ends.
                (ureq::Error::Io(error), Some(_)) if is_network(&error) => {
                    Self::of_io(error, hub, file)
                }
                (
                    error @ (ureq::Error::Io(_)
                    | ureq::Error::HostNotFound
                    | ureq::Error::ConnectionFailed
                    | ureq::Error::ConnectProxyFailed(_)),
                    _,
                ) => Self::Unreachable {
                    endpoint: hub.endpoint.clone(),
                    problem: error.to_string(),
                },
                (error, _) => hub.not_a_hub(error.to_string()),
            },
            ApiError::IoError(error) => Self::of_io(error, hub, file),
            ApiError::LockAcquisition(path) => Self::Locked { path },
            ApiError::MissingHeader(header) if header.eq_ignore_ascii_case("content-range") => {
                Self::NoRanges {
                    endpoint: hub.endpoint.clone(),
                    file: name,
                }
            }
            other => hub.not_a_hub(format!("{name}: {other}")),
        }
    }

    fn of_status(status: u16, hub: &Hub, file: Option<(&str, u64)>) -> Self {
        let (endpoint, has_token) = (hub.endpoint.clone(), hub.has_token);
        let page = format!("{endpoint}/{}", hub.repo);
        match status {
            401 | 403 => Self::Refused {
                page,
                what: file.map_or(LIST, |(name, _)| name).to_owned(),
                has_token,
                status,
                token_path: hub.cache.token_path(),
            },
            404 => Self::NotFound {
                page,
                what: match file {
                    Some((name, _)) => format!("{name} at revision `{}`", hub.revision),
                    None => format!("revision `{}`, or does not exist itself", hub.revision),
                },
            },
            429 => Self::RateLimited {
                endpoint,
                has_token,
            },
            _ => Self::Status { endpoint, status },
        }
    }

    /// An error of a disk or of a connection: hf-hub copies from one to the other.
    fn of_io(error: io::Error, hub: &Hub, file: Option<(&str, u64)>) -> Self {
        let (name, done_bytes) = file.unwrap_or((LIST, 0));
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                Self::DiskFull {
                    file: name.to_owned(),
                    cache: hub.cache.path().clone(),
                }
            }
            _ if is_network(&error) => Self::BrokenOff {
                file: name.to_owned(),
                done_bytes,
                problem: error.to_string(),
            },
            _ => Self::cache(hub.cache.path(), "write to")(error),
        }
    }
}

/// Whether this comes from a connection that was there.
fn is_network(error: &io::Error) -> bool {
    let inner = error.get_ref();
    inner.is_some_and(|inner| inner.is::<ureq::Error>())
        || matches!(
            error.kind(),
            ErrorKind::UnexpectedEof
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::BrokenPipe
                | ErrorKind::NotConnected
                | ErrorKind::TimedOut
                | ErrorKind::InvalidData
        )
}
