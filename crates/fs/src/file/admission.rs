//! Admission: what a write has to have before its bytes may be delayed.
//!
//! A write needs data space for every sector that it touches, and budget of memory. If the file had
//! no delayed data, it also needs metadata for the items that write-back will change. An operation
//! that waits for metadata must not hold any that another operation waits for. So the metadata for
//! the items is reserved in one step with the operation's own handle, and passes to the file with
//! the bytes.

use super::nocow::in_place;
use crate::engine::delalloc::{self, Admitted};
use crate::engine::{Core, Inode};
use crate::error::Result;
use crate::space::SpaceKind;
use crate::transaction::Handle;
use std::sync::Arc;

/// Items that delayed data of a file may change: one is written, one is split or trimmed for it.
const DELAYED_ITEMS: u64 = 2;

/// Joins the transaction to take in what was admitted, with space for the items of a file that had
/// no delayed data. Both are reserved in one step: an operation that waits for metadata must not
/// hold any that another one waits for.
///
/// # Errors
/// `NoSpace`, `ReadOnly`, `WouldBlock`.
pub(super) fn begin_taking_in<'a>(
    core: &'a Core,
    inode: &Inode,
    admitted: &mut Admitted,
) -> Result<Handle<'a>> {
    if !inode.data.is_clean() {
        return core.begin_for_item(inode);
    }
    let cost = core.item_cost(DELAYED_ITEMS);
    let (handle, items) = Handle::join_for_item_keeping(core, &inode.noted_in, cost)?;
    admitted.items = Some(items);
    Ok(handle)
}

/// As [`begin_taking_in`], for an operation that also changes `items` other items and may have
/// nothing to take in.
///
/// # Errors
/// As [`begin_taking_in`].
pub(super) fn begin_with<'a>(
    core: &'a Core,
    inode: &Inode,
    (items, deleting): (u64, bool),
    admitted: Option<&mut Admitted>,
) -> Result<Handle<'a>> {
    let Some(admitted) = admitted.filter(|_| inode.data.is_clean()) else {
        return Handle::join(core, items, deleting);
    };
    let cost = core.item_cost(DELAYED_ITEMS);
    let (handle, kept) = Handle::join_keeping(core, items, deleting, cost)?;
    admitted.items = Some(kept);
    Ok(handle)
}

/// Waits for budget and reserves space for `len` bytes at `start`, but not for the items of a file
/// that had no delayed data. Nothing is changed. The guard gives back what is reserved.
///
/// # Errors
/// `NoSpace`; `WouldBlock`; the errors of writing data back.
pub(super) fn admit(core: &Core, inode: &Inode, start: u64, len: usize) -> Result<Admitted> {
    core.data.wait_for_budget(core, len as u64)?;
    let footprint = super::extents::ceil(start + len as u64) - super::extents::floor(start);
    let space = match core.space.accounts.try_reserve(SpaceKind::Data, footprint) {
        Some(space) => space,
        None if in_place(core, inode, start, len)? => core.space.accounts.empty(SpaceKind::Data),
        None => core.space.accounts.reserve(SpaceKind::Data, footprint)?,
    };
    Ok(Admitted { space, items: None })
}

/// Bytes that are going to be taken in besides what an operation is about, with what was admitted
/// for them.
#[derive(Debug)]
pub(super) struct Rewrite {
    pub(super) at: u64,
    pub(super) data: Vec<u8>,
    pub(super) admitted: Admitted,
}

impl Rewrite {
    /// # Errors
    /// As [`admit`].
    pub(super) fn new(core: &Core, inode: &Inode, at: u64, data: Vec<u8>) -> Result<Self> {
        let admitted = admit(core, inode, at, data.len())?;
        Ok(Self { at, data, admitted })
    }
    /// First byte behind them.
    pub(super) fn end(&self) -> u64 {
        self.at + self.data.len() as u64
    }
    /// Takes the bytes in. `size` is the file's size before the operation; see
    /// [`delalloc::take_in`].
    pub(super) fn take_in(self, core: &Core, inode: &Arc<Inode>, size: u64) {
        delalloc::take_in(core, inode, self.at, &self.data, size, self.admitted);
    }
}
