//! A closer look at names that do not add up.
//!
//! A subvolume whose sums ([`crate::links`]) are not zero is walked again, first into a ledger by
//! inode number, then collecting what concerns the few inodes that do not add up. Snapshots that
//! share the damage have the same sums, and only one of them is looked at. A directory whose two
//! lists of entries differ is read by itself.

use crate::files::Files;
use crate::finding::{Finding, Kind};
use crate::links::{LinkRecord, LinkSink, RECORDS, entry_value};
use crate::sets::{Group, Ledger};
use crate::source::Edge;
use crate::walk::{Memory, Walk, scan};
use crate::world::{Pass, World};
use larder_format::items::{DirEntries, DirEntryRef, FileType};
use larder_format::{Key, KeyType, ObjectId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicUsize;

/// Most subvolumes with damage of their own that are looked at closely.
pub(crate) const SUBVOLUMES: usize = 64;

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
    let pass = Pass::silent(world);
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

/// What was collected about one inode.
struct Suspect<'a> {
    world: &'a World<'a>,
    root: &'a Edge,
    ino: ObjectId,
    /// Type and links, if there is an inode item.
    inode: Option<(u8, u32)>,
    /// Part of the subvolume could not be read.
    broken: bool,
}

/// A name in a directory: the entries' index and type, the indices that the inode records.
#[derive(Default)]
struct BothSides {
    entries: Vec<(u64, u8)>,
    recorded: Vec<u64>,
}

fn explain_inode(
    world: &World<'_>,
    root: &Edge,
    ino: ObjectId,
    records: &[(ObjectId, LinkRecord)],
    broken: bool,
) {
    let inode = records.iter().find_map(|(_, r)| match r {
        LinkRecord::Inode { kind, nlink } => Some((*kind, *nlink)),
        _ => None,
    });
    let suspect = Suspect { world, root, ino, inode, broken };
    suspect.orphan(records.iter().any(|(_, r)| *r == LinkRecord::Orphan));
    let mut names: BTreeMap<(ObjectId, &[u8]), BothSides> = BTreeMap::new();
    for (_, record) in records {
        match record {
            LinkRecord::Entry { dir, index, name, kind } => {
                names.entry((*dir, name)).or_default().entries.push((*index, *kind));
            }
            LinkRecord::Name { dir, index, name } => {
                names.entry((*dir, name)).or_default().recorded.push(*index);
            }
            LinkRecord::Inode { .. } | LinkRecord::Orphan => {}
        }
    }
    for ((dir, name), sides) in names {
        suspect.name(dir, name, &sides);
    }
}

impl Suspect<'_> {
    fn add(&self, kind: Kind, key: Key, what: String) {
        let finding = Finding::new(kind, what).tree(self.root.tree).key(key);
        self.world.add(finding.follow_up_if(self.broken));
    }

    /// An inode without links has an orphan item, others have none.
    fn orphan(&self, has_item: bool) {
        let ino = self.ino;
        match (self.inode, has_item) {
            (Some((_, 0)), false) => {
                let what = format!("inode {ino} has no links and no orphan item");
                self.add(Kind::OrphanItemMissing, Key::new(ino, KeyType::INODE_ITEM, 0), what);
            }
            (None, true) => {
                let key = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, ino.0);
                self.add(Kind::OrphanItemStale, key, format!("there is no inode {ino}"));
            }
            _ => {}
        }
    }

    /// A name in a directory, from both sides.
    fn name(&self, dir: ObjectId, name: &[u8], sides: &BothSides) {
        let (ino, shown) = (self.ino, name.escape_ascii());
        for (n, (index, kind)) in sides.entries.iter().enumerate() {
            let key = Key::new(dir, KeyType::DIR_INDEX, *index);
            if self.inode.is_none() && sides.recorded.is_empty() {
                let what = format!(
                    "entry \"{shown}\" of directory {dir} leads to inode {ino}, which does not \
                        exist"
                );
                self.add(Kind::DirEntryWithoutInode, key, what);
                continue;
            }
            if let Some((is, _)) = self.inode.filter(|(is, _)| is != kind) {
                let what = format!(
                    "entry \"{shown}\" of directory {dir} says {}, inode {ino} is {}",
                    type_name(*kind),
                    type_name(is)
                );
                self.add(Kind::DirEntryType, key, what);
            }
            match sides.recorded.get(n) {
                None => {
                    let what = format!(
                        "inode {ino} does not record its name \"{shown}\" in directory {dir}"
                    );
                    self.add(Kind::InodeRefMissing, key, what);
                }
                Some(_) if sides.recorded.contains(index) => {}
                Some(other) => {
                    let what = format!(
                        "inode {ino} records index {other} for \"{shown}\" in directory {dir}, \
                            which has {index}"
                    );
                    self.add(Kind::InodeRefDiffers, key, what);
                }
            }
        }
        for index in sides.recorded.iter().skip(sides.entries.len()) {
            let key = Key::new(ino, KeyType::INODE_REF, dir.0);
            let what = format!(
                "inode {ino} records the name \"{shown}\" (index {index}) in directory {dir}, \
                    which has no such entry"
            );
            self.add(Kind::InodeRefWithoutEntry, key, what);
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
pub(crate) fn explain_directory(world: &World<'_>, root: &Edge, dir: ObjectId, broken: bool) {
    let ledger = Ledger::new();
    let (hashing, source) = (&world.hashing, &world.source);
    let each = |wanted: &mut dyn FnMut(bool, Key, &DirEntryRef<'_>)| {
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
        let group = Group(hashing.of(&&*source.name(entry.name)));
        let value = entry_value(world, entry);
        if is_index { ledger.subtract(group, value) } else { ledger.add(group, value) }
    });
    let Some(uneven) = ledger.uneven() else { return };
    let mut names: BTreeMap<Box<[u8]>, Both> = BTreeMap::new();
    each(&mut |is_index, key, entry| {
        let name = source.name(entry.name);
        if uneven.contains(Group(hashing.of(&&*name))) && names.len() < RECORDS {
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
