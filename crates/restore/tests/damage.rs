//! Images that the kernel filled, damaged in one place or several, and what can be had from them.
//!
//! Two questions are asked of each: is everything back that must be (for the roots of trees:
//! everything), and is whatever is not as it was *listed*? The second is asked of random damage,
//! too.

use larder_format::{Generation, Logical, ObjectId};
use larder_restore::{
    Loss, Observer, Options, Reader, Report, Request, Target, Tree, Trees, When, points, restore,
};
use larder_simtest::oracle::{
    Aspects, Fixture, KernelMount, Manifest, Need, StdTree, btrfs, copy_image, manifest,
    mkfs_btrfs, need, populate, scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

/// A path that shows as one.
#[derive(PartialEq)]
struct Shown(Vec<u8>);

impl std::fmt::Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

/// Remembers what it hears.
#[derive(Debug, Default)]
struct Ears {
    losses: Mutex<Vec<Loss>>,
    notes: Mutex<Vec<String>>,
}

impl Observer for Ears {
    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.into());
    }
    fn loss(&self, loss: &Loss) {
        self.losses.lock().unwrap().push(loss.clone());
    }
}

impl Ears {
    fn losses(&self) -> Vec<Loss> {
        self.losses.lock().unwrap().clone()
    }
    fn noted(&self, part: &str) -> bool {
        self.notes.lock().unwrap().iter().any(|n| n.contains(part))
    }
}

const OPTIONS: Options = Options { super_copy: None, scan: true };

fn device(image: &Path) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(image, OpenMode::Read).unwrap())
}

fn everything(dest: &Path) -> Request {
    Request {
        when: When::Newest,
        subvolume: None,
        path: None,
        snapshots: true,
        skip_bad: false,
        target: Target::Directory { path: dest.to_owned(), force: false },
    }
}

fn run(image: &Path, request: &Request) -> (larder_restore::Result<Report>, Ears) {
    let ears = Ears::default();
    let report = Reader::open(device(image), OPTIONS, &ears).and_then(|r| restore(&r, request));
    (report, ears)
}

/// An image and what is in it. The file has no name any more: samples are kept in statics, which
/// are never dropped.
struct Sample {
    _file: std::fs::File,
    image: PathBuf,
    manifest: Manifest,
}

impl Sample {
    /// An image with nodes of so many bytes that was filled on one mount.
    fn filled(nodesize: u32, fill: impl FnOnce(&KernelMount)) -> Self {
        let dir = scratch();
        let image = dir.path().join("sample.img");
        mkfs_btrfs(&image, 512 << 20, &["--nodesize", &nodesize.to_string()]).unwrap();
        let mount = KernelMount::image(&image, "noatime").unwrap();
        fill(&mount);
        mount.unmount_clean().unwrap();
        Self::of(&image, dir)
    }

    /// The unmounted image; its directory goes.
    fn of(image: &Path, dir: tempfile::TempDir) -> Self {
        let mount = KernelMount::image_read_only(image, "").unwrap();
        let manifest = manifest(&StdTree::new(mount.path())).unwrap();
        mount.unmount().unwrap();
        let file = std::fs::File::open(image).unwrap();
        dir.close().unwrap();
        Self { image: format!("/proc/self/fd/{}", file.as_raw_fd()).into(), _file: file, manifest }
    }
}

/// An image that the kernel filled, with nodes of so many bytes, made once.
fn sample(nodesize: u32) -> &'static Sample {
    static SMALL: OnceLock<Sample> = OnceLock::new();
    static USUAL: OnceLock<Sample> = OnceLock::new();
    let cell = if nodesize == 4096 { &SMALL } else { &USUAL };
    cell.get_or_init(|| {
        let dir = scratch();
        let image = dir.path().join("sample.img");
        mkfs_btrfs(&image, 512 << 20, &["--nodesize", &nodesize.to_string()]).unwrap();
        let mount = KernelMount::image(&image, "noatime").unwrap();
        populate(mount.path(), &Fixture::small()).unwrap();
        mount.unmount_clean().unwrap();
        // Another transaction, so that there is a yesterday.
        let mount = KernelMount::image(&image, "noatime").unwrap();
        std::fs::write(mount.join("last"), b"the last file").unwrap();
        mount.unmount_clean().unwrap();
        Sample::of(&image, dir)
    })
}

