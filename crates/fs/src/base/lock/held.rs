//! What the thread holds, in builds that check. In others this is nothing, and takes no space.

#[cfg(debug_assertions)]
pub(crate) use checks::{Held, before_waiting, before_waiting_on, holds_tree};
#[cfg(not(debug_assertions))]
pub(crate) use nothing::{Held, before_waiting, before_waiting_on};

#[cfg(debug_assertions)]
mod checks {
    use crate::base::lock::ranks::{Rank, Row};
    use crate::base::lock::{Order, Wait};
    use std::cell::{Cell, RefCell};
    use std::marker::PhantomData;

    #[derive(Clone, Copy)]
    struct Entry {
        row: Row,
        order: Order,
        name: &'static str,
        may: Wait,
        number: u64,
    }

    thread_local! {
        static HELD: RefCell<(Vec<Entry>, u64)> = const { RefCell::new((Vec::new(), 0)) };
        /// How many locks of trees the thread has. It is apart from the list, which allocates
        /// itself.
        static TREES: Cell<u32> = const { Cell::new(0) };
    }

    fn first(wrong: impl Fn(&Entry) -> bool) -> Option<Entry> {
        HELD.with_borrow(|(held, _)| held.iter().copied().find(wrong))
    }

    /// Does the thread have the lock of a tree? This allocates nothing.
    pub(crate) fn holds_tree() -> bool {
        TREES.try_with(|n| n.get() > 0).unwrap_or(false)
    }

    /// Panics if the thread holds what must not be held during such a wait.
    #[track_caller]
    pub(crate) fn before_waiting(wait: Wait) {
        check_wait(wait, |_| false);
    }
    /// The same for a condition whose mutex is `mine`. That one is unlocked meanwhile. It is locked
    /// again at the end, so nothing behind it may be held either.
    #[track_caller]
    pub(crate) fn before_waiting_on(wait: Wait, mine: &Held) {
        check_wait(wait, |e| e.number == mine.number);
        let behind = first(|e| e.row > mine.row && e.number != mine.number);
        if let Some(e) = behind {
            panic!("lock order: {:?} would be locked again with {} held", mine.row, e.name);
        }
    }
    #[track_caller]
    fn check_wait(wait: Wait, excepted: impl Fn(&Entry) -> bool) {
        if let Some(e) = first(|e| e.may < wait && !excepted(e)) {
            panic!("lock order: {wait} is waited for while {} {:?} is held", e.name, e.order);
        }
    }

    /// A note that something is held. It must be dropped on the thread that made it.
    #[derive(Debug)]
    pub(crate) struct Held {
        number: u64,
        row: Row,
        /// Is it counted as the lock of a tree?
        tree: bool,
        /// Not `Send`.
        thread: PhantomData<*const ()>,
    }

    impl Held {
        /// Checks the order, and notes a lock that is about to be taken.
        #[track_caller]
        pub(crate) fn note<R: Rank>(order: Order) -> Self {
            Self::check::<R>(|e| (e.row, e.order) >= (R::ROW, order));
            Self::push::<R>(order)
        }
        /// The same, where one of its kind may be held already. Then there is nothing to wait for,
        /// whatever the thread has locked since.
        #[track_caller]
        pub(crate) fn note_again<R: Rank>() -> Self {
            if first(|e| e.row == R::ROW).is_none() {
                Self::check::<R>(|e| e.row > R::ROW);
            }
            Self::push::<R>(Order::default())
        }
        #[track_caller]
        fn check<R: Rank>(wrong: impl Fn(&Entry) -> bool) {
            if let Some(e) = first(wrong) {
                panic!("lock order: {} is taken while {} {:?} is held", R::NAME, e.name, e.order);
            }
        }
        fn push<R: Rank>(order: Order) -> Self {
            HELD.with_borrow_mut(|(held, next)| {
                *next += 1;
                let number = *next;
                held.push(Entry { row: R::ROW, order, name: R::NAME, may: R::HOLDER_MAY, number });
                Self { number, row: R::ROW, tree: false, thread: PhantomData }
            })
        }
        /// Forgets the last place of this rank that was [kept](Self::keep).
        #[track_caller]
        pub(crate) fn forget<R: Rank>() {
            let number = HELD.with_borrow(|(held, _)| {
                held.iter().rev().find(|e| e.row == R::ROW).map(|e| e.number)
            });
            let number = number
                .unwrap_or_else(|| panic!("lock order: {} ends where it did not begin", R::NAME));
            drop(Self { number, row: R::ROW, tree: false, thread: PhantomData });
        }
        /// Makes the note last until it is forgotten.
        pub(crate) fn keep(self) {
            std::mem::forget(self);
        }
        /// The lock has been taken: the wait for it is over.
        pub(crate) fn got(mut self) -> Self {
            if self.row == Row::TreeRoot {
                self.tree = true;
                TREES.set(TREES.get() + 1);
                crate::base::logging::tree_locked();
            }
            self
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
mod nothing {
    use crate::base::lock::ranks::Rank;
    use crate::base::lock::{Order, Wait};

    #[inline(always)]
    pub(crate) fn before_waiting(_: Wait) {}
    #[inline(always)]
    pub(crate) fn before_waiting_on(_: Wait, _: &Held) {}

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
        pub(crate) fn got(self) -> Self {
            self
        }
    }
}
