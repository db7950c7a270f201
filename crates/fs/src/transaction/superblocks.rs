//! The superblock as each device has it: the same for all, but for the item of the device itself.
//!
//! A device that is behind gets a superblock that says so: its item has a mark, even before a
//! commit has written the mark to the chunk tree ([`super::commit`]). The target of a replacement
//! has that of its source, as [`super::replacement`] says.

use crate::error::{Error, Place, Result};
use crate::space::device_items;
use crate::transaction::Target;
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
    /// Devices that have their first superblock with this commit.
    new: Vec<DeviceId>,
    /// The target of a replacement.
    target: Option<Target>,
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
        let mut this = Self { common, items, unmarked: Vec::new(), new: Vec::new(), target: None };
        this.unmarked = behind.into_iter().filter(|(id, _)| !this.has_mark(*id)).collect();
        let own = this.common.device_id();
        if this.items.is_empty() || this.items.iter().any(|item| id_of(item) == own) {
            return Ok(this);
        }
        let what = format!("device {own} has no item");
        Err(Error::corrupt(Place::tree(ObjectId::CHUNK_TREE), what))
    }

    /// Those of a file system that is being built upon seeds, of which no tree knows yet.
    pub(crate) fn of_new(common: Box<Superblock>) -> Self {
        Self { common, items: Vec::new(), unmarked: Vec::new(), new: Vec::new(), target: None }
    }

    /// The same, while these devices have none yet.
    pub(crate) fn with_new(self, new: Vec<DeviceId>) -> Self {
        Self { new, ..self }
    }

    /// The same, while there is this target of a replacement.
    pub(crate) fn with_target(mut self, target: Option<Target>) -> Self {
        self.target = target;
        if target.is_some_and(|target| target.goes_first()) {
            self.new.push(DeviceId::REPLACE_TARGET);
        }
        self
    }

    /// The same, where the target is the device by now, or is there no more.
    pub(crate) fn without_target(mut self) -> Self {
        self.new.retain(|id| *id != DeviceId::REPLACE_TARGET);
        self.target = None;
        self
    }

    /// The same, where the target has failed as it took the place of its source: that has a
    /// superblock again, before any other device, since the target may have one by which it is the
    /// device.
    pub(crate) fn with_source_again(self) -> Self {
        let source = self.target.map(|target| target.source);
        let mut this = self.without_target();
        this.new.extend(source);
        this
    }

    /// The same, naming the devices that are not written, or will not be by now.
    pub(crate) fn with_failed(mut self, is_written: impl Fn(DeviceId) -> bool) -> Self {
        let fsid = self.common.metadata_fsid();
        let own = self.items.iter().filter(|item| !item.is_seed_of(&fsid)).map(id_of);
        let failed: Vec<DeviceId> = own.filter(|id| !is_written(*id)).collect();
        self.common.note_failed(&failed);
        self
    }

    /// Is this the target that they know?
    pub(crate) fn is_of_target(&self, target: Target) -> bool {
        self.target.is_some_and(|known| known.uuid == target.uuid)
    }

    /// Is the target the device with this commit?
    pub(crate) fn target_takes_over(&self) -> bool {
        self.target.is_some_and(|target| target.takes_over)
    }

    /// Devices that have none yet.
    pub(crate) fn new_devices(&self) -> &[DeviceId] {
        &self.new
    }

    /// That of a device. None for a device that this commit does not know: it is coming or going.
    pub(crate) fn of(&self, device: DeviceId) -> Option<Box<Superblock>> {
        if let Some(target) = self.target {
            if device == DeviceId::REPLACE_TARGET {
                return self.of_target(target);
            }
            if target.takes_over && device == target.source {
                return None;
            }
        }
        let mut superblock = self.without_mark(device)?;
        if let Some((_, since)) = self.unmarked.iter().find(|(id, _)| *id == device) {
            superblock.dev_item = superblock.dev_item.with_mark(Some(*since));
        }
        Some(superblock)
    }

    fn of_target(&self, target: Target) -> Option<Box<Superblock>> {
        let mut superblock = self.without_mark(target.source)?;
        // It has everything, or else it does not take over.
        superblock.dev_item.generation = U64::new(0);
        // It may fail, and the source have the superblock of this commit as well.
        superblock.dev_item = superblock.dev_item.with_arrival(target.takes_over);
        if !target.takes_over {
            superblock.dev_item.devid = U64::new(DeviceId::REPLACE_TARGET.0);
            superblock.dev_item.uuid = target.uuid;
        }
        Some(superblock)
    }

    /// That of a device that has everything. None as for [`Self::of`].
    pub(crate) fn without_mark(&self, device: DeviceId) -> Option<Box<Superblock>> {
        let mut superblock = self.common.clone();
        match self.items.iter().find(|item| id_of(item) == device) {
            Some(item) => superblock.dev_item = *item,
            None if self.items.is_empty() && device == superblock.device_id() => {}
            None => return None,
        }
        Some(superblock)
    }

    /// Does a mark in the chunk tree say that the device is behind?
    pub(crate) fn has_mark(&self, device: DeviceId) -> bool {
        let fsid = self.common.metadata_fsid();
        self.items.iter().any(|item| id_of(item) == device && item.mark(&fsid).is_some())
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
