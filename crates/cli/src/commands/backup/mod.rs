//! `larder backup`: snapshots of a subvolume, sent to where they are safe, pruned on both sides.
//!
//! Here is what the arguments mean and which places fit together. What a run does is in `steps`,
//! and which snapshots it sends and deletes in the crate `backup`.

mod flow;
mod held;
mod on_mount;
mod place;
mod source;
mod ssh;
mod steps;
mod table;
mod target;

use crate::failure::{Advise, usage};
use crate::image::Access;
use crate::interrupt::Interrupt;
use crate::subvolumes::in_image;
use crate::target::{Place, Target as InImage};
use crate::{mount_table, print, size};
use anyhow::{Context, anyhow};
use larder_backup::Keep;
use larder_fs::Timestamp;
use place::{Address, Remote};
use source::Source;
use ssh::Ssh;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use steps::{Run, Wish};
use table::Report;
use target::Target;

/// Snapshot a subvolume, and send what changed to another image, mount or machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder backup --keep daily=7,weekly=8 disk.img:/home backup.img:/
  larder backup mnt/home ssh://nas/srv/backup.img:/
  larder backup --list backup.img:/

Snapshots are called NAME.20251118T040000Z, after the time in UTC. The first one
is sent as a whole, later ones as what changed since the newest one that both
sides have. A run may end at any point: the next one goes on.

--keep takes last, hourly, daily, weekly, monthly and yearly, each with a number
or `all`. Of the latest so many hours, days and so on the first snapshot stays,
on both sides. What no rule keeps is deleted when all is sent. The newest one,
and the one that the next run begins with, always stay.

ssh://[USER@]HOST[:PORT]/PATH runs `ssh`, and `larder` there. PATH is IMAGE:DIR
or a directory on a mount there; /~/ at its start is the home directory.")]
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Args {
    /// What stays on both sides, such as hourly=24,daily=7 (default: everything)
    #[arg(long, value_name = "RULE=COUNT,…")]
    keep: Option<Keep>,
    /// Most bytes to send in a second, such as 10M
    #[arg(long, value_name = "SIZE", value_parser = rate)]
    rate: Option<u64>,
    /// Do nothing, and show what would be done
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// What the snapshots are called (default: the name of the subvolume, or `root`)
    #[arg(long)]
    name: Option<OsString>,
    /// Where the source keeps its snapshots: a directory of the same image or mount (default:
    /// `.snapshots` beside SOURCE)
    #[arg(long, value_name = "DIR")]
    snapshots: Option<OsString>,
    /// Send everything, although the target has older snapshots that the source has not
    #[arg(long)]
    full: bool,
    /// The command `larder` on the other machine
    #[arg(long, value_name = "PATH", default_value = "larder")]
    remote_larder: OsString,
    /// Show which snapshots PLACE has, and do nothing
    #[arg(long, value_name = "PLACE", conflicts_with_all = [
        "keep", "rate", "dry_run", "name", "snapshots", "full", "source", "target",
    ])]
    list: Option<OsString>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Say nothing but errors and notes
    #[arg(short, long)]
    quiet: bool,
    /// The subvolume to back up: IMAGE:PATH, or a directory on a mount
    #[arg(required_unless_present = "list")]
    source: Option<OsString>,
    /// Where to: IMAGE:DIR, a directory on a mount, or ssh://HOST/PATH
    #[arg(required_unless_present = "list")]
    target: Option<OsString>,
}

fn rate(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        0 => Err("with 0 bytes in a second nothing would be sent".to_owned()),
        rate => Ok(rate),
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(place) = &args.list {
        return list(args, &Address::parse(place)?);
    }
    let (Some(source), Some(target)) = (&args.source, &args.target) else {
        return usage("a source and a target are needed");
    };
    let from = From::parse(source)?;
    let to = Address::parse(target)?;
    check_places(&from, &to)?;
    let report = backup(args, &from, &to)?;
    if args.quiet && !args.json { Ok(()) } else { report.print(args.json) }
}

/// What is backed up.
#[derive(Clone, Debug)]
enum From {
    Image(InImage),
    Mount(PathBuf),
}

impl From {
    fn parse(text: &OsStr) -> anyhow::Result<Self> {
        match Address::parse(text)? {
            Address::Here(Place::Image(target)) => Ok(Self::Image(target)),
            Address::Here(Place::Host(path)) if path.is_file() => {
                let shown = print::path(&path);
                usage(format!("{shown} is a whole image: {shown}:/ is its top-level subvolume"))
            }
            Address::Here(Place::Host(path)) => Ok(Self::Mount(path)),
            Address::There(remote) => {
                let shown = remote.display();
                usage(format!("{shown} is on another machine: run `larder backup` there"))
            }
        }
    }
}

