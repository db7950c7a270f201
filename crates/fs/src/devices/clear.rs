//! Chunks leave a part of a device: its end, or all of it.
//!
//! The chunks of the part are closed together, as far as the rest has room for what was promised.
//! Otherwise what one of them holds would go to the next, which is about to be cleared itself. Then
//! they are relocated, the last one first: a relocation that is ended early has made the most of
//! it.
//!
//! A chunk may begin below the future end of a device and reach beyond it. What it holds would fit
//! into the lower part, but it stands there itself. So if there is no other place, such a chunk is
//! moved beyond the end first, into chunks that are no longer than they need to be, and what it
//! held comes back into the space that it has left.

use super::Watch;
use super::tight::Tight;
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::relocate::{self, Relocated};
use crate::space::alloc::ChunkOutcome;
use crate::space::groups::BlockGroup;
use larder_format::{DeviceId, Logical, Physical};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Attempts at one chunk before it is given up: each begins with chunks and commits as they are
/// then.
const PATIENCE: u32 = 8;

/// How far the clearing of a device, or of its end, has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clearing {
    /// Bytes of data and metadata that are to move, of which several copies count once.
    pub total: u64,
    /// Bytes that are still there.
    pub left: u64,
}

/// What came of a change of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is done, and durable.
    Done,
    /// The caller has ended it early. What has moved has moved; the devices are as they were.
    Stopped,
}

/// A part of a device on which no new chunk is made: everything from some place on. It is given
/// back when this is dropped.
pub(super) struct Part<'a> {
    core: &'a Core,
    pub(super) id: DeviceId,
    from: Physical,
}

impl<'a> Part<'a> {
    /// # Errors
    /// `NoSpace` when metadata was promised more than fits without this part.
    pub(super) fn close(core: &'a Core, id: DeviceId, from: Physical) -> Result<Self> {
        let this = Self { core, id, from };
        if this.narrow() {
            return Ok(this);
        }
        // Promises end with what they were made for.
        crate::file::flush_all(core)?;
        core.commit_now()?;
        if this.narrow() { Ok(this) } else { Err(Error::NoSpace) }
    }

    fn is_all(&self) -> bool {
        self.from == Physical(0)
    }

    fn narrow(&self) -> bool {
        if self.is_all() {
            self.core.space.try_close_device(self.id)
        } else {
            self.core.space.try_limit_device(self.id, self.from.0)
        }
    }

    fn chunks(&self) -> Vec<Logical> {
        self.core.space.chunks_beyond(self.id, self.from)
    }

    fn groups(&self) -> Vec<Arc<BlockGroup>> {
        let groups = &self.core.space.groups;
        self.chunks().into_iter().filter_map(|start| groups.find(start)).collect()
    }

    /// Chunks that begin in front of this part.
    fn in_the_way(&self) -> BTreeSet<Logical> {
        let begins = |at: &Logical| self.core.space.first_stripe_on(self.id, *at);
        let before = |at: &Logical| begins(at).is_some_and(|begin| begin < self.from);
        self.chunks().into_iter().filter(before).collect()
    }

    /// Bytes that the chunks of this part hold.
    fn held(&self) -> u64 {
        self.groups().iter().map(|group| group.usage().allocated).sum()
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if self.is_all() {
            self.core.space.open_device(self.id);
        } else {
            self.core.space.unlimit_device(self.id);
        }
    }
}

/// Groups that nothing is allocated in meanwhile. Those that are left are opened again.
pub(super) struct Closed<'a> {
    core: &'a Core,
    groups: Vec<Arc<BlockGroup>>,
}

impl<'a> Closed<'a> {
    pub(super) fn new(core: &'a Core, groups: Vec<Arc<BlockGroup>>) -> Self {
        // What cannot be closed now is closed when it is relocated.
        let close =
            |group: &Arc<BlockGroup>| relocate::try_close(core, group).is_ok_and(|closed| closed);
        let groups = groups.into_iter().filter(close).collect();
        core.space.give_back_preallocated();
        Self { core, groups }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.groups.iter().for_each(|group| self.core.space.groups.set_read_only(group, false));
    }
}

/// Moves everything away that chunks have in this part, into chunks that are `tight` if that is
/// wanted.
///
/// # Errors
/// `NoSpace` when there is no other place; those of a relocation.
pub(super) fn clear(
    part: &Part<'_>,
    tight: Option<&Tight<'_>>,
    watch: Watch<'_>,
) -> Result<Outcome> {
    let core = part.core;
    let _closed = Closed::new(core, part.groups());
    let mut in_the_way = part.in_the_way();
    let mut total = part.held();
    let mut again = (Logical(0), 0);
    while let Some(start) = part.chunks().first().copied() {
        again = if again.0 == start { (start, again.1 + 1) } else { (start, 0) };
        if again.1 > PATIENCE {
            return Err(Error::Unsupported(format!("the block group at {start} does not go")));
        }
        let mut told = || {
            let left = part.held();
            total = total.max(left);
            watch(Clearing { total, left })
        };
        let moved = match move_away(core, start, tight, &mut told) {
            Err(Error::NoSpace) => match in_the_way.pop_first() {
                Some(other) => move_anywhere(part, other, tight, &mut told),
                None => Err(Error::NoSpace),
            },
            other => other,
        };
        match moved {
            Ok(Relocated::Stopped) => return Ok(Outcome::Stopped),
            // A commit has taken it out, and that commit is about to end.
            Ok(Relocated::Done) | Err(Error::NotFound) => core.commit_now()?,
            Err(e) => return Err(e),
        }
        if told().is_break() {
            return Ok(Outcome::Stopped);
        }
    }
    Ok(Outcome::Done)
}

/// Moves a chunk to wherever there is room, this part included.
fn move_anywhere(
    part: &Part<'_>,
    start: Logical,
    tight: Option<&Tight<'_>>,
    watch: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Relocated> {
    part.core.space.lift_limit(part.id);
    let moved = move_away(part.core, start, tight, watch);
    if part.narrow() { moved } else { Err(Error::NoSpace) }
}

/// Relocates the group at an address. If it is the last of its type and profile, there has to be
/// another one first: the commit does not take out the last one. Where chunks are to be tight,
/// there is what metadata needs without it, as far as there is room or as it is told.
pub(super) fn move_away(
    core: &Core,
    start: Logical,
    tight: Option<&Tight<'_>>,
    watch: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Relocated> {
    let group = core.space.groups.find(start).ok_or(Error::NotFound)?;
    let fit = || tight.map_or(0, |tight| tight.fit(&group));
    let is_made = || -> Result<bool> {
        Ok(core.space.make_chunk_like(&core.txns, &group)? == ChunkOutcome::Granted)
    };
    // A hole may be too short for all that is missing.
    while fit() > 0 {
        if !is_made()? {
            if tight.is_some_and(|tight| tight.keeps_room) {
                return Err(Error::NoSpace);
            }
            break;
        }
    }
    let others = core.space.groups.all().into_iter().filter(|g| g.run() != group.run());
    let mut alike = others.filter(|g| g.flags() == group.flags());
    if !alike.any(|g| !g.is_read_only()) && !is_made()? {
        return Err(Error::NoSpace);
    }
    relocate::relocate(core, start, &mut |_| {
        // A chunk that is made now is for what has not moved yet.
        fit();
        watch()
    })
}