fn ready() -> bool {
    need(&[Need::MkfsBtrfs, Need::KernelBtrfs, Need::Root])
}

/// A copy to be damaged, and a place to restore to.
fn work(sample: &Sample) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = scratch();
    let (image, dest) = (dir.path().join("damaged.img"), dir.path().join("dest"));
    copy_image(&sample.image, &image).unwrap();
    (dir, image, dest)
}

/// Overwrites every copy of some blocks.
fn destroy(image: &Path, blocks: &[Logical]) {
    let ears = Ears::default();
    let reader = Reader::open(device(image), OPTIONS, &ears).unwrap();
    let file = std::fs::File::options().write(true).open(image).unwrap();
    let noise = vec![0xa5; reader.superblock().nodesize() as usize];
    for at in blocks {
        for stripe in reader.volume().map().lookup(*at, 1).unwrap().stripes {
            file.write_all_at(&noise, stripe.at.0).unwrap();
        }
    }
}

fn trees(image: &Path) -> Trees {
    let ears = Ears::default();
    let reader = Reader::open(device(image), OPTIONS, &ears).unwrap();
    let point = points::choose(&reader, When::Newest).unwrap();
    Trees::open(&reader, point, point.generation, false)
}

/// Addresses of all nodes of a tree, its root first.
fn nodes(image: &Path, id: ObjectId) -> Vec<(Logical, u8)> {
    let ears = Ears::default();
    let reader = Reader::open(device(image), OPTIONS, &ears).unwrap();
    let point = points::choose(&reader, When::Newest).unwrap();
    let trees = Trees::open(&reader, point, point.generation, false);
    let tree = match id {
        ObjectId::CHUNK_TREE => {
            let sb = reader.superblock();
            let generation = Some(sb.chunk_root_generation());
            Tree::plain(
                id,
                larder_restore::RootPointer {
                    at: sb.chunk_root(),
                    generation,
                    level: sb.chunk_root_level,
                },
            )
        }
        id => trees.tree(id).unwrap(),
    };
    let mut all = Vec::new();
    tree.nodes(&reader, &mut |n| {
        all.push((n.bytenr(), n.level()));
        ControlFlow::Continue(())
    });
    all
}

fn root(image: &Path, id: ObjectId) -> Logical {
    nodes(image, id)[0].0
}

/// Differences between what was there and what was restored, without what no copy keeps.
fn differences(sample: &Sample, dest: &Path) -> Vec<(Shown, String)> {
    let restored = manifest(&StdTree::new(dest)).unwrap();
    let all = sample
        .manifest
        .differences(&restored, Aspects { ignore_top_mtime: false, ..Aspects::copy() });
    // A property of btrfs, which no other file system takes.
    all.into_iter()
        .filter(|d| !d.what.contains("btrfs.compression"))
        .map(|d| (Shown(d.path), d.what))
        .collect()
}

#[track_caller]
fn assert_all_back(sample: &Sample, image: &Path, dest: &Path) -> (Report, Ears) {
    let (report, ears) = run(image, &everything(dest));
    let report = report.unwrap();
    assert_eq!(ears.losses(), [], "{:#?}", ears.notes);
    let differences = differences(sample, dest);
    assert!(differences.is_empty(), "{differences:#?}\n{:#?}", ears.notes);
    (report, ears)
}

const BOTH: [u32; 2] = [4096, 16384];

#[test]
fn a_sound_image_is_restored_as_it_is() {
    if !ready() {
        return;
    }
    for nodesize in BOTH {
        let sample = sample(nodesize);
        let (_dir, image, dest) = work(sample);
        let (report, ears) = assert_all_back(sample, &image, &dest);
        assert!(!ears.noted("searching"), "nothing had to be searched for");
        assert!(report.files > 300 && report.subvolumes > 2 && report.symlinks > 0, "{report:?}");
        assert!(report.unverified_bytes < report.bytes / 2, "{report:?}");
        // Once more: not over what is there.
        let (again, _) = run(&image, &everything(&dest));
        assert!(again.unwrap_err().to_string().contains("not empty"));
    }
}

