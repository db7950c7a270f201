//! Who may join, when to seal, who waits for what.
//!
//! One mutex guards the state machine and nothing else; it is held for a few instructions at a time.

use crate::error::{Error, Result};
use crate::transaction::Txn;
use crate::tree::Root;
use larder_format::Generation;
use parking_lot::{Condvar, Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What reference counts are computed from: the last published extent tree and the notes on top of it.
#[derive(Debug, Clone)]
pub(crate) struct RefsView {
    /// Generation of the published extent tree.
    pub(crate) base: Generation,
    /// Its root.
    pub(crate) extent_root: Root,
    /// Root of the published checksum tree: with the notes of both transactions, all checksums there are.
    pub(crate) csum_root: Root,
    /// The sealed transaction, if one is on its way.
    pub(crate) sealed: Option<Arc<Txn>>,
    /// The running one.
    pub(crate) running: Arc<Txn>,
}

#[derive(Debug)]
struct State {
    running: Arc<Txn>,
    handles: u64,
    sealing: bool,
    published: Generation,
    /// Commit at least up to here.
    wanted: Generation,
    failed: Option<String>,
    stop: bool,
}

/// Counters.
#[derive(Debug, Default)]
pub struct TransactionStats {
    /// Commits.
    pub commits: AtomicU64,
    /// Nanoseconds that joins were held up by sealing, longest and total.
    pub seal_max_ns: AtomicU64,
    /// See `seal_max_ns`.
    pub seal_ns: AtomicU64,
    /// Nanoseconds from seal to publication, in all.
    pub commit_ns: AtomicU64,
    /// Nodes written.
    pub nodes_written: AtomicU64,
}

/// The state machine of transactions.
#[derive(Debug)]
pub(crate) struct Transactions {
    state: Mutex<State>,
    /// Something changed that joiners, waiters or the committer may be waiting for.
    changed: Condvar,
    view: RwLock<RefsView>,
    pub(crate) stats: TransactionStats,
}

impl Transactions {
    pub(crate) fn new(published: Generation, extent_root: Root, csum_root: Root) -> Self {
        let running = Arc::new(Txn::new(published.next()));
        let view =
            RefsView { base: published, extent_root, csum_root, sealed: None, running: running.clone() };
        Self {
            state: Mutex::new(State {
                running,
                handles: 0,
                sealing: false,
                published,
                wanted: published,
                failed: None,
                stop: false,
            }),
            changed: Condvar::new(),
            view: RwLock::new(view),
            stats: TransactionStats::default(),
        }
    }
    /// The last published transaction.
    pub(crate) fn published(&self) -> Generation {
        self.state.lock().published
    }
    /// The running transaction. It may be sealed any moment, unless the caller has a handle.
    pub(crate) fn running(&self) -> Arc<Txn> {
        self.state.lock().running.clone()
    }
    /// Reads the view with `f`; a seal or publication waits meanwhile.
    pub(crate) fn with_view<R>(&self, f: impl FnOnce(&RefsView) -> R) -> R {
        f(&self.view.read())
    }
    /// Why writing has ended, if it has.
    pub(crate) fn failure(&self) -> Option<String> {
        self.state.lock().failed.clone()
    }

    /// Joins the running transaction; waits while one is being sealed. `leave` must follow.
    pub(crate) fn join(&self) -> Result<Arc<Txn>> {
        let mut state = self.state.lock();
        loop {
            if let Some(why) = &state.failed {
                return Err(Error::ReadOnly(Some(why.clone())));
            }
            if !state.sealing {
                state.handles += 1;
                return Ok(state.running.clone());
            }
            crate::api::may_wait()?;
            self.changed.wait(&mut state);
        }
    }
    /// Waits until the transaction with this number takes no more changes.
    pub(crate) fn wait_sealed(&self, generation: Generation) -> Result<()> {
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
        let mut state = self.state.lock();
        state.handles -= 1;
        if state.handles == 0 && state.sealing {
            self.changed.notify_all();
        }
    }
    /// The running transaction, which will not be sealed before `leave`; unlike `join` also while a seal drains its
    /// handles, because those may need it to come to their end.
    pub(crate) fn pin_running(&self) -> Result<Arc<Txn>> {
        let mut state = self.state.lock();
        if let Some(why) = &state.failed {
            return Err(Error::ReadOnly(Some(why.clone())));
        }
        state.handles += 1;
        Ok(state.running.clone())
    }

    /// Asks for a commit of everything up to now, and returns the generation to wait for; `None` when all is published.
    pub(crate) fn request(&self) -> Option<Generation> {
        let mut state = self.state.lock();
        let target = if state.running.dirty.load(Ordering::Acquire) || state.sealing {
            state.running.generation
        } else {
            // Nothing new: at most the sealed one is still on its way.
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
    /// Waits until `generation` is published.
    ///
    /// # Errors
    /// `ReadOnly` when writing has ended before that.
    pub(crate) fn wait(&self, generation: Generation) -> Result<()> {
        let mut state = self.state.lock();
        loop {
            if state.published >= generation {
                return Ok(());
            }
            if let Some(why) = &state.failed {
                return Err(Error::ReadOnly(Some(why.clone())));
            }
            crate::api::may_wait()?;
            self.changed.wait(&mut state);
        }
    }

    /// The committer's wait for work. `None`: stop.
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
    /// Closes the running transaction to new handles and waits for those that are in it.
    pub(crate) fn close_running(&self) -> (Arc<Txn>, Instant) {
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
        let mut view = self.view.write();
        let mut state = self.state.lock();
        // Nobody can have joined, but somebody may be giving this transaction a chunk (`pin_running`).
        while state.handles > 0 {
            self.changed.wait(&mut state);
        }
        let next = Arc::new(Txn::new(state.running.generation.next()));
        let old = std::mem::replace(&mut state.running, next.clone());
        view.sealed = Some(old);
        view.running = next;
        state.sealing = false;
        let ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.stats.seal_ns.fetch_add(ns, Ordering::Relaxed);
        self.stats.seal_max_ns.fetch_max(ns, Ordering::Relaxed);
        self.changed.notify_all();
    }
    /// A sealed transaction is durable. `swap` runs while nobody computes reference counts.
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
        self.stats.commits.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_all();
    }
    /// Ends writing for good: every waiter, now and later, gets `why`.
    pub(crate) fn fail(&self, why: &str) {
        let mut state = self.state.lock();
        tracing::error!("file system turned read-only: {why}");
        state.failed.get_or_insert_with(|| why.to_owned());
        state.sealing = false;
        self.changed.notify_all();
    }
    /// Ends writing without calling it a failure: the file system was closed.
    pub(crate) fn end(&self, why: &str) {
        self.state.lock().failed.get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }
    /// Tells the committer to end when nothing is wanted any more.
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }
    /// Waits up to `interval`, or until stopped: true then.
    pub(crate) fn pause(&self, interval: Duration) -> bool {
        let until = Instant::now() + interval;
        let mut state = self.state.lock();
        while !state.stop {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return false;
            }
        }
        true
    }
}
