//! Everything that a tree can have, in one image of each kind, judged by both checkers and Linux.

mod common;

use common::{Data, Source, assert_linux_agrees, assert_sound, noise, options, text};
use larder_build::{BuildOptions, Compress, ImageSize};
use larder_format::CsumType;
use larder_fs::mkfs::{Features, Profile};
use larder_simtest::oracle::{KernelMount, Need, btrfs, colliding_names, need};
use larder_sources::Kind;

/// A tree with every kind of entry, and sizes around every limit.
fn everything(nodesize: usize) -> Source {
    let mut s = Source::new();
    s.entries.get_mut(&common::path("")).unwrap().attributes.xattrs =
        vec![(b"user.top".to_vec(), b"yes".to_vec())];
    s.dir("sizes");
    for n in [0, 1, 2, 2047, 2048, 2049, 4095, 4096, 4097, 8192, 131_071, 131_072, 131_073] {
        s.file(format!("sizes/noise {n}"), noise(n, n as u64 + 1));
        s.file(format!("sizes/text {n}"), text(n, n as u64));
    }
    s.file("sizes/large", [text(3 << 20, 1), noise(2 << 20, 2), text(900_001, 3)].concat());
    s.dir("sparse");
    s.sparse("sparse/all hole", 10 << 30, Data::default());
    s.sparse("sparse/small hole", 1000, Data::default());
    s.sparse("sparse/end", 1 << 40, Data(vec![((1 << 40) - 5000, noise(5000, 3))]));
    let many = (0..300u64).map(|n| (n * 12_288 + n, noise(3000 + n as usize * 7, n))).collect();
    s.sparse("sparse/many", 5 << 20, Data(many));
    s.sparse("sparse/short", 700, Data(vec![(600, vec![7; 50])]));
    s.dir("special");
    s.add("special/char", Kind::CharDevice { major: 259, minor: 70_000 }, 0o600);
    s.add("special/block", Kind::BlockDevice { major: 8, minor: 1 }, 0o660);
    s.add("special/fifo", Kind::Fifo, 0o644);
    s.add("special/socket", Kind::Socket, 0o755);
    s.add("special/setuid", Kind::Directory, 0o7777);
    s.add("special/link", Kind::Symlink(b"../sizes/large".to_vec()), 0o777);
    let long = (nodesize - 101 - 25 - 21).min(4095);
    s.add("special/long link", Kind::Symlink(vec![b'x'; long]), 0o777);
    s.dir("names");
    for name in colliding_names(3) {
        s.file([b"names/", &name[..]].concat(), b"collides".to_vec());
    }
    s.file([&b"names/"[..], &[b'n'; 255]].concat(), b"long".to_vec());
    s.file([&b"names/"[..], b"\xff\xfe\n\x01"].concat(), b"bytes".to_vec());
    let xattrs = &mut s.file("names/xattrs", b"x".to_vec()).attributes.xattrs;
    *xattrs = (0..40u8).map(|n| (format!("user.{n:02}").into_bytes(), vec![n; 90])).collect();
    let room = nodesize - 101 - 25 - 30 - b"user.large".len();
    s.file("names/large xattr", vec![]).attributes.xattrs =
        vec![(b"user.large".to_vec(), vec![9; room])];
    s.dir("links");
    s.dir("links/other");
    s.file("links/first", noise(10_000, 5));
    for n in 0..800 {
        s.link(format!("links/a long name for a link, number {n}"), "links/first", 1);
    }
    s.link("links/other/one", "links/first", 1);
    s.add("links/fifo", Kind::Fifo, 0o600);
    s.link("links/other/fifo", "links/fifo", 2);
    let mut deep = String::from("deep");
    for n in 0..60 {
        s.dir(&deep);
        s.file(format!("{deep}/{n}"), vec![n; 10]);
        deep.push_str("/d");
    }
    s.dir("flags");
    let flags = [("nocow", 3), ("nosum", 1), ("compress", 1 << 11), ("no compression", 1 << 3)];
    for (name, bits) in flags {
        s.file(format!("flags/{name}"), text(300_000, 4)).attributes.inode_flags = bits;
    }
    for method in ["zlib", "lzo", "zstd", "none"] {
        let property = (b"btrfs.compression".to_vec(), method.as_bytes().to_vec());
        s.file(format!("flags/{method}"), text(300_000, 5)).attributes.xattrs = vec![property];
    }
    s.dir("many");
    for n in 0..1500 {
        s.file(format!("many/{n}"), vec![n as u8; n % 300]);
    }
    s
}

