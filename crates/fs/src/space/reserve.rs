//! Reservations: an operation owns the space for its worst case before it starts, and requests that
//! find no space wait in line.
//!
//! Each kind of space has an account: how many bytes there are, and how many of them are used,
//! pinned, reserved, unusable; the rest is free. A [`Reservation`] is a guard on reserved bytes.
//! Allocations move bytes from it to *used*; its drop gives the rest back. Pinned bytes (freed, but
//! still reachable from the last durable superblock) are never free.
//!
//! A request that does not fit takes a ticket. Tickets are served strictly oldest first, so that
//! small requests do not starve a large one. The thread with the oldest ticket runs the reclaimer;
//! there is no extra thread that could be asleep or die. No request is refused for what others
//! merely hold: an operation that has its reservation comes to its end without needing more
//! ([`Space::reserve_passing`]), gives nearly all of it back, and is waited for. What it leaves
//! behind, delayed data and notes for the commit, is for the reclaimer, which then looks again.
//! `docs/SPACE.md` has the rules, under "Which requests are refused".
//!
//! With an account locked only a ticket is locked, and nothing is called.

use crate::api::may_wait;
use crate::error::{Error, Result};
use crate::lock::{self, Condvar, Locked, Mutex, Wait};
use crate::space::SpaceKind;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Bytes of copies of global trees' blocks that the global reserve pays in one commit.
pub(crate) const MAX_COPIES_IN_RESERVE: u64 = 256 << 20;

/// Rounds of reclaim without a gain after which a request is refused. The number is bounded because
/// a commit frees the blocks that it has copied itself, which would look like progress for ever.
const FRUITLESS_ROUNDS: u32 = 3;

/// How often a deletion waits for others to let go of what they hold. A deletion gives space back
/// itself, so it is refused last of all: it lets the requests in line pass, which will be refused
/// and let go of what they hold, and it waits while anything is held.
const PATIENCE: u32 = 64;
/// How long each such wait may be. Space is held for one operation only, but that may be slow.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// What can make space: the layer above.
pub trait Reclaim: Send + Sync {
    /// Tries to make `bytes` more free for `kind`, by the cheapest means left: running delayed
    /// work, writing delayed data, allocating a chunk, committing. `Ok(false)` means that there is
    /// nothing left to try.
    ///
    /// It runs on the thread with the oldest ticket. That thread may hold locks of the operation
    /// that it reserves for, but no lock of this module. Reservations that are made inside never
    /// wait ([`Space::reserve_emergency`]).
    ///
    /// # Errors
    /// Ends the wait of the ticket with this error.
    fn reclaim(&self, kind: SpaceKind, bytes: u64) -> Result<bool>;
}

/// Bytes of one kind of space, and what state they are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// In all block groups.
    pub total: u64,
    /// Allocated.
    pub used: u64,
    /// Freed, but not usable before the next superblock is durable.
    pub pinned: u64,
    /// Promised, the global reserve included.
    pub reserved: u64,
    /// Where nothing can be allocated: superblock copies, free space of read-only groups.
    pub unusable: u64,
}

impl Figures {
    /// Bytes that can be allocated now, promised or not.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.total - self.used - self.pinned - self.unusable
    }
    /// Bytes that were promised beyond what the block groups hold. A chunk for anything else must
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
    /// It was granted, and its thread has it.
    Taken,
}

/// What a request is for.
#[derive(Clone, Copy, Default)]
struct Asked {
    /// An operation that passes, see [`Space::reserve_passing`].
    passes: bool,
    /// A deletion, which may have half of the global reserve.
    deletes: bool,
}

struct Ticket {
    bytes: u64,
    overcommits: bool,
    asked: Asked,
    state: Mutex<TicketState, lock::Ticket>,
    changed: Condvar,
}

#[derive(Default)]
struct AccountState {
    figures: Figures,
    /// Bytes that metadata may be promised beyond `total`, against device space that can still
    /// become metadata: worst cases are many times what is used, and the commit makes the chunk
    /// when it is needed.
    overcommit: u64,
    /// Size that the global reserve should have, and what it holds (a part of `figures.reserved`).
    global_size: u64,
    global: u64,
    /// Reservations of operations that pass.
    passing: u64,
    /// How many of these operations have ended so far.
    passed: u64,
    /// The first in line waits until anything at all is given back.
    waits_for_any: bool,
    queue: VecDeque<Arc<Ticket>>,
}

