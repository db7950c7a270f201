//! Waiting in line for space.
//!
//! The thread with the oldest ticket makes space; all others wait to be served, or to become the
//! first. This module hides what the first one does until it is served or refused ([`Attempts`]):
//! how often it runs the reclaimer, which operations it waits for when that finds nothing, and when
//! it gives up.

use super::{Account, AccountState, Asked, RECLAIMING, Reservation, Space, Ticket, TicketState};
use crate::error::{Error, Result};
use crate::lock::{self, Locked, Wait};
use crate::space::SpaceKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Rounds of reclaim without a gain after which a request is refused. The number is bounded because
/// a commit frees the blocks that it has copied itself, which would look like progress for ever.
const FRUITLESS_ROUNDS: u32 = 3;

/// How often a deletion waits for others to give back what they hold. A deletion gives space back
/// itself, so it is refused last of all. It lets the other requests in line pass: these will be
/// refused and give back what they hold. It waits as long as anything is held.
const PATIENCE: u32 = 64;
/// How long each such wait may be. Space is held for one operation only, but that may be slow.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// The thread runs the reclaimer, until dropped.
struct Reclaiming;
impl Reclaiming {
    fn start() -> Self {
        RECLAIMING.set(true);
        Self
    }
}
impl Drop for Reclaiming {
    fn drop(&mut self) {
        RECLAIMING.set(false);
    }
}

impl Space {
    /// Runs `f` while no operation that has reserved `kind` is under way, and none begins. It gets
    /// in line like every request, waits for those before it and for operations that pass, and lets
    /// no other through until `f` is done. What `f` reserves must not wait.
    pub(crate) fn alone<R>(&self, kind: SpaceKind, f: impl FnOnce() -> R) -> R {
        lock::before_waiting(Wait::Commit);
        let account = self.account(kind);
        // This ticket is never served. It stands in the way.
        let ticket = Ticket::new((u64::MAX, 1), false, Asked::default());
        account.state.lock().get_in_line(&ticket);
        let _line = InLine { account, ticket: &ticket };
        loop {
            let state = account.state.lock();
            if state.passing == 0 && state.is_first(&ticket) {
                break;
            }
            ticket.wait(state);
        }
        f()
    }

    /// The reservation for a ticket that was granted.
    fn taken(self: &Arc<Self>, kind: SpaceKind, ticket: &Ticket) -> Reservation {
        *ticket.state.lock() = TicketState::Taken;
        let mut guard = self.guard(kind, (ticket.bytes / ticket.charge, ticket.charge));
        guard.passing = ticket.asked.passes;
        guard
    }

    /// Takes a ticket and waits.
    pub(super) fn queue(
        self: &Arc<Self>,
        kind: SpaceKind,
        bytes: u64,
        asked: Asked,
    ) -> Result<Reservation> {
        let account = self.account(kind);
        let charge = self.charge(kind);
        let charged = bytes.saturating_mul(charge);
        let ticket = Ticket::new((charged, charge), kind == SpaceKind::Metadata, asked);
        account.tickets.fetch_add(1, Ordering::Relaxed);
        account.enter(&ticket);
        let _line = InLine { account, ticket: &ticket };
        let mut attempts = Attempts::default();
        loop {
            let Some(seen) = account.wait_for_turn(&ticket) else {
                return Ok(self.taken(kind, &ticket));
            };
            account.reclaims.fetch_add(1, Ordering::Relaxed);
            let refusal = match self.make_space(attempts.next(&seen), &ticket, kind) {
                Ok(true) => continue,
                Ok(false) => Error::NoSpace,
                Err(e) => e,
            };
            let mut state = account.state.lock();
            state.serve();
            if ticket.is_granted() {
                drop(state);
                return Ok(self.taken(kind, &ticket));
            }
            let waits = matches!(refusal, Error::NoSpace);
            if !(waits && attempts.wait_for_others(state, &ticket)) {
                account.refused.fetch_add(1, Ordering::Relaxed);
                return Err(refusal);
            }
        }
    }

    /// Runs the reclaimer for a ticket, unless that has been in vain too often.
    fn make_space(&self, round: Round, ticket: &Ticket, kind: SpaceKind) -> Result<bool> {
        match self.reclaim.get() {
            Some(engine) if round == Round::Reclaim => {
                let _reset = Reclaiming::start();
                engine.reclaim(kind, ticket.bytes)
            }
            _ => Ok(false),
        }
    }
}

