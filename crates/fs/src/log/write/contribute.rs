//! From a changed inode to a ticket of the log.
//!
//! Changes are taken from an inode once. They are in one log or, if they do not get there, in the
//! commit. [`Logged`] remembers which. So a second caller of `fsync` waits for what the first one
//! has taken. If that is the commit, nothing of the inode is logged before it: the log would lack
//! what was taken.
//!
//! The changes are taken while the running transaction is pinned. So it is not sealed meanwhile,
//! and what is taken belongs to it. Everything that reads comes afterwards. Nothing here waits for
//! a commit: [`Awaited`] says which one the caller has to wait for.

use super::batch::TxnLog;
use super::collect::{Contribution, Pair, collect};
use super::{Cause, NotLogged, Result};
use crate::engine::changes::Logged;
use crate::engine::{Core, Inode};
use crate::file::{MAX_FILE_SIZE, ceil};
use crate::transaction::Txn;
use crate::transaction::manager::Pin;
use larder_format::items::InodeItem;
use larder_format::{Generation, ObjectId};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What makes an inode durable.
#[derive(Debug)]
pub(super) enum Awaited {
    /// It is durable.
    Nothing,
    /// The commit of this transaction, which is under way.
    Publication(Generation),
    /// The log of this transaction, with this ticket.
    Ticket(Arc<Txn>, u64),
    /// The commit of this transaction, in the place of its log; and why, unless it is merely too
    /// late for the log.
    Commit(Generation, Option<Cause>),
}

/// Adds what has changed of an inode to the log of the running transaction.
///
/// # Errors
/// Reading or corruption, after which only a commit makes the inode durable; `ReadOnly` when
/// writing has ended.
pub(super) fn contribute(core: &Core, inode: &Arc<Inode>) -> crate::error::Result<Awaited> {
    core.options.tuning.log_start.wait(core)?;
    let mut last = inode.logged.lock();
    let pin = core.txns.pin_running()?;
    let generation = pin.txn.generation;
    match log_in_running(core, inode, pin, &mut last) {
        Ok(awaited) => Ok(awaited),
        Err(NotLogged::Commit(cause)) => Ok(Awaited::Commit(generation, Some(cause))),
        Err(NotLogged::Sealed) => Ok(Awaited::Commit(generation, None)),
        Err(NotLogged::Fail(e)) => Err(e),
    }
}

fn log_in_running(
    core: &Core,
    inode: &Arc<Inode>,
    pin: Pin<'_>,
    last: &mut Option<Logged>,
) -> Result<Awaited> {
    if super::above::moved(core, &inode.subvol, &pin.txn)? {
        return Err(NotLogged::Commit(Cause::SubvolumeEntry));
    }
    if pin.txn.relocated.load(Ordering::Acquire) {
        return Err(NotLogged::Commit(Cause::Relocation));
    }
    let txn = Arc::clone(&pin.txn);
    if last.as_ref().is_some_and(|l| l.generation == txn.generation && l.ticket.is_none()) {
        return Ok(Awaited::Commit(txn.generation, None));
    }
    let change = Change::take(inode, &txn, last.as_ref());
    if !change.is_taken {
        return Ok(taken_before(core, pin, &change, last));
    }
    let content = TakenContent::of(core, inode, &txn, last.as_ref());
    drop(pin);
    let (generation, moves, size) = (txn.generation, change.moves, content.size);
    let logged =
        last.insert(Logged { generation, txn: Arc::downgrade(&txn), ticket: None, moves, size });
    logged.ticket = bring(core, inode, &txn, content)?;
    Ok(match logged.ticket {
        Some(ticket) => Awaited::Ticket(txn, ticket),
        None => Awaited::Commit(generation, TxnLog::of(&txn).given_up_for()),
    })
}

/// How an inode has changed, as the running transaction sees it.
struct Change {
    /// The transaction of its last change.
    changed_in: Generation,
    /// There was something to log, and now it is taken.
    is_taken: bool,
    /// It has changed since it was logged, but in the transaction before this one. Only that one's
    /// commit has the change.
    is_sealed: bool,
    /// How many directories have moved in this transaction. A directory above the inode may be one
    /// of them, so it is logged again although it has not changed.
    moves: u64,
}

