//! Subvolumes in both directions. Larder makes, snapshots, moves and deletes some; Linux reads
//! them, checks them and goes on. A deletion that one of them has begun, the other finishes.

use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions, RenameMode, Tuning};
use larder_simtest::device::{OpKind, SimDevice};
use larder_simtest::image::Image;
use larder_simtest::oracle::{
    Fixture, ImageVariant, KernelMount, Need, btrfs, btrfs_check, copy_image, dump_tree,
    kernel_images, kernel_verdict, mkfs_btrfs, need, populate, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

/// `btrfs subvolume sync` waits for commits.
const QUICK: &str = "commit=1";

fn open(image: &Path) -> Arc<Filesystem> {
    open_with(image, Tuning::default())
}

fn open_with(image: &Path, tuning: Tuning) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn dir() -> NewInode<'static> {
    NewInode {
        kind: FileKind::Directory,
        perm: 0o755,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: b"",
        xattrs: &[],
    }
}

fn file(fs: &Filesystem, dir: InodeId, name: &str, data: &[u8]) {
    let new = NewInode { kind: FileKind::Regular, perm: 0o644, ..self::dir() };
    let id = fs.create(dir, name.as_bytes(), &new).unwrap().id;
    fs.write(id, 0, data).unwrap();
}

fn find(fs: &Filesystem, path: &str) -> InodeId {
    let names = path.split('/').filter(|n| !n.is_empty());
    names.fold(fs.root(), |dir, name| fs.lookup(dir, name.as_bytes()).unwrap().id)
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Fills a directory with files of all sizes.
fn fill(fs: &Filesystem, dir: InodeId, files: usize) {
    for n in 0..files {
        file(fs, dir, &format!("a file with some name {n}"), &vec![n as u8; n % 23 * 977]);
    }
}

#[test]
fn linux_goes_on_with_what_was_made_here() {
    if !need(&NEEDS) {
        return;
    }
    // Mostly one waits for Linux, which looks once a second whether a subvolume is gone.
    let (scratch, variants) = (scratch(), kernel_images());
    std::thread::scope(|threads| {
        for some in variants.chunks(variants.len().div_ceil(4)) {
            threads.spawn(|| some.iter().for_each(|variant| goes_on(variant, scratch.path())));
        }
    });
}

fn goes_on(variant: &ImageVariant, scratch: &Path) {
    let image = scratch.join(&variant.name);
    variant.make(&image, 512 << 20).unwrap();
    let mount = KernelMount::image(&image, &variant.mount).unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
    let fs = open(&image);
    let root = fs.root();
    let sub = fs.create_subvolume(root, b"made here", &dir()).unwrap().id;
    fill(&fs, sub, 400);
    let nested = fs.create_subvolume(sub, b"nested", &dir()).unwrap().id;
    file(&fs, nested, "inside", b"the nested one");
    fs.snapshot(sub.subvol, root, b"copy", false).unwrap();
    fs.snapshot(sub.subvol, root, b"frozen", true).unwrap();
    fs.snapshot(root.subvol, root, b"all", true).unwrap();
    let origin = find(&fs, "volumes/origin");
    fs.snapshot(origin.subvol, root, b"origin again", false).unwrap();
    let again = find(&fs, "origin again");
    fill(&fs, again, 50);
    fill(&fs, find(&fs, "copy"), 0);
    for n in (0..400).step_by(3) {
        fs.unlink(sub, format!("a file with some name {n}").as_bytes()).unwrap();
    }
    fs.rename(sub, b"nested", root, b"not nested", RenameMode::Replace).unwrap();
    // Shared with others on either side, made here and there.
    fs.delete_subvolume(root, b"copy").unwrap();
    fs.delete_subvolume(find(&fs, "volumes"), b"copy").unwrap();
    fs.wait_for_drops().unwrap();
    fs.close().unwrap();
    btrfs_check(&image, true).assert_clean(&variant.name);

    let mount = KernelMount::image_read_only(&image, "").unwrap();
    let list = btrfs(&["subvolume", "list", "-puqR", &text(mount.path())]).unwrap();
    for path in ["made here", "frozen", "all", "origin again", "not nested"] {
        assert!(list.lines().any(|l| l.ends_with(&format!("path {path}"))), "{path} in\n{list}");
    }
    assert!(!list.contains("path copy"), "{list}");
    let show = btrfs(&["subvolume", "show", &text(&mount.join("frozen"))]).unwrap();
    let info = show.lines().find(|l| l.contains("Flags:")).unwrap();
    assert!(info.contains("readonly"), "{show}");
    let deleted = btrfs(&["subvolume", "list", "-d", &text(mount.path())]).unwrap();
    assert_eq!(deleted, "", "nothing is left to be dropped");
    mount.unmount_clean().unwrap();

    let shown = kernel_verdict(&image).unwrap();
    drop(shown);
    // Linux deletes what was made here; what then is there is still sound.
    let mount = KernelMount::image(&image, QUICK).unwrap();
    for path in ["made here", "origin again", "all"] {
        btrfs(&["subvolume", "delete", &text(&mount.join(path))]).unwrap();
    }
    btrfs(&["subvolume", "sync", &text(mount.path())]).unwrap();
    mount.unmount_clean().unwrap();
    btrfs_check(&image, true).assert_clean("after Linux deleted subvolumes of ours");
    std::fs::remove_file(&image).unwrap();
}

#[test]
fn what_linux_began_to_delete_is_finished_here() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let (image, copy) = (scratch.path().join("image"), scratch.path().join("copy"));
    // Linux drops them in the background, and any commit may be the one that has it: then it was
    // quicker than the copy.
    let caught = (0..20).any(|_| {
        kernel_images()[0].make(&image, 512 << 20).unwrap();
        let mount = KernelMount::image(&image, "").unwrap();
        populate(mount.path(), &Fixture::small()).unwrap();
        mount.sync().unwrap();
        for path in ["volumes/copy", "volumes/frozen"] {
            btrfs(&["subvolume", "delete", "-c", &text(&mount.join(path))]).unwrap();
        }
        // What a power cut right after the deletion leaves.
        copy_image(&image, &copy).unwrap();
        mount.unmount_clean().unwrap();
        dump_tree(&copy, &["-t", "root"]).unwrap().contains("ORPHAN_ITEM")
    });
    assert!(caught, "Linux never leaves anything to be deleted");
    let fs = open(&copy);
    fs.wait_for_drops().unwrap();
    fs.close().unwrap();
    assert!(!dump_tree(&copy, &["-t", "root"]).unwrap().contains("ORPHAN_ITEM"));
    btrfs_check(&copy, true).assert_clean("after the deletion was finished here");
    kernel_verdict(&copy).unwrap();
}

