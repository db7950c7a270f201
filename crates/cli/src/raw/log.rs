//! The log of an image that waits to be replayed: its trees, and in short what they hold.

use super::Problems;
use larder_format::items::{ExtRefs, FileExtent, InodeItem, InodeRefs, RootItem};
use larder_format::{Key, KeyType, ObjectId};
use larder_restore::{Reader, RootPointer, Tree};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// What a log has of one inode.
#[derive(Debug, Default)]
pub(crate) struct Logged {
    /// Names, as its references have them: only the last part of the path.
    pub(crate) names: Vec<Vec<u8>>,
    /// Size that the file would have, if the log tells.
    pub(crate) size: Option<u64>,
    /// Bytes of data.
    pub(crate) data: u64,
}

/// The log of one subvolume, by inode number.
pub(crate) type Inodes = BTreeMap<u64, Logged>;

/// The log trees, by subvolume; nothing where there is no log.
pub(crate) fn trees(reader: &Reader<'_>, problems: &Problems) -> Vec<(ObjectId, Tree)> {
    let sb = reader.superblock();
    let Some(at) = sb.log_root() else { return Vec::new() };
    let generation = Some(sb.generation().next());
    let top =
        Tree::plain(ObjectId::TREE_LOG, RootPointer { at, generation, level: sb.log_root_level });
    let mut found = Vec::new();
    let gaps = top.walk(reader, Key::MIN, Key::MAX, &mut |item| {
        if item.key.kind == KeyType::ROOT_ITEM {
            match RootItem::parse(item.data) {
                Ok(root) => {
                    let root = RootPointer { at: root.root(), generation, level: root.level };
                    found.push((ObjectId(item.key.offset), Tree::plain(ObjectId::TREE_LOG, root)));
                }
                Err(e) => problems.add(format!("log of subvolume {}: {e}", item.key.offset)),
            }
        }
        ControlFlow::Continue(())
    });
    problems.gaps(gaps);
    found
}

/// What the log holds, by subvolume.
pub(crate) fn contents(reader: &Reader<'_>, problems: &Problems) -> Vec<(ObjectId, Inodes)> {
    let one = |tree: &Tree| {
        let mut inodes = Inodes::new();
        let gaps = tree.walk(reader, Key::MIN, Key::MAX, &mut |item| {
            if item.key.kind == KeyType::EXTENT_CSUM {
                return ControlFlow::Continue(());
            }
            let logged = inodes.entry(item.key.objectid.0).or_default();
            match item.key.kind {
                KeyType::INODE_ITEM => {
                    logged.size = InodeItem::parse(item.data).ok().map(|i| i.size.get())
                }
                KeyType::INODE_REF => {
                    logged
                        .names
                        .extend(InodeRefs::new(item.data).flatten().map(|r| r.name.to_vec()));
                }
                KeyType::INODE_EXTREF => {
                    logged.names.extend(ExtRefs::new(item.data).flatten().map(|r| r.name.to_vec()));
                }
                KeyType::EXTENT_DATA => {
                    logged.data += match FileExtent::parse(item.data) {
                        Ok(FileExtent::Inline(i)) => i.ram_bytes,
                        Ok(FileExtent::Stored(r)) if !r.is_hole() => r.num_bytes,
                        _ => 0,
                    };
                }
                _ => {}
            }
            ControlFlow::Continue(())
        });
        problems.gaps(gaps);
        inodes
    };
    trees(reader, problems).iter().map(|(subvol, tree)| (*subvol, one(tree))).collect()
}
