//! Truncations and deletions of files of many extents that a power cut ends half-way: Linux
//! finishes what Larder began, and the reverse. The rest of the file is a beginning of it, and
//! nothing that was cut off comes back when the file grows again.

use larder_fs::{FileKind, Filesystem, InodeId, NewInode, OpenOptions, SetAttr, Tuning};
use larder_simtest::crash::Crashes;
use larder_simtest::device::SimDevice;
use larder_simtest::oracle::{
    KernelMount, Need, btrfs, btrfs_check, copy_image, dump_tree, mkfs_btrfs, need, scratch,
};
use larder_simtest::runner::Config;
use larder_volume::{FileDevice, OpenMode};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;
/// Blocks with a hole behind each, hence extents.
const BLOCKS: u64 = 400;
/// In the middle of a block.
const CUT: u64 = 80 * 8192 + 1000;

fn block(n: u64) -> Vec<u8> {
    (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes().repeat(512)
}

/// The first `len` bytes of the file.
fn whole(len: u64) -> Vec<u8> {
    let mut out: Vec<u8> = (0..BLOCKS).flat_map(|n| [block(n), vec![0; 4096]].concat()).collect();
    out.resize(len as usize, 0);
    out
}

/// What a file of some length may hold while it is cut: its beginning.
fn is_beginning(found: &[u8]) -> bool {
    found == whole(found.len() as u64)
}

fn options(steps: bool) -> OpenOptions {
    let tuning = Tuning { commit_steps: steps, ..Tuning::default() };
    OpenOptions { commit_interval: None, tuning, ..OpenOptions::default() }
}

fn make(fs: &Filesystem, name: &str) -> InodeId {
    let new = NewInode {
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: &[],
        xattrs: &[],
    };
    let id = fs.create(fs.root(), name.as_bytes(), &new).unwrap().id;
    for n in 0..BLOCKS {
        fs.write(id, n * 8192, &block(n)).unwrap();
    }
    id
}

fn sized(size: u64) -> SetAttr {
    SetAttr { size: Some(size), ..SetAttr::default() }
}

/// The file of a mount: a beginning of what it was, and zeros when it grows.
fn judge(path: &Path, when: &str) -> u64 {
    let found = fs::read(path).unwrap();
    let len = found.len() as u64;
    assert!((CUT..=BLOCKS * 8192 - 4096).contains(&len), "{when}: {len} bytes");
    assert!(is_beginning(&found), "{when}: not a beginning, of {len} bytes");
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(BLOCKS * 8192).unwrap();
    let found = fs::read(path).unwrap();
    assert!(
        found[len as usize..].iter().all(|b| *b == 0),
        "{when}: of {len} bytes, something came back"
    );
    len
}

/// The same, of the engine.
fn judge_here(fs: &Filesystem, name: &str, when: &str) -> u64 {
    let attr = fs.lookup(fs.root(), name.as_bytes()).unwrap();
    let read = |len: u64| {
        let mut buf = vec![0; len as usize];
        assert_eq!(fs.read(attr.id, 0, &mut buf).unwrap(), buf.len());
        buf
    };
    let len = attr.size;
    assert!((CUT..=BLOCKS * 8192 - 4096).contains(&len), "{when}: {len} bytes");
    assert!(is_beginning(&read(len)), "{when}: not a beginning, of {len} bytes");
    fs.setattr(attr.id, &sized(BLOCKS * 8192)).unwrap();
    assert!(
        read(BLOCKS * 8192)[len as usize..].iter().all(|b| *b == 0),
        "{when}: something came back"
    );
    len
}

#[test]
fn linux_goes_on_with_what_was_left_half_cut_here() {
    if !need(&NEEDS) {
        return;
    }
    let config = Config::new(1).unwrap();
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), options(true)).unwrap();
    let (cut, deleted) = (make(&fs, "cut"), make(&fs, "deleted"));
    fs.sync().unwrap();
    fs.release(deleted, 1);
    let begin = device.mark();
    fs.setattr(cut, &sized(CUT)).unwrap();
    fs.unlink(fs.root(), b"deleted").unwrap();
    fs.sync().unwrap();
    let end = device.mark();
    fs.close().unwrap();
    let crashes = Crashes::of(&device.recording(), &config.limits);
    let between: Vec<_> =
        crashes.states.iter().filter(|s| s.earliest >= begin && s.latest <= end).collect();
    assert!(between.len() > 20, "{}", between.len());
    let dir = scratch();
    let (mut orphans, mut sizes) = (0, std::collections::BTreeSet::new());
    for state in between.iter().step_by(between.len() / 20) {
        let when = format!("state {:016x}", state.id);
        let image = crashes.image(state);
        let path = dir.path().join(&when);
        image.write_sparse(&path).unwrap();
        btrfs_check(&path, true).assert_clean(&when);
        orphans += usize::from(dump_tree(&path, &["-t", "5"]).unwrap().contains("ORPHAN_ITEM"));
        let mount = KernelMount::image(&path, "").unwrap();
        sizes.insert(judge(&mount.join("cut"), &when));
        if let Ok(found) = fs::read(mount.join("deleted")) {
            assert!(found == whole(BLOCKS * 8192 - 4096), "{when}: half deleted");
        }
        mount.unmount_clean().unwrap();
        btrfs_check(&path, true).assert_clean(&when);
        let device = Arc::new(SimDevice::new(image));
        let fs = Filesystem::open(device, options(true)).unwrap();
        judge_here(&fs, "cut", &when);
        fs.close().unwrap();
    }
    println!("{orphans} states had an orphan; sizes {sizes:?}");
    assert!(orphans > 3 && sizes.len() > 3, "{orphans} {sizes:?}");
}

