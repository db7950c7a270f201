//! The extent tree: how extents and their references lie in items.
//!
//! [`apply`] brings one head of delayed refs into the tree, and is the only writer. It decides
//! everything about the representation: skinny or full items for tree blocks, which references are
//! inline and which have items of their own, and their order.
//!
//! Counts are the safety net of the whole format: an extent whose recorded references do not match
//! what the trees hold would sooner or later be freed under somebody. So a reference that should be
//! there and is not, or that is there and should not be, is `Corrupt`, never patched over; the
//! transaction stops and the last durable state stays.

use crate::error::{Error, Place, Result};
use crate::space::refs::{ExtentKind, RefHead};
use crate::tree::TreeOps;
use larder_format::items::{ExtentFlags, ExtentItem, ExtentRef, TreeBlockInfo, parse_keyed_refs};
use larder_format::{DiskKey, FormatError, Generation, Key, KeyType, Logical, ObjectId};

/// What the file system's features say about extent items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExtentFeatures {
    /// SKINNY_METADATA: new tree blocks get METADATA_ITEMs.
    pub(crate) skinny: bool,
    /// Bytes of a tree block.
    pub(crate) nodesize: u32,
}

/// What applying a head did to the allocated space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Applied {
    /// The extent is in the tree now: its bytes are used.
    Added,
    /// It had its last reference dropped and left the tree: its bytes are free (reusable once this
    /// is durable).
    Freed,
    /// References or flags changed, or nothing did.
    Changed,
    /// It was created and dropped within the transaction: the tree never saw it, its space is free
    /// again.
    NeverUsed,
}

/// Facts about an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExtentInfo {
    /// Number of references.
    pub(crate) refs: u64,
    /// Is FULL_BACKREF set?
    pub(crate) full_backref: bool,
    /// Transaction that allocated it.
    pub(crate) generation: Generation,
    /// Length in bytes.
    pub(crate) num_bytes: u64,
    /// File data (a tree block otherwise)?
    pub(crate) is_data: bool,
}

fn corrupt(key: Key, what: impl Into<String>) -> Error {
    Error::corrupt(Place::item(ObjectId::EXTENT_TREE, key), what)
}
/// How many references of an extent have items of their own.
fn keyed_refs(item: &ExtentItem) -> u64 {
    let inline = item.inline.iter().filter(|(r, _)| !matches!(r, ExtentRef::Owner { .. }));
    item.refs - inline.map(|r| u64::from(r.1)).sum::<u64>()
}
fn bad(key: Key) -> impl FnOnce(FormatError) -> Error {
    move |e| corrupt(key, e.0)
}

/// Most bytes of an extent item before further references get items of their own: a sixteenth of a
/// leaf less an item header, as on Linux (seen: 33 data references, 981 bytes, with 16 KiB nodes).
/// Any limit would be valid.
fn inline_limit(nodesize: u32) -> usize {
    larder_format::node::leaf_capacity(nodesize) / 16 - larder_format::node::ITEM_SIZE
}

/// The item of an extent, parsed.
///
/// A tree block may have either form whatever the features say: turning SKINNY_METADATA on leaves
/// old items.
fn find(
    tree: &mut dyn TreeOps,
    bytenr: Logical,
    num_bytes: u64,
    kind: ExtentKind,
    skinny: bool,
) -> Result<Option<(Key, ExtentItem)>> {
    let full = Key::new(bytenr, KeyType::EXTENT_ITEM, num_bytes);
    let keys = match kind {
        ExtentKind::TreeBlock { level } if skinny => {
            [Some(Key::new(bytenr, KeyType::METADATA_ITEM, u64::from(level))), Some(full)]
        }
        _ => [Some(full), None],
    };
    for key in keys.into_iter().flatten() {
        let Some(data) = tree.get(&key)? else { continue };
        let record = ExtentItem::parse(key.kind, &data).map_err(bad(key))?;
        let is_data = record.flags.contains(ExtentFlags::DATA);
        let level = record.block.map(|i| i.level);
        let fits = match kind {
            ExtentKind::Data => is_data,
            ExtentKind::TreeBlock { level: want } => !is_data && level.is_none_or(|l| l == want),
        };
        if !fits {
            return Err(corrupt(
                key,
                format!(
                    "extent is not {kind:?}: flags {:#x}, level {level:?}",
                    record.flags.bits()
                ),
            ));
        }
        return Ok(Some((key, record)));
    }
    Ok(None)
}

