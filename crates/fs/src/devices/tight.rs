//! How long new chunks are while a device is made small: as long as what is going to be in them.
//!
//! For data that is what the chunk has that is moved. For metadata it is what the chunks that stay
//! lack: all of them together have the room that commits and operations need.

use super::fit::{STEP, spare};
use crate::engine::Core;
use crate::space::SpaceKind;
use crate::space::groups::BlockGroup;
use larder_format::items::BlockGroupFlags;
use std::sync::Arc;

/// While this is there, new chunks are no longer than it says.
pub(super) struct Tight<'a> {
    core: &'a Core,
    /// Metadata does not move to where it has too little room.
    pub(super) keeps_room: bool,
}

impl<'a> Tight<'a> {
    pub(super) fn new(core: &'a Core) -> Self {
        Self { core, keeps_room: false }
    }
    /// The same for a device that is going to be as small as it can be.
    pub(super) fn with_room(core: &'a Core) -> Self {
        Self { core, keeps_room: true }
    }
    /// From now on new chunks for what a group holds are as long as that needs. Returns how many
    /// bytes of them have to be there before the group goes.
    pub(super) fn fit(&self, group: &BlockGroup) -> u64 {
        let held = group.usage().allocated;
        let (most, first) = if group.flags().contains(BlockGroupFlags::METADATA) {
            let missing = missing(self.core, group.flags(), |other| other.run() != group.run());
            if self.keeps_room {
                // Otherwise a commit would give back what has just been made for that.
                let needed = needed(self.core, group.flags());
                self.core.space.keep_open(group.flags(), needed.saturating_sub(2 * STEP));
            }
            // What commits need changes by a little all the time.
            (missing.max(STEP), if missing < STEP { 0 } else { missing })
        } else {
            let spare = spare(self.core, group.flags(), held);
            (held.saturating_add(spare).min(group.run().len).max(held), 0)
        };
        self.core.space.limit_chunks(group.kind(), Some(most));
        first
    }
}

/// Bytes that metadata of this type and profile needs beside the chunks that stay: those that are
/// open, as far as they do `stay`.
pub(super) fn missing(
    core: &Core,
    flags: BlockGroupFlags,
    stay: impl Fn(&BlockGroup) -> bool,
) -> u64 {
    let all = core.space.groups.all();
    let stays =
        |group: &&Arc<BlockGroup>| group.flags() == flags && !group.is_read_only() && stay(group);
    let there = all.iter().filter(stays).map(|group| group.run().len).sum();
    needed(core, flags).saturating_sub(there)
}

/// Bytes of chunks that metadata of this type and profile needs.
fn needed(core: &Core, flags: BlockGroupFlags) -> u64 {
    let all = core.space.groups.all();
    let alike = all.iter().filter(|group| group.flags() == flags);
    let held = alike.map(|group| group.usage().allocated).sum();
    held + spare(core, flags, held)
}

impl Drop for Tight<'_> {
    fn drop(&mut self) {
        let kinds = [SpaceKind::Data, SpaceKind::Metadata, SpaceKind::System];
        kinds.into_iter().for_each(|kind| self.core.space.limit_chunks(kind, None));
        self.core.space.keep_open(BlockGroupFlags::empty(), 0);
    }
}
