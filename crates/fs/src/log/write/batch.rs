//! How one thread writes the log for all callers, and when it is durable.
//!
//! Each transaction has a [`TxnLog`]. A caller of `fsync` adds a contribution to it, gets a ticket,
//! and waits or leaves a call behind ([`super::queue`]). There is always one leader. It goes step
//! by step. A step
//!
//! 1. writes the superblock for the nodes that the last flush has made durable,
//! 2. takes all contributions that have gathered, edits the log, and writes its nodes,
//! 3. flushes. This makes both durable, and the callers for which the superblock was written are
//!    done.
//!
//! So one caller alone costs two flushes, which is the least that it takes; under load each batch
//! costs one. Callers that add a contribution need nothing of what the leader holds while it waits
//! for the device. `docs/LOG.md` says what happens to a log when its transaction is sealed
//! ([`TxnLog::close`]) and committed ([`TxnLog::retire`]).

use super::collect::{Contribution, Pair, collect};
use super::content::Content;
use super::queue::{Queue, Settled, TicketOutcome};
use super::tree::Outgoing;
use super::{Cause, NotLogged, Result};
use crate::engine::changes::Logged;
use crate::engine::{Core, Inode};
use crate::error::Error;
use crate::file::{MAX_FILE_SIZE, ceil};
use crate::lock::{self, Locked, Mutex};
use crate::space::Run;
use crate::transaction::{Gathered, Txn, writeout};
use crate::tree::Pointer;
use larder_format::{Generation, Logical, ObjectId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Nodes that were written and to which a superblock is to lead.
#[derive(Debug)]
struct Written {
    root: Pointer,
    /// The tickets that it makes durable: all up to this one.
    upto: u64,
    /// Nodes that are not needed any more once it is durable.
    replaced: Vec<larder_format::Logical>,
}

/// What the leader works on.
#[derive(Debug, Default)]
struct Work {
    /// Nodes that are durable, but whose superblock is not written yet.
    flushed: Option<Written>,
    /// The transaction is published, so nothing may be written any more.
    retired: bool,
}

/// The log of a transaction.
#[derive(Debug, Default)]
pub(crate) struct TxnLog {
    queue: Mutex<Queue, lock::LogQueue>,
    work: Mutex<Work, lock::LogWork>,
    /// Taken behind `work`. Names are looked up with it held, which may read nodes; nothing is
    /// written.
    content: Mutex<Content, lock::LogContent>,
    /// Has any contribution ever been added?
    used: AtomicBool,
}

impl Gathered for TxnLog {}

impl TxnLog {
    /// The log of a transaction.
    pub(crate) fn of(txn: &Txn) -> &Self {
        txn.gathered()
    }
    /// Adds a contribution; `None` if the transaction is sealed or the log was given up.
    pub(super) fn add(&self, contribution: Contribution) -> Option<u64> {
        let ticket = self.ticket(Some(contribution));
        self.used.store(true, Ordering::Relaxed);
        ticket
    }
    /// A ticket for a contribution, or for one that is in the log already.
    fn ticket(&self, contribution: Option<Contribution>) -> Option<u64> {
        let mut queue = self.queue.lock();
        if queue.closed || queue.refused.is_some() {
            return None;
        }
        queue.given += 1;
        queue.waiting.extend(contribution);
        Some(queue.given)
    }
    /// Brings a contribution into the log on the caller's thread, without a batch: for
    /// [`crate::older::LogEntry::Alone`].
    pub(super) fn add_alone(
        &self,
        core: &Core,
        txn: &Arc<Txn>,
        contribution: Contribution,
    ) -> Result<Option<u64>> {
        self.used.store(true, Ordering::Relaxed);
        let mut content = self.content.lock();
        if let Err(stop) = content.take_in(core, txn, vec![contribution]) {
            // A half of it may be in the log.
            let from = self.queue.lock().taken + 1;
            self.refuse(from, if let NotLogged::Commit(cause) = stop { Some(cause) } else { None });
            return Err(stop);
        }
        Ok(self.ticket(None))
    }
    /// The transaction is being sealed: the log takes no more contributions.
    pub(crate) fn close(&self) {
        let mut queue = self.queue.lock();
        queue.closed = true;
        let left = std::mem::take(&mut queue.waiting);
        let calls = queue.wake_all();
        drop(queue);
        calls.make();
        // They may hold the last references to inodes.
        drop(left);
    }
    /// The superblock without this log is durable: returns the log's space, pinned. Waits for one
    /// step of the leader at most.
    ///
    /// # Errors
    /// Broken accounts.
    pub(crate) fn retire(&self, core: &Core) -> crate::error::Result<Vec<Run>> {
        if !self.used.load(Ordering::Relaxed) {
            return Ok(Vec::new());
        }
        let mut work = self.work.lock();
        work.retired = true;
        work.flushed = None;
        self.content.lock().retire(core)
    }
    /// All tickets from this one on have to commit.
    fn refuse(&self, from: u64, cause: Option<Cause>) {
        let mut queue = self.queue.lock();
        // Several threads may find that the log cannot go on: the lowest of their tickets counts.
        if queue.refused.is_none_or(|(first, _)| from < first) {
            queue.refused = Some((from, cause));
        }
        let calls = queue.wake_all();
        drop(queue);
        calls.make();
    }

    /// Waits until a ticket is durable, or is known not to become durable by the log. Leads if
    /// there is no leader.
    fn wait(
        &self,
        core: &Core,
        txn: &Arc<Txn>,
        ticket: u64,
    ) -> crate::error::Result<TicketOutcome> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(outcome) = known(core, &queue, ticket) {
                queue.wake_leader();
                return outcome;
            }
            if queue.led {
                let (place, me) = queue.enter_thread(ticket);
                me.wait(&mut queue);
                queue.leave(place);
                continue;
            }
            queue = match self.lead(core, txn, queue, Some(ticket)) {
                Ok(queue) => queue,
                // The ticket may have been made durable before.
                Err(e) => return known(core, &self.queue.lock(), ticket).unwrap_or(Err(e)),
            };
        }
    }

    /// As [`wait`](Self::wait), but leaves a call behind if there is another leader.
    fn call(&self, core: &Core, txn: &Arc<Txn>, ticket: u64, settled: Settled) {
        let mut queue = self.queue.lock();
        if let Some(outcome) = known(core, &queue, ticket) {
            drop(queue);
            return settled(outcome);
        }
        queue.enter_call(ticket, settled);
        if !queue.led {
            // All waiters are told of a failure, and so is this call.
            drop(self.lead(core, txn, queue, None));
        }
    }

    /// Leads until `ticket`, if there is one, is settled, and no waiter is left that cannot lead.
    ///
    /// # Errors
    /// Those of a step. Writing has ended then, and all waiters know.
    fn lead<'a>(
        &'a self,
        core: &Core,
        txn: &Arc<Txn>,
        mut queue: Locked<'a, Queue>,
        ticket: Option<u64>,
    ) -> crate::error::Result<Locked<'a, Queue>> {
        queue.led = true;
        drop(queue);
        let mut lead = Lead { log: self, core, over: false };
        loop {
            step(core, txn, self)?;
            if let Some(why) = core.txns.failure() {
                return Err(Error::ReadOnly(Some(why)));
            }
            let mut queue = self.queue.lock();
            if !queue.has_calls() && ticket.is_none_or(|ticket| queue.outcome(ticket).is_some()) {
                queue.led = false;
                queue.wake_leader();
                lead.over = true;
                return Ok(queue);
            }
        }
    }
}

