//! Copying trees between the host and images, with everything that a tree is made of.
//!
//! Where a tree comes from and goes to is hidden behind [`Source`] and [`Sink`]; what a faithful copy is lives here:
//! permissions, owners, times, extended attributes (ACLs among them), hard links within what is copied, holes,
//! symbolic links as such, special files. Something that exists at the destination is replaced, directories are
//! merged; symbolic links at the destination are replaced, too, and never followed.
//!
//! The source may be a hostile image: names that could leave the destination are refused, and so are directories
//! without end.

pub(crate) mod host;
pub(crate) mod image;

use crate::print;
use anyhow::{Context, bail};
use indicatif::ProgressBar;
use larder_fs::{FileKind, Timestamp};
use std::collections::HashMap;

/// What is known of a thing that is copied.
#[derive(Clone, Debug)]
pub(crate) struct Meta {
    pub(crate) kind: FileKind,
    pub(crate) perm: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// (major << 20) | minor.
    pub(crate) rdev: u64,
    pub(crate) size: u64,
    pub(crate) atime: Timestamp,
    pub(crate) mtime: Timestamp,
    /// What other names of the same file have in common; `None` where there is only one name.
    pub(crate) identity: Option<(u64, u64)>,
}

/// Extended attributes: names and values.
pub(crate) type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Where a tree comes from.
pub(crate) trait Source {
    /// Something in the tree.
    type Node: Clone;
    /// An open file.
    type File;
    fn meta(&self, node: &Self::Node) -> anyhow::Result<Meta>;
    fn xattrs(&self, node: &Self::Node) -> anyhow::Result<Xattrs>;
    /// Entries of a directory, without `.` and `..`.
    fn entries(&self, node: &Self::Node) -> anyhow::Result<Vec<(Vec<u8>, Self::Node)>>;
    fn readlink(&self, node: &Self::Node) -> anyhow::Result<Vec<u8>>;
    fn open(&self, node: &Self::Node) -> anyhow::Result<Self::File>;
    /// The first range (start, end) at or after `from` that is no hole; `None` when there is none.
    fn data(&self, file: &Self::File, from: u64, size: u64) -> anyhow::Result<Option<(u64, u64)>>;
    fn read(&self, file: &Self::File, at: u64, buf: &mut [u8]) -> anyhow::Result<usize>;
}

/// Where a tree goes.
pub(crate) trait Sink {
    /// Something in the tree.
    type Node: Clone;
    /// A file that is being written.
    type File;
    /// What has that name in a directory, without following a symbolic link.
    fn find(&self, dir: &Self::Node, name: &[u8]) -> anyhow::Result<Option<(Self::Node, FileKind)>>;
    /// Takes a name away that is no directory.
    fn unlink(&self, dir: &Self::Node, name: &[u8]) -> anyhow::Result<()>;
    /// Makes anything, `target` being that of a symbolic link. Permissions are final after [`Sink::finish`] only.
    fn create(&self, dir: &Self::Node, name: &[u8], meta: &Meta, target: &[u8])
    -> anyhow::Result<Self::Node>;
    fn link(&self, node: &Self::Node, dir: &Self::Node, name: &[u8]) -> anyhow::Result<()>;
    fn open(&self, node: &Self::Node) -> anyhow::Result<Self::File>;
    fn write(&self, file: &Self::File, at: u64, data: &[u8]) -> anyhow::Result<()>;
    /// Gives a file its size, after its data.
    fn set_size(&self, file: &Self::File, size: u64) -> anyhow::Result<()>;
    /// Sets attributes for good; for a directory, after everything in it.
    fn finish(&self, node: &Self::Node, meta: &Meta, xattrs: &Xattrs) -> anyhow::Result<()>;
}

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) entries: u64,
    pub(crate) bytes: u64,
}

/// Bytes moved at once.
const PIECE: usize = 1 << 20;
/// Deepest nesting of directories; only an image that contains itself is deeper.
const MAX_DEPTH: usize = 4096;

enum Step<S: Source, D: Sink> {
    Copy { node: S::Node, dir: D::Node, name: Vec<u8>, depth: usize },
    Finish { node: D::Node, meta: Meta, xattrs: Xattrs },
}

