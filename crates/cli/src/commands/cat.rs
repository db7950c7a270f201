//! `larder cat`: the content of files in an image.

use crate::image::{Access, Image};
use crate::target::Target;
use crate::{mount_options, print};
use anyhow::{Context, bail};
use larder_fs::FileKind;
use std::ffi::OsString;
use std::io::Write;

/// Print files of an image.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  larder cat disk.img:/etc/os-release")]
pub(crate) struct Args {
    /// Number of the subvolume that PATH starts in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Read the image even if it is in use
    #[arg(long)]
    force: bool,
    /// Image and path
    #[arg(value_name = "IMAGE:PATH", required = true)]
    targets: Vec<OsString>,
}

const PIECE: usize = 1 << 20;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for text in &args.targets {
        let target = Target::parse(text);
        let image = Image::open(&target.image, Access::Read { force: args.force }, args.subvolid)?;
        let attr = image.resolve(&target.path, true)?;
        match attr.kind {
            FileKind::Regular => {}
            FileKind::Directory => bail!("{} is a directory", target.display()),
            _ => bail!("{} is not a regular file", target.display()),
        }
        let mut buf = vec![0; PIECE];
        let mut at = 0;
        loop {
            let n = image.fs.read(attr.id, at, &mut buf).with_context(|| target.display())?;
            if n == 0 {
                break;
            }
            out.write_all(&buf[..n]).context(print::STDOUT)?;
            at += n as u64;
        }
        image.close()?;
    }
    out.flush().context(print::STDOUT)
}
