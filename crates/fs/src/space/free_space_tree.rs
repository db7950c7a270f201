//! The free-space tree: how free space of a block group lies in items.
//!
//! Each group has a FREE_SPACE_INFO item and its free space in one of two forms: FREE_SPACE_EXTENT
//! items, one per maximal run, or FREE_SPACE_BITMAP items of 2048 sectors each that cover the whole
//! group. This module alone knows the forms; callers add and remove ranges. It keeps what readers
//! rely on. Extents are maximal. `extent_count` counts maximal runs in both forms: a run may cross
//! bitmap borders and counts once. The form changes at the thresholds where the other one is
//! smaller. Between the two thresholds is a gap, so that a group at the border does not flip with
//! each edit.
//!
//! Each edit touches the items of its range and its two neighbours; only a change of form touches
//! the group. The tree describes the *applied* state, superblock mirrors listed as free included.

use crate::error::{Error, Place, Result};
use crate::space::Run;
use crate::tree::TreeOps;
use larder_format::items::FreeSpaceInfo;
use larder_format::items::free_space::{BITMAP_RANGE, BITMAP_SIZE};
use larder_format::{Key, KeyType, Logical, ObjectId, SECTOR_SIZE};
use zerocopy::IntoBytes;

/// Bytes in a sector, the unit of a bit.
const SECTOR: u64 = SECTOR_SIZE as u64;
/// Bytes of an item header in a leaf, part of the price of an item.
const ITEM_HEADER: u64 = 25;

/// A group of `len` bytes with more runs than the first number turns into bitmaps. With fewer runs
/// than the second number it turns back into extents.
#[must_use]
pub(crate) fn thresholds(len: u64) -> (u64, u64) {
    let bitmaps = len.div_ceil(BITMAP_RANGE);
    let high = bitmaps.saturating_mul(ITEM_HEADER + BITMAP_SIZE as u64) / ITEM_HEADER;
    (high, high.saturating_sub(100))
}

fn corrupt(key: Key, what: impl Into<String>) -> Error {
    Error::corrupt(Place::item(ObjectId::FREE_SPACE_TREE, key), what)
}
fn info_key(group: Run) -> Key {
    Key::new(group.start, KeyType::FREE_SPACE_INFO, group.len)
}
fn extent_key(run: Run) -> Key {
    Key::new(run.start, KeyType::FREE_SPACE_EXTENT, run.len)
}

/// The info item of a group, in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Info {
    extents: u32,
    bitmaps: bool,
}

impl Info {
    fn read(tree: &mut dyn TreeOps, group: Run) -> Result<Self> {
        let key = info_key(group);
        let data = tree
            .get(&key)?
            .ok_or_else(|| corrupt(key, "the block group has no free-space info"))?;
        let item = FreeSpaceInfo::parse(&data).map_err(|e| corrupt(key, e.0))?;
        Ok(Self { extents: item.extent_count.get(), bitmaps: item.uses_bitmaps() })
    }
    fn item(self) -> FreeSpaceInfo {
        FreeSpaceInfo::new(self.extents, self.bitmaps)
    }
    fn count(self, group: Run, delta: i64) -> Result<Self> {
        let extents = u32::try_from(i64::from(self.extents) + delta)
            .map_err(|_| corrupt(info_key(group), "extent count does not fit the free space"))?;
        Ok(Self { extents, ..self })
    }
}

/// Checks that `range` is a non-empty stretch of whole sectors in the group. It comes from extent
/// items, which may be damaged.
fn check_range(group: Run, range: Run) -> Result<()> {
    let fits = group.contains(range) && range.len > 0;
    if fits
        && range.len.is_multiple_of(SECTOR)
        && (range.start.0 - group.start.0).is_multiple_of(SECTOR)
    {
        return Ok(());
    }
    let what =
        format!("extent of {} bytes does not fit its block group at {}", range.len, group.start);
    Err(Error::corrupt(Place::block(range.start), what))
}

/// A range of the group is no longer free.
///
/// # Errors
/// `Corrupt` when part of it is not recorded as free, or the items are not what they must be.
pub(crate) fn remove(tree: &mut dyn TreeOps, group: Run, range: Run) -> Result<()> {
    check_range(group, range)?;
    let info = Info::read(tree, group)?;
    let delta = if info.bitmaps {
        edit_bits(tree, group, range, false)?
    } else {
        let (key, found) = extent_at(tree, group, range.start)?
            .filter(|(_, run)| run.contains(range))
            .ok_or_else(|| {
                corrupt(extent_key(range), "space to allocate is not recorded as free")
            })?;
        tree.delete(&key)?;
        let mut delta = -1;
        for (start, end) in [(found.start, range.start), (range.end(), found.end())] {
            if start < end {
                tree.insert(&extent_key(Run::new(start, end.0 - start.0)), &[])?;
                delta += 1;
            }
        }
        delta
    };
    finish(tree, group, info.count(group, delta)?, info)
}

