//! What `larder inspect` says about images of the kernel, beside what Linux's own tools say.

mod common;

use common::{inside, larder};
use larder_simtest::oracle::{
    Fixture, KernelMount, Need, btrfs, dump_tree, mkfs_btrfs, need, populate, scratch,
};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One test at a time: a program that another test starts holds all open files of this process for
/// a moment, and a mount with an open file cannot be unmounted.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ready() -> bool {
    need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs, Need::Root])
}

fn array(v: &Value) -> &[Value] {
    v.as_array().map_or(&[], Vec::as_slice)
}

/// Every file of a tree, whichever subvolume it is in.
fn files(dir: &Path, out: &mut Vec<PathBuf>) {
    for e in std::fs::read_dir(dir).unwrap() {
        let e = e.unwrap();
        let kind = e.file_type().unwrap();
        if kind.is_dir() {
            files(&e.path(), out);
        } else if kind.is_file() {
            out.push(e.path());
        }
    }
}

/// Inode, file offset, subvolume.
type Use = (u64, u64, u64);
/// Addresses, and the files that use them.
type Resolved = Vec<(u64, BTreeSet<Use>)>;

/// An image with everything in it, and what `logical-resolve` says of some addresses: a sample of
/// all extents of files.
fn populated(dir: &Path, nodesize: &str) -> (PathBuf, Resolved, BTreeMap<String, u64>) {
    let image = dir.join("a.img");
    mkfs_btrfs(&image, 512 << 20, &["--nodesize", nodesize]).unwrap();
    let mount = KernelMount::image(&image, "noatime,commit=1").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    // Shared by reflink, then by a snapshot, then changed on one side.
    let top = mount.path().to_owned();
    let p = |name: &str| top.join(name).into_os_string().into_string().unwrap();
    btrfs(&["subvolume", "create", &p("work")]).unwrap();
    for i in 0..40 {
        std::fs::write(top.join(format!("work/file{i}")), vec![i as u8; 20_000]).unwrap();
    }
    mount.sync().unwrap();
    btrfs(&["subvolume", "snapshot", &p("work"), &p("snap")]).unwrap();
    btrfs(&["subvolume", "snapshot", "-r", &p("snap"), &p("work/second")]).unwrap();
    std::fs::write(top.join("work/file7"), b"changed").unwrap();
    let f = std::fs::File::options().write(true).open(top.join("snap/file8")).unwrap();
    f.write_all_at(&[0xee; 4096], 8192).unwrap();
    drop(f);
    mount.sync().unwrap();
    // Deleted subvolumes still have references until they are dropped.
    btrfs(&["subvolume", "sync", top.to_str().unwrap()]).unwrap();
    mount.sync().unwrap();
    let mut all = Vec::new();
    files(mount.path(), &mut all);
    let inodes: BTreeMap<String, u64> = all
        .iter()
        .map(|f| {
            (
                f.strip_prefix(&top).unwrap().to_str().map(str::to_owned),
                f.symlink_metadata().unwrap().ino(),
            )
        })
        .filter_map(|(p, i)| Some((p?, i)))
        .collect();
    // Addresses: from our own view of the extent tree, judged by the kernel.
    let dump = dump_tree_addresses(&image);
    let mut resolved = Vec::new();
    for at in dump {
        let args =
            ["inspect-internal", "logical-resolve", "-P", &at.to_string(), top.to_str().unwrap()];
        // An extent may be out of use at this sector.
        let Ok(out) = btrfs(&args) else { continue };
        let uses = out.lines().filter_map(|l| {
            let n: Vec<u64> = l.split(' ').filter_map(|w| w.parse().ok()).collect();
            (n.len() == 3).then(|| (n[0], n[1], n[2]))
        });
        resolved.push((at, uses.collect()));
    }
    mount.unmount_clean().unwrap();
    (image, resolved, inodes)
}

/// First addresses of data extents, and some in their middle.
fn dump_tree_addresses(image: &Path) -> Vec<u64> {
    let text = dump_tree(image, &["-t", "extent"]).unwrap();
    let starts = text.lines().filter_map(|l| {
        let key = l.split("key (").nth(1)?;
        let mut words = key.split([' ', ')']);
        let at: u64 = words.next()?.parse().ok()?;
        (words.next()? == "EXTENT_ITEM").then_some(())?;
        let len: u64 = words.next()?.parse().ok()?;
        Some((at, len))
    });
    let all: Vec<(u64, u64)> = starts.collect();
    let some = all.iter().step_by(all.len() / 150 + 1);
    some.flat_map(|(at, len)| BTreeSet::from([*at, at + len / 2 / 4096 * 4096])).collect()
}

