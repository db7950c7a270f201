//! A layer of a container image: what a tree has beyond the one below, and lacks of it.
//!
//! Two trees are compared as their entries come, in the order of paths. What differs is only
//! marked, since two things are known later than they are needed. A name of a file with several
//! names is of use in a layer only together with the others: so all of them come as soon as one
//! differs. And whiteouts belong before the entries that stand beside them. Hidden here is how
//! those marks are kept, sorted on disk, until the tree is read once more and written.
//!
//! Of the times only that of the last modification makes a difference: a layer tells of no other.
//! Directories above something that differs come as well, for programs that unpack a
//! layer give them the attributes that they find there. A directory of which every name is gone
//! becomes opaque. Sockets are left out on both sides, because tars have none.

use crate::tar::{TarError, TarWriter};
use larder_sources::spill::{Records, Sorted, Sorter};
use larder_sources::{Attributes, Contents, Entry, Kind, LinkGroup, Locator, Sources, TreePath};
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::iter::Peekable;
use std::ops::Range;
use std::path::Path;

/// Bytes of two files that are compared at once.
const PIECE: u64 = 256 << 10;
/// What stands between the key of a directory and a name that is gone from it.
const GONE: &[u8] = &[0, 0];
/// Names that are gone from a directory, from which on it is opaque if no other one stays.
const ENOUGH_TO_HIDE: u64 = 2;

/// Why there is no layer.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// A tree cannot be read, or memory and disk do not suffice to compare it.
    #[error(transparent)]
    Source(#[from] larder_sources::Error),
    /// The contents of a file cannot be read.
    #[error("{path}: {error}")]
    Contents {
        /// The file.
        path: String,
        /// Why.
        error: io::Error,
    },
    /// An entry cannot be in a layer, or the tar cannot be written.
    #[error("{path}: {error}")]
    Entry {
        /// The entry.
        path: String,
        /// Why.
        error: TarError,
    },
    /// The caller wants no more.
    #[error("interrupted")]
    Stopped,
}

impl From<io::Error> for LayerError {
    fn from(error: io::Error) -> Self {
        Self::Source(error.into())
    }
}

/// Result of making a layer.
type Result<T, E = LayerError> = std::result::Result<T, E>;

/// What is in a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCounts {
    /// Entries, whiteouts not counted.
    pub entries: u64,
    /// Bytes of files.
    pub bytes: u64,
    /// Whiteouts, also those of all names of a directory.
    pub whiteouts: u64,
}

/// Whatever making a layer needs from outside.
pub struct Surroundings<'a> {
    /// Memory for sorting, in bytes.
    pub memory: usize,
    /// Where temporary files are made.
    pub temporary: &'a Path,
    /// Is told how many more bytes of contents were moved or compared, perhaps none, and says
    /// whether the work goes on.
    pub goes_on: &'a (dyn Fn(u64) -> bool + Sync),
}

impl std::fmt::Debug for Surroundings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Surroundings").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Surroundings<'_> {
    fn check(&self, more: u64) -> Result<()> {
        if (self.goes_on)(more) { Ok(()) } else { Err(LayerError::Stopped) }
    }
}

/// How a tree differs from the one below.
#[derive(Debug)]
pub struct Difference<'a> {
    upper: &'a Sources,
    /// Keys of entries that differ, and of names that are gone. `None`: all is new.
    marks: Option<Sorted>,
    /// Inodes with several names of which all come.
    groups: HashSet<LinkGroup>,
}

impl<'a> Difference<'a> {
    /// Compares two trees. Without one below, all of the upper one is new.
    ///
    /// # Errors
    /// [`LayerError`]: one of them cannot be read.
    pub fn between(
        lower: Option<&Sources>,
        upper: &'a Sources,
        around: &Surroundings<'_>,
    ) -> Result<Self> {
        let Some(lower) = lower else {
            return Ok(Self { upper, marks: None, groups: HashSet::new() });
        };
        let marks = Sorter::new(around.memory, around.temporary);
        let mut comparing = Comparing {
            lower,
            upper,
            around,
            marks,
            directories: Vec::new(),
            gone: None,
            names: 0,
            lower_names: HashMap::new(),
            upper_names: HashMap::new(),
            groups: HashSet::new(),
        };
        for pair in Pairs::new(lower, upper)? {
            comparing.pair(pair?)?;
        }
        comparing.leave(None)?;
        let (marks, groups) = (comparing.marks.finish()?, comparing.groups);
        Ok(Self { upper, marks: Some(marks), groups })
    }