/// A range of the group is free from now on.
///
/// # Errors
/// `Corrupt` when part of it is already recorded as free, or the items are not what they must be.
pub(crate) fn add(tree: &mut dyn TreeOps, group: Run, range: Run) -> Result<()> {
    check_range(group, range)?;
    let info = Info::read(tree, group)?;
    let delta = if info.bitmaps {
        edit_bits(tree, group, range, true)?
    } else {
        let mut merged = range;
        let mut delta = 1;
        if let Some((key, before)) = extent_at(tree, group, range.start)? {
            if before.end() > range.start {
                return Err(corrupt(
                    key,
                    format!("space that becomes free at {} is free", range.start),
                ));
            }
            if before.end() == range.start {
                tree.delete(&key)?;
                merged = Run::new(before.start, before.len + range.len);
                delta -= 1;
            }
        }
        // The type is in the key, so that the info item of a group that starts right here is passed
        // over.
        let next = tree.at_or_after(&Key::new(range.start, KeyType::FREE_SPACE_EXTENT, 0))?;
        if let Some((key, _)) = next
            && key.objectid.0 < group.end().0
        {
            let after = parse_extent(key, group)?;
            if after.start < range.end() {
                return Err(corrupt(
                    key,
                    format!("space that becomes free at {} is free", range.start),
                ));
            }
            if after.start == range.end() {
                tree.delete(&key)?;
                merged.len += after.len;
                delta -= 1;
            }
        }
        tree.insert(&extent_key(merged), &[])?;
        delta
    };
    finish(tree, group, info.count(group, delta)?, info)
}

/// Writes the info item back if it changed, and changes the form where the count asks for it.
fn finish(tree: &mut dyn TreeOps, group: Run, mut info: Info, old: Info) -> Result<()> {
    let (high, low) = thresholds(group.len);
    let count = u64::from(info.extents);
    if !info.bitmaps && count > high {
        let runs = collect(tree, group, info)?;
        clear(tree, group)?;
        info.bitmaps = true;
        write_bitmaps(tree, group, &runs)?;
    } else if info.bitmaps && count < low {
        let runs = collect(tree, group, info)?;
        clear(tree, group)?;
        info.bitmaps = false;
        write_extents(tree, &runs)?;
    }
    if info == old { Ok(()) } else { tree.update(&info_key(group), info.item().as_bytes()) }
}

fn collect(tree: &mut dyn TreeOps, group: Run, info: Info) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    walk(tree, group, info, &mut |run| {
        runs.push(run);
        Ok(())
    })?;
    if runs.len() as u64 != u64::from(info.extents) {
        let what = format!("incorrect extent count: {} instead of {}", info.extents, runs.len());
        return Err(corrupt(info_key(group), what));
    }
    Ok(runs)
}

/// Removes extents and bitmaps of a group; the info item stays.
fn clear(tree: &mut dyn TreeOps, group: Run) -> Result<()> {
    let mut from = Key::new(group.start, KeyType::FREE_SPACE_EXTENT, 0);
    while let Some((key, _)) = tree.at_or_after(&from)? {
        if key.objectid.0 >= group.end().0 {
            break;
        }
        tree.delete(&key)?;
        from = key;
    }
    Ok(())
}

fn write_extents(tree: &mut dyn TreeOps, runs: &[Run]) -> Result<()> {
    runs.iter().try_for_each(|run| tree.insert(&extent_key(*run), &[]))
}

fn write_bitmaps(tree: &mut dyn TreeOps, group: Run, runs: &[Run]) -> Result<()> {
    let mut next = 0;
    for map in bitmaps_of(group, group) {
        let mut bits = vec![0u8; bitmap_size(map)];
        while let Some(part) = runs.get(next).and_then(|run| run.intersect(map)) {
            set_bits(&mut bits, map, part, true);
            if runs[next].end() > map.end() {
                break;
            }
            next += 1;
        }
        tree.insert(&Key::new(map.start, KeyType::FREE_SPACE_BITMAP, map.len), &bits)?;
    }
    Ok(())
}

