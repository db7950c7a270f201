//! Names between inodes: directory entries against the names that inodes record, types, orphans.
//!
//! Each entry and each recorded name adds a value to the sums of its subvolume, with opposite
//! signs; so do an entry's type and the inode's, an orphan item and an inode without links. A
//! subvolume whose sums are zero is consistent. For one that is not, its leaves are walked again,
//! first into a ledger by inode number, then collecting what concerns the few inodes that do not
//! add up. Snapshots that share the damage have the same sums, and only one of them is looked at.

use crate::files::{Files, entry_value};
use crate::finding::{Finding, Kind};
use crate::refs::{Refs, Sink};
use crate::sets::{Ledger, SectorSet, Uneven};
use crate::source::Edge;
use crate::walk::{Memory, Walk, scan};
use crate::world::{Pass, World};
use larder_format::items::{DirEntries, FileType};
use larder_format::{Key, KeyType, ObjectId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicUsize;

/// Sums over a range of a subvolume.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Zero if entries and inodes agree.
    pub(crate) links: u64,
    /// Of the entries that lead to subvolumes.
    pub(crate) subvolumes: u64,
    /// Transaction in which the newest of these entries was made.
    pub(crate) newest_subvolume: u64,
    /// Is there a top directory?
    pub(crate) has_top: bool,
    /// Was something not readable?
    pub(crate) broken: bool,
}

impl Totals {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            links: self.links.wrapping_add(other.links),
            subvolumes: self.subvolumes.wrapping_add(other.subvolumes),
            newest_subvolume: self.newest_subvolume.max(other.newest_subvolume),
            has_top: self.has_top | other.has_top,
            broken: self.broken | other.broken,
        }
    }
    /// Adds a value about an inode, to the sum or to wherever the pass collects.
    pub(crate) fn add(
        &mut self,
        sink: LinkSink<'_>,
        ino: u64,
        value: u64,
        record: impl FnOnce() -> LinkRecord,
    ) {
        match sink {
            LinkSink::Sum => self.links = self.links.wrapping_add(value),
            LinkSink::Ledger(ledger) => ledger.add(ino, value),
            LinkSink::Records(uneven, records) => {
                if uneven.contains(ino) {
                    let mut records = records.lock();
                    if records.len() < RECORDS {
                        records.push((ino, record()));
                    }
                }
            }
        }
    }
}

/// Most facts that are collected about the inodes of one subvolume.
const RECORDS: usize = 200_000;
/// Most subvolumes with damage of their own that are looked at closely.
pub(crate) const SUBVOLUMES: usize = 64;

/// Where facts about names go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LinkSink<'a> {
    Sum,
    Ledger(&'a Ledger),
    Records(&'a Uneven, &'a Mutex<Vec<(u64, LinkRecord)>>),
}

/// A fact about an inode.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LinkRecord {
    Entry { dir: u64, index: u64, name: Box<[u8]>, kind: u8 },
    Name { dir: u64, index: u64, name: Box<[u8]> },
    Inode { kind: u8, nlink: u32 },
    Orphan,
}

/// Looks closely at a subvolume whose sums are not zero.
pub(crate) fn explain(world: &World<'_>, root: &Edge, broken: bool) {
    let ledger = Ledger::new();
    walk(world, root, LinkSink::Ledger(&ledger));
    let Some(uneven) = ledger.uneven() else { return };
    let records = Mutex::default();
    walk(world, root, LinkSink::Records(&uneven, &records));
    let mut records = records.into_inner();
    if records.len() >= RECORDS {
        let what = format!("tree {}: more names are wrong than were looked at closely", root.tree);
        world.add(Finding::new(Kind::NotChecked, what).tree(root.tree));
    }
    records.sort();
    let mut rest = &records[..];
    while let Some((ino, _)) = rest.first() {
        let n = rest.partition_point(|(other, _)| other <= ino);
        explain_inode(world, root, *ino, &rest[..n], broken);
        rest = &rest[n..];
    }
}

