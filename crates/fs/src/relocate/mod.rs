//! Relocation: everything in a block group moves elsewhere while the file system is in use.
//!
//! The group is closed, so that nothing new comes into it. A full flush follows: what was on its
//! way to the group is in the published extent tree then. From there on the group is *frozen*, and
//! its bytes do not change. Passes list what it holds and move it, batch by batch, until nothing is
//! left. The commit takes an empty group out, as any other. If the relocation ends early, the group
//! is opened again, and what has moved has moved.
//!
//! | module | decision it hides |
//! |---|---|
//! | `survey` | what refers to a block or an extent, and what trees share |
//! | `region` | how blocks that trees share are moved once for all of them |
//! | `copies` | where copies of data lie, and how they are made |
//! | `batch` | what is done in one transaction, and in which order |
//! | `leftovers` | what Linux has left of a relocation that it did not finish |
//!
//! A crash leaves nothing behind: every batch is a transaction that is complete by itself.
//! `docs/RELOCATION.md` has the rules of references.

mod batch;
mod copies;
mod leftovers;
mod region;
mod survey;

pub(crate) use leftovers::clean as clean_leftovers;

use crate::engine::Core;
use crate::error::{Error, Result};
use crate::space::alloc::ChunkOutcome;
use crate::space::groups::BlockGroup;
use crate::space::{Run, SpaceKind};
use batch::List;
use larder_format::items::BlockGroupFlags;
use larder_format::{Generation, Logical};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use survey::{Extent, Survey};

/// Extents that are listed at once.
const LISTED: usize = 4096;
/// Bytes of data of one batch, apart from its first extent.
const BATCH: u64 = 64 << 20;
/// Passes in which nothing moves before it is given up, and times that closing a group is tried
/// again.
const PATIENCE: u32 = 4;

/// How far a relocation has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Relocating {
    /// Bytes that the group held when it began.
    pub total: u64,
    /// Bytes that it still holds. Moved extents count until their space is released.
    pub left: u64,
}

/// A block group, for those that choose which to relocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupFacts {
    /// Its first address. It names the group.
    pub start: Logical,
    /// Its bytes.
    pub len: u64,
    /// How many of them are used.
    pub used: u64,
    /// What it is for, and its profile.
    pub flags: BlockGroupFlags,
}

/// All block groups by rising address.
pub(crate) fn groups(core: &Core) -> Vec<GroupFacts> {
    let facts = |g: &Arc<BlockGroup>| GroupFacts {
        start: g.run().start,
        len: g.run().len,
        used: g.usage().allocated,
        flags: g.flags(),
    };
    core.space.groups.all().iter().map(facts).collect()
}

/// The outcome of a relocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relocated {
    /// The group is empty. It is gone, or the last of its kind.
    Done,
    /// The caller ended it early.
    Stopped,
}

/// A group that is closed. It is opened again unless it has become empty.
struct Closed<'a> {
    core: &'a Core,
    group: Arc<BlockGroup>,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.core.space.groups.set_read_only(&self.group, false);
    }
}

impl Closed<'_> {
    /// Bytes that something is using, or was when the last superblock was written.
    fn held(&self) -> u64 {
        let now = self.group.usage();
        now.allocated.max(now.disk_used) + now.pinned
    }
}

/// Moves everything in the block group at `start` elsewhere. `watch` is called after each batch,
/// and may end it.
///
/// # Errors
/// `NotFound` for an address in no group; `NoSpace` when there is no other place; `Busy` while
/// another relocation runs; `NotEmptied` when its content is changed faster than it moves; reading,
/// corruption; the device; `ReadOnly`.
pub(crate) fn relocate(
    core: &Core,
    start: Logical,
    watch: &mut dyn FnMut(Relocating) -> ControlFlow<()>,
) -> Result<Relocated> {
    let busy = "a block group is being relocated already";
    let _one = core.relocation.try_lock().ok_or(Error::Busy(busy))?;
    core.check_writable()?;
    let group = core.space.groups.find(start).ok_or(Error::NotFound)?;
    let total = group.usage().disk_used;
    let closed = Closed { core, group: group.clone() };
    close_patiently(core, &group)?;
    settle(core)?;
    group.freeze();
    let mut idle = 0;
    loop {
        settle(core)?;
        let before = closed.held();
        if before == 0 {
            break;
        }
        let said = pass(core, &group, &mut || watch(Relocating { total, left: closed.held() }))?;
        if said.is_break() {
            return Ok(Relocated::Stopped);
        }
        settle(core)?;
        core.epochs.wait_for_oldest();
        core.space.discards.release_expired();
        idle = if closed.held() < before { 0 } else { idle + 1 };
        if idle > PATIENCE {
            return Err(Error::NotEmptied { group: start, left: closed.held() });
        }
    }
    // The commit takes it out.
    core.commit_now()?;
    Ok(Relocated::Done)
}

/// Closes a group. What operations are promised while they run may be in the way, so it is tried
/// again when their changes are written.
///
/// # Errors
/// `NoSpace`; those of a flush and a commit.
fn close_patiently(core: &Core, group: &BlockGroup) -> Result<()> {
    let accounts = &core.space.accounts;
    for tried in 0.. {
        if close(core, group)? {
            break;
        }
        let kinds = [SpaceKind::Data, SpaceKind::Metadata];
        let is_quiet = kinds.iter().all(|kind| accounts.reserved_by_operations(*kind) == 0);
        if is_quiet || tried == PATIENCE {
            return Err(Error::NoSpace);
        }
        settle(core)?;
    }
    Ok(())
}

