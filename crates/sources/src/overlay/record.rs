//! What sources say about paths, as records that can be sorted.
//!
//! A key is a path, then a time, then the type of the record. Times count what sources say, from
//! the first to the last, so that a later time lies over an earlier one. Keys sort as bytes in the
//! order of [`TreePath`], and what is said about one path sorts by time: a separator of paths
//! becomes a NUL, which no name has, and two NULs end the path.
//!
//! All records go to disk and come back within one process, so their form may change at any time.
//! What is read back was written here. Reading therefore asserts that it fits.

use crate::change::Change;
use crate::{Attributes, Kind, LinkGroup, Locator, SourceNumber, Time, TreePath};

/// When something was said, among all that sources say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Moment(pub(crate) u64);

/// An inode as a source describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) attributes: Attributes,
    pub(crate) kind: Kind,
    pub(crate) links: Option<LinkGroup>,
}

impl Node {
    /// A directory that no source describes.
    pub(crate) fn implicit_directory(time: Time) -> Self {
        let attributes = Attributes { permissions: 0o755, modified: time, ..Attributes::default() };
        Self { attributes, kind: Kind::Directory, links: None }
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.kind == Kind::Directory
    }
}

/// What a patch expects to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// Anything.
    Any,
    /// A regular file.
    File,
    /// Anything, or nothing: then the patch does nothing.
    Optional,
    /// A directory. Where there is none, it is made.
    Directory,
}

/// A change of what earlier sources said about a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Patch {
    pub(crate) expected: Expected,
    pub(crate) changes: Vec<Change>,
}

/// What a source says about a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// The node that is put at this moment has a link elsewhere.
    Linked,
    /// What the link of this moment leads to.
    Resolved(Box<Node>),
    /// Nothing of earlier sources is here.
    Whiteout,
    /// Nothing of earlier sources is below.
    Opaque,
    /// Something is named that lies below.
    Through,
    /// Something is put below. A directory is made if there is none.
    Parent,
    /// This is here.
    Put(Box<Node>),
    /// The inode of another path is here.
    Link(TreePath),
    /// What is here is changed.
    Patch(Patch),
}

impl Record {
    /// Records of one path and moment sort by it.
    fn rank(&self) -> u8 {
        match self {
            Self::Linked => 0,
            Self::Resolved(_) => 1,
            Self::Whiteout => 2,
            Self::Opaque => 3,
            Self::Through => 4,
            Self::Parent => 5,
            Self::Put(_) => 6,
            Self::Link(_) => 7,
            Self::Patch(_) => 8,
        }
    }

    /// The record's key.
    pub(crate) fn key(&self, path: &TreePath, at: Moment) -> Vec<u8> {
        key(path, at, self.rank())
    }

    /// The record's value.
    pub(crate) fn value(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        match self {
            Self::Resolved(node) | Self::Put(node) => out.node(node),
            Self::Link(target) => out.bytes(target.as_bytes()),
            Self::Patch(patch) => out.patch(patch),
            Self::Linked | Self::Whiteout | Self::Opaque | Self::Through | Self::Parent => {}
        }
        out.0
    }

    /// What [`Record::value`] wrote, with the rank from its key.
    pub(crate) fn read(rank: u8, value: &[u8]) -> Self {
        let mut from = Reader(value);
        match rank {
            0 => Self::Linked,
            1 => Self::Resolved(Box::new(from.node())),
            2 => Self::Whiteout,
            3 => Self::Opaque,
            4 => Self::Through,
            5 => Self::Parent,
            6 => Self::Put(Box::new(from.node())),
            7 => Self::Link(from.path()),
            8 => Self::Patch(from.patch()),
            _ => unreachable!("a record of rank {rank}"),
        }
    }
}

/// A link that asks what is at another path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    /// Where the link is.
    pub(crate) link: TreePath,
    /// When it was made. The answer belongs to its record of this moment.
    pub(crate) at: Moment,
}

impl Ask {
    /// Sorts beside the records of the target, behind all that was said before the link. A link is
    /// made at a moment of its own, and asks at the one before.
    pub(crate) fn key(target: &TreePath, link: Moment) -> Vec<u8> {
        key(target, Moment(link.0 - 1), u8::MAX)
    }

    pub(crate) fn value(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        out.number(self.at.0);
        out.bytes(self.link.as_bytes());
        out.0
    }

