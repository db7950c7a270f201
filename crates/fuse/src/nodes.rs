//! Inode numbers of a mount.
//!
//! A mount has one device number however many subvolumes it shows, so inode numbers must be unique
//! across them: programs tell hard links by (device, number). The same number is the node id by
//! which the kernel names an inode to us, except for the root of the mount, whose node id is 1.
//!
//! - The top-level subvolume: as on disk, below 2^48.
//! - Any other: subvolume << 40 | number, which begins at 2^48, while the one is below 2^23 and the
//!   other below 2^40.
//! - An inode that does not fit gets the next number from 2^63 on, and keeps it as long as the
//!   mount lives.

use larder_format::TreeId;
use larder_fs::InodeId;
use parking_lot::RwLock;
use std::collections::HashMap;

use crate::proto::{NodeId, ROOT_NODE};

const INO_BITS: u32 = 40;
const TOP_LEVEL_END: u64 = 1 << 48;
const FIRST_DYNAMIC: u64 = 1 << 63;

#[derive(Debug, Default)]
struct Dynamic {
    numbers: HashMap<InodeId, u64>,
    ids: Vec<InodeId>,
}

/// Both directions between the engine's inode ids and the mount's numbers.
#[derive(Debug)]
pub(crate) struct Nodes {
    root: InodeId,
    dynamic: RwLock<Dynamic>,
}

impl Nodes {
    /// For a mount of this root.
    #[must_use]
    pub(crate) fn new(root: InodeId) -> Self {
        Self { root, dynamic: RwLock::default() }
    }

    /// Inode number, as `stat` shows it.
    #[must_use]
    pub(crate) fn ino(&self, id: InodeId) -> u64 {
        if let Some(number) = fixed(id) {
            return number;
        }
        if let Some(number) = self.dynamic.read().numbers.get(&id) {
            return *number;
        }
        let mut dynamic = self.dynamic.write();
        let next = FIRST_DYNAMIC + dynamic.ids.len() as u64;
        let number = *dynamic.numbers.entry(id).or_insert(next);
        if number == next {
            dynamic.ids.push(id);
        }
        number
    }

    /// Node id, as the kernel names it.
    #[must_use]
    pub(crate) fn node(&self, id: InodeId) -> NodeId {
        if id == self.root { ROOT_NODE } else { NodeId(self.ino(id)) }
    }

    /// The inode of a node id; `None` for numbers that were never given out.
    #[must_use]
    pub(crate) fn id(&self, node: NodeId) -> Option<InodeId> {
        match node {
            NodeId(0) => None,
            ROOT_NODE => Some(self.root),
            NodeId(n) if n < TOP_LEVEL_END => Some(InodeId { subvol: TreeId::FS_TREE, ino: n }),
            NodeId(n) if n < FIRST_DYNAMIC => {
                let subvol = larder_format::ids::ObjectId(n >> INO_BITS);
                Some(InodeId { subvol, ino: n & ((1 << INO_BITS) - 1) })
            }
            NodeId(n) => {
                self.dynamic.read().ids.get(usize::try_from(n - FIRST_DYNAMIC).ok()?).copied()
            }
        }
    }
}

/// The number that follows from the id alone.
fn fixed(id: InodeId) -> Option<u64> {
    if id.subvol == TreeId::FS_TREE {
        // 0 and 1 mean other things; no inode has them.
        return (2..TOP_LEVEL_END).contains(&id.ino).then_some(id.ino);
    }
    let fits = (256..1 << (63 - INO_BITS)).contains(&id.subvol.0) && id.ino < 1 << INO_BITS;
    fits.then_some(id.subvol.0 << INO_BITS | id.ino)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::ids::ObjectId;

    fn id(subvol: ObjectId, ino: u64) -> InodeId {
        InodeId { subvol, ino }
    }

    #[test]
    fn numbers_are_unique_and_lead_back() {
        let nodes = Nodes::new(id(ObjectId(5), 256));
        let max = (1 << 40) - 1;
        let ids = [
            id(ObjectId(5), 2),
            id(ObjectId(5), 257),
            id(ObjectId(5), max),
            id(ObjectId(5), (1 << 48) - 1),
            id(ObjectId(256), 0),
            id(ObjectId(256), 256),
            id(ObjectId(256), max),
            id(ObjectId(257), 256),
            id(ObjectId((1 << 23) - 1), max),
            id(ObjectId(1 << 23), 256),
            id(ObjectId(256), 1 << 40),
            id(ObjectId(5), 1 << 48),
            id(ObjectId(5), u64::MAX - 256),
            id(ObjectId(u64::MAX - 256), 300),
        ];
        let mut seen = std::collections::HashSet::new();
        for id in ids {
            let number = nodes.ino(id);
            assert!(seen.insert(number), "{id:?} has the number of another");
            assert_eq!(nodes.node(id), NodeId(number));
            assert_eq!(nodes.id(NodeId(number)), Some(id));
            assert_eq!(nodes.ino(id), number, "stays");
        }
        assert_eq!(nodes.ino(id(ObjectId(5), 257)), 257);
        assert_eq!(nodes.ino(id(ObjectId(256), 257)), 256 << 40 | 257);
        assert_eq!(nodes.dynamic.read().ids.len(), 5);
    }

    #[test]
    fn the_root_is_node_one_but_keeps_its_number() {
        let nodes = Nodes::new(id(ObjectId(300), 256));
        assert_eq!(nodes.node(id(ObjectId(300), 256)), ROOT_NODE);
        assert_eq!(nodes.ino(id(ObjectId(300), 256)), 300 << 40 | 256);
        assert_eq!(nodes.id(ROOT_NODE), Some(id(ObjectId(300), 256)));
        // A file handle from another time may name the root by its number.
        assert_eq!(nodes.id(NodeId(300 << 40 | 256)), Some(id(ObjectId(300), 256)));
        assert_eq!(nodes.id(NodeId(0)), None);
        assert_eq!(nodes.id(NodeId(1 << 63)), None);
        assert_eq!(nodes.id(NodeId(u64::MAX)), None);
    }
}
