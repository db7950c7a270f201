//! `larder send`: read-only subvolumes of an image as a stream for `receive`.
//!
//! Everything about streams is in [`larder_send`] and [`crate::streams`]. Here is which subvolumes
//! are meant, and where the bytes go: never to a terminal.

use crate::failure::{Advise, usage};
use crate::image::{Access, Image};
use crate::print;
use crate::streams::{self, Named, Sent, Wanted};
use crate::subvolumes::{in_image, root_of};
use crate::target::{Place, Target};
use anyhow::{Context, anyhow};
use indicatif::ProgressBar;
use larder_send::{Options, Summary};
use larder_stream::{Protocol, StreamWriter};
use serde_json::json;
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

The stream is that of Linux: `btrfs receive` takes it, too. With a parent it has
only what differs from it, and the receiver needs the parent. All subvolumes are
in one image, which is not mounted. The same subvolumes give the same bytes.")]
pub(crate) struct Args {
    /// Send differences from this snapshot, which the receiver has
    #[arg(short, long, value_name = "IMAGE:PATH")]
    parent: Option<OsString>,
    /// A snapshot that the receiver has, and from which it may take data; without a parent, the
    /// nearest relative of these is the parent
    #[arg(short, long = "clone-src", value_name = "IMAGE:PATH")]
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
    /// Read the image even if it is in use
    #[arg(long)]
    force: bool,
    /// Read-only subvolumes; each becomes a stream, one after the other
    #[arg(value_name = "IMAGE:PATH", required = true)]
    subvolumes: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let protocol = protocol(args)?;
    if args.json && args.file.is_none() {
        return usage("--json needs --file, because standard output has the stream");
    }
    let targets = targets(args)?;
    let first = targets.subvolumes.first().expect("clap wants one");
    in_image(first, Access::Read { force: args.force }, |image| {
        let mut out = open_output(args)?;
        let mut writer = StreamWriter::new(&mut out, protocol);
        let summary = send(args, image, &targets, &mut writer)?;
        out.flush().context("writing the stream")?;
        if args.json { print::json(&describe(&summary)) } else { Ok(()) }
    })
}

fn protocol(args: &Args) -> anyhow::Result<Protocol> {
    match (args.proto.as_deref(), args.compressed_data) {
        (Some("1"), true) => usage("--compressed-data needs --proto 2"),
        (Some("2"), _) | (None, true) => Ok(Protocol::V2),
        _ => Ok(Protocol::V1),
    }
}

/// The arguments that name subvolumes, all of one image.
struct Targets {
    subvolumes: Vec<Target>,
    parent: Option<Target>,
    clones: Vec<Target>,
}

fn targets(args: &Args) -> anyhow::Result<Targets> {
    let parsed = |list: &[OsString]| list.iter().map(target).collect::<anyhow::Result<Vec<_>>>();
    let targets = Targets {
        subvolumes: parsed(&args.subvolumes)?,
        parent: args.parent.as_ref().map(target).transpose()?,
        clones: parsed(&args.clone_src)?,
    };
    let image = targets.subvolumes[0].image.clone();
    let mut all = targets.subvolumes.iter().chain(&targets.parent).chain(&targets.clones);
    match all.find(|target| target.image != image) {
        Some(other) => usage(format!(
            "{} is not in {}: all subvolumes of a stream are in one image",
            other.display(),
            print::path(&image)
        )),
        None => Ok(targets),
    }
}

fn target(text: &OsString) -> anyhow::Result<Target> {
    match Place::parse_existing(text)? {
        Place::Image(target) => Ok(target),
        Place::Host(path) => {
            let shown = print::path(&path);
            Err(anyhow!("{shown} is not IMAGE:PATH"))
                .hint("a mount is not sent from; unmount the image, and name it with the path")
                .could_not_run()
        }
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

/// Finds the subvolumes, and sends them.
fn send<W: Write>(
    args: &Args,
    image: &Image,
    targets: &Targets,
    writer: &mut StreamWriter<W>,
) -> anyhow::Result<Sent> {
    let wanted = Wanted {
        subvolumes: named(image, &targets.subvolumes)?,
        parent: named(image, &targets.parent)?.pop(),
        clones: named(image, &targets.clones)?,
        options: Options { compressed_data: args.compressed_data, no_data: args.no_data },
    };
    let bar = if args.quiet { ProgressBar::hidden() } else { print::progress() };
    let mut watch = |summary: &Summary| {
        bar.set_position(summary.inodes);
        if summary.commands.is_multiple_of(64) {
            bar.set_message(crate::size::human(summary.data));
        }
    };
    let sent = streams::send_all(&image.fs, &wanted, writer, &mut watch)?;
    bar.finish_and_clear();
    Ok(sent)
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

fn describe(done: &[(String, Summary)]) -> serde_json::Value {
    let one = |(subvolume, summary): &(String, Summary)| {
        json!({
            "subvolume": subvolume,
            "commands": summary.commands,
            "inodes": summary.inodes,
            "data": summary.data,
            "cloned": summary.cloned,
        })
    };
    done.iter().map(one).collect()
}
