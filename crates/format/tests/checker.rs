//! The node checker on leaves and nodes built by hand: each rule passes what is right and names
//! what is wrong.

use larder_format::check::{Expect, check_node, check_unsealed};
use larder_format::csum::{data_ref_hash, name_hash};
use larder_format::node::{HEADER_SIZE, ITEM_SIZE, NodeView, POINTER_SIZE};
use larder_format::{CsumType, FileOffset, Generation, Key, KeyType, Logical, ObjectId, TreeId};

#[path = "checker/hostile.rs"]
mod hostile;

const SIZE: usize = 4096;
const GENERATION: u64 = 10;

type Item = (Key, Vec<u8>);

fn header(tree: TreeId, level: u8, n: usize) -> Vec<u8> {
    let mut b = vec![0; SIZE];
    b[32..48].copy_from_slice(&[5; 16]);
    b[48..56].copy_from_slice(&(1u64 << 20).to_le_bytes());
    b[56..64].copy_from_slice(&(1u64 | 1 << 56).to_le_bytes());
    b[80..88].copy_from_slice(&GENERATION.to_le_bytes());
    b[88..96].copy_from_slice(&tree.0.to_le_bytes());
    b[96..100].copy_from_slice(&u32::try_from(n).unwrap().to_le_bytes());
    b[100] = level;
    b
}

fn put_key(b: &mut [u8], key: &Key) {
    b[..8].copy_from_slice(&key.objectid.0.to_le_bytes());
    b[8] = key.kind.0;
    b[9..17].copy_from_slice(&key.offset.to_le_bytes());
}

fn leaf(tree: TreeId, items: &[Item]) -> Vec<u8> {
    let mut b = header(tree, 0, items.len());
    let mut end = SIZE;
    for (slot, (key, data)) in items.iter().enumerate() {
        let at = HEADER_SIZE + slot * ITEM_SIZE;
        end -= data.len();
        put_key(&mut b[at..], key);
        b[at + 17..at + 21]
            .copy_from_slice(&u32::try_from(end - HEADER_SIZE).unwrap().to_le_bytes());
        b[at + 21..at + 25].copy_from_slice(&u32::try_from(data.len()).unwrap().to_le_bytes());
        b[end..end + data.len()].copy_from_slice(data);
    }
    b
}

fn interior(tree: TreeId, pointers: &[(Key, u64, u64)]) -> Vec<u8> {
    let mut b = header(tree, 1, pointers.len());
    for (slot, (key, child, generation)) in pointers.iter().enumerate() {
        let at = HEADER_SIZE + slot * POINTER_SIZE;
        put_key(&mut b[at..], key);
        b[at + 17..at + 25].copy_from_slice(&child.to_le_bytes());
        b[at + 25..at + 33].copy_from_slice(&generation.to_le_bytes());
    }
    b
}

fn seal(b: &mut [u8]) {
    let sum = CsumType::Crc32c.compute(&b[32..]);
    b[..32].copy_from_slice(&sum);
}

/// Expectation of a caller that knows little; tests fill in more.
fn expect() -> Expect {
    Expect {
        nodesize: 4096,
        fsid: [5; 16],
        bytenr: Logical(1 << 20),
        level: None,
        generation: None,
        owner: None,
        is_root: true,
        first_key: None,
        csum: Some(CsumType::Crc32c),
        super_generation: Generation(GENERATION - 1),
        names_hidden: false,
    }
}

fn check(mut bytes: Vec<u8>, expect: &Expect) -> Result<(), String> {
    seal(&mut bytes);
    check_node(&bytes, expect).map_err(|e| e.to_string())
}

fn check_items(tree: TreeId, items: &[Item]) -> Result<(), String> {
    check(leaf(tree, items), &expect())
}

fn key(objectid: impl Into<ObjectId>, kind: KeyType, offset: u64) -> Key {
    Key::new(objectid, kind, offset)
}

