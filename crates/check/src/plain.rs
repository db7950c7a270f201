//! Trees whose items are compared elsewhere: here only their nodes count, and what may stand in
//! which tree.

use crate::coverage::Fact;
use crate::finding::Kind;
use crate::refs::Size;
use crate::source::{Edge, Node};
use crate::walk::Visit;
use crate::world::Pass;
use larder_format::items::inode::{S_IFDIR, S_IFMT, S_IFREG};
use larder_format::items::{ExtentRef, FileExtent, InodeItem};
use larder_format::node::NodeView;
use larder_format::{FileOffset, FormatError, Key, KeyType, LogicalRange, ObjectId, TreeId};

/// Walks a tree for the sake of its nodes.
pub(crate) struct Plain<'a> {
    pub(crate) pass: &'a Pass<'a>,
}

impl Visit for Plain<'_> {
    type Piece = ();
    const SHARED: bool = false;

    fn empty(&self) {}
    fn lost(&self, edge: &Edge) {
        self.pass.lost(edge);
    }
    fn child(&self, parent: NodeView<'_>, edge: &Edge) {
        self.pass.uses_child(parent, edge);
    }
    fn join(&self, _: &Edge, (): (), (): (), _: bool) {}
    fn leaf(&self, edge: &Edge, node: &Node, _: bool) {
        let view = node.view();
        for slot in 0..view.items().len() {
            let (Some(key), Some(data)) = (view.key(slot), view.data(slot)) else { continue };
            if !belongs(edge.tree, key) {
                self.pass.misplaced(edge, key);
            }
            match key.kind {
                KeyType::EXTENT_DATA if edge.tree == ObjectId::ROOT_TREE => {
                    self.cache_file(edge, view, key, data);
                }
                KeyType::INODE_ITEM if edge.tree == ObjectId::ROOT_TREE => {
                    self.inode(edge, key, data)
                }
                _ => {}
            }
        }
    }
}

impl Plain<'_> {
    /// The root tree has one directory; its files hold the version 1 space cache.
    fn inode(&self, edge: &Edge, key: Key, data: &[u8]) {
        // What cannot be parsed was said when the node was judged.
        let Ok(item) = InodeItem::parse(data) else { return };
        let expected =
            if key.objectid == ObjectId::ROOT_TREE_DIR { S_IFDIR } else { S_IFREG | 0o600 };
        let checked = if expected == S_IFDIR { S_IFMT } else { u32::MAX };
        let mode = item.mode.get();
        if mode & checked != expected {
            let e = FormatError::new(format!(
                "mode is {mode:o} in the root tree, expected {expected:o}"
            ));
            self.pass.invalid(Kind::InodeInvalid, edge, key, &e);
        }
    }

    /// The root tree's files hold the version 1 space cache, without checksums.
    fn cache_file(&self, edge: &Edge, view: NodeView<'_>, key: Key, data: &[u8]) {
        match FileExtent::parse(data) {
            Ok(FileExtent::Stored(r)) if !r.is_hole() => {
                let by =
                    ExtentRef::data(view.owner(), key.objectid, FileOffset(key.offset), r.offset);
                self.pass.refs.used(
                    r.disk_bytenr,
                    Size::Data(r.disk_num_bytes),
                    by,
                    edge.tree,
                    Some(key),
                );
                if let (Some(coverage), Some(chunk)) =
                    (self.pass.coverage, self.pass.world.chunks.find(r.disk_bytenr))
                {
                    let extent = LogicalRange::new(r.disk_bytenr, r.disk_num_bytes);
                    coverage.add(Fact::Spare, extent.intersection(chunk.range()));
                }
            }
            Ok(_) => {}
            Err(e) => self.pass.invalid(Kind::FileExtentInvalid, edge, key, &e),
        }
    }
}

/// May an item of this key stand in this tree? Trees that are not known may hold anything.
fn belongs(tree: TreeId, key: Key) -> bool {
    let kind = key.kind;
    match tree {
        ObjectId::CHUNK_TREE => matches!(kind, KeyType::DEV_ITEM | KeyType::CHUNK_ITEM),
        ObjectId::DEV_TREE => matches!(
            kind,
            KeyType::DEV_EXTENT
                | KeyType::PERSISTENT_ITEM
                | KeyType::DEV_REPLACE
                | KeyType::TEMPORARY_ITEM
        ),
        ObjectId::BLOCK_GROUP_TREE => kind == KeyType::BLOCK_GROUP_ITEM,
        ObjectId::FREE_SPACE_TREE => {
            matches!(
                kind,
                KeyType::FREE_SPACE_INFO | KeyType::FREE_SPACE_EXTENT | KeyType::FREE_SPACE_BITMAP
            )
        }
        ObjectId::UUID_TREE => matches!(kind, KeyType::UUID_SUBVOL | KeyType::UUID_RECEIVED_SUBVOL),
        ObjectId::QUOTA_TREE => matches!(
            kind,
            KeyType::QGROUP_STATUS
                | KeyType::QGROUP_INFO
                | KeyType::QGROUP_LIMIT
                | KeyType::QGROUP_RELATION
        ),
        ObjectId::ROOT_TREE => {
            matches!(
                kind,
                KeyType::ROOT_ITEM
                    | KeyType::ROOT_REF
                    | KeyType::ROOT_BACKREF
                    | KeyType::ORPHAN_ITEM
                    | KeyType::INODE_ITEM
                    | KeyType::INODE_REF
                    | KeyType::DIR_ITEM
                    | KeyType::DIR_INDEX
                    | KeyType::XATTR_ITEM
                    | KeyType::EXTENT_DATA
                    | KeyType::TEMPORARY_ITEM
                    | KeyType::PERSISTENT_ITEM
            ) || key.objectid == ObjectId::FREE_SPACE && kind == KeyType(0)
        }
        _ => true,
    }
}
