//! `larder send`: read-only subvolumes of an image as a stream for `receive`.
//!
//! Everything about streams is in [`larder_send`]. Here is which subvolumes are meant, which of
//! them is the parent where none is named, and where the bytes go: never to a terminal.

use crate::failure::{Advise, usage};
use crate::image::{Access, Image};
use crate::print;
use crate::subvolumes::{frozen, in_image};
use crate::target::{Place, Target};
use anyhow::{Context, anyhow};
use indicatif::ProgressBar;
use larder_fs::{Frozen, SubvolInfo};
use larder_send::{Options, Source, Summary};
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
        let summary = send_all(args, image, &targets, &mut writer)?;
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

fn send_all<W: Write>(
    args: &Args,
    image: &Image,
    targets: &Targets,
    writer: &mut StreamWriter<W>,
) -> anyhow::Result<Vec<(String, Summary)>> {
    let parent = targets.parent.as_ref().map(|t| frozen(image, &t.path)).transpose()?;
    let mut given = Vec::new();
    for target in &targets.clones {
        given.push(frozen(image, &target.path)?);
    }
    let options = Options { compressed_data: args.compressed_data, no_data: args.no_data };
    let bar = if args.quiet { ProgressBar::hidden() } else { print::progress() };
    let mut done = Vec::new();
    for target in &targets.subvolumes {
        let subvolume = frozen(image, &target.path)?;
        let name = name_of(image, &subvolume, target)?;
        let clones: Vec<&Frozen> = given.iter().collect();
        let parent = parent.as_ref().or_else(|| relative(&subvolume, &clones));
        let source = Source { subvolume: &subvolume, name: &name, parent, clones: &clones };
        let mut watch = |summary: &Summary| {
            bar.set_position(summary.inodes);
            if summary.commands.is_multiple_of(64) {
                bar.set_message(crate::size::human(summary.data));
            }
        };
        let sent = larder_send::send(&source, options, writer, &mut watch);
        done.push((target.display(), sent.with_context(|| target.display())?));
        // The receiver has it now, so the next one may share with it.
        given.push(subvolume);
    }
    bar.finish_and_clear();
    Ok(done)
}

/// The name that a subvolume has at the receiver: the last one of its path.
fn name_of(image: &Image, subvolume: &Frozen, target: &Target) -> anyhow::Result<Vec<u8>> {
    let path = image.fs.subvolume_path(subvolume.id())?;
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
    if name.is_empty() {
        return Err(anyhow!("{}: the top-level subvolume has no name", target.display()))
            .hint("send a snapshot of it: `larder subvolume snapshot -r`");
    }
    Ok(name)
}

/// Of the given subvolumes, the one from which the fewest changes are to be expected: the source of
/// the snapshot, or else the snapshot of the same source that was changed last before or after.
fn relative<'a>(subvolume: &Frozen, given: &[&'a Frozen]) -> Option<&'a Frozen> {
    let of: &SubvolInfo = subvolume.info();
    if of.parent_uuid == [0; 16] {
        return None;
    }
    let related = |other: &&&Frozen| {
        let other = other.info();
        other.uuid == of.parent_uuid || other.parent_uuid == of.parent_uuid
    };
    let distance = |other: &&Frozen| other.info().ctransid.0.abs_diff(of.ctransid.0);
    given.iter().filter(related).copied().min_by_key(distance)
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
