//! The oracle itself: images, mounts, fixture, comparison and check tell the truth.

use larder_simtest::oracle::{
    Aspects, DeviceSet, Fixture, KernelMount, LoopDevice, Need, StdTree, btrfs_check,
    compare_sources, dump_tree, kernel_images, manifest, mkfs_btrfs, need, populate, scratch,
    tree_compare,
};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

/// Makes an image of 256 MiB with the small fixture in it and unmounts it.
fn fixture_image(path: &Path, mkfs: &[&str], options: &str) {
    mkfs_btrfs(path, 256 * MIB, mkfs).unwrap();
    let mount = KernelMount::image(path, options).unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
}

#[test]
fn fixture_holds_every_representation_of_the_format() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("fixture.img");
    fixture_image(&image, &["-O", "block-group-tree"], "");
    btrfs_check(&image, true).assert_clean("fixture");
    let dump = dump_tree(&image, &[]).unwrap();
    for (what, mark) in [
        ("inline extent", "(inline)"),
        ("preallocated extent", "(prealloc)"),
        ("zlib", "extent compression 1 (zlib)"),
        ("lzo", "extent compression 2 (lzo)"),
        ("zstd", "extent compression 3 (zstd)"),
        ("compressed inline", "inline extent data size 1500"),
        ("extref", "INODE_EXTREF"),
        ("free-space bitmaps", "FREE_SPACE_BITMAP"),
        ("free-space extents", "FREE_SPACE_EXTENT"),
        ("block-group tree", "block group tree key"),
        ("shared data ref", "shared data backref"),
        ("full backref", "FULL_BACKREF"),
        ("read-only subvolume", "flags 0x1(RDONLY)"),
        ("nodatacow", "NODATACOW"),
        ("ACL", "system.posix_acl_default"),
        ("orphan or dropped snapshot's siblings", "ROOT_BACKREF"),
    ] {
        assert!(dump.contains(mark), "the fixture has no {what} ({mark:?})");
    }
    // Sixteen colliding names in one item.
    let dir_items: Vec<&str> = dump.split("DIR_ITEM").collect();
    let most = dir_items
        .iter()
        .map(|item| item.split("\titem ").next().unwrap().matches("name: ").count())
        .max();
    assert!(most.is_some_and(|m| m >= 16), "at most {most:?} names share a directory item");
}

#[test]
fn every_kind_of_image_takes_the_fixture_and_checks_clean() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    for variant in kernel_images() {
        let image = dir.path().join(&variant.name);
        variant.make(&image, 256 * MIB).unwrap();
        let mount = KernelMount::image(&image, &variant.mount).expect(&variant.name);
        populate(mount.path(), &Fixture::small()).expect(&variant.name);
        mount.unmount_clean().expect(&variant.name);
        btrfs_check(&image, true).assert_clean(&variant.name);
        std::fs::remove_file(&image).unwrap();
    }
}

/// A difference as it is reported, and the change that makes it.
type Change = (&'static str, fn(&Path));

const CHANGES: [Change; 12] = [
    ("regular/4097: contents differ from byte 4096 on", change_a_byte),
    ("modes/mode-0644: mode 644 and 645", |top| {
        let mode = PermissionsExt::from_mode(0o645);
        std::fs::set_permissions(top.join("modes/mode-0644"), mode).unwrap();
    }),
    ("inline/100: owner 0 and 7", |top| {
        std::os::unix::fs::chown(top.join("inline/100"), Some(7), None).unwrap();
    }),
    ("modes/epoch: mtime (0, 0) and (0, 1)", |top| {
        let later = std::time::UNIX_EPOCH + std::time::Duration::from_nanos(1);
        writable(&top.join("modes/epoch")).set_modified(later).unwrap();
    }),
    ("links/dir1/b: link to Some(\"links/dir0/a\") and None", |top| {
        // The same bytes and times under the name, but another inode.
        let (path, copy) = (top.join("links/dir1/b"), top.join("links/dir1/copy"));
        let copied = Command::new("cp").arg("-a").arg(&path).arg(&copy).status().unwrap();
        assert!(copied.success());
        std::fs::rename(copy, path).unwrap();
    }),
    ("xattr/file: xattr user.number3 has two values", |top| {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(top.join("xattr/file"), "user.number3", b"planted", flags).unwrap();
    }),
    ("xattr/acl-dir: xattr system.posix_acl_default only in the first tree", |top| {
        let path = top.join("xattr/acl-dir");
        rustix::fs::removexattr(path, "system.posix_acl_default").unwrap();
    }),
    ("special/symlink: target target and other", |top| {
        std::fs::remove_file(top.join("special/symlink")).unwrap();
        std::os::unix::fs::symlink("other", top.join("special/symlink")).unwrap();
    }),
    ("special/fifo: type Fifo and Regular", |top| {
        std::fs::remove_file(top.join("special/fifo")).unwrap();
        std::fs::write(top.join("special/fifo"), b"").unwrap();
    }),
    ("names/deep/0/1/extra: only in the second tree", |top| {
        std::fs::write(top.join("names/deep/0/1/extra"), b"").unwrap();
    }),
    ("volumes/copy/new3: only in the first tree", |top| {
        std::fs::remove_file(top.join("volumes/copy/new3")).unwrap();
    }),
    ("sparse/only-a-hole: size 10485760 and 10485761", |top| {
        writable(&top.join("sparse/only-a-hole")).set_len((10 << 20) + 1).unwrap();
    }),
];

fn writable(path: &Path) -> std::fs::File {
    std::fs::File::options().read(true).write(true).open(path).unwrap()
}

/// Changes one byte of a file, and nothing else.
fn change_a_byte(top: &Path) {
    let file = writable(&top.join("regular/4097"));
    let mtime = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 4096).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 4096).unwrap();
    file.set_modified(mtime).unwrap();
}

