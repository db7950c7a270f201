//! The sound images that damage is planted on, each made once.
//!
//! Every one has the directory `plant` with the same files, so that most of the catalogue can be
//! planted on an image of Larder's own and on one that Linux made. What only Linux makes so far
//! comes from `populate` (snapshots, compression, preallocation, bitmaps of free space), and from
//! images in the midst of something.

use anyhow::{Context, Result, ensure};
use larder_format::superblock::Superblock;
use larder_format::{Physical, SUPER_SIZE};
use larder_fs::mkfs::{MkfsOptions, mkfs};
use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions, Tuning, XattrMode};
use larder_simtest::device::SimDevice;
use larder_simtest::image::Image;
use larder_simtest::oracle::{
    Fixture, KernelMount, Need, btrfs, mkfs_btrfs, need, populate, scratch,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A sound image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Base {
    /// Made by Larder alone.
    Larder,
    /// As mkfs and Linux make it now: with everything.
    Linux,
    /// Without `no-holes` and without a block-group tree.
    Holes,
    /// Of old: also without free-space tree, skinny metadata and extended references.
    Old,
    /// Data and metadata in the same block groups, all of it twice.
    Mixed,
    /// Power lost while a file without a name was open, a deleted subvolume was in use, and a log
    /// was waiting.
    Pending,
    /// With quotas: groups of groups, snapshots that share some of their files.
    Quotas,
    /// So large that Linux keeps version 1 space caches, with runs in one and bitmaps in another.
    Caches,
}

pub(crate) const ALL: [Base; 8] = [
    Base::Larder,
    Base::Linux,
    Base::Holes,
    Base::Old,
    Base::Mixed,
    Base::Pending,
    Base::Quotas,
    Base::Caches,
];

/// Files whose one extent others share: so many that their references do not fit in its item, and
/// so few that they do.
const SHARED: [(&str, usize); 2] = [("shared", 50), ("few", 3)];
const SIZE: u64 = 256 << 20;

impl Base {
    /// The image; `None` where the oracles that make it are missing.
    pub(crate) fn image(self) -> Option<&'static Image> {
        static IMAGES: [OnceLock<Option<Image>>; ALL.len()] =
            [const { OnceLock::new() }; ALL.len()];
        let made = IMAGES[self as usize].get_or_init(|| {
            if self != Self::Larder && !need(&[Need::MkfsBtrfs, Need::KernelBtrfs]) {
                return None;
            }
            // A mount lives in the namespace of its thread: one that ends takes it along.
            let made = std::thread::spawn(move || self.make()).join().expect("no panic");
            let mut image = made.unwrap_or_else(|e| panic!("base image {self:?}: {e:#}"));
            image.freeze();
            Some(image)
        });
        made.as_ref()
    }

    fn make(self) -> Result<Image> {
        let few = Fixture { entries: 40, large_file: 1 << 20, fragments: 300, links: 30 };
        match self {
            Self::Larder => larder(),
            Self::Linux => linux(&["-O", "block-group-tree"], "", &Fixture::small()),
            Self::Holes => linux(&["-O", "^no-holes,^block-group-tree"], "", &few),
            Self::Old => linux(
                &["-O", "^no-holes,^block-group-tree,^free-space-tree,^skinny-metadata,^extref"],
                "nospace_cache",
                &few,
            ),
            Self::Mixed => linux(
                &[
                    "--mixed",
                    "-n",
                    "4096",
                    "-m",
                    "dup",
                    "-d",
                    "dup",
                    "-O",
                    "mixed-bg,^block-group-tree",
                ],
                "",
                &few,
            ),
            Self::Pending => pending(),
            Self::Quotas => quotas(),
            Self::Caches => caches(),
        }
    }
}

/// Bytes that do not compress.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Regular files of `plant`, with their contents.
fn files() -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<(String, Vec<u8>)> = [
        ("plain", 64 << 10),
        ("second", 64 << 10),
        ("third", 64 << 10),
        ("shared", 64 << 10),
        ("few", 64 << 10),
        ("pair-a", 100),
        ("inline", 500),
        ("attributes", 0),
        ("dir/one", 10),
        ("dir/two", 20),
        ("dir/three", 30),
    ]
    .into_iter()
    .zip(1..)
    .map(|((name, len), seed)| (name.to_owned(), noise(seed, len)))
    .collect();
    files.extend((0..400).map(|n| (format!("many/entry-{n:04}"), Vec::new())));
    files
}

const DIRS: [&str; 4] = ["", "dir", "many", "empty"];

