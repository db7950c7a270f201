//! What is logged of an inode's content.
//!
//! It is collected by the caller of `fsync`, in parallel with other callers, from a version of the
//! tree, with no lock held. The order matters. First the inode is asked which ranges have changed,
//! then what its item is, and then the version is taken. So the version contains what the item
//! covers and what is known to have changed, whatever else happens meanwhile.

use super::{Cause, NotLogged, Result};
use crate::api::FileKind;
use crate::engine::{Core, Inode};
use crate::error::{Error, Place};
use crate::file::{MAX_FILE_SIZE, SECTOR, Sums, ceil, floor};
use crate::space::{Run, csum_tree};
use crate::transaction::Txn;
use crate::tree::Version;
use larder_format::features::Incompat;
use larder_format::items::keys::{csum_key, extent_data_key, inode_key};
use larder_format::items::{
    Compression, ExtentKind, ExtentRecord, FileExtent, InodeFlags, InodeItem,
};
use larder_format::{FileOffset, Generation, Key, KeyType, Logical, ObjectId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Extent items that one inode adds to a log at most.
const MOST_ITEMS: usize = 20_000;
/// A sound image has no longer extents.
const MOST_BYTES: u64 = 1 << 30;

/// A range of a file and the extent items that it has now, with holes where they matter.
#[derive(Debug)]
pub(super) struct ChangedRange {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) items: Vec<(Key, Vec<u8>)>,
}

/// What is logged of an inode.
#[derive(Debug)]
pub(crate) struct Contribution {
    pub(super) inode: Arc<Inode>,
    pub(super) item: InodeItem,
    pub(super) changed_ranges: Vec<ChangedRange>,
    /// Inodes whose names decide that this inode's names are as they are.
    pub(super) companions: Vec<ObjectId>,
    /// Checksums, by the address of their first sector.
    pub(super) sums: BTreeMap<Logical, Vec<u8>>,
    /// Other files may have brought some of them in, because the inode got or gave extents in this
    /// transaction.
    pub(super) shares: bool,
}

/// The two versions whose difference a log describes.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) base: Version,
    pub(super) now: Version,
}

impl Pair {
    /// The versions of a subvolume as `txn` sees it. The caller keeps `txn` from being sealed.
    ///
    /// # Errors
    /// The subvolume has no version from before the transaction.
    pub(super) fn of(core: &Core, subvol: &crate::engine::Subvolume, txn: &Txn) -> Result<Self> {
        let epoch = core.epochs.enter();
        let base =
            subvol.base_before(txn.generation).ok_or(NotLogged::Commit(Cause::NewSubvolume))?;
        let now = subvol.tree.version(epoch.clone());
        let base = Version { tree: subvol.id, root: base, store: core.store.clone(), epoch };
        Ok(Self { base, now })
    }
    /// Copies the leaves of an inode's items that have changed in a transaction, while their tree
    /// is locked: for [`crate::older::LogCopies::Locked`].
    pub(super) fn copy_leaves_locked(&self, inode: &Inode, generation: Generation) -> Result<()> {
        let ino = inode.object();
        let mut last = None;
        inode.subvol.tree.locked(|| {
            self.now.scan_since(generation, &inode_key(ino), |item| {
                if item.key.objectid == ino
                    && last.replace(item.leaf_address()) != Some(item.leaf_address())
                {
                    drop(std::hint::black_box(item.copy_of_leaf()));
                }
                Ok(item.key.objectid == ino)
            })
        })?;
        Ok(())
    }
}

/// Collects the content of an inode for the log of `txn`, which may be sealed meanwhile.
///
/// # Errors
/// Reading or corruption; content that a log cannot describe.
pub(super) fn collect(
    core: &Core,
    inode: &Arc<Inode>,
    txn: &Txn,
    item: InodeItem,
    ranges: Vec<(u64, u64)>,
    versions: &Pair,
) -> Result<Contribution> {
    let mut out = Contribution {
        inode: inode.clone(),
        item,
        changed_ranges: Vec::new(),
        companions: Vec::new(),
        sums: BTreeMap::new(),
        shares: inode.last_reflink.load(Ordering::Acquire) >= txn.generation.0,
    };
    let ranges = match inode.kind {
        FileKind::Regular => ranges,
        FileKind::Symlink => vec![(0, SECTOR)],
        _ => return Ok(out),
    };
    let size = ceil(item.size.get().min(MAX_FILE_SIZE));
    out.changed_ranges = changed_ranges(versions, inode, ranges, size, txn.generation)?;
    let mut incompat = 0;
    for (key, data) in out.changed_ranges.iter().flat_map(|w| &w.items) {
        let compression = match parse(inode, *key, data)? {
            FileExtent::Inline(inline) => inline.compression,
            FileExtent::Stored(r) if r.is_hole() => continue,
            FileExtent::Stored(r) => {
                add_data(core, inode, txn, &r, out.shares, &mut out.sums)?;
                r.compression
            }
        };
        incompat |= crate::file::property::incompat(compression).bits();
    }
    let has = Incompat::from_bits_retain(core.superblock.lock().incompat_flags.get());
    if !has.contains(Incompat::from_bits_retain(incompat)) {
        return Err(NotLogged::Commit(Cause::Feature));
    }
    Ok(out)
}