impl AccountState {
    /// Bytes that no operation holds: reclaiming is meant to increase these. They include the
    /// global reserve, which is the first to get what comes back.
    fn unheld(&self) -> u64 {
        (self.figures.free() + self.overcommit).saturating_sub(self.figures.reserved - self.global)
    }
    /// Is there plenty of room for this, which operations that are about to end have reserved? A
    /// chunk that was made because of them would stay for good.
    fn is_only_held_up(&self, bytes: u64) -> bool {
        self.passing > 0 && self.figures.used.saturating_add(bytes) < self.figures.total / 4 * 3
    }
    /// Bytes that may still be promised. What the global reserve lacks counts as promised already.
    /// Otherwise operations would use up the chunks made for them before the reserve is full.
    fn available(&self, overcommits: bool) -> u64 {
        let limit = self.figures.free() + if overcommits { self.overcommit } else { 0 };
        limit.saturating_sub(self.figures.reserved + self.global_size.saturating_sub(self.global))
    }
    fn try_take(&mut self, bytes: u64, overcommits: bool) -> bool {
        let fits = bytes <= self.available(overcommits);
        if fits {
            self.figures.reserved += bytes;
        }
        fits
    }
    /// Turns bytes of the global reserve into an operation's, if half of the reserve stays.
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
        self.figures.check();
        let unpromised = self.figures.free().saturating_sub(self.figures.reserved);
        let fill = self.global_size.saturating_sub(self.global).min(unpromised);
        self.global += fill;
        self.figures.reserved += fill;
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
    /// A ticket joins the line. Its thread may hold what the first in line is waiting for and would
    /// not let go of it, so that one is woken.
    fn get_in_line(&mut self, ticket: &Arc<Ticket>) {
        self.queue.push_back(Arc::clone(ticket));
        if std::mem::take(&mut self.waits_for_any) {
            self.wake_front();
        }
    }
    /// Wakes the thread of the oldest ticket: it has to reclaim.
    fn wake_front(&self) {
        if let Some(first) = self.queue.front() {
            // With the ticket locked, its thread either sees that it is first or is waiting
            // already.
            let _state = first.state.lock();
            first.changed.notify_one();
        }
    }
}

#[derive(Default)]
struct Account {
    state: Mutex<AccountState, lock::Account>,
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
        let figures: Vec<_> = self.accounts.iter().map(|a| a.state.lock().figures).collect();
        f.debug_struct("Space")
            .field("mixed", &self.mixed)
            .field("figures", &figures)
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
    /// Accounts without any space. With `mixed`, data and metadata share their block groups, and so
    /// an account.
    #[must_use]
    pub fn new(mixed: bool) -> Arc<Self> {
        Arc::new(Self { accounts: Default::default(), mixed, reclaim: OnceLock::new() })
    }

    /// Sets what makes space when it is short. Called once.
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

    /// The figures of an account.
    #[must_use]
    pub fn figures(&self, kind: SpaceKind) -> Figures {
        self.account(kind).state.lock().figures
    }

    /// Bytes that operations have reserved, without the global reserve. 0 when nothing runs.
    #[must_use]
    pub fn reserved_by_operations(&self, kind: SpaceKind) -> u64 {
        let state = self.account(kind).state.lock();
        state.figures.reserved - state.global
    }

    /// Could this be reserved now, if nothing was in line?
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

    /// Bytes that the requests in line ask for.
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

    /// Sets how many bytes (logical) of device space new metadata chunks could still have. It is
    /// called whenever chunks come or go.
    pub fn set_overcommit(&self, bytes: u64) {
        let mut state = self.account(SpaceKind::Metadata).state.lock();
        state.overcommit = bytes;
        state.serve();
    }

    /// Device space is about to go to something else than metadata, which then may be promised
    /// `overcommit` bytes beyond its groups. If more than `most` were promised already, returns
    /// false and changes nothing. Both happen in one step, or promises that are made meanwhile
    /// would be broken.
    #[must_use]
    pub fn take_device_space(&self, most: u64, overcommit: u64) -> bool {
        let mut state = self.account(SpaceKind::Metadata).state.lock();
        let fits = state.figures.overcommitted() <= most;
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
        state.figures.reserved -= surplus;
        state.global_size = bytes;
        state.serve();
    }

