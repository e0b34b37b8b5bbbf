//! The cgroups around this process, version 1 and 2, and the processor time that they allow.
//!
//! Invariants: nothing here fails; what the system does not tell is `None`, or no group.
//!
//! Not here: what they allow of memory (`memory`).

use std::path::{Component, Path, PathBuf};

/// One directory of the cgroup tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) folder: PathBuf,
    pub(crate) is_version_2: bool,
}

pub(crate) fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The groups of `controller` that `table` names, lines `id:controllers:path` as in `/proc/self/cgroup`, and all their
/// parents, innermost first.
pub(crate) fn groups(table: &str, controller: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in table.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let mount = Path::new("/sys/fs/cgroup");
        let (mount, is_version_2) = match controllers {
            "" => (mount.to_owned(), true),
            list if list.split(',').any(|name| name == controller) => {
                (mount.join(controller), false)
            }
            _ => continue,
        };
        // A path with `..` lies outside of what this process can see.
        let path = Path::new(path.trim_start_matches('/'));
        let is_visible = path
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        let path = if is_visible { path } else { Path::new("") };
        groups.extend(path.ancestors().map(|part| Group {
            folder: mount.join(part),
            is_version_2,
        }));
    }
    groups
}

/// Processors' worth of time that the cgroups around this process allow it, the least of them; `None` without a limit.
pub fn cpu_quota() -> Option<f64> {
    let table = read("/proc/self/cgroup").unwrap_or_default();
    let groups = groups(&table, "cpu");
    let quotas = groups.iter().filter_map(Group::cpu_quota);
    quotas.min_by(f64::total_cmp)
}

impl Group {
    fn cpu_quota(&self) -> Option<f64> {
        let file = |name: &str| read(self.folder.join(name));
        // Without a limit version 2 says "max", and version 1 -1.
        let (quota, period) = match self.is_version_2 {
            true => {
                let line = file("cpu.max")?;
                let (quota, period) = line.split_once(' ')?;
                (quota.to_owned(), period.to_owned())
            }
            false => (file("cpu.cfs_quota_us")?, file("cpu.cfs_period_us")?),
        };
        let (quota, period): (f64, f64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
        let cpus = quota / period;
        (quota > 0.0 && cpus.is_finite()).then_some(cpus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_with_their_parents() {
        let folders = |table, controller| -> Vec<String> {
            groups(table, controller)
                .iter()
                .map(|group| group.folder.display().to_string())
                .collect()
        };
        assert_eq!(folders("0::/\n", "memory"), ["/sys/fs/cgroup/"]);
        assert_eq!(
            folders("0::/a/b\n", "memory"),
            ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup/"]
        );
        let two = "4:cpu,memory:/x\n3:cpuset:/y\n";
        assert_eq!(
            folders(two, "memory"),
            ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory/"]
        );
        assert_eq!(
            folders(two, "cpu"),
            ["/sys/fs/cgroup/cpu/x", "/sys/fs/cgroup/cpu/"]
        );
        assert_eq!(folders("0::/../../other\n", "cpu"), ["/sys/fs/cgroup/"]);
        assert!(folders("nonsense\n", "cpu").is_empty());
        assert!(groups("0::/\n", "cpu")[0].is_version_2);
    }

    #[test]
    fn a_group_allows_its_quota_by_period() {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let quota = |is_version_2| {
            let folder = folder.path().to_owned();
            let group = Group {
                folder,
                is_version_2,
            };
            group.cpu_quota()
        };
        assert_eq!([quota(true), quota(false)], [None; 2]);
        write("cpu.cfs_quota_us", "-1\n");
        write("cpu.cfs_period_us", "100000\n");
        for none in [
            "max 100000\n",
            "nonsense\n",
            "150000 0\n",
            "150000\n",
            "-1 5\n",
        ] {
            write("cpu.max", none);
            assert_eq!([quota(true), quota(false)], [None; 2], "{none}");
        }
        write("cpu.max", "150000 100000\n");
        write("cpu.cfs_quota_us", "50000\n");
        assert_eq!([quota(true), quota(false)], [Some(1.5), Some(0.5)]);
    }
}
