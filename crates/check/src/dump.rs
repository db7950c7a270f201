//! Metadata dumps (`btrfs-image`): what they lack is no damage, and what cannot be judged is said.
//!
//! A dump has the nodes of all trees and one superblock. It lacks file data, also where that stood
//! in a leaf, and whatever was made on restoring it says nothing about the device that it came
//! from. Names may have been replaced by others of the same length, each place's for itself:
//! nothing in the superblock says so, but the top directory of each subvolume then calls itself
//! something else than `..`. The names of such a dump are compared by their length, and never with
//! the hashes in keys.

use crate::source::{Edge, Source};
use crate::walk::{find, scan};
use larder_format::items::keys::inode_ref_key;
use larder_format::items::{InodeRefs, RootItem};
use larder_format::{DevItem, Key, KeyType, MetadataDump, ObjectId, Superblock, TreeId};
use std::ops::ControlFlow;
use zerocopy::FromBytes;

/// What is known of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dump {
    /// How it was restored.
    pub form: MetadataDump,
    /// Were the chunks made anew? A dump of several devices is restored to one; the superblock then
    /// keeps its device's item as it was.
    pub rewritten: bool,
    /// Were the names replaced?
    pub names_hidden: bool,
}

impl Dump {
    /// `None` if the image is no dump.
    pub(crate) fn of(
        superblock: &Superblock,
        source: &Source<'_>,
        dev_items: &[(Key, Vec<u8>)],
    ) -> Option<Self> {
        let form = superblock.metadata_dump()?;
        let own = &superblock.dev_item;
        let differs = |item: &DevItem| {
            (item.total_bytes, item.bytes_used) != (own.total_bytes, own.bytes_used)
        };
        let rewritten = form == MetadataDump::Mapped
            && dev_items
                .iter()
                .filter(|(key, _)| key.offset == superblock.device_id().0)
                .any(|(_, data)| DevItem::ref_from_bytes(data).is_ok_and(differs));
        Some(Self { form, rewritten, names_hidden: names_hidden(superblock, source) })
    }

    /// `mapped` or `flat`.
    #[must_use]
    pub fn form_name(&self) -> &'static str {
        match self.form {
            MetadataDump::Mapped => "mapped",
            MetadataDump::Flat => "flat",
        }
    }

    /// What cannot be judged of it: a phrase each.
    #[must_use]
    pub fn not_judged(&self) -> Vec<&'static str> {
        let mut out = vec![
            "file data, its checksums and the targets of symbolic links: a dump has zeros in \
                their place",
            "copies of nodes: a dump has one of each, and restoring wrote it to all places",
            "copies of the superblock: a dump has the first only",
        ];
        if self.form == MetadataDump::Flat {
            out.push(
                "where nodes lie on the device: in this form of dump they lie at their addresses",
            );
        }
        if self.rewritten {
            out.push(
                "where chunks lie, and their profiles: restoring made them anew, as with several \
                    devices",
            );
        }
        if self.names_hidden {
            out.push(
                "names: they were replaced to hide them (`btrfs-image -s`), and only their \
                lengths are compared",
            );
        }
        out
    }
}

/// Do top directories call themselves something else than `..`? One alone may be damaged.
fn names_hidden(superblock: &Superblock, source: &Source<'_>) -> bool {
    let replaced = |tree: TreeId| {
        let mut root = None;
        let (from, to) =
            (Key::new(tree, KeyType::ROOT_ITEM, 0), Key::new(tree, KeyType::ROOT_ITEM, u64::MAX));
        scan(source, &Edge::root_tree(superblock), from, to, &mut |_, data| {
            root = RootItem::parse(data).ok();
            ControlFlow::Break(())
        });
        root.and_then(|item| {
            let edge = Edge::root(tree, item.root(), item.level, item.root_generation());
            let names =
                find(source, &edge, inode_ref_key(ObjectId::FIRST_FREE, ObjectId::FIRST_FREE))?;
            let first = InodeRefs::new(&names).next()?.ok()?;
            Some(first.name != b"..")
        })
    };
    [ObjectId::FS_TREE, ObjectId::DATA_RELOC_TREE]
        .into_iter()
        .all(|tree| replaced(tree) == Some(true))
}