/// The bitmaps of a group that cover a part of it.
fn bitmaps_of(group: Run, part: Run) -> impl Iterator<Item = Run> {
    let first = (part.start.0 - group.start.0) / BITMAP_RANGE;
    let end = (part.end().0 - group.start.0).div_ceil(BITMAP_RANGE);
    (first..end).map(move |i| {
        let start = group.start.plus(i * BITMAP_RANGE);
        Run::new(start, BITMAP_RANGE.min(group.end().0 - start.0))
    })
}

fn bitmap_size(map: Run) -> usize {
    usize::try_from((map.len / SECTOR).div_ceil(8)).expect("at most 256")
}

/// Bit numbers of a part of a bitmap.
fn bit_range(map: Run, part: Run) -> std::ops::Range<usize> {
    let bit = |a: Logical| usize::try_from((a.0 - map.start.0) / SECTOR).expect("at most 2048");
    bit(part.start)..bit(part.end())
}
fn get_bit(bits: &[u8], n: usize) -> bool {
    bits[n / 8] >> (n % 8) & 1 == 1
}
fn set_bits(bits: &mut [u8], map: Run, part: Run, value: bool) {
    for n in bit_range(map, part) {
        if value {
            bits[n / 8] |= 1 << (n % 8);
        } else {
            bits[n / 8] &= !(1 << (n % 8));
        }
    }
}

fn read_bitmap(tree: &mut dyn TreeOps, map: Run) -> Result<(Key, Vec<u8>)> {
    let key = Key::new(map.start, KeyType::FREE_SPACE_BITMAP, map.len);
    let bits = tree.get(&key)?.ok_or_else(|| corrupt(key, "free-space bitmap is missing"))?;
    if bits.len() != bitmap_size(map) {
        return Err(corrupt(key, format!("free-space bitmap of {} bytes", bits.len())));
    }
    Ok((key, bits))
}

/// Is the sector at `at` free, in a group of bitmap form? Outside of the group nothing is free.
fn is_free(tree: &mut dyn TreeOps, group: Run, at: Option<Logical>) -> Result<bool> {
    let Some(sector) = at.map(|a| Run::new(a, SECTOR)).filter(|r| group.contains(*r)) else {
        return Ok(false);
    };
    let Some(map) = bitmaps_of(group, sector).next() else { return Ok(false) };
    let (_, bits) = read_bitmap(tree, map)?;
    Ok(get_bit(&bits, bit_range(map, sector).start))
}

/// Turns all bits of a range. Returns by how much the number of runs changes.
fn edit_bits(tree: &mut dyn TreeOps, group: Run, range: Run, free: bool) -> Result<i64> {
    let before = is_free(tree, group, range.start.0.checked_sub(SECTOR).map(Logical))?;
    let after = is_free(tree, group, Some(range.end()))?;
    for map in bitmaps_of(group, range) {
        let (key, mut bits) = read_bitmap(tree, map)?;
        let part = range.intersect(map).expect("bitmaps of the range");
        if bit_range(map, part).any(|n| get_bit(&bits, n) == free) {
            let what = if free {
                "space that becomes free is free"
            } else {
                "space to allocate is not free"
            };
            return Err(corrupt(key, format!("{what}: {} bytes at {}", part.len, part.start)));
        }
        set_bits(&mut bits, map, part, free);
        tree.update(&key, &bits)?;
    }
    let joined = i64::from(before) + i64::from(after);
    Ok(if free { 1 - joined } else { joined - 1 })
}

/// The free extent of a key, checked against the group.
fn parse_extent(key: Key, group: Run) -> Result<Run> {
    if key.kind != KeyType::FREE_SPACE_EXTENT {
        return Err(corrupt(key, "not a free-space extent, in a block group of extents"));
    }
    if key.offset == 0
        || !key.offset.is_multiple_of(SECTOR)
        || key.objectid.0 < group.start.0
        || !(key.objectid.0 - group.start.0).is_multiple_of(SECTOR)
        || key.objectid.0.checked_add(key.offset).is_none_or(|end| end > group.end().0)
    {
        return Err(corrupt(key, "free-space extent does not lie in its block group"));
    }
    Ok(Run::new(Logical(key.objectid.0), key.offset))
}

/// The last free extent that starts at or before an address of the group.
fn extent_at(tree: &mut dyn TreeOps, group: Run, at: Logical) -> Result<Option<(Key, Run)>> {
    let key = Key::new(at, KeyType::FREE_SPACE_EXTENT, u64::MAX);
    match tree.at_or_before(&key)? {
        Some((key, _))
            if key.objectid.0 >= group.start.0 && key.kind != KeyType::FREE_SPACE_INFO =>
        {
            Ok(Some((key, parse_extent(key, group)?)))
        }
        _ => Ok(None),
    }
}

