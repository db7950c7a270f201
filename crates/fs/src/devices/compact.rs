//! Chunks that are no longer than what they hold needs.
//!
//! A chunk is usually as long as a tenth of the file system, and most of it may be empty. So what
//! is behind a small end may find no place in front of it, although there is room within the chunks
//! there. Here, what loose chunks of one type and profile hold moves into one chunk that is made
//! for just that ([`Tight`]), wherever there is room for it. Then the loose ones go. Moving the new
//! chunk to the beginning is for `clear`.
//!
//! Chunks of metadata may also be too short for what commits need, as long as the device has room
//! for more of them. A small device has not, so they are replaced by one that is long enough.
//!
//! What cannot be made tight stays as it is. That is no error, since the file system is larger for
//! it and nothing else.

use super::Watch;
use super::clear::{Clearing, Closed, Outcome, move_away};
use super::fit::{STEP, spare};
use super::tight::{Tight, missing};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::relocate::Relocated;
use crate::space::alloc::ChunkOutcome;
use crate::space::groups::BlockGroup;
use larder_format::items::BlockGroupFlags;
use std::sync::Arc;

/// Rounds in which all is looked at. What does not fit into one piece leaves another loose chunk.
const ROUNDS: usize = 3;

/// Groups of one type and profile.
struct Class {
    flags: BlockGroupFlags,
    groups: Vec<Arc<BlockGroup>>,
}

/// All classes, the largest waste first: what it leaves is room for the others.
fn classes(core: &Core) -> Vec<Class> {
    let mut classes: Vec<Class> = Vec::new();
    for group in core.space.groups.all().into_iter().filter(|g| !g.is_on_seed()) {
        match classes.iter_mut().find(|class| class.flags == group.flags()) {
            Some(class) => class.groups.push(group),
            None => classes.push(Class { flags: group.flags(), groups: vec![group] }),
        }
    }
    classes.sort_by_key(|class| std::cmp::Reverse(class.wasted(core)));
    classes
}

impl Class {
    fn held(&self) -> u64 {
        self.groups.iter().map(|group| group.usage().allocated).sum()
    }
    /// Bytes more than its chunks would need.
    fn wasted(&self, core: &Core) -> u64 {
        let (held, len) = (self.held(), self.groups.iter().map(|g| g.run().len).sum::<u64>());
        len.saturating_sub(held + spare(core, self.flags, held))
    }
    /// Is there so much too much of it that moving pays?
    fn is_loose(&self, core: &Core) -> bool {
        // Chunks with stripes on several devices are rounded up on each.
        let devices = core.volume.devices_for_chunks().max(1) as u64;
        self.wasted(core) >= 2 * STEP * devices
    }
    /// Is it metadata without the room that commits need?
    fn is_short(&self, core: &Core) -> bool {
        let held = self.held();
        let len: u64 = self.groups.iter().map(|g| g.run().len).sum();
        self.flags.contains(BlockGroupFlags::METADATA) && len < held + spare(core, self.flags, held)
    }
    /// Chunks of which a part is empty that is worth having, the emptiest first. All of them, where
    /// they are too short. Of metadata no more than have the room that is too much.
    fn loose(&self, core: &Core) -> Vec<Arc<BlockGroup>> {
        if self.is_short(core) {
            return self.groups.clone();
        }
        let free = |group: &BlockGroup| group.run().len.saturating_sub(group.usage().allocated);
        let is_loose =
            |group: &&Arc<BlockGroup>| free(group) >= STEP && free(group) >= group.run().len / 32;
        let mut loose: Vec<_> = self.groups.iter().filter(is_loose).cloned().collect();
        loose.sort_by_key(|group| std::cmp::Reverse(free(group)));
        if self.flags.contains(BlockGroupFlags::METADATA) {
            let most = spare(core, self.flags, self.held()) + 2 * STEP;
            let mut left: u64 = self.groups.iter().map(|group| free(group)).sum();
            loose.retain(|group| {
                let is_too_much = left > most;
                left -= if is_too_much { free(group) } else { 0 };
                is_too_much
            });
        }
        loose
    }
    /// How long a chunk is that these are moved to.
    fn needs(&self, core: &Core, loose: &[Arc<BlockGroup>]) -> u64 {
        if self.flags.contains(BlockGroupFlags::METADATA) {
            let stays = |group: &BlockGroup| loose.iter().all(|other| other.run() != group.run());
            return missing(core, self.flags, stays);
        }
        let held = loose.iter().map(|group| group.usage().allocated).sum();
        spare(core, self.flags, held).saturating_add(held)
    }
}

/// Makes loose chunks tight, as far as there is room for that.
///
/// # Errors
/// Those of a relocation, but for `NoSpace`.
pub(super) fn compact(core: &Core, tight: &Tight<'_>, watch: Watch<'_>) -> Result<Outcome> {
    for _ in 0..ROUNDS {
        let is_wrong = |class: &Class| class.is_loose(core) || class.is_short(core);
        let loose: Vec<Class> = classes(core).into_iter().filter(is_wrong).collect();
        if loose.is_empty() {
            break;
        }
        for class in loose {
            match tighten(core, tight, &class, watch) {
                Ok(Outcome::Done) | Err(Error::NoSpace) => {}
                other => return other,
            }
        }
    }
    Ok(Outcome::Done)
}

/// Gives metadata the room that commits need, where its chunks have become too short: what was made
/// for that is given back as long as nothing is in it.
///
/// # Errors
/// As [`compact`].
pub(super) fn lengthen(core: &Core, tight: &Tight<'_>, watch: Watch<'_>) -> Result<Outcome> {
    for class in classes(core).into_iter().filter(|class| class.is_short(core)) {
        match tighten(core, tight, &class, watch) {
            Ok(Outcome::Done) | Err(Error::NoSpace) => {}
            other => return other,
        }
    }
    Ok(Outcome::Done)
}

/// Moves what the loose chunks of a class hold into a chunk for just that.
fn tighten(core: &Core, tight: &Tight<'_>, class: &Class, watch: Watch<'_>) -> Result<Outcome> {
    let groups = class.loose(core);
    let Some(first) = groups.first() else { return Ok(Outcome::Done) };
    let held = |groups: &[Arc<BlockGroup>]| groups.iter().map(|g| g.usage().allocated).sum();
    let total: u64 = held(&groups);
    let most = class.needs(core, &groups);
    core.space.limit_chunks(first.kind(), Some(most.max(STEP)));
    if most > 0 && core.space.make_chunk_like(&core.txns, first)? != ChunkOutcome::Granted {
        return Err(Error::NoSpace);
    }
    let _closed = Closed::new(core, groups.clone());
    for group in &groups {
        let mut told = || watch(Clearing { total, left: held(&groups) });
        match move_away(core, group.run().start, Some(tight), &mut told) {
            Ok(Relocated::Stopped) => return Ok(Outcome::Stopped),
            Ok(Relocated::Done) | Err(Error::NotFound) => core.commit_now()?,
            Err(e) => return Err(e),
        }
    }
    Ok(Outcome::Done)
}