#[test]
fn roots_may_be_destroyed() {
    if !ready() {
        return;
    }
    for nodesize in BOTH {
        let sample = sample(nodesize);
        let subvolumes: Vec<ObjectId> = trees(&sample.image).subvolumes.keys().copied().collect();
        assert!(subvolumes.len() > 2);
        let mut cases: Vec<Vec<ObjectId>> = [
            ObjectId::CHUNK_TREE,
            ObjectId::ROOT_TREE,
            ObjectId::EXTENT_TREE,
            ObjectId::CSUM_TREE,
            ObjectId::DEV_TREE,
        ]
        .map(|id| vec![id])
        .to_vec();
        cases.extend(subvolumes.iter().map(|id| vec![*id]));
        cases.push(vec![
            ObjectId::CHUNK_TREE,
            ObjectId::ROOT_TREE,
            ObjectId::FS_TREE,
            ObjectId::CSUM_TREE,
        ]);
        for case in cases {
            let (_dir, image, dest) = work(sample);
            let blocks: Vec<Logical> = case.iter().map(|id| root(&image, *id)).collect();
            let level = case.iter().map(|id| nodes(&image, *id)[0].1).collect::<Vec<_>>();
            destroy(&image, &blocks);
            // A tree of one leaf has lost everything with its root; the older one that is left is
            // not the same.
            if case.iter().zip(&level).any(|(id, l)| id.is_subvolume() && *l == 0) {
                let (report, ears) = run(&image, &everything(&dest));
                report.unwrap();
                assert!(!ears.losses().is_empty(), "{case:?}: {:#?}", ears.notes);
                continue;
            }
            let (report, ears) = run(&image, &everything(&dest));
            let report = report.unwrap();
            let different = differences(sample, &dest);
            assert!(
                ears.losses().is_empty() && different.is_empty(),
                "{nodesize} {case:?} {level:?}:\n{:#?}\n{different:#?}\n{:#?}",
                ears.losses(),
                ears.notes
            );
            assert!(report.files > 300);
        }
    }
}

/// A root may be written before its commit, and once more with it, elsewhere. Here the first one is
/// left, which leads to half of what it should. The extent tree knows where the second one was.
#[test]
fn a_root_from_before_the_commit_is_not_believed() {
    if !ready() {
        return;
    }
    let sample = sample(4096);
    let (_dir, image, dest) = work(sample);
    let (top, root_tree) = (root(&image, ObjectId::FS_TREE), root(&image, ObjectId::ROOT_TREE));
    let in_use: BTreeSet<Logical> =
        trees(&image).ids().flat_map(|id| nodes(&image, id)).map(|(at, _)| at).collect();
    let ears = Ears::default();
    let (places, bytes) = {
        let reader = Reader::open(device(&image), OPTIONS, &ears).unwrap();
        let map = reader.volume().map();
        let chunk = map.chunk_at(top).unwrap();
        let slots = (chunk.start.0..chunk.start.0 + chunk.length).step_by(4096).map(Logical);
        let last_used = in_use.iter().rfind(|at| slots.clone().any(|slot| slot == **at)).unwrap();
        let free = slots.clone().find(|at| at > last_used).unwrap();
        let mut bytes = reader.block(top).unwrap().to_vec();
        let pointers = larder_format::node::NodeView(&bytes).nritems() as u32;
        assert!(pointers > 1);
        bytes[48..56].copy_from_slice(&free.0.to_le_bytes());
        bytes[96..100].copy_from_slice(&(pointers / 2).to_le_bytes());
        let csum = larder_format::CsumType::Crc32c.compute(&bytes[32..]);
        bytes[..32].copy_from_slice(&csum);
        (map.lookup(free, 1).unwrap().stripes, bytes)
    };
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    for stripe in &places {
        file.write_all_at(&bytes, stripe.at.0).unwrap();
    }
    destroy(&image, &[root_tree, top]);
    let (_, ears) = assert_all_back(sample, &image, &dest);
    assert!(ears.noted("using the root of generation"), "{:#?}", ears.notes);
}

