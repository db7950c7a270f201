//! Replacing a device: which one is meant, and how the daemon of a mount does it.
//!
//! The daemon opens nothing, so the target is opened and locked before, and handed over.

use super::{Pauses, Served};
use crate::failure::Advise;
use crate::interrupt::Interrupt;
use crate::jobs::{Handed, Job, ReplaceOrder};
use crate::{device_figures, print};
use anyhow::anyhow;
use larder_fs::{ReplaceStatus, Replacing};
use larder_volume::FileDevice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// One was to be started beside another one.
pub(crate) const IS_RUNNING: &str = "a device is being replaced already";
/// There is none to end.
pub(crate) const NOT_RUNNING: &str = "no device is being replaced";
/// There is none to go on with.
pub(crate) const NOTHING_TO_RESUME: &str = "no replacement of a device is suspended";

/// The daemon behind a path.
#[derive(Debug)]
pub(crate) struct Replaced(Served);

impl Replaced {
    /// # Errors
    /// The path is not on a Larder mount.
    pub(crate) fn behind(path: &Path) -> anyhow::Result<Self> {
        Ok(Self(Served::behind(path)?))
    }

    /// Begins, with this device, and says how far it is.
    ///
    /// # Errors
    /// One runs already; the daemon cannot be asked.
    pub(crate) fn begin(
        &self,
        source: u64,
        avoid: bool,
        target: FileDevice,
    ) -> anyhow::Result<Replacing> {
        let (target, files) = Handed::of(target);
        self.ask(ReplaceOrder::Start { source, avoid, target }, &files)
    }

    /// Has something done with the replacement, and says how far it is.
    ///
    /// # Errors
    /// There is none; the daemon cannot be asked.
    pub(crate) fn change(&self, order: ReplaceOrder) -> anyhow::Result<Replacing> {
        self.ask(order, &[])
    }

    /// Waits for the end, and has the state told to `each` now and then. A signal suspends it.
    ///
    /// # Errors
    /// The daemon cannot be asked; a signal has come.
    pub(crate) fn wait_for_the_end(
        &self,
        mut state: Replacing,
        each: &dyn Fn(&Replacing),
    ) -> anyhow::Result<Replacing> {
        let (interrupt, pauses) = (Interrupt::watch(), Pauses::begin());
        while state.status == ReplaceStatus::Running {
            each(&state);
            if let Err(asked) = interrupt.wait(pauses.next()) {
                self.change(ReplaceOrder::Suspend)?;
                return Err(asked.into());
            }
            state = self.change(ReplaceOrder::Status)?;
        }
        Ok(state)
    }

    /// Waits for the end, and leaves it alone if a signal comes.
    ///
    /// # Errors
    /// The daemon cannot be asked; a signal has come.
    pub(crate) fn watch(&self, mut state: Replacing) -> anyhow::Result<Replacing> {
        let (interrupt, pauses) = (Interrupt::watch(), Pauses::begin());
        while state.status == ReplaceStatus::Running {
            interrupt.wait(pauses.next())?;
            state = self.change(ReplaceOrder::Status)?;
        }
        Ok(state)
    }

    fn ask(&self, order: ReplaceOrder, target: &[OwnedFd]) -> anyhow::Result<Replacing> {
        let files: Vec<BorrowedFd<'_>> = target.iter().map(AsFd::as_fd).collect();
        let text = self.0.answer(Job::Replace(order), &files)?;
        Ok(serde_json::from_slice(&text)?)
    }
}

/// The number of a device that is given by number or name, or as the first that is missing.
///
/// # Errors
/// There is no such device.
pub(crate) fn number_of(source: &Path, at: &Path) -> anyhow::Result<u64> {
    let devices = device_figures::of(at, false)?;
    let real = |path: &Path| path.canonicalize().ok();
    let is_named = |name: &str| {
        let name = Path::new(name);
        name == source || real(source).is_some_and(|source| real(name) == Some(source))
    };
    let number = source.to_str().and_then(|text| text.parse::<u64>().ok());
    let is_missing = |device: &serde_json::Value| device["state"] == "missing";
    let found = devices.iter().find(|device| {
        (source.as_os_str() == "missing" && is_missing(device))
            || number.is_some_and(|n| device["id"] == n)
            || device["name"].as_str().is_some_and(is_named)
    });
    match found {
        Some(device) => Ok(device_figures::number(&device["id"])),
        None => Err(anyhow!("{} is no device of the file system", print::path(source)))
            .hint("`larder device usage` shows the devices and their numbers")
            .could_not_run(),
    }
}
