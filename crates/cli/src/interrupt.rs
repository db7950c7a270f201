//! Ctrl-C (SIGINT) and SIGTERM during work that must not just stop: it would leave half a file, a
//! directory without its permissions, or a commit that was not made.
//!
//! Such work checks now and then whether it has to end. It then ends in order and says so, and the
//! process ends by the signal, as a shell expects. A second signal ends the process at once. A
//! signal that the process was started to ignore, such as Ctrl-C for a script's background jobs,
//! stays ignored.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Has the user asked for the end?
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    /// The signal that has come, or 0.
    signal: Arc<AtomicUsize>,
    /// Can be read from once a signal has come. Nobody reads, so it stays that way.
    bell: Option<Arc<UnixStream>>,
}

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
        let mut this = Self::default();
        let pair = UnixStream::pair().inspect_err(|e| tracing::debug!("no bell: {e}")).ok();
        let (bell, ring) = pair.unzip();
        this.bell = bell.map(Arc::new);
        let armed = Arc::new(AtomicBool::new(false));
        let ignored = ignored();
        for signal in [SIGINT, SIGTERM].into_iter().filter(|s| ignored & 1 << (s - 1) == 0) {
            let number = usize::try_from(signal).unwrap_or_default();
            // In this order: the first signal arms what the second meets.
            let both = flag::register_conditional_default(signal, Arc::clone(&armed))
                .and_then(|_| flag::register(signal, Arc::clone(&armed)))
                .and_then(|_| flag::register_usize(signal, Arc::clone(&this.signal), number));
            if let Err(e) = both {
                tracing::debug!("signal {signal} ends this process at once: {e}");
            }
            let rung = ring.as_ref().map(UnixStream::try_clone);
            if let Some(Ok(ring)) = rung {
                // Waiting takes longer without it, and sees the signal all the same.
                let _ = low_level::pipe::register(signal, ring);
            }
        }
        this
    }

    /// Goes on only while no signal has come.
    ///
    /// # Errors
    /// A signal has come.
    pub(crate) fn check(&self) -> Result<(), Interrupted> {
        match i32::try_from(self.signal.load(Relaxed)) {
            Ok(0) | Err(_) => Ok(()),
            Ok(signal) => Err(Interrupted(signal)),
        }
    }

    /// Waits so long, or until a signal comes.
    ///
    /// # Errors
    /// A signal has come.
    pub(crate) fn wait(&self, time: Duration) -> Result<(), Interrupted> {
        self.wait_beside(time, None)
    }

    /// Waits so long, or until a signal comes, or until something can be read from `other` or its
    /// other end is closed.
    ///
    /// # Errors
    /// A signal has come.
    pub(crate) fn wait_beside(
        &self,
        time: Duration,
        other: Option<&UnixStream>,
    ) -> Result<(), Interrupted> {
        let end = Instant::now() + time;
        loop {
            self.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            let other = other.map(|other| PollFd::new(other, PollFlags::IN));
            let bell = self.bell.iter().map(|bell| PollFd::new(bell, PollFlags::IN));
            let mut both: Vec<PollFd<'_>> = other.into_iter().chain(bell).collect();
            // Whatever ends the call, the loop looks again.
            let _ = poll(&mut both, Timespec::try_from(left).ok().as_ref());
            if other_rang(&both, self.bell.is_some()) {
                return self.check();
            }
        }
    }

    /// As if the signal had come.
    #[cfg(test)]
    pub(crate) fn ask(&self, signal: i32) {
        self.signal.store(usize::try_from(signal).unwrap(), Relaxed);
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.check().is_err()
    }
}

/// Is there anything to be read but the bell, which comes last?
fn other_rang(polled: &[PollFd<'_>], with_bell: bool) -> bool {
    let others = polled.len() - usize::from(with_bell);
    polled[..others].iter().any(|fd| !fd.revents().is_empty())
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
