//! State files: how other processes find the daemon of a mount, and wait for its end.
//!
//! `larder umount` returns when the daemon has exited, and with the daemon's result. The kernel
//! gives neither: a plain FUSE unmount returns at once. So the daemon keeps a file for each mount,
//! and holds an exclusive lock on it as long as it lives; the kernel releases the lock however the
//! process ends. Its last act is to write its result to the file. A waiter opens the file before it
//! unmounts, then waits for the lock and for the process. A file with a free lock and no result
//! belonged to a daemon that was killed.
//!
//! A daemon with several mounts has a file for each. When one of the mounts ends and others stay,
//! its data is made durable, the result goes to its file, and only the lock of that file is
//! released: the waiter does not wait for the process.
//!
//! umount(2) and `umount -i` do not wait, and the image or the directory may be used again at once.
//! For that case the file has the daemon's [`Stage`]: a program can wait for one that is ending.
//!
//! Files lie in `/run/larder` (root), `$XDG_RUNTIME_DIR/larder`, or a private directory in the
//! directory for temporary files. They are named after the mount point and the mount namespace.

use crate::{mount_table, utab};
use anyhow::{Context, bail};
use larder_proc::Status;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Content of a state file.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) pid: u32,
    pub(crate) image: PathBuf,
    pub(crate) mountpoint: PathBuf,
    /// The image was opened for reading only.
    #[serde(default)]
    pub(crate) read_only: bool,
    #[serde(default)]
    pub(crate) stage: Stage,
    /// A process that sees the mount, if the daemon may not: a further mount lives in the mount
    /// namespace of its requester.
    #[serde(default)]
    pub(crate) witness: Option<u32>,
    /// The daemon's attach socket. The image may have been replaced, and be gone.
    #[serde(default)]
    pub(crate) socket: Option<PathBuf>,
    /// The mount has ended, and its daemon serves others.
    #[serde(default)]
    pub(crate) daemon_goes_on: bool,
    /// How the daemon ended; absent while it lives, and for ever if it was killed.
    pub(crate) result: Option<Outcome>,
}

/// How far a daemon has come.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Stage {
    /// There is no mount yet.
    #[default]
    Starting,
    Serving,
    /// The mount is gone; what is left to do is making things durable.
    Ending,
}

/// How a daemon ended.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// Everything is durable.
    Clean,
    /// Something is not durable, or not known to be; why.
    Failed(String),
}

/// The daemon's side: exists as long as the daemon does.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
    record: Record,
    /// Bytes in the file.
    written: usize,
}

impl Claim {
    /// Announces this process as the daemon of a mount.
    ///
    /// # Errors
    /// Another daemon serves that mount point already.
    pub(crate) fn new(image: &Path, mountpoint: &Path, read_only: bool) -> anyhow::Result<Self> {
        let dir = own_directory()?;
        let path = dir.join(file_name(mountpoint));
        let file = loop {
            let file = open_to_lock(&path)?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                if Watch::of(path.clone()).is_some_and(|mut w| w.sees_the_end()) {
                    continue;
                }
                bail!("{} is in use: it already has a Larder mount", mountpoint.display());
            }
            // The last holder of the lock may have removed the file: others would not find this
            // one.
            if is_at(&file, &path) {
                break file;
            }
        };
        let record = Record {
            pid: std::process::id(),
            image: image.to_owned(),
            mountpoint: mountpoint.to_owned(),
            read_only,
            stage: Stage::Starting,
            witness: None,
            socket: None,
            daemon_goes_on: false,
            result: None,
        };
        // The record of a daemon that was killed.
        file.set_len(0)?;
        let mut claim = Self { file, record, written: 0 };
        claim.save()?;
        Ok(claim)
    }

    /// Goes on with what another process [began](Self::new) and handed over locked: this one is the
    /// daemon. `witness` is a process that sees the mount.
    pub(crate) fn take_over(
        file: File,
        image: &Path,
        mountpoint: &Path,
        read_only: bool,
        witness: u32,
    ) -> anyhow::Result<Self> {
        let record = Record {
            pid: std::process::id(),
            image: image.to_owned(),
            mountpoint: mountpoint.to_owned(),
            read_only,
            stage: Stage::Starting,
            witness: Some(witness),
            socket: None,
            daemon_goes_on: false,
            result: None,
        };
        let written = usize::try_from(file.metadata()?.len())?;
        let mut claim = Self { file, record, written };
        claim.save()?;
        Ok(claim)
    }

    /// The open file, to be handed over.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Notes the daemon's attach socket. It is written down with the next stage.
    #[must_use]
    pub(crate) fn with_socket(mut self, socket: Option<&Path>) -> Self {
        self.record.socket = socket.map(Path::to_owned);
        self
    }

    /// Writes down how far the daemon has come. Nothing depends on a reader of it.
    pub(crate) fn reached(&mut self, stage: Stage) {
        self.record.stage = stage;
        if let Err(e) = self.save() {
            tracing::warn!("the state of the mount cannot be written: {e:#}");
        }
    }

    /// The daemon's last act but one before it exits. The waiter has the file open already, so the
    /// file may be [removed](tidy_up) after a good result. A bad one stays for later waiters.
    pub(crate) fn finish(mut self, result: Outcome) -> anyhow::Result<()> {
        self.record.result = Some(result);
        let saved = self.save();
        // The lock is not given back here but by the kernel, when the process is gone.
        std::mem::forget(self.file);
        saved
    }

    /// The same for a mount whose daemon has others and goes on: leaves the result, has `tidy_up`
    /// done, and gives the lock back.
    pub(crate) fn finish_one_of_several(
        mut self,
        result: Outcome,
        tidy_up: impl FnOnce(),
    ) -> anyhow::Result<()> {
        self.record.result = Some(result);
        self.record.daemon_goes_on = true;
        let saved = self.save();
        tidy_up();
        // The process that began it may still have it open.
        let _ = flock(&self.file, FlockOperation::Unlock);
        saved
    }

    fn save(&mut self) -> anyhow::Result<()> {
        let mut text = serde_json::to_vec(&self.record)?;
        // One write over the old text, so that a reader finds one text or the other.
        text.resize(text.len().max(self.written), b' ');
        self.written = text.len();
        self.file.write_all_at(&text, 0)?;
        Ok(())
    }
}

