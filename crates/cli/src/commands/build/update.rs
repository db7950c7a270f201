//! `larder build --update`: an image that exists becomes what the sources say.
//!
//! Decided here: which subvolumes get a snapshot of the state before, its name, and when it is not
//! worth keeping. `larder-update` does the rest.

use super::{Args, DENIED, explained, is_denied};
use crate::failure::{Advise, is_full};
use crate::image::{Access, Image};
use crate::interrupt::Interrupt;
use crate::source_date::source_date;
use crate::{print, size};
use anyhow::{Context, anyhow};
use larder_format::TreeId;
use larder_fs::{InodeId, SubvolInfo, Timestamp};
use larder_sources::Sources;
use larder_update::{Change, Compare, Error, Options, Summary, What, update};
use serde_json::json;

/// Number of the root directory of each subvolume.
const ROOT: u64 = 256;
/// The part of the memory for what is known of files with several names.
const LINKS_SHARE: u64 = 8;

pub(super) fn run(args: &Args, sources: &Sources, interrupt: &Interrupt) -> anyhow::Result<()> {
    let access = if args.dry_run { Access::Read { force: args.force } } else { Access::Write };
    let packing = args.compress.or(args.compress_force);
    let image = Image::open_compressing(&args.image, access, Some(TreeId::FS_TREE.0), packing)?;
    let name = snapshot_name(args, &image)?;
    let done = Job { args, sources, interrupt, image: &image, name }.run();
    let closed = image.close();
    done.and(closed)
}

struct Job<'a> {
    args: &'a Args,
    sources: &'a Sources,
    interrupt: &'a Interrupt,
    image: &'a Image,
    /// Name of the snapshots of the state before.
    name: String,
}

impl Job<'_> {
    fn run(&self) -> anyhow::Result<()> {
        let kept = if self.args.dry_run { Vec::new() } else { self.snapshots()? };
        let done = self.update();
        let unchanged = matches!(&done, Ok(summary) if summary.is_unchanged());
        if unchanged {
            for subvolume in &kept {
                self.image.fs.delete_subvolume(*subvolume, self.name.as_bytes())?;
            }
        }
        let summary = done.or_else(|error| self.advise(error, !kept.is_empty()))?;
        if !self.args.dry_run {
            self.image.fs.sync()?;
        }
        self.show(&summary, if unchanged { 0 } else { kept.len() })
    }

    fn update(&self) -> anyhow::Result<Summary> {
        let options = Options {
            compare: self.compare()?,
            dry_run: self.args.dry_run,
            memory: usize::try_from(self.args.memory / LINKS_SHARE).unwrap_or(usize::MAX),
            ..Options::default()
        };
        let mut trouble = None;
        let mut each = |change: &Change<'_>| {
            let shown = if self.args.dry_run && !self.args.json { line(change) } else { Ok(()) };
            trouble = shown.and_then(|()| Ok(self.interrupt.check()?)).err();
            trouble.is_none()
        };
        let open = |locator: &_| self.sources.open(locator).map_err(larder_update::BoxError::from);
        let fs = &self.image.fs;
        let made = update(fs, fs.root(), self.sources.entries()?, &open, options, &mut each);
        match (trouble, made) {
            (Some(trouble), _) => Err(trouble),
            (None, made) => made.map_err(update_error),
        }
    }

    /// Adds what helps where an image is left with a part of the changes.
    fn advise(&self, error: anyhow::Error, kept: bool) -> anyhow::Result<Summary> {
        let full = is_full(&error);
        let mut failed = Err(error);
        if full {
            failed = failed.hint("`larder build --free SIZE` makes an image with room for updates");
        }
        if kept {
            failed = failed.hint(format!("the snapshot {} has what was before", self.name));
        }
        failed
    }

    /// Files are compared by their bytes where all their times were set to one value.
    fn compare(&self) -> anyhow::Result<Compare> {
        let set = self.args.mtime.is_some() || source_date()?.is_some();
        Ok(if set || self.args.checksum { Compare::Contents } else { Compare::TimeAndSize })
    }

    /// Makes a snapshot of each writable subvolume, and returns the directories in which they are.
    fn snapshots(&self) -> anyhow::Result<Vec<InodeId>> {
        if self.args.no_snapshot {
            return Ok(Vec::new());
        }
        let (fs, name) = (&self.image.fs, &self.name);
        let writable = fs.subvolumes()?.into_iter().filter(|s| !s.read_only);
        let mut made = Vec::new();
        for subvolume in writable {
            let root = InodeId { subvol: subvolume.id, ino: ROOT };
            let snapshot = fs.snapshot(subvolume.id, root, name.as_bytes(), true);
            match snapshot {
                Err(e @ larder_fs::Error::Exists) => {
                    return Err(anyhow::Error::new(e).context(format!("the snapshot {name}")))
                        .hint("--snapshot NAME gives it another name");
                }
                other => other.with_context(|| format!("the snapshot {name}"))?,
            };
            made.push(root);
        }
        Ok(made)
    }

    fn show(&self, s: &Summary, snapshots: usize) -> anyhow::Result<()> {
        let name = (snapshots > 0).then_some(&self.name);
        if self.args.json {
            return print::json(&json!({
                "added": s.added,
                "removed": s.removed,
                "replaced": s.replaced,
                "contents": s.contents,
                "attributes": s.attributes,
                "linked": s.linked,
                "unchanged": s.unchanged,
                "written": s.written,
                "snapshot": name,
            }));
        }
        if s.is_unchanged() {
            print::say("larder: the image is as the sources say");
            return Ok(());
        }
        print::say(&format!(
            "larder: {} added, {} removed, {} replaced, {} with other contents, {} with other \
             attributes, {} linked; {} unchanged; {} written",
            s.added,
            s.removed,
            s.replaced,
            s.contents,
            s.attributes,
            s.linked,
            s.unchanged,
            size::human(s.written)
        ));
        if let Some(name) = name {
            print::say(&format!("larder: the snapshot {name} has what was before"));
        }
        Ok(())
    }
}

