//! The two trees side by side.

use crate::contents::{Failed, File};
use crate::error::At;
use crate::links::Links;
use crate::listing::{self, Left, Name};
use crate::{Change, Compare, Error, OpenContents, Options, Result, Summary, What};
use crate::{attributes, remove};
use larder_fs::{Attr, FileKind, Filesystem, InodeId, NewInode, Surveyed};
use larder_sources::{Attributes, Entry, Kind, Locator, TreePath};

/// An update on its way.
pub(crate) struct Walk<'a> {
    fs: &'a Filesystem,
    open: &'a OpenContents<'a>,
    options: Options,
    each: &'a mut dyn FnMut(&Change<'_>) -> bool,
    summary: Summary,
    links: Links,
    /// Directories from the root to the one whose entries are coming.
    levels: Vec<Level>,
}

/// A directory whose entries are coming.
struct Level {
    path: TreePath,
    /// `None`: it would have been made, but this is a dry run.
    id: Option<InodeId>,
    /// Names that the image has in it, and that the sources have not come to yet.
    left: Left,
    /// What the sources say of it. `None` for a root without an entry.
    attributes: Option<Attributes>,
    /// It was reported already, as something new.
    told: bool,
}

/// What an entry finds in its place.
enum Found {
    Nothing,
    Other(Name),
    Same(Surveyed),
}

