//! Which callers wait for which ticket of a log, and how they learn that it is settled.
//!
//! A caller leaves a [`Completion`], which is completed where its ticket is settled: by the leader,
//! or by the committer in a seal. If the log cannot serve the ticket, the completion goes on to the
//! commit, which completes it ([`leave_to_commit`]). No thread waits for that.
//!
//! Most callers cannot lead, because their threads do other work meanwhile. Therefore the leader
//! does not leave while there are waiters, unless one of them has a parked thread that leads
//! instead: **there are waiters only while there is a leader.**

use super::Cause;
use super::collect::Contribution;
use crate::completion::Completion;
use crate::engine::Core;
use crate::error::{Error, Result};
use larder_format::Generation;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// The outcome of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TicketOutcome {
    /// A durable superblock leads to it.
    Durable,
    /// A commit has to do it; and why, unless that commit is under way already.
    Commit(Option<Cause>),
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Contributions that no batch has taken yet, in the order of their tickets. Without those that
    /// their callers have brought in themselves.
    pub(super) waiting: Vec<Contribution>,
    /// The last ticket given out, and the last that a batch has taken.
    pub(super) given: u64,
    pub(super) taken: u64,
    /// All tickets up to this are durable.
    pub(super) durable: u64,
    /// All tickets from this one on have to wait for the commit; and why, unless that commit is
    /// under way already.
    pub(super) refused: Option<(u64, Option<Cause>)>,
    /// There is a leader.
    pub(super) led: bool,
    /// The transaction is sealed.
    pub(super) closed: bool,
    /// The waiters, by ticket, and by a number, because several may wait for one ticket.
    waiters: BTreeMap<(u64, u64), Completion>,
    next_waiter: u64,
}

/// Waiters whose tickets are settled. Their completions are called once the queue is unlocked
/// again.
#[must_use]
pub(super) struct SettledWaiters(Vec<(Completion, Result<TicketOutcome>)>);

impl SettledWaiters {
    /// Calls them. The log is that of the transaction `generation`.
    pub(super) fn tell(self, core: &Core, generation: Generation) {
        for (done, outcome) in self.0 {
            settle(core, generation, done, outcome);
        }
    }
}

/// Tells one waiter the outcome of its ticket, or leaves that to the commit.
pub(super) fn settle(
    core: &Core,
    generation: Generation,
    done: Completion,
    outcome: Result<TicketOutcome>,
) {
    match outcome {
        Ok(TicketOutcome::Durable) => {
            core.log.logged.fetch_add(1, Ordering::Relaxed);
            done.complete(Ok(()));
        }
        Ok(TicketOutcome::Commit(cause)) => leave_to_commit(core, generation, cause, done),
        Err(e) => done.complete(Err(e)),
    }
}

/// Asks for the commit of the transaction `generation`, which completes `done`. Without a cause the
/// commit is under way already.
pub(super) fn leave_to_commit(
    core: &Core,
    generation: Generation,
    cause: Option<Cause>,
    done: Completion,
) {
    match cause {
        Some(cause) => core.log.caused(cause),
        None => {
            core.log.sealed.fetch_add(1, Ordering::Relaxed);
        }
    }
    core.when_committed_up_to(generation, done);
}

impl Queue {
    /// Tickets that the next batch will take. None once the log was given up, because its content
    /// may be incomplete then.
    pub(super) fn fresh(&self) -> u64 {
        if self.closed || self.refused.is_some() { 0 } else { self.given - self.taken }
    }
    /// The outcome of a ticket, as far as it is known.
    pub(super) fn outcome(&self, ticket: u64) -> Option<TicketOutcome> {
        if self.durable >= ticket {
            return Some(TicketOutcome::Durable);
        }
        match self.refused {
            Some((from, cause)) if from <= ticket => Some(TicketOutcome::Commit(cause)),
            _ => (self.closed && self.taken < ticket).then_some(TicketOutcome::Commit(None)),
        }
    }

