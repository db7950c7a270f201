//! `larder reflink`: a copy that shares its extents with its source.
//!
//! On a mount the daemon is asked ([`larder_fuse::sharing`]); an image is opened for the one
//! command. Unlike `cp`, which copies bytes where nothing can be shared, this shares or fails.

use crate::failure::{Advise, usage};
use crate::image::{Access, Image};
use crate::mount_options;
use crate::mounted::mounted;
use crate::size;
use crate::target::{Place, Target};
use anyhow::{Context, anyhow};
use larder_fs::{Error, FileKind, InodeId, NewInode, SetAttr};
use larder_fuse::sharing::{self, FileAt};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Copy a file, or ranges of one, by sharing its extents: at once, and without taking space.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder reflink mnt/disk.raw mnt/disk-copy.raw
  larder reflink disk.img:/a disk.img:/b
  larder reflink --range 1M+64K@0 mnt/a mnt/b

Without --range the copy becomes as its source is: a file that exists gets the
source's content and size. With it, only the ranges are changed. Offsets are
multiples of 4K; so are lengths, unless a range ends where both files do. Both
are in the same image or on the same mount; files without checksums
(`chattr +C`) share only with each other.")]
pub(crate) struct Args {
    /// Share a range only: FROM+LENGTH[@TO], TO being FROM if not given; may be repeated
    #[arg(long, value_name = "RANGE", value_parser = range)]
    range: Vec<Range>,
    /// Number of the subvolume that paths in an image start in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// The file to share with: IMAGE:PATH, or a path on a mount
    #[arg(value_name = "SRC")]
    source: OsString,
    /// The copy, or a directory for it: IMAGE:PATH, or a path on a mount
    #[arg(value_name = "DST")]
    destination: OsString,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    from: u64,
    len: u64,
    to: u64,
}

fn range(text: &str) -> Result<Range, String> {
    let (what, to) = text.split_once('@').map_or((text, None), |(what, to)| (what, Some(to)));
    let (from, len) = what
        .split_once('+')
        .ok_or_else(|| format!("{text:?} is not FROM+LENGTH[@TO], such as 1M+64K@0"))?;
    let from = size::parse(from)?;
    let len = size::parse(len)?;
    if len == 0 {
        return Err("an empty range".to_owned());
    }
    Ok(Range { from, len, to: to.map_or(Ok(from), size::parse)? })
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match (Place::parse_existing(&args.source)?, Place::parse_existing(&args.destination)?) {
        (Place::Host(from), Place::Host(to)) => on_mount(&from, &to, &args.range),
        (Place::Image(from), Place::Image(to)) if from.image == to.image => {
            let image = Image::open(&from.image, Access::Write, args.subvolid)?;
            let done = in_image(&image, &from, &to, &args.range);
            // What was done stays done, even if a later part failed.
            let closed = image.close();
            done.and(closed)
        }
        _ => usage("extents are shared within one image, or on one mount"),
    }
}

/// Adds a hint.
fn advise<T>(result: anyhow::Result<T>, refused: bool) -> anyhow::Result<T> {
    if refused {
        result.hint("`larder reflink --help` says which ranges can be shared")
    } else {
        result
    }
}

fn on_mount(from: &Path, to: &Path, ranges: &[Range]) -> anyhow::Result<()> {
    let source = File::open(from).with_context(|| from.display().to_string()).could_not_run()?;
    let to: PathBuf = if to.is_dir() {
        to.join(from.file_name().context("what is it to be called?").could_not_run()?)
    } else {
        to.to_owned()
    };
    let mode = source.metadata()?.mode() & 0o777;
    let mut options = std::fs::OpenOptions::new();
    let target = options.read(true).write(true).create(true).truncate(false).mode(mode).open(&to);
    let target = target.with_context(|| to.display().to_string()).could_not_run()?;
    let (a, b) = (source.metadata()?, target.metadata()?);
    if (a.dev(), a.ino()) == (b.dev(), b.ino()) && ranges.is_empty() {
        return usage("a file shares all of itself already");
    }
    let share = |r: &Range| {
        let done = mounted(&to, |_| {
            let from = FileAt { file: &source, offset: r.from };
            sharing::clone(from, FileAt { file: &target, offset: r.to }, r.len)
        });
        let kind = |e: &anyhow::Error| e.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        let refused = done
            .as_ref()
            .err()
            .and_then(kind)
            .is_some_and(|k| k == std::io::ErrorKind::InvalidInput);
        advise(done, refused)
    };
    if ranges.is_empty() {
        if b.len() > a.len() {
            target.set_len(a.len()).with_context(|| to.display().to_string())?;
        }
        return share(&Range { from: 0, len: 0, to: 0 });
    }
    ranges.iter().try_for_each(share)
}

fn in_image(image: &Image, from: &Target, to: &Target, ranges: &[Range]) -> anyhow::Result<()> {
    let fs = &image.fs;
    let source = image.resolve(&from.path, true)?;
    if source.kind != FileKind::Regular {
        return Err(anyhow!("{} is not a regular file", from.display()));
    }
    let target = target(image, from, to, source.perm)?;
    if target == source.id && ranges.is_empty() {
        return usage("a file shares all of itself already");
    }
    let share = |r: &Range| {
        let done = fs.clone_range(source.id.at(r.from), target.at(r.to), r.len).map(drop);
        let refused = matches!(done, Err(Error::Invalid(_)));
        advise(done.with_context(|| to.display()), refused)
    };
    if ranges.is_empty() {
        if fs.getattr(target)?.size > source.size {
            fs.setattr(target, &SetAttr { size: Some(source.size), ..SetAttr::default() })?;
        }
        return share(&Range { from: 0, len: 0, to: 0 });
    }
    ranges.iter().try_for_each(share)
}

/// The file that gets the extents; made if it is not there.
fn target(image: &Image, from: &Target, to: &Target, perm: u32) -> anyhow::Result<InodeId> {
    let (dir, name) = match image.lookup(&to.path, true) {
        Some(found) if found.kind == FileKind::Directory => (found.id, image.parent(&from.path)?.1),
        Some(found) => return Ok(found.id),
        None => image.parent(&to.path)?,
    };
    match image.fs.lookup(dir, name) {
        Ok(found) => Ok(found.id),
        Err(Error::NotFound) => {
            let (uid, gid) =
                (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
            let kind = FileKind::Regular;
            let new = NewInode { kind, perm, uid, gid, rdev: 0, target: b"", xattrs: &[] };
            Ok(image.fs.create(dir, name, &new).with_context(|| to.display())?.id)
        }
        Err(e) => Err(e).with_context(|| to.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed() {
        assert_eq!(range("1M+64K@0"), Ok(Range { from: 1 << 20, len: 64 << 10, to: 0 }));
        assert_eq!(range("4096+100"), Ok(Range { from: 4096, len: 100, to: 4096 }));
        for bad in ["", "5", "+", "1+0", "a+b", "1+2@", "1+2@x"] {
            assert!(range(bad).is_err(), "{bad}");
        }
    }
}
