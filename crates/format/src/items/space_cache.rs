//! The version 1 space cache: a block group's free space in a file of the root tree.
//!
//! The item (FREE_SPACE, 0, start of the block group) names the file. Its first page begins with a
//! crc32c of each of the file's pages (of its own without those sums) and a generation; entries of
//! 17 bytes follow, as many as fit in each page, then one page for each entry that says that its
//! space stands in a bitmap. Linux believes a cache only if sums and generations fit, if it says
//! nothing twice, and if it has as much free space as the block group; otherwise it looks for
//! itself.

use super::exact;
use crate::csum::crc32c_raw;
use crate::key::DiskKey;
use crate::{FormatResult, Logical, LogicalRange, SECTOR_SIZE};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a page of the file.
pub const CACHE_PAGE: usize = 4096;
/// Bytes of space that a page of bits covers: 128 MiB.
const CACHE_BITMAP_RANGE: u64 = CACHE_PAGE as u64 * 8 * SECTOR_SIZE as u64;

/// (FREE_SPACE, 0, start), 41 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SpaceCacheItem {
    /// Key of the file's inode, in the root tree.
    pub location: DiskKey,
    /// Transaction that wrote the file; also stands in its inode and in the file.
    pub generation: U64,
    /// Entries, those for bitmaps included.
    pub entries: U64,
    /// Entries whose space stands in bitmaps.
    pub bitmaps: U64,
}
const _: () = assert!(size_of::<SpaceCacheItem>() == 41);

impl SpaceCacheItem {
    /// From the item's bytes.
    ///
    /// # Errors
    /// A size other than 41.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        exact(bytes, "space cache item")
    }
}

#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Entry {
    at: U64,
    bytes: U64,
    /// 1: a run of free space; 2: a bitmap.
    kind: u8,
}
const RUN: u8 = 1;
const BITMAP: u8 = 2;

/// Why a cache's contents say nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// Linux sees it, and does without the cache.
    #[error("{0}")]
    Unused(String),
    /// The sums fit, and still it is none that Linux could have written.
    #[error("{0}")]
    Invalid(String),
}

/// Runs of free space, in the order of the file, from its contents.
///
/// `contents` are all pages of the file, as its inode's size says.
///
/// # Errors
/// As [`CacheError`] says.
pub fn parse_space_cache(
    contents: &[u8],
    item: &SpaceCacheItem,
) -> Result<Vec<LogicalRange>, CacheError> {
    let mut reader = Pages::new(contents)?;
    let first = reader.next()?;
    let mut rest = &first[reader.sums..];
    let (generation, entries) = U64::ref_from_prefix(rest).map_err(|_| too_short())?;
    if generation.get() != item.generation.get() {
        return Err(CacheError::Unused(format!(
            "the file is of generation {generation}, its item of {}",
            item.generation
        )));
    }
    rest = entries;
    let (mut runs, mut bitmaps) = (Vec::new(), Vec::new());
    for _ in 0..item.entries.get() {
        if rest.len() < size_of::<Entry>() {
            rest = reader.next()?;
        }
        let (entry, behind) = Entry::ref_from_prefix(rest).map_err(|_| too_short())?;
        rest = behind;
        let (at, bytes) = (Logical(entry.at.get()), entry.bytes.get());
        if bytes == 0 {
            return Err(CacheError::Unused(format!("the entry for {at} has no bytes")));
        }
        match entry.kind {
            RUN => runs.push(LogicalRange::new(at, bytes)),
            BITMAP => bitmaps.push(at),
            kind => {
                return Err(CacheError::Invalid(format!("the entry for {at} is of kind {kind}")));
            }
        }
    }
    if bitmaps.len() as u64 != item.bitmaps.get() {
        let what =
            format!("there are {} bitmaps, and the item says {}", bitmaps.len(), item.bitmaps);
        return Err(CacheError::Invalid(what));
    }
    says_nothing_twice(runs.iter().map(|run| run.start))?;
    says_nothing_twice(bitmaps.iter().copied())?;
    for start in bitmaps {
        bitmap_runs(start, reader.next()?, &mut runs)?;
    }
    Ok(runs)
}

fn says_nothing_twice(starts: impl Iterator<Item = Logical>) -> Result<(), CacheError> {
    let mut starts: Vec<Logical> = starts.collect();
    starts.sort_unstable();
    match starts.windows(2).find(|w| w[0] == w[1]) {
        Some(twice) => Err(CacheError::Unused(format!("there are two entries for {}", twice[0]))),
        None => Ok(()),
    }
}

/// The file page by page, each compared with its sum.
struct Pages<'a> {
    contents: &'a [u8],
    n: usize,
    /// Bytes of sums at the beginning of the first page.
    sums: usize,
}

fn too_short() -> CacheError {
    CacheError::Unused("the file ends too early".into())
}

impl<'a> Pages<'a> {
    fn new(contents: &'a [u8]) -> Result<Self, CacheError> {
        let sums = contents.len() / CACHE_PAGE * size_of::<U32>();
        if sums + size_of::<U64>() > CACHE_PAGE || contents.is_empty() {
            return Err(CacheError::Unused(format!("the file has {} bytes", contents.len())));
        }
        Ok(Self { contents, n: 0, sums })
    }
    fn next(&mut self) -> Result<&'a [u8], CacheError> {
        let page = self.contents.chunks_exact(CACHE_PAGE).nth(self.n).ok_or_else(too_short)?;
        let sum = &self.contents[self.n * size_of::<U32>()..][..size_of::<U32>()];
        let begin = if self.n == 0 { self.sums } else { 0 };
        if (!crc32c_raw(!0, &page[begin..])).to_le_bytes() != sum {
            return Err(CacheError::Unused(format!("page {} is not what was written", self.n)));
        }
        self.n += 1;
        Ok(page)
    }
}

