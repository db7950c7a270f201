//! Which devices of a file system failed in a commit, as the superblocks of that commit say.
//!
//! A device that fails while a commit is made durable may lack what it should have got. The trees
//! of that commit are written by then and do not say so; those of the next one will. If the power
//! goes when only some of the others have the new superblock, the rest of them look like the one
//! that has failed: all have the superblock of the commit before. But the rest have everything,
//! since a superblock is written when all that it leads to is durable. So the superblock **names**
//! the devices that were not written in its commit, and all others are as good as those that have
//! it.
//!
//! Linux keeps the fields as they are in later superblocks. So they have the generation that they
//! belong to, and say nothing about another one.

use crate::ids::DeviceId;
use crate::superblock::{MOST_FAILED, Superblock};
use zerocopy::little_endian::U64;

impl Superblock {
    /// Notes the devices that were not written in the commit of this superblock. Nothing is noted
    /// if there are none, and if there are more than [`MOST_FAILED`].
    pub fn note_failed(&mut self, devices: &[DeviceId]) {
        self.failed = [U64::new(0); MOST_FAILED];
        let fits = !devices.is_empty() && devices.len() <= MOST_FAILED;
        self.failed_in = if fits { self.generation } else { U64::new(0) };
        if fits {
            for (field, device) in self.failed.iter_mut().zip(devices) {
                *field = U64::new(device.0);
            }
        }
    }

    /// The devices that were not written in the commit of this superblock, if it names any. All
    /// others had everything before the first superblock of the commit was written.
    #[must_use]
    pub fn failed(&self) -> Option<Vec<DeviceId>> {
        let is_said = self.failed_in != 0 && self.failed_in == self.generation;
        let ids = || self.failed.iter().map(|id| DeviceId(id.get())).filter(|id| id.0 != 0);
        is_said.then(|| ids().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Generation;
    use zerocopy::FromZeros;

    #[test]
    fn what_is_noted_is_of_one_commit() {
        let mut superblock = Superblock::new_zeroed();
        superblock.set_generation(Generation(9));
        assert_eq!(superblock.failed(), None);
        superblock.note_failed(&[DeviceId(3), DeviceId(1 << 40)]);
        assert_eq!(superblock.failed(), Some(vec![DeviceId(3), DeviceId(1 << 40)]));
        superblock.set_generation(Generation(10));
        assert_eq!(superblock.failed(), None, "Linux has written it since");
        superblock.note_failed(&[]);
        assert_eq!(superblock.failed(), None);
    }

    #[test]
    fn more_than_there_is_room_for_are_not_noted_in_part() {
        let mut superblock = Superblock::new_zeroed();
        superblock.set_generation(Generation(9));
        superblock.note_failed(&[DeviceId(1)]);
        superblock.note_failed(&[1, 2, 3, 4].map(DeviceId));
        assert_eq!(superblock.failed(), None);
        assert_eq!(superblock.failed, [U64::new(0); MOST_FAILED]);
    }
}