    /// Bytes that the global reserve should hold and does hold.
    #[must_use]
    pub fn global_reserve(&self) -> (u64, u64) {
        let state = self.account(SpaceKind::Metadata).state.lock();
        (state.global_size, state.global)
    }

    /// Changes the figures, and serves the tickets that the change helps.
    pub(super) fn change(&self, kind: SpaceKind, f: impl FnOnce(&mut Figures)) {
        let mut state = self.account(kind).state.lock();
        f(&mut state.figures);
        state.serve();
    }

    /// A group has come, which takes device space. Changes the figures of its account, and sets
    /// what metadata may be promised beyond its groups. For metadata both happen in one step,
    /// because it is the same space.
    pub(super) fn grow(&self, kind: SpaceKind, overcommit: u64, f: impl FnOnce(&mut Figures)) {
        let metadata = self.account(SpaceKind::Metadata);
        let account = self.account(kind);
        if !std::ptr::eq(account, metadata) {
            return self.change(kind, f);
        }
        let mut state = account.state.lock();
        f(&mut state.figures);
        state.overcommit = overcommit;
        state.serve();
    }

    /// Takes `bytes` that are free out of service, if what is left is enough for all that was
    /// promised. For metadata the promises include the global reserve, but not what was promised
    /// against device space.
    pub(super) fn try_withdraw(&self, kind: SpaceKind, bytes: u64) -> bool {
        let mut state = self.account(kind).state.lock();
        let rest = state.figures.free().checked_sub(bytes);
        let fits = rest.is_some_and(|rest| rest >= state.figures.reserved);
        if fits {
            state.figures.unusable += bytes;
            state.figures.check();
        }
        fits
    }

    /// Turns `bytes` that are free and promised to nothing into pinned ones. Returns false if there
    /// are fewer.
    pub(super) fn try_pin(&self, kind: SpaceKind, bytes: u64) -> bool {
        let mut state = self.account(kind).state.lock();
        let fits = bytes <= state.available(false);
        if fits {
            state.figures.pinned += bytes;
            state.figures.check();
        }
        fits
    }

    fn guard(self: &Arc<Self>, kind: SpaceKind, bytes: u64) -> Reservation {
        self.guard_of(kind, bytes, Asked::default())
    }
    /// A guard for what was taken for a request.
    fn guard_of(self: &Arc<Self>, kind: SpaceKind, bytes: u64, asked: Asked) -> Reservation {
        Reservation { space: Arc::clone(self), kind, bytes, passing: asked.passes }
    }

    /// An empty reservation, to merge others into. What is allocated beyond what it holds comes
    /// from the global reserve, then from free space. The committer uses it.
    #[must_use]
    pub fn empty(self: &Arc<Self>, kind: SpaceKind) -> Reservation {
        self.guard(kind, 0)
    }

