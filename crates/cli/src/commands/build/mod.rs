//! `larder build`: an image from directories, archives, container images and other images.
//!
//! `larder-sources` reads what the image is to hold, and `larder-build` writes it. This command
//! translates its options for both (`plan`), shows the progress (`progress`), and says in the end
//! what took the space (`summary`). An image that exists is changed by `update`.

mod plan;
mod progress;
mod summary;
mod update;

use crate::failure::Advise;
use crate::format_options::FormatOptions;
use crate::interrupt::Interrupt;
use crate::{print, size};
use anyhow::anyhow;
use larder_build::{BoxError, BuildOptions, OpenContents, Output, build};
use larder_fs::Packing;
use larder_sources::{Sources, Stop, TreePath};
use plan::{SubvolumeArg, subvolume};
use progress::Bar;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Make an image of directories, archives, container images or other images.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder build root.img rootfs
  larder build --compress zstd:9 --shrink root.img rootfs.tar.zst overlay:/etc
  tar -C rootfs -cf - . | larder build --size 1G root.img -
  larder build --layers container.img oci:layout:v1
  larder build --subvol home --subvol var=ro --owner 0:0 root.img rootfs
  larder build --update --dry-run disk.img rootfs

SOURCE is a directory, an archive (tar, also compressed; `-` is standard input),
or an image of btrfs. A word in front says what else it is: oci:LAYOUT[:TAG],
oci-archive:FILE[:TAG], docker-archive:FILE[:NAME:TAG], image:FILE[:SUBVOLUME],
mtree:FILE, manifest:FILE. Later sources lie over earlier ones. :PATH, which
begins with a slash, is where a source is placed. A colon of a name is `\\:`.

Patterns are globs: one without a slash is for names, one with a slash for whole
paths in the image.

The same sources, uuid and SOURCE_DATE_EPOCH give the same bytes. Contents that
are equal share as far as --memory can remember them, so with --dedupe or
--layers it has to be the same, too. Without --uuid the uuid is a random one.

A build that fails or is interrupted leaves no image. The map is drawn last: if
that fails, the exit code is 1 and the image is complete.")]
pub(crate) struct Args {
    /// Image file to make, or block device to write
    image: PathBuf,
    /// What it is to hold
    #[arg(required = true, value_name = "SOURCE[:PATH]")]
    sources: Vec<OsString>,
    /// Make a subvolume of a directory; it is made if it is missing, and so are the directories on
    /// the way to it
    #[arg(long, value_name = "PATH[=ro|rw|default|default-ro]", value_parser = subvolume)]
    subvol: Vec<SubvolumeArg>,
    /// Make a read-only subvolume of each layer, each a snapshot of the one below, and a writable
    /// one of all, which is the default
    #[arg(long, conflicts_with = "subvol")]
    layers: bool,
    /// Compress: zlib[:1..9], lzo or zstd[:-15..15]
    #[arg(long, value_name = "METHOD")]
    compress: Option<Packing>,
    /// Compress also what does not look compressible
    #[arg(long, value_name = "METHOD", conflicts_with = "compress")]
    compress_force: Option<Packing>,
    /// Equal contents share extents
    #[arg(long)]
    dedupe: bool,
    /// Size of the image: a number of bytes, or auto for a tenth more than is needed
    #[arg(long, value_name = "SIZE|auto", conflicts_with_all = ["free", "shrink"])]
    size: Option<String>,
    /// Leave so many bytes free, and make the image no larger than that
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "shrink")]
    free: Option<u64>,
    /// Make the image as small as it gets. It is full then: Linux mounts it, and has to let it grow
    /// before it can write (`truncate -s +SIZE IMAGE`, mount, `btrfs filesystem resize max DIR`).
    /// --free keeps room instead
    #[arg(long)]
    shrink: bool,
    /// Unit of the size, with --shrink
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size::parse,
        default_value = "4K",
        requires = "shrink"
    )]
    align: u64,
    #[command(flatten)]
    format: FormatOptions,
    /// Owner of everything but what a manifest describes, as numbers
    #[arg(long, value_name = "UID[:GID]")]
    owner: Option<String>,
    /// Change permissions by pattern: an octal number, or as chmod takes them
    #[arg(long, value_name = "PATTERN=MODE")]
    chmod: Vec<String>,
    /// Change owners by pattern, as numbers
    #[arg(long, value_name = "PATTERN=UID[:GID]")]
    chown: Vec<String>,
    /// Set an extended attribute by pattern; without a value, remove it
    #[arg(long, value_name = "PATTERN=NAME[=VALUE]")]
    xattr: Vec<String>,
    /// Leave out what matches
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Time of everything but what a manifest describes: seconds since 1970. SOURCE_DATE_EPOCH is
    /// the latest time that anything gets
    #[arg(long, value_name = "SECONDS")]
    mtime: Option<String>,
    /// Memory to use, approximately
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "256M")]
    memory: u64,
    /// Threads that read and compress (default: one for each processor)
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// List what the image would hold, or what --update would change, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Change an image that exists to what the sources say, moving only what differs
    #[arg(long, conflicts_with_all = ["subvol", "layers", "size", "free", "shrink", "map"])]
    update: bool,
    /// Compare files by their bytes, not by size and time
    #[arg(long, requires = "update")]
    checksum: bool,
    /// Name of the snapshot that --update makes first (default: before- and the time)
    #[arg(long, value_name = "NAME", requires = "update")]
    snapshot: Option<String>,
    /// Make no snapshot first
    #[arg(long, requires = "update", conflicts_with = "snapshot")]
    no_snapshot: bool,
    /// Draw a map of the image, as .svg or .html
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// Replace an image, or what is on a device
    #[arg(long, short = 'f')]
    force: bool,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The image, as messages name it.
    pub(crate) fn image_name(&self) -> String {
        print::path(&self.image)
    }

    /// The image, and the picture to draw of it.
    pub(crate) fn map(&self) -> Option<(&Path, &Path)> {
        self.map.as_deref().filter(|_| !self.dry_run).map(|map| (self.image.as_path(), map))
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let specs = plan::specs(args)?;
    let mut options = plan::build_options(args)?;
    let reading = print::progress();
    reading.set_message("reading sources");
    let (mut source_options, watched) = (plan::source_options(args)?, Arc::default());
    source_options.stop = stop_of(&watched);
    let sources = Sources::gather(&specs, &source_options);
    reading.finish_and_clear();
    let sources = sources.map_err(explained)?;
    // Until here a signal ends the process at once: nothing has a name yet.
    let interrupt = Interrupt::watch();
    let _ = watched.set(interrupt.clone());
    let done = make(args, &sources, &mut options, &interrupt);
    done.map_err(|e| match interrupt.check() {
        Err(interrupted) if was_stopped(&e) => interrupted.into(),
        _ => e,
    })
}

