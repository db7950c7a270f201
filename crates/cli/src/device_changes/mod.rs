//! Adding, removing and resizing devices, on a mount and on images without one.
//!
//! An image is changed by this process, and a mount by its daemon. Both carry out the same
//! [`Order`](crate::device_orders::Order) (`order`). The daemon is asked by
//! `crate::on_mount::devices`. It opens no files, so a device that is to be added is opened here,
//! and its descriptors go along. The daemon says how far it is while it works, and stops when the
//! program has gone or a signal has come: what has moved until then stays where it is.

mod order;
mod progress;

pub(crate) use order::carry_out;
pub(crate) use progress::Progress;

use crate::device_orders::{Order, Summary, Told};
use crate::devices::superblock_of;
use crate::failure::Advise;
use crate::image::{Access, advise_open, when_free};
use crate::interrupt::Interrupt;
use crate::print;
use anyhow::anyhow;
use larder_fs::{Clearing, Filesystem, Outcome, mkfs};
use larder_volume::{Device, FileDevice, OpenMode};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// Carries an order out on an image that is open in this process. A signal ends it early.
///
/// # Errors
/// What is refused; a signal has come.
pub(crate) fn here(
    fs: &Filesystem,
    order: &Order,
    device: Option<Arc<dyn Device>>,
) -> anyhow::Result<Summary> {
    let interrupt = Interrupt::watch();
    let mut progress = Progress::new();
    let mut watch = |how: Clearing| {
        progress.show(how);
        if interrupt.is_asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let summary = carry_out(fs, order, device, &mut watch);
    progress.finish();
    let summary = summary.could_not_run()?;
    if summary.outcome == Told::Stopped {
        interrupt.check()?;
    }
    Ok(summary)
}

/// What is to become a device of a file system.
pub(crate) struct NewDevice<'p> {
    pub(crate) path: &'p Path,
    /// A file gets this size, and is made if it is not there.
    pub(crate) size: Option<u64>,
    /// What it holds may be overwritten.
    pub(crate) force: bool,
}

impl NewDevice<'_> {
    /// Opens and wipes it, and has it added. A file that was made for this goes if it is not.
    ///
    /// # Errors
    /// It cannot be opened; it holds something that may not be overwritten; what `add` says.
    pub(crate) fn add<T>(
        &self,
        add: impl FnOnce(FileDevice) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.used(|device| {
            mkfs::wipe(&device, !device.is_block_device() || self.force)?;
            add(device)
        })
    }

    /// Opens it, and has it take the place of another device. A file that was made for this goes if
    /// nothing is to go on with it. What it held is there until the replacement begins.
    ///
    /// # Errors
    /// As those of [`Self::add`].
    pub(crate) fn replace<T>(
        &self,
        replace: impl FnOnce(FileDevice) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.used(replace)
    }

    fn used<T>(&self, by: impl FnOnce(FileDevice) -> anyhow::Result<T>) -> anyhow::Result<T> {
        // A link that leads nowhere is not made here.
        let is_made = self.path.symlink_metadata().is_err();
        let done = self.open().and_then(by);
        // It may have become a device although nobody could say so.
        if is_made && done.is_err() && superblock_of(self.path).is_none() {
            let _ = fs::remove_file(self.path);
        }
        done
    }

    fn open(&self) -> anyhow::Result<FileDevice> {
        let device = match self.size.filter(|_| !self.path.exists()) {
            Some(size) => FileDevice::create(self.path, size).could_not_run()?,
            None if !self.path.exists() => {
                return Err(anyhow!("{}: no such file", print::path(self.path)))
                    .hint("give --size SIZE to make a new image file")
                    .could_not_run();
            }
            None => {
                let opened = when_free(self.path, || FileDevice::open(self.path, OpenMode::Write));
                advise_open(opened, Access::Write)?
            }
        };
        // Before a size is touched: a refusal changes nothing.
        if let Some(found) = mkfs::recognise(&device).filter(|_| !self.force) {
            return Err(anyhow!("{} already holds {found}", print::path(self.path)))
                .hint("use --force to overwrite it")
                .could_not_run();
        }
        if let Some(size) = self.size.filter(|size| *size != device.size()) {
            device.set_size(size).could_not_run()?;
        }
        Ok(device)
    }
}

impl From<Outcome> for Told {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Done,
            Outcome::Stopped => Self::Stopped,
        }
    }
}
