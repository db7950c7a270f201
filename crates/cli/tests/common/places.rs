//! An image with several places to mount it on, for tests of several mounts.

use super::scene::Scene;
use super::{Run, command, inside, is_mounted, larder};
use crate::args;
use larder_simtest::oracle::{Need, btrfs_check, need};
use rustix::process::Pid;
use std::fs;
use std::path::{Path, PathBuf};

/// An image with the subvolumes `@` and `@home`, and places to mount it on.
pub struct Places {
    pub scene: Scene,
    pub all: Vec<PathBuf>,
}

impl Places {
    pub fn new() -> Option<Self> {
        let scene = Scene::new()?;
        for subvolume in ["/@", "/@home"] {
            larder(args!["subvolume", "create", inside(&scene.image(), subvolume)]).ok();
        }
        let all: Vec<PathBuf> = (0..6).map(|n| scene.dir().join(format!("p{n}"))).collect();
        all.iter().for_each(|place| fs::create_dir(place).unwrap());
        Some(Self { scene, all })
    }
    pub fn image(&self) -> PathBuf {
        self.scene.image()
    }
    pub fn place(&self, n: usize) -> &Path {
        &self.all[n]
    }
    pub fn at(&self, n: usize, path: &str) -> PathBuf {
        self.all[n].join(path)
    }
    pub fn try_mount(&self, n: usize, options: &str) -> Run {
        larder(args!["mount", "-o", options, self.image(), self.place(n)])
    }
    /// Mounts, and tells where.
    #[track_caller]
    pub fn mount(&self, n: usize, options: &str) -> &Path {
        self.try_mount(n, options).ok();
        assert!(self.is_mounted(n));
        self.place(n)
    }
    #[track_caller]
    pub fn umount(&self, n: usize) {
        larder(args!["umount", self.place(n)]).ok();
        assert!(!self.is_mounted(n));
    }
    pub fn is_mounted(&self, n: usize) -> bool {
        is_mounted(self.place(n))
    }
    pub fn daemon(&self) -> Pid {
        self.scene.daemon()
    }
    /// What the mount table says of a place, after the path.
    pub fn shown(&self, n: usize) -> String {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let path = format!(" {} ", self.place(n).display());
        table.lines().rev().find_map(|line| line.split_once(&path)).unwrap().1.to_owned()
    }
    #[track_caller]
    pub fn assert_undisturbed(&self, n: usize) {
        let sandbox =
            larder(args!["stats", "--json", self.place(n)]).ok().json()["sandbox"].clone();
        assert_eq!(sandbox["refused_system_calls"], serde_json::json!([]), "{sandbox}");
        assert_eq!(sandbox["seccomp"], true);
    }
    /// The image, when nobody uses it any more.
    #[track_caller]
    pub fn assert_sound(&self) {
        larder(args!["check", self.image()]).ok();
        if need(&[Need::BtrfsProgs]) {
            btrfs_check(&self.image(), true).assert_clean("after several mounts");
        }
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        // The last ones first: they may lie within others.
        for n in (0..self.all.len()).rev() {
            if self.is_mounted(n) {
                let _ = command().args(["umount", "--lazy"]).arg(self.place(n)).output();
            }
        }
    }
}

#[track_caller]
pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// Names in a directory.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
