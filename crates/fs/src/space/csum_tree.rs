//! Data checksums: how one checksum per sector is packed into items.
//!
//! An item holds the checksums of adjacent sectors of the *logical* space, whatever files they
//! belong to. This module keeps the packing: items never overlap, neighbours are joined as far as
//! an item may grow, and a deletion trims or splits. Callers speak of sectors only.
//!
//! Appending extends one item, and at most the largest item's size is copied. So `n` runs that are
//! inserted in order cost `n` bounded edits.

use crate::error::{Error, Place, Result};
use crate::space::Run;
use crate::tree::TreeOps;
use larder_format::{CsumType, Key, KeyType, Logical, ObjectId, SECTOR_SIZE};

/// Bytes in a sector, which has one checksum.
const SECTOR: u64 = SECTOR_SIZE as u64;

/// Most checksums in one item, of a tree whose largest item has `max_item_size` bytes.
#[must_use]
pub(crate) fn max_sums(max_item_size: usize, csum: CsumType) -> usize {
    // The leaf's capacity less two item headers, and one checksum to spare. Linux stops there, too.
    const ITEM_HEADER: usize = larder_format::node::ITEM_SIZE;
    (max_item_size.saturating_sub(ITEM_HEADER) / csum.size()).saturating_sub(1).max(1)
}

fn key_of(start: Logical) -> Key {
    Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, start.0)
}

/// An item: the sectors that it covers and their checksums.
struct Item {
    key: Key,
    run: Run,
    sums: Vec<u8>,
}

impl Item {
    fn parse(key: Key, sums: Vec<u8>, csum: CsumType) -> Result<Option<Self>> {
        if (key.objectid, key.kind) != (ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM) {
            return Ok(None);
        }
        let len = (sums.len() / csum.size()) as u64 * SECTOR;
        if sums.is_empty()
            || !sums.len().is_multiple_of(csum.size())
            || !key.offset.is_multiple_of(SECTOR)
            || key.offset.checked_add(len).is_none()
        {
            let what = format!("checksum item of {} bytes", sums.len());
            return Err(Error::corrupt(Place::item(ObjectId::CSUM_TREE, key), what));
        }
        Ok(Some(Self { key, run: Run::new(Logical(key.offset), len), sums }))
    }
    /// The checksums of a part of the item.
    fn part(&self, part: Run, csum: CsumType) -> &[u8] {
        let at = |a: Logical| bytes_of(a.0 - self.run.start.0, csum);
        &self.sums[at(part.start)..at(part.end())]
    }
}

/// Bytes of the checksums of `len` bytes of data.
fn bytes_of(len: u64, csum: CsumType) -> usize {
    usize::try_from(len / SECTOR).expect("checksums fit in memory") * csum.size()
}

/// The item that covers `at`, or else the last item before it.
fn before(tree: &mut dyn TreeOps, csum: CsumType, at: Logical) -> Result<Option<Item>> {
    match tree.at_or_before(&key_of(at))? {
        Some((key, data)) => Item::parse(key, data, csum),
        None => Ok(None),
    }
}
/// The first item that starts at `at` or after it.
fn after(tree: &mut dyn TreeOps, csum: CsumType, at: Logical) -> Result<Option<Item>> {
    match tree.at_or_after(&key_of(at))? {
        Some((key, data)) => Item::parse(key, data, csum),
        None => Ok(None),
    }
}

