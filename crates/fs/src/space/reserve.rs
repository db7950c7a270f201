//! Reservations: an operation owns its worst case before it starts, and who waits for space waits
//! in line.
//!
//! Each kind of space has an account: how many bytes there are and which pot they are in (used,
//! pinned, reserved, unusable; the rest is free). A [`Reservation`] is a guard on reserved bytes:
//! allocations move bytes from it to *used*, its drop gives the rest back. Pinned bytes (freed, but
//! still reachable from the last durable superblock) are never free.
//!
//! When a request does not fit, it takes a ticket. Tickets are served strictly oldest first, so
//! that a large request is not starved by small ones. The thread with the oldest ticket runs the
//! reclaimer; there is no thread that could be asleep or die. It gives up when the reclaimer has
//! nothing left to try, or has tried several times without a gain: a commit frees the blocks that
//! it has copied itself, which looks like progress for ever. But nobody is refused for what others
//! merely hold: an operation that has its reservation comes to its end without needing more
//! ([`Space::reserve_passing`]), gives back nearly all of it, and is waited for, from the moment at
//! which it is granted. What it leaves behind, delayed data and notes for the commit, is for the
//! reclaimer: who found nothing while such an operation came to its end looks again. A deletion,
//! which gives space back itself, is refused last of all: it lets those in line pass, who will be
//! refused and let go of what they hold, and waits while anybody holds anything.
//!
//! The *global reserve* is the part of metadata space that only the commit may use (the extent,
//! checksum, free-space and root trees change while it runs), deletions in need excepted: they may
//! have half of it, which is why it is twice what a commit takes ([`global_reserve_size`]).
//! Metadata may be reserved beyond what its block groups hold, against device space that can still
//! become metadata: worst cases are many times what is used, and a commit allocates the chunk when
//! it is needed.
//!
//! Lock order: nothing is locked, and nothing called, with an account locked.

use crate::api::may_wait;
use crate::error::{Error, Result};
use crate::space::SpaceKind;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Bytes of copies of global trees' blocks that the global reserve pays in one commit.
pub(crate) const MAX_COPIES_IN_RESERVE: u64 = 256 << 20;

/// Rounds of reclaim without a gain after which a request is refused.
const FRUITLESS_ROUNDS: u32 = 3;

/// Times that a deletion waits for others to let go of what they hold, and how long at most:
/// whoever holds space does so for an operation, but may be slow.
const PATIENCE: u32 = 64;
/// See [`PATIENCE`].
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// What can make space: the engine.
pub trait Reclaim: Send + Sync {
    /// Tries to make `bytes` more free for `kind`, by the cheapest means left: running delayed
    /// work, writing delayed data, allocating a chunk, committing. `Ok(false)`: there is nothing
    /// left to try.
    ///
    /// Runs on the thread with the oldest ticket, which may hold locks of the operation that it
    /// reserves for, and with no lock of this module held. Reservations made inside never wait
    /// ([`Space::reserve_emergency`]).
    ///
    /// # Errors
    /// Ends the wait of the ticket with this error.
    fn reclaim(&self, kind: SpaceKind, bytes: u64) -> Result<bool>;
}

/// Bytes of one kind of space and what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pots {
    /// In all block groups.
    pub total: u64,
    /// Allocated.
    pub used: u64,
    /// Freed, not to be reused before the next superblock is durable.
    pub pinned: u64,
    /// Promised, the global reserve included.
    pub reserved: u64,
    /// Where nothing can be allocated: superblock copies, free space of read-only groups.
    pub unusable: u64,
}

impl Pots {
    /// Bytes that can be allocated now, promised or not.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.total - self.used - self.pinned - self.unusable
    }
    /// Bytes that were promised beyond what the block groups hold: a chunk for anything else must
    /// leave this much device space.
    #[must_use]
    pub fn overcommitted(&self) -> u64 {
        self.reserved.saturating_sub(self.free())
    }
    fn check(&self) {
        let taken = self.used.checked_add(self.pinned).and_then(|n| n.checked_add(self.unusable));
        assert!(taken.is_some_and(|n| n <= self.total), "space does not add up: {self:?}");
    }
}

