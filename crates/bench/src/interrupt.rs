//! Ctrl-C as an ordinary error: mounts, loop devices and daemons are taken away by the same
//! destructors as after any other failure.
//!
//! Daemons must outlive the steps that use them. So they are started in a process group of their
//! own, which the terminal's signal does not reach. Other child processes end by the signal itself.

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

static RAISED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on the signals only set a flag.
pub(crate) fn install() -> Result<()> {
    let flag = RAISED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag)).context("catching signals")?;
    }
    Ok(())
}

/// Fails once a signal has come. Every loop that takes longer than a moment calls it.
pub(crate) fn check() -> Result<()> {
    if RAISED.get().is_some_and(|flag| flag.load(Ordering::Relaxed)) {
        bail!("interrupted");
    }
    Ok(())
}
