//! How a scrub is slowed down, told to end, and watched.
//!
//! A limit is for all devices together, and may change at any time. Besides, a scrub gives way to
//! other work on the devices: while there is any, it reads in short pieces, and lets the devices go
//! for some time after each.

use super::report::{ScrubDamage, ScrubState, ScrubStatus};
use crate::error::{Error, Result};
use crate::lock::{self, Condvar, Mutex};
use larder_format::DeviceId;
use larder_volume::Volume;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// After a piece the devices are left to others for so many times as long as it took.
const REST: u32 = 10;
/// And no longer than this.
const LONGEST_REST: Duration = Duration::from_millis(100);
/// Others that used the devices so long ago still work.
const A_MOMENT: Duration = Duration::from_millis(200);
/// A scrub ahead of its limit by less than this goes on.
const SLACK: Duration = Duration::from_millis(5);
/// Seconds that one piece may cost at most. More is a limit that nobody meant.
const LONGEST_DEBT: f64 = 86_400.0;

/// The reins of a scrub. Its runner and others have it together.
#[derive(Debug, Default)]
pub struct ScrubControl {
    inner: Mutex<Inner, lock::ScrubState>,
    changed: Condvar,
    /// Transfers that scrubs asked for, and those of others when it was last looked.
    own: AtomicU64,
    others: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    state: ScrubState,
    /// When others were last seen to use the devices.
    others_worked: Option<Instant>,
    /// Why it has to end.
    end: Option<ScrubStatus>,
    /// When the limit allows the next piece.
    next: Option<Instant>,
    /// When this run began, and the seconds of earlier ones.
    since: Option<(Instant, f64)>,
}

impl ScrubControl {
    /// For a scrub that begins, or goes on from a state.
    #[must_use]
    pub fn new(state: ScrubState) -> Self {
        Self { inner: Mutex::new(Inner { state, ..Inner::default() }), ..Self::default() }
    }

    /// How far it is.
    #[must_use]
    pub fn state(&self) -> ScrubState {
        let inner = self.inner.lock();
        let mut state = inner.state.clone();
        if let Some((since, before)) = inner.since {
            state.seconds = before + since.elapsed().as_secs_f64();
        }
        state
    }

    /// Tells it to end, so that it can go on later.
    pub fn cancel(&self) {
        self.end(ScrubStatus::Canceled);
    }

    /// The same for a file system that is about to be closed.
    pub fn interrupt(&self) {
        self.end(ScrubStatus::Interrupted);
    }

    fn end(&self, how: ScrubStatus) {
        self.inner.lock().end.get_or_insert(how);
        self.changed.notify_all();
    }

    /// Sets how many bytes may be read in a second, of all devices together. 0: any number.
    pub fn set_limit(&self, limit: u64) {
        let mut inner = self.inner.lock();
        inner.state.limit = limit;
        inner.next = None;
        drop(inner);
        self.changed.notify_all();
    }

    pub(super) fn begin(&self, fill: impl FnOnce(&mut ScrubState)) {
        let mut inner = self.inner.lock();
        inner.since = Some((Instant::now(), inner.state.seconds));
        inner.state.status = ScrubStatus::Running;
        inner.state.why = None;
        fill(&mut inner.state);
    }

    /// Says how the run ended.
    pub(super) fn ended(&self, result: &Result<()>) {
        let mut inner = self.inner.lock();
        if let Some((since, before)) = inner.since.take() {
            inner.state.seconds = before + since.elapsed().as_secs_f64();
        }
        inner.state.status = match (result, inner.end) {
            // It may have been told to end when there was nothing left to do.
            (Ok(()), _) => ScrubStatus::Finished,
            (Err(_), Some(end)) => end,
            (Err(e), None) => {
                inner.state.why = Some(e.to_string());
                ScrubStatus::Failed
            }
        };
        drop(inner);
        self.changed.notify_all();
    }

    pub(super) fn with<R>(&self, f: impl FnOnce(&mut ScrubState) -> R) -> R {
        f(&mut self.inner.lock().state)
    }

    pub(super) fn count(&self, device: DeviceId, f: impl FnOnce(&mut super::ScrubCounts)) {
        self.with(|state| f(state.of(device)));
    }

    pub(super) fn note(&self, damage: ScrubDamage) {
        self.with(|state| state.note(damage));
    }

