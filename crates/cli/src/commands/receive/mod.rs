//! `larder receive`: applies a send stream to an image or to a directory on a mount, or shows it.
//!
//! Hidden here is where the stream comes from and how its end is told to people: what is half
//! received, and how it goes on. What the stream does is `larder_receive`'s.

mod dump;
mod json;
mod progress;

use crate::failure::{Advise, usage};
use crate::interrupt::Interrupt;
use crate::mounted::mounted;
use crate::print;
use crate::subvolumes::in_image_for_stream;
use crate::target::{Place, Target};
use anyhow::{Context, anyhow};
use larder_fs::FileKind;
use larder_receive::destination::Destination;
use larder_receive::{Error, ImageDir, MountedDir, Options, Summary, Taken};
use larder_stream::StreamReader;
use progress::Watcher;
use serde_json::json;
use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

/// Receive subvolumes from a stream that `btrfs send` or `larder send` wrote.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder receive -f monday.stream disk.img:/snapshots
  larder receive --resume -f monday.stream disk.img:/snapshots
  larder receive --dump -f monday.stream

The subvolume gets the name that it was sent with, and is read-only when it is
complete. A stream with changes only needs the subvolume that they build upon:
it is found by its uuid, wherever it is in the same image.

Interrupted, a subvolume stays writable and is marked as incomplete. The same
command with --resume and the same stream goes on with it.")]
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Args {
    /// Read the stream from FILE instead of standard input
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Show the commands of the stream, and receive nothing
    #[arg(long, conflicts_with_all = ["resume", "force_decompress", "max_errors"])]
    dump: bool,
    /// Print JSON: of a dump one line for each command, else a summary
    #[arg(long)]
    json: bool,
    /// Go on with what was received in part
    #[arg(long)]
    resume: bool,
    /// End after N commands have failed; 0: go on to the end
    #[arg(short = 'E', long, value_name = "N", default_value_t = 1)]
    max_errors: u64,
    /// Unpack compressed data, also where it could be stored as it is
    #[arg(long)]
    force_decompress: bool,
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Directory in an image (IMAGE:DIR) or on a mount
    #[arg(required_unless_present = "dump", conflicts_with = "dump")]
    target: Option<OsString>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let input = open(args)?;
    let Some(target) = &args.target else {
        let reader = StreamReader::new(input);
        return if args.json { json::show(reader) } else { dump::show(reader) };
    };
    let options = Options {
        resume: args.resume,
        max_errors: args.max_errors,
        force_decompress: args.force_decompress,
        ..Options::default()
    };
    let summary = match Place::parse_existing(target)? {
        Place::Image(target) => into_image(&target, input, &options, args)?,
        Place::Host(path) => onto_mount(&path, input, &options, args)?,
    };
    if args.json {
        print::json(&as_json(&summary))?;
    }
    match summary.errors {
        0 => Ok(()),
        n => Err(anyhow!("{} failed; the rest was received", print::number(n, "command"))),
    }
}

/// The stream.
fn open(args: &Args) -> anyhow::Result<Box<dyn Read + Send>> {
    if let Some(path) = &args.file {
        let file = File::open(path).with_context(|| print::path(path)).could_not_run()?;
        return Ok(Box::new(file));
    }
    let input = std::io::stdin();
    if input.is_terminal() {
        return usage("a stream cannot be typed: give a file with -f, or pipe the stream in");
    }
    Ok(Box::new(input))
}

fn into_image(
    target: &Target,
    input: impl Read + Send + 'static,
    options: &Options,
    args: &Args,
) -> anyhow::Result<Summary> {
    in_image_for_stream(target, |image| {
        let dir = image.resolve(&target.path, true)?;
        if dir.kind != FileKind::Directory {
            return Err(anyhow!("{} is not a directory", target.display())).could_not_run();
        }
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut to = ImageDir::new(&image.fs, dir.id, owner);
        receive(input, &mut to, options, args)
    })
}

fn onto_mount(
    path: &Path,
    input: impl Read + Send + 'static,
    options: &Options,
    args: &Args,
) -> anyhow::Result<Summary> {
    let mut to = mounted(path, MountedDir::open)?;
    receive(input, &mut to, options, args)
}

fn receive(
    input: impl Read + Send + 'static,
    to: &mut impl Destination,
    options: &Options,
    args: &Args,
) -> anyhow::Result<Summary> {
    let interrupt = Interrupt::watch();
    let mut watcher = Watcher::new(interrupt.clone(), args.quiet, args.json);
    let done = larder_receive::receive(input, to, options, &mut watcher);
    watcher.finish();
    if let Err(Error::Interrupted) = done {
        interrupt.check()?;
    }
    advise(done, watcher.left_a_part())
}

/// Adds what helps.
fn advise(done: Result<Summary, Error>, left_a_part: bool) -> anyhow::Result<Summary> {
    let hint = match &done {
        Err(Error::Taken { why: Taken::Partly, .. }) => {
            "--resume goes on with it; or delete it (`larder subvolume delete`) to begin again"
        }
        Err(Error::Taken { why: Taken::Received, .. }) => {
            "nothing was done; --resume skips what is complete"
        }
        Err(Error::Taken { why: Taken::Foreign | Taken::OtherStream, .. }) => {
            "move it away or delete it (`larder subvolume delete`), or receive into another \
             directory"
        }
        Err(Error::Stream(_) | Error::Command(_)) if left_a_part => {
            "what was received in part stays: --resume goes on with it"
        }
        _ => return Ok(done?),
    };
    done.hint(hint)
}

fn as_json(summary: &Summary) -> serde_json::Value {
    let subvolumes: Vec<_> = summary
        .subvolumes
        .iter()
        .map(|s| {
            json!({
                "name": print::name(&s.name),
                "uuid": print::uuid(s.sent.uuid),
                "transid": s.sent.ctransid.0,
                "parent_uuid": s.parent.map(|p| print::uuid(p.uuid)),
                "commands": s.applied,
                "skipped": s.skipped,
            })
        })
        .collect();
    json!({ "subvolumes": subvolumes, "errors": summary.errors, "bytes": summary.bytes })
}
