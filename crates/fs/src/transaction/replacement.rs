//! The replacement of a device, as far as commits have to do with it.
//!
//! A room above copies ([`crate::replace`]). Here stands what it has come to, and a commit writes
//! that: the item in the device tree, and the superblock of the target. Both are taken at the same
//! moment ([`Replacement::for_commit`]), so a target has the superblock of a target exactly as long
//! as the item says that there is one.
//!
//! | | superblock of the target | of the source |
//! |---|---|---|
//! | it is being copied | that of the source, with id 0 and a uuid of its own; in the first commit it is durable before any other | as always |
//! | the commit that ends it | that of the source, durable before any other | none |
//!
//! So no power cut leaves a file system whose superblocks rely on the target while the target does
//! not know that. The source keeps the superblock of the commit before until it is erased. By then
//! the target, which says that it is the same device, has a newer one. If the target fails as it
//! gets that, the source has the superblock of the commit, too, and counts.

use crate::error::{Error, Place, Result};
use crate::lock::{self, Mutex};
use crate::tree::Version;
use larder_format::items::{DevReplace, ReplaceState};
use larder_format::{DeviceId, ObjectId, Physical};
use zerocopy::IntoBytes;

/// The target of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The device that it is going to be.
    pub(crate) source: DeviceId,
    /// Its own uuid, until it is that device.
    pub(crate) uuid: [u8; 16],
    /// Has it no superblock yet?
    is_new: bool,
    /// Is it that device with the commit that is being made?
    pub(crate) takes_over: bool,
}

impl Target {
    /// Is its superblock durable before any other?
    pub(crate) fn goes_first(&self) -> bool {
        self.is_new || self.takes_over
    }
}

/// The replacement that is under way, or was the last.
#[derive(Debug, Default)]
pub(crate) struct Replacement(Mutex<Inner, lock::Replacement>);

#[derive(Debug, Default)]
struct Inner {
    item: Option<DevReplace>,
    target: Option<Target>,
    /// The device whose place a target has taken, or was about to, that was given up.
    returns: Option<DeviceId>,
    changed: bool,
}

/// What a commit writes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Written {
    /// The item, if it has changed.
    item: Option<DevReplace>,
    pub(crate) target: Option<Target>,
    /// A device that may have no superblock of the commit before, although it is one of the file
    /// system: it gets that of this commit before any other.
    pub(crate) returns: Option<DeviceId>,
}

impl Written {
    /// The bytes of the item, if it has changed.
    pub(crate) fn item(&self) -> Option<&[u8]> {
        self.item.as_ref().map(IntoBytes::as_bytes)
    }
}

impl Inner {
    fn end(&mut self, state: ReplaceState, now: u64) {
        if let Some(item) = &mut self.item {
            item.set_state(state);
            item.stopped.set(now);
            self.changed = true;
        }
    }
}

impl Replacement {
    /// As a device tree has it.
    ///
    /// # Errors
    /// Reading; `Corrupt` for an item that cannot be right.
    pub(crate) fn of(devices: &Version) -> Result<Self> {
        let key = DevReplace::key();
        let Some(item) = devices.get(&key)? else { return Ok(Self::default()) };
        let item = DevReplace::parse(item.data())
            .map_err(|e| Error::corrupt(Place::item(ObjectId::DEV_TREE, key), e.0))?;
        Ok(Self(Mutex::new(Inner { item: Some(*item), ..Inner::default() })))
    }

    /// The item, if there is one.
    pub(crate) fn item(&self) -> Option<DevReplace> {
        self.0.lock().item
    }

    /// The target, if it is there.
    pub(crate) fn target(&self) -> Option<Target> {
        self.0.lock().target
    }

    /// The item of a replacement that has not ended.
    pub(crate) fn under_way(&self) -> Option<DevReplace> {
        self.item().filter(|item| item.state().is_under_way())
    }

    /// One begins.
    pub(crate) fn begin(&self, item: DevReplace, uuid: [u8; 16]) {
        let target = Target { source: item.source(), uuid, is_new: true, takes_over: false };
        let (item, target) = (Some(item), Some(target));
        *self.0.lock() = Inner { item, target, returns: None, changed: true };
    }

    /// The target of one that is under way is there.
    pub(crate) fn found_target(&self, uuid: [u8; 16]) {
        let mut inner = self.0.lock();
        inner.target = inner.item.map(|item| Target {
            source: item.source(),
            uuid,
            is_new: false,
            takes_over: false,
        });
    }

    /// Everything in front of `copied` is on the target, up to `copying` it is on its way.
    pub(crate) fn set_cursor(&self, copied: Physical, copying: Physical) {
        self.change(|item| item.set_cursor(copied, copying));
    }

    /// Changes the item.
    pub(crate) fn change(&self, change: impl FnOnce(&mut DevReplace)) {
        let mut inner = self.0.lock();
        if let Some(item) = &mut inner.item {
            change(item);
            inner.changed = true;
        }
    }

    /// With the next commit the target is the device.
    pub(crate) fn take_over(&self, now: u64) {
        let mut inner = self.0.lock();
        inner.end(ReplaceState::Finished, now);
        if let Some(target) = &mut inner.target {
            target.takes_over = true;
        }
    }

    /// With the next commit there is no target any more.
    pub(crate) fn give_up(&self, now: u64) {
        let mut inner = self.0.lock();
        inner.end(ReplaceState::Canceled, now);
        let target = inner.target.take();
        inner.returns = target.filter(|target| target.takes_over).map(|target| target.source);
    }

    /// There is no target any more, or it is not there.
    pub(crate) fn forget_target(&self) {
        self.0.lock().target = None;
    }

    /// What the commit that is being made writes.
    pub(crate) fn for_commit(&self) -> Written {
        let mut inner = self.0.lock();
        let changed = std::mem::take(&mut inner.changed);
        let returns = inner.returns.take();
        let item = inner.item.filter(|_| changed);
        let written = Written { item, target: inner.target, returns };
        if let Some(target) = &mut inner.target {
            target.is_new = false;
        }
        written
    }
}
