//! Replaying: from a superblock with a log to one without it.

use super::logged_data::{Claims, Sums};
use super::source::{Log, damaged};
use super::subvolume::{Outcome, work_out};
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::space::{Run, SpaceKind};
use crate::transaction::{Handle, commit};
use crate::tree::doing;
use larder_format::Key;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Items that one edit changes.
const ITEMS: usize = 16;

/// Replays the log. True if there was one. The file system is not in use yet, and no other thread
/// runs.
///
/// If the file system may be written, everything is durable when this returns, and the log is gone.
/// Otherwise the result is in memory only, in a transaction that is never committed.
///
/// # Errors
/// Reading; `Corrupt` where the log is damaged; `NoSpace`. The device is as it was, or has a commit
/// whose superblock was not written.
pub(crate) fn replay(core: &Core) -> Result<bool> {
    let Some(log) = Log::find(core)? else { return Ok(false) };
    let _doing = doing("log replay");
    keep_nodes(core, &log)?;
    let mut claims = Claims::default();
    let mut outcomes = Vec::new();
    for (id, tree) in &log.trees {
        match core.subvol(*id) {
            Ok(subvol) => outcomes.push(work_out(core, &subvol, tree, &mut claims)?),
            Err(Error::NotFound) => {
                tracing::warn!("a log of subvolume {id}, which is gone, is passed over")
            }
            Err(e) => return Err(e),
        }
    }
    // The versions of the log keep space from being reused, and the commit may have to wait for
    // that space.
    drop(log);
    let mut handle = Handle::for_replay(core)?;
    handle.txn.touch();
    // All logs together, because files of several subvolumes may share an extent, and notes of
    // checksums never overlap.
    let mut sums = Sums::default();
    outcomes.iter_mut().for_each(|outcome| sums.take(&mut outcome.sums));
    sums.note(&mut handle);
    for outcome in outcomes {
        apply(&mut handle, outcome)?;
    }
    drop(handle);
    core.log_replayed.store(true, Ordering::Release);
    if core.read_only.is_none() {
        commit::commit_once(core)?;
    }
    Ok(true)
}

/// Keeps the log's nodes from being overwritten before a superblock without them is durable.
fn keep_nodes(core: &Core, log: &Log) -> Result<()> {
    let groups = &core.space.groups;
    let mut none = core.space.accounts.empty(SpaceKind::Metadata);
    let mut runs: Vec<Run> =
        log.nodes.iter().map(|at| Run::new(*at, u64::from(core.nodesize()))).collect();
    runs.sort_unstable_by_key(|run| run.start);
    for run in &runs {
        if !groups.take_exact(*run, &mut none)? {
            return Err(damaged(
                Place::block(run.start),
                "one of its nodes is in use as something else",
            ));
        }
        groups.pin(*run)?;
    }
    core.txns.running().freed_log.lock().extend(runs);
    Ok(())
}

fn apply(h: &mut Handle<'_>, outcome: Outcome) -> Result<()> {
    let subvol: &Arc<_> = &outcome.subvol;
    if outcome.incompat != 0 {
        h.need_incompat(outcome.incompat);
    }
    for change in &outcome.refs {
        change.note(h, subvol.id)?;
    }
    let changes: Vec<_> = outcome.changes.into_iter().collect();
    for some in changes.chunks(ITEMS) {
        let keys: Vec<Key> = some.iter().map(|(key, _)| *key).collect();
        h.edit(subvol, &keys, |e| {
            for (key, now) in some {
                match (e.get(key).is_some(), now) {
                    (true, Some(data)) => e.update(key, data)?,
                    (false, Some(data)) => e.insert(key, data)?,
                    (true, None) => e.delete(key)?,
                    (false, None) => {}
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}
