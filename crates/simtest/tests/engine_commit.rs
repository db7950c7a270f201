//! Commits on images that Linux made: each kind of image is opened, changed in the least way there
//! is, and committed several times; then the kernel and `btrfs check` say what they think of it.

use larder_fs::{Filesystem, OpenOptions};
use larder_simtest::oracle::{
    self, Fixture, KernelMount, Need, kernel_images, kernel_verdict, populate, scratch,
};
use larder_volume::{FileDevice, OpenMode};
use std::path::Path;
use std::sync::Arc;

fn open(image: &Path) -> Arc<Filesystem> {
    let device = FileDevice::open(image, OpenMode::Write).unwrap();
    let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
    Filesystem::open(Arc::new(device), options).unwrap()
}

#[test]
fn commits_leave_every_kind_of_image_clean() {
    if !oracle::need(&[Need::KernelBtrfs, Need::MkfsBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let dir = scratch();
    for variant in kernel_images() {
        let image = dir.path().join(&variant.name);
        variant.make(&image, 256 << 20).unwrap();
        let mount = KernelMount::image(&image, &variant.mount).unwrap();
        populate(mount.path(), &Fixture::small()).unwrap();
        mount.unmount_clean().unwrap();
        let fs = open(&image);
        let before = fs.info().generation;
        for n in 0..5 {
            fs.set_label(format!("{n} {}", variant.name).as_bytes()).unwrap();
            fs.sync().unwrap();
        }
        assert_eq!(fs.info().generation.0, before.0 + 5, "{}", variant.name);
        fs.close().unwrap();
        drop(fs);
        let fs = open(&image);
        assert_eq!(fs.info().label, format!("4 {}", variant.name).as_bytes());
        fs.close().unwrap();
        drop(fs);
        if let Err(e) = kernel_verdict(&image) {
            panic!("{}: {e:#}", variant.name);
        }
        std::fs::remove_file(&image).unwrap();
    }
}
