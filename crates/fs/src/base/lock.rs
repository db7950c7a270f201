//! Locks that know their place in the order.
//!
//! Every lock that can be held while another is taken has a [`Rank`]. Ranks are taken in ascending
//! order only, and that is what rules deadlocks out. Builds with debug assertions keep for each
//! thread what it holds, and panic at the first lock that is taken out of order, whether or not
//! another thread is there to deadlock with. Other builds pay nothing: the bookkeeping has no size
//! and no code.
//!
//! The order is the one of `ARCHITECTURE.md`, "Lock order". Two locks of one rank may be held
//! together only if they have an order among themselves, which they are made with
//! ([`RwLock::ordered`]). Being in a transaction is a place in the order, too, although it is no
//! lock: a seal waits for the threads that are in one ([`enter`]).
//!
//! The same notes say whether a thread holds a lock across something that takes long:
//! [`before_waiting_for_a_device`], [`holds_tree`], and what [`crate::watch`] makes of them.

use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A place in the order of locks.
#[cfg_attr(not(debug_assertions), allow(dead_code))]
pub(crate) trait Rank {
    /// Locks are taken in ascending order.
    const RANK: u8;
    /// For the message.
    const NAME: &'static str;
}

macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident = $rank:literal, $shown:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum $name {}
        impl Rank for $name {
            const RANK: u8 = $rank;
            const NAME: &'static str = $shown;
        }
    )*};
}

ranks! {
    /// Subvolumes come, go and move.
    SubvolTree = 5, "the tree of subvolumes";
    /// What a crash left behind is being cleaned up.
    Cleaning = 10, "a subvolume's clean-up";
    /// Directories of a subvolume stand still.
    Moving = 20, "moving directories";
    /// Operations on an inode: directories by number, then others by number.
    Op = 30, "an inode's operations";
    /// Membership in the running transaction.
    Joined = 40, "a transaction handle";
    /// Extent items of a file.
    Extents = 50, "a file's extent lock";
    /// Attributes of an inode.
    InodeState = 60, "an inode's state";
    /// Delayed bytes of a file.
    Delayed = 70, "a file's delayed data";
    /// Files that wait for write-back.
    Queue = 80, "the write-back queue";
    /// The table of inodes.
    Table = 90, "a table of inodes";
    /// A tree's root.
    TreeRoot = 100, "a tree";
    /// What reference counts are computed from.
    View = 110, "the view of references";
    /// The state machine of transactions. The notes of a transaction would come before it, but the
    /// two are never held together.
    Transactions = 120, "the state of transactions";
    /// Where the next allocation comes from.
    Hint = 130, "an allocation hint";
    /// The map of block groups.
    GroupMap = 140, "the map of block groups";
    /// A block group.
    Group = 150, "a block group";
}

/// Order among locks of one rank.
pub(crate) type Order = (bool, u64, u64);

#[cfg(debug_assertions)]
mod held {
    use super::{InodeState, Order, Rank, TreeRoot};
    use std::cell::{Cell, RefCell};
    use std::marker::PhantomData;

    #[derive(Clone, Copy)]
    struct Entry {
        rank: u8,
        order: Order,
        name: &'static str,
        number: u64,
    }

    thread_local! {
        static HELD: RefCell<(Vec<Entry>, u64)> = const { RefCell::new((Vec::new(), 0)) };
        /// How many locks of trees the thread has. It is apart from the list, which allocates
        /// itself.
        static TREES: Cell<u32> = const { Cell::new(0) };
    }

    /// Does the thread have the lock of a tree? This allocates nothing.
    pub(crate) fn holds_tree() -> bool {
        TREES.try_with(|n| n.get() > 0).unwrap_or(false)
    }
    /// Panics if the thread holds what must not be held while waiting for a device: an inode's
    /// state, or anything behind it in the order.
    pub(crate) fn before_waiting_for_a_device() {
        let found =
            HELD.with_borrow(|(held, _)| held.iter().copied().find(|e| e.rank >= InodeState::RANK));
        if let Some(e) = found {
            panic!("lock order: a device is waited for while {} {:?} is held", e.name, e.order);
        }
    }

    /// A note that something is held. It must be dropped on the thread that made it.
    #[derive(Debug)]
    pub(crate) struct Held {
        number: u64,
        /// Is it counted as the lock of a tree?
        tree: bool,
        /// Not `Send`.
        thread: PhantomData<*const ()>,
    }

