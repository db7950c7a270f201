//! Devices that the daemon of a mount adds, removes and resizes.

use super::served::concluded;
use super::{Served, TICK};
use crate::device_changes::Progress;
use crate::device_orders::{Order, Summary, Told};
use crate::devices;
use crate::interrupt::Interrupt;
use crate::jobs::{Handed, Job};
use larder_volume::FileDevice;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// The seed that is mounted on a directory, by the name that the mount was given. `None`: what is
/// mounted there is no seed.
///
/// # Errors
/// The directory is not on a Larder mount.
pub(crate) fn seed_behind(directory: &Path) -> anyhow::Result<Option<PathBuf>> {
    let served = Served::behind(directory)?;
    let is_seed = devices::are_seeds(&devices::names(served.image()));
    Ok(is_seed.then(|| served.image().to_owned()))
}

/// Has the daemon behind a directory carry an order out. A signal ends it early.
///
/// # Errors
/// What the daemon refuses; it cannot be asked; a signal has come.
pub(crate) fn change_devices(
    path: &Path,
    order: Order,
    device: Option<FileDevice>,
) -> anyhow::Result<Summary> {
    let served = Served::behind(path)?;
    let (device, files) = device.map(Handed::of).unzip();
    let files = files.unwrap_or_default();
    let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let interrupt = Interrupt::watch();
    let inlet = served.ask(Job::Devices { order, device }, &borrowed)?;
    // The daemon has its own now.
    drop(files);
    let mut progress = Progress::new();
    std::thread::scope(|threads| {
        let (inlet, progress) = (&inlet, &mut progress);
        let reader = threads.spawn(move || inlet.copy_to(&mut &mut *progress, &mut |_| ()));
        while !reader.is_finished() {
            if interrupt.wait(TICK).is_err() {
                // The daemon stops, and says how far it came.
                inlet.let_go();
                break;
            }
        }
        reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    progress.finish();
    let summary: Summary = serde_json::from_value(concluded(inlet)?)?;
    if summary.outcome == Told::Stopped {
        interrupt.check()?;
    }
    Ok(summary)
}