#[test]
fn files_at_an_address_are_those_that_linux_finds() {
    let _alone = alone();
    if !ready() {
        return;
    }
    for nodesize in ["4096", "16384"] {
        let dir = scratch();
        let (image, resolved, inodes) = populated(dir.path(), nodesize);
        assert!(resolved.len() > 50, "{}", resolved.len());
        let (mut shared, mut across, mut named) = (0, 0, 0);
        for (at, expected) in &resolved {
            let out =
                larder(args!["inspect", "files-at", "--json", &image, at.to_string()]).ok().json();
            let files = array(&out["files"]);
            let number = |f: &Value, k: &str| f[k].as_u64().unwrap();
            let got: BTreeSet<Use> = files
                .iter()
                .map(|f| (number(f, "inode"), number(f, "offset"), number(f, "subvolume")))
                .collect();
            assert_eq!(&got, expected, "{nodesize} {at}: {out:#}");
            for f in files {
                for path in array(&f["paths"]).iter().filter_map(Value::as_str) {
                    // Names that cannot be printed are shown with escapes.
                    if path.chars().all(|c| c.is_ascii_graphic() && c != '\\') {
                        assert_eq!(inodes.get(&path[1..]), f["inode"].as_u64().as_ref(), "{path}");
                        named += 1;
                    }
                }
            }
            let subvolumes: BTreeSet<u64> =
                array(&out["files"]).iter().map(|f| f["subvolume"].as_u64().unwrap()).collect();
            shared += usize::from(got.len() > 1);
            across += usize::from(subvolumes.len() > 2);
            // The same by the address on the device.
            let place = out["stripes"][0]["offset"].as_u64().unwrap();
            let by_place = larder(args![
                "inspect",
                "files-at",
                "--json",
                "--physical",
                &image,
                place.to_string()
            ]);
            assert_eq!(by_place.ok().json()["files"], out["files"]);
        }
        assert!(shared > 5 && across > 5 && named > 50, "{shared} {across} {named}");
        // Without an extent tree every file is looked at, and the answer is the same.
        let (at, _) = resolved.iter().find(|(_, e)| e.len() > 1).unwrap();
        let with =
            larder(args!["inspect", "files-at", "--json", &image, at.to_string()]).ok().json();
        destroy_root(&image, "extent");
        let run = larder(args!["inspect", "files-at", "--json", &image, at.to_string()]);
        assert_eq!(run.code, 1);
        assert!(run.err.contains("every file was looked at"), "{}", run.err);
        assert_eq!(run.json()["files"], with["files"]);
    }
}

/// Overwrites both copies of a tree's root.
fn destroy_root(image: &Path, tree: &str) {
    let blocks = larder(args!["inspect", "tree", "--json", "--tree", tree, image]).ok().json();
    let at = blocks[0]["bytenr"].as_u64().unwrap();
    let out = larder(args!["inspect", "extent", "--json", image, at.to_string()]).ok().json();
    let file = std::fs::File::options().write(true).open(image).unwrap();
    for s in array(&out["extent"]["stripes"]) {
        file.write_all_at(&[7; 4096], s["offset"].as_u64().unwrap()).unwrap();
    }
}

#[test]
fn inodes_lie_where_filefrag_sees_them() {
    let _alone = alone();
    if !ready() {
        return;
    }
    let dir = scratch();
    let image = dir.path().join("a.img");
    mkfs_btrfs(&image, 512 << 20, &[] as &[&str]).unwrap();
    let mount = KernelMount::image(&image, "noatime,compress-force=zstd").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    let mut all = Vec::new();
    files(mount.path(), &mut all);
    let mut expected = Vec::new();
    for path in all.iter().step_by(7) {
        let out = std::process::Command::new("filefrag")
            .args(["-b4096", "-v"])
            .arg(path)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        // `   0:        0..     243:      16644..     16887:    244:             last,eof`
        let rows: Vec<(u64, u64, bool)> = text
            .lines()
            .filter_map(|l| {
                let n: Vec<u64> = l
                    .split([':', '.', ' '])
                    .filter(|w| !w.is_empty())
                    .map_while(|w| w.parse().ok())
                    .collect();
                (n.len() >= 5 && !l.contains("inline"))
                    .then(|| (n[1] * 4096, n[3] * 4096, l.contains("shared")))
            })
            .collect();
        let name = path.strip_prefix(mount.path()).unwrap().to_str().map(str::to_owned);
        let inode = path.symlink_metadata().unwrap();
        if let Some(name) = name.filter(|n| n.is_ascii() && !n.contains('\\') && !n.contains('\n'))
        {
            expected.push((name, inode.ino(), inode.size(), rows));
        }
    }
    mount.unmount_clean().unwrap();
    let (mut compared, mut shared) = (0, 0);
    for (name, ino, size, rows) in &expected {
        let out =
            larder(args!["inspect", "inode", "--json", "--limit", "100000", inside(&image, name)])
                .ok()
                .json();
        assert_eq!(
            (out["inode"].as_u64(), out["item"]["size"].as_u64()),
            (Some(*ino), Some(*size)),
            "{name}"
        );
        let ours: Vec<(u64, u64, bool)> = array(&out["extents"])
            .iter()
            .filter(|e| !e["logical"].is_null())
            .map(|e| {
                (
                    e["offset"].as_u64().unwrap(),
                    e["logical"].as_u64().unwrap(),
                    e["shared"].as_bool().unwrap(),
                )
            })
            .collect();
        // The kernel joins extents that follow each other; each of its rows begins where one of
        // ours does.
        for row in rows {
            let found = ours.iter().find(|o| o.0 == row.0);
            assert_eq!(found.map(|o| o.1), Some(row.1), "{name}: {ours:?} {rows:?}");
            compared += 1;
            shared += usize::from(row.2);
            assert!(!row.2 || found.unwrap().2, "{name} at {}: the kernel says shared", row.0);
        }
        let sum = &out["summary"];
        assert!(sum["fragments"].as_u64() <= sum["extents"].as_u64());
    }
    assert!(compared > 100 && shared > 0, "{compared} {shared}");
    larder(args!["inspect", "inode", inside(&image, "no/such")]).fails(1, "no such file");
    larder(args!["inspect", "inode", "--number", "999999", &image]).fails(1, "no inode 999999");
}