/// Stores the checksums of the sectors from `start` on. They replace what was stored for these
/// sectors.
///
/// `sums` are the checksums, [`CsumType::size`] bytes each, one after the other.
///
/// # Errors
/// `Corrupt` when items are not what they must be.
pub(crate) fn insert(
    tree: &mut dyn TreeOps,
    csum: CsumType,
    start: Logical,
    sums: &[u8],
) -> Result<()> {
    assert!(
        start.0.is_multiple_of(SECTOR) && sums.len().is_multiple_of(csum.size()),
        "whole sectors"
    );
    if sums.is_empty() {
        return Ok(());
    }
    let run = Run::new(start, (sums.len() / csum.size()) as u64 * SECTOR);
    let max = max_sums(tree.max_item_size(), csum) * csum.size();
    let mut left = before(tree, csum, start)?;
    let mut right = after(tree, csum, Logical(start.0 + 1))?;
    if left.as_ref().is_some_and(|i| i.run.overlaps(run))
        || right.as_ref().is_some_and(|i| i.run.overlaps(run))
    {
        delete(tree, csum, run)?;
        left = before(tree, csum, start)?;
        right = after(tree, csum, start)?;
    }
    let (mut at, mut rest) = (start, sums);
    // Fills up the item that ends here.
    if let Some(mut item) = left.filter(|i| i.run.end() == start && i.sums.len() < max) {
        let take = rest.len().min(max - item.sums.len());
        item.sums.extend_from_slice(&rest[..take]);
        rest = &rest[take..];
        at = Logical(at.0 + (take / csum.size()) as u64 * SECTOR);
        // If all of it fits, and the item that follows fits, too, the gap is closed.
        if rest.is_empty()
            && let Some(next) =
                right.take_if(|n| n.run.start == at && item.sums.len() + n.sums.len() <= max)
        {
            tree.delete(&next.key)?;
            item.sums.extend_from_slice(&next.sums);
        }
        tree.update(&item.key, &item.sums)?;
    }
    while !rest.is_empty() {
        let take = rest.len().min(max);
        let mut chunk = std::borrow::Cow::Borrowed(&rest[..take]);
        let end = Logical(at.0 + (take / csum.size()) as u64 * SECTOR);
        if take == rest.len()
            && let Some(next) = right.take_if(|n| n.run.start == end && take + n.sums.len() <= max)
        {
            tree.delete(&next.key)?;
            chunk.to_mut().extend_from_slice(&next.sums);
        }
        tree.insert(&key_of(at), &chunk)?;
        (at, rest) = (end, &rest[take..]);
    }
    Ok(())
}

/// Forgets the checksums of all sectors of `range`; having none is fine.
///
/// # Errors
/// `Corrupt` when items are not what they must be.
pub(crate) fn delete(tree: &mut dyn TreeOps, csum: CsumType, range: Run) -> Result<()> {
    assert!(
        range.start.0.is_multiple_of(SECTOR) && range.len.is_multiple_of(SECTOR),
        "whole sectors"
    );
    let mut next = before(tree, csum, range.start)?;
    if next.as_ref().is_none_or(|i| i.run.end() <= range.start) {
        next = after(tree, csum, range.start)?;
    }
    while let Some(item) = next.filter(|i| i.run.overlaps(range)) {
        let end = item.run.end();
        if item.run.start < range.start {
            let keep = Run::new(item.run.start, range.start.0 - item.run.start.0);
            tree.update(&item.key, item.part(keep, csum))?;
        } else {
            tree.delete(&item.key)?;
        }
        if range.end() < end {
            let keep = Run::new(range.end(), end.0 - range.end().0);
            tree.insert(&key_of(keep.start), item.part(keep, csum))?;
            break;
        }
        next = after(tree, csum, end)?;
    }
    Ok(())
}

