//! Which callers wait for which ticket of a log, and how they learn that it is settled.
//!
//! Some callers wait with their thread. Any of them can lead. Others have left a call behind
//! ([`Settled`]) and do other work: so a hundred callers of `fsync` do not cost a hundred threads
//! that each batch puts to sleep and wakes. They cannot lead. Therefore the leader does not leave
//! while there are calls: **a call is left behind only while there is a leader.**
//!
//! Calls are made where their ticket is settled, by the leader or by the committer in a seal, with
//! locks of the log held. So they only pass on the result. They must not wait or call the engine.

use super::Cause;
use super::collect::Contribution;
use crate::lock::Condvar;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The outcome of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TicketOutcome {
    /// A durable superblock leads to it.
    Durable,
    /// A commit has to do it; and why, unless that commit is under way already.
    Commit(Option<Cause>),
}

/// Called once with the outcome of a ticket.
pub(super) type Settled = Box<dyn FnOnce(crate::error::Result<TicketOutcome>) + Send>;

enum Waiter {
    Thread(Arc<Condvar>),
    Call(Settled),
}

#[derive(Default)]
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
    waiters: BTreeMap<(u64, u64), Waiter>,
    next_waiter: u64,
    /// How many of the waiters are calls.
    calls: usize,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("given", &self.given)
            .field("taken", &self.taken)
            .field("durable", &self.durable)
            .field("refused", &self.refused)
            .field("waiters", &self.waiters.len())
            .finish_non_exhaustive()
    }
}

/// The key of a waiter, as long as it waits.
pub(super) type Place = (u64, u64);

/// Calls to be made once the queue is unlocked again.
#[must_use]
pub(super) struct Calls(Vec<(Settled, crate::error::Result<TicketOutcome>)>);

impl Calls {
    /// Makes the calls.
    pub(super) fn make(self) {
        for (call, outcome) in self.0 {
            call(outcome);
        }
    }
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

    fn enter(&mut self, ticket: u64, waiter: Waiter) -> Place {
        let place = (ticket, self.next_waiter);
        self.next_waiter += 1;
        self.waiters.insert(place, waiter);
        place
    }
    /// A thread is about to wait. It [leaves](Self::leave) afterwards.
    pub(super) fn enter_thread(&mut self, ticket: u64) -> (Place, Arc<Condvar>) {
        let me = Arc::new(Condvar::new());
        (self.enter(ticket, Waiter::Thread(me.clone())), me)
    }
    pub(super) fn leave(&mut self, place: Place) {
        self.waiters.remove(&place);
    }
    /// A call is left behind.
    pub(super) fn enter_call(&mut self, ticket: u64, call: Settled) {
        self.enter(ticket, Waiter::Call(call));
        self.calls += 1;
    }
    /// Is there a waiter that cannot lead?
    pub(super) fn has_calls(&self) -> bool {
        self.calls > 0
    }

