//! `larder shrink`: an image as small as it can be, for shipping.

use crate::device_changes;
use crate::device_orders::{NewSize, Order, Place, Summary, Told};
use crate::failure::{Advise, usage};
use crate::image::{Access, Image, open_devices};
use crate::{devices, print, size};
use anyhow::anyhow;
use larder_fs::OpenOptions;
use larder_volume::{Device, FileDevice};
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Make an image as small as it can be: what is stored moves together to its beginning, into chunks
/// that are no longer than needed, and the file ends behind them. `larder resize --image +1G` makes
/// it larger again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
What is left free is what commits need, and some MiB: enough to change a file
and to delete. `larder resize --how-small` says how small it would be.

Ctrl-C ends it: what has moved has moved, and the image is as long as before.

Exit codes: 0 done, 1 it failed, 2 could not run.

Examples:
  larder shrink disk.img
  larder shrink --json disk.img")]
pub(crate) struct Args {
    /// Print JSON, in bytes
    #[arg(long)]
    json: bool,
    /// Image file; several if the file system spans them and they do not lie in one directory
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let target = devices::join(&args.images);
    if args.images.iter().any(|path| path.is_dir()) {
        return usage("a mount is made smaller by `larder resize min DIR`");
    }
    let devices = open_devices(&target, Access::Write)?;
    if let Some(device) = devices.iter().find(|device| device.is_block_device()) {
        return usage(format!(
            "{} is a block device; `larder resize` makes its file system smaller",
            device.name()
        ));
    }
    let before = measure(&devices);
    let options = OpenOptions { discard: true, ..OpenOptions::default() };
    let image = Image::on(&devices, &target, Access::Write, None, options)?;
    let shrunk = each(&image);
    let closed = image.close();
    let shrunk = shrunk?;
    closed?;
    for summary in shrunk.iter().filter(|s| s.outcome == Told::Done) {
        let file = devices.iter().find(|file| Some(file.name()) == summary.name);
        if let Some(file) = file.filter(|file| summary.size < file.size()) {
            file.set_size(summary.size)?;
            file.flush()?;
        }
    }
    let after = measure(&devices);
    if args.json {
        return print::json(&json!({
            "before": before.len, "size": after.len,
            "stored_before": before.stored, "stored": after.stored, "devices": shrunk,
        }));
    }
    print::line(&format!(
        "{}: {} before, {} now; {} of the host's space saved",
        print::path(&target),
        size::human(before.len),
        size::human(after.len),
        size::human(before.stored.saturating_sub(after.stored))
    ))
}

/// Makes each device as small as it can be.
fn each(image: &Image) -> anyhow::Result<Vec<Summary>> {
    let mut shrunk = Vec::new();
    for device in image.fs.devices() {
        if device.name.is_none() {
            return Err(anyhow!("device {} is missing", device.id))
                .hint("`larder device remove missing IMAGE` takes it out of the file system")
                .could_not_run();
        }
        let place = Place { device: Some(device.id), size: NewSize::Min };
        shrunk.push(device_changes::here(&image.fs, &Order::Resize(place), None)?);
    }
    Ok(shrunk)
}

/// Bytes of image files, and what the host stores of them.
#[derive(Clone, Copy)]
struct Measured {
    len: u64,
    stored: u64,
}

fn measure(devices: &[Arc<FileDevice>]) -> Measured {
    let metas = devices.iter().filter_map(|device| device.path().metadata().ok());
    metas.fold(Measured { len: 0, stored: 0 }, |sum, meta| Measured {
        len: sum.len + meta.len(),
        stored: sum.stored + meta.blocks() * 512,
    })
}