/// Removes the file of a daemon that has ended well or never had a mount. Called while the daemon
/// still lives: by itself, or by another process if it is in its sandbox.
pub(crate) fn tidy_up(mountpoint: &Path) {
    utab::remove(mountpoint);
    if let Ok(Some(mut watch)) = Watch::find(mountpoint, None)
        && !matches!(watch.record(), Ok(Record { result: Some(Outcome::Failed(_)), .. }))
    {
        let _ = fs::remove_file(&watch.path);
    }
}

/// The other side: a daemon that may be waited for.
#[derive(Debug)]
pub(crate) struct Watch {
    path: PathBuf,
    file: File,
    /// The daemon's process, if it has the lock.
    process: Option<rustix::fd::OwnedFd>,
}

impl Watch {
    /// Finds the daemon of the mount on `mountpoint`, made by `user` (if known); `None` if it left
    /// no file.
    pub(crate) fn find(mountpoint: &Path, user: Option<u32>) -> anyhow::Result<Option<Self>> {
        let name = file_name(mountpoint);
        Ok(directories(user).iter().find_map(|dir| Self::of(dir.join(&name))))
    }

    /// The daemon that left this file.
    fn of(path: PathBuf) -> Option<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(&path, flags, Mode::empty()).map(File::from).ok()?;
        let mut watch = Self { path, file, process: None };
        if !watch.is_over() {
            // The lock is held, so the number in the file is that of a living process.
            let pid = watch
                .record()
                .ok()
                .and_then(|r| rustix::process::Pid::from_raw(r.pid.cast_signed()));
            watch.process = pid.and_then(|p| {
                rustix::process::pidfd_open(p, rustix::process::PidfdFlags::empty()).ok()
            });
        }
        Some(watch)
    }

    /// Waits for the daemon's end if its mount is gone. False if the mount is still there, or in
    /// use out of sight.
    pub(crate) fn sees_the_end(&mut self) -> bool {
        /// The daemon learns of the end of a mount as soon as it is scheduled.
        const STEPS: u32 = 200;
        /// The end of one mount among several shows only by its lock.
        const FIRST_NS: i64 = 200_000;
        const STEP_NS: i64 = 50_000_000;
        for n in 0..STEPS {
            if self.is_over() {
                return true;
            }
            let patience = match self.record() {
                Ok(r) if r.stage == Stage::Ending => return self.wait_for_lock().is_ok(),
                Ok(r) if r.stage == Stage::Starting || is_mounted(&r) => return false,
                // The record may just be being written.
                _ => rustix::event::Timespec {
                    tv_sec: 0,
                    tv_nsec: (FIRST_NS << n.min(20)).min(STEP_NS),
                },
            };
            let Some(process) = &self.process else { return false };
            let mut fds = [rustix::event::PollFd::new(process, rustix::event::PollFlags::IN)];
            if rustix::event::poll(&mut fds, Some(&patience)) == Ok(1) {
                return true;
            }
        }
        false
    }

    fn wait_for_lock(&self) -> anyhow::Result<()> {
        while let Err(e) = flock(&self.file, FlockOperation::LockShared) {
            if e != rustix::io::Errno::INTR {
                return Err(e).context("waiting for the daemon");
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        let free = flock(&self.file, FlockOperation::NonBlockingLockShared).is_ok();
        if free {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
        free
    }

    /// Has the daemon been killed, but not ended yet? It may wait in the kernel for an answer that
    /// only it could give.
    pub(crate) fn is_being_killed(&mut self) -> bool {
        if self.process.is_none() {
            return false;
        }
        let Ok(record) = self.record() else { return false };
        let tasks =
            fs::read_dir(format!("/proc/{}/task", record.pid)).into_iter().flatten().flatten();
        let mut threads = tasks.filter_map(|task| Status::read(&task.path()).ok());
        threads.any(|status| is_killed(&status))
    }

    /// Does the daemon serve other mounts, too?
    pub(crate) fn has_siblings(&mut self) -> bool {
        let Ok(own) = self.record() else { return false };
        let files =
            directories(None).into_iter().filter_map(|d| fs::read_dir(d).ok()).flatten().flatten();
        let mut others = files.filter(|f| f.path() != self.path).filter_map(|f| Self::of(f.path()));
        others.any(|mut w| w.process.is_some() && w.record().is_ok_and(|r| r.pid == own.pid))
    }

    /// What the daemon says about itself.
    pub(crate) fn record(&mut self) -> anyhow::Result<Record> {
        /// A record may be read while it is written.
        const ATTEMPTS: u32 = 100;
        for _ in 1..ATTEMPTS {
            match self.read() {
                Ok(record) => return Ok(record),
                Err(_) => std::thread::yield_now(),
            }
        }
        self.read()
    }

    fn read(&mut self) -> anyhow::Result<Record> {
        let mut text = String::new();
        self.file.rewind()?;
        self.file.read_to_string(&mut text)?;
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", self.path.display()))
    }

    /// Waits until the daemon is done with the mount and, unless it has others, has exited. Removes
    /// its file and returns how it ended; `None` for a daemon that was killed.
    pub(crate) fn wait(mut self) -> anyhow::Result<Option<Outcome>> {
        self.wait_for_lock()?;
        let goes_on = self.record().is_ok_and(|r| r.daemon_goes_on);
        if let Some(process) = self.process.as_ref().filter(|_| !goes_on) {
            let mut fds = [rustix::event::PollFd::new(process, rustix::event::PollFlags::IN)];
            while rustix::event::poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
        }
        let outcome = self.record().map(|r| r.result);
        // A new daemon may have made its own file since: that one stays.
        let same = |m: fs::Metadata| self.file.metadata().is_ok_and(|f| f.ino() == m.ino());
        if fs::symlink_metadata(&self.path).is_ok_and(same) {
            let _ = fs::remove_file(&self.path);
        }
        outcome
    }
}

/// Waits for the daemons of `image` whose mounts are gone. False if there was none: then the user
/// of the image does not end by itself.
pub(crate) fn wait_for_the_end(image: &Path) -> bool {
    let Ok(image) = fs::canonicalize(image) else { return false };
    let files =
        directories(None).into_iter().filter_map(|d| fs::read_dir(d).ok()).flatten().flatten();
    let mut watches = files.filter_map(|f| Watch::of(f.path()));
    watches.any(|mut w| {
        w.process.is_some() && w.record().is_ok_and(|r| r.image == image) && w.sees_the_end()
    })
}

/// Where `image` is mounted, if its daemon can be found.
pub(crate) fn mounted_on(image: &Path) -> Option<PathBuf> {
    let image = fs::canonicalize(image).ok()?;
    let files =
        directories(None).into_iter().filter_map(|d| fs::read_dir(d).ok()).flatten().flatten();
    let mut watches = files.filter_map(|f| Watch::of(f.path())).filter(|w| w.process.is_some());
    watches.find_map(|mut w| w.record().ok().filter(|r| r.image == image)).map(|r| r.mountpoint)
}

/// Does a thread's status say that SIGKILL has come for it, or that it has ended before its
/// process?
fn is_killed(status: &Status) -> bool {
    const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);
    let pending = |name| status.bits(name).unwrap_or(0);
    let ended = status.field("State").is_some_and(|state| state.starts_with(['Z', 'X']));
    ended || (pending("SigPnd") | pending("ShdPnd")) & SIGKILL != 0
}

/// Is the mount there, where its daemon lives?
fn is_mounted(record: &Record) -> bool {
    // The table cannot be read if the daemon is just ending, or hidden.
    mount_table::of_process(record.witness.unwrap_or(record.pid))
        .is_ok_and(|table| table.iter().any(|m| m.point == record.mountpoint && m.is_larder()))
}

/// Opens a file to lock it, and makes it if there is none.
pub(crate) fn open_to_lock(path: &Path) -> anyhow::Result<File> {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .with_context(|| path.display().to_string())
}

/// Is this file the one that others find at that path?
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| file.metadata().is_ok_and(|f| f.ino() == m.ino()))
}

