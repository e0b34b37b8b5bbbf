//! The disk that a path lies on, as far as the system tells (Linux).

use std::path::{Path, PathBuf};

/// A mounted file system and its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Disk {
    /// Such as `ext4`.
    pub(crate) filesystem: String,
    /// Such as `/dev/nvme0n1p2`.
    pub(crate) source: String,
    /// Whether the system takes it for a disk that turns; `None` where it has no word on it.
    pub(crate) is_rotational: Option<bool>,
}

impl Disk {
    /// The disk of an existing path; `None` where the system does not say.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let path = path.canonicalize().ok()?;
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        let (disk, device) = find(&mounts, &path)?;
        let read = |file: &str| {
            let text = std::fs::read_to_string(format!("/sys/dev/block/{device}/{file}")).ok()?;
            Some(text.trim() == "1")
        };
        // A partition has its queue a level above.
        let is_rotational = read("queue/rotational").or_else(|| read("../queue/rotational"));
        Some(Self {
            is_rotational,
            ..disk
        })
    }

    /// File system and device, for people and to tell one disk from another.
    pub(crate) fn name(&self) -> String {
        format!("{} on {}", self.filesystem, self.source)
    }
}

/// The mount that `path` lies below, and its device as `major:minor`.
fn find(mounts: &str, path: &Path) -> Option<(Disk, String)> {
    let lines = mounts.lines().filter_map(|line| {
        // `27 1 254:0 / /mount/point rw - ext4 /dev/vda rw`, with optional fields before the dash.
        let (fields, rest) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(2);
        let (device, point) = (fields.next()?, PathBuf::from(unescaped(fields.nth(1)?)));
        let mut rest = rest.split(' ');
        let disk = Disk {
            filesystem: rest.next()?.to_owned(),
            source: unescaped(rest.next()?),
            is_rotational: None,
        };
        path.starts_with(&point)
            .then(|| (point.components().count(), disk, device.to_owned()))
    });
    // Of mounts at one point the last one covers the others, and `max_by_key` gives the last.
    let (_, disk, device) = lines.max_by_key(|(depth, _, _)| *depth)?;
    Some((disk, device))
}

/// Spaces and the like are octal numbers in the kernel's tables.
fn unescaped(text: &str) -> String {
    let pairs = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    pairs.iter().fold(text.to_owned(), |text, (code, plain)| {
        text.replace(code, plain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
        30 27 0:30 / /data\\040one rw shared:1 master:2 - tmpfs tmpfs rw\n\
        31 27 259:3 / /data\\040one rw - xfs /dev/nvme0n1p2 rw\nnonsense\n";

    #[test]
    fn the_deepest_and_last_mount_is_the_one() {
        let of = |path: &str| {
            let (disk, device) = find(MOUNTS, Path::new(path)).unwrap();
            (disk.name(), device)
        };
        assert_eq!(
            of("/home"),
            ("ext4 on /dev/vda".to_owned(), "254:0".to_owned())
        );
        assert_eq!(of("/data one/x").0, "xfs on /dev/nvme0n1p2");
        assert_eq!(of("/data one/x").1, "259:3");
        assert_eq!(of("/data").0, "ext4 on /dev/vda");
        assert_eq!(find("", Path::new("/")), None);
    }
}
