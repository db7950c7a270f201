//! What is allocated in a strip, and what is known of it, in one commit.

use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::space::{Run, csum_tree, extent_tree};
use crate::tree::{Epoch, Item, Version};
use larder_format::items::{ExtentFlags, ExtentItem};
use larder_format::{Generation, Key, KeyType, Logical, ObjectId, SECTOR_SIZE};
use std::ops::Range;

pub(crate) const SECTOR: u64 = SECTOR_SIZE as u64;

/// The trees of a commit that say what is allocated. As long as it lives, nothing else is written
/// to what is allocated in it.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) extents: Version,
    sums: Version,
    nodesize: u32,
    #[allow(dead_code)]
    epoch: Epoch,
}

/// An extent, as its item has it.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    pub(crate) start: Logical,
    pub(crate) len: u64,
    pub(crate) key: Key,
    pub(crate) item: ExtentItem,
}

impl Extent {
    pub(crate) fn is_data(&self) -> bool {
        self.item.flags.contains(ExtentFlags::DATA)
    }
    fn end(&self) -> Logical {
        self.start.plus(self.len)
    }
}

impl View {
    pub(crate) fn new(core: &Core) -> Self {
        let epoch = core.epochs.enter();
        let at =
            |tree, root| Version { tree, root, store: core.store.clone(), epoch: epoch.clone() };
        let (extents, sums) = core.txns.with_view(|v| {
            let extents = at(ObjectId::EXTENT_TREE, v.extent_root.clone());
            (extents, at(ObjectId::CSUM_TREE, v.csum_root.clone()))
        });
        Self { extents, sums, nodesize: core.nodesize(), epoch }
    }

    fn extent(&self, item: &Item) -> Result<Option<Extent>> {
        let Some((start, len)) = extent_tree::extent_of(&item.key, self.nodesize) else {
            return Ok(None);
        };
        let corrupt = |what| Error::corrupt(Place::item(ObjectId::EXTENT_TREE, item.key), what);
        let parsed = ExtentItem::parse(item.key.kind, item.data()).map_err(|e| corrupt(e.0))?;
        if start.0.checked_add(len).is_none() {
            return Err(corrupt("the extent reaches past the end of the addresses".into()));
        }
        Ok(Some(Extent { start, len, key: item.key, item: parsed }))
    }

    /// The extent that `at` lies in.
    ///
    /// # Errors
    /// Reading, corruption.
    pub(crate) fn extent_at(&self, at: Logical) -> Result<Option<Extent>> {
        let mut key = Key::new(at, KeyType::METADATA_ITEM, u64::MAX);
        while let Some(item) = self.extents.at_or_before(&key)? {
            if let Some(extent) = self.extent(&item)? {
                return Ok(Some(extent).filter(|e| e.end() > at));
            }
            // Something else about a place: the item of an extent there stands before it.
            let behind = Key::new(item.key.objectid, KeyType::METADATA_ITEM, u64::MAX);
            if item.key > behind {
                key = behind;
            } else {
                let Some(before) = item.key.objectid.0.checked_sub(1) else { break };
                key = Key::new(Logical(before), KeyType::METADATA_ITEM, u64::MAX);
            }
        }
        Ok(None)
    }

    /// Calls `each` for the extents that reach into a range of addresses, in order.
    ///
    /// # Errors
    /// Reading, corruption; those of `each`.
    fn each_extent(
        &self,
        range: &Range<Logical>,
        mut each: impl FnMut(Extent) -> Result<()>,
    ) -> Result<()> {
        if let Some(before) = self.extent_at(range.start)?.filter(|e| e.start < range.start) {
            each(before)?;
        }
        let from = Key::new(range.start, KeyType(0), 0);
        let to = Key::new(range.end, KeyType(0), 0);
        self.extents.scan(&from, &to, |item| {
            if let Some(extent) = self.extent(item)? {
                each(extent)?;
            }
            Ok(true)
        })
    }
}

/// What a sector is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sector {
    Free,
    /// Data with a checksum.
    Summed,
    /// Data without.
    Unsummed,
    /// Part of a tree block.
    Block,
}

/// A tree block that begins in a strip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) at: Logical,
    pub(crate) generation: Generation,
}

/// What is in a strip.
#[derive(Debug)]
pub(crate) struct Content {
    start: Logical,
    pub(crate) sectors: Vec<Sector>,
    /// A checksum for each sector, where there is one.
    sums: Vec<u8>,
    sum_len: usize,
    pub(crate) blocks: Vec<Block>,
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("a strip lies in memory")
}

impl Content {
    /// What lies in a range of addresses.
    ///
    /// # Errors
    /// Reading, corruption.
    pub(crate) fn of(core: &Core, view: &View, range: &Range<Logical>) -> Result<Self> {
        let count = index((range.end.0 - range.start.0) / SECTOR);
        let mut this = Self {
            start: range.start,
            sectors: vec![Sector::Free; count],
            sums: Vec::new(),
            sum_len: core.csum.size(),
            blocks: Vec::new(),
        };
        let mut has_data = false;
        view.each_extent(range, |extent| {
            let kind = if extent.is_data() { Sector::Unsummed } else { Sector::Block };
            has_data |= extent.is_data();
            if !extent.is_data() && extent.start >= range.start {
                let Extent { start: at, item, .. } = &extent;
                this.blocks.push(Block { at: *at, generation: item.generation });
            }
            let from = extent.start.0.max(range.start.0);
            let to = extent.end().0.min(range.end.0);
            if from < to {
                let first = index((from - range.start.0) / SECTOR);
                this.sectors[first..index((to - range.start.0).div_ceil(SECTOR))].fill(kind);
            }
            Ok(())
        })?;
        if has_data {
            this.take_sums(core, view, range)?;
        }
        Ok(this)
    }

    fn take_sums(&mut self, core: &Core, view: &View, range: &Range<Logical>) -> Result<()> {
        self.sums = vec![0; self.sectors.len() * self.sum_len];
        let run = Run::new(range.start, range.end.0 - range.start.0);
        csum_tree::read(&mut view.sums.clone(), core.csum, run, &mut |at, sum| {
            let n = index((at.0 - range.start.0) / SECTOR);
            if let (Some(sum), Sector::Unsummed) = (sum, self.sectors[n]) {
                self.sectors[n] = Sector::Summed;
                self.sums[n * self.sum_len..(n + 1) * self.sum_len].copy_from_slice(sum);
            }
        })
    }

    /// Is anything allocated?
    pub(crate) fn is_empty(&self) -> bool {
        self.sectors.iter().all(|s| *s == Sector::Free)
    }

    /// The address of a sector.
    pub(crate) fn address(&self, n: usize) -> Logical {
        self.start.plus(n as u64 * SECTOR)
    }

    /// The number of the sector at an address.
    pub(crate) fn number(&self, at: Logical) -> usize {
        index((at.0 - self.start.0) / SECTOR)
    }

    /// The checksum of a sector that has one.
    pub(crate) fn sum(&self, n: usize) -> &[u8] {
        &self.sums[n * self.sum_len..(n + 1) * self.sum_len]
    }
}
