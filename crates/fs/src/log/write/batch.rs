//! Who writes the log, for whom, and when it is durable.
//!
//! Each transaction has a [`TxnLog`]. Who calls `fsync` adds a contribution to it, gets a ticket, and waits; among those
//! who wait there is always one who leads, one step at a time. A step
//!
//! 1. writes the superblock for the nodes that the last flush has made durable,
//! 2. takes all contributions that have gathered, edits the log, and writes its nodes,
//! 3. flushes, which makes both durable; those that the superblock was for are done.
//!
//! So with one caller there are two flushes, as many as it takes, and under load one for each batch. What the leader holds while it
//! waits for the device is its own: nobody needs it to add a contribution.
//!
//! A log belongs to one transaction and hangs on the superblock of the one before. While that one is still being written,
//! nodes are written all the same, and only the superblock waits. When the log's own transaction is sealed, no more
//! is taken in ([`TxnLog::close`]); what is on its way may still come to its end before the commit's superblock, never after
//! it; whoever is left waits for the commit. Once that is durable, the log's space is free ([`TxnLog::retire`]).

use super::collect::{Contribution, Pair, collect};
use super::content::Content;
use super::tree::Outgoing;
use super::{Cause, Result, Stop};
use crate::core::Core;
use crate::error::Error;
use crate::file::{MAX_FILE_SIZE, ceil};
use crate::inode::Inode;
use crate::space::Run;
use crate::transaction::{Txn, writeout};
use crate::tree::Pointer;
use larder_format::{Generation, Logical, ObjectId};
use larder_volume::superblock::{SuperCopies, write_superblocks};
use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use zerocopy::little_endian::U64;

/// What `fsync` has done since the file system was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct LogStats {
    /// Calls, those that found everything durable, and those that the log served.
    pub fsyncs: u64,
    pub fsyncs_with_nothing_to_do: u64,
    pub fsyncs_logged: u64,
    /// Those that had to be commits, by cause: in a subvolume that is not in the last commit, entries of subvolumes, chunks
    /// that are not in the last commit, no space, a feature that the superblock lacks, a directory that left memory, too much to log, the log switched off,
    /// and too late for the log of a transaction that was being sealed.
    pub commits_new_subvolume: u64,
    pub commits_subvolume_entry: u64,
    pub commits_new_chunk: u64,
    pub commits_no_space: u64,
    pub commits_feature: u64,
    pub commits_forgotten: u64,
    pub commits_too_much: u64,
    pub commits_off: u64,
    pub commits_sealed: u64,
    /// Items of checksums that came to logs; ranges of theirs that were searched for what other files had brought, which is done
    /// for files that share extents since the last commit; ranges in which there was something. Nothing is ever deleted for
    /// them, or locked.
    pub csum_items: u64,
    pub csum_ranges_searched: u64,
    pub csum_ranges_present: u64,
    /// Batches, the most callers that one has served, superblocks and nodes written, and flushes.
    pub batches: u64,
    pub largest_batch: u64,
    pub superblocks: u64,
    pub nodes: u64,
    pub flushes: u64,
}

/// The counters behind [`LogStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    fsyncs: AtomicU64,
    nothing: AtomicU64,
    logged: AtomicU64,
    causes: [AtomicU64; Cause::ALL.len()],
    sealed: AtomicU64,
    pub(super) csum_items: AtomicU64,
    pub(super) csums_searched: AtomicU64,
    pub(super) csums_present: AtomicU64,
    batches: AtomicU64,
    largest: AtomicU64,
    superblocks: AtomicU64,
    nodes: AtomicU64,
    flushes: AtomicU64,
}

