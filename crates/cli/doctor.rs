//! `wick doctor`: the disk, the memory and the processors that models will meet, and what to change.
//!
//! Each line is a finding: fine, or a warning with a sentence on what helps. Rates are probed on the largest file below
//! the path where that is large enough, or on a file without a name that is written for it.
//!
//! Not here: the probes themselves (`probe`), which settings suit a model (`tune`).

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{ensure, Context, Result};
use candle_wick::{available_memory_bytes, DirectIo, HumanBytes, IoMode};
use clap::Args;
use serde::Serialize;
use wick_io::{cpu_quota, memory_limits, total_memory_bytes, try_uring, FlashFile, ReaderOptions};

use crate::disk::Disk;
use crate::machine::Machine;
use crate::output;
use crate::probe::{Rates, ReadRate, Records};

/// A file below this answers from some cache.
const PROBE_FILE_BYTES: u64 = 64 << 20;
const READ_BYTES: usize = 16 << 10;
/// Filesystems that are memory, or somebody else's machine.
const MEMORY_FILESYSTEMS: [&str; 2] = ["tmpfs", "ramfs"];
const REMOTE_FILESYSTEMS: [&str; 6] = ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"];
/// Below these a model waits for the disk nearly all of the time.
const SEQUENTIAL_MIN: f64 = 500e6;
const RANDOM_MIN: f64 = 200e6;
const AVAILABLE_MIN: u64 = 2 << 30;
const LOCKED_MIN: u64 = 8 << 20;

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Folder or file on the disk in question
    #[arg(value_name = "PATH", default_value = ".")]
    path: PathBuf,

    /// Leave out the rates, which take some seconds and up to 1 GiB of memory
    #[arg(long)]
    no_probe: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warn,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    status: Status,
    found: String,
    /// What to change; only of a warning.
    advice: Option<&'static str>,
}

#[derive(Serialize)]
struct Checkup {
    path: PathBuf,
    machine: Machine,
    findings: Vec<Finding>,
    /// Bytes a second, with the settings that reached them.
    rates: Option<Rates>,
}

impl Finding {
    fn new(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            found: found.into(),
            advice: None,
        }
    }

    /// The same, with a warning where `is_bad`.
    fn warn_if(self, is_bad: bool, advice: &'static str) -> Self {
        match is_bad {
            true => Self {
                status: Status::Warn,
                advice: Some(advice),
                ..self
            },
            false => self,
        }
    }
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    ensure!(
        args.path.exists(),
        "{}: no such file or folder",
        args.path.display()
    );
    let machine = Machine::this();
    let mut findings = vec![disk(&args.path)];
    let sample = Sample::at(&args.path);
    findings.push(direct(sample.as_ref()));
    findings.push(uring());
    findings.extend(memory());
    findings.push(locked());
    findings.push(large_pages());
    findings.push(instructions());
    findings.push(processors(&machine));
    findings.push(load(&machine));
    let rates = match (&sample, args.no_probe) {
        (Ok(sample), false) => {
            output::note("measuring the disk and memory, for some seconds");
            let rates = sample.rates()?;
            findings.extend(judged(&rates));
            Some(rates)
        }
        _ => None,
    };
    let checkup = Checkup {
        path: args.path.clone(),
        machine,
        findings,
        rates,
    };
    match args.json {
        true => output::print_json(&checkup)?,
        false => output::print(&checkup.lines())?,
    }
    Ok(ExitCode::SUCCESS)
}

