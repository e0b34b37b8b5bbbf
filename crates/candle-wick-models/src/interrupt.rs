//! A flag that stops a forward pass between two layers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// Clones share the flag; a signal handler may hold one.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

/// What the candle error of an interrupted forward says.
pub(crate) const INTERRUPTED: &str = "interrupted between two layers";

impl Interrupt {
    /// A flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the model to stop.
    pub fn trigger(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    pub fn is_triggered(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn check(&self) -> candle::Result<()> {
        if self.is_triggered() {
            candle::bail!("{INTERRUPTED}");
        }
        Ok(())
    }
}
