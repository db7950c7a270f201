//! The damage editor: what it leaves is what was asked for, and sound everywhere else.

use larder_format::check::{Expect, check_node};
use larder_format::node::NodeView;
use larder_format::{CsumType, Key, KeyType, Logical, ObjectId};
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
use larder_simtest::damage::{Copies, Damage, Seal, raw};
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use std::sync::{Arc, LazyLock};

const FS: ObjectId = ObjectId::FS_TREE;

/// A directory with 600 files: a tree of several leaves, all of it twice.
static IMAGE: LazyLock<Image> = LazyLock::new(|| {
    let device = Arc::new(SimDevice::new(Image::zeroed(256 << 20)).unrecorded());
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    let fs = Filesystem::open(device.clone(), options).unwrap();
    let new = NewInode {
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: b"",
        xattrs: &[],
    };
    for n in 0..600 {
        fs.create(fs.root(), format!("file-{n}").as_bytes(), &new).unwrap();
    }
    fs.close().unwrap();
    device.image()
});

/// Every node of the tree of files passes the node checker, in both copies.
fn assert_sound(damage: &Damage) {
    let image = damage.clone().into_image();
    let superblock = damage.superblock();
    let root = damage.root(FS).unwrap();
    let mut seen = 0;
    let mut todo: Vec<(Logical, Option<Key>)> = vec![(root, None)];
    while let Some((at, first_key)) = todo.pop() {
        for place in damage.places(at).unwrap() {
            let mut bytes = vec![0; superblock.nodesize() as usize];
            image.read(place.0, &mut bytes);
            let expect = Expect {
                nodesize: superblock.nodesize(),
                fsid: superblock.metadata_fsid(),
                bytenr: at,
                level: None,
                generation: None,
                owner: Some(FS),
                is_root: at == root,
                first_key,
                csum: Some(CsumType::Crc32c),
                super_generation: superblock.generation(),
                names_hidden: false,
            };
            check_node(&bytes, &expect).unwrap();
            seen += 1;
        }
        let node = damage.node(at).unwrap();
        let view = NodeView(&node);
        if view.level() > 0 {
            todo.extend(
                view.pointers().iter().map(|p| (Logical(p.blockptr.get()), Some(Key::from(p.key)))),
            );
        }
    }
    assert!(seen > 10, "{seen} nodes");
}

#[test]
fn fields_change_and_nothing_else_does() {
    let mut damage = Damage::on(&IMAGE).unwrap();
    let before = damage.items(FS).unwrap();
    let (key, old) =
        damage.first(FS, |k, _| k.kind == KeyType::INODE_ITEM && k.objectid.0 > 300).unwrap();
    damage.item(FS, key).set_u32(40, 7).unwrap();
    damage.item(FS, key).add_u64(72, -1).unwrap();
    let new = damage.get(FS, key).unwrap();
    assert_eq!(new[40..44], 7u32.to_le_bytes());
    assert_eq!([&new[..40], &new[44..72], &new[80..]], [&old[..40], &old[44..72], &old[80..]]);
    let after = damage.items(FS).unwrap();
    assert_eq!(before.iter().zip(&after).filter(|(a, b)| a != b).count(), 1);
    assert_sound(&damage);
    // What changes nothing, or is not there, is a mistake.
    assert!(damage.item(FS, key).set_u32(40, 7).is_err());
    assert!(damage.item(FS, key).set_u64(157, 7).is_err());
    assert!(damage.item(FS, Key { offset: 1, ..key }).set_u32(40, 8).is_err());
    assert!(damage.insert(FS, key, &[]).is_err());
}

