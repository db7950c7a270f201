//! Completions: how a caller learns that something has ended.
//!
//! A caller gives a [`Completion`] to work that takes long, and its own thread goes on. The thread
//! that ends the work completes it: the leader of a log, or the committer. So a hundred callers of
//! `fsync` cost no hundred threads that are put to sleep and woken.
//!
//! A caller that has nothing else to do parks on a completion ([`wait_for`]). A parked thread can
//! be lent a job ([`Completion::lend`]). A leader does so when its own caller waits for it: another
//! thread then leads, and the leader's thread returns to its caller.

use crate::api::may_wait;
use crate::error::{Error, Result};
use crate::lock::{self, Condvar, Mutex, Wait};
use std::sync::Arc;

/// Work for a thread that is parked.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// Called once with the outcome of something.
///
/// The call is made where the outcome becomes known, in the middle of a commit or of a batch of the
/// log. So it only passes the outcome on: it must not wait or call the engine.
pub struct Completion {
    caller: Option<Caller>,
    /// The error of a part that has ended already.
    failed: Option<Error>,
}

enum Caller {
    Call(Box<dyn FnOnce(Result<()>) + Send>),
    Parked(Arc<Parked>),
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion")
            .field("parked", &self.is_parked())
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl Completion {
    /// Makes this call with the outcome, on any thread.
    #[must_use]
    pub fn new(call: impl FnOnce(Result<()>) + Send + 'static) -> Self {
        Self { caller: Some(Caller::Call(Box::new(call))), failed: None }
    }
    /// A part has ended like this. Its error is the outcome, unless the rest fails as well.
    pub(crate) fn after(mut self, part: Result<()>) -> Self {
        self.failed = self.failed.take().or(part.err());
        self
    }
    /// Makes the call with the outcome.
    pub(crate) fn complete(mut self, outcome: Result<()>) {
        let outcome = outcome.and(self.failed.take().map_or(Ok(()), Err));
        match self.caller.take() {
            Some(Caller::Call(call)) => call(outcome),
            Some(Caller::Parked(parked)) => parked.complete(outcome),
            None => {}
        }
    }
    /// Is a thread parked here, or about to park?
    pub(crate) fn is_parked(&self) -> bool {
        matches!(self.caller, Some(Caller::Parked(_)))
    }
    /// Lends a job to the thread that is parked here, or about to park. That thread does the job
    /// before it learns the outcome. False if there is no such thread.
    pub(crate) fn lend(&self, job: impl FnOnce() + Send + 'static) -> bool {
        match &self.caller {
            Some(Caller::Parked(parked)) => parked.lend(Box::new(job)),
            _ => false,
        }
    }
}

impl Drop for Completion {
    /// No thread may stay parked because another one panicked.
    fn drop(&mut self) {
        if let Some(Caller::Parked(parked)) = self.caller.take() {
            parked.complete(Err(Error::ReadOnly(Some("an internal error ended the call".into()))));
        }
    }
}

/// Begins something, and waits until it has ended.
///
/// # Errors
/// The error with which it ended; `WouldBlock`, although it was begun.
pub(crate) fn wait_for(begin: impl FnOnce(Completion)) -> Result<()> {
    lock::before_waiting(Wait::Commit);
    let parked = Arc::<Parked>::default();
    begin(Completion { caller: Some(Caller::Parked(parked.clone())), failed: None });
    loop {
        match parked.next()? {
            Next::Job(job) => job(),
            Next::Outcome(outcome) => return outcome,
        }
    }
}

/// A thread that waits for one outcome.
#[derive(Default)]
struct Parked {
    state: Mutex<ParkedState, lock::Parked>,
    changed: Condvar,
}

#[derive(Default)]
struct ParkedState {
    job: Option<Job>,
    outcome: Option<Result<()>>,
    /// The thread has gone on.
    left: bool,
}

/// What a parked thread does next.
enum Next {
    Job(Job),
    Outcome(Result<()>),
}

impl Parked {
    fn next(&self) -> Result<Next> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.job.take() {
                return Ok(Next::Job(job));
            }
            if let Some(outcome) = state.outcome.take() {
                state.left = true;
                return Ok(Next::Outcome(outcome));
            }
            may_wait().inspect_err(|_| state.left = true)?;
            self.changed.wait(&mut state);
        }
    }
    fn complete(&self, outcome: Result<()>) {
        self.state.lock().outcome = Some(outcome);
        self.changed.notify_one();
    }
    fn lend(&self, job: Job) -> bool {
        let mut state = self.state.lock();
        if state.left || state.job.is_some() {
            return false;
        }
        state.job = Some(job);
        self.changed.notify_one();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::no_wait;
    use std::sync::mpsc::channel;
    use std::thread;

    fn lost() -> Result<()> {
        Err(Error::DataLost)
    }

    #[test]
    fn the_worse_of_two_outcomes_is_told() {
        let told = |part, rest| {
            let (out, outcome) = channel();
            Completion::new(move |o| out.send(o).unwrap()).after(part).complete(rest);
            outcome.recv().unwrap()
        };
        assert!(told(Ok(()), Ok(())).is_ok());
        assert!(matches!(told(lost(), Ok(())), Err(Error::DataLost)));
        assert!(matches!(told(Ok(()), lost()), Err(Error::DataLost)));
        assert!(matches!(told(lost(), Err(Error::NoSpace)), Err(Error::NoSpace)));
    }

    #[test]
    fn a_parked_thread_learns_the_outcome_and_does_jobs_meanwhile() {
        assert!(wait_for(|done| done.complete(Ok(()))).is_ok());
        let (give, given) = channel::<Completion>();
        thread::scope(|s| {
            let parked = s.spawn(|| {
                let mine = thread::current().id();
                (mine, wait_for(|done| give.send(done).unwrap()))
            });
            let done = given.recv().unwrap();
            let (out, ran_on) = channel();
            assert!(done.lend(move || out.send(thread::current().id()).unwrap()));
            let ran_on = ran_on.recv().unwrap();
            done.complete(lost());
            let (mine, outcome) = parked.join().unwrap();
            assert_eq!(ran_on, mine);
            assert!(matches!(outcome, Err(Error::DataLost)));
        });
    }

    #[test]
    fn a_job_comes_before_the_outcome() {
        let (out, ran) = channel();
        let outcome = wait_for(|done| {
            assert!(done.lend(move || out.send(()).unwrap()));
            assert!(!done.lend(|| ()), "it has one already");
            done.complete(Ok(()));
        });
        assert!(outcome.is_ok() && ran.try_recv().is_ok());
    }

    #[test]
    fn no_thread_stays_parked() {
        assert!(matches!(wait_for(drop), Err(Error::ReadOnly(_))));
        let mut kept = None;
        let outcome = no_wait(|| wait_for(|done| kept = Some(done)));
        assert!(matches!(outcome, Err(Error::WouldBlock)));
        assert!(!kept.unwrap().lend(|| ()), "the thread has gone on");
        assert!(!Completion::new(|_| ()).lend(|| ()), "there is no thread");
    }
}
