//! `larder mkdir`: directories in an image.

use crate::failure::Advise;
use crate::image::{Access, Image};
use crate::mount_options;
use crate::target::Target;
use anyhow::Context;
use larder_fs::{Error, FileKind, NewInode};
use std::ffi::OsString;

/// Make a directory in an image.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder mkdir -p disk.img:/srv/www/html")]
pub(crate) struct Args {
    /// Make the directories in front of the last one too; none of them is an error if it exists
    #[arg(short, long)]
    parents: bool,
    /// Permissions, octal
    #[arg(short, long, default_value = "755", value_parser = octal)]
    mode: u32,
    /// Number of the subvolume that PATH starts in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Image and path
    #[arg(value_name = "IMAGE:PATH")]
    target: OsString,
}

fn octal(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(m) if m <= 0o7777 => Ok(m),
        _ => Err(format!("{text:?} is not a mode such as 755")),
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let target = Target::parse(&args.target);
    let image = Image::open(&target.image, Access::Write, args.subvolid)?;
    let made = if args.parents {
        make_all(&image, &target.path, args.mode)
    } else {
        make(&image, &target.path, args.mode)
    };
    // What was made stays made, even if a later part failed.
    let closed = image.close();
    made.and(closed)
}

fn make(image: &Image, path: &[u8], mode: u32) -> anyhow::Result<()> {
    let (dir, name) = image.parent(path)?;
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let new = NewInode {
        kind: FileKind::Directory,
        perm: mode,
        uid,
        gid,
        rdev: 0,
        target: b"",
        xattrs: &[],
    };
    match image.fs.create(dir, name, &new) {
        Err(e @ Error::Exists) => Err(anyhow::Error::new(e).context(image.show(path)))
            .hint("-p accepts directories that exist"),
        other => other.map(drop).with_context(|| image.show(path)),
    }
}

fn make_all(image: &Image, path: &[u8], mode: u32) -> anyhow::Result<()> {
    let ends = (1..=path.len()).filter(|i| *i == path.len() || path[*i] == b'/');
    for part in ends.map(|i| &path[..i]).filter(|p| p.iter().any(|b| *b != b'/')) {
        match image.lookup(part, true) {
            Some(a) if a.kind == FileKind::Directory => {}
            Some(_) => anyhow::bail!("{} exists and is not a directory", image.show(part)),
            None => make(image, part, mode)?,
        }
    }
    Ok(())
}