    /// Is there nothing to tell?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.marks.as_ref().is_some_and(|marks| marks.count() == 0)
    }

    /// Writes it as a layer.
    ///
    /// # Errors
    /// [`LayerError`]: the tree cannot be read, or the tar cannot be written.
    pub fn write<W: Write>(
        &self,
        tar: &mut TarWriter<W>,
        around: &Surroundings<'_>,
    ) -> Result<LayerCounts> {
        let marks = self.marks.as_ref().map(Sorted::records).transpose()?.map(Iterator::peekable);
        let counts = LayerCounts::default();
        let mut writing = Writing { difference: self, tar, around, marks, above: vec![], counts };
        for entry in self.upper.entries()? {
            let entry = entry?;
            if !is_socket(&entry) {
                writing.entry(entry)?;
            }
        }
        Ok(writing.counts)
    }
}

/// The entries of two trees, side by side.
struct Pairs<'a> {
    lower: Peekable<Side<'a>>,
    upper: Peekable<Side<'a>>,
}

type Side<'a> = Box<dyn Iterator<Item = larder_sources::Result<Entry>> + 'a>;

/// What is at a path in the lower tree, in the upper one, or in both.
enum Pair {
    Gone(Box<Entry>),
    New(Box<Entry>),
    Both(Box<(Entry, Entry)>),
}

impl<'a> Pairs<'a> {
    fn new(lower: &'a Sources, upper: &'a Sources) -> Result<Self> {
        let side = |sources: &'a Sources| -> Result<Peekable<Side<'a>>> {
            let entries = sources.entries()?.filter(|entry| !entry.as_ref().is_ok_and(is_socket));
            let entries: Side<'a> = Box::new(entries);
            Ok(entries.peekable())
        };
        Ok(Self { lower: side(lower)?, upper: side(upper)? })
    }
}

impl Iterator for Pairs<'_> {
    type Item = larder_sources::Result<Pair>;

    fn next(&mut self) -> Option<Self::Item> {
        use std::cmp::Ordering::{Equal, Greater, Less};
        let order = match (self.lower.peek(), self.upper.peek()) {
            (None, None) => return None,
            (Some(Ok(lower)), Some(Ok(upper))) => lower.path.cmp(&upper.path),
            (Some(_), None) | (Some(Err(_)), _) => Less,
            (_, Some(_)) => Greater,
        };
        Some(match order {
            Less => self.lower.next()?.map(|lower| Pair::Gone(Box::new(lower))),
            Greater => self.upper.next()?.map(|upper| Pair::New(Box::new(upper))),
            Equal => match (self.lower.next()?, self.upper.next()?) {
                (Ok(lower), Ok(upper)) => Ok(Pair::Both(Box::new((lower, upper)))),
                (Err(e), _) | (_, Err(e)) => Err(e),
            },
        })
    }
}

/// A directory of both trees, and what became of the names that the lower one has in it.
struct Common {
    path: TreePath,
    gone: u64,
    stay: u64,
}

/// A comparison under way.
struct Comparing<'a> {
    lower: &'a Sources,
    upper: &'a Sources,
    around: &'a Surroundings<'a>,
    marks: Sorter,
    /// Directories of both trees on the way to the path at hand.
    directories: Vec<Common>,
    /// Something that the upper tree does not have as a directory, and of which all is gone.
    gone: Option<TreePath>,
    /// Names that both trees have, so far.
    names: u64,
    /// For each inode of several names, the number of the first name that both trees have.
    lower_names: HashMap<LinkGroup, u64>,
    upper_names: HashMap<LinkGroup, u64>,
    groups: HashSet<LinkGroup>,
}

