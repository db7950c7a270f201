//! File systems that are built upon seeds: Linux builds them, Larder goes on, and Linux after that.

use larder_check::Severity;
use larder_fs::{FileKind, Filesystem, NewInode, OpenOptions};
use larder_simtest::oracle::{
    Aspects, DeviceSet, EngineTree, Fixture, LoopDevice, Manifest, Need, StdTree, btrfs, manifest,
    need, populate, scratch,
};
use larder_volume::{Device, FileDevice, OpenMode};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const NEEDS: [Need; 3] = [Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// `btrfs check` looks for seeds among all devices of the machine, and gives up when one of another
/// test goes away meanwhile. So these tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn my_turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn seeding(image: &Path, on: bool) {
    let mut tune = Command::new("btrfstune");
    tune.args(["-f", "-S", if on { "1" } else { "0" }]).arg(image);
    assert!(tune.status().unwrap().success());
}

/// A file system with something in it, also a file that is written in place, as a seed.
fn seed(dir: &Path) -> PathBuf {
    let set = DeviceSet::make(dir, &[300 * MIB], &[]).unwrap();
    let mount = set.mount("").unwrap();
    populate(mount.path(), &Fixture::small()).unwrap();
    let in_place = mount.path().join("in-place");
    std::fs::File::create(&in_place).unwrap();
    assert!(Command::new("chattr").arg("+C").arg(&in_place).status().unwrap().success());
    std::fs::write(&in_place, vec![3; 1 << 20]).unwrap();
    mount.unmount_clean().unwrap();
    let image = set.images()[0].clone();
    seeding(&image, true);
    image
}

/// Linux adds a device to what these seeds are, which makes a new file system. The new one first.
fn sprouted(seeds: &[PathBuf], name: &str) -> Vec<PathBuf> {
    let new = seeds[0].with_file_name(name);
    std::fs::File::create(&new).unwrap().set_len(300 * MIB).unwrap();
    let mount = DeviceSet::of(seeds.to_vec()).mount("ro").unwrap();
    let device = LoopDevice::attach(&new).unwrap();
    let words = ["device", "add", "-f"].map(OsStr::new);
    let args = [&words[..], &[device.path().as_ref(), mount.path().as_ref()]].concat();
    btrfs(&args).unwrap();
    let again =
        Command::new("mount").args(["-o", "remount,rw"]).arg(mount.path()).status().unwrap();
    assert!(again.success());
    std::fs::write(mount.path().join(format!("of-{name}")), vec![1; 300_000]).unwrap();
    mount.unmount_clean().unwrap();
    let mut all = vec![new];
    all.extend_from_slice(seeds);
    all
}

fn devices(images: &[PathBuf]) -> Vec<Arc<dyn Device>> {
    let open = |(n, path): (usize, &PathBuf)| -> Arc<dyn Device> {
        let mode = if n == 0 { OpenMode::Write } else { OpenMode::Read };
        Arc::new(FileDevice::open(path, mode).unwrap())
    };
    images.iter().enumerate().map(open).collect()
}

fn open(images: &[PathBuf]) -> larder_fs::Result<Arc<Filesystem>> {
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open_devices(devices(images), options)
}

/// Changes of all kinds. Everything that the seed has is changed as well.
fn change(fs: &Filesystem, name: &str) {
    let root = fs.root();
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 1, gid: 2, rdev: 0, target: &[], xattrs: &[] };
    fs.snapshot(root.subvol, root, format!("kept-{name}").as_bytes(), true).unwrap();
    for n in 0..200 {
        let file = fs.create(root, format!("{name}-{n}").as_bytes(), &new).unwrap().id;
        fs.write(file, 0, &vec![n as u8; n * 700]).unwrap();
        if n % 20 == 0 {
            fs.fsync(file, false).unwrap();
        }
    }
    let in_place = fs.lookup(root, b"in-place").unwrap().id;
    fs.write(in_place, 8192, &[7; 50_000]).unwrap();
    fs.fsync(in_place, false).unwrap();
    fs.sync().unwrap();
}

fn is_sound(images: &[PathBuf]) {
    let options = larder_check::Options { data: true, ..Default::default() };
    let ours = larder_check::check(&devices(images), &options, &|_| {}).unwrap();
    let errors = ours.findings.iter().filter(|f| f.kind.severity() == Severity::Error);
    let errors: Vec<_> = errors.collect();
    assert!(errors.is_empty(), "{errors:?}");
    let theirs = DeviceSet::of(images.to_vec()).check().unwrap();
    assert!(theirs.is_clean(), "{theirs:?}");
}

fn shown_by_linux(images: &[PathBuf]) -> Manifest {
    let mount = DeviceSet::of(images.to_vec()).mount("ro").unwrap();
    let shown = manifest(&StdTree::new(mount.path())).unwrap();
    mount.unmount_clean().unwrap();
    shown
}

fn is_the_same(one: &Manifest, other: &Manifest) {
    assert_eq!(one.differences(other, Aspects::same_image()), []);
}

