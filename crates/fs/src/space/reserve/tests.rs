//! Reservations against a sum, and tickets under threads.
#![allow(clippy::disallowed_types, reason = "locks of tests have no place in the order")]

use super::*;
use parking_lot::Mutex;
use proptest::prelude::*;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

const META: SpaceKind = SpaceKind::Metadata;

fn space(total: u64) -> Arc<Space> {
    let space = Space::new(false);
    space.change(META, |p| p.total = total);
    space
}

/// A reclaimer of a closure.
struct With<F>(F);
impl<F: Fn(SpaceKind, u64) -> Result<bool> + Send + Sync> Reclaim for With<F> {
    fn reclaim(&self, kind: SpaceKind, bytes: u64) -> Result<bool> {
        (self.0)(kind, bytes)
    }
}

#[test]
fn pinned_is_not_free_and_drop_gives_back() {
    let s = space(100);
    let mut r = s.reserve(META, 60).unwrap();
    r.consume(50, Change::default());
    assert_eq!(
        s.figures(META),
        Figures { total: 100, used: 50, pinned: 0, reserved: 10, unusable: 0 }
    );
    drop(r);
    s.change(META, |p| (p.used, p.pinned) = (0, 50));
    assert!(s.try_reserve(META, 51).is_none());
    assert!(matches!(s.reserve(META, 51), Err(Error::NoSpace)), "no reclaimer, no space");
    s.change(META, |p| p.pinned = 0);
    let mut all = s.reserve(META, 100).unwrap();
    let part = all.split(30);
    assert_eq!((all.bytes(), part.bytes(), s.reserved_by_operations(META)), (70, 30, 100));
    all.shrink_to(5);
    assert_eq!(s.reserved_by_operations(META), 35);
    all.merge(part);
    assert_eq!(all.bytes(), 35);
    drop(all);
    assert_eq!(s.reserved_by_operations(META), 0);
    assert_eq!(s.stats(META).refused, 1);
}

#[test]
fn only_metadata_overcommits_and_only_what_can_become_metadata() {
    let s = space(100);
    s.change(SpaceKind::Data, |p| p.total = 100);
    s.set_overcommit(Overcommit(50));
    let r = s.try_reserve(META, 150).unwrap();
    assert_eq!(s.figures(SpaceKind::Metadata).overcommitted(), 50);
    assert!(s.try_reserve(META, 1).is_none());
    assert!(s.try_reserve(SpaceKind::Data, 101).is_none());
    drop(r);
    assert_eq!(s.figures(SpaceKind::Metadata).overcommitted(), 0);
    // Mixed: one account, but data is never promised space that is not there.
    let s = Space::new(true);
    s.change(META, |p| p.total = 100);
    s.set_overcommit(Overcommit(50));
    assert!(s.try_reserve(SpaceKind::Data, 101).is_none());
    let _r = s.try_reserve(META, 101).unwrap();
    assert!(s.try_reserve(SpaceKind::Data, 1).is_none());
}

#[test]
fn device_space_goes_to_others_only_as_far_as_it_is_not_promised() {
    let s = space(100);
    s.set_overcommit(Overcommit(50));
    let r = s.try_reserve(META, 130).unwrap();
    assert!(!s.take_device_space(29, Overcommit(20)), "30 were promised");
    assert!(s.try_reserve(META, 20).is_some(), "nothing has changed");
    assert!(s.take_device_space(30, Overcommit(20)));
    assert!(s.try_reserve(META, 1).is_none(), "promised already is more than may be now");
    drop(r);
    assert!(s.try_reserve(META, 121).is_none() && s.try_reserve(META, 120).is_some());
    // Space that becomes metadata counts once, not also where it came from.
    let waiting = s.reserve(META, 120).unwrap();
    s.grow(META, Overcommit(0), |p| p.total += 20);
    assert!(s.try_reserve(META, 1).is_none());
    drop(waiting);
    assert!(!s.try_withdraw(META, 121) && s.try_withdraw(META, 20));
    assert_eq!(s.figures(META).free(), 100);
}

#[test]
fn the_global_reserve_is_for_the_commit_and_for_deletions() {
    let s = space(100);
    s.set_global_reserve(40);
    assert_eq!(s.global_reserve(), (40, 40));
    let rest = s.reserve(META, 60).unwrap();
    assert!(s.reserve(META, 1).is_err());
    // What is split off stays behind. The deletion itself would be waited for.
    let deletion = s.reserve_for_deletion(20).unwrap().split(20);
    assert!(s.reserve_for_deletion(1).is_err(), "half of it stays for the commit");
    let mut commit = s.empty(META);
    commit.consume(15, Change::default());
    assert_eq!(s.global_reserve(), (40, 5));
    assert_eq!(s.figures(META).used, 15);
    drop(deletion);
    assert_eq!(s.global_reserve(), (40, 25), "refilled before anybody else gets it");
    drop(rest);
    assert_eq!(s.global_reserve(), (40, 40));
    s.set_global_reserve(10);
    assert_eq!((s.global_reserve(), s.figures(META).reserved), ((10, 10), 10));
    commit.restore(15);
    assert_eq!((commit.bytes(), s.figures(META).used), (15, 0));
}

