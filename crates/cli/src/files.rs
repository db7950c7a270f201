//! Trees of files on a mount or in an image, for commands that look at extents and share them.
//!
//! Hidden here is which of the two it is: a command walks, reads and shares in the same way.

use crate::failure::Advise;
use crate::image::{Access, Image};
use crate::mounted::mounted;
use crate::target::{Place, Target};
use anyhow::{Context, anyhow};
use larder_fs::{Deduped, FileKind, InodeId, MappedExtent};
use larder_fuse::sharing::{self, FileAt};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Kinds of files, as far as commands about space tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Regular.
    File,
    Directory,
    /// Anything else: takes no space of its own.
    Other,
}

/// Where a file is.
#[derive(Clone, Debug)]
enum At {
    Host(PathBuf),
    Image(InodeId),
}

/// A file or directory.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    at: At,
    pub(crate) kind: Kind,
    pub(crate) size: u64,
    /// Unique on its file system.
    pub(crate) ino: u64,
    /// Has it several names?
    pub(crate) linked: bool,
}

/// A tree.
#[derive(Debug)]
pub(crate) enum Files {
    /// On the mount behind a path. Other file systems in it are left out.
    Host { top: PathBuf, shown: String, dev: u64 },
    /// In an image.
    Image { image: Image, target: Target, shown: String },
}

impl Files {
    /// Opens the tree at a path, for reading.
    pub(crate) fn open(text: &OsStr, subvolid: Option<u64>, force: bool) -> anyhow::Result<Self> {
        Self::open_as(text, subvolid, Access::Read { force })
    }

    /// Opens it, an image in some other way.
    pub(crate) fn open_as(
        text: &OsStr,
        subvolid: Option<u64>,
        access: Access,
    ) -> anyhow::Result<Self> {
        let target = match Place::parse_existing(text)? {
            Place::Image(target) => target,
            Place::Host(path) if is_image(&path) => Target::parse(text),
            Place::Host(path) => {
                let shown = crate::print::name(path.as_os_str().as_bytes());
                let found =
                    path.symlink_metadata().with_context(|| shown.clone()).could_not_run()?;
                mounted(&path, |p| larder_fuse::control::df(p).map(drop))?;
                return Ok(Self::Host { shown, dev: found.dev(), top: path });
            }
        };
        let image = Image::open(&target.image, access, subvolid)?;
        let shown = target.display();
        Ok(Self::Image { image, target, shown })
    }

    /// The path, for messages.
    pub(crate) fn shown(&self) -> &str {
        match self {
            Self::Host { shown, .. } | Self::Image { shown, .. } => shown,
        }
    }

    /// Commits what was changed in an image.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        match self {
            Self::Host { .. } => Ok(()),
            Self::Image { image, .. } => image.close(),
        }
    }

    /// What the path leads to.
    pub(crate) fn top(&self) -> anyhow::Result<Node> {
        match self {
            Self::Host { top, .. } => host(top.clone()),
            Self::Image { image, target, .. } => {
                in_image(image, image.resolve(&target.path, false)?.id)
            }
        }
    }

    /// What another path leads to. It has to lie in the same image or on the same mount.
    pub(crate) fn at(&self, text: &OsStr) -> anyhow::Result<Node> {
        match (self, Place::parse_existing(text)?) {
            (Self::Host { dev, .. }, Place::Host(path)) if !is_image(&path) => {
                let found = path
                    .symlink_metadata()
                    .with_context(|| path.display().to_string())
                    .could_not_run()?;
                if found.dev() != *dev {
                    return Err(anyhow!("{} is not on the same mount", path.display()))
                        .could_not_run();
                }
                host(path)
            }
            (Self::Image { image, target, .. }, _) => {
                let other = Target::parse(text);
                if other.image != target.image {
                    return Err(anyhow!("{} is not in the same image", other.display()))
                        .could_not_run();
                }
                in_image(image, image.resolve(&other.path, false)?.id)
            }
            (_, Place::Image(other)) => {
                Err(anyhow!("{} is not on the same mount", other.display())).could_not_run()
            }
            (_, Place::Host(path)) => {
                Err(anyhow!("{} is not on the same mount", path.display())).could_not_run()
            }
        }
    }

    /// What is in a directory, by name.
    pub(crate) fn entries(&self, node: &Node) -> anyhow::Result<Vec<(Vec<u8>, Node)>> {
        let mut out = Vec::new();
        match (self, &node.at) {
            (Self::Host { dev, .. }, At::Host(path)) => {
                let context = || path.display().to_string();
                for entry in std::fs::read_dir(path).with_context(context)? {
                    let entry = entry.with_context(context)?;
                    let Some(found) = gone(entry.metadata()).with_context(context)? else {
                        continue;
                    };
                    if found.dev() == *dev {
                        out.push((entry.file_name().into_vec(), of_metadata(entry.path(), &found)));
                    }
                }
            }
            (Self::Image { image, .. }, At::Image(id)) => {
                for (name, child) in image.entries(*id)? {
                    out.push((name, in_image(image, child)?));
                }
            }
            _ => unreachable!("a node of another tree"),
        }
        out.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(out)
    }

    /// Calls `each` for the extents of a file.
    pub(crate) fn extents(
        &self,
        node: &Node,
        each: &mut dyn FnMut(&MappedExtent),
    ) -> anyhow::Result<()> {
        match (self, &node.at) {
            (Self::Host { .. }, At::Host(path)) => mounted(path, |path| {
                let Some(file) = gone(open(path, false))? else { return Ok(()) };
                sharing::extents(&file, each)
            }),
            (Self::Image { image, .. }, At::Image(id)) => {
                let each = &mut |e: &MappedExtent| {
                    each(e);
                    true
                };
                Ok(image.fs.map_extents(*id, 0, each)?)
            }
            _ => unreachable!("a node of another tree"),
        }
    }

    /// Opens a file for reading and sharing.
    pub(crate) fn file<'a>(&'a self, node: &Node) -> anyhow::Result<OpenFile<'a>> {
        match (self, &node.at) {
            (Self::Host { .. }, At::Host(path)) => {
                // A user without the right to write may still share, as the owner of the file.
                let file = open(path, true).or_else(|_| open(path, false));
                Ok(OpenFile::Host(file.with_context(|| path.display().to_string())?))
            }
            (Self::Image { image, .. }, At::Image(id)) => Ok(OpenFile::Image(image, *id)),
            _ => unreachable!("a node of another tree"),
        }
    }
}

