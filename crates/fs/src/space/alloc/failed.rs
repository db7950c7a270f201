//! Where data goes when a device has failed.
//!
//! New chunks do not lie on it. But where chunks have one copy of each byte, or too few for what
//! has failed, there is free space that cannot be written any more, beside devices that are well.
//! Data that came to lie there would be lost. So these chunks are left before data is allocated
//! next (`groups::read_only`), and others are made on the devices that are left.
//!
//! Metadata needs no such care: where it cannot be written, the commit fails, and the file system
//! is not written any more.

use super::{Allocator, ChunkOutcome, Seen};
use crate::error::Result;
use crate::space::SpaceKind;
use crate::space::groups::BlockGroup;
use larder_format::items::BlockGroupFlags;
use std::sync::atomic::Ordering;

impl Allocator {
    /// Leaves the chunks of data that cannot be written any more. If what was promised in them has
    /// no space elsewhere, and there is none for other chunks, they stay in use, and this is tried
    /// again.
    pub(super) fn leave_failed_devices(&self, make_chunk: impl Fn(Seen) -> Result<ChunkOutcome>) {
        let failures = self.volume.failures();
        if self.failures.load(Ordering::Acquire) == failures {
            return;
        }
        let all = self.groups.all();
        let lost = all.iter().filter(|group| self.cannot_be_written(group));
        let stay = lost.filter(|group| !self.leave(group, &make_chunk)).count();
        if stay == 0 {
            self.failures.store(failures, Ordering::Release);
        }
    }

    fn leave(
        &self,
        group: &BlockGroup,
        make_chunk: &impl Fn(Seen) -> Result<ChunkOutcome>,
    ) -> bool {
        loop {
            let seen = self.seen(SpaceKind::Data);
            if self.groups.try_leave(group) {
                return true;
            }
            if !make_chunk(seen).is_ok_and(|outcome| outcome == ChunkOutcome::Granted) {
                return false;
            }
        }
    }

    /// Comes back to the chunks that can be written again, since a device was replaced. The caller
    /// sees to it that nothing is relocated meanwhile.
    pub(crate) fn come_back_to_devices(&self) {
        for group in self.groups.all().iter().filter(|group| !self.cannot_be_written(group)) {
            self.groups.come_back(group);
        }
    }

    fn cannot_be_written(&self, group: &BlockGroup) -> bool {
        group.kind() == SpaceKind::Data
            && !group.flags().contains(BlockGroupFlags::METADATA)
            && self.volume.cannot_take(group.run().start)
    }
}