/// The outcome of a ticket, as far as it is known. It is known, too, if writing has ended.
fn known(core: &Core, queue: &Queue, ticket: u64) -> Option<crate::error::Result<TicketOutcome>> {
    let outcome = queue.outcome(ticket).map(Ok);
    outcome.or_else(|| core.txns.failure().map(|why| Err(Error::ReadOnly(Some(why)))))
}

/// A thread leads. If it panics or fails, all waiters are told.
struct Lead<'a> {
    log: &'a TxnLog,
    core: &'a Core,
    over: bool,
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        if std::thread::panicking() {
            self.core.txns.fail("writing the log hit a broken invariant");
        }
        let why = self.core.txns.failure().unwrap_or_else(|| "the log could not be written".into());
        let mut queue = self.log.queue.lock();
        queue.led = false;
        let calls = queue.fail(&why);
        drop(queue);
        calls.make();
    }
}

/// One step of the leader.
///
/// # Errors
/// The device failed, or what was read is corrupt. Writing has ended then.
fn step(core: &Core, txn: &Arc<Txn>, log: &TxnLog) -> crate::error::Result<()> {
    let mut work = log.work.lock();
    if work.retired {
        log.refuse(0, None);
        return Ok(());
    }
    let outcome = step_with(core, txn, log, &mut work);
    if let Err(e) = &outcome {
        // A part of it may be on the device, so nothing can be known of what the log has.
        core.txns.fail(&format!("the log could not be written: {e}"));
    }
    outcome
}

