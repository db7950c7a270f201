//! Copying trees between the host and images, with everything that a tree is made of.
//!
//! Where a tree comes from and goes to is hidden behind [`Source`] and [`Sink`]. This module knows
//! what belongs to a faithful copy: permissions, owners, times, extended attributes (ACLs among
//! them), hard links within the tree, holes, symbolic links, special files. At the destination
//! directories are merged. Everything else is replaced, or stays and is an error. Symbolic links
//! there are never followed.
//!
//! An entry that cannot be copied is reported, and the others are copied. A destination that is
//! full or broken ends the copy, and so does a signal. No file is ever left with only a part of its
//! data.
//!
//! `walk` has the order of entries, and what is refused of a hostile source.

pub(crate) mod beneath;
pub(crate) mod host;
pub(crate) mod image;
pub(crate) mod walk;

use crate::failure::Advise;
use crate::interrupt::{Interrupt, Interrupted};
use crate::select::Select;
use crate::{failure, print, size};
use anyhow::anyhow;
use indicatif::ProgressBar;
use larder_format::acl::{ACCESS, DEFAULT};
use larder_fs::{FileKind, Timestamp};
use std::collections::HashMap;
use std::ops::Range;
use walk::{Event, Found, Walk};

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
    /// The subvolume, or the file system of the host, that it is in.
    pub(crate) tree: u64,
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

/// Where a copy goes.
pub(crate) enum Place<D: Sink> {
    /// To this name in this directory.
    Named(D::Node, Vec<u8>),
    /// The content of a directory goes into this one, which also gets its attributes.
    Into(D::Node),
}

/// What happens to what is at the destination, and is no directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// It goes.
    Replaced,
    /// It stays, and the entry is not copied.
    Kept,
}

/// Bytes moved at once.
const PIECE: usize = 1 << 20;

/// Something that is made and lacks its attributes.
struct Made<D: Sink> {
    node: D::Node,
    meta: Meta,
    xattrs: Xattrs,
    shown: String,
}

/// Why something could not be copied.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// It concerns one entry: the others can be.
    Entry(anyhow::Error),
    /// There is no point in going on.
    All(anyhow::Error),
}

/// A copy under way.
pub(crate) struct Copier<'a, S: Source, D: Sink> {
    source: &'a S,
    sink: &'a D,
    existing: Existing,
    progress: &'a ProgressBar,
    interrupt: &'a Interrupt,
    /// Files that have more names, and where the first of them went.
    links: HashMap<(u64, u64), D::Node>,
    /// Directories that get their attributes when everything in them is there.
    begun: Vec<Made<D>>,
    /// Paths of nested subvolumes.
    nested: Vec<String>,
    buf: Vec<u8>,
    totals: Totals,
}

impl<'a, S: Source, D: Sink> Copier<'a, S, D> {
    pub(crate) fn new(
        source: &'a S,
        sink: &'a D,
        existing: Existing,
        progress: &'a ProgressBar,
        interrupt: &'a Interrupt,
    ) -> Self {
        let (links, begun, nested) = (HashMap::new(), Vec::new(), Vec::new());
        let (buf, totals) = (vec![0; PIECE], Totals::default());
        Self { source, sink, existing, progress, interrupt, links, begun, nested, buf, totals }
    }

    /// Copies what is selected of `node`; `shown` is what messages call it.
    ///
    /// # Errors
    /// It could not be copied at all, or not to its end. What was wrong with single entries below
    /// it is reported, and counted.
    pub(crate) fn copy(
        &mut self,
        node: &S::Node,
        select: &Select,
        place: &Place<D>,
        shown: &str,
    ) -> anyhow::Result<()> {
        let mut walk = Walk::new(self.source, select, node, shown);
        let mut first = true;
        while let Some(event) = walk.next() {
            let done = self.go_on().and(event).and_then(|event| self.step(event, &mut walk, place));
            match done {
                Ok(()) => {}
                Err(Trouble::Entry(e)) if !first => {
                    self.totals.failed += 1;
                    self.progress.suspend(|| print::say(&failure::text(&e)));
                }
                Err(Trouble::Entry(e) | Trouble::All(e)) => {
                    self.leave();
                    return Err(e);
                }
            }
            first = false;
        }
        Ok(())
    }

    /// What has been copied so far.
    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Paths, from the start on, of the subvolumes that became directories.
    pub(crate) fn into_nested(self) -> Vec<String> {
        self.nested
    }

    /// Directories that were begun get their attributes, as far as that still works.
    fn leave(&mut self) {
        while let Some(made) = self.begun.pop() {
            let _ = self.finish(&made);
        }
    }

    fn finish(&self, made: &Made<D>) -> Result<(), Trouble> {
        self.sink.finish(&made.node, &made.meta, &made.xattrs).of_sink(&made.shown)
    }

    /// An interrupt ends all of the copy.
    fn go_on(&self) -> Result<(), Trouble> {
        self.interrupt.check().map_err(|e| Trouble::All(e.into()))
    }

    fn step(
        &mut self,
        event: Event<S::Node>,
        walk: &mut Walk<'_, S>,
        place: &Place<D>,
    ) -> Result<(), Trouble> {
        match event {
            Event::Leave => match self.begun.pop() {
                Some(made) => self.finish(&made),
                None => Ok(()),
            },
            Event::Enter(found) => {
                self.progress.inc(1);
                self.directory(found, place).inspect_err(|_| walk.skip())
            }
            Event::Other(found) => {
                self.progress.inc(1);
                self.other(found, place)
            }
        }
    }

