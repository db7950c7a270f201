//! Read-only groups: nothing is allocated from them, and their free space counts as unusable.
//!
//! A relocation makes the group read-only that it empties, and allows it again if it ends before
//! that. What the group holds is going to move, so the others must have space for that, too.
//!
//! A group of data is **left** when only devices that have failed have some part of it. What it
//! holds stays there, can be read, and is written in place as before. A relocation may empty it,
//! and does not change that it is left. The allocator comes back to it when one of the devices has
//! been replaced.

use super::{BlockGroup, Groups};
use larder_format::items::BlockGroupFlags;

/// Bytes of metadata that are left for operations when a group is closed. Each holds well under one
/// MiB while it is under way, and waits for others.
const BESIDE: u64 = 4 << 20;

impl Groups {
    /// Keeps a group from being allocated from. Its free space counts as unusable from now on.
    /// Returns false, and changes nothing, if what was promised, and what the group holds, would
    /// not find space elsewhere, or if next to nothing were left there for operations that begin
    /// meanwhile.
    pub(crate) fn try_set_read_only(&self, group: &BlockGroup) -> bool {
        let mut s = group.state.lock();
        if s.removed || s.read_only && !s.left {
            return !s.removed;
        }
        let is_metadata = group.flags.contains(BlockGroupFlags::METADATA);
        let beside = if is_metadata { BESIDE } else { 0 };
        let free = if s.left { 0 } else { s.free.total() };
        let fits = self.space.try_make_unusable(group.kind(), (free, s.allocated + beside));
        s.read_only |= fits;
        fits
    }
    /// The same without the test; or allows the group again, unless it was left.
    pub(crate) fn set_read_only(&self, group: &BlockGroup, read_only: bool) {
        let mut s = group.state.lock();
        s.frozen &= read_only || group.is_on_seed;
        let read_only = read_only || group.is_on_seed || s.left;
        if s.read_only != read_only && !s.removed {
            s.read_only = read_only;
            let free = s.free.total();
            self.space.change(group.kind(), |p| {
                if read_only {
                    p.unusable += free;
                } else {
                    p.unusable -= free;
                }
            });
        }
    }

    /// Leaves a group. False, and nothing has changed, if what was promised would not find space
    /// elsewhere.
    pub(crate) fn try_leave(&self, group: &BlockGroup) -> bool {
        let mut s = group.state.lock();
        if s.read_only || s.removed {
            return true;
        }
        let free = s.free.total();
        s.left = self.space.try_make_unusable(group.kind(), (free, 0));
        s.read_only = s.left;
        s.left
    }

    /// Comes back to a group, if it was left. No relocation may be under way.
    pub(crate) fn come_back(&self, group: &BlockGroup) {
        if std::mem::take(&mut group.state.lock().left) {
            self.set_read_only(group, false);
        }
    }
}