/// Looks an extent up. `num_bytes` is its whole length (the node size for tree blocks).
///
/// # Errors
/// `Corrupt` when its item is malformed, or is of the other kind or level.
pub(crate) fn extent_info(
    tree: &mut dyn TreeOps,
    bytenr: Logical,
    num_bytes: u64,
    kind: ExtentKind,
    skinny: bool,
) -> Result<Option<ExtentInfo>> {
    Ok(find(tree, bytenr, num_bytes, kind, skinny)?.map(|(_, r)| ExtentInfo {
        refs: r.refs,
        full_backref: r.flags.contains(ExtentFlags::FULL_BACKREF),
        generation: r.generation,
        num_bytes,
        is_data: kind.is_data(),
    }))
}

/// Looks a data extent up, and counts its references that are `key` and lie in its item. References
/// with items of their own are not searched: where those exist, there are or were other references.
///
/// # Errors
/// As [`extent_info`].
pub(crate) fn inline_refs(
    tree: &mut dyn TreeOps,
    bytenr: Logical,
    num_bytes: u64,
    key: ExtentRef,
) -> Result<Option<(ExtentInfo, u64)>> {
    let Some((_, record)) = find(tree, bytenr, num_bytes, ExtentKind::Data, false)? else {
        return Ok(None);
    };
    let count = record.inline.iter().find(|r| r.0 == key).map_or(0, |r| u64::from(r.1));
    let info = ExtentInfo {
        refs: record.refs,
        full_backref: record.flags.contains(ExtentFlags::FULL_BACKREF),
        generation: record.generation,
        num_bytes,
        is_data: true,
    };
    Ok(Some((info, count)))
}

/// The extent that an item of the extent tree stands for: address and length. `None` for other
/// items.
#[must_use]
pub(crate) fn extent_of(key: &Key, nodesize: u32) -> Option<(Logical, u64)> {
    match key.kind {
        KeyType::EXTENT_ITEM => Some((Logical(key.objectid.0), key.offset)),
        KeyType::METADATA_ITEM => Some((Logical(key.objectid.0), u64::from(nodesize))),
        _ => None,
    }
}

/// Brings all changes of one extent into the tree.
///
/// # Errors
/// `Corrupt` when a reference to drop is not there, when one to add is, when counts do not add up,
/// or when a new extent overlaps one that is in the tree.
pub(crate) fn apply(
    tree: &mut dyn TreeOps,
    features: ExtentFeatures,
    bytenr: Logical,
    head: &RefHead,
) -> Result<Applied> {
    let mut edit = if head.created {
        if head.refs().next().is_none() {
            return Ok(Applied::NeverUsed);
        }
        Edit::create(tree, features, bytenr, head)?
    } else {
        if head.is_empty() {
            return Ok(Applied::Changed);
        }
        match find(tree, bytenr, head.num_bytes, head.kind, features.skinny)? {
            Some((key, record)) => Edit { tree, features, key, record, bytenr },
            None => {
                let key = Key::new(bytenr, KeyType::EXTENT_ITEM, head.num_bytes);
                return Err(corrupt(key, format!("{:?} extent in use has no item", head.kind)));
            }
        }
    };
    // Drops first: they may make room for what is added.
    for (key, delta) in head.refs().filter(|r| r.1 < 0) {
        edit.drop_refs(key, delta.unsigned_abs())?;
    }
    for (key, delta) in head.refs().filter(|r| r.1 > 0) {
        edit.add_refs(key, delta.unsigned_abs())?;
    }
    if head.set_full_backref {
        edit.record.flags |= ExtentFlags::FULL_BACKREF;
    }
    edit.finish(head.created)
}

