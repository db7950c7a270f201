//! Ctrl-C as an ordinary error, so that everything that was mounted, attached or started is taken
//! away by the same destructors as after any other failure.
//!
//! Daemons are started in a process group of their own and so do not see the terminal's signal:
//! they must outlive the steps that use them. Everything else that runs as a child ends by the
//! signal itself.

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

static RAISED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on the signals only leave a mark.
pub(crate) fn install() -> Result<()> {
    let flag = RAISED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag)).context("catching signals")?;
    }
    Ok(())
}

/// Fails once a signal has come. Every loop that runs for longer than a moment asks.
pub(crate) fn check() -> Result<()> {
    if RAISED.get().is_some_and(|flag| flag.load(Ordering::Relaxed)) {
        bail!("interrupted");
    }
    Ok(())
}
