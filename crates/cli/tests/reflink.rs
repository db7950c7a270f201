//! `larder reflink`, and plain `cp` on a mount.

mod common;

use common::{command, inside, larder};
use larder_fuse::sharing::{FileAt, clone};
use larder_simtest::oracle::{
    KernelMount, Need, btrfs_check, enter_private_namespace, need, scratch,
};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

#[track_caller]
fn check(image: &Path) {
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(image, true).assert_clean(&image.display().to_string());
    }
}

fn start(file: &fs::File) -> FileAt<'_> {
    FileAt { file, offset: 0 }
}

fn data(len: u32) -> Vec<u8> {
    (0..len).map(|n| (n / 5 % 253) as u8).collect()
}

/// Bytes of data that the file system has in use.
fn used(target: impl AsRef<std::ffi::OsStr>) -> u64 {
    let json = larder(args!["df", "--json", target.as_ref()]).ok().json();
    json["space"]["data"]["used"].as_u64().unwrap_or_else(|| panic!("{json}"))
}

#[test]
fn in_an_image() {
    let dir = scratch();
    let img = dir.path().join("a.img");
    let at = |path: &str| inside(&img, path);
    let (a, out) = (dir.path().join("a"), dir.path().join("out"));
    fs::write(&a, data(3_000_001)).unwrap();
    larder(args!["mkfs", "--size", "256M", &img]).ok();
    larder(args!["cp", &a, at("/a")]).ok();
    let before = used(&img);
    larder(args!["reflink", at("/a"), at("/b")]).ok();
    larder(args!["mkdir", at("/d")]).ok();
    larder(args!["reflink", at("/a"), at("/d")]).ok();
    larder(args!["reflink", "--range", "1M+64K@0", "--range", "4K+4K@1M", at("/a"), at("/c")]).ok();
    assert_eq!(used(&img), before, "nothing was copied");
    for path in ["/b", "/d/a"] {
        larder(args!["cp", at(path), &out]).ok();
        assert!(fs::read(&out).unwrap() == data(3_000_001));
        fs::remove_file(&out).unwrap();
    }
    larder(args!["cp", at("/c"), &out]).ok();
    let c = fs::read(&out).unwrap();
    let all = data(3_000_001);
    assert!(
        c.len() == (1 << 20) + 4096
            && c[..65536] == all[1 << 20..][..65536]
            && c[1 << 20..] == all[4096..8192]
    );
    assert!(c[65536..1 << 20].iter().all(|b| *b == 0));
    // A file that exists becomes equal to its source, and no longer.
    larder(args!["reflink", at("/c"), at("/b")]).ok();
    assert_eq!(larder(args!["cat", at("/b")]).ok().out, c);
    larder(args!["reflink", "--range", "1+4K", at("/a"), at("/b")]).fails(1, "--help");
    larder(args!["reflink", "--range", "4K", at("/a"), at("/b")]).fails(2, "FROM+LENGTH");
    larder(args!["reflink", at("/a"), at("/a")]).fails(2, "already");
    larder(args!["reflink", at("/nix"), at("/b")]).fails(1, "no such file");
    larder(args!["reflink", at("/d"), at("/b")]).fails(1, "not a regular file");
    larder(args!["reflink", &a, at("/b")]).fails(2, "one image");
    check(&img);
}

struct Unmount<'a>(&'a Path);
impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        // Nothing is mounted any more after a test that ended well.
        drop(command().arg("umount").arg(self.0).output());
    }
}