impl Checkup {
    fn lines(&self) -> String {
        let mut lines = vec![self.machine.to_string()];
        for finding in &self.findings {
            let mark = match finding.status {
                Status::Ok => "ok  ",
                Status::Warn => "warn",
            };
            let advice = finding
                .advice
                .map_or(String::new(), |advice| format!(": {advice}"));
            lines.push(format!(
                "{mark} {:<18} {}{advice}",
                finding.name, finding.found
            ));
        }
        lines.join("\n") + "\n"
    }
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn disk(path: &Path) -> Finding {
    let Some(disk) = Disk::of(path) else {
        return Finding::new("disk", "unknown");
    };
    let is_one_of = |names: &[&str]| names.contains(&disk.filesystem.as_str());
    let turns = match disk.is_rotational {
        Some(true) => ", said to be a disk that turns (virtual disks often are)",
        _ => "",
    };
    let found = Finding::new("disk", format!("{}{turns}", disk.name()));
    match is_one_of(&MEMORY_FILESYSTEMS) {
        true => found.warn_if(
            true,
            "files here are memory themselves: keep models on an SSD",
        ),
        false => found.warn_if(
            is_one_of(&REMOTE_FILESYSTEMS),
            "a disk in another machine: keep models on one in this machine",
        ),
    }
}

fn direct(sample: Result<&Sample, &anyhow::Error>) -> Finding {
    match sample {
        Err(error) => Finding::new("direct I/O", format!("unknown, {}", output::one_line(error)))
            .warn_if(true, "name a folder that can be written, or a converted model"),
        Ok(sample) => Finding::new("direct I/O", sample.file.mode().to_string()).warn_if(
            sample.file.mode() == IoMode::Buffered,
            "reads go through the page cache, which costs processor time; ext4 and xfs read directly",
        ),
    }
}

fn uring() -> Finding {
    match try_uring(ReaderOptions::default().depth) {
        Ok(()) => Finding::new("io_uring", "works"),
        Err(error) => Finding::new("io_uring", format!("refused ({error})")).warn_if(
            true,
            "reads go by a pool of threads; Linux 5.6 or later with kernel.io_uring_disabled=0 has it, unless a sandbox \
             forbids it",
        ),
    }
}

fn memory() -> Vec<Finding> {
    let size = |bytes: Option<u64>| {
        bytes.map_or("unknown".to_owned(), |bytes| HumanBytes(bytes).to_string())
    };
    let available = available_memory_bytes();
    let mut findings = vec![Finding::new(
        "memory",
        format!(
            "{} of {} available",
            size(available),
            size(total_memory_bytes())
        ),
    )
    .warn_if(
        available.is_some_and(|bytes| bytes < AVAILABLE_MIN),
        "little is left: end other programs, or give --memory a size that fits",
    )];
    let limits = memory_limits();
    if limits.is_empty() {
        findings.push(Finding::new("memory cgroup", "no limit"));
    }
    findings.extend(limits.into_iter().map(|limit| {
        let found = format!(
            "{} of {} left in {}",
            HumanBytes(limit.available_bytes),
            HumanBytes(limit.limit_bytes),
            limit.folder.display()
        );
        Finding::new("memory cgroup", found).warn_if(
            limit.available_bytes < AVAILABLE_MIN,
            "the group's processes are killed beyond its limit: give --memory less than is left, or raise the limit",
        )
    }));
    findings
}

/// The limit of memory that a process may lock, which rings of older kernels count against.
fn locked() -> Finding {
    let limits = read("/proc/self/limits").unwrap_or_default();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"));
    let soft = line.and_then(|line| line.split_whitespace().next());
    let bytes = soft.and_then(|soft| soft.parse::<u64>().ok());
    let found = match (soft, bytes) {
        (_, Some(bytes)) => HumanBytes(bytes).to_string(),
        (Some(word), None) => word.to_owned(),
        (None, None) => "unknown".to_owned(),
    };
    let matters = bytes.is_some_and(|bytes| bytes < LOCKED_MIN)
        && try_uring(ReaderOptions::default().depth).is_err();
    Finding::new("locked memory", found).warn_if(
        matters,
        "before Linux 5.12 io_uring counts against it: raise `ulimit -l` to 8192",
    )
}

fn large_pages() -> Finding {
    let modes = read("/sys/kernel/mm/transparent_hugepage/enabled");
    let mode = modes.as_deref().and_then(|modes| {
        let (_, rest) = modes.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    });
    let is_off = mode.as_deref() == Some("never");
    Finding::new("large pages", mode.unwrap_or("unknown".to_owned())).warn_if(
        is_off,
        "products look up many small pages: set /sys/kernel/mm/transparent_hugepage/enabled to madvise",
    )
}

fn instructions() -> Finding {
    let name = wick_kernels::isa_name();
    Finding::new("instructions", name).warn_if(
        name == "scalar" && cfg!(target_arch = "x86_64"),
        "products run without vectors: a processor with AVX2, FMA and F16C is several times as fast (or unset WICK_ISA)",
    )
}

/// How many processors this process may use, of how many where the system tells.
fn processors(machine: &Machine) -> Finding {
    let table = read("/proc/cpuinfo").unwrap_or_default();
    let is_one = |line: &&str| line.starts_with("processor");
    let there = table.lines().filter(is_one).count();
    let of = match there {
        0 => String::new(),
        there => format!(" of {there}"),
    };
    let quota = cpu_quota().map_or(String::new(), |cpus| {
        format!(", a cgroup quota of {cpus:.1}")
    });
    let found = format!("{}{of} usable{quota}", machine.cpus);
    Finding::new("processors", found).warn_if(
        machine.cpus < there,
        "a cgroup or an affinity mask holds back the others: raise its quota if they are meant to help",
    )
}

fn load(machine: &Machine) -> Finding {
    let found = machine.load.map_or("unknown".to_owned(), |load| {
        format!("{load} busy in the last minute")
    });
    Finding::new("load", found).warn_if(
        machine.load.unwrap_or(0.0) > 0.5 * machine.cpus as f64,
        "other programs compute, too: rates and tokens are slower than they could be",
    )
}

/// A file to read from.
struct Sample {
    file: FlashFile,
}

impl Sample {
    fn at(path: &Path) -> Result<Self> {
        let found = if path.is_dir() {
            largest(path)
        } else {
            Some(path.to_owned())
        };
        let is_large = |path: &PathBuf| {
            fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() >= PROBE_FILE_BYTES)
        };
        if let Some(path) = found.filter(is_large) {
            let file = FlashFile::open(&path, DirectIo::Preferred)?;
            return Ok(Self { file });
        }
        let folder = match path.is_dir() {
            true => path,
            false => path.parent().context("a file in no folder")?,
        };
        Self::written_in(folder)
    }

