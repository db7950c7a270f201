//! `larder cp`: files and trees into, out of and between images.

use crate::copy::beneath::Beneath;
use crate::copy::host::HostTree;
use crate::copy::image::ImageTree;
use crate::copy::{Copier, Existing, Place as Goal, Sink, Source, Totals, with_what_arrived};
use crate::failure::{Advise, usage};
use crate::image::{Access, Image};
use crate::interrupt::Interrupt;
use crate::select::Select;
use crate::target::{Place, Target};
use crate::{mount_options, print};
use anyhow::{Context, anyhow, bail};
use larder_fs::{FileKind, InodeId, Packing};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Copy files into or out of an image, with permissions, owners, times, attributes, hard links and
/// holes.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder cp -r rootfs/ disk.img:/
  larder cp -r --compress zstd:9 rootfs/ disk.img:/
  larder cp disk.img:/etc/os-release .
  larder cp -r old.img:/home new.img:/home

If DST is a directory, the copy is made in it, under the name of SRC. SRC with a
slash at its end means the content of the directory; DST then gets its
attributes, too. Existing files are replaced, directories merged. What cannot be
copied is reported, and the rest is copied.

Interrupted (Ctrl-C), it keeps what was copied, and leaves no part of a file
behind.")]
pub(crate) struct Args {
    /// Copy directories and what is in them
    #[arg(short, long)]
    recursive: bool,
    /// Number of the subvolume that paths in images start in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Compress what is copied into an image: zlib[:1..9], lzo or zstd[:-15..15]
    #[arg(long, value_name = "METHOD")]
    compress: Option<Packing>,
    /// Read the source image even if it is in use
    #[arg(long)]
    force: bool,
    /// What to copy: IMAGE:PATH or a path of the host
    #[arg(value_name = "SRC")]
    source: OsString,
    /// Where to: IMAGE:PATH or a path of the host
    #[arg(value_name = "DST")]
    destination: OsString,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match (Place::parse_existing(&args.source)?, Place::parse_existing(&args.destination)?) {
        (Place::Host(_), Place::Host(_)) => Err(anyhow!("neither side is in an image"))
            .hint("one side is IMAGE:PATH, where IMAGE exists; `cp` copies files of the host")
            .could_not_run(),
        (Place::Host(from), Place::Image(to)) => {
            let from = existing(&from)?;
            let image =
                Image::open_compressing(&to.image, Access::Write, args.subvolid, args.compress)?;
            let done = into_image(args, &HostTree, &from.node, from.name, &image, &to);
            // What arrived stays, even if a later part failed.
            let closed = image.close();
            done.and(closed)
        }
        (Place::Image(from), Place::Host(to)) => {
            let image =
                Image::open(&from.image, Access::Read { force: args.force }, args.subvolid)?;
            let source = image.resolve(&from.path, false)?;
            let (dir, name) = place_on_host(&to, name_of(&from.path))?;
            let sink = Beneath::open(&dir).with_context(|| print::path(&dir))?;
            run_copy(args, &ImageTree(&image), &source.id, &sink, goal(Vec::new(), name))?;
            image.close()
        }
        (Place::Image(from), Place::Image(to)) if same_file(&from.image, &to.image) => {
            let image =
                Image::open_compressing(&to.image, Access::Write, args.subvolid, args.compress)?;
            let done = within(args, &image, &from, &to);
            let closed = image.close();
            done.and(closed)
        }
        (Place::Image(from), Place::Image(to)) => {
            let source =
                Image::open(&from.image, Access::Read { force: args.force }, args.subvolid)?;
            let attr = source.resolve(&from.path, false)?;
            let image =
                Image::open_compressing(&to.image, Access::Write, args.subvolid, args.compress)?;
            let done =
                into_image(args, &ImageTree(&source), &attr.id, name_of(&from.path), &image, &to);
            let closed = image.close();
            done.and(closed)?;
            source.close()
        }
    }
}

struct HostSource {
    node: PathBuf,
    name: Option<Vec<u8>>,
}

