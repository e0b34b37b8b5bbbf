//! Short turns on the processor for reading threads.
//!
//! A reading thread has microseconds to do for each request and keeps the device waiting until it has. Where all
//! processors compute, a scheduler of Linux 6.12 or later lets it interrupt them only if the turns it asks for are
//! shorter than theirs. What it brings is in `docs/bench/io.md`.

/// Asks for turns of 0.1 ms for this thread. Advice: older kernels and other policies leave it as it is.
#[cfg(target_os = "linux")]
pub(crate) fn take_short_turns() {
    const TURN_NS: u64 = 100_000;
    /// `struct sched_attr` as of Linux 3.14, which later kernels still take.
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime_ns: u64,
        deadline_ns: u64,
        period_ns: u64,
    }
    let mut attributes = Attributes::default();
    let size = size_of::<Attributes>();
    // SAFETY: the kernel writes at most `size` bytes to the structure.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if got != 0 || attributes.policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attributes.runtime_ns = TURN_NS;
    // SAFETY: the kernel reads the structure, whose size it filled in itself.
    let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn take_short_turns() {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn what_the_thread_had_is_kept() {
        let scheduling = || std::fs::read_to_string("/proc/thread-self/sched").unwrap_or_default();
        let line = |name: &str| {
            let text = scheduling();
            text.lines()
                .find(|line| line.starts_with(name))
                .map(str::to_owned)
        };
        let before = (line("policy"), line("prio"));
        super::take_short_turns();
        assert_eq!((line("policy"), line("prio")), before);
        // The slice in nanoseconds, where the kernel has one to show.
        let slice = line("se.slice").and_then(|line| line.rsplit(':').next()?.trim().parse().ok());
        assert!(slice.is_none_or(|ns: u64| ns <= 100_000), "{slice:?}");
    }
}
