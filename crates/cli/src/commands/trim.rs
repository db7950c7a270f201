//! `larder trim`: gives free space back to what the file system lies on.

use crate::failure::Advise;
use crate::image::{Access, Image};
use crate::mounted::mounted_here;
use crate::{print, size};
use anyhow::Context;
use larder_fs::TrimRange;
use larder_fuse::control;
use serde_json::json;
use std::path::PathBuf;

/// Discard all free space of an image or of what is mounted on a directory: an image file gets
/// holes there, a device is told. (On a mount fstrim(8) does the same.)
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  larder trim disk.img\n  larder trim --json mnt")]
pub(crate) struct Args {
    /// Print JSON, in bytes
    #[arg(long)]
    json: bool,
    /// Image, block device, or directory of a mount
    #[arg(value_name = "IMAGE|DIR")]
    target: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let name = args.target.display().to_string();
    let on_mount = args.target.is_dir() || larder_fuse::mount::is_dead(&args.target);
    let bytes = if on_mount {
        mounted_here(&args.target, |path| control::trim(path, TrimRange::default()))?.bytes
    } else {
        let image = Image::open(&args.target, Access::Write, None)?;
        let trimmed = image.fs.trim(TrimRange::default()).map(|t| t.bytes);
        let unsupported = matches!(trimmed, Err(larder_fs::Error::NotSupported(_)));
        let trimmed = trimmed.with_context(|| name.clone());
        let closed = image.close();
        let trimmed = if unsupported {
            trimmed.hint("its file system or device cannot give space back").could_not_run()?
        } else {
            trimmed?
        };
        closed?;
        trimmed
    };
    if args.json {
        return print::json(&json!({ "discarded": bytes }));
    }
    print::line(&format!("{name}: {} discarded", size::human(bytes)))
}
