//! `larder send`: read-only subvolumes of an image or on a mount as a stream for `receive`.
//!
//! Everything about streams is in [`larder_send`] and [`crate::streams`]. Here is which
//! subvolumes are meant, and where the bytes go: never to a terminal. The stream of an image is
//! made here. That of a mount is made by its daemon ([`crate::on_mount::send`]).

use crate::failure::{Advise, usage};
use crate::image::{Access, Image};
use crate::on_mount::send::{How, Paths, send_streams};
use crate::print;
use crate::streams::{self, Named, Wanted};
use crate::subvolumes::{in_image, root_of};
use crate::target::{Place, Target};
use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use larder_send::{Options, Summary};
use larder_stream::{Protocol, StreamWriter};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::PathBuf;

/// Write read-only subvolumes as a stream that `receive` makes subvolumes of.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder send disk.img:/home-monday > monday.stream
  larder send -p disk.img:/home-monday disk.img:/home-tuesday > tuesday.stream
  larder send -p mnt/home-monday mnt/home-tuesday > tuesday.stream

The stream is that of Linux: `btrfs receive` takes it, too. With a parent it has
only what differs from it, and the receiver needs the parent. All subvolumes are
in one image: named by IMAGE:PATH if it is not mounted, or else by directories
on a mount. The same subvolumes give the same bytes.

From a mount only root and the user that mounted it may send, because a stream
has all files, whatever their permissions. The daemon writes the stream. Until
it ends, its subvolumes cannot be deleted or made writable. Unmounting ends it.")]
pub(crate) struct Args {
    /// Send differences from this snapshot, which the receiver has
    #[arg(short, long, value_name = "SUBVOLUME")]
    parent: Option<OsString>,
    /// A snapshot that the receiver has, and from which it may take data; without a parent, the
    /// nearest relative of these is the parent
    #[arg(short, long = "clone-src", value_name = "SUBVOLUME")]
    clone_src: Vec<OsString>,
    /// Protocol: 2 has packed extents, punched holes and times of creation
    #[arg(long, value_name = "1|2", value_parser = ["1", "2"])]
    proto: Option<String>,
    /// Send compressed extents as they are (protocol 2)
    #[arg(long)]
    compressed_data: bool,
    /// Send no data, but say which ranges of files differ
    #[arg(long)]
    no_data: bool,
    /// Write to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
    /// Print a summary as JSON (with --file)
    #[arg(long)]
    json: bool,
    /// Read the image even if it is in use (with IMAGE:PATH)
    #[arg(long)]
    force: bool,
    /// Read-only subvolumes, as IMAGE:PATH or as directories on a mount; each becomes a stream, one
    /// after the other
    #[arg(value_name = "SUBVOLUME", required = true)]
    subvolumes: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let protocol = protocol(args)?;
    if args.json && args.file.is_none() {
        return usage("--json needs --file, because standard output has the stream");
    }
    let options = Options { compressed_data: args.compressed_data, no_data: args.no_data };
    let bar = if args.quiet { ProgressBar::hidden() } else { print::progress() };
    let summary = match sources(args)? {
        Sources::Image(targets) => from_image(args, &targets, options, protocol, &bar)?,
        Sources::Mount(paths) => {
            // Only the daemon knows how many entries there are.
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                bar.set_style(style);
            }
            let mut watch = |bytes| bar.set_message(crate::size::human(bytes));
            let how = How { protocol, options, joined: false };
            send_streams(&paths, how, &mut *open_output(args)?, &mut watch)?
        }
    };
    bar.finish_and_clear();
    if args.json { print::json(&summary) } else { Ok(()) }
}

fn protocol(args: &Args) -> anyhow::Result<Protocol> {
    match (args.proto.as_deref(), args.compressed_data) {
        (Some("1"), true) => usage("--compressed-data needs --proto 2"),
        (Some("2"), _) | (None, true) => Ok(Protocol::V2),
        _ => Ok(Protocol::V1),
    }
}

/// The arguments that name subvolumes.
enum Sources {
    Image(Targets),
    Mount(Paths),
}

/// Those of one image that is not mounted.
struct Targets {
    subvolumes: Vec<Target>,
    parent: Option<Target>,
    clones: Vec<Target>,
}

