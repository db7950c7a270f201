//! Files in images, without a mount.

mod common;

use common::{inside, larder};
use larder_simtest::oracle::{
    Fixture, KernelMount, Need, btrfs_check, mkfs_btrfs, need, populate, scratch,
};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One test at a time: a program that another test starts holds all open files of this process for
/// a moment, and a mount with an open file cannot be unmounted.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn image(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    larder(args!["mkfs", "--size", "256M", "-L", "shelf", &path]).ok();
    path
}

#[track_caller]
fn check(image: &Path) {
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(image, true).assert_clean(&image.display().to_string());
    }
}

#[test]
fn directories_are_made_listed_and_removed() {
    let _alone = alone();
    let dir = scratch();
    let img = image(dir.path(), "a.img");
    larder(args!["mkdir", inside(&img, "/one")]).ok();
    larder(args!["mkdir", inside(&img, "/one")]).fails(1, "-p accepts");
    larder(args!["mkdir", inside(&img, "/x/y/z")]).fails(1, "no such file");
    larder(args!["mkdir", "-p", "-m", "1770", inside(&img, "x/y/z")]).ok();
    larder(args!["mkdir", "-p", inside(&img, "x/y/z")]).ok();
    larder(args!["mkdir", inside(&img, "/")]).fails(1, "no name");
    assert_eq!(larder(args!["ls", &img]).ok().text(), "one\nx\n");
    assert_eq!(larder(args!["ls", inside(&img, "/x/../x//y/.")]).ok().text(), "z\n");
    let long = larder(args!["ls", "-lR", &img]).ok().text();
    assert!(long.contains("drwxrwx--T") && long.contains("\n/x/y:\n"), "{long}");
    let json = larder(args!["ls", "-R", "--json", &img]).ok().json();
    let paths: Vec<&str> =
        json.as_array().unwrap().iter().map(|e| e["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["/one", "/x", "/x/y", "/x/y/z"]);
    larder(args!["ls", inside(&img, "/nothing")]).fails(1, "no such file");
    larder(args!["rm", inside(&img, "/x")]).fails(1, "-r");
    larder(args!["rm", inside(&img, "/nothing")]).fails(1, "no such file");
    larder(args!["rm", "-f", inside(&img, "/nothing")]).ok();
    larder(args!["rm", "-r", inside(&img, "/x"), inside(&img, "/one")]).ok();
    assert_eq!(larder(args!["ls", &img]).ok().text(), "");
    larder(args!["ls", "--subvolid", "4711", &img]).fails(2, "subvolid 5");
    check(&img);
}

#[test]
fn labels_are_shown_and_changed() {
    let _alone = alone();
    let dir = scratch();
    let img = image(dir.path(), "a.img");
    assert_eq!(larder(args!["label", &img]).ok().text(), "shelf\n");
    larder(args!["label", &img, "cellar"]).ok();
    assert_eq!(larder(args!["label", &img]).ok().text(), "cellar\n");
    larder(args!["label", &img, "x".repeat(256)]).fails(2, "255 bytes");
    larder(args!["label", &img, ""]).ok();
    assert_eq!(larder(args!["label", &img]).ok().text(), "\n");
    let df = larder(args!["df", "--json", &img]).ok().json();
    assert_eq!(df["total"], 256u64 << 20);
    assert!(larder(args!["df", &img]).ok().text().contains("256.00MiB"));
    check(&img);
}

/// A tree with a bit of everything that an ordinary user can make.
fn sample(dir: &Path) -> PathBuf {
    let top = dir.join("sample");
    std::fs::create_dir_all(top.join("sub/empty")).unwrap();
    std::fs::write(top.join("hello"), b"hello, world\n").unwrap();
    std::fs::set_permissions(top.join("hello"), PermissionsExt::from_mode(0o640)).unwrap();
    std::fs::hard_link(top.join("hello"), top.join("sub/again")).unwrap();
    std::fs::write(top.join("sub/empty-file"), b"").unwrap();
    let big: Vec<u8> = (0..3_000_000u32).map(|i| (i / 7) as u8 ^ (i >> 12) as u8).collect();
    std::fs::write(top.join("sub/big"), big).unwrap();
    symlink("../hello", top.join("sub/link")).unwrap();
    symlink("/sub/big", top.join("absolute")).unwrap();
    let sparse = std::fs::File::create(top.join("sparse")).unwrap();
    sparse.write_all_at(b"in the middle", 100 << 20).unwrap();
    sparse.set_len(200 << 20).unwrap();
    std::fs::File::open(&top)
        .unwrap()
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(1_234_567_890, 123_456_789))
        .unwrap();
    top
}

#[track_caller]
fn assert_same(a: &Path, b: &Path) {
    let differences = larder_simtest::oracle::tree_compare(a, b).unwrap();
    assert!(differences.is_empty(), "{differences:#?}");
}

#[test]
fn a_tree_goes_in_and_out_and_is_the_same() {
    let _alone = alone();
    let dir = scratch();
    let img = image(dir.path(), "a.img");
    let from = sample(dir.path());
    larder(args!["cp", &from, inside(&img, "/")]).fails(2, "use -r");
    larder(args!["cp", "-r", &from, inside(&img, "/")]).ok();
    check(&img);
    assert_eq!(larder(args!["cat", inside(&img, "/sample/hello")]).ok().text(), "hello, world\n");
    assert_eq!(
        larder(args!["cat", inside(&img, "/sample/sub/link")]).ok().text(),
        "hello, world\n"
    );
    larder(args!["cat", inside(&img, "/sample/sub")]).fails(1, "is a directory");
    larder(args!["cat", inside(&img, "/sample/absolute")]).fails(1, "no such file");
    let back = dir.path().join("back");
    larder(args!["cp", "-r", inside(&img, "/sample"), &back]).ok();
    assert_same(&from, &back);
    assert_eq!(std::fs::metadata(back.join("hello")).unwrap().nlink(), 2);
    assert!(
        std::fs::metadata(back.join("sparse")).unwrap().blocks() * 512 < 1 << 20,
        "holes stay holes"
    );
    let listed = larder(args!["ls", "-l", "--json", inside(&img, "/sample/sparse")]).ok().json();
    assert!(listed[0]["allocated"].as_u64().unwrap() < 1 << 20);
    // A file into a directory, under its own name; onto itself it is replaced.
    std::fs::create_dir(dir.path().join("in")).unwrap();
    for _ in 0..2 {
        larder(args!["cp", inside(&img, "/sample/hello"), dir.path().join("in")]).ok();
    }
    assert_eq!(std::fs::read(dir.path().join("in/hello")).unwrap(), b"hello, world\n");
    larder(args!["cp", inside(&img, "/sample/hello"), dir.path().join("no/where")])
        .fails(2, "not a directory");
    // The content of a directory, not itself.
    larder(args!["mkdir", "-m", "700", inside(&img, "/flat")]).ok();
    let mut content = from.clone().into_os_string();
    content.push("/");
    larder(args!["cp", "-r", content, inside(&img, "/flat")]).ok();
    assert_eq!(
        larder(args!["ls", inside(&img, "/flat")]).ok().text(),
        "absolute\nhello\nsparse\nsub\n"
    );
    let listed = larder(args!["ls", "--json", &img]).ok().json();
    let flat = listed.as_array().unwrap().iter().find(|e| e["name"] == "flat").unwrap();
    assert_eq!((&flat["mtime"], &flat["mtime_nsec"]), (&1_234_567_890.into(), &123_456_789.into()));
    assert_ne!(flat["mode"], "0700", "it has got the source's permissions");
    check(&img);
}

#[test]
fn trees_go_from_image_to_image() {
    let _alone = alone();
    let dir = scratch();
    let (a, b) = (image(dir.path(), "a.img"), image(dir.path(), "b:b.img"));
    let from = sample(dir.path());
    larder(args!["cp", "-r", &from, inside(&a, "/t")]).ok();
    larder(args!["cp", "-r", inside(&a, "/t"), inside(&b, "/u")]).ok();
    // Within one image.
    larder(args!["cp", "-r", inside(&b, "/u"), inside(&b, "/v")]).ok();
    larder(args!["cp", "-r", inside(&b, "/u"), inside(&b, "/u/sub/deep")]).fails(2, "into itself");
    larder(args!["cp", inside(&b, "/u/hello"), inside(&b, "/u/hello")]).fails(2, "into itself");
    check(&a);
    check(&b);
    let back = dir.path().join("back");
    larder(args!["cp", "-r", inside(&b, "/v"), &back]).ok();
    assert_same(&from, &back);
    larder(args!["rm", "-r", inside(&b, "/u")]).ok();
    assert_eq!(larder(args!["ls", &b]).ok().text(), "v\n");
    check(&b);
}

/// Everything that the format can hold, as Linux wrote it, comes out of the image as the kernel
/// shows it, and goes into a new image so that the kernel shows the same again.
#[test]
fn what_linux_wrote_is_copied_faithfully_both_ways() {
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    let _alone = alone();
    let dir = scratch();
    let theirs = dir.path().join("theirs.img");
    mkfs_btrfs(&theirs, 512 << 20, &["-q", "-O", "block-group-tree"]).unwrap();
    let mount = KernelMount::image(&theirs, "").unwrap();
    std::fs::create_dir(mount.join("top")).unwrap();
    populate(&mount.join("top"), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
    let ours = dir.path().join("ours.img");
    larder(args!["mkfs", "--size", "512M", &ours]).ok();
    // From image to image; then the kernel looks at both.
    larder(args!["cp", "-r", inside(&theirs, "/top"), inside(&ours, "/")]).ok();
    check(&ours);
    let (a, b) =
        (KernelMount::image(&theirs, "ro").unwrap(), KernelMount::image(&ours, "ro").unwrap());
    assert_same(&a.join("top"), &b.join("top"));
    // And from the host, where the kernel reads, into a third.
    let third = dir.path().join("third.img");
    larder(args!["mkfs", "--size", "512M", &third]).ok();
    larder(args!["cp", "-r", a.join("top"), inside(&third, "/")]).ok();
    check(&third);
    let c = KernelMount::image(&third, "ro").unwrap();
    assert_same(&a.join("top"), &c.join("top"));
    // Out again, onto the host.
    for m in [b, c] {
        m.unmount_clean().unwrap();
    }
    let out = KernelMount::image(&ours, "").unwrap();
    larder(args!["cp", "-r", inside(&third, "/top"), out.join("again")]).ok();
    assert_same(&a.join("top"), &out.join("again"));
    out.unmount_clean().unwrap();
    a.unmount_clean().unwrap();
}

/// An image that was not unmounted has a log: commands that read show the last commit and say so,
/// mounts and writers replay it, and it can be looked at and dropped.
#[test]
fn an_image_with_a_log() {
    if !need(&[Need::MkfsBtrfs, Need::KernelBtrfs, Need::Fuse]) {
        return;
    }
    let _alone = alone();
    let dir = scratch();
    let (live, crashed) = (dir.path().join("live.img"), dir.path().join("crashed.img"));
    mkfs_btrfs(&live, 256 << 20, &["-q"]).unwrap();
    let mount = KernelMount::image(&live, "commit=300").unwrap();
    std::fs::write(mount.join("committed"), b"yes").unwrap();
    mount.sync().unwrap();
    let file = std::fs::File::create(mount.join("logged")).unwrap();
    file.write_all_at(b"later", 0).unwrap();
    file.sync_all().unwrap();
    larder(args!["ls", &live]).fails(2, "the kernel has it mounted");
    larder(args!["mkfs", "--force", &live]).fails(2, "the kernel has it mounted");
    std::fs::copy(&live, &crashed).unwrap();
    drop(file);
    mount.unmount_clean().unwrap();
    let listed = larder(args!["ls", &crashed]).ok();
    assert_eq!(listed.text(), "committed\n");
    assert!(listed.err.contains("has a log"), "{}", listed.err);
    assert!(larder(args!["inspect", "super", "--json", &crashed]).ok().json()[0]["log_root"] != 0);
    let log = larder(args!["inspect", "log", &crashed]).ok();
    assert!(
        log.text().contains("log of subvolume 5") && log.text().contains("logged"),
        "{}",
        log.text()
    );
    assert_eq!(larder(args!["inspect", "log", "--json", &crashed]).ok().json()[0]["subvolume"], 5);
    let dropped = dir.path().join("dropped.img");
    std::fs::copy(&crashed, &dropped).unwrap();
    let told = larder(args!["rescue", "zero-log", &dropped]).fails(2, "--force");
    assert!(told.text().contains("(logged): 5 bytes of data"), "{}", told.text());
    assert_eq!(std::fs::read(&dropped).unwrap(), std::fs::read(&crashed).unwrap());
    larder(args!["rescue", "zero-log", "--force", &dropped]).ok();
    btrfs_check(&dropped, true).assert_clean("without its log");
    let listed = larder(args!["ls", &dropped]).ok();
    assert_eq!((listed.text().as_str(), listed.err.as_str()), ("committed\n", ""));
    assert!(larder(args!["inspect", "log", &dropped]).ok().text().contains("no log"));

    let before = std::fs::read(&crashed).unwrap();
    let point = dir.path().join("mnt");
    std::fs::create_dir(&point).unwrap();
    larder_simtest::oracle::enter_private_namespace().unwrap();
    let mounted = |options: &str| {
        larder(args!["mount", "-o", options, &crashed, &point]).ok();
        let shown = std::fs::read_dir(&point).unwrap().count();
        larder(args!["umount", &point]).ok();
        shown
    };
    assert_eq!((mounted("ro,nologreplay"), mounted("ro")), (1, 2));
    assert_eq!(std::fs::read(&crashed).unwrap(), before, "a read-only mount wrote");
    assert_eq!(mounted("rw"), 2);
    larder(args!["mkdir", inside(&crashed, "/d")]).ok();
    assert_eq!(larder(args!["cat", inside(&crashed, "/logged")]).ok().text(), "later");
    btrfs_check(&crashed, true).assert_clean("replayed");
}
