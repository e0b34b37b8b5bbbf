//! Ctrl-C: the first one ends the text between two layers, the second one ends the program.

use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_wick_models::Interrupt;

/// Exit status of a program that was interrupted: 128 and the signal's number.
pub(crate) const INTERRUPTED_STATUS: u8 = 130;

/// Ctrl-C, turned into a flag from `arm` on.
pub(crate) struct CtrlC {
    interrupt: Interrupt,
    is_armed: Arc<AtomicBool>,
}

impl CtrlC {
    /// Watches the signal; until `arm` it ends the program at once, for there is nothing to show yet.
    pub(crate) fn watch() -> Result<Self> {
        let watch = Self {
            interrupt: Interrupt::new(),
            is_armed: Arc::default(),
        };
        let (interrupt, is_armed) = (watch.interrupt.clone(), watch.is_armed.clone());
        ctrlc::set_handler(move || {
            if !is_armed.load(Ordering::Relaxed) || interrupt.is_triggered() {
                exit(INTERRUPTED_STATUS.into());
            }
            interrupt.trigger();
        })
        .context("watching for Ctrl-C")?;
        Ok(watch)
    }

    /// The flag to give to the model.
    pub(crate) fn flag(&self) -> Interrupt {
        self.interrupt.clone()
    }

    /// From now on there is something to show.
    pub(crate) fn arm(&self) {
        self.is_armed.store(true, Ordering::Relaxed);
    }
}