/// Figures for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReserveStats {
    /// Requests that had to queue.
    pub tickets: u64,
    /// Calls of the reclaimer.
    pub reclaims: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Bytes allocated beyond a reservation (an estimate was too low).
    pub overdrawn: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TicketState {
    Waiting,
    Granted,
    /// Granted, and its thread has it.
    Taken,
}

/// How space is asked for.
#[derive(Clone, Copy, Default)]
struct Asked {
    /// For an operation that passes, see [`Space::reserve_passing`].
    passes: bool,
    /// It may have half of the global reserve.
    deletes: bool,
}

struct Ticket {
    bytes: u64,
    overcommits: bool,
    asked: Asked,
    state: Mutex<TicketState>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    pots: Pots,
    /// Device space that metadata may be promised beyond `total`.
    overcommit: u64,
    /// Size that the global reserve should have, and what it holds (a part of `pots.reserved`).
    global_size: u64,
    global: u64,
    /// Reservations of operations that are on their way to their end.
    passing: u64,
    /// How many have come to it so far.
    passed: u64,
    /// The first in line waits for anybody who gives back anything.
    waits_for_any: bool,
    queue: VecDeque<Arc<Ticket>>,
}

impl State {
    /// Bytes that no operation holds: what reclaiming is to increase. It counts the global reserve,
    /// which is the first to get what comes back.
    fn unheld(&self) -> u64 {
        (self.pots.free() + self.overcommit).saturating_sub(self.pots.reserved - self.global)
    }
    /// Is there plenty of room for this, but operations that are about to end have reserved it?
    /// Chunks that were made for their sake would stay for good.
    fn is_only_held_up(&self, bytes: u64) -> bool {
        self.passing > 0 && self.pots.used.saturating_add(bytes) < self.pots.total / 4 * 3
    }
    /// Bytes that may still be promised. What the global reserve lacks is promised already: chunks
    /// that operations were promised would otherwise be used up by them before it is full.
    fn available(&self, overcommits: bool) -> u64 {
        let limit = self.pots.free() + if overcommits { self.overcommit } else { 0 };
        limit.saturating_sub(self.pots.reserved + self.global_size.saturating_sub(self.global))
    }
    fn try_take(&mut self, bytes: u64, overcommits: bool) -> bool {
        let fits = bytes <= self.available(overcommits);
        if fits {
            self.pots.reserved += bytes;
        }
        fits
    }
    /// Turns bytes of the global reserve into an operation's, as long as half of it stays.
    fn take_half_of_global(&mut self, bytes: u64) -> bool {
        let enough =
            self.global.checked_sub(bytes).is_some_and(|rest| rest >= self.global_size / 2);
        if enough {
            self.global -= bytes;
        }
        enough
    }
    /// Hands out what has become free: first to the global reserve, then to the oldest tickets.
    fn serve(&mut self) {
        self.pots.check();
        let unpromised = self.pots.free().saturating_sub(self.pots.reserved);
        let fill = self.global_size.saturating_sub(self.global).min(unpromised);
        self.global += fill;
        self.pots.reserved += fill;
        while let Some(first) = self.queue.front() {
            let (bytes, overcommits, deletes) =
                (first.bytes, first.overcommits, first.asked.deletes);
            let fits =
                self.try_take(bytes, overcommits) || deletes && self.take_half_of_global(bytes);
            if !fits {
                break;
            }
            let first = self.queue.pop_front().expect("looked at");
            self.passing += u64::from(first.asked.passes);
            *first.state.lock() = TicketState::Granted;
            first.changed.notify_one();
            self.wake_front();
        }
    }
    /// A ticket joins the line. Its thread may hold what the first in line is waiting for, and
    /// would not let go of it.
    fn get_in_line(&mut self, ticket: &Arc<Ticket>) {
        self.queue.push_back(Arc::clone(ticket));
        if std::mem::take(&mut self.waits_for_any) {
            self.wake_front();
        }
    }
    /// The oldest ticket's thread has work to do: to reclaim.
    fn wake_front(&self) {
        if let Some(first) = self.queue.front() {
            // Locked, so that the thread either sees that it is first or is waiting already.
            let _state = first.state.lock();
            first.changed.notify_one();
        }
    }
}

