//! Items against random ones and random bytes: what is encoded parses back equal and encodes equal;
//! what is not an item gives an error, never a panic; an accepted item encodes to the bytes it came
//! from.

mod reencode;

use larder_format::items::dir::{find_entry, remove_entry};
use larder_format::items::inode_ref::{find_extref, find_ref, remove_extref, remove_ref};
use larder_format::items::{
    BlockGroupFlags, Chunk, Compression, DevStats, DirEntries, DirEntryRef, ExtRef, ExtRefs,
    ExtentFlags, ExtentItem, ExtentKind, ExtentRecord, ExtentRef, FileExtent, FileType,
    InlineExtent, InodeRef, InodeRefs, Profile, RootItem, RootRef, Stripe, TreeBlockInfo,
    encode_sys_array, keys, parse_keyed_refs, parse_sys_array,
};
use larder_format::{
    DeviceId, DiskKey, FileOffset, Generation, Key, KeyType, Logical, ObjectId, Physical,
};
use proptest::collection::vec;
use proptest::prelude::*;
use reencode::reencode;
use zerocopy::{FromBytes, IntoBytes};

fn name() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 1..=255)
}
/// Names that may repeat.
fn short_name() -> impl Strategy<Value = Vec<u8>> {
    vec(0u8..3, 1..3)
}
fn sectors(max: u64) -> impl Strategy<Value = u64> {
    (0..max).prop_map(|n| n * 4096)
}
fn key() -> impl Strategy<Value = Key> {
    (any::<u64>(), any::<u8>(), any::<u64>()).prop_map(|(o, k, off)| Key::new(o, KeyType(k), off))
}

