//! The devices of a file system, one by one, as its daemon or its image tells of them.
//!
//! A file system of the kernel is not asked. What both sources give is JSON of the same form, that
//! of `larder_fs::DeviceFigures`.

use crate::image::{Access, Image};
use crate::mounted::{mounted, mounted_here};
use larder_fuse::control;
use serde_json::Value;
use std::path::Path;

/// The counters of errors: names as `btrfs device stats` has them, and titles.
pub(crate) const COUNTERS: [(&str, &str); 5] = [
    ("write_io_errs", "Write errors"),
    ("read_io_errs", "Read errors"),
    ("flush_io_errs", "Flush errors"),
    ("corruption_errs", "Corruption errors"),
    ("generation_errs", "Generation errors"),
];

fn is_mount(target: &Path) -> bool {
    target.is_dir() || larder_fuse::mount::is_dead(target)
}

/// The devices of an image, or of what is mounted on a directory. `force`: even if the image is in
/// use.
pub(crate) fn of(target: &Path, force: bool) -> anyhow::Result<Vec<Value>> {
    if is_mount(target) {
        return mounted(target, control::devices);
    }
    let image = Image::open(target, Access::Read { force }, None)?;
    let devices: Result<Vec<Value>, _> =
        image.fs.devices().iter().map(serde_json::to_value).collect();
    image.close()?;
    Ok(devices?)
}

/// Sets the counters of all devices to 0.
pub(crate) fn reset(target: &Path) -> anyhow::Result<()> {
    if is_mount(target) {
        return mounted_here(target, control::reset_device_errors);
    }
    let image = Image::open(target, Access::Write, None)?;
    let reset = image.fs.reset_device_errors().map_err(Into::into);
    let closed = image.close();
    reset.and(closed)
}

/// A number of a device, or one below `errors`.
pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// The counters of a device, in their order.
pub(crate) fn counters(device: &Value) -> [u64; 5] {
    COUNTERS.map(|(name, _)| number(&device["errors"][name]))
}

/// The name of a device; `missing` for one that is not there.
pub(crate) fn name(device: &Value) -> String {
    device["name"].as_str().unwrap_or("missing").to_owned()
}