/// Linux's balance writes every tree anew, and shares what snapshots share by other references than
/// before. Each root is still one that its own tree refers to.
#[test]
fn roots_are_found_after_a_balance_of_linux() {
    if !ready() {
        return;
    }
    let sample = Sample::filled(4096, |mount| {
        let at = |name: &str| mount.join(name).into_os_string().into_string().unwrap();
        btrfs(&["subvolume", "create", &at("sub")]).unwrap();
        for n in 0..400 {
            std::fs::write(mount.join(format!("sub/file-{n}")), vec![n as u8; 5000]).unwrap();
        }
        for n in 0..3 {
            btrfs(&["subvolume", "snapshot", &at("sub"), &at(&format!("snapshot-{n}"))]).unwrap();
            std::fs::write(mount.join(format!("snapshot-{n}/new")), b"new").unwrap();
        }
        mount.sync().unwrap();
        btrfs(&["balance", "start", "--full-balance", &at("")]).unwrap();
        std::fs::write(mount.join("sub/after"), b"after").unwrap();
    });
    let (_dir, image, dest) = work(&sample);
    destroy(&image, &[root(&image, ObjectId::ROOT_TREE)]);
    let (report, ears) = assert_all_back(&sample, &image, &dest);
    assert_eq!(report.subvolumes, 5, "{report:?}: {:#?}", ears.notes);
    assert!(report.files > 1600, "{report:?}");
}

/// The chunk tree of mkfs is whole, and a backup root names it; it lacks the chunk that the first
/// mount made.
#[test]
fn chunks_are_found_that_an_older_chunk_tree_lacks() {
    if !ready() {
        return;
    }
    let sample = Sample::filled(16384, |mount| {
        for n in 0..24u8 {
            std::fs::write(mount.join(format!("file-{n}")), vec![n; 1 << 20]).unwrap();
        }
    });
    let (_dir, image, dest) = work(&sample);
    destroy(&image, &[root(&image, ObjectId::CHUNK_TREE)]);
    let (_, ears) = assert_all_back(&sample, &image, &dest);
    assert!(ears.noted("the backup of generation"), "{:#?}", ears.notes);
}

#[test]
fn superblocks_may_be_destroyed_but_one() {
    if !ready() {
        return;
    }
    let sample = sample(16384);
    for lost in [0u64, 1] {
        let (_dir, image, dest) = work(sample);
        let file = std::fs::File::options().write(true).open(&image).unwrap();
        file.write_all_at(&[0; 4096], [64 << 10, 64 << 20][lost as usize]).unwrap();
        let (_, ears) = assert_all_back(sample, &image, &dest);
        assert_eq!(ears.noted("superblock copy 1"), lost == 0);
        // The one that is gone can be asked for, in vain.
        let options = Options { super_copy: Some(lost as usize), scan: false };
        assert!(Reader::open(device(&image), options, &ears).is_err());
        file.write_all_at(&[0; 4096], 64 << 10).unwrap();
        file.write_all_at(&[0; 4096], 64 << 20).unwrap();
        let error = Reader::open(device(&image), OPTIONS, &ears).unwrap_err();
        assert!(error.to_string().contains("not a btrfs"), "{error}");
    }
}

/// Whatever differs has to be listed: by its path, a path above it, or a note on its tree.
#[test]
fn nothing_is_lost_in_silence() {
    if !ready() {
        return;
    }
    for nodesize in BOTH {
        let sample = sample(nodesize);
        let ids: Vec<ObjectId> = trees(&sample.image).subvolumes.keys().copied().collect();
        let mut all: BTreeSet<(Logical, u8)> = BTreeSet::new();
        for id in ids {
            all.extend(nodes(&sample.image, id));
        }
        let all: Vec<Logical> = all.into_iter().map(|(at, _)| at).collect();
        let mut lossy = 0;
        for seed in 0..12u64 {
            let (_dir, image, dest) = work(sample);
            let mut random = fastrand::Rng::with_seed(seed);
            let blocks: Vec<_> =
                (0..1 + seed % 4).map(|_| all[random.usize(..all.len())]).collect();
            destroy(&image, &blocks);
            let (report, ears) = run(&image, &everything(&dest));
            report.unwrap();
            let losses = ears.losses();
            lossy += usize::from(!losses.is_empty());
            let silent: Vec<_> = differences(sample, &dest)
                .into_iter()
                .filter(|(Shown(path), _)| {
                    !losses.iter().any(|l| match &l.path {
                        Some(p) => {
                            p.is_empty()
                                || path == p
                                || path.starts_with(p)
                                || same_file(sample, path, p)
                        }
                        None => false,
                    })
                })
                // A directory whose entries are lost, or whose time is that of an older version, is
                // named by them.
                .collect();
            // What a destroyed leaf held can be known only as a range of inodes.
            let ranges: Vec<_> = losses.iter().filter(|l| l.path.is_none()).collect();
            assert!(
                silent.is_empty() || !ranges.is_empty(),
                "{nodesize} seed {seed} {blocks:?}:\n{silent:#?}\n{losses:#?}\n{:#?}",
                ears.notes
            );
        }
        assert!(lossy > 0, "destroying leaves loses something");
    }
}