/// All as the first one: in the image, or on a mount.
fn sources(args: &Args) -> anyhow::Result<Sources> {
    let first = args.subvolumes.first().expect("clap wants one");
    match Place::parse_existing(first)? {
        Place::Image(_) => Ok(Sources::Image(Targets {
            subvolumes: all(&args.subvolumes, in_an_image)?,
            parent: all(args.parent.as_slice(), in_an_image)?.pop(),
            clones: all(&args.clone_src, in_an_image)?,
        })),
        Place::Host(_) => Ok(Sources::Mount(Paths {
            subvolumes: all(&args.subvolumes, on_a_mount)?,
            parent: all(args.parent.as_slice(), on_a_mount)?.pop(),
            clones: all(&args.clone_src, on_a_mount)?,
        })),
    }
}

fn all<T>(texts: &[OsString], one: fn(&OsString) -> anyhow::Result<T>) -> anyhow::Result<Vec<T>> {
    texts.iter().map(one).collect()
}

fn in_an_image(text: &OsString) -> anyhow::Result<Target> {
    match Place::parse_existing(text)? {
        Place::Image(target) => Ok(target),
        Place::Host(path) => usage(format!(
            "{} is not IMAGE:PATH, as the first subvolume is: all are in one image",
            print::path(&path)
        )),
    }
}

fn on_a_mount(text: &OsString) -> anyhow::Result<PathBuf> {
    match Place::parse_existing(text)? {
        Place::Host(path) => Ok(path),
        Place::Image(target) => usage(format!(
            "{} is not on a mount, as the first subvolume is: all are in one image",
            target.display()
        )),
    }
}

fn from_image(
    args: &Args,
    targets: &Targets,
    options: Options,
    protocol: Protocol,
    bar: &ProgressBar,
) -> anyhow::Result<serde_json::Value> {
    let first = must_be_of_one_image(targets)?;
    in_image(first, Access::Read { force: args.force }, |image| {
        let mut out = open_output(args)?;
        let mut writer = StreamWriter::new(&mut out, protocol);
        let wanted = Wanted {
            subvolumes: named(image, &targets.subvolumes)?,
            parent: named(image, &targets.parent)?.pop(),
            clones: named(image, &targets.clones)?,
            options,
        };
        let mut watch = |summary: &Summary| {
            bar.set_position(summary.inodes);
            if summary.commands.is_multiple_of(64) {
                bar.set_message(crate::size::human(summary.data));
            }
        };
        let sent = streams::send_all(&image.fs, &wanted, &mut writer, &mut watch)?;
        out.flush().context("writing the stream")?;
        Ok(streams::describe(&sent))
    })
}

/// The first of them.
fn must_be_of_one_image(targets: &Targets) -> anyhow::Result<&Target> {
    let image = &targets.subvolumes[0].image;
    let mut all = targets.subvolumes.iter().chain(&targets.parent).chain(&targets.clones);
    match all.find(|target| target.image != *image) {
        Some(other) => usage(format!(
            "{} is not in {}: all subvolumes of a stream are in one image",
            other.display(),
            print::path(image)
        )),
        None => Ok(&targets.subvolumes[0]),
    }
}

/// The file, or standard output if that is no terminal.
fn open_output(args: &Args) -> anyhow::Result<Box<dyn Write>> {
    const BUFFER: usize = 1 << 20;
    if let Some(path) = &args.file {
        let file = File::create(path).with_context(|| print::path(path)).could_not_run()?;
        return Ok(Box::new(BufWriter::with_capacity(BUFFER, file)));
    }
    let out = std::io::stdout();
    if out.is_terminal() {
        return usage("a stream is not for a terminal: send it into a file (-f FILE) or a pipe");
    }
    Ok(Box::new(BufWriter::with_capacity(BUFFER, out.lock())))
}

fn named<'a>(
    image: &Image,
    targets: impl IntoIterator<Item = &'a Target>,
) -> anyhow::Result<Vec<Named>> {
    let one = |target: &Target| {
        let id = root_of(image, &target.path)?.subvol;
        Ok(Named { id, shown: target.display() })
    };
    targets.into_iter().map(one).collect()
}
