//! `larder mkfs`: a new file system, on one device or several.

use crate::failure::{Advise, usage};
use crate::format_options::FormatOptions;
use crate::image::{Access, advise_open, when_free};
use crate::source_date::source_date;
use crate::{format_options, print, size};
use larder_fs::mkfs::{MkfsOptions, MkfsReport, NewDevice, mkfs_on, recognise};
use larder_volume::{Device, FileDevice, OpenMode, VolumeError};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Make a btrfs file system in image files or on block devices.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder mkfs --size 8G disk.img
  larder mkfs --label backup -m single --csum xxhash /dev/sdb1
  larder mkfs -d raid1 -m raid1 /dev/sdb1 /dev/sdc1
  larder mkfs --size 4G -d raid5 -m raid1c3 a.img b.img c.img
  fallocate -l 8G disk.img && larder mkfs --nodiscard disk.img
  SOURCE_DATE_EPOCH=0 larder mkfs --size 1G --uuid 6ba7b810-9dad-11d1-80b4-00c04fd430c8 a.img

A file system on several devices is named by any of them afterwards: block
devices are found by its uuid, image files in the same directory. All targets
are looked at before the first one is changed.

An image made with --uuid and SOURCE_DATE_EPOCH is the same, byte for byte,
every time; by whatever user, with --root-owner. With --nodiscard that holds for
what is written, not for the rest.")]
pub(crate) struct Args {
    /// Size of the image file, or of each of them; made if it does not exist
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
    #[command(flatten)]
    format: FormatOptions,
    /// Owner of the root directory, as numbers (default: the user who makes it)
    #[arg(long, value_name = "UID:GID", value_parser = format_options::owner)]
    root_owner: Option<(u32, u32)>,
    /// Discard nothing first: an image file keeps the disk space that it has, and old bytes stay
    /// where nothing is written
    #[arg(long, short = 'K')]
    nodiscard: bool,
    /// Overwrite a file system or partition table that is there
    #[arg(long, short = 'f')]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Image files or block devices
    #[arg(required = true, value_name = "TARGET")]
    targets: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let options = options(args)?;
    let new: Vec<&PathBuf> = args.targets.iter().filter(|target| !target.exists()).collect();
    let result = make(args, &options);
    if result.is_err() {
        // A file that this command made is not left half made.
        for target in new {
            let _ = std::fs::remove_file(target);
        }
    }
    let report = result?;
    if report.metadata.tolerated_losses() < report.data.tolerated_losses() {
        let (metadata, data) = (report.metadata.name(), report.data.name());
        print::say(&format!(
            "larder: note: metadata ({metadata}) survives the loss of fewer devices than data \
                ({data})"
        ));
    }
    if args.json { show_json(args, &report) } else { show(args, &report) }
}

fn options(args: &Args) -> anyhow::Result<MkfsOptions> {
    let format = args.format.chosen()?;
    Ok(MkfsOptions {
        label: format.label,
        uuid: format.uuid,
        device_uuid: None,
        bytes: None,
        metadata: format.metadata,
        data: format.data,
        csum: format.csum,
        nodesize: format.nodesize,
        features: format.features,
        time: source_date()?,
        root_owner: args.root_owner.unwrap_or_else(|| {
            (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
        }),
        force: args.force,
        discard: !args.nodiscard,
    })
}

fn make(args: &Args, options: &MkfsOptions) -> anyhow::Result<MkfsReport> {
    for (n, target) in args.targets.iter().enumerate() {
        if args.targets[..n].iter().any(|other| is_same(other, target)) {
            return usage(format!("{} is given twice", print::path(target)));
        }
    }
    let opened = args.targets.iter().map(|target| open(args, target));
    let mut devices = opened.collect::<anyhow::Result<Vec<FileDevice>>>()?;
    // Before a size is touched: a refusal changes nothing.
    for device in devices.iter().filter(|_| !args.force) {
        if let Some(found) = recognise(device) {
            return Err(anyhow::anyhow!("{} already holds {found}", device.name()))
                .hint("use --force to overwrite it")
                .could_not_run();
        }
    }
    for device in &mut devices {
        resize(args.size, device)?;
    }
    let devices: Vec<&dyn Device> = devices.iter().map(|device| device as &dyn Device).collect();
    match mkfs_on(&devices, options) {
        Err(e @ larder_fs::Error::Unsupported(_)) => {
            let names: Vec<String> = args.targets.iter().map(|t| print::path(t)).collect();
            Err(anyhow::Error::new(e).context(names.join(", "))).could_not_run()
        }
        other => Ok(other?),
    }
}

/// Do two names lead to the same file?
fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    one == other || real(one).is_some_and(|one| real(other) == Some(one))
}

