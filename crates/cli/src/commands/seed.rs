//! `larder seed`: makes an image one upon which others are built, or an ordinary one again.

use crate::failure::{Advise, usage};
use crate::image::{Access, advise_content, as_devices, open_own_devices};
use crate::print;
use anyhow::Context;
use std::path::PathBuf;

/// Mark an image as a seed, upon which others are built, or take the mark away.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder seed on base.img
  larder seed off --force base.img

A seed is only read from then on, also by Linux, so many file systems can be
built upon it at the same time: `larder device add new.img base.img` makes one.
What is changed in it goes to new.img, and base.img stays as it is.")]
pub(crate) struct Args {
    /// Whether it is to be a seed
    what: What,
    /// Take the mark away although file systems may be built upon the seed: they cannot be opened
    /// any more once it was written
    #[arg(long)]
    force: bool,
    /// Image or block device; several with commas between them
    image: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// It is a seed, and is never written
    On,
    /// It is an ordinary file system, and is written when it is mounted
    Off,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let name = print::path(&args.image);
    if args.what == What::Off && !args.force {
        return usage(format!(
            "file systems that are built upon {name} cannot be opened any more once it was \
                written; --force takes the mark away"
        ));
    }
    let devices = open_own_devices(&args.image, Access::Write)?;
    let on = args.what == What::On;
    let first = devices.first().context("no device")?.clone();
    let changed =
        larder_fs::set_seed(as_devices(&devices), on).map_err(anyhow::Error::from).could_not_run();
    let changed = advise_content(changed, first.as_ref())?;
    print::line(&match (on, changed) {
        (true, true) => format!(
            "{name} is a seed now, and only read. `larder device add NEW {name}` builds a file \
                system upon it."
        ),
        (true, false) => format!("{name} is a seed already."),
        (false, true) => format!("{name} is no seed any more."),
        (false, false) => format!("{name} is no seed."),
    })
}
