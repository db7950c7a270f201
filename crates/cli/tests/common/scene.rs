//! A mount of the command on a small image, for tests of its life.

use super::{command, larder};
use crate::args;
use larder_simtest::oracle::{Need, enter_private_namespace, need, scratch};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One scene at a time: a program that another test starts holds all open files of this process for
/// a moment, and the mount would be busy.
static ALONE: Mutex<()> = Mutex::new(());

/// An image and a mount point, in a mount namespace of this test's own; unmounted whatever happens.
pub struct Scene {
    dir: tempfile::TempDir,
    /// Goes last.
    _alone: MutexGuard<'static, ()>,
}

impl Scene {
    pub fn new() -> Option<Self> {
        if !need(&[Need::Fuse, Need::Root]) {
            return None;
        }
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        enter_private_namespace().unwrap();
        let s = Self { dir: scratch(), _alone };
        std::fs::create_dir(s.point()).unwrap();
        larder(args!["mkfs", "--size", "128M", "-L", "stage", s.image()]).ok();
        Some(s)
    }
    /// A directory of the scene's own.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
    pub fn image(&self) -> PathBuf {
        self.dir.path().join("img")
    }
    pub fn point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
    pub fn at(&self, name: &str) -> PathBuf {
        self.point().join(name)
    }
    pub fn mount(&self) {
        larder(args!["mount", self.image(), self.point()]).ok();
    }
    /// The process that serves the mount: the one with a lock on the image.
    pub fn daemon(&self) -> rustix::process::Pid {
        Self::daemon_of(&self.image())
    }
    pub fn daemon_of(image: &Path) -> rustix::process::Pid {
        let run = larder(args!["inspect", "super", image]);
        let text = run.fails(2, "locked by process").err;
        let pid = text.split("process ").nth(1).unwrap().split(' ').next().unwrap();
        rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap()
    }
    pub fn is_mounted(&self) -> bool {
        super::is_mounted(&self.point())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if self.is_mounted() {
            let _ = command().args(["umount", "--lazy"]).arg(self.point()).output();
        }
    }
}

/// Waits until a process is gone, however it ends.
pub fn wait_for_end(pid: rustix::process::Pid) {
    let fd = match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return,
        Err(e) => panic!("{e}"),
    };
    let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, None).unwrap();
}

pub fn is_alive(pid: rustix::process::Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|s| !s.contains(") Z "))
}
