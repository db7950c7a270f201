//! `larder resize`: gives a device of a file system another size, and with --image the file that it
//! lies in.
//!
//! Order matters for the file. It becomes longer before the file system does, and shorter
//! afterwards.

use crate::device_changes;
use crate::device_figures;
use crate::device_orders::{NewSize, Order, Place, Sizes, Summary, Told};
use crate::failure::{Advise, usage};
use crate::image::{Access, Image, open_devices};
use crate::on_mount::devices::change_devices;
use crate::{print, size};
use anyhow::{Context, anyhow};
use larder_fs::OpenOptions;
use larder_volume::{Device, FileDevice};
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Make a file system larger or smaller, on a mount or without one. What lies behind a smaller size
/// is moved first.
#[derive(Debug, clap::Args)]
#[command(
    allow_missing_positional = true,
    after_help = "\
SIZE is a size (300M), a change (+1G, -500M), max (all of the device) or min (as
small as it can be). In front of it may stand the number of the device, 2:max;
else it is the first one.

Ctrl-C ends it: what has moved has moved, and the size is as before.

Exit codes: 0 done, 1 it failed, 2 refused or could not run.

Examples:
  larder resize +1G --image disk.img
  larder resize --image min disk.img
  larder resize -10M mnt
  larder resize --how-small disk.img"
)]
pub(crate) struct Args {
    /// Also make the image file longer before, or shorter afterwards
    #[arg(short, long)]
    image: bool,
    /// Only say how small the device can be, and what decides it
    #[arg(long, conflicts_with = "image")]
    how_small: bool,
    /// Print JSON, in bytes
    #[arg(long)]
    json: bool,
    /// [DEVID:]SIZE|+N|-N|max|min
    #[arg(value_name = "SIZE", allow_hyphen_values = true)]
    size: Option<String>,
    /// Image, block device, or directory of a mount
    #[arg(value_name = "IMAGE|DIR", required = true)]
    target: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Some(target) = &args.target else { return usage("which image?") };
    if args.how_small {
        let device = args.size.as_deref().map(str::parse).transpose();
        let Ok(device) = device else { return usage("--how-small takes the number of a device") };
        return how_small(target, device, args.json);
    }
    let Some(text) = &args.size else { return usage("which size? 300M, +1G, max, min") };
    let place = match text.parse::<Place>() {
        Ok(place) => place,
        Err(why) => return usage(why),
    };
    let summary = resize(target, place, args.image)?;
    if args.json {
        return print::json(&summary);
    }
    print::line(&format!(
        "Device {}: {} before, {} now",
        summary.device,
        size::human(summary.before),
        size::human(summary.size)
    ))
}

/// Resizes a device, and with `with_image` its file.
pub(crate) fn resize(target: &Path, place: Place, with_image: bool) -> anyhow::Result<Summary> {
    if target.is_dir() {
        return on_mount(target, place, with_image);
    }
    let devices = open_devices(target, Access::Write)?;
    let options = OpenOptions { discard: true, ..OpenOptions::default() };
    let image = Image::on(&devices, target, Access::Write, None, options)?;
    let all = image.fs.devices();
    let id = place.device.or(all.first().map(|d| d.id));
    let figures = all.into_iter().find(|d| Some(d.id) == id);
    let file = figures.as_ref().and_then(|d| devices.iter().find(|f| Some(f.name()) == d.name));
    let longer = || -> anyhow::Result<()> {
        let (Some(file), Some(now)) = (file.filter(|_| with_image), &figures) else {
            return Ok(());
        };
        is_file(file)?;
        match wanted(place.size, now.size) {
            Some(bytes) if bytes > file.size() => Ok(file.set_size(bytes)?),
            _ => Ok(()),
        }
    };
    let summary =
        longer().and_then(|()| device_changes::here(&image.fs, &Order::Resize(place), None));
    let closed = image.close();
    let summary = summary?;
    closed?;
    if let Some(file) = file.filter(|_| with_image && summary.outcome == Told::Done)
        && summary.size < file.size()
    {
        file.set_size(summary.size)?;
        file.flush()?;
    }
    Ok(summary)
}

/// The size that the file needs for this.
fn wanted(size: NewSize, now: u64) -> Option<u64> {
    if size == NewSize::Max { None } else { size.bytes(Sizes { now, there: now }) }
}

fn is_file(file: &Arc<FileDevice>) -> anyhow::Result<()> {
    if file.is_block_device() {
        return usage(format!("{} is a block device: leave --image out", file.name()));
    }
    Ok(())
}

fn on_mount(target: &Path, place: Place, with_image: bool) -> anyhow::Result<Summary> {
    let order = Order::Resize(place);
    if !with_image {
        return change_devices(target, order, None);
    }
    let all = device_figures::of(target, false)?;
    let id = place.device.or(all.first().and_then(|d| d["id"].as_u64()));
    let figures = all.iter().find(|d| d["id"].as_u64() == id);
    let path = figures.and_then(|d| d["name"].as_str()).map(PathBuf::from);
    let path =
        path.ok_or_else(|| anyhow!("there is no such device with a file")).could_not_run()?;
    let meta = path.metadata().with_context(|| print::path(&path)).could_not_run()?;
    if !meta.is_file() {
        return usage(format!("{} is no image file: leave --image out", print::path(&path)));
    }
    let now = figures.and_then(|d| d["size"].as_u64()).unwrap_or_default();
    if let Some(bytes) = wanted(place.size, now).filter(|bytes| *bytes > meta.len()) {
        set_len(&path, bytes)?;
    }
    let summary = change_devices(target, order, None)?;
    if summary.outcome == Told::Done && summary.size < path.metadata()?.len() {
        set_len(&path, summary.size)?;
    }
    Ok(summary)
}

/// The daemon has the lock, and has changed what it uses before, or will afterwards.
fn set_len(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let file = File::options().write(true).open(path);
    let done = file.and_then(|file| file.set_len(bytes).and_then(|()| file.sync_all()));
    done.with_context(|| print::path(path)).could_not_run()
}

fn how_small(target: &Path, device: Option<u64>, json: bool) -> anyhow::Result<()> {
    let order = Order::Smallest(device);
    let summary = if target.is_dir() {
        change_devices(target, order, None)?
    } else {
        let image = Image::open(target, Access::Read { force: false }, None)?;
        let summary = device_changes::here(&image.fs, &order, None);
        image.close()?;
        summary?
    };
    if json {
        return print::json(&summary);
    }
    let smallest = summary.smallest.unwrap_or_default();
    let bytes = |value: &Value| size::human(value.as_u64().unwrap_or_default());
    print::line(&format!(
        "Device {} has {} and can have about {}",
        summary.device,
        bytes(&smallest["now"]),
        bytes(&smallest["bytes"])
    ))?;
    for part in smallest["parts"].as_array().into_iter().flatten() {
        let text = |key: &str| part[key].as_str().unwrap_or_default().to_owned();
        print::line(&format!(
            "  {} ({}): {} stored or kept free, which take {}",
            text("kind"),
            text("profile"),
            bytes(&part["bytes"]),
            bytes(&part["on_devices"])
        ))?;
    }
    match smallest["elsewhere"].as_u64() {
        Some(elsewhere) if elsewhere > 0 => {
            print::line(&format!("  Other devices can take up to {}", size::human(elsewhere)))
        }
        _ => Ok(()),
    }
}