/// Extents in the large files; `LARDER_EXTENTS=1000000` shows figures that mean something.
fn many() -> u64 {
    std::env::var("LARDER_EXTENTS").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000)
}

/// What the process has in memory of its own, in KiB.
fn memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Bytes in use, once it has been opened and closed.
fn in_use(path: &Path) -> u64 {
    let device = FileDevice::open(path, OpenMode::Write).unwrap();
    let fs = Filesystem::open(Arc::new(device), options(false)).unwrap();
    fs.close().unwrap();
    fs.info().bytes_used
}

#[test]
fn files_of_very_many_extents_are_cut_and_deleted_in_bounded_steps() {
    if !need(&NEEDS) {
        return;
    }
    let count = many();
    let dir = scratch();
    let image = dir.path().join("image");
    mkfs_btrfs(&image, 512 * MIB + count * 16384, &["-q"]).unwrap();
    // Reserved space: extents without the time that their bytes would take.
    let mount = KernelMount::image(&image, "").unwrap();
    for name in ["cut", "deleted"] {
        let file = File::create(mount.join(name)).unwrap();
        for n in 0..count / 2 {
            let none = rustix::fs::FallocateFlags::empty();
            rustix::fs::fallocate(&file, none, n * 8192, 4096).unwrap();
        }
    }
    mount.unmount_clean().unwrap();
    let copy = dir.path().join("copy");
    copy_image(&image, &copy).unwrap();
    let generation = |path: &Path| -> u64 {
        let text = btrfs(&["inspect-internal", "dump-super", path.to_str().unwrap()]).unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix("generation")).unwrap();
        line.trim().parse().unwrap()
    };
    let before = generation(&image);

    let mount = KernelMount::image(&image, "").unwrap();
    let begin = Instant::now();
    File::options().write(true).open(mount.join("cut")).unwrap().set_len(CUT).unwrap();
    fs::remove_file(mount.join("deleted")).unwrap();
    rustix::fs::syncfs(File::open(mount.path()).unwrap()).unwrap();
    let kernel = begin.elapsed();
    mount.unmount_clean().unwrap();
    let kernels = generation(&image) - before;

    let device = FileDevice::open(&copy, OpenMode::Write).unwrap();
    let options = OpenOptions { cache_size: 64 * MIB, ..options(false) };
    let fs = Filesystem::open(Arc::new(device), options).unwrap();
    let find = |name: &[u8]| fs.lookup(fs.root(), name).unwrap().id;
    let (cut, deleted) = (find(b"cut"), find(b"deleted"));
    let begin = Instant::now();
    fs.setattr(cut, &sized(CUT)).unwrap();
    fs.unlink(fs.root(), b"deleted").unwrap();
    fs.release(deleted, 1);
    fs.sync().unwrap();
    let time = begin.elapsed();
    let stats = fs.stats();
    println!(
        "{count} extents: {time:.2?}, {} commits, {} MiB of memory afterwards; kernel \
         {kernel:.2?}, {kernels} commits; {:.2} times its time",
        stats.commits,
        memory() >> 10,
        time.as_secs_f64() / kernel.as_secs_f64()
    );
    // A commit by size now and then, so that what a transaction has changed stays within its
    // budget.
    assert!(stats.commits <= 2 + count / 2000, "{} commits for {count} extents", stats.commits);
    assert_eq!(fs.getattr(cut).unwrap().size, CUT);
    fs.close().unwrap();
    drop(fs);
    btrfs_check(&copy, true).assert_clean("cut and deleted here");
    let used = in_use(&copy);
    assert!(used < 2 * MIB, "{used} bytes are still in use");
}

