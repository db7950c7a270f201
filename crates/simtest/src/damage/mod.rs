//! An editor that damages images: one call changes one thing.
//!
//! A wrong link count is worth testing only if the node that holds it has a right checksum, lies at
//! its place in both copies, and everything else is as it was. Hidden here is how a change gets
//! onto an image in that way: where the copies of a block lie, which node of which tree holds a
//! key, how a leaf is packed again around an item that grew, and which checksum has to follow.
//!
//! Nothing is copied to another place and no sum is kept up to date: an edit happens where the
//! bytes lie, and what contradicts it afterwards is the damage.
//!
//! ```
//! # use larder_simtest::{damage::Damage, image::Image};
//! # use larder_format::{KeyType, ObjectId};
//! # fn plant(image: &Image) -> anyhow::Result<Image> {
//! let mut damage = Damage::on(image)?;
//! let inode = damage.first(ObjectId::FS_TREE, |key, _| key.kind == KeyType::INODE_ITEM)?.0;
//! damage.item(ObjectId::FS_TREE, inode).set_u32(40, 7)?; // the link count
//! # Ok(damage.into_image())
//! # }
//! ```
//!
//! - here: superblocks, blocks and data, with or without checksums, on all copies or on one;
//! - `leaf`: taking a leaf apart and packing it again; `raw`: the fixed structures in a node's
//!   bytes;
//! - `tree`: finding and changing items;
//! - [`random`]: a change that a number stands for, where nobody thought of one.
//!
//! The editor opens sound images only, and complains as a test does: it returns errors that say
//! what it could not find.

mod leaf;
pub mod random;
pub mod raw;
mod tree;

pub use tree::{ItemEdit, Items, Step};

use crate::image::{Image, PAGE};
use anyhow::{Context, Result, anyhow, ensure};
use larder_format::items::chunk::{Chunk, parse_sys_array};
use larder_format::node::NodeView;
use larder_format::superblock::Superblock;
use larder_format::{KeyType, Logical, ObjectId, Physical, SECTOR_SIZE, SUPER_OFFSETS, SUPER_SIZE};
use larder_volume::superblock::copies_within;
use larder_volume::{ChunkMap, MappedChunk};

/// Which copies of a block an edit changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// All of them, alike.
    All,
    /// One of them, counted from 0 in the order of the chunk's stripes.
    Only(usize),
}

/// What happens to the checksum of a block that was edited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seal {
    /// It is computed anew: the block looks as if it had been written this way.
    Fix,
    /// It stays: the block looks rotten.
    Leave,
}

/// An image that is being damaged.
#[derive(Clone, Debug)]
pub struct Damage {
    image: Image,
    superblock: Box<Superblock>,
    chunks: Vec<MappedChunk>,
}

impl Damage {
    /// Begins with a copy of a sound image of one device.
    ///
    /// # Errors
    /// The superblock or the chunk tree cannot be read.
    pub fn on(image: &Image) -> Result<Self> {
        let mut bytes = vec![0; SUPER_SIZE];
        ensure!(
            image.size() > SUPER_OFFSETS[0].0 + SUPER_SIZE as u64,
            "too small for a superblock"
        );
        image.read(SUPER_OFFSETS[0].0, &mut bytes);
        let superblock = Superblock::parse(&bytes, SUPER_OFFSETS[0])?;
        let map = ChunkMap::new();
        for (key, chunk) in parse_sys_array(superblock.sys_chunk_bytes())? {
            map.insert(MappedChunk::from_item(Logical(key.offset), &chunk))?;
        }
        let mut damage = Self { image: image.clone(), superblock, chunks: map.chunks() };
        for (key, data) in damage.items(ObjectId::CHUNK_TREE)? {
            if key.kind == KeyType::CHUNK_ITEM {
                map.insert(MappedChunk::from_item(Logical(key.offset), &Chunk::parse(&data)?))?;
            }
        }
        damage.chunks = map.chunks();
        Ok(damage)
    }

    /// The image as it is now.
    #[must_use]
    pub fn into_image(self) -> Image {
        self.image
    }

    /// The superblock that the image had when the editor opened it. Edits find their way through
    /// it, whatever they do to the one on disk.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The chunks that the image had when the editor opened it.
    #[must_use]
    pub fn chunks(&self) -> &[MappedChunk] {
        &self.chunks
    }

    /// Number of superblock copies that the image has room for.
    #[must_use]
    pub(crate) fn super_copies(&self) -> usize {
        copies_within(self.image.size()).count()
    }

    /// Cuts the image off: bytes from `size` on are gone.
    ///
    /// # Errors
    /// It is not longer than that.
    pub fn truncate(&mut self, size: u64) -> Result<()> {
        ensure!(
            size < self.image.size() && size.is_multiple_of(PAGE as u64),
            "cannot be cut off at {size}"
        );
        let mut shorter = Image::zeroed(size);
        for number in 0..size / PAGE as u64 {
            if let Some(page) = self.image.page(number) {
                shorter.set_page(number, page.clone());
            }
        }
        self.image = shorter;
        Ok(())
    }

