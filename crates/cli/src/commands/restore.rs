//! `larder restore`: what is left of an image that does not mount.
//!
//! `larder-restore` does the work. This command shows what happens: notes and losses on standard
//! error as they come, or all of it as one JSON object on standard output.

use crate::failure::{Advise, usage};
use crate::image::{Access, DUMP_ADVICE, advise_content, as_devices, open_devices};
use crate::interrupt::Interrupt;
use crate::mount_options;
use crate::print;
use crate::size;
use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use larder_format::{Generation, ObjectId};
use larder_restore::{
    Entry, Loss, Observer, Options, PointSource, Reader, Report, Request, Step, Target, Trees,
    When, points, restore,
};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Copy what is left of a damaged image into a directory.
///
/// Missing parts come from the other copy, from backup roots, and finally from every node that can
/// be found on the device. What cannot be restored is listed. The image is only read.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: 0 everything was restored, 1 something was lost (and listed),
2 could not run.

Examples:
  larder restore --list broken.img
  larder restore --dry-run broken.img
  larder restore broken.img /mnt/rescued
  larder restore --older 1 --path home/me/thesis broken.img yesterday")]
pub(crate) struct Args {
    /// Image file or block device
    image: PathBuf,
    /// Directory to write to; made if it is not there
    #[arg(required_unless_present_any = ["list", "dry_run"])]
    dest: Option<PathBuf>,
    /// Show the points in time and the subvolumes that there are, and restore nothing
    #[arg(long, conflicts_with_all = ["dry_run", "dest"])]
    list: bool,
    /// Read and judge everything, list what would be restored, write nothing
    #[arg(long, conflicts_with = "dest")]
    dry_run: bool,
    /// Restore this subvolume and those below it (default: 5, the top, with all)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Restore only this path and what is below it
    #[arg(long)]
    path: Option<OsString>,
    /// Go back so many commits
    #[arg(long, value_name = "N", conflicts_with = "generation")]
    older: Option<usize>,
    /// Restore the commit of this generation
    #[arg(long, value_name = "N")]
    generation: Option<u64>,
    /// Start from this copy of the superblock: 0, 1 or 2 (default: the best)
    #[arg(long = "super", value_name = "N")]
    super_copy: Option<usize>,
    /// Leave snapshots out; otherwise each is written as a full copy
    #[arg(long)]
    no_snapshots: bool,
    /// Leave files with damaged data out, instead of writing what there is of them
    #[arg(long)]
    skip_bad: bool,
    /// Never search the whole device for lost nodes
    #[arg(long)]
    no_scan: bool,
    /// Write into a directory that is not empty, replacing what is in the way; read an image that
    /// is in use
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Losses and entries that a JSON report spells out.
const MOST: usize = 100_000;

/// Shows progress, notes and losses.
struct Console {
    json: bool,
    /// Show entries.
    list: bool,
    bar: ProgressBar,
    losses: AtomicU64,
    kept: Mutex<Kept>,
    /// Why nothing more is listed.
    broken: OnceLock<anyhow::Error>,
    interrupt: Interrupt,
}

#[derive(Default)]
struct Kept {
    notes: Vec<String>,
    losses: Vec<Value>,
    entries: Vec<Value>,
}

impl Console {
    fn new(args: &Args) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            ProgressBar::new(0)
        } else {
            ProgressBar::hidden()
        };
        bar.enable_steady_tick(Duration::from_millis(200));
        Self {
            json: args.json,
            list: args.dry_run,
            bar,
            losses: AtomicU64::new(0),
            kept: Mutex::default(),
            broken: OnceLock::new(),
            interrupt: Interrupt::default(),
        }
    }

    fn keep(&self, what: impl FnOnce(&mut Kept)) {
        what(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn say(&self, text: &str) {
        self.bar.suspend(|| print::say(&format!("larder: {text}")));
    }
}

impl Observer for Console {
    fn progress(&self, step: Step, done: u64, total: Option<u64>) {
        let total = total.unwrap_or(0);
        let template = match step {
            Step::Scan => "searching {bytes} of {total_bytes} ({bytes_per_sec}, {eta} left)",
            Step::Names => "{spinner} {pos} names",
            Step::Files => "{spinner} {pos} of {len} files",
        };
        if self.bar.length() != Some(total) || done == 0 {
            self.bar.set_length(total);
            if let Ok(style) = ProgressStyle::with_template(template) {
                self.bar.set_style(style);
            }
        }
        self.bar.set_position(done);
    }
    fn note(&self, text: &str) {
        if self.json {
            self.keep(|k| k.notes.push(text.to_owned()));
        } else {
            self.say(&format!("note: {text}"));
        }
    }
    fn loss(&self, loss: &Loss) {
        let nth = self.losses.fetch_add(1, Relaxed);
        let path = loss.path.as_ref().map(|p| format!("/{}", print::name(p)));
        if self.json {
            if nth < MOST as u64 {
                let value = json!({
                    "tree": loss.tree.0.cast_signed(),
                    "inode": loss.inode.map(|inode| inode.0),
                    "path": path,
                    "what": loss.what,
                });
                self.keep(|k| k.losses.push(value));
            }
        } else {
            let place = path.unwrap_or_else(|| format!("tree {}", loss.tree));
            self.say(&format!("lost: {place}: {}", loss.what));
        }
    }
    fn entry(&self, entry: Entry<'_>) {
        if !self.list {
            return;
        }
        let path = format!("/{}", print::name(entry.path));
        if self.json {
            let value = json!({
                "subvolume": entry.tree.0,
                "inode": entry.inode.0,
                "path": path,
                "mode": format!("{:o}", entry.mode),
                "size": entry.size,
            });
            self.keep(|k| {
                if k.entries.len() < MOST {
                    k.entries.push(value);
                }
            });
        } else if self.broken.get().is_none() {
            let line = format!("{:>12} {path}", entry.size);
            if let Err(e) = self.bar.suspend(|| print::line(&line)) {
                let _ = self.broken.set(e);
            }
        }
    }
    fn is_over(&self) -> bool {
        self.interrupt.is_asked()
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.super_copy.is_some_and(|n| n > 2) {
        return usage("there are at most three superblocks: 0, 1 and 2");
    }
    let devices = open_devices(&args.image, Access::Read { force: args.force })?;
    let mut console = Console::new(args);
    if !args.list && !args.dry_run {
        console.interrupt = Interrupt::watch();
    }
    let options = Options { super_copy: args.super_copy, scan: !args.no_scan };
    let opened = Reader::open_devices(as_devices(&devices), options, &console).could_not_run();
    let reader = advise_content(opened, &*devices[0])?;
    let dump = reader.superblock().metadata_dump().is_some();
    if dump && args.list {
        console.note(
            "this is a metadata dump without its data: what is listed cannot be restored from it",
        );
    }
    if args.list {
        return list(args, &reader, &console);
    }
    let when = match (args.older, args.generation) {
        (Some(n), _) => When::Older(n),
        (_, Some(g)) => When::Generation(Generation(g)),
        _ => When::Newest,
    };
    let trimmed = args.path.as_ref().map(|p| {
        let names = p.as_bytes().split(|b| *b == b'/').filter(|n| !n.is_empty() && *n != b".");
        names.collect::<Vec<_>>().join(&b'/')
    });
    let target = match &args.dest {
        Some(path) if !args.dry_run => Target::Directory { path: path.clone(), force: args.force },
        _ => Target::DryRun,
    };
    let request = Request {
        when,
        subvolume: args.subvolid.map(ObjectId),
        path: trimmed.filter(|p| !p.is_empty()),
        snapshots: !args.no_snapshots,
        skip_bad: args.skip_bad,
        target,
    };
    let report = restore(&reader, &request);
    console.bar.finish_and_clear();
    let report = advise(report, &console.interrupt)?;
    let losses = console.losses.load(Relaxed);
    if args.json {
        let kept = console.kept.into_inner().unwrap_or_else(PoisonError::into_inner);
        // The verdict stands even if nobody reads to the end.
        print::unless_closed(print::json(&value(&report, losses, kept)))?;
    } else {
        summary(&report, args.dry_run);
        if let Some(e) = console.broken.into_inner() {
            print::unless_closed(Err(e))?;
        }
    }
    if losses > 0 {
        let losses = if losses == 1 { "1 loss".to_owned() } else { format!("{losses} losses") };
        bail!("{losses}: what was restored is not everything");
    }
    Ok(())
}

/// Adds a hint where nothing could be tried, or not everything could be done.
fn advise(report: larder_restore::Result<Report>, interrupt: &Interrupt) -> anyhow::Result<Report> {
    use std::io::ErrorKind::{DirectoryNotEmpty, QuotaExceeded, StorageFull};
    let kind = match &report {
        Err(larder_restore::Error::Destination { source, .. }) => Some(source.kind()),
        _ => None,
    };
    const STAYS: &str = "what was restored until then stays; with --force the next try goes into \
        the same directory";
    match (report, kind) {
        (Err(larder_restore::Error::Stopped), _) => {
            interrupt.check().hint(STAYS)?;
            Err(larder_restore::Error::Stopped.into())
        }
        (Err(e), Some(DirectoryNotEmpty)) => Err(e)
            .hint(
                "name a directory that is new or empty; --force writes into this one and replaces \
                 what is in the way",
            )
            .could_not_run(),
        (Err(e @ larder_restore::Error::MetadataDump), _) => {
            Err(e).hint(DUMP_ADVICE).could_not_run()
        }
        (Err(e), Some(StorageFull | QuotaExceeded)) => Err(e).hint(STAYS),
        (report, _) => report.could_not_run(),
    }
}

fn value(r: &Report, losses: u64, kept: Kept) -> Value {
    json!({
        "generation": r.generation,
        "subvolumes": r.subvolumes,
        "files": r.files,
        "directories": r.directories,
        "symlinks": r.symlinks,
        "special": r.special,
        "links": r.links,
        "bytes": r.bytes,
        "unverified_bytes": r.unverified_bytes,
        "snapshots_skipped": r.snapshots_skipped,
        "owners_refused": r.owners_refused,
        "xattrs_refused": r.xattrs_refused,
        "losses": losses,
        "lost": kept.losses,
        "notes": kept.notes,
        "entries": kept.entries,
    })
}

fn summary(r: &Report, dry: bool) {
    let would = if dry { "would be " } else { "" };
    print::say(&format!(
        "larder: {would}restored from generation {}: {} files ({}), {} further names, {} \
         directories, {} symbolic links, {} special files, in {} subvolumes",
        r.generation,
        r.files,
        size::human(r.bytes),
        r.links,
        r.directories,
        r.symlinks,
        r.special,
        r.subvolumes
    ));
    let notes = [
        (
            r.unverified_bytes,
            format!(
                "{} of data have no checksum to hold them against",
                size::human(r.unverified_bytes)
            ),
        ),
        (r.snapshots_skipped, format!("{} snapshots were left out", r.snapshots_skipped)),
        (r.owners_refused, format!("the owners of {} entries could not be set", r.owners_refused)),
        (r.xattrs_refused, format!("{} extended attributes could not be set", r.xattrs_refused)),
    ];
    for (_, text) in notes.iter().filter(|(n, _)| *n > 0) {
        print::say(&format!("larder: note: {text}"));
    }
}

/// Points in time, and the subvolumes at the one that would be restored.
fn list(args: &Args, reader: &Reader<'_>, console: &Console) -> anyhow::Result<()> {
    let all = points::points(reader, !args.no_scan);
    console.bar.finish_and_clear();
    let mut values = Vec::new();
    let mut n = 0;
    for p in &all {
        let readable = points::is_readable(reader, p);
        let source = match p.source {
            PointSource::Super => "superblock",
            PointSource::Backup => "backup root",
            PointSource::Found => "found",
            PointSource::Nothing => "nothing",
        };
        values.push(json!({
            "older": readable.then_some(n),
            "generation": p.generation.0,
            "source": source,
            "root": p.root.map(|r| r.at.0),
            "readable": readable,
        }));
        n += usize::from(readable);
    }
    let point = points::choose(reader, When::Newest).could_not_run()?;
    let trees = Trees::open(reader, point, reader.superblock().generation(), !args.no_scan);
    let subvolumes: Vec<Value> = trees
        .subvolumes
        .values()
        .map(|s| {
            json!({
                "id": s.id.0,
                "generation": s.generation.0,
                "parent": s.parent.map(|p| p.0),
                "name": print::name(&s.name),
                "snapshot": s.snapshot,
                "read_only": s.read_only,
            })
        })
        .collect();
    if args.json {
        let dump = reader.superblock().metadata_dump().is_some();
        return print::json(
            &json!({ "points": values, "subvolumes": subvolumes, "metadata_dump": dump }),
        );
    }
    print::line("points in time:")?;
    for v in &values {
        let older =
            v["older"].as_u64().map_or("cannot be read".to_owned(), |n| format!("--older {n}"));
        print::line(&format!(
            "  generation {:<10} {:<12} {older}",
            v["generation"].to_string(),
            v["source"].as_str().unwrap_or_default()
        ))?;
    }
    print::line(&format!("subvolumes in generation {}:", point.generation))?;
    for s in trees.subvolumes.values() {
        let parent =
            s.parent.map_or_else(String::new, |p| format!(" in {p}: {}", print::name(&s.name)));
        let snapshot = if s.snapshot { ", snapshot" } else { "" };
        print::line(&format!("  {}{parent} (generation {}{snapshot})", s.id, s.generation))?;
    }
    Ok(())
}
