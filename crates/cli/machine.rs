//! What a figure was measured on, and when.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// The machine, as far as it tells.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    /// Name and release of the kernel, and the architecture.
    system: String,
    /// The model name of the first processor.
    pub(crate) processor: Option<String>,
    /// Processors that this process may use.
    pub(crate) cpus: usize,
    /// Processes that wanted to run in the minute before: far below `cpus` on a machine left alone.
    pub(crate) load: Option<f64>,
    /// Year, month and day in UTC.
    pub(crate) date: String,
}

impl Machine {
    pub(crate) fn this() -> Self {
        let read = |path| std::fs::read_to_string(path).ok();
        let kernel = match read("/proc/sys/kernel/osrelease") {
            Some(release) => format!("Linux {}", release.trim()),
            None => std::env::consts::OS.to_owned(),
        };
        let processor = read("/proc/cpuinfo").and_then(|table| {
            let mut lines = table.lines().filter_map(|line| line.split_once(':'));
            let (_, name) = lines.find(|(key, _)| key.trim() == "model name")?;
            Some(name.trim().to_owned())
        });
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            system: format!("{kernel} {}", std::env::consts::ARCH),
            processor,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            load: read("/proc/loadavg").and_then(|loads| loads.split(' ').next()?.parse().ok()),
            date: date(now.map_or(0, |since| since.as_secs()) / 86_400),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus = if self.cpus == 1 { "CPU" } else { "CPUs" };
        write!(f, "{}, {} {cpus}", self.system, self.cpus)?;
        if let Some(processor) = &self.processor {
            write!(f, " ({processor})")?;
        }
        if let Some(load) = self.load {
            write!(f, ", load {load}")?;
        }
        write!(f, ", {}", self.date)
    }
}

/// `2026-11-29` from the days since 1970-01-01.
fn date(mut days: u64) -> String {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (364, "1970-12-31"),
            (11_016, "2000-02-29"),
            (20_513, "2026-03-01"),
            (20_786, "2026-11-29"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(date(days), expected, "{days}");
        }
    }

    #[test]
    fn this_machine_can_be_named() {
        let machine = Machine::this();
        assert!(machine.cpus > 0);
        assert!(machine.date.as_str() >= "2025-01-01", "{machine}");
        assert!(machine.to_string().contains(std::env::consts::ARCH));
    }
}