/// Calls `each` for every sector of `range`, in order, with its checksum if it has one.
///
/// # Errors
/// `Corrupt` when items are not what they must be.
pub(crate) fn read(
    tree: &mut dyn TreeOps,
    csum: CsumType,
    range: Run,
    each: &mut dyn FnMut(Logical, Option<&[u8]>),
) -> Result<()> {
    assert!(
        range.start.0.is_multiple_of(SECTOR) && range.len.is_multiple_of(SECTOR),
        "whole sectors"
    );
    let mut at = range.start;
    let mut next = before(tree, csum, at)?;
    if next.as_ref().is_none_or(|i| i.run.end() <= at) {
        next = after(tree, csum, at)?;
    }
    while at < range.end() {
        let part = next.as_ref().and_then(|i| i.run.intersect(Run::new(at, range.end().0 - at.0)));
        let gap_end = part.map_or(range.end(), |p| p.start);
        while at < gap_end {
            each(at, None);
            at = at.plus(SECTOR);
        }
        if let (Some(part), Some(item)) = (part, &next) {
            for sum in item.part(part, csum).chunks_exact(csum.size()) {
                each(at, Some(sum));
                at = at.plus(SECTOR);
            }
            if at < range.end() {
                next = after(tree, csum, at)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::ops::MapTree;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::ops::Range;

    const BASE: u64 = 1 << 30;
    fn run(sectors: Range<u64>) -> Run {
        let at = |sector: u64| Logical(BASE + sector * SECTOR);
        Run::between(at(sectors.start), at(sectors.end)).expect("not empty")
    }
    /// Checksums of sectors with these numbers in them.
    fn sums(csum: CsumType, numbers: Range<u64>) -> Vec<u8> {
        numbers.flat_map(|n| csum.compute(&n.to_le_bytes())[..csum.size()].to_vec()).collect()
    }
    fn check(t: &MapTree, csum: CsumType) {
        let max = max_sums(16258, csum) * csum.size();
        let mut end = Logical(0);
        for (k, v) in &t.0 {
            let item = Item::parse(*k, v.clone(), csum).unwrap().unwrap();
            assert!(item.run.start >= end && v.len() <= max, "{k}");
            end = item.run.end();
        }
    }

    #[test]
    fn limit_is_that_of_linux() {
        assert_eq!(max_sums(larder_format::node::max_item_size(16384), CsumType::Crc32c), 4057);
    }

    #[test]
    fn adjacent_runs_fill_items_up_to_the_limit() {
        let csum = CsumType::Crc32c;
        let mut t = MapTree::default();
        for i in 0..2000 {
            insert(&mut t, csum, run(i * 4..i * 4 + 4).start, &sums(csum, i * 4..i * 4 + 4))
                .unwrap();
        }
        let sizes: Vec<_> = t.0.values().map(|v| v.len() / 4).collect();
        assert_eq!(sizes, [4057, 8000 - 4057]);
        // A gap that is filled joins its neighbours.
        let mut t = MapTree::default();
        for first in [0, 8, 4] {
            insert(&mut t, csum, run(first..first + 4).start, &sums(csum, first..first + 4))
                .unwrap();
        }
        assert_eq!(t.0.len(), 1);
        assert_eq!(t.0.values().next().unwrap(), &sums(csum, 0..12));
    }

    #[test]
    fn broken_items_are_reported() {
        let csum = CsumType::Crc32c;
        for (offset, len) in [(BASE, 5), (BASE + 1, 8), (u64::MAX - 4095, 8), (BASE, 0)] {
            let mut t = MapTree::default();
            t.0.insert(key_of(Logical(offset)), vec![0; len]);
            let near = Logical((offset & !4095) - 2 * SECTOR);
            let part = Run::new(near, 2 * SECTOR);
            assert!(read(&mut t, csum, part, &mut |_, _| ()).is_err());
            assert!(insert(&mut t, csum, near.plus(SECTOR), &[0; 4]).is_err());
            assert!(delete(&mut t, csum, part).is_err());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(80))]
        #[test]
        fn items_match_a_map(
            wide in any::<bool>(),
            ops in prop::collection::vec(
                (0u8..3, 0u64..9000, 1u64..5000, any::<u64>(), any::<bool>()),
                1..60,
            ),
        ) {
            let csum = if wide { CsumType::Sha256 } else { CsumType::Crc32c };
            let mut t = MapTree::default();
            let mut model: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
            for (op, first, len, seed, short) in ops {
                let len = if short { 1 + len % 20 } else { len };
                let seed = seed >> 1;
                if op > 0 {
                    let s = sums(csum, seed..seed + len);
                    insert(&mut t, csum, run(first..first + len).start, &s).unwrap();
                    for i in 0..len {
                        let at = i as usize * csum.size();
                        model.insert(first + i, s[at..at + csum.size()].to_vec());
                    }
                } else {
                    delete(&mut t, csum, run(first..first + len)).unwrap();
                    model.retain(|n, _| !(first..first + len).contains(n));
                }
                check(&t, csum);
                let (from, n) = (seed % 9000, 700);
                let mut got = Vec::new();
                let mut push = |at, s: Option<&[u8]>| got.push((at, s.map(<[u8]>::to_vec)));
                read(&mut t, csum, run(from..from + n), &mut push).unwrap();
                let want: Vec<_> = (from..from + n)
                    .map(|i| (run(i..i + 1).start, model.get(&i).cloned())).collect();
                prop_assert_eq!(got, want);
            }
            let stored: usize = t.0.values().map(Vec::len).sum();
            prop_assert_eq!(stored, model.len() * csum.size());
        }
    }
}
