//! The mutator: an input is a program that changes a sound image.
//!
//! Random bytes in an image end at a checksum. So a program names its change in the format's own
//! words: a field of an item, a key, a pointer, a header, a block that takes another's place.
//! Afterwards the checksums of the changed blocks are computed anew, and mostly the keys that
//! parents keep of them, too. The result is an image as an attacker would write it, and it must do
//! no harm.
//!
//! A program is a row of [`Choices`]: the seed, then steps until the input ends. Steps and values
//! are numbered; inputs that are kept depend on the numbers, so new ones are appended.

use super::choices::Choices;
use super::leaf::Leaf;
use super::seeds;
use super::survey::{Block, Survey};
use crate::image::Image;
use larder_format::items::keys::csum_key;
use larder_format::node::{FLAG_WRITTEN, HEADER_SIZE, Header, KeyPointer, NodeView, POINTER_SIZE};
use larder_format::{
    CsumType, Key, KeyType, Logical, ObjectId, Physical, SECTOR_SIZE, SUPER_OFFSETS, Superblock,
};
use std::collections::BTreeMap;
use zerocopy::{FromBytes, IntoBytes};

/// Steps of a program at most: more only cost time.
const MAX_STEPS: usize = 48;

/// An image that a program has changed, and the rest of the input, for the requests.
#[derive(Debug)]
pub struct Mutated<'a> {
    /// The image.
    pub image: Image,
    /// The seed that it was made from.
    pub seed: usize,
    /// Choices for the requests.
    pub script: u8,
    /// More of them.
    pub variant: u8,
    /// Steps that were done, for people.
    pub steps: Vec<&'a str>,
}

/// Runs the program that an input stands for.
#[must_use]
pub fn mutate(input: &[u8]) -> Mutated<'static> {
    let mut c = Choices::new(input);
    let (seed, variant) = seeds::choose(c.byte());
    let script = c.byte();
    let mut patient = Patient::new(seeds::seed(seed));
    let mut steps = Vec::new();
    while !c.is_empty() && steps.len() < MAX_STEPS {
        steps.push(patient.step(&mut c));
    }
    Mutated { image: patient.close(), seed, script, variant, steps }
}

/// A seed in which one pointer of an interior block leads to another block, with that block's own
/// generation and the key that stood there.
#[must_use]
pub fn point(seed: usize, block: usize, slot: usize, target: usize) -> Image {
    let mut patient = Patient::new(seeds::seed(seed));
    let to = patient.info(target);
    patient.write_pointer(block, slot, |p| {
        p.blockptr.set(to.at.0);
        p.generation.set(to.generation);
    });
    patient.close()
}

/// A seed under the knife.
struct Patient {
    survey: &'static Survey,
    image: Image,
    superblock: Vec<u8>,
    super_changed: bool,
    /// Blocks that were changed, by number.
    changed: BTreeMap<usize, Vec<u8>>,
}