    pub(crate) fn read(value: &[u8]) -> Self {
        let mut from = Reader(value);
        let at = Moment(from.number());
        Self { link: from.path(), at }
    }
}

/// Bytes of a key behind the path: its end, a moment, a rank.
const TAIL: usize = 2 + 8 + 1;

/// The part of a key that is the path, with its end.
pub(crate) fn path_key(path: &TreePath) -> Vec<u8> {
    let mut key = Vec::with_capacity(path.as_bytes().len() + TAIL);
    key.extend(path.as_bytes().iter().map(|&b| if b == b'/' { 0 } else { b }));
    key.extend([0, 0]);
    key
}

fn key(path: &TreePath, at: Moment, rank: u8) -> Vec<u8> {
    let mut key = path_key(path);
    key.extend(at.0.to_be_bytes());
    key.push(rank);
    key
}

/// A key's path as [`path_key`] made it, without its end; its moment and rank.
pub(crate) fn parts(key: &[u8]) -> (&[u8], Moment, u8) {
    let (path, tail) = key.split_at(key.len() - TAIL);
    let moment = u64::from_be_bytes(tail[2..10].try_into().expect("eight bytes"));
    (path, Moment(moment), tail[10])
}

/// The path of a key.
pub(crate) fn path_of(key: &[u8]) -> TreePath {
    let slashes: Vec<u8> = key.iter().map(|&b| if b == 0 { b'/' } else { b }).collect();
    TreePath::new(&slashes).expect("a path was written")
}

/// A path and what is there, for a sorter of a reader's own.
pub(crate) fn write_name(path: &TreePath, node: &Node) -> Vec<u8> {
    let mut out = Writer(Vec::new());
    out.bytes(path.as_bytes());
    out.node(node);
    out.0
}

/// What [`write_name`] wrote.
pub(crate) fn read_name(value: &[u8]) -> (TreePath, Node) {
    let mut from = Reader(value);
    (from.path(), from.node())
}

/// Changes as the value of a record.
pub(crate) fn write_changes(changes: &[Change]) -> Vec<u8> {
    let mut out = Writer(Vec::new());
    out.changes(changes);
    out.0
}

/// What [`write_changes`] wrote.
pub(crate) fn read_changes(value: &[u8]) -> Vec<Change> {
    Reader(value).changes()
}

struct Writer(Vec<u8>);

