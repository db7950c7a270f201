//! Snapshots as old kernels made them: `larder check` believes the entries of subvolumes in them,
//! and no others.
//!
//! A snapshot has the entries of the subvolumes that were in its source, but nothing hangs there.
//! Today's root items say whether they are snapshots; those of kernels before 3.6 do not. The tests
//! make such images from today's, by taking away what those kernels did not know. `btrfs check` is
//! the judge of each form, and damage is added to each.

use anyhow::{Context, Result};
use larder_check::{Kind, Options, Report, Severity};
use larder_format::items::dir::{DirEntries, DirEntryRef};
use larder_format::items::keys::{dir_index_key, dir_item_key, inode_key};
use larder_format::items::root::OLD_SIZE;
use larder_format::{Generation, Key, KeyType, ObjectId, TreeId};
use larder_simtest::damage::Damage;
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use larder_simtest::oracle::{KernelMount, Need, btrfs, btrfs_check, mkfs_btrfs, need, scratch};
use std::path::Path;
use std::sync::{Arc, OnceLock};

const ROOTS: TreeId = ObjectId::ROOT_TREE;
const UUIDS: TreeId = ObjectId::UUID_TREE;
const UUID: usize = 247;
const PARENT_UUID: usize = 263;
const CTRANSID: usize = 295;
const END: usize = 439;

fn subvolume(args: &[&str], paths: &[&Path]) -> Result<()> {
    let mut all: Vec<&std::ffi::OsStr> = vec!["subvolume".as_ref()];
    all.extend(args.iter().map(|a| std::ffi::OsStr::new(*a)));
    all.extend(paths.iter().map(|p| p.as_os_str()));
    btrfs(&all).map(drop)
}

/// A tree that holds its own snapshots, as backup programs of the time did it; one of a snapshot;
/// one of a tree from which a subvolume was deleted, another renamed, another moved to a snapshot.
fn make() -> Result<Image> {
    let dir = scratch();
    let path = dir.path().join("image");
    mkfs_btrfs(&path, 256 << 20, &["-O", "^no-holes,^block-group-tree,^free-space-tree"])?;
    // Deleted subvolumes are removed at commits by the clock.
    let mount = KernelMount::image(&path, "commit=1,nospace_cache")?;
    let tree = mount.join("tree");
    subvolume(&["create"], &[&tree])?;
    for name in ["nested", "nested/deeper", "gone", "renamed", "moved"] {
        subvolume(&["create"], &[&tree.join(name)])?;
    }
    std::fs::create_dir(tree.join("dir"))?;
    subvolume(&["create"], &[&tree.join("dir/below")])?;
    std::fs::write(tree.join("file"), "contents")?;
    for n in 0..5 {
        subvolume(&["snapshot"], &[&tree, &tree.join(format!("snap_{n:02}"))])?;
        std::fs::write(tree.join(format!("file-{n}")), "more")?;
        mount.sync()?;
    }
    subvolume(&["snapshot", "-r"], &[&tree.join("snap_03"), &tree.join("snap_of_snap")])?;
    subvolume(&["create"], &[&tree.join("snap_01/own")])?;
    subvolume(&["delete"], &[&tree.join("gone")])?;
    subvolume(&["delete"], &[&tree.join("snap_00")])?;
    btrfs(&["subvolume".as_ref(), "sync".as_ref(), mount.path().as_os_str()])?;
    std::fs::rename(tree.join("renamed"), tree.join("other name"))?;
    std::fs::rename(tree.join("moved"), tree.join("snap_02/moved here"))?;
    mount.sync()?;
    mount.unmount_clean()?;
    Ok(Image::from_file(&path)?)
}

/// The image; `None` where the oracles that make it are missing.
fn image() -> Option<&'static Image> {
    static IMAGE: OnceLock<Option<Image>> = OnceLock::new();
    let made = IMAGE.get_or_init(|| {
        if !need(&[Need::MkfsBtrfs, Need::KernelBtrfs, Need::BtrfsProgs]) {
            return None;
        }
        // A mount lives in the namespace of its thread: one that ends takes it along.
        let made = std::thread::spawn(make).join().expect("no panic");
        Some(made.unwrap_or_else(|e| panic!("{e:#}")))
    });
    made.as_ref()
}

