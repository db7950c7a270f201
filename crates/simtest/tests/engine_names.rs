//! Names under load: several threads make, link, rename and remove entries in subvolumes that share
//! their blocks with snapshots, while commits run; then the kernel and `btrfs check` have their
//! say, and the kernel sees what we saw.

use larder_fs::{
    Error, FileKind, Filesystem, InodeId, NewInode, OpenOptions, RenameMode, XattrMode,
};
use larder_simtest::oracle::{
    self, Fixture, KernelMount, Need, kernel_images, kernel_verdict, populate, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

fn open(image: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn find(fs: &Filesystem, path: &str) -> InodeId {
    let mut id = fs.root();
    for name in path.split('/').filter(|n| !n.is_empty()) {
        id = fs.lookup(id, name.as_bytes()).unwrap().id;
    }
    id
}

/// Refusals that races between the threads explain.
fn race(e: &Error) -> bool {
    matches!(
        e,
        Error::NotFound
            | Error::Exists
            | Error::NotEmpty
            | Error::IsDirectory
            | Error::NotDirectory
            | Error::NotPermitted(_)
            | Error::Invalid(_)
            | Error::TooManyLinks
            | Error::CrossSubvolume
            | Error::Overflow
            | Error::NoAttribute
            | Error::Busy(_)
    )
}

fn churn(fs: &Filesystem, tops: &[InodeId], seed: u64, steps: u32) {
    let mut rng = SmallRng::seed_from_u64(seed);
    for _ in 0..steps {
        let dir = tops[rng.random_range(0..tops.len())];
        let to = tops[rng.random_range(0..tops.len())];
        let mut name = || format!("n{}", rng.random_range(0..400u32)).into_bytes();
        let (a, b) = (name(), name());
        let kind = [FileKind::Regular, FileKind::Directory, FileKind::Symlink, FileKind::Fifo]
            [rng.random_range(0..4)];
        let target: &[u8] = if kind == FileKind::Symlink { b"somewhere" } else { b"" };
        let new = NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target, xattrs: &[] };
        let done = match rng.random_range(0..12u32) {
            0..=3 => fs.create(dir, &a, &new).map(drop),
            4 => fs.lookup(dir, &a).and_then(|f| fs.link(f.id, to, &b)).map(drop),
            5 | 6 => fs.unlink(dir, &a),
            7 => fs.rmdir(dir, &a),
            8 => fs.rename(dir, &a, to, &b, RenameMode::Replace),
            9 => fs.rename(dir, &a, to, &b, RenameMode::Exchange),
            10 => fs.lookup(dir, &a).and_then(|f| {
                let value = vec![7; rng.random_range(0..2000)];
                fs.setxattr(f.id, b"trusted.x", &value, XattrMode::Set)
            }),
            _ => {
                if rng.random_ratio(1, 20) {
                    fs.sync()
                } else {
                    fs.rename(dir, &a, to, &b, RenameMode::NoReplace)
                }
            }
        };
        if let Err(e) = done {
            assert!(race(&e), "{e}");
        }
    }
}

fn names(fs: &Filesystem, dir: InodeId) -> BTreeSet<Vec<u8>> {
    let mut out = BTreeSet::new();
    fs.readdir(dir, 0, &mut |e| {
        out.insert(e.name.to_vec());
        true
    })
    .unwrap();
    out.remove(&b"."[..]);
    out.remove(&b".."[..]);
    out
}

#[test]
fn names_change_under_load_beside_snapshots() {
    if !oracle::need(&[Need::KernelBtrfs, Need::MkfsBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    for (n, variant) in kernel_images().into_iter().enumerate() {
        let image = dir.path().join(&variant.name);
        variant.make(&image, 256 << 20).unwrap();
        let mount = KernelMount::image(&image, &variant.mount).unwrap();
        populate(mount.path(), &Fixture::small()).unwrap();
        mount.unmount_clean().unwrap();
        let fs = open(&image);
        let tops = ["", "volumes/origin", "volumes/copy", "volumes/copy-of-copy", "many"]
            .map(|p| find(&fs, p));
        std::thread::scope(|s| {
            for t in 0..4 {
                let (fs, tops) = (&fs, &tops);
                s.spawn(move || churn(fs, tops, n as u64 * 10 + t, 1500));
            }
        });
        let shown: Vec<_> = tops.iter().map(|t| names(&fs, *t)).collect();
        fs.close().unwrap();
        drop(fs);
        let mount = KernelMount::image_read_only(&image, "noatime").unwrap();
        for (path, shown) in
            ["", "volumes/origin", "volumes/copy", "volumes/copy-of-copy", "many"].iter().zip(shown)
        {
            let there: BTreeSet<Vec<u8>> = std::fs::read_dir(mount.join(path))
                .unwrap()
                .map(|e| std::os::unix::ffi::OsStringExt::into_vec(e.unwrap().file_name()))
                .collect();
            assert_eq!(there, shown, "{}: /{path}", variant.name);
        }
        mount.unmount_clean().unwrap();
        if let Err(e) = kernel_verdict(&image) {
            panic!("{}: {e:#}", variant.name);
        }
        std::fs::remove_file(&image).unwrap();
    }
}
