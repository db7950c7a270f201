//! `larder dedupe` and `larder du`, in images and on mounts.

mod common;

use common::{command, inside, larder};
use larder_simtest::oracle::{
    KernelMount, Need, btrfs, btrfs_check, enter_private_namespace, mkfs_btrfs, need, scratch,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[track_caller]
fn check(image: &Path) {
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(image, true).assert_clean(&image.display().to_string());
    }
}

/// Bytes that do not repeat.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Bytes of data that the file system has in use.
fn used(target: impl AsRef<std::ffi::OsStr>) -> u64 {
    let json = larder(args!["df", "--json", target.as_ref()]).ok().json();
    json["space"]["data"]["used"].as_u64().unwrap()
}

/// Trees with much in common: whole files, parts at block borders, tails. Also files that differ by
/// one byte, data in leaves, and holes.
fn fill(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let a = noise(1, 3_000_001);
    let mut other = a.clone();
    other[2_500_000] ^= 1;
    let mut part = noise(2, 1 << 20);
    part.extend_from_slice(&a[1 << 20..2 << 20]);
    part.extend_from_slice(&noise(3, 70_000));
    let mut twice = noise(4, 1 << 20);
    twice.extend_from_within(..);
    for (name, data) in [
        ("a", a.clone()),
        ("copy", a.clone()),
        ("other", other),
        ("part", part),
        ("twice", twice),
        ("short", a[..5000].to_vec()),
        ("short too", a[..5000].to_vec()),
        ("leaf", a[..1000].to_vec()),
        ("leaf too", a[..1000].to_vec()),
        ("empty", Vec::new()),
    ] {
        fs::write(dir.join(name), &data).unwrap();
        files.insert(name.to_owned(), data);
    }
    let holes = fs::File::create(dir.join("hole")).unwrap();
    holes.set_len(1 << 20).unwrap();
    files.insert("hole".to_owned(), vec![0; 1 << 20]);
    files
}

/// Bytes that can be saved: by whole blocks of 128 KiB, and tails.
const SAVED: u64 = {
    let block = 128 << 10;
    // The copy; all blocks but one of what differs by a byte, its tail too; a megabyte of the part,
    // and half of what is there twice; the second short one.
    let a: u64 = 3_000_001;
    a + (a - block) + (1 << 20) + (1 << 20) + 5000
};

#[track_caller]
fn number(json: &Value, key: &str) -> u64 {
    json[key].as_u64().unwrap_or_else(|| panic!("{key} in {json}"))
}

#[test]
fn equal_blocks_of_an_image_are_shared() {
    let dir = scratch();
    let (img, tree) = (dir.path().join("a.img"), dir.path().join("tree"));
    fs::create_dir(&tree).unwrap();
    let files = fill(&tree);
    larder(args!["mkfs", "--size", "256M", &img]).ok();
    larder(args!["cp", "-r", &tree, inside(&img, "/")]).ok();
    let before = used(&img);
    let top = inside(&img, "/tree");
    let tried = larder(args!["dedupe", "--dry-run", "--json", &top]).ok().json();
    assert_eq!(used(&img), before);
    // Little memory: the files are read several times, with the same result.
    let done = larder(args!["dedupe", "--memory", "1K", "--json", &top]).ok().json();
    assert_eq!(number(&done, "refused") + number(&done, "failed"), 0, "{done}");
    assert!(number(&done, "read") > 2 * number(&tried, "read"), "{done}");
    let shared = number(&done, "shared");
    assert!((SAVED..SAVED + 20_000).contains(&shared), "{shared} of {SAVED}");
    assert_eq!(
        number(&tried, "shared").next_multiple_of(4096) / 20_000,
        shared / 20_000,
        "{tried}"
    );
    let freed = before - used(&img);
    // Of the extents of others a part is still used.
    assert!((3_000_000..SAVED + 20_000).contains(&freed), "{freed} of {SAVED}");
    check(&img);
    let again = larder(args!["dedupe", "--json", &top]).ok().json();
    assert_eq!((number(&again, "shared"), number(&again, "ranges")), (0, 0), "{again}");
    for (name, data) in files {
        assert!(
            larder(args!["cat", inside(&img, &format!("/tree/{name}"))]).ok().out == data,
            "{name}"
        );
    }
    larder(args!["dedupe", "--block-size", "5K", &top]).fails(2, "power of two");
    larder(args!["dedupe", inside(&img, "/nix")]).fails(1, "no such file");
}

struct Unmount<'a>(&'a Path);
impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        // Nothing is mounted any more after a test that ended well.
        drop(command().arg("umount").arg(self.0).output());
    }
}