/// Root items of subvolumes, but for the top-level one.
fn subvolumes(d: &Damage) -> Result<Vec<Key>> {
    let items = d.items(ROOTS)?;
    let wanted = |key: &Key| {
        key.kind == KeyType::ROOT_ITEM
            && key.objectid.is_subvolume()
            && key.objectid != ObjectId::FS_TREE
    };
    Ok(items.into_iter().map(|(key, _)| key).filter(wanted).collect())
}

/// Those of them that were made as snapshots.
fn snapshots(d: &Damage) -> Result<Vec<Key>> {
    Ok(subvolumes(d)?.into_iter().filter(|key| key.offset != 0).collect())
}

fn forget_uuids(d: &mut Damage) -> Result<()> {
    for (key, _) in d.items(UUIDS)? {
        d.item(UUIDS, key).delete()?;
    }
    Ok(())
}

/// Kernels up to 3.5 wrote the short form of root items, and no uuid tree.
fn short_items(d: &mut Damage) -> Result<()> {
    let keys = subvolumes(d)?;
    for key in keys.into_iter().chain([d.root_item(ObjectId::FS_TREE)?.0]) {
        d.item(ROOTS, key).edit(|data| data.truncate(OLD_SIZE))?;
    }
    forget_uuids(d)
}

/// They left what they did not know as it was, with the wrong second generation.
fn stale_items(d: &mut Damage) -> Result<()> {
    let keys = subvolumes(d)?;
    for key in keys.into_iter().chain([d.root_item(ObjectId::FS_TREE)?.0]) {
        d.item(ROOTS, key).add_u64(OLD_SIZE, -1)?;
    }
    forget_uuids(d)
}

/// A newer kernel that changes such a subvolume gives it a uuid, and zeros.
fn items_made_longer(d: &mut Damage) -> Result<()> {
    for key in subvolumes(d)? {
        d.item(ROOTS, key).edit(|data| {
            data[PARENT_UUID..CTRANSID].fill(0);
            data[CTRANSID + 8..END].fill(0);
        })?;
    }
    Ok(())
}

/// A newer kernel has changed every second one only.
fn some_items_made_longer(d: &mut Damage) -> Result<()> {
    items_made_longer(d)?;
    for key in subvolumes(d)?.into_iter().step_by(2) {
        let uuid: [u8; 16] = d.get(ROOTS, key)?[UUID..UUID + 16].try_into()?;
        d.item(ROOTS, key).edit(|data| data.truncate(OLD_SIZE))?;
        let own = larder_format::items::keys::uuid_key(&uuid, KeyType::UUID_SUBVOL);
        d.item(UUIDS, own).delete()?;
    }
    Ok(())
}

/// Before 2.6.35 the key of a snapshot did not say when it was made, either.
fn keys_without_time(d: &mut Damage) -> Result<()> {
    short_items(d)?;
    for key in snapshots(d)? {
        d.item(ROOTS, key).rekey(Key { offset: 0, ..key })?;
    }
    Ok(())
}

/// Adds an entry for a subvolume to the top directory of another.
fn add_entry(
    d: &mut Damage,
    tree: TreeId,
    child: TreeId,
    (name, index): (&[u8], u64),
    made: u64,
) -> Result<()> {
    let dir = ObjectId::FIRST_FREE;
    let entry = DirEntryRef::subvolume(child, Generation(made), name).encode();
    d.insert(tree, dir_item_key(dir, name), &entry)?;
    d.insert(tree, dir_index_key(dir, index), &entry)?;
    // The size of a directory counts each name twice.
    d.item(tree, inode_key(dir)).add_u64(16, 2 * i64::try_from(name.len())?)
}