/// How far the deleted subvolumes of an image were dropped; `None` where none is left.
fn drop_progress(image: &Path) -> Option<Vec<String>> {
    let dump = dump_tree(image, &["-t", "root"]).unwrap();
    let keys = dump.lines().filter_map(|l| l.trim().strip_prefix("drop_progress key "));
    let moved: Vec<_> = keys.filter(|k| !k.starts_with("(0 ")).map(str::to_owned).collect();
    dump.contains("ORPHAN_ITEM").then_some(moved)
}

#[test]
fn a_deletion_that_stopped_half_way_goes_on_on_either_side() {
    if !need(&NEEDS) {
        return;
    }
    const FILES: usize = 6000;
    let scratch = scratch();
    let image = scratch.path().join("image");
    mkfs_btrfs::<&str>(&image, 512 << 20, &[]).unwrap();
    let fs = open(&image);
    let sub = fs.create_subvolume(fs.root(), b"sub", &dir()).unwrap().id;
    fill(&fs, sub, FILES);
    // What the snapshot keeps relies on the original until that is gone.
    fs.snapshot(sub.subvol, fs.root(), b"kept", false).unwrap();
    for n in (0..FILES).step_by(97) {
        fs.unlink(sub, format!("a file with some name {n}").as_bytes()).unwrap();
    }
    fs.close().unwrap();
    let device = Arc::new(SimDevice::new(Image::from_file(&image).unwrap()));
    // Each step is a transaction.
    let tuning = Tuning { drop_step: Some(60), ..Tuning::default() };
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    let fs = Filesystem::open(device.clone(), options).unwrap();
    fs.delete_subvolume(fs.root(), b"sub").unwrap();
    fs.wait_for_drops().unwrap();
    fs.close().unwrap();
    // What the disk held each time that a superblock had been written.
    let recording = device.recording();
    let mut now = recording.base.clone();
    let mut moments = Vec::new();
    for op in &recording.ops {
        if let OpKind::Write { at, pieces, .. } = &op.kind {
            pieces.iter().for_each(|p| now.put(p));
            if *at == 64 << 10 {
                moments.push(now.clone());
            }
        }
    }
    assert!(moments.len() > 8, "{} commits", moments.len());
    let mut seen = BTreeSet::new();
    for (n, eighths) in [2, 3, 5, 6].into_iter().enumerate() {
        let image = scratch.path().join(format!("half {n}"));
        moments[moments.len() * eighths / 8].write_sparse(&image).unwrap();
        let moved = drop_progress(&image).expect("the deletion is under way");
        assert_eq!(moved.len(), 1, "{moved:?}");
        seen.extend(moved);
        btrfs_check(&image, true).assert_clean("half-way");
        if n % 2 == 0 {
            let fs = open(&image);
            fs.wait_for_drops().unwrap();
            fs.close().unwrap();
        } else {
            let mount = KernelMount::image(&image, QUICK).unwrap();
            btrfs(&["subvolume", "sync", &text(mount.path())]).unwrap();
            mount.unmount_clean().unwrap();
        }
        assert_eq!(drop_progress(&image), None);
        btrfs_check(&image, true).assert_clean("after it went on");
        let mount = KernelMount::image_read_only(&image, "").unwrap();
        let kept = std::fs::read_dir(mount.join("kept")).unwrap().count();
        mount.unmount_clean().unwrap();
        assert_eq!(kept, FILES);
    }
    assert_eq!(seen.len(), 4, "each one step further: {seen:?}");
}