    /// A caller waits for a ticket whose outcome is not known.
    pub(super) fn enter(&mut self, ticket: u64, done: Completion) {
        self.waiters.insert((ticket, self.next_waiter), done);
        self.next_waiter += 1;
    }
    /// Is there any waiter?
    pub(super) fn has_waiters(&self) -> bool {
        !self.waiters.is_empty()
    }
    /// Lends the first waiter with a parked thread the job that `job` makes for its ticket. False
    /// if there is none.
    pub(super) fn lend<J: FnOnce() + Send + 'static>(&self, job: impl FnOnce(u64) -> J) -> bool {
        let mut job = Some(job);
        self.waiters.iter().any(|((ticket, _), done)| {
            done.is_parked() && job.take().is_some_and(|job| done.lend(job(*ticket)))
        })
    }

    /// Takes out the waiters of tickets up to `upto` whose outcome is known.
    fn take(
        &mut self,
        upto: u64,
        outcome: impl Fn(&Self, u64) -> Option<Result<TicketOutcome>>,
    ) -> SettledWaiters {
        let settled: Vec<_> = self
            .waiters
            .range(..=(upto, u64::MAX))
            .filter_map(|(place, _)| Some((*place, outcome(self, place.0)?)))
            .collect();
        let mut take = |place| self.waiters.remove(&place).expect("it was just there");
        SettledWaiters(settled.into_iter().map(|(place, o)| (take(place), o)).collect())
    }
    /// Takes out all waiters whose ticket is settled.
    pub(super) fn take_settled(&mut self) -> SettledWaiters {
        self.take(u64::MAX, |queue, ticket| queue.outcome(ticket).map(Ok))
    }
    /// Takes out all waiters, because writing has ended. Those without an outcome get the reason.
    pub(super) fn take_all(&mut self, why: &str) -> SettledWaiters {
        let failed = || Error::ReadOnly(Some(why.to_owned()));
        self.take(u64::MAX, |queue, ticket| {
            Some(queue.outcome(ticket).map_or_else(|| Err(failed()), Ok))
        })
    }
    /// Takes out the waiters whose ticket is durable. It looks at no others: of a hundred waiters
    /// each batch serves only a few.
    pub(super) fn take_served(&mut self) -> SettledWaiters {
        self.take(self.durable, |_, _| Some(Ok(TicketOutcome::Durable)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::completion::wait_for;
    use std::sync::mpsc::{Receiver, channel};

    /// A queue that has a leader and has given out `given` tickets, with a waiter for each that
    /// says its ticket.
    fn led(given: u64) -> (Queue, Receiver<u64>) {
        let mut queue = Queue { given, led: true, ..Queue::default() };
        let (out, told) = channel();
        for ticket in 1..=given {
            let out = out.clone();
            queue.enter(ticket, Completion::new(move |_| out.send(ticket).unwrap()));
        }
        (queue, told)
    }

    fn outcomes(
        settled: SettledWaiters,
        told: &Receiver<u64>,
    ) -> Vec<(u64, Result<TicketOutcome>)> {
        let tell = |(done, outcome): (Completion, _)| {
            done.complete(Ok(()));
            (told.try_recv().unwrap(), outcome)
        };
        settled.0.into_iter().map(tell).collect()
    }
    fn known(settled: SettledWaiters, told: &Receiver<u64>) -> Vec<(u64, TicketOutcome)> {
        outcomes(settled, told).into_iter().map(|(ticket, o)| (ticket, o.unwrap())).collect()
    }

    #[test]
    fn a_waiter_that_is_served_is_told_once() {
        let (mut queue, told) = led(3);
        assert_eq!(known(queue.take_served(), &told), []);
        queue.durable = 2;
        let durable = |ticket| (ticket, TicketOutcome::Durable);
        assert_eq!(known(queue.take_served(), &told), [1, 2].map(durable));
        assert!(queue.has_waiters());
        queue.durable = 3;
        assert_eq!(known(queue.take_served(), &told), [3].map(durable));
        assert_eq!(known(queue.take_served(), &told), []);
        assert!(!queue.has_waiters());
    }

    #[test]
    fn what_is_sealed_too_early_or_given_up_has_to_commit() {
        let (mut queue, told) = led(4);
        (queue.taken, queue.durable) = (2, 1);
        queue.refused = Some((4, Some(Cause::TooMuch)));
        let too_much = TicketOutcome::Commit(Some(Cause::TooMuch));
        let settled = known(queue.take_settled(), &told);
        assert_eq!(settled, [(1, TicketOutcome::Durable), (4, too_much)]);
        queue.closed = true;
        assert_eq!(known(queue.take_settled(), &told), [(3, TicketOutcome::Commit(None))]);
        assert!(queue.has_waiters(), "the second was taken, and may still become durable");
    }

    #[test]
    fn a_failure_reaches_every_waiter_that_is_not_served() {
        let (mut queue, told) = led(3);
        queue.durable = 1;
        let all = outcomes(queue.take_all("the device is gone"), &told);
        assert!(!queue.has_waiters());
        assert!(matches!(all[0], (1, Ok(TicketOutcome::Durable))), "{all:?}");
        let failed =
            |n: usize| matches!(&all[n].1, Err(Error::ReadOnly(Some(why))) if why.contains("gone"));
        assert!(all.len() == 3 && failed(1) && failed(2), "{all:?}");
    }

    #[test]
    fn the_first_parked_thread_is_lent_a_job() {
        let (mut queue, _told) = led(2);
        assert!(!queue.lend(|_| || ()), "no thread is parked");
        let (out, ran) = channel();
        let outcome = wait_for(|done| {
            queue.enter(2, done);
            assert!(queue.lend(|ticket| move || out.send(ticket).unwrap()));
            queue.durable = 2;
            let served = queue.take_served();
            served.0.into_iter().for_each(|(done, _)| done.complete(Ok(())));
        });
        assert!(outcome.is_ok());
        assert_eq!(ran.try_recv(), Ok(2));
    }
}
