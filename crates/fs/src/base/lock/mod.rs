//! The locks of the engine. Each knows its place in the order, and what its holder may wait for.
//!
//! Every lock has a [`Rank`], a row in the table of [`ranks`]. Locks are taken down that table
//! only, and that is what rules deadlocks out. Builds with debug assertions keep for each thread
//! what it holds ([`held`]), and panic at the first lock that is taken out of order, whether or not
//! another thread is there to deadlock with. `try_lock` keeps the order, too.
//!
//! Waiting for something that is no lock has rules of its own, because it ends only when other
//! threads have done their work. [`Wait`] says for what, and the table says which locks may be held
//! meanwhile. It is checked where a thread waits on a condition ([`Condvar`]), where it uses a
//! device ([`crate::watch`]), and where it may have to wait ([`before_waiting`]), also if it need
//! not. Being in a transaction is a place in the order, although it is no lock: a seal waits for
//! the threads that are in one ([`enter`]).
//!
//! Other builds pay nothing: the bookkeeping has no size and no code, and what is left is inlined.
//! (Calls would cost an operation half a percent of its instructions.) Clippy refuses other locks
//! in this crate (`clippy.toml`).

#![expect(clippy::disallowed_types, reason = "here they get their ranks")]

mod held;
mod ranks;
#[cfg(test)]
mod tests;

#[cfg(debug_assertions)]
pub(crate) use held::holds_tree;
pub(crate) use ranks::*;

use held::Held;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult};

/// What a thread waits for, from the shortest to the longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wait {
    /// Another thread that holds a lock for some instructions.
    Nothing,
    /// The device, or a thread that does nothing but use the device.
    Device,
    /// A commit, a seal, space, or other threads' work that may need one of these.
    Commit,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "a lock",
            Self::Device => "a device",
            Self::Commit => "the work of other threads",
        })
    }
}

/// Order among locks of one rank.
pub(crate) type Order = (bool, u64, u64);

/// The thread is about to wait, or would wait if what it asks for were not there. In builds that
/// check, this panics if the thread holds what must not be held during such a wait.
#[inline]
#[cfg_attr(debug_assertions, track_caller)]
pub(crate) fn before_waiting(wait: Wait) {
    held::before_waiting(wait);
}

/// The thread comes to a place in the order that is no lock, and stays there until [`leave`].
#[inline]
#[cfg_attr(debug_assertions, track_caller)]
pub(crate) fn enter<R: Rank>() {
    Held::note::<R>(Order::default()).keep();
}
/// The same, where it may be there already.
#[inline]
#[cfg_attr(debug_assertions, track_caller)]
pub(crate) fn enter_again<R: Rank>() {
    Held::note_again::<R>().keep();
}
/// The thread leaves the place that it came to.
#[inline]
#[cfg_attr(debug_assertions, track_caller)]
pub(crate) fn leave<R: Rank>() {
    Held::forget::<R>();
}

/// A guard with its place in the order.
#[derive(Debug)]
pub(crate) struct Guard<G> {
    guard: G,
    held: Held,
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;
    #[inline]
    fn deref(&self) -> &G::Target {
        &self.guard
    }
}
impl<G: DerefMut> DerefMut for Guard<G> {
    #[inline]
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

/// A mutex with a rank.
pub(crate) struct Mutex<T, R> {
    inner: parking_lot::Mutex<T>,
    rank: PhantomData<fn() -> R>,
}

/// Guard of a [`Mutex`].
pub(crate) type Locked<'a, T> = Guard<MutexGuard<'a, T>>;

impl<T, R: Rank> Mutex<T, R> {
    #[inline]
    pub(crate) const fn new(value: T) -> Self {
        Self { inner: parking_lot::Mutex::new(value), rank: PhantomData }
    }
    /// Locks.
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn lock(&self) -> Locked<'_, T> {
        let held = Held::note::<R>(Order::default());
        Guard { guard: self.inner.lock(), held: held.got() }
    }
    /// Locks if that can be done at once.
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn try_lock(&self) -> Option<Locked<'_, T>> {
        let held = Held::note::<R>(Order::default());
        Some(Guard { guard: self.inner.try_lock()?, held: held.got() })
    }
}
impl<T: Default, R: Rank> Default for Mutex<T, R> {
    fn default() -> Self {
        Self::new(T::default())
    }
}
impl<T: fmt::Debug, R> fmt::Debug for Mutex<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// A condition that threads wait for with a [`Mutex`] locked.
#[derive(Debug, Default)]
pub(crate) struct Condvar(parking_lot::Condvar);

