//! `larder rm`: files and directories out of an image.

use crate::failure::Advise;
use crate::image::{Access, Image};
use crate::mount_options;
use crate::target::Target;
use anyhow::Context;
use larder_fs::{FileKind, InodeId};
use std::ffi::OsString;

/// Remove files from an image.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  larder rm disk.img:/etc/motd\n  larder rm -r disk.img:/var/cache"
)]
pub(crate) struct Args {
    /// Remove directories and what is in them
    #[arg(short, long)]
    recursive: bool,
    /// A path that does not exist is no error
    #[arg(short, long)]
    force: bool,
    /// Number of the subvolume that PATH starts in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Image and path
    #[arg(value_name = "IMAGE:PATH", required = true)]
    targets: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    for text in &args.targets {
        let target = Target::parse(text);
        let image = Image::open(&target.image, Access::Write, args.subvolid)?;
        let removed = remove(args, &image, &target.path);
        // What is gone stays gone, even if a later part failed.
        let closed = image.close();
        removed.and(closed)?;
    }
    Ok(())
}

/// A directory has two steps, before and after its entries: depth first without recursion.
enum Step {
    Enter(InodeId, Vec<u8>, InodeId),
    Leave(InodeId, Vec<u8>),
}

fn remove(args: &Args, image: &Image, path: &[u8]) -> anyhow::Result<()> {
    let (dir, name) = image.parent(path)?;
    let attr = match image.fs.lookup(dir, name) {
        Err(larder_fs::Error::NotFound) if args.force => return Ok(()),
        other => other.with_context(|| image.show(path))?,
    };
    if attr.kind != FileKind::Directory {
        return image.fs.unlink(dir, name).with_context(|| image.show(path));
    }
    if !args.recursive {
        return Err(anyhow::anyhow!("{} is a directory", image.show(path)))
            .hint("use -r to remove it and what is in it");
    }
    let mut todo = vec![Step::Enter(dir, name.to_vec(), attr.id)];
    while let Some(step) = todo.pop() {
        match step {
            Step::Enter(parent, name, id) => {
                todo.push(Step::Leave(parent, name));
                for (name, child) in image.entries(id)? {
                    if image.fs.getattr(child)?.kind == FileKind::Directory {
                        todo.push(Step::Enter(id, name, child));
                    } else {
                        image.fs.unlink(id, &name).with_context(|| crate::print::name(&name))?;
                    }
                }
            }
            Step::Leave(parent, name) => {
                image.fs.rmdir(parent, &name).with_context(|| crate::print::name(&name))?;
            }
        }
    }
    Ok(())
}
