//! What must be true of every stream that sources give, whatever they say.
//!
//! No entry leads out of the tree. Paths rise, and each has its directory before it. Attributes are
//! such as Linux has. Contents can be read, and are as long as their entry says. The same sources
//! give the same stream with little memory, when the sorters work on disk. An error, too, is the
//! same, and has nothing that a terminal would obey.

use crate::hostile::tools::ask;
use larder_sources::{
    Attributes, Contents, Entry, Error, Kind, LinkGroup, Options, SourceSpec, Sources, TreePath,
};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::ops::Range;

/// Memory with which sorters spill nearly everything.
const LITTLE: usize = 4096;
/// Streams of more entries are not read a second time.
const MANY: usize = 2000;
/// Files of a stream whose contents are read.
const FILES: usize = 200;
/// Bytes that are read at each end of a file.
const PIECE: u64 = 64 << 10;

/// What was read.
pub(super) struct Read {
    pub(super) sources: Sources,
    pub(super) entries: Vec<Entry>,
}

/// Reads sources, and judges the stream that they give. `None`: they were refused.
pub(super) fn read<S: AsRef<str>>(given: &[S], options: &Options) -> Option<Read> {
    let specs: Result<Vec<_>, _> =
        given.iter().map(|source| SourceSpec::parse(OsStr::new(source.as_ref()))).collect();
    let specs = specs.map_err(|error| said(&error)).ok()?;
    let read = gathered(&specs, options);
    if read.as_ref().map_or(0, |read| read.entries.len()) <= MANY {
        let little = Options { memory: LITTLE, ..options.clone() };
        let again = gathered(&specs, &little);
        match (&read, again) {
            (Ok(read), Ok(again)) => {
                assert!(read.entries == again.entries, "hostile: another stream with little memory")
            }
            (Err(error), Err(again)) => assert_eq!(*error, again, "hostile: another error"),
            (Ok(_), Err(error)) => panic!("hostile: an error with little memory only: {error}"),
            (Err(error), Ok(_)) => panic!("hostile: no error with little memory: {error}"),
        }
    }
    read.ok()
}

fn gathered(specs: &[SourceSpec], options: &Options) -> Result<Read, String> {
    let refused = |error: Error| {
        said(&error);
        error.to_string()
    };
    let sources =
        ask("gather", options.memory, || Sources::gather(specs, options)).map_err(refused)?;
    sources.notes().iter().for_each(|note| is_plain(note));
    for layers in 0..sources.layers().len() {
        // A layer may change what only a later one has.
        let _ = judged(&sources, layers, options).map_err(refused);
    }
    let entries = judged(&sources, sources.layers().len(), options).map_err(refused)?;
    assert!(entries.len() as u64 <= sources.at_most(), "hostile: more entries than were announced");
    Ok(Read { sources, entries })
}

/// An error that people can be shown.
pub(super) fn said(error: &Error) {
    is_plain(&error.to_string());
    error.advice().iter().for_each(|advice| is_plain(advice));
}

fn is_plain(text: &str) {
    assert!(!text.chars().any(char::is_control), "hostile: a terminal would obey {text:?}");
}

fn judged(sources: &Sources, layers: usize, options: &Options) -> Result<Vec<Entry>, Error> {
    ask("entries", options.memory, || {
        let mut judge = Judge::default();
        let mut entries = Vec::new();
        let mut stream = sources.first_layers(layers)?;
        while let Some(entry) = stream.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    assert!(stream.next().is_none(), "hostile: a stream goes on after an error");
                    return Err(error);
                }
            };
            judge.entry(&entry);
            entries.push(entry);
        }
        assert!(!entries.is_empty(), "hostile: a tree without a root");
        entries.iter().filter_map(|entry| opened(sources, entry)).take(FILES).for_each(drop);
        Ok(entries)
    })
}

/// What came so far.
#[derive(Default)]
struct Judge {
    last: Option<TreePath>,
    /// The directories from the root to the entry before.
    directories: Vec<TreePath>,
    links: HashMap<LinkGroup, (Attributes, Kind)>,
}

