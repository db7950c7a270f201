//! Subvolumes from streams and within them, snapshots of layers, and what they share.

mod common;

use common::{Source, assert_linux_agrees, assert_sound, noise, options, path};
use larder_build::{BuildOptions, InnerSubvolume, Output, Place, Silent, TreeInput, build};
use larder_simtest::oracle::{Need, btrfs, need};
use std::path::Path;

fn input<'a>(source: &'a Source, place: Place) -> TreeInput<'a> {
    TreeInput { place, ..source.top() }
}

fn make(
    image: &Path,
    sources: &[&Source],
    trees: Vec<TreeInput<'_>>,
    options: &BuildOptions,
) -> larder_build::Result<larder_build::Report> {
    let output = Output::File { path: image.to_owned(), force: true };
    let open = |l: &larder_sources::Locator| {
        sources.iter().find_map(|s| s.open(l).ok()).ok_or_else(|| "no such contents".into())
    };
    build(&output, trees, &open, options, &Silent)
}

#[test]
fn directories_and_streams_become_subvolumes() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let mut top = Source::new();
    for d in ["home", "home/a", "home/a/deep", "var", "z"] {
        top.dir(d);
        top.file(format!("{d}/file"), noise(5000, d.len() as u64));
    }
    let mut other = Source::new();
    other.file("hello", noise(70_000, 9));
    let mut tree = top.top();
    let inner = |p: &str, read_only, default| InnerSubvolume { path: path(p), read_only, default };
    tree.inner = vec![inner("home", false, true), inner("home/a/deep", true, false)];
    tree.inner.push(inner("var/empty", false, false));
    let below = |p: &str| Place::Below { parent: 0, path: path(p) };
    let trees = vec![tree, input(&other, below("home/a/other")), input(&other, below("other"))];
    let report = make(&image, &[&top, &other], trees, &options()).unwrap();
    assert_eq!(report.subvolumes, 6);
    assert_eq!(report.shared, 70_000u64.next_multiple_of(4096), "one stream has the other's");
    assert_sound(&image, "subvolumes");
    // What the test compares with has the entries of the subvolumes, too.
    let mut seen = top.clone();
    for d in ["home/a/other", "other"] {
        for (at, entry) in &other.entries {
            let mut entry = entry.clone();
            entry.path = path([d.as_bytes(), b"/", at.as_bytes()].concat());
            seen.entries.insert(entry.path.clone(), entry);
        }
    }
    seen.contents.extend(other.contents.clone());
    let empty = seen.dir("var/empty");
    (empty.attributes.uid, empty.attributes.gid) = (0, 0);
    empty.attributes.modified.nanoseconds = 0;
    if !need(&[Need::KernelBtrfs]) {
        return;
    }
    let mount = larder_simtest::oracle::KernelMount::image(&image, "subvolid=5").unwrap();
    common::compare(mount.path(), &seen, "subvolumes");
    let list = btrfs(&["subvolume", "list", mount.path().to_str().unwrap()]).unwrap();
    for want in ["home", "home/a/deep", "home/a/other", "other", "var/empty"] {
        assert!(list.lines().any(|l| l.ends_with(&format!("path {want}"))), "{want}: {list}");
    }
    assert!(std::fs::write(mount.join("home/a/deep/file"), "x").is_err(), "read-only");
    mount.unmount_clean().unwrap();
    let mount = larder_simtest::oracle::KernelMount::image(&image, "").unwrap();
    assert!(mount.join("a/deep/file").exists(), "the default is home");
    mount.unmount_clean().unwrap();
}

