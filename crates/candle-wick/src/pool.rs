//! The threads that compute one model.
//!
//! A model has a pool of its own and runs inside of it: its products find their threads without a switch to another
//! thread and back, and no thread that holds a lock of this model ever picks up the work of another model, which
//! might want that lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use candle::Result;
use rayon::{ThreadPool, ThreadPoolBuilder, Yield};

/// How long an idle thread looks for work before it sleeps. Waking one takes about 25 us, and a layer has a dozen
/// products with less than that between them; waiting for a device takes longer, and its reads need the processor.
const AWAKE_TIME: Duration = Duration::from_micros(100);

/// Processors that this process may use; asked once, since the answer takes reading files of the system.
static PROCESSORS: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

/// The pool of one model.
pub struct ComputePool(ThreadPool);

impl ComputePool {
    /// As many threads as the current pool has; they are there when this returns.
    ///
    /// # Errors
    /// The system has no thread to give.
    pub fn new() -> Result<Self> {
        let threads = rayon::current_num_threads();
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("wick-compute-{index}"))
            .build()
            .map_err(candle::Error::wrap)?;
        pool.broadcast(|_| ());
        Ok(Self(pool))
    }

    /// Whether the current thread is one of the pool's.
    pub fn is_current(&self) -> bool {
        self.0.current_thread_index().is_some()
    }

    /// Runs `work` on a thread of the pool.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.0.install(work)
    }
}

/// Runs `work` while the other threads of the current pool stay awake for its products.
pub fn with_awake_threads<T>(work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    let own = rayon::current_thread_index();
    rayon::in_place_scope(|scope| {
        // More than there are processors would only be in each other's way.
        for _ in 1..rayon::current_num_threads().min(*PROCESSORS) {
            scope.spawn(|_| {
                // The thread of `work` may pick one of these up while it waits for a product.
                if rayon::current_thread_index() != own {
                    look_for_work(&done);
                }
            });
        }
        // Also when `work` panics: the scope waits for the others.
        let _done = SetOnDrop(&done);
        work()
    })
}

fn look_for_work(done: &AtomicBool) {
    let mut worked = Instant::now();
    while !done.load(Ordering::Relaxed) && worked.elapsed() < AWAKE_TIME {
        match rayon::yield_now() {
            Some(Yield::Executed) => worked = Instant::now(),
            _ => std::hint::spin_loop(),
        }
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_runs_on_a_thread_of_the_pool_and_its_panics_come_out() {
        let pool = ComputePool::new().unwrap();
        let name = pool.run(|| std::thread::current().name().map(str::to_owned));
        assert!(name.unwrap().starts_with("wick-compute-"));
        let sum = pool.run(|| with_awake_threads(|| (0..100).sum::<u32>()));
        assert_eq!(sum, 4950);
        let panics = || pool.run(|| with_awake_threads(|| panic!("as asked")));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        // Outside of a pool there is nobody to keep awake.
        assert_eq!(with_awake_threads(|| 7), 7);
    }
}