impl Judge {
    fn entry(&mut self, entry: &Entry) {
        let Entry { path, attributes, kind, links } = entry;
        is_within(path);
        assert!(self.last.as_ref() < Some(path), "hostile: {path:?} comes behind {:?}", self.last);
        match path.split() {
            None => assert_eq!(*kind, Kind::Directory, "hostile: the root is no directory"),
            Some((parent, _)) => {
                while self.directories.last().is_some_and(|directory| *directory != parent) {
                    self.directories.pop();
                }
                assert!(!self.directories.is_empty(), "hostile: {path:?} has no directory");
            }
        }
        if *kind == Kind::Directory {
            self.directories.push(path.clone());
            assert_eq!(*links, None, "hostile: a directory with several names");
        }
        is_of_linux(attributes);
        is_possible(kind);
        if let Some(group) = links {
            let inode = (attributes.clone(), kind.clone());
            let first = self.links.entry(*group).or_insert_with(|| inode.clone());
            assert!(*first == inode, "hostile: {path:?} is not as the other names of its inode");
        }
        self.last = Some(path.clone());
    }
}

fn is_within(path: &TreePath) {
    let names = path.as_bytes().split(|&b| b == b'/');
    let sound = |name: &[u8]| {
        !matches!(name, b"" | b"." | b"..") && name.len() <= 255 && !name.contains(&0)
    };
    assert!(path.is_root() || names.into_iter().all(sound), "hostile: the path {path:?}");
}

fn is_of_linux(attributes: &Attributes) {
    let Attributes { uid, gid, permissions, modified, accessed, changed, created, xattrs, .. } =
        attributes;
    assert!(*uid != u32::MAX && *gid != u32::MAX, "hostile: nobody's user or group");
    assert!(permissions & !0o7777 == 0, "hostile: the permissions {permissions:o}");
    for time in [Some(*modified), *accessed, *changed, *created].into_iter().flatten() {
        assert!(time.nanoseconds < 1_000_000_000, "hostile: {time:?}");
    }
    assert!(xattrs.is_sorted_by(|a, b| a.0 < b.0), "hostile: attributes are not sorted");
    for (name, _) in xattrs {
        let sound = (1..=255).contains(&name.len()) && !name.contains(&0);
        assert!(sound, "hostile: an attribute named {name:?}");
    }
}

fn is_possible(kind: &Kind) {
    match kind {
        Kind::Symlink(target) => {
            let sound = (1..=4095).contains(&target.len()) && !target.contains(&0);
            assert!(sound, "hostile: a link of {} bytes", target.len());
        }
        Kind::CharDevice { major, minor } | Kind::BlockDevice { major, minor } => {
            assert!(*major < 1 << 12 && *minor < 1 << 20, "hostile: the device {major}:{minor}");
        }
        Kind::File { size, contents } => {
            assert_eq!(*size > 0, contents.is_some(), "hostile: a size without contents");
            assert!(i64::try_from(*size).is_ok(), "hostile: a file of {size} bytes");
        }
        Kind::Directory | Kind::Fifo | Kind::Socket => {}
    }
}

/// Reads both ends of a file. `None`: it is none.
fn opened(sources: &Sources, entry: &Entry) -> Option<()> {
    let Kind::File { size, contents: Some(at) } = &entry.kind else { return None };
    let mut contents = sources.open(at).expect("what was just read can be opened");
    let parts = contents.data().expect("parts of a file");
    assert!(parts.iter().all(|part| part.start < part.end), "hostile: an empty part");
    assert!(parts.is_sorted_by(|a, b| a.end <= b.start), "hostile: parts overlap: {parts:?}");
    let end = parts.last().map_or(0, |part| part.end);
    assert!(end <= *size, "hostile: a part ends at {end} of {size}");
    let head = bytes(&mut *contents, 0..PIECE.min(*size));
    bytes(&mut *contents, size - PIECE.min(*size)..*size);
    for (at, byte) in (0u64..).zip(&head) {
        let is_data = parts.iter().any(|part| part.contains(&at));
        assert!(is_data || *byte == 0, "hostile: a hole with data");
    }
    assert!(contents.read_exact_at(&mut [0; 1], *size).is_err(), "hostile: bytes behind the end");
    Some(())
}

/// Bytes of a file.
pub(super) fn bytes(contents: &mut dyn Contents, range: Range<u64>) -> Vec<u8> {
    let len = range.end - range.start;
    let mut bytes = vec![0xa5; usize::try_from(len).expect("a few")];
    contents.read_exact_at(&mut bytes, range.start).expect("bytes of a file");
    bytes
}