#[test]
fn items_come_and_go_with_the_keys_above_them() {
    let mut damage = Damage::on(&IMAGE).unwrap();
    let before = damage.items(FS).unwrap();
    let leaf = damage.nodes(FS, 0).unwrap()[2];
    let first = NodeView(&damage.node(leaf).unwrap()).key(0).unwrap();
    let data = damage.get(FS, first).unwrap();
    damage.item(FS, first).delete().unwrap();
    assert_eq!(damage.items(FS).unwrap().len(), before.len() - 1);
    assert!(damage.get(FS, first).is_err());
    assert_sound(&damage);
    // It comes back in the leaf before, whose range it is in now, or its own: where look-ups find
    // it.
    damage.insert(FS, first, &data).unwrap();
    assert_eq!(damage.items(FS).unwrap(), before);
    assert_sound(&damage);
    let (orphan, moved) = (Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, 999), before[0].0);
    damage.insert(FS, orphan, &[]).unwrap();
    assert_eq!(damage.items(FS).unwrap().last().unwrap().0, orphan);
    damage.item(FS, orphan).rekey(Key { offset: 1000, ..orphan }).unwrap();
    assert_eq!(damage.items(FS).unwrap().last().unwrap().0.offset, 1000);
    damage.item(FS, moved).edit(|data| data.push(0)).unwrap();
    assert_eq!(damage.get(FS, moved).unwrap().len(), 161);
}

#[test]
fn copies_and_checksums_are_damaged_as_told() {
    let mut damage = Damage::on(&IMAGE).unwrap();
    let root = damage.root(FS).unwrap();
    let good = damage.node(root).unwrap();
    damage.edit_node_in(root, Copies::Only(1), Seal::Leave, |n| n[1000] ^= 1).unwrap();
    assert_eq!(damage.node(root).unwrap(), good, "the first copy");
    let second = damage.places(root).unwrap()[1];
    let image = damage.clone().into_image();
    let mut bad = vec![0; good.len()];
    image.read(second.0, &mut bad);
    assert!(!NodeView(&bad).csum_matches(CsumType::Crc32c));
    damage.edit_node(root, |n| raw::header(n).owner.set(1)).unwrap();
    assert!(NodeView(&damage.node(root).unwrap()).csum_matches(CsumType::Crc32c));
    assert!(damage.edit_node_in(root, Copies::Only(2), Seal::Fix, |_| ()).is_err());

    damage.edit_super(|s| s.bytes_used.set(1 << 20)).unwrap();
    damage.edit_super_copy(1, |s| s.generation.set(1)).unwrap();
    let reopened = Damage::on(&damage.into_image()).unwrap();
    assert_eq!(reopened.superblock().bytes_used(), 1 << 20);
    assert_eq!(
        reopened.superblock().generation(),
        Damage::on(&IMAGE).unwrap().superblock().generation()
    );
    let mut damage = reopened;
    damage.edit_super_bytes(0, |b| b[100] ^= 1).unwrap();
    assert!(Damage::on(&damage.into_image()).is_err());
}

#[test]
fn a_full_leaf_shares_with_the_one_beside_it() {
    let mut damage = Damage::on(&IMAGE).unwrap();
    let before = damage.items(FS).unwrap();
    let leaves = damage.nodes(FS, 0).unwrap();
    let free: Vec<usize> =
        leaves.iter().map(|at| NodeView(&damage.node(*at).unwrap()).leaf_free()).collect();
    // Three items that one leaf has no room for, but the one beside it has.
    let beside = |i: usize| free[i.saturating_sub(1)].max(free[(i + 1).min(free.len() - 1)]);
    let (full, size) = [3000, 1500, 700, 300, 100]
        .iter()
        .find_map(|size| {
            let wanted = 3 * (size + 25);
            let full =
                (1..leaves.len() - 1).find(|i| free[*i] < wanted && beside(*i) >= 2 * wanted)?;
            Some((full, *size))
        })
        .expect("a full leaf beside one with room");
    let victim = NodeView(&damage.node(leaves[full]).unwrap()).key(1).unwrap();
    let large = vec![7; size];
    for n in 0..3 {
        damage
            .insert(FS, Key { offset: victim.offset + 1 + n, kind: KeyType(99), ..victim }, &large)
            .unwrap();
    }
    let after = damage.items(FS).unwrap();
    assert_eq!(after.len(), before.len() + 3);
    assert!(after.is_sorted_by(|a, b| a.0 < b.0));
    assert_eq!(
        after.into_iter().filter(|(k, _)| k.kind != KeyType(99)).collect::<Vec<_>>(),
        before
    );
    assert_eq!(damage.nodes(FS, 0).unwrap(), leaves);
    assert_sound(&damage);
}
