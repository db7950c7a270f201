//! How one thread writes the log for all callers, and when it is durable.
//!
//! Each transaction has a [`TxnLog`]. A caller of `fsync` adds a contribution to it, gets a ticket,
//! and leaves a completion behind ([`super::queue`]). There is always one leader. It goes step by
//! step. A step
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

use super::collect::Contribution;
use super::content::Content;
use super::queue::{Queue, TicketOutcome, settle};
use super::tree::Outgoing;
use super::{Cause, NotLogged, Result};
use crate::completion::Completion;
use crate::engine::Core;
use crate::error::Error;
use crate::lock::{self, Mutex};
use crate::space::Run;
use crate::transaction::{Gathered, Txn, writeout};
use crate::tree::Pointer;
use crate::watch::Logging;
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
    replaced: Vec<Logical>,
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
            let cause = if let NotLogged::Commit(cause) = stop { Some(cause) } else { None };
            self.refuse(core, txn, from, cause);
            return Err(stop);
        }
        Ok(self.ticket(None))
    }
    /// The transaction is being sealed: the log takes no more contributions.
    pub(crate) fn close(&self, core: &Core, txn: &Txn) {
        let mut queue = self.queue.lock();
        queue.closed = true;
        let left = std::mem::take(&mut queue.waiting);
        let settled = queue.take_settled();
        drop(queue);
        settled.tell(core, txn.generation);
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
    fn refuse(&self, core: &Core, txn: &Txn, from: u64, cause: Option<Cause>) {
        let mut queue = self.queue.lock();
        // Several threads may find that the log cannot go on: the lowest of their tickets counts.
        if queue.refused.is_none_or(|(first, _)| from < first) {
            queue.refused = Some((from, cause));
        }
        let settled = queue.take_settled();
        drop(queue);
        settled.tell(core, txn.generation);
    }
    /// Why the log was given up. `None` also if it is merely closed.
    pub(super) fn given_up_for(&self) -> Option<Cause> {
        self.queue.lock().refused.and_then(|(_, cause)| cause)
    }

    /// Completes `done` when a ticket is durable by the log, or by the commit that has to do it. If
    /// no thread leads, this thread leads, for as long as other callers need it.
    pub(super) fn when_durable(
        &self,
        core: &Arc<Core>,
        txn: &Arc<Txn>,
        ticket: u64,
        done: Completion,
    ) {
        let mut queue = self.queue.lock();
        if let Some(outcome) = known(core, &queue, ticket) {
            drop(queue);
            return settle(core, txn.generation, done, outcome);
        }
        queue.enter(ticket, done);
        let leads = !std::mem::replace(&mut queue.led, true);
        drop(queue);
        if leads {
            lead(core, txn, ticket);
        }
    }
}

/// The outcome of a ticket, as far as it is known. It is known, too, if writing has ended.
fn known(core: &Core, queue: &Queue, ticket: u64) -> Option<crate::error::Result<TicketOutcome>> {
    let outcome = queue.outcome(ticket).map(Ok);
    outcome.or_else(|| core.txns.failure().map(|why| Err(Error::ReadOnly(Some(why)))))
}

/// Leads until no caller waits any more. The caller with the ticket `own` may be done before that.
/// Then another waiter's parked thread, if there is one, goes on in its place.
fn lead(core: &Arc<Core>, txn: &Arc<Txn>, own: u64) {
    let _logging = Logging::begin();
    let log = TxnLog::of(txn);
    let mut lead = Lead { log, core, txn, over: false };
    while !lead.over {
        // All waiters learn of a failure.
        if step(core, txn, log).is_err() || core.txns.failure().is_some() {
            return;
        }
        let mut queue = log.queue.lock();
        if !queue.has_waiters() {
            queue.led = false;
            lead.over = true;
        } else if queue.outcome(own).is_some() {
            lead.over = queue.lend(|ticket| {
                let (core, txn) = (Arc::clone(core), Arc::clone(txn));
                move || self::lead(&core, &txn, ticket)
            });
        }
    }
}

/// A thread leads. If it panics or fails, all waiters learn of that.
struct Lead<'a> {
    log: &'a TxnLog,
    core: &'a Core,
    txn: &'a Txn,
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
        let all = queue.take_all(&why);
        drop(queue);
        all.tell(self.core, self.txn.generation);
    }
}

