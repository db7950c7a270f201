//! Subvolumes that change places and leave whiteouts, beside Linux: the same calls, the same
//! answers, the same trees; and each goes on with what the other left.
//!
//! Not compared is an exchange of the entry that stands in a snapshot for a subvolume that is not
//! there: Linux 6.18 aborts its transaction for it and goes read-only.

use larder_check::{Options, Severity};
use larder_fs::{FileKind, Filesystem, InodeId, OpenOptions, RenameMode};
use larder_fuse::errno::errno;
use larder_simtest::by_hand::new;
use larder_simtest::oracle::{
    Aspects, EngineTree, KernelMount, Need, StdTree, btrfs, btrfs_check, compare_sources,
    copy_image, kernel_verdict, mkfs_btrfs, need, scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use rustix::fs::{CWD, RenameFlags};
use std::path::Path;
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Exchange,
    Whiteout,
}
use How::{Exchange, Whiteout};

const SUBVOLUMES: [&str; 8] = ["s", "t", "t/in", "t/in/deep", "u", "dir/v", "w", "x"];
const DIRECTORIES: [&str; 7] = ["dir", "dir/empty", "dir/full", "empty", "full", "t/dir", "s/dir"];
const FILES: [&str; 8] =
    ["file", "full/f", "dir/full/f", "t/file", "s/file", "t/in/file", "w/file", "dir/file"];

/// One after the other, on the same tree.
const CALLS: [(&str, &str, How); 46] = [
    // With each other: in one directory, in two, in two trees, there and back.
    ("s", "t", Exchange),
    ("s", "t", Exchange),
    ("s", "dir/v", Exchange),
    ("s", "t/in", Exchange),
    ("t/in", "s", Exchange),
    ("t/in/deep", "dir/v", Exchange),
    // With what is none, whichever is named first.
    ("s", "file", Exchange),
    ("s", "file", Exchange),
    ("dir/v", "file", Exchange),
    ("empty", "u", Exchange),
    ("dir/full", "w", Exchange),
    ("w", "dir/file", Exchange),
    ("full", "dir/full", Exchange),
    ("dir/empty", "dir/full", Exchange),
    ("s", "s", Exchange),
    // In another tree there is no place for it.
    ("s", "t/file", Exchange),
    ("t/dir", "s", Exchange),
    ("file", "t/in", Exchange),
    ("t/in", "empty", Exchange),
    // Nothing is there.
    ("s", "nothing", Exchange),
    ("nothing", "s", Exchange),
    // One lies in the other.
    ("t", "t/in", Exchange),
    ("t/in", "t", Exchange),
    ("t", "t/file", Exchange),
    ("t", "t/dir", Exchange),
    ("dir", "dir/full", Exchange),
    ("dir/full", "dir", Exchange),
    // Whiteouts: nothing is there, or something that gives way, or not.
    ("x", "y", Whiteout),
    ("y", "empty-too", Whiteout),
    ("empty-too", "dir/y", Whiteout),
    ("dir/y", "t/y", Whiteout),
    ("t/y", "t/z", Whiteout),
    ("t/z", "t/dir", Whiteout),
    ("t/dir", "full", Whiteout),
    ("t/dir", "dir/v", Whiteout),
    ("t/dir", "t/file", Whiteout),
    ("t/dir", "t/in", Whiteout),
    ("t/dir", "t/dir", Whiteout),
    ("t", "t/loop", Whiteout),
    ("t", "t/dir/loop", Whiteout),
    ("nothing", "t/loop", Whiteout),
    // A whiteout that was left changes places, too.
    ("x", "s", Exchange),
    ("x", "s", Exchange),
    ("t/y", "t/in", Exchange),
    ("t/in", "t/y", Whiteout),
    ("s", "x", Whiteout),
];

fn open(path: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(path, OpenMode::Write).expect("open the image");
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device) as Arc<dyn Device>, options).expect("open")
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

/// The directory of a path, and its last name.
fn side<'a>(fs: &Filesystem, path: &'a str) -> (InodeId, &'a [u8]) {
    let (dir, name) = split(path);
    let names = dir.split('/').filter(|n| !n.is_empty());
    let dir =
        names.fold(fs.root(), |dir, name| fs.lookup(dir, name.as_bytes()).expect("a directory").id);
    (dir, name.as_bytes())
}