impl Comparing<'_> {
    fn pair(&mut self, pair: Pair) -> Result<()> {
        self.around.check(0)?;
        match pair {
            Pair::Gone(lower) => self.is_gone(&lower),
            Pair::New(upper) => self.differs(&upper),
            Pair::Both(both) => self.both(&both.0, &both.1),
        }
    }

    fn is_gone(&mut self, entry: &Entry) -> Result<()> {
        if self.gone.as_ref().is_some_and(|gone| is_below(&entry.path, gone)) {
            return Ok(());
        }
        self.leave(Some(&entry.path))?;
        if entry.kind == Kind::Directory {
            self.gone = Some(entry.path.clone());
        }
        if let (Some(directory), Some((_, name))) =
            (self.directories.last_mut(), entry.path.split())
        {
            directory.gone += 1;
            self.marks.push(&[&key(&directory.path), GONE, name].concat(), &[])?;
        }
        Ok(())
    }

    fn both(&mut self, lower: &Entry, upper: &Entry) -> Result<()> {
        self.leave(Some(&upper.path))?;
        if let Some(directory) = self.directories.last_mut() {
            directory.stay += 1;
        }
        match (&lower.kind, &upper.kind) {
            (Kind::Directory, Kind::Directory) => {
                let path = upper.path.clone();
                self.directories.push(Common { path, gone: 0, stay: 0 });
            }
            (Kind::Directory, _) => self.gone = Some(upper.path.clone()),
            _ => {}
        }
        // The order counts: names are numbered whatever else differs.
        let same = self.same_inode(lower, upper) && same_attributes(lower, upper);
        if same && self.same_kind(lower, upper)? { Ok(()) } else { self.differs(upper) }
    }

    /// Is this name together with the same names on both sides, as far as both have them?
    fn same_inode(&mut self, lower: &Entry, upper: &Entry) -> bool {
        self.names += 1;
        let first = |names: &mut HashMap<LinkGroup, u64>, group: Option<LinkGroup>| {
            group.map_or(self.names, |group| *names.entry(group).or_insert(self.names))
        };
        first(&mut self.lower_names, lower.links) == first(&mut self.upper_names, upper.links)
    }

    fn same_kind(&self, lower: &Entry, upper: &Entry) -> Result<bool> {
        match (&lower.kind, &upper.kind) {
            (Kind::File { size: a, contents: x }, Kind::File { size: b, contents: y }) => {
                match (x, y) {
                    _ if a != b => Ok(false),
                    (Some(x), Some(y)) => self.same_contents(&upper.path, *a, x, y),
                    _ => Ok(x.is_none() && y.is_none()),
                }
            }
            (a, b) => Ok(a == b),
        }
    }

    fn same_contents(
        &self,
        path: &TreePath,
        size: u64,
        lower: &Locator,
        upper: &Locator,
    ) -> Result<bool> {
        let failed = |error| LayerError::Contents { path: shown(path), error };
        let mut lower = self.lower.open(lower).map_err(failed)?;
        let mut upper = self.upper.open(upper).map_err(failed)?;
        let (a, b) = (lower.place().map_err(failed)?, upper.place().map_err(failed)?);
        if a.is_some() && a == b {
            return Ok(true);
        }
        let parts = [lower.data().map_err(failed)?, upper.data().map_err(failed)?].concat();
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for part in in_order(parts, size) {
            let mut at = part.start;
            while at < part.end {
                let len = PIECE.min(part.end - at);
                self.around.check(len)?;
                let room = usize::try_from(len).expect("a piece");
                one.resize(room, 0);
                other.resize(room, 0);
                lower.read_exact_at(&mut one, at).map_err(failed)?;
                upper.read_exact_at(&mut other, at).map_err(failed)?;
                if one != other {
                    return Ok(false);
                }
                at += len;
            }
        }
        Ok(true)
    }

    fn differs(&mut self, entry: &Entry) -> Result<()> {
        match entry.links {
            Some(group) => {
                self.groups.insert(group);
            }
            None => self.marks.push(&key(&entry.path), &[])?,
        }
        Ok(())
    }

    /// Ends the directories that do not have `path`.
    fn leave(&mut self, path: Option<&TreePath>) -> Result<()> {
        let has = |directory: &Common| path.is_some_and(|path| is_below(path, &directory.path));
        while let Some(directory) = self.directories.pop_if(|directory| !has(directory)) {
            if directory.stay == 0 && directory.gone >= ENOUGH_TO_HIDE {
                self.marks.push(&[&key(&directory.path), GONE].concat(), &[])?;
            }
        }
        Ok(())
    }
}

/// A layer in the making.
struct Writing<'a, W> {
    difference: &'a Difference<'a>,
    tar: &'a mut TarWriter<W>,
    around: &'a Surroundings<'a>,
    marks: Option<Peekable<Records>>,
    /// Directories above the path at hand that are not in the layer. None has one below it that is.
    above: Vec<Entry>,
    counts: LayerCounts,
}

