//! Streams of ours, received by Linux and by the engine: the trees are equal, generation after
//! generation.
//!
//! Each case is a random history of a subvolume ([`larder_simtest::lineage`]), told by three
//! snapshots. The first is sent whole, the others as differences, the last one with more to clone
//! from. `LARDER_SCALE=50` does it fifty times as often, from `LARDER_SEED` on.

use larder_format::TreeId;
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{Compress, Filesystem, Frozen, OpenOptions, Packing, SubvolChoice};
use larder_receive::{ImageDir, Observer, receive};
use larder_send::{Options, Source, send};
use larder_simtest::lineage::Lineage;
use larder_simtest::oracle::{
    Aspects, EngineTree, KernelMount, Need, StdTree, btrfs_check, compare_sources, mkfs_btrfs,
    need, scratch,
};
use larder_stream::{Protocol, StreamWriter};
use larder_volume::{FileDevice, OpenMode};
use std::io::{Cursor, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

fn open(image: &Path, packs: bool) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let compress = packs.then_some(Compress { packing: Packing::default(), force: false });
    let options = OpenOptions { commit_interval: None, compress, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

fn stream(source: &Source<'_>, protocol: Protocol) -> Vec<u8> {
    let mut writer = StreamWriter::new(Vec::new(), protocol);
    let options = Options { compressed_data: protocol == Protocol::V2, no_data: false };
    send(source, options, &mut writer, &mut |_| ()).unwrap();
    writer.into_inner()
}

struct Quiet;
impl Observer for Quiet {}

/// Both of them get every stream.
struct Receivers<'a> {
    linux: &'a Path,
    here: &'a Filesystem,
}

impl Receivers<'_> {
    fn receive(&self, stream: &[u8], what: &str) {
        receive_with_linux(stream, self.linux, what);
        let mut to = ImageDir::new(self.here, self.here.root(), (0, 0));
        receive(
            Cursor::new(stream.to_vec()),
            &mut to,
            &larder_receive::Options::default(),
            &mut Quiet,
        )
        .unwrap_or_else(|e| panic!("{what}: {e}\n{}", keep(stream)));
    }

    /// Have both what this subvolume has?
    fn compare(&self, fs: &Filesystem, tree: TreeId, name: &str, what: &str) {
        let sent = fs.another(&SubvolChoice::Id(tree.0)).unwrap();
        let path = SubvolChoice::Path(name.as_bytes().to_vec());
        let here = self.here.another(&path).unwrap();
        let by_linux = StdTree::new(&self.linux.join(name));
        let (sent_tree, here_tree) = (EngineTree(&sent), EngineTree(&here));
        let differs = [
            ("Linux", compare_sources(&sent_tree, &by_linux, Aspects::copy()).unwrap()),
            ("the engine", compare_sources(&sent_tree, &here_tree, Aspects::copy()).unwrap()),
        ];
        sent.leave();
        here.leave();
        for (receiver, found) in differs {
            let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert!(found.is_empty(), "{what}, received by {receiver}: {shown:#?}");
        }
    }
}

/// Keeps a stream that was not received, and says where.
fn keep(stream: &[u8]) -> String {
    let kept = std::env::temp_dir().join("larder-failed-stream");
    std::fs::write(&kept, stream).unwrap();
    format!("the stream is in {}", kept.display())
}

fn receive_with_linux(stream: &[u8], dir: &Path, what: &str) {
    let mut child = Command::new("btrfs")
        .args(["-q", "receive", "-e"])
        .arg(dir)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().write_all(stream);
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    if !out.status.success() || said.contains("ERROR") {
        panic!("{what}: {said}\n{}", keep(stream));
    }
}

/// One case.
fn tell(seed: u64, image: &Path, receivers: &Receivers<'_>) {
    let protocol = if seed.is_multiple_of(2) { Protocol::V1 } else { Protocol::V2 };
    let packs = seed % 4 > 1;
    let mut fs = open(image, packs);
    let mut lineage = Lineage::begin(&fs, &format!("w{seed}"), seed).unwrap();
    let mut frozen: Vec<TreeId> = Vec::new();
    for generation in 0..3 {
        lineage.change(&fs, if generation == 0 { 30 } else { 14 }).unwrap();
        let name = format!("s{seed}-{generation}");
        frozen.push(lineage.snapshot(&fs, &name).unwrap());
        let trees: Vec<Frozen> = frozen.iter().map(|id| fs.frozen(*id).unwrap()).collect();
        let (new, before) = trees.split_last().unwrap();
        let clones: Vec<&Frozen> = before.iter().collect();
        let source = Source {
            subvolume: new,
            name: name.as_bytes(),
            parent: before.last(),
            clones: if generation == 2 { &clones } else { &[] },
        };
        let what = format!("LARDER_SEED={seed}, generation {generation}, {protocol:?}");
        let bytes = stream(&source, protocol);
        assert_eq!(bytes, stream(&source, protocol), "{what}: not deterministic");
        receivers.receive(&bytes, &what);
        receivers.compare(&fs, *frozen.last().unwrap(), &name, &what);
        drop(trees);
        // Numbers of deleted inodes are used again after this.
        fs.close().unwrap();
        drop(fs);
        fs = open(image, packs);
    }
    fs.close().unwrap();
}

fn make(image: &Path) {
    let _ = std::fs::remove_file(image);
    let device = FileDevice::create(image, 2 << 30).unwrap();
    mkfs(&device, &MkfsOptions::default()).unwrap();
}

#[test]
fn linux_and_the_engine_receive_what_is_sent() {
    if !need(&NEEDS) {
        return;
    }
    /// Cases that share an image.
    const TOGETHER: usize = 50;
    let scratch = scratch();
    let path = |name| scratch.path().join(name);
    let (image, target, here) = (path("sender"), path("receiver"), path("here"));
    mkfs_btrfs(&target, 2 << 30, &[] as &[&str]).unwrap();
    let mount = KernelMount::image(&target, "").unwrap();
    let (first, cases) = (number("LARDER_SEED", 1), 250 * number("LARDER_SCALE", 1));
    for from in (first..first + cases).step_by(TOGETHER) {
        make(&image);
        make(&here);
        let fs = open(&here, false);
        let receivers = Receivers { linux: mount.path(), here: &fs };
        for seed in (from..first + cases).take(TOGETHER) {
            tell(seed, &image, &receivers);
        }
        fs.close().unwrap();
        btrfs_check(&here, true).assert_clean("what the engine received");
    }
    mount.unmount_clean().unwrap();
    btrfs_check(&target, true).assert_clean("what Linux received");
}