/// Runs of set bits, lowest bit of the first byte first.
fn bitmap_runs(
    start: Logical,
    bits: &[u8],
    runs: &mut Vec<LogicalRange>,
) -> Result<(), CacheError> {
    let sector = u64::from(SECTOR_SIZE);
    if start.0.checked_add(CACHE_BITMAP_RANGE).is_none() {
        return Err(CacheError::Invalid(format!("a bitmap begins at {start}")));
    }
    let mut open: Option<LogicalRange> = None;
    for (n, byte) in bits.iter().enumerate().filter(|(_, byte)| **byte != 0) {
        for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
            let here = LogicalRange::new(start.plus((n as u64 * 8 + bit) * sector), sector);
            match &mut open {
                Some(run) if run.end == here.start => run.end = here.end,
                _ => runs.extend(open.replace(here)),
            }
        }
    }
    runs.extend(open);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Key, KeyType, ObjectId};

    const AT: Logical = Logical(1 << 30);
    const SECTOR: u64 = SECTOR_SIZE as u64;

    /// The item of a file with entries of these kinds.
    fn item(kinds: &[u8]) -> SpaceCacheItem {
        SpaceCacheItem {
            location: Key::new(ObjectId(256), KeyType::INODE_ITEM, 0).into(),
            generation: U64::new(7),
            entries: U64::new(kinds.len() as u64),
            bitmaps: U64::new(kinds.iter().filter(|kind| **kind == BITMAP).count() as u64),
        }
    }

    fn space(at: Logical, sectors: u64) -> LogicalRange {
        LogicalRange::new(at, sectors * SECTOR)
    }

    /// A file of four pages with these entries and bitmaps; `seal` gives it its sums.
    fn file(entries: &[(LogicalRange, u8)], bits: &[&[u8]]) -> Vec<u8> {
        let mut pages = [16 + 8, 0, 0, 0].map(|used| (used, vec![0; CACHE_PAGE]));
        pages[0].1[16] = 7;
        let mut n = 0;
        for (space, kind) in entries {
            if pages[n].0 + 17 > CACHE_PAGE {
                n += 1;
            }
            let (used, page) = &mut pages[n];
            page[*used..][..8].copy_from_slice(&space.start.0.to_le_bytes());
            page[*used + 8..][..8].copy_from_slice(&space.len().to_le_bytes());
            page[*used + 16] = *kind;
            *used += 17;
        }
        for bits in bits {
            n += 1;
            pages[n].1[..bits.len()].copy_from_slice(bits);
        }
        seal(pages.into_iter().flat_map(|(_, page)| page).collect())
    }

    fn seal(mut file: Vec<u8>) -> Vec<u8> {
        for n in 0..file.len() / CACHE_PAGE {
            let begin = if n == 0 { 16 } else { 0 };
            let sum = !crc32c_raw(!0, &file[n * CACHE_PAGE..][begin..CACHE_PAGE]);
            file[n * 4..][..4].copy_from_slice(&sum.to_le_bytes());
        }
        file
    }

    #[test]
    fn runs_and_bitmaps() {
        let file = file(
            &[(space(AT, 4), RUN), (space(AT.plus(8 * SECTOR), 3), BITMAP)],
            &[&[0b1000_0001, 1]],
        );
        let runs = parse_space_cache(&file, &item(&[RUN, BITMAP])).unwrap();
        let bits = AT.plus(8 * SECTOR);
        assert_eq!(runs, [space(AT, 4), space(bits, 1), space(bits.plus(7 * SECTOR), 2)]);
    }

    #[test]
    fn entries_go_on_in_the_next_page() {
        let entries: Vec<_> = (0..400).map(|n| (space(AT.plus(n * 2 * SECTOR), 1), RUN)).collect();
        let runs = parse_space_cache(&file(&entries, &[]), &item(&[RUN; 400])).unwrap();
        assert_eq!(runs.len(), 400);
        assert_eq!(runs[399], space(AT.plus(798 * SECTOR), 1));
    }

    #[test]
    fn what_linux_does_not_use() {
        let one = [(space(AT, 1), RUN)];
        let unused = |file: &[u8], item: &SpaceCacheItem| {
            assert!(matches!(parse_space_cache(file, item), Err(CacheError::Unused(_))));
        };
        let mut torn = file(&one, &[]);
        torn[30] ^= 1;
        unused(&torn, &item(&[RUN]));
        let mut late = file(&one, &[]);
        late[16] = 8;
        unused(&seal(late), &item(&[RUN]));
        unused(&file(&[(space(AT, 0), RUN)], &[]), &item(&[RUN]));
        unused(&file(&[one[0], one[0]], &[]), &item(&[RUN; 2]));
        unused(&file(&one, &[]), &item(&[RUN; 5000]));
        unused(&[], &item(&[]));
        unused(&vec![0; 2000 * CACHE_PAGE], &item(&[RUN]));
    }

    #[test]
    fn what_linux_never_writes() {
        let invalid = |file: &[u8], item: &SpaceCacheItem| {
            assert!(matches!(parse_space_cache(file, item), Err(CacheError::Invalid(_))));
        };
        invalid(&file(&[(space(AT, 1), 3)], &[]), &item(&[RUN]));
        invalid(&file(&[(space(AT, 1), BITMAP)], &[&[1]]), &item(&[RUN]));
        invalid(&file(&[(space(Logical(u64::MAX - 5), 1), BITMAP)], &[&[1]]), &item(&[BITMAP]));
        assert_eq!(item(&[RUN]).as_bytes().len(), 41);
    }
}