#[test]
fn layers_are_snapshots_that_share() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let mut layers = vec![Source::new()];
    for n in 0..40u64 {
        layers[0].file(format!("f{n:02}"), noise(n as usize * 1000, n));
    }
    for n in 1..4u64 {
        let mut next = layers[layers.len() - 1].clone();
        next.contents.clear();
        next.entries.remove(&path(format!("f{n:02}")));
        next.file(format!("new {n}"), noise(50_000, 100 + n));
        layers.push(next);
    }
    // Locators stay those of the first layer; contents are found wherever they are.
    let all: Vec<&Source> = layers.iter().collect();
    let empty = Source::new();
    let mut trees = vec![empty.top()];
    for (n, layer) in layers.iter().enumerate() {
        let place = Place::Below { parent: 0, path: path(format!("layer {n}")) };
        let mut tree = input(layer, place);
        tree.snapshot_of = (n > 0).then_some(n);
        tree.read_only = n < 3;
        trees.push(tree);
    }
    let report = make(&image, &all, trees, &options()).unwrap();
    assert!(report.shared > 3 * 700_000 && report.data < 1_100_000, "{report:?}");
    assert_sound(&image, "layers");
    let mut seen = layers[3].clone();
    for layer in &layers {
        seen.contents.extend(layer.contents.clone());
    }
    assert_linux_agrees(&image, &[("layer 3", &seen)], "layers");
    if need(&[Need::KernelBtrfs]) {
        let mount = larder_simtest::oracle::KernelMount::image(&image, "").unwrap();
        let at = mount.join("layer 2");
        let shown = btrfs(&["subvolume", "show", at.to_str().unwrap()]).unwrap();
        let field = |text: &str, name: &str| {
            text.lines().find_map(|l| l.trim().strip_prefix(name).map(|v| v.trim().to_owned()))
        };
        let before = mount.join("layer 1");
        let before = btrfs(&["subvolume", "show", before.to_str().unwrap()]).unwrap();
        assert_eq!(field(&shown, "Parent UUID:"), field(&before, "UUID:"), "{shown}");
        // Linux deletes one, and what the others share stays.
        btrfs(&["subvolume", "delete", "-c", mount.join("layer 0").to_str().unwrap()]).unwrap();
        btrfs(&["subvolume", "sync", mount.path().to_str().unwrap()]).unwrap();
        mount.unmount_clean().unwrap();
        assert_sound(&image, "layers, one deleted by Linux");
    }
}

#[test]
fn equal_contents_share_with_dedupe() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let mut s = Source::new();
    let large = noise(3 << 20, 1);
    s.file("a", large.clone());
    s.file("b", large.clone());
    s.file("c", [noise(1 << 20, 2), large[..1 << 20].to_vec(), noise(300, 3)].concat());
    // Equal within itself.
    s.file("d", large[..128 << 10].repeat(9));
    for n in 0..60 {
        s.file(format!("small {n}"), noise(5000, 7));
    }
    for compress in [None, Some("zstd"), Some("lzo")] {
        let compress =
            compress.map(|p| larder_build::Compress { packing: p.parse().unwrap(), force: false });
        let plain = s.build(&image, &BuildOptions { compress, ..options() }).unwrap();
        let report =
            s.build(&image, &BuildOptions { compress, dedupe: true, ..options() }).unwrap();
        let want = (3 << 20) + (1 << 20) + (4 << 10) + (8 << 10);
        assert_eq!((report.data, report.data + report.shared), (want, plain.data));
        assert_sound(&image, "deduplicated");
        assert_linux_agrees(&image, &[("", &s)], "deduplicated");
    }
}

#[test]
fn an_extent_with_very_many_references_is_sound() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let mut s = Source::new();
    for n in 0..12_000 {
        s.file(format!("{n:05}"), noise(4096, 1));
    }
    let report = s.build(&image, &BuildOptions { dedupe: true, ..options() }).unwrap();
    assert_eq!(report.data, 2 * 4096, "a second copy after ten thousand");
    assert_sound(&image, "many references");
}

#[test]
fn impossible_trees_are_refused() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let mut s = Source::new();
    s.dir("d");
    s.file("f", b"x".to_vec());
    let text =
        |trees: Vec<TreeInput<'_>>| make(&image, &[&s], trees, &options()).unwrap_err().to_string();
    let below = |parent, p: &str| Place::Below { parent, path: path(p) };
    assert!(text(vec![]).contains("top"));
    assert!(text(vec![s.top(), s.top()]).contains("exactly one"));
    assert!(text(vec![s.top(), input(&s, below(0, "f"))]).contains("f: a subvolume is asked for"));
    assert!(text(vec![s.top(), input(&s, below(0, "x/y"))]).contains("x/y: its directory"));
    assert!(text(vec![s.top(), input(&s, below(7, "x"))]).contains("hangs in another tree"));
    let twice = vec![s.top(), input(&s, below(0, "x")), input(&s, below(0, "x"))];
    assert!(text(twice).contains("the same place"));
    let circle = vec![s.top(), input(&s, below(2, "x")), input(&s, below(1, "x"))];
    assert!(text(circle).contains("circle"));
    let early = TreeInput { snapshot_of: Some(1), ..input(&s, below(0, "x")) };
    assert!(text(vec![s.top(), early]).contains("snapshot"));
    let two = |p| TreeInput { default: true, ..input(&s, below(0, p)) };
    assert!(text(vec![s.top(), two("x"), two("y")]).contains("default"));
    assert!(!image.exists());
}
