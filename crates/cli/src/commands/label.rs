//! `larder label`: shows or changes a file system's name.

use crate::failure::usage;
use crate::image::{Access, Image};
use crate::mounted::mounted_here;
use crate::print;
use larder_fuse::control;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Show or change the label of an image or of what is mounted on a directory.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  larder label disk.img\n  larder label mnt backup")]
pub(crate) struct Args {
    /// Read the image even if it is in use (only to show the label)
    #[arg(long)]
    force: bool,
    /// Image, block device, or directory of a mount
    #[arg(value_name = "IMAGE|DIR")]
    target: PathBuf,
    /// New label, up to 255 bytes; empty to remove it
    new: Option<OsString>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(new) = &args.new
        && (new.len() > 255 || new.as_bytes().iter().any(|b| matches!(b, 0 | b'\n')))
    {
        return usage("a label has up to 255 bytes, without line breaks");
    }
    let on_mount = args.target.is_dir() || larder_fuse::mount::is_dead(&args.target);
    match (&args.new, on_mount) {
        (None, true) => {
            let label = mounted_here(&args.target, control::label)?;
            print::line(&print::name(&label))
        }
        (Some(new), true) => mounted_here(&args.target, |p| control::set_label(p, new.as_bytes())),
        (None, false) => {
            let image = Image::open(&args.target, Access::Read { force: args.force }, None)?;
            let label = image.fs.info().label;
            image.close()?;
            print::line(&print::name(&label))
        }
        (Some(new), false) => {
            let image = Image::open(&args.target, Access::Write, None)?;
            let set = image.fs.set_label(new.as_bytes()).map_err(Into::into);
            let closed = image.close();
            set.and(closed)
        }
    }
}