/// A ROOT_ITEM in a dump, word by word.
fn root_item(dump: &str, id: u64) -> Vec<&str> {
    let head = format!("key ({id} ROOT_ITEM ");
    let from = dump
        .lines()
        .skip_while(|l| !(l.trim_start().starts_with("item ") && l.contains(&head)))
        .skip(1);
    from.take_while(|l| !l.trim_start().starts_with("item "))
        .flat_map(str::split_whitespace)
        .collect()
}

fn field<'a>(item: &[&'a str], name: &str) -> &'a str {
    let at =
        item.iter().position(|w| *w == name).unwrap_or_else(|| panic!("no {name} in {item:?}"));
    item[at + 1]
}

/// What ROOT_ITEMs say, but for what depends on when they were made: of transactions only which
/// came before which, of uuids only whose they are.
fn facts(dump: &str, ids: &[u64]) -> Vec<String> {
    const PLAIN: [&str; 8] = [
        "root_dirid",
        "byte_limit",
        "flags",
        "refs",
        "drop_level",
        "level",
        "stransid",
        "rtransid",
    ];
    const TRANSACTIONS: [&str; 3] = ["ctransid", "otransid", "last_snapshot"];
    const UUIDS: [&str; 3] = ["uuid", "parent_uuid", "received_uuid"];
    let items: Vec<_> = ids.iter().map(|id| root_item(dump, *id)).collect();
    let number = |item: &[&str], name| field(item, name).parse::<u64>().unwrap();
    let moments: BTreeSet<u64> =
        items.iter().flat_map(|i| TRANSACTIONS.iter().map(|t| number(i, t))).collect();
    let uuids: Vec<_> = items.iter().map(|i| field(i, "uuid")).collect();
    let mut facts = Vec::new();
    for (id, item) in ids.iter().zip(&items) {
        facts.extend(PLAIN.map(|name| format!("{id} {name} {}", field(item, name))));
        let order = |name| moments.iter().position(|m| *m == number(item, name));
        facts.extend(TRANSACTIONS.map(|name| format!("{id} {name} {:?}", order(name))));
        let whose = |name| uuids.iter().position(|u| *u == field(item, name));
        facts.extend(UUIDS.map(|name| format!("{id} {name} {:?}", whose(name))));
        let set = |name| field(item, name).starts_with("0.0");
        facts.extend(["stime", "rtime"].map(|name| format!("{id} {name} {}", set(name))));
    }
    facts
}

#[test]
fn root_items_are_as_linux_writes_them() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let (theirs, ours) = (scratch.path().join("theirs"), scratch.path().join("ours"));
    mkfs_btrfs::<&str>(&theirs, 256 << 20, &[]).unwrap();
    let mount = KernelMount::image(&theirs, "").unwrap();
    mount.sync().unwrap();
    mount.unmount_clean().unwrap();
    copy_image(&theirs, &ours).unwrap();

    let mount = KernelMount::image(&theirs, "").unwrap();
    let at = |p: &str| text(&mount.join(p));
    btrfs(&["subvolume", "create", &at("sub")]).unwrap();
    std::fs::write(mount.join("sub/file"), b"x").unwrap();
    mount.sync().unwrap();
    btrfs(&["subvolume", "snapshot", &at("sub"), &at("copy")]).unwrap();
    btrfs(&["subvolume", "snapshot", "-r", &at("sub"), &at("frozen")]).unwrap();
    btrfs(&["subvolume", "set-default", "257", &at("")]).unwrap();
    mount.unmount_clean().unwrap();

    let fs = open(&ours);
    let sub = fs.create_subvolume(fs.root(), b"sub", &dir()).unwrap().id;
    file(&fs, sub, "file", b"x");
    fs.sync().unwrap();
    let copy = fs.snapshot(sub.subvol, fs.root(), b"copy", false).unwrap();
    fs.snapshot(sub.subvol, fs.root(), b"frozen", true).unwrap();
    fs.set_default_subvolume(copy).unwrap();
    fs.close().unwrap();
    btrfs_check(&ours, true).assert_clean("ours");

    let dump = |image: &Path| dump_tree(image, &["-t", "root"]).unwrap();
    let (theirs, ours) = (dump(&theirs), dump(&ours));
    let ids = [256, 257, 258];
    assert_eq!(facts(&ours, &ids), facts(&theirs, &ids));
    let links = |dump: &str| -> Vec<String> {
        let lines =
            dump.lines().filter(|l| l.contains("root ref key") || l.contains("root backref key"));
        lines.map(|l| l.trim().to_owned()).collect()
    };
    assert_eq!(links(&ours).len(), 6);
    assert_eq!(links(&ours), links(&theirs));
    let default = |dump: &str| {
        let mut lines = dump.lines().skip_while(|l| !l.contains("DIR_ITEM 2378154706"));
        let line = lines.find(|l| l.contains("location")).expect("the default is set");
        line.split("ROOT_ITEM").next().unwrap().trim().to_owned()
    };
    assert_eq!(default(&ours), default(&theirs));
}

