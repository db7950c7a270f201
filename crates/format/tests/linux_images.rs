//! Images that Linux's tools made: everything in them must parse and pass the node checker, and
//! bytes planted into them must be found.

mod common;

use common::{Image, Nodes, has, items, le64, missing, mkfs, mkfs_sized, reseal, run};
use larder_format::check::check_node;
use larder_format::features::Incompat;
use larder_format::node::{HEADER_SIZE, ITEM_SIZE, NodeView};
use larder_format::superblock::{Superblock, Support, looks_like_btrfs};
use larder_format::{CsumType, KeyType, ObjectId, Physical, SUPER_OFFSETS};
use std::fs;
use std::path::Path;
use std::process::Command;

const CSUMS: [(&str, CsumType); 4] = [
    ("crc32c", CsumType::Crc32c),
    ("xxhash", CsumType::XxHash64),
    ("sha256", CsumType::Sha256),
    ("blake2", CsumType::Blake2b),
];

/// A directory with the kinds of files that leave different items.
fn source_tree(dir: &Path) {
    let write = |name: &str, bytes: &[u8]| fs::write(dir.join(name), bytes).unwrap();
    for n in 0..400 {
        write(&format!("file with a name of some length {n}"), &vec![b'x'; n * 37]);
    }
    write("empty", b"");
    write("large", &(0..3 << 20).map(|n: u32| (n >> 7) as u8).collect::<Vec<_>>());
    write(&"n".repeat(255), b"longest name");
    // Two names of the same hash share a directory item.
    write("TTqGO4p", b"1");
    write("snNzDoq", b"2");
    fs::create_dir_all(dir.join("a/b/c/d")).unwrap();
    fs::write(dir.join("a/b/c/d/deep"), b"deep").unwrap();
    std::os::unix::fs::symlink("a/b", dir.join("link")).unwrap();
    for n in 0..50 {
        fs::hard_link(dir.join("large"), dir.join(format!("a/another name of large {n}"))).unwrap();
    }
}

/// What must hold for every image beyond passing the checker.
fn verify_image(path: &Path) -> Image {
    let mut image = Image::open(path);
    let nodes = image.walk();
    // Each node has an extent item and each of those a node: the walk missed nothing.
    let mut tracked: Vec<u64> = items(&nodes)
        .filter(|(tree, key, data)| {
            let extent = matches!(key.kind, KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM);
            *tree == ObjectId::EXTENT_TREE && extent && le64(data, 16) & 2 != 0
        })
        .map(|(_, key, _)| key.objectid.0)
        .collect();
    tracked.sort_unstable();
    assert_eq!(tracked, nodes.keys().copied().collect::<Vec<_>>());
    let groups = items(&nodes).filter(|(_, key, _)| key.kind == KeyType::BLOCK_GROUP_ITEM);
    let used: u64 = groups.map(|(_, _, data)| le64(data, 0)).sum();
    assert_eq!(used, image.sb.bytes_used());
    image
}