/// Copies `node` to `name` in `dir`; a directory only if `recursive`.
pub(crate) fn copy<S: Source, D: Sink>(
    source: &S,
    node: &S::Node,
    sink: &D,
    dir: &D::Node,
    name: &[u8],
    recursive: bool,
    progress: &ProgressBar,
) -> anyhow::Result<Totals> {
    let mut totals = Totals::default();
    let mut links: HashMap<(u64, u64), D::Node> = HashMap::new();
    let mut buf = vec![0; PIECE];
    let first = Step::Copy { node: node.clone(), dir: dir.clone(), name: name.to_vec(), depth: 0 };
    let mut todo: Vec<Step<S, D>> = vec![first];
    while let Some(step) = todo.pop() {
        let (node, dir, name, depth) = match step {
            Step::Finish { node, meta, xattrs } => {
                sink.finish(&node, &meta, &xattrs)?;
                continue;
            }
            Step::Copy { node, dir, name, depth } => (node, dir, name, depth),
        };
        check_name(&name)?;
        let shown = || print::name(&name);
        let meta = source.meta(&node).with_context(shown)?;
        totals.entries += 1;
        progress.inc(1);
        if meta.kind == FileKind::Directory {
            if !recursive {
                bail!("{} is a directory", shown());
            }
            if depth > MAX_DEPTH {
                bail!("{}: directories are nested more than {MAX_DEPTH} deep", shown());
            }
            let xattrs = source.xattrs(&node).with_context(shown)?;
            let made = match sink.find(&dir, &name).with_context(shown)? {
                Some((existing, FileKind::Directory)) => existing,
                Some(_) => bail!("{} exists and is not a directory", shown()),
                None => sink.create(&dir, &name, &meta, b"").with_context(shown)?,
            };
            todo.push(Step::Finish { node: made.clone(), meta, xattrs });
            let entries = source.entries(&node).with_context(shown)?;
            todo.extend(entries.into_iter().rev().map(|(name, node)| Step::Copy {
                node,
                dir: made.clone(),
                name,
                depth: depth + 1,
            }));
            continue;
        }
        match sink.find(&dir, &name).with_context(shown)? {
            Some((_, FileKind::Directory)) => bail!("{} exists and is a directory", shown()),
            Some(_) => sink.unlink(&dir, &name).with_context(shown)?,
            None => {}
        }
        if let Some(earlier) = meta.identity.and_then(|i| links.get(&i)) {
            sink.link(earlier, &dir, &name).with_context(shown)?;
            continue;
        }
        let target = if meta.kind == FileKind::Symlink {
            source.readlink(&node).with_context(shown)?
        } else {
            Vec::new()
        };
        let made = sink.create(&dir, &name, &meta, &target).with_context(shown)?;
        if meta.kind == FileKind::Regular {
            totals.bytes += content(source, &node, sink, &made, meta.size, &mut buf).with_context(shown)?;
            progress.set_message(crate::size::human(totals.bytes));
        }
        let xattrs = source.xattrs(&node).with_context(shown)?;
        sink.finish(&made, &meta, &xattrs).with_context(shown)?;
        if let Some(identity) = meta.identity {
            links.insert(identity, made);
        }
    }
    Ok(totals)
}

/// Copies the data of a file, leaving holes out; returns the bytes moved.
fn content<S: Source, D: Sink>(
    source: &S,
    node: &S::Node,
    sink: &D,
    made: &D::Node,
    size: u64,
    buf: &mut [u8],
) -> anyhow::Result<u64> {
    let (from, to) = (source.open(node)?, sink.open(made)?);
    let (mut at, mut moved) = (0, 0);
    while at < size {
        let Some((start, end)) = source.data(&from, at, size)? else { break };
        let end = end.min(size);
        at = start.max(at);
        while at < end {
            let want = usize::try_from(end - at).unwrap_or(usize::MAX).min(buf.len());
            let n = source.read(&from, at, &mut buf[..want])?;
            if n == 0 {
                // It has become shorter under our hands.
                return Ok(moved);
            }
            sink.write(&to, at, &buf[..n])?;
            at += n as u64;
            moved += n as u64;
        }
    }
    sink.set_size(&to, size)?;
    Ok(moved)
}