impl Counters {
    fn caused(&self, cause: Cause) {
        self.causes[cause as usize].fetch_add(1, Ordering::Relaxed);
    }
    /// What they say now.
    pub(crate) fn stats(&self) -> LogStats {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let cause = |cause: Cause| get(&self.causes[cause as usize]);
        LogStats {
            fsyncs: get(&self.fsyncs),
            fsyncs_with_nothing_to_do: get(&self.nothing),
            fsyncs_logged: get(&self.logged),
            commits_new_subvolume: cause(Cause::NewSubvolume),
            commits_subvolume_entry: cause(Cause::SubvolumeEntry),
            commits_new_chunk: cause(Cause::NewChunk),
            commits_no_space: cause(Cause::NoSpace),
            commits_feature: cause(Cause::Feature),
            commits_forgotten: cause(Cause::Forgotten),
            commits_too_much: cause(Cause::TooMuch),
            commits_off: cause(Cause::Off),
            commits_sealed: get(&self.sealed),
            csum_items: get(&self.csum_items),
            csum_ranges_searched: get(&self.csums_searched),
            csum_ranges_present: get(&self.csums_present),
            batches: get(&self.batches),
            largest_batch: get(&self.largest),
            superblocks: get(&self.superblocks),
            nodes: get(&self.nodes),
            flushes: get(&self.flushes),
        }
    }
}

/// Written nodes that a superblock is to lead to.
#[derive(Debug)]
struct Written {
    root: Pointer,
    /// Tickets that it serves: all up to this.
    upto: u64,
    /// Nodes that nobody needs once it is durable.
    replaced: Vec<larder_format::Logical>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Contributions that nobody has taken, in the order of their tickets; those are not among them that their callers have brought in.
    waiting: Vec<Contribution>,
    /// The last ticket given out, and the last that a batch has taken.
    given: u64,
    taken: u64,
    /// All tickets up to this are durable.
    durable: u64,
    /// All tickets from this on have to wait for the commit, and why, if not because it is on its way.
    refused: Option<(u64, Option<Cause>)>,
    /// Somebody leads.
    led: bool,
    /// The transaction is sealed.
    closed: bool,
    /// Who waits, by ticket; and a number, because several may wait for one.
    waiters: BTreeMap<(u64, u64), Arc<Condvar>>,
    next_waiter: u64,
}

impl Queue {
    /// Tickets that the next batch will take: none once the log was given up, when what it has may be half of something.
    fn fresh(&self) -> u64 {
        if self.closed || self.refused.is_some() { 0 } else { self.given - self.taken }
    }
    /// Everybody has to look again.
    fn wake_all(&self) {
        self.waiters.values().for_each(|waiter| {
            waiter.notify_one();
        });
    }
    /// Wakes those whose ticket is durable by now. Nobody else: where a hundred wait, each batch serves a few.
    fn wake_served(&self) {
        self.waiters.range(..=(self.durable, u64::MAX)).for_each(|(_, waiter)| {
            waiter.notify_one();
        });
    }
    /// Nobody leads: the first who is not served has to. Whoever was woken for it and leaves passes it on.
    fn wake_leader(&self) {
        if !self.led
            && let Some((_, waiter)) = self.waiters.range((self.durable + 1, 0)..).next()
        {
            waiter.notify_one();
        }
    }
}

/// What the leader works on.
#[derive(Debug, Default)]
struct Work {
    /// Nodes that are durable; their superblock is not written yet.
    flushed: Option<Written>,
    /// The transaction is published: nothing may be written any more.
    retired: bool,
}

/// The log of a transaction.
#[derive(Debug, Default)]
pub(crate) struct TxnLog {
    queue: Mutex<Queue>,
    work: Mutex<Work>,
    /// Behind `work`. Nobody waits for a device who holds it.
    content: Mutex<Content>,
    /// Has anything ever been taken in?
    used: AtomicBool,
}

/// What becomes of a ticket.
enum Verdict {
    Durable,
    Commit,
}

