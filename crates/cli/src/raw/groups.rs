//! Block groups, from wherever the image keeps them.

use super::Session;
use larder_format::items::{BlockGroupFlags, BlockGroupItem};
use larder_format::{CompatRo, Key, KeyType, Logical, ObjectId};
use std::ops::ControlFlow;

/// A block group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) start: Logical,
    pub(crate) length: u64,
    pub(crate) used: u64,
    pub(crate) flags: BlockGroupFlags,
}

/// All block groups, by address.
pub(crate) fn read_groups(s: &Session<'_>) -> Vec<Group> {
    let own = s.reader.superblock().compat_ro().contains(CompatRo::BLOCK_GROUP_TREE);
    let id = if own { ObjectId::BLOCK_GROUP_TREE } else { ObjectId::EXTENT_TREE };
    let mut groups = Vec::new();
    let Some(tree) = s.trees.tree(id) else {
        s.problems.add(format!("tree {id}, which has the block groups, is missing"));
        return groups;
    };
    if !own {
        // They stand among millions of extents; chunks say where.
        for chunk in s.reader.volume().map().chunks() {
            let low = Key::new(chunk.start, KeyType::BLOCK_GROUP_ITEM, 0);
            let gaps = tree.walk(s.reader, low, Key { offset: u64::MAX, ..low }, &mut |item| {
                add(s, &mut groups, item.key, item.data);
                ControlFlow::Continue(())
            });
            s.problems.gaps(gaps);
        }
        return groups;
    }
    let gaps = tree.walk(s.reader, Key::MIN, Key::MAX, &mut |item| {
        add(s, &mut groups, item.key, item.data);
        ControlFlow::Continue(())
    });
    s.problems.gaps(gaps);
    groups
}

fn add(s: &Session<'_>, groups: &mut Vec<Group>, key: Key, data: &[u8]) {
    if key.kind != KeyType::BLOCK_GROUP_ITEM {
        return;
    }
    match BlockGroupItem::parse(key.offset, data) {
        Ok(g) => groups.push(Group {
            start: Logical(key.objectid.0),
            length: key.offset,
            used: g.used.get(),
            flags: g.kind(),
        }),
        Err(e) => s.problems.add(format!("block group at {}: {e}", key.objectid)),
    }
}
