//! How a balance is watched, paused and cancelled.

use crate::error::Error;
use crate::lock::{self, Condvar, Mutex};
use crate::relocate::Relocating;
use serde::{Deserialize, Serialize};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// What has become of a balance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BalanceStatus {
    /// It runs, or is about to.
    #[default]
    Running,
    /// It is complete. Some chunks may have been left where they are, for lack of space.
    Finished,
    /// It goes on later.
    Paused,
    /// It was told to end.
    Canceled,
    /// Something was in its way.
    Failed,
}

/// How far a balance is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BalanceState {
    /// What has become of it.
    pub status: BalanceStatus,
    /// Filters of data, of metadata and of system chunks, as [`crate::Filters`] writes them.
    pub data: Option<String>,
    /// See `data`.
    pub metadata: Option<String>,
    /// See `data`.
    pub system: Option<String>,
    /// When it began or went on, in seconds since 1970.
    pub started: u64,
    /// How long it took since then.
    pub seconds: f64,
    /// Chunks that there were when they were chosen.
    pub considered: u64,
    /// Chunks that are to be moved.
    pub expected: u64,
    /// Chunks that have been moved.
    pub completed: u64,
    /// Chunks that stay, because there was no room for what they hold, or something that cannot be
    /// moved.
    pub left: u64,
    /// Bytes that the chunks held which are to be moved.
    pub total: u64,
    /// Bytes that have been moved.
    pub moved: u64,
    /// Why it failed, or why the last of the chunks that stay was left.
    pub why: Option<String>,
}

impl BalanceState {
    /// Bytes that are moved in a second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        if self.seconds > 0.0 { (self.moved as f64 / self.seconds) as u64 } else { 0 }
    }
    /// Seconds until it is complete, if that can be said.
    #[must_use]
    pub fn seconds_left(&self) -> Option<f64> {
        let rate = self.moved as f64 / self.seconds.max(0.001);
        let left = self.total.saturating_sub(self.moved) as f64;
        (self.moved > 0 && self.status == BalanceStatus::Running).then(|| left / rate)
    }
}

/// How it is to end before it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Early {
    Pause,
    Cancel,
}

/// The reins of a balance. Its runner and others have it together.
#[derive(Debug, Default)]
pub struct BalanceControl {
    inner: Mutex<Inner, lock::BalanceState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    state: BalanceState,
    has_begun: bool,
    since: Option<Instant>,
    end: Option<Early>,
    /// Of the chunk that is being moved.
    now: Relocating,
}

impl BalanceControl {
    /// For a balance that is going to begin or to go on.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How far it is.
    #[must_use]
    pub fn state(&self) -> BalanceState {
        let inner = self.inner.lock();
        let mut state = inner.state.clone();
        state.moved += inner.now.total.saturating_sub(inner.now.left);
        if let Some(since) = inner.since {
            state.seconds = since.elapsed().as_secs_f64();
        }
        state
    }

    /// Tells it to end, and to remember that it is to go on later.
    pub fn pause(&self) {
        self.inner.lock().end.get_or_insert(Early::Pause);
        self.changed.notify_all();
    }

    /// Tells it to end. What has been moved stays where it is.
    pub fn cancel(&self) {
        self.inner.lock().end = Some(Early::Cancel);
        self.changed.notify_all();
    }

    /// Waits until it has begun, or has been refused.
    pub fn wait_for_the_beginning(&self) {
        let mut inner = self.inner.lock();
        while inner.state.status == BalanceStatus::Running && !inner.has_begun {
            self.changed.wait(&mut inner);
        }
    }

    /// Has it begun? One that was refused has not.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.inner.lock().has_begun
    }

    pub(super) fn told(&self) -> Option<Early> {
        self.inner.lock().end
    }

    pub(super) fn begin(&self, fill: impl FnOnce(&mut BalanceState)) {
        let mut inner = self.inner.lock();
        inner.has_begun = true;
        inner.since = Some(Instant::now());
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        inner.state.started = now.map_or(0, |now| now.as_secs());
        fill(&mut inner.state);
        drop(inner);
        self.changed.notify_all();
    }

    pub(super) fn with(&self, f: impl FnOnce(&mut BalanceState)) {
        f(&mut self.inner.lock().state);
    }

    /// Part of a chunk has been moved.
    pub(super) fn moving(&self, now: Relocating) {
        self.inner.lock().now = now;
    }

    /// A chunk has been dealt with.
    pub(super) fn dealt_with(&self, f: impl FnOnce(&mut BalanceState)) {
        let mut inner = self.inner.lock();
        inner.now = Relocating::default();
        f(&mut inner.state);
    }

    /// Says how it ended.
    pub(super) fn ended(&self, status: BalanceStatus, why: Option<&Error>) {
        let mut inner = self.inner.lock();
        if let Some(since) = inner.since.take() {
            inner.state.seconds = since.elapsed().as_secs_f64();
        }
        inner.state.status = status;
        if let Some(why) = why {
            inner.state.why = Some(why.to_string());
        }
        drop(inner);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_learns_that_it_was_refused() {
        let control = BalanceControl::new();
        std::thread::scope(|threads| {
            let waiter = threads.spawn(|| control.wait_for_the_beginning());
            control.ended(BalanceStatus::Failed, Some(&Error::NoSpace));
            waiter.join().unwrap();
        });
        let state = control.state();
        assert!(!control.has_begun());
        assert_eq!(
            (state.status, state.why.as_deref()),
            (BalanceStatus::Failed, Some("no space left"))
        );
    }

    #[test]
    fn to_cancel_outweighs_to_pause() {
        let control = BalanceControl::new();
        control.pause();
        assert_eq!(control.told(), Some(Early::Pause));
        control.cancel();
        control.pause();
        assert_eq!(control.told(), Some(Early::Cancel));
    }

    #[test]
    fn rate_and_time_left_follow_from_what_was_moved() {
        let mut state = BalanceState { total: 100, moved: 25, seconds: 5.0, ..Default::default() };
        assert_eq!((state.rate(), state.seconds_left()), (5, Some(15.0)));
        state.moved = 0;
        assert_eq!(state.seconds_left(), None);
    }
}
