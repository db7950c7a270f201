//! Whatever the bytes are, the checker answers: good nodes with changes, and garbage.

use super::*;
use proptest::prelude::*;

/// Leaves with something of everything.
fn samples() -> Vec<Vec<u8>> {
    let file = key(258, KeyType::INODE_ITEM, 0);
    let subvolume = leaf(
        ObjectId::FS_TREE,
        &[
            inode(257),
            (key(257, KeyType::INODE_REF, 256), [&le(2)[..], &[4, 0], b"name"].concat()),
            (key(257, KeyType::INODE_EXTREF, 1), [&[0; 16][..], &[2, 0], b"ab"].concat()),
            (
                key(257, KeyType::XATTR_ITEM, name_hash(b"user.x")),
                dir_entry(&Key::MIN, 8, b"user.x", b"v"),
            ),
            (key(257, KeyType::DIR_ITEM, name_hash(b"name")), dir_entry(&file, 1, b"name", b"")),
            (key(257, KeyType::EXTENT_DATA, 0), extent(&[])),
            (key(257, KeyType::EXTENT_DATA, 8192), extent(&[])),
        ],
    );
    let head = body(24, &[(0, &le(4)), (8, &le(9)), (16, &le(1))]);
    let node = body(24, &[(0, &le(4)), (8, &le(9)), (16, &le(2))]);
    let space = leaf(
        ObjectId::EXTENT_TREE,
        &[
            (
                key(4096, KeyType::EXTENT_ITEM, 4096),
                [&head[..], &data_ref(ObjectId(257), FileOffset(0), 2)].concat(),
            ),
            (
                key(8192, KeyType::METADATA_ITEM, 0),
                [&node[..], &[176], &le(5), &[182], &le(4096)].concat(),
            ),
            (key(8192, KeyType::SHARED_BLOCK_REF, 4096), vec![]),
            (key(8192, KeyType::FREE_SPACE_BITMAP, 32768), vec![3]),
            (key(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, 0), vec![1; 40]),
        ],
    );
    let k = |n| key(n, KeyType::INODE_ITEM, 0);
    vec![subvolume, space, interior(ObjectId::FS_TREE, &[(k(256), 4096, 10), (k(300), 8192, 1)])]
}

#[test]
fn samples_are_good() {
    for bytes in samples() {
        assert_eq!(check(bytes, &expect()), Ok(()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
    /// Whatever stands in a node with a right checksum, the checker ends without panic, and what it
    /// lets through has all its items within the block, in order and apart.
    #[test]
    fn no_bytes_panic(
        sample in 0usize..3,
        // Most changes hit headers and items; some of them set whole fields to their ends.
        changes in prop::collection::vec((0usize..SIZE, any::<u8>(), 0usize..9), 0..6),
        near in prop::collection::vec((80usize..330, any::<u8>()), 0..3),
        tail in prop::collection::vec((SIZE - 600..SIZE, any::<u8>()), 0..3),
        csum in prop::bool::ANY,
    ) {
        let mut bytes = samples().swap_remove(sample);
        for (at, value, run) in changes {
            let end = (at + run).min(SIZE);
            bytes[at.min(end)..end].fill(value);
        }
        for (at, value) in near.into_iter().chain(tail) {
            bytes[at] = value;
        }
        let e = Expect { csum: csum.then_some(CsumType::Crc32c), ..expect() };
        if check(bytes.clone(), &e).is_ok() {
            let node = NodeView(&bytes);
            let mut end = SIZE - HEADER_SIZE;
            for slot in 0..node.nritems() {
                let k = node.key(slot).unwrap();
                prop_assert_eq!(node.search(&k), Ok(slot));
                if node.level() == 0 {
                    let data = node.data(slot).unwrap();
                    let item = node.items()[slot];
                    prop_assert_eq!(item.offset.get() as usize + data.len(), end);
                    end = item.offset.get() as usize;
                }
            }
        }
    }

    /// Pure garbage of any length, and garbage behind a right header.
    #[test]
    fn no_garbage_panics(
        mut bytes in prop::collection::vec(any::<u8>(), 0..=SIZE),
        n in 0u8..200,
        level in 0u8..3,
    ) {
        let e = Expect { csum: None, ..expect() };
        let _ = check_node(&bytes, &e);
        bytes.resize(SIZE, 0xa5);
        let head = header(ObjectId::FS_TREE, level, n.into());
        bytes[..HEADER_SIZE].copy_from_slice(&head[..HEADER_SIZE]);
        let _ = check_node(&bytes, &e);
    }

    /// One item of random bytes of every kind that has rules.
    #[test]
    fn no_item_panics(
        kind in any::<u8>(),
        objectid in prop_oneof![Just(256u64), Just(1), Just(4096), any::<u64>()],
        offset in prop_oneof![Just(0u64), Just(4096), any::<u64>()],
        data in prop::collection::vec(
            prop_oneof![2 => Just(0u8), 1 => Just(0xff), 3 => any::<u8>()],
            0..500,
        ),
        tree in prop_oneof![Just(5u64), Just(2)],
    ) {
        let item = (key(objectid, KeyType(kind), offset), data);
        let _ = check_items(ObjectId(tree), &[item]);
    }
}
