//! `btrfs check` and `btrfs rescue zero-log`, on images.
//!
//! The checker is that of `larder check`, whose report stands between the first and the last line
//! of btrfs-progs. Its exit codes are the same: 0 sound, 1 not, or could not be checked.

use super::elsewhere::Anything;
use super::{Done, Failed, elsewhere};
use crate::commands::check;
use crate::image::{Access, advise_content, open_device, open_devices};
use crate::print;
use larder_volume::superblock::{SuperCopies, read_superblock, write_superblocks};
use larder_volume::{Device, FileDevice};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Options {
    /// Superblock copy to start from (not supported)
    #[arg(short = 's', long = "super", value_name = "N")]
    copy: Option<String>,
    /// Start from a backup root (not supported)
    #[arg(short = 'b', long)]
    backup: bool,
    /// Address of the root tree (not supported)
    #[arg(short = 'r', long, value_name = "ADDRESS")]
    tree_root: Option<String>,
    /// Address of the chunk tree (not supported)
    #[arg(long, value_name = "ADDRESS")]
    chunk_root: Option<String>,
    /// Only read (it always does)
    #[arg(long)]
    readonly: bool,
    /// Not supported
    #[arg(long)]
    repair: bool,
    /// Also an image that is in use
    #[arg(long)]
    force: bool,
    /// original or lowmem: there is one, which is fast and needs little memory
    #[arg(long, value_parser = ["original", "lowmem"], value_name = "MODE")]
    mode: Option<String>,
    /// Not supported
    #[arg(long)]
    init_csum_tree: bool,
    /// Not supported
    #[arg(long)]
    init_extent_tree: bool,
    /// Also verify the checksums of data
    #[arg(long)]
    check_data_csum: bool,
    /// Not supported
    #[arg(short = 'Q', long)]
    qgroup_report: bool,
    /// Not supported
    #[arg(short = 'E', long, value_name = "ID")]
    subvol_extents: Option<String>,
    /// Show progress (on a terminal it always does)
    #[arg(short, long)]
    progress: bool,
    /// Not supported
    #[arg(long, value_name = "VERSION")]
    clear_space_cache: Option<String>,
    device: PathBuf,
}

impl Options {
    fn starts_elsewhere(&self) -> bool {
        self.backup || [&self.copy, &self.tree_root, &self.chunk_root].iter().any(|o| o.is_some())
    }

    fn reports_more(&self) -> bool {
        self.qgroup_report || self.subvol_extents.is_some()
    }

    fn repairs(&self) -> bool {
        self.repair
            || self.init_csum_tree
            || self.init_extent_tree
            || self.clear_space_cache.is_some()
    }
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Rescue {
    /// Drop the log
    ZeroLog { device: PathBuf },
    /// Not supported
    ChunkRecover(Anything),
    /// Not supported
    SuperRecover(Anything),
    /// Not supported
    FixDeviceSize(Anything),
    /// Not needed
    CreateControlDevice(Anything),
    /// Not supported
    ClearInoCache(Anything),
    /// Not needed
    ClearSpaceCache(Anything),
    /// Not supported
    ClearUuidTree(Anything),
}

pub(super) fn check(options: &Options) -> Done {
    if options.repairs() {
        return elsewhere::refuse("check --repair");
    }
    if options.starts_elsewhere() || options.reports_more() {
        return elsewhere::refuse("check");
    }
    let shown = print::path(&options.device);
    print::say("Opening filesystem to check...");
    let device = open_device(&options.device, Access::Read { force: options.force })?;
    let found = advise_content(
        read_superblock(device.as_ref()).map_err(anyhow::Error::from),
        device.as_ref(),
    )?;
    print::say(&format!("Checking filesystem on {shown}\nUUID: {}", print::uuid(found.fsid)));
    // The checker takes the lock itself.
    drop(device);
    let verdict =
        check::run(&check::Args::of(&options.device, options.check_data_csum, options.force));
    let used = found.bytes_used.get();
    let said = if verdict.is_ok() { "no error found" } else { "error(s) found" };
    print::say(&format!("found {used} bytes used, {said}"));
    verdict.map_err(Failed::from)
}

pub(super) fn rescue(what: Rescue) -> Done {
    match what {
        Rescue::ZeroLog { device } => zero_log(&device),
        Rescue::ChunkRecover(_) => elsewhere::refuse("rescue chunk-recover"),
        Rescue::SuperRecover(_) => elsewhere::refuse("rescue super-recover"),
        Rescue::FixDeviceSize(_) => elsewhere::refuse("rescue fix-device-size"),
        Rescue::CreateControlDevice(_) => elsewhere::refuse("rescue create-control-device"),
        Rescue::ClearInoCache(_) => elsewhere::refuse("rescue clear-ino-cache"),
        Rescue::ClearSpaceCache(_) => elsewhere::refuse("rescue clear-space-cache"),
        Rescue::ClearUuidTree(_) => elsewhere::refuse("rescue clear-uuid-tree"),
    }
}

/// As `larder rescue zero-log --force`: callers of the other name expect no question.
fn zero_log(path: &Path) -> Done {
    let devices = open_devices(path, Access::Write)?;
    let read = |device: &FileDevice| {
        advise_content(read_superblock(device).map_err(anyhow::Error::from), device)
    };
    let superblock = read(&devices[0])?;
    let shown = print::path(path);
    if superblock.metadata_dump().is_some() {
        let why = format!("{shown}: it is a metadata dump, and a dump is never written");
        return Err(Failed::because(why));
    }
    print::line(&format!(
        "Clearing log on {shown}, previous log_root {}, level {}",
        superblock.log_root.get(),
        superblock.log_root_level
    ))?;
    for device in &devices {
        let mut superblock = read(device)?;
        superblock.set_log_root(None);
        let written = write_superblocks(&**device, &superblock, SuperCopies::All);
        written.map_err(anyhow::Error::from)?;
        device.flush().map_err(anyhow::Error::from)?;
    }
    Ok(())
}