fn step_with(
    core: &Core,
    txn: &Arc<Txn>,
    log: &TxnLog,
    work: &mut Work,
) -> crate::error::Result<()> {
    let counters = &core.log;
    let before = Generation(txn.generation.0 - 1);
    let more = {
        let queue = log.queue.lock();
        queue.fresh() > 0
    };
    // Contributions that gather while the superblock has to wait are written meanwhile.
    let waits = core.txns.published() < before && !fault!(core.options.tuning, LogEarlySuper);
    let mut completing = None;
    if let Some(written) = work.flushed.take() {
        if waits && more {
            work.flushed = Some(written);
        } else {
            if !fault!(core.options.tuning, LogEarlySuper) {
                core.txns.wait(before)?;
            }
            if core.write_log_superblock(txn.generation, &written.root)? {
                counters.superblocks.fetch_add(1, Ordering::Relaxed);
                completing = Some(written);
            } else {
                // The commit came first.
                log.refuse(0, None);
            }
        }
    }
    let (batch, first, upto) = {
        let mut queue = log.queue.lock();
        let first = queue.taken + 1;
        queue.taken += queue.fresh();
        (std::mem::take(&mut queue.waiting), first, queue.taken)
    };
    let mut wrote = false;
    if first <= upto {
        let served = upto - first + 1;
        counters.batches.fetch_add(1, Ordering::Relaxed);
        counters.largest.fetch_max(served, Ordering::Relaxed);
        match write_batch(core, txn, log, batch) {
            Ok((root, mut replaced)) => {
                wrote = true;
                if let Some(overtaken) = work.flushed.take() {
                    replaced.extend(overtaken.replaced);
                }
                work.flushed = Some(Written { root, upto, replaced });
            }
            Err(NotLogged::Commit(cause)) => log.refuse(first, Some(cause)),
            Err(NotLogged::Sealed) => log.refuse(first, None),
            Err(NotLogged::Fail(e)) => return Err(e),
        }
    }
    if completing.is_none() && !wrote {
        return Ok(());
    }
    if !fault!(core.options.tuning, LogNoFlush) {
        counters.flushes.fetch_add(1, Ordering::Relaxed);
        core.flush()?;
    }
    if let Some(completed) = completing {
        log.content.lock().reuse(completed.replaced);
        let mut queue = log.queue.lock();
        queue.durable = queue.durable.max(completed.upto);
        let calls = queue.wake_served();
        drop(queue);
        calls.make();
    }
    Ok(())
}

/// Brings contributions into the log and writes the nodes that changed. Returns the log's root, and
/// the nodes that are not needed any more once a superblock leads to it.
fn write_batch(
    core: &Core,
    txn: &Arc<Txn>,
    log: &TxnLog,
    batch: Vec<Contribution>,
) -> Result<(Pointer, Vec<Logical>)> {
    let edition = {
        let mut content = log.content.lock();
        content.take_in(core, txn, batch)?;
        content.edition(core, txn)?
    };
    write_nodes(core, txn, edition.nodes)?;
    Ok((edition.root, edition.replaced))
}

fn write_nodes(core: &Core, txn: &Txn, mut out: Vec<Outgoing>) -> crate::error::Result<()> {
    core.log.nodes.fetch_add(out.len() as u64, Ordering::Relaxed);
    out.sort_unstable_by_key(|node| node.at);
    let nodes = out.into_iter().map(|n| writeout::LooseNode {
        at: n.at,
        bytes: n.bytes.into_vec(),
        tree: ObjectId::TREE_LOG,
        is_root: n.is_root,
    });
    writeout::write_loose(core, txn.generation, nodes.collect())
}

/// An `fsync` that the log could not do. The commit of a transaction will.
#[derive(Debug)]
pub struct Unlogged {
    generation: Generation,
    cause: Option<Cause>,
}

impl Unlogged {
    /// Waits for that commit.
    ///
    /// # Errors
    /// `ReadOnly` when writing has ended.
    pub(crate) fn commit(self, core: &Core) -> crate::error::Result<()> {
        match self.cause {
            Some(cause) => core.log.caused(cause),
            None => {
                core.log.sealed.fetch_add(1, Ordering::Relaxed);
            }
        }
        core.commit_of(self.generation)
    }
}

/// How an `fsync` ends if its caller has not waited for it.
#[derive(Debug)]
pub enum Synced {
    /// It is durable, or cannot become so.
    Done(crate::error::Result<()>),
    /// It needs a commit, and a thread has to wait for that.
    Commit(Unlogged),
}

/// Called once with the end of an `fsync`. It must not wait or call the engine.
pub type OnSynced = Box<dyn FnOnce(Synced) + Send>;