/// Is the other path another name of the same file?
fn same_file(sample: &Sample, a: &[u8], b: &[u8]) -> bool {
    let e = &sample.manifest.entries;
    let first = |p: &[u8]| e.get(p).map(|x| x.same_as.clone().unwrap_or_else(|| p.to_vec()));
    first(a).is_some() && first(a) == first(b)
}

#[test]
fn damaged_data_is_written_and_listed_or_left_out() {
    if !ready() {
        return;
    }
    let sample = sample(16384);
    let (dir, image, dest) = work(sample);
    let mount = KernelMount::image(&image, "").unwrap();
    let content = vec![0x77; 300_000];
    std::fs::write(mount.join("victim"), &content).unwrap();
    mount.unmount().unwrap();
    let ears = Ears::default();
    let reader = Reader::open(device(&image), OPTIONS, &ears).unwrap();
    let trees = trees(&image);
    let mut extent = None;
    trees.tree(ObjectId::FS_TREE).unwrap().walk(
        &reader,
        larder_format::Key::MIN,
        larder_format::Key::MAX,
        &mut |item| {
            use larder_format::items::FileExtent;
            if item.key.kind == larder_format::KeyType::EXTENT_DATA
                && let Ok(FileExtent::Stored(r)) = FileExtent::parse(item.data)
                && r.num_bytes == 303_104
            {
                extent = Some(r);
            }
            ControlFlow::Continue(())
        },
    );
    let at = extent.unwrap().disk_bytenr;
    let place = reader.volume().map().lookup(at.plus(8192), 4096).unwrap().stripes[0].at;
    drop(reader);
    std::fs::File::options()
        .write(true)
        .open(&image)
        .unwrap()
        .write_all_at(&[0x11; 100], place.0)
        .unwrap();
    let request = Request { path: Some(b"victim".to_vec()), ..everything(&dest) };
    let (report, ears) = run(&image, &request);
    let report = report.unwrap();
    assert_eq!((report.files, report.losses), (1, 1));
    let loss = &ears.losses()[0];
    assert_eq!(loss.path.as_deref(), Some(&b"victim"[..]));
    assert!(loss.what.contains("4096 bytes have a wrong checksum"), "{loss:?}");
    let mut damaged = content.clone();
    damaged[8192..8292].fill(0x11);
    assert_eq!(std::fs::read(dest.join("victim")).unwrap(), damaged);
    let second = dir.path().join("second");
    let request = Request { skip_bad: true, path: Some(b"victim".to_vec()), ..everything(&second) };
    let (report, ears) = run(&image, &request);
    assert_eq!(report.unwrap().files, 0);
    assert!(ears.losses()[0].what.contains("left out") && !second.join("victim").exists());
    let request =
        Request { path: Some(b"nowhere".to_vec()), target: Target::DryRun, ..everything(&second) };
    assert!(run(&image, &request).0.unwrap_err().to_string().contains("there is no /nowhere"));
}

/// Has enough when it has been asked so many times.
struct Impatient {
    patience: usize,
    asked: AtomicUsize,
}

impl Observer for Impatient {
    fn is_over(&self) -> bool {
        self.asked.fetch_add(1, Relaxed) >= self.patience
    }
}

/// Regular files below a directory, by path.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        for e in std::fs::read_dir(dir).unwrap() {
            let e = e.unwrap();
            match e.file_type().unwrap() {
                t if t.is_dir() => todo.push(e.path()),
                t if t.is_file() => out.push(e.path()),
                _ => {}
            }
        }
    }
    out
}