impl<W: Write> Writing<'_, W> {
    fn entry(&mut self, entry: Entry) -> Result<()> {
        self.around.check(0)?;
        self.above.retain(|directory| is_below(&entry.path, &directory.path));
        let key = key(&entry.path);
        let marked = match &mut self.marks {
            None => true,
            Some(marks) => next_if(marks, |mark| mark == key)?.is_some(),
        };
        let of_group = entry.links.is_some_and(|group| self.difference.groups.contains(&group));
        let path = entry.path.clone();
        if marked || of_group {
            self.put_with_above(&entry)?;
        } else if entry.kind == Kind::Directory {
            self.above.push(entry);
        }
        self.whiteouts(&path, &[&key, GONE].concat())
    }

    /// The names that are gone from a directory. Those of an opaque one come behind its mark, and
    /// need none of their own.
    fn whiteouts(&mut self, directory: &TreePath, prefix: &[u8]) -> Result<()> {
        let mut opaque = false;
        while let Some(marks) = &mut self.marks
            && let Some(mark) = next_if(marks, |mark| mark.starts_with(prefix))?
        {
            let name = &mark[prefix.len()..];
            let above = std::mem::take(&mut self.above);
            above.iter().try_for_each(|entry| self.put(entry))?;
            if !opaque {
                opaque = name.is_empty();
                let written = self.tar.whiteout(directory, Some(name).filter(|_| !opaque));
                written.map_err(|e| failed(directory, TarError::Output(e)))?;
                self.counts.whiteouts += 1;
            }
        }
        Ok(())
    }

    fn put_with_above(&mut self, entry: &Entry) -> Result<()> {
        let above = std::mem::take(&mut self.above);
        above.iter().chain([entry]).try_for_each(|entry| self.put(entry))
    }

    fn put(&mut self, entry: &Entry) -> Result<()> {
        let opened = match &entry.kind {
            Kind::File { contents: Some(locator), .. } => Some(self.difference.upper.open(locator)),
            _ => None,
        };
        let opened = opened.transpose();
        let opened =
            opened.map_err(|error| LayerError::Contents { path: shown(&entry.path), error });
        let mut counted = opened?.map(|contents| Counted {
            contents,
            around: self.around,
            moved: 0,
            stopped: false,
        });
        let written = match &mut counted {
            Some(contents) => self.tar.entry(entry, Some(contents)),
            None => self.tar.entry(entry, None),
        };
        if counted.as_ref().is_some_and(|contents| contents.stopped) {
            return Err(LayerError::Stopped);
        }
        written.map_err(|error| failed(&entry.path, error))?;
        self.counts.entries += 1;
        self.counts.bytes += counted.map_or(0, |contents| contents.moved);
        Ok(())
    }
}

/// Contents that can be stopped, and are counted.
struct Counted<'a> {
    contents: Box<dyn Contents>,
    around: &'a Surroundings<'a>,
    moved: u64,
    stopped: bool,
}

impl Contents for Counted<'_> {
    fn data(&mut self) -> io::Result<Vec<Range<u64>>> {
        self.contents.data()
    }

    fn read_exact_at(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let more = buf.len() as u64;
        if !(self.around.goes_on)(more) {
            self.stopped = true;
            return Err(io::Error::other(LayerError::Stopped));
        }
        self.moved += more;
        self.contents.read_exact_at(buf, offset)
    }
}

fn is_socket(entry: &Entry) -> bool {
    entry.kind == Kind::Socket
}

fn failed(path: &TreePath, error: TarError) -> LayerError {
    LayerError::Entry { path: shown(path), error }
}

/// What an unpacked layer shows of an inode besides its type and contents.
fn same_attributes(lower: &Entry, upper: &Entry) -> bool {
    let shown = |entry: &Entry| {
        let attributes = entry.attributes.clone();
        Attributes { accessed: None, changed: None, created: None, ..attributes }
    };
    shown(lower) == shown(upper)
}

/// The next mark, if it is one of those.
fn next_if(
    marks: &mut Peekable<Records>,
    is: impl Fn(&[u8]) -> bool,
) -> io::Result<Option<Vec<u8>>> {
    let next = marks.next_if(|mark| mark.as_ref().map_or(true, |(key, _)| is(key)));
    Ok(next.transpose()?.map(|(key, _)| key))
}

/// A path as bytes that sort as paths do.
fn key(path: &TreePath) -> Vec<u8> {
    path.as_bytes().iter().map(|&b| if b == b'/' { 0 } else { b }).collect()
}

fn is_below(path: &TreePath, directory: &TreePath) -> bool {
    let rest = path.as_bytes().strip_prefix(directory.as_bytes());
    !path.is_root() && (directory.is_root() || rest.is_some_and(|rest| rest.starts_with(b"/")))
}

/// Parts of a file in order, joined where they overlap.
fn in_order(mut parts: Vec<Range<u64>>, size: u64) -> Vec<Range<u64>> {
    parts.sort_unstable_by_key(|part| (part.start, part.end));
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(parts.len());
    for part in parts {
        let part = part.start..part.end.min(size);
        match joined.last_mut() {
            Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
            _ => joined.push(part),
        }
    }
    joined
}

fn shown(path: &TreePath) -> String {
    let path = path.as_bytes();
    if path.is_empty() { "/".to_owned() } else { path.escape_ascii().to_string() }
}