/// Where the entry was made before the tree was copied, a snapshot of a tree into itself has an
/// entry of itself.
fn entries_of_themselves(d: &mut Damage) -> Result<()> {
    short_items(d)?;
    for key in snapshots(d)? {
        add_entry(d, key.objectid, key.objectid, (b"itself", 5000), key.offset)?;
    }
    Ok(())
}

type Form = (&'static str, fn(&mut Damage) -> Result<()>);

const FORMS: [Form; 7] = [
    ("as Linux makes them now", |_| Ok(())),
    ("short root items", short_items),
    ("root items with a stale second part", stale_items),
    ("root items made longer later", items_made_longer),
    ("some root items made longer later", some_items_made_longer),
    ("keys without a time", keys_without_time),
    ("entries of themselves", entries_of_themselves),
];

fn planted(image: &Image, plant: impl FnOnce(&mut Damage) -> Result<()>) -> Result<Image> {
    let mut damage = Damage::on(image)?;
    plant(&mut damage)?;
    Ok(damage.into_image())
}

fn check(image: Image) -> Report {
    let device = Arc::new(SimDevice::new(image).unrecorded());
    larder_check::check(&[device], &Options::default(), &|_| ()).expect("it can be checked")
}

fn said(report: &Report) -> Vec<String> {
    let bad = report.findings.iter().filter(|f| f.severity() != Severity::Note);
    bad.map(|f| format!("{}: {:?} {:?}: {}", f.kind, f.tree, f.key, f.what)).collect()
}

/// The entries of subvolumes in the top directory of a tree.
fn entries(d: &Damage, tree: TreeId) -> Result<Vec<(Vec<u8>, TreeId)>> {
    let mut out = Vec::new();
    for (key, data) in d.items(tree)? {
        if key.kind == KeyType::DIR_INDEX {
            for entry in DirEntries::new(&data) {
                let entry = entry?;
                if entry.location.kind == KeyType::ROOT_ITEM {
                    out.push((entry.name.to_vec(), entry.location.objectid));
                }
            }
        }
    }
    Ok(out)
}

#[test]
fn entries_in_snapshots_of_old_kernels_are_right() {
    let Some(image) = image() else { return };
    let d = Damage::on(image).unwrap();
    let last = snapshots(&d).unwrap().pop().unwrap();
    let names = entries(&d, last.objectid).unwrap();
    assert!(names.iter().any(|(name, _)| name == b"snap_00"), "{names:?}");
    assert!(names.len() >= 7, "{names:?}");
    for (name, form) in FORMS {
        let image = planted(image, form).with_context(|| name).unwrap();
        let dir = scratch();
        let path = dir.path().join("image");
        image.write_sparse(&path).unwrap();
        btrfs_check(&path, true).assert_clean(name);
        let report = check(image);
        assert_eq!(said(&report), <[String; 0]>::default(), "{name}");
    }
}

/// An entry that is younger than its snapshot cannot come from the source; nor can any in what is
/// no snapshot.
#[test]
fn entries_that_were_made_later_are_wrong_in_every_form() {
    let Some(image) = image() else { return };
    for (name, form) in FORMS.into_iter().skip(1) {
        let image = planted(image, form).unwrap();
        let stray = |tree: TreeId, made: u64| {
            let image =
                planted(&image, |d| add_entry(d, tree, ObjectId(4000), (b"stray", 6000), made))
                    .unwrap();
            check(image).found(Kind::EntryWithoutSubvolume)
        };
        let d = Damage::on(&image).unwrap();
        let now = d.superblock().generation().0;
        for key in subvolumes(&d).unwrap() {
            assert!(stray(key.objectid, now), "{name}: {key}");
            let last_snapshot = d.root_item(key.objectid).unwrap().1.last_snapshot.get();
            let made = if key.offset == 0 { last_snapshot } else { key.offset };
            assert!(stray(key.objectid, made + 1), "{name}: {key}");
        }
        assert!(stray(ObjectId::FS_TREE, 1), "{name}: the top-level subvolume is no snapshot");
    }
}