fn larder() -> Result<Image> {
    let device = Arc::new(SimDevice::new(Image::zeroed(SIZE)).unrecorded());
    mkfs(&*device, &MkfsOptions { uuid: Some([0x4c; 16]), ..MkfsOptions::default() })?;
    let tuning = Tuning { fake_clock: true, ..Tuning::default() };
    let options = OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() };
    let fs = Filesystem::open(device.clone(), options)?;
    let new =
        |kind| NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target: b"", xattrs: &[] };
    let walk = |path: &str| -> Result<InodeId> {
        let names = path.split('/').filter(|n| !n.is_empty());
        Ok(names
            .map(str::as_bytes)
            .try_fold(fs.root(), |at, name| fs.lookup(at, name).map(|a| a.id))?)
    };
    let make = |path: &str, new: &NewInode<'_>| -> Result<InodeId> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok(fs.create(walk(dir)?, name.as_bytes(), new)?.id)
    };
    for dir in DIRS {
        make(format!("plant/{dir}").trim_end_matches('/'), &new(FileKind::Directory))?;
    }
    for (name, content) in files() {
        let file = make(&format!("plant/{name}"), &new(FileKind::Regular))?;
        fs.write(file, 0, &content)?;
    }
    let plant = walk("plant")?;
    make("plant/symlink", &NewInode { target: b"the/target", ..new(FileKind::Symlink) })?;
    make("plant/fifo", &new(FileKind::Fifo))?;
    let sparse = make("plant/sparse", &new(FileKind::Regular))?;
    fs.write(sparse, 0, &noise(31, 4096))?;
    fs.write(sparse, 64 << 10, &noise(32, 4096))?;
    fs.link(walk("plant/pair-a")?, plant, b"pair-b")?;
    fs.link(walk("plant/pair-a")?, walk("plant/dir")?, b"pair-c")?;
    for (name, value) in [("user.one", "first"), ("user.two", "second")] {
        fs.setxattr(walk("plant/attributes")?, name.as_bytes(), value.as_bytes(), XattrMode::Set)?;
    }
    fs.sync()?;
    for (name, sharers) in SHARED {
        let source = walk(&format!("plant/{name}"))?;
        for n in 0..sharers {
            let target = make(&format!("plant/{name}-{n:02}"), &new(FileKind::Regular))?;
            ensure!(
                fs.copy_range(source.at(0), target.at(0), 64 << 10)? == 64 << 10,
                "a shorter copy"
            );
        }
    }
    fs.sync()?;
    fs.close()?;
    Ok(device.image())
}

/// `plant` through the kernel.
fn plant(root: &Path) -> Result<()> {
    let top = root.join("plant");
    for dir in DIRS {
        std::fs::create_dir(top.join(dir))?;
    }
    for (name, content) in files() {
        std::fs::write(top.join(name), content)?;
    }
    std::os::unix::fs::symlink("the/target", top.join("symlink"))?;
    let mode = rustix::fs::Mode::from_raw_mode(0o644);
    rustix::fs::mknodat(rustix::fs::CWD, top.join("fifo"), rustix::fs::FileType::Fifo, mode, 0)?;
    let sparse = File::create_new(top.join("sparse"))?;
    sparse.write_all_at(&noise(31, 4096), 0)?;
    sparse.write_all_at(&noise(32, 4096), 64 << 10)?;
    std::fs::hard_link(top.join("pair-a"), top.join("pair-b"))?;
    std::fs::hard_link(top.join("pair-a"), top.join("dir/pair-c"))?;
    for (name, value) in [("user.one", "first"), ("user.two", "second")] {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(top.join("attributes"), name, value.as_bytes(), flags)?;
    }
    rustix::fs::syncfs(File::open(&top)?)?;
    for (name, sharers) in SHARED {
        let source = File::open(top.join(name))?;
        for n in 0..sharers {
            rustix::fs::ioctl_ficlone(
                File::create_new(top.join(format!("{name}-{n:02}")))?,
                &source,
            )?;
        }
    }
    Ok(())
}

fn linux(args: &[&str], options: &str, knobs: &Fixture) -> Result<Image> {
    let dir = scratch();
    let path = dir.path().join("image");
    mkfs_btrfs(&path, SIZE, args)?;
    // Commits by the clock would make the trees differ from run to run.
    let mount = KernelMount::image(&path, &format!("commit=300,{options}"))?;
    plant(mount.path()).context("plant")?;
    populate(mount.path(), knobs)?;
    if args.contains(&"4096") {
        tall(&mount).context("a tall subvolume")?;
    }
    mount.sync()?;
    mount.unmount_clean()?;
    Ok(Image::from_file(&path)?)
}