impl TxnLog {
    /// Takes a contribution in; `None` where the transaction is sealed or the log was given up.
    fn add(&self, contribution: Contribution) -> Option<u64> {
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
    /// Brings a contribution into the log in its caller, without a batch: for [`crate::Tuning::log_alone`].
    fn add_alone(&self, core: &Core, txn: &Arc<Txn>, contribution: Contribution) -> Result<Option<u64>> {
        self.used.store(true, Ordering::Relaxed);
        let mut content = self.content.lock();
        if let Err(stop) = content.take_in(core, txn, vec![contribution]) {
            // Half of it may be in.
            let from = self.queue.lock().taken + 1;
            self.refuse(from, if let Stop::Commit(cause) = stop { Some(cause) } else { None });
            return Err(stop);
        }
        Ok(self.ticket(None))
    }
    /// The transaction is being sealed: nothing more is taken in.
    pub(crate) fn close(&self) {
        let mut queue = self.queue.lock();
        queue.closed = true;
        let left = std::mem::take(&mut queue.waiting);
        queue.wake_all();
        drop(queue);
        // Inodes may go with them.
        drop(left);
    }
    /// The superblock without this log is durable: its space, pinned. Waits for a step of the leader at most.
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
    /// From the next ticket on all have to commit.
    fn refuse(&self, from: u64, cause: Option<Cause>) {
        let mut queue = self.queue.lock();
        // Several may find that it cannot go on: the first ticket of all that cannot counts.
        if queue.refused.is_none_or(|(first, _)| from < first) {
            queue.refused = Some((from, cause));
        }
        queue.wake_all();
    }

    /// Waits until a ticket is durable or known not to become so by the log; leads where nobody does.
    fn wait(&self, core: &Core, txn: &Arc<Txn>, ticket: u64) -> crate::error::Result<Verdict> {
        let mut queue = self.queue.lock();
        loop {
            let verdict = if queue.durable >= ticket {
                Some(Ok(Verdict::Durable))
            } else if queue.refused.is_some_and(|(from, _)| from <= ticket)
                || queue.closed && queue.taken < ticket
            {
                Some(Ok(Verdict::Commit))
            } else {
                core.txns.failure().map(|why| Err(Error::ReadOnly(Some(why))))
            };
            if let Some(verdict) = verdict {
                queue.wake_leader();
                return verdict;
            }
            if queue.led {
                let (number, me) = (queue.next_waiter, Arc::new(Condvar::new()));
                queue.next_waiter += 1;
                queue.waiters.insert((ticket, number), me.clone());
                me.wait(&mut queue);
                queue.waiters.remove(&(ticket, number));
                continue;
            }
            queue.led = true;
            drop(queue);
            let lead = Lead { log: self, core };
            let done = step(core, txn, self);
            drop(lead);
            done?;
            queue = self.queue.lock();
        }
    }
}

/// Somebody leads; if it panics, everybody learns of it.
struct Lead<'a> {
    log: &'a TxnLog,
    core: &'a Core,
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.core.txns.fail("writing the log hit a broken invariant");
        }
        let mut queue = self.log.queue.lock();
        queue.led = false;
        if self.core.txns.failure().is_some() { queue.wake_all() } else { queue.wake_leader() }
    }
}

/// One step of the leader.
///
/// # Errors
/// The device failed, or what was read is corrupt: writing has ended then.
fn step(core: &Core, txn: &Arc<Txn>, log: &TxnLog) -> crate::error::Result<()> {
    let mut work = log.work.lock();
    if work.retired {
        log.refuse(0, None);
        return Ok(());
    }
    let outcome = step_with(core, txn, log, &mut work);
    if let Err(e) = &outcome {
        // Part of it may be on the device: nobody can say any more what the log has.
        core.txns.fail(&format!("the log could not be written: {e}"));
    }
    outcome
}

