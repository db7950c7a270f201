//! The version 1 space cache against the extent tree.
//!
//! Linux uses the cache of a block group only if its sums, its generation and the amount of free
//! space fit; what it would not use is a note here. What it would believe has to be right: with the
//! allocated extents it must tile the block group ([`crate::extents`]), and only where it does not,
//! both are read side by side.

use crate::chunks::Chunk;
use crate::finding::{Finding, Kind};
use crate::free_space::Listed;
use crate::source::Edge;
use crate::walk::{find, scan};
use crate::world::World;
use larder_format::items::space_cache::CACHE_PAGE;
use larder_format::items::{
    CacheError, Compression, ExtentKind, FileExtent, InodeItem, SpaceCacheItem, parse_space_cache,
};
use larder_format::{CompatRo, Key, KeyType, Logical, LogicalRange, ObjectId};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering::Relaxed;

/// Most pages of a cache's file: the sums of more do not fit in its first page.
const PAGES: usize = CACHE_PAGE / 4 - 2;

/// Checks all caches that Linux would look at.
pub(crate) fn check(world: &World<'_>, extent_root: Option<&Edge>) {
    let mut caches = Vec::new();
    let (from, to) = (Key::new(ObjectId::FREE_SPACE, KeyType(0), 0), last_cache());
    scan(&world.source, &Edge::root_tree(&world.superblock), from, to, &mut |key, data| {
        if let Some(chunk) = world.chunks.starting_at(Logical(key.offset)) {
            caches.push((key, chunk, data.to_vec()));
        }
        ControlFlow::Continue(())
    });
    let sb = &world.superblock;
    if caches.is_empty() {
        return;
    }
    let has_tree = sb.compat_ro().contains(CompatRo::FREE_SPACE_TREE);
    if has_tree || sb.cache_generation() != sb.generation() {
        let instead = if has_tree { "; there is a free-space tree, too" } else { "" };
        let (cache, now) = (sb.cache_generation(), sb.generation());
        let what = format!("cache_generation is {cache}, the generation {now}{instead}");
        return world.add(Finding::new(Kind::SpaceCacheStale, what).tree(ObjectId::ROOT_TREE));
    }
    for (key, chunk, item) in caches {
        Cache { world, key, chunk }.check(&item, extent_root);
    }
}

fn last_cache() -> Key {
    Key::new(ObjectId::FREE_SPACE, KeyType(0), u64::MAX)
}

/// The cache of one block group.
struct Cache<'a> {
    world: &'a World<'a>,
    /// Of its item.
    key: Key,
    chunk: &'a Chunk,
}

impl Cache<'_> {
    fn add(&self, kind: Kind, what: String) {
        let finding = Finding::new(kind, what).tree(ObjectId::ROOT_TREE).key(self.key);
        self.world.add(finding.address(self.chunk.start));
    }

    fn check(&self, item: &[u8], extent_root: Option<&Edge>) {
        let (world, chunk) = (self.world, self.chunk);
        let mut ranges = match self.load(item) {
            Ok(ranges) => ranges,
            Err(CacheError::Unused(what)) => return self.add(Kind::SpaceCacheUnused, what),
            Err(CacheError::Invalid(what)) => return self.add(Kind::SpaceCacheInvalid, what),
        };
        let listed: u64 = ranges.iter().fold(0, |sum, run| sum.saturating_add(run.len()));
        let reserved: u64 = chunk.superblocks.iter().map(|copy| copy.len()).sum();
        let free = chunk.len.saturating_sub(chunk.used.load(Relaxed)).saturating_sub(reserved);
        if listed < free {
            let what = format!("it lists {listed} bytes as free, and there are {free}");
            return self.add(Kind::SpaceCacheUnused, what);
        }
        let whole = chunk.range();
        if let Some(run) = ranges.iter().find(|run| !whole.covers(**run)) {
            let (from, to, start) = (run.start, run.end, chunk.start);
            let what = format!("{from} to {to} lies outside of the block group at {start}");
            self.add(Kind::SpaceCacheInvalid, what);
            ranges.retain(|run| whole.covers(*run));
        }
        // Linux lists no space in which copies of the superblock lie.
        ranges.extend(&chunk.superblocks);
        ranges.sort_unstable();
        for range in &ranges {
            chunk.tile(&world.hashing, *range);
        }
        let Some(extent_root) = extent_root else { return };
        if chunk.is_tiled(&world.hashing) {
            return;
        }
        let twice = ranges.windows(2).find(|w| w[0].end > w[1].start).map(|w| w[1].start);
        let listed = Listed {
            free: ranges,
            lost: false,
            tree: ObjectId::ROOT_TREE,
            allocated: Kind::SpaceCacheAllocated,
            missing: Kind::SpaceCacheMissing,
        };
        listed.compare(world, extent_root, chunk);
        if let Some(at) = twice {
            self.add(Kind::SpaceCacheInvalid, format!("the space from {at} on is listed twice"));
        }
    }

    /// The runs that its file lists.
    fn load(&self, item: &[u8]) -> Result<Vec<LogicalRange>, CacheError> {
        let unused = |what: String| CacheError::Unused(what);
        let item = SpaceCacheItem::parse(item).map_err(|e| unused(e.to_string()))?;
        let source = &self.world.source;
        let root = Edge::root_tree(&self.world.superblock);
        let inode_key = Key::from(item.location);
        let inode = find(source, &root, inode_key)
            .ok_or_else(|| unused(format!("{inode_key} is missing")))?;
        let inode = InodeItem::parse(&inode).map_err(|e| unused(e.to_string()))?;
        if inode.generation.get() != item.generation.get() {
            let (inode, item) = (inode.generation, item.generation);
            return Err(unused(format!("its inode is of generation {inode}, its item of {item}")));
        }
        let pages = inode.size.get().div_ceil(CACHE_PAGE as u64);
        let pages = usize::try_from(pages).ok().filter(|pages| *pages <= PAGES);
        let pages = pages.ok_or_else(|| unused(format!("its file has {} bytes", inode.size)))?;
        let mut contents = vec![0; pages * CACHE_PAGE];
        let extents = |offset| Key::new(inode_key.objectid, KeyType::EXTENT_DATA, offset);
        scan(source, &root, extents(0), extents(u64::MAX), &mut |key, data| {
            self.read(key.offset, data, &mut contents);
            ControlFlow::Continue(())
        });
        parse_space_cache(&contents, item)
    }

    /// Reads an extent of the file. What cannot be read stays zero, which no sum fits.
    fn read(&self, offset: u64, item: &[u8], contents: &mut [u8]) {
        let Ok(FileExtent::Stored(extent)) = FileExtent::parse(item) else { return };
        let plain = extent.kind == ExtentKind::Regular && extent.compression == Compression::None;
        let Some(begin) = usize::try_from(offset).ok().filter(|b| *b < contents.len() && plain)
        else {
            return;
        };
        let len =
            usize::try_from(extent.num_bytes).unwrap_or(usize::MAX).min(contents.len() - begin);
        let Some(at) = extent.disk_bytenr.0.checked_add(extent.offset) else { return };
        let buffer = &mut contents[begin..][..len];
        let volume = &self.world.source.volume;
        let copies = volume.copies(Logical(at)).unwrap_or(0);
        self.world.meter.read(len as u64);
        if !(0..copies).any(|copy| volume.read(Logical(at), buffer, copy).is_ok()) {
            buffer.fill(0);
        }
    }
}