/// An open file.
#[derive(Debug)]
pub(crate) enum OpenFile<'a> {
    Host(File),
    Image(&'a Image, InodeId),
}

impl OpenFile<'_> {
    /// Reads until the buffer is full or the file ends.
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> anyhow::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let n = match self {
                Self::Host(file) => file.read_at(&mut buf[done..], at)?,
                Self::Image(image, id) => image.fs.read(*id, at, &mut buf[done..])?,
            };
            if n == 0 {
                break;
            }
            done += n;
        }
        Ok(done)
    }

    /// Gives the range at `to_offset` of `to` the extents of a range of this file. Returns how many
    /// bytes had extents of their own; `None` where the ranges differ, or cannot be shared.
    pub(crate) fn dedupe(
        &self,
        range: Range<u64>,
        to: &Self,
        to_offset: u64,
    ) -> anyhow::Result<Option<u64>> {
        let (offset, len) = (range.start, range.end - range.start);
        match (self, to) {
            (Self::Host(from), Self::Host(to)) => {
                match sharing::dedupe(
                    FileAt { file: from, offset },
                    FileAt { file: to, offset: to_offset },
                    len,
                ) {
                    Ok(sharing::Deduped::Same(shared)) => Ok(Some(shared)),
                    Ok(sharing::Deduped::Differs) => Ok(None),
                    Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => Ok(None),
                    Err(e) => Err(e.into()),
                }
            }
            (Self::Image(image, from), Self::Image(_, to)) => {
                match image.fs.dedupe_range(from.at(offset), to.at(to_offset), len) {
                    Ok(Deduped::Same { shared, .. }) => Ok(Some(shared)),
                    Ok(Deduped::Differs) | Err(larder_fs::Error::Invalid(_)) => Ok(None),
                    Err(e) => Err(e.into()),
                }
            }
            _ => unreachable!("files of two trees"),
        }
    }
}

fn is_image(path: &Path) -> bool {
    // A regular file on a Larder mount is taken for a file, not for an image.
    path.is_file() && !File::open(path).is_ok_and(|f| sharing::is_shareable(&f))
}

fn open(path: &Path, write: bool) -> std::io::Result<File> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(write).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// `None` for what was deleted meanwhile.
fn gone<T>(result: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn host(path: PathBuf) -> anyhow::Result<Node> {
    let found = path.symlink_metadata().with_context(|| path.display().to_string())?;
    Ok(of_metadata(path, &found))
}

fn of_metadata(path: PathBuf, found: &std::fs::Metadata) -> Node {
    let kind = match found.file_type() {
        t if t.is_dir() => Kind::Directory,
        t if t.is_file() => Kind::File,
        _ => Kind::Other,
    };
    Node {
        at: At::Host(path),
        kind,
        size: found.len(),
        ino: found.ino(),
        linked: found.nlink() > 1,
    }
}

fn in_image(image: &Image, id: InodeId) -> anyhow::Result<Node> {
    let attr = image.fs.getattr(id)?;
    let kind = match attr.kind {
        FileKind::Directory => Kind::Directory,
        FileKind::Regular => Kind::File,
        _ => Kind::Other,
    };
    // Inodes of two subvolumes can have the same number.
    let ino = id.subvol.0 << 40 ^ id.ino;
    Ok(Node { at: At::Image(id), kind, size: attr.size, ino, linked: attr.nlink > 1 })
}

/// All regular files at and below some paths, each once.
pub(crate) fn regular(files: &Files, paths: &[OsString]) -> anyhow::Result<Vec<Node>> {
    let mut seen = std::collections::HashSet::new();
    let mut out = Vec::new();
    for path in paths {
        let mut ahead = vec![files.at(path)?];
        while let Some(node) = ahead.pop() {
            match node.kind {
                Kind::File if seen.insert(node.ino) => out.push(node),
                Kind::Directory => {
                    // The first name is looked at first.
                    ahead.extend(files.entries(&node)?.into_iter().rev().map(|(_, child)| child));
                }
                _ => {}
            }
        }
    }
    Ok(out)
}
