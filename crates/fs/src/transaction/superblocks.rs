//! The superblock as each device has it: the same for all, but for the item of the device itself.
//!
//! A device that is behind gets a superblock that says so: its item has a mark, even before a
//! commit has written the mark to the chunk tree ([`super::commit`]).

use crate::error::{Error, Place, Result};
use crate::space::device_items;
use crate::tree::Version;
use larder_format::{DevItem, DeviceId, Generation, ObjectId, Superblock};
use zerocopy::little_endian::U64;

/// The superblocks of a commit.
#[derive(Clone, Debug)]
pub(crate) struct Superblocks {
    /// As the device has it whose item it holds.
    pub(crate) common: Box<Superblock>,
    /// Items of all devices. None where there is one device.
    items: Vec<DevItem>,
    /// Devices that are behind while no mark in the chunk tree says so. Without a mark in their
    /// superblock they would look as good as the others.
    unmarked: Vec<(DeviceId, Generation)>,
}

impl Superblocks {
    /// The superblocks that go with this tree of chunks, while these devices are behind, each since
    /// a commit.
    ///
    /// # Errors
    /// Reading; `Corrupt` for device items that cannot be right.
    pub(crate) fn new(
        common: Box<Superblock>,
        chunks: &Version,
        behind: Vec<(DeviceId, Generation)>,
    ) -> Result<Self> {
        let items = if common.num_devices() > 1 { device_items(chunks)? } else { Vec::new() };
        let has_mark = |id| items.iter().any(|i: &DevItem| id_of(i) == id && i.generation != 0);
        let unmarked = behind.into_iter().filter(|(id, _)| !has_mark(*id)).collect();
        let this = Self { common, items, unmarked };
        let own = this.common.device_id();
        if this.items.is_empty() || this.items.iter().any(|item| id_of(item) == own) {
            return Ok(this);
        }
        let what = format!("device {own} has no item");
        Err(Error::corrupt(Place::tree(ObjectId::CHUNK_TREE), what))
    }

    /// That of a device.
    pub(crate) fn of(&self, device: DeviceId) -> Box<Superblock> {
        let mut superblock = self.without_mark(device);
        if let Some((_, since)) = self.unmarked.iter().find(|(id, _)| *id == device) {
            superblock.dev_item.generation = U64::new(since.0.max(1));
        }
        superblock
    }

    /// That of a device that has everything.
    pub(crate) fn without_mark(&self, device: DeviceId) -> Box<Superblock> {
        let mut superblock = self.common.clone();
        if let Some(item) = self.items.iter().find(|item| id_of(item) == device) {
            superblock.dev_item = *item;
        }
        superblock
    }

    /// Does a mark in the chunk tree say that the device is behind?
    pub(crate) fn has_mark(&self, device: DeviceId) -> bool {
        self.items.iter().any(|item| id_of(item) == device && item.generation.get() != 0)
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
