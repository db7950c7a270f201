//! Carrying an order out on an open file system.

use crate::device_orders::{Order, Place, Sizes, Summary, Told, Which};
use crate::print;
use anyhow::{anyhow, bail};
use larder_format::DeviceId;
use larder_fs::{Clearing, DeviceFigures, DeviceState, Filesystem, Smallest};
use larder_volume::Device;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// Does what is wanted. `device` is the one that is to be added.
///
/// # Errors
/// What is refused.
pub(crate) fn carry_out(
    fs: &Filesystem,
    order: &Order,
    device: Option<Arc<dyn Device>>,
    watch: &mut dyn FnMut(Clearing) -> ControlFlow<()>,
) -> anyhow::Result<Summary> {
    match order {
        Order::Add => add(fs, device.ok_or_else(|| anyhow!("no device came along"))?),
        Order::Remove(which) => {
            let found = find(fs, which)?;
            let outcome = fs.remove_device(DeviceId(found.id), watch)?.into();
            let size = if outcome == Told::Done { 0 } else { found.size };
            Ok(summary(&found, outcome, size))
        }
        Order::Resize(place) => resize(fs, *place, watch),
        Order::Smallest(id) => {
            let found = one(fs, *id)?;
            let smallest: Smallest = fs.smallest_size(DeviceId(found.id))?;
            let size = found.size;
            let smallest = Some(serde_json::to_value(smallest)?);
            Ok(Summary { smallest, ..summary(&found, Told::Done, size) })
        }
    }
}

fn summary(of: &DeviceFigures, outcome: Told, size: u64) -> Summary {
    let (device, name, before) = (of.id, of.name.clone(), of.size);
    Summary { outcome, device, name, before, size, smallest: None }
}

fn add(fs: &Filesystem, device: Arc<dyn Device>) -> anyhow::Result<Summary> {
    let id = fs.add_device(device)?;
    let added = one(fs, Some(id.0))?;
    Ok(Summary { before: 0, ..summary(&added, Told::Done, added.size) })
}

fn resize(
    fs: &Filesystem,
    place: Place,
    watch: &mut dyn FnMut(Clearing) -> ControlFlow<()>,
) -> anyhow::Result<Summary> {
    let found = one(fs, place.device)?;
    let id = DeviceId(found.id);
    let sizes = Sizes { now: found.size, there: fs.device_bytes(id)? };
    let (size, outcome) = match place.size.bytes(sizes) {
        Some(bytes) => {
            let outcome = fs.resize_device(id, bytes, watch)?;
            (one(fs, Some(found.id))?.size, outcome)
        }
        None => fs.shrink_device(id, watch)?,
    };
    Ok(summary(&found, outcome.into(), size))
}

/// The device with a number, or the first one.
fn one(fs: &Filesystem, id: Option<u64>) -> anyhow::Result<DeviceFigures> {
    match id {
        Some(id) => find(fs, &Which::Id(id)),
        None => {
            let first = fs.devices().into_iter().next();
            first.ok_or_else(|| anyhow!("the file system has no devices"))
        }
    }
}

fn find(fs: &Filesystem, which: &Which) -> anyhow::Result<DeviceFigures> {
    let all = fs.devices();
    let is_it = |d: &DeviceFigures| match which {
        Which::Id(id) => d.id == *id,
        Which::Missing => d.state == DeviceState::Missing,
        Which::Path(path) => d.name.as_ref().is_some_and(|name| is_path(name, path)),
    };
    let known: Vec<String> = all.iter().map(shown).collect();
    let found = all.into_iter().find(|d| is_it(d));
    let known = known.join(", ");
    Ok(match (found, which) {
        (Some(found), _) => found,
        (None, Which::Id(id)) => bail!("there is no device {id}; there are {known}"),
        (None, Which::Missing) => bail!("no device is missing; there are {known}"),
        (None, Which::Path(path)) => {
            bail!("{} is none of the devices; there are {known}", print::path(path))
        }
    })
}

fn shown(device: &DeviceFigures) -> String {
    let name = device.name.as_ref().map_or_else(|| "missing".to_owned(), |n| print::harmless(n));
    format!("{} ({name})", device.id)
}

/// Does a name lead to the file behind a path? A daemon may not look, and goes by the name, which
/// the program has made whole.
fn is_path(name: &str, path: &Path) -> bool {
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    Path::new(name) == path || whole(Path::new(name)) == whole(path)
}
