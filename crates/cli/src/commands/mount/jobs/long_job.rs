//! Work of one kind, of which one piece runs at a time.

use anyhow::{anyhow, bail};
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The piece of work that runs, or ran last. It is watched and ended by its control `C`.
#[derive(Debug)]
pub(super) struct LongJob<C> {
    current: Mutex<Current<C>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Current<C> {
    control: Option<Arc<C>>,
    runs: bool,
    /// No more may begin.
    ended: bool,
}

impl<C> Default for LongJob<C> {
    fn default() -> Self {
        let current = Current { control: None, runs: false, ended: false };
        Self { current: Mutex::new(current), changed: Condvar::new() }
    }
}

/// A piece of work from its beginning to its end: that of this value.
#[derive(Debug)]
pub(in super::super) struct Running<C> {
    job: Arc<LongJob<C>>,
    control: Arc<C>,
}

impl<C> Deref for Running<C> {
    type Target = C;
    fn deref(&self) -> &C {
        &self.control
    }
}

impl<C> Running<C> {
    /// Ends it, and leaves nothing that could be told of it.
    pub(super) fn forget(self) {
        self.job.current().control = None;
    }
}

impl<C> Drop for Running<C> {
    fn drop(&mut self) {
        self.job.current().runs = false;
        self.job.changed.notify_all();
    }
}

impl<C> LongJob<C> {
    fn current(&self) -> MutexGuard<'_, Current<C>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// That of the one that runs, or ran last.
    pub(super) fn control(&self) -> Option<Arc<C>> {
        self.current().control.clone()
    }

    /// That of the one that runs.
    pub(super) fn running(&self) -> Option<Arc<C>> {
        let current = self.current();
        current.control.clone().filter(|_| current.runs)
    }

    /// # Errors
    /// One runs, which is said in the words of `is_running`; no more may begin.
    pub(super) fn begin(
        self: &Arc<Self>,
        control: C,
        is_running: &str,
    ) -> anyhow::Result<Running<C>> {
        let mut current = self.current();
        if current.ended {
            return Err(super::unmounted());
        }
        if current.runs {
            bail!("{is_running}");
        }
        let control = Arc::new(control);
        (current.control, current.runs) = (Some(Arc::clone(&control)), true);
        Ok(Running { job: Arc::clone(self), control })
    }

    /// Ends the one that runs in some way, and waits for its end.
    ///
    /// # Errors
    /// None runs, which is said in the words of `is_not_running`.
    pub(super) fn stop(&self, how: impl FnOnce(&C), is_not_running: &str) -> anyhow::Result<()> {
        let control = self.running().ok_or_else(|| anyhow!("{is_not_running}"))?;
        how(&control);
        let mut current = self.current();
        let is_it = |c: &Current<C>| c.control.as_ref().is_some_and(|c| Arc::ptr_eq(c, &control));
        while current.runs && is_it(&current) {
            current = self.changed.wait(current).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Leaves nothing that could be told of the last one.
    pub(super) fn forget_last(&self) {
        let mut current = self.current();
        if !current.runs {
            current.control = None;
        }
    }

    /// Ends the one that runs in some way; it has not ended yet when this returns. No more may
    /// begin.
    pub(super) fn end(&self, how: impl FnOnce(&C)) {
        self.current().ended = true;
        if let Some(control) = self.running() {
            how(&control);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn one_runs_at_a_time_and_is_waited_for() {
        let job = Arc::<LongJob<AtomicBool>>::default();
        assert!(job.stop(|_| (), "none").unwrap_err().to_string().contains("none"));
        let running = job.begin(AtomicBool::new(false), "one runs").unwrap();
        assert_eq!(
            job.begin(AtomicBool::default(), "one runs").unwrap_err().to_string(),
            "one runs"
        );
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !running.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                drop(running);
            });
            job.stop(|control| control.store(true, Ordering::Relaxed), "none").unwrap();
            assert!(job.running().is_none() && job.control().is_some());
        });
        job.begin(AtomicBool::default(), "one runs").unwrap().forget();
        assert!(job.control().is_none());
        job.end(|_| ());
        assert!(job.begin(AtomicBool::default(), "one runs").is_err());
    }
}