fn packing(text: &str, force: bool) -> Option<Compress> {
    Some(Compress { packing: text.parse().unwrap(), force })
}

fn check(what: &str, options: &BuildOptions) {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let nodesize = options.nodesize.unwrap_or(if options.features.mixed { 4096 } else { 16384 });
    let source = everything(nodesize as usize);
    let report = source.build(&image, options).unwrap();
    assert_eq!(std::fs::metadata(&image).unwrap().len(), report.size, "{what}");
    assert_sound(&image, what);
    assert_linux_agrees(&image, &[("", &source)], what);
    common::assert_engine_agrees(&image, what);
}

fn features(list: &str) -> Features {
    let mut features = Features::default();
    features.apply(list).unwrap();
    features
}

#[test]
fn with_the_defaults() {
    check("defaults", &options());
}

#[test]
fn with_every_compression() {
    check("zstd", &BuildOptions { compress: packing("zstd:3", false), ..options() });
    check("zlib", &BuildOptions { compress: packing("zlib:1", true), ..options() });
    let dedupe = true;
    check("lzo", &BuildOptions { compress: packing("lzo", false), dedupe, ..options() });
}

#[test]
fn with_nodes_of_4_and_64_kib_and_other_checksums() {
    let csum = CsumType::XxHash64;
    check("4 KiB", &BuildOptions { nodesize: Some(4096), csum, ..options() });
    let csum = CsumType::Sha256;
    check("64 KiB", &BuildOptions { nodesize: Some(65536), csum, ..options() });
    let csum = CsumType::Blake2b;
    check("8 KiB", &BuildOptions { nodesize: Some(8192), csum, ..options() });
}

#[test]
fn with_older_features() {
    let features = features("^bgt,^fst,^no-holes,^skinny-metadata");
    let size = ImageSize::Free(100 << 20);
    check("older", &BuildOptions { features, dedupe: true, size, ..options() });
}

#[test]
fn with_mixed_groups() {
    check("mixed", &BuildOptions { features: features("mixed-bg"), ..options() });
    let features = features("mixed-bg,^bgt,^fst");
    let data = Some(Profile::Dup);
    check("mixed, twice", &BuildOptions { features, data, ..options() });
}

#[test]
fn with_all_copies_twice_and_once() {
    let (data, metadata) = (Some(Profile::Dup), Some(Profile::Single));
    let size = ImageSize::Exactly(600 << 20);
    check("data twice", &BuildOptions { data, metadata, size, ..options() });
    let (data, metadata) = (Some(Profile::Single), Some(Profile::Single));
    check("once", &BuildOptions { data, metadata, ..options() });
}

#[test]
fn shrunk() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let source = everything(16384);
    let size = ImageSize::Shrink { align: 4096 };
    let report = source.build(&image, &BuildOptions { size, ..options() }).unwrap();
    assert_eq!((report.size, report.end % 4096), (report.end, 0));
    let least = report.data + report.metadata * 2;
    assert!(report.size < least + (8 << 20), "{} for {least}", report.size);
    assert_sound(&image, "shrunk");
    if !need(&[Need::KernelBtrfs]) {
        return;
    }
    // Linux mounts it for writing. There is no room to change anything.
    let mount = KernelMount::image(&image, "").unwrap();
    common::compare(mount.path(), &source, "shrunk");
    mount.sync().unwrap();
    mount.unmount_clean().unwrap();
    assert_sound(&image, "shrunk, mounted by Linux");
    // It grows like any other. (Linux resizes to no less than 256 MiB.)
    let file = std::fs::OpenOptions::new().write(true).open(&image).unwrap();
    file.set_len(report.size + (300 << 20)).unwrap();
    let mount = KernelMount::image(&image, "").unwrap();
    btrfs(&["filesystem", "resize", "max", mount.path().to_str().unwrap()]).unwrap();
    std::fs::write(mount.join("large"), noise(20 << 20, 8)).unwrap();
    mount.sync().unwrap();
    mount.unmount_clean().unwrap();
    assert_sound(&image, "shrunk, grown by Linux");
}