#[test]
fn equal_blocks_on_a_mount_are_shared() {
    if !need(&[Need::Fuse, Need::Root, Need::KernelBtrfs]) {
        return;
    }
    enter_private_namespace().unwrap();
    let dir = scratch();
    let (img, mnt) = (dir.path().join("a.img"), dir.path().join("mnt"));
    fs::create_dir(&mnt).unwrap();
    larder(args!["mkfs", "--size", "256M", &img]).ok();
    larder(args!["mount", &img, &mnt]).ok();
    let unmount = Unmount(&mnt);
    let files = fill(&mnt);
    let times = |name: &str| mnt.join(name).metadata().unwrap().modified().unwrap();
    let before: Vec<_> = files.keys().map(|n| times(n)).collect();
    larder(args!["sync", &mnt]).ok();
    let full = used(&mnt);
    let done = larder(args!["dedupe", "--json", &mnt]).ok().json();
    let shared = number(&done, "shared");
    assert!((SAVED..SAVED + 20_000).contains(&shared), "{shared} of {SAVED}: {done}");
    assert_eq!(number(&done, "files"), 11);
    larder(args!["sync", &mnt]).ok();
    assert!(full - used(&mnt) > 3_000_000, "{} of {full}", used(&mnt));
    assert_eq!(files.keys().map(|n| times(n)).collect::<Vec<_>>(), before);
    for (name, data) in &files {
        assert!(fs::read(mnt.join(name)).unwrap() == *data, "{name}");
    }
    let text = larder(args!["dedupe", mnt.join("a"), mnt.join("copy")]).ok().text();
    assert!(text.contains("0B in 0 ranges shared"), "{text}");
    larder(args!["dedupe", dir.path()]).fails(2, "not on a Larder mount");
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    check(&img);
    let kernel = KernelMount::image_read_only(&img, "").unwrap();
    for (name, data) in &files {
        assert!(fs::read(kernel.join(name)).unwrap() == *data, "{name}");
    }
    kernel.unmount_clean().unwrap();
}

/// Total, exclusive and shared, as `btrfs filesystem du` has it.
fn kernel_du(path: &Path) -> (u64, u64, u64) {
    let out = btrfs(&["filesystem", "du", "-s", "--raw", path.to_str().unwrap()]).unwrap();
    let line = out.lines().last().unwrap();
    let mut words = line.split_whitespace().map(|w| w.parse().unwrap_or(0));
    (words.next().unwrap(), words.next().unwrap(), words.next().unwrap())
}

fn larder_du(path: impl AsRef<std::ffi::OsStr>) -> (u64, u64, u64) {
    let json = larder(args!["du", "--json", path.as_ref()]).ok().json();
    let one = &json.as_array().unwrap()[0];
    (number(one, "total"), number(one, "exclusive"), number(one, "shared"))
}

#[test]
fn who_uses_what_is_as_linux_has_it() {
    if !need(&[Need::Fuse, Need::Root, Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    enter_private_namespace().unwrap();
    let dir = scratch();
    let (img, mnt) = (dir.path().join("a.img"), dir.path().join("mnt"));
    fs::create_dir(&mnt).unwrap();
    mkfs_btrfs::<&str>(&img, 256 << 20, &[]).unwrap();
    let kernel = KernelMount::image(&img, "").unwrap();
    let text = |p: &str| kernel.join(p).to_str().unwrap().to_owned();
    for sub in ["sub", "alone"] {
        btrfs(&["subvolume", "create", &text(sub)]).unwrap();
        fs::create_dir(kernel.join(sub).join("dir")).unwrap();
        for n in 0..40 {
            fs::write(kernel.join(format!("{sub}/dir/{n}")), noise(n, 3000 + 5000 * n as usize))
                .unwrap();
        }
        fs::write(kernel.join(format!("{sub}/large")), noise(99, 4 << 20)).unwrap();
    }
    fs::hard_link(kernel.join("alone/large"), kernel.join("alone/linked")).unwrap();
    let copy = |from: &str, to: &str| {
        let mut cp = std::process::Command::new("cp");
        assert!(cp.args(["--reflink=always", &text(from), &text(to)]).status().unwrap().success());
    };
    copy("alone/large", "alone/dir/clone");
    copy("alone/dir/7", "loose");
    kernel.sync().unwrap();
    btrfs(&["subvolume", "snapshot", &text("sub"), &text("snap")]).unwrap();
    for n in 0..10 {
        fs::write(kernel.join(format!("snap/dir/{n}")), noise(200 + n, 50_000)).unwrap();
        fs::remove_file(kernel.join(format!("sub/dir/{}", n + 20))).unwrap();
    }
    kernel.sync().unwrap();
    let paths =
        ["sub", "snap", "alone", "alone/dir", "alone/dir/7", "alone/dir/8", "sub/large", "loose"];
    let theirs: Vec<_> = paths.iter().map(|p| kernel_du(&kernel.join(p))).collect();
    kernel.unmount_clean().unwrap();
    assert!(theirs.iter().filter(|t| t.1 > 0 && t.2 > 0).count() > 3, "{theirs:?}");
    let image: Vec<_> = paths.iter().map(|p| larder_du(inside(&img, &format!("/{p}")))).collect();
    for ((path, ours), theirs) in paths.iter().zip(image).zip(&theirs) {
        assert_eq!(ours, *theirs, "{path} in the image");
    }
    larder(args!["mount", &img, &mnt]).ok();
    let unmount = Unmount(&mnt);
    for (path, theirs) in paths.iter().zip(&theirs) {
        assert_eq!(larder_du(mnt.join(path)), *theirs, "{path} on the mount");
    }
    let text = larder(args!["du", "--bytes", "--depth", "1", mnt.join("alone")]).ok().text();
    assert_eq!(text.lines().count(), 5, "{text}");
    let last: Vec<_> = text.lines().last().unwrap().split_whitespace().map(str::to_owned).collect();
    let alone = theirs[2];
    assert_eq!(last[..3], [alone.0.to_string(), alone.1.to_string(), alone.2.to_string()]);
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
}
