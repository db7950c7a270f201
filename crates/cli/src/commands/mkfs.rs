//! `larder mkfs`: a new file system.

use crate::failure::{Advise, usage};
use crate::image::{Access, advise_open, when_free};
use crate::{print, size};
use clap::ValueEnum;
use larder_format::CsumType;
use larder_fs::Timestamp;
use larder_fs::mkfs::{Features, MkfsOptions, MkfsReport, Profile, mkfs, recognise};
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
    /// Name of the file system, up to 255 bytes
    #[arg(long, short = 'L', default_value = "", hide_default_value = true)]
    label: String,
    /// Uuid of the file system (default: a random one)
    #[arg(long, short = 'U')]
    uuid: Option<uuid::Uuid>,
    /// Copies of metadata (default: dup, with --mixed single)
    #[arg(long, short = 'm', value_name = "PROFILE")]
    metadata: Option<ProfileArg>,
    /// Copies of data (default: single)
    #[arg(long, short = 'd', value_name = "PROFILE")]
    data: Option<ProfileArg>,
    /// Checksum of metadata and data
    #[arg(long, value_name = "TYPE", default_value = "crc32c")]
    csum: CsumArg,
    /// Bytes of a tree node: 4K to 64K (default 16K, with --mixed 4K)
    #[arg(long, short = 'n', value_name = "N", value_parser = size::parse)]
    nodesize: Option<u64>,
    /// Keep data and metadata together, for small devices: 4K nodes, equal profiles
    #[arg(long, short = 'M')]
    mixed: bool,
    /// Features to turn on, or off with ^: extref, skinny-metadata, no-holes, free-space-tree,
    /// block-group-tree (which goes with either of the two before it)
    #[arg(short = 'O', long = "features", value_name = "LIST")]
    features: Vec<String>,
    /// Owner of the root directory, as numbers (default: the user who makes it)
    #[arg(long, value_name = "UID:GID", value_parser = owner)]
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

/// Two numbers with a colon between them. `u32::MAX` stands for nobody in the system's own calls.
fn owner(text: &str) -> Result<(u32, u32), String> {
    let number = |s: &str| s.parse().ok().filter(|n| *n != u32::MAX);
    let both = text.split_once(':').and_then(|(uid, gid)| Some((number(uid)?, number(gid)?)));
    both.ok_or_else(|| "not two numbers like 1000:1000".to_owned())
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProfileArg {
    Single,
    Dup,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CsumArg {
    Crc32c,
    #[value(alias = "xxhash64")]
    Xxhash,
    Sha256,
    #[value(alias = "blake2b")]
    Blake2,
}

impl From<ProfileArg> for Profile {
    fn from(p: ProfileArg) -> Self {
        match p {
            ProfileArg::Single => Self::Single,
            ProfileArg::Dup => Self::Dup,
        }
    }
}

impl From<CsumArg> for CsumType {
    fn from(c: CsumArg) -> Self {
        match c {
            CsumArg::Crc32c => Self::Crc32c,
            CsumArg::Xxhash => Self::XxHash64,
            CsumArg::Sha256 => Self::Sha256,
            CsumArg::Blake2 => Self::Blake2b,
        }
    }
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
    if args.json { show_json(&report) } else { show(&args.target, &report, &args.label) }
}

fn options(args: &Args) -> anyhow::Result<MkfsOptions> {
    let (mut features, notes) =
        Features::chosen(args.features.iter().map(String::as_str)).could_not_run()?;
    features.mixed |= args.mixed;
    for note in notes {
        print::say(&format!("larder: note: {note}"));
    }
    let nodesize = match args.nodesize.map(u32::try_from) {
        None => None,
        Some(Ok(n)) => Some(n),
        Some(Err(_)) => return usage("--nodesize is too large: at most 64K"),
    };
    Ok(MkfsOptions {
        label: args.label.clone().into_bytes(),
        uuid: args.uuid.map(uuid::Uuid::into_bytes),
        metadata: args.metadata.map(Into::into),
        data: args.data.map(Into::into),
        csum: args.csum.into(),
        nodesize,
        features,
        time: source_date()?,
        root_owner: args.root_owner.unwrap_or_else(|| {
            (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
        }),
        force: args.force,
        discard: !args.nodiscard,
    })
}

/// The time that reproducible builds ask for.
fn source_date() -> anyhow::Result<Option<Timestamp>> {
    let Some(text) = std::env::var_os("SOURCE_DATE_EPOCH") else { return Ok(None) };
    match text.to_str().and_then(|t| t.parse().ok()) {
        Some(sec) => Ok(Some(Timestamp { sec, nsec: 0 })),
        None => usage(format!("SOURCE_DATE_EPOCH={} is not a number of seconds", text.display())),
    }
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
