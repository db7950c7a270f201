//! The same bytes whatever the circumstances; errors that name what to look at; bounds.

mod common;

use common::{Data, Source, assert_sound, noise, options, text};
use larder_build::{BuildOptions, Compress, Error, ImageSize, Output, Progress, Stage, build};
use larder_simtest::oracle::{KernelMount, Need, btrfs, mkfs_btrfs, need};
use larder_sources::{Contents, Entry, Kind, Locator};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

fn some_tree() -> Source {
    let mut s = Source::new();
    for d in 0..30 {
        s.dir(format!("{d}"));
        for f in 0..40 {
            let n = (d * 40 + f) * 37;
            s.file(format!("{d}/{f}"), if f % 2 == 0 { text(n, 1) } else { noise(n, n as u64) });
        }
    }
    s.file("large", [text(2_500_000, 2), noise(3_000_000, 3)].concat());
    s
}

#[test]
fn the_same_tree_gives_the_same_bytes() {
    let dir = larder_simtest::oracle::scratch();
    let s = some_tree();
    for compress in [None, Some(Compress { packing: "zstd:1".parse().unwrap(), force: false })] {
        let mut images = Vec::new();
        // Little memory makes the sorters use a scratch file.
        for (threads, memory) in [(1, 256 << 20), (2, 16 << 20), (5, 64 << 20)] {
            let image = dir.path().join(format!("{threads}"));
            let threads = Some(threads);
            let o = BuildOptions { compress, threads, memory, dedupe: true, ..options() };
            s.build(&image, &o).unwrap();
            images.push(std::fs::read(&image).unwrap());
        }
        assert!(images.windows(2).all(|w| w[0] == w[1]));
        let image = dir.path().join("other");
        let o = BuildOptions { compress, dedupe: true, uuid: Some([7; 16]), ..options() };
        s.build(&image, &o).unwrap();
        assert!(std::fs::read(&image).unwrap() != images[0]);
    }
}

#[test]
fn a_hundred_thousand_files_in_little_memory() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let mut s = Source::new();
    for d in 0..100 {
        s.dir(format!("{d:03}"));
        for f in 0..1000 {
            s.file(format!("{d:03}/a file of some name {f}"), vec![f as u8; 40 + f % 100]);
        }
    }
    let o = BuildOptions { memory: 16 << 20, ..options() };
    let report = s.build(&image, &o).unwrap();
    assert_eq!((report.inodes.files, report.names), (100_000, 100_100));
    assert_sound(&image, "a hundred thousand files");
}

#[test]
fn names_of_many_files_are_brought_together_in_little_memory() {
    const FILES: usize = 30_000;
    let dir = larder_simtest::oracle::scratch();
    let mut s = Source::new();
    for d in ["a", "b", "c"] {
        s.dir(d);
    }
    for n in 0..FILES {
        let first = format!("a/{n}");
        s.file(&first, vec![n as u8; 10]);
        s.link(format!("b/{n}"), &first, n as u64);
        if n % 2 == 0 {
            s.link(format!("c/{}", n * 7919 % FILES), &first, n as u64);
        }
    }
    let images = [16 << 20, 1 << 30].map(|memory| {
        let image = dir.path().join(format!("{memory}"));
        let report = s.build(&image, &BuildOptions { memory, ..options() }).unwrap();
        assert_eq!((report.inodes.files, report.names), (30_000, 75_003));
        image
    });
    assert_sound(&images[0], "files of several names");
    assert!(std::fs::read(&images[0]).unwrap() == std::fs::read(&images[1]).unwrap());
}

/// What is free in the image can be written: Linux reserves space for metadata by the largest
/// change that it can think of, and takes all that is free for that if it lies in no chunk yet.
#[test]
fn linux_can_write_files_into_an_image_of_any_fill() {
    if !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = larder_simtest::oracle::scratch();
    for (files, large) in [(1_000, 1 << 20), (12_000, 190 << 20)] {
        let image = dir.path().join(format!("{files}"));
        let mut s = Source::new();
        for f in 0..files {
            s.file(format!("{f}"), noise(200, f));
        }
        s.file("large", vec![7; large]);
        s.build(&image, &options()).unwrap();
        let mount = KernelMount::image(&image, "").unwrap();
        for f in 0..300 {
            let written = std::fs::write(mount.join(format!("new {f}")), noise(100_000, f));
            written.unwrap_or_else(|e| panic!("{files} files, and then file {f}: {e}"));
        }
        mount.sync().unwrap();
        mount.unmount_clean().unwrap();
        assert_sound(&image, "filled by Linux");
        std::fs::remove_file(&image).unwrap();
    }
}

/// A file with `names` names in a hundred directories.
fn link_farm(names: usize) -> Source {
    let mut s = Source::new();
    for d in 0..100 {
        s.dir(format!("{d:02}"));
    }
    s.file("00/0", noise(5000, 1));
    for n in 1..names {
        s.link(format!("{:02}/{n}", n % 100), "00/0", 1);
    }
    s
}