fn walk(world: &World<'_>, root: &Edge, links: LinkSink<'_>) {
    let pass = Pass {
        world,
        seen: SectorSet::new(),
        first: false,
        refs: Refs { hashing: &world.hashing, sink: Sink::None },
        coverage: None,
        owners: None,
        data: None,
    };
    let uneven_dirs = Mutex::default();
    let files = Files {
        pass: &pass,
        root: *root,
        links,
        whole: true,
        uneven_dirs: &uneven_dirs,
        looked_up: Mutex::default(),
        extent_root: None,
        owners_asked: AtomicUsize::new(0),
    };
    let memory = Memory::new();
    let walk = Walk {
        source: &world.source,
        seen: &pass.seen,
        memory: &memory,
        visitor: &files,
        report: false,
    };
    walk.tree(root, None).finish(&files);
}

fn explain_inode(
    world: &World<'_>,
    root: &Edge,
    ino: u64,
    records: &[(u64, LinkRecord)],
    broken: bool,
) {
    let inode = records.iter().find_map(|(_, r)| match r {
        LinkRecord::Inode { kind, nlink } => Some((*kind, *nlink)),
        _ => None,
    });
    let orphan = records.iter().any(|(_, r)| *r == LinkRecord::Orphan);
    let add = |kind, key, what: String| {
        world.add(Finding::new(kind, what).tree(root.tree).key(key).follow_up_if(broken));
    };
    let inode_key = Key::new(ino, KeyType::INODE_ITEM, 0);
    match (inode, orphan) {
        (Some((_, 0)), false) => {
            add(
                Kind::OrphanItemMissing,
                inode_key,
                format!("inode {ino} has no links and no orphan item"),
            );
        }
        (None, true) => {
            let key = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, ino);
            add(Kind::OrphanItemStale, key, format!("there is no inode {ino}"));
        }
        _ => {}
    }
    // By directory and name: the entry's index and type, the recorded name's index.
    type Pair = (Vec<(u64, u8)>, Vec<u64>);
    let mut names: BTreeMap<(u64, &[u8]), Pair> = BTreeMap::new();
    for (_, record) in records {
        match record {
            LinkRecord::Entry { dir, index, name, kind } => {
                names.entry((*dir, name)).or_default().0.push((*index, *kind));
            }
            LinkRecord::Name { dir, index, name } => {
                names.entry((*dir, name)).or_default().1.push(*index);
            }
            LinkRecord::Inode { .. } | LinkRecord::Orphan => {}
        }
    }
    for ((dir, name), (entries, recorded)) in names {
        let shown = name.escape_ascii();
        for (n, (index, kind)) in entries.iter().enumerate() {
            let key = Key::new(dir, KeyType::DIR_INDEX, *index);
            match inode {
                None if recorded.is_empty() => {
                    let what = format!(
                        "entry \"{shown}\" of directory {dir} leads to inode {ino}, which does \
                            not exist"
                    );
                    add(Kind::DirEntryWithoutInode, key, what);
                    continue;
                }
                Some((is, _)) if is != *kind => {
                    let what = format!(
                        "entry \"{shown}\" of directory {dir} says {}, inode {ino} is {}",
                        type_name(*kind),
                        type_name(is)
                    );
                    add(Kind::DirEntryType, key, what);
                }
                _ => {}
            }
            match recorded.get(n) {
                None => {
                    let what = format!(
                        "inode {ino} does not record its name \"{shown}\" in directory {dir}"
                    );
                    add(Kind::InodeRefMissing, key, what);
                }
                Some(_) if recorded.contains(index) => {}
                Some(other) => {
                    let what = format!(
                        "inode {ino} records index {other} for \"{shown}\" in directory {dir}, \
                            which has {index}"
                    );
                    add(Kind::InodeRefDiffers, key, what);
                }
            }
        }
        for index in recorded.iter().skip(entries.len()) {
            let key = Key::new(ino, KeyType::INODE_REF, dir);
            let what = format!(
                "inode {ino} records the name \"{shown}\" (index {index}) in directory {dir}, \
                    which has no such entry"
            );
            add(Kind::InodeRefWithoutEntry, key, what);
        }
    }
}