#[test]
fn a_restore_that_is_stopped_leaves_whole_files() {
    if !ready() {
        return;
    }
    let (dir, image, whole) = work(sample(4096));
    run(&image, &everything(&whole)).0.unwrap();
    let all = files(&whole).len();
    let (mut patience, mut most) = (1, 0);
    loop {
        let dest = dir.path().join(format!("after-{patience}"));
        let observer = Impatient { patience, asked: AtomicUsize::new(0) };
        let report = Reader::open(device(&image), Options { scan: false, ..OPTIONS }, &observer)
            .and_then(|r| restore(&r, &everything(&dest)));
        let some = files(&dest);
        for file in &some {
            let complete = whole.join(file.strip_prefix(&dest).unwrap());
            let len = |path: &Path| std::fs::metadata(path).unwrap().len();
            assert_eq!(len(file), len(&complete), "{file:?} is not whole");
            // One is a hole that is larger than memory.
            if len(file) < 16 << 20 {
                assert!(
                    std::fs::read(file).unwrap() == std::fs::read(complete).unwrap(),
                    "{file:?}"
                );
            }
        }
        most = most.max(some.len());
        match report {
            Err(larder_restore::Error::Stopped) => patience = patience * 2 + 1,
            report => {
                report.unwrap();
                assert_eq!(some.len(), all);
                break;
            }
        }
        assert!(some.len() < all, "it has not stopped");
    }
    assert!(most > 0);
}

#[test]
fn yesterday_can_be_restored() {
    if !ready() {
        return;
    }
    let sample = sample(16384);
    let (dir, image, dest) = work(sample);
    let ears = Ears::default();
    let before = {
        let reader = Reader::open(device(&image), OPTIONS, &ears).unwrap();
        reader.superblock().generation()
    };
    let mount = KernelMount::image(&image, "").unwrap();
    std::fs::remove_file(mount.join("last")).unwrap();
    btrfs(&["filesystem", "sync", mount.path().to_str().unwrap()]).unwrap();
    mount.unmount().unwrap();
    let (report, _) = run(&image, &everything(&dest));
    report.unwrap();
    assert!(!dest.join("last").exists());
    let second = dir.path().join("second");
    let request = Request { when: When::Generation(before), ..everything(&second) };
    let (report, ears) = run(&image, &request);
    assert_eq!(report.unwrap().generation, before.0);
    assert_eq!(ears.losses(), []);
    assert_eq!(differences(sample, &second), []);
    let request = Request { when: When::Generation(Generation(1 << 40)), ..everything(&second) };
    assert!(run(&image, &request).0.is_err());
    let request = Request { when: When::Older(1), target: Target::DryRun, ..everything(&second) };
    assert!(run(&image, &request).0.unwrap().generation < before.0 + 3);
}

