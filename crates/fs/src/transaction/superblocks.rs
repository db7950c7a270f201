//! The superblock as each device has it: the same for all, but for the item of the device itself.

use crate::error::{Error, Place, Result};
use crate::space::device_items;
use crate::tree::Version;
use larder_format::{DevItem, DeviceId, ObjectId, Superblock};

/// The superblocks of a commit.
#[derive(Clone, Debug)]
pub(crate) struct Superblocks {
    /// As the device has it whose item it holds.
    pub(crate) common: Box<Superblock>,
    /// Items of all devices. None where there is one device.
    items: Vec<DevItem>,
    /// Devices that are behind while no mark says so. With a new superblock they would look as
    /// good as the others.
    withheld: Vec<DeviceId>,
}

impl Superblocks {
    /// The superblocks that go with this tree of chunks, while these devices are behind.
    ///
    /// # Errors
    /// Reading; `Corrupt` for device items that cannot be right.
    pub(crate) fn new(
        common: Box<Superblock>,
        chunks: &Version,
        behind: Vec<DeviceId>,
    ) -> Result<Self> {
        let items = if common.num_devices() > 1 { device_items(chunks)? } else { Vec::new() };
        let has_mark = |id| items.iter().any(|i: &DevItem| id_of(i) == id && i.generation != 0);
        let withheld = behind.into_iter().filter(|id| !has_mark(*id)).collect();
        let this = Self { common, items, withheld };
        let own = this.common.device_id();
        if this.items.is_empty() || this.items.iter().any(|item| id_of(item) == own) {
            return Ok(this);
        }
        let what = format!("device {own} has no item");
        Err(Error::corrupt(Place::tree(ObjectId::CHUNK_TREE), what))
    }

    /// That of a device. `None`: it keeps the one that it has.
    pub(crate) fn of(&self, device: DeviceId) -> Option<Box<Superblock>> {
        if self.withheld.contains(&device) {
            return None;
        }
        Some(self.of_current(device))
    }

    /// The same for a device that has everything.
    pub(crate) fn of_current(&self, device: DeviceId) -> Box<Superblock> {
        let mut superblock = self.common.clone();
        if let Some(item) = self.items.iter().find(|item| id_of(item) == device) {
            superblock.dev_item = *item;
        }
        superblock
    }

    /// The same with a log attached.
    pub(crate) fn with_log(&self, log: impl FnOnce(&mut Superblock)) -> Self {
        let mut this = self.clone();
        log(&mut this.common);
        this
    }
}

fn id_of(item: &DevItem) -> DeviceId {
    DeviceId(item.devid.get())
}
