//! Where a log's nodes are, and how a log is read.

use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::transaction::parse_root_item;
use crate::tree::{Pointer, Version, child_pointer};
use larder_format::{Generation, Key, KeyType, Logical, ObjectId, TreeId};
use std::collections::HashSet;

/// A log to which the superblock leads.
#[derive(Debug)]
pub(super) struct Log {
    /// The log of each subvolume, by the subvolume's id.
    pub(super) trees: Vec<(TreeId, Version)>,
    /// Addresses of all its nodes.
    pub(super) nodes: HashSet<Logical>,
}

/// An error in a log. It says what the caller can do.
pub(super) fn damaged(place: Place, what: impl std::fmt::Display) -> Error {
    Error::corrupt(
        Place { tree: Some(ObjectId::TREE_LOG), ..place },
        format!("the log cannot be replayed: {what}"),
    )
}

impl Log {
    /// Finds the log, if there is one. All its nodes are read and verified.
    ///
    /// # Errors
    /// Reading; `Corrupt` when a node is not what it should be.
    pub(super) fn find(core: &Core) -> Result<Option<Self>> {
        let (at, level, generation) = {
            let sb = core.superblock.lock();
            (sb.log_root.get(), sb.log_root_level, Generation(sb.generation.get()).next())
        };
        if at == 0 {
            return Ok(None);
        }
        let top = version(core, Pointer { at: Logical(at), generation, level, first_key: None });
        let mut log = Self { trees: Vec::new(), nodes: HashSet::new() };
        log.visit(core, &top)?;
        let mut roots = Vec::new();
        top.scan(&Key::MIN, &Key::MAX, |item| {
            let place = Place::item(ObjectId::TREE_LOG, item.key);
            if item.key.objectid != ObjectId::TREE_LOG || item.key.kind != KeyType::ROOT_ITEM {
                return Err(damaged(place, "an item that is not the root of a log"));
            }
            let root = parse_root_item(item)?;
            if root.root_generation() != generation {
                return Err(damaged(
                    place,
                    format!(
                        "its root is of transaction {}, not {generation}",
                        root.root_generation()
                    ),
                ));
            }
            roots.push((ObjectId(item.key.offset), crate::transaction::root_pointer(&root)));
            Ok(true)
        })?;
        for (subvol, root) in roots {
            let tree = version(core, root);
            log.visit(core, &tree)?;
            log.trees.push((subvol, tree));
        }
        Ok(Some(log))
    }

    /// Reads all nodes of a tree. A node must not be there twice: otherwise a damaged log could be
    /// longer than any disk.
    fn visit(&mut self, core: &Core, tree: &Version) -> Result<()> {
        let mut ahead = vec![tree.root.ptr];
        while let Some(ptr) = ahead.pop() {
            if !self.nodes.insert(ptr.at) {
                return Err(damaged(Place::block(ptr.at), "a node is in it twice"));
            }
            let node = core.store.get(&ptr, ObjectId::TREE_LOG)?;
            if node.level() > 0 {
                ahead.extend((0..node.view().nritems()).map(|slot| child_pointer(&node, slot)));
            }
        }
        Ok(())
    }
}

fn version(core: &Core, ptr: Pointer) -> Version {
    let any = core.roots.root.version(core.epochs.enter());
    Version { tree: ObjectId::TREE_LOG, ..any.at_root(ptr) }
}