    /// Takes out the calls of tickets up to `upto` whose outcome is known.
    fn take_calls(
        &mut self,
        upto: u64,
        say: impl Fn(&Self, u64) -> Option<crate::error::Result<TicketOutcome>>,
    ) -> Calls {
        if self.calls == 0 {
            return Calls(Vec::new());
        }
        let places: Vec<(Place, crate::error::Result<TicketOutcome>)> = self
            .waiters
            .range(..=(upto, u64::MAX))
            .filter(|(_, waiter)| matches!(waiter, Waiter::Call(_)))
            .filter_map(|(place, _)| Some((*place, say(self, place.0)?)))
            .collect();
        let mut calls = Vec::with_capacity(places.len());
        for (place, outcome) in places {
            if let Some(Waiter::Call(call)) = self.waiters.remove(&place) {
                self.calls -= 1;
                calls.push((call, outcome));
            }
        }
        Calls(calls)
    }
    fn wake_threads(&self, upto: u64) {
        for waiter in self.waiters.range(..=(upto, u64::MAX)).map(|(_, waiter)| waiter) {
            if let Waiter::Thread(thread) = waiter {
                thread.notify_one();
            }
        }
    }
    /// All waiters have to look again.
    pub(super) fn wake_all(&mut self) -> Calls {
        self.wake_threads(u64::MAX);
        self.take_calls(u64::MAX, |queue, ticket| queue.outcome(ticket).map(Ok))
    }
    /// Writing has ended. All waiters without an outcome are told why.
    pub(super) fn fail(&mut self, why: &str) -> Calls {
        let failed = || crate::error::Error::ReadOnly(Some(why.to_owned()));
        self.wake_threads(u64::MAX);
        self.take_calls(u64::MAX, |queue, ticket| {
            Some(queue.outcome(ticket).map_or_else(|| Err(failed()), Ok))
        })
    }
    /// Wakes the waiters whose ticket is durable now, and no others: of a hundred waiters each
    /// batch serves only a few.
    pub(super) fn wake_served(&mut self) -> Calls {
        self.wake_threads(self.durable);
        self.take_calls(self.durable, |_, _| Some(Ok(TicketOutcome::Durable)))
    }
    /// There is no leader, so the first waiter without an outcome has to lead. A waiter that was
    /// woken for this and leaves passes it on.
    pub(super) fn wake_leader(&self) {
        debug_assert!(
            self.led || self.calls == 0,
            "there is no leader, but a waiter that cannot lead"
        );
        let mut unserved = self.waiters.range((self.durable + 1, 0)..);
        if !self.led
            && let Some(Waiter::Thread(thread)) = unserved.next().map(|(_, waiter)| waiter)
        {
            thread.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::mpsc::{Receiver, channel};

    type Answers = Receiver<(u64, crate::error::Result<TicketOutcome>)>;

    /// A queue that has a leader and has given out `given` tickets, with a call left behind for
    /// each.
    fn led(given: u64) -> (Queue, Answers) {
        let mut queue = Queue { given, led: true, ..Queue::default() };
        let (out, answers) = channel();
        for ticket in 1..=given {
            let out = out.clone();
            queue.enter_call(ticket, Box::new(move |outcome| out.send((ticket, outcome)).unwrap()));
        }
        (queue, answers)
    }

    fn heard(answers: &Answers) -> Vec<(u64, TicketOutcome)> {
        answers.try_iter().map(|(ticket, outcome)| (ticket, outcome.unwrap())).collect()
    }

    #[test]
    fn who_is_served_hears_it_once() {
        let (mut queue, answers) = led(3);
        queue.wake_served().make();
        assert_eq!(heard(&answers), []);
        queue.durable = 2;
        queue.wake_served().make();
        assert_eq!(heard(&answers), [(1, TicketOutcome::Durable), (2, TicketOutcome::Durable)]);
        assert!(queue.has_calls());
        queue.durable = 3;
        queue.wake_served().make();
        queue.wake_served().make();
        assert_eq!(heard(&answers), [(3, TicketOutcome::Durable)]);
        assert!(!queue.has_calls());
    }

    #[test]
    fn what_is_sealed_too_early_or_given_up_has_to_commit() {
        let (mut queue, answers) = led(4);
        (queue.taken, queue.durable) = (2, 1);
        queue.refused = Some((4, Some(Cause::TooMuch)));
        queue.wake_all().make();
        let too_much = TicketOutcome::Commit(Some(Cause::TooMuch));
        assert_eq!(heard(&answers), [(1, TicketOutcome::Durable), (4, too_much)]);
        queue.closed = true;
        queue.wake_all().make();
        assert_eq!(heard(&answers), [(3, TicketOutcome::Commit(None))]);
        assert!(queue.has_calls(), "the second was taken, and may still become durable");
    }

    #[test]
    fn a_failure_reaches_everybody_who_is_not_served() {
        let (mut queue, answers) = led(3);
        queue.durable = 1;
        queue.fail("the device is gone").make();
        assert!(!queue.has_calls());
        let all: Vec<_> = answers.try_iter().collect();
        assert!(matches!(all[0], (1, Ok(TicketOutcome::Durable))), "{all:?}");
        let failed =
            |n: usize| matches!(&all[n].1, Err(Error::ReadOnly(Some(why))) if why.contains("gone"));
        assert!(all.len() == 3 && failed(1) && failed(2), "{all:?}");
    }
}
