//! How a replacement is told to end, and watched.

use crate::error::{Error, Result};
use crate::lock::{self, Mutex};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// What has become of a replacement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReplaceStatus {
    /// There was none.
    #[default]
    Never,
    /// It copies.
    Running,
    /// It goes on when it is told to, or when the file system is mounted.
    Suspended,
    /// The target has taken the place of the device.
    Finished,
    /// It was given up. Everything is as before.
    Canceled,
}

/// How far a replacement is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replacing {
    /// What has become of it.
    pub status: ReplaceStatus,
    /// Why it was given up, if nobody asked for that.
    pub why: Option<String>,
    /// The device that is replaced. None when that is not known any more.
    pub source: Option<u64>,
    /// Name of the target, while it is there.
    pub target: Option<String>,
    /// Seconds since 1970.
    pub started: u64,
    /// The same; 0 while it runs.
    pub stopped: u64,
    /// Bytes copied since it began or went on, and about how many there are.
    pub copied: u64,
    /// See `copied`.
    pub total: u64,
    /// How far the copy is on the device, and where the device ends.
    pub cursor: u64,
    /// See `cursor`.
    pub size: u64,
    /// For how long it has run since it began or went on.
    pub seconds: f64,
    /// Sectors of which the source had no good copy, and another device had.
    pub corrected: u64,
    /// Sectors of which no copy was good.
    pub unreadable: u64,
    /// Writes that the target refused.
    pub write_errors: u64,
}

impl Replacing {
    /// About how many seconds it still takes.
    #[must_use]
    pub fn seconds_left(&self) -> Option<f64> {
        let left = self.total.saturating_sub(self.copied) as f64;
        (self.copied > 0).then(|| self.seconds * left / self.copied as f64)
    }
    /// Thousandths of the device that are done.
    #[must_use]
    pub fn permille(&self) -> u64 {
        let done = u128::from(self.cursor.min(self.size)) * 1000;
        u64::try_from(done / u128::from(self.size.max(1))).unwrap_or(1000)
    }
}

/// What a replacement is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Suspend,
    Cancel,
}

/// The reins of a replacement. Its runner and others have it together.
#[derive(Debug, Default)]
pub struct ReplaceControl {
    inner: Mutex<Inner, lock::ReplaceState>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Replacing,
    since: Option<Instant>,
    told: Option<Told>,
}

impl ReplaceControl {
    /// How far it is.
    #[must_use]
    pub fn state(&self) -> Replacing {
        let inner = self.inner.lock();
        let mut state = inner.state.clone();
        if let Some(since) = inner.since {
            state.seconds = since.elapsed().as_secs_f64();
        }
        state
    }

    /// Tells it to end, so that it can go on later.
    pub fn suspend(&self) {
        self.tell(Told::Suspend);
    }

    /// Tells it to give up.
    pub fn cancel(&self) {
        self.tell(Told::Cancel);
    }

    fn tell(&self, what: Told) {
        let mut inner = self.inner.lock();
        if inner.told != Some(Told::Cancel) {
            inner.told = Some(what);
        }
    }

    /// A run begins, from this state.
    pub(super) fn begin(&self, state: Replacing) {
        let mut inner = self.inner.lock();
        inner.state = Replacing { status: ReplaceStatus::Running, ..state };
        inner.since = Some(Instant::now());
    }

    /// There is no run, for this reason.
    pub(super) fn refused(&self, status: ReplaceStatus, why: &Error) {
        self.ended(status, 0, Some(why.to_string()));
    }

    /// The run has ended.
    pub(super) fn ended(&self, status: ReplaceStatus, stopped: u64, why: Option<String>) {
        let mut inner = self.inner.lock();
        if let Some(since) = inner.since.take() {
            inner.state.seconds = since.elapsed().as_secs_f64();
        }
        (inner.state.status, inner.state.stopped, inner.state.why) = (status, stopped, why);
    }

    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Replacing) -> R) -> R {
        f(&mut self.inner.lock().state)
    }

    pub(super) fn told(&self) -> Option<Told> {
        self.inner.lock().told
    }

    /// Goes on only while it was not told to end.
    ///
    /// # Errors
    /// `Busy`.
    pub(super) fn check(&self) -> Result<()> {
        match self.told() {
            None => Ok(()),
            Some(_) => Err(Error::Busy("the replacement was told to end")),
        }
    }
}