/// Are they in one image?
fn are_one(from: &From, to: &Address) -> anyhow::Result<bool> {
    let number = |path: &Path| path.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
    match (from, to) {
        (From::Image(from), Address::Here(Place::Image(to))) => {
            let (from, to) = (number(&from.image), number(&to.image));
            Ok(from.is_some() && from == to)
        }
        (From::Mount(from), Address::Here(Place::Host(to))) => {
            let (from, to) = (mounted_image(from)?, mounted_image(to)?);
            Ok(from.is_some() && from == to)
        }
        // Only one program opens an image: the other one is told that it is in use.
        _ => Ok(false),
    }
}

/// The image that is mounted where a path leads to.
fn mounted_image(path: &Path) -> anyhow::Result<Option<OsString>> {
    let Ok(meta) = path.metadata() else { return Ok(None) };
    let mut mounts = mount_table::all()?.into_iter().filter(mount_table::Mount::is_larder);
    Ok(mounts.find(|mount| mount.device == meta.dev()).map(|mount| mount.source))
}

/// Do the two fit together?
fn check_places(from: &From, to: &Address) -> anyhow::Result<()> {
    if are_one(from, to)? {
        return Err(anyhow!("the source and the target are one image: what damages it takes both"))
            .hint(
                "back up into another image; for snapshots in the same one there is `larder \
                 subvolume snapshot -r`",
            )
            .could_not_run();
    }
    match to {
        Address::Here(Place::Host(path)) if path.is_file() => {
            let shown = print::path(path);
            usage(format!("{shown} is a whole image: give a directory in it, such as {shown}:/"))
        }
        _ => Ok(()),
    }
}

fn backup(args: &Args, from: &From, to: &Address) -> anyhow::Result<Report> {
    let access = if args.dry_run { Access::Read { force: false } } else { Access::Write };
    let interrupt = Interrupt::watch();
    let dir = args.snapshots.as_deref();
    match from {
        From::Image(from) => in_image(from, access, |image| {
            let wish = wish(args, || source::own_name(image, &from.path))?;
            let source = source::InImage::new(image, &from.path, dir.map(OsStr::as_bytes))?;
            into(args, (to, access), (&source, &wish, &interrupt))
        }),
        From::Mount(path) => {
            let wish = wish(args, || on_mount::own_name(path))?;
            let source = on_mount::OnMount::new(path, dir.map(Path::new), args.dry_run)?;
            into(args, (to, access), (&source, &wish, &interrupt))
        }
    }
}

fn wish(args: &Args, own_name: impl FnOnce() -> anyhow::Result<Vec<u8>>) -> anyhow::Result<Wish> {
    // Also where another name is given: it has to be a subvolume.
    let own_name = own_name()?;
    let prefix = args.name.as_ref().map_or(own_name, |name| name.as_bytes().to_vec());
    let stamp = ".20251118T040000Z".len();
    if prefix.is_empty() || prefix.contains(&b'/') || prefix.len() + stamp > 255 {
        let shown = print::name(&prefix);
        return usage(format!("{shown:?} cannot be the name of snapshots: give one with --name"));
    }
    let keep = match &args.keep {
        Some(keep) => keep.clone(),
        None => "last=all".parse().context("the policy that keeps everything")?,
    };
    let (rate, full, dry_run, quiet) = (args.rate, args.full, args.dry_run, args.quiet);
    Ok(Wish { prefix, keep, rate, full, dry_run, quiet, now: Timestamp::now().sec })
}

/// Opens the target, and runs.
fn into(
    args: &Args,
    (to, access): (&Address, Access),
    (source, wish, interrupt): (&dyn Source, &Wish, &Interrupt),
) -> anyhow::Result<Report> {
    let run = |target: &mut dyn Target| Run { source, target, wish, interrupt }.run();
    match to {
        Address::There(remote) => run(&mut there(args, remote, &wish.prefix)),
        Address::Here(Place::Host(dir)) => {
            run(&mut target::OnMount { dir: dir.clone(), interrupt: interrupt.clone() })
        }
        Address::Here(Place::Image(to)) => in_image(to, access, |image| {
            let (path, interrupt) = (to.path.clone(), interrupt.clone());
            run(&mut target::InImage { image, path, interrupt })
        }),
    }
}

fn there(args: &Args, remote: &Remote, prefix: &[u8]) -> Ssh {
    let (to, program) = (remote.clone(), args.remote_larder.clone());
    Ssh { to, program, prefix: prefix.to_vec() }
}

/// What a place has.
fn list(args: &Args, place: &Address) -> anyhow::Result<()> {
    let entries = match place {
        Address::There(remote) => {
            return table::list(there(args, remote, b"").told()?, args.json);
        }
        Address::Here(Place::Host(dir)) => held::on_a_mount(dir)?,
        Address::Here(Place::Image(target)) => {
            in_image(target, Access::Read { force: false }, |image| {
                held::in_image(image, image.resolve(&target.path, true)?.id)
            })?
        }
    };
    table::list(entries.iter().map(held::Entry::tell).collect(), args.json)
}