#[test]
fn all_checksums_and_node_sizes() {
    if !has("mkfs.btrfs") || !has("btrfs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (path, source) = (dir.path().join("img"), dir.path().join("source"));
    fs::create_dir(&source).unwrap();
    source_tree(&source);
    for (name, csum) in CSUMS {
        for nodesize in [4096, 16384, 65536] {
            let args = [
                "--csum",
                name,
                "--nodesize",
                &nodesize.to_string(),
                "-L",
                "étiquette",
                "--rootdir",
                source.to_str().unwrap(),
            ];
            mkfs(&path, &args);
            let image = verify_image(&path);
            let sb = &image.sb;
            assert_eq!((sb.csum_type(), sb.nodesize(), sb.sectorsize()), (csum, nodesize, 4096));
            assert_eq!(sb.label(), "étiquette".as_bytes());
            assert_eq!(sb.support(), Support::ReadWrite);
            assert_eq!(sb.backup_roots[sb.current_backup_slot().unwrap()].tree_root, sb.root);
            matches_dump(&path, sb);
            mirror_is_the_same(&image);
            planted_bytes_are_found(&image);
        }
    }
}

/// What `dump-super` prints, against the parsed fields.
fn matches_dump(path: &Path, sb: &Superblock) {
    let dump = run("btrfs", &["inspect-internal", "dump-super", path.to_str().unwrap()]);
    let field = |name: &str| {
        let line = dump.lines().find(|l| l.split_whitespace().next() == Some(name));
        line.and_then(|l| l.split_whitespace().nth(1))
            .unwrap_or_else(|| panic!("no {name} in {dump}"))
            .to_owned()
    };
    assert_eq!(field("fsid"), uuid::Uuid::from_bytes(sb.fsid).to_string());
    assert_eq!(field("dev_item.uuid"), uuid::Uuid::from_bytes(sb.dev_item.uuid).to_string());
    assert_eq!(field("incompat_flags"), format!("{:#x}", sb.incompat().bits()));
    assert_eq!(field("compat_ro_flags"), format!("{:#x}", sb.compat_ro().bits()));
    for (name, value) in [
        ("generation", sb.generation().0),
        ("root", sb.root().0),
        ("root_level", sb.root_level.into()),
        ("chunk_root", sb.chunk_root().0),
        ("chunk_root_level", sb.chunk_root_level.into()),
        ("chunk_root_generation", sb.chunk_root_generation().0),
        ("sys_array_size", sb.sys_chunk_bytes().len() as u64),
        ("total_bytes", sb.total_bytes()),
        ("bytes_used", sb.bytes_used()),
        ("num_devices", sb.num_devices()),
        ("stripesize", sb.stripesize.get().into()),
        ("cache_generation", sb.cache_generation().0),
        ("uuid_tree_generation", sb.uuid_tree_generation().0),
        ("dev_item.devid", sb.device_id().0),
        ("dev_item.bytes_used", sb.dev_item.bytes_used.get()),
        ("dev_item.sector_size", sb.dev_item.sector_size.get().into()),
    ] {
        assert_eq!(field(name), value.to_string(), "{name}");
    }
}

fn mirror_is_the_same(image: &Image) {
    let at = SUPER_OFFSETS[1];
    let bytes = image.superblock_bytes(at);
    assert!(looks_like_btrfs(&bytes));
    let mut mirror = Superblock::parse(&bytes, at).unwrap();
    assert_eq!(mirror.seal(SUPER_OFFSETS[0])[..], image.superblock_bytes(SUPER_OFFSETS[0])[..]);
    assert_eq!(mirror.seal(at)[..], bytes[..]);
    // A copy that was read from the wrong place is not taken.
    let error = Superblock::parse(&bytes, SUPER_OFFSETS[0]).unwrap_err().to_string();
    assert_eq!(error, "superblock at 65536: bytenr is 67108864, expected 65536");
    let error = Superblock::parse(&image.superblock_bytes(Physical(1 << 20)), SUPER_OFFSETS[0])
        .unwrap_err();
    assert!(error.to_string().contains("magic"), "{error}");
}

fn planted_bytes_are_found(image: &Image) {
    let csum = image.sb.csum_type();
    for (expect, tree) in [(image.expect_chunk_root(), "3"), (image.expect_root_tree(), "1")] {
        let good = image.node(expect.bytenr.0).swap_remove(0);
        check_node(&good, &expect).unwrap();
        let leaf_data = good.len() - 1;
        // One flipped bit anywhere behind the checksum.
        for at in [48, 100, HEADER_SIZE, good.len() / 2, leaf_data] {
            let mut bytes = good.clone();
            bytes[at] ^= 0x10;
            assert!(check_node(&bytes, &expect).is_err(), "flip at {at}");
        }
        let plant = |at: usize, new: &[u8], message: &str| {
            let mut bytes = good.clone();
            bytes[at..at + new.len()].copy_from_slice(new);
            reseal(&mut bytes, csum);
            let error = check_node(&bytes, &expect).expect_err(message).to_string();
            assert!(error.contains(message), "\"{error}\" instead of \"{message}\"");
        };
        plant(32, &[0xff; 16], "header has fsid ffffffff-ffff-ffff-ffff-ffffffffffff, expected");
        plant(48, &[0; 8], &format!("header says block 0, expected {}", expect.bytenr));
        plant(56, &[0], "lacks the flag WRITTEN");
        plant(63, &[0], "back reference revision 0, expected 1");
        plant(80, &[0xff; 8], "generation is 18446744073709551615, expected");
        plant(
            88,
            &7u64.to_le_bytes(),
            &format!("owner is tree 7, which cannot have nodes in tree {tree}"),
        );
        plant(100, &[8], "level is 8, expected less than 8");
        plant(100, &[7], &format!("level is 7, expected {}", expect.level.unwrap()));
        plant(
            96,
            &[0; 4],
            if expect.level == Some(0) { "leaf is empty" } else { "has 0 pointers" },
        );
        plant(96, &[0xff; 4], "4294967295");
        if expect.level == Some(0) {
            plant(HEADER_SIZE + 17, &[0xff; 4], "bytes of data at 4294967295, expected to end at");
            plant(HEADER_SIZE + ITEM_SIZE, &[0; 17], "does not follow");
        } else {
            plant(HEADER_SIZE + 17, &[0; 8], "child at 0, expected");
        }
        let mut stale = expect.clone();
        stale.generation = Some(larder_format::Generation(NodeView(&good).generation().0 + 1));
        assert!(check_node(&good, &stale).unwrap_err().to_string().starts_with("generation is"));
        let mut unsummed = good.clone();
        unsummed[0] ^= 1;
        let error = check_node(&unsummed, &expect).unwrap_err().to_string();
        assert_eq!(error, format!("{} checksum does not match", csum.name()));
    }
}

#[test]
fn other_shapes() {
    if !has("mkfs.btrfs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (path, source) = (dir.path().join("img"), dir.path().join("source"));
    fs::create_dir(&source).unwrap();
    source_tree(&source);
    for args in [
        &["--mixed", "--nodesize", "4096"][..],
        &["-O", "^skinny-metadata", "--nodesize", "4096"],
        &["-O", "^no-holes,^extref"],
        &["-O", "^free-space-tree"],
        &["-O", "block-group-tree", "-m", "single"],
    ] {
        mkfs(&path, &[args, &["--rootdir", source.to_str().unwrap()]].concat());
        let image = verify_image(&path);
        assert_eq!(image.sb.support(), Support::ReadWrite, "{args:?}");
        let skinny = image.sb.incompat().contains(Incompat::SKINNY_METADATA);
        assert_eq!(skinny, !args.contains(&"^skinny-metadata"));
    }
}

/// A mount by the kernel that goes away with its guard.
struct Mounted<'a>(&'a Path);
impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if !Command::new("umount").arg(self.0).status().is_ok_and(|s| s.success()) {
            let _ = Command::new("umount").arg("-l").arg(self.0).status();
        }
    }
}