    /// Reserves if that can be done at once. `None` if it cannot, or if other requests wait
    /// already.
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
        // Requests in line are not overtaken. Otherwise those that need the global reserve would
        // never find it full.
        let fits = state.queue.is_empty()
            && (state.try_take(bytes, kind == SpaceKind::Metadata)
                || asked.deletes && state.take_half_of_global(bytes));
        fits.then(|| {
            state.passing += u64::from(asked.passes);
            self.guard_of(kind, bytes, asked)
        })
    }

    /// Reserves `bytes`, and waits for space if it has to.
    ///
    /// # Errors
    /// `NoSpace` when nothing can be reclaimed; `WouldBlock` on a thread that must not wait
    /// ([`crate::api::no_wait`]); what the reclaimer returned.
    pub fn reserve(self: &Arc<Self>, kind: SpaceKind, bytes: u64) -> Result<Reservation> {
        self.reserve_as(kind, bytes, Asked::default())
    }

    /// Reserves metadata for an operation that passes: it then needs nothing more, waits for no
    /// space and no commit, and ends. While there is such a reservation, no request is refused.
    /// What is [split](Reservation::split) from it stays behind.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub fn reserve_passing(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        self.reserve_as(SpaceKind::Metadata, bytes, Asked { passes: true, deletes: false })
    }

    /// As [`Self::reserve_passing`], for operations that free more than they take. Where metadata
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
        lock::before_waiting(Wait::Commit);
        match self.try_reserve_as(kind, bytes, asked) {
            Some(guard) => Ok(guard),
            None => {
                may_wait()?;
                self.queue(kind, bytes, asked)
            }
        }
    }

    /// Reserves without ever waiting, past the requests in line, and from the global reserve if
    /// necessary. It is for the reclaimer itself and for the commit. It never counts as passing:
    /// the reclaimer would find in each round that an operation has passed, its own, and begin
    /// another round.
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

    /// Reserves metadata without waiting, past the requests in line. It is for operations that hold
    /// up a seal already. Deletions may use half of the global reserve.
    #[must_use]
    pub fn reserve_inside(self: &Arc<Self>, bytes: u64, deleting: bool) -> Option<Reservation> {
        let kind = SpaceKind::Metadata;
        let mut state = self.account(kind).state.lock();
        if state.try_take(bytes, true) || deleting && state.take_half_of_global(bytes) {
            return Some(self.guard(kind, bytes));
        }
        None
    }

    /// Runs `f` while no operation that has reserved `kind` is under way, and none begins. It gets
    /// in line like every request, waits for those before it and for operations that pass, and lets
    /// no other through until `f` is done. What `f` reserves must not wait.
    pub fn alone<R>(&self, kind: SpaceKind, f: impl FnOnce() -> R) -> R {
        lock::before_waiting(Wait::Commit);
        let account = self.account(kind);
        let ticket = Arc::new(Ticket {
            // This ticket is never served. It stands in the way.
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

    /// The reservation for a ticket that was granted.
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
        // How many operations had ended when the reclaimer began.
        let mut seen = 0;
        loop {
            // Wait until served or first in line. The account is asked before the ticket is locked,
            // because the order is account, ticket.
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
                // Each operation that ends wakes this thread; after that everything is tried once
                // more. An operation that has ended since the reclaimer looked may have left behind
                // what the reclaimer did not find.
                if state.passed == seen {
                    ticket.wait(state);
                }
                fruitless = FRUITLESS_ROUNDS - 1;
                continue;
            }
            let held = state.figures.reserved > state.global;
            if asked.deletes && held && patience > 0 && matches!(refusal, Error::NoSpace) {
                fruitless = FRUITLESS_ROUNDS - 1;
                patience -= 1;
                if state.queue.len() > 1 {
                    // The requests behind may hold something already.
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
    /// Moves `bytes` (or all, if there are fewer) into a reservation of their own, which does not
    /// pass.
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

    /// `bytes` have been allocated, so they are used now. If fewer are reserved, the global reserve
    /// pays, then the free space: the allocator has found the bytes, so they are there.
    pub(super) fn consume(&mut self, bytes: u64) {
        let account = self.space.account(self.kind);
        let mut state = account.state.lock();
        let own = bytes.min(self.bytes);
        self.bytes -= own;
        let global =
            if self.kind == SpaceKind::Metadata { (bytes - own).min(state.global) } else { 0 };
        state.global -= global;
        state.figures.reserved -= own + global;
        state.figures.used += bytes;
        state.figures.check();
        account.overdrawn.fetch_add(bytes - own, Ordering::Relaxed);
    }
    /// `bytes` were allocated and are given back unused. They are reserved again.
    pub(super) fn restore(&mut self, bytes: u64) {
        let mut state = self.space.account(self.kind).state.lock();
        state.figures.used -= bytes;
        state.figures.reserved += bytes;
        self.bytes += bytes;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 && !self.passing {
            return;
        }
        let mut state = self.space.account(self.kind).state.lock();
        state.figures.reserved -= self.bytes;
        state.serve();
        let waited_for = std::mem::take(&mut state.waits_for_any);
        if self.passing {
            state.passing -= 1;
            state.passed += 1;
        }
        // A request that waits for operations to end has to see that this one has ended.
        if self.passing || waited_for {
            state.wake_front();
        }
    }
}

/// Size of the *global reserve*: the part of metadata space that is for the commit, which changes
/// the extent, checksum, free-space and root trees, and for deletions in need. `commit_bytes` is
/// the most that a commit copies: every block of these trees once, and what they grow by. The
/// reserve is twice that, because deletions may have half of it. It has 16 to 512 MiB, but not more
/// than a quarter of the metadata space, or half of it where a commit may need that.
#[must_use]
pub fn global_reserve_size(commit_bytes: u64, metadata_total: u64) -> u64 {
    let needed = 2 * commit_bytes.min(MAX_COPIES_IN_RESERVE);
    needed.clamp(16 << 20, 512 << 20).min((metadata_total / 4).max(needed.min(metadata_total / 2)))
}

#[cfg(test)]
mod tests;
