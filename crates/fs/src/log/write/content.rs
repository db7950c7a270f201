//! What the log of a transaction has, and how contributions come into it.
//!
//! One thread at a time edits [`Content`], and it writes nothing. A batch's contributions come in.
//! Then the nodes that have changed are made. The caller writes them when the next batch may
//! already come in.

use super::blocks::Blocks;
use super::collect::{ChangedRange, Contribution, Pair, part_of, sum_items, sums_end};
use super::names::{Names, SubvolLog, items_of};
use super::tree::{LogTree, Outgoing};
use super::{Cause, NotLogged, Result};
use crate::engine::{Core, Subvolume};
use crate::error::Error;
use crate::space::Run;
use crate::transaction::Txn;
use crate::tree::Pointer;
use larder_format::items::keys::{csum_key, extent_data_key, inode_key};
use larder_format::items::{FileExtent, RootItem};
use larder_format::{FileOffset, Key, KeyType, Logical, ObjectId, TreeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Nodes that a log has at most, because they stay in memory until the commit.
const MOST_NODES: usize = 4096;

/// The trees of a log, complete in memory.
#[derive(Debug, Default)]
pub(super) struct Content {
    subvols: BTreeMap<TreeId, (Arc<Subvolume>, SubvolLog)>,
    roots: Option<LogTree>,
    blocks: Blocks,
}

/// What has to be written for a batch.
#[derive(Debug)]
pub(super) struct Edition {
    pub(super) root: Pointer,
    pub(super) nodes: Vec<Outgoing>,
    /// Nodes that are not needed any more once a superblock leads to this root.
    pub(super) replaced: Vec<Logical>,
}

impl Content {
    /// Brings contributions in.
    ///
    /// # Errors
    /// The contributions before the one that failed are in. Nothing of this may be written any
    /// more.
    pub(super) fn take_in(
        &mut self,
        core: &Core,
        txn: &Arc<Txn>,
        batch: Vec<Contribution>,
    ) -> Result<()> {
        let mut by_subvol: BTreeMap<TreeId, Vec<Contribution>> = BTreeMap::new();
        for contribution in batch {
            by_subvol.entry(contribution.inode.id.subvol).or_default().push(contribution);
        }
        for (id, contributions) in by_subvol {
            let subvol = contributions[0].inode.subvol.clone();
            if subvol.is_dead() {
                continue;
            }
            let versions = {
                // Versions of the log's own transaction, because changes of a later one belong to
                // another log.
                let pin = core.txns.pin_running()?;
                if pin.txn.generation != txn.generation {
                    return Err(NotLogged::Sealed);
                }
                Pair::of(core, &subvol, txn)?
            };
            self.blocks.overwrites = fault!(core.options.tuning, LogOverwrites);
            let (_, log) =
                self.subvols.entry(id).or_insert_with(|| (subvol.clone(), SubvolLog::new(core)));
            merge(core, &subvol, &versions, log, &mut self.blocks, contributions)?;
        }
        Ok(())
    }
    /// The nodes that have changed since the last edition.
    ///
    /// # Errors
    /// The log has grown too large, or has no space.
    pub(super) fn edition(&mut self, core: &Core, txn: &Txn) -> Result<Edition> {
        if self.blocks.len() > MOST_NODES {
            return Err(NotLogged::Commit(Cause::TooMuch));
        }
        self.blocks.begin_step(core);
        let mut nodes = Vec::new();
        let roots = self.roots.get_or_insert_with(|| LogTree::new(core.nodesize()));
        for (id, (_, log)) in &mut self.subvols {
            let key = Key::new(ObjectId::TREE_LOG, KeyType::ROOT_ITEM, id.0);
            if log.tree.is_empty() {
                // Its old content is not true any more, and its nodes will be used again.
                roots.remove(&mut self.blocks, key..=key);
                continue;
            }
            let root = log.tree.write(core, &mut self.blocks, txn.generation, &mut nodes)?;
            let mut item =
                RootItem { bytenr: U64::new(root.at.0), level: root.level, ..RootItem::default() };
            item.set_generation(txn.generation);
            item.refs = 1.into();
            roots.put(&mut self.blocks, &key, item.as_bytes())?;
        }
        let root = roots.write(core, &mut self.blocks, txn.generation, &mut nodes)?;
        Ok(Edition { root, nodes, replaced: self.blocks.take_replaced() })
    }
    /// Nothing durable leads to these nodes any more.
    pub(super) fn reuse(&mut self, core: &Core, nodes: Vec<Logical>) {
        self.blocks.reuse(core, nodes);
    }
    /// The log has ended: returns its space, pinned.
    ///
    /// # Errors
    /// Broken accounts.
    pub(super) fn retire(&mut self, core: &Core) -> crate::error::Result<Vec<Run>> {
        self.subvols.clear();
        self.roots = None;
        self.blocks.retire(core)
    }
}

/// Brings the contributions of one subvolume into its log, in the order in which they came.
fn merge(
    core: &Core,
    subvol: &Subvolume,
    versions: &Pair,
    log: &mut SubvolLog,
    blocks: &mut Blocks,
    contributions: Vec<Contribution>,
) -> Result<()> {
    // Inodes that lost their last name meanwhile have nothing in the log.
    let mut named = Vec::new();
    {
        let mut names = Names::new(core, subvol, &versions.base, &versions.now, log, blocks);
        for contribution in contributions {
            let (ino, dir) = (contribution.inode.object(), contribution.inode.is_dir());
            if names.log(ino, &contribution.item, dir, &contribution.companions)? {
                named.push(contribution);
            }
        }
    }
    for contribution in named {
        let ino = contribution.inode.object();
        if log.tree.get(&inode_key(ino)).is_none() {
            continue;
        }
        for changed in &contribution.changed_ranges {
            overlay(log, blocks, ino, changed)?;
        }
        log.parts |= contribution.shares && !contribution.sums.is_empty();
        for (at, sums) in &contribution.sums {
            for (key, data) in sum_items(core, *at, sums) {
                put_sums(core, log, blocks, key, &data)?;
            }
        }
    }
    Ok(())
}

/// Adds an item of checksums. Once a file that shares extents is logged, sectors whose checksums
/// the log already has are left out.
fn put_sums(
    core: &Core,
    log: &mut SubvolLog,
    blocks: &mut Blocks,
    key: Key,
    data: &[u8],
) -> Result<()> {
    core.log.csum_items.fetch_add(1, Ordering::Relaxed);
    if log.parts {
        return put_missing_sums(core, log, blocks, key, data);
    }
    let end = sums_end(core, Logical(key.offset), data);
    if core.options.tuning.log_entry.deletes_sums_first() {
        // As if another file might have put some there.
        for (from, _) in sums_in(core, log, key, end) {
            let at = csum_key(Logical(from));
            log.tree.remove(blocks, at..=at);
        }
    } else {
        debug_assert!(
            sums_in(core, log, key, end).iter().all(|(from, _)| *from == key.offset),
            "checksums of a log overlap although nothing is shared"
        );
    }
    log.tree.put(blocks, &key, data)
}

/// Where the log has checksums for data from the address of `key` to `end`, from where to where.
fn sums_in(core: &Core, log: &SubvolLog, key: Key, end: Logical) -> Vec<(u64, u64)> {
    let last = csum_key(Logical(end.0 - 1));
    let first = log.tree.at_or_before(&csum_key(Logical(0)), &key).map_or(key, |(key, _)| key);
    log.tree
        .range(first..=last)
        .map(|(k, d)| (k.offset, sums_end(core, Logical(k.offset), d).0))
        .filter(|(_, to)| *to > key.offset)
        .collect()
}

/// Adds those checksums of an item that the log does not have.
fn put_missing_sums(
    core: &Core,
    log: &mut SubvolLog,
    blocks: &mut Blocks,
    key: Key,
    data: &[u8],
) -> Result<()> {
    core.log.csums_searched.fetch_add(1, Ordering::Relaxed);
    let end = sums_end(core, Logical(key.offset), data);
    let there = sums_in(core, log, key, end);
    if !there.is_empty() {
        core.log.csums_present.fetch_add(1, Ordering::Relaxed);
    }
    let bytes = |at: u64| {
        (at - key.offset) as usize / larder_format::SECTOR_SIZE as usize * core.csum.size()
    };
    let mut at = key.offset;
    for (from, to) in there.into_iter().chain([(end.0, end.0)]) {
        if at < from {
            log.tree.put(blocks, &csum_key(Logical(at)), &data[bytes(at)..bytes(from)])?;
        }
        at = at.max(to);
    }
    Ok(())
}

/// Replaces what the log has of a range of a file.
fn overlay(
    log: &mut SubvolLog,
    blocks: &mut Blocks,
    ino: ObjectId,
    changed: &ChangedRange,
) -> Result<()> {
    let key = |at: u64| extent_data_key(ino, FileOffset(at));
    let all = items_of(ino, KeyType::EXTENT_DATA, KeyType::EXTENT_DATA);
    let first = log
        .tree
        .at_or_before(all.start(), &key(changed.start))
        .map_or(key(changed.start), |(k, _)| k);
    let old: Vec<(Key, Vec<u8>)> =
        log.tree.range(first..=key(changed.end - 1)).map(|(k, d)| (k, d.to_vec())).collect();
    let mut kept = Vec::new();
    for (at, data) in old {
        let extent = FileExtent::parse(&data).map_err(|e| {
            NotLogged::Fail(Error::corrupt(crate::error::Place::item(ObjectId::TREE_LOG, at), e.0))
        })?;
        let FileExtent::Stored(r) = extent else {
            // The first sector has no item before it that could reach into the range.
            if changed.start == 0 {
                log.tree.remove(blocks, at..=at);
            }
            continue;
        };
        let end = at.offset + r.num_bytes;
        if end <= changed.start {
            continue;
        }
        log.tree.remove(blocks, at..=at);
        if at.offset < changed.start {
            kept.push(part_of(at, &r, (at.offset, changed.start)));
        }
        if end > changed.end {
            kept.push(part_of(at, &r, (changed.end, end)));
        }
    }
    for (key, data) in kept.iter().chain(&changed.items) {
        log.tree.put(blocks, key, data)?;
    }
    Ok(())
}
