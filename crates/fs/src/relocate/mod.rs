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
//! | `batch` | what is done in one transaction, and in which order |
//!
//! A crash leaves nothing behind: every batch is a transaction that is complete by itself.
//! `docs/RELOCATION.md` has the rules of references.

mod batch;
mod region;
mod survey;

use crate::engine::Core;
use crate::error::{Error, Result};
use crate::space::Run;
use crate::space::groups::BlockGroup;
use larder_format::Logical;
use larder_format::items::BlockGroupFlags;
use std::ops::ControlFlow;
use std::sync::Arc;
use survey::{Extent, Survey};

/// Extents that are listed at once.
const LISTED: usize = 2048;
/// Bytes of data of one batch, apart from its first extent.
const BATCH: u64 = 32 << 20;
/// Passes in which nothing moves before it is given up.
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
/// another relocation runs; reading, corruption; the device; `ReadOnly`.
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
    if !core.space.close_group(&core.txns, &group)? {
        return Err(Error::NoSpace);
    }
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
            let what = format!("block group {start} still holds {} bytes", closed.held());
            return Err(Error::Unsupported(what));
        }
    }
    // The commit takes it out.
    core.commit_now()?;
    Ok(Relocated::Done)
}

/// Everything that was changed before is in the published trees afterwards, and trees that were
/// deleted before are gone.
fn settle(core: &Core) -> Result<()> {
    crate::file::flush_all(core)?;
    core.commit_now()?;
    core.drops.wait(core)?;
    core.commit_now()
}

/// Moves what the published extent tree has in a group.
fn pass(
    core: &Core,
    group: &BlockGroup,
    watch: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<ControlFlow<()>> {
    let run = group.run();
    let mut next = Some(run);
    while let Some(rest) = next {
        let list = Survey::new(core).list(rest, LISTED)?;
        next = list.last().and_then(|last| Run::between(last.run.end(), run.end()));
        if move_list(core, &list, watch)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

fn move_list(
    core: &Core,
    mut list: &[Extent],
    watch: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<ControlFlow<()>> {
    let mut most = usize::MAX;
    while !list.is_empty() {
        let some = &list[..batch::first_batch(list, BATCH).min(most)];
        match batch::move_some(core, some) {
            Ok(done) => list = &list[done.max(1)..],
            // A smaller batch asks for less.
            Err(Error::NoSpace) if some.len() > 1 => most = some.len() / 2,
            Err(e) => return Err(e),
        }
        // The next survey sees what this one has done.
        core.commit_now()?;
        if watch().is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}
