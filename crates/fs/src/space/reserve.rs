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
//! Where there is parity, a sector of data may take along all that its row has (`stripes`). So data
//! is **charged** for as many sectors as a row has, and what it did not need is free again when it
//! has got its place. Tree blocks fill the rows that they begin, and are charged as they are.
//!
//! With an account locked only a ticket is locked, and nothing is called.

mod line;

use crate::api::may_wait;
use crate::error::{Error, Result};
use crate::lock::{self, Condvar, Mutex, Wait};
use crate::space::SpaceKind;
use crate::space::stripes::Change;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Bytes of copies of global trees' blocks that the global reserve pays in one commit.
pub(crate) const MAX_COPIES_IN_RESERVE: u64 = 256 << 20;

/// What can make space: the layer above.
pub(crate) trait Reclaim: Send + Sync {
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
pub(crate) struct Figures {
    /// In all block groups.
    pub(crate) total: u64,
    /// Allocated.
    pub(crate) used: u64,
    /// Freed, but not usable before the next superblock is durable.
    pub(crate) pinned: u64,
    /// Promised, the global reserve included.
    pub(crate) reserved: u64,
    /// Where nothing can be allocated: superblock copies, what rows hold back, free space of
    /// read-only groups.
    pub(crate) unusable: u64,
}

impl Figures {
    /// Bytes that can be allocated now, promised or not.
    #[must_use]
    pub(crate) fn free(&self) -> u64 {
        self.total - self.used - self.pinned - self.unusable
    }
    /// Bytes that were promised beyond what the block groups hold. A chunk for anything else must
    /// leave this much device space.
    #[must_use]
    pub(crate) fn overcommitted(&self) -> u64 {
        self.reserved.saturating_sub(self.free())
    }
    fn check(&self) {
        let taken = self.used.checked_add(self.pinned).and_then(|n| n.checked_add(self.unusable));
        assert!(taken.is_some_and(|n| n <= self.total), "space does not add up: {self:?}");
    }
}

/// Figures for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReserveStats {
    /// Requests that had to queue.
    pub(crate) tickets: u64,
    /// Calls of the reclaimer.
    pub(crate) reclaims: u64,
    /// Requests that were refused.
    pub(crate) refused: u64,
    /// Bytes allocated beyond a reservation (an estimate was too low).
    pub(crate) overdrawn: u64,
}

/// Bytes that metadata may be promised beyond its block groups, against device space that can still
/// become metadata: worst cases are many times what is used, and the commit makes the chunk when it
/// is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overcommit(pub u64);

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
    /// See [`Reservation`].
    charge: u64,
    overcommits: bool,
    asked: Asked,
    state: Mutex<TicketState, lock::Ticket>,
    changed: Condvar,
}

impl Ticket {
    /// For so many bytes, with what each is charged.
    fn new((bytes, charge): (u64, u64), overcommits: bool, asked: Asked) -> Arc<Self> {
        let state = Mutex::new(TicketState::Waiting);
        Arc::new(Self { bytes, charge, overcommits, asked, state, changed: Condvar::new() })
    }
    fn is_granted(&self) -> bool {
        *self.state.lock() == TicketState::Granted
    }
}