#[derive(Default)]
struct Account {
    state: Mutex<State>,
    tickets: AtomicU64,
    reclaims: AtomicU64,
    refused: AtomicU64,
    overdrawn: AtomicU64,
}

/// The accounts of a file system.
pub struct Space {
    accounts: [Account; 3],
    mixed: bool,
    reclaim: OnceLock<Box<dyn Reclaim>>,
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pots: Vec<_> = self.accounts.iter().map(|a| a.state.lock().pots).collect();
        f.debug_struct("Space")
            .field("mixed", &self.mixed)
            .field("pots", &pots)
            .finish_non_exhaustive()
    }
}

thread_local! {
    static RECLAIMING: Cell<bool> = const { Cell::new(false) };
}

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
    /// Accounts without any space. `mixed`: data and metadata share their block groups, hence an
    /// account.
    #[must_use]
    pub fn new(mixed: bool) -> Arc<Self> {
        Arc::new(Self { accounts: Default::default(), mixed, reclaim: OnceLock::new() })
    }

    /// Says who makes space when it is short. Once.
    ///
    /// # Panics
    /// When called twice.
    pub fn set_reclaim(&self, reclaim: Box<dyn Reclaim>) {
        assert!(self.reclaim.set(reclaim).is_ok(), "one engine");
    }

    fn account(&self, kind: SpaceKind) -> &Account {
        match kind {
            SpaceKind::Data => &self.accounts[0],
            SpaceKind::Metadata => &self.accounts[usize::from(!self.mixed)],
            SpaceKind::System => &self.accounts[2],
        }
    }

    /// Do data and metadata share their space?
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// The pots of an account.
    #[must_use]
    pub fn pots(&self, kind: SpaceKind) -> Pots {
        self.account(kind).state.lock().pots
    }

    /// Bytes that operations have reserved, without the global reserve: 0 when nothing runs.
    #[must_use]
    pub fn reserved_by_operations(&self, kind: SpaceKind) -> u64 {
        let state = self.account(kind).state.lock();
        state.pots.reserved - state.global
    }

    /// Could this be reserved now, if nobody waited?
    #[must_use]
    pub fn fits(&self, kind: SpaceKind, bytes: u64) -> bool {
        self.account(kind).state.lock().available(kind == SpaceKind::Metadata) >= bytes
    }

    /// Bytes that no operation holds, the global reserve and what metadata may overcommit included:
    /// what [`Reclaim::reclaim`] is to increase.
    #[must_use]
    pub fn unheld(&self, kind: SpaceKind) -> u64 {
        self.account(kind).state.lock().unheld()
    }

    /// Bytes for which somebody waits.
    #[must_use]
    pub fn wanted(&self, kind: SpaceKind) -> u64 {
        let state = self.account(kind).state.lock();
        let bytes = state.queue.iter().map(|t| t.bytes).filter(|n| *n < u64::MAX);
        bytes.fold(0, u64::saturating_add)
    }

    /// Statistics of an account.
    #[must_use]
    pub fn stats(&self, kind: SpaceKind) -> ReserveStats {
        let a = self.account(kind);
        ReserveStats {
            tickets: a.tickets.load(Ordering::Relaxed),
            reclaims: a.reclaims.load(Ordering::Relaxed),
            refused: a.refused.load(Ordering::Relaxed),
            overdrawn: a.overdrawn.load(Ordering::Relaxed),
        }
    }

    /// Sets how many bytes (logical) of device space new metadata chunks could still have. To be
    /// called whenever chunks come or go.
    pub fn set_overcommit(&self, bytes: u64) {
        let mut state = self.account(SpaceKind::Metadata).state.lock();
        state.overcommit = bytes;
        state.serve();
    }

    /// Device space is about to go to something else than metadata, which may be promised
    /// `overcommit` bytes beyond its groups from now on. False, and nothing is changed, where more
    /// than `most` were promised already: in one step, or promises that are made meanwhile would be
    /// broken.
    #[must_use]
    pub fn take_device_space(&self, most: u64, overcommit: u64) -> bool {
        let mut state = self.account(SpaceKind::Metadata).state.lock();
        let fits = state.pots.overcommitted() <= most;
        if fits {
            state.overcommit = overcommit;
        }
        fits
    }

    /// Sets the size of the global reserve ([`global_reserve_size`]). It fills as space becomes
    /// free.
    pub fn set_global_reserve(&self, bytes: u64) {
        let mut state = self.account(SpaceKind::Metadata).state.lock();
        let surplus = state.global.saturating_sub(bytes);
        state.global -= surplus;
        state.pots.reserved -= surplus;
        state.global_size = bytes;
        state.serve();
    }

    /// Bytes that the global reserve should hold and does hold.
    #[must_use]
    pub fn global_reserve(&self) -> (u64, u64) {
        let state = self.account(SpaceKind::Metadata).state.lock();
        (state.global_size, state.global)
    }

    /// Changes pots, and serves whom the change helps.
    pub(super) fn change(&self, kind: SpaceKind, f: impl FnOnce(&mut Pots)) {
        let mut state = self.account(kind).state.lock();
        f(&mut state.pots);
        state.serve();
    }

    /// A group has come, which takes device space: changes the pots of its account and sets what
    /// metadata may be promised beyond its groups. For metadata in one step, as it is the same
    /// space.
    pub(super) fn grow(&self, kind: SpaceKind, overcommit: u64, f: impl FnOnce(&mut Pots)) {
        let metadata = self.account(SpaceKind::Metadata);
        let account = self.account(kind);
        if !std::ptr::eq(account, metadata) {
            return self.change(kind, f);
        }
        let mut state = account.state.lock();
        f(&mut state.pots);
        state.overcommit = overcommit;
        state.serve();
    }

    /// Takes `bytes` that are free out of service, if what is left is enough for all that was
    /// promised. For metadata that counts the global reserve and leaves promises against device
    /// space out.
    pub(super) fn try_withdraw(&self, kind: SpaceKind, bytes: u64) -> bool {
        let mut state = self.account(kind).state.lock();
        let rest = state.pots.free().checked_sub(bytes);
        let fits = rest.is_some_and(|rest| rest >= state.pots.reserved);
        if fits {
            state.pots.unusable += bytes;
            state.pots.check();
        }
        fits
    }

    /// Takes `bytes` out of what is free and promised to nobody, into the pinned ones. False when
    /// there is less.
    pub(super) fn try_pin(&self, kind: SpaceKind, bytes: u64) -> bool {
        let mut state = self.account(kind).state.lock();
        let fits = bytes <= state.available(false);
        if fits {
            state.pots.pinned += bytes;
            state.pots.check();
        }
        fits
    }

    fn guard(self: &Arc<Self>, kind: SpaceKind, bytes: u64) -> Reservation {
        self.guard_of(kind, bytes, Asked::default())
    }
    /// What was taken for a request.
    fn guard_of(self: &Arc<Self>, kind: SpaceKind, bytes: u64, asked: Asked) -> Reservation {
        Reservation { space: Arc::clone(self), kind, bytes, passing: asked.passes }
    }

    /// An empty reservation, to merge others into. What is allocated from it beyond what it holds
    /// comes from the global reserve, then from free space: the committer's kind.
    #[must_use]
    pub fn empty(self: &Arc<Self>, kind: SpaceKind) -> Reservation {
        self.guard(kind, 0)
    }

    /// Reserves if that can be done at once; `None` if not, or if others wait already.
    #[must_use]
    pub fn try_reserve(self: &Arc<Self>, kind: SpaceKind, bytes: u64) -> Option<Reservation> {
        self.try_reserve_as(kind, bytes, Asked::default())
    }

    fn try_reserve_as(
        self: &Arc<Self>,
        kind: SpaceKind,
        bytes: u64,
        asked: Asked,
    ) -> Option<Reservation> {
        let mut state = self.account(kind).state.lock();
        // Not past those who wait, who would never find the global reserve full either.
        let fits = state.queue.is_empty()
            && (state.try_take(bytes, kind == SpaceKind::Metadata)
                || asked.deletes && state.take_half_of_global(bytes));
        fits.then(|| {
            state.passing += u64::from(asked.passes);
            self.guard_of(kind, bytes, asked)
        })
    }

    /// Reserves `bytes`, waiting for space if need be.
    ///
    /// # Errors
    /// `NoSpace` when nothing can be reclaimed; `WouldBlock` on a thread that must not wait
    /// ([`crate::api::no_wait`]); what the reclaimer returned.
    pub fn reserve(self: &Arc<Self>, kind: SpaceKind, bytes: u64) -> Result<Reservation> {
        self.reserve_as(kind, bytes, Asked::default())
    }

    /// Reserves metadata for an operation that then needs nothing more, waits for no space and no
    /// commit, and ends: while there is such a reservation, nobody is refused. What is
    /// [split](Reservation::split) from it stays behind.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub fn reserve_passing(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        self.reserve_as(SpaceKind::Metadata, bytes, Asked { passes: true, deletes: false })
    }

    /// As [`Self::reserve_passing`], for operations that free more than they take: where metadata
    /// is short they may use up to half of the global reserve. Otherwise a full file system could
    /// not be emptied.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub fn reserve_for_deletion(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        self.reserve_as(SpaceKind::Metadata, bytes, Asked { passes: true, deletes: true })
    }

    fn reserve_as(
        self: &Arc<Self>,
        kind: SpaceKind,
        bytes: u64,
        asked: Asked,
    ) -> Result<Reservation> {
        if RECLAIMING.get() {
            return self.reserve_emergency(kind, bytes);
        }
        match self.try_reserve_as(kind, bytes, asked) {
            Some(guard) => Ok(guard),
            None => {
                may_wait()?;
                self.queue(kind, bytes, asked)
            }
        }
    }

    /// Reserves without ever waiting, past those who wait, and from the global reserve if need be:
    /// for the reclaimer itself and for the commit. Never as passing: who reclaims would find in
    /// each round that somebody has passed, himself, and begin another.
    ///
    /// # Errors
    /// `NoSpace`.
    pub fn reserve_emergency(self: &Arc<Self>, kind: SpaceKind, bytes: u64) -> Result<Reservation> {
        let mut state = self.account(kind).state.lock();
        if state.try_take(bytes, kind == SpaceKind::Metadata) {
            return Ok(self.guard(kind, bytes));
        }
        if kind == SpaceKind::Metadata && state.global >= bytes {
            state.global -= bytes;
            return Ok(self.guard(kind, bytes));
        }
        Err(Error::NoSpace)
    }

    /// Reserves metadata without waiting, past those who wait: for operations that hold up a seal
    /// already. Deletions may use half of the global reserve.
    #[must_use]
    pub fn reserve_inside(self: &Arc<Self>, bytes: u64, deleting: bool) -> Option<Reservation> {
        let kind = SpaceKind::Metadata;
        let mut state = self.account(kind).state.lock();
        if state.try_take(bytes, true) || deleting && state.take_half_of_global(bytes) {
            return Some(self.guard(kind, bytes));
        }
        None
    }

    /// Runs `f` while no operation is under way that has reserved `kind`, and none begins: gets in
    /// line like everybody else, waits for those before and for those that are passing, and lets
    /// nobody through until `f` is done. What `f` reserves must not wait.
    pub fn alone<R>(&self, kind: SpaceKind, f: impl FnOnce() -> R) -> R {
        let account = self.account(kind);
        let ticket = Arc::new(Ticket {
            // Never served: it stands in the way.
            bytes: u64::MAX,
            overcommits: false,
            asked: Asked::default(),
            state: Mutex::new(TicketState::Waiting),
            changed: Condvar::new(),
        });
        account.state.lock().get_in_line(&ticket);
        let _line = InLine { account, ticket: &ticket };
        loop {
            let state = account.state.lock();
            if state.passing == 0 && state.queue.front().is_some_and(|t| Arc::ptr_eq(t, &ticket)) {
                break;
            }
            ticket.wait(state);
        }
        f()
    }

    /// What a ticket was granted.
    fn taken(self: &Arc<Self>, kind: SpaceKind, ticket: &Ticket) -> Reservation {
        *ticket.state.lock() = TicketState::Taken;
        self.guard_of(kind, ticket.bytes, ticket.asked)
    }

    /// Takes a ticket and waits.
    fn queue(self: &Arc<Self>, kind: SpaceKind, bytes: u64, asked: Asked) -> Result<Reservation> {
        let account = self.account(kind);
        let ticket = Arc::new(Ticket {
            bytes,
            overcommits: kind == SpaceKind::Metadata,
            asked,
            state: Mutex::new(TicketState::Waiting),
            changed: Condvar::new(),
        });
        account.tickets.fetch_add(1, Ordering::Relaxed);
        {
            let mut state = account.state.lock();
            state.get_in_line(&ticket);
            // Space may have come since the first attempt.
            state.serve();
        }
        let _line = InLine { account, ticket: &ticket };
        let (mut best, mut fruitless, mut patience) = (0, 0, PATIENCE);
        // Operations that had come to their end when the reclaimer began.
        let mut seen = 0;
        loop {
            // Wait until served or first in line. The account is asked without the ticket locked:
            // the order is account, ticket.
            let (granted, first, unheld, passed) = {
                let state = account.state.lock();
                let granted = *ticket.state.lock() == TicketState::Granted;
                let first = state.queue.front().is_some_and(|t| Arc::ptr_eq(t, &ticket));
                if !granted && (!first || state.is_only_held_up(bytes)) {
                    ticket.wait(state);
                    continue;
                }
                (granted, first, state.unheld(), state.passed)
            };
            if granted {
                return Ok(self.taken(kind, &ticket));
            }
            debug_assert!(first);
            fruitless = if unheld > best { 0 } else { fruitless + 1 };
            best = best.max(unheld);
            account.reclaims.fetch_add(1, Ordering::Relaxed);
            let tries = fruitless <= FRUITLESS_ROUNDS;
            if tries {
                seen = passed;
            }
            let outcome = match self.reclaim.get() {
                Some(engine) if tries => {
                    let _reset = Reclaiming::start();
                    engine.reclaim(kind, bytes)
                }
                _ => Ok(false),
            };
            let refusal = match outcome {
                Ok(true) => continue,
                Ok(false) => Error::NoSpace,
                Err(e) => e,
            };
            let mut state = account.state.lock();
            state.serve();
            if *ticket.state.lock() == TicketState::Granted {
                drop(state);
                return Ok(self.taken(kind, &ticket));
            }
            if (state.passing > 0 || state.passed != seen) && matches!(refusal, Error::NoSpace) {
                // Each that ends wakes us; after it, everything is tried once more. One that has
                // ended since the reclaimer looked may have left behind what that did not find.
                if state.passed == seen {
                    ticket.wait(state);
                }
                fruitless = FRUITLESS_ROUNDS - 1;
                continue;
            }
            let held = state.pots.reserved > state.global;
            if asked.deletes && held && patience > 0 && matches!(refusal, Error::NoSpace) {
                fruitless = FRUITLESS_ROUNDS - 1;
                patience -= 1;
                if state.queue.len() > 1 {
                    // Who is behind may hold something already.
                    state.queue.rotate_left(1);
                    state.wake_front();
                    ticket.wait(state);
                } else {
                    state.waits_for_any = true;
                    if ticket.wait_for(state, LONGEST_WAIT) {
                        patience = 0;
                    }
                }
                continue;
            }
            account.refused.fetch_add(1, Ordering::Relaxed);
            return Err(refusal);
        }
    }
}