/// A name that stays within its directory.
fn check_name(name: &[u8]) -> anyhow::Result<()> {
    if matches!(name, b"" | b"." | b"..") || name.iter().any(|b| matches!(b, b'/' | 0)) {
        bail!("{:?} is not a file name", print::name(name));
    }
    Ok(())
}

/// Attributes that are copied: those of programs and of the system's access control.
pub(crate) fn is_copied(name: &[u8]) -> bool {
    [&b"user."[..], b"security.", b"trusted.", b"btrfs."].iter().any(|p| name.starts_with(p))
        || name == b"system.posix_acl_access"
        || name == b"system.posix_acl_default"
}

#[cfg(test)]
mod tests {
    use super::host::HostTree;
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn all(from: &std::path::Path, to: &std::path::Path) -> anyhow::Result<Totals> {
        let bar = ProgressBar::hidden();
        copy(&HostTree, &from.to_owned(), &HostTree, &to.to_owned(), b"copy", true, &bar)
    }

    #[test]
    fn a_copy_has_everything() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        std::fs::create_dir_all(from.join("sub/empty")).unwrap();
        std::fs::create_dir(&to).unwrap();
        std::fs::write(from.join("a"), b"hello").unwrap();
        std::fs::hard_link(from.join("a"), from.join("sub/b")).unwrap();
        symlink("nowhere", from.join("link")).unwrap();
        let sparse = std::fs::File::create(from.join("sparse")).unwrap();
        sparse.set_len(64 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"x", 32 << 20).unwrap();
        std::fs::set_permissions(from.join("a"), PermissionsExt::from_mode(0o4711)).unwrap();
        let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 123_456_789);
        std::fs::File::open(&from).unwrap().set_modified(time).unwrap();
        let totals = all(&from, &to).unwrap();
        assert_eq!(totals.entries, 7);
        assert!(totals.bytes < 1 << 20, "holes are not moved");
        let copy = to.join("copy");
        assert_eq!(std::fs::read(copy.join("sub/b")).unwrap(), b"hello");
        let meta = std::fs::metadata(copy.join("a")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.nlink()), (0o4711, 2));
        assert_eq!(meta.ino(), std::fs::metadata(copy.join("sub/b")).unwrap().ino());
        assert_eq!(std::fs::read_link(copy.join("link")).unwrap().to_str(), Some("nowhere"));
        let sparse = std::fs::metadata(copy.join("sparse")).unwrap();
        assert!(sparse.len() == 64 << 20 && sparse.blocks() * 512 < 1 << 20);
        assert_eq!(std::fs::metadata(&copy).unwrap().modified().unwrap(), time);
        // Once more: merged and replaced.
        all(&from, &to).unwrap();
        assert_eq!(std::fs::read(copy.join("a")).unwrap(), b"hello");
    }

    #[test]
    fn nothing_is_written_through_a_link_at_the_destination() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        std::fs::create_dir_all(&from).unwrap();
        std::fs::create_dir_all(to.join("copy")).unwrap();
        std::fs::write(from.join("f"), b"new").unwrap();
        std::fs::write(dir.path().join("victim"), b"old").unwrap();
        symlink(dir.path().join("victim"), to.join("copy/f")).unwrap();
        all(&from, &to).unwrap();
        assert_eq!(std::fs::read(dir.path().join("victim")).unwrap(), b"old");
        assert_eq!(std::fs::read(to.join("copy/f")).unwrap(), b"new");
        // A directory onto a link to a directory is refused rather than followed.
        std::fs::create_dir(from.join("d")).unwrap();
        symlink(dir.path(), to.join("copy/d")).unwrap();
        assert!(all(&from, &to).is_err());
    }

    #[test]
    fn names_cannot_leave_their_directory() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0"] {
            assert!(check_name(bad).is_err());
        }
        check_name(b"...").unwrap();
    }
}