impl<'a> Walk<'a> {
    pub(crate) fn new(
        fs: &'a Filesystem,
        root: InodeId,
        open: &'a OpenContents<'a>,
        options: Options,
        each: &'a mut dyn FnMut(&Change<'_>) -> bool,
    ) -> Result<Self> {
        let summary = Summary::default();
        let links = Links::new(options.memory, &options.temporary);
        let mut walk = Self { fs, open, options, each, summary, links, levels: Vec::new() };
        walk.enter(TreePath::root(), Some(root), None, false)?;
        Ok(walk)
    }

    /// Goes on with the next entry.
    pub(crate) fn entry(&mut self, entry: Entry) -> Result<()> {
        let Some((parent, name)) = entry.path.split() else {
            self.levels[0].attributes = Some(entry.attributes);
            return Ok(());
        };
        while self.top().path != parent {
            // The root holds everything, so this ends.
            if self.levels.len() == 1 {
                return Err(Error::Order { path: entry.path.clone() });
            }
            self.leave()?;
        }
        let found = self.find(&entry, name)?;
        match entry.kind {
            Kind::Directory => self.directory(entry, found),
            _ => self.leaf(&entry, found),
        }
    }

    /// Leaves all directories. No more entries come.
    pub(crate) fn finish(mut self) -> Result<Summary> {
        while !self.levels.is_empty() {
            self.leave()?;
        }
        Ok(self.summary)
    }

    fn top(&mut self) -> &mut Level {
        self.levels.last_mut().expect("the root is left at the end only")
    }

    fn tell(&mut self, path: &TreePath, what: What) -> Result<()> {
        self.summary.count(what);
        if (self.each)(&Change { path, what }) { Ok(()) } else { Err(Error::Interrupted) }
    }

    /// Goes into a directory.
    fn enter(
        &mut self,
        path: TreePath,
        id: Option<InodeId>,
        attributes: Option<Attributes>,
        told: bool,
    ) -> Result<()> {
        let left = match id {
            Some(id) => Left::of(self.fs, id).at(&path, "list the directory")?,
            None => Left::default(),
        };
        self.levels.push(Level { path, id, left, attributes, told });
        Ok(())
    }

    /// Ends a directory: removes what the sources do not have, and sets its attributes. They are
    /// set last, because each change in the directory changes its time.
    fn leave(&mut self) -> Result<()> {
        while let Some(name) = self.top().left.next_if(|_| true) {
            self.remove_left(&name)?;
        }
        let level = self.levels.pop().expect("the caller has seen it");
        let (Some(id), Some(wanted)) = (level.id, &level.attributes) else { return Ok(()) };
        let mut now = listing::one(self.fs, id).at(&level.path, "read attributes")?;
        let modified = attributes::timestamp(wanted.modified);
        let touched = now.attr.mtime != modified;
        // The time differs wherever names came or went. Those names were reported themselves.
        now.attr.mtime = modified;
        let others = attributes::differ(&now, wanted);
        if !self.options.dry_run && (others || touched) {
            attributes::set(self.fs, id, wanted).at(&level.path, "set attributes")?;
        }
        match (level.told, others) {
            (true, _) => Ok(()),
            (false, true) => self.tell(&level.path, What::Attributes),
            (false, false) => {
                self.summary.unchanged += 1;
                Ok(())
            }
        }
    }

    /// Removes what the image has before `name`, and finds what it has under that name.
    fn find(&mut self, entry: &Entry, name: &[u8]) -> Result<Found> {
        while let Some(before) = self.top().left.next_if(|n| n.name.as_slice() < name) {
            self.remove_left(&before)?;
        }
        let (fs, top) = (self.fs, self.top());
        // A directory to be made has no names.
        let Some(dir) = top.id else { return Ok(Found::Nothing) };
        let there = top.left.take(fs, dir, name).at(&entry.path, "read attributes")?;
        let Some((there, now)) = there else { return Ok(Found::Nothing) };
        Ok(if self.is_same(entry, &now.attr)? { Found::Same(now) } else { Found::Other(there) })
    }

    /// Is it of the entry's type, with equal values of what cannot be changed in that type?
    fn is_same(&self, entry: &Entry, now: &Attr) -> Result<bool> {
        if kind_of(&entry.kind) != now.kind {
            return Ok(false);
        }
        Ok(match &entry.kind {
            Kind::Symlink(target) => {
                *target == self.fs.readlink(now.id).at(&entry.path, "read the link")?
            }
            _ => rdev_of(&entry.kind) == now.rdev,
        })
    }

    fn remove_left(&mut self, name: &Name) -> Result<()> {
        let mut path = self.top().path.clone();
        path.push(&name.name);
        let dir = self.top().id.expect("a directory to be made has no names");
        if name.is_subvolume(dir) {
            return Ok(());
        }
        if self.take_away(dir, name, &path)? {
            self.tell(&path, What::Removed)?;
        }
        Ok(())
    }

    /// Removes a name with what is below it, or finds out what that would do. Returns whether the
    /// name is gone.
    fn take_away(&mut self, dir: InodeId, name: &Name, path: &TreePath) -> Result<bool> {
        if !self.options.dry_run {
            return remove::remove(self.fs, dir, name).at(path, "remove it");
        }
        let links = &mut self.links;
        remove::would_remove(self.fs, dir, name, path, &mut |id| links.would_lose(id))
    }

    /// Makes room for an entry that cannot become what is in its place.
    fn clear(&mut self, path: &TreePath, name: &Name) -> Result<()> {
        let dir = self.top().id.expect("a directory to be made has no names");
        if name.is_subvolume(dir) {
            return Err(Error::Subvolume { path: path.clone() });
        }
        match self.take_away(dir, name, path)? {
            true => Ok(()),
            false => Err(Error::Subvolume { path: path.clone() }),
        }
    }

    fn directory(&mut self, entry: Entry, found: Found) -> Result<()> {
        let Entry { path, attributes, .. } = entry;
        let what = match found {
            Found::Same(now) => {
                return self.enter(path, Some(now.attr.id), Some(attributes), false);
            }
            Found::Nothing => What::Added,
            Found::Other(name) => {
                self.clear(&path, &name)?;
                What::Replaced
            }
        };
        self.tell(&path, what)?;
        let id = self.create(&path, &Kind::Directory, &attributes)?;
        self.enter(path, id, Some(attributes), true)
    }

    /// Anything but a directory.
    fn leaf(&mut self, entry: &Entry, found: Found) -> Result<()> {
        if let Some(first) = self.links.of(entry.links)? {
            return self.further_name(entry, first, found);
        }
        match found {
            Found::Same(now) if self.links.may_keep(&now.attr, entry.links)? => {
                self.links.keep(now.attr.id, entry.links)?;
                self.compare(entry, &now)
            }
            Found::Same(now) => {
                let name = self.name_of(entry, &now.attr);
                self.clear(&entry.path, &name)?;
                self.make(entry, What::Replaced)
            }
            Found::Other(name) => {
                self.clear(&entry.path, &name)?;
                self.make(entry, What::Replaced)
            }
            Found::Nothing => self.make(entry, What::Added),
        }
    }

    /// A name of an inode that an earlier entry made known; `first` is `None` in a dry run.
    fn further_name(&mut self, entry: &Entry, first: Option<InodeId>, found: Found) -> Result<()> {
        match found {
            Found::Same(now) if Some(now.attr.id) == first => {
                self.summary.unchanged += 1;
                return Ok(());
            }
            Found::Same(now) => {
                let name = self.name_of(entry, &now.attr);
                self.clear(&entry.path, &name)?;
            }
            Found::Other(name) => self.clear(&entry.path, &name)?,
            Found::Nothing => {}
        }
        if let (false, Some(id), Some(dir)) = (self.options.dry_run, first, self.top().id) {
            let (_, name) = entry.path.split().expect("the root is a directory");
            self.fs.link(id, dir, name).at(&entry.path, "link it")?;
        }
        self.tell(&entry.path, What::Linked)
    }

    fn name_of(&self, entry: &Entry, now: &Attr) -> Name {
        let (_, name) = entry.path.split().expect("the root is a directory");
        Name { name: name.to_vec(), id: now.id, kind: now.kind }
    }

    /// Makes what the image does not have.
    fn make(&mut self, entry: &Entry, what: What) -> Result<()> {
        self.tell(&entry.path, what)?;
        let id = self.create(&entry.path, &entry.kind, &entry.attributes)?;
        self.links.made(id, entry.links)?;
        let Some(id) = id else { return Ok(()) };
        if let Kind::File { size, contents } = &entry.kind {
            self.write(entry, File { fs: self.fs, id, size: 0 }, *size, contents.as_ref())?;
        }
        attributes::set(self.fs, id, &entry.attributes).at(&entry.path, "set attributes")
    }

    /// Makes an empty inode; `None` in a dry run.
    fn create(
        &mut self,
        path: &TreePath,
        kind: &Kind,
        attributes: &Attributes,
    ) -> Result<Option<InodeId>> {
        let (false, Some(dir)) = (self.options.dry_run, self.top().id) else { return Ok(None) };
        let new = NewInode {
            kind: kind_of(kind),
            perm: attributes.permissions,
            uid: attributes.uid,
            gid: attributes.gid,
            rdev: rdev_of(kind),
            target: if let Kind::Symlink(target) = kind { target } else { b"" },
            xattrs: &attributes.xattrs,
        };
        let (_, name) = path.split().expect("the root is there");
        Ok(Some(self.fs.create(dir, name, &new).at(path, "make it")?.id))
    }

    /// Changes what the image has where it is not as the sources say.
    fn compare(&mut self, entry: &Entry, now: &Surveyed) -> Result<()> {
        let mut what = None;
        let id = now.attr.id;
        if attributes::differ(now, &entry.attributes) {
            what = Some(What::Attributes);
        }
        if let Kind::File { size, contents } = &entry.kind {
            let file = File { fs: self.fs, id, size: now.attr.size };
            if self.contents_differ(entry, &file, &now.attr)? {
                what = Some(What::Contents);
                if !self.options.dry_run {
                    self.write(entry, file, *size, contents.as_ref())?;
                }
            }
        }
        let Some(what) = what else {
            self.summary.unchanged += 1;
            return Ok(());
        };
        if !self.options.dry_run {
            attributes::set(self.fs, id, &entry.attributes).at(&entry.path, "set attributes")?;
        }
        self.tell(&entry.path, what)
    }

    fn contents_differ(&self, entry: &Entry, file: &File<'_>, now: &Attr) -> Result<bool> {
        let Kind::File { size, contents } = &entry.kind else { return Ok(false) };
        if *size != now.size {
            return Ok(true);
        }
        match self.options.compare {
            Compare::TimeAndSize => {
                Ok(now.mtime != attributes::timestamp(entry.attributes.modified))
            }
            Compare::Contents => {
                let Some(locator) = contents else { return Ok(false) };
                let mut source = self.source(entry, locator)?;
                file.is_like(&mut *source).map_err(|e| failed(&entry.path, e))
            }
            .map(|like| !like),
        }
    }

    fn write(
        &mut self,
        entry: &Entry,
        file: File<'_>,
        size: u64,
        contents: Option<&Locator>,
    ) -> Result<()> {
        let written = match contents {
            Some(locator) => {
                let mut source = self.source(entry, locator)?;
                file.become_like(&mut *source, size)
            }
            None => file.become_like(&mut Nothing, size),
        };
        self.summary.written += written.map_err(|e| failed(&entry.path, e))?;
        Ok(())
    }

    fn source(
        &self,
        entry: &Entry,
        locator: &Locator,
    ) -> Result<Box<dyn larder_sources::Contents>> {
        (self.open)(locator).map_err(|why| Error::Contents { path: entry.path.clone(), why })
    }
}