#[test]
fn a_deletion_that_waits_is_served_from_the_global_reserve_once_it_is_full_again() {
    let s = space(100);
    s.set_global_reserve(40);
    let _rest = s.reserve(META, 60).unwrap();
    // Half of the reserve is in use. It comes back with the next commit.
    let mut commit = s.empty(META);
    commit.consume(20, Change::default());
    {
        let weak = Arc::downgrade(&s);
        s.set_reclaim(Box::new(With(move |_, _| {
            weak.upgrade().expect("alive").change(META, |p| p.used = 0);
            Ok(true)
        })));
    }
    let deletion = s.reserve_for_deletion(15).unwrap().split(15);
    assert_eq!((deletion.bytes(), s.global_reserve()), (15, (40, 25)));
    assert!(matches!(s.reserve(META, 1), Err(Error::NoSpace)), "not for others");
}

#[test]
fn who_is_about_to_give_back_is_waited_for() {
    let s = space(100);
    s.set_reclaim(Box::new(With(|_, _| Ok(false))));
    let held = s.reserve(META, 80).unwrap();
    assert!(
        matches!(s.reserve(META, 30), Err(Error::NoSpace)),
        "nobody says that it will come back"
    );
    drop(held);
    let mut passing = s.reserve_passing(80).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| s.reserve(META, 30).map(|r| r.bytes()));
        until("a ticket", || s.account(META).state.lock().queue.len() == 1);
        passing.consume(60, Change::default());
        drop(passing);
        assert_eq!(waiter.join().unwrap().unwrap(), 30);
        // The operation ends without giving anything back. Then nothing waits for ever.
        let mut passing = s.reserve_passing(40).unwrap();
        let waiter = scope.spawn(|| s.reserve(META, 30));
        until("a ticket", || s.account(META).state.lock().queue.len() == 1);
        passing.consume(40, Change::default());
        drop(passing);
        assert!(matches!(waiter.join().unwrap(), Err(Error::NoSpace)));
    });
    assert!(s.account(META).state.lock().queue.is_empty());
    assert_eq!(s.reserved_by_operations(META), 0);
}

/// An operation passes from the moment at which it is granted, also if it had to wait for that: its
/// thread may not have run since.
#[test]
fn who_was_granted_what_it_waited_for_is_waited_for() {
    let s = space(100);
    // There is not much room. With more, the reclaimer is not even asked.
    s.change(META, |p| p.used = 10);
    let held = Mutex::new(Some(s.reserve(META, 90).unwrap()));
    let (first_came, others_wait) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
    s.set_reclaim(Box::new(With({
        let others_wait = Arc::clone(&others_wait);
        move |_, bytes| {
            // The first is granted what it asked for while its thread is still in here. For the
            // second there is nothing to reclaim.
            if bytes == 60 {
                until("another to wait", || others_wait.load(Ordering::SeqCst));
                drop(held.lock().take());
                until("the other to have looked", || !others_wait.load(Ordering::SeqCst));
            } else {
                others_wait.store(false, Ordering::SeqCst);
            }
            Ok(false)
        }
    })));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let r = s.reserve_passing(60).unwrap();
            first_came.store(true, Ordering::SeqCst);
            drop(r);
        });
        until("a ticket", || s.account(META).state.lock().queue.len() == 1);
        let second = scope
            .spawn(|| s.reserve(META, 70).map(|r| (r.bytes(), first_came.load(Ordering::SeqCst))));
        until("a second ticket", || s.account(META).state.lock().queue.len() == 2);
        others_wait.store(true, Ordering::SeqCst);
        first.join().unwrap();
        assert_eq!(second.join().unwrap().unwrap(), (70, true));
    });
    assert_eq!(s.account(META).state.lock().passing, 0);
    assert_eq!(s.reserved_by_operations(META), 0);
}

/// The operation leaves something behind after the reclaimer has looked, and is gone before a
/// request is refused.
#[test]
fn after_whoever_has_passed_the_reclaimer_looks_again() {
    let s = space(100);
    let passing = Mutex::new(Some(s.reserve_passing(80).unwrap()));
    let behind = Arc::new(Mutex::new(None));
    s.set_reclaim(Box::new(With({
        let behind = Arc::clone(&behind);
        move |_, _| {
            let found = behind.lock().take();
            if let Some(mut passing) = passing.lock().take() {
                *behind.lock() = Some(passing.split(40));
            }
            Ok(found.is_some())
        }
    })));
    assert_eq!(s.reserve(META, 90).unwrap().bytes(), 90);
    assert!(behind.lock().is_none());
}