/// Makes an inode durable. Its data has been written back already.
///
/// # Errors
/// Reading or corruption; `ReadOnly` when writing has ended.
pub(crate) fn sync(core: &Core, inode: &Arc<Inode>) -> crate::error::Result<()> {
    let (txn, outcome) = begin(core, inode)?;
    let synced = match outcome {
        Outcome::Nothing => Synced::Done(Ok(())),
        Outcome::Ticket(ticket) => {
            ended(core, txn.generation, TxnLog::of(&txn).wait(core, &txn, ticket))
        }
        Outcome::Commit(cause) => Synced::Commit(Unlogged { generation: txn.generation, cause }),
    };
    match synced {
        Synced::Done(done) => done,
        Synced::Commit(unlogged) => unlogged.commit(core),
    }
}

/// As [`sync`], but does not wait for other threads: the call is told the result, now or later.
/// This thread may lead meanwhile, for as long as other callers have left calls behind, too.
pub(crate) fn sync_then(core: &Arc<Core>, inode: &Arc<Inode>, then: OnSynced) {
    let (txn, outcome) = match begin(core, inode) {
        Ok(begun) => begun,
        Err(e) => return then(Synced::Done(Err(e))),
    };
    let generation = txn.generation;
    match outcome {
        Outcome::Nothing => then(Synced::Done(Ok(()))),
        Outcome::Commit(cause) => then(Synced::Commit(Unlogged { generation, cause })),
        Outcome::Ticket(ticket) => {
            let counting = Arc::downgrade(core);
            let settled = move |outcome| {
                // The thread that settles the ticket holds the core.
                let Some(core) = counting.upgrade() else { return };
                then(ended(&core, generation, outcome));
            };
            TxnLog::of(&txn).call(core, &txn, ticket, Box::new(settled));
        }
    }
}

fn begin(core: &Core, inode: &Arc<Inode>) -> crate::error::Result<(Arc<Txn>, Outcome)> {
    core.log.fsyncs.fetch_add(1, Ordering::Relaxed);
    let (txn, outcome) = contribute(core, inode)?;
    if fault!(core.options.tuning, FsyncDoesNotWait) {
        return Ok((txn, Outcome::Nothing));
    }
    if matches!(outcome, Outcome::Nothing) {
        core.log.nothing.fetch_add(1, Ordering::Relaxed);
    }
    Ok((txn, outcome))
}

fn ended(
    core: &Core,
    generation: Generation,
    outcome: crate::error::Result<TicketOutcome>,
) -> Synced {
    match outcome {
        Ok(TicketOutcome::Durable) => {
            core.log.logged.fetch_add(1, Ordering::Relaxed);
            Synced::Done(Ok(()))
        }
        Ok(TicketOutcome::Commit(cause)) => Synced::Commit(Unlogged { generation, cause }),
        Err(e) => Synced::Done(Err(e)),
    }
}

enum Outcome {
    /// It is durable.
    Nothing,
    /// It is in the log, or will be with the next batches.
    Ticket(u64),
    /// The transaction has to be committed.
    Commit(Option<Cause>),
}