/// The contents of a file that has none.
struct Nothing;

impl larder_sources::Contents for Nothing {
    fn data(&mut self) -> std::io::Result<Vec<std::ops::Range<u64>>> {
        Ok(Vec::new())
    }

    fn read_exact_at(&mut self, _buf: &mut [u8], _offset: u64) -> std::io::Result<()> {
        Err(std::io::ErrorKind::UnexpectedEof.into())
    }
}

fn failed(path: &TreePath, e: Failed) -> Error {
    match e {
        Failed::Source(why) => Error::Contents { path: path.clone(), why: why.into() },
        Failed::Image(why) => {
            Error::Image { path: path.clone(), doing: "write it", why: why.into() }
        }
    }
}

fn kind_of(kind: &Kind) -> FileKind {
    match kind {
        Kind::Directory => FileKind::Directory,
        Kind::File { .. } => FileKind::Regular,
        Kind::Symlink(_) => FileKind::Symlink,
        Kind::CharDevice { .. } => FileKind::CharDevice,
        Kind::BlockDevice { .. } => FileKind::BlockDevice,
        Kind::Fifo => FileKind::Fifo,
        Kind::Socket => FileKind::Socket,
    }
}

/// The device number as the format has it; 0 for all but devices.
fn rdev_of(kind: &Kind) -> u64 {
    match kind {
        Kind::CharDevice { major, minor } | Kind::BlockDevice { major, minor } => {
            u64::from(*major) << 20 | u64::from(*minor)
        }
        _ => 0,
    }
}