fn existing(path: &Path) -> anyhow::Result<HostSource> {
    if let Err(e) = std::fs::symlink_metadata(path) {
        return Err(anyhow::Error::new(e).context(print::path(path))).could_not_run();
    }
    Ok(HostSource { node: path.to_owned(), name: name_of(path.as_os_str().as_bytes()) })
}

/// Last name of a path; `None` where it ends with a slash or a dot: then its content is meant.
fn name_of(path: &[u8]) -> Option<Vec<u8>> {
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    (!matches!(name, b"" | b"." | b"..")).then(|| name.to_vec())
}

fn same_file(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Directory and name in an image that a copy gets; no name: its content goes into the directory.
fn place_in_image(
    image: &Image,
    to: &Target,
    name: Option<Vec<u8>>,
) -> anyhow::Result<(InodeId, Option<Vec<u8>>)> {
    match image.lookup(&to.path, true) {
        Some(a) if a.kind == FileKind::Directory => Ok((a.id, name)),
        _ if to.path.ends_with(b"/") => bail!("{} is not a directory", to.display()),
        _ => {
            let (dir, new) = image.parent(&to.path)?;
            Ok((dir, Some(new.to_vec())))
        }
    }
}

fn place_on_host(to: &Path, name: Option<Vec<u8>>) -> anyhow::Result<(PathBuf, Option<Vec<u8>>)> {
    if to.is_dir() {
        return Ok((to.to_owned(), name));
    }
    let Some(new) = name_of(to.as_os_str().as_bytes()) else {
        return usage(format!("{} is not a directory", print::path(to)));
    };
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        return usage(format!("{} is not a directory", print::path(parent)));
    }
    Ok((parent.to_owned(), Some(new)))
}

fn into_image<S: Source>(
    args: &Args,
    source: &S,
    node: &S::Node,
    name: Option<Vec<u8>>,
    image: &Image,
    to: &Target,
) -> anyhow::Result<()> {
    let (dir, name) = place_in_image(image, to, name)?;
    run_copy(args, source, node, &ImageTree(image), goal(dir, name))
}

/// A copy within one image, which is open once only.
fn within(args: &Args, image: &Image, from: &Target, to: &Target) -> anyhow::Result<()> {
    let source = image.resolve(&from.path, false)?;
    let (dir, name) = place_in_image(image, to, name_of(&from.path))?;
    let inside = source.kind == FileKind::Directory && image.is_below(dir, source.id)?;
    let itself =
        name.as_deref().is_some_and(|n| image.fs.lookup(dir, n).is_ok_and(|a| a.id == source.id));
    if inside || itself {
        return usage(format!("{} cannot be copied into itself", from.display()));
    }
    run_copy(args, &ImageTree(image), &source.id, &ImageTree(image), goal(dir, name))
}

/// A name in a directory; no name: the content goes into the directory.
fn goal<D: Sink>(dir: D::Node, name: Option<Vec<u8>>) -> Goal<D> {
    match name {
        Some(name) => Goal::Named(dir, name),
        None => Goal::Into(dir),
    }
}

/// Copies one thing, or what is in a directory where there is no name for it.
fn run_copy<S: Source, D: Sink>(
    args: &Args,
    source: &S,
    node: &S::Node,
    sink: &D,
    to: Goal<D>,
) -> anyhow::Result<()> {
    let shown = print::name(args.source.as_bytes());
    let kind = source.meta(node).with_context(|| shown.clone())?.kind;
    if kind == FileKind::Directory && !args.recursive {
        return Err(anyhow!("{shown} is a directory"))
            .hint("use -r to copy it and what is in it")
            .could_not_run();
    }
    let (progress, interrupt) = (print::progress(), Interrupt::watch());
    let mut copier = Copier::new(source, sink, Existing::Replaced, &progress, &interrupt);
    let result = copier.copy(node, &Select::all(), &to, &shown);
    progress.finish_and_clear();
    conclude(result, copier.totals())
}

/// Says what is there and what is not.
fn conclude(result: anyhow::Result<()>, totals: Totals) -> anyhow::Result<()> {
    with_what_arrived(result, totals)?;
    if totals.failed > 0 {
        let entries = print::entries(totals.failed);
        bail!("{entries} could not be copied as above; everything else was");
    }
    Ok(())
}