/// The name that was asked for, or one that no subvolume has yet.
fn snapshot_name(args: &Args, image: &Image) -> anyhow::Result<String> {
    if let Some(name) = &args.snapshot {
        return Ok(name.clone());
    }
    let now = source_date()?.unwrap_or_else(Timestamp::now);
    let base = format!("before-{}", print::time(now.sec).replace([' ', ':'], "-"));
    let subvolumes = image.fs.subvolumes()?;
    let taken = |name: &str| {
        let in_directory = |s: &SubvolInfo| {
            let root = InodeId { subvol: s.id, ino: ROOT };
            image.fs.lookup(root, name.as_bytes())
        };
        subvolumes.iter().any(|s| in_directory(s).is_ok())
    };
    let more = (2u32..).map(|n| format!("{base}-{n}"));
    let mut names = std::iter::once(base.clone()).chain(more);
    Ok(names.find(|name| !taken(name)).unwrap_or(base))
}

/// `+ etc/fstab`.
fn line(change: &Change<'_>) -> anyhow::Result<()> {
    let sign = match change.what {
        What::Added => '+',
        What::Removed => '-',
        What::Replaced => '!',
        What::Contents => '*',
        What::Attributes => '@',
        What::Linked => '=',
    };
    let path = print::name(change.path.as_bytes());
    print::line(&format!("{sign} {}", if path.is_empty() { "." } else { &path }))
}

fn update_error(error: Error) -> anyhow::Error {
    match error {
        Error::Source(e) => match e.downcast::<larder_sources::Error>() {
            Ok(e) => explained(*e),
            Err(e) => anyhow!(e),
        },
        Error::Contents { ref why, .. } if is_denied(why) => {
            Err::<(), _>(error).hint(DENIED).unwrap_err()
        }
        error => error.into(),
    }
}
