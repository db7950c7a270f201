//! The state machine of transactions: joining, sealing, waiting.
//!
//! One mutex guards the state machine and nothing else. It is held for a few instructions at a
//! time. A caller that needs a transaction to be durable leaves a [`Completion`], which the
//! publication completes.

use crate::completion::{self, Completion};
use crate::error::{Error, Result};
use crate::lock::{self, Condvar, Joined, Mutex, RwLock, Wait};
use crate::space::alloc::{ChunkNotes, ChunkOutcome, Running};
use crate::transaction::{Gathered, Txn};
use crate::tree::{EditStop, Need, Root};
use larder_format::Generation;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What reference counts are computed from: the last published extent tree, and the notes on top of
/// it.
#[derive(Debug, Clone)]
pub(crate) struct RefsView {
    /// Generation of the published extent tree.
    pub(crate) base: Generation,
    /// Its root.
    pub(crate) extent_root: Root,
    /// Root of the published checksum tree. With the notes of both transactions it has all
    /// checksums.
    pub(crate) csum_root: Root,
    /// The sealed transaction, if one is being committed.
    pub(crate) sealed: Option<Arc<Txn>>,
    /// The running one.
    pub(crate) running: Arc<Txn>,
}

/// How often a lock is tried that is held for some instructions only. If that does not help, its
/// holder has lost its processor, and will get it back in milliseconds.
const TRIES: usize = 100;

/// Locks for a caller that holds a tree: while it waits, all others would wait for that tree.
pub(super) fn at_once<G>(lock: impl Fn() -> Option<G>) -> Result<G, EditStop> {
    for _ in 0..TRIES {
        if let Some(guard) = lock() {
            return Ok(guard);
        }
        std::hint::spin_loop();
    }
    Err(EditStop::Need(Need::Notes))
}

#[derive(Debug)]
struct TransactionsState {
    running: Arc<Txn>,
    handles: u64,
    sealing: bool,
    published: Generation,
    /// Callers that wait until a transaction is published.
    waiters: BTreeMap<Generation, Vec<Completion>>,
    /// The last transaction that a commit was asked for.
    wanted: Generation,
    failed: Option<String>,
    stop: bool,
    /// Periodic work has to be done now.
    hasten: bool,
}

/// Counters.
#[derive(Debug, Default)]
pub(crate) struct TransactionStats {
    /// Commits.
    pub(crate) commits: AtomicU64,
    /// Nanoseconds that joins were held up by sealing, longest and total.
    pub(crate) seal_max_ns: AtomicU64,
    /// See `seal_max_ns`.
    pub(crate) seal_ns: AtomicU64,
    /// Nanoseconds from seal to publication, longest and total.
    pub(crate) commit_max_ns: AtomicU64,
    /// See `commit_max_ns`.
    pub(crate) commit_ns: AtomicU64,
    /// Nodes written.
    pub(crate) nodes_written: AtomicU64,
    /// Callers that had to wait until a transaction was published.
    pub(crate) waits: AtomicU64,
}

/// The state machine of transactions.
#[derive(Debug)]
pub(crate) struct Transactions {
    state: Mutex<TransactionsState, lock::Transactions>,
    /// Has writing ended? Then `state` says why.
    ended: AtomicBool,
    /// Something has changed that joining operations or the committer may be waiting for.
    changed: Condvar,
    view: RwLock<RefsView, lock::View>,
    /// Makes what the rooms above gather in a transaction.
    above: fn() -> Vec<Box<dyn Gathered>>,
    pub(crate) stats: TransactionStats,
}

/// Keeps the running transaction from being sealed.
#[derive(Debug)]
pub(crate) struct Pin<'a> {
    txns: &'a Transactions,
    pub(crate) txn: Arc<Txn>,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.txns.leave();
    }
}

