//! The version 1 space cache.

use crate::entry::{CACHES, Entry, mentioned, seen};
use crate::find::{ROOTS, SECTOR};
use anyhow::{Context, Result};
use larder_check::Kind;
use larder_format::csum::crc32c_raw;
use larder_format::items::{FileExtent, SpaceCacheItem};
use larder_format::{Key, KeyType, Logical, ObjectId};
use larder_simtest::damage::{Copies, Damage};
use std::ops::Range;

/// The cache with the most entries that has no bitmaps, or the one with bitmaps: its first page, and how many entries it has.
fn cache(d: &Damage, with_bitmaps: bool) -> Result<(Logical, usize, u64)> {
    let mut best = None;
    for (key, data) in d.items(ROOTS)? {
        if key.objectid != ObjectId::FREE_SPACE {
            continue;
        }
        let item = *SpaceCacheItem::parse(&data)?;
        let entries = usize::try_from(item.entries.get())?;
        if (item.bitmaps.get() > 0) == with_bitmaps && best.is_none_or(|(_, most)| entries > most) {
            best = Some((Key::from(item.location), entries));
        }
    }
    let (inode, entries) = best.context("a cache")?;
    let data = d.get(ROOTS, Key::new(inode.objectid, KeyType::EXTENT_DATA, 0))?;
    match FileExtent::parse(&data)? {
        FileExtent::Stored(record) => Ok((record.disk_bytenr, entries, record.num_bytes)),
        FileExtent::Inline(_) => anyhow::bail!("inline"),
    }
}

/// Changes a page of a cache, and gives it the sum that fits.
fn edit(d: &mut Damage, with_bitmaps: bool, page: u64, change: impl FnOnce(&mut [u8])) -> Result<()> {
    let (at, _, bytes) = cache(d, with_bitmaps)?;
    let sums = usize::try_from(bytes / SECTOR * 4)?;
    let mut sum = 0;
    d.edit_data(at.plus(page * SECTOR), Copies::All, |data| {
        change(data);
        sum = !crc32c_raw(!0, &data[if page == 0 { sums } else { 0 }..]);
    })?;
    d.edit_data(at, Copies::All, |data| {
        data[usize::try_from(page).unwrap_or(0) * 4..][..4].copy_from_slice(&sum.to_le_bytes());
    })
}

/// Changes one entry: where it begins, and its bytes.
fn entry(d: &mut Damage, n: usize, change: impl FnOnce(&mut u64, &mut u64)) -> Result<()> {
    let (_, _, bytes) = cache(d, false)?;
    let at = usize::try_from(bytes / SECTOR * 4 + 8)? + n * 17;
    let word = |at: usize| -> Range<usize> { at..at + 8 };
    edit(d, false, 0, |page| {
        let read = |page: &[u8], at| u64::from_le_bytes(page[word(at)].try_into().unwrap_or_default());
        let (mut start, mut len) = (read(page, at), read(page, at + 8));
        change(&mut start, &mut len);
        page[word(at)].copy_from_slice(&start.to_le_bytes());
        page[word(at + 8)].copy_from_slice(&len.to_le_bytes());
    })
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("cache-run-too-long", CACHES, &[Kind::SpaceCacheAllocated], |d| {
        entry(d, 1, |_, len| *len += SECTOR)
    }),
    seen(
        "cache-run-that-begins-too-early",
        CACHES,
        &[Kind::SpaceCacheAllocated, Kind::SpaceCacheMissing],
        |d| entry(d, 1, |start, _| *start -= SECTOR),
    ),
    seen("cache-run-beyond-its-group", CACHES, &[Kind::SpaceCacheInvalid, Kind::SpaceCacheMissing], |d| {
        entry(d, 1, |start, _| *start += 1 << 40)
    }),
    seen(
        "cache-bitmap-with-another-bit",
        CACHES,
        &[Kind::SpaceCacheAllocated, Kind::SpaceCacheMissing],
        |d| {
            // The bitmap stands behind the one page of entries.
            edit(d, true, 1, |bits| {
                let at = bits.iter().position(|b| *b == 0b0101_0101 || *b == 0b1010_1010).unwrap_or(0);
                bits[at] = !bits[at];
            })
        },
    ),
    mentioned("cache-run-too-short", CACHES, &[Kind::SpaceCacheUnused], |d| {
        entry(d, 1, |_, len| *len -= SECTOR)
    }),
    mentioned("cache-of-another-time", CACHES, &[Kind::SpaceCacheUnused], |d| {
        let (_, _, bytes) = cache(d, false)?;
        let at = usize::try_from(bytes / SECTOR * 4)?;
        edit(d, false, 0, |page| page[at] ^= 1)
    }),
    mentioned("cache-without-its-sum", CACHES, &[Kind::SpaceCacheUnused], |d| {
        let (at, ..) = cache(d, false)?;
        d.edit_data(at, Copies::All, |page| page[200] ^= 1)
    }),
    mentioned("cache-without-its-file", CACHES, &[Kind::SpaceCacheUnused], |d| {
        let (at, ..) = cache(d, false)?;
        d.edit_data(at, Copies::All, |page| page.fill(0))
    }),
];