/// A subvolume with nodes between its root and its leaves, of which its snapshot shares some.
fn tall(mount: &KernelMount) -> Result<()> {
    let (tall, copy) =
        (mount.join("tall").display().to_string(), mount.join("copy").display().to_string());
    btrfs(&["subvolume", "create", &tall])?;
    for n in 0..400 {
        std::fs::write(mount.join(format!("tall/{n}")), noise(n, 1900))?;
    }
    std::fs::write(mount.join("tall/large"), noise(400, 100_000))?;
    mount.sync()?;
    btrfs(&["subvolume", "snapshot", &tall, &copy])?;
    for n in (0..400).step_by(150) {
        std::fs::write(mount.join(format!("tall/{n}")), noise(n, 1000))?;
    }
    Ok(())
}

fn pending() -> Result<Image> {
    let dir = scratch();
    let path = dir.path().join("image");
    let none: [&str; 0] = [];
    mkfs_btrfs(&path, SIZE, &none)?;
    let mount = KernelMount::image(&path, "commit=300")?;
    plant(mount.path()).context("plant")?;
    let gone = mount.join("gone").display().to_string();
    btrfs(&["subvolume", "create", &gone])?;
    std::fs::write(mount.join("gone/file"), noise(41, 64 << 10))?;
    std::fs::write(mount.join("plant/unlinked"), noise(42, 64 << 10))?;
    std::fs::write(mount.join("plant/logged"), noise(43, 64 << 10))?;
    mount.sync()?;
    // Open files keep both from being cleaned up before the image is taken.
    let _in_gone = File::open(mount.join("gone/file"))?;
    let _unlinked = File::open(mount.join("plant/unlinked"))?;
    std::fs::remove_file(mount.join("plant/unlinked"))?;
    btrfs(&["subvolume", "delete", &gone])?;
    mount.sync()?;
    let logged = File::options().write(true).open(mount.join("plant/logged"))?;
    logged.write_all_at(&noise(44, 16 << 10), 16 << 10)?;
    logged.sync_all()?;
    std::fs::write(mount.join("plant/logged-new"), noise(45, 20_000))?;
    File::open(mount.join("plant/logged-new"))?.sync_all()?;
    let image = Image::from_file(&path)?;
    drop((_in_gone, _unlinked, logged));
    mount.unmount_clean()?;
    let mut superblock = vec![0; SUPER_SIZE];
    image.read(64 << 10, &mut superblock);
    ensure!(
        Superblock::parse(&superblock, Physical(64 << 10))?.log_root().is_some(),
        "there is no log"
    );
    Ok(image)
}

/// `tall` and `copy` are subvolumes whose groups belong to 1/1, and that one to 2/1; `apart`
/// belongs to nobody.
fn quotas() -> Result<Image> {
    let dir = scratch();
    let path = dir.path().join("image");
    mkfs_btrfs(&path, SIZE, &["-n", "4096"])?;
    let mount = KernelMount::image(&path, "commit=300")?;
    let top = mount.path().display().to_string();
    btrfs(&["quota", "enable", &top])?;
    tall(&mount)?;
    btrfs(&[
        "subvolume",
        "snapshot",
        &mount.join("copy").display().to_string(),
        &format!("{top}/apart"),
    ])?;
    std::fs::write(mount.join("apart/own"), noise(3, 30_000))?;
    std::fs::write(mount.join("beside"), noise(4, 30_000))?;
    rustix::fs::ioctl_ficlone(
        File::create_new(mount.join("shared"))?,
        File::open(mount.join("apart/own"))?,
    )?;
    for group in ["1/1", "2/1"] {
        btrfs(&["qgroup", "create", group, &top])?;
    }
    for (member, group) in [("0/256", "1/1"), ("0/257", "1/1"), ("1/1", "2/1")] {
        btrfs(&["qgroup", "assign", "--no-rescan", member, group, &top])?;
    }
    btrfs(&["quota", "rescan", "-w", &top])?;
    mount.sync()?;
    mount.unmount_clean()?;
    Ok(Image::from_file(&path)?)
}

fn caches() -> Result<Image> {
    let dir = scratch();
    let path = dir.path().join("image");
    mkfs_btrfs(&path, 4 << 30, &["-O", "^free-space-tree,^block-group-tree"])?;
    let mount = KernelMount::image(&path, "space_cache=v1,commit=300,nodiscard")?;
    let file = |n: u64| mount.join(format!("file-{n}"));
    // What is free between these is in so many pieces that it takes a bitmap.
    for n in 0..3000 {
        std::fs::write(file(n), noise(n, 4096))?;
    }
    mount.sync()?;
    for n in (0..3000).step_by(2) {
        std::fs::remove_file(file(n))?;
    }
    mount.sync()?;
    std::fs::write(mount.join("last"), noise(9, 20_000))?;
    mount.sync()?;
    mount.unmount_clean()?;
    Ok(Image::from_file(&path)?)
}