/// References of one keyed item with their counts. Linux writes one into each item.
type Keyed = Vec<(ExtentRef, u32)>;

/// One extent that is being changed. `record` is written back at the end, keyed references at once.
struct Edit<'a> {
    tree: &'a mut dyn TreeOps,
    features: ExtentFeatures,
    bytenr: Logical,
    key: Key,
    record: ExtentItem,
}

impl<'a> Edit<'a> {
    fn create(
        tree: &'a mut dyn TreeOps,
        features: ExtentFeatures,
        bytenr: Logical,
        head: &RefHead,
    ) -> Result<Self> {
        let (key, flags, block) = match head.kind {
            ExtentKind::Data => {
                (Key::new(bytenr, KeyType::EXTENT_ITEM, head.num_bytes), ExtentFlags::DATA, None)
            }
            ExtentKind::TreeBlock { level } if features.skinny => (
                Key::new(bytenr, KeyType::METADATA_ITEM, u64::from(level)),
                ExtentFlags::TREE_BLOCK,
                None,
            ),
            ExtentKind::TreeBlock { level } => (
                Key::new(bytenr, KeyType::EXTENT_ITEM, head.num_bytes),
                ExtentFlags::TREE_BLOCK,
                Some(TreeBlockInfo {
                    key: DiskKey::from(head.first_key.unwrap_or_default()),
                    level,
                }),
            ),
        };
        let record =
            ExtentItem { refs: 0, generation: head.generation, flags, block, inline: Vec::new() };
        // A wrong free-space record shows here first: a neighbour that is an extent must not
        // overlap the new one.
        let end = bytenr.plus(head.num_bytes);
        let before = tree.at_or_before(&Key::new(bytenr, KeyType::METADATA_ITEM, u64::MAX))?;
        let after = tree.at_or_after(&Key::new(bytenr.plus(1), KeyType(0), 0))?;
        for (other, _) in before.into_iter().chain(after) {
            if let Some((start, len)) = extent_of(&other, features.nodesize)
                && start < end
                && bytenr < start.plus(len)
            {
                return Err(corrupt(
                    other,
                    format!("overlaps the new extent {}+{}", bytenr, head.num_bytes),
                ));
            }
        }
        Ok(Self { tree, features, bytenr, key, record })
    }

    /// Slot of an inline reference.
    fn inline_slot(&self, key: ExtentRef) -> Option<usize> {
        self.record.inline.iter().position(|r| r.0 == key)
    }

    /// The item at or after `from` if it holds keyed references of the same type of this extent.
    fn next_keyed(&mut self, from: Key) -> Result<Option<(Key, Keyed)>> {
        let Some((key, data)) = self.tree.at_or_after(&from)? else { return Ok(None) };
        if (key.objectid, key.kind) != (from.objectid, from.kind) {
            return Ok(None);
        }
        Ok(Some((key, parse_keyed_refs(&key, &data).map_err(bad(key))?)))
    }

    /// Writes an item of keyed references back, or removes it.
    fn set_keyed(&mut self, at: Key, mut refs: Keyed) -> Result<()> {
        refs.retain(|r| r.1 > 0);
        if refs.is_empty() {
            return self.tree.delete(&at);
        }
        let data: Vec<u8> = refs.into_iter().flat_map(|(r, n)| r.encode_keyed(n)).collect();
        self.tree.update(&at, &data)
    }