#[test]
fn a_file_has_as_many_names_as_linux_allows_and_no_more() {
    const MOST: usize = 65_535;
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let report = link_farm(MOST).build(&image, &options()).unwrap();
    assert_eq!((report.inodes.files, report.names), (1, MOST as u64 + 100));
    assert_sound(&image, "as many names as there can be");
    let other = dir.path().join("other");
    let e = link_farm(MOST + 1).build(&other, &options()).unwrap_err().to_string();
    assert!(e.starts_with("99/") && e.contains("more than 65535 hard links"), "{e}");
    assert!(!other.exists());
}

#[test]
fn an_empty_tree_makes_an_image_that_tools_like() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let s = Source::new();
    for size in [ImageSize::Auto, ImageSize::Shrink { align: 4096 }, ImageSize::Exactly(30 << 20)] {
        s.build(&image, &BuildOptions { size, ..options() }).unwrap();
        assert_sound(&image, "an empty tree");
        if need(&[Need::KernelBtrfs]) {
            let mount = KernelMount::image(&image, "").unwrap();
            let usage = btrfs(&["filesystem", "usage", mount.path().to_str().unwrap()]).unwrap();
            assert!(usage.contains("Data ratio:\t\t\t      1.00"), "{usage}");
            mount.unmount_clean().unwrap();
        }
    }
}

#[test]
fn a_size_that_is_too_small_is_refused_and_nothing_is_left() {
    let dir = larder_simtest::oracle::scratch();
    let s = some_tree();
    let image = dir.path().join("img");
    let mut fits = 0;
    for mib in [1, 4, 16, 20, 24, 30, 34, 40, 60] {
        let size = ImageSize::Exactly(mib << 20);
        match s.build(&image, &BuildOptions { size, ..options() }) {
            Ok(report) => {
                assert_eq!(report.size, mib << 20);
                assert_sound(&image, "a tight image");
                std::fs::remove_file(&image).unwrap();
                fits += 1;
            }
            Err(e) => {
                assert!(e.to_string().contains("too small") && fits == 0, "{mib}: {e}");
                assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
            }
        }
    }
    assert!(fits > 0);
}

/// A file that is other than its entry says.
struct Other(Kind2);

enum Kind2 {
    Short,
    Longer,
    Broken,
}

impl Contents for Other {
    fn data(&mut self) -> io::Result<Vec<Range<u64>>> {
        let end = if matches!(self.0, Kind2::Longer) { 20_000 } else { 5000 };
        Ok(std::iter::once(0..end).collect())
    }
    fn read_exact_at(&mut self, _: &mut [u8], _: u64) -> io::Result<()> {
        Err(match self.0 {
            Kind2::Broken => io::Error::other("the disk is broken"),
            _ => io::ErrorKind::UnexpectedEof.into(),
        })
    }
}