/// What a file has in the ranges that have changed. These may overlap.
fn changed_ranges(
    versions: &Pair,
    inode: &Inode,
    mut ranges: Vec<(u64, u64)>,
    size: u64,
    generation: Generation,
) -> Result<Vec<ChangedRange>> {
    // Replaying cuts a file behind its end. What is preallocated there comes back only from the
    // log.
    ranges.push((size, MAX_FILE_SIZE + 1));
    ranges.sort_unstable();
    let (mut reached, mut items, mut found) = (0, 0, Vec::new());
    for (start, end) in ranges {
        let (start, end) = (floor(start).max(reached), ceil(end));
        if start >= end {
            continue;
        }
        let changed = changed_range(versions, inode, (start, end), size, generation)?;
        items += changed.items.len();
        if items > MOST_ITEMS {
            return Err(NotLogged::Commit(Cause::TooMuch));
        }
        reached = changed.end;
        found.push(changed);
    }
    Ok(found)
}

/// Adds the checksums of the data that an extent item has.
///
/// # Errors
/// Reading or corruption; data that a log cannot have.
fn add_data(
    core: &Core,
    inode: &Inode,
    txn: &Txn,
    r: &ExtentRecord,
    shares: bool,
    out: &mut BTreeMap<Logical, Vec<u8>>,
) -> Result<()> {
    if core.space.groups.find(r.disk_bytenr).is_none_or(|g| g.created_in() >= txn.generation) {
        return Err(NotLogged::Commit(Cause::NewChunk));
    }
    if shares && !fault!(core.options.tuning, LogPreallocated) && is_filled(txn, inode, r) {
        return Err(NotLogged::Commit(Cause::Preallocated));
    }
    if r.kind != ExtentKind::Regular || fault!(core.options.tuning, LogNoCsums) {
        return Ok(());
    }
    let all = sums(core, txn, r, shares, out);
    let summed = !inode.flags().contains(InodeFlags::NODATASUM);
    if !all
        && summed
        && r.generation == txn.generation
        && !fault!(core.options.tuning, LogOlderCsums)
    {
        older_sums(core, txn, r, shares, out)?;
    }
    Ok(())
}

fn parse<'a>(inode: &Inode, key: Key, data: &'a [u8]) -> Result<FileExtent<'a>> {
    FileExtent::parse(data)
        .map_err(|e| NotLogged::Fail(Error::corrupt(Place::item(inode.id.subvol, key), e.0)))
}

/// Where an extent item ends in its file, in whole sectors.
fn end_of(key: Key, extent: &FileExtent<'_>) -> u64 {
    match extent {
        FileExtent::Inline(_) => SECTOR,
        FileExtent::Stored(r) => key.offset.saturating_add(r.num_bytes).min(MAX_FILE_SIZE + 1),
    }
}

/// What the extent items of a range have in it, and no more. What an item has before and behind the
/// range was logged when it changed, or the last commit has it. A file whose preallocated extent is
/// filled piece by piece has one item for everything that is written, and each log has the new
/// piece.
fn changed_range(
    versions: &Pair,
    inode: &Inode,
    (start, end): (u64, u64),
    size: u64,
    generation: Generation,
) -> Result<ChangedRange> {
    let ino = inode.object();
    let key = |at: u64| extent_data_key(ino, FileOffset(at));
    let mut out = ChangedRange { start, end, items: Vec::new() };
    let first = versions.now.at_or_before(&key(start))?;
    let first = first.filter(|i| i.key.objectid == ino && i.key.kind == KeyType::EXTENT_DATA);
    let from = first.map_or(key(start), |item| item.key);
    let mut reached = start;
    let mut failed = None;
    versions.now.scan(&from, &key(end - 1), |item| {
        let extent = match parse(inode, item.key, item.data()) {
            Ok(extent) => extent,
            Err(stop) => {
                failed = Some(stop);
                return Ok(false);
            }
        };
        let to = end_of(item.key, &extent);
        if to > start {
            out.hole(key(reached), item.key.offset.min(size), generation);
            out.items.push(match extent {
                FileExtent::Stored(r) => {
                    let at = item.key.offset.max(start);
                    part_of(item.key, &r, (at, to.min(end)))
                }
                FileExtent::Inline(_) => (item.key, item.data().to_vec()),
            });
            reached = to.min(end);
        }
        Ok(out.items.len() <= MOST_ITEMS)
    })?;
    if let Some(stop) = failed {
        return Err(stop);
    }
    out.hole(key(reached), end.min(size), generation);
    Ok(out)
}

/// The item for a part of what an extent item has of a file.
pub(super) fn part_of(key: Key, r: &ExtentRecord, (start, end): (u64, u64)) -> (Key, Vec<u8>) {
    let mut part = r.part(start - key.offset..end - key.offset);
    if part.is_hole() {
        part.ram_bytes = part.num_bytes;
    }
    (Key { offset: start, ..key }, part.encode().to_vec())
}