#[test]
fn on_a_mount() {
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
    let at = |path: &str| mnt.join(path);
    fs::write(at("a"), data(5_000_000)).unwrap();
    larder(args!["sync", &mnt]).ok();
    let before = used(&mnt);
    // The kernel has read it, and must not show that afterwards.
    fs::write(at("old"), vec![7; 20_000]).unwrap();
    assert_eq!(fs::read(at("old")).unwrap()[0], 7);
    larder(args!["reflink", at("a"), at("old")]).ok();
    assert!(fs::read(at("old")).unwrap() == data(5_000_000));
    assert_eq!(at("old").metadata().unwrap().size(), 5_000_000);
    larder(args!["reflink", "--range", "8K+8K@0", at("a"), at("part")]).ok();
    assert!(fs::read(at("part")).unwrap() == data(5_000_000)[8192..16384]);
    fs::set_permissions(at("a"), fs::Permissions::from_mode(0o640)).unwrap();
    larder(args!["reflink", at("a"), at("new")]).ok();
    assert_eq!(at("new").metadata().unwrap().mode() & 0o777, 0o640);
    for n in 0..5 {
        let copy = at(&format!("copy {n}"));
        assert!(
            std::process::Command::new("cp").arg(at("a")).arg(&copy).status().unwrap().success()
        );
        assert!(fs::read(&copy).unwrap() == data(5_000_000));
    }
    larder(args!["sync", &mnt]).ok();
    assert_eq!(used(&mnt), before, "nothing was copied");
    larder(args!["reflink", "--range", "1+8K", at("a"), at("part")]).fails(1, "--help");
    larder(args!["reflink", img.as_path(), at("part").as_path()]).fails(1, "cross");
    // Whatever the descriptor was opened for: permissions are what counts.
    let source = fs::OpenOptions::new().write(true).open(at("a")).unwrap();
    let target = fs::File::create(at("other")).unwrap();
    clone(start(&source), start(&target), 0).unwrap();
    let mine = fs::File::open(&img).unwrap();
    let e = clone(start(&mine), start(&target), 0).unwrap_err();
    assert_eq!(e.raw_os_error(), Some(libc::EXDEV));
    drop((source, target));
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    check(&img);
    let kernel = KernelMount::image(&img, "").unwrap();
    for name in ["a", "old", "new", "copy 3", "other"] {
        assert!(fs::read(kernel.join(name)).unwrap() == data(5_000_000), "{name}");
        fs::remove_file(kernel.join(name)).unwrap();
    }
    assert!(fs::read(kernel.join("copy 4")).unwrap() == data(5_000_000));
    kernel.unmount_clean().unwrap();
    check(&img);
}

/// What `btrfs subvolume snapshot` sends: the source is a descriptor of the caller.
#[test]
fn a_snapshot_by_descriptor() {
    if !need(&[Need::Fuse, Need::Root]) {
        return;
    }
    const SNAP_CREATE_V2: libc::c_ulong = 0x5000_9417;
    enter_private_namespace().unwrap();
    let dir = scratch();
    let (img, mnt) = (dir.path().join("a.img"), dir.path().join("mnt"));
    fs::create_dir(&mnt).unwrap();
    larder(args!["mkfs", "--size", "256M", &img]).ok();
    larder(args!["mount", &img, &mnt]).ok();
    let unmount = Unmount(&mnt);
    larder(args!["subvolume", "create", mnt.join("sub")]).ok();
    fs::write(mnt.join("sub/file"), b"content").unwrap();
    let (source, top) = (fs::File::open(mnt.join("sub")).unwrap(), fs::File::open(&mnt).unwrap());
    let take = |fd: i64, flags: u64, name: &str| {
        let mut arg = [0u8; 4096];
        arg[..8].copy_from_slice(&fd.to_ne_bytes());
        arg[16..24].copy_from_slice(&flags.to_ne_bytes());
        arg[56..56 + name.len()].copy_from_slice(name.as_bytes());
        // SAFETY: the request reads 4096 bytes.
        match unsafe { libc::ioctl(top.as_raw_fd(), SNAP_CREATE_V2, arg.as_ptr()) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
        }
    };
    take(source.as_raw_fd().into(), 0, "snap").unwrap();
    take(source.as_raw_fd().into(), 2, "frozen").unwrap();
    let inside = fs::File::open(mnt.join("sub/file")).unwrap();
    assert_eq!(take(inside.as_raw_fd().into(), 0, "no"), Err(libc::EINVAL));
    assert_eq!(take(-1, 0, "no"), Err(libc::EBADF));
    assert_eq!(take(9999, 0, "no"), Err(libc::EBADF));
    let outside = fs::File::open(dir.path()).unwrap();
    assert_eq!(take(outside.as_raw_fd().into(), 0, "no"), Err(libc::EXDEV));
    fs::write(mnt.join("snap/file"), b"changed").unwrap();
    assert_eq!(fs::read(mnt.join("sub/file")).unwrap(), b"content");
    assert_eq!(
        fs::write(mnt.join("frozen/file"), b"no").unwrap_err().raw_os_error(),
        Some(libc::EROFS)
    );
    drop((source, top, inside));
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    check(&img);
}