/// Opens a target, which is made if it is not there.
fn open(args: &Args, target: &Path) -> anyhow::Result<FileDevice> {
    if target.exists() {
        let opened = when_free(target, || FileDevice::open(target, OpenMode::Write));
        return advise_open(opened, Access::Write);
    }
    match args.size {
        Some(size) => create(target, size),
        None => Err(anyhow::anyhow!("{}: no such file", target.display()))
            .hint("give --size SIZE to make a new image")
            .could_not_run(),
    }
}

/// Gives a file the size that was asked for.
fn resize(size: Option<u64>, device: &mut FileDevice) -> anyhow::Result<()> {
    if let Some(size) = size.filter(|s| *s != device.size()) {
        if device.is_block_device() {
            return usage(format!(
                "{} is a block device of {} bytes: leave --size out",
                device.name(),
                device.size()
            ));
        }
        device.set_size(size)?;
    }
    if device.size() == 0 {
        return Err(anyhow::anyhow!("{} is empty", device.name()))
            .hint("give --size SIZE to say how large the image is to be")
            .could_not_run();
    }
    Ok(())
}

/// Makes the file.
fn create(target: &Path, size: u64) -> anyhow::Result<FileDevice> {
    let above = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match FileDevice::create(target, size) {
        Err(e @ VolumeError::Io { .. }) if !above.is_dir() => {
            Err(e).hint(format!("there is no directory {}", print::path(above))).could_not_run()
        }
        made => advise_open(made, Access::Write),
    }
}

fn show(args: &Args, r: &MkfsReport) -> anyhow::Result<()> {
    let label = match &args.format.label[..] {
        "" => String::new(),
        label => format!("Label:     {label}\n"),
    };
    print::line(&format!(
        "{label}\
         {}\
         UUID:      {}\n\
         Size:      {}\n\
         Node size: {}\n\
         Checksum:  {}\n\
         Profiles:  data {}, metadata {}\n\
         Features:  {}",
        show_devices(args, r),
        print::uuid(r.uuid),
        size::human(r.total_bytes),
        r.nodesize,
        r.csum.name(),
        r.data.name(),
        r.metadata.name(),
        r.features.names().join(", ")
    ))
}

fn show_devices(args: &Args, r: &MkfsReport) -> String {
    if let [target] = &args.targets[..] {
        return format!("Image:     {}\n", target.display());
    }
    let line = |(device, target): (&NewDevice, &PathBuf)| {
        format!("Device {}:  {} ({})\n", device.id, target.display(), size::human(device.bytes))
    };
    r.devices.iter().zip(&args.targets).map(line).collect()
}

fn show_json(args: &Args, r: &MkfsReport) -> anyhow::Result<()> {
    let device = |(device, target): (&NewDevice, &PathBuf)| {
        json!({
            "id": device.id.0,
            "uuid": print::uuid(device.uuid),
            "bytes": device.bytes,
            "path": print::path(target),
        })
    };
    let devices: Vec<_> = r.devices.iter().zip(&args.targets).map(device).collect();
    print::json(&json!({
        "uuid": print::uuid(r.uuid),
        "total_bytes": r.total_bytes,
        "bytes_used": r.bytes_used,
        "nodesize": r.nodesize,
        "csum": r.csum.name(),
        "data": r.data.name(),
        "metadata": r.metadata.name(),
        "features": r.features.names(),
        "devices": devices,
    }))
}