/// The disk of a kernel mount is a file on another btrfs, of which clones are made while the kernel
/// works: each is a moment.
#[test]
fn what_linux_left_half_cut_goes_on_here() {
    if !need(&NEEDS) {
        return;
    }
    let dir = scratch();
    let host = dir.path().join("host");
    mkfs_btrfs(&host, 1 << 30, &["-q"]).unwrap();
    let host = KernelMount::image(&host, "").unwrap();
    let image = host.join("image");
    mkfs_btrfs(&image, 128 << 20, &["-q", "-M"]).unwrap();
    let mount = KernelMount::image(&image, "commit=1").unwrap();
    for name in ["cut", "deleted"] {
        let file = File::create(mount.join(name)).unwrap();
        for n in 0..BLOCKS {
            file.write_all_at(&block(n), n * 8192).unwrap();
        }
        file.sync_all().unwrap();
    }
    let clone = |n: usize| {
        let to = host.join(format!("clone-{n}"));
        let cp = Command::new("cp").arg("--reflink=always").arg(&image).arg(&to).output().unwrap();
        assert!(cp.status.success(), "{}", String::from_utf8_lossy(&cp.stderr));
        to
    };
    let mut clones = vec![clone(0)];
    // An open file that is deleted: its orphan is on the disk for certain.
    let open = File::open(mount.join("deleted")).unwrap();
    fs::remove_file(mount.join("deleted")).unwrap();
    let sync = || rustix::fs::syncfs(File::open(mount.path()).unwrap()).unwrap();
    sync();
    clones.push(clone(1));
    drop(open);
    let script = format!("truncate -s {CUT} \"$0\"");
    let mut child = Command::new("sh")
        .args(["-c", &script])
        .arg(mount.join("cut"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    // However far the kernel gets meanwhile: each clone is judged as what it is.
    loop {
        let done = child.try_wait().unwrap().is_some();
        sync();
        clones.push(clone(clones.len()));
        if done || clones.len() > 30 {
            break;
        }
    }
    assert!(child.wait().unwrap().success());
    mount.unmount_clean().unwrap();
    let mut sizes = std::collections::BTreeSet::new();
    for path in clones {
        let when = path.display().to_string();
        let device = FileDevice::open(&path, OpenMode::Write).unwrap();
        let fs = Filesystem::open(Arc::new(device), options(false)).unwrap();
        sizes.insert(judge_here(&fs, "cut", &when));
        let deleted = fs.lookup(fs.root(), b"deleted").is_err();
        fs.close().unwrap();
        drop(fs);
        btrfs_check(&path, true).assert_clean(&when);
        let used = in_use(&path);
        assert!(!deleted || used < 4 << 20, "{when}: {used} bytes are still in use");
    }
    println!("sizes {sizes:?}");
}
