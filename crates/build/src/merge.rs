//! How sorted records become the items of a subvolume.
//!
//! Most records are items already. Three kinds share an item where their keys are equal: entries of
//! a directory and attributes whose names have one hash, and names that one directory has for one
//! inode. Names that find no room there go to extended references. The link count of an inode with
//! several names comes before its item, as records of a kind that the format does not know
//! ([`LINKS`]). There is one for each further name, and the last one has them all.

use crate::error::{Error, Result};
use crate::nodes::{Nodes, Placed, TreeWriter};
use crate::options::Plan;
use crate::sort::{ItemKey, Reader};
use larder_format::csum::extref_hash;
use larder_format::items::{DirEntries, ExtRef, InodeItem, InodeRefs};
use larder_format::node::max_item_size;
use larder_format::{Key, KeyType, ObjectId};
use std::collections::BTreeMap;
use zerocopy::FromBytes;

/// Kind of the record with an inode's link count, 32 bits.
pub(crate) const LINKS: u8 = 0;

/// Records of two sorters in one order.
pub(crate) struct Records<'a> {
    names: Reader<'a, ItemKey>,
    contents: Reader<'a, ItemKey>,
}

impl<'a> Records<'a> {
    pub(crate) fn new(names: Reader<'a, ItemKey>, contents: Reader<'a, ItemKey>) -> Self {
        Self { names, contents }
    }

    fn peek(&mut self) -> Result<Option<(ItemKey, bool)>> {
        Ok(match (self.names.peek()?, self.contents.peek()?) {
            (Some(a), Some(b)) if b < a => Some((b, false)),
            (Some(a), _) => Some((a, true)),
            (None, b) => b.map(|b| (b, false)),
        })
    }

    /// The next record of this subvolume.
    fn next(&mut self, tree: u32) -> Result<Option<(ItemKey, Vec<u8>)>> {
        match self.peek()? {
            Some((key, true)) if key.tree == tree => self.names.next(),
            Some((key, false)) if key.tree == tree => self.contents.next(),
            _ => Ok(None),
        }
    }
}

/// Packs the tree of a subvolume from its records.
pub(crate) fn subvolume(
    plan: &Plan,
    nodes: &mut Nodes<'_>,
    records: &mut Records<'_>,
    tree: u32,
    id: ObjectId,
) -> Result<Placed> {
    let writer = TreeWriter::new(nodes, id);
    let most = max_item_size(plan.nodesize);
    let extref = plan.features.extref;
    let item = None;
    let mut merge = Merge { writer, most, extref, item, links: None, more: BTreeMap::new() };
    while let Some((key, value)) = records.next(tree)? {
        merge.take(nodes, key, value)?;
    }
    merge.end_of_item(nodes)?;
    merge.end_of_references(nodes)?;
    merge.writer.finish(nodes)
}

struct Merge {
    writer: TreeWriter,
    most: usize,
    extref: bool,
    /// What may grow.
    item: Option<(Key, Vec<u8>)>,
    /// Of the inode whose item comes next.
    links: Option<u32>,
    /// Names of an inode that found no room, by hash.
    more: BTreeMap<(u64, u64), Vec<u8>>,
}

impl Merge {
    fn take(&mut self, nodes: &mut Nodes<'_>, key: ItemKey, mut value: Vec<u8>) -> Result<()> {
        if key.kind == LINKS {
            self.links = Some(u32::from_le_bytes(value[..].try_into().expect("a count")));
            return Ok(());
        }
        let at = Key::new(key.inode, KeyType(key.kind), key.offset);
        if let Some((last, item)) = &mut self.item
            && *last == at
        {
            if item.len() + value.len() <= self.most {
                item.append(&mut value);
                return Ok(());
            }
            return self.overflow(at, &value);
        }
        self.end_of_item(nodes)?;
        if at.kind != KeyType::INODE_REF {
            self.end_of_references(nodes)?;
        }
        if at.kind == KeyType::INODE_ITEM
            && let Some(links) = self.links.take()
        {
            let inode = InodeItem::mut_from_bytes(&mut value).expect("an inode item");
            inode.nlink.set(links);
        }
        self.item = Some((at, value));
        Ok(())
    }

    fn end_of_item(&mut self, nodes: &mut Nodes<'_>) -> Result<()> {
        match self.item.take() {
            Some((key, item)) => self.writer.push(nodes, key, &item),
            None => Ok(()),
        }
    }

    /// Extended references come behind the references.
    fn end_of_references(&mut self, nodes: &mut Nodes<'_>) -> Result<()> {
        for ((inode, hash), item) in std::mem::take(&mut self.more) {
            self.writer.push(nodes, Key::new(inode, KeyType::INODE_EXTREF, hash), &item)?;
        }
        Ok(())
    }

    fn overflow(&mut self, at: Key, value: &[u8]) -> Result<()> {
        let refuse =
            |name: &[u8], what: &str| Error::Entry { path: name.to_vec(), what: what.into() };
        if at.kind != KeyType::INODE_REF {
            let name =
                DirEntries::new(value).next().and_then(|e| e.ok()).map_or(&[][..], |e| e.name);
            return Err(refuse(name, "too many names with the hash of this one"));
        }
        let entry = InodeRefs::new(value).next().and_then(|e| e.ok()).expect("written here");
        let parent = ObjectId(at.offset);
        if !self.extref {
            return Err(refuse(entry.name, "too many links in one directory without extref"));
        }
        let hash = extref_hash(parent, entry.name);
        let item = self.more.entry((at.objectid.0, hash)).or_default();
        ExtRef { parent, index: entry.index, name: entry.name }.append_to(item);
        if item.len() > self.most {
            return Err(refuse(entry.name, "too many links with the hash of this one"));
        }
        Ok(())
    }
}