    impl Held {
        /// Checks the order, and notes a lock that is about to be taken.
        #[track_caller]
        pub(crate) fn note<R: Rank>(order: Order) -> Self {
            Self::check::<R>(|e| (e.rank, e.order) >= (R::RANK, order));
            Self::push::<R>(order)
        }
        /// The same, where one of its kind may be held already: then there is nothing to wait for,
        /// whatever came after it.
        #[track_caller]
        pub(crate) fn note_again<R: Rank>() -> Self {
            if !HELD.with_borrow(|(held, _)| held.iter().any(|e| e.rank == R::RANK)) {
                Self::check::<R>(|e| e.rank > R::RANK);
            }
            Self::push::<R>((false, 0, 0))
        }
        #[track_caller]
        fn check<R: Rank>(wrong: impl Fn(&Entry) -> bool) {
            let before = HELD.with_borrow(|(held, _)| held.iter().copied().find(&wrong));
            if let Some(e) = before {
                panic!(
                    "lock order: {} {:?} is taken while {} {:?} is held",
                    R::NAME,
                    R::RANK,
                    e.name,
                    e.order
                );
            }
        }
        fn push<R: Rank>(order: Order) -> Self {
            HELD.with_borrow_mut(|(held, next)| {
                *next += 1;
                held.push(Entry { rank: R::RANK, order, name: R::NAME, number: *next });
                Self { number: *next, tree: false, thread: PhantomData }
            })
        }
        /// Forgets the last place of this rank that was [kept](Self::keep).
        pub(crate) fn forget<R: Rank>() {
            let number = HELD.with_borrow(|(held, _)| {
                held.iter().rev().find(|e| e.rank == R::RANK).map(|e| e.number)
            });
            let number = number
                .unwrap_or_else(|| panic!("lock order: {} ends where it did not begin", R::NAME));
            drop(Self { number, tree: false, thread: PhantomData });
        }
        /// Makes the note last until it is forgotten.
        pub(crate) fn keep(self) {
            std::mem::forget(self);
        }
        /// The lock has been taken: the wait for it is over.
        pub(crate) fn got<R: Rank>(mut self) -> Self {
            if R::RANK == TreeRoot::RANK {
                self.tree = true;
                TREES.set(TREES.get() + 1);
                crate::base::logging::tree_locked();
            }
            self
        }
        /// Panics if a place of this rank or a later one is held.
        #[track_caller]
        pub(crate) fn none_from<R: Rank>() {
            Self::check::<R>(|e| e.rank >= R::RANK);
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            if self.tree {
                let _ = TREES.try_with(|n| n.set(n.get() - 1));
            }
            // While a thread ends, its list may be gone before what it holds.
            let _ = HELD.try_with(|list| {
                let held = &mut list.borrow_mut().0;
                if let Some(at) = held.iter().rposition(|e| e.number == self.number) {
                    held.remove(at);
                }
            });
        }
    }
}

#[cfg(not(debug_assertions))]
mod held {
    use super::{Order, Rank};

    /// A note that something is held. It is nothing in this build.
    #[derive(Debug)]
    pub(crate) struct Held;

    impl Held {
        #[inline(always)]
        pub(crate) fn note<R: Rank>(_: Order) -> Self {
            Self
        }
        #[inline(always)]
        pub(crate) fn note_again<R: Rank>() -> Self {
            Self
        }
        #[inline(always)]
        pub(crate) fn forget<R: Rank>() {}
        #[inline(always)]
        pub(crate) fn keep(self) {}
        #[inline(always)]
        pub(crate) fn got<R: Rank>(self) -> Self {
            self
        }
        #[inline(always)]
        pub(crate) fn none_from<R: Rank>() {}
    }
}

use held::Held;
#[cfg(debug_assertions)]
pub(crate) use held::{before_waiting_for_a_device, holds_tree};

/// The thread comes to a place in the order that is no lock, and stays there until [`leave`].
#[track_caller]
pub(crate) fn enter<R: Rank>() {
    Held::note::<R>((false, 0, 0)).keep();
}
/// The same, where it may be there already.
#[track_caller]
pub(crate) fn enter_again<R: Rank>() {
    Held::note_again::<R>().keep();
}
/// The thread leaves the place that it came to.
pub(crate) fn leave<R: Rank>() {
    Held::forget::<R>();
}

/// The thread is about to wait, and for that to end other threads have to pass `R` and what comes
/// after it. Panics, in builds that check, if this thread holds any of that.
#[track_caller]
pub(crate) fn must_hold_none_from<R: Rank>() {
    Held::none_from::<R>();
}

/// A guard with its place in the order.
#[derive(Debug)]
pub(crate) struct Guard<G> {
    guard: G,
    _held: Held,
}