fn step_with(core: &Core, txn: &Arc<Txn>, log: &TxnLog, work: &mut Work) -> crate::error::Result<()> {
    let counters = &core.log;
    let before = Generation(txn.generation.0 - 1);
    let more = {
        let queue = log.queue.lock();
        queue.fresh() > 0
    };
    // What gathers while the superblock has to wait is written meanwhile.
    let waits = core.txns.published() < before && !core.options.tuning.break_log_early_super;
    let mut landing = None;
    if let Some(written) = work.flushed.take() {
        if waits && more {
            work.flushed = Some(written);
        } else {
            if !core.options.tuning.break_log_early_super {
                core.txns.wait(before)?;
            }
            if write_superblock(core, txn, &written.root)? {
                landing = Some(written);
            } else {
                // The commit was faster.
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
            Err(Stop::Commit(cause)) => log.refuse(first, Some(cause)),
            Err(Stop::Sealed) => log.refuse(first, None),
            Err(Stop::Fail(e)) => return Err(e),
        }
    }
    if landing.is_none() && !wrote {
        return Ok(());
    }
    if !core.options.tuning.break_log_no_flush {
        counters.flushes.fetch_add(1, Ordering::Relaxed);
        core.volume.flush()?;
    }
    if let Some(landed) = landing {
        log.content.lock().reuse(landed.replaced);
        let mut queue = log.queue.lock();
        queue.durable = queue.durable.max(landed.upto);
        queue.wake_served();
    }
    Ok(())
}

/// Writes the superblock of the last commit with the log on it; false where the commit of the log's own transaction
/// has written its superblock already.
fn write_superblock(core: &Core, txn: &Txn, root: &Pointer) -> crate::error::Result<bool> {
    let written = core.superblock_written.lock();
    if written.generation >= txn.generation {
        return Ok(false);
    }
    let mut sb = written.superblock.clone();
    let follows = sb.generation.get() + 1 == txn.generation.0;
    assert!(follows || core.options.tuning.break_log_early_super, "a log hangs on the superblock before it");
    sb.log_root = U64::new(root.at.0);
    sb.log_root_level = root.level;
    for (_, device) in core.volume.devices() {
        write_superblocks(device.as_ref(), &sb, SuperCopies::Primary)?;
    }
    core.log.superblocks.fetch_add(1, Ordering::Relaxed);
    Ok(true)
}

/// Brings contributions into the log and writes what has changed of it: its root, and the nodes that nobody needs once a
/// superblock leads there.
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

/// What an inode remembers of its last `fsync`.
#[derive(Debug)]
pub(crate) struct Logged {
    /// The transaction whose log has it.
    generation: Generation,
    txn: Weak<Txn>,
    ticket: u64,
    /// How many directories had moved then.
    moves: u64,
    /// The size that it has there, in whole sectors: of what lies behind, the log says nothing but what is reserved.
    size: u64,
}

/// Makes an inode durable whose data has been written back.
///
/// # Errors
/// Reading or corruption; `ReadOnly` when writing has ended.
pub(crate) fn sync(core: &Core, inode: &Arc<Inode>) -> crate::error::Result<()> {
    let counters = &core.log;
    counters.fsyncs.fetch_add(1, Ordering::Relaxed);
    let (txn, outcome) = contribute(core, inode)?;
    if core.options.tuning.break_fsync_does_not_wait {
        return Ok(());
    }
    let cause = match outcome {
        Outcome::Nothing => {
            counters.nothing.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        Outcome::Ticket(ticket) => match txn.log.wait(core, &txn, ticket)? {
            Verdict::Durable => {
                counters.logged.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            Verdict::Commit => txn.log.queue.lock().refused.and_then(|(_, cause)| cause),
        },
        Outcome::Commit(cause) => cause,
    };
    match cause {
        Some(cause) => counters.caused(cause),
        None => {
            counters.sealed.fetch_add(1, Ordering::Relaxed);
        }
    }
    core.commit_of(txn.generation)
}

enum Outcome {
    /// It is durable.
    Nothing,
    /// It is in the log, or on its way.
    Ticket(u64),
    /// The transaction has to be committed.
    Commit(Option<Cause>),
}

/// Collects what has changed of an inode and adds it to the log of the running transaction.
fn contribute(core: &Core, inode: &Arc<Inode>) -> crate::error::Result<(Arc<Txn>, Outcome)> {
    let tuning = &core.options.tuning;
    if tuning.log_waits_for_commit
        && let Some(sealed) = core.txns.with_view(|view| view.sealed.as_ref().map(|txn| txn.generation))
    {
        core.txns.wait(sealed)?;
    }
    // Who comes second finds what the first has collected.
    let mut last = inode.logged.lock();
    let pin = core.txns.pin_running()?;
    let txn = pin.txn.clone();
    match super::above::moved(core, &inode.subvol, &txn) {
        Ok(false) => {}
        Ok(true) => return Ok((txn, Outcome::Commit(Some(Cause::SubvolumeEntry)))),
        Err(Stop::Commit(cause)) => return Ok((txn, Outcome::Commit(Some(cause)))),
        Err(Stop::Sealed) => return Ok((txn, Outcome::Commit(None))),
        Err(Stop::Fail(e)) => return Err(e),
    }
    let moves = txn.moves.load(Ordering::Relaxed);
    let moved = moves > 0 && last.as_ref().is_none_or(|l| l.generation != txn.generation || l.moves != moves);
    let (changed_in, unlogged, sealed) = {
        let mut state = inode.state.lock();
        let unlogged = moved || state.unlogged && state.last_change == txn.generation;
        // Changed since it was logged, in the transaction before this one: only that one's commit has it.
        let sealed = state.unlogged && !unlogged;
        if unlogged {
            state.unlogged = false;
        }
        (state.last_change, unlogged, sealed)
    };
    if !unlogged {
        // A directory above it may have moved in the transaction whose commit is on its way.
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
                // Published since we looked.
                None => (txn, Outcome::Nothing),
            },
            // It was taken, and did not get into a log: a commit has it.
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
    // Of what has no name nothing is logged but that; it may still get one.
    let mut ranges = if nameless { Vec::new() } else { inode.changes.lock().take(txn.generation) };
    let item = inode.item_for_log(core);
    let size = item.as_ref().map_or(0, |item| ceil(item.size.get().min(MAX_FILE_SIZE)));
    // What was cut off when it was logged is a hole now, and must not come back from the last commit.
    let before = last.as_ref().filter(|l| l.generation == txn.generation).map(|l| l.size);
    ranges.extend(
        before.filter(|before| *before < size && !tuning.break_log_no_holes).map(|before| (before, size)),
    );
    inode.keep_extents_for_log(txn.generation);
    let versions = Pair::of(core, &inode.subvol, &txn);
    drop(pin);
    let copied = match &versions {
        Ok(versions) if tuning.log_copies_leaves_locked => versions.copy_leaves_locked(inode, txn.generation),
        _ => Ok(()),
    };
    let added = match (item, versions) {
        _ if tuning.no_log => Err(Stop::Commit(Cause::Off)),
        _ if inode.since >= txn.generation => Err(Stop::Commit(Cause::Forgotten)),
        (_, Err(stop)) => Err(stop),
        _ if copied.is_err() => copied.map(|()| None),
        // Deleted: a commit forgets the rest of it.
        (None, _) => Ok(None),
        (Some(item), Ok(versions)) => {
            collect(core, inode, &txn, item, ranges, &versions).and_then(|contribution| {
                let contribution = Contribution { companions, ..contribution };
                if tuning.log_alone {
                    txn.log.add_alone(core, &txn, contribution)
                } else {
                    Ok(txn.log.add(contribution))
                }
            })
        }
    };
    let outcome = match added {
        Ok(Some(ticket)) => {
            let generation = txn.generation;
            *last = Some(Logged { generation, txn: Arc::downgrade(&txn), ticket, moves, size });
            return Ok((txn, Outcome::Ticket(ticket)));
        }
        Ok(None) => Outcome::Commit(txn.log.queue.lock().refused.and_then(|(_, cause)| cause)),
        Err(Stop::Commit(cause)) => Outcome::Commit(Some(cause)),
        Err(Stop::Sealed) => Outcome::Commit(None),
        Err(Stop::Fail(e)) => {
            inode.state.lock().unlogged = true;
            return Err(e);
        }
    };
    // It was taken, and is nowhere: whoever asks before the commit has to wait for that as well.
    *last = None;
    Ok((txn, outcome))
}

/// A leader fails while others wait with what they have collected; then one of them leads.
#[cfg(test)]
pub(crate) fn lead_after_giving_up(core: &Core, inodes: &[Arc<Inode>]) {
    let txn = core.txns.running();
    for inode in inodes {
        assert!(matches!(contribute(core, inode), Ok((_, Outcome::Ticket(_)))));
    }
    txn.log.refuse(1, Some(Cause::TooMuch));
    step(core, &txn, &txn.log).expect("nothing is done");
}