impl Writer {
    /// Seven bits a byte, the lowest first.
    fn number(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn time(&mut self, time: Time) {
        // Small numbers of either sign become small numbers without one.
        self.number(((time.seconds << 1) ^ (time.seconds >> 63)).cast_unsigned());
        self.number(time.nanoseconds.into());
    }

    fn some_time(&mut self, time: Option<Time>) {
        self.0.push(time.is_some().into());
        if let Some(time) = time {
            self.time(time);
        }
    }

    fn node(&mut self, node: &Node) {
        let Node { attributes, kind, links } = node;
        self.number(attributes.uid.into());
        self.number(attributes.gid.into());
        self.number(attributes.permissions.into());
        self.time(attributes.modified);
        self.some_time(attributes.accessed);
        self.some_time(attributes.changed);
        self.some_time(attributes.created);
        self.number(attributes.inode_flags);
        self.number(attributes.xattrs.len() as u64);
        for (name, value) in &attributes.xattrs {
            self.bytes(name);
            self.bytes(value);
        }
        self.kind(kind);
        self.number(links.map_or(0, |LinkGroup(group)| group + 1));
    }

    fn kind(&mut self, kind: &Kind) {
        match kind {
            Kind::Directory => self.0.push(0),
            Kind::File { size, contents } => {
                self.0.push(if contents.is_some() { 2 } else { 1 });
                self.number(*size);
                if let Some(Locator { source, key }) = contents {
                    self.number(source.0.into());
                    self.bytes(key);
                }
            }
            Kind::Symlink(target) => {
                self.0.push(3);
                self.bytes(target);
            }
            Kind::CharDevice { major, minor } => self.device(4, *major, *minor),
            Kind::BlockDevice { major, minor } => self.device(5, *major, *minor),
            Kind::Fifo => self.0.push(6),
            Kind::Socket => self.0.push(7),
        }
    }

    fn device(&mut self, tag: u8, major: u32, minor: u32) {
        self.0.push(tag);
        self.number(major.into());
        self.number(minor.into());
    }

    fn patch(&mut self, patch: &Patch) {
        self.0.push(match patch.expected {
            Expected::Any => 0,
            Expected::File => 1,
            Expected::Optional => 2,
            Expected::Directory => 3,
        });
        self.changes(&patch.changes);
    }

    fn changes(&mut self, changes: &[Change]) {
        self.number(changes.len() as u64);
        for change in changes {
            self.change(change);
        }
    }

    fn change(&mut self, change: &Change) {
        let mut numbers = |tag: u8, numbers: &[u64]| {
            self.0.push(tag);
            numbers.iter().for_each(|&n| self.number(n));
        };
        match change {
            Change::Uid(uid) => numbers(0, &[(*uid).into()]),
            Change::Gid(gid) => numbers(1, &[(*gid).into()]),
            Change::Permissions { clear, set } => numbers(2, &[(*clear).into(), (*set).into()]),
            Change::ExecuteIfAny(bits) => numbers(3, &[(*bits).into()]),
            Change::InodeFlags(flags) => numbers(4, &[*flags]),
            Change::Modified(time) => {
                self.0.push(5);
                self.time(*time);
            }
            Change::Xattr(name, value) => {
                self.0.push(6);
                self.bytes(name);
                self.bytes(value);
            }
            Change::NoXattr(name) => {
                self.0.push(7);
                self.bytes(name);
            }
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> u8 {
        let (&first, rest) = self.0.split_first().expect("a record is whole");
        self.0 = rest;
        first
    }

    fn number(&mut self) -> u64 {
        let mut n = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte();
            n |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        n
    }

    fn small(&mut self) -> u32 {
        u32::try_from(self.number()).expect("a record is whole")
    }

    fn bytes(&mut self) -> Vec<u8> {
        let len = usize::try_from(self.number()).expect("a record is whole");
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        bytes.to_vec()
    }

    fn path(&mut self) -> TreePath {
        TreePath::new(&self.bytes()).expect("a path was written")
    }

    fn time(&mut self) -> Time {
        let n = self.number();
        let seconds = (n >> 1).cast_signed() ^ -(n & 1).cast_signed();
        Time { seconds, nanoseconds: self.small() }
    }

    fn some_time(&mut self) -> Option<Time> {
        (self.byte() != 0).then(|| self.time())
    }

    fn node(&mut self) -> Node {
        let attributes = Attributes {
            uid: self.small(),
            gid: self.small(),
            permissions: self.small(),
            modified: self.time(),
            accessed: self.some_time(),
            changed: self.some_time(),
            created: self.some_time(),
            inode_flags: self.number(),
            xattrs: (0..self.number()).map(|_| (self.bytes(), self.bytes())).collect(),
        };
        let kind = self.kind();
        let links = self.number().checked_sub(1).map(LinkGroup);
        Node { attributes, kind, links }
    }

    fn kind(&mut self) -> Kind {
        match self.byte() {
            0 => Kind::Directory,
            1 => Kind::File { size: self.number(), contents: None },
            2 => {
                let size = self.number();
                let source = SourceNumber(self.small());
                Kind::File { size, contents: Some(Locator { source, key: self.bytes() }) }
            }
            3 => Kind::Symlink(self.bytes()),
            4 => Kind::CharDevice { major: self.small(), minor: self.small() },
            5 => Kind::BlockDevice { major: self.small(), minor: self.small() },
            6 => Kind::Fifo,
            7 => Kind::Socket,
            tag => unreachable!("a kind of tag {tag}"),
        }
    }

    fn patch(&mut self) -> Patch {
        let expected = match self.byte() {
            0 => Expected::Any,
            1 => Expected::File,
            2 => Expected::Optional,
            3 => Expected::Directory,
            tag => unreachable!("a patch of tag {tag}"),
        };
        Patch { expected, changes: self.changes() }
    }

    fn changes(&mut self) -> Vec<Change> {
        (0..self.number()).map(|_| self.change()).collect()
    }

    fn change(&mut self) -> Change {
        match self.byte() {
            0 => Change::Uid(self.small()),
            1 => Change::Gid(self.small()),
            2 => Change::Permissions { clear: self.small(), set: self.small() },
            3 => Change::ExecuteIfAny(self.small()),
            4 => Change::InodeFlags(self.number()),
            5 => Change::Modified(self.time()),
            6 => Change::Xattr(self.bytes(), self.bytes()),
            7 => Change::NoXattr(self.bytes()),
            tag => unreachable!("a change of tag {tag}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn some_path() -> impl Strategy<Value = TreePath> {
        prop::collection::vec("[a-b!-0]{1,2}", 0..4)
            .prop_filter_map("dots", |names| TreePath::new(names.join("/").as_bytes()))
    }

    fn some_time() -> impl Strategy<Value = Time> {
        (any::<i64>(), 0..1_000_000_000u32)
            .prop_map(|(seconds, nanoseconds)| Time { seconds, nanoseconds })
    }

    fn some_kind() -> impl Strategy<Value = Kind> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..9);
        prop_oneof![
            Just(Kind::Directory),
            any::<u64>().prop_map(|size| Kind::File { size, contents: None }),
            (any::<u64>(), any::<u32>(), bytes()).prop_map(|(size, source, key)| Kind::File {
                size,
                contents: Some(Locator { source: SourceNumber(source), key }),
            }),
            bytes().prop_map(Kind::Symlink),
            any::<(u32, u32)>().prop_map(|(major, minor)| Kind::CharDevice { major, minor }),
            any::<(u32, u32)>().prop_map(|(major, minor)| Kind::BlockDevice { major, minor }),
            Just(Kind::Fifo),
            Just(Kind::Socket),
        ]
    }

    fn some_node() -> impl Strategy<Value = Node> {
        let times = (some_time(), prop::option::of(some_time()), prop::option::of(some_time()));
        let xattrs = prop::collection::vec(("[a-c]{1,4}", "[a-c]{0,4}"), 0..3);
        let numbers = any::<(u32, u32, u32, u64)>();
        let links = prop::option::of(0..u64::MAX - 1);
        (times, xattrs, numbers, some_kind(), links).prop_map(
            |(
                (modified, accessed, changed),
                xattrs,
                (uid, gid, permissions, flags),
                kind,
                links,
            )| {
                let xattrs =
                    xattrs.into_iter().map(|(n, v)| (n.into_bytes(), v.into_bytes())).collect();
                let created = changed;
                let attributes = Attributes {
                    uid,
                    gid,
                    permissions,
                    modified,
                    accessed,
                    changed,
                    created,
                    xattrs,
                    inode_flags: flags,
                };
                Node { attributes, kind, links: links.map(LinkGroup) }
            },
        )
    }

    proptest! {
        #[test]
        fn keys_sort_as_paths_do(a in some_path(), b in some_path(), at in any::<(u64, u64)>()) {
            let keys = (key(&a, Moment(at.0), 3), key(&b, Moment(at.1), 5));
            let expected = a.cmp(&b).then(at.0.cmp(&at.1)).then(3.cmp(&5));
            prop_assert_eq!(keys.0.cmp(&keys.1), expected);
            let (path, moment, rank) = parts(&keys.0);
            prop_assert_eq!((path_of(path), moment, rank), (a, Moment(at.0), 3));
        }

        #[test]
        fn what_is_written_is_read(node in some_node(), path in some_path(), time in some_time()) {
            let changes = vec![
                Change::Uid(7),
                Change::Gid(u32::MAX),
                Change::Permissions { clear: 0o7777, set: 0o4755 },
                Change::ExecuteIfAny(0o110),
                Change::InodeFlags(u64::MAX),
                Change::Modified(time),
                Change::Xattr(b"user.a".to_vec(), b"b".to_vec()),
                Change::NoXattr(b"user.c".to_vec()),
            ];
            for record in [
                Record::Linked,
                Record::Resolved(Box::new(node.clone())),
                Record::Whiteout,
                Record::Opaque,
                Record::Through,
                Record::Parent,
                Record::Put(Box::new(node)),
                Record::Link(path.clone()),
                Record::Patch(Patch { expected: Expected::Directory, changes }),
            ] {
                prop_assert_eq!(Record::read(record.rank(), &record.value()), record);
            }
            let ask = Ask { link: path, at: Moment(300) };
            prop_assert_eq!(Ask::read(&ask.value()), ask);
        }
    }
}
