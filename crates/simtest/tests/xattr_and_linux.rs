//! Extended attributes as large as a leaf takes, beside Linux: the same limits and the same
//! refusals for all sizes of nodes, and logs of them that both replay.
//!
//! Larder takes more in one case. Where an attribute grows, or another of the same hash joins it,
//! Linux wants room in the leaf as it happens to be filled, and may say `ENOSPC` to what it takes
//! on another day. That is not compared.

use larder_check::{Options, Severity};
use larder_fs::mkfs::MkfsOptions;
use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions, XattrMode};
use larder_fuse::errno::errno;
use larder_simtest::device::SimDevice;
use larder_simtest::oracle::{
    Aspects, EngineTree, KernelMount, Need, StdTree, btrfs_check, colliding_names, compare_sources,
    copy_image, kernel_verdict, mkfs_btrfs, need, scratch,
};
use larder_simtest::runner::fresh;
use larder_volume::{Device, FileDevice, OpenMode};
use rustix::fs::XattrFlags;
use std::path::Path;
use std::sync::Arc;

const SIZE: u64 = 256 << 20;
const NODE_SIZES: [u32; 5] = [4096, 8192, 16_384, 32_768, 65_536];
/// Bytes of a name and a value together, and of all of an item, that a node of `nodesize` bytes
/// does not have for them: the node's header, an item's, and an entry's.
const NOT_ATTRIBUTE: usize = 101 + 25 + 30;

/// One call: name, length of the value, how.
type Call = (Vec<u8>, usize, XattrMode);

fn value(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8 + 1).collect()
}

/// Calls on a file of its own each. What Linux says to them depends on sizes alone.
fn sequences(nodesize: u32) -> Vec<Vec<Call>> {
    use XattrMode::{Create, Replace, Set};
    let short = || b"user.a".to_vec();
    let long = || [&b"user."[..], &[b'n'; 250]].concat();
    let room = |name: &[u8]| nodesize as usize - NOT_ATTRIBUTE - name.len();
    let mut all = Vec::new();
    for name in [short(), long(), b"trusted.t".to_vec(), b"security.s".to_vec()] {
        let most = room(&name);
        let call = |len: usize, mode| (name.clone(), len, mode);
        all.push(vec![
            call(most, Create),
            call(most, Create),
            call(most - 1, Replace),
            call(0, Replace),
        ]);
        all.push(vec![call(most, Set), call(most + 1, Set), call(most, Set), call(most, Replace)]);
        // What fits nowhere is refused first, whether the attribute is there or not.
        all.push(vec![
            call(most + 1, Set),
            call(most + 1, Create),
            call(most + 1, Replace),
            call(most, Replace),
        ]);
        all.push(vec![
            call(0, Create),
            call(most + 1, Create),
            call(1, Create),
            call(65_536, Create),
        ]);
        all.push(vec![call(65_536, Set), call(65_537, Set), call(65_537, Replace), call(1, Set)]);
    }
    // Several that each fill a leaf.
    all.push((0..5).map(|i| (format!("user.{i}").into_bytes(), room(b"user.0"), Set)).collect());
    // Names of one hash have one item together.
    let names: Vec<Vec<u8>> =
        colliding_names(1).into_iter().map(|n| [&b"user."[..], &n].concat()).collect();
    let together = room(&names[0]) - 30 - names[1].len();
    for first in [0, 100, together / 2, together] {
        let one = |len: usize| (names[1].clone(), len, Create);
        all.push(vec![
            (names[0].clone(), first, Create),
            one(together - first + 1),
            one(together - first),
        ]);
    }
    all.push(vec![(names[0].clone(), room(&names[0]), Create), (names[1].clone(), 0, Create)]);
    all
}

/// What each call came to, 0 or an errno.
fn kernel(dir: &Path, calls: &[Call], file: &str) -> Vec<i32> {
    let path = dir.join(file);
    std::fs::File::create_new(&path).expect("a new file");
    let one = |(name, len, mode): &Call| {
        let flags = match mode {
            XattrMode::Set => XattrFlags::empty(),
            XattrMode::Create => XattrFlags::CREATE,
            XattrMode::Replace => XattrFlags::REPLACE,
        };
        rustix::fs::setxattr(&path, &name[..], &value(*len), flags)
            .map_or_else(|e| e.raw_os_error(), |()| 0)
    };
    calls.iter().map(one).collect()
}

fn create(fs: &Filesystem, name: &str) -> InodeId {
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    fs.create(fs.root(), name.as_bytes(), &new).expect("create").id
}

fn engine(fs: &Filesystem, calls: &[Call], file: &str) -> Vec<i32> {
    let id = create(fs, file);
    let set = |(name, len, mode): &Call| fs.setxattr(id, name, &value(*len), *mode);
    calls.iter().map(|call| set(call).map_or_else(|e| errno(&e).0, |()| 0)).collect()
}

fn options() -> OpenOptions {
    OpenOptions { commit_interval: None, ..OpenOptions::default() }
}

fn open(path: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(path, OpenMode::Write).expect("open the image");
    Filesystem::open(Arc::new(device) as Arc<dyn Device>, options()).expect("open")
}