#[test]
fn a_reclaimer_that_panics_leaves_nobody_in_line() {
    let s = space(100);
    s.set_reclaim(Box::new(With(|_, _| panic!("a bug"))));
    let _all = s.reserve(META, 100).unwrap();
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| s.reserve(META, 1))).is_err());
    assert!(s.account(META).state.lock().queue.is_empty());
}

#[test]
fn what_is_granted_to_who_gives_up_comes_back() {
    let s = space(100);
    let all = Mutex::new(Some(s.reserve(META, 100).unwrap()));
    // Space comes and is granted to the waiter, but its thread does not come back for it.
    s.set_reclaim(Box::new(With(move |_, _| {
        drop(all.lock().take());
        panic!("a bug")
    })));
    assert!(
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| s.reserve(META, 60))).is_err()
    );
    assert_eq!(s.reserved_by_operations(META), 0);
    assert_eq!(s.reserve(META, 100).map(|r| r.bytes()).unwrap(), 100);
}

#[test]
fn the_global_reserve_holds_two_commits_where_there_is_room() {
    let of = |total| Figures { total, ..Figures::default() };
    assert_eq!(global_reserve_size(1 << 20, &of(1 << 40)), 16 << 20);
    assert_eq!(global_reserve_size(100 << 20, &of(1 << 40)), 200 << 20);
    assert_eq!(global_reserve_size(1 << 40, &of(1 << 40)), 512 << 20);
    assert_eq!(global_reserve_size(1 << 20, &of(8 << 20)), 2 << 20);
    assert_eq!(global_reserve_size(3 << 20, &of(8 << 20)), 4 << 20, "half of all metadata");
}

#[test]
fn a_thread_that_must_not_wait_is_told_so() {
    let s = space(100);
    s.set_reclaim(Box::new(With(|_, _| panic!("must not be reached"))));
    let _all = s.reserve(META, 100).unwrap();
    assert!(matches!(crate::api::no_wait(|| s.reserve(META, 1)), Err(Error::WouldBlock)));
    assert_eq!(s.stats(META).tickets, 0);
}

#[test]
fn reclaim_without_gain_ends_and_its_errors_reach_the_caller() {
    let s = space(100);
    s.set_reclaim(Box::new(With(
        |_, bytes| if bytes == 7 { Err(Error::ReadOnly(None)) } else { Ok(true) },
    )));
    let _all = s.reserve(META, 100).unwrap();
    assert!(matches!(s.reserve(META, 1), Err(Error::NoSpace)));
    assert!(matches!(s.reserve(META, 7), Err(Error::ReadOnly(None))));
    assert!(s.stats(META).reclaims <= 6);
    assert!(s.account(META).state.lock().queue.is_empty());
}

#[test]
fn a_reclaimer_may_reserve_for_itself() {
    let s = space(100);
    s.set_global_reserve(20);
    let weak = Arc::downgrade(&s);
    s.set_reclaim(Box::new(With(move |_, _| {
        let s = weak.upgrade().expect("alive");
        let mine = s.reserve(META, 15)?;
        s.change(META, |p| p.pinned = 0);
        drop(mine);
        Ok(true)
    })));
    s.change(META, |p| p.pinned = 80);
    let r = s.reserve(META, 50).unwrap();
    assert_eq!((r.bytes(), s.figures(META).pinned), (50, 0));
}

