//! Larder and Linux change a tree in turn, and send each other what has changed.
//!
//! Each case is a tree with generations. The engine makes the first, and Linux receives it. Linux
//! changes what it has received and sends the difference back, and the engine receives it into the
//! image that the first came from. So the parent of each stream is what one side has sent and the
//! other has received. `LARDER_SCALE=100` has a hundred times as many cases, from `LARDER_SEED` on.

use larder_fs::{Compress, Filesystem, OpenOptions, Packing, SubvolChoice};
use larder_receive::{ImageDir, Observer, receive};
use larder_send::{Source, send};
use larder_simtest::lineage::Lineage;
use larder_simtest::ops::Op;
use larder_simtest::oracle::{
    Aspects, EngineTree, KernelMount, Need, PathRunner, StdTree, btrfs, btrfs_check,
    compare_sources, mkfs_btrfs, need, received_again, scratch,
};
use larder_stream::{Protocol, StreamWriter};
use larder_volume::{FileDevice, OpenMode};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const SIZE: u64 = 1 << 30;
/// Each sends one stream against what the other has sent, but for the first.
const GENERATIONS: u64 = 4;
/// Cases that share the images.
const TOGETHER: usize = 25;

struct Quiet;
impl Observer for Quiet {}

fn number(name: &str, or: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(or)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// One tree, changed in turn.
struct Case<'a> {
    seed: u64,
    ours: &'a Path,
    linux: &'a KernelMount,
    stream: PathBuf,
}