impl Transactions {
    pub(crate) fn new(
        published: Generation,
        extent_root: Root,
        csum_root: Root,
        above: fn() -> Vec<Box<dyn Gathered>>,
    ) -> Self {
        let running = Arc::new(Txn::new(published.next(), above()));
        let view = RefsView {
            base: published,
            extent_root,
            csum_root,
            sealed: None,
            running: running.clone(),
        };
        Self {
            state: Mutex::new(TransactionsState {
                running,
                handles: 0,
                sealing: false,
                published,
                waiters: BTreeMap::new(),
                wanted: published,
                failed: None,
                stop: false,
                hasten: false,
            }),
            ended: AtomicBool::new(false),
            changed: Condvar::new(),
            view: RwLock::new(view),
            above,
            stats: TransactionStats::default(),
        }
    }
    /// The last published transaction.
    pub(crate) fn published(&self) -> Generation {
        self.state.lock().published
    }
    /// The running transaction. It may be sealed at any moment, unless the caller has a handle.
    pub(crate) fn running(&self) -> Arc<Txn> {
        self.state.lock().running.clone()
    }
    /// Reads the view with `f`. A seal or a publication waits meanwhile.
    pub(crate) fn with_view<R>(&self, f: impl FnOnce(&RefsView) -> R) -> R {
        f(&self.view.read())
    }
    /// The same for a caller that holds a tree. It never waits.
    pub(crate) fn with_view_at_once<R>(
        &self,
        f: impl FnOnce(&RefsView) -> Result<R, EditStop>,
    ) -> Result<R, EditStop> {
        f(&*at_once(|| self.view.try_read())?)
    }
    /// Does something while the view is locked as for a change.
    #[cfg(test)]
    pub(crate) fn while_view_changes<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let _view = self.view.write();
        // `f` runs on another thread, because this one must not take the lock again.
        std::thread::scope(|s| s.spawn(f).join().expect("it does not panic"))
    }
    /// Why writing has ended, if it has.
    pub(crate) fn failure(&self) -> Option<String> {
        // This is asked before every operation.
        if self.ended.load(Ordering::Acquire) { self.state.lock().failed.clone() } else { None }
    }

    /// Joins the running transaction. Waits while one is being sealed. The caller must call `leave`
    /// later.
    pub(crate) fn join(&self) -> Result<Arc<Txn>> {
        lock::before_waiting(Wait::Commit);
        let mut state = self.state.lock();
        loop {
            if let Some(why) = &state.failed {
                return Err(Error::ReadOnly(Some(why.clone())));
            }
            if !state.sealing {
                state.handles += 1;
                let txn = state.running.clone();
                drop(state);
                lock::enter::<Joined>();
                return Ok(txn);
            }
            crate::api::may_wait()?;
            self.changed.wait(&mut state);
        }
    }
    /// Waits until the transaction with this number takes no more changes.
    pub(crate) fn wait_sealed(&self, generation: Generation) -> Result<()> {
        lock::before_waiting(Wait::Commit);
        let mut state = self.state.lock();
        while state.running.generation <= generation {
            if let Some(why) = &state.failed {
                return Err(Error::ReadOnly(Some(why.clone())));
            }
            self.changed.wait(&mut state);
        }
        Ok(())
    }
    /// Ends a join.
    pub(crate) fn leave(&self) {
        lock::leave::<Joined>();
        let mut state = self.state.lock();
        state.handles -= 1;
        if state.handles == 0 && state.sealing {
            self.changed.notify_all();
        }
    }
    /// The running transaction, which will not be sealed before the guard is dropped. Unlike
    /// `join`, this works while a seal drains the handles, because an operation with a handle may
    /// need it to end.
    pub(crate) fn pin_running(&self) -> Result<Pin<'_>> {
        let mut state = self.state.lock();
        if let Some(why) = &state.failed {
            return Err(Error::ReadOnly(Some(why.clone())));
        }
        state.handles += 1;
        let txn = state.running.clone();
        drop(state);
        lock::enter_again::<Joined>();
        Ok(Pin { txns: self, txn })
    }

    /// Asks for a commit of everything up to now. Returns the generation to wait for, or `None` if
    /// all is published.
    pub(crate) fn request(&self) -> Option<Generation> {
        let mut state = self.state.lock();
        let target = if state.running.dirty.load(Ordering::Acquire) || state.sealing {
            state.running.generation
        } else {
            // Nothing is new. At most the sealed transaction is not published yet.
            Generation(state.running.generation.0 - 1)
        };
        if target <= state.published {
            return None;
        }
        if target > state.wanted {
            state.wanted = target;
            self.changed.notify_all();
        }
        Some(target)
    }
    /// Asks for a commit of the transaction `generation`, which is or was the running one.
    pub(crate) fn request_up_to(&self, generation: Generation) {
        let mut state = self.state.lock();
        if generation > state.wanted {
            state.wanted = generation;
            self.changed.notify_all();
        }
    }
    /// Completes `done` when `generation` is published, or with `ReadOnly` when writing has ended
    /// before that.
    pub(crate) fn when_published(&self, generation: Generation, done: Completion) {
        let mut state = self.state.lock();
        let outcome = match &state.failed {
            _ if state.published >= generation => Ok(()),
            Some(why) => Err(Error::ReadOnly(Some(why.clone()))),
            None => {
                self.stats.waits.fetch_add(1, Ordering::Relaxed);
                state.waiters.entry(generation).or_default().push(done);
                return;
            }
        };
        drop(state);
        done.complete(outcome);
    }
    /// Waits until `generation` is published.
    ///
    /// # Errors
    /// `ReadOnly` when writing has ended before that; `WouldBlock`.
    pub(crate) fn wait(&self, generation: Generation) -> Result<()> {
        completion::wait_for(|done| self.when_published(generation, done))
    }

    /// Waits for work for the committer. `None` means: stop.
    pub(crate) fn next_seal(&self) -> Option<()> {
        let mut state = self.state.lock();
        loop {
            if state.failed.is_some() {
                if state.stop {
                    return None;
                }
            } else if state.wanted >= state.running.generation {
                return Some(());
            } else if state.stop {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
    /// Closes the running transaction to new handles, and waits until the last handle has left.
    pub(crate) fn close_running(&self) -> (Arc<Txn>, Instant) {
        lock::before_waiting(Wait::Commit);
        let mut state = self.state.lock();
        state.sealing = true;
        let since = Instant::now();
        while state.handles > 0 {
            self.changed.wait(&mut state);
        }
        (state.running.clone(), since)
    }
    /// Starts the next transaction; the closed one is sealed.
    pub(crate) fn sealed(&self, since: Instant) {
        // No operation can have joined. But another thread may be giving this transaction a chunk,
        // or collecting for its log (`pin_running`), and may look at the view meanwhile. So the
        // view must not be held while waiting for such a thread.
        let (mut view, mut state) = loop {
            {
                let mut state = self.state.lock();
                while state.handles > 0 {
                    self.changed.wait(&mut state);
                }
            }
            let view = self.view.write();
            let state = self.state.lock();
            if state.handles == 0 {
                break (view, state);
            }
        };
        let next = Arc::new(Txn::new(state.running.generation.next(), (self.above)()));
        let old = std::mem::replace(&mut state.running, next.clone());
        view.sealed = Some(old);
        view.running = next;
        state.sealing = false;
        let ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.stats.seal_ns.fetch_add(ns, Ordering::Relaxed);
        self.stats.seal_max_ns.fetch_max(ns, Ordering::Relaxed);
        self.changed.notify_all();
    }
    /// A sealed transaction is durable. `swap` runs while no reference count can be computed.
    pub(crate) fn publish(
        &self,
        generation: Generation,
        (extent_root, csum_root): (Root, Root),
        swap: impl FnOnce(),
    ) {
        let mut view = self.view.write();
        let mut state = self.state.lock();
        view.base = generation;
        view.extent_root = extent_root;
        view.csum_root = csum_root;
        view.sealed = None;
        state.published = generation;
        swap();
        let later = state.waiters.split_off(&generation.next());
        let served = std::mem::replace(&mut state.waiters, later);
        self.stats.commits.fetch_add(1, Ordering::Relaxed);
        drop(state);
        drop(view);
        served.into_values().flatten().for_each(|done| done.complete(Ok(())));
    }
    /// Ends writing for good. Every waiter, now and later, gets `why`.
    pub(crate) fn fail(&self, why: &str) {
        tracing::error!("file system turned read-only: {why}");
        self.end(why);
    }
    /// Ends writing without calling it a failure: the file system has been closed.
    pub(crate) fn end(&self, why: &str) {
        let mut state = self.state.lock();
        // A seal that waits for handles goes on waiting for them, so a handle that leaves must wake
        // it.
        let why = state.failed.get_or_insert_with(|| why.to_owned()).clone();
        self.ended.store(true, Ordering::Release);
        let waiters = std::mem::take(&mut state.waiters);
        self.changed.notify_all();
        drop(state);
        for done in waiters.into_values().flatten() {
            done.complete(Err(Error::ReadOnly(Some(why.clone()))));
        }
    }
    /// Tells the committer to end once no commit is wanted any more.
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }
    /// Ends the pause that is under way, or the next one.
    pub(crate) fn hasten(&self) {
        self.state.lock().hasten = true;
        self.changed.notify_all();
    }
    /// Waits up to `interval`, or until hastened or stopped. Returns true if stopped.
    pub(crate) fn pause(&self, interval: Option<Duration>) -> bool {
        let until = interval.and_then(|interval| Instant::now().checked_add(interval));
        let mut state = self.state.lock();
        while !state.stop {
            if std::mem::take(&mut state.hasten) {
                return false;
            }
            match until {
                Some(until) => {
                    if self.changed.wait_until(&mut state, until).timed_out() {
                        return false;
                    }
                }
                None => self.changed.wait(&mut state),
            }
        }
        true
    }
}

impl Running for Transactions {
    fn while_pinned(
        &self,
        make: &mut dyn FnMut(&dyn ChunkNotes) -> Result<ChunkOutcome>,
    ) -> Result<ChunkOutcome> {
        make(&*self.pin_running()?.txn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::no_wait;
    use crate::tree::Pointer;
    use larder_format::Logical;
    use std::sync::mpsc;
    use std::thread;

    fn root() -> Root {
        let ptr =
            Pointer { at: Logical(1 << 20), generation: Generation(7), level: 0, first_key: None };
        Root { ptr, node: None }
    }
    fn manager() -> Transactions {
        Transactions::new(Generation(7), root(), root(), Vec::new)
    }
    /// What a committer does, without anything to commit.
    fn commit(txns: &Transactions) -> Generation {
        let (txn, since) = txns.close_running();
        txns.sealed(since);
        txns.publish(txn.generation, (root(), root()), || ());
        txn.generation
    }
    /// Waits until `txns` is closing its running transaction.
    fn until_sealing(txns: &Transactions) {
        while !txns.state.lock().sealing {
            thread::yield_now();
        }
    }

    /// A thread that collects for the log looks at the view while it holds the transaction, and the
    /// seal waits for that thread.
    #[test]
    fn a_seal_that_waits_for_a_pin_keeps_nobody_from_the_view() {
        let txns = std::sync::Arc::new(manager());
        let (txn, since) = txns.close_running();
        let (send, events) = mpsc::channel();
        let (held, sealing) = (send.clone(), txns.clone());
        thread::spawn({
            let txns = txns.clone();
            move || {
                let pin = txns.pin_running().unwrap();
                held.send("pinned").unwrap();
                for _ in 0..10_000 {
                    txns.with_view(|view| assert!(view.sealed.is_none()));
                    thread::yield_now();
                }
                drop(pin);
            }
        });
        let limit = std::time::Duration::from_secs(60);
        assert_eq!(events.recv_timeout(limit), Ok("pinned"));
        thread::spawn(move || {
            sealing.sealed(since);
            send.send("sealed").unwrap();
        });
        assert_eq!(events.recv_timeout(limit), Ok("sealed"));
        txns.with_view(|view| assert_eq!(view.sealed.as_ref().unwrap().generation, txn.generation));
    }

    #[test]
    fn a_seal_waits_for_handles_and_lets_nobody_join() {
        let txns = manager();
        let first = txns.join().unwrap();
        let (send, events) = mpsc::channel();
        thread::scope(|s| {
            let (txns, sender) = (&txns, send.clone());
            s.spawn(move || {
                let n = commit(txns);
                sender.send(format!("published {n}")).unwrap();
            });
            until_sealing(txns);
            let refused = s.spawn(|| no_wait(|| txns.join())).join().unwrap();
            assert!(matches!(refused, Err(Error::WouldBlock)));
            let sender = send.clone();
            s.spawn(move || {
                let joined = txns.join().unwrap();
                sender.send(format!("joined {}", joined.generation)).unwrap();
                txns.leave();
            });
            assert!(events.try_recv().is_err(), "the first handle is still there");
            assert_eq!(first.generation, Generation(8));
            txns.leave();
            let mut seen: Vec<String> = events.iter().take(2).collect();
            seen.sort();
            assert_eq!(seen, ["joined 9", "published 8"]);
        });
        assert_eq!(txns.published(), Generation(8));
    }

    #[test]
    fn a_pin_holds_the_seal_at_each_of_its_stages() {
        let txns = manager();
        let handle = txns.join().unwrap();
        thread::scope(|s| {
            let (closed_send, closed) = mpsc::channel();
            let (go_send, go) = mpsc::channel::<()>();
            let committer = s.spawn({
                let txns = &txns;
                move || {
                    let (txn, since) = txns.close_running();
                    closed_send.send(()).unwrap();
                    go.recv().unwrap();
                    txns.sealed(since);
                    txn
                }
            });
            until_sealing(&txns);
            // While handles drain: an operation in the transaction may need a chunk to come to its
            // end.
            let pin = txns.pin_running().unwrap();
            txns.leave();
            assert!(closed.try_recv().is_err());
            drop(pin);
            closed.recv().unwrap();
            // While delayed items are written.
            let pin = txns.pin_running().unwrap();
            go_send.send(()).unwrap();
            for _ in 0..1000 {
                assert_eq!(
                    txns.running().generation,
                    pin.txn.generation,
                    "sealed although it is pinned"
                );
                thread::yield_now();
            }
            pin.txn.touch();
            drop(pin);
            let sealed = committer.join().unwrap();
            assert!(sealed.dirty.load(Ordering::Acquire) && Arc::ptr_eq(&sealed, &handle));
            assert_eq!(txns.running().generation, Generation(9));
        });
    }

    #[test]
    fn a_request_names_what_covers_everything_so_far() {
        let txns = manager();
        assert_eq!(txns.request(), None, "nothing changed");
        txns.running().touch();
        assert_eq!(txns.request(), Some(Generation(8)));
        let (_, since) = txns.close_running();
        assert_eq!(txns.request(), Some(Generation(8)), "while it is sealed");
        txns.sealed(since);
        assert_eq!(txns.request(), Some(Generation(8)), "while it is written, and nothing new");
        txns.running().touch();
        assert_eq!(txns.request(), Some(Generation(9)));
        txns.publish(Generation(8), (root(), root()), || ());
        assert!(txns.wait(Generation(8)).is_ok());
        assert!(matches!(no_wait(|| txns.wait(Generation(9))), Err(Error::WouldBlock)));
        assert_eq!(txns.next_seal(), Some(()));
        assert_eq!(commit(&txns), Generation(9));
        assert_eq!(txns.request(), None);
        txns.hasten();
        assert!(!txns.pause(None), "once");
        txns.stop();
        assert_eq!(txns.next_seal(), None);
        txns.hasten();
        assert!(txns.pause(Some(Duration::MAX)));
    }

    #[test]
    fn a_failure_reaches_everybody() {
        let txns = manager();
        txns.join().unwrap().touch();
        thread::scope(|s| {
            let waits = s.spawn(|| txns.wait(txns.request().unwrap()));
            let sealed = s.spawn(|| txns.wait_sealed(Generation(8)));
            let commits = s.spawn(|| txns.close_running().0.generation);
            until_sealing(&txns);
            let joins = s.spawn(|| txns.join().map(drop));
            txns.fail("the device is gone");
            txns.fail("and something else went wrong");
            for waiter in [waits, sealed, joins] {
                match waiter.join().unwrap() {
                    Err(Error::ReadOnly(Some(why))) => assert_eq!(why, "the device is gone"),
                    other => panic!("{other:?}"),
                }
            }
            txns.leave();
            assert_eq!(commits.join().unwrap(), Generation(8));
        });
        assert!(matches!(txns.join(), Err(Error::ReadOnly(_))));
        assert!(matches!(txns.pin_running(), Err(Error::ReadOnly(_))));
        txns.stop();
        assert_eq!(txns.next_seal(), None);
    }

    /// Many operations, and commits all the time. No operation is in a transaction that is sealed,
    /// and all come to their end.
    #[test]
    fn joins_and_seals_under_load() {
        let txns = manager();
        let stop = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|s| {
            let committer = s.spawn(|| {
                while txns.next_seal().is_some() {
                    let (txn, since) = txns.close_running();
                    txns.sealed(since);
                    assert_eq!(txn.blocks.load(Ordering::Relaxed), 0, "somebody came in later");
                    txns.publish(txn.generation, (root(), root()), || ());
                }
            });
            let workers: Vec<_> = (0..4)
                .map(|n| {
                    let (txns, stop) = (&txns, &stop);
                    s.spawn(move || {
                        for i in 0..2000 {
                            let txn = if (i + n) % 7 == 0 {
                                let pin = txns.pin_running().unwrap();
                                pin.txn.blocks.fetch_add(1, Ordering::Relaxed);
                                pin.txn.touch();
                                pin.txn.blocks.fetch_sub(1, Ordering::Relaxed);
                                pin.txn.clone()
                            } else {
                                let txn = txns.join().unwrap();
                                txn.blocks.fetch_add(1, Ordering::Relaxed);
                                txn.touch();
                                txn.blocks.fetch_sub(1, Ordering::Relaxed);
                                txns.leave();
                                txn
                            };
                            if i % 5 == 0
                                && let Some(generation) = txns.request()
                            {
                                assert!(generation >= txn.generation);
                                txns.wait(generation).unwrap();
                                assert!(txns.published() >= txn.generation);
                            }
                        }
                        assert!(!stop.load(Ordering::Relaxed));
                    })
                })
                .collect();
            for w in workers {
                w.join().unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            txns.stop();
            committer.join().unwrap();
        });
        assert_eq!(txns.state.lock().handles, 0);
        assert_eq!(txns.stats.commits.load(Ordering::Relaxed), txns.published().0 - 7);
    }
}
