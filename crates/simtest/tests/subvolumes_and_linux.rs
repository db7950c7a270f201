//! Subvolumes in both directions: what is made, snapshotted, moved and deleted here Linux reads, checks and goes on with;
//! what Linux has begun to delete is finished here, and the reverse.

use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions, RenameMode, Tuning};
use larder_simtest::oracle::{
    Fixture, KernelMount, Need, btrfs, btrfs_check, copy_image, dump_tree, kernel_images, kernel_verdict,
    need, populate, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::path::Path;
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

/// `btrfs subvolume sync` waits for commits.
const QUICK: &str = "commit=1";

fn open(image: &Path) -> Arc<Filesystem> {
    open_with(image, Tuning::default())
}

fn open_with(image: &Path, tuning: Tuning) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write, false).unwrap();
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn dir() -> NewInode<'static> {
    NewInode { kind: FileKind::Directory, perm: 0o755, uid: 0, gid: 0, rdev: 0, target: b"", xattrs: &[] }
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
    let scratch = scratch();
    for variant in kernel_images() {
        let image = scratch.path().join(&variant.name);
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
}

#[test]
fn what_linux_began_to_delete_is_finished_here() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let (image, copy) = (scratch.path().join("image"), scratch.path().join("copy"));
    kernel_images()[0].make(&image, 512 << 20).unwrap();
    let mount = KernelMount::image(&image, "").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    let volumes = mount.join("volumes");
    mount.sync().unwrap();
    let list = btrfs(&["subvolume", "list", &text(mount.path())]).unwrap();
    for path in ["volumes/copy", "volumes/frozen"] {
        let _ = volumes.metadata().unwrap();
        btrfs(&["subvolume", "delete", "-c", &text(&mount.join(path))]).unwrap();
    }
    // What a power cut right after the deletion leaves.
    copy_image(&image, &copy).unwrap();
    mount.unmount_clean().unwrap();
    let announced = dump_tree(&copy, &["-t", "root"]).unwrap().contains("ORPHAN_ITEM");
    assert!(announced, "Linux was quicker than the copy; subvolumes were\n{list}");
    let fs = open(&copy);
    fs.wait_for_drops().unwrap();
    fs.close().unwrap();
    assert!(!dump_tree(&copy, &["-t", "root"]).unwrap().contains("ORPHAN_ITEM"));
    btrfs_check(&copy, true).assert_clean("after the deletion was finished here");
    kernel_verdict(&copy).unwrap();
}