#[derive(Clone, Debug)]
struct Entry {
    location: Key,
    transid: u64,
    kind: FileType,
    name: Vec<u8>,
    data: Vec<u8>,
}
impl Entry {
    fn view(&self) -> DirEntryRef<'_> {
        DirEntryRef {
            location: self.location,
            transid: Generation(self.transid),
            kind: self.kind,
            name: &self.name,
            data: &self.data,
        }
    }
}
fn entry(name: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Entry> {
    (key(), any::<u64>(), 1u8..=8, name, vec(any::<u8>(), 0..40)).prop_map(
        |(location, transid, kind, name, data)| {
            let kind = FileType::from_disk(kind).unwrap();
            let data = if kind == FileType::Xattr { data } else { Vec::new() };
            Entry { location, transid, kind, name, data }
        },
    )
}

fn stored() -> impl Strategy<Value = ExtentRecord> {
    let compression = prop_oneof![
        Just(Compression::None),
        Just(Compression::Zlib),
        Just(Compression::Lzo),
        Just(Compression::Zstd)
    ];
    let fields = (any::<u64>(), 1u64..=32, any::<bool>(), 1u64..1 << 40, 0u64..32, 1u64..=32);
    (compression, fields).prop_map(
        |(compression, (generation, total, prealloc, at, offset, num))| {
            let offset = offset % total;
            ExtentRecord {
                generation: Generation(generation),
                ram_bytes: total * 4096,
                compression,
                kind: if prealloc { ExtentKind::Prealloc } else { ExtentKind::Regular },
                disk_bytenr: Logical(at * 4096),
                disk_num_bytes: if compression == Compression::None { total * 4096 } else { 4096 },
                offset: offset * 4096,
                num_bytes: num.min(total - offset) * 4096,
            }
        },
    )
}

fn data_refs() -> impl Strategy<Value = Vec<(ExtentRef, u32)>> {
    let data =
        (any::<u64>(), any::<u64>(), sectors(1 << 52)).prop_map(|(root, objectid, offset)| {
            let (root, objectid) = (ObjectId(root), ObjectId(objectid));
            ExtentRef::Data { root, objectid, offset: FileOffset(offset) }
        });
    let shared = sectors(1 << 52).prop_map(|p| ExtentRef::SharedData { parent: Logical(p) });
    let owner = any::<u64>().prop_map(|r| ExtentRef::Owner { root: ObjectId(r) });
    vec((prop_oneof![data, shared, owner], 1..u32::MAX), 0..6).prop_map(|mut refs| {
        for (r, count) in &mut refs {
            if !r.has_count() {
                *count = 1;
            }
        }
        refs
    })
}
fn block_refs() -> impl Strategy<Value = Vec<(ExtentRef, u32)>> {
    let by_tree = any::<u64>().prop_map(|r| ExtentRef::TreeBlock { root: ObjectId(r) });
    let shared = sectors(1 << 52).prop_map(|p| ExtentRef::SharedBlock { parent: Logical(p) });
    vec((prop_oneof![by_tree, shared], Just(1)), 0..6)
}

fn chunk() -> impl Strategy<Value = Chunk> {
    let stripe =
        (any::<u64>(), 0u64..1 << 40, any::<[u8; 16]>()).prop_map(|(devid, at, dev_uuid)| Stripe {
            devid: DeviceId(devid),
            offset: Physical(at * 4096),
            dev_uuid,
        });
    let kind = prop_oneof![
        Just(BlockGroupFlags::DATA),
        Just(BlockGroupFlags::METADATA),
        Just(BlockGroupFlags::SYSTEM),
        Just(BlockGroupFlags::DATA | BlockGroupFlags::METADATA),
    ];
    (1u64..1 << 36, kind, prop::sample::select(Profile::ALL.to_vec()), vec(stripe, 12), 0u16..3)
        .prop_map(|(length, kind, profile, mut stripes, extra)| {
            let least = (1..).find(|n| profile.fits_stripes(*n)).unwrap();
            let n = if profile.fits_stripes(least + 2 * extra) { least + 2 * extra } else { least };
            stripes.truncate(n.into());
            Chunk::new(length * 4096, kind | profile.flag(), stripes)
        })
}

const KINDS: [KeyType; 23] = [
    KeyType::INODE_ITEM,
    KeyType::INODE_REF,
    KeyType::INODE_EXTREF,
    KeyType::DIR_ITEM,
    KeyType::XATTR_ITEM,
    KeyType::DIR_INDEX,
    KeyType::EXTENT_DATA,
    KeyType::ROOT_REF,
    KeyType::ROOT_BACKREF,
    KeyType::EXTENT_ITEM,
    KeyType::METADATA_ITEM,
    KeyType::TREE_BLOCK_REF,
    KeyType::SHARED_BLOCK_REF,
    KeyType::EXTENT_DATA_REF,
    KeyType::SHARED_DATA_REF,
    KeyType::BLOCK_GROUP_ITEM,
    KeyType::FREE_SPACE_INFO,
    KeyType::DEV_EXTENT,
    KeyType::CHUNK_ITEM,
    KeyType::UUID_SUBVOL,
    KeyType::DIR_LOG_INDEX,
    KeyType::ORPHAN_ITEM,
    KeyType::FREE_SPACE_BITMAP,
];

fn check_bytes(key_offset: u64, bytes: &[u8]) -> Result<(), TestCaseError> {
    for kind in KINDS {
        let key = Key::new(4096, kind, key_offset);
        if let Ok(back) = reencode(&key, bytes).expect("every kind has a parser") {
            // Equal references may stand in any order among themselves: sequences collide only for
            // hashes.
            prop_assert_eq!(&back, bytes, "{} accepted but not understood", kind);
        }
    }
    if let Ok(chunks) = parse_sys_array(bytes) {
        prop_assert_eq!(encode_sys_array(chunks.iter().map(|(k, c)| (*k, c))).unwrap(), bytes);
    }
    let _ = RootItem::parse(bytes);
    let _ = DevStats::parse(bytes);
    Ok(())
}

proptest! {
    #[test]
    fn directory_entries(entries in vec(entry(name()), 1..5)) {
        let mut item = Vec::new();
        for e in &entries {
            e.view().append_to(&mut item);
        }
        let back: Vec<_> = DirEntries::new(&item).collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(back, entries.iter().map(Entry::view).collect::<Vec<_>>());
        for cut in 1..entries[0].view().encoded_len() {
            prop_assert!(DirEntries::new(&item[..cut]).next().unwrap().is_err());
        }
    }

    #[test]
    fn directory_entries_are_found_and_removed_by_name(
        entries in vec(entry(short_name()), 0..8),
        wanted in short_name(),
    ) {
        let mut item = Vec::new();
        for e in &entries {
            e.view().append_to(&mut item);
        }
        let at = entries.iter().position(|e| e.name == wanted);
        prop_assert_eq!(find_entry(&item, &wanted).unwrap(), at.map(|i| entries[i].view()));
        prop_assert_eq!(remove_entry(&mut item, &wanted).unwrap(), at.is_some());
        let others = entries.iter().enumerate().filter(|(i, _)| Some(*i) != at);
        let left: Vec<_> = others.map(|(_, e)| e.view()).collect();
        let back: Vec<_> = DirEntries::new(&item).collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(back, left);
    }

    #[test]
    fn inode_refs(entries in vec((any::<u64>(), short_name()), 0..8), wanted in short_name()) {
        let mut item = Vec::new();
        for (index, name) in &entries {
            InodeRef { index: *index, name }.append_to(&mut item);
        }
        let read = |item: &[u8]| -> Vec<(u64, Vec<u8>)> {
            InodeRefs::new(item).map(|e| e.map(|e| (e.index, e.name.to_vec())).unwrap()).collect()
        };
        prop_assert_eq!(&read(&item), &entries);
        let at = entries.iter().position(|(_, name)| *name == wanted);
        let index = at.map(|i| entries[i].0);
        prop_assert_eq!(find_ref(&item, &wanted).unwrap().map(|e| e.index), index);
        prop_assert_eq!(remove_ref(&mut item, &wanted).unwrap(), index);
        let mut left = entries.clone();
        if let Some(i) = at {
            left.remove(i);
        }
        prop_assert_eq!(read(&item), left);
    }

    #[test]
    fn inode_extrefs(
        entries in vec((0u64..3, any::<u64>(), short_name()), 0..8),
        parent in 0u64..3,
        wanted in short_name(),
    ) {
        let mut item = Vec::new();
        for (parent, index, name) in &entries {
            ExtRef { parent: ObjectId(*parent), index: *index, name }.append_to(&mut item);
        }
        let read = |item: &[u8]| -> Vec<(u64, u64, Vec<u8>)> {
            let parts = |e: ExtRef<'_>| (e.parent.0, e.index, e.name.to_vec());
            ExtRefs::new(item).map(|e| e.map(parts).unwrap()).collect()
        };
        prop_assert_eq!(&read(&item), &entries);
        let at = entries.iter().position(|(p, _, name)| *p == parent && *name == wanted);
        let index = at.map(|i| entries[i].1);
        let parent = ObjectId(parent);
        prop_assert_eq!(find_extref(&item, parent, &wanted).unwrap().map(|e| e.index), index);
        prop_assert_eq!(remove_extref(&mut item, parent, &wanted).unwrap(), index);
        let mut left = entries.clone();
        if let Some(i) = at {
            left.remove(i);
        }
        prop_assert_eq!(read(&item), left);
    }

    #[test]
    fn stored_extents(record in stored(), skip in 0u64..32) {
        let bytes = record.encode();
        prop_assert_eq!(FileExtent::parse(&bytes), Ok(FileExtent::Stored(record)));
        let skip = skip * 4096 % record.num_bytes;
        let part = record.part(skip..record.num_bytes);
        let bytes = part.encode();
        prop_assert_eq!(FileExtent::parse(&bytes), Ok(FileExtent::Stored(part)));
        prop_assert_eq!(part.offset + part.num_bytes, record.offset + record.num_bytes);

        let beyond = ExtentRecord { num_bytes: record.num_bytes + 33 * 4096, ..record };
        prop_assert!(FileExtent::parse(&beyond.encode()).is_err());
        let empty = ExtentRecord { num_bytes: 0, ..record };
        prop_assert!(FileExtent::parse(&empty.encode()).is_err());
        let unaligned = ExtentRecord { disk_bytenr: record.disk_bytenr.plus(512), ..record };
        prop_assert!(FileExtent::parse(&unaligned.encode()).is_err());
    }

    #[test]
    fn inline_extents(
        data in vec(any::<u8>(), 0..3000),
        generation in any::<u64>(),
        kind in 0u8..4,
    ) {
        let compression = Compression::from_disk(kind).unwrap();
        let ram_bytes = if compression == Compression::None { data.len() as u64 } else { 4096 };
        let generation = Generation(generation);
        let inline = InlineExtent { generation, ram_bytes, compression, data: &data };
        let bytes = inline.encode();
        prop_assert_eq!(FileExtent::parse(&bytes), Ok(FileExtent::Inline(inline)));
        let wrong = InlineExtent { ram_bytes: ram_bytes + (1 << 20), ..inline }.encode();
        prop_assert!(FileExtent::parse(&wrong).is_err());
    }

    #[test]
    fn extent_items(
        data in data_refs(),
        blocks in block_refs(),
        generation in any::<u64>(),
        keyed in 0u64..9,
        first in key(),
        level in 0u8..8,
    ) {
        for (kind, flags, block, inline) in [
            (KeyType::EXTENT_ITEM, ExtentFlags::DATA, None, &data),
            (KeyType::METADATA_ITEM, ExtentFlags::TREE_BLOCK, None, &blocks),
            (
                KeyType::EXTENT_ITEM,
                ExtentFlags::TREE_BLOCK | ExtentFlags::FULL_BACKREF,
                Some(TreeBlockInfo { key: first.into(), level }),
                &blocks,
            ),
        ] {
            let sum: u64 = inline
                .iter()
                .filter(|(r, _)| !matches!(r, ExtentRef::Owner { .. }))
                .map(|(_, n)| u64::from(*n))
                .sum();
            let mut item = ExtentItem {
                refs: sum + keyed,
                generation: Generation(generation),
                flags,
                block,
                inline: inline.clone(),
            };
            let bytes = item.encode();
            prop_assert_eq!(bytes.len(), item.encoded_len());
            let back = ExtentItem::parse(kind, &bytes).unwrap();
            prop_assert_eq!(back.encode(), bytes);
            item.inline.sort_by_key(|(r, _)| r.inline_order());
            prop_assert_eq!(back, item);
        }
    }

    #[test]
    fn keyed_refs(data in data_refs(), blocks in block_refs(), bytenr in sectors(1 << 50)) {
        for (r, count) in data.into_iter().chain(blocks) {
            if matches!(r, ExtentRef::Owner { .. }) {
                continue;
            }
            let key = r.keyed(Logical(bytenr));
            prop_assert_eq!(key.objectid.0, bytenr);
            prop_assert_eq!(parse_keyed_refs(&key, &r.encode_keyed(count)), Ok(vec![(r, count)]));
        }
    }

    #[test]
    fn chunks(chunks in vec(chunk(), 1..4), at in sectors(1 << 40)) {
        for c in &chunks {
            let bytes = c.encode();
            prop_assert_eq!(bytes.len(), c.encoded_len());
            prop_assert_eq!(&Chunk::parse(&bytes).unwrap(), c);
        }
        let system: Vec<(Key, Chunk)> = chunks
            .into_iter()
            .filter(|c| c.flags.contains(BlockGroupFlags::SYSTEM))
            .map(|c| (keys::chunk_key(Logical(at)), c))
            .collect();
        let bytes = encode_sys_array(system.iter().map(|(k, c)| (*k, c))).unwrap();
        prop_assert_eq!(parse_sys_array(&bytes).unwrap(), system);
    }

    #[test]
    fn root_refs(dirid in any::<u64>(), sequence in any::<u64>(), name in name()) {
        let r = RootRef { dirid: ObjectId(dirid), sequence, name: &name };
        let mut bytes = r.encode();
        prop_assert_eq!(RootRef::parse(&bytes), Ok(r));
        bytes.push(0);
        prop_assert!(RootRef::parse(&bytes).is_err());
        bytes.truncate(bytes.len() - 2);
        prop_assert!(RootRef::parse(&bytes).is_err());
    }

    #[test]
    fn root_items(bytes in vec(any::<u8>(), 439)) {
        let mut item = RootItem::read_from_bytes(&bytes).unwrap();
        item.flags = 1.into();
        item.bytenr = (item.bytenr.get() & !4095).into();
        (item.level, item.drop_level) = (item.level & 7, item.drop_level & 7);
        item.set_generation(Generation(item.generation.get()));
        prop_assert_eq!(RootItem::parse(item.as_bytes()), Ok(item));
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..500), offset in any::<u64>()) {
        check_bytes(offset, &bytes)?;
    }

    #[test]
    fn small_bytes_never_panic(bytes in vec(0u8..3, 0..200), offset in 0u64..3) {
        check_bytes(offset, &bytes)?;
    }

    #[test]
    fn damaged_items_never_panic(
        entries in vec(entry(short_name()), 1..4),
        record in stored(),
        data in data_refs(),
        chunk in chunk(),
        first in key(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut dir = Vec::new();
        let mut refs = Vec::new();
        let mut extrefs = Vec::new();
        for e in &entries {
            e.view().append_to(&mut dir);
            InodeRef { index: e.transid, name: &e.name }.append_to(&mut refs);
            let (parent, index) = (first.objectid, e.transid);
            ExtRef { parent, index, name: &e.name }.append_to(&mut extrefs);
        }
        let extent = ExtentItem {
            refs: u64::MAX,
            generation: Generation(1),
            flags: ExtentFlags::DATA,
            block: None,
            inline: data,
        };
        let record = record.encode().to_vec();
        let chunk = chunk.encode();
        let sys = [DiskKey::from(keys::chunk_key(Logical(1 << 20))).as_bytes(), &chunk].concat();
        for item in [dir, refs, extrefs, record, extent.encode(), chunk, sys] {
            check_bytes(first.offset, &item)?;
            let mut bad = item.clone();
            for (at, v) in &damage {
                let at = at.index(bad.len());
                bad[at] = *v;
            }
            check_bytes(first.offset, &bad)?;
            check_bytes(first.offset, &item[..cut.index(item.len())])?;
        }
    }
}
