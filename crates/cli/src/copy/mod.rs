//! Copying trees between the host and images, with everything that a tree is made of.
//!
//! Where a tree comes from and goes to is hidden behind [`Source`] and [`Sink`]. This module knows
//! what belongs to a faithful copy: permissions, owners, times, extended attributes (ACLs among
//! them), hard links within the tree, holes, symbolic links, special files. At the destination
//! directories are merged, and everything else is replaced. Symbolic links there are replaced, too,
//! and never followed.
//!
//! An entry that cannot be copied is reported, and the others are copied. A destination that is
//! full or broken ends the copy, and so does a signal. No file is ever left with only a part of its
//! data.
//!
//! The source may be a hostile image: names that could leave the destination are refused, and so
//! are directories without end.

pub(crate) mod host;
pub(crate) mod image;

use crate::interrupt::Interrupt;
use crate::{failure, print};
use anyhow::{anyhow, bail};
use indicatif::ProgressBar;
use larder_fs::{FileKind, Timestamp};
use std::collections::HashMap;
use std::ops::Range;

/// Attributes of an entry.
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
    /// The first range of data at or after the start of `within`, which ends where the file ends;
    /// `None` where the rest is a hole.
    fn data(&self, file: &Self::File, within: Range<u64>) -> anyhow::Result<Option<Range<u64>>>;
    fn read(&self, file: &Self::File, at: u64, buf: &mut [u8]) -> anyhow::Result<usize>;
}

/// Where a tree goes.
pub(crate) trait Sink {
    /// Something in the tree.
    type Node: Clone;
    /// A file that is being written.
    type File;
    /// What has that name in a directory, without following a symbolic link.
    fn find(&self, dir: &Self::Node, name: &[u8])
    -> anyhow::Result<Option<(Self::Node, FileKind)>>;
    /// Removes a name that is not a directory.
    fn unlink(&self, dir: &Self::Node, name: &[u8]) -> anyhow::Result<()>;
    /// Makes anything, `target` being that of a symbolic link. Permissions are final after
    /// [`Sink::finish`] only.
    fn create(
        &self,
        dir: &Self::Node,
        name: &[u8],
        meta: &Meta,
        target: &[u8],
    ) -> anyhow::Result<Self::Node>;
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
    /// Entries that could not be copied, or not as they are; each was reported.
    pub(crate) failed: u64,
}

/// Bytes moved at once.
const PIECE: usize = 1 << 20;
/// Deepest nesting of directories; only an image that contains itself is deeper.
const MAX_DEPTH: usize = 4096;

/// Something that is to be copied, and where.
struct Task<S: Source, D: Sink> {
    node: S::Node,
    dir: D::Node,
    name: Vec<u8>,
    /// For messages.
    shown: String,
    depth: usize,
}

impl<S: Source, D: Sink> Task<S, D> {
    fn new(node: &S::Node, dir: &D::Node, name: &[u8], shown: &str) -> Self {
        Self {
            node: node.clone(),
            dir: dir.clone(),
            name: name.to_vec(),
            shown: shown.to_owned(),
            depth: 0,
        }
    }
}

enum Step<S: Source, D: Sink> {
    Copy(Task<S, D>),
    Finish(Made<D>),
}

/// Something that is made and lacks its attributes.
struct Made<D: Sink> {
    node: D::Node,
    meta: Meta,
    xattrs: Xattrs,
    shown: String,
}

/// Why something could not be copied.
enum Trouble {
    /// It concerns one entry: the others can be.
    Entry(anyhow::Error),
    /// There is no point in going on.
    All(anyhow::Error),
}

/// A copy under way.
pub(crate) struct Copier<'a, S: Source, D: Sink> {
    source: &'a S,
    sink: &'a D,
    recursive: bool,
    progress: &'a ProgressBar,
    interrupt: &'a Interrupt,
    /// Files that have more names, and where the first of them went.
    links: HashMap<(u64, u64), D::Node>,
    todo: Vec<Step<S, D>>,
    buf: Vec<u8>,
    totals: Totals,
}

impl<'a, S: Source, D: Sink> Copier<'a, S, D> {
    /// Will copy directories only if `recursive`.
    pub(crate) fn new(
        source: &'a S,
        sink: &'a D,
        recursive: bool,
        progress: &'a ProgressBar,
        interrupt: &'a Interrupt,
    ) -> Self {
        let (links, todo) = (HashMap::new(), Vec::new());
        let (buf, totals) = (vec![0; PIECE], Totals::default());
        Self { source, sink, recursive, progress, interrupt, links, todo, buf, totals }
    }