/// Directory for this user's daemons, made if necessary.
pub(crate) fn own_directory() -> anyhow::Result<PathBuf> {
    let me = rustix::process::geteuid().as_raw();
    let dirs = directories(Some(me));
    let mut problem = None;
    for dir in dirs {
        match usable(&dir, me) {
            Ok(()) => return Ok(dir),
            Err(e) => problem = Some(anyhow::Error::new(e).context(dir.display().to_string())),
        }
    }
    Err(problem.unwrap_or_else(|| anyhow::anyhow!("no directory for the state of mounts")))
}

fn usable(dir: &Path, me: u32) -> std::io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    fs::symlink_metadata(dir)?;
    if belongs_to(dir, me) {
        return Ok(());
    }
    Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, "belongs to somebody else"))
}

/// Is it a directory in which only this user (and root) can make files?
pub(crate) fn belongs_to(dir: &Path, user: u32) -> bool {
    fs::symlink_metadata(dir)
        .is_ok_and(|meta| meta.is_dir() && meta.uid() == user && meta.mode() & 0o022 == 0)
}

/// Where the files of a user's mounts may lie, the preferred place first.
pub(crate) fn directories(user: Option<u32>) -> Vec<PathBuf> {
    let me = rustix::process::geteuid().as_raw();
    let user = user.unwrap_or(me);
    let mut dirs = Vec::new();
    if user == 0 {
        dirs.push(PathBuf::from("/run/larder"));
    } else {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR")
            .filter(|d| user == me && Path::new(d).is_absolute());
        dirs.extend(runtime.map(|d| Path::new(&d).join("larder")));
        dirs.push(PathBuf::from(format!("/run/user/{user}/larder")));
    }
    dirs.push(std::env::temp_dir().join(format!("larder-{user}")));
    dirs
}