impl Patient {
    fn new(survey: &'static Survey) -> Self {
        Self {
            survey,
            image: survey.image.clone(),
            superblock: survey.super_bytes(),
            super_changed: false,
            changed: BTreeMap::new(),
        }
    }
    fn block(&mut self, number: usize) -> &mut Vec<u8> {
        self.changed.entry(number).or_insert_with(|| self.survey.bytes(number))
    }
    fn now(&self, number: usize) -> Vec<u8> {
        self.changed.get(&number).cloned().unwrap_or_else(|| self.survey.bytes(number))
    }
    fn any_block(&self, c: &mut Choices<'_>) -> usize {
        c.below(self.survey.blocks.len())
    }
    /// A leaf, chosen by tree first: small trees are as interesting as large ones.
    fn any_leaf(&self, c: &mut Choices<'_>) -> usize {
        self.any_where(c, |b| b.level == 0)
    }
    fn any_where(&self, c: &mut Choices<'_>, wanted: impl Fn(&Block) -> bool) -> usize {
        let mut trees: BTreeMap<ObjectId, Vec<usize>> = BTreeMap::new();
        for (i, b) in self.survey.blocks.iter().enumerate().filter(|(_, b)| wanted(b)) {
            trees.entry(b.tree).or_default().push(i);
        }
        let Some(blocks) = trees.values().nth(c.below(trees.len())) else { return 0 };
        blocks[c.below(blocks.len())]
    }
    fn info(&self, number: usize) -> &'static Block {
        &self.survey.blocks[number]
    }

    fn step(&mut self, c: &mut Choices<'_>) -> &'static str {
        match c.byte() % 20 {
            0..=5 => self.item_field(c),
            6 => self.item_key(c),
            7 => self.delete_item(c),
            8 => self.insert_item(c),
            9 => self.replace_data(c),
            10 => self.resize_data(c),
            11 => self.header_field(c),
            12 => self.pointer(c),
            13 => self.transplant(c),
            14 => self.move_root(c),
            15 => self.super_field(c),
            16 => self.poke_block(c),
            17 => self.scribble_data(c),
            18 => self.append_data(c),
            _ => self.spoil_copy(c),
        }
    }

    /// A number that an attacker might choose, given what stands there.
    fn value(&mut self, c: &mut Choices<'_>, now: u64, width: usize) -> u64 {
        let max = if width >= 8 { u64::MAX } else { (1 << (8 * width)) - 1 };
        let value = match c.byte() % 32 {
            0 => 0,
            1 => 1,
            2 => max,
            3 => max - 1,
            4 => max / 2,
            5 => max / 2 + 1,
            6 => now.wrapping_add(1),
            7 => now.wrapping_sub(1),
            8 => now ^ (1 << (c.byte() % 64)),
            9 => now.wrapping_add(u64::from(SECTOR_SIZE)),
            10 => now.wrapping_sub(u64::from(SECTOR_SIZE)),
            11 => 1 << (c.byte() % 64),
            12 => (1u64 << (c.byte() % 64)).wrapping_sub(1),
            13 => c.long(),
            14 => c.word().into(),
            15 => c.byte().into(),
            16 => self.info(self.any_block(c)).at.0,
            17 => self.info(self.any_block(c)).generation,
            18 => self.other_item(c).map_or(0, |(key, _)| key.objectid.0),
            19 => self.other_item(c).map_or(0, |(key, _)| key.offset),
            20 => {
                let data = self.other_item(c).map_or(Vec::new(), |(_, data)| data);
                let at = c.below(data.len());
                read(&data, at, width)
            }
            21 => self.survey.image.size(),
            22 => self.survey.superblock.generation().0 + u64::from(c.byte() % 4),
            23 => now.wrapping_mul(2),
            24 => !now,
            25 => u64::MAX - 4095,
            26 => i64::MAX as u64 - 4095,
            27 => u64::from(c.byte()).wrapping_neg(),
            28 => u64::from(c.word()) * u64::from(SECTOR_SIZE),
            29 => 256 + u64::from(c.byte()),
            30 => now / 2,
            _ => now.wrapping_add(1 << 20),
        };
        value & max
    }

    fn other_item(&self, c: &mut Choices<'_>) -> Option<(Key, Vec<u8>)> {
        let leaf = Leaf::parse(&self.now(self.any_leaf(c)));
        let slot = c.below(leaf.0.len());
        leaf.0.into_iter().nth(slot)
    }

    /// Changes a leaf by its items, keeps it a leaf, and tells its parents of a new first key.
    fn edit(&mut self, number: usize, change: impl FnOnce(&mut Self, &mut Leaf)) {
        let mut leaf = Leaf::parse(&self.now(number));
        change(self, &mut leaf);
        leaf.sort();
        if leaf.store(self.block(number)) {
            self.tell_parents(number);
        }
    }

    fn tell_parents(&mut self, number: usize) {
        let mut child = number;
        while let Some((parent, slot)) = self.info(child).parent {
            let Some(first) = NodeView(&self.now(child)).key(0) else { return };
            self.write_pointer(parent, slot, |p| p.key = first.into());
            if slot != 0 {
                return;
            }
            child = parent;
        }
    }

    fn write_pointer(&mut self, block: usize, slot: usize, change: impl FnOnce(&mut KeyPointer)) {
        let at = HEADER_SIZE + slot * POINTER_SIZE;
        let bytes = self.block(block).get_mut(at..at + POINTER_SIZE);
        if let Some(Ok(p)) = bytes.map(KeyPointer::mut_from_bytes) {
            change(p);
        }
    }

    fn item_field(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_leaf(c);
        self.edit(number, |this, leaf| {
            let n = leaf.0.len();
            let Some((key, data)) = leaf.0.get_mut(c.below(n)) else { return };
            let (at, width) = match fields(key.kind, data.len()) {
                [] => (c.below(data.len()), 1 << (c.byte() % 4)),
                known => known[c.below(known.len())],
            };
            let value = this.value(c, read(data, at, width), width);
            write(data, at, width, value);
        });
        "field of an item"
    }

    fn item_key(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_leaf(c);
        self.edit(number, |this, leaf| {
            let n = leaf.0.len();
            let Some((key, _)) = leaf.0.get_mut(c.below(n)) else { return };
            this.change_key(c, key);
        });
        "key of an item"
    }

    fn change_key(&mut self, c: &mut Choices<'_>, key: &mut Key) {
        match c.byte() % 4 {
            0 => key.objectid = ObjectId(self.value(c, key.objectid.0, 8)),
            1 => key.kind = KINDS[c.below(KINDS.len())],
            _ => key.offset = self.value(c, key.offset, 8),
        }
    }

    fn delete_item(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_leaf(c);
        self.edit(number, |_, leaf| {
            if leaf.0.len() > 1 {
                leaf.0.remove(c.below(leaf.0.len()));
            }
        });
        "item removed"
    }

    fn insert_item(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_leaf(c);
        self.edit(number, |this, leaf| {
            let own = leaf.0.get(c.below(leaf.0.len())).cloned();
            let Some((mut key, data)) =
                (if c.byte().is_multiple_of(2) { own } else { this.other_item(c) })
            else {
                return;
            };
            this.change_key(c, &mut key);
            leaf.0.push((key, data));
        });
        "item inserted"
    }

    fn replace_data(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_leaf(c);
        self.edit(number, |this, leaf| {
            let slot = c.below(leaf.0.len());
            let data = this.other_item(c);
            if let (Some(item), Some((_, data))) = (leaf.0.get_mut(slot), data) {
                item.1 = data;
            }
        });
        "data of another item"
    }

    fn resize_data(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_leaf(c);
        self.edit(number, |_, leaf| {
            let n = leaf.0.len();
            let Some((_, data)) = leaf.0.get_mut(c.below(n)) else { return };
            let len = match c.byte() % 4 {
                0 => c.below(data.len() + 1),
                1 => data.len() + usize::from(c.byte()),
                2 => data.len().saturating_sub(1),
                _ => data.len() * 2,
            };
            data.resize(len.min(1 << 16), 0);
        });
        "size of an item"
    }

    fn append_data(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_leaf(c);
        self.edit(number, |this, leaf| {
            let slot = c.below(leaf.0.len());
            let same = leaf.0.get(c.below(leaf.0.len())).map(|(_, d)| d.clone());
            let more = match c.byte() % 3 {
                0 => same,
                1 => this.other_item(c).map(|(_, d)| d),
                _ => {
                    let n = usize::from(c.byte());
                    Some(c.bytes(n).to_vec())
                }
            };
            if let (Some(item), Some(more)) = (leaf.0.get_mut(slot), more) {
                item.1.extend(more);
            }
        });
        "data added to an item"
    }

    fn header_field(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_block(c);
        // Address, flags, generation, owner, number of items, level.
        let (at, width) = [(48, 8), (56, 8), (80, 8), (88, 8), (96, 4), (100, 1)][c.below(6)];
        let value = self.value(c, read(&self.now(number), at, width), width);
        write(self.block(number), at, width, value);
        "field of a header"
    }

    fn pointer(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_where(c, |b| b.level > 0);
        let slot = c.below(NodeView(&self.now(number)).nritems());
        let target = self.any_block(c);
        let key = self.other_item(c).map(|(key, _)| key);
        match c.byte() % 4 {
            // As the target itself has it, so that only its content is out of place.
            0 | 1 => {
                let (to, fit) = (self.info(target), c.byte().is_multiple_of(2));
                self.write_pointer(number, slot, |p| {
                    p.blockptr.set(to.at.0);
                    p.generation.set(to.generation);
                    if let (true, Some(first)) = (fit, to.first_key) {
                        p.key = first.into();
                    }
                });
            }
            2 => {
                let now = self.now(number);
                let at = HEADER_SIZE + slot * POINTER_SIZE + [0, 9, 17, 25][c.below(4)];
                let value = self.value(c, read(&now, at, 8), 8);
                write(self.block(number), at, 8, value);
            }
            _ => self.write_pointer(number, slot, |p| p.key = key.unwrap_or(Key::MAX).into()),
        }
        "pointer"
    }

    /// Puts the content of one block in the place of another.
    fn transplant(&mut self, c: &mut Choices<'_>) -> &'static str {
        let (from, to) = (self.any_block(c), self.any_block(c));
        let how = c.byte();
        let mut bytes = self.now(from);
        let place = self.now(to);
        let (old, _) = Header::read_from_prefix(&place).expect("longer than a header");
        let (header, _) = Header::mut_from_prefix(&mut bytes).expect("longer than a header");
        header.bytenr = old.bytenr;
        header.generation = old.generation;
        if how & 1 == 0 {
            header.owner = old.owner;
        }
        if how & 2 != 0 {
            header.level = old.level;
        }
        *self.block(to) = bytes;
        if how & 4 == 0 {
            self.tell_parents(to);
        }
        "block in another's place"
    }

    /// Lets a root item point somewhere else, consistently or not.
    fn move_root(&mut self, c: &mut Choices<'_>) -> &'static str {
        if self.survey.roots.is_empty() {
            return "no roots";
        }
        let (number, key) = self.survey.roots[c.below(self.survey.roots.len())];
        let target = self.any_block(c);
        let how = c.byte();
        let to = self.info(target);
        self.edit(number, |_, leaf| {
            let Some((_, data)) = leaf.0.iter_mut().find(|(k, _)| *k == key) else { return };
            write(data, 176, 8, to.at.0);
            write(data, 238, 1, to.level.into());
            if how & 1 == 0 {
                write(data, 160, 8, to.generation);
                write(data, 239, 8, to.generation);
            }
        });
        if how & 2 == 0 {
            write(self.block(target), 88, 8, key.objectid.0);
        }
        "root moved"
    }

    fn super_field(&mut self, c: &mut Choices<'_>) -> &'static str {
        let (at, width) = SUPER_FIELDS[c.below(SUPER_FIELDS.len())];
        let at = if at == 0x32b { at + c.below(320) } else { at };
        let value = self.value(c, read(&self.superblock, at, width), width);
        write(&mut self.superblock, at, width, value);
        self.super_changed = true;
        "field of the superblock"
    }

    fn poke_block(&mut self, c: &mut Choices<'_>) -> &'static str {
        let number = self.any_block(c);
        let at = c.below(self.survey.nodesize);
        let width = 1 << (c.byte() % 4);
        let value = self.value(c, read(&self.now(number), at, width), width);
        write(self.block(number), at, width, value);
        "bytes of a block"
    }

    /// Changes stored data, mostly compressed ones, and their checksum.
    fn scribble_data(&mut self, c: &mut Choices<'_>) -> &'static str {
        let packed: Vec<_> = self.survey.extents.iter().filter(|e| e.compressed).collect();
        let plain: Vec<_> = self.survey.extents.iter().filter(|e| !e.compressed).collect();
        let from = if c.byte().is_multiple_of(4) || packed.is_empty() { plain } else { packed };
        if from.is_empty() {
            return "no data";
        }
        let extent = from[c.below(from.len())];
        let sector =
            c.below((extent.len / u64::from(SECTOR_SIZE)) as usize) as u64 * u64::from(SECTOR_SIZE);
        let mut bytes = vec![0; SECTOR_SIZE as usize];
        let at = Physical(extent.physical.0 + sector);
        self.image.read(at.0, &mut bytes);
        for _ in 0..=c.byte() % 8 {
            // The head of a stream says most about the rest.
            let i = if c.byte().is_multiple_of(2) { c.below(64) } else { c.below(bytes.len()) };
            bytes[i] = c.byte();
        }
        self.image.write(at.0, &bytes);
        self.fix_data_sum(extent.at.plus(sector), &bytes);
        "stored data"
    }

    fn fix_data_sum(&mut self, at: Logical, bytes: &[u8]) {
        let (wanted, size) = (csum_key(at), self.survey.csum.size());
        let sum = self.survey.csum.compute(bytes);
        let leaves = 0..self.survey.blocks.len();
        for number in
            leaves.filter(|n| self.info(*n).tree == ObjectId::CSUM_TREE && self.info(*n).level == 0)
        {
            let mut leaf = Leaf::parse(&self.now(number));
            for (key, data) in &mut leaf.0 {
                if key.kind != wanted.kind || key.offset > wanted.offset {
                    continue;
                }
                let i = ((wanted.offset - key.offset) / u64::from(SECTOR_SIZE)) as usize * size;
                if let Some(place) = data.get_mut(i..i + size) {
                    place.copy_from_slice(&sum[..size]);
                    leaf.store(self.block(number));
                    return;
                }
            }
        }
    }

    /// Damages one copy of a block without a checksum to match.
    fn spoil_copy(&mut self, c: &mut Choices<'_>) -> &'static str {
        let block = self.info(self.any_block(c));
        let copy = block.copies[c.below(block.copies.len())];
        let at = copy.0 + c.below(self.survey.nodesize) as u64;
        self.image.write(at, &[c.byte()]);
        "one copy"
    }

    /// Puts checksums right and everything in its place.
    fn close(mut self) -> Image {
        for (number, mut bytes) in std::mem::take(&mut self.changed) {
            let (header, _) = Header::mut_from_prefix(&mut bytes).expect("longer than a header");
            if header.flags() & FLAG_WRITTEN == 0 {
                header.set_flags(header.flags() | FLAG_WRITTEN);
            }
            let sum = self.survey.csum.compute(&bytes[32..]);
            bytes[..32].copy_from_slice(&sum);
            for copy in &self.info(number).copies {
                self.image.write(copy.0, &bytes);
            }
        }
        if self.super_changed
            && let Ok(sb) = Superblock::mut_from_bytes(&mut self.superblock)
        {
            let kind = CsumType::from_disk(sb.csum_type.get()).unwrap_or(self.survey.csum);
            let sum = kind.compute(&sb.as_bytes()[32..]);
            sb.csum = sum;
            self.image.write(SUPER_OFFSETS[0].0, sb.as_bytes());
        }
        self.image.freeze();
        self.image
    }
}

/// A little-endian number of up to eight bytes; what lies outside counts as zero.
pub(crate) fn read(bytes: &[u8], at: usize, width: usize) -> u64 {
    (0..width.min(8))
        .rev()
        .fold(0, |n, i| n << 8 | u64::from(bytes.get(at + i).copied().unwrap_or(0)))
}

pub(crate) fn write(bytes: &mut [u8], at: usize, width: usize, value: u64) {
    for i in 0..width.min(8) {
        if let Some(b) = bytes.get_mut(at + i) {
            *b = (value >> (8 * i)) as u8;
        }
    }
}

/// Fields of the superblock that are worth a change: where they lie and how long they are.
pub(crate) const SUPER_FIELDS: [(usize, usize); 36] = [
    (0x38, 8),
    (0x48, 8),
    (0x50, 8),
    (0x58, 8),
    (0x60, 8),
    (0x70, 8),
    (0x78, 8),
    (0x80, 8),
    (0x88, 8),
    (0x90, 4),
    (0x94, 4),
    (0xa0, 4),
    (0xa4, 8),
    (0xb4, 8),
    (0xbc, 8),
    (0xc4, 2),
    (0xc6, 1),
    (0xc7, 1),
    (0xc8, 1),
    (0xc9, 8),
    (0xd1, 8),
    (0xd9, 8),
    (0x22b, 8),
    (0x233, 8),
    (0xa0, 4),
    (0x32b, 1),
    (0x32b, 2),
    (0x32b, 4),
    (0x32b, 8),
    (0x32b, 8),
    // Generations of the roots in the four backups, and an address.
    (0xb33, 8),
    (0xbdb, 8),
    (0xc83, 8),
    (0xd2b, 8),
    (0xb2b, 8),
    (0x12b, 8),
];

/// Types that a key can be changed to.
pub(crate) const KINDS: [KeyType; 36] = [
    KeyType::INODE_ITEM,
    KeyType::INODE_REF,
    KeyType::INODE_EXTREF,
    KeyType::XATTR_ITEM,
    KeyType::ORPHAN_ITEM,
    KeyType::DIR_LOG_ITEM,
    KeyType::DIR_LOG_INDEX,
    KeyType::DIR_ITEM,
    KeyType::DIR_INDEX,
    KeyType::EXTENT_DATA,
    KeyType::EXTENT_CSUM,
    KeyType::ROOT_ITEM,
    KeyType::ROOT_BACKREF,
    KeyType::ROOT_REF,
    KeyType::EXTENT_ITEM,
    KeyType::METADATA_ITEM,
    KeyType::EXTENT_OWNER_REF,
    KeyType::TREE_BLOCK_REF,
    KeyType::EXTENT_DATA_REF,
    KeyType::SHARED_BLOCK_REF,
    KeyType::SHARED_DATA_REF,
    KeyType::BLOCK_GROUP_ITEM,
    KeyType::FREE_SPACE_INFO,
    KeyType::FREE_SPACE_EXTENT,
    KeyType::FREE_SPACE_BITMAP,
    KeyType::DEV_EXTENT,
    KeyType::DEV_ITEM,
    KeyType::CHUNK_ITEM,
    KeyType::QGROUP_STATUS,
    KeyType::TEMPORARY_ITEM,
    KeyType::PERSISTENT_ITEM,
    KeyType::DEV_REPLACE,
    KeyType::UUID_SUBVOL,
    KeyType::UUID_RECEIVED_SUBVOL,
    KeyType(0),
    KeyType(255),
];

/// Where a field lies and how long it is.
type Field = (usize, usize);

/// Generation, transid, size, nbytes, block group, links, owner, group, mode, device, flags,
/// sequence, seconds, nanoseconds.
const INODE_FIELDS: [Field; 14] = [
    (0, 8),
    (8, 8),
    (16, 8),
    (16, 8),
    (24, 8),
    (32, 8),
    (40, 4),
    (40, 4),
    (52, 4),
    (56, 8),
    (64, 8),
    (72, 8),
    (112, 8),
    (120, 4),
];

/// Generation, ram_bytes, compression, encryption, type, address, length on disk, offset, length.
const STORED_EXTENT_FIELDS: [Field; 10] =
    [(0, 8), (8, 8), (16, 1), (17, 1), (20, 1), (21, 8), (29, 8), (37, 8), (45, 8), (45, 8)];

/// Inode (size, links, mode, flags), generation, directory, address, limit, used, last snapshot,
/// flags, refs, drop_progress, levels, second generation.
const ROOT_FIELDS: [Field; 19] = [
    (16, 8),
    (40, 4),
    (52, 4),
    (64, 8),
    (160, 8),
    (168, 8),
    (168, 8),
    (176, 8),
    (184, 8),
    (192, 8),
    (200, 8),
    (208, 8),
    (216, 4),
    (220, 8),
    (228, 1),
    (229, 8),
    (237, 1),
    (238, 1),
    (239, 8),
];

const CHUNK_FIELDS: [Field; 15] = [
    (0, 8),
    (0, 8),
    (8, 8),
    (16, 8),
    (24, 8),
    (24, 8),
    (32, 4),
    (40, 4),
    (44, 2),
    (46, 2),
    (48, 8),
    (56, 8),
    (56, 8),
    (80, 8),
    (88, 8),
];

/// Fields of an item that are worth a change; none: any byte.
pub(crate) fn fields(kind: KeyType, len: usize) -> &'static [Field] {
    match kind {
        KeyType::INODE_ITEM => &INODE_FIELDS,
        KeyType::INODE_REF => &[(0, 8), (0, 8), (8, 2), (10, 1)],
        KeyType::INODE_EXTREF => &[(0, 8), (8, 8), (16, 2), (18, 1)],
        KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => {
            &[(0, 8), (0, 8), (8, 1), (9, 8), (17, 8), (25, 2), (27, 2), (29, 1), (30, 1), (31, 1)]
        }
        KeyType::EXTENT_DATA if len > 53 => &[(0, 8), (8, 8), (16, 1), (20, 1)],
        KeyType::EXTENT_DATA => &STORED_EXTENT_FIELDS,
        KeyType::ROOT_ITEM => &ROOT_FIELDS,
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => &[(0, 8), (8, 8), (16, 2), (18, 1)],
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
            &[(0, 8), (0, 8), (8, 8), (16, 8), (24, 1), (25, 8), (33, 1), (33, 8), (41, 8), (49, 4)]
        }
        KeyType::EXTENT_DATA_REF => &[(0, 8), (8, 8), (16, 8), (24, 4)],
        KeyType::SHARED_DATA_REF => &[(0, 4)],
        KeyType::BLOCK_GROUP_ITEM => &[(0, 8), (8, 8), (16, 8)],
        KeyType::FREE_SPACE_INFO => &[(0, 4), (4, 4)],
        // The end of a range of deletions.
        KeyType::DIR_LOG_ITEM | KeyType::DIR_LOG_INDEX => &[(0, 8)],
        KeyType::DEV_EXTENT => &[(0, 8), (8, 8), (16, 8), (24, 8)],
        KeyType::DEV_ITEM => {
            &[(0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 4), (36, 8), (44, 8)]
        }
        KeyType::CHUNK_ITEM => &CHUNK_FIELDS,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_little_endian_and_stay_within() {
        let mut b = [1, 2, 3, 4];
        assert_eq!((read(&b, 0, 2), read(&b, 2, 8), read(&b, 9, 4)), (0x201, 0x403, 0));
        write(&mut b, 3, 8, 0xaabb);
        assert_eq!(b, [1, 2, 3, 0xbb]);
    }

    #[test]
    fn an_empty_program_changes_nothing() {
        let mut tried = std::collections::BTreeSet::new();
        for byte in 0..=u8::MAX {
            if !tried.insert(seeds::choose(byte).0) {
                continue;
            }
            let Mutated { seed, mut image, .. } = mutate(&[byte]);
            assert_eq!(image.content_hash(), seeds::seed(seed).image.clone().content_hash());
        }
        assert_eq!(tried.len(), seeds::NAMES.len());
    }

    #[test]
    fn every_step_is_done_and_changed_blocks_pass_their_checksums() {
        let mut seen = std::collections::BTreeSet::new();
        let mut rng = fastrand::Rng::with_seed(7);
        for round in 0..300u32 {
            let mut input = vec![(round * 101) as u8, 0];
            input.extend((0..60).map(|_| rng.u8(..)));
            // Copies are spoilt on purpose by the last step: leave it out.
            let done = mutate(&input);
            seen.extend(done.steps.iter().copied());
            if done.steps.contains(&"one copy") {
                continue;
            }
            let survey = seeds::seed(done.seed);
            for block in &survey.blocks {
                let mut bytes = vec![0; survey.nodesize];
                done.image.read(block.copies[0].0, &mut bytes);
                assert!(NodeView(&bytes).csum_matches(survey.csum), "{:?}", done.steps);
            }
        }
        assert_eq!(seen.len(), 15, "{seen:?}");
    }
}
