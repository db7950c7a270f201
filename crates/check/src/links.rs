//! Facts about names: directory entries against the names that inodes record, types, orphans.
//!
//! Each entry and each recorded name adds a value to the sums of its subvolume, with opposite
//! signs; so do an entry's type and the inode's, an orphan item and an inode without links. A
//! subvolume whose sums are zero is consistent. Hidden here: what each fact adds, and that the same
//! facts go into a ledger by inode number, or are collected for some inodes, when [`crate::names`]
//! walks a subvolume again to see what is wrong with it.

use crate::sets::{Ledger, Uneven};
use crate::world::World;
use larder_format::ObjectId;
use larder_format::items::DirEntryRef;
use parking_lot::Mutex;

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
        ino: ObjectId,
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
pub(crate) const RECORDS: usize = 200_000;

/// Where facts about names go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LinkSink<'a> {
    Sum,
    Ledger(&'a Ledger),
    Records(&'a Uneven, &'a Mutex<Vec<(ObjectId, LinkRecord)>>),
}

/// A fact about an inode.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LinkRecord {
    Entry { dir: ObjectId, index: u64, name: Box<[u8]>, kind: u8 },
    Name { dir: ObjectId, index: u64, name: Box<[u8]> },
    Inode { kind: u8, nlink: u32 },
    Orphan,
}

/// What an entry adds to its directory's sum: the same for both of its items.
pub(crate) fn entry_value(world: &World<'_>, entry: &DirEntryRef<'_>) -> u64 {
    let l = entry.location;
    world.hashing.of(&(
        "entry",
        &*world.source.name(entry.name),
        l.objectid.0,
        l.kind.0,
        l.offset,
        entry.kind as u8,
    ))
}
