//! `larder mkfs`: a new file system.

use crate::failure::{Advise, usage};
use crate::format_options::FormatOptions;
use crate::image::{Access, advise_open, when_free};
use crate::source_date::source_date;
use crate::{format_options, print, size};
use larder_fs::mkfs::{MkfsOptions, MkfsReport, mkfs, recognise};
use larder_volume::{Device, FileDevice, OpenMode, VolumeError};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Make a btrfs file system in an image file or on a block device.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder mkfs --size 8G disk.img
  larder mkfs --label backup -m single --csum xxhash /dev/sdb1
  fallocate -l 8G disk.img && larder mkfs --nodiscard disk.img
  SOURCE_DATE_EPOCH=0 larder mkfs --size 1G --uuid 6ba7b810-9dad-11d1-80b4-00c04fd430c8 a.img

An image made with --uuid and SOURCE_DATE_EPOCH is the same, byte for byte,
every time; by whatever user, with --root-owner. With --nodiscard that holds for
what is written, not for the rest.")]
pub(crate) struct Args {
    /// Size of the image file; made if it does not exist
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
    /// Image file or block device
    target: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let options = options(args)?;
    let existed = args.target.exists();
    let result = make(args, &options, existed);
    if result.is_err() && !existed {
        // A file that this command made is not left half made.
        let _ = std::fs::remove_file(&args.target);
    }
    let report = result?;
    if args.json { show_json(&report) } else { show(&args.target, &report, &args.format.label) }
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

fn make(args: &Args, options: &MkfsOptions, existed: bool) -> anyhow::Result<MkfsReport> {
    let target = &args.target;
    let mut device = if existed {
        advise_open(when_free(target, || FileDevice::open(target, OpenMode::Write)), Access::Write)?
    } else {
        let Some(size) = args.size else {
            return Err(anyhow::anyhow!("{}: no such file", target.display()))
                .hint("give --size SIZE to make a new image")
                .could_not_run();
        };
        create(target, size)?
    };
    // Before the size is touched: a refusal changes nothing.
    if !args.force
        && let Some(found) = recognise(&device)
    {
        return Err(anyhow::anyhow!("{} already holds {found}", target.display()))
            .hint("use --force to overwrite it")
            .could_not_run();
    }
    if let Some(size) = args.size.filter(|s| *s != device.size()) {
        if device.is_block_device() {
            return usage(format!(
                "{} is a block device of {} bytes: leave --size out",
                target.display(),
                device.size()
            ));
        }
        device.set_size(size)?;
    }
    if device.size() == 0 {
        return Err(anyhow::anyhow!("{} is empty", target.display()))
            .hint("give --size SIZE to say how large the image is to be")
            .could_not_run();
    }
    match mkfs(&device, options) {
        Err(e @ larder_fs::Error::Unsupported(_)) => {
            Err(anyhow::Error::new(e).context(target.display().to_string())).could_not_run()
        }
        other => Ok(other?),
    }
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

fn show(target: &Path, r: &MkfsReport, label: &str) -> anyhow::Result<()> {
    let label = if label.is_empty() { String::new() } else { format!("Label:     {label}\n") };
    print::line(&format!(
        "{label}\
         Image:     {}\n\
         UUID:      {}\n\
         Size:      {}\n\
         Node size: {}\n\
         Checksum:  {}\n\
         Profiles:  data {}, metadata {}\n\
         Features:  {}",
        target.display(),
        print::uuid(r.uuid),
        size::human(r.total_bytes),
        r.nodesize,
        r.csum.name(),
        r.data.name(),
        r.metadata.name(),
        r.features.names().join(", ")
    ))
}

fn show_json(r: &MkfsReport) -> anyhow::Result<()> {
    print::json(&json!({
        "uuid": print::uuid(r.uuid),
        "total_bytes": r.total_bytes,
        "bytes_used": r.bytes_used,
        "nodesize": r.nodesize,
        "csum": r.csum.name(),
        "data": r.data.name(),
        "metadata": r.metadata.name(),
        "features": r.features.names(),
    }))
}