impl Case<'_> {
    fn name(&self, generation: u64) -> String {
        format!("s{}-{generation}", self.seed)
    }

    /// Its copy that is changed for the generation.
    fn work(&self, generation: u64) -> String {
        format!("w{}-{generation}", self.seed)
    }

    fn protocol(&self) -> Protocol {
        if self.seed.is_multiple_of(3) { Protocol::V1 } else { Protocol::V2 }
    }

    /// Are compressed extents sent as they are?
    fn packed(&self) -> bool {
        self.seed % 3 == 2
    }

    fn open(&self) -> Arc<Filesystem> {
        let device = FileDevice::open(self.ours, OpenMode::Write).expect("open the image");
        let packs = self.seed.is_multiple_of(2);
        let compress = packs.then_some(Compress { packing: Packing::default(), force: false });
        let options = OpenOptions { commit_interval: None, compress, ..OpenOptions::default() };
        Filesystem::open(Arc::new(device), options).expect("open")
    }

    /// The engine makes a generation and sends it.
    fn send(&self, generation: u64) {
        let fs = self.open();
        let (work, name) = (self.work(generation), self.name(generation));
        let subvol = |name: &str| fs.lookup(fs.root(), name.as_bytes()).expect("there").id.subvol;
        let seed = self.seed * GENERATIONS + generation;
        let mut lineage = match generation.checked_sub(1) {
            None => Lineage::begin(&fs, &work, seed).expect("a subvolume"),
            Some(before) => {
                let before = subvol(&self.name(before));
                fs.snapshot(before, fs.root(), work.as_bytes(), false).expect("a snapshot");
                Lineage::of(&work, seed)
            }
        };
        lineage.change(&fs, if generation == 0 { 40 } else { 15 }).expect("changes");
        let new = lineage.snapshot(&fs, &name).expect("a snapshot");
        let frozen: Vec<_> =
            (0..generation).map(|n| fs.frozen(subvol(&self.name(n))).expect("read-only")).collect();
        let new = fs.frozen(new).expect("read-only");
        let clones: Vec<_> = frozen.iter().collect();
        let (name, parent) = (name.as_bytes(), frozen.last());
        let source = Source { subvolume: &new, name, parent, clones: &clones };
        let options = larder_send::Options { compressed_data: self.packed(), no_data: false };
        let file = File::create(&self.stream).expect("a file");
        send(&source, options, &mut StreamWriter::new(file, self.protocol()), &mut |_| ())
            .expect("sent");
        drop((frozen, new));
        fs.close().expect("close");
    }

    fn receive(&self) -> Result<(), larder_receive::Error> {
        let fs = self.open();
        let mut to = ImageDir::new(&fs, fs.root(), (0, 0));
        let input = File::open(&self.stream).expect("the stream");
        let done = receive(input, &mut to, &larder_receive::Options::default(), &mut Quiet);
        fs.close().expect("close");
        done.map(drop)
    }

    /// Linux changes what it has received last, and sends it.
    fn send_by_linux(&self, generation: u64) -> anyhow::Result<()> {
        let [before, work, new] =
            [self.name(generation - 1), self.work(generation), self.name(generation)]
                .map(|name| self.linux.join(name));
        btrfs(&["subvolume", "snapshot", text(&before), text(&work)])?;
        // Streams do not say which files have no checksums, and Linux does not clone between a file
        // that has them and one that has none.
        let wanted = |op: &Op| !matches!(op, Op::NoCow(_));
        PathRunner::new(&work).walk(self.seed * GENERATIONS + generation, 40, wanted);
        btrfs(&["subvolume", "snapshot", "-r", text(&work), text(&new)])?;
        let mut args = vec!["send", "-q", "-p", text(&before), "-c", text(&before)];
        match self.protocol() {
            Protocol::V1 => args.extend(["--proto", "1"]),
            Protocol::V2 => args.extend(["--proto", "2"]),
        }
        if self.packed() {
            args.push("--compressed-data");
        }
        args.extend(["-f", text(&self.stream), text(&new)]);
        btrfs(&args)?;
        Ok(())
    }

    fn receive_by_linux(&self) -> anyhow::Result<()> {
        let args = ["receive", "-q", "-f", text(&self.stream), text(self.linux.path())];
        btrfs(&args)?;
        Ok(())
    }

    /// What differs between a directory and the engine's subvolume.
    fn differences(&self, there: &Path, generation: u64) -> Vec<String> {
        let (fs, there) = (self.open(), StdTree::new(there));
        let here = SubvolChoice::Path(self.name(generation).into_bytes());
        let here = fs.another(&here).expect("there");
        let found = compare_sources(&there, &EngineTree(&here), Aspects::copy()).expect("compare");
        here.leave();
        fs.close().expect("close");
        found.iter().map(ToString::to_string).collect()
    }

    /// Have both the same? Says `false` if not, but the engine has what Linux makes of the stream.
    fn is_same(&self, generation: u64) -> bool {
        let name = self.name(generation);
        let found = self.differences(&self.linux.join(&name), generation);
        if found.is_empty() {
            return true;
        }
        if generation % 2 == 1 {
            let again = received_again(self.linux.path(), &self.stream, &name).expect("received");
            // What is made passes through the root directory, and Linux does not send its time.
            let only_time = found.iter().all(|what| what.starts_with("/: mtime "));
            if only_time || self.differences(&again, generation).is_empty() {
                eprintln!("{}: Linux does not send {found:?}", self.what(generation));
                return false;
            }
        }
        panic!("{}: {found:#?}", self.what(generation));
    }

    fn what(&self, generation: u64) -> String {
        let kept = std::env::temp_dir().join("larder-failed-stream");
        let _ = std::fs::copy(&self.stream, &kept);
        format!(
            "LARDER_SEED={}, generation {generation}: the stream is in {}",
            self.seed,
            kept.display()
        )
    }

    fn run(&self) {
        for generation in 0..GENERATIONS {
            if generation % 2 == 0 {
                self.send(generation);
                self.receive_by_linux()
                    .unwrap_or_else(|e| panic!("{}: {e:#}", self.what(generation)));
            } else {
                self.send_by_linux(generation)
                    .unwrap_or_else(|e| panic!("{}: {e:#}", self.what(generation)));
                self.receive().unwrap_or_else(|e| panic!("{}: {e}", self.what(generation)));
            }
            if !self.is_same(generation) {
                return;
            }
        }
    }
}

#[test]
fn each_goes_on_with_what_the_other_has_sent() {
    if !need(&NEEDS) {
        return;
    }
    let scratch = scratch();
    let path = |name| scratch.path().join(name);
    let (ours, theirs) = (path("ours"), path("theirs"));
    let (first, cases) = (number("LARDER_SEED", 1), 12 * number("LARDER_SCALE", 1));
    for from in (first..first + cases).step_by(TOGETHER) {
        for image in [&ours, &theirs] {
            let _ = std::fs::remove_file(image);
            mkfs_btrfs(image, SIZE, &["-q"]).expect("mkfs.btrfs");
        }
        let linux = KernelMount::image(&theirs, "compress=zstd").expect("mount");
        for seed in (from..first + cases).take(TOGETHER) {
            Case { seed, ours: &ours, linux: &linux, stream: path("stream") }.run();
        }
        linux.unmount_clean().expect("unmount");
        btrfs_check(&ours, true).assert_clean("what the engine has");
        btrfs_check(&theirs, true).assert_clean("what Linux has");
    }
}