impl ChangedRange {
    /// Adds an item that says: there is nothing from a key on up to `end`. Logs have items for all
    /// holes.
    fn hole(&mut self, from: Key, end: u64, generation: Generation) {
        if from.offset < end {
            let hole = ExtentRecord::hole(generation, end - from.offset);
            self.items.push((from, hole.encode().to_vec()));
        }
    }
}

/// Has another file written into the extent while it had it preallocated? The log may not have that
/// file, or may have it from before the write. Replaying would then give it preallocated space that
/// has checksums.
fn is_filled(txn: &Txn, inode: &Inode, r: &ExtentRecord) -> bool {
    r.kind == ExtentKind::Regular
        && txn.filled.lock().get(&r.disk_bytenr).is_some_and(|whose| *whose != inode.id)
}

/// The part of an extent's data for which an item needs checksums.
fn summed(r: &ExtentRecord) -> Run {
    match r.compression {
        Compression::None => {
            Run::new(Logical(r.disk_bytenr.0.saturating_add(r.offset)), r.num_bytes)
        }
        _ => Run::new(r.disk_bytenr, r.disk_num_bytes),
    }
}

/// Adds the checksums of an extent item's data that the transaction has noted. False if some are
/// missing.
///
/// Notes are taken whole, although a note may cover several extents that were written together. So
/// the items of a log are equal or apart, whichever extents they were logged for. Replaying takes
/// those for which it has extents.
///
/// A file that shares extents is an exception. It may use what another file has written into space
/// that is preallocated according to the log, which may have that file from before. Sectors of such
/// space must not have checksums. So only the part of the extent that this file has is taken
/// (`content::put_sums` keeps such items apart).
fn sums(
    core: &Core,
    txn: &Txn,
    r: &ExtentRecord,
    shares: bool,
    out: &mut BTreeMap<Logical, Vec<u8>>,
) -> bool {
    let run = summed(r);
    let (start, end) = (run.start, run.end());
    let mut missing = run.len;
    let noted = txn.csums.lock();
    let before = noted.range(..start).next_back();
    let before = before.filter(|(at, sums)| sums_end(core, **at, sums) > start);
    let before = before.filter(|_| !fault!(core.options.tuning, LogPartCsums));
    for (at, sums) in before.into_iter().chain(noted.range(start..end)) {
        let (from, to) = (start.max(*at), end.min(sums_end(core, *at, sums)));
        missing = missing.saturating_sub(to.0 - from.0);
        if shares {
            add_part(core, (*at, sums), (from, to), out);
        } else {
            out.entry(*at).or_insert_with(|| sums.clone());
        }
    }
    missing == 0
}

/// Adds the checksums that an extent had before the transaction. They are needed when a part of the
/// item's data was written into preallocated space in this transaction, and another part in an
/// earlier one.
///
/// Nothing would be lost without them, since the checksum tree has them, but a log has all that its
/// items need. Those of the whole extent are taken, for the same reason as whole notes.
fn older_sums(
    core: &Core,
    txn: &Txn,
    r: &ExtentRecord,
    shares: bool,
    out: &mut BTreeMap<Logical, Vec<u8>>,
) -> Result<()> {
    if r.disk_num_bytes > MOST_BYTES {
        return Err(NotLogged::Commit(Cause::TooMuch));
    }
    let before = Sums::before(core, txn).ok_or(NotLogged::Sealed)?;
    let part = summed(r);
    for (at, sums) in before.pieces(core, Run::new(r.disk_bytenr, r.disk_num_bytes))? {
        let end = sums_end(core, at, &sums);
        if !shares {
            out.insert(at, sums);
        } else if let Some(both) = Run::new(at, end.0 - at.0).intersect(part) {
            add_part(core, (at, &sums), (both.start, both.end()), out);
        }
    }
    Ok(())
}

/// Adds the part of some checksums that is for `from..to`.
fn add_part(
    core: &Core,
    (at, sums): (Logical, &[u8]),
    (from, to): (Logical, Logical),
    out: &mut BTreeMap<Logical, Vec<u8>>,
) {
    let bytes = |to: Logical| (to.0 - at.0) as usize / SECTOR as usize * core.csum.size();
    let part = &sums[bytes(from)..bytes(to)];
    let known = out.entry(from).or_default();
    if known.len() < part.len() {
        *known = part.to_vec();
    }
}

/// Where the data ends whose checksums these are, from an address on.
pub(super) fn sums_end(core: &Core, at: Logical, sums: &[u8]) -> Logical {
    at.plus((sums.len() / core.csum.size()) as u64 * SECTOR)
}

/// Items for checksums, each as long as an item may be.
pub(super) fn sum_items(
    core: &Core,
    at: Logical,
    sums: &[u8],
) -> impl Iterator<Item = (Key, Vec<u8>)> {
    let size = core.csum.size();
    let most =
        csum_tree::max_sums(larder_format::node::max_item_size(core.nodesize()), core.csum) * size;
    let first = move |n: usize| csum_key(at.plus((n * most / size) as u64 * SECTOR));
    sums.chunks(most)
        .enumerate()
        .map(move |(n, some)| (first(n), some.to_vec()))
        .collect::<Vec<_>>()
        .into_iter()
}