/// Calls `each` with every maximal run of free space of the group, in address order.
///
/// # Errors
/// `Corrupt` when the info item is missing or wrong (its count included), when items overlap, leave
/// the group or mix the forms; whatever `each` returns.
pub(crate) fn load(
    tree: &mut dyn TreeOps,
    group: Run,
    each: &mut dyn FnMut(Run) -> Result<()>,
) -> Result<()> {
    let info = Info::read(tree, group)?;
    let mut count = 0u64;
    walk(tree, group, info, &mut |run| {
        count += 1;
        each(run)
    })?;
    if count != u64::from(info.extents) {
        let what = format!("incorrect extent count: {} instead of {count}", info.extents);
        return Err(corrupt(info_key(group), what));
    }
    Ok(())
}

/// Calls `each` with every maximal run of free space, in either form.
fn walk(
    tree: &mut dyn TreeOps,
    group: Run,
    info: Info,
    each: &mut dyn FnMut(Run) -> Result<()>,
) -> Result<()> {
    let mut pending: Option<Run> = None;
    let mut push = |run: Run| -> Result<()> {
        match &mut pending {
            Some(p) if p.end() == run.start => p.len += run.len,
            p => {
                if let Some(done) = p.replace(run) {
                    each(done)?;
                }
            }
        }
        Ok(())
    };
    if info.bitmaps {
        walk_bitmaps(tree, group, &mut push)?;
    } else {
        walk_extents(tree, group, &mut push)?;
    }
    pending.map_or(Ok(()), each)
}

/// Calls `push` with every run of set bits. A run that crosses a border comes in parts.
fn walk_bitmaps(
    tree: &mut dyn TreeOps,
    group: Run,
    push: &mut dyn FnMut(Run) -> Result<()>,
) -> Result<()> {
    for map in bitmaps_of(group, group) {
        let (_, bits) = read_bitmap(tree, map)?;
        let all = bit_range(map, map);
        let mut n = all.start;
        while n < all.end {
            if !get_bit(&bits, n) {
                n += 1;
                continue;
            }
            let first = n;
            while n < all.end && get_bit(&bits, n) {
                n += 1;
            }
            push(Run::new(map.start.plus(first as u64 * SECTOR), (n - first) as u64 * SECTOR))?;
        }
    }
    Ok(())
}

/// Calls `push` with every free extent.
fn walk_extents(
    tree: &mut dyn TreeOps,
    group: Run,
    push: &mut dyn FnMut(Run) -> Result<()>,
) -> Result<()> {
    let mut from = Key::new(group.start, KeyType::FREE_SPACE_EXTENT, 0);
    let mut end = group.start;
    while let Some((key, _)) = tree.at_or_after(&from)? {
        if key.objectid.0 >= group.end().0 {
            break;
        }
        let run = parse_extent(key, group)?;
        if run.start < end {
            return Err(corrupt(key, "free-space extents overlap"));
        }
        end = run.end();
        push(run)?;
        let Some(next) = key.successor() else { break };
        from = next;
    }
    Ok(())
}

/// Adds a group. `used` is what is allocated of it: sorted, not overlapping, whole sectors.
///
/// Items that an earlier writer left behind for this stretch are removed. So this also rebuilds a
/// group whose items are broken.
///
/// # Errors
/// Those of the tree.
pub(crate) fn new_group(tree: &mut dyn TreeOps, group: Run, used: &[Run]) -> Result<()> {
    delete_group(tree, group)?;
    let mut runs = Vec::new();
    let mut at = group.start;
    for run in used {
        check_range(group, *run)?;
        assert!(run.start >= at, "used ranges are sorted");
        if at < run.start {
            runs.push(Run::new(at, run.start.0 - at.0));
        }
        at = run.end();
    }
    if at < group.end() {
        runs.push(Run::new(at, group.end().0 - at.0));
    }
    let extents = u32::try_from(runs.len()).expect("runs of a block group");
    let bitmaps = u64::from(extents) > thresholds(group.len).0;
    let info = Info { extents, bitmaps };
    tree.insert(&info_key(group), info.item().as_bytes())?;
    if bitmaps { write_bitmaps(tree, group, &runs) } else { write_extents(tree, &runs) }
}

/// Removes every item of the group's stretch.
///
/// # Errors
/// Those of the tree.
pub(crate) fn delete_group(tree: &mut dyn TreeOps, group: Run) -> Result<()> {
    let from = Key::new(group.start, KeyType(0), 0);
    while let Some((key, _)) = tree.at_or_after(&from)? {
        if key.objectid.0 >= group.end().0 {
            break;
        }
        tree.delete(&key)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
