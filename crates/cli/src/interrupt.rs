//! Ctrl-C (SIGINT) and SIGTERM during work that must not just stop: it would leave half a file, a
//! directory without its permissions, or a commit that was not made.
//!
//! Such work checks now and then whether it has to end. It then ends in order and says so, and the
//! process ends by the signal, as a shell expects. A second signal ends the process at once. A
//! signal that the process was started to ignore, such as Ctrl-C for a script's background jobs,
//! stays ignored.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Has the user asked for the end?
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicUsize>);

/// The error of work that was ended by a signal.
#[derive(Debug)]
pub(crate) struct Interrupted(i32);

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

impl Interrupt {
    /// From now on signals are left to [`check`](Self::check).
    pub(crate) fn watch() -> Self {
        let this = Self::default();
        let armed = Arc::new(AtomicBool::new(false));
        let ignored = ignored();
        for signal in [SIGINT, SIGTERM].into_iter().filter(|s| ignored & 1 << (s - 1) == 0) {
            let number = usize::try_from(signal).unwrap_or_default();
            // In this order: the first signal arms what the second meets.
            let both = flag::register_conditional_default(signal, Arc::clone(&armed))
                .and_then(|_| flag::register(signal, Arc::clone(&armed)))
                .and_then(|_| flag::register_usize(signal, Arc::clone(&this.0), number));
            if let Err(e) = both {
                tracing::debug!("signal {signal} ends this process at once: {e}");
            }
        }
        this
    }

    /// Goes on only while no signal has come.
    ///
    /// # Errors
    /// A signal has come.
    pub(crate) fn check(&self) -> Result<(), Interrupted> {
        match i32::try_from(self.0.load(Relaxed)) {
            Ok(0) | Err(_) => Ok(()),
            Ok(signal) => Err(Interrupted(signal)),
        }
    }

    /// As if the signal had come.
    #[cfg(test)]
    pub(crate) fn ask(&self, signal: i32) {
        self.0.store(usize::try_from(signal).unwrap(), Relaxed);
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.check().is_err()
    }
}

/// Signals that the process ignores, as the kernel shows them.
fn ignored() -> u64 {
    larder_proc::Status::own().ok().and_then(|status| status.bits("SigIgn")).unwrap_or(0)
}

/// If a signal is behind the error, the process ends by it, now.
pub(crate) fn end_as_asked(error: &anyhow::Error) {
    let signal = error.chain().find_map(|e| e.downcast_ref::<Interrupted>());
    if let Some(Interrupted(signal)) = signal {
        let _ = low_level::emulate_default_handler(*signal);
    }
}