fn type_name(kind: u8) -> &'static str {
    match FileType::from_disk(kind) {
        Ok(FileType::Regular) => "file",
        Ok(FileType::Directory) => "directory",
        Ok(FileType::CharDevice) => "character device",
        Ok(FileType::BlockDevice) => "block device",
        Ok(FileType::Fifo) => "fifo",
        Ok(FileType::Socket) => "socket",
        Ok(FileType::Symlink) => "symbolic link",
        _ => "an unknown type",
    }
}

/// An entry as one of its items has it.
type Seen = (Key, u8, Key);
/// All of a name's: by DIR_ITEM, by DIR_INDEX.
type Both = (Vec<Seen>, Vec<Seen>);

/// Looks closely at a directory whose DIR_ITEMs and DIR_INDEXes are not the same entries.
pub(crate) fn explain_directory(world: &World<'_>, root: &Edge, dir: u64, broken: bool) {
    let ledger = Ledger::new();
    let (hashing, source) = (&world.hashing, &world.source);
    let each = |wanted: &mut dyn FnMut(bool, Key, &larder_format::items::DirEntryRef<'_>)| {
        let from = Key::new(dir, KeyType::DIR_ITEM, 0);
        let to = Key::new(dir, KeyType::DIR_INDEX, u64::MAX);
        scan(&world.source, root, from, to, &mut |key, data| {
            if matches!(key.kind, KeyType::DIR_ITEM | KeyType::DIR_INDEX) {
                for entry in DirEntries::new(data).map_while(Result::ok) {
                    wanted(key.kind == KeyType::DIR_INDEX, key, &entry);
                }
            }
            ControlFlow::Continue(())
        });
    };
    each(&mut |is_index, _, entry| {
        let (group, value) = (hashing.of(&&*source.name(entry.name)), entry_value(world, entry));
        if is_index { ledger.subtract(group, value) } else { ledger.add(group, value) }
    });
    let Some(uneven) = ledger.uneven() else { return };
    let mut names: BTreeMap<Box<[u8]>, Both> = BTreeMap::new();
    each(&mut |is_index, key, entry| {
        let name = source.name(entry.name);
        if uneven.contains(hashing.of(&&*name)) && names.len() < RECORDS {
            let seen: Seen = (entry.location, entry.kind as u8, key);
            let (items, indexes) = names.entry((&*name).into()).or_default();
            if is_index { indexes.push(seen) } else { items.push(seen) }
        }
    });
    let add = |kind, key: Key, what: String| {
        world.add(Finding::new(kind, what).tree(root.tree).key(key).follow_up_if(broken));
    };
    for (name, (items, indexes)) in names {
        let shown = name.escape_ascii();
        match (&items[..], &indexes[..]) {
            ([item], [index]) if (item.0, item.1) != (index.0, index.1) => {
                let seen = |s: &Seen| format!("{} ({})", s.0, type_name(s.1));
                let what = format!(
                    "name \"{shown}\" is listed as {} and looked up as {}",
                    seen(index),
                    seen(item)
                );
                add(Kind::DirEntryDiffers, index.2, what);
            }
            ([], [index, ..]) => {
                let what =
                    format!("name \"{shown}\" is listed, but there is no item to look it up");
                add(Kind::DirItemMissing, index.2, what);
            }
            ([item, ..], []) => {
                let what = format!("name \"{shown}\" can be looked up, but is not listed");
                add(Kind::DirIndexMissing, item.2, what);
            }
            // Names of one length are not to be told apart where names are hidden.
            (_, [_, second, ..]) if !source.names_hidden() => {
                let what = format!("name \"{shown}\" is listed {} times", indexes.len());
                add(Kind::DirNameDuplicate, second.2, what);
            }
            _ => {}
        }
    }
}
