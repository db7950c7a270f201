//! Streams that Linux sends, received by the engine: the same trees, shared where they were shared,
//! and either side goes on with what the other has received.
//!
//! `LARDER_SCALE` times as many random walks, each over four generations, from `LARDER_SEED` on.

use larder_fs::{ExtentPlace, Filesystem, OpenOptions, SubvolChoice};
use larder_receive::{ImageDir, Observer, Options, Summary, receive};
use larder_simtest::oracle::{
    Aspects, EngineTree, KernelMount, Need, PathRunner, StdTree, btrfs, btrfs_check,
    compare_sources, mkfs_btrfs, need, received_again, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const SIZE: u64 = 512 << 20;

/// How `btrfs send` is asked.
const WAYS: [&[&str]; 3] =
    [&["--proto", "1"], &["--proto", "2"], &["--proto", "2", "--compressed-data"]];

struct Quiet;
impl Observer for Quiet {}

fn open(image: &Path, subvol: &str) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).expect("open the image");
    let subvol = SubvolChoice::Path(subvol.as_bytes().to_vec());
    let options = OpenOptions { commit_interval: None, subvol, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).expect("open")
}

fn receive_here(image: &Path, stream: &Path) -> Summary {
    let fs = open(image, "");
    let input = File::open(stream).expect("the stream");
    let mut to = ImageDir::new(&fs, fs.root(), (0, 0));
    let done = receive(input, &mut to, &Options::default(), &mut Quiet);
    fs.close().expect("close");
    done.unwrap_or_else(|e| panic!("{}: {e}", stream.display()))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// Makes generations of a random tree, and sends each: the first as a whole, the others against the
/// one before, which is a source of clones as well.
fn generations(source: &KernelMount, dir: &Path, seed: u64, way: &[&str]) -> Vec<PathBuf> {
    let work = source.join(format!("work{seed}"));
    btrfs(&["subvolume", "create", text(&work)]).expect("a subvolume");
    std::fs::write(work.join("big"), b"packs well, and more than once. ".repeat(20_000)).unwrap();
    let mut streams = Vec::new();
    for n in 0..4u64 {
        PathRunner::new(&work).walk(seed * 4 + n, 60, |_| true);
        std::fs::write(work.join(format!("gen{n}")), n.to_string().repeat(9000)).unwrap();
        let name = |n| format!("g{seed}_{n}");
        let snapshot = source.join(name(n));
        btrfs(&["subvolume", "snapshot", "-r", text(&work), text(&snapshot)]).expect("a snapshot");
        let stream = dir.join(name(n));
        let parent = source.join(name(n.saturating_sub(1)));
        let mut args = vec!["send", "-q"];
        args.extend(way);
        if n > 0 {
            args.extend(["-p", text(&parent), "-c", text(&parent)]);
        }
        args.extend(["-f", text(&stream), text(&snapshot)]);
        btrfs(&args).expect("btrfs send");
        streams.push(stream);
    }
    streams
}

/// What differs between a directory and a subvolume of the image.
fn differences(source: &Path, image: &Path, name: &str) -> Vec<String> {
    let fs = open(image, name);
    let found = compare_sources(&StdTree::new(source), &EngineTree(&fs), Aspects::copy());
    fs.close().expect("close");
    found.expect("compare").iter().map(ToString::to_string).collect()
}

/// Has the image what was sent? Says `false` if it has not, but has what Linux makes of the stream.
fn is_same(source: &KernelMount, image: &Path, name: &str, stream: &Path) -> bool {
    let found = differences(&source.join(name), image, name);
    if found.is_empty() {
        return true;
    }
    let again = received_again(source.path(), stream, name).expect("received by Linux");
    if differences(&again, image, name).is_empty() {
        eprintln!("{name}: Linux does not send {found:?}");
        return false;
    }
    let kept = std::env::temp_dir().join("larder-failed-stream");
    std::fs::copy(stream, &kept).expect("kept");
    panic!("{name}: {found:#?}; the stream is in {}", kept.display());
}

/// Linux makes the generations of one tree, and they are received by the engine, Linux and the
/// engine again.
fn in_turn(source: &KernelMount, dir: &Path, seed: u64) {
    let to = dir.join("to.img");
    let way = WAYS[usize::try_from(seed).unwrap() % WAYS.len()];
    mkfs_btrfs(&to, SIZE, &["-q"]).expect("mkfs.btrfs");
    let streams = generations(source, dir, seed, way);
    for (n, stream) in streams.iter().enumerate() {
        if n == 2 {
            let mount = KernelMount::image(&to, "").expect("mount what was received");
            btrfs(&["receive", "-q", "-f", text(stream), text(mount.path())])
                .unwrap_or_else(|e| panic!("Linux goes on, seed {seed}: {e:#}"));
            mount.unmount_clean().expect("unmount");
        } else {
            receive_here(&to, stream);
        }
        if !is_same(source, &to, &format!("g{seed}_{n}"), stream) {
            break;
        }
    }
    for stream in &streams {
        std::fs::remove_file(stream).unwrap();
    }
    btrfs_check(&to, true).assert_clean(&format!("seed {seed}, {way:?}"));
    std::fs::remove_file(&to).unwrap();
}

#[test]
fn generations_from_linux_in_turn_with_linux() {
    if !need(&NEEDS) {
        return;
    }
    /// Trees that are made in one image.
    const TOGETHER: usize = 30;
    let dir = scratch();
    let number =
        |name: &str, or| std::env::var(name).ok().and_then(|s| s.parse().ok()).unwrap_or(or);
    let (first, cases) = (number("LARDER_SEED", 0), 6 * number("LARDER_SCALE", 1));
    let from = dir.path().join("from.img");
    for begin in (first..first + cases).step_by(TOGETHER) {
        mkfs_btrfs(&from, SIZE, &["-q"]).expect("mkfs.btrfs");
        let source = KernelMount::image(&from, "compress=zstd").expect("mount");
        for seed in (begin..first + cases).take(TOGETHER) {
            in_turn(&source, dir.path(), seed);
        }
        source.unmount_clean().expect("unmount");
        std::fs::remove_file(&from).unwrap();
    }
}

/// The places of a file's extents: address, bytes there, compressed.
fn places(fs: &Filesystem, name: &str) -> Vec<(u64, u64, bool)> {
    let id = fs.lookup(fs.root(), name.as_bytes()).expect("the file").id;
    let mut out = Vec::new();
    fs.map_extents(id, 0, &mut |e| {
        if let ExtentPlace::Device { at, len, compressed, .. } = e.place {
            out.push((at.0, len, compressed));
        }
        true
    })
    .expect("map");
    out
}

#[test]
fn packed_extents_arrive_as_they_are_and_clones_share() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    for method in ["zstd", "zlib", "lzo"] {
        let (from, to) = (dir.path().join("from.img"), dir.path().join("to.img"));
        mkfs_btrfs(&from, SIZE, &["-q"]).expect("mkfs.btrfs");
        mkfs_btrfs(&to, SIZE, &["-q"]).expect("mkfs.btrfs");
        let source = KernelMount::image(&from, &format!("compress={method}")).expect("mount");
        let work = source.join("work");
        btrfs(&["subvolume", "create", text(&work)]).expect("a subvolume");
        let bytes: Vec<u8> = (0..1_000_000u32).flat_map(|n| (n / 50).to_le_bytes()).collect();
        std::fs::write(work.join("file"), &bytes[..3_999_999]).unwrap();
        std::fs::write(work.join("tiny"), "tiny ".repeat(200)).unwrap();
        source.sync().unwrap();
        let copied = std::process::Command::new("cp")
            .args(["--reflink=always", text(&work.join("file")), text(&work.join("clone"))])
            .status();
        assert!(copied.unwrap().success());
        let (snapshot, stream) = (source.join("snap"), dir.path().join("stream"));
        btrfs(&["subvolume", "snapshot", "-r", text(&work), text(&snapshot)]).expect("a snapshot");
        let args = ["send", "-q", "--proto", "2", "--compressed-data", "-f"];
        btrfs(&[&args[..], &[text(&stream), text(&snapshot)]].concat()).expect("btrfs send");
        receive_here(&to, &stream);
        assert_eq!(differences(&snapshot, &to, "snap"), [""; 0], "{method}");
        let theirs = source.unmount_clean().map(|()| open(&from, "snap")).expect("unmount");
        let here = open(&to, "snap");
        let sizes = |fs: &Filesystem| -> Vec<(u64, bool)> {
            places(fs, "file").into_iter().map(|(_, len, packed)| (len, packed)).collect()
        };
        assert_eq!(sizes(&here), sizes(&theirs), "{method}: extents are stored as they were");
        assert!(sizes(&here).iter().all(|(_, packed)| *packed), "{method}");
        assert_eq!(places(&here, "file"), places(&here, "clone"), "{method}: the clone shares");
        here.close().expect("close");
        theirs.close().expect("close");
        btrfs_check(&to, true).assert_clean(method);
        for image in [&from, &to, &stream] {
            std::fs::remove_file(image).unwrap();
        }
    }
}
