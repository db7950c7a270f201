//! File systems on several devices, which Linux made: everything is read, whole and with devices
//! left out.

use larder_check::{Kind as Finding, Severity};
use larder_format::items::{Chunk, RootItem};
use larder_format::node::NodeView;
use larder_format::{CsumType, DeviceId, Key, KeyType, Logical, ObjectId, Superblock};
use larder_fs::{Filesystem, OpenOptions};
use larder_simtest::oracle::{
    Aspects, DeviceSet, EngineTree, Fixture, Manifest, Need, StdTree, copy_image, manifest, need,
    populate, scratch,
};
use larder_volume::{Assembly, Device, FileDevice, MappedChunk, OpenMode, Volume};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NEEDS: [Need; 2] = [Need::MkfsBtrfs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// Profile of data and of metadata, devices, and how many of them may be lost.
type Kind = (&'static str, &'static str, usize, usize);

const KINDS: [Kind; 10] = [
    ("single", "raid1", 2, 0),
    ("raid0", "raid0", 3, 0),
    ("raid1", "raid1", 3, 1),
    ("raid1c3", "raid1c3", 4, 2),
    ("raid1c4", "raid1c4", 4, 3),
    ("raid10", "raid10", 5, 1),
    ("raid5", "raid1", 3, 1),
    ("raid5", "raid5", 4, 1),
    ("raid6", "raid1c3", 4, 2),
    ("raid6", "raid6", 5, 2),
];

/// Makes a file system of a kind, fills it, and says what Linux shows of it.
fn made_by_linux(dir: &Path, (data, metadata, devices, _): Kind) -> (DeviceSet, Manifest) {
    let sizes: Vec<u64> = (0..devices as u64).map(|n| (256 + 16 * n) * MIB).collect();
    let set = DeviceSet::make(dir, &sizes, &["-d", data, "-m", metadata]).unwrap();
    let mount = set.mount("").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    mount.unmount_clean().unwrap();
    let mount = set.mount("ro").unwrap();
    let shown = manifest(&StdTree::new(mount.path())).unwrap();
    mount.unmount_clean().unwrap();
    (set, shown)
}

fn open(images: &[PathBuf]) -> Vec<Arc<dyn Device>> {
    let open = |path: &PathBuf| -> Arc<dyn Device> {
        Arc::new(FileDevice::open(path, OpenMode::Read).unwrap())
    };
    images.iter().map(open).collect()
}

/// Kinds of the errors that a check with all data finds.
fn errors_of_a_check(images: &[PathBuf]) -> Vec<Finding> {
    let options = larder_check::Options { data: true, ..Default::default() };
    let report = larder_check::check(&open(images), &options, &|_| {}).unwrap();
    let errors = report.findings.iter().filter(|f| f.severity() == Severity::Error);
    errors.map(|f| f.kind).collect()
}

/// All sets of up to `most` of the numbers 1 to `n`.
fn losses(n: usize, most: usize) -> Vec<Vec<usize>> {
    let set = |bits: usize| (1..=n).filter(|i| bits >> (i - 1) & 1 == 1).collect::<Vec<_>>();
    (0..1usize << n).map(set).filter(|lost| lost.len() <= most).collect()
}

/// Reads through a volume alone, without the engine.
struct Walk {
    volume: Volume,
    superblock: Box<Superblock>,
    csum: CsumType,
    seen: BTreeSet<Logical>,
    /// Sectors whose checksum was compared.
    sectors: u64,
}

impl Walk {
    fn new(devices: Vec<Arc<dyn Device>>) -> Self {
        let found = Assembly::of(devices).unwrap();
        let superblock = found.superblock.clone();
        let (csum, seen) = (superblock.csum_type(), BTreeSet::new());
        Self { volume: Volume::open(found, true).unwrap(), superblock, csum, seen, sectors: 0 }
    }

    /// All trees that hang on the superblock; chunks first. Data is compared with its checksums.
    fn everything(mut self) -> (usize, u64) {
        self.tree(self.superblock.chunk_root());
        assert!(self.volume.first_lost(|_| true).is_none());
        self.tree(self.superblock.root());
        (self.seen.len(), self.sectors)
    }

    fn tree(&mut self, root: Logical) {
        let mut todo = vec![root];
        while let Some(at) = todo.pop() {
            if !self.seen.insert(at) {
                continue;
            }
            let block = self.node(at);
            let node = NodeView(&block);
            if node.level() > 0 {
                todo.extend(node.pointers().iter().map(|p| Logical(p.blockptr.get())));
                continue;
            }
            for slot in 0..node.nritems() {
                let (key, data) = (node.key(slot).unwrap(), node.data(slot).unwrap());
                self.item(key, data, &mut todo);
            }
        }
    }

    /// The node, which the first copy has: that is the one that needs no missing device.
    fn node(&self, at: Logical) -> Vec<u8> {
        let mut block = vec![0; self.superblock.nodesize() as usize];
        self.volume.read_block(at, &mut block, 0).unwrap();
        let node = NodeView(&block);
        assert!(node.bytenr() == at && node.csum_matches(self.csum), "node {at}");
        block
    }

    fn item(&mut self, key: Key, data: &[u8], todo: &mut Vec<Logical>) {
        match key.kind {
            KeyType::CHUNK_ITEM => {
                let chunk = Chunk::parse(data).unwrap();
                let mapped = MappedChunk::from_item(Logical(key.offset), &chunk);
                self.volume.add_chunk(mapped).unwrap();
            }
            KeyType::ROOT_ITEM => todo.push(RootItem::parse(data).unwrap().root()),
            KeyType::EXTENT_CSUM if key.objectid == ObjectId::EXTENT_CSUM => {
                for (n, sum) in data.chunks_exact(self.csum.size()).enumerate() {
                    self.sector(Logical(key.offset).plus(n as u64 * 4096), sum);
                }
            }
            _ => {}
        }
    }

    /// Every copy that can be read is right, and the first can be read.
    fn sector(&mut self, at: Logical, sum: &[u8]) {
        self.sectors += 1;
        let mut sector = [0; 4096];
        for copy in 0..self.volume.copies(at).unwrap() {
            let read = self.volume.read(at, &mut sector, copy);
            assert!(read.is_ok() || copy > 0, "{at}: {read:?}");
            if read.is_ok() {
                assert!(self.csum.compute(&sector)[..sum.len()] == *sum, "{at}, copy {copy}");
            }
        }
    }
}

#[test]
fn every_profile_is_read_with_devices_left_out() {
    if !need(&NEEDS) {
        return;
    }
    for kind in KINDS {
        let dir = scratch();
        let (set, linux) = made_by_linux(dir.path(), kind);
        let (data, metadata, devices, tolerated) = kind;
        let mut whole = None;
        for lost in losses(devices, tolerated) {
            let name = format!("{data}/{metadata} on {devices} without {lost:?}");
            let images = set.without(&lost);
            let read = Walk::new(open(&images)).everything();
            assert!(read.1 > 1000, "{name}: {read:?}");
            assert_eq!(*whole.get_or_insert(read), read, "{name}");
            // The engine reads what the volume gives it; so the worst cases do for it.
            if !lost.is_empty() && lost.len() < tolerated {
                continue;
            }
            let options = OpenOptions {
                read_only: true,
                degraded: !lost.is_empty(),
                commit_interval: None,
                ..OpenOptions::default()
            };
            let fs = Filesystem::open_devices(open(&images), options)
                .unwrap_or_else(|e| panic!("{name}: {e}"));
            let missing: Vec<usize> =
                fs.info().missing_devices.iter().map(|m| m.id.0 as usize).collect();
            assert_eq!(missing, lost, "{name}");
            let errors = errors_of_a_check(&images);
            assert_eq!(errors, vec![Finding::DeviceMissing; lost.len()], "{name}");
            let engine = manifest(&EngineTree(&fs)).unwrap_or_else(|e| panic!("{name}: {e:#}"));
            fs.close().unwrap();
            let differences = linux.differences(&engine, Aspects::same_image());
            assert_eq!(differences, [], "{name}");
        }
    }
}

/// What was fsynced after the last commit is in a log, which a reader replays in memory.
#[test]
fn a_log_is_replayed_without_a_device() {
    if !need(&NEEDS) {
        return;
    }
    let (dir, cut) = (scratch(), scratch());
    let args = ["-d", "raid5", "-m", "raid1"];
    let set = DeviceSet::make(dir.path(), &[256 * MIB; 3], &args).unwrap();
    let mount = set.mount("").unwrap();
    mount.sync().unwrap();
    let contents: Vec<u8> = (0..400_000u32).map(|i| (i / 64) as u8).collect();
    std::fs::write(mount.join("file"), &contents).unwrap();
    std::fs::File::open(mount.join("file")).unwrap().sync_all().unwrap();
    // As a power cut leaves it: the kernel's mount is still there.
    let images: Vec<PathBuf> = set.images()[1..]
        .iter()
        .map(|image| {
            let copy = cut.path().join(image.file_name().unwrap());
            copy_image(image, &copy).unwrap();
            copy
        })
        .collect();
    mount.unmount_clean().unwrap();
    let options = OpenOptions { read_only: true, degraded: true, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(open(&images), options).unwrap();
    let mut back = vec![0; contents.len() + 1];
    let file = fs.lookup(fs.root(), b"file").unwrap().id;
    assert_eq!(fs.read(file, 0, &mut back).unwrap(), contents.len());
    assert!(back[..contents.len()] == contents);
    fs.close().unwrap();
}

/// A device that was away while the others were written is recognised. It is not asked for what
/// others have, and what only it has counts where the checksums say so.
#[test]
fn a_device_that_was_away_is_read_last() {
    if !need(&NEEDS) {
        return;
    }
    let (dir, old) = (scratch(), scratch());
    let args = ["-d", "raid1", "-m", "raid1"];
    let set = DeviceSet::make(dir.path(), &[256 * MIB; 2], &args).unwrap();
    let write = |byte: u8| {
        let mount = set.mount("nodatasum").unwrap();
        std::fs::write(mount.join("file"), vec![byte; 200_000]).unwrap();
        mount.unmount_clean().unwrap();
    };
    write(1);
    let away = old.path().join("away");
    copy_image(&set.images()[0], &away).unwrap();
    write(2);
    // Without checksums only the order tells.
    let images = [away, set.images()[1].clone()];
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(open(&images), options).unwrap();
    let stale: Vec<u64> = fs.info().stale_devices.iter().map(|s| s.id.0).collect();
    assert_eq!((stale, fs.info().missing_devices), (vec![1], Vec::new()));
    let mut back = vec![0; 200_000];
    let file = fs.lookup(fs.root(), b"file").unwrap().id;
    assert_eq!(fs.read(file, 0, &mut back).unwrap(), 200_000);
    assert!(back.iter().all(|b| *b == 2));
    fs.close().unwrap();
}

#[test]
fn what_is_missing_is_named() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let sizes = [256 * MIB; 3];
    let set = DeviceSet::make(dir.path(), &sizes, &["-d", "raid5", "-m", "raid1c3"]).unwrap();
    let refused = |images: &[PathBuf], degraded, read_only| {
        let options = OpenOptions { degraded, read_only, ..OpenOptions::default() };
        Filesystem::open_devices(open(images), options).unwrap_err().to_string()
    };
    let text = refused(&set.without(&[2]), false, true);
    assert!(text.contains("device 2 (") && text.ends_with(") is missing"), "{text}");
    // The trees are on all three devices, so what is left can be read.
    let options = OpenOptions { degraded: true, read_only: true, ..OpenOptions::default() };
    let fs = Filesystem::open_devices(open(&set.without(&[1, 3])), options).unwrap();
    for chunk in fs.info().lost_chunks {
        assert_eq!((chunk.profile, chunk.devices), ("raid5", vec![DeviceId(1), DeviceId(3)]));
    }
    assert!(!fs.info().lost_chunks.is_empty());
    drop(fs);
}