impl Condvar {
    #[inline]
    pub(crate) const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }
    /// Unlocks, waits, and locks again. What other threads do meanwhile may need a commit or space.
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn wait<T>(&self, guard: &mut Locked<'_, T>) {
        held::before_waiting_on(Wait::Commit, &guard.held);
        self.0.wait(&mut guard.guard);
    }
    /// The same for `longest` at most.
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn wait_for<T>(
        &self,
        guard: &mut Locked<'_, T>,
        longest: Duration,
    ) -> WaitTimeoutResult {
        held::before_waiting_on(Wait::Commit, &guard.held);
        self.0.wait_for(&mut guard.guard, longest)
    }
    /// The same up to a moment.
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn wait_until<T>(
        &self,
        guard: &mut Locked<'_, T>,
        until: Instant,
    ) -> WaitTimeoutResult {
        held::before_waiting_on(Wait::Commit, &guard.held);
        self.0.wait_until(&mut guard.guard, until)
    }
    /// As [`Self::wait`], for a thread that does nothing but use the device.
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn wait_for_device<T>(&self, guard: &mut Locked<'_, T>) {
        held::before_waiting_on(Wait::Device, &guard.held);
        self.0.wait(&mut guard.guard);
    }
    /// Wakes a waiter.
    #[inline]
    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }
    /// Wakes all waiters.
    #[inline]
    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A lock for many readers or one writer, with a rank.
pub(crate) struct RwLock<T, R> {
    inner: parking_lot::RwLock<T>,
    #[cfg(debug_assertions)]
    order: Order,
    rank: PhantomData<fn() -> R>,
}

/// Guards of a [`RwLock`].
pub(crate) type Shared<'a, T> = Guard<RwLockReadGuard<'a, T>>;
/// See [`Shared`].
pub(crate) type Exclusive<'a, T> = Guard<RwLockWriteGuard<'a, T>>;

impl<T, R: Rank> RwLock<T, R> {
    #[inline]
    pub(crate) const fn new(value: T) -> Self {
        Self::ordered(value, (false, 0, 0))
    }
    /// A lock that is held together with others of its rank, and its place among them.
    #[inline]
    #[cfg_attr(not(debug_assertions), allow(unused_variables))]
    pub(crate) const fn ordered(value: T, order: Order) -> Self {
        Self {
            inner: parking_lot::RwLock::new(value),
            #[cfg(debug_assertions)]
            order,
            rank: PhantomData,
        }
    }
    #[cfg(debug_assertions)]
    #[cfg_attr(debug_assertions, track_caller)]
    fn note(&self) -> Held {
        Held::note::<R>(self.order)
    }
    #[cfg(not(debug_assertions))]
    #[inline(always)]
    fn note(&self) -> Held {
        Held::note::<R>(Order::default())
    }
    /// Locks for reading.
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn read(&self) -> Shared<'_, T> {
        let held = self.note();
        Guard { guard: self.inner.read(), held: held.got() }
    }
    /// Locks for writing.
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn write(&self) -> Exclusive<'_, T> {
        let held = self.note();
        Guard { guard: self.inner.write(), held: held.got() }
    }
    /// Locks for reading if that can be done at once.
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn try_read(&self) -> Option<Shared<'_, T>> {
        let held = self.note();
        Some(Guard { guard: self.inner.try_read()?, held: held.got() })
    }
    /// Locks for writing if that can be done at once.
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn try_write(&self) -> Option<Exclusive<'_, T>> {
        let held = self.note();
        Some(Guard { guard: self.inner.try_write()?, held: held.got() })
    }
    /// What is locked, for the only owner.
    #[inline]
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}
impl<T: Default, R: Rank> Default for RwLock<T, R> {
    fn default() -> Self {
        Self::new(T::default())
    }
}
impl<T: fmt::Debug, R> fmt::Debug for RwLock<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