/// Closes a group: nothing is allocated in it from now on. A chunk is made first if what the group
/// holds would not find space elsewhere. False if there is no room for that.
fn close(core: &Core, group: &BlockGroup) -> Result<bool> {
    loop {
        let seen = core.space.seen(group.kind());
        if try_close(core, group)? {
            core.space.give_back_preallocated();
            return Ok(true);
        }
        let made = core.space.chunk_in_running(&core.txns, group.kind(), seen)?;
        if made != ChunkOutcome::Granted {
            return Ok(false);
        }
    }
}

/// Closes a group if there is room elsewhere, also for the next commit. No commit can use chunks
/// that later transactions make. So one that is under way is waited for.
///
/// # Errors
/// `ReadOnly`.
pub(crate) fn try_close(core: &Core, group: &BlockGroup) -> Result<bool> {
    let groups = &core.space.groups;
    if group.is_read_only() {
        return Ok(groups.try_set_read_only(group));
    }
    loop {
        let running = core.txns.running().generation;
        core.txns.wait(Generation(running.0 - 1))?;
        if !groups.try_set_read_only(group) {
            return Ok(false);
        }
        let is_enough = core.space.commit_can_do_without(group, running);
        if is_enough && core.txns.running().generation == running {
            return Ok(true);
        }
        groups.set_read_only(group, false);
        if !is_enough {
            return Ok(false);
        }
    }
}

/// Everything that was changed before is in the published trees afterwards, and trees that were
/// deleted before are gone.
fn settle(core: &Core) -> Result<()> {
    crate::file::flush_all(core)?;
    let some_die = core.drops.len() > 0;
    core.commit_now()?;
    if some_die {
        // What dies meanwhile is dropped after the next commit, for which nobody else may ask.
        core.drops.wait(core, core.txns.published())?;
        core.commit_now()?;
    }
    Ok(())
}

/// Moves what the published extent tree has in a group.
fn pass(
    core: &Core,
    group: &BlockGroup,
    watch: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<ControlFlow<()>> {
    let run = group.run();
    let (mut rest, mut most) = (Some(run), usize::MAX);
    while let Some(left) = rest {
        // What moves changes references of other extents, too. So each batch has a new list.
        let survey = Survey::new(core);
        let (mut list, base) = (survey.list(left, LISTED)?, survey.base());
        drop(survey);
        read_ahead(core, &list);
        let is_large = |extent: &Extent| extent.is_data && extent.refs.len() > batch::USERS;
        if list.first().is_some_and(is_large) {
            let extent = list.swap_remove(0);
            rest = Run::between(extent.run.end(), run.end());
            if move_parts(core, extent.parts(batch::USERS), base, watch)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            continue;
        }
        list.truncate(list.iter().position(is_large).unwrap_or(list.len()));
        rest = match move_first(core, List { extents: &list, base }, &mut most, watch)? {
            ControlFlow::Break(()) => return Ok(ControlFlow::Break(())),
            ControlFlow::Continue(last) => last.and_then(|l| Run::between(l.end(), run.end())),
        };
    }
    Ok(ControlFlow::Continue(()))
}

/// Reads the blocks of a list, in long transfers.
fn read_ahead(core: &Core, list: &[Extent]) {
    let blocks = list.iter().filter(|extent| !extent.is_data);
    let blocks: Vec<_> = blocks.map(|extent| (extent.run.start, extent.made)).collect();
    core.store.read_ahead(&blocks);
}

/// Moves the first extents of a list in one batch, `most` at most. Returns the last of them.
fn move_first(
    core: &Core,
    List { extents: list, base }: List<'_>,
    most: &mut usize,
    watch: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<ControlFlow<(), Option<Run>>> {
    let mut some = &list[..batch::first_batch(list, BATCH).min(list.len()).min(*most)];
    while let Some(first) = some.first() {
        match batch::move_some(core, List { extents: some, base }, &mut None) {
            Ok(moved) => {
                *most = some.len().saturating_mul(2);
                let last = some[..moved.max(1)].last().map(|extent| extent.run);
                return Ok(moved_some(core, watch)?.map_continue(|()| last));
            }
            // A smaller batch asks for less.
            Err(Error::NoSpace) if some.len() > 1 => some = &some[..some.len() / 2],
            Err(Error::NoSpace) if first.is_data && first.refs.len() > 1 => {
                let half = first.refs.len().div_ceil(2);
                let moved = move_parts(core, first.clone().parts(half), base, watch)?;
                return Ok(moved.map_continue(|()| Some(first.run)));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(ControlFlow::Continue(None))
}

/// Moves an extent for some of its users after the other. If there is too little space for that,
/// for fewer at a time.
fn move_parts(
    core: &Core,
    parts: Vec<Extent>,
    base: Generation,
    watch: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<ControlFlow<()>> {
    let mut half_moved = None;
    let mut parts = VecDeque::from(parts);
    while let Some(part) = parts.pop_front() {
        let list = List { extents: std::slice::from_ref(&part), base };
        match batch::move_some(core, list, &mut half_moved) {
            Ok(_) => {}
            Err(Error::NoSpace) if part.refs.len() > 1 => {
                let half = part.refs.len().div_ceil(2);
                part.parts(half).into_iter().rev().for_each(|half| parts.push_front(half));
                continue;
            }
            Err(e) => return Err(e),
        }
        if moved_some(core, watch)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// A batch is over. The next one sees what it has done.
fn moved_some(core: &Core, watch: &mut dyn FnMut() -> ControlFlow<()>) -> Result<ControlFlow<()>> {
    core.commit_now()?;
    Ok(watch())
}
