//! One file from the hub into the cache, checked against the size that the server has.
//!
//! hf-hub goes on where a `.part` file ends, and takes what it then has for the whole file. Left for
//! this file: parts that are whole already (a server has nothing to add to those), blobs that another
//! revision brought, links to nothing, and whatever came out in another size.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiError, ApiRepo, Metadata};
use hf_hub::api::Progress;
use wick_format::is_plain_file_name;

use super::{Hub, HubError, Report};

/// Downloads of one file in one call: a part that turns out to be useless is dropped once.
const ATTEMPTS: usize = 2;

/// A file's places in the cache.
struct CachedFile {
    /// In the snapshot's folder, a link to the blob.
    pointer: PathBuf,
    blob: PathBuf,
    part: PathBuf,
    /// The blob as seen from the pointer.
    link: PathBuf,
    size_bytes: u64,
}

impl Hub {
    /// The path of `name` in the cache, where it is whole.
    pub(super) fn fetch_file(
        &self,
        remote: &ApiRepo,
        commit: &str,
        name: &str,
        report: &Report<'_>,
    ) -> Result<PathBuf, HubError> {
        let metadata = self.api.metadata(&remote.url(name));
        let metadata = metadata.map_err(|error| HubError::of(error, self, Some((name, 0))))?;
        report(None);
        let file = self.places(&metadata, commit, name)?;
        for _ in 0..ATTEMPTS {
            file.make_ready()?;
            if file.is_whole() {
                return Ok(file.pointer);
            }
            let (progress, had_bytes) = (Reporter::new(report), len(&file.part).unwrap_or(0));
            match remote.download_with_progress(name, progress) {
                Ok(_) | Err(ApiError::InvalidResume) => {}
                Err(error) => {
                    let done = len(&file.part).unwrap_or(had_bytes);
                    return Err(HubError::of(error, self, Some((name, done))));
                }
            }
            if file.is_whole() {
                return Ok(file.pointer);
            }
        }
        let got = len(&file.pointer).unwrap_or(0);
        // It must not be found there as if it were good.
        file.remove(&file.pointer)?;
        file.remove(&file.blob)?;
        Err(HubError::WrongSize {
            file: name.to_owned(),
            got,
            expected: file.size_bytes,
        })
    }

    fn places(
        &self,
        metadata: &Metadata,
        commit: &str,
        name: &str,
    ) -> Result<CachedFile, HubError> {
        if metadata.commit_hash() != commit {
            let other = metadata.commit_hash();
            let problem = format!("{name} of commit {other} instead of {commit}");
            return Err(self.not_a_hub(problem));
        }
        let etag = metadata.etag();
        if !etag.split('/').all(is_plain_file_name) {
            return Err(self.not_a_hub(format!("{name} with the etag `{etag}`")));
        }
        let cached = self.cache.repo(self.at(commit));
        let blob = cached.blob_path(etag);
        Ok(CachedFile {
            pointer: cached.pointer_path(commit).join(name),
            part: blob.with_extension("part"),
            link: Path::new("../../blobs").join(etag),
            blob,
            size_bytes: metadata.size() as u64,
        })
    }
}

impl CachedFile {
    fn is_whole(&self) -> bool {
        len(&self.pointer) == Some(self.size_bytes)
    }

    /// Uses what is there, and puts out of the way what hf-hub would stumble over.
    fn make_ready(&self) -> Result<(), HubError> {
        if self.is_whole() {
            return Ok(());
        }
        self.remove(&self.pointer)?;
        if len(&self.blob) == Some(self.size_bytes) {
            let folder = self.pointer.parent().unwrap_or(&self.pointer);
            fs::create_dir_all(folder).map_err(HubError::cache(folder, "create"))?;
            let linked = symlink(&self.link, &self.pointer);
            return linked.map_err(HubError::cache(&self.pointer, "create"));
        }
        match len(&self.part) {
            Some(bytes) if bytes > self.size_bytes => self.remove(&self.part),
            // Killed before it was renamed: with a byte left to ask for, hf-hub finishes it.
            Some(bytes) if bytes == self.size_bytes && bytes > 0 => {
                let opened = OpenOptions::new().write(true).open(&self.part);
                let cut = opened.and_then(|part| part.set_len(bytes - 1));
                cut.map_err(HubError::cache(&self.part, "write to"))
            }
            _ => Ok(()),
        }
    }

    fn remove(&self, path: &Path) -> Result<(), HubError> {
        if path.symlink_metadata().is_err() {
            return Ok(());
        }
        fs::remove_file(path).map_err(HubError::cache(path, "remove"))
    }
}

/// Size of a file, links followed.
fn len(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|found| found.len())
}

/// hf-hub's progress, reported on.
struct Reporter<'a> {
    report: &'a Report<'a>,
    file: String,
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a> Reporter<'a> {
    fn new(report: &'a Report<'a>) -> Self {
        Self {
            report,
            file: String::new(),
            done_bytes: 0,
            total_bytes: 0,
        }
    }
}

impl Progress for Reporter<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        self.file = filename.to_owned();
        self.done_bytes = 0;
        self.total_bytes = size as u64;
    }

    fn update(&mut self, size: usize) {
        self.done_bytes += size as u64;
        (self.report)(Some((&self.file, self.done_bytes, self.total_bytes)));
    }

    fn finish(&mut self) {}
}
