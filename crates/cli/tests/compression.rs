//! Compression from the command line: the property in images and on mounts, copies that compress,
//! mount options.

mod common;

use common::{inside, larder};
use larder_simtest::oracle::{Need, btrfs_check, dump_tree, need, scratch};
use std::path::Path;

fn image(dir: &Path) -> std::path::PathBuf {
    let image = dir.join("a.img");
    larder(args!["mkfs", "--size", "256M", &image]).ok();
    image
}

#[test]
fn properties_in_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path());
    larder(args!["mkdir", inside(&image, "/d")]).ok();
    let get = |path: &str| larder(args!["property", "get", inside(&image, path)]).ok().text();
    let set =
        |value: &str| larder(args!["property", "set", inside(&image, "/d"), "compression", value]);
    assert_eq!(get("/d"), "");
    set("zstd:9").ok();
    assert_eq!(get("/d"), "compression=zstd:9\n");
    larder(args!["mkdir", inside(&image, "/d/e")]).ok();
    assert_eq!(get("/d/e"), "compression=zstd\n");
    set("none").ok();
    assert_eq!(get("/d"), "compression=none\n");
    set("").ok();
    assert_eq!(get("/d"), "");
    set("gzip").fails(1, "zlib, lzo, zstd");
    larder(args!["property", "set", inside(&image, "/d"), "colour", "red"]).fails(2, "compression");
    larder(args!["property", "get", inside(&image, "/missing")]).fails(1, "no such file");
    let host = dir.path().join("plain");
    std::fs::write(&host, b"x").unwrap();
    larder(args!["property", "get", &host]).fails(2, "no properties");
}

#[test]
fn copies_that_compress() {
    let dir = scratch();
    let image = image(dir.path());
    let text: Vec<u8> = b"all work and no play\n".iter().copied().cycle().take(1 << 20).collect();
    let host = dir.path().join("text");
    std::fs::write(&host, &text).unwrap();
    larder(args!["cp", "--compress", "zstd:5", &host, inside(&image, "/packed")]).ok();
    larder(args!["cp", &host, inside(&image, "/plain")]).ok();
    larder(args!["cp", "--compress", "best", &host, inside(&image, "/x")])
        .fails(2, "zlib, lzo, zstd");
    for name in ["/packed", "/plain"] {
        assert!(larder(args!["cat", inside(&image, name)]).ok().out == text);
    }
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(&image, true).assert_clean("copies");
        let tree = dump_tree(&image, &["-t", "5"]).unwrap();
        assert_eq!(tree.matches("extent compression 3 (zstd)").count(), 8);
        assert!(tree.contains("extent compression 0 (none)"));
    }
}

#[test]
fn mounts_that_compress() {
    if !need(&[Need::Root, Need::Fuse]) {
        return;
    }
    let dir = scratch();
    let image = image(dir.path());
    let point = dir.path().join("mnt");
    std::fs::create_dir(&point).unwrap();
    larder(args!["mount", "-o", "compress=best", &image, &point]).fails(2, "zlib, lzo, zstd");
    larder(args!["mount", "-o", "compress=lzo", &image, &point]).ok();
    let done = std::panic::catch_unwind(|| {
        let text: Vec<u8> =
            b"and the rest is silence ".iter().copied().cycle().take(3 << 20).collect();
        std::fs::write(point.join("text"), &text).unwrap();
        std::fs::create_dir(point.join("z")).unwrap();
        larder(args!["property", "set", point.join("z"), "compression", "zlib"]).ok();
        let shown = larder(args!["property", "get", point.join("z")]).ok().text();
        assert_eq!(shown, "compression=zlib\n");
        std::fs::write(point.join("z/text"), &text).unwrap();
        larder(args!["sync", &point]).ok();
        let stats = larder(args!["stats", "--json", &point]).ok().json();
        let find = |name: &str| -> u64 {
            fn look(v: &serde_json::Value, name: &str) -> Option<u64> {
                let o = v.as_object()?;
                o.get(name)
                    .and_then(serde_json::Value::as_u64)
                    .or_else(|| o.values().find_map(|v| look(v, name)))
            }
            look(&stats, name).unwrap_or_else(|| panic!("{name} is not in {stats}"))
        };
        assert_eq!(find("compress_in_bytes"), 6 << 20);
        assert!(find("compress_out_bytes") < 1 << 20);
        assert!(std::fs::read(point.join("text")).unwrap() == text);
    });
    larder(args!["umount", &point]).ok();
    if let Err(e) = done {
        std::panic::resume_unwind(e);
    }
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(&image, true).assert_clean("a mount that compresses");
        let tree = dump_tree(&image, &["-t", "5"]).unwrap();
        for method in ["1 (zlib)", "2 (lzo)"] {
            assert_eq!(
                tree.matches(&format!("extent compression {method}")).count(),
                24,
                "{method}"
            );
        }
    }
}
