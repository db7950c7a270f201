//! One test for each rule; and that builds that do not check pay nothing.

#[cfg(debug_assertions)]
mod rules {
    use crate::base::lock::*;
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
    fn an_attempt_that_fails_leaves_nothing_behind() {
        let state = Mutex::<(), InodeState>::new(());
        let held = state.lock();
        std::thread::scope(|s| {
            s.spawn(|| {
                assert!(state.try_lock().is_none());
                before_waiting(Wait::Commit);
            });
        });
        drop(held);
        assert!(state.try_lock().is_some());
        before_waiting(Wait::Commit);
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
    fn locks_of_one_rank_without_an_order_are_held_one_at_a_time() {
        let shards = [0, 1].map(Mutex::<_, Table>::new);
        assert_eq!(shards.iter().map(|shard| *shard.lock()).sum::<i32>(), 1);
        let _first = shards[0].lock();
        assert!(panics(|| drop(shards[1].lock())) && panics(|| drop(shards[1].try_lock())));
    }

    #[test]
    fn a_waiter_for_a_device_holds_little() {
        let (op, state) = (RwLock::<(), Op>::new(()), Mutex::<(), InodeState>::new(()));
        let (tree, other) = (RwLock::<(), TreeRoot>::new(()), RwLock::<(), View>::new(()));
        let (extents, wait) = (Mutex::<(), Extents>::new(()), || before_waiting(Wait::Device));
        let _held = (op.write(), extents.lock());
        wait();
        let held = state.lock();
        assert!(panics(wait) && !holds_tree());
        drop(held);
        let held = tree.read();
        assert!(panics(wait) && holds_tree());
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
        wait();
    }

    #[test]
    fn a_waiter_for_a_commit_holds_nothing_that_the_commit_needs() {
        let wait = || before_waiting(Wait::Commit);
        enter::<Joined>();
        assert!(panics(wait));
        assert!(panics(enter::<Joined>), "no transaction twice");
        enter_again::<Joined>();
        leave::<Joined>();
        assert!(panics(wait));
        leave::<Joined>();
        assert!(panics(leave::<Joined>));
        let (op, order) = (RwLock::<(), Op>::new(()), Mutex::<(), SuperblockOrder>::new(()));
        let _op = op.write();
        wait();
        let held = order.lock();
        before_waiting(Wait::Device);
        assert!(panics(wait));
        // Another thread holds nothing.
        std::thread::scope(|s| s.spawn(wait).join().unwrap());
        drop(held);
        wait();
    }

    #[test]
    fn a_waiter_on_a_condition_holds_its_mutex_and_little_else() {
        let (queue, changed) = (Mutex::<bool, Queue>::new(false), Condvar::new());
        let (op, extents) = (RwLock::<(), Op>::new(()), Mutex::<(), Extents>::new(()));
        let flushes = Mutex::<bool, EarlyFlush>::new(false);
        let _op = op.read();
        // With nothing else that matters it waits, and the mutex is free meanwhile.
        std::thread::scope(|s| {
            let mut waits = queue.lock();
            s.spawn(|| {
                *queue.lock() = true;
                changed.notify_all();
            });
            while !*waits {
                changed.wait(&mut waits);
            }
        });
        let held = extents.lock();
        assert!(panics(|| changed.wait(&mut queue.lock())));
        assert!(panics(|| _ = changed.wait_until(&mut queue.lock(), Instant::now())));
        assert!(panics(|| _ = changed.wait_for(&mut queue.lock(), Duration::ZERO)));
        // The holder of that one may wait for the device.
        std::thread::scope(|s| {
            let mut waits = flushes.lock();
            s.spawn(|| {
                *flushes.lock() = true;
                changed.notify_all();
            });
            while !*waits {
                changed.wait_for_device(&mut waits);
            }
        });
        // Of a mutex behind it nobody may.
        let account = Mutex::<(), Account>::new(());
        let (mut waits, inner) = (flushes.lock(), account.lock());
        assert!(panics(|| changed.wait_for_device(&mut waits)));
        drop((inner, waits, held));
    }

    #[test]
    fn what_is_behind_the_mutex_of_a_condition_is_not_held_when_that_is_locked_again() {
        let (tree, changed) = (Mutex::<(), SubvolTree>::new(()), Condvar::new());
        let op = RwLock::<(), Op>::new(());
        let mut first = tree.lock();
        assert!(changed.wait_for(&mut first, Duration::ZERO).timed_out());
        let _second = op.read();
        assert!(panics(|| changed.wait(&mut first)));
    }
}

#[cfg(not(debug_assertions))]
#[test]
fn ranks_take_no_space() {
    use super::*;
    use std::mem::size_of;
    assert_eq!(size_of::<Mutex<u64, Account>>(), size_of::<parking_lot::Mutex<u64>>());
    assert_eq!(size_of::<RwLock<u64, Op>>(), size_of::<parking_lot::RwLock<u64>>());
    assert_eq!(size_of::<Condvar>(), size_of::<parking_lot::Condvar>());
    assert_eq!(size_of::<Locked<'_, u64>>(), size_of::<MutexGuard<'_, u64>>());
    assert_eq!(size_of::<Shared<'_, u64>>(), size_of::<RwLockReadGuard<'_, u64>>());
}
