//! `larder extract`: what an image holds, as a directory, a tar or a container image.
//!
//! The image is only read, and needs no mount. A directory is filled by the same copy that `larder
//! cp` makes; `archive` writes the other two forms.

mod archive;

use crate::copy::beneath::Beneath;
use crate::copy::image::ImageTree;
use crate::copy::{Copier, Existing, Place, with_what_arrived};
use crate::failure::{Advise, usage};
use crate::image::{Access, Image};
use crate::interrupt::Interrupt;
use crate::select::Select;
use crate::target::Target;
use crate::{mount_options, print};
use anyhow::{Context, anyhow, bail};
use archive::OciName;
use larder_archive::{Compression, Platform};
use larder_fs::{Attr, FileKind};
use serde_json::json;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Take files out of an image: into a directory, a tar or a container image.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder extract disk.img rescued
  larder extract disk.img:/etc rescued hostname '--exclude=*.bak'
  larder extract disk.img --tar root.tar.zst
  larder extract disk.img:/home --tar - --include '*.txt' | tar -tf -
  larder extract disk.img --oci layout:v1

IMAGE:PATH is a directory whose content is extracted, or one file. Each further
PATH is in that directory, and only what is there is extracted. Patterns are
globs: one without a slash is for names, one with a slash for paths from
IMAGE:PATH on. What a pattern says of a directory holds for what is in it.

Modes, times, extended attributes, ACLs, hard links and holes are kept; owners
and devices if root extracts into a directory. Existing files stay, and are
reported, unless there is --force. Names and links in the image cannot lead out
of DIR. Nested subvolumes become directories.

A tar is sorted, and the same image gives the same bytes. It holds no sockets.
Layers of container images have no holes, as their specification wants it.")]
pub(crate) struct Args {
    /// Image file or block device, and what to extract
    #[arg(value_name = "IMAGE[:PATH]")]
    source: OsString,
    /// Directory to fill, made if it is not there; with --tar and --oci there is none. Then: paths
    /// to extract (default: all)
    #[arg(value_name = "DIR] [PATH")]
    rest: Vec<OsString>,
    /// Write a tar to FILE, or to standard output
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        default_missing_value = "-",
        conflicts_with = "oci"
    )]
    tar: Option<PathBuf>,
    /// Write a container image of one layer into an OCI layout (default tag: latest)
    #[arg(long, value_name = "LAYOUT[:TAG]")]
    oci: Option<OsString>,
    /// Compress the tar: none, gzip, zstd or xz, and a level (default: what the name of FILE says;
    /// of layers: gzip)
    #[arg(long, value_name = "METHOD[:LEVEL]")]
    compress: Option<Compression>,
    /// Machine that a container image is for (default: linux and this one)
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", value_parser = platform, requires = "oci")]
    platform: Option<Platform>,
    /// Extract only what matches
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Leave out what matches
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Make empty directories of nested subvolumes
    #[arg(long)]
    one_subvolume: bool,
    /// Number of the subvolume that PATH starts in (default: the default subvolume)
    #[arg(long, value_name = "N", value_parser = mount_options::subvolid)]
    subvolid: Option<u64>,
    /// Replace what exists; read an image that is in use
    #[arg(long)]
    force: bool,
    /// Print what was extracted as JSON
    #[arg(long)]
    json: bool,
}

/// Where the files go.
enum Form<'a> {
    Directory(&'a Path),
    Tar(&'a Path),
    Oci(OciName),
}

/// What was extracted.
#[derive(Debug, Default)]
struct Extracted {
    entries: u64,
    bytes: u64,
    failed: u64,
    /// Paths of nested subvolumes.
    subvolumes: Vec<String>,
    /// Sockets that were left out.
    sockets: u64,
    /// Digest of the manifest of a container image.
    digest: Option<String>,
}

/// What all forms work on.
struct Job<'a> {
    args: &'a Args,
    tree: ImageTree<'a>,
    start: Attr,
    /// Name of the start, where that is not a directory.
    name: Vec<u8>,
    shown: String,
    select: Select,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (form, paths) = form(args)?;
    let target = Target::parse(&args.source);
    let image = Image::open(&target.image, Access::Read { force: args.force }, args.subvolid)?;
    let start = image.resolve(&target.path, true).could_not_run()?;
    let mut select = Select::new(paths, &args.include, &args.exclude).could_not_run()?;
    select.one_subvolume = args.one_subvolume;
    if start.kind != FileKind::Directory && !select.is_all() {
        return usage(format!("{} is a file: nothing is to be selected in it", target.display()));
    }
    let name = target.path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
    let shown = print::name(args.source.as_bytes());
    let job = Job { args, tree: ImageTree(&image), start, name, shown, select };
    let done = match form {
        Form::Directory(dir) => into_directory(&job, dir),
        Form::Tar(file) => archive::tar(&job, file),
        Form::Oci(name) => archive::oci(&job, &name),
    };
    let done = done.and_then(|extracted| report(&job, &extracted));
    image.close()?;
    done
}