/// One step of the leader.
///
/// # Errors
/// The device failed, or what was read is corrupt. Writing has ended then.
fn step(core: &Core, txn: &Arc<Txn>, log: &TxnLog) -> crate::error::Result<()> {
    let mut work = log.work.lock();
    if work.retired {
        log.refuse(core, txn, 0, None);
        return Ok(());
    }
    let outcome = step_with(core, txn, log, &mut work);
    if let Err(e) = &outcome {
        // A part of it may be on the device, so what the log has there is not known.
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
    let completing = write_superblock(core, txn, log, work)?;
    let wrote = write_gathered(core, txn, log, work)?;
    if completing.is_none() && !wrote {
        return Ok(());
    }
    if !fault!(core.options.tuning, LogNoFlush) {
        core.log.flushes.fetch_add(1, Ordering::Relaxed);
        core.flush()?;
    }
    if let Some(completed) = completing {
        log.completed(core, txn, completed);
    }
    Ok(())
}

/// Writes the superblock for the nodes that are durable, if there are any. Returns what the next
/// flush completes by that.
///
/// This superblock comes after that of the commit before. While that commit is still under way,
/// contributions that have gathered go first.
fn write_superblock(
    core: &Core,
    txn: &Txn,
    log: &TxnLog,
    work: &mut Work,
) -> crate::error::Result<Option<Written>> {
    let before = Generation(txn.generation.0 - 1);
    let early = fault!(core.options.tuning, LogEarlySuper);
    let more = log.queue.lock().fresh() > 0;
    if more && !early && core.txns.published() < before {
        return Ok(None);
    }
    let Some(written) = work.flushed.take() else { return Ok(None) };
    if !early {
        core.txns.wait(before)?;
    }
    // A device has failed since the last commit. It would look as good as one that only a power cut
    // has kept from its superblock, so a commit has to note it.
    let unnoted = core.volume.errors_have_changed() && !core.volume.failed().is_empty();
    if !unnoted && core.write_log_superblock(txn.generation, &written.root)? {
        core.log.superblocks.fetch_add(1, Ordering::Relaxed);
        return Ok(Some(written));
    }
    // The transaction's own commit came first, or has to.
    log.refuse(core, txn, 0, None);
    Ok(None)
}

/// Takes the contributions that have gathered, and writes the nodes that change by them. False if
/// nothing was written.
fn write_gathered(
    core: &Core,
    txn: &Arc<Txn>,
    log: &TxnLog,
    work: &mut Work,
) -> crate::error::Result<bool> {
    let (batch, first, upto) = {
        let mut queue = log.queue.lock();
        let first = queue.taken + 1;
        queue.taken += queue.fresh();
        (std::mem::take(&mut queue.waiting), first, queue.taken)
    };
    if first > upto {
        return Ok(false);
    }
    core.log.batches.fetch_add(1, Ordering::Relaxed);
    core.log.largest.fetch_max(upto - first + 1, Ordering::Relaxed);
    let cause = match write_batch(core, txn, log, batch) {
        Ok((root, mut replaced)) => {
            if let Some(overtaken) = work.flushed.take() {
                replaced.extend(overtaken.replaced);
            }
            work.flushed = Some(Written { root, upto, replaced });
            return Ok(true);
        }
        Err(NotLogged::Commit(cause)) => Some(cause),
        Err(NotLogged::Sealed) => None,
        Err(NotLogged::Fail(e)) => return Err(e),
    };
    log.refuse(core, txn, first, cause);
    Ok(false)
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

impl TxnLog {
    /// A superblock that leads to these nodes is durable.
    fn completed(&self, core: &Core, txn: &Txn, completed: Written) {
        self.content.lock().reuse(core, completed.replaced);
        let mut queue = self.queue.lock();
        queue.durable = queue.durable.max(completed.upto);
        let served = queue.take_served();
        drop(queue);
        served.tell(core, txn.generation);
    }
}

/// A leader fails while others wait with their contributions. Then one of them leads.
#[cfg(test)]
pub(crate) fn lead_after_giving_up(core: &Core, inodes: &[Arc<crate::engine::Inode>]) {
    use super::contribute::{Awaited, contribute};
    let txn = core.txns.running();
    for inode in inodes {
        assert!(matches!(contribute(core, inode), Ok(Awaited::Ticket(..))));
    }
    TxnLog::of(&txn).refuse(core, &txn, 1, Some(Cause::TooMuch));
    step(core, &txn, TxnLog::of(&txn)).expect("nothing is done");
}