impl Ticket {
    /// Waits to be woken. Who changes anything locks the account first, so nothing is missed.
    fn wait(&self, state: MutexGuard<'_, State>) {
        let mut mine = self.state.lock();
        drop(state);
        self.changed.wait(&mut mine);
    }
    /// The same for some time; true if that went by.
    fn wait_for(&self, state: MutexGuard<'_, State>, longest: Duration) -> bool {
        let mut mine = self.state.lock();
        drop(state);
        self.changed.wait_for(&mut mine, longest).timed_out()
    }
}

/// A ticket's place in the line. Whoever leaves, by whatever way, lets the next fit or take over.
struct InLine<'a> {
    account: &'a Account,
    ticket: &'a Arc<Ticket>,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let mut state = self.account.state.lock();
        let before = state.queue.len();
        state.queue.retain(|t| !Arc::ptr_eq(t, self.ticket));
        // Granted while its thread was giving up.
        let unwanted = *self.ticket.state.lock() == TicketState::Granted;
        if unwanted {
            state.pots.reserved -= self.ticket.bytes;
            state.passing -= u64::from(self.ticket.asked.passes);
        }
        if unwanted || state.queue.len() < before {
            state.serve();
            state.wake_front();
        }
    }
}

/// Reserved bytes. Dropping gives back what was not allocated.
#[derive(Debug)]
pub struct Reservation {
    space: Arc<Space>,
    kind: SpaceKind,
    bytes: u64,
    passing: bool,
}