/// A name in an image that would lead out of the destination.
#[test]
fn names_do_not_lead_out() {
    if !ready() {
        return;
    }
    let sample = sample(16384);
    let (dir, image, _) = work(sample);
    let mount = KernelMount::image(&image, "").unwrap();
    std::fs::write(mount.join("EVILEVILEVIL!"), b"evil").unwrap();
    mount.unmount().unwrap();
    // Every copy of the leaf gets the new name and a right checksum.
    let node = 16384;
    let mut bytes = std::fs::read(&image).unwrap();
    let mut changed = 0;
    for at in (0..bytes.len() - node).step_by(4096) {
        let block = &mut bytes[at..at + node];
        let hits: Vec<usize> =
            (101..node - 13).filter(|i| &block[*i..*i + 13] == b"EVILEVILEVIL!").collect();
        if hits.is_empty() || u64::from_le_bytes(block[48..56].try_into().unwrap()) == 0 {
            continue;
        }
        if !larder_format::node::NodeView(block).csum_matches(larder_format::CsumType::Crc32c) {
            continue;
        }
        for i in hits {
            block[i..i + 13].copy_from_slice(b"../../../evil");
        }
        let csum = larder_format::CsumType::Crc32c.compute(&block[32..]);
        block[..32].copy_from_slice(&csum);
        changed += 1;
    }
    assert!(changed > 0);
    std::fs::write(&image, bytes).unwrap();
    let dest = dir.path().join("a/b/c/dest");
    std::fs::create_dir_all(dest.parent().unwrap()).unwrap();
    let (report, _) = run(&image, &everything(&dest));
    report.unwrap();
    for outside in ["a/b/c/evil", "a/b/evil", "a/evil", "evil"] {
        assert!(!dir.path().join(outside).exists(), "{outside}");
    }
    let kept: Vec<_> =
        std::fs::read_dir(dest.join("lost+found")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(kept.len(), 1);
    assert_eq!(std::fs::read(&kept[0]).unwrap(), b"evil");
}

/// A node planted in a file is not believed.
#[test]
fn nodes_in_file_data_are_not_believed() {
    if !ready() {
        return;
    }
    let sample = sample(16384);
    let (_dir, image, dest) = work(sample);
    // A newer leaf of the top-level subvolume, as a user could write one into a file.
    let at = nodes(&image, ObjectId::FS_TREE)[1].0;
    let ears = Ears::default();
    let forged = {
        let reader = Reader::open(device(&image), OPTIONS, &ears).unwrap();
        let mut bytes = reader.block(at).unwrap().to_vec();
        let generation = reader.superblock().generation();
        bytes[80..88].copy_from_slice(&generation.0.to_le_bytes());
        for b in bytes[101 + 25 * 4..]
            .windows(4)
            .enumerate()
            .filter(|(_, w)| *w == b"last")
            .map(|(i, _)| i)
            .collect::<Vec<_>>()
        {
            bytes[101 + 25 * 4 + b] = b'L';
        }
        let csum = larder_format::CsumType::Crc32c.compute(&bytes[32..]);
        bytes[..32].copy_from_slice(&csum);
        bytes
    };
    let mount = KernelMount::image(&image, "").unwrap();
    std::fs::write(mount.join("forged"), [forged.clone(), forged].concat()).unwrap();
    mount.unmount().unwrap();
    destroy(&image, &[root(&image, ObjectId::FS_TREE), root(&image, ObjectId::EXTENT_TREE)]);
    let (report, _) = run(&image, &everything(&dest));
    report.unwrap();
    assert_eq!(std::fs::read(dest.join("last")).unwrap(), b"the last file");
    assert!(!dest.join("Last").exists());
}

/// A few fields changed at random, checksums redone: whatever the bytes say, restoring ends, and
/// without a panic.
#[test]
fn mutated_nodes_do_no_harm() {
    if !ready() {
        return;
    }
    const VALUES: [u64; 8] = [0, 1, 255, 4096, 1 << 20, 1 << 40, i64::MAX as u64, u64::MAX];
    let sample = sample(4096);
    let (node, csum) = (4096usize, larder_format::CsumType::Crc32c);
    let original = std::fs::read(&sample.image).unwrap();
    let ears = Ears::default();
    let fsid = Reader::open(device(&sample.image), OPTIONS, &ears).unwrap().superblock().fsid;
    let places: Vec<usize> = (0..original.len() - node)
        .step_by(4096)
        .filter(|at| {
            original[at + 32..at + 48] == fsid && original[at + 64..at + 72] != *b"_BHRfS_M"
        })
        .collect();
    assert!(places.len() > 500);
    let mut restored = 0;
    for seed in 0..24u64 {
        let (_dir, image, dest) = work(sample);
        let file = std::fs::File::options().write(true).open(&image).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut random = |n: usize| random.usize(..n);
        for _ in 0..1 + random(200) {
            let at = places[random(places.len())];
            let mut bytes = original[at..at + node].to_vec();
            for _ in 0..1 + random(6) {
                let value = VALUES[random(VALUES.len())].to_le_bytes();
                // Header fields, item headers, data.
                let to = [80 + random(21), 101 + random(200), 101 + random(node - 110)][random(3)];
                let n = [1, 4, 8][random(3)];
                bytes[to..to + n].copy_from_slice(&value[..n]);
            }
            let sum = csum.compute(&bytes[32..]);
            bytes[..32].copy_from_slice(&sum);
            file.write_all_at(&bytes, at as u64).unwrap();
        }
        let (report, _) = run(&image, &everything(&dest));
        restored += report.map_or(0, |r| r.files);
    }
    assert!(restored > 24 * 100, "{restored}");
}
