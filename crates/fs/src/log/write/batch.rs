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

use super::blocks::Blocks;
use super::collect::{Contribution, Pair, Window, collect, sum_items, sums_end};
use super::names::{Names, SubvolLog, items_of};
use super::tree::{LogTree, Outgoing};
use super::{Cause, Result, Stop};
use crate::core::Core;
use crate::error::Error;
use crate::inode::Inode;
use crate::root::Subvolume;
use crate::space::Run;
use crate::transaction::{Txn, writeout};
use crate::tree::Pointer;
use larder_format::items::keys::{csum_key, extent_data_key, inode_key};
use larder_format::items::{FileExtent, RootItem};
use larder_format::{FileOffset, Generation, Key, KeyType, Logical, ObjectId, TreeId};
use larder_volume::superblock::{SuperCopies, write_superblocks};
use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use zerocopy::IntoBytes;
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
    csum_items: AtomicU64,
    csums_searched: AtomicU64,
    csums_present: AtomicU64,
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

/// Nodes of a log at most: they stay in memory until the commit.
const MOST_NODES: usize = 4096;

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
    /// Contributions that nobody has taken, in the order of their tickets.
    waiting: Vec<Contribution>,
    /// The last ticket given out, and the last whose contribution was taken.
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
    subvols: BTreeMap<TreeId, (Arc<Subvolume>, SubvolLog)>,
    roots: Option<LogTree>,
    blocks: Blocks,
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
        let mut queue = self.queue.lock();
        if queue.closed || queue.refused.is_some() {
            return None;
        }
        self.used.store(true, Ordering::Relaxed);
        queue.given += 1;
        queue.waiting.push(contribution);
        Some(queue.given)
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
        work.subvols.clear();
        work.roots = None;
        work.blocks.retire(core)
    }
    /// From the next ticket on all have to commit.
    fn refuse(&self, from: u64, cause: Option<Cause>) {
        let mut queue = self.queue.lock();
        queue.refused.get_or_insert((from, cause));
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
        !queue.closed && !queue.waiting.is_empty()
    };
    // What gathers while the superblock has to wait is written meanwhile.
    let waits = core.txns.published() < before;
    let mut landing = None;
    if let Some(written) = work.flushed.take() {
        if waits && more {
            work.flushed = Some(written);
        } else {
            core.txns.wait(before)?;
            if write_superblock(core, txn, &written.root)? {
                landing = Some(written);
            } else {
                // The commit was faster.
                log.refuse(0, None);
            }
        }
    }
    let (batch, upto) = {
        let mut queue = log.queue.lock();
        let batch = std::mem::take(&mut queue.waiting);
        if !batch.is_empty() {
            queue.taken = queue.given;
        }
        (batch, queue.taken)
    };
    let mut wrote = false;
    if !batch.is_empty() {
        counters.batches.fetch_add(1, Ordering::Relaxed);
        counters.largest.fetch_max(batch.len() as u64, Ordering::Relaxed);
        let first = upto - batch.len() as u64 + 1;
        match write_batch(core, txn, work, batch) {
            Ok(root) => {
                wrote = true;
                let mut replaced = work.blocks.take_replaced();
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
        work.blocks.reuse(landed.replaced);
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
    assert_eq!(sb.generation.get() + 1, txn.generation.0, "a log hangs on the superblock before it");
    sb.log_root = U64::new(root.at.0);
    sb.log_root_level = root.level;
    for (_, device) in core.volume.devices() {
        write_superblocks(device.as_ref(), &sb, SuperCopies::Primary)?;
    }
    core.log.superblocks.fetch_add(1, Ordering::Relaxed);
    Ok(true)
}

/// Brings contributions into the log and writes what changed of it; its root.
fn write_batch(core: &Core, txn: &Arc<Txn>, work: &mut Work, batch: Vec<Contribution>) -> Result<Pointer> {
    let mut by_subvol: BTreeMap<TreeId, Vec<Contribution>> = BTreeMap::new();
    for contribution in batch {
        by_subvol.entry(contribution.inode.id.subvol).or_default().push(contribution);
    }
    for (id, contributions) in by_subvol {
        let subvol = contributions[0].inode.subvol.clone();
        if subvol.is_dead() {
            continue;
        }
        let versions = {
            // Versions of the log's own transaction: what a later one has changed belongs to another log.
            let pin = core.txns.pin_running()?;
            if pin.txn.generation != txn.generation {
                return Err(Stop::Sealed);
            }
            Pair::of(core, &subvol, txn)?
        };
        work.blocks.overwrites = core.options.tuning.break_log_overwrites;
        let (_, log) = work.subvols.entry(id).or_insert_with(|| (subvol.clone(), SubvolLog::new(core)));
        merge(core, &subvol, &versions, log, &mut work.blocks, contributions)?;
    }
    if work.blocks.len() > MOST_NODES {
        return Err(Stop::Commit(Cause::TooMuch));
    }
    let mut out = Vec::new();
    let roots = work.roots.get_or_insert_with(|| LogTree::new(core.nodesize()));
    for (id, (_, log)) in &mut work.subvols {
        if log.tree.is_empty() {
            continue;
        }
        let root = log.tree.write(core, &mut work.blocks, txn.generation, &mut out)?;
        let mut item = RootItem { bytenr: U64::new(root.at.0), level: root.level, ..RootItem::default() };
        item.set_generation(txn.generation);
        item.refs = 1.into();
        let key = Key::new(ObjectId::TREE_LOG, KeyType::ROOT_ITEM, id.0);
        roots.put(&mut work.blocks, &key, item.as_bytes())?;
    }
    let root = roots.write(core, &mut work.blocks, txn.generation, &mut out)?;
    write_nodes(core, txn, out)?;
    Ok(root)
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

/// Brings the contributions of one subvolume into its log, in the order in which they came.
fn merge(
    core: &Core,
    subvol: &Subvolume,
    versions: &Pair,
    log: &mut SubvolLog,
    blocks: &mut Blocks,
    contributions: Vec<Contribution>,
) -> Result<()> {
    // Inodes that lost their last name meanwhile have nothing in the log.
    let mut named = Vec::new();
    {
        let mut names = Names::new(core, subvol, &versions.base, &versions.now, log, blocks);
        for contribution in contributions {
            let (ino, dir) = (contribution.inode.object(), contribution.inode.is_dir());
            if names.log(ino, &contribution.item, dir, &contribution.companions)? {
                named.push(contribution);
            }
        }
    }
    for contribution in named {
        let ino = contribution.inode.object();
        if log.tree.get(&inode_key(ino)).is_none() {
            continue;
        }
        for window in &contribution.windows {
            overlay(log, blocks, ino, window)?;
        }
        for (at, sums) in &contribution.sums {
            for (key, data) in sum_items(core, *at, sums) {
                put_sums(core, log, blocks, key, &data, contribution.shares)?;
            }
        }
    }
    Ok(())
}

/// Adds an item of checksums. Where the file shares extents, sectors that the log has checksums of already are left out.
fn put_sums(
    core: &Core,
    log: &mut SubvolLog,
    blocks: &mut Blocks,
    key: Key,
    data: &[u8],
    shares: bool,
) -> Result<()> {
    core.log.csum_items.fetch_add(1, Ordering::Relaxed);
    let end = sums_end(core, Logical(key.offset), data);
    let there = |log: &SubvolLog| {
        let last = csum_key(Logical(end.0 - 1));
        let first = log.tree.at_or_before(&csum_key(Logical(0)), &key).map_or(key, |(key, _)| key);
        log.tree
            .range(first..=last)
            .map(|(k, d)| (k.offset, sums_end(core, Logical(k.offset), d).0))
            .filter(|(_, to)| *to > key.offset)
            .collect::<Vec<_>>()
    };
    if !shares {
        debug_assert!(
            there(log).iter().all(|(from, _)| *from == key.offset),
            "checksums of a log overlap although nothing is shared"
        );
        return log.tree.put(blocks, &key, data);
    }
    core.log.csums_searched.fetch_add(1, Ordering::Relaxed);
    let there = there(log);
    if !there.is_empty() {
        core.log.csums_present.fetch_add(1, Ordering::Relaxed);
    }
    let bytes = |at: u64| (at - key.offset) as usize / larder_format::SECTOR_SIZE as usize * core.csum.size();
    let mut at = key.offset;
    for (from, to) in there.into_iter().chain([(end.0, end.0)]) {
        if at < from {
            log.tree.put(blocks, &csum_key(Logical(at)), &data[bytes(at)..bytes(from)])?;
        }
        at = at.max(to);
    }
    Ok(())
}

/// Replaces what the log has of a range of a file.
fn overlay(log: &mut SubvolLog, blocks: &mut Blocks, ino: ObjectId, window: &Window) -> Result<()> {
    let key = |at: u64| extent_data_key(ino, FileOffset(at));
    let all = items_of(ino, KeyType::EXTENT_DATA, KeyType::EXTENT_DATA);
    let first = log.tree.at_or_before(all.start(), &key(window.start)).map_or(key(window.start), |(k, _)| k);
    let old: Vec<(Key, Vec<u8>)> =
        log.tree.range(first..=key(window.end - 1)).map(|(k, d)| (k, d.to_vec())).collect();
    let mut kept = Vec::new();
    for (at, data) in old {
        let extent = FileExtent::parse(&data).map_err(|e| {
            Stop::Fail(Error::corrupt(crate::error::Place::item(ObjectId::TREE_LOG, at), e.0))
        })?;
        let FileExtent::Stored(r) = extent else {
            // In the first sector, which it has alone.
            if window.start == 0 {
                log.tree.remove(blocks, at..=at);
            }
            continue;
        };
        let end = at.offset + r.num_bytes;
        if end <= window.start {
            continue;
        }
        log.tree.remove(blocks, at..=at);
        let part = |from: u64, to: u64| {
            let mut part = r.part(from - at.offset, to - from);
            if part.is_hole() {
                part.ram_bytes = part.num_bytes;
            }
            (key(from), part.encode().to_vec())
        };
        if at.offset < window.start {
            kept.push(part(at.offset, window.start));
        }
        if end > window.end {
            kept.push(part(window.end, end));
        }
    }
    for (key, data) in kept.iter().chain(&window.items) {
        log.tree.put(blocks, key, data)?;
    }
    Ok(())
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
    let ranges = if nameless { Vec::new() } else { inode.changes.lock().take(txn.generation) };
    let item = inode.item_for_log(core);
    inode.keep_extents_for_log(txn.generation);
    let versions = Pair::of(core, &inode.subvol, &txn);
    drop(pin);
    let added = match (item, versions) {
        _ if core.options.tuning.no_log => Err(Stop::Commit(Cause::Off)),
        _ if inode.since >= txn.generation => Err(Stop::Commit(Cause::Forgotten)),
        (_, Err(stop)) => Err(stop),
        // Deleted: a commit forgets the rest of it.
        (None, _) => Ok(None),
        (Some(item), Ok(versions)) => collect(core, inode, &txn, item, ranges, &versions)
            .map(|contribution| txn.log.add(Contribution { companions, ..contribution })),
    };
    let outcome = match added {
        Ok(Some(ticket)) => {
            let generation = txn.generation;
            *last = Some(Logged { generation, txn: Arc::downgrade(&txn), ticket, moves });
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