/// What a snapshot shows of subvolumes in its source: of each placeholder mode and inode number,
/// and whether what is tried with it is done.
#[test]
fn placeholders_of_nested_subvolumes_are_those_of_linux() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let (theirs, ours) = (scratch.path().join("theirs"), scratch.path().join("ours"));
    mkfs_btrfs::<&str>(&theirs, 256 << 20, &[]).unwrap();
    let mount = KernelMount::image(&theirs, "").unwrap();
    let at = |p: &str| text(&mount.join(p));
    btrfs(&["subvolume", "create", &at("sub")]).unwrap();
    std::fs::create_dir(at("sub/d")).unwrap();
    for nested in ["sub/one", "sub/d/two", "sub/d/three"] {
        btrfs(&["subvolume", "create", &at(nested)]).unwrap();
        std::fs::write(at(nested) + "/file", b"x").unwrap();
    }
    mount.sync().unwrap();
    copy_image(&theirs, &ours).unwrap();

    btrfs(&["subvolume", "snapshot", &at("sub"), &at("snap")]).unwrap();
    let mut there = Vec::new();
    for path in ["snap/one", "snap/d/two", "snap/d/three"] {
        let meta = std::fs::metadata(at(path)).unwrap();
        assert_eq!(std::fs::read_dir(at(path)).unwrap().count(), 0);
        there.push((
            meta.mode() & 0o7777,
            meta.ino(),
            meta.uid(),
            meta.gid(),
            meta.nlink(),
            meta.len(),
        ));
    }
    let did = |result: std::io::Result<()>| result.is_ok();
    let tried = [
        did(std::fs::create_dir(at("snap/one/x"))),
        did(std::fs::write(at("snap/one/y"), b"y")),
        did(std::fs::remove_file(at("snap/one"))),
        did(std::fs::remove_dir(at("snap/d"))),
        did(std::fs::remove_dir(at("snap/d/two"))),
        did(std::fs::create_dir(at("snap/d/two"))),
        did(std::fs::create_dir(at("snap/d/two/z"))),
    ];
    btrfs(&["subvolume", "delete", &at("snap")]).unwrap();
    mount.unmount_clean().unwrap();

    let fs = open(&ours);
    let snap = fs.snapshot(find(&fs, "sub").subvol, fs.root(), b"snap", false).unwrap();
    assert_eq!(snap, find(&fs, "snap").subvol);
    let here: Vec<_> = ["snap/one", "snap/d/two", "snap/d/three"]
        .into_iter()
        .map(|path| {
            let attr = fs.getattr(find(&fs, path)).unwrap();
            let mut names = 0;
            fs.readdir(attr.id, 0, &mut |_| {
                names += 1;
                true
            })
            .unwrap();
            assert_eq!(names, 2, "the dot entries");
            (attr.perm, attr.id.ino, attr.uid, attr.gid, u64::from(attr.nlink), attr.size)
        })
        .collect();
    assert_eq!(here, there);
    let (top, d, one) = (find(&fs, "snap"), find(&fs, "snap/d"), find(&fs, "snap/one"));
    let new_file = NewInode { kind: FileKind::Regular, perm: 0o644, ..dir() };
    let mut ours_tried = vec![
        fs.create(one, b"x", &dir()).is_ok(),
        fs.create(one, b"y", &new_file).is_ok(),
        fs.unlink(top, b"one").is_ok(),
        fs.rmdir(top, b"d").is_ok(),
        fs.rmdir(d, b"two").is_ok(),
        fs.create(d, b"two", &dir()).is_ok(),
    ];
    ours_tried.push(fs.create(find(&fs, "snap/d/two"), b"z", &dir()).is_ok());
    assert_eq!(ours_tried, tried);
    assert_eq!(tried, [false, false, false, false, true, true, true]);
    fs.delete_subvolume(fs.root(), b"snap").unwrap();
    fs.close().unwrap();
    btrfs_check(&ours, true).assert_clean("ours");
}