    /// Copies `node` to `name` in `dir`; `shown` is what messages call it.
    ///
    /// # Errors
    /// It could not be copied at all, or not to its end. What was wrong with single entries below
    /// it is reported, and counted.
    pub(crate) fn copy(
        &mut self,
        node: &S::Node,
        dir: &D::Node,
        name: &[u8],
        shown: &str,
    ) -> anyhow::Result<()> {
        match self.entry(Task::new(node, dir, name, shown)) {
            Ok(()) => self.rest(),
            Err(Trouble::Entry(e) | Trouble::All(e)) => Err(e),
        }
    }

    /// The same for one of several things to be copied: if it cannot be, the others are.
    ///
    /// # Errors
    /// There is no point in going on.
    pub(crate) fn copy_among_others(
        &mut self,
        node: &S::Node,
        dir: &D::Node,
        name: &[u8],
        shown: &str,
    ) -> anyhow::Result<()> {
        self.todo.push(Step::Copy(Task::new(node, dir, name, shown)));
        self.rest()
    }

    /// Takes the remaining steps.
    fn rest(&mut self) -> anyhow::Result<()> {
        while let Some(step) = self.todo.pop() {
            let done = match step {
                Step::Finish(made) => self.finish(&made),
                Step::Copy(task) => self.entry(task),
            };
            match done {
                Ok(()) => {}
                Err(Trouble::Entry(e)) => {
                    self.totals.failed += 1;
                    self.progress.suspend(|| print::say(&failure::text(&e)));
                }
                Err(Trouble::All(e)) => {
                    self.leave();
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// What has been copied so far.
    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Directories that were begun get their attributes, as far as that still works.
    fn leave(&mut self) {
        while let Some(step) = self.todo.pop() {
            if let Step::Finish(made) = step {
                let _ = self.finish(&made);
            }
        }
    }

    fn finish(&self, made: &Made<D>) -> Result<(), Trouble> {
        self.sink.finish(&made.node, &made.meta, &made.xattrs).of_sink(&made.shown)
    }

    fn entry(&mut self, task: Task<S, D>) -> Result<(), Trouble> {
        self.go_on()?;
        let shown = &task.shown;
        check_name(&task.name).of_source(shown)?;
        let meta = self.source.meta(&task.node).of_source(shown)?;
        self.progress.inc(1);
        match meta.kind {
            FileKind::Directory => self.directory(task, meta),
            _ => self.other(task, meta),
        }
    }

    /// An interrupt ends all of the copy.
    fn go_on(&self) -> Result<(), Trouble> {
        self.interrupt.check().map_err(|e| Trouble::All(e.into()))
    }

    /// Makes a directory; what is in it comes next, then its attributes.
    fn directory(&mut self, task: Task<S, D>, meta: Meta) -> Result<(), Trouble> {
        let Task { node, dir, name, shown, depth } = task;
        let refused = |why: String| Err(Trouble::Entry(anyhow!("{shown}: {why}")));
        if !self.recursive {
            return refused("is a directory".into());
        }
        if depth > MAX_DEPTH {
            return refused(format!("directories are nested more than {MAX_DEPTH} deep"));
        }
        let xattrs = self.source.xattrs(&node).of_source(&shown)?;
        let entries = self.source.entries(&node).of_source(&shown)?;
        let made = match self.sink.find(&dir, &name).of_sink(&shown)? {
            Some((existing, FileKind::Directory)) => existing,
            Some(_) => return refused("the destination exists and is not a directory".into()),
            None => self.sink.create(&dir, &name, &meta, b"").of_sink(&shown)?,
        };
        self.totals.entries += 1;
        let above = shown.trim_end_matches('/').to_owned();
        self.todo.push(Step::Finish(Made { node: made.clone(), meta, xattrs, shown }));
        self.todo.extend(entries.into_iter().rev().map(|(name, node)| {
            let shown = format!("{above}/{}", print::name(&name));
            Step::Copy(Task { node, dir: made.clone(), name, shown, depth: depth + 1 })
        }));
        Ok(())
    }

    /// Copies what is no directory. Nothing is replaced before it is known that the source can be
    /// read.
    fn other(&mut self, task: Task<S, D>, meta: Meta) -> Result<(), Trouble> {
        let Task { node, dir, name, shown, .. } = task;
        let file = match meta.kind {
            FileKind::Regular => Some(self.source.open(&node).of_source(&shown)?),
            _ => None,
        };
        let target = match meta.kind {
            FileKind::Symlink => self.source.readlink(&node).of_source(&shown)?,
            _ => Vec::new(),
        };
        let xattrs = self.source.xattrs(&node).of_source(&shown)?;
        self.make_room(&dir, &name, &shown)?;
        if let Some(earlier) = meta.identity.and_then(|i| self.links.get(&i)) {
            self.sink.link(earlier, &dir, &name).of_sink(&shown)?;
            self.totals.entries += 1;
            return Ok(());
        }
        let made = self.sink.create(&dir, &name, &meta, &target).of_sink(&shown)?;
        if let Some(file) = file
            && let Err(e) = self.content(&file, &made, meta.size, &shown)
        {
            // Half a file would look like a whole one.
            let _ = self.sink.unlink(&dir, &name);
            return Err(e);
        }
        self.totals.entries += 1;
        let identity = meta.identity;
        self.finish(&Made { node: made.clone(), meta, xattrs, shown })?;
        self.links.extend(identity.map(|identity| (identity, made)));
        Ok(())
    }

    /// Takes away what has the name at the destination, unless it is a directory.
    fn make_room(&self, dir: &D::Node, name: &[u8], shown: &str) -> Result<(), Trouble> {
        match self.sink.find(dir, name).of_sink(shown)? {
            Some((_, FileKind::Directory)) => {
                let why = anyhow!("{shown}: the destination exists and is a directory");
                Err(Trouble::Entry(why))
            }
            Some(_) => self.sink.unlink(dir, name).of_sink(shown),
            None => Ok(()),
        }
    }

    /// Copies the data of a file, leaving holes out.
    fn content(
        &mut self,
        from: &S::File,
        made: &D::Node,
        size: u64,
        shown: &str,
    ) -> Result<(), Trouble> {
        let to = self.sink.open(made).of_sink(shown)?;
        let mut at = 0;
        while at < size {
            let Some(data) = self.source.data(from, at..size).of_source(shown)? else { break };
            let end = data.end.min(size);
            at = data.start.max(at);
            while at < end {
                self.go_on()?;
                let want = usize::try_from(end - at).unwrap_or(usize::MAX).min(self.buf.len());
                let n = self.source.read(from, at, &mut self.buf[..want]).of_source(shown)?;
                if n == 0 {
                    // The file has become shorter during the copy.
                    return Ok(());
                }
                self.sink.write(&to, at, &self.buf[..n]).of_sink(shown)?;
                at += n as u64;
                self.totals.bytes += n as u64;
                self.progress.set_message(crate::size::human(self.totals.bytes));
            }
        }
        self.sink.set_size(&to, size).of_sink(shown)
    }
}

/// Says which side a step failed on, and at which entry.
trait Blame<T> {
    /// What cannot be read of one entry says nothing about others.
    fn of_source(self, shown: &str) -> Result<T, Trouble>;
    /// A destination that refuses one entry may take others; one that is full or broken will not.
    fn of_sink(self, shown: &str) -> Result<T, Trouble>;
}

impl<T> Blame<T> for anyhow::Result<T> {
    fn of_source(self, shown: &str) -> Result<T, Trouble> {
        self.map_err(|error| Trouble::Entry(error.context(shown.to_owned())))
    }

    fn of_sink(self, shown: &str) -> Result<T, Trouble> {
        self.map_err(|error| {
            let single = concerns_one_entry(&error);
            let error = error.context(shown.to_owned());
            if single { Trouble::Entry(error) } else { Trouble::All(error) }
        })
    }
}

/// Is it the refusal of one entry, by the host or by the engine?
fn concerns_one_entry(error: &anyhow::Error) -> bool {
    use std::io::ErrorKind as Kind;
    let host = error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>()).any(|e| {
        matches!(
            e.kind(),
            Kind::PermissionDenied
                | Kind::AlreadyExists
                | Kind::NotFound
                | Kind::IsADirectory
                | Kind::NotADirectory
                | Kind::InvalidFilename
                | Kind::InvalidInput
                | Kind::Unsupported
                | Kind::FileTooLarge
        )
    });
    let errno = error.chain().filter_map(|e| e.downcast_ref::<rustix::io::Errno>()).any(|e| {
        use rustix::io::Errno;
        matches!(
            *e,
            Errno::PERM
                | Errno::ACCESS
                | Errno::OPNOTSUPP
                | Errno::INVAL
                | Errno::TOOBIG
                | Errno::RANGE
        )
    });
    let image = error.chain().filter_map(|e| e.downcast_ref::<larder_fs::Error>()).any(|e| {
        use larder_fs::Error;
        matches!(
            e,
            Error::Exists
                | Error::NotDirectory
                | Error::IsDirectory
                | Error::NotEmpty
                | Error::TooManyLinks
                | Error::NameTooLong
                | Error::Overflow
                | Error::TooBig
                | Error::FileTooBig
                | Error::Invalid(_)
                | Error::NotPermitted(_)
                | Error::NotSupported(_)
                | Error::CrossSubvolume
        )
    });
    host || errno || image
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
        let (bar, interrupt) = (ProgressBar::hidden(), Interrupt::default());
        let mut copier = Copier::new(&HostTree, &HostTree, true, &bar, &interrupt);
        copier.copy(&from.to_owned(), &to.to_owned(), b"copy", "from")?;
        Ok(copier.totals())
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
        assert_eq!(all(&from, &to).unwrap().failed, 1);
        assert!(!dir.path().join("d").exists());
    }

    /// A source where the user asks for the end once a file has begun.
    struct Stopping<'a>(&'a Interrupt);

    impl Source for Stopping<'_> {
        type Node = std::path::PathBuf;
        type File = std::fs::File;
        fn meta(&self, node: &Self::Node) -> anyhow::Result<Meta> {
            Source::meta(&HostTree, node)
        }
        fn xattrs(&self, node: &Self::Node) -> anyhow::Result<Xattrs> {
            HostTree.xattrs(node)
        }
        fn entries(&self, node: &Self::Node) -> anyhow::Result<Vec<(Vec<u8>, Self::Node)>> {
            HostTree.entries(node)
        }
        fn readlink(&self, node: &Self::Node) -> anyhow::Result<Vec<u8>> {
            HostTree.readlink(node)
        }
        fn open(&self, node: &Self::Node) -> anyhow::Result<Self::File> {
            Source::open(&HostTree, node)
        }
        fn data(
            &self,
            file: &Self::File,
            within: Range<u64>,
        ) -> anyhow::Result<Option<Range<u64>>> {
            HostTree.data(file, within)
        }
        fn read(&self, file: &Self::File, at: u64, buf: &mut [u8]) -> anyhow::Result<usize> {
            if at > 0 {
                self.0.ask(signal_hook::consts::SIGINT);
            }
            HostTree.read(file, at, buf)
        }
    }