    /// Waits until the limit allows to read more. The caller holds no version meanwhile, which
    /// would pin space.
    ///
    /// # Errors
    /// `Busy` when it has to end.
    pub(super) fn wait_for_turn(&self) -> Result<()> {
        let mut inner = self.inner.lock();
        loop {
            if inner.end.is_some() {
                return Err(told_to_end());
            }
            match inner.next {
                Some(next) if next > Instant::now() + SLACK => {
                    self.changed.wait_until(&mut inner, next);
                }
                _ => return Ok(()),
            }
        }
    }

    /// Reads so many bytes now. What the limit does not allow yet is waited for before more is
    /// read.
    pub(super) fn spend(&self, bytes: u64) {
        let mut inner = self.inner.lock();
        let (limit, now) = (inner.state.limit, Instant::now());
        let from = inner.next.map_or(now, |next| next.max(now));
        let takes = if limit == 0 { 0.0 } else { bytes as f64 / limit as f64 };
        inner.next = (limit > 0).then(|| from + Duration::from_secs_f64(takes.min(LONGEST_DEBT)));
    }

    /// A transfer of the scrub's own.
    pub(super) fn own(&self) {
        self.own_many(1);
    }

    /// So many transfers of the scrub's own.
    pub(super) fn own_many(&self, transfers: u64) {
        self.own.fetch_add(transfers, Ordering::Relaxed);
    }

    /// What was asked of the devices until now is nobody's work: what came before the scrub, and
    /// the commit that it begins with. See [`Self::others_work`].
    pub(super) fn forget_earlier_work(&self, volume: &Volume, nodes: u64) {
        self.others.store(self.transfers_of_others(volume, nodes), Ordering::Relaxed);
    }

    /// Have others used the devices a moment ago? Nodes that were read do not count, because a
    /// scrub reads nodes as others do: `nodes` is how many were.
    pub(super) fn others_work(&self, volume: &Volume, nodes: u64) -> bool {
        let others = self.transfers_of_others(volume, nodes);
        let before = self.others.fetch_max(others, Ordering::Relaxed);
        let mut inner = self.inner.lock();
        if others > before {
            inner.others_worked = Some(Instant::now());
        }
        inner.others_worked.is_some_and(|at| at.elapsed() < A_MOMENT)
    }

    /// Each transfer is counted as the scrub's before it is counted at all. So this is never too
    /// much, but it may be too little for a moment.
    fn transfers_of_others(&self, volume: &Volume, nodes: u64) -> u64 {
        let all = volume.transfers();
        all.saturating_sub(self.own.load(Ordering::Relaxed) + nodes)
    }

    /// Leaves the devices to others, after a piece that took so long.
    ///
    /// # Errors
    /// `Busy` when it has to end.
    pub(super) fn rest(&self, took: Duration) -> Result<()> {
        let until = Instant::now() + (took * REST).min(LONGEST_REST);
        let mut inner = self.inner.lock();
        while inner.end.is_none() {
            if self.changed.wait_until(&mut inner, until).timed_out() {
                return Ok(());
            }
        }
        Err(told_to_end())
    }
}

fn told_to_end() -> Error {
    Error::Busy("the scrub was told to end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_holds_and_can_be_lifted() {
        let control = ScrubControl::new(ScrubState { limit: 1 << 20, ..ScrubState::default() });
        let begin = Instant::now();
        for _ in 0..5 {
            control.wait_for_turn().unwrap();
            control.spend(64 << 10);
        }
        assert!(begin.elapsed() >= Duration::from_millis(4 * 62 - 10));
        control.spend(1 << 40);
        std::thread::scope(|threads| {
            let waiter = threads.spawn(|| control.wait_for_turn());
            control.set_limit(0);
            waiter.join().unwrap().unwrap();
        });
    }

    #[test]
    fn what_waits_learns_of_the_end() {
        let control = ScrubControl::new(ScrubState { limit: 1, ..ScrubState::default() });
        control.spend(1 << 40);
        std::thread::scope(|threads| {
            let waiter = threads.spawn(|| control.wait_for_turn());
            control.cancel();
            assert!(matches!(waiter.join().unwrap(), Err(Error::Busy(_))));
        });
        assert!(control.rest(Duration::from_secs(10)).is_err());
        control.interrupt();
        control.ended(&Err(told_to_end()));
        assert_eq!(control.state().status, ScrubStatus::Canceled);
    }
}