/// Waits for a condition that other threads bring about.
fn until(what: &str, f: impl Fn() -> bool) {
    let start = Instant::now();
    while !f() {
        assert!(start.elapsed() < Duration::from_secs(20), "timed out: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn tickets_are_served_oldest_first_whatever_their_size() {
    let s = space(100);
    let go = Arc::new(AtomicBool::new(false));
    let held = Mutex::new(vec![s.reserve(META, 100).unwrap()]);
    let order = Mutex::new(Vec::new());
    {
        let (go, weak) = (Arc::clone(&go), Arc::downgrade(&s));
        s.set_reclaim(Box::new(With(move |_, bytes| {
            let s = weak.upgrade().expect("alive");
            until("the queue to fill", || go.load(Ordering::SeqCst));
            until("others to finish", || bytes != 50 || s.reserved_by_operations(META) <= 50);
            Ok(true)
        })));
    }
    std::thread::scope(|scope| {
        // A large request, then small ones that would fit long before.
        for (i, bytes) in [80, 10, 10, 50].into_iter().enumerate() {
            let (s2, order) = (&s, &order);
            scope.spawn(move || {
                let r = s2.reserve(META, bytes).unwrap();
                order.lock().push(i);
                // The last one needs what the others hold.
                if i == 3 {
                    drop(r);
                } else {
                    until("all before the last", || order.lock().len() >= 3);
                    drop(r);
                }
            });
            until("a ticket", || s.account(META).state.lock().queue.len() == i + 1);
        }
        let mut first = held.lock().pop().expect("the first");
        first.shrink_to(85);
        assert_eq!(
            s.account(META).state.lock().queue.len(),
            4,
            "15 free: the small ones do not overtake"
        );
        drop(first);
        go.store(true, Ordering::SeqCst);
    });
    let order = order.into_inner();
    assert_eq!(order[3], 3);
    assert_eq!(order.len(), 4);
    assert_eq!(s.reserved_by_operations(META), 0);
}

#[test]
fn stress_ends_with_nothing_reserved() {
    let s = space(64);
    s.set_global_reserve(4);
    {
        // Another thread holds what is missing and will give it back. That is what a commit waits
        // for.
        let weak = Arc::downgrade(&s);
        s.set_reclaim(Box::new(With(move |_, bytes| {
            let s = weak.upgrade().expect("alive");
            // It does not wait for ever: our own ticket may have been served meanwhile, and then
            // all others wait for us.
            for _ in 0..10_000 {
                let (figures, held) = (s.figures(META), s.reserved_by_operations(META));
                if figures.pinned > 0 || figures.free().saturating_sub(held) >= bytes + 4 {
                    break;
                }
                std::thread::yield_now();
            }
            s.change(META, |p| p.pinned = 0);
            Ok(true)
        })));
    }
    let granted = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for t in 0..6u64 {
            let (s, granted) = (&s, &granted);
            scope.spawn(move || {
                let mut x = t + 1;
                for _ in 0..3000 {
                    x = x
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let bytes = 1 + (x >> 33) % 24;
                    match s.reserve(META, bytes) {
                        Ok(mut r) => {
                            let figures = s.figures(META);
                            assert!(
                                figures.used + figures.pinned + figures.reserved <= figures.total,
                                "{figures:?}"
                            );
                            if x.is_multiple_of(3) {
                                r.consume(bytes / 2, Change::default());
                                drop(r);
                                s.change(META, |p| {
                                    (p.used, p.pinned) = (p.used - bytes / 2, p.pinned + bytes / 2)
                                });
                            }
                            granted.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(e) => assert!(matches!(e, Error::NoSpace), "{e}"),
                    }
                }
            });
        }
    });
    assert!(granted.into_inner() > 6000);
    assert_eq!(s.reserved_by_operations(META), 0);
    assert_eq!(s.figures(META).used, 0);
    assert!(s.account(META).state.lock().queue.is_empty());
}

proptest! {
    #[test]
    fn pots_match_a_sum(ops in prop::collection::vec((0u8..7, 0usize..8, 0u64..60), 1..120)) {
        let s = space(500);
        s.set_global_reserve(50);
        s.set_overcommit(Overcommit(40));
        let mut held: Vec<Reservation> = Vec::new();
        let (mut used, mut pinned) = (0u64, 0u64);
        for (op, which, bytes) in ops {
            let slot = which % held.len().max(1);
            match op {
                0 | 1 => {
                    let reserved: u64 = held.iter().map(Reservation::bytes).sum();
                    let room = 540u64.saturating_sub(
                        used + pinned + reserved + s.global_reserve().1);
                    let got = s.try_reserve(META, bytes);
                    prop_assert_eq!(got.is_some(), bytes <= room);
                    held.extend(got);
                }
                2 if !held.is_empty() => drop(held.swap_remove(slot)),
                3 if !held.is_empty() => {
                    let n = bytes.min(held[slot].bytes()).min(500 - used - pinned);
                    held[slot].consume(n, Change::default());
                    used += n;
                }
                4 => {
                    let n = bytes.min(used);
                    s.change(META, |p| { p.used -= n; p.pinned += n; });
                    (used, pinned) = (used - n, pinned + n);
                }
                5 => {
                    s.change(META, |p| p.pinned = 0);
                    pinned = 0;
                }
                _ if held.len() > 1 => {
                    let other = held.pop().unwrap();
                    let n = held.len();
                    held[slot % n].merge(other);
                }
                _ => {}
            }
            let p = s.figures(META);
            prop_assert_eq!((p.used, p.pinned), (used, pinned));
            prop_assert_eq!(s.reserved_by_operations(META),
                held.iter().map(Reservation::bytes).sum::<u64>());
        }
        drop(held);
        prop_assert_eq!(s.reserved_by_operations(META), 0);
    }
}
