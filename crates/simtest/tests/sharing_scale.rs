//! Much-shared extents and many snapshots, beside the kernel: a thousand clones of one extent, then
//! most of them deleted; many snapshots of one subvolume, then some of them. `btrfs check` and the
//! kernel find nothing wrong with what is left.
//!
//! `LARDER_SCALE=50` does 50 times as many snapshots (10,000) and prints what each side took,
//! `--nocapture` given.

use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, InodeId, OpenOptions};
use larder_simtest::by_hand::new;
use larder_simtest::oracle::{
    KernelMount, Need, btrfs_check, copy_image, mkfs_btrfs, need, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const CLONES: usize = 1000;
const SNAPSHOTS: usize = 200;

fn scale() -> usize {
    std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

fn open(image: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn timed<T>(what: &str, f: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let value = f();
    println!("{what}: {:.1} ms", begin.elapsed().as_secs_f64() * 1000.0);
    value
}

fn data() -> Vec<u8> {
    (0..1 << 20u32).map(|n| (n / 3 % 251) as u8).collect()
}

#[test]
fn an_extent_with_a_thousand_users() {
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    const FICLONE: libc::c_ulong = 0x4004_9409;
    let dir = scratch();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    mkfs(&FileDevice::create(&ours, 512 << 20).unwrap(), &MkfsOptions::default()).unwrap();
    mkfs_btrfs::<&str>(&theirs, 512 << 20, &[]).unwrap();
    let data = data();
    let fs = open(&ours);
    let root = fs.root();
    let source = fs.create(root, b"source", &new(FileKind::Regular)).unwrap().id;
    fs.write(source, 0, &data).unwrap();
    fs.sync().unwrap();
    timed("1,000 clones here, with a sync", || {
        for n in 0..CLONES {
            let name = format!("clone {n}");
            let to = fs.create(root, name.as_bytes(), &new(FileKind::Regular)).unwrap().id;
            assert_eq!(fs.clone_range(source.at(0), to.at(0), 0).unwrap(), data.len() as u64);
        }
        fs.sync().unwrap();
    });
    let used = fs.space_usage().data.used;
    assert_eq!(used, 1 << 20, "one extent");
    let mount = KernelMount::image(&theirs, "noatime").unwrap();
    fs::write(mount.join("source"), &data).unwrap();
    mount.sync().unwrap();
    timed("1,000 clones by Linux, with a sync", || {
        let source = File::open(mount.join("source")).unwrap();
        for n in 0..CLONES {
            let to = File::create(mount.join(format!("clone {n}"))).unwrap();
            // SAFETY: the request takes a descriptor.
            assert_eq!(unsafe { libc::ioctl(to.as_raw_fd(), FICLONE, source.as_raw_fd()) }, 0);
        }
        mount.sync().unwrap();
    });
    timed("900 deleted here, with a sync", || {
        for n in 0..900 {
            fs.unlink(root, format!("clone {n}").as_bytes()).unwrap();
        }
        fs.sync().unwrap();
    });
    timed("900 deleted by Linux, with a sync", || {
        for n in 0..900 {
            fs::remove_file(mount.join(format!("clone {n}"))).unwrap();
        }
        mount.sync().unwrap();
    });
    fs.close().unwrap();
    mount.unmount_clean().unwrap();
    for image in [&ours, &theirs] {
        btrfs_check(image, true).assert_clean("most are gone");
    }
    // Each deletes the rest of the other's.
    let (ours, theirs) = {
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        copy_image(&theirs, &a).unwrap();
        copy_image(&ours, &b).unwrap();
        (a, b)
    };
    let fs = open(&ours);
    let mount = KernelMount::image(&theirs, "noatime").unwrap();
    for name in (900..CLONES).map(|n| format!("clone {n}")).chain(["source".to_owned()]) {
        assert!(fs::read(mount.join(&name)).unwrap() == data, "{name}");
        fs::remove_file(mount.join(&name)).unwrap();
        fs.unlink(fs.root(), name.as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    assert_eq!(fs.space_usage().data.used, 0);
    fs.close().unwrap();
    mount.unmount_clean().unwrap();
    for image in [&ours, &theirs] {
        btrfs_check(image, true).assert_clean("all are gone");
    }
}

#[test]
fn a_subvolume_with_many_snapshots() {
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    const SNAP_CREATE_V2: libc::c_ulong = 0x5000_9417;
    const SUBVOL_CREATE: libc::c_ulong = 0x5000_940e;
    let count = SNAPSHOTS * scale();
    let dir = scratch();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    mkfs(&FileDevice::create(&ours, 4 << 30).unwrap(), &MkfsOptions::default()).unwrap();
    mkfs_btrfs::<&str>(&theirs, 4 << 30, &[]).unwrap();
    let fs = open(&ours);
    let root = fs.root();
    let sub = fs.create_subvolume(root, b"sub", &new(FileKind::Directory)).unwrap().id;
    let change = |fs: &Filesystem, sub: InodeId, n: usize| {
        let name = format!("file {}", n % 100);
        let id = match fs.lookup(sub, name.as_bytes()) {
            Ok(found) => found.id,
            Err(_) => fs.create(sub, name.as_bytes(), &new(FileKind::Regular)).unwrap().id,
        };
        fs.write(id, 0, format!("as of snapshot {n}").as_bytes()).unwrap();
    };
    (0..100).for_each(|n| change(&fs, sub, n));
    timed(&format!("{count} snapshots here"), || {
        for n in 0..count {
            change(&fs, sub, n);
            fs.snapshot(sub.subvol, root, format!("snap {n}").as_bytes(), n % 2 == 0).unwrap();
        }
    });
    let mount = KernelMount::image(&theirs, "noatime").unwrap();
    let top = File::open(mount.path()).unwrap();
    let ask = |request: libc::c_ulong, fd: i64, at: usize, name: &str| {
        let mut arg = [0u8; 4096];
        arg[..8].copy_from_slice(&fd.to_ne_bytes());
        arg[at..at + name.len()].copy_from_slice(name.as_bytes());
        // SAFETY: the requests read 4096 bytes.
        assert_eq!(unsafe { libc::ioctl(top.as_raw_fd(), request, arg.as_ptr()) }, 0);
    };
    ask(SUBVOL_CREATE, 0, 8, "sub");
    let their = mount.join("sub");
    let change = |n: usize| {
        fs::write(their.join(format!("file {}", n % 100)), format!("as of snapshot {n}")).unwrap();
    };
    (0..100).for_each(change);
    timed(&format!("{count} snapshots by Linux"), || {
        for n in 0..count {
            change(n);
            let source = File::open(&their).unwrap();
            ask(SNAP_CREATE_V2, source.as_raw_fd().into(), 56, &format!("snap {n}"));
        }
    });
    drop(top);
    let delete = count / 2;
    timed(&format!("{delete} of {count} deleted here and dropped"), || {
        for n in 0..delete {
            fs.delete_subvolume(root, format!("snap {n}").as_bytes()).unwrap();
        }
        fs.wait_for_drops().unwrap();
    });
    let seen = |fs: &Filesystem, snapshot: usize, file: usize| {
        let top = fs.lookup(fs.root(), format!("snap {snapshot}").as_bytes()).unwrap().id;
        let id = fs.lookup(top, format!("file {file}").as_bytes()).unwrap().id;
        let mut buf = [0; 100];
        let n = fs.read(id, 0, &mut buf).unwrap();
        String::from_utf8(buf[..n].to_vec()).unwrap()
    };
    for n in [delete, delete + 17, count - 1] {
        assert_eq!(seen(&fs, n, n % 100), format!("as of snapshot {n}"));
    }
    fs.close().unwrap();
    mount.unmount_clean().unwrap();
    btrfs_check(&ours, true).assert_clean("half of the snapshots are gone");
    let mount = KernelMount::image(&ours, "commit=1").unwrap();
    let n = count - 3;
    let text = fs::read_to_string(mount.join(format!("snap {n}/file {}", n % 100))).unwrap();
    assert_eq!(text, format!("as of snapshot {n}"));
    mount.unmount_clean().unwrap();
}
