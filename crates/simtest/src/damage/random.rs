//! Random damage: from a number, one change somewhere in a sound image, in the format's own words.
//!
//! The catalogue has damage that its authors thought of; this module makes the rest, evenly. It
//! chooses a *kind* of item of a tree first, so that a root item is changed as often as one of ten
//! thousand directory entries. Then it chooses a field, and a value: nearly right (one more, or the
//! neighbour's) or absurd. Checksums are put right on all copies, and so are the keys that parents
//! keep, unless the change is about them. So the only thing to be noticed is the change.
//!
//! A number gives the same change of the same image each time.

use crate::hostile::leaf::Leaf;
use crate::hostile::mutate::{KINDS, SUPER_FIELDS, fields, read, write};
use crate::hostile::survey::Survey;
use crate::image::Image;
use larder_format::node::{FLAG_WRITTEN, HEADER_SIZE, Header, NodeView, POINTER_SIZE};
use larder_format::{
    CsumType, Key, KeyType, ObjectId, Physical, SECTOR_SIZE, SUPER_SIZE, Superblock, TreeId,
};
use larder_volume::superblock::copies_within;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::fmt::Write;
use zerocopy::{FromBytes, IntoBytes};

/// A sound image, and what there is in it to damage.
#[derive(Debug)]
pub struct Patient {
    survey: Survey,
    /// Items by what they are: block and slot.
    items: BTreeMap<(TreeId, KeyType), Vec<(usize, usize)>>,
}

/// An image with one damage.
#[derive(Debug)]
pub struct Wounded {
    /// The image.
    pub image: Image,
    /// The kind of damage.
    pub class: &'static str,
    /// What was done, for people.
    pub what: String,
}

/// The kinds of damage, by how often each is done.
const CLASSES: [(&str, u32); 16] = [
    ("field of an item", 34),
    ("key of an item", 8),
    ("item removed", 10),
    ("items removed", 4),
    ("item doubled", 8),
    ("item of another's content", 4),
    ("items changed places", 4),
    ("size of an item", 5),
    ("content doubled", 3),
    ("header of a block", 6),
    ("pointer to a block", 6),
    ("pointer removed", 3),
    ("block in another's place", 2),
    ("copy of a block", 3),
    ("superblock", 8),
    ("data", 2),
];

impl Patient {
    /// Looks at a sound image.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(image: Image) -> Result<Self, String> {
        let survey = Survey::new(image)?;
        let mut items: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (number, block) in survey.blocks.iter().enumerate().filter(|(_, b)| b.level == 0) {
            // One place for all that hold files, but for the top.
            let tree = match block.tree {
                ObjectId::FS_TREE => ObjectId::FS_TREE,
                other if other.is_subvolume() => ObjectId::FIRST_FREE,
                other => other,
            };
            let leaf = Leaf::parse(&survey.bytes(number));
            for (slot, (key, _)) in leaf.0.iter().enumerate() {
                items.entry((tree, key.kind)).or_default().push((number, slot));
            }
        }
        Ok(Self { survey, items })
    }

    /// The image with the damage that a number stands for.
    #[must_use]
    pub fn wound(&self, number: u64) -> Wounded {
        let mut knife = Knife {
            patient: self,
            rng: StdRng::seed_from_u64(number),
            image: self.survey.image.clone(),
            what: String::new(),
        };
        let (class, _) =
            CLASSES.choose_weighted(&mut knife.rng, |(_, weight)| *weight).expect("classes");
        // What turns out to change nothing, or finds no room, is tried elsewhere.
        for _ in 0..100 {
            if knife.cut(class) {
                break;
            }
            knife.what.clear();
        }
        knife.image.freeze();
        Wounded { image: knife.image, class, what: knife.what }
    }
}

struct Knife<'a> {
    patient: &'a Patient,
    rng: StdRng,
    image: Image,
    what: String,
}

/// An item that is to be damaged, and its leaf.
struct Chosen {
    slot: usize,
    kind: KeyType,
    key: Key,
    data: Vec<u8>,
    leaf: Leaf,
}

