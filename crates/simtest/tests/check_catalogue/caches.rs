//! The version 1 space cache.

use crate::entry::{CACHES, Entry, mentioned, seen};
use crate::find::{ROOTS, SECTOR};
use anyhow::{Context, Result};
use larder_check::Kind;
use larder_format::csum::crc32c_raw;
use larder_format::items::{FileExtent, SpaceCacheItem};
use larder_format::{Key, KeyType, Logical, ObjectId};
use larder_simtest::damage::{Copies, Damage};

/// Bytes of an entry.
const ENTRY: usize = 17;

/// The file of a cache.
struct File {
    /// The block group.
    start: u64,
    at: Logical,
    entries: usize,
    bitmaps: u64,
    /// Where the first page's sums end.
    sums: usize,
}

impl File {
    /// Entries that fit in the first page, behind sums and generation.
    fn in_first_page(&self) -> usize {
        (SECTOR as usize - self.first_entry()) / ENTRY
    }
    fn first_entry(&self) -> usize {
        self.sums + 8
    }
    /// The page of the first bitmap.
    fn bitmap_page(&self) -> u64 {
        let more =
            self.entries.saturating_sub(self.in_first_page()).div_ceil(SECTOR as usize / ENTRY);
        1 + more as u64
    }
}

fn files(d: &Damage) -> Result<Vec<File>> {
    let mut files = Vec::new();
    for (key, data) in d.items(ROOTS)? {
        if key.objectid != ObjectId::FREE_SPACE {
            continue;
        }
        let item = *SpaceCacheItem::parse(&data)?;
        let extent = Key::new(Key::from(item.location).objectid, KeyType::EXTENT_DATA, 0);
        if let FileExtent::Stored(record) = FileExtent::parse(&d.get(ROOTS, extent)?)? {
            files.push(File {
                start: key.offset,
                at: record.disk_bytenr,
                entries: usize::try_from(item.entries.get())?,
                bitmaps: item.bitmaps.get(),
                sums: usize::try_from(record.num_bytes / SECTOR * 4)?,
            });
        }
    }
    Ok(files)
}

/// The cache with the most entries.
fn largest(d: &Damage) -> Result<File> {
    files(d)?.into_iter().max_by_key(|f| f.entries).context("a cache")
}

/// Changes a page of a cache, and gives it the sum that fits.
fn edit(d: &mut Damage, file: &File, page: u64, change: impl FnOnce(&mut [u8])) -> Result<()> {
    let mut sum = 0;
    d.edit_data(file.at.plus(page * SECTOR), Copies::All, |data| {
        change(data);
        sum = !crc32c_raw(!0, &data[if page == 0 { file.sums } else { 0 }..]);
    })?;
    let place = usize::try_from(page)? * 4;
    d.edit_data(file.at, Copies::All, |data| data[place..][..4].copy_from_slice(&sum.to_le_bytes()))
}

/// A run of several sectors with used space on both sides: its place in the first page of its file.
fn a_run(d: &Damage) -> Result<(File, usize)> {
    for file in files(d)? {
        let group =
            d.chunks().iter().find(|c| c.start.0 == file.start).context("the cache's chunk")?;
        let page = d.read(file.at, SECTOR as usize)?;
        let inside = |at: &usize| {
            let (start, len) = (word(&page, *at), word(&page, *at + 8));
            page[*at + 16] == 1
                && len > SECTOR
                && start > group.start.0
                && start + len < group.end().0
        };
        let mut entries =
            (0..file.entries.min(file.in_first_page())).map(|n| file.first_entry() + n * ENTRY);
        if let Some(at) = entries.find(inside) {
            return Ok((file, at));
        }
    }
    anyhow::bail!("no run inside of a group")
}

fn word(page: &[u8], at: usize) -> u64 {
    page[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Changes that run: where it begins, and its bytes.
fn run(d: &mut Damage, change: impl FnOnce(&mut u64, &mut u64)) -> Result<()> {
    let (file, at) = a_run(d)?;
    edit(d, &file, 0, |page| {
        let (mut start, mut len) = (word(page, at), word(page, at + 8));
        change(&mut start, &mut len);
        page[at..][..8].copy_from_slice(&start.to_le_bytes());
        page[at + 8..][..8].copy_from_slice(&len.to_le_bytes());
    })
}

pub(crate) const ENTRIES: &[Entry] = &[
    seen("cache-run-too-long", CACHES, &[Kind::SpaceCacheAllocated], |d| {
        run(d, |_, len| *len += SECTOR)
    }),
    seen(
        "cache-run-that-begins-too-early",
        CACHES,
        &[Kind::SpaceCacheAllocated, Kind::SpaceCacheMissing],
        |d| run(d, |start, _| *start -= SECTOR),
    ),
    seen(
        "cache-run-beyond-its-group",
        CACHES,
        &[Kind::SpaceCacheInvalid, Kind::SpaceCacheMissing],
        |d| run(d, |start, _| *start += 1 << 40),
    ),
    seen(
        "cache-bitmap-with-another-bit",
        CACHES,
        &[Kind::SpaceCacheAllocated, Kind::SpaceCacheMissing],
        |d| {
            let file =
                files(d)?.into_iter().find(|f| f.bitmaps > 0).context("a cache with bitmaps")?;
            edit(d, &file, file.bitmap_page(), |bits| {
                let at =
                    bits.iter().position(|b| *b == 0b0101_0101 || *b == 0b1010_1010).unwrap_or(0);
                bits[at] = !bits[at];
            })
        },
    ),
    mentioned("cache-run-too-short", CACHES, &[Kind::SpaceCacheUnused], |d| {
        run(d, |_, len| *len -= SECTOR)
    }),
    mentioned("cache-of-another-time", CACHES, &[Kind::SpaceCacheUnused], |d| {
        let file = largest(d)?;
        edit(d, &file, 0, |page| page[file.sums] ^= 1)
    }),
    mentioned("cache-without-its-sum", CACHES, &[Kind::SpaceCacheUnused], |d| {
        let at = largest(d)?.at;
        d.edit_data(at, Copies::All, |page| page[200] ^= 1)
    }),
    mentioned("cache-without-its-file", CACHES, &[Kind::SpaceCacheUnused], |d| {
        let at = largest(d)?.at;
        d.edit_data(at, Copies::All, |page| page.fill(0))
    }),
];