    /// The directory that an entry goes to, and its name there. No name: it goes where the
    /// directory is.
    fn destination(&self, found: &Found<S::Node>, place: &Place<D>) -> (D::Node, Option<Vec<u8>>) {
        match (self.begun.last(), place) {
            (Some(above), _) => (above.node.clone(), Some(found.name().to_vec())),
            (None, Place::Named(dir, name)) => (dir.clone(), Some(name.clone())),
            (None, Place::Into(dir)) => (dir.clone(), None),
        }
    }

    /// Makes a directory; what is in it comes next, then its attributes.
    fn directory(&mut self, found: Found<S::Node>, place: &Place<D>) -> Result<(), Trouble> {
        let (dir, name) = self.destination(&found, place);
        let Found { path, meta, xattrs, shown, nested, .. } = found;
        let node = match name {
            None => dir,
            Some(name) => {
                let node = match self.sink.find(&dir, &name).of_sink(&shown)? {
                    Some((existing, FileKind::Directory)) => existing,
                    Some(_) => {
                        let why = "the destination exists and is not a directory";
                        return Err(Trouble::Entry(anyhow!("{shown}: {why}")));
                    }
                    None => self.sink.create(&dir, &name, &meta, b"").of_sink(&shown)?,
                };
                self.totals.entries += 1;
                node
            }
        };
        if nested {
            self.nested.push(print::name(&path));
        }
        self.begun.push(Made { node, meta, xattrs, shown });
        Ok(())
    }

    /// Copies what is no directory. Nothing is replaced before it is known that the source can be
    /// read.
    fn other(&mut self, found: Found<S::Node>, place: &Place<D>) -> Result<(), Trouble> {
        let (dir, name) = self.destination(&found, place);
        let Found { node, meta, xattrs, shown, .. } = found;
        let Some(name) = name else {
            return Err(Trouble::Entry(anyhow!("{shown} is not a directory")));
        };
        let file = match meta.kind {
            FileKind::Regular => Some(self.source.open(&node).of_source(&shown)?),
            _ => None,
        };
        let target = match meta.kind {
            FileKind::Symlink => self.source.readlink(&node).of_source(&shown)?,
            _ => Vec::new(),
        };
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

    /// Takes away what has the name at the destination, if it may be replaced.
    fn make_room(&self, dir: &D::Node, name: &[u8], shown: &str) -> Result<(), Trouble> {
        let why = match self.sink.find(dir, name).of_sink(shown)? {
            None => return Ok(()),
            Some((_, FileKind::Directory)) => "the destination exists and is a directory",
            Some(_) if self.existing == Existing::Kept => {
                "the destination exists (--force replaces it)"
            }
            Some(_) => return self.sink.unlink(dir, name).of_sink(shown),
        };
        Err(Trouble::Entry(anyhow!("{shown}: {why}")))
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
                self.progress.set_message(size::human(self.totals.bytes));
            }
        }
        self.sink.set_size(&to, size).of_sink(shown)
    }
}

/// Adds to the error of a copy what arrived before it.
pub(crate) fn with_what_arrived(result: anyhow::Result<()>, totals: Totals) -> anyhow::Result<()> {
    match result {
        Err(e) if e.is::<Interrupted>() || totals.entries > 0 => {
            let (entries, bytes) = (print::entries(totals.entries), size::human(totals.bytes));
            Err(e).hint(format!("{entries} ({bytes}) had been copied, and stay"))
        }
        other => other,
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

/// Attributes that are copied: those of programs and of the system's access control.
pub(crate) fn is_copied(name: &[u8]) -> bool {
    [&b"user."[..], b"security.", b"trusted.", b"btrfs."].iter().any(|p| name.starts_with(p))
        || name == ACCESS
        || name == DEFAULT
}

#[cfg(test)]
mod tests {
    use super::beneath::Beneath;
    use super::host::HostTree;
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn all(from: &std::path::Path, to: &std::path::Path) -> anyhow::Result<Totals> {
        with(from, to, Existing::Replaced)
    }

    fn with(
        from: &std::path::Path,
        to: &std::path::Path,
        existing: Existing,
    ) -> anyhow::Result<Totals> {
        let (bar, interrupt) = (ProgressBar::hidden(), Interrupt::default());
        let sink = Beneath::open(to)?;
        let mut copier = Copier::new(&HostTree, &sink, existing, &bar, &interrupt);
        let place = Place::Named(Vec::new(), b"copy".to_vec());
        copier.copy(&from.to_owned(), &Select::all(), &place, "from")?;
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
        // Once more: what is there stays, or is merged and replaced.
        std::fs::write(copy.join("sub/b"), b"other").unwrap();
        let kept = with(&from, &to, Existing::Kept).unwrap();
        assert_eq!((kept.entries, kept.failed), (3, 4), "directories are merged");
        assert_eq!(std::fs::read(copy.join("a")).unwrap(), b"other");
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
        let sink = Beneath::open(&to).unwrap();
        let mut copier = Copier::new(&source, &sink, Existing::Replaced, &bar, &interrupt);
        let place = Place::Named(Vec::new(), b"copy".to_vec());
        let error = copier.copy(&from, &Select::all(), &place, "from").unwrap_err();
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
}