/// Sources are read before signals are watched, and streamed afterwards.
fn stop_of(watched: &Arc<OnceLock<Interrupt>>) -> Stop {
    let watched = Arc::clone(watched);
    Stop::when(move || watched.get().is_some_and(Interrupt::is_asked))
}

fn was_stopped(error: &anyhow::Error) -> bool {
    let stopped = |e: &larder_sources::Error| matches!(e, larder_sources::Error::Stopped);
    error.chain().any(|e| e.downcast_ref::<larder_sources::Error>().is_some_and(stopped))
}

/// Makes or changes the image, or lists what would be in it.
fn make(
    args: &Args,
    sources: &Sources,
    options: &mut BuildOptions,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    for note in sources.notes() {
        print::say(&format!("larder: note: {note}"));
    }
    if args.update {
        return update::run(args, sources, interrupt);
    }
    if args.dry_run {
        return summary::list(sources, args.json);
    }
    let bar = Bar::new(sources.at_most(), interrupt.clone());
    let trees = plan::trees(args, sources)?;
    if options.uuid.is_none() {
        // The summary shows it, so that a build can be repeated.
        options.uuid = Some(uuid::Uuid::new_v4().into_bytes());
    }
    let output = Output::File { path: args.image.clone(), force: args.force };
    let open = |locator: &_| sources.open(locator).map_err(BoxError::from);
    let open: &OpenContents<'_> = &open;
    let made = build(&output, trees, open, options, &bar);
    bar.finish();
    let report = made.map_err(|e| match interrupt.check() {
        Err(interrupted) => interrupted.into(),
        Ok(()) => build_error(args, sources, e),
    })?;
    if args.json {
        summary::json(&report)
    } else {
        summary::show(&args.image, &report, bar.elapsed(), args.shrink)
    }
}

/// An error of the sources, with what helps.
fn explained(error: larder_sources::Error) -> anyhow::Error {
    use larder_sources::Error;
    let (advice, no_source) = (
        error.advice(),
        match &error {
            Error::Argument { .. } | Error::Choice { .. } => true,
            Error::Io { error, .. } => error.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        },
    );
    let mut result = Err::<(), _>(anyhow::Error::new(error));
    if let Some(advice) = advice {
        result = result.hint(advice);
    }
    if no_source {
        result = result.could_not_run();
    }
    result.unwrap_err()
}

fn build_error(args: &Args, sources: &Sources, error: larder_build::Error) -> anyhow::Error {
    use larder_build::Error;
    match error {
        Error::Source(e) => match e.downcast::<larder_sources::Error>() {
            Ok(e) => explained(*e),
            Err(e) => anyhow!(e),
        },
        Error::Unsupported(what) => {
            let image = print::path(&args.image);
            let error =
                if what.contains(&image) { anyhow!(what) } else { anyhow!("{image}: {what}") };
            Err::<(), _>(error).could_not_run().unwrap_err()
        }
        Error::Contents { ref path, ref why } => {
            let source = source_of(args, sources, path).filter(|name| !names(why, name));
            let denied = is_denied(why);
            let error = with_source(source, &error);
            if denied { Err::<(), _>(error).hint(DENIED).unwrap_err() } else { error }
        }
        Error::Entry { ref path, .. } => with_source(source_of(args, sources, path), &error),
        error => error.into(),
    }
}

const DENIED: &str = "run the command as a user that may read it, or leave it out with --exclude";

fn is_denied(why: &BoxError) -> bool {
    let error = why.downcast_ref::<std::io::Error>();
    error.is_some_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied)
}

/// Does the text of an error begin with the name of its source?
fn names(why: &BoxError, source: &str) -> bool {
    why.to_string().starts_with(source)
}

/// The source of an entry. With layers there are many trees, and the entry may be in any of them.
fn source_of<'a>(args: &Args, sources: &'a Sources, path: &[u8]) -> Option<&'a str> {
    if args.layers {
        return None;
    }
    TreePath::new(path).and_then(|path| sources.source_of(&path))
}

fn with_source(source: Option<&str>, error: &larder_build::Error) -> anyhow::Error {
    match source {
        Some(source) => anyhow!("{source}: {error}"),
        None => anyhow!("{error}"),
    }
}
