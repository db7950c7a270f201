//! A device is lost, and comes back.
//!
//! Linux writes a file, for both sides, so that both have the same layout. Then each side
//!
//! - scrubs what it has mounted;
//! - reads the file without one of the devices;
//! - scrubs again after the device has come back. Linux has written as much once more in the
//!   meantime, and the device has none of that: it is rebuilt.
//!
//! Only a profile that can lose a device goes on behind the first. In the first round another
//! device is lost after Larder has rebuilt the first one, and Linux reads what was written.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

/// Everything is read and verified.
pub(crate) const SCRUB: &str = "scrub";
/// A file is read without one of the devices.
pub(crate) const READ: &str = "read 1 file, degraded";
/// A device gets what was written without it.
pub(crate) const REBUILD: &str = "rebuild";

/// The device that is lost first, and the one that is lost afterwards, by their places in the list.
pub(crate) const DEVICES: [usize; 2] = [1, 2];
/// The file that is written while a device is away.
pub(crate) const MEANWHILE: &str = "meanwhile";

/// Scrubs a mount with Linux's command or that of Larder, and waits for the end.
pub(crate) fn scrub(larder: Option<&Path>, mount: &Path) -> Result<()> {
    let mut command = match larder {
        Some(larder) => {
            let mut command = Command::new(larder);
            command.args(["scrub", "start", "--wait"]);
            command
        }
        None => {
            let mut command = Command::new("btrfs");
            command.args(["scrub", "start", "-B"]);
            command
        }
    };
    let out = command.arg(mount).output().context("running a scrub")?;
    let said = [out.stdout, out.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    ensure!(out.status.success(), "{command:?}: {}: {}", out.status, said.trim());
    Ok(())
}
