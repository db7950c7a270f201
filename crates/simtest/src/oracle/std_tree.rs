//! A directory of this machine as a [`TreeSource`]: the kernel's btrfs, Larder's mount, or any
//! other file system.

use super::tree::{Facts, Time, TreeSource, decode_kind};
use anyhow::{Context, Result};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The tree below a directory.
#[derive(Clone, Debug)]
pub struct StdTree {
    top: PathBuf,
}

impl StdTree {
    /// The tree whose top is `top`.
    #[must_use]
    pub fn new(top: &Path) -> Self {
        Self { top: top.to_owned() }
    }
}

/// Calls a function that fills a buffer of unknown length until the buffer is large enough.
fn growing(fill: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut buf = vec![0; 1024];
    loop {
        match fill(&mut buf) {
            Ok(n) => {
                buf.truncate(n);
                return Ok(buf);
            }
            // 64 KiB is the kernel's own limit for both a value and a list of names.
            Err(Errno::RANGE) if buf.len() < 1 << 17 => buf.resize(buf.len() * 8, 0),
            Err(e) => return Err(e),
        }
    }
}

impl TreeSource for StdTree {
    type Id = PathBuf;
    type File = File;

    fn root(&self) -> Result<PathBuf> {
        Ok(self.top.clone())
    }

    fn children(&self, dir: &PathBuf) -> Result<Vec<(Vec<u8>, PathBuf)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let name = entry?.file_name();
            found.push((name.as_bytes().to_vec(), dir.join(&name)));
        }
        Ok(found)
    }

    fn facts(&self, path: &PathBuf) -> Result<Facts> {
        let m = std::fs::symlink_metadata(path)?;
        let kind = decode_kind(m.mode()).with_context(|| format!("mode {:o}", m.mode()))?;
        let device =
            u64::from(rustix::fs::major(m.rdev())) << 20 | u64::from(rustix::fs::minor(m.rdev()));
        let time = |sec: i64, nsec: i64| -> Time { (sec, u32::try_from(nsec).unwrap_or(u32::MAX)) };
        let btime = m.created().ok().map(|t| match t.duration_since(UNIX_EPOCH) {
            Ok(d) => (d.as_secs().cast_signed(), d.subsec_nanos()),
            Err(e) => {
                let d = e.duration();
                let (sec, nsec) = (-d.as_secs().cast_signed(), d.subsec_nanos());
                if nsec == 0 { (sec, 0) } else { (sec - 1, 1_000_000_000 - nsec) }
            }
        });
        Ok(Facts {
            kind,
            perm: m.mode() & 0o7777,
            nlink: m.nlink(),
            uid: m.uid(),
            gid: m.gid(),
            rdev: device,
            size: m.size(),
            allocated: m.blocks() * 512,
            identity: (m.dev(), m.ino()),
            atime: time(m.atime(), m.atime_nsec()),
            mtime: time(m.mtime(), m.mtime_nsec()),
            ctime: time(m.ctime(), m.ctime_nsec()),
            btime,
        })
    }

    fn readlink(&self, path: &PathBuf) -> Result<Vec<u8>> {
        Ok(std::fs::read_link(path)?.as_os_str().as_bytes().to_vec())
    }

    fn xattrs(&self, path: &PathBuf) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
        let names = match growing(|buf| rustix::fs::llistxattr(path, buf)) {
            Err(Errno::NOTSUP) => return Ok(BTreeMap::new()),
            other => other.context("listxattr")?,
        };
        let mut found = BTreeMap::new();
        for name in names.split(|b| *b == 0).filter(|n| !n.is_empty()) {
            let value = growing(|buf| rustix::fs::lgetxattr(path, name, buf))
                .with_context(|| format!("getxattr {}", name.escape_ascii()))?;
            found.insert(name.to_vec(), value);
        }
        Ok(found)
    }

    fn open(&self, path: &PathBuf) -> Result<File> {
        // Looking must not change access times where that can be had (owner or root).
        let careful = File::options().read(true).custom_flags(libc::O_NOATIME).open(path);
        match careful {
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => Ok(File::open(path)?),
            other => Ok(other?),
        }
    }

    fn next_data(&self, file: &File, offset: u64) -> Result<Option<(u64, u64)>> {
        let start = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(e) => return Err(e).context("SEEK_DATA"),
        };
        let end = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(start)).context("SEEK_HOLE")?;
        Ok(Some((start, end)))
    }

    fn read(&self, file: &File, offset: u64, buf: &mut [u8]) -> Result<usize> {
        Ok(file.read_at(buf, offset)?)
    }
}