/// Collects what has changed of an inode and adds it to the log of the running transaction.
fn contribute(core: &Core, inode: &Arc<Inode>) -> crate::error::Result<(Arc<Txn>, Outcome)> {
    let tuning = &core.options.tuning;
    tuning.log_start.wait(core)?;
    // A second caller finds what the first one has collected.
    let mut last = inode.logged.lock();
    let pin = core.txns.pin_running()?;
    let txn = pin.txn.clone();
    match super::above::moved(core, &inode.subvol, &txn) {
        Ok(false) => {}
        Ok(true) => return Ok((txn, Outcome::Commit(Some(Cause::SubvolumeEntry)))),
        Err(NotLogged::Commit(cause)) => return Ok((txn, Outcome::Commit(Some(cause)))),
        Err(NotLogged::Sealed) => return Ok((txn, Outcome::Commit(None))),
        Err(NotLogged::Fail(e)) => return Err(e),
    }
    let moves = txn.moves.load(Ordering::Relaxed);
    let moved = moves > 0
        && last.as_ref().is_none_or(|l| l.generation != txn.generation || l.moves != moves);
    let (changed_in, unlogged, sealed) = {
        let mut state = inode.state.lock();
        let unlogged = moved || state.unlogged && state.last_change == txn.generation;
        // The inode has changed since it was logged, but in the transaction before this one. Only
        // that one's commit has the change.
        let sealed = state.unlogged && !unlogged;
        if unlogged {
            state.unlogged = false;
        }
        (state.last_change, unlogged, sealed)
    };
    if !unlogged {
        // A directory above it may have moved in the transaction that is being committed.
        let moved_before = core.txns.with_view(|view| {
            let sealed = view.sealed.as_ref()?;
            (sealed.moves.load(Ordering::Relaxed) > 0).then_some(sealed.generation)
        });
        drop(pin);
        if changed_in <= core.txns.published() && moves == 0 {
            if let Some(generation) = moved_before {
                core.txns.wait(generation)?;
            }
            *last = None;
            return Ok((txn, Outcome::Nothing));
        }
        if sealed {
            core.txns.wait(changed_in)?;
            return Ok((txn, Outcome::Nothing));
        }
        return Ok(match &*last {
            Some(last) if last.generation == changed_in || moves > 0 => match last.txn.upgrade() {
                Some(txn) => (txn, Outcome::Ticket(last.ticket)),
                // The transaction was published after the check above.
                None => (txn, Outcome::Nothing),
            },
            // The change was taken, but did not get into a log. A commit has it.
            _ if changed_in < txn.generation => {
                core.txns.wait(changed_in)?;
                (txn, Outcome::Nothing)
            }
            _ => (txn, Outcome::Commit(None)),
        });
    }
    let companions = {
        let mut state = inode.state.lock();
        if state.companions.0 == txn.generation {
            std::mem::take(&mut state.companions.1)
        } else {
            Vec::new()
        }
    };
    let nameless = inode.state.lock().item.nlink.get() == 0;
    // Of an inode without names only that fact is logged. Its changes stay, because it may still
    // get a name.
    let mut ranges = if nameless { Vec::new() } else { inode.changes.lock().take(txn.generation) };
    let item = inode.item_for_log(core);
    let size = item.as_ref().map_or(0, |item| ceil(item.size.get().min(MAX_FILE_SIZE)));
    // If the file grew since it was logged, the range behind its old end is a hole now, and must
    // not come back from the last commit.
    let before = last.as_ref().filter(|l| l.generation == txn.generation).map(|l| l.size);
    ranges.extend(
        before
            .filter(|before| *before < size && !fault!(tuning, LogNoHoles))
            .map(|before| (before, size)),
    );
    inode.keep_extents_for_log(txn.generation);
    let versions = Pair::of(core, &inode.subvol, &txn);
    drop(pin);
    let copied = match &versions {
        Ok(versions) => tuning.log_copies.copy(inode, &txn, versions),
        Err(_) => Ok(()),
    };
    let added = match (item, versions) {
        _ if tuning.no_log => Err(NotLogged::Commit(Cause::Off)),
        _ if inode.since >= txn.generation => Err(NotLogged::Commit(Cause::Forgotten)),
        (_, Err(stop)) => Err(stop),
        _ if copied.is_err() => copied.map(|()| None),
        // Deleted: a commit forgets the rest of it.
        (None, _) => Ok(None),
        (Some(item), Ok(versions)) => {
            collect(core, inode, &txn, item, ranges, &versions).and_then(|contribution| {
                let contribution = Contribution { companions, ..contribution };
                tuning.log_entry.bring(core, &txn, contribution)
            })
        }
    };
    let outcome = match added {
        Ok(Some(ticket)) => {
            let generation = txn.generation;
            *last = Some(Logged { generation, txn: Arc::downgrade(&txn), ticket, moves, size });
            return Ok((txn, Outcome::Ticket(ticket)));
        }
        Ok(None) => {
            Outcome::Commit(TxnLog::of(&txn).queue.lock().refused.and_then(|(_, cause)| cause))
        }
        Err(NotLogged::Commit(cause)) => Outcome::Commit(Some(cause)),
        Err(NotLogged::Sealed) => Outcome::Commit(None),
        Err(NotLogged::Fail(e)) => {
            inode.state.lock().unlogged = true;
            return Err(e);
        }
    };
    // The change was taken, but is in no log. Any `fsync` before the commit has to wait for the
    // commit, too.
    *last = None;
    Ok((txn, outcome))
}

/// A leader fails while others wait with their contributions. Then one of them leads.
#[cfg(test)]
pub(crate) fn lead_after_giving_up(core: &Core, inodes: &[Arc<Inode>]) {
    let txn = core.txns.running();
    for inode in inodes {
        assert!(matches!(contribute(core, inode), Ok((_, Outcome::Ticket(_)))));
    }
    TxnLog::of(&txn).refuse(1, Some(Cause::TooMuch));
    step(core, &txn, TxnLog::of(&txn)).expect("nothing is done");
}