impl Change {
    fn take(inode: &Inode, txn: &Txn, last: Option<&Logged>) -> Self {
        let moves = txn.moves.load(Ordering::Relaxed);
        let is_here = |l: &Logged| l.generation == txn.generation && l.moves == moves;
        let moved = moves > 0 && !last.is_some_and(is_here);
        let mut state = inode.state.lock();
        let is_taken = moved || state.unlogged && state.last_change == txn.generation;
        let is_sealed = state.unlogged && !is_taken;
        if is_taken {
            state.unlogged = false;
        }
        Self { changed_in: state.last_change, is_taken, is_sealed, moves }
    }
}

/// What makes an inode durable if there is nothing new of it to log.
fn taken_before(core: &Core, pin: Pin<'_>, change: &Change, last: &mut Option<Logged>) -> Awaited {
    let running = pin.txn.generation;
    // A directory above it may have moved in the transaction that is being committed.
    let moved_before = core.txns.with_view(|view| {
        let sealed = view.sealed.as_ref()?;
        (sealed.moves.load(Ordering::Relaxed) > 0).then_some(sealed.generation)
    });
    drop(pin);
    if change.changed_in <= core.txns.published() && change.moves == 0 {
        *last = None;
        return moved_before.map_or(Awaited::Nothing, Awaited::Publication);
    }
    if change.is_sealed {
        return Awaited::Publication(change.changed_in);
    }
    let here = |l: &&Logged| l.generation == change.changed_in || change.moves > 0;
    match last.as_ref().filter(here).and_then(|l| Some((l.txn.clone(), l.ticket?))) {
        Some((txn, ticket)) => match txn.upgrade() {
            Some(txn) => Awaited::Ticket(txn, ticket),
            // The transaction was published after the check above.
            None => Awaited::Nothing,
        },
        // The change was taken, but did not get into a log. A commit has it.
        _ if change.changed_in < running => Awaited::Publication(change.changed_in),
        _ => Awaited::Commit(running, None),
    }
}

/// What is taken from an inode while the transaction is pinned, in the order of the fields.
struct TakenContent {
    companions: Vec<ObjectId>,
    /// Ranges of a file that have to be logged.
    ranges: Vec<(u64, u64)>,
    /// `None`: the inode is deleted.
    item: Option<InodeItem>,
    /// Its size, in whole sectors.
    size: u64,
    versions: Result<Pair>,
}

impl TakenContent {
    fn of(core: &Core, inode: &Inode, txn: &Txn, before: Option<&Logged>) -> Self {
        let companions = take_companions(inode, txn.generation);
        let nameless = inode.state.lock().item.nlink.get() == 0;
        // Of an inode without names the log has only that fact. Its changes stay, because it may
        // still get a name.
        let mut ranges =
            if nameless { Vec::new() } else { inode.changes.lock().take(txn.generation) };
        let item = inode.item_for_log(core);
        let size = item.as_ref().map_or(0, |item| ceil(item.size.get().min(MAX_FILE_SIZE)));
        // If the file grew since it was logged, the range behind its old end is a hole now, and
        // must not come back from the last commit.
        let old_end = before.filter(|l| l.generation == txn.generation).map(|l| l.size);
        if let Some(old_end) = old_end.filter(|old_end| *old_end < size)
            && !fault!(core.options.tuning, LogNoHoles)
        {
            ranges.push((old_end, size));
        }
        inode.keep_extents_for_log(txn.generation);
        let versions = Pair::of(core, &inode.subvol, txn);
        Self { companions, ranges, item, size, versions }
    }
}

fn take_companions(inode: &Inode, generation: Generation) -> Vec<ObjectId> {
    let (noted_in, companions) = &mut inode.state.lock().companions;
    if *noted_in == generation { std::mem::take(companions) } else { Vec::new() }
}

/// Collects what was taken, and brings it to the log. `None`: the log takes nothing any more, or
/// the inode is deleted, so that a commit forgets the rest of it.
fn bring(
    core: &Core,
    inode: &Arc<Inode>,
    txn: &Arc<Txn>,
    content: TakenContent,
) -> Result<Option<u64>> {
    let tuning = &core.options.tuning;
    if tuning.no_log {
        return Err(NotLogged::Commit(Cause::Off));
    }
    if inode.since >= txn.generation {
        return Err(NotLogged::Commit(Cause::Forgotten));
    }
    let versions = content.versions?;
    tuning.log_copies.copy(inode, txn, &versions)?;
    let Some(item) = content.item else { return Ok(None) };
    let collected = collect(core, inode, txn, item, content.ranges, &versions)?;
    let contribution = Contribution { companions: content.companions, ..collected };
    tuning.log_entry.bring(core, txn, contribution)
}
