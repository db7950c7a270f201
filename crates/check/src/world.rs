//! What every part of the check needs: the image, what is known about it so far, and where to
//! report.
//!
//! A [`World`] lives as long as the check. A [`Pass`] is one walk over all trees with a purpose:
//! the first pass reports what is wrong with nodes and items and fills the sums; later ones, made
//! only when sums disagree, look closer.

use crate::chunks::Chunks;
use crate::coverage::Coverage;
use crate::data::Data;
use crate::dump::Dump;
use crate::finding::{Finding, Findings, Kind};
use crate::lost::Lost;
use crate::owners::Owners;
use crate::progress::Meter;
use crate::refs::{Refs, Sink, Size};
use crate::sets::{Hashing, SectorSet};
use crate::source::{Edge, Source};
use larder_format::items::ExtentRef;
use larder_format::node::NodeView;
use larder_format::{DevItem, DeviceId, Incompat, Key, ObjectId, Superblock, TreeId};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The image and what is known about it.
pub(crate) struct World<'a> {
    pub(crate) source: Source<'a>,
    pub(crate) findings: &'a Findings,
    pub(crate) meter: &'a Meter<'a>,
    pub(crate) superblock: Box<Superblock>,
    /// The item that each device's superblock has of it.
    pub(crate) dev_items: BTreeMap<DeviceId, DevItem>,
    /// The superblocks of seeds.
    pub(crate) seeds: BTreeMap<DeviceId, Box<Superblock>>,
    /// Is it a metadata dump?
    pub(crate) dump: Option<Dump>,
    pub(crate) chunks: Chunks,
    pub(crate) hashing: Hashing,
    pub(crate) lost: Lost,
    /// Nodes whose children are referred to by parent.
    pub(crate) full_backref: SectorSet,
    /// Newest transaction of which another snapshot may share nodes.
    pub(crate) last_snapshot: AtomicU64,
    /// Features that were seen in use.
    pub(crate) features: AtomicU64,
    pub(crate) counts: Counts,
}

/// What there was to check.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) nodes: AtomicU64,
    pub(crate) extents: AtomicU64,
    pub(crate) inodes: AtomicU64,
    pub(crate) names: AtomicU64,
    pub(crate) file_extents: AtomicU64,
    pub(crate) data_bytes: AtomicU64,
}

impl World<'_> {
    pub(crate) fn generation(&self) -> u64 {
        self.superblock.generation().0
    }
    pub(crate) fn has(&self, feature: Incompat) -> bool {
        self.superblock.incompat().contains(feature)
    }
    /// Is it a dump whose chunks lie elsewhere than on the devices that it was made of?
    pub(crate) fn is_rewritten(&self) -> bool {
        self.dump.is_some_and(|d| d.rewritten)
    }
    pub(crate) fn add(&self, finding: Finding) {
        self.findings.add(finding);
    }
    /// Something in the image uses this feature.
    pub(crate) fn uses(&self, feature: Incompat) {
        if self.features.load(Relaxed) & feature.bits() != feature.bits() {
            self.features.fetch_or(feature.bits(), Relaxed);
        }
    }
}

/// One walk over all trees.
pub(crate) struct Pass<'a> {
    pub(crate) world: &'a World<'a>,
    /// Nodes met so far.
    pub(crate) seen: SectorSet,
    /// Report what is wrong with nodes and items.
    pub(crate) first: bool,
    pub(crate) refs: Refs<'a>,
    pub(crate) coverage: Option<&'a Coverage>,
    pub(crate) owners: Option<&'a Owners>,
    pub(crate) data: Option<&'a Data>,
}

impl<'a> Pass<'a> {
    /// A pass that reports and collects nothing.
    pub(crate) fn silent(world: &'a World<'a>) -> Self {
        Self {
            world,
            seen: SectorSet::new(),
            first: false,
            refs: Refs { hashing: &world.hashing, sink: Sink::None },
            coverage: None,
            owners: None,
            data: None,
        }
    }
    /// The same, but it reports.
    pub(crate) fn reporting(mut self) -> Self {
        self.first = true;
        self
    }
    /// Reports, if this is the pass that reports.
    pub(crate) fn add(&self, finding: impl FnOnce() -> Finding) {
        if self.first {
            self.world.findings.add(finding());
        }
    }
    /// An item that cannot be parsed. Its node's check has mostly said so already.
    pub(crate) fn invalid(
        &self,
        kind: Kind,
        edge: &Edge,
        key: Key,
        error: &larder_format::FormatError,
    ) {
        self.add(|| {
            Finding::new(kind, error.to_string()).tree(edge.tree).address(edge.at).key(key)
        });
    }
    /// A node points to a child.
    pub(crate) fn uses_child(&self, parent: NodeView<'_>, edge: &Edge) {
        if self.first {
            self.world.counts.nodes.fetch_add(1, Relaxed);
        }
        let by = if edge.tree.holds_files() && self.world.full_backref.contains(parent.bytenr().0) {
            ExtentRef::SharedBlock { parent: parent.bytenr() }
        } else {
            ExtentRef::TreeBlock { root: parent.owner() }
        };
        self.refs.used(
            edge.at,
            Size::Node(edge.level, edge.generation),
            by,
            edge.tree,
            edge.first_key,
        );
    }
    /// A root item or the superblock points to the root of a tree.
    pub(crate) fn uses_root(&self, edge: &Edge) {
        if self.first {
            self.world.counts.nodes.fetch_add(1, Relaxed);
        }
        let by = if edge.tree == ObjectId::TREE_RELOC {
            ExtentRef::SharedBlock { parent: edge.at }
        } else {
            ExtentRef::TreeBlock { root: edge.tree }
        };
        self.refs.used(edge.at, Size::Node(edge.level, edge.generation), by, edge.tree, None);
    }
    /// Part of a tree cannot be read.
    pub(crate) fn lost(&self, edge: &Edge) {
        if self.first {
            self.world.lost.add(edge);
        }
    }
    pub(crate) fn misplaced(&self, edge: &Edge, key: Key) {
        self.add(|| {
            let what = format!("an item of type {} has no place in tree {}", key.kind, edge.tree);
            Finding::new(Kind::ItemMisplaced, what).tree(edge.tree).address(edge.at).key(key)
        });
    }
}

/// A phrase for a tree.
pub(crate) fn tree_name(tree: TreeId) -> String {
    let name = match tree {
        ObjectId::ROOT_TREE => "root tree",
        ObjectId::EXTENT_TREE => "extent tree",
        ObjectId::CHUNK_TREE => "chunk tree",
        ObjectId::DEV_TREE => "device tree",
        ObjectId::FS_TREE => "top-level subvolume",
        ObjectId::CSUM_TREE => "checksum tree",
        ObjectId::QUOTA_TREE => "quota tree",
        ObjectId::UUID_TREE => "uuid tree",
        ObjectId::FREE_SPACE_TREE => "free-space tree",
        ObjectId::BLOCK_GROUP_TREE => "block-group tree",
        ObjectId::DATA_RELOC_TREE => "data relocation tree",
        ObjectId::TREE_RELOC => "relocation tree",
        ObjectId::TREE_LOG => "log tree",
        _ => return format!("tree {tree}"),
    };
    name.to_owned()
}