/// `larder check` and `btrfs check` are content.
fn assert_sound(image: &Path, what: &str) {
    btrfs_check(image, true).assert_clean(what);
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, OpenMode::Read).expect("open"));
    let options = Options { data: true, ..Options::default() };
    let report = larder_check::check(&[device], &options, &|_| ()).expect("it can be checked");
    let wrong: Vec<_> = report.findings.iter().filter(|f| f.severity() != Severity::Note).collect();
    assert!(wrong.is_empty(), "{what}: {wrong:#?}");
}

#[test]
fn limits_and_refusals_are_those_of_linux() {
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let (theirs, mine) = (dir.path().join("theirs"), dir.path().join("mine"));
    for nodesize in NODE_SIZES {
        mkfs_btrfs(&theirs, SIZE, &["-q", "-n", &nodesize.to_string()]).expect("mkfs.btrfs");
        copy_image(&theirs, &mine).expect("copy");
        let mount = KernelMount::image(&theirs, "").expect("mount");
        let fs = open(&mine);
        for (i, calls) in sequences(nodesize).iter().enumerate() {
            let file = format!("f{i}");
            let expected = kernel(mount.path(), calls, &file);
            let called: Vec<_> = calls
                .iter()
                .map(|(n, len, mode)| (n.escape_ascii().to_string(), len, mode))
                .collect();
            assert_eq!(engine(&fs, calls, &file), expected, "{nodesize}: {called:?}");
        }
        mount.unmount_clean().expect("unmount");
        fs.close().expect("close");
        drop(fs);
        assert_sound(&mine, &format!("{nodesize}"));
        // What Linux has written reads the same here, and the other way round.
        let mount = KernelMount::image_read_only(&theirs, "").expect("mount");
        let fs = open(&mine);
        let aspects = Aspects { ignore_top_mtime: true, ..Aspects::default() };
        let differences = compare_sources(&StdTree::new(mount.path()), &EngineTree(&fs), aspects)
            .expect("compare");
        // Each was made at a time of its own.
        let differences: Vec<_> =
            differences.into_iter().filter(|d| !d.what.contains("time")).collect();
        assert!(differences.is_empty(), "{nodesize}: {differences:#?}");
        mount.unmount_clean().expect("unmount");
        fs.close().expect("close");
        kernel_verdict(&mine).unwrap_or_else(|e| panic!("{nodesize}: {e:#}"));
    }
}

/// An `fsync` logs them, and Linux and the engine replay what it logged.
#[test]
fn the_largest_are_logged_and_replayed() {
    if !need(&[Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let dir = scratch();
    let (image, copy) = (dir.path().join("image"), dir.path().join("copy"));
    let names: Vec<Vec<u8>> =
        colliding_names(1).into_iter().map(|n| [&b"user."[..], &n].concat()).collect();
    for nodesize in NODE_SIZES {
        let base = fresh(SIZE, &MkfsOptions { nodesize: Some(nodesize), ..MkfsOptions::default() })
            .expect("mkfs");
        let device = Arc::new(SimDevice::new(base).unrecorded());
        let fs = Filesystem::open(device.clone() as Arc<dyn Device>, options()).expect("open");
        let most = nodesize as usize - NOT_ATTRIBUTE;
        let set = |id, name: &[u8], len: usize| {
            fs.setxattr(id, name, &value(len), XattrMode::Set).expect("set")
        };
        let old = create(&fs, "old");
        set(old, b"user.a", most - 6);
        set(old, b"user.gone", most - 9);
        fs.sync().expect("sync");
        // Replaced, removed, several more, and two in one item.
        set(old, b"user.a", 7);
        set(old, b"user.a", most - 6);
        fs.removexattr(old, b"user.gone").expect("remove");
        set(old, b"user.b", most - 6);
        let new = create(&fs, "new");
        set(new, &[&b"user."[..], &[b'n'; 250]].concat(), most - 255);
        set(new, b"trusted.t", most - 9);
        let together = most - names[0].len() - 30 - names[1].len();
        set(new, &names[0], together / 2);
        set(new, &names[1], together - together / 2);
        fs.fsync(old, false).expect("fsync");
        fs.fsync(new, false).expect("fsync");
        let log = fs.stats().log;
        assert_eq!(log.fsyncs_logged, 2, "{log:?}");
        let cut = device.image();
        drop(fs);
        cut.write_sparse(&image).expect("write the image");
        copy_image(&image, &copy).expect("copy");
        let mount = KernelMount::image(&copy, "").expect("Linux replays it");
        let fs = open(&image);
        for (file, id, expected) in [("old", old, 2), ("new", new, 4)] {
            let listed = fs.listxattr(id).expect("list");
            assert_eq!(listed.len(), expected, "{nodesize}: {file}");
            for name in listed {
                let ours = fs.getxattr(id, &name).expect("get");
                let mut theirs = vec![0; 65_536];
                let len = rustix::fs::getxattr(mount.join(file), &name[..], &mut theirs[..])
                    .expect("getxattr");
                assert_eq!(ours, theirs[..len], "{nodesize}: {file}: {}", name.escape_ascii());
                assert_eq!(ours, value(len));
            }
        }
        mount.unmount_clean().expect("unmount");
        fs.close().expect("close");
        drop(fs);
        assert_sound(&copy, "replayed by Linux");
        assert_sound(&image, "replayed by the engine");
    }
}