impl Reservation {
    /// Bytes still reserved.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// What they are for.
    #[must_use]
    pub fn kind(&self) -> SpaceKind {
        self.kind
    }
    /// Moves `bytes` (all there are, if there are fewer) into a reservation of their own, which is
    /// not a passing one.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.space.guard(self.kind, bytes)
    }
    /// Takes over what `other` holds.
    ///
    /// # Panics
    /// When it is of another kind of space.
    pub fn merge(&mut self, mut other: Self) {
        assert_eq!(self.kind, other.kind);
        self.bytes += std::mem::take(&mut other.bytes);
    }
    /// Gives back all but `keep` bytes.
    pub fn shrink_to(&mut self, keep: u64) {
        let surplus = self.bytes.saturating_sub(keep);
        drop(self.split(surplus));
    }

    /// `bytes` have been allocated: they are used now. Beyond what is reserved, the global reserve
    /// pays, then the free space: the allocator has found them, so they are there.
    pub(super) fn consume(&mut self, bytes: u64) {
        let account = self.space.account(self.kind);
        let mut state = account.state.lock();
        let own = bytes.min(self.bytes);
        self.bytes -= own;
        let global =
            if self.kind == SpaceKind::Metadata { (bytes - own).min(state.global) } else { 0 };
        state.global -= global;
        state.pots.reserved -= own + global;
        state.pots.used += bytes;
        state.pots.check();
        account.overdrawn.fetch_add(bytes - own, Ordering::Relaxed);
    }
    /// `bytes` were allocated and are given back unused: they are reserved again.
    pub(super) fn restore(&mut self, bytes: u64) {
        let mut state = self.space.account(self.kind).state.lock();
        state.pots.used -= bytes;
        state.pots.reserved += bytes;
        self.bytes += bytes;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 && !self.passing {
            return;
        }
        let mut state = self.space.account(self.kind).state.lock();
        state.pots.reserved -= self.bytes;
        state.serve();
        let waited_for = std::mem::take(&mut state.waits_for_any);
        if self.passing {
            state.passing -= 1;
            state.passed += 1;
        }
        // Who waits for operations to end counts with this one.
        if self.passing || waited_for {
            state.wake_front();
        }
    }
}

/// Size of the global reserve. `commit_bytes` is the most that a commit copies: every block of the
/// extent, checksum, free-space and root trees once, and what they grow by. Twice that, because
/// deletions may have half; from 16 to 512 MiB, but not more than a quarter of the metadata space,
/// or half of it where a commit may need that.
#[must_use]
pub fn global_reserve_size(commit_bytes: u64, metadata_total: u64) -> u64 {
    let needed = 2 * commit_bytes.min(MAX_COPIES_IN_RESERVE);
    needed.clamp(16 << 20, 512 << 20).min((metadata_total / 4).max(needed.min(metadata_total / 2)))
}

#[cfg(test)]
mod tests;