    #[test]
    fn half_a_file_is_not_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        std::fs::create_dir(&from).unwrap();
        std::fs::create_dir(&to).unwrap();
        std::fs::set_permissions(&from, PermissionsExt::from_mode(0o751)).unwrap();
        std::fs::write(from.join("a"), vec![1; 3 * PIECE]).unwrap();
        std::fs::write(from.join("b"), vec![1; 3 * PIECE]).unwrap();
        let interrupt = Interrupt::default();
        let bar = ProgressBar::hidden();
        let source = Stopping(&interrupt);
        let mut copier = Copier::new(&source, &HostTree, true, &bar, &interrupt);
        let error = copier.copy(&from, &to, b"copy", "from").unwrap_err();
        assert!(error.is::<crate::interrupt::Interrupted>(), "{error}");
        let copy = to.join("copy");
        assert_eq!(std::fs::read_dir(&copy).unwrap().count(), 0, "the file that had begun is gone");
        assert_eq!(
            std::fs::metadata(&copy).unwrap().mode() & 0o7777,
            0o751,
            "and the directory is complete"
        );
    }

    #[test]
    fn what_cannot_be_copied_is_told_and_the_rest_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        std::fs::create_dir_all(from.join("sub")).unwrap();
        std::fs::create_dir_all(to.join("copy/sub/b")).unwrap();
        for name in ["a", "sub/b", "sub/c", "z"] {
            std::fs::write(from.join(name), name).unwrap();
        }
        let totals = all(&from, &to).unwrap();
        assert_eq!((totals.entries, totals.failed), (5, 1), "a directory is in the way of sub/b");
        assert_eq!(std::fs::read(to.join("copy/sub/c")).unwrap(), b"sub/c");
        assert_eq!(std::fs::read(to.join("copy/z")).unwrap(), b"z");
    }

    #[test]
    fn names_cannot_leave_their_directory() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0"] {
            assert!(check_name(bad).is_err());
        }
        check_name(b"...").unwrap();
    }
}