#[test]
fn a_copy_compares_equal_and_every_planted_difference_is_found() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("a.img");
    fixture_image(&image, &[], "");
    let other = dir.path().join("b.img");
    mkfs_btrfs(&other, 256 * MIB, &["--csum", "xxhash"]).unwrap();
    let a = KernelMount::image(&image, "noatime").unwrap();
    // GNU cp gives up on a file of 2^63 - 1 bytes.
    std::fs::remove_file(a.join("sparse/huge")).unwrap();
    let b = KernelMount::image(&other, "").unwrap();
    let copied = Command::new("cp").arg("-a").arg(a.join(".")).arg(b.path()).output().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    assert_eq!(tree_compare(a.path(), b.path()).unwrap(), []);

    for (_, change) in CHANGES {
        change(b.path());
    }
    let found: Vec<String> =
        tree_compare(a.path(), b.path()).unwrap().iter().map(ToString::to_string).collect();
    for (expected, _) in CHANGES {
        assert!(
            found.iter().any(|f| f == &format!("/{expected}")),
            "not found: {expected}\nfound: {found:#?}"
        );
    }
    b.unmount().unwrap();
    a.unmount_clean().unwrap();
}

#[test]
fn two_mounts_of_one_image_agree_in_every_aspect() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("a.img");
    fixture_image(&image, &[], "");
    let copy = dir.path().join("b.img");
    std::fs::copy(&image, &copy).unwrap();
    let a = KernelMount::image_read_only(&image, "").unwrap();
    let b = KernelMount::image_read_only(&copy, "").unwrap();
    let aspects = Aspects { atime: true, ..Aspects::same_image() };
    let differences =
        compare_sources(&StdTree::new(a.path()), &StdTree::new(b.path()), aspects).unwrap();
    assert_eq!(differences, []);
    let tree = manifest(&StdTree::new(a.path())).unwrap();
    assert!(tree.entries.len() > 1200, "{} entries", tree.entries.len());
    let huge = &tree.entries[&b"sparse/huge"[..]];
    assert!(huge.facts.size > i64::MAX.cast_unsigned() - 8192);
    assert!(huge.data_map.len() >= 3, "{:?}", huge.data_map);
    assert!(
        tree.to_string().lines().any(|l| l.starts_with("/special/large-numbers BlockDevice 640")
            && l.contains("rdev=259:70000"))
    );
    a.unmount_clean().unwrap();
    b.unmount_clean().unwrap();
}

#[test]
fn damage_is_reported_by_the_check_and_by_the_kernel() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("damaged.img");
    mkfs_btrfs(&image, 128 * MIB, &["-m", "single"]).unwrap();
    let mount = KernelMount::image(&image, "").unwrap();
    let data: Vec<u8> = (0..200_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(mount.join("file"), &data).unwrap();
    mount.unmount_clean().unwrap();
    btrfs_check(&image, true).assert_clean("before the damage");

    // The first bytes of the file, wherever they lie on the device.
    let bytes = std::fs::read(&image).unwrap();
    let at =
        bytes.windows(64).position(|w| w == &data[..64]).expect("the file's data is in the image");
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(&[0xff], at as u64).unwrap();
    drop(file);
    assert!(btrfs_check(&image, false).is_clean(), "without reading data the damage is not seen");
    let report = btrfs_check(&image, true);
    assert!(!report.is_clean() && !report.complaints.is_empty(), "{report}");

    let mut mount = KernelMount::image(&image, "").unwrap();
    assert_eq!(std::fs::read(mount.join("file")).unwrap_err().raw_os_error(), Some(libc::EIO));
    let complaints = mount.complaints();
    assert!(complaints.iter().any(|c| c.contains("csum failed")), "{complaints:?}");
    drop(mount);

    // A superblock that does not match its checksum is refused, and the reason is in the error.
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(&[0xff; 8], 65_536 + 0x70).unwrap();
    drop(file);
    let refused = KernelMount::image(&image, "").unwrap_err();
    assert!(refused.to_string().contains("the kernel refuses the mount"), "{refused:#}");
    assert!(!btrfs_check(&image, false).is_clean());
}