#[derive(Default)]
struct AccountState {
    figures: Figures,
    overcommit: Overcommit,
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
        (self.figures.free() + self.overcommit.0)
            .saturating_sub(self.figures.reserved - self.global)
    }
    /// Are there enough bytes for this, which operations that are about to end have reserved? A
    /// chunk that was made because of them would stay for good.
    fn is_only_held_up(&self, bytes: u64) -> bool {
        self.passing > 0 && self.figures.used.saturating_add(bytes) < self.figures.total / 4 * 3
    }
    /// Bytes that may still be promised. What the global reserve lacks counts as promised already.
    /// Otherwise operations would use up the chunks made for them before the reserve is full.
    fn available(&self, overcommits: bool) -> u64 {
        let limit = self.figures.free() + if overcommits { self.overcommit.0 } else { 0 };
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
    fn is_first(&self, ticket: &Arc<Ticket>) -> bool {
        self.queue.front().is_some_and(|first| Arc::ptr_eq(first, ticket))
    }
    /// A ticket joins the line. Its thread may hold what the first in line is waiting for, and
    /// would not give it back. So the first in line is woken.
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
pub(crate) struct Space {
    accounts: [Account; 3],
    /// Bytes that are charged for each byte of data.
    data_charge: AtomicU64,
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

impl Space {
    /// Accounts without any space. With `mixed`, data and metadata share their block groups, and so
    /// an account.
    #[must_use]
    pub(crate) fn new(mixed: bool) -> Arc<Self> {
        Arc::new(Self {
            accounts: Default::default(),
            data_charge: AtomicU64::new(1),
            mixed,
            reclaim: OnceLock::new(),
        })
    }

    /// Rows have at most so many sectors, of which a sector of data may take all. What is reserved
    /// already stays charged as it was.
    pub(crate) fn set_data_charge(&self, sectors: u64) {
        self.data_charge.store(sectors.max(1), Ordering::Relaxed);
    }

    /// Bytes that are charged for each byte of a kind.
    #[must_use]
    pub(crate) fn charge(&self, kind: SpaceKind) -> u64 {
        if kind == SpaceKind::Data { self.data_charge.load(Ordering::Relaxed) } else { 1 }
    }

    /// Sets what makes space when it is short. Called once.
    ///
    /// # Panics
    /// When called twice.
    pub(crate) fn set_reclaim(&self, reclaim: Box<dyn Reclaim>) {
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
    pub(crate) fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// The figures of an account.
    #[must_use]
    pub(crate) fn figures(&self, kind: SpaceKind) -> Figures {
        self.account(kind).state.lock().figures
    }

    /// Bytes that operations have reserved, without the global reserve. 0 when nothing runs.
    #[must_use]
    pub(crate) fn reserved_by_operations(&self, kind: SpaceKind) -> u64 {
        let state = self.account(kind).state.lock();
        state.figures.reserved - state.global
    }

    /// Could this be reserved now, if nothing was in line?
    #[must_use]
    pub(crate) fn fits(&self, kind: SpaceKind, bytes: u64) -> bool {
        let bytes = bytes.saturating_mul(self.charge(kind));
        self.account(kind).state.lock().available(kind == SpaceKind::Metadata) >= bytes
    }

    /// Bytes that no operation holds, the global reserve and what metadata may overcommit included:
    /// what [`Reclaim::reclaim`] is to increase.
    #[must_use]
    pub(crate) fn unheld(&self, kind: SpaceKind) -> u64 {
        self.account(kind).state.lock().unheld()
    }

    /// Bytes that the requests in line ask for.
    #[must_use]
    pub(crate) fn wanted(&self, kind: SpaceKind) -> u64 {
        let state = self.account(kind).state.lock();
        let bytes = state.queue.iter().map(|t| t.bytes).filter(|n| *n < u64::MAX);
        bytes.fold(0, u64::saturating_add)
    }

    /// Statistics of an account.
    #[must_use]
    pub(crate) fn stats(&self, kind: SpaceKind) -> ReserveStats {
        let a = self.account(kind);
        ReserveStats {
            tickets: a.tickets.load(Ordering::Relaxed),
            reclaims: a.reclaims.load(Ordering::Relaxed),
            refused: a.refused.load(Ordering::Relaxed),
            overdrawn: a.overdrawn.load(Ordering::Relaxed),
        }
    }

    /// Sets what new metadata chunks could still add. It is called whenever chunks come or go.
    pub(crate) fn set_overcommit(&self, overcommit: Overcommit) {
        let mut state = self.account(SpaceKind::Metadata).state.lock();
        state.overcommit = overcommit;
        state.serve();
    }

    /// Device space is about to go to something else than metadata, which then may be promised
    /// `overcommit` beyond its groups. If more than `most` bytes were promised already, returns
    /// false and changes nothing. Both happen in one step, or promises that are made meanwhile
    /// would be broken.
    #[must_use]
    pub(crate) fn take_device_space(&self, most: u64, overcommit: Overcommit) -> bool {
        let mut state = self.account(SpaceKind::Metadata).state.lock();
        let fits = state.figures.overcommitted() <= most;
        if fits {
            state.overcommit = overcommit;
        }
        fits
    }

    /// Sets the size of the global reserve ([`global_reserve_size`]). It fills as space becomes
    /// free.
    pub(crate) fn set_global_reserve(&self, bytes: u64) {
        let mut state = self.account(SpaceKind::Metadata).state.lock();
        let surplus = state.global.saturating_sub(bytes);
        state.global -= surplus;
        state.figures.reserved -= surplus;
        state.global_size = bytes;
        state.serve();
    }

    /// Bytes that the global reserve should hold and does hold.
    #[must_use]
    pub(crate) fn global_reserve(&self) -> (u64, u64) {
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
    pub(super) fn grow(
        &self,
        kind: SpaceKind,
        overcommit: Overcommit,
        f: impl FnOnce(&mut Figures),
    ) {
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

    /// Takes `bytes` that are free out of service, and `needed` more are about to be asked for.
    /// That is possible if what is left is enough for both, and for all that was promised. Metadata
    /// may count on device space.
    pub(super) fn try_make_unusable(&self, kind: SpaceKind, (bytes, needed): (u64, u64)) -> bool {
        let mut state = self.account(kind).state.lock();
        let more = if kind == SpaceKind::Metadata { state.overcommit.0 } else { 0 };
        let rest = state.figures.free().checked_sub(bytes);
        let fits = rest.is_some_and(|rest| rest + more >= state.figures.reserved + needed);
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

    /// A guard for what was taken, `charge` for each byte.
    fn guard(self: &Arc<Self>, kind: SpaceKind, (bytes, charge): (u64, u64)) -> Reservation {
        Reservation { space: Arc::clone(self), kind, bytes, charge, passing: false }
    }

    /// An empty reservation, to merge others into. What is allocated beyond what it holds comes
    /// from the global reserve, then from free space. The committer uses it.
    #[must_use]
    pub(crate) fn empty(self: &Arc<Self>, kind: SpaceKind) -> Reservation {
        self.guard(kind, (0, self.charge(kind)))
    }

    /// Reserves if that can be done at once. `None` if it cannot, or if other requests wait
    /// already.
    #[must_use]
    pub(crate) fn try_reserve(
        self: &Arc<Self>,
        kind: SpaceKind,
        bytes: u64,
    ) -> Option<Reservation> {
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
        let charge = self.charge(kind);
        let charged = bytes.saturating_mul(charge);
        let fits = state.queue.is_empty()
            && (state.try_take(charged, kind == SpaceKind::Metadata)
                || asked.deletes && state.take_half_of_global(charged));
        fits.then(|| {
            state.passing += u64::from(asked.passes);
            let mut guard = self.guard(kind, (bytes, charge));
            guard.passing = asked.passes;
            guard
        })
    }

    /// Reserves `bytes`, and waits for space if it has to.
    ///
    /// # Errors
    /// `NoSpace` when nothing can be reclaimed; `WouldBlock` on a thread that must not wait
    /// ([`crate::api::no_wait`]); what the reclaimer returned.
    pub(crate) fn reserve(self: &Arc<Self>, kind: SpaceKind, bytes: u64) -> Result<Reservation> {
        self.reserve_as(kind, bytes, Asked::default())
    }

    /// Reserves metadata for an operation that passes: it then needs nothing more, waits for no
    /// space and no commit, and ends. While there is such a reservation, no request is refused.
    /// What is [split](Reservation::split) from it stays behind.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub(crate) fn reserve_passing(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
        self.reserve_as(SpaceKind::Metadata, bytes, Asked { passes: true, deletes: false })
    }

    /// As [`Self::reserve_passing`], for operations that free more than they take. Where metadata
    /// is short they may use up to half of the global reserve. Otherwise a full file system could
    /// not be emptied.
    ///
    /// # Errors
    /// As [`Self::reserve`].
    pub(crate) fn reserve_for_deletion(self: &Arc<Self>, bytes: u64) -> Result<Reservation> {
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
    /// necessary. It is for the reclaimer itself and for the commit. It never counts as passing.
    /// Otherwise the reclaimer would find in each round that an operation has passed, its own, and
    /// begin another round.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn reserve_emergency(
        self: &Arc<Self>,
        kind: SpaceKind,
        bytes: u64,
    ) -> Result<Reservation> {
        let mut state = self.account(kind).state.lock();
        let charge = self.charge(kind);
        if state.try_take(bytes.saturating_mul(charge), kind == SpaceKind::Metadata) {
            return Ok(self.guard(kind, (bytes, charge)));
        }
        if kind == SpaceKind::Metadata && state.global >= bytes {
            state.global -= bytes;
            return Ok(self.guard(kind, (bytes, charge)));
        }
        Err(Error::NoSpace)
    }

    /// Reserves metadata without waiting, past the requests in line. It is for operations that hold
    /// up a seal already. Deletions may use half of the global reserve.
    #[must_use]
    pub(crate) fn reserve_inside(
        self: &Arc<Self>,
        bytes: u64,
        deleting: bool,
    ) -> Option<Reservation> {
        let kind = SpaceKind::Metadata;
        let mut state = self.account(kind).state.lock();
        if state.try_take(bytes, true) || deleting && state.take_half_of_global(bytes) {
            return Some(self.guard(kind, (bytes, self.charge(kind))));
        }
        None
    }
}

/// Reserved bytes. Dropping gives back what was not allocated.
#[derive(Debug)]
pub(crate) struct Reservation {
    space: Arc<Space>,
    kind: SpaceKind,
    bytes: u64,
    /// Bytes of the account that are reserved for each.
    charge: u64,
    passing: bool,
}

impl Reservation {
    /// Bytes still reserved.
    #[must_use]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
    /// What they are for.
    #[must_use]
    pub(crate) fn kind(&self) -> SpaceKind {
        self.kind
    }
    /// Moves `bytes` (or all, if there are fewer) into a reservation of their own, which does not
    /// pass.
    #[must_use]
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.space.guard(self.kind, (bytes, self.charge))
    }
    /// Takes over what `other` holds.
    ///
    /// # Panics
    /// When it is of another kind of space.
    pub(crate) fn merge(&mut self, mut other: Self) {
        assert_eq!(self.kind, other.kind);
        if self.charge != other.charge {
            self.charge_as(other.charge);
        }
        self.bytes += std::mem::take(&mut other.bytes);
    }
    /// Has what it holds charged at another rate. Space is not looked for: a rate changes only
    /// before chunks come that need it.
    fn charge_as(&mut self, charge: u64) {
        let mut state = self.space.account(self.kind).state.lock();
        state.figures.reserved -= self.bytes * self.charge;
        state.figures.reserved += self.bytes * charge;
        self.charge = charge;
    }
    /// Gives back all but `keep` bytes.
    pub(crate) fn shrink_to(&mut self, keep: u64) {
        let surplus = self.bytes.saturating_sub(keep);
        drop(self.split(surplus));
    }

    /// `bytes` have been allocated, so they are used now, and `held` is held back because of them.
    /// If fewer are reserved, the global reserve pays, then the free space: the allocator has found
    /// the bytes, so they are there.
    pub(super) fn consume(&mut self, bytes: u64, held: Change) {
        let account = self.space.account(self.kind);
        let mut state = account.state.lock();
        let own = bytes.min(self.bytes);
        self.bytes -= own;
        let global =
            if self.kind == SpaceKind::Metadata { (bytes - own).min(state.global) } else { 0 };
        state.global -= global;
        state.figures.reserved -= own * self.charge + global;
        state.figures.used += bytes;
        state.figures.unusable = state.figures.unusable + held.more - held.fewer;
        state.figures.check();
        account.overdrawn.fetch_add(bytes - own, Ordering::Relaxed);
    }
    /// `bytes` were allocated and are given back unused. As many as can be paid for are reserved
    /// again, and are not used any more: returns how many these are.
    pub(super) fn restore(&mut self, bytes: u64) -> u64 {
        let bytes = bytes / self.charge;
        let mut state = self.space.account(self.kind).state.lock();
        state.figures.used -= bytes;
        state.figures.reserved += bytes * self.charge;
        self.bytes += bytes;
        bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 && !self.passing {
            return;
        }
        let mut state = self.space.account(self.kind).state.lock();
        state.figures.reserved -= self.bytes * self.charge;
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
pub(crate) fn global_reserve_size(commit_bytes: u64, metadata: &Figures) -> u64 {
    let needed = 2 * commit_bytes.min(MAX_COPIES_IN_RESERVE);
    let total = metadata.total;
    needed.clamp(16 << 20, 512 << 20).min((total / 4).max(needed.min(total / 2)))
}

#[cfg(test)]
mod tests;