    fn drop_refs(&mut self, key: ExtentRef, n: u64) -> Result<()> {
        let item = self.key;
        let missing =
            move || corrupt(item, format!("{n} references {key:?} to drop are not there"));
        let mut left = n;
        let keyed = keyed_refs(&self.record);
        if let Some(slot) = self.inline_slot(key) {
            let count = &mut self.record.inline[slot].1;
            let take = left.min(u64::from(*count));
            left -= take;
            *count -= u32::try_from(take).expect("at most the count");
            if *count == 0 {
                self.record.inline.remove(slot);
            }
        }
        if left > keyed {
            return Err(missing());
        }
        self.record.refs -= n;
        // A reference that collided with other data references was moved behind them. Another
        // writer may have removed those since, so the search goes on to the end of the type. Only
        // in a broken tree does it find nothing.
        let mut from = key.keyed(self.bytenr);
        while left > 0 {
            let (at, mut refs) = self.next_keyed(from)?.ok_or_else(missing)?;
            if let Some((_, count)) = refs.iter_mut().find(|r| r.0 == key) {
                let take = left.min(u64::from(*count));
                left -= take;
                *count -= u32::try_from(take).expect("at most the count");
                self.set_keyed(at, refs)?;
            } else if !matches!(key, ExtentRef::Data { .. }) {
                return Err(missing());
            }
            from = at.successor().ok_or_else(missing)?;
        }
        Ok(())
    }

    fn add_refs(&mut self, key: ExtentRef, n: u64) -> Result<()> {
        let surplus =
            |e: &Self| corrupt(e.key, format!("{n} references {key:?} to add are one too many"));
        let sum = |old: u32| u32::try_from(u64::from(old) + n).ok();
        if !key.is_data() && n != 1 {
            return Err(surplus(self));
        }
        let had_keyed = keyed_refs(&self.record) > 0;
        let refs = self.record.refs.checked_add(n).ok_or_else(|| surplus(self))?;
        match self.inline_slot(key) {
            Some(slot) if key.is_data() => {
                self.record.inline[slot].1 =
                    sum(self.record.inline[slot].1).ok_or_else(|| surplus(self))?;
            }
            Some(_) => return Err(surplus(self)),
            None => {
                let count = u32::try_from(n).map_err(|_| surplus(self))?;
                let len = self.record.encoded_len() + key.inline_len();
                let room = len <= inline_limit(self.features.nodesize);
                // A reference that already has an item keeps it.
                let done = (had_keyed || !room) && self.add_keyed(key, count, !room)?;
                if !done {
                    let order = key.inline_order();
                    let slot = self.record.inline.partition_point(|r| r.0.inline_order() < order);
                    self.record.inline.insert(slot, (key, count));
                }
            }
        }
        self.record.refs = refs;
        Ok(())
    }

    /// Adds to the item of a reference. Where there is none, makes one if `make`. Returns whether
    /// the reference was added.
    fn add_keyed(&mut self, key: ExtentRef, n: u32, make: bool) -> Result<bool> {
        let mut at = key.keyed(self.bytenr);
        while let Some(data) = self.tree.get(&at)? {
            let mut refs = parse_keyed_refs(&at, &data).map_err(bad(at))?;
            if let Some((_, count)) = refs.iter_mut().find(|r| r.0 == key) {
                let sum = count.checked_add(n).filter(|_| key.is_data());
                *count = sum.ok_or_else(|| corrupt(at, "a reference to add is one too many"))?;
                self.set_keyed(at, refs)?;
                return Ok(true);
            }
            // Only data references get here, after a hash collision. The next offset is tried.
            at.offset =
                at.offset.checked_add(1).ok_or_else(|| corrupt(at, "too many colliding hashes"))?;
        }
        if make {
            self.tree.insert(&at, &key.encode_keyed(n))?;
        }
        Ok(make)
    }

    fn finish(self, created: bool) -> Result<Applied> {
        if self.record.refs == 0 {
            if created {
                return Err(corrupt(self.key, "references of a new extent do not add up"));
            }
            self.tree.delete(&self.key)?;
            if let Some((next, _)) = self.tree.at_or_after(&self.key)?
                && next.objectid == self.key.objectid
                && (KeyType::TREE_BLOCK_REF..=KeyType::SHARED_DATA_REF).contains(&next.kind)
            {
                return Err(corrupt(next, "reference to an extent without references"));
            }
            return Ok(Applied::Freed);
        }
        if created {
            self.tree.insert(&self.key, &self.record.encode())?;
            Ok(Applied::Added)
        } else {
            self.tree.update(&self.key, &self.record.encode())?;
            Ok(Applied::Changed)
        }
    }
}

#[cfg(test)]
mod tests;
