//! A memory cgroup: the kernel itself keeps a program within a budget, and tells what it used.
//!
//! Version 1 where its memory controller is mounted, else version 2, at the root or beside this process' own group
//! (where systemd delegates). Swapping is switched off where the kernel allows that, so that memory means memory.
//!
//! Invariants:
//! - A group that exists has its limit: one that cannot be given it is removed again.
//! - The group is removed on drop, unless something still runs in it.
//!
//! Not here: reading the limits this process is under (`wick_io::available_memory_bytes`).

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;

/// A cgroup with a limit on its memory.
#[derive(Debug)]
pub(crate) struct MemoryCgroup {
    path: PathBuf,
    files: &'static Files,
}

/// What the kernel counted for a group; `None` where it does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct CgroupUsage {
    /// The most that was charged at once: also page cache, page tables and the like.
    pub(crate) peak_bytes: Option<u64>,
    /// Processes killed for the limit.
    pub(crate) oom_kills: Option<u64>,
    /// How often the limit was met, and something had to be reclaimed.
    pub(crate) limit_hits: Option<u64>,
}

/// A number in a file of the group: the whole file, or the line that starts with a name.
#[derive(Debug)]
struct Number {
    file: &'static str,
    line: Option<&'static str>,
}

/// Names of the files of a version.
#[derive(Debug)]
struct Files {
    limit: &'static str,
    /// 0 in here and nothing is swapped. Not the bound on memory and swap together that version 1 has too: where it
    /// is met first, the limit on memory is never hit.
    swap: &'static str,
    peak: Number,
    kills: Number,
    hits: Number,
}

const VERSION_1: Files = Files {
    limit: "memory.limit_in_bytes",
    swap: "memory.swappiness",
    peak: Number {
        file: "memory.max_usage_in_bytes",
        line: None,
    },
    kills: Number {
        file: "memory.oom_control",
        line: Some("oom_kill "),
    },
    hits: Number {
        file: "memory.failcnt",
        line: None,
    },
};

const VERSION_2: Files = Files {
    limit: "memory.max",
    swap: "memory.swap.max",
    peak: Number {
        file: "memory.peak",
        line: None,
    },
    kills: Number {
        file: "memory.events",
        line: Some("oom_kill "),
    },
    hits: Number {
        file: "memory.events",
        line: Some("max "),
    },
};

impl MemoryCgroup {
    /// A new group of at most `limit_bytes` of memory; `None` where none can be made.
    pub(crate) fn new(limit_bytes: u64) -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("wick-bench-{}-{count}", std::process::id());
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let places = [
            Some((PathBuf::from("/sys/fs/cgroup/memory"), &VERSION_1)),
            Some((PathBuf::from("/sys/fs/cgroup"), &VERSION_2)),
            beside(&own).map(|parent| (parent, &VERSION_2)),
        ];
        let mut places = places.into_iter().flatten();
        places.find_map(|(parent, files)| Self::at(parent.join(&name), files, limit_bytes))
    }

    fn at(path: PathBuf, files: &'static Files, limit_bytes: u64) -> Option<Self> {
        fs::create_dir(&path).ok()?;
        let group = Self { path, files };
        group.set(files.limit, limit_bytes)?;
        // Absent where the kernel does not count swap.
        let _no_swap = group.set(files.swap, 0);
        Some(group)
    }

    /// Writes to a file that the kernel provides; in a directory that is no cgroup there is none.
    fn set(&self, file: &str, value: u64) -> Option<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .open(self.path.join(file))
            .ok()?;
        file.write_all(value.to_string().as_bytes()).ok()
    }

    /// A command that runs `program` inside the group from its first byte on; arguments may be added.
    ///
    /// A shell enters the group and becomes the program: whoever enters keeps what was charged elsewhere, and a
    /// shell has next to nothing.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        command.arg(self.path.join("cgroup.procs")).arg(program);
        command
    }

    pub(crate) fn usage(&self) -> CgroupUsage {
        CgroupUsage {
            peak_bytes: self.files.peak.read(&self.path),
            oom_kills: self.files.kills.read(&self.path),
            limit_hits: self.files.hits.read(&self.path),
        }
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _busy = fs::remove_dir(&self.path);
    }
}

