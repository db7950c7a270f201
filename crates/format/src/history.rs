//! Histories of a file system on several devices: which of its devices were written together.
//!
//! As long as all devices are there, they have one history. When one of them is lost, those that
//! are left begin a **new history**, with a number that nobody else chooses. The superblocks of all
//! devices that are written have that number from then on. The item of the device that is lost has
//! the number of the history that it **left**. So when it comes back with a superblock of another
//! history than the one that it left, somebody has written it without the others.
//!
//! Without this the two halves of a mirror that were each written for a while look as if one of
//! them were only older. If both did the same things, they even look equal, since then their trees
//! lie in the same places.
//!
//! Linux keeps both fields as they are, and writes that of the superblock to all devices.

use crate::dev_item::DevItem;
use crate::ids::Generation;
use crate::superblock::Superblock;
use zerocopy::little_endian::U64;

/// Says that the item of a device has the history that it left.
const LEFT: u64 = 1 << 63;

/// The number of a history: 0 for the first one of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HistoryId(u64);

impl HistoryId {
    /// The number that these bytes give, and not 0.
    #[must_use]
    pub fn from_random(bytes: [u8; 8]) -> Self {
        Self((u64::from_le_bytes(bytes) & !LEFT).max(1))
    }
}

impl Superblock {
    /// The history that the superblock belongs to.
    #[must_use]
    pub fn history(&self) -> HistoryId {
        HistoryId(self.history.get())
    }

    /// The first commit of that history.
    #[must_use]
    pub fn history_began(&self) -> Generation {
        Generation(self.history_began.get())
    }

    /// Begins a history with a commit.
    pub fn begin_history(&mut self, id: HistoryId, commit: Generation) {
        self.history = U64::new(id.0);
        self.history_began = U64::new(commit.0);
    }
}

impl DevItem {
    /// The history that the device left, if it is not written.
    #[must_use]
    pub fn left(&self) -> Option<HistoryId> {
        let field = self.start_offset.get();
        (field & LEFT != 0).then_some(HistoryId(field & !LEFT))
    }

    /// The same with the history that it left.
    #[must_use]
    pub fn with_left(self, history: Option<HistoryId>) -> Self {
        Self { start_offset: U64::new(history.map_or(0, |id| id.0 | LEFT)), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn a_device_can_leave_the_first_history() {
        let item = DevItem::new_zeroed();
        assert_eq!(item.left(), None);
        let first = HistoryId::default();
        assert_eq!(item.with_left(Some(first)).left(), Some(first));
        let other = HistoryId::from_random([0xff; 8]);
        assert_eq!(item.with_left(Some(other)).left(), Some(other));
        assert_eq!(item.with_left(Some(other)).with_left(None).start_offset, 0);
    }

    #[test]
    fn no_history_has_the_number_of_the_first() {
        assert_ne!(HistoryId::from_random([0; 8]), HistoryId::default());
        let mut superblock = Superblock::new_zeroed();
        assert_eq!(superblock.history(), HistoryId::default());
        let id = HistoryId::from_random(*b"12345678");
        superblock.begin_history(id, Generation(9));
        assert_eq!((superblock.history(), superblock.history_began()), (id, Generation(9)));
    }
}