impl<G> Guard<G> {
    /// The guard itself, for waiting on a condition.
    pub(crate) fn inner(&mut self) -> &mut G {
        &mut self.guard
    }
}
impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;
    fn deref(&self) -> &G::Target {
        &self.guard
    }
}
impl<G: DerefMut> DerefMut for Guard<G> {
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
    pub(crate) const fn new(value: T) -> Self {
        Self { inner: parking_lot::Mutex::new(value), rank: PhantomData }
    }
    /// Locks.
    #[track_caller]
    pub(crate) fn lock(&self) -> Locked<'_, T> {
        let held = Held::note::<R>((false, 0, 0));
        Guard { guard: self.inner.lock(), _held: held }
    }
    /// Locks if that can be done at once.
    #[track_caller]
    pub(crate) fn try_lock(&self) -> Option<Locked<'_, T>> {
        let held = Held::note::<R>((false, 0, 0));
        Some(Guard { guard: self.inner.try_lock()?, _held: held })
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
    pub(crate) const fn new(value: T) -> Self {
        Self::ordered(value, (false, 0, 0))
    }
    /// A lock that is held together with others of its rank, and its place among them.
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
    #[track_caller]
    fn note(&self) -> Held {
        Held::note::<R>(self.order)
    }
    #[cfg(not(debug_assertions))]
    #[inline(always)]
    fn note(&self) -> Held {
        Held::note::<R>((false, 0, 0))
    }
    /// Locks for reading.
    #[track_caller]
    pub(crate) fn read(&self) -> Shared<'_, T> {
        let held = self.note();
        let guard = self.inner.read();
        Guard { guard, _held: held.got::<R>() }
    }
    /// Locks for writing.
    #[track_caller]
    pub(crate) fn write(&self) -> Exclusive<'_, T> {
        let held = self.note();
        let guard = self.inner.write();
        Guard { guard, _held: held.got::<R>() }
    }
    /// Locks for reading if that can be done at once.
    #[track_caller]
    pub(crate) fn try_read(&self) -> Option<Shared<'_, T>> {
        let held = self.note();
        Some(Guard { guard: self.inner.try_read()?, _held: held.got::<R>() })
    }
    /// Locks for writing if that can be done at once.
    #[track_caller]
    pub(crate) fn try_write(&self) -> Option<Exclusive<'_, T>> {
        let held = self.note();
        Some(Guard { guard: self.inner.try_write()?, _held: held.got::<R>() })
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

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn panics(f: impl FnOnce()) -> bool {
        let text = match catch_unwind(AssertUnwindSafe(f)) {
            Ok(()) => return false,
            Err(e) => e.downcast_ref::<String>().cloned().unwrap_or_default(),
        };
        assert!(text.contains("lock order"), "{text}");
        true
    }

    #[test]
    fn ranks_ascend() {
        let (state, tree) = (Mutex::<_, InodeState>::new(1), RwLock::<_, TreeRoot>::new(2));
        {
            let mut s = state.lock();
            *s += *tree.read();
            assert_eq!(*s, 3);
            assert!(panics(|| drop(state.lock())), "the same once more");
        }
        let t = tree.write();
        assert!(panics(|| drop(state.lock())));
        assert!(panics(|| drop(state.try_lock())));
        assert!(panics(|| drop(tree.read())), "shared inside of exclusive");
        drop(t);
        drop(state.lock());
        // They may be dropped in any order.
        let (s, t) = (state.lock(), tree.read());
        drop(s);
        assert!(panics(|| drop(state.lock())));
        drop(t);
        drop(state.lock());
    }

    #[test]
    fn locks_of_one_rank_have_an_order_of_their_own() {
        let [dir, a, b] = [(false, 5, 300), (true, 5, 257), (true, 5, 258)]
            .map(|o| RwLock::<(), Op>::ordered((), o));
        let held = (dir.write(), a.read(), b.write());
        drop(held);
        let _b = b.read();
        assert!(panics(|| drop(a.write())) && panics(|| drop(dir.try_read())));
    }

    #[test]
    fn who_waits_for_a_device_holds_little() {
        let (op, state) = (RwLock::<(), Op>::new(()), Mutex::<(), InodeState>::new(()));
        let (tree, other) = (RwLock::<(), TreeRoot>::new(()), RwLock::<(), View>::new(()));
        let _op = op.write();
        before_waiting_for_a_device();
        let held = state.lock();
        assert!(panics(before_waiting_for_a_device) && !holds_tree());
        drop(held);
        let held = tree.read();
        assert!(panics(before_waiting_for_a_device) && holds_tree());
        let inner = other.read();
        drop(held);
        assert!(!holds_tree());
        drop(inner);
        let held = tree.try_write();
        assert!(held.is_some() && holds_tree());
        // Another thread holds nothing, and does not get it either.
        std::thread::scope(|s| {
            s.spawn(|| assert!(tree.try_read().is_none() && !holds_tree()));
        });
        drop(held);
        assert!(!holds_tree());
        before_waiting_for_a_device();
    }

    #[test]
    fn what_is_waited_for_may_need_what_is_held() {
        enter::<Joined>();
        assert!(panics(must_hold_none_from::<Joined>));
        assert!(panics(enter::<Joined>), "no transaction twice");
        enter_again::<Joined>();
        leave::<Joined>();
        assert!(panics(must_hold_none_from::<Joined>));
        leave::<Joined>();
        assert!(panics(leave::<Joined>));
        let op = RwLock::<(), Op>::new(());
        let _op = op.write();
        must_hold_none_from::<Joined>();
        assert!(panics(must_hold_none_from::<Op>));
        // Another thread holds nothing.
        std::thread::scope(|s| s.spawn(must_hold_none_from::<Cleaning>).join().unwrap());
    }
}