impl Number {
    fn read(&self, group: &Path) -> Option<u64> {
        let text = fs::read_to_string(group.join(self.file)).ok()?;
        let value = match self.line {
            Some(name) => text.lines().find_map(|line| line.strip_prefix(name))?,
            None => &text,
        };
        value.trim().parse().ok()
    }
}

/// The directory around the version 2 group that `/proc/self/cgroup` names.
fn beside(own: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let parent = Path::new(path).parent()?;
    let is_visible = !path.split('/').any(|part| part == "..");
    is_visible.then(|| Path::new("/sys/fs/cgroup").join(parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_in_a_group_is_counted_and_kept_within_the_limit() {
        const LIMIT: u64 = 24 << 20;
        let Some(group) = MemoryCgroup::new(LIMIT) else {
            eprintln!(
                "skipped: no memory cgroup can be made here (needs root and a memory controller)"
            );
            return;
        };
        let path = group.path.clone();
        let status = group.command("true").status().unwrap();
        assert!(status.success(), "{status}");
        let usage = group.usage();
        assert_eq!(usage.oom_kills, Some(0));
        assert!(usage
            .peak_bytes
            .is_none_or(|peak| peak > 0 && peak <= LIMIT));
        // `tail` keeps a line until it ends, and this one does not.
        let hog = ["-c", "head -c 99000000 /dev/zero | tail -n 1 | wc -c"];
        let output = group.command("sh").args(hog).output().unwrap();
        assert_ne!(output.stdout, b"99000000\n");
        let usage = group.usage();
        assert!(
            usage.oom_kills >= Some(1) && usage.limit_hits >= Some(1),
            "{usage:?}"
        );
        assert!(
            usage
                .peak_bytes
                .is_none_or(|peak| peak > LIMIT / 2 && peak <= LIMIT),
            "{usage:?}"
        );
        drop(group);
        assert!(!path.exists());
    }

    #[test]
    fn a_program_that_is_not_there_is_a_failure() {
        if let Some(group) = MemoryCgroup::new(24 << 20) {
            assert!(!group
                .command("/no/such/program")
                .output()
                .unwrap()
                .status
                .success());
        }
    }

    #[test]
    fn a_directory_without_a_controller_is_no_group() {
        let folder = tempfile::tempdir().unwrap();
        for files in [&VERSION_1, &VERSION_2] {
            let path = folder.path().join("group");
            assert!(MemoryCgroup::at(path.clone(), files, 1 << 20).is_none());
            assert!(!path.exists(), "left behind");
            assert!(MemoryCgroup::at(folder.path().join("none/group"), files, 1 << 20).is_none());
        }
    }

    #[test]
    fn both_versions_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let usage = |files| {
            let group = std::mem::ManuallyDrop::new(MemoryCgroup {
                path: folder.path().to_owned(),
                files,
            });
            group.usage()
        };
        let nothing = CgroupUsage {
            peak_bytes: None,
            oom_kills: None,
            limit_hits: None,
        };
        assert_eq!([usage(&VERSION_1), usage(&VERSION_2)], [nothing; 2]);
        write("memory.max_usage_in_bytes", "4096\n");
        write(
            "memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        );
        write("memory.failcnt", "7\n");
        write("memory.peak", "8192\n");
        write(
            "memory.events",
            "low 0\nhigh 0\nmax 9\noom 3\noom_kill 1\noom_group_kill 0\n",
        );
        let [first, second] = [usage(&VERSION_1), usage(&VERSION_2)];
        assert_eq!(
            (first.peak_bytes, first.oom_kills, first.limit_hits),
            (Some(4096), Some(2), Some(7))
        );
        assert_eq!(
            (second.peak_bytes, second.oom_kills, second.limit_hits),
            (Some(8192), Some(1), Some(9))
        );
        write("memory.events", "oom_kill many\n");
        assert_eq!(usage(&VERSION_2).oom_kills, None);
    }

    #[test]
    fn the_place_beside_this_process_is_inside_the_mount() {
        let at = |table| beside(table).map(|path| path.display().to_string());
        assert_eq!(
            at("1:name=x:/y\n0::/a/b/c\n").as_deref(),
            Some("/sys/fs/cgroup/a/b")
        );
        assert_eq!(at("0::/a\n").as_deref(), Some("/sys/fs/cgroup/"));
        assert_eq!(at("0::/\n"), None);
        assert_eq!(at("0::/../../other/x\n"), None);
        assert_eq!(at("4:memory:/x\n"), None);
    }
}
