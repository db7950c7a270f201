//! What lies where in a sound image: the map by which a mutator finds something worth changing.
//!
//! Every block that can be reached from the superblock is listed once, in the order of a walk that
//! depends on the image alone. So a number names the same block each time. The image must be sound:
//! it is a seed, not an attack.

use super::device::HostileDevice;
use crate::image::Image;
use larder_format::items::{Chunk, Compression, FileExtent, RootItem};
use larder_format::node::NodeView;
use larder_format::{
    CsumType, Key, KeyType, Logical, ObjectId, Physical, SUPER_OFFSETS, Superblock, TreeId,
};
use larder_volume::{Assembly, Device, MappedChunk, Volume};
use std::collections::HashMap;
use std::sync::Arc;

/// A tree block of the seed.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Block {
    pub at: Logical,
    /// Where its copies lie on the device.
    pub copies: Vec<Physical>,
    /// Tree it was reached from first.
    pub tree: TreeId,
    pub level: u8,
    pub generation: u64,
    pub first_key: Option<Key>,
    /// The block that points to it, by number, and the slot there; none for roots.
    pub parent: Option<(usize, usize)>,
}

/// A stored extent of file data.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DataExtent {
    pub at: Logical,
    pub physical: Physical,
    pub len: u64,
    pub compressed: bool,
}

/// A seed, and what is where in it.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Survey {
    pub image: Image,
    pub superblock: Box<Superblock>,
    pub nodesize: usize,
    pub csum: CsumType,
    pub blocks: Vec<Block>,
    pub by_address: HashMap<Logical, usize>,
    pub extents: Vec<DataExtent>,
    /// Leaves with items of the root tree that are roots: block and key.
    pub roots: Vec<(usize, Key)>,
}

impl Survey {
    /// Looks at a seed.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(mut image: Image) -> Result<Self, String> {
        image.freeze();
        let device = Arc::new(HostileDevice::new(image.clone()));
        let found = Assembly::of([device as Arc<dyn Device>]).map_err(|e| e.to_string())?;
        let sb = found.superblock.clone();
        let volume = Volume::open(found, false).map_err(|e| e.to_string())?;
        let mut this = Self {
            nodesize: sb.nodesize() as usize,
            csum: sb.csum_type(),
            superblock: sb,
            image,
            blocks: Vec::new(),
            by_address: HashMap::new(),
            extents: Vec::new(),
            roots: Vec::new(),
        };
        this.walk(&volume, ObjectId::CHUNK_TREE, this.superblock.chunk_root())?;
        this.walk(&volume, ObjectId::ROOT_TREE, this.superblock.root())?;
        if let Some(log) = this.superblock.log_root() {
            this.walk(&volume, ObjectId::TREE_LOG, log)?;
        }
        Ok(this)
    }

    fn walk(&mut self, volume: &Volume, tree: TreeId, root: Logical) -> Result<(), String> {
        let mut todo = vec![(tree, root, None)];
        while let Some((tree, at, parent)) = todo.pop() {
            if at == Logical(0) || self.by_address.contains_key(&at) {
                continue;
            }
            let mut bytes = vec![0; self.nodesize];
            volume.read_block(at, &mut bytes, 0).map_err(|e| e.to_string())?;
            let node = NodeView(&bytes);
            if node.bytenr() != at || !node.csum_matches(self.csum) {
                return Err(format!("block {at} of tree {tree} is damaged"));
            }
            let found = volume.map().lookup(at, self.nodesize as u64).map_err(|e| e.to_string())?;
            let number = self.blocks.len();
            self.by_address.insert(at, number);
            self.blocks.push(Block {
                at,
                copies: found.stripes.iter().map(|s| s.at).collect(),
                tree,
                level: node.level(),
                generation: node.generation().0,
                first_key: node.key(0),
                parent,
            });
            for (slot, pointer) in node.pointers().iter().enumerate().filter(|_| node.level() > 0) {
                todo.push((tree, Logical(pointer.blockptr.get()), Some((number, slot))));
            }
            for slot in 0..if node.level() == 0 { node.nritems() } else { 0 } {
                let (Some(key), Some(data)) = (node.key(slot), node.data(slot)) else { continue };
                match key.kind {
                    KeyType::CHUNK_ITEM if tree == ObjectId::CHUNK_TREE => {
                        let chunk = Chunk::parse(data).map_err(|e| e.to_string())?;
                        volume
                            .add_chunk(MappedChunk::from_item(Logical(key.offset), &chunk))
                            .map_err(|e| e.to_string())?;
                    }
                    KeyType::ROOT_ITEM => {
                        let item = RootItem::parse(data).map_err(|e| e.to_string())?;
                        self.roots.push((number, key));
                        todo.push((key.objectid, item.root(), None));
                    }
                    KeyType::EXTENT_DATA => self.extent(volume, data),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn extent(&mut self, volume: &Volume, data: &[u8]) {
        let Ok(FileExtent::Stored(r)) = FileExtent::parse(data) else { return };
        if r.is_hole() || self.extents.iter().any(|e| e.at == r.disk_bytenr) {
            return;
        }
        if let Ok(found) = volume.map().lookup(r.disk_bytenr, r.disk_num_bytes) {
            self.extents.push(DataExtent {
                at: r.disk_bytenr,
                physical: found.stripes[0].at,
                len: found.len,
                compressed: r.compression != Compression::None,
            });
        }
    }

    /// Bytes of a block as they are in the seed.
    #[must_use]
    pub fn bytes(&self, block: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.nodesize];
        if let Some(at) = self.blocks[block].copies.first() {
            self.image.read(at.0, &mut bytes);
        }
        bytes
    }

    /// The first superblock as it is in the seed.
    #[must_use]
    pub(crate) fn super_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; larder_format::SUPER_SIZE];
        self.image.read(SUPER_OFFSETS[0].0, &mut bytes);
        bytes
    }
}