/// Name of the file for a mount point, in this mount namespace.
fn file_name(mountpoint: &Path) -> String {
    let namespace = fs::read_link("/proc/thread-self/ns/mnt").unwrap_or_default();
    let key = [mountpoint.as_os_str().as_bytes(), b"\0", namespace.as_os_str().as_bytes()].concat();
    let hash = larder_format::CsumType::Blake2b.compute(&key);
    hash[..12].iter().map(|b| format!("{b:02x}")).collect::<String>() + ".json"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_killed_is_known_before_the_end() {
        for (text, killed) in [
            (
                "Name:\tlarder\nState:\tS (sleeping)\nSigPnd:\t0000000000000000\n\
                ShdPnd:\t0000000000000001\n",
                false,
            ),
            (
                "State:\tD (disk sleep)\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n",
                true,
            ),
            ("State:\tS (sleeping)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000102\n", true),
            ("State:\tZ (zombie)\n", true),
        ] {
            assert_eq!(is_killed(&Status::from(text.as_bytes())), killed, "{text}");
        }
        assert!(!is_killed(&Status::own().unwrap()));
    }

    #[test]
    fn a_claim_is_exclusive_and_ends_with_its_result() {
        let point = tempfile::tempdir().unwrap();
        assert!(Watch::find(point.path(), None).unwrap().is_none());
        let claim = Claim::new(Path::new("/a.img"), point.path(), false).unwrap();
        assert!(
            Claim::new(Path::new("/b.img"), point.path(), false)
                .unwrap_err()
                .to_string()
                .contains("already")
        );
        let mut watch = Watch::find(point.path(), None).unwrap().unwrap();
        assert!(!watch.is_over());
        assert!(watch.process.is_some());
        let record = watch.record().unwrap();
        assert_eq!((record.pid, record.image.as_path()), (std::process::id(), Path::new("/a.img")));
        assert_eq!(record.result, None);
        // A daemon that just vanishes: its lock goes, no result is left.
        drop(claim);
        watch.process = None;
        assert_eq!(watch.wait().unwrap(), None);
        assert!(Watch::find(point.path(), None).unwrap().is_none());
        // One that failed.
        let mut claim = Claim::new(Path::new("/a.img"), point.path(), false).unwrap();
        claim.record.result = Some(Outcome::Failed("disk on fire".into()));
        claim.save().unwrap();
        drop(claim);
        let watch = Watch::find(point.path(), None).unwrap().unwrap();
        assert_eq!(watch.wait().unwrap(), Some(Outcome::Failed("disk on fire".into())));
    }
}
