//! `larder property`: what a file or directory says about how its data is kept.
//!
//! There are two: `ro` of subvolumes (see [`crate::subvolumes`]) and `compression`, the attribute
//! `btrfs.compression`, which both Linux and Larder obey. In an image the engine changes it. On a
//! mount the system call does, so it works on a mount by Linux, too.

use crate::failure::{Advise, usage};
use crate::image::{Access, Image};
use crate::print;
use crate::subvolumes::read_only;
use crate::target::Place;
use anyhow::{Context, anyhow};
use larder_fs::{Error, XattrMode};
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::ffi::OsString;
use std::path::Path;

/// Show or set properties of files and directories.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder property set disk.img:/var/log compression zstd
  larder property get mnt/var/log

The property ro of a subvolume is true or false.

The property compression is zlib, lzo or zstd, with a level if wanted (zstd:9).
The value none means that data is never compressed; an empty word means that
the property says nothing. New files and directories get it from the directory
they are made in. Existing data stays as it is.")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Show a property, or all that are set
    #[command(after_help = "Example:\n  larder property get disk.img:/var/log compression")]
    Get {
        /// Read the image even if it is in use
        #[arg(long)]
        force: bool,
        /// IMAGE:PATH, or a path on a mount
        target: OsString,
        /// Property
        #[arg(default_value = "compression", value_parser = [PROPERTY, READ_ONLY])]
        name: String,
    },
    /// Set a property
    #[command(after_help = "Example:\n  larder property set mnt/var/log compression zstd:9")]
    Set {
        /// IMAGE:PATH, or a path on a mount
        target: OsString,
        /// Property
        #[arg(value_parser = [PROPERTY, READ_ONLY])]
        name: String,
        /// Its value
        value: String,
    },
}

const PROPERTY: &str = "compression";
const READ_ONLY: &str = "ro";
const ATTRIBUTE: &str = "btrfs.compression";
/// No value is longer.
const LONGEST: usize = 256;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        What::Get { target, name, .. } if name == READ_ONLY => {
            let on = read_only(target, None, false)?;
            on.map_or(Ok(()), |on| print::line(&format!("{READ_ONLY}={on}")))
        }
        What::Set { target, name, value } if name == READ_ONLY => match value.as_str() {
            "true" | "false" => read_only(target, Some(value == "true"), false).map(drop),
            _ => usage("ro is true or false"),
        },
        What::Get { force, target, name } => {
            let value = match Place::parse_existing(target)? {
                Place::Image(t) => {
                    let image = Image::open(&t.image, Access::Read { force: *force }, None)?;
                    let attr = image.resolve(&t.path, false)?;
                    let value = match image.fs.getxattr(attr.id, ATTRIBUTE.as_bytes()) {
                        Ok(value) => Some(value),
                        Err(Error::NoAttribute) => None,
                        Err(e) => return Err(e).with_context(|| t.display()),
                    };
                    image.close()?;
                    value
                }
                Place::Host(path) => on_mount(&path)?,
            };
            // Nothing is set: nothing to print, and no mistake.
            value.map_or(Ok(()), |v| print::line(&format!("{name}={}", print::name(&v))))
        }
        What::Set { target, value, .. } => match Place::parse_existing(target)? {
            Place::Image(t) => {
                let image = Image::open(&t.image, Access::Write, None)?;
                let attr = image.resolve(&t.path, false)?;
                let name = ATTRIBUTE.as_bytes();
                let set = image.fs.setxattr(attr.id, name, value.as_bytes(), XattrMode::Set);
                let closed = image.close();
                advise(set.map_err(anyhow::Error::new).with_context(|| t.display()), value)?;
                closed
            }
            Place::Host(path) => {
                let set =
                    rustix::fs::lsetxattr(&path, ATTRIBUTE, value.as_bytes(), XattrFlags::empty());
                let shown = || path.display().to_string();
                match set {
                    Err(Errno::OPNOTSUPP) => Err(no_properties(&path)).could_not_run(),
                    other => advise(other.map_err(anyhow::Error::new).with_context(shown), value),
                }
            }
        },
    }
}

fn on_mount(path: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    let mut value = vec![0; LONGEST];
    match rustix::fs::lgetxattr(path, ATTRIBUTE, &mut value[..]) {
        Ok(len) => {
            value.truncate(len);
            Ok(Some(value))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(Errno::OPNOTSUPP) => Err(no_properties(path)).could_not_run(),
        Err(e) => Err(e).with_context(|| path.display().to_string()).could_not_run(),
    }
}

fn no_properties(path: &Path) -> anyhow::Error {
    anyhow!("{}: there are no properties on this file system", path.display())
}

fn advise(result: anyhow::Result<()>, value: &str) -> anyhow::Result<()> {
    if larder_fs::Packing::parse(value).is_err() && !value.is_empty() {
        return result.hint("compression is zlib, lzo, zstd (with a level if wanted) or none");
    }
    result
}
