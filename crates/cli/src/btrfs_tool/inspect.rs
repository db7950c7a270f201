//! `btrfs inspect-internal`: ids and paths on a mount, superblocks and trees of images.

use super::elsewhere::Anything;
use super::mounted::{Mounted, id_of, must_be_larder, subvolumes_of};
use super::{Done, Failed, dump_tree, each, elsewhere, must_be_directory, reason, superblock};
use crate::commands::inspect::uses_of;
use crate::image::{Access, as_devices, open_devices};
use crate::print;
use crate::raw::session;
use larder_format::Logical;
use larder_fuse::{control, subvolumes};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Show the path of an inode
    InodeResolve {
        /// Accepted
        #[arg(short, long)]
        verbose: bool,
        #[arg(value_name = "INODE")]
        ino: u64,
        path: PathBuf,
    },
    /// Show the path of a subvolume
    SubvolidResolve { id: u64, path: PathBuf },
    /// Show the id of the subvolume that a path is in
    Rootid { path: PathBuf },
    /// Show superblocks of images
    DumpSuper(superblock::Options),
    /// Show the files that use an address
    LogicalResolve(LogicalResolve),
    /// Not supported
    MapSwapfile(Anything),
    /// Not supported
    MinDevSize(Anything),
    /// Show the trees of images
    DumpTree(dump_tree::Options),
    /// Not supported
    TreeStats(Anything),
    /// See `larder inspect chunks`
    ListChunks(Anything),
}

#[derive(Debug, clap::Args)]
pub(crate) struct LogicalResolve {
    /// Print inodes instead of paths
    #[arg(short = 'P')]
    inodes: bool,
    /// Accepted
    #[arg(short, long)]
    verbose: bool,
    /// Also files that use other parts of the same extent
    #[arg(short = 'o')]
    whole: bool,
    /// Accepted: there is always room
    #[arg(short = 's', value_name = "BYTES")]
    _room: Option<u64>,
    #[arg(value_name = "ADDRESS")]
    at: u64,
    path: PathBuf,
}

pub(super) fn run(what: What) -> Done {
    match what {
        What::InodeResolve { ino, path, .. } => inode(ino, &path),
        What::SubvolidResolve { id, path } => subvolume(id, &path),
        What::Rootid { path } => {
            path.metadata().map_err(|e| {
                let shown = path.display();
                Failed::because(format!("cannot access '{shown}': {}", reason(&e)))
            })?;
            must_be_larder(&path)?;
            Ok(print::line(&id_of(&path)?.to_string())?)
        }
        What::DumpSuper(options) => {
            each(&options.devices, |device| superblock::dump(device, &options))
        }
        What::LogicalResolve(options) => logical(&options),
        What::MapSwapfile(_) => elsewhere::refuse("inspect-internal map-swapfile"),
        What::MinDevSize(_) => elsewhere::refuse("inspect-internal min-dev-size"),
        What::DumpTree(options) => {
            each(&options.devices, |device| dump_tree::dump(device, &options))
        }
        What::TreeStats(_) => elsewhere::refuse("inspect-internal tree-stats"),
        What::ListChunks(_) => elsewhere::refuse("inspect-internal list-chunks"),
    }
}

/// The daemon has no request for this. So what there is gets committed, and the last commit is read
/// from the image.
fn logical(options: &LogicalResolve) -> Done {
    let path = &options.path;
    must_be_directory(path)?;
    let source = PathBuf::from(Mounted::at(path)?.source);
    control::sync(path)
        .map_err(|e| Failed::because(format!("Could not sync filesystem: {}", reason(&e))))?;
    let mut found = Vec::new();
    session(as_devices(&open_devices(&source, Access::Read { force: true })?), |s| {
        found = uses_of(s, Logical(options.at), options.whole)?;
        Ok(())
    })?;
    if found.is_empty() {
        return Err(Failed::because("logical ino ioctl: No such file or directory"));
    }
    let here = id_of(path)?;
    let (all, _) = subvolumes_of(path)?;
    for file in found {
        let (id, ino) = (file.subvolume.0, file.ino);
        if options.inodes {
            print::line(&format!("inode {ino} offset {} root {id}", file.offset))?;
        } else if id == here {
            inode(ino, path)?;
        } else {
            let of = all.iter().find(|s| s["id"] == id);
            let of = of.and_then(|s| s["path"].as_str()).unwrap_or("?");
            print::line(&format!(
                "inode {ino} subvol {} could not be accessed: not mounted",
                print::name(of.as_bytes())
            ))?;
        }
    }
    Ok(())
}

/// One path, also of an inode with several names.
fn inode(ino: u64, path: &Path) -> Done {
    must_be_directory(path)?;
    let inside = subvolumes::path_of_inode(path, ino)
        .map_err(|e| Failed::because(format!("ino paths ioctl: {}", reason(&e))))?;
    let inside = inside.strip_suffix(b"/").unwrap_or(&inside);
    let found = path.join(std::ffi::OsStr::from_bytes(inside));
    Ok(print::line(&print::path(&found))?)
}

fn subvolume(id: u64, path: &Path) -> Done {
    must_be_directory(path)?;
    let (all, _) = subvolumes_of(path)?;
    match all.iter().find(|s| s["id"] == id) {
        Some(found) => {
            let path = found["path"].as_str().unwrap_or_default();
            Ok(print::line(&print::name(path.as_bytes()))?)
        }
        None => {
            print::say(&format!("failed to lookup subvol_id {id}!"));
            Err(Failed::because(format!("resolving subvolid {id} error -2")))
        }
    }
}
