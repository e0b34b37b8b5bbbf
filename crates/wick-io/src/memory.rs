//! What memory this process uses, and what it may still take.
//!
//! All figures are bytes. `None` means that the system does not say; a caller then goes without, it never fails.
//! On Linux they come from `/proc` and the memory cgroups (version 1 and 2) of the process; on macOS only the
//! peak is known.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
use crate::huge::ADVISED_BYTES_MIN;
use std::path::PathBuf;

use crate::cgroup::{groups, read};

/// The most memory this process has had resident at once.
pub fn peak_rss_bytes() -> Option<u64> {
    #[cfg(target_os = "macos")]
    return macos_peak_rss_bytes();
    #[cfg(not(target_os = "macos"))]
    table_bytes(&read("/proc/self/status")?, "VmHWM:")
}

/// The memory this process has resident now.
pub fn current_rss_bytes() -> Option<u64> {
    table_bytes(&read("/proc/self/status")?, "VmRSS:")
}

/// The memory this process could still take without swapping or being killed: the smaller of what the machine
/// has free or reclaimable and what each memory cgroup around the process leaves.
pub fn available_memory_bytes() -> Option<u64> {
    let machine = read("/proc/meminfo").and_then(|table| table_bytes(&table, "MemAvailable:"));
    let groups = memory_groups();
    let groups = groups.iter().filter_map(|group| group.available_bytes());
    machine.into_iter().chain(groups).min()
}

/// All memory of the machine.
pub fn total_memory_bytes() -> Option<u64> {
    table_bytes(&read("/proc/meminfo")?, "MemTotal:")
}

/// A memory cgroup around this process that has a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Its directory.
    pub folder: PathBuf,
    /// The most that its processes may use together.
    pub limit_bytes: u64,
    /// What is left of that, where reclaimable page cache counts as free.
    pub available_bytes: u64,
}

/// The memory cgroups (version 1 and 2) that bound this process, innermost first.
pub fn memory_limits() -> Vec<MemoryLimit> {
    let groups = memory_groups().into_iter();
    groups.filter_map(|group| group.limit()).collect()
}

/// The value of a line `name   123 kB`.
fn table_bytes(table: &str, name: &str) -> Option<u64> {
    let value = table.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// One directory of the cgroup tree, and the names of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MemoryGroup {
    folder: PathBuf,
    files: GroupFiles,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupFiles {
    limit: &'static str,
    usage: &'static str,
    /// Line of `memory.stat`: page cache that goes first when memory is short.
    reclaimable: &'static str,
}

const VERSION_1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
};
const VERSION_2: GroupFiles = GroupFiles {
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: "inactive_file ",
};

/// Version 1 has no word for "no limit": a number that no machine has, rounded to pages.
const NO_LIMIT_BYTES: u64 = 1 << 62;

impl MemoryGroup {
    fn limit(self) -> Option<MemoryLimit> {
        let limit_bytes = self.number(self.files.limit)?;
        (limit_bytes < NO_LIMIT_BYTES).then_some(MemoryLimit {
            available_bytes: self.available_bytes()?,
            folder: self.folder,
            limit_bytes,
        })
    }

    /// What a file of one number holds; "max" is no number.
    fn number(&self, name: &str) -> Option<u64> {
        read(self.folder.join(name))?.trim().parse().ok()
    }

    /// Limit less usage, where reclaimable page cache is no usage; `None` without a limit.
    fn available_bytes(&self) -> Option<u64> {
        let limit = self.number(self.files.limit)?;
        let usage = self.number(self.files.usage)?;
        let reclaimable = read(self.folder.join("memory.stat"))
            .and_then(|stat| {
                stat.lines().find_map(|line| {
                    line.strip_prefix(self.files.reclaimable)?
                        .trim()
                        .parse()
                        .ok()
                })
            })
            .unwrap_or(0);
        Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
    }
}

/// The memory groups of this process and all their parents: each has a say.
fn memory_groups() -> Vec<MemoryGroup> {
    let table = read("/proc/self/cgroup").unwrap_or_default();
    let groups = groups(&table, "memory").into_iter();
    groups
        .map(|group| MemoryGroup {
            folder: group.folder,
            files: match group.is_version_2 {
                true => VERSION_2,
                false => VERSION_1,
            },
        })
        .collect()
}

/// Gives free pages of the heap back to the system where the allocator keeps them (glibc), so that the resident
/// set is what the program holds and not what it once held.
pub fn release_free_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: a plain call without preconditions; the allocator takes its own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Lets all threads of the process share one heap where the allocator would give each its own (glibc): what one
/// thread freed another can use, so that a peak is what is in use at once. Memory of a model's size stays out of
/// it, and goes back to the system when it is freed. Counts for threads that have not allocated yet, so it belongs
/// before they start.
pub fn share_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: plain calls without preconditions; the allocator takes its own locks.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, ADVISED_BYTES_MIN as i32);
    }
}

#[cfg(target_os = "macos")]
fn macos_peak_rss_bytes() -> Option<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is valid for one `rusage`, which the call fills.
    let code = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    // SAFETY: all-zero bytes are a valid `rusage`, filled or not.
    let usage = unsafe { usage.assume_init() };
    // Bytes on macOS, unlike elsewhere.
    if code == 0 {
        u64::try_from(usage.ru_maxrss).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_by_name() {
        let table = "VmPeak:\t  100 kB\nVmHWM:\t   2048 kB\nVmRSS:\t 1 kB\nOdd: 3 pages\n";
        assert_eq!(table_bytes(table, "VmHWM:"), Some(2 << 20));
        assert_eq!(table_bytes(table, "VmRSS:"), Some(1024));
        assert_eq!(table_bytes(table, "VmSwap:"), None);
        assert_eq!(table_bytes(table, "Odd:"), None);
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_cannot_be_reclaimed() {
        let folder = tempfile::tempdir().unwrap();
        let group = MemoryGroup {
            folder: folder.path().to_owned(),
            files: VERSION_2,
        };
        assert_eq!(group.available_bytes(), None);
        std::fs::write(folder.path().join("memory.current"), "700\n").unwrap();
        std::fs::write(folder.path().join("memory.max"), "max\n").unwrap();
        assert_eq!(group.available_bytes(), None);
        std::fs::write(folder.path().join("memory.max"), "1000\n").unwrap();
        assert_eq!(group.available_bytes(), Some(300));
        std::fs::write(
            folder.path().join("memory.stat"),
            "anon 5\ninactive_file 200\nactive_file 9\n",
        )
        .unwrap();
        assert_eq!(group.available_bytes(), Some(500));
        std::fs::write(folder.path().join("memory.max"), "100\n").unwrap();
        assert_eq!(group.available_bytes(), Some(0));
        let limit = group.clone().limit().unwrap();
        assert_eq!((limit.limit_bytes, limit.available_bytes), (100, 0));
        std::fs::write(folder.path().join("memory.max"), "9223372036854771712\n").unwrap();
        assert_eq!(group.limit(), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_figures_of_this_process_make_sense() {
        // In this order: the peak never falls, and other tests allocate meanwhile.
        let now = current_rss_bytes().unwrap();
        let peak = peak_rss_bytes().unwrap();
        assert!(now > 100 << 10 && peak + (4 << 20) >= now, "{now} {peak}");
        assert!(available_memory_bytes().unwrap() > 1 << 20);
        assert!(total_memory_bytes().unwrap() > 1 << 20);
        let fits = |limit: &MemoryLimit| limit.available_bytes <= limit.limit_bytes;
        assert!(memory_limits().iter().all(fits));
    }
}