/// What the first in line sees when its turn has come.
struct Seen {
    /// Bytes that no operation holds.
    unheld: u64,
    /// How many operations that pass have ended so far.
    passed: u64,
}

impl Account {
    /// A ticket joins the line. Space may have come since the first attempt.
    fn enter(&self, ticket: &Arc<Ticket>) {
        let mut state = self.state.lock();
        state.get_in_line(ticket);
        state.serve();
    }
    /// Waits until a ticket is first in line, so that its thread has to make space. `None` means
    /// that it was served.
    fn wait_for_turn(&self, ticket: &Arc<Ticket>) -> Option<Seen> {
        loop {
            // The account is locked before the ticket: that is their order.
            let state = self.state.lock();
            if ticket.is_granted() {
                return None;
            }
            if state.is_first(ticket) && !state.is_only_held_up(ticket.bytes) {
                return Some(Seen { unheld: state.unheld(), passed: state.passed });
            }
            ticket.wait(state);
        }
    }
}

/// What the first in line does next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Round {
    /// It runs the reclaimer.
    Reclaim,
    /// It looks only whether there is anything to wait for.
    Look,
}

/// What the first in line has tried.
struct Attempts {
    /// The most bytes that no operation held so far, and rounds of reclaim since then.
    best: u64,
    fruitless: u32,
    /// How many operations had ended when the reclaimer began.
    passed: u64,
    /// How often a deletion may still wait for others.
    patience: u32,
}

impl Default for Attempts {
    fn default() -> Self {
        Self { best: 0, fruitless: 0, passed: 0, patience: PATIENCE }
    }
}

impl Attempts {
    /// Begins a round.
    fn next(&mut self, now: &Seen) -> Round {
        self.fruitless = if now.unheld > self.best { 0 } else { self.fruitless + 1 };
        self.best = self.best.max(now.unheld);
        if self.fruitless > FRUITLESS_ROUNDS {
            return Round::Look;
        }
        self.passed = now.passed;
        Round::Reclaim
    }
    /// The reclaimer has found nothing. Waits for what others are about to give back. Returns false
    /// if there is nothing to wait for.
    fn wait_for_others(&mut self, mut state: Locked<'_, AccountState>, ticket: &Ticket) -> bool {
        let held = state.figures.reserved > state.global;
        if state.passed != self.passed {
            // An operation that has ended since the reclaimer looked may have left behind what the
            // reclaimer did not find.
        } else if state.passing > 0 {
            // Each operation that ends wakes this thread.
            ticket.wait(state);
        } else if ticket.asked.deletes && held && self.patience > 0 {
            self.patience -= 1;
            if state.queue.len() > 1 {
                // The requests behind may hold something already.
                state.queue.rotate_left(1);
                state.wake_front();
                ticket.wait(state);
            } else {
                state.waits_for_any = true;
                if ticket.wait_for(state, LONGEST_WAIT) {
                    self.patience = 0;
                }
            }
        } else {
            return false;
        }
        // Everything is tried once more.
        self.fruitless = FRUITLESS_ROUNDS - 1;
        true
    }
}

impl Ticket {
    /// Waits to be woken. Every change locks the account first, so nothing is missed.
    fn wait(&self, state: Locked<'_, AccountState>) {
        let mut mine = self.state.lock();
        drop(state);
        self.changed.wait(&mut mine);
    }
    /// The same for `longest` at most. Returns true if that time has passed.
    fn wait_for(&self, state: Locked<'_, AccountState>, longest: Duration) -> bool {
        let mut mine = self.state.lock();
        drop(state);
        self.changed.wait_for(&mut mine, longest).timed_out()
    }
}

/// A ticket's place in the line. When it is left, by whatever way, the next ticket is served or
/// takes over.
struct InLine<'a> {
    account: &'a Account,
    ticket: &'a Arc<Ticket>,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let mut state = self.account.state.lock();
        let before = state.queue.len();
        state.queue.retain(|t| !Arc::ptr_eq(t, self.ticket));
        // It may have been granted while its thread was giving up.
        let unwanted = *self.ticket.state.lock() == TicketState::Granted;
        if unwanted {
            state.figures.reserved -= self.ticket.bytes;
            state.passing -= u64::from(self.ticket.asked.passes);
        }
        if unwanted || state.queue.len() < before {
            state.serve();
            state.wake_front();
        }
    }
}