/// Linux makes what is to move.
fn make(image: &Path) {
    mkfs_btrfs(image, 512 << 20, &["-q"]).expect("mkfs.btrfs");
    let mount = KernelMount::image(image, "").expect("mount");
    let mut paths: Vec<(&str, char)> = SUBVOLUMES.iter().map(|p| (*p, 's')).collect();
    paths.extend(DIRECTORIES.iter().map(|p| (*p, 'd')).chain([("empty-too", 'd')]));
    paths.extend(FILES.iter().map(|p| (*p, 'f')));
    // What others lie in comes first.
    paths.sort_by_key(|(path, kind)| (path.matches('/').count(), *kind));
    for (path, kind) in paths {
        let at = mount.join(path);
        match kind {
            's' => drop(
                btrfs(&["subvolume", "create", at.to_str().expect("text")]).expect("a subvolume"),
            ),
            'd' => std::fs::create_dir(&at).expect("a directory"),
            _ => std::fs::write(&at, path.repeat(700)).expect("a file"),
        }
    }
    mount.unmount_clean().expect("unmount");
}

fn kernel(mount: &KernelMount, (from, to, how): (&str, &str, How)) -> i32 {
    let flags = if how == Exchange { RenameFlags::EXCHANGE } else { RenameFlags::WHITEOUT };
    rustix::fs::renameat_with(CWD, mount.join(from), CWD, mount.join(to), flags)
        .map_or_else(|e| e.raw_os_error(), |()| 0)
}

fn engine(fs: &Filesystem, (from, to, how): (&str, &str, How)) -> i32 {
    let ((dir, name), (to_dir, to_name)) = (side(fs, from), side(fs, to));
    let mode = if how == Exchange {
        RenameMode::Exchange
    } else {
        RenameMode::Whiteout { uid: 0, gid: 0 }
    };
    fs.rename(dir, name, to_dir, to_name, mode).map_or_else(|e| errno(&e).0, |()| 0)
}

fn assert_sound(image: &Path, what: &str) {
    btrfs_check(image, true).assert_clean(what);
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, OpenMode::Read).expect("open"));
    let report =
        larder_check::check(&[device], &Options::default(), &|_| ()).expect("it can be checked");
    let wrong: Vec<_> = report.findings.iter().filter(|f| f.severity() != Severity::Note).collect();
    assert!(wrong.is_empty(), "{what}: {wrong:#?}");
}

#[test]
fn subvolumes_change_places_as_on_linux() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let [theirs, mine] = ["theirs", "mine"].map(|name| dir.path().join(name));
    make(&theirs);
    copy_image(&theirs, &mine).expect("copy");
    let mount = KernelMount::image(&theirs, "").expect("mount");
    let fs = open(&mine);
    let mut done = 0;
    for call in CALLS {
        let expected = kernel(&mount, call);
        assert_eq!(engine(&fs, call), expected, "{call:?}");
        done += usize::from(expected == 0);
        // What a commit wrote down and what was only noted are the same to the next call.
        if done % 5 == 4 {
            fs.sync().expect("sync");
        }
    }
    assert!(done > 20, "{done} of {} calls did something", CALLS.len());
    mount.unmount_clean().expect("unmount");
    fs.close().expect("close");
    drop(fs);
    for (image, what) in [(&mine, "ours"), (&theirs, "Linux's")] {
        assert_sound(image, what);
    }
    let mount = KernelMount::image_read_only(&theirs, "").expect("mount");
    let fs = open(&mine);
    let aspects = Aspects { inode_numbers: true, directory_size: true, ..Aspects::default() };
    let differences =
        compare_sources(&StdTree::new(mount.path()), &EngineTree(&fs), aspects).expect("compare");
    // Each side has made its changes at a time of its own.
    let differences: Vec<_> =
        differences.into_iter().filter(|d| !d.what.contains("time")).collect();
    assert!(differences.is_empty(), "{differences:#?}");
    mount.unmount_clean().expect("unmount");
    fs.close().expect("close");
    drop(fs);
    // Linux goes on with ours, and the engine with Linux's.
    kernel_verdict(&mine).expect("Linux goes on");
    let fs = open(&theirs);
    for call in CALLS {
        engine(&fs, call);
    }
    let made = fs.create(fs.root(), b"made here", &new(FileKind::Regular)).expect("create").id;
    fs.write(made, 0, b"something").expect("write");
    fs.close().expect("close");
    drop(fs);
    assert_sound(&theirs, "Linux's, gone on with");
}