#[test]
fn block_groups_are_those_of_linux() {
    let _alone = alone();
    if !ready() {
        return;
    }
    for features in ["block-group-tree", "^block-group-tree"] {
        let dir = scratch();
        let image = dir.path().join("a.img");
        mkfs_btrfs(&image, 512 << 20, &["-O", features]).unwrap();
        let tree = if features.starts_with('^') { "extent" } else { "block-group" };
        let text = dump_tree(&image, &["-t", tree]).unwrap();
        let mut lines = text.lines();
        let mut expected = Vec::new();
        while let Some(l) = lines.next() {
            if let Some((_, key)) = l.split_once("key (").filter(|_| l.contains("BLOCK_GROUP_ITEM"))
            {
                let words: Vec<&str> = key.split([' ', ')']).collect();
                let used = lines.next().unwrap().split_whitespace().nth(3).unwrap().to_owned();
                expected.push(format!("{} {} {used}", words[0], words[2]));
            }
        }
        let out = larder(args!["inspect", "block-groups", "--json", &image]).ok().json();
        let ours: Vec<String> = array(&out)
            .iter()
            .map(|g| format!("{} {} {}", g["start"], g["length"], g["used"]))
            .collect();
        assert_eq!(ours, expected);
        assert!(!ours.is_empty());
        assert!(
            larder(args!["inspect", "block-groups", &image]).ok().text().contains("block groups, ")
        );
    }
}

#[test]
fn addresses_that_hold_nothing_are_told_apart() {
    let _alone = alone();
    let dir = scratch();
    let image = dir.path().join("a.img");
    larder(args!["mkfs", "--size", "256M", &image]).ok();
    let at = larder(args!["inspect", "tree", "--json", &image]).ok().json()[0]["bytenr"]
        .as_u64()
        .unwrap();
    let node = larder(args!["inspect", "files-at", "--json", &image, at.to_string()]).ok().json();
    assert_eq!(node["extent"]["kind"], "node of level 0");
    assert_eq!(node["trees"], serde_json::json!([1]));
    let groups = larder(args!["inspect", "block-groups", "--json", &image]).ok().json();
    let data = array(&groups).iter().find(|g| g["type"] == "Data single").unwrap();
    let free = data["start"].as_u64().unwrap() + data["length"].as_u64().unwrap() - 4096;
    let run = larder(args!["inspect", "files-at", &image, free.to_string()]).ok().text();
    assert!(run.contains("not allocated") && run.contains("Data single"), "{run}");
    let run = larder(args!["inspect", "extent", &image, format!("{:#x}", 1u64 << 50)]).ok().text();
    assert!(run.contains("in no block group"), "{run}");
    larder(args!["inspect", "files-at", "--physical", &image, "4096"]).fails(2, "in no chunk");
    larder(args!["inspect", "files-at", &image, "here"]).fails(2, "not an address");
    // What items hold is said in words.
    let text = larder(args!["inspect", "tree", "--tree", "fs", &image]).ok().text();
    assert!(text.contains("mode 40755") && text.contains("names [index 0, name ..]"), "{text}");
    let none = larder(args!["inspect", "tree", "--limit", "0", "--json", &image]).ok().json();
    assert_eq!(none, serde_json::json!([]));
    let json = larder(args!["inspect", "tree", "--tree", "fs", "--json", &image]).ok().json();
    assert_eq!(json[0]["items"][0]["holds"]["nlink"], 1);
}