#[test]
fn a_mount_in_use_is_reported_and_what_is_dropped_leaves_nothing() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("a.img");
    mkfs_btrfs(&image, 128 * MIB, &[] as &[&str]).unwrap();
    let device = LoopDevice::attach(&image).unwrap();
    let node = device.path().to_owned();
    assert!(!device.is_claimed().unwrap());
    let mount = KernelMount::device(device, "").unwrap();
    assert!(mount.loop_device().is_claimed().unwrap());
    let mounts = std::fs::read_to_string("/proc/thread-self/mounts").unwrap();
    assert!(mounts.contains(mount.path().to_str().unwrap()));
    // Nobody else sees it.
    let elsewhere = std::fs::read_to_string("/proc/1/mounts").unwrap();
    assert!(!elsewhere.contains(mount.path().to_str().unwrap()));
    let open = std::fs::File::create(mount.join("open")).unwrap();
    let error = mount.unmount().unwrap_err();
    assert!(format!("{error:#}").contains("cannot be unmounted"), "{error:#}");
    drop(open);
    // Autoclear has detached it: attached again, it would have to have our file behind it.
    let number = node.file_name().unwrap().to_str().unwrap().to_owned();
    let backing = std::fs::read_to_string(format!("/sys/block/{number}/loop/backing_file"))
        .unwrap_or_default();
    assert!(!backing.contains(image.to_str().unwrap()), "still attached: {backing}");
}

/// btrfs remembers a device that was missing. Another device with its number, in a file system of
/// the same id, would be one too many.
#[test]
fn a_device_that_was_missing_is_in_nobodys_way() {
    if !need(&NEEDS) {
        return;
    }
    let args = ["-d", "raid1", "-m", "raid1", "-U", "6c617264-6572-0000-0000-0d1e00000001"];
    let make = |dir: &Path| DeviceSet::make(dir, &[256 * MIB; 2], &args).unwrap();
    let (first, second) = (scratch(), scratch());
    let first = make(first.path());
    first.mount("").unwrap().unmount_clean().unwrap();
    let rest = DeviceSet::of(first.without(&[1]));
    rest.mount("degraded").unwrap().unmount().unwrap();
    make(second.path()).mount("").unwrap().unmount_clean().unwrap();
}

#[test]
fn a_killed_process_leaves_no_mount_and_no_loop_device() {
    const CHILD: &str = "LARDER_TEST_ORACLE_CHILD";
    if !need(&NEEDS) {
        return;
    }
    if let Some(image) = std::env::var_os(CHILD) {
        let mount = KernelMount::image(Path::new(&image), "").unwrap();
        println!("mounted {} {}", mount.loop_device().name(), mount.path().display());
        // Until the parent kills this process; standard input ends should it forget.
        let _ = std::io::read_to_string(std::io::stdin());
        return;
    }
    let dir = scratch();
    let image = dir.path().join("a.img");
    mkfs_btrfs(&image, 128 * MIB, &[] as &[&str]).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_killed_process_leaves_no_mount_and_no_loop_device", "--nocapture"])
        .env(CHILD, &image)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let output = std::io::BufReader::new(child.stdout.take().unwrap());
    let line = std::io::BufRead::lines(output)
        .map_while(Result::ok)
        .find_map(|l| l.split_once("mounted ").map(|(_, rest)| rest.to_owned()))
        .expect("the child has mounted");
    let (device, mount_point) = line.split_once(' ').unwrap();
    let backing = format!("/sys/block/{device}/loop/backing_file");
    assert!(std::fs::read_to_string(&backing).unwrap().contains("a.img"));
    child.kill().unwrap();
    child.wait().unwrap();
    // The kernel tears the namespace down after the process is gone: wait for the state, up to a
    // limit.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        match std::fs::read_to_string(&backing) {
            Ok(text) if text.contains(dir.path().to_str().unwrap()) => {
                assert!(std::time::Instant::now() < deadline, "{device} is still attached");
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            _ => break,
        }
    }
    btrfs_check(&image, false).assert_clean("after the kernel unmounted by itself");
    // The empty directory is all that is left: it goes only if nothing is mounted there any more.
    std::fs::remove_dir(mount_point).unwrap();
}