impl Knife<'_> {
    fn survey(&self) -> &Survey {
        &self.patient.survey
    }

    /// Does some damage of a class; says whether there is any.
    fn cut(&mut self, class: &str) -> bool {
        match class {
            "header of a block" => self.header(),
            "pointer to a block" => self.pointer(),
            "pointer removed" => self.drop_pointer(),
            "block in another's place" => self.transplant(),
            "copy of a block" => self.copy(),
            "superblock" => self.superblock(),
            "data" => self.data(),
            items => self.items(items),
        }
    }

    fn note(&mut self, text: std::fmt::Arguments<'_>) {
        self.what.write_fmt(text).expect("a string");
    }

    fn block(&mut self) -> usize {
        // Small trees are as interesting as large ones.
        let mut trees: BTreeMap<TreeId, Vec<usize>> = BTreeMap::new();
        for (n, block) in self.patient.survey.blocks.iter().enumerate() {
            trees.entry(block.tree).or_default().push(n);
        }
        let trees: Vec<_> = trees.into_values().collect();
        *trees.choose(&mut self.rng).expect("trees").choose(&mut self.rng).expect("blocks")
    }

    fn interior(&mut self) -> Option<usize> {
        let blocks = &self.patient.survey.blocks;
        let interior: Vec<usize> = (0..blocks.len()).filter(|n| blocks[*n].level > 0).collect();
        interior.choose(&mut self.rng).copied()
    }

    /// A number that might stand in the place of `now`.
    fn value(&mut self, now: u64, width: usize) -> u64 {
        let max = if width >= 8 { u64::MAX } else { (1 << (8 * width)) - 1 };
        let sector = u64::from(SECTOR_SIZE);
        let generation = self.survey().superblock.generation().0;
        loop {
            let value = match self.rng.random_range(0..18) {
                0 => 0,
                1 => 1,
                2 => max,
                3..=5 => now.wrapping_add(1),
                6 | 7 => now.wrapping_sub(1),
                8 => now.wrapping_add(sector),
                9 => now.wrapping_sub(sector),
                10 | 11 => now ^ (1 << self.rng.random_range(0..8 * width)),
                12 => now.wrapping_mul(2),
                13 => now / 2,
                14 => generation + self.rng.random_range(0..4),
                15 => {
                    let n = self.block();
                    self.survey().blocks[n].at.0
                }
                16 => 256 + self.rng.random_range(0..80),
                _ => self.rng.random(),
            };
            if value & max != now {
                return value & max;
            }
        }
    }

    fn bytes(&self, block: usize) -> Vec<u8> {
        self.survey().bytes(block)
    }

    /// Writes a block to all its copies, with its checksum.
    fn put(&mut self, block: usize, mut bytes: Vec<u8>) {
        let sum = self.survey().csum.compute(&bytes[32..]);
        bytes[..32].copy_from_slice(&sum);
        for copy in self.survey().blocks[block].copies.clone() {
            self.image.write(copy.0, &bytes);
        }
    }

    /// Writes a leaf of these items, and its first key into the blocks above.
    fn put_leaf(&mut self, block: usize, leaf: &Leaf) -> bool {
        let mut bytes = self.bytes(block);
        if !leaf.store(&mut bytes) {
            return false;
        }
        self.put(block, bytes);
        let Some((first, _)) = leaf.0.first() else { return true };
        let mut child = block;
        while let Some((parent, slot)) = self.survey().blocks[child].parent {
            let mut bytes = self.bytes(parent);
            write(&mut bytes, HEADER_SIZE + slot * POINTER_SIZE, 8, first.objectid.0);
            bytes[HEADER_SIZE + slot * POINTER_SIZE + 8] = first.kind.0;
            write(&mut bytes, HEADER_SIZE + slot * POINTER_SIZE + 9, 8, first.offset);
            self.put(parent, bytes);
            if slot != 0 {
                break;
            }
            child = parent;
        }
        true
    }

    fn items(&mut self, class: &str) -> bool {
        let kinds: Vec<_> = self.patient.items.iter().collect();
        let ((_, kind), places) = *kinds.choose(&mut self.rng).expect("items");
        let (block, slot) = *places.choose(&mut self.rng).expect("an item");
        let tree = self.survey().blocks[block].tree;
        let other = *places.choose(&mut self.rng).expect("an item");
        let leaf = Leaf::parse(&self.bytes(block));
        let (key, data) = leaf.0[slot].clone();
        self.note(format_args!("tree {tree}, item {key}: "));
        let mut chosen = Chosen { slot, kind: *kind, key, data, leaf };
        let changes = match class {
            "field of an item" => self.field(&mut chosen, other),
            "key of an item" => {
                let to = self.other_key(key);
                self.note(format_args!("filed under {to}"));
                chosen.leaf.0[slot].0 = to;
                chosen.leaf.sort();
                chosen.leaf.0.iter().any(|(k, _)| *k == to)
            }
            "item removed" => {
                self.note(format_args!("removed"));
                chosen.leaf.0.remove(slot);
                !chosen.leaf.0.is_empty()
            }
            "items removed" => self.remove_several(&mut chosen),
            "item doubled" => self.double(&mut chosen),
            "item of another's content" => {
                let (from, theirs) = Leaf::parse(&self.bytes(other.0)).0[other.1].clone();
                self.note(format_args!("with the content of {from}"));
                chosen.leaf.0[slot].1.clone_from(&theirs);
                theirs != chosen.data
            }
            "items changed places" => self.exchange(&mut chosen),
            "size of an item" => self.resize(&mut chosen),
            _ => {
                self.note(format_args!("its content twice"));
                chosen.leaf.0[slot].1.extend_from_slice(&chosen.data);
                !chosen.data.is_empty()
            }
        };
        changes && self.put_leaf(block, &chosen.leaf)
    }

    /// Changes a field of the item; `other` is the place of another one of its kind.
    fn field(&mut self, chosen: &mut Chosen, other: (usize, usize)) -> bool {
        let data = &chosen.data;
        let known = fields(chosen.kind, data.len());
        let (at, width) = match known {
            [] if data.is_empty() => return false,
            [] => (self.rng.random_range(0..data.len()), 1 << self.rng.random_range(0..4)),
            known => *known.choose(&mut self.rng).expect("fields"),
        };
        if at + width > data.len() {
            return false;
        }
        let now = read(data, at, width);
        // What stands there in another item of this kind may fit everything but this one.
        let theirs = Leaf::parse(&self.bytes(other.0)).0[other.1].1.clone();
        let value = match self.rng.random_range(0..4) {
            0 if theirs.len() >= at + width => read(&theirs, at, width),
            _ => self.value(now, width),
        };
        self.note(format_args!("{width} bytes at {at} from {now} to {value}"));
        write(&mut chosen.leaf.0[chosen.slot].1, at, width, value);
        value != now
    }

    /// Removes the item with some that follow, or with all of its object.
    fn remove_several(&mut self, chosen: &mut Chosen) -> bool {
        let (slot, key, items) = (chosen.slot, chosen.key, &mut chosen.leaf.0);
        let all = self.rng.random_range(0..2) == 0;
        let end = (slot + self.rng.random_range(2..8)).min(items.len());
        if all {
            self.note(format_args!("and all of {} in its leaf removed", key.objectid));
            items.retain(|(k, _)| k.objectid != key.objectid);
        } else {
            self.note(format_args!("and {} that follow removed", end - slot - 1));
            items.drain(slot..end);
        }
        !items.is_empty()
    }

    fn double(&mut self, chosen: &mut Chosen) -> bool {
        let to = self.other_key(chosen.key);
        self.note(format_args!("also filed under {to}"));
        if chosen.leaf.0.iter().any(|(k, _)| *k == to) {
            return false;
        }
        chosen.leaf.0.push((to, chosen.data.clone()));
        chosen.leaf.sort();
        true
    }

    /// Exchanges the key or the content with the item behind it.
    fn exchange(&mut self, chosen: &mut Chosen) -> bool {
        let (slot, items) = (chosen.slot, &mut chosen.leaf.0);
        if slot + 1 >= items.len() {
            return false;
        }
        let (next, theirs) = items[slot + 1].clone();
        let keys = self.rng.random_range(0..2) == 0;
        self.note(format_args!("{} exchanged with {next}", if keys { "key" } else { "content" }));
        let differs = theirs != chosen.data;
        if keys {
            (items[slot].0, items[slot + 1].0) = (next, chosen.key);
        } else {
            (items[slot].1, items[slot + 1].1) = (theirs, chosen.data.clone());
        }
        keys || differs
    }

    fn resize(&mut self, chosen: &mut Chosen) -> bool {
        let now = chosen.data.len();
        let len = match self.rng.random_range(0..5) {
            0 => now.saturating_sub(1),
            1 => now + 1,
            2 => self.rng.random_range(0..=now),
            3 => now + self.rng.random_range(0..300),
            _ => 0,
        };
        self.note(format_args!("{len} bytes instead of {now}"));
        chosen.leaf.0[chosen.slot].1.resize(len, 0);
        len != now
    }

    fn other_key(&mut self, key: Key) -> Key {
        let mut to = key;
        match self.rng.random_range(0..8) {
            0..=2 => to.objectid = ObjectId(self.value(key.objectid.0, 8)),
            3 => to.kind = *KINDS.choose(&mut self.rng).expect("kinds"),
            _ => to.offset = self.value(key.offset, 8),
        }
        to
    }

    fn header(&mut self) -> bool {
        let block = self.block();
        let mut bytes = self.bytes(block);
        let places =
            [(32, 8), (48, 8), (56, 8), (63, 1), (64, 8), (80, 8), (88, 8), (96, 4), (100, 1)];
        let (at, width) = *places.choose(&mut self.rng).expect("fields");
        let now = read(&bytes, at, width);
        let value = self.value(now, width);
        let info = self.survey().blocks[block].clone();
        self.note(format_args!(
            "block {} (tree {}, level {}): {width} bytes at {at} from {now} to {value}",
            info.at, info.tree, info.level
        ));
        write(&mut bytes, at, width, value);
        self.put(block, bytes);
        true
    }

    fn pointer(&mut self) -> bool {
        let Some(block) = self.interior() else { return false };
        let mut bytes = self.bytes(block);
        let slot = self.rng.random_range(0..NodeView(&bytes).nritems());
        let info = self.survey().blocks[block].clone();
        self.note(format_args!("block {} (tree {}), pointer {slot}: ", info.at, info.tree));
        let at = HEADER_SIZE + slot * POINTER_SIZE;
        if self.rng.random_range(0..4) == 0 {
            // To another block, as that is.
            let target = self.block();
            let to = self.survey().blocks[target].clone();
            if to.at.0 == read(&bytes, at + 17, 8) {
                return false;
            }
            self.note(format_args!("leads to {} (tree {})", to.at, to.tree));
            write(&mut bytes, at + 17, 8, to.at.0);
            write(&mut bytes, at + 25, 8, to.generation);
        } else {
            let (field, width) =
                *[(0, 8), (8, 1), (9, 8), (17, 8), (25, 8)].choose(&mut self.rng).expect("fields");
            let now = read(&bytes, at + field, width);
            let value = self.value(now, width);
            self.note(format_args!("{width} bytes at {field} from {now} to {value}"));
            write(&mut bytes, at + field, width, value);
        }
        self.put(block, bytes);
        true
    }

    fn drop_pointer(&mut self) -> bool {
        let Some(block) = self.interior() else { return false };
        let mut bytes = self.bytes(block);
        let n = NodeView(&bytes).nritems();
        if n < 2 {
            return false;
        }
        // The first would leave the key in the parent wrong besides.
        let slot = self.rng.random_range(1..n);
        let info = self.survey().blocks[block].clone();
        self.note(format_args!("block {} (tree {}): pointer {slot} removed", info.at, info.tree));
        let from = HEADER_SIZE + (slot + 1) * POINTER_SIZE;
        bytes.copy_within(from..HEADER_SIZE + n * POINTER_SIZE, from - POINTER_SIZE);
        write(&mut bytes, 96, 4, n as u64 - 1);
        self.put(block, bytes);
        true
    }

    fn transplant(&mut self) -> bool {
        let (from, to) = (self.block(), self.block());
        let (mut bytes, place) = (self.bytes(from), self.bytes(to));
        let (source, target) =
            (self.survey().blocks[from].clone(), self.survey().blocks[to].clone());
        if source.level != target.level || from == to {
            return false;
        }
        self.note(format_args!(
            "block {} (tree {}) has the content of {} (tree {})",
            target.at, target.tree, source.at, source.tree
        ));
        let (old, _) = Header::read_from_prefix(&place).expect("longer than a header");
        let (header, _) = Header::mut_from_prefix(&mut bytes).expect("longer than a header");
        header.bytenr = old.bytenr;
        if self.rng.random_range(0..2) == 0 {
            header.generation = old.generation;
            header.owner = old.owner;
        }
        header.set_flags(header.flags() | FLAG_WRITTEN);
        self.put(to, bytes);
        true
    }

    fn copy(&mut self) -> bool {
        let block = self.block();
        let info = self.survey().blocks[block].clone();
        let all = self.rng.random_range(0..4) == 0;
        let one = *info.copies.choose(&mut self.rng).expect("a copy");
        let at = self.rng.random_range(0..self.survey().nodesize);
        let byte: u8 = self.rng.random();
        self.note(format_args!(
            "block {} (tree {}): byte {at} of {} spoilt, without its checksum",
            info.at,
            info.tree,
            if all { "all copies" } else { "a copy" }
        ));
        let mut changed = false;
        for copy in info.copies.iter().filter(|c| all || **c == one) {
            let mut now = [0];
            self.image.read(copy.0 + at as u64, &mut now);
            changed |= now[0] != byte;
            self.image.write(copy.0 + at as u64, &[byte]);
        }
        changed
    }

    /// A field of the superblock, in all of its copies.
    fn superblock(&mut self) -> bool {
        let (at, width) = *SUPER_FIELDS.choose(&mut self.rng).expect("fields");
        let at = if at == 0x32b { at + self.rng.random_range(0..320) } else { at };
        let mut bytes = self.survey().super_bytes();
        let now = read(&bytes, at, width);
        let value = self.value(now, width);
        self.note(format_args!("superblock: {width} bytes at {at:#x} from {now} to {value}"));
        write(&mut bytes, at, width, value);
        let Ok(changed) = Superblock::read_from_bytes(&bytes) else { return false };
        let kind = CsumType::from_disk(changed.csum_type.get()).unwrap_or(self.survey().csum);
        for place in copies_within(self.image.size()).collect::<Vec<Physical>>() {
            let mut sb = changed;
            sb.bytenr.set(place.0);
            // A log is known to the first copy only.
            if place.0 != copies_within(u64::MAX).next().expect("a first").0 {
                let mut there = vec![0; SUPER_SIZE];
                self.image.read(place.0, &mut there);
                let Ok(old) = Superblock::read_from_bytes(&there) else { continue };
                if (0x60..0x68).contains(&at) {
                    continue;
                }
                sb.log_root = old.log_root;
                sb.log_root_level = old.log_root_level;
            }
            sb.csum = kind.compute(&sb.as_bytes()[32..]);
            self.image.write(place.0, sb.as_bytes());
        }
        true
    }

    fn data(&mut self) -> bool {
        let Some(extent) = self.patient.survey.extents.choose(&mut self.rng) else { return false };
        let at = self.rng.random_range(0..extent.len);
        self.note(format_args!("data at {} + {at}", extent.at));
        let mut byte = [0];
        self.image.read(extent.physical.0 + at, &mut byte);
        self.image.write(extent.physical.0 + at, &[!byte[0]]);
        true
    }
}
