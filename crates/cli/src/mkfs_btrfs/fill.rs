//! A file system that is filled from a directory (`--rootdir`), by the bulk loader.
//!
//! As with mkfs.btrfs, a file that is too small grows, one that does not exist is made, a block
//! device stays as it is, and `--shrink` cuts a file to what is needed. An existing file is written
//! in place, because programs may hold it open.

use super::options::{Content, InodeFlags, Options};
use super::{Refused, open, refuse_existing};
use crate::interrupt::Interrupt;
use crate::print;
use crate::source_date::source_date;
use larder_build::{
    BoxError, BuildOptions, Compress, ImageSize, InnerSubvolume, OpenContents, Output, Place,
    Progress, TreeInput, build,
};
use larder_format::items::InodeFlags as Flags;
use larder_sources::{Entry, Kind, SourceSpec, Sources, Time, TreePath};
use larder_volume::Device;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

struct Stop(Interrupt);

impl Progress for Stop {
    fn cancelled(&self) -> bool {
        self.0.is_asked()
    }
}

pub(super) fn fill(options: &Options, content: &Content) -> Result<(), Refused> {
    let (output, size) = place(options, content)?;
    let before = std::fs::metadata(&options.devices[0]).ok().filter(std::fs::Metadata::is_file);
    if content.reflink {
        print::say("WARNING: --reflink: Larder copies the data");
    }
    let sources = gather(&content.from)?;
    for note in sources.notes() {
        print::say(&format!("WARNING: {note}"));
    }
    let inner = subvolumes(content)?;
    let flagged = flagged(content)?;
    let entries = sources.entries().map_err(refused)?;
    let entries = entries.map(move |entry| match entry {
        Ok(entry) => Ok(with_flags(entry, &flagged)),
        Err(e) => Err(BoxError::from(e)),
    });
    let tree = TreeInput {
        place: Place::Top,
        read_only: false,
        default: !inner.iter().any(|s| s.default),
        snapshot_of: None,
        inner,
        entries: Box::new(entries),
    };
    let open = |locator: &_| sources.open(locator).map_err(BoxError::from);
    let open: &OpenContents<'_> = &open;
    let how = BuildOptions {
        label: options.label.clone(),
        uuid: options.uuid,
        device_uuid: options.device_uuid,
        metadata: options.metadata,
        data: options.data,
        csum: options.csum,
        nodesize: options.nodesize,
        features: options.features,
        time: source_date()?,
        compress: content.compress.map(|packing| Compress { packing, force: false }),
        size,
        ..BuildOptions::default()
    };
    build(&output, vec![tree], open, &how, &Stop(Interrupt::watch())).map_err(refused)?;
    match before.filter(|_| !content.shrink) {
        Some(file) => keep_length(&options.devices[0], file.len())
            .map_err(|e| Refused::because(format!("{}: {e}", options.devices[0].display()))),
        None => Ok(()),
    }
}

fn refused(error: impl std::error::Error) -> Refused {
    Refused::because(error.to_string())
}

/// Where the file system is written, and how large it becomes. A file gets at least the size that
/// was given, and the file system on a device gets exactly that.
fn place(options: &Options, content: &Content) -> Result<(Output, ImageSize), Refused> {
    let path = options.devices[0].clone();
    let shrunk = content.shrink.then_some(ImageSize::Shrink { align: 4096 });
    if !path.exists() {
        let size = shrunk.or(options.bytes.map(ImageSize::AtLeast)).unwrap_or(ImageSize::Auto);
        return Ok((Output::File { path, force: false }, size));
    }
    let device = open(&path)?;
    refuse_existing(options, &path, &device)?;
    let there = device.size();
    let size = if device.is_block_device() {
        if let Some(bytes) = options.bytes.filter(|bytes| *bytes > there) {
            return Err(Refused::because(format!(
                "{} is smaller than requested size, expected {bytes}, found {there}",
                path.display(),
            )));
        }
        ImageSize::Exactly(options.bytes.unwrap_or(there))
    } else {
        ImageSize::AtLeast(options.bytes.unwrap_or(there))
    };
    Ok((Output::InPlace { path, force: true }, shrunk.unwrap_or(size)))
}

/// Gives a file the length back that it had: a size is one of the file system.
fn keep_length(path: &Path, before: u64) -> std::io::Result<()> {
    let file = File::options().write(true).open(path)?;
    if file.metadata()?.len() < before { file.set_len(before) } else { Ok(()) }
}

fn gather(from: &Path) -> Result<Sources, Refused> {
    if !from.is_dir() {
        let what = "is not a directory, or cannot be read";
        return Err(Refused::because(format!("{} {what}", from.display())));
    }
    // A colon in the directory's name belongs to the name.
    let mut argument = b"dir:".to_vec();
    for byte in from.as_os_str().as_bytes() {
        if *byte == b':' {
            argument.push(b'\\');
        }
        argument.push(*byte);
    }
    let spec = SourceSpec::parse(&OsString::from_vec(argument)).map_err(refused)?;
    let latest = source_date()?.map(|t| Time { seconds: t.sec, nanoseconds: t.nsec });
    let options = larder_sources::Options { latest, ..larder_sources::Options::default() };
    Sources::gather(&[spec], &options).map_err(refused)
}

/// A path within the directory, which has to be there.
fn within(content: &Content, path: &Path) -> Result<TreePath, Refused> {
    let missing =
        || Refused::because(format!("{} is not in {}", path.display(), content.from.display()));
    let inside = TreePath::new(path.as_os_str().as_bytes()).ok_or_else(missing)?;
    let real = content.from.join(std::ffi::OsStr::from_bytes(inside.as_bytes()));
    if real.symlink_metadata().is_err() {
        return Err(missing());
    }
    Ok(inside)
}

fn subvolumes(content: &Content) -> Result<Vec<InnerSubvolume>, Refused> {
    let mut out = Vec::new();
    for subvolume in &content.subvolumes {
        let path = within(content, &subvolume.path)?;
        let real = content.from.join(std::ffi::OsStr::from_bytes(path.as_bytes()));
        if path.is_root() || !real.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
            let shown = subvolume.path.display();
            return Err(Refused::because(format!("{shown} is not a directory within rootdir")));
        }
        let (read_only, default) = (subvolume.read_only, subvolume.default);
        out.push(InnerSubvolume { path, read_only, default });
    }
    Ok(out)
}

fn flagged(content: &Content) -> Result<Vec<(TreePath, InodeFlags)>, Refused> {
    let flags = content.flags.iter();
    flags.map(|flags| Ok((within(content, &flags.path)?, flags.clone()))).collect()
}

/// Flags go to the inode that was named and to all below it. Only files and directories have them.
fn with_flags(mut entry: Entry, flagged: &[(TreePath, InodeFlags)]) -> Entry {
    let is_file = match entry.kind {
        Kind::Directory => false,
        Kind::File { .. } => true,
        _ => return entry,
    };
    for (path, flags) in flagged {
        if !is_at_or_below(&entry.path, path) {
            continue;
        }
        if flags.no_data_cow {
            entry.attributes.inode_flags |= Flags::NODATACOW.bits();
        }
        // A file that is not copied on write has no checksums.
        if flags.no_data_sum || is_file && flags.no_data_cow {
            entry.attributes.inode_flags |= Flags::NODATASUM.bits();
        }
    }
    entry
}

fn is_at_or_below(path: &TreePath, above: &TreePath) -> bool {
    let mut components = path.components();
    above.components().all(|name| components.next() == Some(name))
}