#[test]
fn what_the_kernel_writes() {
    if !has("mkfs.btrfs") || !has("btrfs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (path, mnt) = (dir.path().join("img"), dir.path().join("mnt"));
    fs::create_dir(&mnt).unwrap();
    // The old space cache is kept for block groups of 100 MiB and more only.
    let v1 = ["-O", "^free-space-tree,^block-group-tree"];
    for (size, args, cache) in [
        (256 << 20, &["--nodesize", "4096"][..], ""),
        (256 << 20, &["-O", "block-group-tree"], ""),
        (8 << 30, &v1, ",space_cache=v1"),
    ] {
        mkfs_sized(&path, size, args);
        let mounted = Command::new("mount")
            .args(["-o", &format!("loop,compress=zstd,commit=1{cache}")])
            .args([&path, &mnt])
            .output()
            .is_ok_and(|o| o.status.success());
        if !mounted {
            return missing("the kernel's btrfs, loop devices and the right to mount");
        }
        let guard = Mounted(&mnt);
        // Subvolumes, snapshots, shared and compressed extents, preallocation, holes, many links,
        // xattrs, device nodes, deletions; a balance moves nodes with full back references.
        let script = r#"
            set -e
            cd "$1"
            btrfs -q subvolume create sub
            for i in $(seq 300); do echo "$i" > "sub/name $i"; done
            yes text | head -c 3000000 > sub/compressed
            head -c 3000000 /dev/urandom > sub/random
            cp --reflink=always sub/random sub/clone
            mkfifo sub/fifo; mknod sub/device c 1 3
            for i in $(seq 120); do
                ln sub/random "sub/link $i xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
            done
            setfattr -n user.some -v value sub/fifo 2>/dev/null ||
                setfattr -n user.some -v value sub/random
            fallocate -l 1M sub/prealloc
            dd if=/dev/urandom of=sub/prealloc bs=4096 seek=3 count=5 conv=notrunc status=none
            truncate -s 1G sub/sparse
            dd if=/dev/urandom of=sub/sparse bs=4096 seek=1000 count=1 conv=notrunc status=none
            sync -f .
            btrfs -q subvolume snapshot sub snap
            btrfs -q subvolume snapshot -r sub frozen
            rm "snap/name 1"; echo more >> "snap/name 2"
            dd if=/dev/urandom of=sub/random bs=4096 seek=100 count=9 conv=notrunc status=none
            btrfs -q subvolume set-default sub
            sync -f .
            # Metadata only: moving data, Linux 6.18 now and then reads preallocated sectors as
            # damaged ("corrupt" in its device statistics) and gives up.
            btrfs -q balance start -m . > /dev/null
            touch snap/after
            btrfs -q subvolume delete frozen
            btrfs -q subvolume sync .
            sync -f .
        "#;
        let script = run("sh", &["-c", script, "sh", mnt.to_str().unwrap()]);
        assert_eq!(script, "");
        log_of_the_kernel(&path, &mnt);
        drop(guard);
        let mut image = verify_image(&path);
        let caches = |nodes: &Nodes| {
            items(nodes).filter(|(_, k, _)| k.objectid == ObjectId::FREE_SPACE).count()
        };
        assert_eq!(caches(&image.walk()) > 0, !cache.is_empty());
        assert!(image.sb.incompat().contains(Incompat::COMPRESS_ZSTD | Incompat::DEFAULT_SUBVOL));
    }
}

/// The log that fsync leaves behind, as a crash would find it.
fn log_of_the_kernel(path: &Path, mnt: &Path) {
    let script = r#"
        set -e
        cd "$1"
        mount -o remount,commit=300 .
        sync -f .
        mkdir -p sub/new/deep
        ln -f sub/random sub/new/link; [ ! -e sub/clone ] || mv sub/clone sub/new/moved
        dd if=/dev/urandom of=sub/new/deep/logged bs=5000 count=30 conv=fsync status=none
        dd if=/dev/urandom of=sub/random bs=4096 count=1 seek=7 conv=fsync,notrunc status=none
        sync sub/new
        dd if=/dev/urandom of=snap/logged bs=100 count=1 conv=fsync status=none
        cp --sparse=always "$2" "$2.crash"
    "#;
    let crash = path.with_extension("crash");
    let arguments = ["-c", script, "sh", mnt.to_str().unwrap(), path.to_str().unwrap()];
    // A commit of the kernel's own accord in between drops the log; then the next try has one (so
    // the script can run again).
    for _ in 0..10 {
        run("sh", &arguments);
        let image = verify_image(&crash);
        let nodes = image.walk_log();
        fs::remove_file(&crash).unwrap();
        let kinds: Vec<KeyType> = items(&nodes).map(|(_, key, _)| key.kind).collect();
        if !kinds.is_empty() {
            assert!(kinds.contains(&KeyType::INODE_ITEM), "{kinds:?}");
            return;
        }
    }
    panic!("ten times fsync, and never a log");
}
