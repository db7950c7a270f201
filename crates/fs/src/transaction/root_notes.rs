//! What operations want done in the root tree, which they may not touch.
//!
//! A running transaction collects these wishes ([`RootNotes`]) as *final states*: where a subvolume
//! hangs, what its ROOT_ITEM is to say. So if one transaction makes, moves and deletes a subvolume,
//! the commit has one change to make, or none. Until the transaction is published, look-ups find
//! the links elsewhere first ([`crate::engine::Links`]), because the root tree may still have older
//! ones.

use crate::api::{Timestamp, to_timespec};
use crate::transaction::SubvolumeTree;
use larder_format::items::{RootFlags, RootItem, RootRef};
use larder_format::{Generation, Key, KeyType, ObjectId, TreeId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use zerocopy::FromZeros;

/// Where a subvolume hangs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// The subvolume that has its entry.
    pub(crate) parent: TreeId,
    /// The directory of the entry.
    pub(crate) dir: ObjectId,
    /// Index of the entry.
    pub(crate) index: u64,
    /// Its name.
    pub(crate) name: Vec<u8>,
}

impl Link {
    /// The link as ROOT_REF and ROOT_BACKREF have it.
    pub(crate) fn encode(&self) -> Vec<u8> {
        RootRef { dirid: self.dir, sequence: self.index, name: &self.name }.encode()
    }
}

/// What is to change in a ROOT_ITEM, apart from the root itself.
#[derive(Debug, Default)]
pub(crate) struct RootChange {
    /// Read-only or not.
    pub(crate) read_only: Option<bool>,
    /// Deleted: to be dropped in the background.
    pub(crate) deleted: bool,
    /// Where it was received from.
    pub(crate) received: Option<Received>,
}

impl RootChange {
    fn apply(&self, item: &mut RootItem) {
        let mut flags = item.root_flags();
        if let Some(read_only) = self.read_only {
            flags.set(RootFlags::RDONLY, read_only);
        }
        if self.deleted {
            flags |= RootFlags::DEAD;
            item.refs = 0.into();
            item.drop_progress.zero();
            item.drop_level = 0;
        }
        item.set_root_flags(flags);
        if let Some(received) = &self.received {
            received.apply(item);
        }
    }
}

/// What the commit of a transaction is to do in the root tree.
#[derive(Debug, Default)]
pub(crate) struct RootNotes {
    /// Subvolumes that hang elsewhere than before, or nowhere any more.
    pub(crate) links: BTreeMap<TreeId, Option<Link>>,
    /// ROOT_ITEMs to change.
    changes: BTreeMap<TreeId, (Arc<SubvolumeTree>, RootChange)>,
    /// How far trees have been dropped.
    pub(crate) drops: BTreeMap<DeadTree, Progress>,
    /// New default subvolume.
    pub(crate) default: Option<TreeId>,
    /// The item of the balance that is under way, or that there is none any more.
    pub(crate) balance: Option<Option<Box<[u8]>>>,
    /// New snapshots, and subvolumes in which nothing has changed except that a snapshot was taken.
    pub(crate) untouched: BTreeSet<TreeId>,
}

impl RootNotes {
    /// What is to change in a subvolume's ROOT_ITEM.
    pub(crate) fn root(&mut self, subvol: &Arc<SubvolumeTree>) -> &mut RootChange {
        &mut self
            .changes
            .entry(subvol.id)
            .or_insert_with(|| (subvol.clone(), RootChange::default()))
            .1
    }
    /// Makes the changes that were noted for a ROOT_ITEM, and forgets them.
    pub(crate) fn change(&mut self, id: TreeId, item: &mut RootItem) {
        if let Some((_, change)) = self.changes.remove(&id) {
            change.apply(item);
        }
    }
    /// The next subvolume whose ROOT_ITEM is still to be changed.
    pub(crate) fn first_change(&self) -> Option<Arc<SubvolumeTree>> {
        self.changes.values().next().map(|(subvol, _)| subvol.clone())
    }
}

/// Where a subvolume was received from. All zero: from nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// The sent subvolume's uuid.
    pub uuid: [u8; 16],
    /// Its transaction when it was sent.
    pub stransid: Generation,
    /// The transaction here that received it.
    pub rtransid: Generation,
    /// When it was sent.
    pub stime: Timestamp,
    /// When it was received.
    pub rtime: Timestamp,
}

impl Received {
    pub(crate) fn apply(&self, item: &mut RootItem) {
        item.received_uuid = self.uuid;
        item.stransid = self.stransid.0.into();
        item.rtransid = self.rtransid.0.into();
        item.stime = to_timespec(self.stime);
        item.rtime = to_timespec(self.rtime);
    }
}

/// A tree that is to be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum DeadTree {
    /// A subvolume that was deleted.
    Subvolume(TreeId),
    /// A tree in which Linux was moving the blocks of this one.
    Relocation(TreeId),
}

impl DeadTree {
    /// The id by which the tree is known.
    pub(crate) fn id(self) -> TreeId {
        match self {
            Self::Subvolume(id) => id,
            Self::Relocation(_) => ObjectId::TREE_RELOC,
        }
    }
    /// Its ROOT_ITEM is the last one up to this key.
    pub(crate) fn last_key(self) -> Key {
        let offset = match self {
            Self::Subvolume(_) => u64::MAX,
            Self::Relocation(of) => of.0,
        };
        Key::new(self.id(), KeyType::ROOT_ITEM, offset)
    }
    /// Is this the key of its ROOT_ITEM?
    pub(crate) fn is_at(self, key: &Key) -> bool {
        let last = self.last_key();
        let fits = matches!(self, Self::Subvolume(_)) || key.offset == last.offset;
        key.objectid == last.objectid && key.kind == last.kind && fits
    }
}

impl std::fmt::Display for DeadTree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Subvolume(id) => write!(f, "deleted subvolume {id}"),
            Self::Relocation(of) => write!(f, "tree in which Linux was moving blocks of tree {of}"),
        }
    }
}

/// How far a tree has been dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The next child is the one with this key in a node of this level.
    At {
        /// Its key.
        key: Key,
        /// Level of the node that points to it.
        level: u8,
    },
    /// Nothing is left.
    Done,
}