#[test]
fn errors_name_the_file_and_leave_nothing() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let mut s = some_tree();
    s.file("5/bad", noise(5000, 1));
    let output = Output::File { path: image.clone(), force: false };
    for (kind, want) in [(0, "ends before"), (1, "changed"), (2, "disk is broken"), (3, "no such")]
    {
        let open = |l: &Locator| -> Result<Box<dyn Contents>, larder_build::BoxError> {
            if l.key != b"5/bad" {
                return s.open(l);
            }
            Ok(Box::new(Other(match kind {
                0 => Kind2::Short,
                1 => Kind2::Longer,
                2 => Kind2::Broken,
                _ => return Err("no such thing".into()),
            })))
        };
        let e = build(&output, vec![s.top()], &open, &options(), &larder_build::Silent);
        let text = e.unwrap_err().to_string();
        assert!(text.starts_with("5/bad: ") && text.contains(want), "{text}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
    let with = |change: &dyn Fn(&mut Vec<Entry>)| {
        let mut entries: Vec<_> = s.entries.values().cloned().collect();
        change(&mut entries);
        let mut tree = s.top();
        tree.entries = Box::new(entries.into_iter().map(Ok));
        let e = build(&output, vec![tree], &|l| s.open(l), &options(), &larder_build::Silent);
        e.unwrap_err().to_string()
    };
    assert!(with(&|e| e.swap(3, 4)).contains("out of order"));
    assert!(with(&|e| e.retain(|e| e.path.as_bytes() != b"7")).contains("7/0: its directory"));
    assert!(with(&|e| e[2].path = common::path([b'x'; 300])).contains("name has 300 bytes"));
    let value = vec![1; 20_000];
    let xattr = (b"user.x".to_vec(), value);
    assert!(with(&|e| e[2].attributes.xattrs = vec![xattr.clone()]).contains("user.x"));
    let long = Kind::Symlink(vec![b'x'; 4096]);
    assert!(with(&|e| e[2].kind = long.clone()).contains("target has 4096 bytes"));
    let device = Kind::CharDevice { major: 5000, minor: 1 };
    assert!(with(&|e| e[2].kind = device.clone()).contains("5000:1"));
    assert!(!image.exists());
}

/// Wants no more from the start.
struct Stop;

impl Progress for Stop {
    fn cancelled(&self) -> bool {
        true
    }
}

#[test]
fn a_build_can_be_stopped() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let s = some_tree();
    let output = Output::File { path: image, force: false };
    let e = build(&output, vec![s.top()], &|l| s.open(l), &options(), &Stop).unwrap_err();
    assert!(matches!(e, Error::Interrupted), "{e}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Counts how often each stage asks whether to stop, and stops at one of those times.
#[derive(Default)]
struct Asked {
    stage: AtomicUsize,
    times: [AtomicU64; 3],
    stop: Option<(usize, u64)>,
}

impl Progress for Asked {
    fn stage(&self, stage: Stage) {
        self.stage.store(stage as usize, Relaxed);
    }

    fn cancelled(&self) -> bool {
        let stage = self.stage.load(Relaxed);
        let times = self.times[stage].fetch_add(1, Relaxed) + 1;
        self.stop.is_some_and(|(at, after)| stage > at || stage == at && times >= after)
    }
}

#[test]
fn a_build_can_be_stopped_at_each_node_and_each_piece() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("img");
    let mut s = Source::new();
    for n in 0..3000 {
        s.file(format!("{n:04}"), Vec::new());
    }
    s.file("large", noise(4 << 20, 1));
    let build = |asked: &Asked| {
        let output = Output::File { path: image.clone(), force: true };
        build(&output, vec![s.top()], &|l| s.open(l), &options(), asked)
    };
    let asked = Asked::default();
    let report = build(&asked).unwrap();
    let times = |stage: Stage| asked.times[stage as usize].load(Relaxed);
    assert!(times(Stage::Contents) >= 3000 / 64 + 2 * 4);
    // Nodes of the global trees are rehearsed as well.
    let nodes = report.metadata / u64::from(report.nodesize);
    assert!(nodes > 30 && times(Stage::Trees) >= nodes, "{nodes}, {}", times(Stage::Trees));
    std::fs::remove_file(&image).unwrap();
    for stage in [Stage::Contents, Stage::Trees, Stage::Sync] {
        let most = times(stage);
        for after in [1, most / 3, most].into_iter().filter(|n| *n > 0) {
            let stop = Some((stage as usize, after));
            let e = build(&Asked { stop, ..Asked::default() }).unwrap_err();
            assert!(matches!(e, Error::Interrupted), "{stage:?} {after}: {e}");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }
}

#[test]
fn an_output_that_cannot_be_made_is_named() {
    let dir = larder_simtest::oracle::scratch();
    let mut s = Source::new();
    s.sparse("f", 5000, Data::default());
    let e = s.build(&dir.path().join("no/img"), &options()).unwrap_err().to_string();
    assert!(e.contains("no/img"), "{e}");
}

#[test]
fn a_full_disk_is_an_error_and_nothing_is_left() {
    if !need(&[Need::KernelBtrfs, Need::MkfsBtrfs]) {
        return;
    }
    let dir = larder_simtest::oracle::scratch();
    let disk = dir.path().join("disk");
    mkfs_btrfs::<&str>(&disk, 110 << 20, &[]).unwrap();
    let mount = KernelMount::image(&disk, "").unwrap();
    let mut s = Source::new();
    for n in 0..80 {
        s.file(format!("{n}"), noise(2 << 20, n));
    }
    let e = s.build(&mount.join("img"), &options()).unwrap_err();
    assert!(matches!(e, Error::Output { op: "write", .. }), "{e}");
    assert!(e.to_string().contains("No space left"), "{e}");
    assert_eq!(std::fs::read_dir(mount.path()).unwrap().count(), 0);
    mount.unmount_clean().unwrap();
}

#[test]
fn in_place_the_size_stays_and_what_is_there_is_refused() {
    let dir = larder_simtest::oracle::scratch();
    let image = dir.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(300 << 20).unwrap();
    let s = some_tree();
    let make = |force| {
        let output = Output::InPlace { path: image.clone(), force };
        build(&output, vec![s.top()], &|l| s.open(l), &options(), &larder_build::Silent)
    };
    let report = make(false).unwrap();
    assert_eq!(report.size, 300 << 20);
    assert_sound(&image, "in place");
    let first = std::fs::read(&image).unwrap();
    let refused = make(false).unwrap_err().to_string();
    assert!(refused.contains("already holds a btrfs file system"), "{refused}");
    make(true).unwrap();
    assert!(std::fs::read(&image).unwrap() == first);
    common::assert_linux_agrees(&image, &[("", &s)], "in place");
}