    /// Loses its name before it has content: whatever ends the program, nothing is left behind.
    fn written_in(folder: &Path) -> Result<Self> {
        let path = folder.join(format!(".wick-doctor-{}", std::process::id()));
        let writing = || format!("writing {}", path.display());
        let mut written = fs::File::create_new(&path).with_context(writing)?;
        let sized = written.set_len(PROBE_FILE_BYTES);
        let opened = FlashFile::open(&path, DirectIo::Preferred);
        fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        sized.with_context(writing)?;
        let file = opened?;
        // Not all alike: some devices keep no zeros.
        let block: Vec<u8> = (0..1u32 << 20)
            .map(|at| (at.wrapping_mul(0x9e37_79b9) >> 23) as u8)
            .collect();
        for _ in 0..PROBE_FILE_BYTES >> 20 {
            written.write_all(&block).with_context(writing)?;
        }
        // Pages that wait to be written would be written while others are read.
        written.sync_all().with_context(writing)?;
        Ok(Self { file })
    }

    fn rates(&self) -> Result<Rates> {
        let records = Records {
            offset_bytes: 0,
            stride_bytes: READ_BYTES,
            count: self.file.len_bytes() / READ_BYTES as u64,
        };
        Rates::measure(&self.file, &records)
    }
}

/// The largest file in a folder.
fn largest(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let files = entries.filter_map(|entry| {
        let found = entry.metadata().ok()?;
        found.is_file().then(|| (found.len(), entry.path()))
    });
    files.max().map(|(_, path)| path)
}

fn judged(rates: &Rates) -> [Finding; 3] {
    let reads = |rate: &ReadRate| {
        format!(
            "{}/s ({}, {} KiB, {} in flight)",
            HumanBytes(rate.bytes_per_s.median as u64),
            rate.setting.engine,
            rate.setting.read_bytes >> 10,
            rate.setting.in_flight
        )
    };
    let memory = &rates.memory;
    [
        Finding::new("reads in order", reads(&rates.sequential)).warn_if(
            rates.sequential.bytes_per_s.median < SEQUENTIAL_MIN,
            "slow for what a model reads for each token: an NVMe SSD reads several GB/s",
        ),
        Finding::new("reads at random", reads(&rates.random)).warn_if(
            rates.random.bytes_per_s.median < RANDOM_MIN,
            "slow for single neurons: an NVMe SSD reads 1 GB/s and more in records of 16 KiB",
        ),
        Finding::new(
            "memory reads",
            format!(
                "{}/s ({} threads)",
                HumanBytes(memory.bytes_per_s.median as u64),
                memory.setting.threads
            ),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_no_name_and_a_large_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let count = || fs::read_dir(folder.path()).unwrap().count();
        let sample = Sample::at(folder.path()).unwrap();
        assert_eq!((sample.file.len_bytes(), count()), (PROBE_FILE_BYTES, 0));
        assert!(Sample::at(&folder.path().join("none/none")).is_err());
        let large = folder.path().join("large");
        fs::File::create(&large)
            .unwrap()
            .set_len(PROBE_FILE_BYTES)
            .unwrap();
        fs::write(folder.path().join("small"), "few").unwrap();
        let sample = Sample::at(folder.path()).unwrap();
        assert_eq!(sample.file.path(), large);
        drop(sample);
        assert_eq!(count(), 2);
    }

    #[test]
    fn a_warning_has_advice_and_a_busy_machine_is_one() {
        let fine = Finding::new("disk", "x").warn_if(false, "no");
        assert_eq!((fine.status, fine.advice), (Status::Ok, None));
        let bad = Finding::new("disk", "x").warn_if(true, "first");
        assert_eq!((bad.status, bad.advice), (Status::Warn, Some("first")));
        let mut machine = Machine::this();
        for (busy, status) in [
            (None, Status::Ok),
            (Some(0.0), Status::Ok),
            (Some(machine.cpus as f64), Status::Warn),
        ] {
            machine.load = busy;
            assert_eq!(load(&machine).status, status);
        }
        // More processors than any machine has are held back by nothing.
        machine.cpus = usize::MAX;
        assert_eq!(processors(&machine).status, Status::Ok);
    }
}
