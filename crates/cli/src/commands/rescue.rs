//! `larder rescue`: last resorts.

use crate::failure::{Advise, usage};
use crate::image::{Access, advise_content, as_devices, open_devices};
use crate::print;
use crate::raw::{Problems, log};
use anyhow::anyhow;
use larder_format::Superblock;
use larder_restore::{Options, Reader};
use larder_volume::superblock::{SuperCopies, read_superblock, write_superblocks};
use larder_volume::{Device, FileDevice};
use std::path::PathBuf;
use std::sync::Arc;

/// Last resorts for a file system that does not mount.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder rescue zero-log disk.img")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Drop a log that cannot be replayed: the file system goes back to its last commit
    ///
    /// Says what would be lost, and does nothing without --force. Try -o ro,nologreplay and `larder
    /// restore` first.
    #[command(
        after_help = "Examples:\n  larder rescue zero-log disk.img\n  larder rescue zero-log \
            --force disk.img"
    )]
    ZeroLog(ZeroLog),
}

#[derive(Debug, clap::Args)]
struct ZeroLog {
    /// Do it
    #[arg(long)]
    force: bool,
    /// Image file or block device
    image: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        What::ZeroLog(a) => zero_log(a),
    }
}

/// Inodes that are named one by one; more are counted.
const NAMED: usize = 20;

fn zero_log(args: &ZeroLog) -> anyhow::Result<()> {
    let devices = open_devices(&args.image, Access::Write)?;
    let shown = args.image.display();
    let read = |device: &Arc<FileDevice>| {
        advise_content(read_superblock(&**device).could_not_run(), &**device)
    };
    let superblocks = devices.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
    let newest = superblocks.iter().map(|sb| sb.generation()).max().unwrap_or_default();
    if superblocks.iter().any(|sb| sb.metadata_dump().is_some()) {
        return Err(anyhow!("{shown}: it is a metadata dump, and a dump is never written"))
            .hint(
                "`larder inspect log` shows its log; drop that of the file system that the dump \
                    was made of",
            )
            .could_not_run();
    }
    // What an older device has is not replayed.
    let is_replayed = |sb: &Superblock| sb.generation() == newest && sb.log_root().is_some();
    if !superblocks.iter().any(|sb| is_replayed(sb)) {
        return print::line(&format!("{shown} has no log; nothing to do"));
    }
    let what = if args.force { "is lost" } else { "would be lost" };
    print::line(&format!("what was fsynced after transaction {newest} {what}:"))?;
    tell(&devices)?;
    if !args.force {
        return usage(format!(
            "nothing was changed: repeat with --force to drop the log of {shown}"
        ));
    }
    for (device, mut superblock) in devices.iter().zip(superblocks) {
        if is_replayed(&superblock) {
            superblock.set_log_root(None);
            write_superblocks(&**device, &superblock, SuperCopies::All).could_not_run()?;
            device.flush().could_not_run()?;
        }
    }
    print::line(&format!("the log is gone; {shown} is at transaction {newest}"))
}

/// Lists what the log holds, as far as it can be read.
fn tell(devices: &[Arc<FileDevice>]) -> anyhow::Result<()> {
    let problems = Problems::default();
    let options = Options { super_copy: None, scan: false };
    let reader = Reader::open_devices(as_devices(devices), options, &problems).could_not_run()?;
    for (subvol, inodes) in log::contents(&reader, &problems) {
        for (ino, logged) in inodes.iter().take(NAMED) {
            let names: Vec<String> = logged.names.iter().map(|n| print::name(n)).collect();
            let named =
                if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
            let size = logged.size.map_or(String::new(), |n| format!(", size {n}"));
            print::line(&format!(
                "  subvolume {subvol}, inode {ino}{named}: {} bytes of data{size}",
                logged.data
            ))?;
        }
        if inodes.len() > NAMED {
            print::line(&format!(
                "  and {} more inodes of subvolume {subvol}",
                inodes.len() - NAMED
            ))?;
        }
    }
    drop(reader);
    if problems.finish().is_err() {
        print::line("  and what could not be read")?;
    }
    Ok(())
}