/// Bytes with little-endian values at offsets.
fn body(size: usize, fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut b = vec![0; size];
    for (at, bytes) in fields {
        b[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    b
}
fn le(v: u64) -> [u8; 8] {
    v.to_le_bytes()
}

/// A change of an item, by its key or its bytes, and the message that it must lead to.
enum Change {
    Key(Key),
    Byte(usize, u8),
    U64(usize, u64),
    Size(usize),
}
use Change::{Byte, Size, U64};

/// The item passes in its leaf; changed in each of the ways, alone, it does not.
fn rules(tree: TreeId, before: &[Item], item: &Item, changes: &[(Change, &str)]) {
    let with = |item: Item| check_items(tree, &[before, &[item]].concat());
    assert_eq!(with(item.clone()), Ok(()), "{}", item.0);
    for (change, message) in changes {
        let (mut k, mut data) = item.clone();
        match change {
            Change::Key(new) => k = *new,
            Byte(at, v) => data[*at] = *v,
            U64(at, v) => data[*at..at + 8].copy_from_slice(&le(*v)),
            Size(n) => data.resize(*n, 0),
        }
        let error = with((k, data)).expect_err(message);
        assert!(error.contains(message), "{}: \"{error}\" instead of \"{message}\"", item.0);
        assert!(error.contains(&format!("item {} {k}: ", before.len())), "{error}");
    }
}

fn inode(objectid: u64) -> Item {
    let d = body(160, &[(0, &le(9)), (8, &le(10)), (40, &[1]), (52, &0o100_644u32.to_le_bytes())]);
    (key(objectid, KeyType::INODE_ITEM, 0), d)
}

#[test]
fn inodes() {
    let item = inode(257);
    rules(
        ObjectId::FS_TREE,
        &[],
        &item,
        &[
            (Change::Key(key(255, KeyType::INODE_ITEM, 0)), "255 is no inode number"),
            (Change::Key(key(ObjectId::TREE_LOG, KeyType::INODE_ITEM, 0)), "-6 is no inode number"),
            (Change::Key(key(257, KeyType::INODE_ITEM, 4)), "key offset is 4, expected 0"),
            (Size(161), "size is 161, expected 160"),
            (Size(0), "size is 0, expected 160"),
            (U64(0, 11), "generation is 11, expected at most 10"),
            (U64(8, u64::MAX), "transid is 18446744073709551615, expected at most 10"),
            (Byte(53, 0), "which is no kind of file"),
            (Byte(54, 1), "which is no kind of file"),
            (Byte(65, 0x10), "flags are 0x1000, of which 0x1000 are unknown"),
            (Byte(68, 2), "of which 0x200000000 are unknown"),
        ],
    );
    let directory =
        body(160, &[(40, &[1]), (52, &0o40_755u32.to_le_bytes()), (64, &[0xff, 0xf, 0, 0x80, 1])]);
    rules(
        ObjectId::FS_TREE,
        &[],
        &(key(256, KeyType::INODE_ITEM, 0), directory),
        &[(Byte(40, 2), "directory has 2 links, expected at most 1")],
    );
}

fn dir_entry(target: &Key, kind: u8, name: &[u8], data: &[u8]) -> Vec<u8> {
    let mut b = vec![0; 30];
    put_key(&mut b, target);
    b[25..27].copy_from_slice(&u16::try_from(data.len()).unwrap().to_le_bytes());
    b[27..29].copy_from_slice(&u16::try_from(name.len()).unwrap().to_le_bytes());
    b[29] = kind;
    [&b[..], name, data].concat()
}

#[test]
fn names() {
    let tree = ObjectId(300);
    let file = key(258, KeyType::INODE_ITEM, 0);
    let dir = |name: &[u8]| key(257, KeyType::DIR_ITEM, name_hash(name));
    let item = (dir(b"name"), dir_entry(&file, 1, b"name", b""));
    rules(
        tree,
        &[inode(257)],
        &item,
        &[
            (Change::Key(dir(b"other")), "name \"name\" has hash"),
            (Byte(29, 0), "entry has type 0, expected 1 to 7"),
            (Byte(29, 8), "entry has type 8, expected 1 to 7"),
            (Byte(29, 9), "entry has type 9"),
            (Byte(25, 1), "directory entry has 1 bytes of data, expected none"),
            (Byte(27, 0), "name has 0 bytes, expected 1 to 255"),
            (Byte(28, 1), "name has 260 bytes"),
            (Byte(27, 5), "entry ends 1 bytes behind the item"),
            (Byte(27, 3), "name \"nam\" has hash"),
            (Size(35), "size is 1, expected at least"),
            (Size(29), "size is 29, expected at least 30"),
            (Size(0), "size is 0, expected at least"),
            (U64(0, 7), "entry points to (7 INODE_ITEM 0), which it cannot"),
            (Byte(8, 96), "entry points to (258 DIR_INDEX 0)"),
            (Byte(9, 1), "entry points to (258 INODE_ITEM 1)"),
        ],
    );
    // A subvolume, and names of one hash sharing an item.
    let subvolume = key(300, KeyType::ROOT_ITEM, u64::MAX);
    let index = (key(257, KeyType::DIR_INDEX, 2), dir_entry(&subvolume, 2, b"sub", b""));
    rules(tree, &[inode(257)], &index, &[(U64(0, 7), "entry points to (7 ROOT_ITEM ")]);
    let both =
        [dir_entry(&file, 1, b"TTqGO4p", b""), dir_entry(&file, 2, b"snNzDoq", b"")].concat();
    rules(tree, &[inode(257)], &(dir(b"snNzDoq"), both), &[(Byte(37 + 30, b'x'), "has hash")]);

    let xattr = dir_entry(&Key::MIN, 8, b"user.x", b"value");
    let xattr = (key(257, KeyType::XATTR_ITEM, name_hash(b"user.x")), xattr);
    rules(
        tree,
        &[inode(257)],
        &xattr,
        &[
            (Byte(29, 1), "entry has type 1, expected 8"),
            (Byte(0, 1), "entry points to"),
            (Byte(25, 6), "entry ends 1 bytes behind"),
            (Byte(26, 1), "entry ends 256 bytes behind"),
        ],
    );

    let link = [&le(2)[..], &[4, 0], b"name", &le(3), &[1, 0], b"x"].concat();
    let link = (key(257, KeyType::INODE_REF, 256), link);
    rules(
        tree,
        &[inode(257)],
        &link,
        &[
            (Byte(8, 0), "name has 0 bytes"),
            (Byte(8, 99), "behind the item"),
            (Byte(22, 2), "name ends 1 bytes behind the item"),
            (Size(10), "name ends 4 bytes behind the item"),
            (Size(9), "size is 9, expected at least 10"),
            (Size(26), "size is 1, expected at least 10"),
        ],
    );
    let extref = (key(257, KeyType::INODE_EXTREF, 1), [&[0; 16][..], &[2, 0], b"ab"].concat());
    rules(
        tree,
        &[inode(257)],
        &extref,
        &[(Size(19), "name ends 1 bytes"), (Size(17), "size is 17")],
    );
    let root_ref = (key(5, KeyType::ROOT_REF, 257), [&[0; 16][..], &[2, 0], b"ab"].concat());
    rules(
        ObjectId::ROOT_TREE,
        &[],
        &root_ref,
        &[(Size(19), "size is 19, expected 20"), (Size(3), "size is 3")],
    );
}

fn extent(fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut d = body(
        53,
        &[
            (0, &le(9)),
            (8, &le(8192)),
            (20, &[1]),
            (21, &le(1 << 30)),
            (29, &le(8192)),
            (45, &le(8192)),
        ],
    );
    for (at, bytes) in fields {
        d[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    d
}

#[test]
fn file_extents() {
    let at = |offset| key(257, KeyType::EXTENT_DATA, offset);
    let first = (at(0), extent(&[]));
    rules(
        ObjectId::FS_TREE,
        &[inode(257), first],
        &(at(8192), extent(&[])),
        &[
            (Change::Key(at(8191)), "file offset is not a multiple of 4096"),
            (Change::Key(at(4096)), "overlaps the extent before it, which ends at 8192"),
            (Change::Key(at(u64::MAX - 4095)), "8192 bytes from 18446744073709547520 overflow"),
            (Size(20), "size is 20, expected at least 21"),
            (Size(52), "size is 52, expected 53"),
            (Size(54), "size is 54, expected 53"),
            (Byte(16, 4), "compression is 4, expected 0 to 3"),
            (Byte(17, 1), "encryption is 1, expected 0"),
            (Byte(20, 3), "extent type is 3, expected 0 to 2"),
            (Byte(20, 0), "inline extent at 8192, expected at 0"),
            (U64(8, 1), "ram_bytes is 1, expected a multiple"),
            (U64(21, 2), "disk_bytenr is 2, expected a multiple"),
            (U64(29, 3), "disk_num_bytes is 3, expected a multiple"),
            (U64(37, 4), "offset is 4, expected a multiple"),
            (U64(45, 5), "num_bytes is 5, expected a multiple"),
            (U64(45, 0), "num_bytes is 0"),
        ],
    );
    let compressed = (at(0), extent(&[(8, &le(128 << 10)), (16, &[3]), (45, &le(128 << 10))]));
    rules(
        ObjectId::FS_TREE,
        &[inode(257)],
        &compressed,
        &[(U64(8, 256 << 10), "compressed extent of 262144 bytes, expected at most 131072")],
    );
    let inline = [&body(21, &[(8, &le(5))])[..], b"inlin"].concat();
    rules(
        ObjectId::FS_TREE,
        &[inode(257)],
        &(at(0), inline.clone()),
        &[
            (Size(25), "inline extent has 4 bytes of data, expected 5"),
            (U64(8, u64::MAX), "inline extent has 5 bytes of data, expected 18446744073709551615"),
        ],
    );
    // An inline extent takes its whole sector; a compressed one may stand for more than it has.
    let packed = [&body(21, &[(8, &le(4096)), (16, &[1])])[..], b"zlib"].concat();
    for (data, next) in [(inline, 4096), (packed, 4096)] {
        let items = [inode(257), (at(0), data), (at(next), extent(&[]))];
        assert_eq!(check_items(ObjectId::FS_TREE, &items), Ok(()));
    }
}

#[test]
fn items_follow_their_inode_in_subvolumes_only() {
    let items = [inode(257), (key(258, KeyType::EXTENT_DATA, 0), extent(&[]))];
    let error = check_items(ObjectId::FS_TREE, &items).unwrap_err();
    assert!(error.contains("item 1 (258 EXTENT_DATA 0): follows (257 INODE_ITEM 0)"), "{error}");
    for tree in [ObjectId::TREE_LOG, ObjectId::ROOT_TREE, ObjectId::DATA_RELOC_TREE] {
        assert_eq!(check_items(tree, &items), Ok(()));
    }
    // A leaf can begin in the midst of an inode.
    assert_eq!(check_items(ObjectId::FS_TREE, &items[1..]), Ok(()));
}

#[test]
fn checksums() {
    let at = |offset| key(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, offset);
    rules(
        ObjectId::CSUM_TREE,
        &[(at(4096), vec![1; 8])],
        &(at(12288), vec![2; 12]),
        &[
            (Change::Key(at(8192)), "overlaps the checksums before it, which end at 12288"),
            (Change::Key(at(12289)), "address is not a multiple"),
            (Change::Key(at(u64::MAX - 4095)), "12288 bytes from 18446744073709547520 overflow"),
            (Size(13), "size is 13, expected a multiple of 4, not 0"),
            (Size(0), "size is 0, expected a multiple of 4, not 0"),
        ],
    );
    let elsewhere = (key(256, KeyType::EXTENT_CSUM, 0), vec![0; 4]);
    let error = check_items(ObjectId::CSUM_TREE, &[elsewhere]).unwrap_err();
    assert!(error.contains("object id is 256, expected -10"), "{error}");
}

#[test]
fn roots() {
    let root = body(
        439,
        &[
            (160, &le(9)),
            (176, &le(8192)),
            (200, &le(10)),
            (208, &(1u64 | 1 << 48).to_le_bytes()),
            (239, &le(9)),
        ],
    );
    let at = |id: ObjectId, offset| key(id, KeyType::ROOT_ITEM, offset);
    rules(
        ObjectId::ROOT_TREE,
        &[],
        &(at(ObjectId(256), 0), root.clone()),
        &[
            (Change::Key(at(ObjectId(0), 0)), "tree id is 0"),
            (
                Change::Key(at(ObjectId::TREE_RELOC, 7)),
                "relocation tree of 7, which is no subvolume",
            ),
            (Size(438), "size is 438, expected 439 or 239"),
            (U64(160, 11), "generation is 11, expected at most 10"),
            (U64(200, 11), "last_snapshot is 11, expected at most 10"),
            (U64(239, 11), "generation_v2 is 11, expected at most 10"),
            (U64(176, 1), "bytenr is 1, expected a multiple"),
            (Byte(237, 8), "drop_level is 8, expected less than 8"),
            (Byte(238, 8), "level is 8, expected less than 8"),
            (Byte(208, 2), "of which 0x2 are unknown"),
        ],
    );
    let old = (at(ObjectId::TREE_RELOC, 256), root[..239].to_vec());
    assert_eq!(check_items(ObjectId::ROOT_TREE, &[old]), Ok(()));
}

/// An inline reference of the top-level subvolume.
fn data_ref(inode: ObjectId, offset: FileOffset, count: u32) -> Vec<u8> {
    let root = ObjectId::FS_TREE.0;
    [&[178][..], &le(root), &le(inode.0), &le(offset.0), &count.to_le_bytes()].concat()
}

fn data_key(at: u64) -> Key {
    key(ObjectId(at), KeyType::EXTENT_ITEM, 8192)
}

const DATA: u8 = 1;
const NODE: u8 = 2;

/// What extent items begin with.
fn extent_head(refs: u64, flags: u8) -> Vec<u8> {
    body(24, &[(0, &le(refs)), (8, &le(9)), (16, &le(flags.into()))])
}

/// An extent that ends at 12288.
fn extent_before() -> (Key, Vec<u8>) {
    (data_key(4096), extent_head(1, DATA))
}

/// Two references by file, in their order, and one by leaf.
fn references_to_data() -> [Vec<u8>; 3] {
    let mut refs =
        [data_ref(ObjectId(257), FileOffset(0), 2), data_ref(ObjectId(258), FileOffset(4096), 1)];
    refs.sort_by_key(|r| {
        let at = |n: usize| u64::from_le_bytes(r[n..n + 8].try_into().unwrap());
        std::cmp::Reverse(data_ref_hash(ObjectId(at(1)), ObjectId(at(9)), FileOffset(at(17))))
    });
    let shared = [&[184][..], &le(65536), &1u32.to_le_bytes()].concat();
    let [first, second] = refs;
    [first, second, shared]
}

#[test]
fn data_extents() {
    let whole = [extent_head(4, DATA), references_to_data().concat()].concat();
    rules(
        ObjectId::EXTENT_TREE,
        &[extent_before()],
        &(data_key(12288), whole),
        &[
            (Change::Key(data_key(8192)), "overlaps the extent before it, which ends at 12288"),
            (Change::Key(data_key(12289)), "address is 12289, expected a multiple"),
            (Change::Key(key(12288, KeyType::EXTENT_ITEM, 0)), "length is 0"),
            (
                Change::Key(key(12288, KeyType::EXTENT_ITEM, 77)),
                "length is 77, expected a multiple",
            ),
            (Change::Key(key(12288, KeyType::METADATA_ITEM, 0)), "data in an item for a node"),
            (Size(23), "size is 23, expected at least 24"),
            (Size(24 + 29 + 28), "size is 27, expected at least 28"),
        ],
    );
    for (flags, message) in [
        (0, "flags are 0x0, expected exactly one of DATA and TREE_BLOCK"),
        (3, "flags are 0x3, expected exactly one"),
        (0x101, "data extent with full back references"),
    ] {
        let head = body(24, &[(0, &le(1)), (8, &le(9)), (16, &le(flags))]);
        let error = check_items(ObjectId::EXTENT_TREE, &[(data_key(4096), head)]).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    let end_of_space = (key(u64::MAX - 4095, KeyType::EXTENT_ITEM, 8192), extent_head(1, DATA));
    let error = check_items(ObjectId::EXTENT_TREE, &[end_of_space]).unwrap_err();
    assert!(error.contains("8192 bytes from 18446744073709547520 overflow"), "{error}");
}

#[test]
fn inline_references() {
    let [first, second, shared] = references_to_data();
    let with = |list: &[&[u8]]| {
        let item = [&extent_head(4, DATA)[..], &list.concat()].concat();
        check_items(ObjectId::EXTENT_TREE, &[(data_key(12288), item)])
    };
    let fails = |list: &[&[u8]], message: &str| {
        let error = with(list).expect_err(message);
        assert!(error.contains(message), "\"{error}\" instead of \"{message}\"");
    };
    fails(
        &[&second, &first],
        "inline references of types EXTENT_DATA_REF, EXTENT_DATA_REF are out of order",
    );
    fails(
        &[&shared, &first],
        "inline references of types SHARED_DATA_REF, EXTENT_DATA_REF are out of order",
    );
    fails(&[&first[..28]], "size is 27, expected at least 28");
    fails(&[&shared[..12]], "size is 11, expected at least 12");
    fails(&[&[178]], "size is 0, expected at least 8");
    fails(&[&[0]], "inline reference of type UNKNOWN.0 in a data extent");
    fails(&[&[176; 9]], "inline reference of type TREE_BLOCK_REF in a data extent");
    fails(&[&data_ref(ObjectId(257), FileOffset(0), 0)], "EXTENT_DATA_REF with count 0");
    fails(&[&data_ref(ObjectId(257), FileOffset(0), 5)], "5 inline references, but only 4 in all");
    fails(
        &[&data_ref(ObjectId(257), FileOffset(0), u32::MAX)],
        "4294967295 inline references, but only 4 in all",
    );
    fails(
        &[&data_ref(ObjectId(257), FileOffset(1), 1)],
        "offset of a data reference is 1, expected a multiple",
    );
    fails(&[&[&[184][..], &le(1), &[1, 0, 0, 0]].concat()], "parent of a data reference is 1");
    let owner = [&[172][..], &le(5)].concat();
    assert_eq!(with(&[&owner, &first]), Ok(()));
    fails(&[&first, &owner], "owner reference behind other references");
}

#[test]
fn extents_of_nodes() {
    let node_key = |at: u64, level| key(at, KeyType::METADATA_ITEM, level);
    let node = [&extent_head(2, NODE)[..], &[176], &le(257), &[182], &le(8192)].concat();
    rules(
        ObjectId::EXTENT_TREE,
        &[extent_before()],
        &(node_key(12288, 1), node),
        &[
            (Change::Key(node_key(8192, 1)), "overlaps the extent before it"),
            (Change::Key(node_key(12288, 8)), "level is 8, expected less than 8"),
            (U64(8, 11), "generation is 11, expected at most 10"),
            (U64(0, 1), "2 inline references, but only 1 in all"),
            (Byte(24, 178), "inline reference of type EXTENT_DATA_REF in a tree extent"),
            (Byte(33, 176), "types TREE_BLOCK_REF, TREE_BLOCK_REF are out of order"),
            (U64(34, 8193), "parent of a node reference is 8193"),
            (Size(41), "size is 7, expected at least 8"),
        ],
    );
    // The long kind of item for nodes, with first key and level before the references.
    let long = [&extent_head(1, NODE)[..], &[0; 18], &[176], &le(2)].concat();
    rules(
        ObjectId::EXTENT_TREE,
        &[],
        &(key(8192, KeyType::EXTENT_ITEM, 4096), long),
        &[
            (Change::Key(data_key(8192)), "node of 8192 bytes, expected 4096"),
            (Byte(41, 8), "level is 8, expected less than 8"),
            (Size(40), "size is 40, expected at least 42"),
        ],
    );
}

/// References with keys of their own stand between an extent and the next.
#[test]
fn keyed_references() {
    let keyed = [
        extent_before(),
        (
            key(4096, KeyType::EXTENT_DATA_REF, 3),
            data_ref(ObjectId(257), FileOffset(0), 1)[1..].to_vec(),
        ),
        (key(4096, KeyType::SHARED_DATA_REF, 8192), vec![1, 0, 0, 0]),
        (data_key(8192), extent_head(1, DATA)),
    ];
    let error = check_items(ObjectId::EXTENT_TREE, &keyed).unwrap_err();
    assert!(error.contains("item 3") && error.contains("overlaps the extent before it"), "{error}");
    assert_eq!(check_items(ObjectId::EXTENT_TREE, &keyed[..3]), Ok(()));
    rules(
        ObjectId::EXTENT_TREE,
        &[],
        &keyed[1],
        &[
            (Size(27), "size is 27, expected a multiple of 28"),
            (Size(0), "size is 0, expected a multiple of 28"),
            (Byte(16, 1), "offset is 1, expected a multiple"),
            (Change::Key(key(4097, KeyType::EXTENT_DATA_REF, 3)), "address is 4097"),
        ],
    );
    rules(
        ObjectId::EXTENT_TREE,
        &[],
        &keyed[2],
        &[
            (Size(5), "size is 5, expected 4"),
            (Change::Key(key(4096, KeyType::SHARED_DATA_REF, 8193)), "parent is 8193"),
        ],
    );
    for kind in [KeyType::TREE_BLOCK_REF, KeyType::SHARED_BLOCK_REF] {
        let item = (key(4096, kind, 8192), vec![]);
        rules(ObjectId::EXTENT_TREE, &[], &item, &[(Size(1), "size is 1, expected 0")]);
    }
}

#[test]
fn block_groups_and_free_space() {
    let group = |start: u64, length| key(start, KeyType::BLOCK_GROUP_ITEM, length);
    let item = body(24, &[(0, &le(4096)), (8, &le(256)), (16, &le(0x24))]);
    rules(
        ObjectId::BLOCK_GROUP_TREE,
        &[],
        &(group(1 << 20, 8192), item),
        &[
            (Change::Key(group(1 << 20, 0)), "length is 0"),
            (Change::Key(group(u64::MAX, 8192)), "overflow"),
            (Size(25), "size is 25, expected 24"),
            (U64(0, 8193), "8193 bytes used of 8192"),
            (U64(8, 255), "chunk_objectid is 255, expected 256"),
            (U64(16, 0x34), "names several profiles"),
            (U64(16, 0x20), "is not one of data, metadata, system, data and metadata"),
            (U64(16, 0x23), "is not one of"),
        ],
    );
    let mixed = body(24, &[(8, &le(256)), (16, &le(5))]);
    assert_eq!(check_items(ObjectId::BLOCK_GROUP_TREE, &[(group(0, 4096), mixed)]), Ok(()));

    let free = |kind, start: u64, length| key(start, kind, length);
    for (kind, size) in [
        (KeyType::FREE_SPACE_INFO, 8),
        (KeyType::FREE_SPACE_EXTENT, 0),
        (KeyType::FREE_SPACE_BITMAP, 2),
    ] {
        rules(
            ObjectId::FREE_SPACE_TREE,
            &[],
            &(free(kind, 1 << 20, 9 * 4096), vec![1; size]),
            &[
                (Change::Key(free(kind, 77, 9 * 4096)), "start is 77, expected a multiple"),
                (Change::Key(free(kind, 1 << 20, 0)), "length is 0"),
                (Change::Key(free(kind, 1 << 20, 5)), "length is 5, expected a multiple"),
                (Change::Key(free(kind, u64::MAX - 4095, 9 * 4096)), "overflow"),
                (
                    Size(size + 1),
                    if size == 2 { "bitmap has 3 bytes, expected 2" } else { "expected" },
                ),
            ],
        );
    }
}

#[test]
fn chunks() {
    let chunk = |stripes: u8, kind: u64| {
        body(
            48 + 32 * usize::from(stripes),
            &[
                (0, &le(8 << 20)),
                (16, &le(65536)),
                (24, &le(kind)),
                (40, &4096u32.to_le_bytes()),
                (44, &[stripes]),
                (46, &[2]),
            ],
        )
    };
    let at = |offset| key(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, offset);
    rules(
        ObjectId::CHUNK_TREE,
        &[],
        &(at(1 << 20), chunk(2, 0x22)),
        &[
            (Change::Key(at(5)), "logical address is 5, expected a multiple"),
            (Change::Key(at(u64::MAX - 4095)), "overflow"),
            (Change::Key(key(257, KeyType::CHUNK_ITEM, 1 << 20)), "expected (256 CHUNK_ITEM"),
            (Size(0), "size is 0, expected at least"),
            (Size(111), "size is 111, expected 112"),
            (Byte(44, 0), "no stripes"),
            (Byte(45, 0xff), "size is 112, expected 2089072"),
            (U64(0, 0), "length is 0"),
            (U64(0, 5), "length is 5, expected a multiple"),
            (U64(0, 1 << 48), "length is 281474976710656, expected less than"),
            (U64(16, 4096), "stripe length is 4096, expected 65536"),
            (Byte(41, 0), "sector size is 0, expected 4096"),
            (U64(24, 0x1022), "type 0x1022 has unknown bits"),
            (U64(24, 0x32), "names several profiles"),
            (U64(24, 0x20), "is not one of"),
            (U64(24, 0x2), "type 0x2 with 2 stripes and 2 sub-stripes"),
            (U64(24, 0x202), "type 0x202 with 2 stripes"),
            (U64(24, 0x102), "type 0x102 with 2 stripes"),
        ],
    );
    for (stripes, kind) in [
        (1, 1),
        (1, 5),
        (3, 0x9),
        (2, 0x11),
        (4, 0x41),
        (2, 0x81),
        (3, 0x101),
        (3, 0x201),
        (4, 0x401),
    ] {
        let item = (at(0), chunk(stripes, kind));
        assert_eq!(check_items(ObjectId::CHUNK_TREE, &[item]), Ok(()), "{kind:#x}");
    }
    let raid10 = (at(0), chunk(4, 0x41));
    rules(
        ObjectId::CHUNK_TREE,
        &[],
        &raid10,
        &[(Byte(46, 1), "type 0x41 with 4 stripes and 1 sub-stripes")],
    );
}

#[test]
fn devices() {
    let device = body(98, &[(0, &le(1)), (8, &le(1 << 30)), (16, &le(1 << 20))]);
    rules(
        ObjectId::CHUNK_TREE,
        &[],
        &(key(1, KeyType::DEV_ITEM, 1), device),
        &[
            (Change::Key(key(2, KeyType::DEV_ITEM, 1)), "object id is 2, expected 1"),
            (Change::Key(key(1, KeyType::DEV_ITEM, 2)), "device id is 1, expected 2"),
            (Size(97), "size is 97, expected 98"),
            (U64(16, 1 << 31), "2147483648 bytes used of 1073741824"),
        ],
    );

    let extent = body(48, &[(0, &le(3)), (8, &le(256)), (16, &le(1 << 20)), (24, &le(8192))]);
    let at = |offset| key(1, KeyType::DEV_EXTENT, offset);
    rules(
        ObjectId::DEV_TREE,
        &[(at(0), extent.clone())],
        &(at(8192), extent),
        &[
            (Change::Key(at(4096)), "overlaps the device extent before it, which ends at 8192"),
            (Change::Key(at(8193)), "physical address is 8193"),
            (Change::Key(at(u64::MAX - 4095)), "overflow"),
            (Size(47), "size is 47, expected 48"),
            (U64(0, 4), "chunk tree is 4, expected 3"),
            (U64(8, 1), "chunk_objectid is 1, expected 256"),
            (U64(16, 3), "chunk_offset is 3"),
            (U64(24, 0), "length is 0"),
            (U64(24, 3), "length is 3"),
        ],
    );
}

/// Items that no rule is about.
fn plain(n: u64) -> Item {
    (key(1, KeyType::UUID_SUBVOL, n), vec![7; 8])
}

#[test]
fn layout_of_leaves() {
    let good = leaf(ObjectId::UUID_TREE, &[plain(1), plain(2), plain(3)]);
    assert_eq!(check(good.clone(), &expect()), Ok(()));
    let fails = |at: usize, bytes: &[u8], message: &str| {
        let mut b = good.clone();
        b[at..at + bytes.len()].copy_from_slice(bytes);
        let error = check(b, &expect()).expect_err(message);
        assert!(error.contains(message), "\"{error}\" instead of \"{message}\"");
    };
    let second = HEADER_SIZE + ITEM_SIZE;
    fails(second + 9, &[1], "item 1: key (1 UUID_SUBVOL 1) does not follow (1 UUID_SUBVOL 1)");
    fails(second + 9, &[0], "item 1: key (1 UUID_SUBVOL 0) does not follow (1 UUID_SUBVOL 1)");
    fails(
        second + 17,
        &[0],
        "item 1 (1 UUID_SUBVOL 2): 8 bytes of data at 3840, expected to end at 3987",
    );
    fails(second + 21, &[9], "9 bytes of data at 3979, expected to end at 3987");
    fails(second + 21, &[0xff; 4], "4294967295 bytes of data at 3979");
    fails(second + 17, &[0xff; 8], "4294967295 bytes of data at 4294967295");
    fails(96, &[4], "item 3: key");
    fails(96, &[160], "leaf says 160 items, at most 159 fit");
    // Data down to the headers is fine, a byte more is not.
    let room = SIZE - HEADER_SIZE - ITEM_SIZE;
    let big = |n| leaf(ObjectId::UUID_TREE, &[(plain(1).0, vec![1; n])]);
    assert_eq!(check(big(room), &expect()), Ok(()));
    let mut over = big(room);
    over[HEADER_SIZE + 17..HEADER_SIZE + 21].copy_from_slice(&24u32.to_le_bytes());
    over[HEADER_SIZE + 21..HEADER_SIZE + 25]
        .copy_from_slice(&u32::try_from(room + 1).unwrap().to_le_bytes());
    let error = check(over, &expect()).unwrap_err();
    assert!(error.contains("data at 24 overlaps the item headers, which end at 25"), "{error}");
}

#[test]
fn empty_leaves() {
    let empty = |tree, is_root| check(leaf(tree, &[]), &Expect { is_root, ..expect() });
    assert_eq!(empty(ObjectId::CSUM_TREE, true), Ok(()));
    assert!(empty(ObjectId::CSUM_TREE, false).unwrap_err().contains("only a root may be"));
    for tree in [0, 1, 2, 3, 4, 5, 9u64.wrapping_neg()] {
        let error = empty(ObjectId(tree), true).unwrap_err();
        assert!(error.contains("leaf is empty, which the root of tree"), "{error}");
    }
}

#[test]
fn interior_nodes() {
    let k = |n| key(n, KeyType::INODE_ITEM, 0);
    let check_pointers = |p: &[(Key, u64, u64)]| check(interior(ObjectId::FS_TREE, p), &expect());
    assert_eq!(check_pointers(&[(k(256), 4096, 10), (k(300), 8192, 1)]), Ok(()));
    for (pointers, message) in [
        (&[][..], "node of level 1 has 0 pointers, expected 1 to 121"),
        (&[(k(256), 0, 1)], "child at 0, expected a multiple of 4096, not 0"),
        (&[(k(256), 4097, 1)], "child at 4097"),
        (&[(k(256), 4096, 11)], "generation 11, expected at most 10"),
        (
            &[(k(256), 4096, 1), (k(256), 8192, 1)],
            "pointer 1: key (256 INODE_ITEM 0) does not follow",
        ),
    ] {
        let error = check_pointers(pointers).expect_err(message);
        assert!(error.contains(message), "\"{error}\" instead of \"{message}\"");
    }
    let mut many = interior(ObjectId::FS_TREE, &[(k(256), 4096, 1)]);
    many[96] = 122;
    assert!(check(many, &expect()).unwrap_err().contains("has 122 pointers, expected 1 to 121"));
}

#[test]
fn what_the_parent_knows() {
    let bytes = leaf(ObjectId(257), &[inode(300)]);
    let knows = |change: &dyn Fn(&mut Expect)| {
        let mut e = expect();
        change(&mut e);
        check(bytes.clone(), &e)
    };
    let fails = |change: &dyn Fn(&mut Expect), message: &str| {
        let error = knows(change).expect_err(message);
        assert!(error.contains(message), "\"{error}\" instead of \"{message}\"");
    };
    assert_eq!(
        knows(&|e| {
            e.level = Some(0);
            e.generation = Some(Generation(GENERATION));
            e.owner = Some(ObjectId(257));
            e.first_key = Some(inode(300).0);
        }),
        Ok(())
    );
    fails(&|e| e.nodesize = 8192, "node has 4096 bytes, expected 8192");
    fails(&|e| e.bytenr = Logical(0), "header says block 1048576, expected 0");
    fails(&|e| e.fsid = [6; 16], "expected 06060606-0606-0606-0606-060606060606");
    fails(&|e| e.csum = Some(CsumType::Sha256), "sha256 checksum does not match");
    fails(&|e| e.level = Some(1), "level is 0, expected 1");
    fails(&|e| e.generation = Some(Generation(9)), "generation is 10, expected 9");
    fails(&|e| e.super_generation = Generation(8), "generation is 10, but the superblock's is 8");
    fails(
        &|e| e.first_key = Some(inode(301).0),
        "first key is (300 INODE_ITEM 0), expected (301 INODE_ITEM 0)",
    );

    // Snapshots share nodes, but each has a root of its own.
    let owned = |tree, is_root| knows(&|e| (e.owner, e.is_root) = (Some(tree), is_root));
    for tree in [ObjectId::FS_TREE, ObjectId(300)] {
        assert_eq!(owned(tree, false), Ok(()));
        assert!(
            owned(tree, true)
                .unwrap_err()
                .contains("owner is tree 257, which cannot have nodes in tree")
        );
    }
    assert_eq!(owned(ObjectId::TREE_RELOC, true), Ok(()));
    assert!(owned(ObjectId::CSUM_TREE, false).is_err());
    assert!(owned(ObjectId::TREE_LOG, false).is_err());

    // Bytes that are about to be written have neither checksum nor the flag yet.
    let mut fresh = bytes.clone();
    fresh[56] = 0;
    assert!(check(fresh.clone(), &expect()).unwrap_err().contains("lacks the flag WRITTEN"));
    assert_eq!(check_node(&fresh, &Expect { csum: None, ..expect() }), Ok(()));
    assert_eq!(check_unsealed(&fresh, &expect(), CsumType::Crc32c), Ok(()));
    // Checksum items are checked only where the length of a checksum is known.
    let at = |offset| key(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, offset);
    let sums = leaf(ObjectId::CSUM_TREE, &[(at(0), vec![1; 64]), (at(8192), vec![1; 64])]);
    assert_eq!(check_node(&sums, &Expect { csum: None, ..expect() }), Ok(()));
    assert_eq!(check_unsealed(&sums, &expect(), CsumType::Sha256), Ok(()));
    let error = check_unsealed(&sums, &expect(), CsumType::Crc32c).unwrap_err().to_string();
    assert!(error.contains("overlaps the checksums before it, which end at 65536"), "{error}");
}