/// The form that the arguments ask for, and the paths that they name.
fn form(args: &Args) -> anyhow::Result<(Form<'_>, Vec<Vec<u8>>)> {
    let mut rest = args.rest.iter();
    let form = match (&args.tar, &args.oci) {
        (Some(file), _) => Form::Tar(file),
        (None, Some(name)) => Form::Oci(OciName::parse(name)),
        (None, None) => match rest.next() {
            Some(dir) => Form::Directory(Path::new(dir)),
            None => return usage("name a directory to extract to, or use --tar or --oci"),
        },
    };
    if args.compress.is_some() && matches!(form, Form::Directory(_)) {
        return usage("--compress is for --tar and --oci");
    }
    if let Form::Tar(file) = form
        && file == Path::new("-")
    {
        if io::stdout().is_terminal() {
            return usage("a tar is not written to a terminal: name a file, or use a pipe");
        }
        if args.json {
            return usage("--json would be written into the tar: name a file");
        }
    }
    let paths: Vec<Vec<u8>> = rest.map(|path| path.as_bytes().to_vec()).collect();
    if paths.iter().any(|path| path.split(|b| *b == b'/').any(|name| name == b"..")) {
        return usage("paths to extract go down from IMAGE:PATH, without ..");
    }
    Ok((form, paths))
}

fn into_directory(job: &Job<'_>, dir: &Path) -> anyhow::Result<Extracted> {
    let made = match std::fs::create_dir(dir) {
        Ok(()) => true,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
        Err(e) => {
            return Err(anyhow::Error::new(e).context(print::path(dir))).could_not_run();
        }
    };
    let sink = Beneath::open(dir).with_context(|| print::path(dir)).could_not_run()?;
    let place = match job.start.kind {
        FileKind::Directory => Place::Into(Vec::new()),
        _ => Place::Named(Vec::new(), job.name.clone()),
    };
    let existing = if job.args.force { Existing::Replaced } else { Existing::Kept };
    let (progress, interrupt) = (print::progress(), Interrupt::watch());
    let mut copier = Copier::new(&job.tree, &sink, existing, &progress, &interrupt);
    let result = copier.copy(&job.start.id, &job.select, &place, &job.shown);
    progress.finish_and_clear();
    let totals = copier.totals();
    if totals.entries == 0 && made && result.is_err() {
        // An empty directory would look like an empty tree.
        let _ = std::fs::remove_dir(dir);
    }
    let subvolumes = copier.into_nested();
    with_what_arrived(result, totals)?;
    let (entries, bytes, failed) = (totals.entries, totals.bytes, totals.failed);
    Ok(Extracted { entries, bytes, failed, subvolumes, ..Extracted::default() })
}

/// Reports what a reader of the result would not expect.
fn report(job: &Job<'_>, extracted: &Extracted) -> anyhow::Result<()> {
    if !extracted.subvolumes.is_empty() {
        let list = listed(&extracted.subvolumes);
        print::say(&match job.args.one_subvolume {
            true => format!("larder: note: nested subvolumes are empty directories: {list}"),
            false => format!(
                "larder: note: nested subvolumes became directories: {list} (--one-subvolume \
                 leaves them empty)"
            ),
        });
    }
    if extracted.sockets > 0 {
        let sockets = print::number(extracted.sockets, "socket");
        print::say(&format!("larder: note: left out, because a tar cannot hold them: {sockets}"));
    }
    if job.args.json {
        print::json(&json!({
            "entries": extracted.entries,
            "bytes": extracted.bytes,
            "failed": extracted.failed,
            "subvolumes": extracted.subvolumes,
            "sockets": extracted.sockets,
            "digest": extracted.digest,
        }))?;
    }
    let missing: Vec<String> = job.select.unmet().iter().map(|path| print::name(path)).collect();
    if !missing.is_empty() {
        return Err(anyhow!("{} has no {}", job.shown, missing.join(", ")));
    }
    if extracted.failed > 0 {
        let entries = print::entries(extracted.failed);
        bail!("{entries} could not be extracted as above; everything else was");
    }
    Ok(())
}

/// The first of some names, and how many more there are.
fn listed(names: &[String]) -> String {
    const MOST: usize = 5;
    let some = names.iter().take(MOST).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MOST) {
        0 => some,
        more => format!("{some} and {more} more"),
    }
}

/// `linux/arm/v7`.
fn platform(text: &str) -> Result<Platform, String> {
    let parts: Vec<&str> = text.split('/').collect();
    match parts[..] {
        [os, architecture, ref variant @ ..]
            if !os.is_empty() && !architecture.is_empty() && variant.len() <= 1 =>
        {
            Ok(Platform {
                os: os.to_owned(),
                architecture: architecture.to_owned(),
                variant: variant.first().map(|v| (*v).to_owned()),
            })
        }
        _ => Err("not OS/ARCH or OS/ARCH/VARIANT, such as linux/amd64".to_owned()),
    }
}