/// Larder reads what Linux has built, changes it, and Linux goes on. The seeds keep their bytes.
fn is_exchanged(images: &[PathBuf]) {
    let before: Vec<Vec<u8>> =
        images[1..].iter().map(|path| std::fs::read(path).unwrap()).collect();
    let linux = shown_by_linux(images);
    let fs = open(images).unwrap();
    is_the_same(&linux, &manifest(&EngineTree(&fs)).unwrap());
    // A chain has what was done to its seeds.
    change(&fs, &images[0].file_name().unwrap().to_string_lossy());
    let ours = manifest(&EngineTree(&fs)).unwrap();
    fs.close().unwrap();
    drop(fs);
    is_sound(images);
    is_the_same(&ours, &shown_by_linux(images));
    let mount = DeviceSet::of(images.to_vec()).mount("").unwrap();
    std::fs::write(mount.path().join("of-linux"), vec![5; 1 << 20]).unwrap();
    mount.unmount_clean().unwrap();
    is_sound(images);
    let fs = open(images).unwrap();
    is_the_same(&shown_by_linux(images), &manifest(&EngineTree(&fs)).unwrap());
    fs.close().unwrap();
    let after = images[1..].iter().map(|path| std::fs::read(path).unwrap());
    assert!(before.into_iter().eq(after), "a seed was written");
}

#[test]
fn what_linux_builds_upon_a_seed_goes_on() {
    if !need(&NEEDS) {
        return;
    }
    let _turn = my_turn();
    let dir = scratch();
    is_exchanged(&sprouted(&[seed(dir.path())], "sprout"));
}

/// Larder builds upon these seeds. The new file system first.
fn built_by_larder(seeds: &[PathBuf], name: &str) -> Vec<PathBuf> {
    let new = seeds[0].with_file_name(name);
    let device = Arc::new(FileDevice::create(&new, 300 * MIB).unwrap());
    let open = |path: &PathBuf| -> Arc<dyn Device> {
        Arc::new(FileDevice::open(path, OpenMode::Read).unwrap())
    };
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    let fs = larder_fs::sprout(seeds.iter().map(open).collect(), device, options).unwrap();
    fs.close().unwrap();
    let mut all = vec![new];
    all.extend_from_slice(seeds);
    all
}

#[test]
fn what_larder_builds_upon_a_seed_goes_on() {
    if !need(&NEEDS) {
        return;
    }
    let _turn = my_turn();
    let dir = scratch();
    let base = seed(dir.path());
    let first = built_by_larder(std::slice::from_ref(&base), "first");
    is_sound(&first);
    is_exchanged(&first);
    // Another one upon the same seed knows nothing of it, and a chain has both.
    is_exchanged(&built_by_larder(&[base], "second"));
    assert!(larder_fs::set_seed(devices(&first), true).unwrap());
    is_exchanged(&built_by_larder(&first, "third"));
}

/// With the seed removed, the file system is whole without it, and the seed is as it was.
#[test]
fn a_seed_can_be_removed() {
    if !need(&NEEDS) {
        return;
    }
    let _turn = my_turn();
    let dir = scratch();
    let base = seed(dir.path());
    for images in [
        built_by_larder(std::slice::from_ref(&base), "of-larder"),
        sprouted(std::slice::from_ref(&base), "of-linux"),
    ] {
        let before = std::fs::read(&base).unwrap();
        let fs = open(&images).unwrap();
        change(&fs, "more");
        let shown = manifest(&EngineTree(&fs)).unwrap();
        let go_on = &mut |_| std::ops::ControlFlow::Continue(());
        fs.remove_device(larder_format::DeviceId(1), go_on).unwrap();
        fs.close().unwrap();
        drop(fs);
        is_sound(&images[..1]);
        is_the_same(&shown, &shown_by_linux(&images[..1]));
        assert_eq!(std::fs::read(&base).unwrap(), before);
    }
}

#[test]
fn what_linux_builds_upon_a_chain_of_seeds_goes_on() {
    if !need(&NEEDS) {
        return;
    }
    let _turn = my_turn();
    let dir = scratch();
    let middle = sprouted(&[seed(dir.path())], "middle");
    seeding(&middle[0], true);
    // Of seeds alone the newest is meant, and it is read-only.
    let text = open(&middle).unwrap_err().to_string();
    assert!(text.contains("seed"), "{text}");
    is_exchanged(&sprouted(&middle, "top"));
}

/// Without its seed, with another one, or with one that has changed, nothing is opened.
#[test]
fn a_wrong_seed_is_refused_by_name() {
    if !need(&NEEDS) {
        return;
    }
    let _turn = my_turn();
    let (dir, other) = (scratch(), scratch());
    let images = sprouted(&[seed(dir.path())], "sprout");
    let refused = |images: &[PathBuf]| open(images).unwrap_err().to_string();
    let text = refused(&images[..1]);
    assert!(text.contains("device 1") && text.contains("missing"), "{text}");
    let text = refused(&[images[0].clone(), seed(other.path())]);
    assert!(text.contains("is a device of file system"), "{text}");
    seeding(&images[1], false);
    let mount = DeviceSet::of(vec![images[1].clone()]).mount("").unwrap();
    std::fs::write(mount.path().join("changed"), "since").unwrap();
    mount.unmount_clean().unwrap();
    seeding(&images[1], true);
    let text = refused(&images);
    assert!(text.contains("generation") && text.contains("seed"), "{text}");
}