    /// Changes every copy of the superblock and its checksum.
    ///
    /// # Errors
    /// A copy is not sound any more.
    pub fn edit_super(&mut self, mut change: impl FnMut(&mut Superblock)) -> Result<()> {
        (0..self.super_copies()).try_for_each(|n| self.edit_super_copy(n, &mut change))
    }

    /// Changes one copy of the superblock (0: the one that counts) and its checksum.
    ///
    /// # Errors
    /// The copy is not sound any more, or there is no such copy.
    pub fn edit_super_copy(
        &mut self,
        n: usize,
        change: impl FnOnce(&mut Superblock),
    ) -> Result<()> {
        let at = self.super_at(n)?;
        let mut bytes = vec![0; SUPER_SIZE];
        self.image.read(at.0, &mut bytes);
        let mut superblock = Superblock::parse(&bytes, at)?;
        change(&mut superblock);
        self.image.write(at.0, &superblock.seal(at));
        Ok(())
    }

    /// Changes bytes of one copy of the superblock, as they lie there. Its checksum is left alone.
    ///
    /// # Errors
    /// There is no such copy.
    pub fn edit_super_bytes(&mut self, n: usize, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let at = self.super_at(n)?;
        let mut bytes = vec![0; SUPER_SIZE];
        self.image.read(at.0, &mut bytes);
        change(&mut bytes);
        self.image.write(at.0, &bytes);
        Ok(())
    }

    fn super_at(&self, n: usize) -> Result<Physical> {
        copies_within(self.image.size())
            .nth(n)
            .with_context(|| format!("there is no superblock copy {n}"))
    }

    /// Places of all copies of `at` on the device.
    ///
    /// # Errors
    /// No chunk covers it.
    pub fn places(&self, at: Logical) -> Result<Vec<Physical>> {
        let chunk = self.chunks.iter().find(|c| c.start <= at && at < c.end());
        let chunk = chunk.ok_or_else(|| anyhow!("no chunk covers {at}"))?;
        Ok(chunk.stripes.iter().map(|s| s.at.plus(at.0 - chunk.start.0)).collect())
    }

    /// Bytes of the first copy from a logical address on; they must lie in one chunk.
    ///
    /// # Errors
    /// No chunk covers it.
    pub fn read(&self, at: Logical, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.image.read(self.places(at)?[0].0, &mut bytes);
        Ok(bytes)
    }

    /// The bytes of a node, from its first copy.
    ///
    /// # Errors
    /// No chunk covers it, or nothing that calls itself this node lies there.
    pub fn node(&self, at: Logical) -> Result<Vec<u8>> {
        let bytes = self.read(at, self.superblock.nodesize() as usize)?;
        let found = NodeView(&bytes).bytenr();
        ensure!(found == at, "expected node {at}, found one that says {found}");
        Ok(bytes)
    }

    /// Changes the bytes of a node in all copies, and its checksum.
    ///
    /// # Errors
    /// As [`Damage::node`].
    pub fn edit_node(&mut self, at: Logical, change: impl FnOnce(&mut [u8])) -> Result<()> {
        self.edit_node_in(at, Copies::All, Seal::Fix, change)
    }

    /// Changes the bytes of a node in some copies, its checksum or not.
    ///
    /// # Errors
    /// As [`Damage::node`]; there is no such copy.
    pub fn edit_node_in(
        &mut self,
        at: Logical,
        copies: Copies,
        seal: Seal,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let mut bytes = self.node(at)?;
        change(&mut bytes);
        if seal == Seal::Fix {
            let csum = self.superblock.csum_type().compute(&bytes[32..]);
            bytes[..32].copy_from_slice(&csum);
        }
        self.put(at, copies, &bytes)
    }

    /// Changes a sector of data in some copies. Checksums of data lie in a tree; they are left
    /// alone.
    ///
    /// # Errors
    /// No chunk covers it, or there is no such copy.
    pub fn edit_data(
        &mut self,
        at: Logical,
        copies: Copies,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let mut bytes = self.read(at, SECTOR_SIZE as usize)?;
        change(&mut bytes);
        self.put(at, copies, &bytes)
    }

    fn put(&mut self, at: Logical, copies: Copies, bytes: &[u8]) -> Result<()> {
        let places = self.places(at)?;
        match copies {
            Copies::All => places.iter().for_each(|p| self.image.write(p.0, bytes)),
            Copies::Only(n) => {
                let place = places.get(n).with_context(|| format!("{at} has no copy {n}"))?;
                self.image.write(place.0, bytes);
            }
        }
        Ok(())
    }
}
