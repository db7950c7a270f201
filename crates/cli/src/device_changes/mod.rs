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
use crate::failure::Advise;
use crate::image::{Access, advise_open, when_free};
use crate::interrupt::Interrupt;
use crate::print;
use anyhow::anyhow;
use larder_fs::{Clearing, Filesystem, Outcome, mkfs};
use larder_volume::{Device, FileDevice, OpenMode};
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

/// Opens what is to become a device of a file system, and wipes it.
///
/// # Errors
/// It cannot be opened; it holds something, and `force` is not given.
pub(crate) fn open_new(path: &Path, size: Option<u64>, force: bool) -> anyhow::Result<FileDevice> {
    let device = match size.filter(|_| !path.exists()) {
        Some(size) => FileDevice::create(path, size),
        None => when_free(path, || FileDevice::open(path, OpenMode::Write)),
    };
    let device = advise_open(device, Access::Write)?;
    if let Some(size) = size.filter(|size| *size != device.size()) {
        device.set_size(size)?;
    }
    if let Some(found) = mkfs::recognise(&device).filter(|_| !force) {
        return Err(anyhow!("{} holds {found}", print::path(path)))
            .hint("--force overwrites it")
            .could_not_run();
    }
    mkfs::wipe(&device, !device.is_block_device() || force)?;
    Ok(device)
}

impl From<Outcome> for Told {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Done,
            Outcome::Stopped => Self::Stopped,
        }
    }
}
